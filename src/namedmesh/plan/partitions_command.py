"""``namedmesh partitions``: list the layouts of a world, and report the fastest one."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from namedmesh.command_line import float_between, int_between
from namedmesh.errors import UsageError, format_count
from namedmesh.plan.hardware import CARDS, load_hardware
from namedmesh.plan.model import Axes, Job, Model, list_options, read_config
from namedmesh.plan.partitions import (
    MARGIN,
    Partition,
    best_partitions,
    explain,
    find_partition,
    list_partitions,
    make_sort_key,
)
from namedmesh.plan.settings import describe_assumptions
from namedmesh.plan.spec import EXIT_MISMATCH, format_table, parse_spec

# A table shows only the rows that a reader needs for a decision: the nearest layouts, and the parts of a step
# that matter.
_SHOWN_IF_NOTHING_FITS = 3
_SHOWN_PARTS_OF_STEP = 4
_COLUMNS = (*Axes._fields, "mb", "stage", "again", "GB", "tokens/s", "time goes to", "ruled out")
_EPILOG = """\
output: a line for each layout, with its fastest policies.
  mb, stage, again    micro-batch, ZeRO stage and checkpointing: as given, else the best that was
                      found; selective: with torch everything except attention and every second
                      product is recomputed (torchtitan's "selective op"), with Megatron attention's
                      scores
  GB                  memory of the fullest rank: weights, gradients and optimizer as ZeRO shards
                      them; gathered, unsharded parameters of FSDP (embedding and head; in pipelines
                      all weights and their gradients); activations; loss, copies of the logits;
                      backward, additional memory of one layer's backward pass
  tokens/s            of all ranks together
  time goes to        parts of a step: matmul, attention; elementwise, kernels that are bound by
                      memory (norms, gates, copies); bubble, pipeline warm-up and drain; optimizer;
                      an axis, its communication that does not overlap with computation
  ruled out           why a layout cannot be trained: by its sizes, by its trainer, or by memory
Estimates are sums of published formulas; benchmarks/published.py compares them with published
runs."""


def _configure(parser: ArgumentParser) -> None:
    """Declare a flag for each option of the model and the job, and the flags of the output."""
    # argparse would fill the table of columns as a paragraph.
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--world-size", type=int_between(1), metavar="N", required=True, help="how many ranks there are"
    )
    text = "Hugging Face's config.json of the model, or its directory; flags override it"
    parser.add_argument("--config", metavar="FILE", help=text)
    _add_options(parser, "the model", Model)
    _add_options(parser, "how it is trained; the best is searched for policies that are not given", Job)
    group = parser.add_argument_group("hardware and output")
    text = f"{', '.join(CARDS)}, or a file.json with the fields of a card (default: %(default)s)"
    group.add_argument("--hardware", default="h100", metavar="NAME", help=text)
    text = "replicas of a sharded model: HSDP (default: the best of some)"
    group.add_argument("--dp-replicate", type=int_between(1), metavar="N", help=text)
    text = "GB of a GPU, if not the hardware's"
    group.add_argument("--memory", type=float_between(0.001, 1e6), metavar="N", help=text)
    text = "the part of the memory that stays free (default: %(default)s)"
    group.add_argument("--margin", type=float_between(0, 0.999), default=MARGIN, metavar="N", help=text)
    text = "only the N that fit and have the most tokens a second"
    group.add_argument("--best", type=int_between(1), metavar="N", help=text)
    text = "why one of two layouts, such as tp=8,dp=4, is faster: the seconds and gigabytes that differ (default: the first two)"
    group.add_argument("--explain", nargs="*", metavar="SIZES", help=text)


def _add_options(parser: ArgumentParser, title: str, kind: type[Model | Job]) -> None:
    """Declare a flag for each option of a model or a job."""
    group = parser.add_argument_group(title)
    for entry in list_options(kind):
        choices = entry.metadata["choices"]
        # The default is None for all, so that a flag that is not given does not override a
        # configuration.
        keywords: dict[str, Any] = {"type": int_between(0, entry.metadata["most"]), "metavar": "N"}
        if isinstance(entry.default, bool):
            keywords = {"action": BooleanOptionalAction}
        elif choices:
            keywords = {"type": type(choices[0]), "choices": choices}
        flag = f"--{entry.name.replace('_', '-')}"
        group.add_argument(flag, help=entry.metadata["text"], **keywords)


def _run(arguments: Namespace) -> tuple[int, str]:
    """Return the partitions that the arguments ask for, with status 3 if nothing fits."""
    model, notes = _read_model(arguments)
    hardware = load_hardware(arguments.hardware)
    # A GPU of the same kind with another memory, such as the 40 GB of an A100.
    if arguments.memory:
        hardware = replace(hardware, memory=arguments.memory * 1e9)
    job = Job(model, hardware, **_read_options(Job, arguments))
    partitions = list_partitions(
        arguments.world_size, job, margin=arguments.margin, dp_replicate=arguments.dp_replicate
    )
    fitting = sum(partition.fits for partition in partitions)

    heading = (
        f"{format_count(len(partitions), 'layout')} of {arguments.world_size} ranks, {fitting} of them fit"
    )
    if not job.missing:
        limit = hardware.memory * (1 - arguments.margin) / 1e9
        heading += f" {limit:.4g} GB of {hardware.name} ({arguments.margin:.0%} of it stay free)"
    paragraphs = ["\n".join([heading, *(f"{arguments.config}: {note}" for note in notes)])]

    # All layouts are listed unless --best limits them; those that do not fit say why.
    listed: Sequence[Partition] = partitions
    if not fitting:
        paragraphs.append("nothing fits; the nearest, with the policies that need the least memory:")
        nearest_first = sorted(partitions, key=make_sort_key, reverse=True)
        listed = nearest_first[: arguments.best or _SHOWN_IF_NOTHING_FITS]
    elif arguments.best:
        listed = best_partitions(partitions, arguments.best)
    paragraphs.append(_format_partitions(listed))

    # Without the sizes of the model there is no ranking. If it is needed to explain, that is an
    # error.
    explains_best = arguments.explain == []  # the flag is given without layouts
    best: Sequence[Partition] = ()
    if fitting and (explains_best or not job.missing):
        best = best_partitions(partitions, 2)
    explained = best
    if arguments.explain:
        explained = _find_explained(partitions, arguments.explain)
    if arguments.explain is not None and len(explained) > 1:
        paragraphs.append(explain(*explained))
    if best:
        fastest = best[0]
        # The lines after the heading are to be copied into a program or a launch script.
        lines = [f"The fastest, with {fastest.policies}:", fastest.call, *fastest.settings]
        paragraphs.append("\n  ".join(lines))
        paragraphs.append(describe_assumptions(fastest.job))
    status = 0 if fitting else EXIT_MISMATCH
    return status, "\n\n".join(paragraphs) + "\n"


def _find_explained(partitions: Sequence[Partition], specs: Sequence[str]) -> list[Partition]:
    """Return the two partitions that are to be explained."""
    explained = [find_partition(partitions, parse_spec(spec)[1]) for spec in specs]
    if len(explained) != 2:  # noqa: PLR2004  two are compared
        raise UsageError(f"--explain was given {specs}; give two layouts, or none")
    return explained


def _read_model(arguments: Namespace) -> tuple[Model, list[str]]:
    """Return the model of the configuration and the flags, and notes about the configuration."""
    model = Model()
    notes: list[str] = []
    if arguments.config:
        model, notes = read_config(arguments.config)
    return replace(model, **_read_options(Model, arguments)), notes


def _read_options(kind: type[Model | Job], arguments: Namespace) -> dict[str, Any]:
    """Return the fields of a model or a job that were given as flags, by name."""
    given = {}
    for entry in list_options(kind):
        value = getattr(arguments, entry.name)
        if value is not None:
            given[entry.name] = value
    return given


def _format_partitions(partitions: Sequence[Partition]) -> str:
    """Format a row for each partition, without the columns that are empty in all rows."""
    rows = [_make_row(partition) for partition in partitions]
    filled: set[str] = set()
    for row in rows:
        filled.update(row)
    # The columns keep their order, whichever rows have them.
    columns = [name for name in _COLUMNS if name in filled]
    return format_table(columns, [_list_cells(row, columns) for row in rows])


def _list_cells(row: dict[str, Any], columns: Sequence[str]) -> list[Any]:
    """Return the cells of a row in the order of the columns; empty text if a cell is missing."""
    return [row.get(name, "") for name in columns]


def _make_row(partition: Partition) -> dict[str, Any]:
    """Return the cells of a partition by column, without those that do not apply to it."""
    row: dict[str, Any] = partition.axes._asdict()
    if partition.dp_replicate == 1:
        del row["dp_replicate"]
    if not partition.job.model.experts:
        del row["ep"]
        del row["etp"]
    # A layout that sizes rule out has no memory and no policies: none of them would change that.
    if partition.memory is not None:
        row["mb"] = partition.job.micro_batch
        row["stage"] = partition.job.stage
        row["again"] = partition.job.checkpointing
        row["GB"] = round(partition.memory.total / 1e9, 1)
        row["tokens/s"] = round(partition.tokens_per_second)
        step = sum(partition.seconds.values())
        largest = list(partition.seconds.items())[:_SHOWN_PARTS_OF_STEP]
        row["time goes to"] = ", ".join(f"{part} {seconds / step:.0%}" for part, seconds in largest)
    if partition.reasons:
        row["ruled out"] = "; ".join(partition.reasons)
    return row


_SUMMARY = "every layout of a world, with the policies under which it is fastest; the exit status is 3 if nothing fits"
COMMANDS = {"partitions": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
