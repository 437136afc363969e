"""The command ``namedmesh migrate``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from namedmesh.errors import listing
from namedmesh.migrate.report import as_json, as_text
from namedmesh.migrate.rewrite import RewriteError, rewrite, write
from namedmesh.migrate.scan import scan
from namedmesh.plan.spec import UsageError

if TYPE_CHECKING:
    from namedmesh.migrate.findings import Scan


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=_existing, help="a module, a notebook, or a folder of them"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")
    parser.add_argument(
        "--megatron",
        metavar="RELEASE",
        help="the release of megatron-core that the code runs with, such as 0.13",
    )
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
    """Scan, and print the report; 1 if a file could not be read or rewritten."""
    if (arguments.diff or arguments.write) and arguments.format != "text":
        raise UsageError("--diff and --write report as text; leave --format out")
    result = scan(arguments.paths, megatron=arguments.megatron)
    if arguments.diff or arguments.write:
        result = _rewritten(result, write_them=arguments.write)
    sys.stdout.write(as_json(result) if arguments.format == "json" else as_text(result))
    return 1 if result.problems else 0


def _rewritten(result: Scan, *, write_them: bool) -> Scan:
    """Show or write what is certain, and return the rest."""
    files, left = rewrite(result)
    written: list[str] = []
    for file in files:
        if not write_them:
            sys.stdout.write(file.diff())
            continue
        try:
            backup = write(file)
        except RewriteError as error:
            before = (
                f"rewritten before it: {listing(written)}" if written else "no file was rewritten before it"
            )
            raise RewriteError(f"{error}; {before}") from None
        written.append(file.before.path)
        sys.stdout.write(f"{file.before.path}: rewritten; it was {backup}\n")
    if files:
        sys.stdout.write("\n")
    return left


COMMANDS = {
    "migrate": (
        "list every use of Megatron's, fairscale's and GPT-NeoX's groups in some code, and the mesh call for each",
        _configure,
        _migrate,
    )
}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
