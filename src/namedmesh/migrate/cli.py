"""The command ``namedmesh migrate``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from namedmesh.migrate.report import as_json, as_text
from namedmesh.migrate.scan import scan

__all__ = ["SUMMARY", "configure", "run"]

SUMMARY = "list every use of megatron.core.parallel_state in some code, and the mesh call that replaces it"
"""What the command does, for the help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> configure(parser)
        >>> parser.parse_args([__file__]).format
        'text'
    """
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=_existing, help="a module, a notebook, or a folder of them"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Scan, and print what was found.

    Returns:
        0; 1 if a file could not be read.

    Example:
        >>> run(argparse.Namespace(paths=[], format="text"))
        No use of megatron.core.parallel_state in 0 files.
        0
    """
    found = scan(arguments.paths)
    sys.stdout.write(as_json(found) if arguments.format == "json" else as_text(found))
    return 1 if found.problems else 0


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {path!r}")
    return path
