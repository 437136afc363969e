"""List every factoring of a world into tensor, context, pipeline and data parallel ranks, and what rules some out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from math import isqrt
from typing import TYPE_CHECKING, Any

from namedmesh.errors import LayoutError
from namedmesh.plan.costs import STAGES, Memory, Model, estimate_model_memory, estimate_step, estimate_traffic
from namedmesh.plan.nodes import crossing_groups
from namedmesh.plan.spec import size_problems
from namedmesh.plan.tables import Cell, Document, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_SHOWN = 200
_MOST = 10**7  # beyond, there may be millions of them
_AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
RANKED_BY = ("params", "layers", "hidden", "seq")
"""The sizes of a model that a ranking needs."""


@dataclass(frozen=True, eq=False)
class Rules:
    """What partitions are judged by.

    Args:
        model: the sizes that rule some out, and that the estimates are made from.
        gpus_per_node: how many consecutive ranks one node has, in Megatron's order.
        memory: bytes that a rank has.
        stage: the stage of ZeRO.
    """

    model: Model = field(default_factory=Model)
    gpus_per_node: int | None = None
    memory: int | None = None
    stage: int = 3

    @cached_property
    def incompatible(self) -> Callable[[str, int], tuple[str, ...]]:
        """A function of an axis and its size: why the model rules it out. Many partitions share a size."""
        return cache(partial(_incompatibilities, self.model))


@dataclass(frozen=True)
class Partition:
    """One factoring of a world; what follows from it is computed when it is asked for.

    Args:
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline stages.
        dp: data-parallel size.
        ep: expert-parallel size.
        etp: tensor-parallel size of an expert.
        rules: what it is judged by.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int = 1
    etp: int = 1
    rules: Rules = field(default_factory=Rules, repr=False)

    @property
    def fits(self) -> bool:
        """Whether nothing rules it out."""
        return not self.reasons

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return {axis: getattr(self, axis) for axis in _AXES}

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the model's sizes rule it out, or else the memory; empty if they do not."""
        rule = self.rules.incompatible
        reasons = rule("tp", self.tp) + rule("pp", self.pp) + rule("ep", self.ep) + rule("cp", self.cp)
        memory, stage = self.rules.memory, self.rules.stage
        if memory is None or reasons:
            return reasons
        needed = estimate_model_memory(self.rules.model, self.sizes, stage=stage).total
        return (f"needs {needed / 1e9:.1f} GB of {memory / 1e9:.1f} at stage {stage}",) * (needed > memory)

    @cached_property
    def crossing(self) -> tuple[str, ...]:
        """The axes of which some groups have ranks on several nodes."""
        if self.rules.gpus_per_node is None:
            return ()
        world = self.tp * self.cp * self.pp * self.dp
        dense, expert = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp")
        sizes = {**self.sizes, "edp": world // (self.pp * self.ep * self.etp)}
        crossing = []
        for axes in (dense, expert if self.rules.model.experts else ()):
            stride = 1
            for axis in axes:
                if crossing_groups(sizes[axis], stride, world, self.rules.gpus_per_node):
                    crossing.append(axis)
                stride *= sizes[axis]
        return tuple(crossing)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Bytes of one rank for each stage of ZeRO; empty if the number of parameters is not known."""
        known = self.rules.model.params is not None
        return (
            tuple(estimate_model_memory(self.rules.model, self.sizes, stage=at) for at in STAGES)
            if known
            else ()
        )

    @property
    def traffic(self) -> tuple[tuple[str, float], ...]:
        """Bytes that a rank sends in a step by axis, the most first, as far as the sizes tell."""
        return tuple(estimate_traffic(self.rules.model, self.sizes, stage=self.rules.stage).items())

    @cached_property
    def step(self) -> dict[str, float]:
        """Seconds of a step by what they go to, by :func:`namedmesh.plan.costs.estimate_step`; empty if sizes are not known."""
        if any(getattr(self.rules.model, name) is None for name in RANKED_BY):
            return {}
        return estimate_step(self.rules.model, self.sizes, self.crossing, stage=self.rules.stage)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole job in a second at most; 0 if sizes are not known."""
        tokens = self.rules.model.batch * self.dp * (self.rules.model.seq or 0)
        return tokens / sum(self.step.values()) if self.step else 0.0


def list_partitions(
    world_size: int,
    *,
    model: Model | None = None,
    gpus_per_node: int | None = None,
    memory: int | None = None,
    stage: int = 3,
) -> tuple[Partition, ...]:
    """List every tp x cp x pp x dp that makes up a world, and with experts every ep inside it, with etp 1 and tp.

    Args:
        world_size: how many ranks there are.
        model: the sizes that rule some of them out, and that the estimates are made from.
        gpus_per_node: how many consecutive ranks one node has; ranks are in Megatron's order.
        memory: bytes that a rank has; what needs more at ``stage`` is ruled out.
        stage: the stage of ZeRO that memory and traffic are judged by.

    Returns:
        The partitions by tp, cp, pp, ep and etp, those that are ruled out included.

    Raises:
        LayoutError: a world of less than one rank, sizes that do not go together, another stage, or memory
            without the number of parameters.

    Example:
        >>> [(p.tp, p.pp, p.dp) for p in list_partitions(4) if p.cp == 1]
        [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
        >>> [p.reasons for p in list_partitions(3, model=Model(heads=32)) if p.tp == 3]
        [('32 heads do not divide by tp=3',)]
    """
    model = model or Model()
    problems = size_problems({"world_size": world_size, "gpus_per_node": gpus_per_node}) + model.problems()
    if world_size > _MOST:
        problems.append(f"world_size is {world_size}; partitions are listed for {_MOST} ranks at most")
    if stage not in STAGES:
        problems.append(f"stage {stage} is not one of ZeRO's {STAGES}")
    if memory is not None and model.params is None:
        problems.append("memory was given, but not the number of parameters; give params too")
    if problems:
        raise LayoutError(*problems)
    rules = Rules(model, gpus_per_node, memory, stage)
    return tuple(Partition(*sizes, rules=rules) for sizes in _all_sizes(world_size, model.experts))


def best_partitions(partitions: Iterable[Partition], count: int) -> tuple[Partition, ...]:
    """Return the partitions that fit with the most tokens in a second, the best first.

    Raises:
        LayoutError: a count below 1, or sizes that the estimate needs are not known.

    Example:
        >>> model = Model(params=7_000_000_000, layers=32, heads=32, hidden=4096, seq=4096, batch=8)
        >>> best, *_ = best_partitions(list_partitions(16, model=model, gpus_per_node=8, memory=80_000_000_000), 3)
        >>> best.sizes, best.crossing
        ({'tp': 1, 'cp': 1, 'pp': 2, 'dp': 8, 'ep': 1, 'etp': 1}, ('pp',))
    """
    fitting = [partition for partition in partitions if partition.fits]
    problems = size_problems({"the number of partitions": count})
    if fitting:
        missing = [name for name in RANKED_BY if getattr(fitting[0].rules.model, name) is None]
        problems += [
            f"a ranking needs {', '.join(missing)}; give {'them' if missing[1:] else 'it'} too"
        ] * bool(missing)
    if problems:
        raise LayoutError(*problems)
    return tuple(sorted(fitting, key=lambda partition: -partition.tokens_per_second)[:count])


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _all_sizes(world_size: int, experts: int | None) -> Iterator[tuple[int, int, int, int, int, int]]:
    divisors = cache(_divisors)
    for tp in divisors(world_size):
        for cp in divisors(world_size // tp):
            left = world_size // tp // cp
            for pp in divisors(left):
                for ep in divisors(world_size // pp) if experts else (1,):
                    for etp in (1, tp) if experts and tp > 1 else (1,):
                        if world_size // pp % (ep * etp) == 0:
                            yield tp, cp, pp, left // pp, ep, etp


def _incompatibilities(model: Model, axis: str, size: int) -> tuple[str, ...]:
    """Return a sentence for each size of a model that does not divide by that of an axis."""
    kv_heads = model.kv_heads if model.kv_heads != model.heads else None
    divisions = {
        "tp": (
            ("heads", model.heads),
            ("key and value heads", kv_heads),
            ("hidden features", model.hidden),
            ("vocabulary entries", model.vocab),
        ),
        "pp": (("layers", model.layers),),
        "ep": (("experts", model.experts),),
    }
    # Each context-parallel rank takes a chunk from either end, so that causal attention is balanced.
    if axis == "cp" and model.seq is not None and size > 1 and model.seq % (2 * size):
        return (f"a sequence of {model.seq} does not divide by 2 x cp={size}",)
    return tuple(
        f"{count} {what} do not divide by {axis}={size}"
        for what, count in divisions.get(axis, ())
        if count is not None and count % size
    )


def partitions_document(
    partitions: Sequence[Partition], headline: str = "", *, everything: bool = False
) -> Document:
    """Write partitions as a table; rows that are ruled out have an x and the reason."""
    shown = partitions if everything else partitions[:_SHOWN]
    cells = [_cells(partition) for partition in shown]
    columns = tuple(
        column
        for column in (cells[0] if cells else ())
        if column in _AXES[:4] or any(row[column] for row in cells)
    )
    if not (shown and shown[0].rules.model.experts):
        columns = tuple(column for column in columns if column not in _AXES[4:])
    rows = tuple(tuple(row[column] for column in columns) for row in cells)
    table = Table(columns, rows, frozenset(i for i, partition in enumerate(shown) if not partition.fits))
    more = f"... and {len(partitions) - len(shown)} more" if len(shown) < len(partitions) else ""
    notes = []
    if "memory 0/1/2/3" in columns:
        notes.append(
            "memory: GB of weights, gradients, optimizer state (Adam, mixed precision) and activations by ZeRO stage"
        )
    if "activations" in columns:
        checkpointing = shown[0].rules.model.checkpointing
        notes.append(
            f"activations: GB of the first stage, checkpointing {checkpointing}; logits are counted where pp is 1"
        )
    if "sent" in columns:
        notes.append("sent: GB that a rank sends in a step by axis, the most first")
    if "tokens/s" in columns:
        notes.append(
            "tokens/s: of the job at most, at 989 TFLOP/s, 450 GB/s inside a node and 50 GB/s across nodes, nothing overlapped"
        )
    return Document(
        (headline, table, more, "\n".join(notes)),
        lambda: {"partitions": [_data(partition) for partition in partitions]},
        lambda: Table(
            tuple(_flat(Partition(1, 1, 1, 1))), tuple(tuple(_flat(one).values()) for one in partitions)
        ),
    )


def _cells(partition: Partition) -> dict[str, Cell]:
    sent = " > ".join(f"{axis} {_gigabytes(amount)}" for axis, amount in partition.traffic)
    seconds = sum(partition.step.values())
    parts = sorted(partition.step.items(), key=lambda part: -part[1])
    activations = partition.memory[0].activations if partition.memory else 0.0
    return {
        **partition.sizes,
        "memory 0/1/2/3": " / ".join(_gigabytes(memory.total) for memory in partition.memory),
        "activations": _gigabytes(activations) if activations else None,
        "sent": sent or None,
        "crosses nodes": " ".join(partition.crossing) or None,
        "ruled out": "; ".join(partition.reasons),
        "tokens/s": round(partition.tokens_per_second) or None,
        "time goes to": ", ".join(f"{part} {took / seconds:.0%}" for part, took in parts) or None,
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
        "step": partition.step,
        "tokens_per_second": partition.tokens_per_second,
    }


def _flat(partition: Partition) -> dict[str, Cell]:
    """Return the columns that a spreadsheet wants."""
    sent, memory = dict(partition.traffic), partition.memory
    return {
        **partition.sizes,
        "fits": int(partition.fits),
        "reasons": "; ".join(partition.reasons),
        "crossing": " ".join(partition.crossing),
        **{f"bytes_stage_{stage}": memory[stage].total if memory else None for stage in STAGES},
        "bytes_activations": memory[0].activations if memory else None,
        **{f"sent_{axis}": sent.get(axis) for axis in (*_AXES, "edp")},
        "tokens_per_second": partition.tokens_per_second or None,
    }
