"""What the commands of the planner have in common: their arguments, and what becomes of a mistake."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from namedmesh.dialects import AXES, DIALECTS, EXPERT_AXES
from namedmesh.errors import NamedMeshError
from namedmesh.plan.spec import UsageError
from namedmesh.plan.tables import FORMATS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["add_format", "add_layout", "add_nodes", "layout_arguments", "reported", "sizes_given"]

_MEANINGS = {
    "pp": "pipeline stages",
    "dp_replicate": "data-parallel copies of a sharded model (HSDP)",
    "dp_shard": "data-parallel ranks that shard one copy (FSDP)",
    "dp": "data-parallel ranks; inferred when left out",
    "cp": "context-parallel ranks: parts of a sequence",
    "tp": "tensor-parallel ranks: parts of a weight",
    "edp": "copies of an expert; inferred when left out",
    "ep": "expert-parallel ranks: parts of the set of experts",
    "etp": "tensor-parallel ranks of an expert",
}


def add_layout(parser: argparse.ArgumentParser) -> None:
    """A spec string, or a flag for each axis."""
    parser.add_argument(
        "spec",
        nargs="*",
        metavar="SPEC",
        help="axes and sizes, slowest first, such as pp=2,dp=-1,tp=2 (-1: whatever is left), or a dialect and "
        "sizes, such as: megatron tp=2,pp=4",
    )
    for axis in (*AXES, *EXPERT_AXES):
        flag = f"--{axis.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="N", help=_MEANINGS[axis])
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--order",
        metavar="ORDER",
        help="the order of the axes, fastest first (default: Megatron's, tp-cp-ep-dp-pp)",
    )
    order.add_argument("--like", choices=tuple(DIALECTS), help="the order and the groups of a library")


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """How the ranks lie on the hardware."""
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="consecutive ranks on one node")
    parser.add_argument(
        "--nvlink-domain", type=int, metavar="N", help="consecutive ranks that NVLink joins, if not a node"
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    """How the answer is written."""
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="leave nothing out, however long it gets")


def sizes_given(arguments: argparse.Namespace) -> dict[str, int]:
    """The sizes that were given by flags."""
    values = {axis: getattr(arguments, axis) for axis in (*AXES, *EXPERT_AXES)}
    return {axis: size for axis, size in values.items() if size is not None}


def layout_arguments(arguments: argparse.Namespace) -> tuple[str, dict[str, object]]:
    """The spec and the keywords that :func:`namedmesh.plan.make_plan` takes."""
    keywords: dict[str, object] = {
        **sizes_given(arguments),
        "order": arguments.order,
        "like": arguments.like,
    }
    return " ".join(arguments.spec), keywords


def reported(command: str, work: Callable[[], int]) -> int:
    """Do some work; a mistake becomes a message on standard error.

    Returns:
        What the work returns; 1 if the layout is wrong, 2 if the arguments are.
    """
    try:
        return work()
    except NamedMeshError as error:
        sys.stderr.write(f"namedmesh {command}: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
