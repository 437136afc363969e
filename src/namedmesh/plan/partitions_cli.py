"""The command ``namedmesh partitions``: its arguments, and how they become a job."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentTypeError, BooleanOptionalAction
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from namedmesh.errors import count_of
from namedmesh.plan.cli import add_format, add_integer
from namedmesh.plan.hardware import hardware_names, load_hardware
from namedmesh.plan.job import CHOICES, Job
from namedmesh.plan.model import Model
from namedmesh.plan.spec import UsageError, parse_amount, parse_spec
from namedmesh.plan.tables import show

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

NOTHING_FITS = 3
"""The exit status where no partition fits."""
_DEFAULT = "h100"
_MISSES = 3  # are named where nothing fits
_AMOUNTS = ("params", "expert_params")
_ARGUMENT = re.compile(
    r"^( *)(\w+): (.*(?:\n\1 {4}.*)*)", re.MULTILINE
)  # of a docstring, however it is indented
_OF_THE_TRAINER = {
    "stage": "3, Megatron's 1",
    "state_bytes": "16, Megatron's 18",
    "context_attention": "gathered, Megatron's ring",
}


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
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


def run(arguments: Namespace) -> int:
    """List, and explain if asked to; the exit status says whether anything fits."""
    from namedmesh.plan.partitions import best_partitions, list_partitions, nearest_misses
    from namedmesh.plan.partitions_text import partitions_document
    from namedmesh.plan.why import misses_text

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
    from namedmesh.plan.partitions import best_partitions
    from namedmesh.plan.why import explain, find_partition

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
        from namedmesh.plan.config import read_config

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
