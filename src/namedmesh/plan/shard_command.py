"""The command ``namedmesh shard``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.plan.arguments import add_format, reported
from namedmesh.plan.shard import STYLES, cut_weight, shard_document
from namedmesh.plan.tables import show

if TYPE_CHECKING:
    import argparse

__all__ = ["SUMMARY", "configure", "run"]

SUMMARY = "how the weight of a linear layer is cut over tensor-parallel ranks"
"""What the command does, for the help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--in", dest="inputs", type=int, required=True, metavar="N", help="input features")
    parser.add_argument("--out", dest="outputs", type=int, required=True, metavar="N", help="output features")
    parser.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel ranks")
    parser.add_argument(
        "--style", choices=STYLES, required=True, help="column cuts the outputs, row the inputs"
    )
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """Cut, and print.

    Returns:
        0; 1 if a size is wrong.
    """
    return reported("shard", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    cut = cut_weight(arguments.inputs, arguments.outputs, tp=arguments.tp, style=arguments.style)
    show(shard_document(cut, everything=arguments.all), arguments.format)
    return 0
