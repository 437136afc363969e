"""The command ``namedmesh partitions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.plan.arguments import add_format, reported
from namedmesh.plan.costs import STAGES, Model, parse_bytes, parse_count
from namedmesh.plan.partitions import Partition, list_partitions
from namedmesh.plan.tables import Cell, Document, Table, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["SUMMARY", "configure", "partitions_document", "run"]

SUMMARY = "every tp x cp x pp x dp of a world; what a model's sizes or the memory rule out is struck, with the reason"
"""What the command does, for the help."""

_SHOWN = 200
_SIZES = {
    "layers": "layers",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values, if fewer",
    "hidden": "width of the residual stream",
    "vocab": "entries of the vocabulary",
    "seq": "tokens of a sequence",
    "experts": "experts of a layer; lists every ep too",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="how many ranks there are")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="consecutive ranks on one node")
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    parser.add_argument("--top-k", type=int, default=1, metavar="N", help="experts of a token (default: 1)")
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences of a data rank and step (default: 1)"
    )
    parser.add_argument("--params", metavar="P", help="parameters, such as 7B: estimates memory and traffic")
    parser.add_argument(
        "--memory", metavar="M", help="memory of a rank, such as 80GB: strikes what needs more"
    )
    parser.add_argument(
        "--stage", type=int, choices=STAGES, default=3, help="ZeRO stage to judge by; 3 is FSDP (default: 3)"
    )
    parser.add_argument("--fitting", action="store_true", help="leave out what is ruled out")
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """List, and print.

    Returns:
        0; 1 if a size is wrong, 2 if an argument cannot be read.
    """
    return reported("partitions", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    model = Model(
        **{name: getattr(arguments, name) for name in _SIZES},
        params=None if arguments.params is None else parse_count(arguments.params),
        top_k=arguments.top_k,
        batch=arguments.batch,
    )
    found = list_partitions(
        arguments.world_size,
        model=model,
        gpus_per_node=arguments.gpus_per_node,
        memory=None if arguments.memory is None else parse_bytes(arguments.memory),
        stage=arguments.stage,
    )
    chosen = [partition for partition in found if partition.fits or not arguments.fitting]
    fit = sum(partition.fits for partition in found)
    head = f"{len(found)} partitions of {arguments.world_size} ranks, {fit} of them fit"
    show(partitions_document(chosen, head, everything=arguments.all), arguments.format)
    return 0


def partitions_document(
    found: Sequence[Partition], headline: str = "", *, everything: bool = False
) -> Document:
    """Partitions as a table; the struck rows carry an x and the reason."""
    shown = found if everything else found[:_SHOWN]
    rows = [_row(partition, found) for partition in shown]
    columns = ("tp", "cp", "pp", "dp", *_columns(found))
    table = Table(columns, tuple(rows), frozenset(i for i, p in enumerate(shown) if not p.fits))
    more = f"... and {len(found) - len(shown)} more" if len(shown) < len(found) else ""
    notes = []
    if any(partition.memory for partition in found):
        notes.append(
            "memory: GB of weights, gradients and optimizer state (Adam, mixed precision) by ZeRO stage; no activations"
        )
    if any(partition.traffic for partition in found):
        notes.append("sent: GB that a rank sends in a step by axis, the most first")
    return Document(
        (headline, table, more, "\n".join(notes)),
        lambda: {"partitions": [_data(partition) for partition in found]},
        lambda: _flat_table(found),
    )


def _flat_table(found: Sequence[Partition]) -> Table:
    columns = ("tp", "cp", "pp", "dp", "ep", "fits", "reasons", "crossing", *_MEMORY, *_SENT)
    return Table(columns, tuple(_flat(partition) for partition in found))


_MEMORY = tuple(f"bytes_stage_{stage}" for stage in STAGES)
_SENT = tuple(f"sent_{axis}" for axis in ("tp", "cp", "pp", "dp", "ep"))


def _columns(found: Sequence[Partition]) -> list[str]:
    columns = ["ep"] if any(partition.ep > 1 for partition in found) else []
    columns += ["memory 0/1/2/3"] if any(partition.memory for partition in found) else []
    columns += ["sent"] if any(partition.traffic for partition in found) else []
    columns += ["crosses nodes"] if any(partition.crossing for partition in found) else []
    columns += ["ruled out"] if any(partition.reasons for partition in found) else []
    return columns


def _row(partition: Partition, found: Sequence[Partition]) -> tuple[Cell, ...]:
    sent = " > ".join(f"{axis} {_gigabytes(amount)}" for axis, amount in partition.traffic)
    cells: dict[str, Cell] = {
        "ep": partition.ep,
        "memory 0/1/2/3": " / ".join(_gigabytes(memory.total) for memory in partition.memory),
        "sent": sent or None,
        "crosses nodes": " ".join(partition.crossing) or None,
        "ruled out": "; ".join(partition.reasons),
    }
    start = (partition.tp, partition.cp, partition.pp, partition.dp)
    return (*start, *(cells[column] for column in _columns(found)))


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.3g}"


def _data(partition: Partition) -> dict[str, Any]:
    return {
        **partition.sizes,
        "fits": partition.fits,
        "reasons": list(partition.reasons),
        "crossing": list(partition.crossing),
        "memory": [
            {
                "stage": memory.stage,
                "weights": memory.weights,
                "gradients": memory.gradients,
                "optimizer": memory.optimizer,
                "total": memory.total,
            }
            for memory in partition.memory
        ],
        "sent": dict(partition.traffic),
    }


def _flat(partition: Partition) -> tuple[Cell, ...]:
    totals = [estimate.total for estimate in partition.memory]
    memory: list[Cell] = [*totals] if totals else [None] * len(STAGES)
    sent = dict(partition.traffic)
    return (
        *partition.sizes.values(),
        int(partition.fits),
        "; ".join(partition.reasons),
        " ".join(partition.crossing),
        *memory,
        *(sent.get(column.removeprefix("sent_")) for column in _SENT),
    )
