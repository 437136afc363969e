"""The command ``namedmesh diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.plan.arguments import add_format, reported
from namedmesh.plan.comparison import compare, diff_document
from namedmesh.plan.tables import show

if TYPE_CHECKING:
    import argparse

__all__ = ["SUMMARY", "configure", "run"]

SUMMARY = "which groups differ between two layouts; the exit status is 0 whether any do or not"
"""What the command does, for the help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--a", required=True, metavar="SPEC", help='such as "megatron tp=2,pp=4"')
    parser.add_argument("--b", required=True, metavar="SPEC", help='such as "fairscale tp=2,pp=4"')
    parser.add_argument("--world-size", type=int, metavar="N", help="how many ranks there are")
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print.

    Returns:
        0, also where the groups differ; 1 if a layout is wrong, 2 if it cannot be read.
    """
    return reported("diff", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    show(diff_document(compare(arguments.a, arguments.b, world_size=arguments.world_size)), arguments.format)
    return 0
