"""The commands ``namedmesh plan``, ``partitions`` and ``diff``: their flags, and what they print.

A mistake is raised, and ``namedmesh.__main__`` prints it. What only one command needs is imported when that command runs.
"""

from __future__ import annotations

import inspect
import json
import sys
from argparse import BooleanOptionalAction, RawDescriptionHelpFormatter
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namedmesh.dialects import AXES, DIALECTS, EXPERT_AXES
from namedmesh.errors import count_of
from namedmesh.plan.comparison import compare, comparison_text
from namedmesh.plan.describe import make_plan, plan_data, plan_text, rank_text
from namedmesh.plan.hardware import hardware_names, load_hardware
from namedmesh.plan.job import CHOICES, Job
from namedmesh.plan.model import Model, read_config
from namedmesh.plan.partitions import MARGIN, best_partitions, explain, find_partition, list_partitions
from namedmesh.plan.spec import UsageError, parse_amount, parse_spec
from namedmesh.plan.svg import draw_svg
from namedmesh.plan.tables import Table, as_text

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from namedmesh.plan.partitions import Partition

_STATUS = 3  # where layouts differ, or none fits; beside 1, a layout that is wrong, and 2, arguments that are
_SHOWN, _MISSES = 60, 3  # partitions that are listed unless all are, and that are named where none fits
_AXES = {
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
_WORDS = """\
what is printed: a line for each layout, with the policies under which it is fastest.
  mb, stage, again    micro-batch, ZeRO's stage and checkpointing: as given, else the best that was found
  GB                  that the fullest rank needs: weights, gradients and optimizer as ZeRO divides them; gathered, what FSDP holds
                      whole (embedding and head; in pipelines all weights and their gradients); activations; loss, copies of the
                      logits; backward, what one layer needs on top
  tokens/s            of the whole job
  time goes to        parts of a step: matmul, attention; elementwise, kernels that the memory bounds (norms, gates, copies); bubble,
                      where pipeline ranks wait for the first and the last micro-batch; optimizer; an axis, as far as its
                      communication does not run beside computation
  ruled out           why a layout cannot be trained, by its sizes, by its trainer, or by memory
Estimates are sums of published formulas; benchmarks/published.py compares them with published runs."""


def _add_integers(parser: Any, flags: dict[str, str]) -> None:
    for name, text in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)


def add_format(parser: Any) -> None:
    """Add how the output is written."""
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="leave nothing out, however long it gets")


def add_layout(parser: ArgumentParser) -> None:
    """Add a spec string, and a flag for each axis."""
    parser.add_argument(
        "spec",
        nargs="*",
        metavar="SPEC",
        help="axes and sizes, slowest first, such as pp=2,dp=-1,tp=2 (-1: whatever is left), or a dialect and "
        "sizes, such as: megatron tp=2,pp=4",
    )
    _add_integers(parser, {axis: _AXES[axis] for axis in (*AXES, *EXPERT_AXES)})
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--order", help="the order of the axes, fastest first (default: Megatron's, tp-cp-ep-dp-pp)"
    )
    order.add_argument("--like", choices=tuple(DIALECTS), help="the order and the groups of a library")


def layout_arguments(arguments: Namespace) -> tuple[str, dict[str, Any]]:
    """Return the spec and the keywords that :func:`namedmesh.plan.make_plan` takes."""
    sizes = {axis: getattr(arguments, axis) for axis in (*AXES, *EXPERT_AXES)}
    keywords = {axis: size for axis, size in sizes.items() if size is not None}
    return " ".join(arguments.spec), {**keywords, "order": arguments.order, "like": arguments.like}


def _show(text: str, data: dict[str, Any], how: str) -> None:
    sys.stdout.write(f"{json.dumps(data, indent=1) if how == 'json' else text}\n")


def _configure_plan(parser: ArgumentParser) -> None:
    _add_integers(parser, {"world_size": "how many ranks there are"})
    add_layout(parser)
    _add_integers(
        parser,
        {"gpus_per_node": "consecutive ranks that fast links join", "rank": "explain one rank instead"},
    )
    add_format(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw the ranks into this file")
    parser.add_argument(
        "--color-by", metavar="AXIS", help="the axis that gives the colors (default: the slowest above 1)"
    )


def _plan(arguments: Namespace) -> int:
    spec, keywords = layout_arguments(arguments)
    plan = make_plan(spec, world_size=arguments.world_size, gpus_per_node=arguments.gpus_per_node, **keywords)
    rank = arguments.rank
    text = plan_text(plan, everything=arguments.all) if rank is None else rank_text(plan, rank)
    if arguments.svg is not None:
        try:
            Path(arguments.svg).write_text(draw_svg(plan, color_by=arguments.color_by), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{arguments.svg!r} cannot be written: {error.strerror}") from None
    _show(text, plan_data(plan, rank) if arguments.format == "json" else {}, arguments.format)
    return 0


def _configure_diff(parser: ArgumentParser) -> None:
    parser.add_argument("--a", metavar="SPEC", required=True, help='one layout, such as "megatron tp=2,pp=4"')
    parser.add_argument("--b", metavar="SPEC", required=True, help='the other, such as "fairscale tp=2,pp=4"')
    _add_integers(parser, {"world_size": "how many ranks there are"})


def _diff(arguments: Namespace) -> int:
    comparison = compare(arguments.a, arguments.b, world_size=arguments.world_size)
    sys.stdout.write(f"{comparison_text(comparison)}\n")
    return 0 if comparison.same else _STATUS


def _add_fields(parser: ArgumentParser, title: str, kind: type[Model | Job]) -> None:
    """Add a flag for each field of a dataclass; its docstring, which says what they are, stands above them."""
    text = inspect.getdoc(kind) or ""
    group = parser.add_argument_group(title, text.partition("Args:\n")[2].partition("\n\n")[0])
    for one in fields(kind):
        flag, choices = f"--{one.name.replace('_', '-')}", CHOICES.get(one.name)
        if isinstance(one.default, bool):
            group.add_argument(flag, action=BooleanOptionalAction)
        elif one.name not in {"model", "hardware"}:
            kind_of = str if one.name in {"params", *CHOICES} and one.name != "stage" else int
            group.add_argument(flag, type=kind_of, choices=choices, metavar=None if choices else "N")


def _configure_partitions(parser: ArgumentParser) -> None:
    parser.formatter_class, parser.epilog = RawDescriptionHelpFormatter, _WORDS
    parser.add_argument("--world-size", type=int, metavar="N", required=True, help="how many ranks there are")
    text = "Hugging Face's config.json of the model; flags override it"
    parser.add_argument("--config", metavar="FILE", help=text)
    _add_fields(parser, "the model", Model)
    _add_fields(parser, "how it is trained", Job)
    group = parser.add_argument_group("on what, and what is shown")
    text = f"{', '.join(hardware_names())}, or a file.json with the fields of a card (default: %(default)s)"
    group.add_argument("--hardware", default="h100", metavar="NAME", help=text)
    numbers = {"gpus_per_node": "consecutive ranks on one node, if not the hardware's"}
    numbers |= {"dp_replicate": "copies of a sharded model: HSDP (default: the best of some)"}
    _add_integers(group, numbers | {"best": "only the N that fit and have the most tokens a second"})
    group.add_argument("--memory", help="memory of a GPU, such as 80GB, if not the hardware's")
    text = "the part of the memory that stays free (default: %(default)s)"
    group.add_argument("--margin", type=float, default=MARGIN, help=text)
    text = "why one of two layouts, such as tp=8,dp=4, is faster: the seconds and gigabytes that differ (default: the first two)"
    group.add_argument("--explain", nargs="*", metavar="SIZES", help=text)
    add_format(group)


def _job(arguments: Namespace) -> tuple[Job, list[str]]:
    """Return the job that the arguments describe, and what its configuration says that it cannot express."""
    model, notes = (Model(), list[str]()) if arguments.config is None else read_config(arguments.config)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if "params" in given:
        given["params"] = parse_amount(given["params"], "parameters")
    hardware = load_hardware(arguments.hardware)
    if arguments.gpus_per_node is not None:
        hardware = hardware.with_node(arguments.gpus_per_node)
    model = replace(model, **{one.name: given[one.name] for one in fields(Model) if one.name in given})
    knobs = {one.name: given[one.name] for one in fields(Job) if one.name in given and one.name != "hardware"}
    return Job(model, hardware, **knobs), notes


def _partitions(arguments: Namespace) -> int:
    job, notes = _job(arguments)
    memory = None if arguments.memory is None else parse_amount(arguments.memory, "memory")
    if memory is not None and not job.model.total:
        raise UsageError("--memory needs the number of parameters; give --params, or the sizes of the model")
    more = {"memory": memory, "margin": arguments.margin, "dp_replicate": arguments.dp_replicate}
    partitions = list_partitions(arguments.world_size, job, **more)
    fitting = [one for one in partitions if one.fits]
    listed: Sequence[Partition] = partitions
    if arguments.best is not None:
        listed = best_partitions(partitions, arguments.best)
    head = (
        f"{count_of(len(partitions), 'layout')} of {arguments.world_size} ranks, {len(fitting)} of them fit"
    )
    if job.model.total:
        head += f" {partitions[0].limit / 1e9:.4g} GB of {job.hardware.name} ({arguments.margin:.0%} of it stay free)"
    parts = ["\n".join([head, *(f"{arguments.config}: {note}" for note in notes)])]
    shown = listed if arguments.all or arguments.best is not None else listed[:_SHOWN]
    if shown:
        parts.append(as_text(_table(shown)))
    if len(shown) < len(listed):
        parts.append(f"... and {len(listed) - len(shown)} more: --all shows them, --best N the fastest")
    explanation = "" if arguments.explain is None else _explained(arguments.explain, partitions)
    if not fitting:
        parts.append(_misses(partitions))
    if explanation:
        parts.append(explanation)
    if fitting and not job.missing:
        best = best_partitions(partitions, 1)[0]
        parts.append(f"The fastest, with {best.policies}:\n  {best.call}")
    data = {
        "partitions": [_data(one) for one in listed] if arguments.format == "json" else [],
        "explanation": explanation,
    }
    _show("\n\n".join(parts), data, arguments.format)
    return 0 if fitting else _STATUS


def _explained(given: list[str], partitions: Sequence[Partition]) -> str:
    if len(given) == 2:  # noqa: PLR2004  two are compared
        first, second = (find_partition(partitions, parse_spec(text)[1]) for text in given)
        return explain(first, second)
    if given:
        raise UsageError(
            f"--explain was given {given}; give two layouts, such as tp=8,dp=4 and dp=32, or none for the first two"
        )
    best = best_partitions(partitions, 2)
    return explain(*best) if len(best) == 2 else ""  # noqa: PLR2004  one alone needs no reason


def _misses(partitions: Sequence[Partition]) -> str:
    """Return what the layouts lack that come nearest to fitting."""
    over = [(one.memory.total, one) for one in partitions if one.memory is not None and not one.mismatches]
    if not over:
        return "nothing fits: sizes or batch rule out every layout"
    lines = ["nothing fits; the nearest, with the policies that need the least memory:"]
    for total, one in sorted(over, key=lambda each: each[0])[:_MISSES]:
        lines.append(f"  {one.words} ({one.policies}) lacks {(total - one.limit) / 1e9:.3g} GB")
    return "\n".join(lines)


def _table(partitions: Sequence[Partition]) -> Table:
    """Return a row for each partition, without columns that have nothing in any of them."""
    rows = [_cells(one) for one in partitions]
    columns = tuple(name for name in rows[0] if any(row[name] for row in rows))
    return Table(columns, tuple(tuple(row[name] for name in columns) for row in rows))


def _cells(one: Partition) -> dict[str, Any]:
    job, step = one.job, one.step
    cells: dict[str, Any] = {
        axis: getattr(one, axis) for axis in ("tp", "cp", "pp", "dp", "dp_replicate", "ep", "etp")
    }
    if one.dp_replicate == 1:
        cells["dp_replicate"] = None
    if not job.model.experts:
        cells |= {"ep": None, "etp": None}
    searched = job.model.total and not one.mismatches
    policies = (job.micro_batch, job.stage, job.checkpointing) if searched else (None, None, None)
    cells |= dict(zip(("mb", "stage", "again"), policies, strict=True))
    cells["GB"] = one.memory and round(one.memory.total / 1e9, 1)
    cells["tokens/s"] = round(one.tokens_per_second) or None
    parts = [] if step is None else list(step.seconds.items())[:4]
    cells["time goes to"] = ", ".join(f"{part} {seconds / step.total:.0%}" for part, seconds in parts if step)
    return cells | {"ruled out": "; ".join(one.reasons)}


def _data(one: Partition) -> dict[str, Any]:
    policies = {name: getattr(one.job, name) for name in ("micro_batch", "stage", "checkpointing")}
    costs = {"memory": one.memory and asdict(one.memory), "seconds": one.step and one.step.seconds}
    speed = {"tokens_per_second": one.tokens_per_second, "fits": one.fits, "reasons": one.reasons}
    return one.sizes | policies | costs | speed | {"call": one.call}


COMMANDS = {
    "plan": ("what a layout amounts to: groups, replicas, communicators, nodes", _configure_plan, _plan),
    "partitions": (
        "every layout of a world, with the policies under which it is fastest; the exit status is 3 if nothing fits",
        _configure_partitions,
        _partitions,
    ),
    "diff": (
        "which groups differ between two layouts; the exit status is 3 if some do",
        _configure_diff,
        _diff,
    ),
}
"""For each command its summary, the function that declares its arguments, and the one that runs it."""
