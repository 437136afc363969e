"""Every layout of a world, with the policies under which it is fastest; which of them fit, why one is faster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import isqrt
from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError
from namedmesh.plan.cost import Memory, Step, estimate_memory, estimate_step
from namedmesh.plan.job import Axes, Job
from namedmesh.plan.spec import size_problems
from namedmesh.sizes import SharedHeads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MARGIN = 0.08
"""The part of a GPU's memory that stays free by default, for CUDA, NCCL and what the estimate does not know."""
_MOST = 10**7  # beyond, there may be millions of them
# What a user would try by hand; a later policy costs more time, and needs less memory.
_MICRO_BATCHES, _STAGES, _CHECKPOINTING = (1, 2, 4), (1, 2, 3), ("none", "selective", "full")
_REPLICAS = 2  # sizes of dp_replicate that are tried beside 1: those with most of the sharding in fast links
_LEAST = 0.005  # the part of the whole from which on a difference is named


@dataclass(frozen=True)
class Partition:
    """One layout of a world, and the policies that go with it; what follows is computed when it is asked for.

    Args:
        axes: the size of each axis.
        job: the model, and how it is trained, nothing of it open.
        limit: bytes that a rank has.
        mismatches: which sizes of the model or the batch rule it out, or what a trainer refuses.
    """

    axes: Axes
    job: Job = field(default_factory=Job, repr=False)
    limit: float = field(default=0.0, repr=False)
    mismatches: tuple[str, ...] = field(default=(), repr=False)

    def __getattr__(self, name: str) -> int:
        if name not in Axes._fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        size: int = getattr(self.axes, name)
        return size

    @property
    def fits(self) -> bool:
        """Whether nothing rules it out."""
        return not self.reasons

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis; dp_replicate is a part of dp."""
        return self.axes._asdict()

    @property
    def words(self) -> str:
        """The sizes above 1, as a spec."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "dp=1"

    @property
    def policies(self) -> str:
        """What was searched, in words."""
        job = self.job
        return f"micro-batch {job.micro_batch}, stage {job.stage}, checkpointing {job.checkpointing}"

    @property
    def call(self) -> str:
        """The call that makes the mesh, to copy."""
        axes = self.axes
        data = f"dp={axes.dp}"
        if axes.dp_replicate > 1:
            data = f"dp_replicate={axes.dp_replicate}, dp_shard={axes.dp // axes.dp_replicate}"
        call = f"mesh = init_mesh(pp={axes.pp}, {data}, cp={axes.cp}, tp={axes.tp})"
        if self.job.model.experts:
            call += f'; mesh.add_view("expert", pp={axes.pp}, edp={axes.edp}, ep={axes.ep}, etp={axes.etp})'
        return call

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why it is ruled out: sizes and trainers, or else the memory."""
        if self.mismatches or self.memory is None or self.memory.total <= self.limit:
            return self.mismatches
        needed = self.memory.total / 1e9
        return (f"needs {needed:.1f} GB of {self.limit / 1e9:.1f} at stage {self.job.stage}",)

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
    world_size: int,
    job: Job | None = None,
    *,
    memory: float | None = None,
    margin: float = MARGIN,
    dp_replicate: int | None = None,
) -> tuple[Partition, ...]:
    """List every tp x cp x pp x dp that makes up a world, with experts every ep inside it, and for each the best policies.

    Where the job leaves them open, micro-batches of 1, 2 and 4, ZeRO's stages 1 to 3, each checkpointing, and several sizes of
    ``dp_replicate`` are tried; what fits and is fastest is kept, or what needs the least memory.

    Args:
        world_size: how many ranks there are.
        job: the model and how it is trained, that rule some of them out, and that the estimates are made from.
        memory: bytes of a GPU; by default those of the hardware.
        margin: the part of it that stays free.
        dp_replicate: how many copies of a sharded model dp has (HSDP); by default the best.

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
    problems = size_problems({"world_size": world_size, "dp_replicate": dp_replicate}) + job.problems()
    if world_size > _MOST:
        problems.append(f"world_size is {world_size}; partitions are listed for {_MOST} ranks at most")
    if not 0 <= margin < 1:
        problems.append(f"margin is {margin}; it is the part of the memory that stays free, such as 0.08")
    if problems:
        raise LayoutError(*problems)
    job = replace(job, hardware=job.hardware.filled(world_size))
    limit = (memory or job.hardware.memory) * (1 - margin)
    jobs = list(_jobs(job))
    return tuple(_best_of(axes, jobs, limit, dp_replicate) for axes in _all_axes(world_size, job))


def _jobs(job: Job) -> Iterator[Job]:
    """Yield the job with every combination of what it leaves open."""
    micro_batches = _MICRO_BATCHES if job.micro_batch is None else (job.micro_batch,)
    stages = _STAGES if job.stage is None else (job.stage,)
    policies = _CHECKPOINTING if job.checkpointing is None else (job.checkpointing,)
    if not job.model.total or job.missing:  # nothing to compare by
        yield job.settled
        return
    for micro_batch, policy, stage in product(micro_batches, policies, stages):
        yield replace(job, micro_batch=micro_batch, stage=stage, checkpointing=policy)


def _best_of(axes: Axes, jobs: list[Job], limit: float, dp_replicate: int | None) -> Partition:
    """Return a layout with the policies under which it is fastest, or else those that come nearest to fitting.

    Jobs with more checkpointing, and of these such with a higher stage, follow those that are faster and need more memory.
    """
    fitting, others = list[Partition](), list[Partition]()
    for copies in _replicas(axes, jobs[0]) if dp_replicate is None else [dp_replicate]:
        lowest = dict[int | None, int]()  # the lowest stage that fits, by micro-batch; -1 where none can
        for job in jobs:
            if (job.stage or 0) >= lowest.get(job.micro_batch, len(_STAGES) + 1):
                continue
            one = Partition(axes._replace(dp_replicate=copies), job, limit, _mismatches(axes, job, copies))
            if one.fits or one.mismatches:  # which no stage and no checkpointing changes
                lowest[job.micro_batch] = -1 if one.mismatches else job.stage or 0
            (fitting if one.fits else others).append(one)
    if fitting:
        return max(fitting, key=lambda one: one.tokens_per_second)
    return min(others, key=lambda one: float("inf") if one.memory is None else one.memory.total)


def _mismatches(axes: Axes, job: Job, copies: int) -> tuple[str, ...]:
    if axes.dp % copies or axes.edp % copies:
        return (f"dp={axes.dp} does not divide by dp_replicate={copies}",)
    key = ("mismatches", axes)
    if key not in job.known:
        job.known[key] = tuple(incompatibilities(job, axes))
    found: tuple[str, ...] = job.known[key]
    return found


def _replicas(axes: Axes, job: Job) -> list[int]:
    """Return 1, and the largest dp_replicate whose shards fill whole domains of fast links."""
    if job.missing or axes.world <= job.hardware.domain:
        return [1]
    whole = [
        copies
        for copies in _divisors(axes.dp)
        if copies > 1
        and axes.world // axes.pp // copies % job.hardware.domain == 0
        and axes.edp % copies == 0
    ]
    return [1, *whole[-_REPLICAS:]]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _all_axes(world_size: int, job: Job) -> Iterator[Axes]:
    for tp in _divisors(world_size):
        for cp in _divisors(world_size // tp):
            left = world_size // tp // cp
            for pp in _divisors(left):
                if not job.model.experts:
                    yield Axes(tp, cp, pp, left // pp)
                    continue
                for ep in _divisors(world_size // pp):
                    for etp in sorted({1, tp}):
                        if world_size // pp % (ep * etp) == 0:
                            yield Axes(tp, cp, pp, left // pp, ep=ep, etp=etp)


def incompatibilities(job: Job, axes: Axes) -> Iterator[str]:
    """Yield a sentence for each size of a job that does not go with an axis, and for what a trainer refuses."""
    model, tp, pp, cp, dp = job.model, axes.tp, axes.pp, axes.cp, axes.dp
    # Each context-parallel rank takes a chunk from either end, so that causal attention is balanced.
    widths = [
        ("heads", model.heads, "tp", tp), ("hidden features", model.hidden, "tp", tp),
        ("vocabulary entries", model.vocab, "tp", tp), ("experts", model.experts, "ep", axes.ep),
        ("features of an expert", model.expert_inner if model.experts else None, "etp", axes.etp),
        ("tokens of a sequence", job.seq, "2 x cp", 2 * cp if cp > 1 else 1),
    ]  # fmt: skip
    if not model.experts or model.dense_layers:
        widths.insert(2, ("features of the feed-forward network", model.ffn, "tp", tp))
    for what, count, axis, size in widths:
        if count is not None and count % size:
            yield f"{count} {what} do not divide by {axis}={size // 2 if axis == '2 x cp' else size}"
    kv_heads = model.kv_heads if model.kv_rank is None else None
    if kv_heads and kv_heads % tp and not SharedHeads(model.heads or kv_heads, kv_heads, tp).possible:
        yield f"{kv_heads} key and value heads can neither be divided nor shared by tp={tp}"
    stages = pp * job.stages_per_rank
    if model.layers is not None and model.layers < stages:
        yield f"{model.layers} layers cannot fill {stages} stages"
    if job.global_batch is None:
        return
    micro_batches = job.micro_batches(dp)
    if micro_batches is None:
        yield f"a global batch of {job.global_batch} does not divide by dp={dp} x micro-batches of {job.micro_batch}"
    elif job.is_torch and micro_batches < pp:
        yield f"{micro_batches} micro-batches are fewer than the {pp} stages, which torch's 1F1B refuses"
    elif job.stages_per_rank > 1 and pp > 1 and micro_batches % pp and not job.is_torch:
        yield f"{micro_batches} micro-batches do not divide by pp={pp}, as Megatron's interleaved schedule needs"


def best_partitions(partitions: Iterable[Partition], count: int) -> tuple[Partition, ...]:
    """Return the partitions that fit with the most tokens in a second, the best first.

    Raises:
        LayoutError: a count below 1, or sizes that the estimate needs are not known.

    Example:
        >>> from namedmesh.plan import Model
        >>> model = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
        >>> best, *_ = best_partitions(list_partitions(16, Job(model, seq=8192, global_batch=32)), 3)
        >>> best.words, best.policies
        ('cp=2,dp=8', 'micro-batch 1, stage 1, checkpointing none')
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


def find_partition(partitions: Sequence[Partition], sizes: Mapping[str, int]) -> Partition:
    """Return the partition with these sizes; other axes have size 1, dp is whatever is left. A LayoutError if there is none."""
    for one in partitions:
        wanted = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, **sizes}
        if all(one.sizes.get(axis) == size for axis, size in wanted.items() if size != -1):
            return one
    given = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise LayoutError(
        f"{given} is none of these partitions; name tp, cp, pp, dp, and ep and etp with experts"
    )


def explain(first: Partition, second: Partition) -> str:
    """Return which of two partitions is faster, and the seconds and the gigabytes that differ, the largest difference first.

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
    words = f"{first.words} ({first.policies}) is faster than {second.words} ({second.policies})"
    lines = [f"{words}: {fast:.3g} s a step against {slow:.3g} s, {1 - fast / slow:.1%} less"]
    lines += _differences(ours, theirs, fast, "s")
    if first.memory is not None and second.memory is not None:
        needed, other = first.memory.total / 1e9, second.memory.total / 1e9
        lines.append(f"it needs {needed:.3g} GB a GPU against {other:.3g} GB")
        ours, theirs = (
            {part: size / 1e9 for part, size in vars(one.memory).items()} for one in (first, second)
        )
        lines += _differences(ours, theirs, needed, "GB")
    lines += [f"{one.words} is ruled out: {'; '.join(one.reasons)}" for one in (first, second) if one.reasons]
    return "\n".join(lines)


def _differences(ours: dict[str, float], theirs: dict[str, float], whole: float, unit: str) -> list[str]:
    pairs = {part: (ours.get(part, 0.0), theirs.get(part, 0.0)) for part in (*ours, *theirs)}
    largest = sorted(pairs, key=lambda part: -abs(pairs[part][0] - pairs[part][1]))
    lines = []
    for part in largest:
        own, other = pairs[part]
        if abs(own - other) >= _LEAST * whole:
            lines.append(f"  {part}: {own:.3g} {unit} against {other:.3g} {unit}")
    return lines
