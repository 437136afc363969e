"""The commands ``namedmesh plan``, ``shard``, ``diff`` and ``doctor``.

Each has a function that declares its arguments and one that runs it and returns the exit status; a mistake is raised,
and ``namedmesh.__main__`` prints it. What only one command needs is imported when that command runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namedmesh.dialects import AXES, DIALECTS, EXPERT_AXES
from namedmesh.plan.spec import UsageError, kept, raise_all
from namedmesh.plan.tables import FORMATS, show

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from namedmesh.errors import NamedMeshError
    from namedmesh.plan.tables import Document

_DIFFERENT = 3  # beside 1, a layout that is wrong, and 2, arguments that are
_AXIS_HELP = {
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


def _add_layout(parser: ArgumentParser) -> None:
    """Add a spec string, and a flag for each axis."""
    parser.add_argument(
        "spec",
        nargs="*",
        metavar="SPEC",
        help="axes and sizes, slowest first, such as pp=2,dp=-1,tp=2 (-1: whatever is left), or a dialect and "
        "sizes, such as: megatron tp=2,pp=4",
    )
    for axis in (*AXES, *EXPERT_AXES):
        add_integer(parser, f"--{axis.replace('_', '-')}", _AXIS_HELP[axis])
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--order",
        metavar="ORDER",
        help="the order of the axes, fastest first (default: Megatron's, tp-cp-ep-dp-pp)",
    )
    order.add_argument("--like", choices=tuple(DIALECTS), help="the order and the groups of a library")


def add_integer(parser: Any, flag: str, text: str, **more: Any) -> None:
    """Add a flag that takes a number; a parser or a group of its arguments."""
    parser.add_argument(flag, type=int, metavar="N", help=text, **more)


def add_format(parser: Any) -> None:
    """Add how the output is written."""
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="leave nothing out, however long it gets")


def _layout_arguments(arguments: Namespace) -> tuple[str, dict[str, Any]]:
    """Return the spec and the keywords that :func:`namedmesh.plan.make_plan` takes."""
    sizes = {axis: getattr(arguments, axis) for axis in (*AXES, *EXPERT_AXES)}
    keywords = {axis: size for axis, size in sizes.items() if size is not None}
    return " ".join(arguments.spec), {**keywords, "order": arguments.order, "like": arguments.like}


def _configure_plan(parser: ArgumentParser) -> None:
    add_integer(parser, "--world-size", "how many ranks there are")
    _add_layout(parser)
    add_integer(parser, "--gpus-per-node", "consecutive ranks on one node")
    add_integer(parser, "--nvlink-domain", "consecutive ranks that NVLink joins, if not a node")
    parser.add_argument("--rank", type=int, metavar="R", help="explain one rank instead")
    add_format(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw the ranks into this file")
    parser.add_argument("--html", metavar="FILE", help="write a page on which axis and rank can be picked")
    parser.add_argument(
        "--color-by", metavar="AXIS", help="the axis that gives the colors (default: the slowest above 1)"
    )


def _plan(arguments: Namespace) -> int:
    from namedmesh.plan.cells import Grid
    from namedmesh.plan.core import make_plan
    from namedmesh.plan.text import plan_document, rank_document

    errors: list[NamedMeshError] = []
    with kept(errors):
        paths = _paths(arguments)
    spec, keywords = _layout_arguments(arguments)
    numbers = {name: getattr(arguments, name) for name in ("world_size", "gpus_per_node", "nvlink_domain")}
    rank, color = arguments.rank, arguments.color_by
    with kept(errors):
        plan = make_plan(spec, **numbers, **keywords)
        if color is not None:
            with kept(errors):
                Grid(plan).color_axis(color)
        if rank is not None:
            plan.layout.coords(rank)
    raise_all(errors)
    if rank is None:
        document = plan_document(plan, everything=arguments.all, color_by=color)
    else:
        document = rank_document(plan, rank)
    pictures = {}
    if "svg" in paths:
        from namedmesh.plan.svg import draw_svg

        pictures[paths["svg"]] = draw_svg(plan, color_by=color)
    if "html" in paths:
        from namedmesh.plan.html import draw_html

        pictures[paths["html"]] = draw_html(plan, color_by=color, rank=rank)
    _output(pictures, document, arguments.format)
    return 0


def _paths(arguments: Namespace) -> dict[str, str]:
    """Return the pictures that are asked for, and their files; one of another format, or that cannot be written, is refused."""
    paths, wrong = {}, []
    for form, suffixes in (("svg", (".svg",)), ("html", (".html", ".htm"))):
        path = getattr(arguments, form)
        if path is None:
            continue
        paths[form], suffix = path, Path(path).suffix
        existing = path if Path(path).exists() else Path(path).parent
        if Path(path).is_dir() or not os.access(existing, os.W_OK):
            wrong.append(
                f"{path!r} cannot be written; name a file in a folder that is there and can be written"
            )
        if suffix and suffix.lower() not in suffixes:
            wrong.append(
                f"{path!r} ends in {suffix}, but --{form} writes {form.upper()}; name a file that ends in .{form}"
            )
    if wrong:
        raise UsageError(*wrong)
    return paths


def _output(pictures: dict[str, str], document: Document, how: str) -> None:
    """Write pictures into their files, and a document to standard output."""
    try:
        for path, text in pictures.items():
            Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path!r} cannot be written: {error.strerror}") from None
    show(document, how)


def _configure_shard(parser: ArgumentParser) -> None:
    from namedmesh.plan.weights import STYLES

    add_integer(parser, "--in", "input features", dest="inputs", required=True)
    add_integer(parser, "--out", "output features", dest="outputs", required=True)
    add_integer(parser, "--tp", "tensor-parallel ranks", required=True)
    parser.add_argument(
        "--style", choices=STYLES, required=True, help="column shards the outputs, row the inputs"
    )
    add_format(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw the shards into this file")
    parser.add_argument("--html", metavar="FILE", help="write a page with the drawing")


def _shard(arguments: Namespace) -> int:
    from namedmesh.plan import weights

    errors: list[NamedMeshError] = []
    with kept(errors):
        paths = _paths(arguments)
    with kept(errors):
        cut = weights.cut_weight(arguments.inputs, arguments.outputs, tp=arguments.tp, style=arguments.style)
    raise_all(errors)
    draw = {"svg": weights.draw_weights_svg, "html": weights.draw_weights_html}
    pictures = {path: draw[form](*weights.drawn_weight(cut)) for form, path in paths.items()}
    _output(pictures, weights.shard_document(cut, everything=arguments.all), arguments.format)
    return 0


def _configure_diff(parser: ArgumentParser) -> None:
    parser.add_argument("--a", metavar="SPEC", help='one layout, such as "megatron tp=2,pp=4"')
    parser.add_argument("--b", metavar="SPEC", help='the other, such as "fairscale tp=2,pp=4"')
    add_integer(parser, "--world-size", "how many ranks there are")
    add_format(parser)


def _diff(arguments: Namespace) -> int:
    from namedmesh.plan.comparison import compare, diff_document

    if arguments.a is None or arguments.b is None:
        raise UsageError(
            'two layouts are compared; give both, as in: namedmesh diff --a "megatron tp=2,pp=4" --b "fairscale tp=2,pp=4" '
            "--world-size 16"
        )
    comparison = compare(arguments.a, arguments.b, world_size=arguments.world_size)
    show(diff_document(comparison), arguments.format)
    return 0 if comparison.same else _DIFFERENT


def _configure_doctor(parser: ArgumentParser) -> None:
    _add_layout(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for a rank, or for a collective (default: 60)",
    )
    parser.add_argument("--device", help="cpu, cuda, or one device (default: what torch finds)")
    parser.add_argument("--backend", help="backend of the groups (default: torch's for the device)")
    parser.add_argument(
        "--megabytes", type=float, metavar="M", help="size of the large all-reduce (default: 4, on a GPU 64)"
    )
    add_format(parser)


def _doctor(arguments: Namespace) -> int:
    from namedmesh.plan.group_checks import run_doctor

    return run_doctor(*_layout_arguments(arguments), arguments)


COMMANDS = {
    "plan": (
        "what a layout amounts to: sizes, groups, replicas, communicators, nodes; without a GPU or torch",
        _configure_plan,
        _plan,
    ),
    "shard": (
        "how the weight of a linear layer is sharded over tensor-parallel ranks",
        _configure_shard,
        _shard,
    ),
    "diff": (
        "which groups differ between two layouts; the exit status is 0 if none do, 3 if some do",
        _configure_diff,
        _diff,
    ),
    "doctor": (
        "under torchrun: check every group of a layout with a collective, and measure each axis",
        _configure_doctor,
        _doctor,
    ),
}
"""For each command its summary, the function that declares its arguments, and the one that runs it."""
