"""The command ``namedmesh plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.plan.arguments import add_format, add_layout, add_nodes, layout_arguments, reported
from namedmesh.plan.core import Plan, make_plan
from namedmesh.plan.spec import UsageError
from namedmesh.plan.tables import show
from namedmesh.plan.text import plan_document, rank_document

if TYPE_CHECKING:
    import argparse

__all__ = ["SUMMARY", "configure", "run"]

SUMMARY = "what a layout amounts to: sizes, groups, replicas, communicators, nodes; without a GPU or torch"
"""What the command does, for the help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--world-size", type=int, metavar="N", help="how many ranks there are")
    add_layout(parser)
    add_nodes(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="explain one rank instead")
    add_format(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw the ranks into this file")
    parser.add_argument("--html", metavar="FILE", help="write a page on which axis and rank can be picked")
    parser.add_argument(
        "--color-by", metavar="AXIS", help="the axis that gives the colours (default: the slowest above 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print or draw.

    Returns:
        0; 1 if the layout is wrong, 2 if the arguments are.
    """
    return reported("plan", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    spec, keywords = layout_arguments(arguments)
    given: dict[str, Any] = {
        **keywords,
        "world_size": arguments.world_size,
        "gpus_per_node": arguments.gpus_per_node,
        "nvlink_domain": arguments.nvlink_domain,
    }
    plan = make_plan(spec, **given)
    if arguments.rank is not None:
        from namedmesh.plan.one_rank import plan_rank

        show(rank_document(plan, plan_rank(plan, arguments.rank)), arguments.format)
    else:
        show(plan_document(plan, everything=arguments.all), arguments.format)
    _draw(plan, arguments)
    return 0


def _draw(plan: Plan, arguments: argparse.Namespace) -> None:
    """The pictures that were asked for."""
    if arguments.svg is not None:
        from namedmesh.plan.svg import draw_svg

        _write(arguments.svg, draw_svg(plan, color_by=arguments.color_by))
    if arguments.html is not None:
        from namedmesh.plan.page import draw_html

        _write(arguments.html, draw_html(plan, color_by=arguments.color_by, rank=arguments.rank))


def _write(path: str, text: str) -> None:
    from pathlib import Path

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path!r} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from None
