"""Write partitions as a document: a table for people, and every number for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from namedmesh.plan.partitions import AXES, Partition
from namedmesh.plan.tables import Document, Table, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 200
_OPTIONAL = ("crosses nodes", "sent", "micro batches", "time goes to")
_DENSE = ("tp", "cp", "pp", "dp")
_PARTS = 4  # of the time and the traffic are named
_LEAST = 0.01  # and from which part of the whole on


def partitions_document(
    partitions: Sequence[Partition], headline: str = "", explanation: str = "", *, everything: bool = False
) -> Document:
    """Write partitions as a table; rows that are ruled out have an x and the reason."""
    shown = partitions if everything else partitions[:_SHOWN]
    cells = [_cells(partition) for partition in shown]
    columns = tuple(cells[0]) if cells else ()
    columns = tuple(column for column in columns if column in _DENSE or any(row[column] for row in cells))
    if not (shown and shown[0].job.model.experts):
        columns = tuple(column for column in columns if column not in {"ep", "etp"})
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
    return notes


def _cells(partition: Partition) -> dict[str, Value]:
    memory, step = partition.memory, partition.step
    sent = time = ""
    if step is not None:
        sent = _largest(step.sent, " > ", lambda amount: f"{amount / 1e9:.3g}")
        time = _largest(step.seconds, ", ", lambda seconds: f"{seconds / step.total:.0%}")
    return {
        **partition.sizes,
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
