"""The command ``namedmesh migrate``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from namedmesh.migrate.report import as_json, as_text
from namedmesh.migrate.rewrite import Rewritten, is_certain, rewrite, write
from namedmesh.migrate.scan import scan
from namedmesh.plan.spec import UsageError


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=_existing, help="a module, a notebook, or a folder of them"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--diff", action="store_true", help="show what --write would change, and report the rest"
    )
    how.add_argument(
        "--write",
        action="store_true",
        help="replace the calls whose replacement is certain, keep each file as FILE.orig, and report the rest",
    )


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {path!r}")
    return path


def _migrate(arguments: argparse.Namespace) -> int:
    """Scan, and print the report; 1 if a file could not be read."""
    result = scan(arguments.paths)
    if arguments.diff or arguments.write:
        if arguments.format != "text":
            raise UsageError("--diff and --write report as text; leave --format out")
        files = rewrite(result)
        done = {file.path for file in files}
        if arguments.diff:
            sys.stdout.write("".join(file.diff() for file in files))
        else:
            sys.stdout.write("".join(f"{file.path}: rewritten; it was {_written(file)}\n" for file in files))
        left = (one for one in result.findings if one.path not in done or not is_certain(one))
        result = replace(result, findings=tuple(left))
        sys.stdout.write("\n" * bool(files))
    sys.stdout.write(as_json(result) if arguments.format == "json" else as_text(result))
    return 1 if result.problems else 0


def _written(file: Rewritten) -> str:
    try:
        return write(file)
    except OSError as error:
        raise UsageError(f"{file.path!r} cannot be rewritten: {error.strerror}") from None


COMMANDS = {
    "migrate": (
        "list every use of megatron.core.parallel_state in some code, and the mesh call that replaces it",
        _configure,
        _migrate,
    )
}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
