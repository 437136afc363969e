"""The command ``namedmesh partitions``: its arguments, and how they become a job."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentTypeError, BooleanOptionalAction
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from namedmesh.errors import count_of
from namedmesh.plan.cli import add_format, add_integer
from namedmesh.plan.hardware import Hardware, hardware_names, load_hardware
from namedmesh.plan.job import (
    CHECKPOINTING,
    CONTEXT_ATTENTION,
    OPTIMIZER_BYTES,
    PRECISIONS,
    RECOMPUTED,
    SCHEDULES,
    STAGE_WORDS,
    STAGES,
    STATE_BYTES,
    TRAINERS,
    Job,
)
from namedmesh.plan.model import Model
from namedmesh.plan.spec import UsageError, parse_amount, parse_spec
from namedmesh.plan.tables import show

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

NOTHING_FITS = 3
"""The exit status where no partition fits."""
_DEFAULT = "h100"
_MISSES = 3  # are named where nothing fits
_MODEL_HELP = {
    "layers": "layers",
    "hidden": "width of the residual stream",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values, if fewer",
    "head_dim": "features of a head, if not hidden / heads",
    "ffn": "inner width of the feed-forward network, gated (default: 4 x hidden, not gated)",
    "vocab": "entries of the vocabulary",
    "experts": "experts of a layer; lists every ep too",
    "top_k": "experts of a token (default: 1)",
    "expert_ffn": "inner width of an expert (default: that of --ffn)",
    "shared_experts": "experts that every token goes to",
    "dense_layers": "first layers that have no experts",
    "expert_groups": "groups of experts that a token goes to at most, if limited",
    "q_rank": "latent attention: rank of the queries",
    "kv_rank": "latent attention: rank of keys and values; --head-dim is then without positions",
    "rope_dim": "latent attention: features of a head that hold positions",
    "value_dim": "latent attention: features of a value head",
}


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    add_integer(parser, "--world-size", "how many ranks there are", required=True)
    _configure_model(parser.add_argument_group("the model"))
    _configure_training(parser.add_argument_group("how it is trained"))
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


def _configure_model(parser: Any) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="Hugging Face's config.json of the model; flags override what it says",
    )
    for name, text in _MODEL_HELP.items():
        add_integer(parser, f"--{name.replace('_', '-')}", text)
    parser.add_argument("--tied", action=BooleanOptionalAction, help="the head is the embedding, as in GPT-2")
    parser.add_argument("--params", metavar="P", help="parameters, such as 7B (default: from the sizes)")
    parser.add_argument("--expert-params", metavar="P", help="those of all experts (default: from the sizes)")


def _configure_training(parser: Any) -> None:
    add_integer(parser, "--seq", "tokens of a sequence")
    add_integer(
        parser, "--global-batch", "sequences of a step, over all ranks; what does not divide it is struck"
    )
    parser.add_argument("--batch", type=_batch_of_a_rank, help=SUPPRESS)
    add_integer(parser, "--micro-batch", "sequences that a rank works on at a time (default: 1)", default=1)
    _choice(parser, "--precision", PRECISIONS, "bf16", "numbers of the matrix products")
    _choice(
        parser, "--trainer", TRAINERS, "torch", "whose layers and loss: torch's with FSDP2, or Megatron's"
    )
    _choice(
        parser,
        "--checkpointing",
        CHECKPOINTING,
        "selective",
        "what is computed again: nothing; attention's scores; all but attention and every second product; whole layers",
    )
    parser.add_argument(
        "--recompute", nargs="+", choices=RECOMPUTED, default=(), help="what selective computes again too"
    )
    parser.add_argument(
        "--stage", type=int, choices=STAGES, help=f"ZeRO stage: {STAGE_WORDS} (default: 3, Megatron's 1)"
    )
    parser.add_argument(
        "--state-bytes",
        type=int,
        choices=STATE_BYTES,
        help="bytes of weight, gradient and Adam's state of a parameter (default: 16, Megatron's 18)",
    )
    parser.add_argument(
        "--optimizer-bytes",
        type=int,
        choices=OPTIMIZER_BYTES,
        default=OPTIMIZER_BYTES[0],
        help="those of Adam's state among them; 8 with moments in bf16 (default: 12)",
    )
    parser.add_argument(
        "--context-attention",
        choices=CONTEXT_ATTENTION,
        help="how attention over cp gets keys and values (default: gathered, Megatron's ring); torch repeats the heads",
    )
    _choice(parser, "--schedule", SCHEDULES, "1f1b", "order of a pipeline's micro-batches")
    add_integer(
        parser, "--stages-per-rank", "of a pipeline; 2 or more is interleaved (default: 1)", default=1
    )
    _switch(
        parser, "--sequence-parallel", "tp ranks share the norms and the residual stream too", default=True
    )
    _switch(parser, "--fused-attention", "attention's scores stay on the chip (FlashAttention)", default=True)
    parser.add_argument(
        "--eager",
        dest="compiled",
        action="store_false",
        help="a kernel for each operation, without torch.compile (Megatron's are fused in any case)",
    )
    _switch(parser, "--fused-norms", "RMSNorm is one kernel in eager mode, from torch 2.9 on", default=True)
    _switch(parser, "--fused-loss", "the loss is compiled, without copies of the logits", default=False)
    _switch(parser, "--fp8-inputs", "products and gates keep their inputs in fp8", default=False)
    _switch(parser, "--dropout", "the layers have dropout, whose masks are kept", default=False)
    _switch(parser, "--overlap", "weights and gradients travel beside the computation", default=True)


def _batch_of_a_rank(text: str) -> None:
    raise ArgumentTypeError(f"{text} is of one data-parallel rank; give --global-batch, over all ranks")


def _choice(parser: Any, flag: str, values: tuple[str, ...], default: str, text: str) -> None:
    parser.add_argument(flag, choices=values, default=default, help=f"{text} (default: {default})")


def _switch(parser: Any, flag: str, text: str, *, default: bool) -> None:
    state = "yes" if default else "no"
    parser.add_argument(
        flag, action=BooleanOptionalAction, default=default, help=f"{text} (default: {state})"
    )


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
    sizes = {name: getattr(arguments, name) for name in (*_MODEL_HELP, "tied")}
    for name in ("params", "expert_params"):
        text = getattr(arguments, name)
        sizes[name] = None if text is None else parse_amount(text, "parameters")
    model = replace(model, **{name: size for name, size in sizes.items() if size is not None})
    names = {one.name for one in fields(Job)} & {*vars(arguments)} - {"model", "hardware"}
    policies = {name: getattr(arguments, name) for name in names}
    policies["recompute"] = tuple(policies["recompute"])
    if policies["stage"] is None:
        policies["stage"] = 1 if policies["trainer"] == "megatron" else 3
    return Job(model, _hardware(arguments), **policies), notes


def _hardware(arguments: Namespace) -> Hardware:
    hardware, node = load_hardware(arguments.hardware or _DEFAULT), arguments.gpus_per_node
    return hardware if node is None else hardware.with_node(node)
