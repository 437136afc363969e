"""Every factoring of a world into tensor, context, pipeline and data parallel ranks: what rules some out, why one is faster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from math import isqrt
from typing import TYPE_CHECKING, Any

from namedmesh.errors import LayoutError
from namedmesh.plan.job import Axes, Job
from namedmesh.plan.memory import Memory, estimate_memory
from namedmesh.plan.nodes import crossing_groups
from namedmesh.plan.spec import size_problems
from namedmesh.plan.step import Step, estimate_step
from namedmesh.sizes import SharedHeads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_MOST = 10**7  # beyond, there may be millions of them
AXES = Axes._fields

_LARGEST = 4  # how many differences are named
_LEAST = 0.005  # and from which part of the whole on
_REMEDIES: tuple[dict[str, Any], ...] = (
    *({"stage": stage} for stage in (1, 2, 3)),
    *({"checkpointing": policy} for policy in ("selective", "op", "full")),
    *({"micro_batch": 1}, {"sequence_parallel": True}, {"optimizer_bytes": 8}, {"fused_loss": True}),
    {"checkpointing": "full", "fused_loss": True},
)


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
        job: the model, and how it is trained.
        limit: bytes that a rank has; None is any number.
        mismatches: which sizes of the model or the batch do not go with it.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int = 1
    etp: int = 1
    job: Job = field(default_factory=Job, repr=False)
    limit: float | None = field(default=None, repr=False)
    mismatches: tuple[str, ...] = field(default=(), repr=False)

    @property
    def fits(self) -> bool:
        """Whether nothing rules it out."""
        return not self.reasons

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def words(self) -> str:
        """The sizes above 1, as a spec."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "dp=1"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the sizes of the model or the batch rule it out, or else the memory; empty if they do not."""
        if self.limit is None or self.memory is None or self.memory.total <= self.limit:
            return self.mismatches
        needed = self.memory.total
        return (f"needs {needed / 1e9:.1f} GB of {self.limit / 1e9:.1f} at stage {self.job.stage}",)

    @cached_property
    def crossing(self) -> tuple[str, ...]:
        """The axes of which some groups have ranks on several nodes, or in several domains of fast links that join nodes."""
        node = max(self.job.hardware.gpus_per_node, self.job.hardware.domain)
        dense, expert = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp")
        sizes = {**self.sizes, "edp": self.world_size // (self.pp * self.ep * self.etp)}
        crossing = []
        for axes in (dense, expert if self.job.model.experts else ()):
            stride = 1
            for axis in axes:
                if crossing_groups(sizes[axis], stride, self.world_size, node):
                    crossing.append(axis)
                stride *= sizes[axis]
        return tuple(crossing)

    @property
    def micro_batches(self) -> int | None:
        """How many micro-batches a data-parallel rank has in a step; None if the global batch is not known."""
        return self.job.micro_batches(self.dp)

    @cached_property
    def memory(self) -> Memory | None:
        """The bytes of the fullest rank; None if the number of parameters is not known, or sizes rule it out."""
        if self.mismatches or not self.job.model.total:
            return None
        return estimate_memory(self.job, self.sizes)

    @cached_property
    def step(self) -> Step | None:
        """The seconds of a step, and what a rank sends in it; None if a size is missing, or sizes rule it out."""
        if self.mismatches or self.job.missing:
            return None
        return estimate_step(self.job, self.sizes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole job in a second; 0 if sizes are not known."""
        if self.step is None:
            return 0.0
        return (self.job.global_batch or 0) * (self.job.seq or 0) / self.step.total


def list_partitions(
    world_size: int, job: Job | None = None, *, memory: float | None = None
) -> tuple[Partition, ...]:
    """List every tp x cp x pp x dp that makes up a world, and with experts every ep inside it, with etp 1 and tp.

    Args:
        world_size: how many ranks there are.
        job: the model and how it is trained, that rule some of them out, and that the estimates are made from.
        memory: bytes that a rank has; by default what the hardware has. What needs more is ruled out.

    Returns:
        The partitions by tp, cp, pp, ep and etp, those that are ruled out included.

    Raises:
        LayoutError: a world of less than one rank, or a job that does not go together.

    Example:
        >>> [(p.tp, p.pp, p.dp) for p in list_partitions(4) if p.cp == 1]
        [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
        >>> from namedmesh.plan import Model
        >>> [p.reasons for p in list_partitions(3, Job(Model(heads=32))) if p.tp == 3]
        [('32 heads do not divide by tp=3',)]
    """
    job = job or Job()
    problems = size_problems({"world_size": world_size}) + job.problems()
    if world_size > _MOST:
        problems.append(f"world_size is {world_size}; partitions are listed for {_MOST} ranks at most")
    if memory is not None and not job.model.total:
        problems.append(
            "memory was given, but not the number of parameters; give params, or the sizes of the model"
        )
    if problems:
        raise LayoutError(*problems)
    job, limit = replace(job, hardware=job.hardware.filled(world_size)), memory or job.hardware.memory
    rule = cache(partial(_incompatibilities, job))  # many partitions share a size
    partitions = []
    for sizes in _all_sizes(world_size, job.model.experts):
        mismatches = (rule(axis, sizes[AXES.index(axis)]) for axis in ("tp", "pp", "ep", "cp", "dp"))
        partitions.append(Partition(*sizes, job, limit, tuple(chain.from_iterable(mismatches))))
    return tuple(partitions)


def best_partitions(partitions: Iterable[Partition], count: int) -> tuple[Partition, ...]:
    """Return the partitions that fit with the most tokens in a second, the best first.

    Raises:
        LayoutError: a count below 1, or sizes that the estimate needs are not known.

    Example:
        >>> from namedmesh.plan import Model
        >>> model = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
        >>> best, *_ = best_partitions(list_partitions(16, Job(model, seq=8192, global_batch=32)), 3)
        >>> best.words, best.crossing
        ('dp=16', ('dp',))
    """
    listed = list(partitions)
    problems = size_problems({"the number of partitions": count})
    missing = listed[0].job.missing if listed else []
    if missing:
        problems.append(f"a ranking needs {', '.join(missing)}; give {'them' if missing[1:] else 'it'} too")
    if problems:
        raise LayoutError(*problems)
    fitting = [partition for partition in listed if partition.fits]
    return tuple(sorted(fitting, key=lambda partition: -partition.tokens_per_second)[:count])


def nearest_misses(partitions: Iterable[Partition], count: int) -> tuple[Partition, ...]:
    """Return the partitions that only the memory rules out, those that need the least first."""
    over = [one for one in partitions if one.reasons and not one.mismatches]
    return tuple(sorted(over, key=lambda one: one.memory.total if one.memory else 0.0)[:count])


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _all_sizes(world_size: int, experts: int | None) -> Iterator[tuple[int, int, int, int, int, int]]:
    divisors = cache(_divisors)
    for tp in divisors(world_size):
        for cp in divisors(world_size // tp):
            left = world_size // tp // cp
            for pp in divisors(left):
                if not experts:
                    yield tp, cp, pp, left // pp, 1, 1
                    continue
                for ep in divisors(world_size // pp):
                    for etp in (1, tp) if tp > 1 else (1,):
                        if world_size // pp % (ep * etp) == 0:
                            yield tp, cp, pp, left // pp, ep, etp


def _incompatibilities(job: Job, axis: str, size: int) -> tuple[str, ...]:
    """Return a sentence for each size of a job that does not go with that of an axis."""
    model = job.model
    if axis == "cp" and job.seq is not None and size > 1 and job.seq % (2 * size):
        # Each context-parallel rank takes a chunk from either end, so that causal attention is balanced.
        return (f"a sequence of {job.seq} does not divide by 2 x cp={size}",)
    if axis == "cp" and size > 1 and not job.fused_attention:
        return (f"ring attention over cp={size} is fused; leave out --no-fused-attention",)
    if axis == "pp" and model.layers is not None and model.layers < size * job.stages_per_rank:
        stages = f"pp={size}" if job.stages_per_rank == 1 else f"pp={size} x {job.stages_per_rank} stages"
        return (f"{model.layers} layers cannot fill {stages}",)
    if axis == "dp" and job.global_batch is not None and job.global_batch % (size * job.micro_batch):
        return (
            f"a global batch of {job.global_batch} does not divide by dp={size} x micro-batches of {job.micro_batch}",
        )
    divided = {"heads": model.heads, "hidden features": model.hidden, "vocabulary entries": model.vocab}
    if axis != "tp":
        divided = {"experts": model.experts} if axis == "ep" else {}
    reasons = [
        f"{count} {what} do not divide by {axis}={size}"
        for what, count in divided.items()
        if count is not None and count % size
    ]
    kv_heads = model.kv_heads if axis == "tp" and model.kv_rank is None else None
    if kv_heads and kv_heads % size and not SharedHeads(model.heads or kv_heads, kv_heads, size).possible:
        reasons.append(f"{kv_heads} key and value heads can neither be divided nor shared by tp={size}")
    return tuple(reasons)


def find_partition(partitions: Sequence[Partition], sizes: Mapping[str, int]) -> Partition:
    """Return the partition with these sizes; other axes have size 1, dp is whatever is left. A LayoutError if there is none."""
    world = partitions[0].world_size if partitions else 0
    wanted = {**dict.fromkeys(AXES, 1), **sizes}
    if sizes.get("dp", -1) == -1:
        wanted["dp"] = world // (wanted["tp"] * wanted["cp"] * wanted["pp"])
    for one in partitions:
        if one.sizes == wanted:
            return one
    given = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise LayoutError(
        f"{given} is no partition of {world} ranks; name tp, cp, pp, dp, and ep and etp with experts"
    )


def explain(first: Partition, second: Partition) -> str:
    """Return in a few lines which of two partitions is faster, by which seconds, and which gigabytes differ.

    Raises:
        LayoutError: sizes that the seconds need are not known, or a partition has no step to time.
    """
    for one in (first, second):
        if one.step is None:
            missing = one.job.missing
            why = f"the seconds of a step need {', '.join(missing)}" if missing else "; ".join(one.reasons)
            raise LayoutError(f"{one.words} has no step to explain: {why}")
    first, second = sorted((first, second), key=lambda one: one.step.total if one.step else 0.0)
    ours, theirs = (one.step.seconds if one.step else {} for one in (first, second))
    fast, slow = sum(ours.values()), sum(theirs.values())
    lines = [
        f"{first.words} is faster than {second.words}: {fast:.3g} s a step against {slow:.3g} s, {1 - fast / slow:.1%} less"
    ]
    lines += _differences(ours, theirs, fast, "s")
    if first.memory is not None and second.memory is not None:
        memories = (first.memory, second.memory)
        ours, theirs = (
            {part: size / 1e9 for part, size in vars(each).items() if part != "rank"} for each in memories
        )
        needed, other = (each.total / 1e9 for each in memories)
        lines.append(f"it needs {needed:.3g} GB a GPU against {other:.3g} GB")
        lines += _differences(ours, theirs, needed, "GB")
    lines += [f"{one.words} is ruled out: {'; '.join(one.reasons)}" for one in (first, second) if one.reasons]
    return "\n".join(lines)


def _differences(ours: dict[str, float], theirs: dict[str, float], whole: float, unit: str) -> list[str]:
    """Return a line for each of the largest differences."""
    pairs = {part: (ours.get(part, 0.0), theirs.get(part, 0.0)) for part in (*ours, *theirs)}
    gaps = {part: abs(other - own) for part, (own, other) in pairs.items()}
    large = [part for part, gap in gaps.items() if gap >= _LEAST * whole]
    largest = sorted(large, key=gaps.__getitem__, reverse=True)[:_LARGEST]
    return [
        "  {}: {:.3g} {unit} against {:.3g} {unit}".format(part, *pairs[part], unit=unit) for part in largest
    ]


def remedies(partition: Partition) -> list[str]:
    """Return the changes of a job, one or else two, under which a partition needs no more memory than there is."""
    job, limit = partition.job, partition.limit
    if limit is None or partition.memory is None:
        return []
    found = []
    for change in _REMEDIES:
        if change.get("stage", job.stage + 1) <= job.stage or ("fused_loss" in change and not job.is_torch):
            continue
        changed = replace(job, **change)
        if "checkpointing" in change:
            changed = replace(changed, recompute=())
        if changed == job or (job.global_batch is not None and changed.micro_batches(partition.dp) is None):
            continue
        if estimate_memory(changed, partition.sizes).total <= limit:
            found.append(change)
    single = [change for change in found if len(change) == 1]
    words = [" ".join(f"--{name} {value}" for name, value in change.items()) for change in single or found]
    return [each.replace("_", "-").removesuffix(" True") for each in words]


def misses_text(misses: Sequence[Partition]) -> str:
    """Return in a few lines what the partitions lack that come nearest to fitting, and what would make them fit."""
    if not misses:
        return "nothing fits: the sizes of the model, or the batch, rule out every partition; without --best and --fitting the reasons are listed"
    lines = ["nothing fits; the nearest:"]
    for one in misses:
        lacking = ((one.memory.total if one.memory else 0.0) - (one.limit or 0.0)) / 1e9
        changes = " or ".join(remedies(one))
        what = f"fits with {changes}" if changes else "no single policy makes it fit: take more GPUs"
        lines.append(f"  {one.words} lacks {lacking:.3g} GB; {what}")
    return "\n".join(lines)
