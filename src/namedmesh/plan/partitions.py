"""List every factoring of a world into tensor, context, pipeline and data parallel ranks, and what rules some out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any

from namedmesh.dialects import PLAIN, arrange
from namedmesh.errors import LayoutError
from namedmesh.plan.costs import STAGES, Memory, Model, estimate_memory, estimate_traffic
from namedmesh.plan.nodes import placements
from namedmesh.plan.spec import size_problems
from namedmesh.plan.tables import Cell, Document, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Partition", "list_partitions", "partitions_document"]

_SHOWN = 200


@dataclass(frozen=True)
class Partition:
    """One factoring of a world.

    Args:
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline stages.
        dp: data-parallel size.
        ep: expert-parallel size; the experts are not tensor-parallel then (etp is 1).
        reasons: why the model's sizes, or the memory, rule it out; empty if they do not.
        crossing: the axes of which some groups have ranks on several nodes.
        memory: bytes of one rank for each stage of ZeRO; empty if the number of parameters is not known.
        traffic: bytes that a rank sends in a step by axis, the most first, as far as the sizes tell.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int = 1
    reasons: tuple[str, ...] = ()
    crossing: tuple[str, ...] = ()
    memory: tuple[Memory, ...] = ()
    traffic: tuple[tuple[str, float], ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing rules it out."""
        return not self.reasons

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp, "ep": self.ep}


def list_partitions(
    world_size: int,
    *,
    model: Model | None = None,
    gpus_per_node: int | None = None,
    memory: int | None = None,
    stage: int = 3,
) -> tuple[Partition, ...]:
    """List every tp x cp x pp x dp that makes up a world, and with experts every ep inside it.

    Args:
        world_size: how many ranks there are.
        model: the sizes that rule some of them out, and that the estimates are made from.
        gpus_per_node: how many consecutive ranks one node has; ranks are in Megatron's order.
        memory: bytes that a rank has; what needs more at ``stage`` is ruled out.
        stage: the stage of ZeRO that memory and traffic are judged by.

    Returns:
        The partitions by tp, cp, pp and ep, those that are ruled out included.

    Raises:
        LayoutError: a world of less than one rank, another stage, or memory without the number of parameters.

    Example:
        >>> [(p.tp, p.pp, p.dp) for p in list_partitions(4) if p.cp == 1]
        [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
        >>> [p.reasons for p in list_partitions(3, model=Model(heads=32)) if p.tp == 3]
        [('32 heads do not divide by tp=3',)]
    """
    model = model or Model()
    problems = _problems(world_size, model, gpus_per_node, memory, stage)
    if problems:
        raise LayoutError(*problems)
    return tuple(
        _judged(sizes, model, gpus_per_node, memory, stage) for sizes in _all_sizes(world_size, model.experts)
    )


def _problems(
    world_size: int, model: Model, gpus_per_node: int | None, memory: int | None, stage: int
) -> list[str]:
    problems = size_problems({"world_size": world_size, "gpus_per_node": gpus_per_node, **vars(model)})
    if stage not in STAGES:
        problems.append(f"stage {stage} is not one of ZeRO's {STAGES}")
    if memory is not None and model.params is None:
        problems.append("memory was given, but not the number of parameters; give params too")
    return problems


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _all_sizes(world_size: int, experts: int | None) -> Iterator[dict[str, int]]:
    for tp in _divisors(world_size):
        for cp in _divisors(world_size // tp):
            for pp in _divisors(world_size // tp // cp):
                dp = world_size // tp // cp // pp
                for ep in _divisors(world_size // pp) if experts else (1,):
                    yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep}


def _judged(
    sizes: dict[str, int], model: Model, gpus_per_node: int | None, memory: int | None, stage: int
) -> Partition:
    estimates: tuple[Memory, ...] = ()
    if model.params is not None:
        estimates = tuple(
            estimate_memory(
                model.params, tp=sizes["tp"], pp=sizes["pp"], data=sizes["dp"] * sizes["cp"], stage=at
            )
            for at in STAGES
        )
    reasons = _incompatibilities(sizes, model)
    if memory is not None and estimates[stage].total > memory:
        reasons.append(f"needs {estimates[stage].total / 1e9:.1f} GB of {memory / 1e9:.1f} at stage {stage}")
    return Partition(
        **sizes,
        reasons=tuple(reasons),
        crossing=_crossing(sizes, gpus_per_node),
        memory=estimates,
        traffic=tuple(estimate_traffic(model, sizes, stage=stage).items()),
    )


def _incompatibilities(sizes: dict[str, int], model: Model) -> list[str]:
    """Return a sentence for each size of a model that does not divide by that of its axis."""
    kv_heads = model.kv_heads if model.kv_heads is not None else model.heads
    divisions = [
        ("heads", model.heads, "tp", sizes["tp"]),
        ("key and value heads", kv_heads if kv_heads != model.heads else None, "tp", sizes["tp"]),
        ("hidden features", model.hidden, "tp", sizes["tp"]),
        ("vocabulary entries", model.vocab, "tp", sizes["tp"]),
        ("layers", model.layers, "pp", sizes["pp"]),
        ("experts", model.experts, "ep", sizes["ep"]),
    ]
    reasons = [
        f"{count} {what} do not divide by {axis}={size}"
        for what, count, axis, size in divisions
        if count is not None and count % size
    ]
    # Each context-parallel rank takes a chunk from either end, so that causal attention is balanced.
    if model.seq is not None and sizes["cp"] > 1 and model.seq % (2 * sizes["cp"]):
        reasons.append(f"a sequence of {model.seq} does not divide by 2 x cp={sizes['cp']}")
    return reasons


def _crossing(sizes: dict[str, int], gpus_per_node: int | None) -> tuple[str, ...]:
    if gpus_per_node is None:
        return ()
    dense = {axis: size for axis, size in sizes.items() if axis != "ep"}
    expert = {"ep": sizes["ep"], "etp": 1} if sizes["ep"] > 1 else {}
    arrangement = arrange(PLAIN, {**dense, **expert})
    return tuple(
        placement.axis for placement in placements(arrangement, gpus_per_node) if placement.across_nodes
    )


_MEMORY = tuple(f"bytes_stage_{stage}" for stage in STAGES)
_SENT = tuple(f"sent_{axis}" for axis in ("tp", "cp", "pp", "dp", "ep"))


def partitions_document(
    partitions: Sequence[Partition], headline: str = "", *, everything: bool = False
) -> Document:
    """Write partitions as a table; rows that are ruled out have an x and the reason."""
    shown = partitions if everything else partitions[:_SHOWN]
    has_values = {
        "ep": any(partition.ep > 1 for partition in partitions),
        "memory 0/1/2/3": any(partition.memory for partition in partitions),
        "sent": any(partition.traffic for partition in partitions),
        "crosses nodes": any(partition.crossing for partition in partitions),
        "ruled out": any(partition.reasons for partition in partitions),
    }
    columns = ("tp", "cp", "pp", "dp", *(column for column, filled in has_values.items() if filled))
    rows = tuple(tuple(map(_cells(partition).__getitem__, columns)) for partition in shown)
    table = Table(columns, rows, frozenset(i for i, partition in enumerate(shown) if not partition.fits))
    more = f"... and {len(partitions) - len(shown)} more" if len(shown) < len(partitions) else ""
    notes = []
    if has_values["memory 0/1/2/3"]:
        notes.append(
            "memory: GB of weights, gradients and optimizer state (Adam, mixed precision) by ZeRO stage; no activations"
        )
    if has_values["sent"]:
        notes.append("sent: GB that a rank sends in a step by axis, the most first")
    flat_columns = ("tp", "cp", "pp", "dp", "ep", "fits", "reasons", "crossing", *_MEMORY, *_SENT)
    return Document(
        (headline, table, more, "\n".join(notes)),
        lambda: {"partitions": [_data(partition) for partition in partitions]},
        lambda: Table(flat_columns, tuple(_flat_row(partition) for partition in partitions)),
    )


def _cells(partition: Partition) -> dict[str, Cell]:
    sent = " > ".join(f"{axis} {_gigabytes(amount)}" for axis, amount in partition.traffic)
    return {
        **partition.sizes,
        "memory 0/1/2/3": " / ".join(_gigabytes(memory.total) for memory in partition.memory),
        "sent": sent or None,
        "crosses nodes": " ".join(partition.crossing) or None,
        "ruled out": "; ".join(partition.reasons),
    }


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.3g}"


def _data(partition: Partition) -> dict[str, Any]:
    return {
        **partition.sizes,
        "fits": partition.fits,
        "reasons": partition.reasons,
        "crossing": partition.crossing,
        "memory": [{**asdict(memory), "total": memory.total} for memory in partition.memory],
        "sent": dict(partition.traffic),
    }


def _flat_row(partition: Partition) -> tuple[Cell, ...]:
    sent = dict(partition.traffic)
    totals = [estimate.total for estimate in partition.memory]
    memory: list[Cell] = [*totals] or [None] * len(STAGES)
    return (
        *partition.sizes.values(),
        int(partition.fits),
        "; ".join(partition.reasons),
        " ".join(partition.crossing),
        *memory,
        *(sent.get(column.removeprefix("sent_")) for column in _SENT),
    )
