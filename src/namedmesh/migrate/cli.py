"""The command ``namedmesh migrate``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from namedmesh.migrate.report import as_json, as_text
from namedmesh.migrate.scan import scan

__all__ = ["COMMANDS"]


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=_existing, help="a module, a notebook, or a folder of them"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {path!r}")
    return path


def _migrate(arguments: argparse.Namespace) -> int:
    """Scan, and print the report; 1 if a file could not be read."""
    result = scan(arguments.paths)
    sys.stdout.write(as_json(result) if arguments.format == "json" else as_text(result))
    return 1 if result.problems else 0


COMMANDS = {
    "migrate": (
        "list every use of megatron.core.parallel_state in some code, and the mesh call that replaces it",
        _configure,
        _migrate,
    )
}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
