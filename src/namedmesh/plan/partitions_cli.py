"""The command ``namedmesh partitions``: its arguments, how they become a job, and what it prints."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentTypeError, BooleanOptionalAction
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from namedmesh.errors import count_of
from namedmesh.plan.cli import add_format, add_integer
from namedmesh.plan.hardware import hardware_names, load_hardware
from namedmesh.plan.job import CHOICES, Job
from namedmesh.plan.model import Model, read_config
from namedmesh.plan.partitions import (
    AXES,
    Partition,
    best_partitions,
    explain,
    find_partition,
    list_partitions,
    misses_text,
    nearest_misses,
)
from namedmesh.plan.spec import UsageError, parse_amount, parse_spec
from namedmesh.plan.tables import Document, Table, Value, show

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

NOTHING_FITS = 3
"""The exit status where no partition fits."""
_DEFAULT = "h100"
_MISSES = 3  # are named where nothing fits
_AMOUNTS = ("params", "expert_params")
# Of a docstring, however it is indented
_ARGUMENT = re.compile(r"^( *)(\w+): (.*(?:\n\1 {4}.*)*)", re.MULTILINE)
_SHOWN = 200
_OPTIONAL = ("crosses nodes", "sent", "micro batches", "time goes to")
_DENSE = ("tp", "cp", "pp", "dp")
_PARTS = 4  # of the time and the traffic are named
_LEAST = 0.01  # and from which part of the whole on
_OF_THE_TRAINER = {
    "stage": "3, Megatron's 1",
    "state_bytes": "16, Megatron's 18",
    "context_attention": "gathered, Megatron's ring",
}


def _configure(parser: ArgumentParser) -> None:
    add_integer(parser, "--world-size", "how many ranks there are", required=True)
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="Hugging Face's config.json of the model; flags override what it says",
    )
    _add_fields(group, Model)
    group = parser.add_argument_group("how it is trained")
    _add_fields(group, Job)
    group.add_argument("--batch", type=_batch_of_a_rank, help=SUPPRESS)
    group = parser.add_argument_group("on what")
    group.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"{', '.join(hardware_names())}, or a file like those of namedmesh/plan/gpus that ends in .json (default: {_DEFAULT})",
    )
    add_integer(group, "--gpus-per-node", "consecutive ranks on one node, if not the hardware's")
    group.add_argument("--memory", metavar="M", help="memory of a GPU, such as 80GB, if not the hardware's")
    group = parser.add_argument_group("what is shown")
    add_integer(group, "--best", "only the N that fit and have the most tokens a second, with the reason")
    group.add_argument(
        "--explain",
        nargs="*",
        metavar="SIZES",
        help="why one of two, such as tp=8,dp=4, is faster: which seconds, which gigabytes (default: the first two)",
    )
    group.add_argument("--fitting", action="store_true", help="leave out what is ruled out")
    add_format(group)


def _add_fields(parser: Any, kind: type[Model | Job]) -> None:
    """Add a flag for each field of a dataclass, with what its docstring says about it."""
    found = _ARGUMENT.findall(kind.__doc__ or "")
    texts = {name: " ".join(text.replace("``", "").split()) for _, name, text in found}
    for one in fields(kind):
        name, text = one.name, texts.get(one.name, "").removesuffix(".")
        # What a configuration says of a model counts unless a flag is given.
        default = one.default if kind is Job else None
        flag = f"--{name.replace('_', '-')}"
        if name in _OF_THE_TRAINER:
            text, default = f"{text} (default: {_OF_THE_TRAINER[name]})", None
        elif default not in {None, ()}:
            text = f"{text} (default: {default})"
        if name in CHOICES:
            more: dict[str, Any] = {"nargs": "+"} if name == "recompute" else {}
            choices = CHOICES[name]
            parser.add_argument(
                flag, type=type(choices[0]), choices=choices, default=default, help=text, **more
            )
        elif name == "compiled":
            text = "without torch.compile: each elementwise operation is a kernel"
            parser.add_argument("--eager", dest=name, action="store_false", help=text)
        elif isinstance(one.default, bool):
            parser.add_argument(flag, action=BooleanOptionalAction, default=default, help=text)
        elif name in _AMOUNTS:
            parser.add_argument(flag, metavar="P", help=f"{text}; such as 7B")
        elif name not in {"model", "hardware"}:
            add_integer(parser, flag, text, default=default)


def _batch_of_a_rank(text: str) -> None:
    raise ArgumentTypeError(f"{text} is of one data-parallel rank; give --global-batch, over all ranks")


def _run(arguments: Namespace) -> int:
    job, notes = _job(arguments)
    memory = None if arguments.memory is None else parse_amount(arguments.memory, "memory")
    partitions = list_partitions(arguments.world_size, job, memory=memory)
    listed = partitions
    if arguments.best is not None:
        listed = best_partitions(partitions, arguments.best)
    elif arguments.fitting:
        listed = tuple(partition for partition in partitions if partition.fits)
    fitting = sum(partition.fits for partition in partitions)
    headline = (
        f"{count_of(len(partitions), 'partition')} of {arguments.world_size} ranks, {fitting} of them fit"
    )
    if job.model.total:
        headline += f" {(memory or job.hardware.memory) / 1e9:.4g} GB of {job.hardware.name}"
        headline += " (the default; --hardware names another)" if arguments.hardware is None else ""
    headline = "\n".join([headline, *(f"{arguments.config}: {note}" for note in notes)])
    explanation = ""
    if arguments.explain is not None:
        explanation = _explained(arguments.explain, partitions)
    if not fitting:
        explanation = "\n\n".join(
            text for text in (explanation, misses_text(nearest_misses(partitions, _MISSES))) if text
        )
    document = partitions_document(listed, headline, explanation, everything=arguments.all)
    show(document, arguments.format)
    return 0 if fitting else NOTHING_FITS


def _explained(given: list[str], partitions: Any) -> str:
    if len(given) not in {0, 2}:
        raise UsageError(
            f"--explain was given {count_of(len(given), 'layout')}; give two, such as tp=8,dp=4 and dp=32, or none for the first two"
        )
    if given:
        first, second = (find_partition(partitions, parse_spec(text).sizes) for text in given)
        return explain(first, second)
    best = best_partitions(partitions, 2)
    return explain(*best) if len(best) == 2 else ""  # noqa: PLR2004  one alone needs no reason


def _job(arguments: Namespace) -> tuple[Job, list[str]]:
    """Return the job that the arguments describe, and what its configuration says that it cannot express."""
    model, notes = Model(), list[str]()
    if arguments.config is not None:
        model, notes = read_config(arguments.config)
    sizes = {one.name: getattr(arguments, one.name) for one in fields(Model)}
    for name in _AMOUNTS:
        if sizes[name] is not None:
            sizes[name] = parse_amount(sizes[name], "parameters")
    model = replace(model, **{name: size for name, size in sizes.items() if size is not None})
    names = {one.name for one in fields(Job)} & {*vars(arguments)} - {"hardware"}
    policies = {name: getattr(arguments, name) for name in names}
    policies["recompute"] = tuple(policies["recompute"])
    if policies["stage"] is None:
        policies["stage"] = 1 if policies["trainer"] == "megatron" else 3
    hardware = load_hardware(arguments.hardware or _DEFAULT)
    if arguments.gpus_per_node is not None:
        hardware = hardware.with_node(arguments.gpus_per_node)
    return Job(model, hardware, **policies), notes


def partitions_document(
    partitions: Sequence[Partition], headline: str = "", explanation: str = "", *, everything: bool = False
) -> Document:
    """Write partitions as a table; rows that are ruled out have an x and the reason."""
    shown = partitions if everything else partitions[:_SHOWN]
    cells = [_cells(partition) for partition in shown]
    columns = tuple(cells[0]) if cells else ()
    columns = tuple(column for column in columns if column in _DENSE or any(row[column] for row in cells))
    rows = tuple(tuple(row[column] for column in columns) for row in cells)
    struck = frozenset(i for i, partition in enumerate(shown) if not partition.fits)
    table = Table(columns, rows, struck, _OPTIONAL)
    more = f"... and {len(partitions) - len(shown)} more" if len(shown) < len(partitions) else ""
    notes = "\n".join(_notes(shown[0], columns)) if shown else ""
    return Document(
        (headline, table, more, explanation, notes),
        lambda: {"partitions": [_data(partition) for partition in partitions], "explanation": explanation},
        lambda: Table(
            tuple(_flat(Partition(1, 1, 1, 1))), tuple(tuple(_flat(one).values()) for one in partitions)
        ),
    )


def _notes(partition: Partition, columns: Sequence[str]) -> list[str]:
    job, limit = partition.job, partition.limit
    notes = []
    if "GB" in columns and limit is not None:
        parts = (
            f"gathered weights, activations ({job.trainer}'s layers, checkpointing {job.checkpointing}), loss"
        )
        if not job.sized:
            parts = "without activations, for which layers, hidden, heads and seq are missing"
        notes.append(
            f"GB: of the fullest rank, of {limit / 1e9:.4g}: states at ZeRO stage {job.stage}, {parts}"
        )
    if "sent" in columns:
        notes.append("sent: GB that a rank sends in a step by axis, the most first")
    if "tokens/s" in columns:
        hardware = job.hardware
        notes.append(
            f"tokens/s: of the whole job, on {hardware.name}: products at {hardware.matmul_rate(job.precision) / 1e12:.0f} "
            f"TFLOP/s ({job.precision}), {hardware.domain_bandwidth / 1e9:.0f} GB/s a GPU among {hardware.domain}, "
            f"{hardware.nics_per_node} NICs of {hardware.nic_bandwidth / 1e9:.0f} GB/s a node of {hardware.gpus_per_node}"
        )
        if job.model.experts:
            notes.append(
                "experts: the time that the host takes to launch their kernels is not counted; small experts are slower than this"
            )
    return notes


def _cells(partition: Partition) -> dict[str, Value]:
    memory, step = partition.memory, partition.step
    sent = time = ""
    if step is not None:
        sent = _largest(step.sent, " > ", lambda amount: f"{amount / 1e9:.3g}")
        time = _largest(step.seconds, ", ", lambda seconds: f"{seconds / step.total:.0%}")
    axes = AXES if partition.job.model.experts else _DENSE
    return {
        **{axis: partition.sizes[axis] for axis in axes},
        "micro batches": partition.micro_batches,
        "GB": round(memory.total / 1e9, 1) if memory is not None else None,
        "tokens/s": round(partition.tokens_per_second) or None,
        "time goes to": time or None,
        "sent": sent or None,
        "crosses nodes": " ".join(partition.crossing) or None,
        "ruled out": "; ".join(partition.reasons),
    }


def _largest(parts: dict[str, float], between: str, write: Any) -> str:
    whole = sum(parts.values())
    large = [part for part, amount in parts.items() if amount >= _LEAST * whole]
    largest = sorted(large, key=lambda part: -parts[part])[:_PARTS]
    return between.join(f"{part} {write(parts[part])}" for part in largest)


def _data(partition: Partition) -> dict[str, Any]:
    step, memory = partition.step, partition.memory
    return {
        **partition.sizes,
        "fits": partition.fits,
        "reasons": partition.reasons,
        "crossing": partition.crossing,
        "micro_batches": partition.micro_batches,
        "memory": memory and asdict(memory) | {"total": memory.total},
        "sent": {} if step is None else step.sent,
        "step": {} if step is None else step.seconds,
        "tokens_per_second": partition.tokens_per_second,
    }


def _flat(partition: Partition) -> dict[str, Value]:
    """Return the columns that a spreadsheet wants."""
    data, memory = _data(partition), partition.memory
    return {
        **partition.sizes,
        "fits": int(partition.fits),
        "reasons": "; ".join(partition.reasons),
        "crossing": " ".join(partition.crossing),
        "micro_batches": partition.micro_batches,
        "bytes": None if memory is None else memory.total,
        "bytes_activations": None if memory is None else memory.activations,
        **{f"sent_{axis}": data["sent"].get(axis) for axis in AXES},
        "tokens_per_second": partition.tokens_per_second or None,
    }


COMMANDS = {
    "partitions": (
        "every tp x cp x pp x dp of a world, or the best; what sizes, batch or memory rule out is struck; the exit status is 3 if nothing fits",
        _configure,
        _run,
    )
}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
