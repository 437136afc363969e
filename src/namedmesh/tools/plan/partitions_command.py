"""``namedmesh partitions``: list the layouts of a world, and report the fastest one."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from namedmesh._command_line import float_between, int_between
from namedmesh._errors import UsageError, format_count
from namedmesh.tools.plan.hardware import CARDS, load_hardware
from namedmesh.tools.plan.model import Axes, Job, Model, list_options, read_config
from namedmesh.tools.plan.partitions import (
    MARGIN,
    Partition,
    best_partitions,
    explain,
    find_partition,
    list_partitions,
    make_sort_key,
)
from namedmesh.tools.plan.settings import describe_assumptions
from namedmesh.tools.plan.spec import EXIT_MISMATCH, format_table, parse_spec

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
    count = int_between(1)
    text = "how many ranks there are"
    parser.add_argument("--world-size", type=count, metavar="N", required=True, help=text)
    text = "Hugging Face's config.json of the model, or its directory; flags override it"
    parser.add_argument("--config", metavar="FILE", help=text)
    _add_options(parser, "the model", Model)
    _add_options(parser, "how it is trained; the best is searched for policies that are not given", Job)
    group = parser.add_argument_group("hardware and output")
    text = f"{', '.join(CARDS)}, or a file.json with the fields of a card (default: %(default)s)"
    group.add_argument("--hardware", default="h100", metavar="NAME", help=text)
    text = "replicas of a sharded model: HSDP (default: the best of some)"
    group.add_argument("--dp-replicate", type=count, metavar="N", help=text)
    text = "GB of a GPU, if not the hardware's"
    group.add_argument("--memory", type=float_between(0.001, 1e6), metavar="N", help=text)
    text = "the part of the memory that stays free (default: %(default)s)"
    group.add_argument("--margin", type=float_between(0, 0.999), default=MARGIN, metavar="N", help=text)
    text = "only the N that fit and have the most tokens a second"
    group.add_argument("--best", type=count, metavar="N", help=text)
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
    model = Model()
    notes: list[str] = []
    if arguments.config:
        model, notes = read_config(arguments.config)
    model = replace(model, **_read_options(Model, arguments))
    hardware = load_hardware(arguments.hardware)
    # A GPU of the same kind with another memory, such as the 40 GB of an A100.
    if arguments.memory:
        hardware = replace(hardware, memory=arguments.memory * 1e9)
    job = Job(model, hardware, **_read_options(Job, arguments))
    world_size = arguments.world_size
    margin = arguments.margin
    partitions = list_partitions(world_size, job, margin=margin, dp_replicate=arguments.dp_replicate)
    fitting = sum(partition.fits for partition in partitions)

    heading = f"{format_count(len(partitions), 'layout')} of {world_size} ranks, {fitting} of them fit"
    if not job.missing:
        limit = hardware.memory * (1 - margin) / 1e9
        heading += f" {limit:.4g} GB of {hardware.name} ({margin:.0%} of it stay free)"
    paragraphs = ["\n".join([heading, *(f"{arguments.config}: {note}" for note in notes)])]

    # All layouts are listed unless --best limits them; those that do not fit say why.
    listed: Sequence[Partition] = partitions
    if not fitting:
        paragraphs.append("nothing fits; the nearest, with the policies that need the least memory:")
        nearest_first = sorted(partitions, key=make_sort_key, reverse=True)
        listed = nearest_first[: arguments.best or _SHOWN_IF_NOTHING_FITS]
    elif arguments.best:
        listed = best_partitions(partitions, arguments.best)
    paragraphs.append(format_table(_COLUMNS, [_list_cells(partition) for partition in listed]))

    # Without the sizes of the model there is no ranking. If it is needed to explain, that is an
    # error.
    best: Sequence[Partition] = ()
    if fitting and (arguments.explain == [] or not job.missing):
        best = best_partitions(partitions, 2)
    if arguments.explain is not None:
        paragraphs += _explain(partitions, best, arguments.explain)
    if best:
        fastest = best[0]
        # The lines after the heading are to be copied into a program or a launch script.
        lines = [f"The fastest, with {fastest.policies}:", fastest.call, *fastest.settings]
        paragraphs.append("\n  ".join(lines))
        paragraphs.append(describe_assumptions(fastest.job))
    return 0 if fitting else EXIT_MISMATCH, "\n\n".join(paragraphs) + "\n"


def _explain(partitions: Sequence[Partition], best: Sequence[Partition], specs: Sequence[str]) -> list[str]:
    """Return the explanation of two layouts, by default the best ones; empty for a single one."""
    explained = [find_partition(partitions, parse_spec(spec)[1]) for spec in specs]
    if len(explained) not in {0, 2}:
        raise UsageError(f"--explain was given {specs}; give two layouts, or none")
    pair = explained or best
    return [explain(*pair)] if len(pair) > 1 else []


def _read_options(kind: type[Model | Job], arguments: Namespace) -> dict[str, Any]:
    """Return the fields of a model or a job that were given as flags, by name."""
    values = {entry.name: getattr(arguments, entry.name) for entry in list_options(kind)}
    return {name: value for name, value in values.items() if value is not None}


def _list_cells(partition: Partition) -> list[Any]:
    """Return the cells of a row; empty text if a column does not apply to the partition."""
    cells: dict[str, Any] = partition.axes._asdict()
    if partition.dp_replicate == 1:
        del cells["dp_replicate"]
    if not partition.job.model.experts:
        del cells["ep"]
        del cells["etp"]
    # A layout that sizes rule out has no memory and no policies: none of them would change that.
    if partition.memory is not None:
        step = sum(partition.seconds.values())
        largest = list(partition.seconds.items())[:_SHOWN_PARTS_OF_STEP]
        cells["mb"] = partition.job.micro_batch
        cells["stage"] = partition.job.stage
        cells["again"] = partition.job.checkpointing
        cells["GB"] = round(partition.memory.total / 1e9, 1)
        cells["tokens/s"] = round(partition.tokens_per_second)
        cells["time goes to"] = ", ".join(f"{part} {seconds / step:.0%}" for part, seconds in largest)
    cells["ruled out"] = "; ".join(partition.reasons)
    return [cells.get(name, "") for name in _COLUMNS]


_SUMMARY = "every layout of a world, with the policies under which it is fastest; the exit status is 3 if nothing fits"
COMMANDS = {"partitions": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
