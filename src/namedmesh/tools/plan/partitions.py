"""List the layouts of a world with their fastest policies, rank and explain them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import inf, isqrt
from typing import Any, NamedTuple

from namedmesh._errors import LayoutError
from namedmesh.layout.sizes import find_shared_heads
from namedmesh.tools.plan.memory import Memory, estimate_memory
from namedmesh.tools.plan.model import Axes, Job
from namedmesh.tools.plan.settings import list_settings
from namedmesh.tools.plan.step import estimate_step

MARGIN = 0.08
"""The fraction of memory that stays free by default, for CUDA, NCCL and other overhead."""

# The policies that a user would try by hand. A later stage, or later checkpointing, takes longer and
# needs less memory.
_MICRO_BATCHES = (1, 2, 4)
_STAGES = (1, 2, 3)
_CHECKPOINTING = ("none", "selective", "full")
# Numbers of replicas (HSDP) that are tried in addition to 1: the largest ones, whose shards are in
# fast links.
_TRIED_REPLICAS = 2
# The estimates of so many layouts take about a minute.
_MOST_LAYOUTS = 100_000
# A difference of less than this fraction of the step or of the memory is not explained.
_SMALLEST_DIFFERENCE = 0.005


class Partition(NamedTuple):
    """One layout of a world, and the policies with which it is trained.

    The size of an axis is an attribute, too, such as ``partition.tp``.

    Attributes:
        axes: the sizes of the axes.
        job: the job, with all policies decided.
        reasons: why the layout is ruled out: by sizes, by its trainer, or by memory; empty if it
            fits.
        memory: the memory of the fullest rank; None if a size is missing, or sizes rule the layout
            out.
        seconds: the seconds of a step, by part, if ``memory`` is known.
    """

    axes: Axes
    job: Job
    reasons: tuple[str, ...] = ()
    memory: Memory | None = None
    seconds: Mapping[str, float] = {}

    # The axes are a tuple of their own, which the estimates take; a reader writes partition.tp.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.axes, name)

    @property
    def fits(self) -> bool:
        """Whether the layout can be trained."""
        return not self.reasons

    @property
    def specification(self) -> str:
        """The sizes above 1, as a layout specification."""
        sizes = [f"{axis}={size}" for axis, size in self.axes._asdict().items() if size > 1]
        return ",".join(sizes) or "dp=1"

    @property
    def policies(self) -> str:
        """The policies as text: micro-batch, ZeRO stage, checkpointing."""
        job = self.job
        return f"micro-batch {job.micro_batch}, stage {job.stage}, checkpointing {job.checkpointing}"

    @property
    def call(self) -> str:
        """The call that creates the mesh."""
        axes = self.axes
        replicas = axes.dp_replicate
        data = f"dp_replicate={replicas}, dp_shard={axes.dp // replicas}" if replicas > 1 else f"dp={axes.dp}"
        # Every axis is written out, also of size 1, so that all axes exist under the usual names.
        call = f"mesh = init_mesh(pp={axes.pp}, {data}, cp={axes.cp}, tp={axes.tp})"
        if self.job.model.experts:
            call += f'; mesh.add_view("expert", pp={axes.pp}, edp={axes.edp}, ep={axes.ep}, etp={axes.etp})'
        return call

    @property
    def settings(self) -> list[str]:
        """The code or the flags for each policy: micro-batch, ZeRO stage, checkpointing."""
        return list_settings(self.job, self.axes)

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all ranks per second; 0 if the step is not estimated."""
        return self.job.global_batch * self.job.seq / sum(self.seconds.values()) if self.seconds else 0.0


def list_partitions(
    world_size: int, job: Job | None = None, *, margin: float = MARGIN, dp_replicate: int | None = None
) -> tuple[Partition, ...]:
    """List every tp x cp x pp x dp x ep of a world, each with its best policies.

    Policies that the job leaves open are searched: micro-batches of 1, 2 and 4, ZeRO stages 1 to 3,
    each checkpointing, and several numbers of replicas. The fastest policies that fit are kept; if
    none fit, those with the least memory.

    Args:
        world_size: the number of ranks.
        job: the model and how it is trained. If sizes are missing, nothing is estimated, and only
            sizes rule a layout out.
        margin: the fraction of the hardware's memory that stays free.
        dp_replicate: the number of replicas of the sharded model (HSDP); by default the best.

    Raises:
        LayoutError: for all wrong arguments, and all contradictions in the job.

    Example:
        >>> [partition.specification for partition in list_partitions(2)]
        ['dp=2', 'pp=2', 'cp=2', 'tp=2']
    """
    job = job or Job()
    # All mistakes are reported together, before the search, which takes seconds in a large world.
    problems = job.problems()
    if world_size < 1:
        problems.append(f"world_size is {world_size}; it is an int of at least 1")
    if not 0 <= margin < 1:
        problems.append(f"margin is {margin}; it is the part of the memory that stays free, such as 0.08")
    if problems:
        raise LayoutError(*problems)
    job = replace(job, hardware=job.hardware.fit_domain(world_size))
    searches = list(_list_searches(job))
    limit = job.hardware.memory * (1 - margin)
    layouts = list(islice(_iter_axes(world_size, job), _MOST_LAYOUTS + 1))
    if len(layouts) > _MOST_LAYOUTS:
        raise LayoutError(
            f"a world of {world_size} ranks has more than {_MOST_LAYOUTS} layouts; give a "
            "world_size with fewer divisors, such as a power of two"
        )
    return tuple(_find_best(axes, searches, limit, dp_replicate) for axes in layouts)


def _list_searches(job: Job) -> Iterator[list[Job]]:
    """Yield for each micro-batch the jobs with every combination of the open policies."""
    if job.missing:
        # Nothing can be estimated, so there is nothing by which policies could be compared.
        yield [job]
        return
    micro_batches = _MICRO_BATCHES if job.micro_batch is None else (job.micro_batch,)
    stages = _STAGES if job.stage is None else (job.stage,)
    checkpointing = _CHECKPOINTING if job.checkpointing is None else (job.checkpointing,)
    for micro_batch in micro_batches:
        search = []
        for recomputed, stage in product(checkpointing, stages):
            search.append(replace(job, micro_batch=micro_batch, checkpointing=recomputed, stage=stage))
        yield search


def _find_best(
    axes: Axes, searches: Sequence[Sequence[Job]], limit: float, dp_replicate: int | None
) -> Partition:
    """Return a layout with its fastest policies, or those with the least memory if none fit.

    Args:
        axes: the sizes of the axes.
        searches: for each micro-batch, the jobs to compare.
        limit: the bytes of a GPU that may be used.
        dp_replicate: the number of replicas; None searches it.
    """
    replica_counts = [dp_replicate] if dp_replicate else _list_replica_counts(axes, searches[0][0])
    candidates: list[Partition] = []
    for replicas in replica_counts:
        replicated = axes._replace(dp_replicate=replicas)
        for jobs in searches:
            candidates += _estimate_candidates(replicated, jobs, limit)
    best = max(candidates, key=make_sort_key)
    if best.memory is None or best.seconds:
        return best
    # The step of a layout that does not fit was not needed to compare it, but is reported.
    return best._replace(seconds=estimate_step(best.job, best.axes))


def _estimate_candidates(axes: Axes, jobs: Sequence[Job], limit: float) -> list[Partition]:
    """Estimate one layout with each policy, except those that cannot be the fastest."""
    reasons = (*_find_size_problems(jobs[0], axes), *_find_batch_problems(jobs[0], axes))
    if reasons or jobs[0].missing:
        return [Partition(axes, jobs[0], reasons)]
    candidates = []
    lowest_fitting_stage: float = inf
    for job in jobs:
        stage = job.stage or 0
        # Jobs come in order of checkpointing. If a stage fits with less of it, the same stage with
        # more is slower, and so is a higher stage.
        if stage >= lowest_fitting_stage:
            continue
        memory = estimate_memory(job, axes)
        if memory.total <= limit:
            lowest_fitting_stage = stage
            candidates.append(Partition(axes, job, (), memory, estimate_step(job, axes)))
        else:
            reason = f"needs {memory.total / 1e9:.1f} GB of {limit / 1e9:.1f} at stage {job.stage}"
            candidates.append(Partition(axes, job, (reason,), memory))
    return candidates


def make_sort_key(partition: Partition) -> tuple[bool, float]:
    """Return a sort key, worst first: by whether partitions fit, then by speed or memory."""
    if partition.fits:
        return True, partition.tokens_per_second
    if partition.memory is None:
        return False, -inf
    return False, -partition.memory.total


def _list_replica_counts(axes: Axes, job: Job) -> list[int]:
    """Return 1, and the largest replica counts whose shards fill whole domains of fast links."""
    domain = job.hardware.domain
    if job.missing or axes.world <= domain:
        return [1]
    ranks_per_stage = axes.world // axes.pp
    # Experts are replicated, too. If the shards of a replica leave a domain, replicas save little.
    divide_dp = [replicas for replicas in _list_divisors(axes.dp)[1:] if axes.edp % replicas == 0]
    fill_domains = [replicas for replicas in divide_dp if ranks_per_stage // replicas % domain == 0]
    return [1, *fill_domains[-_TRIED_REPLICAS:]]


def _list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    divisors: set[int] = set()
    for divisor in range(1, isqrt(number) + 1):
        if number % divisor == 0:
            divisors.update((divisor, number // divisor))
    return sorted(divisors)


def _iter_axes(world_size: int, job: Job) -> Iterator[Axes]:
    """Yield the sizes of every layout of a world."""
    for tp in _list_divisors(world_size):
        for cp in _list_divisors(world_size // tp):
            pp_times_dp = world_size // tp // cp
            for pp in _list_divisors(pp_times_dp):
                dense = Axes(tp, cp, pp, pp_times_dp // pp)
                if job.model.experts:
                    yield from _iter_expert_axes(dense, world_size // pp)
                else:
                    yield dense


def _iter_expert_axes(dense: Axes, ranks_per_stage: int) -> Iterator[Axes]:
    """Yield a layout with every size of ep, with experts sharded over tp and not."""
    for ep in _list_divisors(ranks_per_stage):
        for etp in sorted({1, dense.tp}):
            if ranks_per_stage % (ep * etp) == 0:
                yield dense._replace(ep=ep, etp=etp)


def _find_size_problems(job: Job, axes: Axes) -> Iterator[str]:
    """Yield a message for each size of the model that does not fit an axis."""
    model = job.model
    ffn = model.ffn
    if model.experts and not model.dense_layers:  # then no layer has a dense feed-forward network
        ffn = 0
    for name, count, axis, size in (
        ("heads", model.heads, "tp", axes.tp),
        ("hidden features", model.hidden, "tp", axes.tp),
        ("features of the feed-forward network", ffn, "tp", axes.tp),
        ("vocabulary entries", model.vocab, "tp", axes.tp),
        ("experts", model.experts, "ep", axes.ep),
        ("features of an expert", model.expert_ffn or model.inner, "etp", axes.etp),
    ):
        if count % size:
            yield f"{count} {name} do not divide by {axis}={size}"
    # Each cp rank takes one chunk from the front and one from the back, so that causal attention is
    # balanced.
    if axes.cp > 1 and job.seq % (2 * axes.cp):
        yield f"{job.seq} tokens of a sequence do not divide by 2 x cp={axes.cp}"
    # Latent attention has no key and value heads of its own.
    kv_heads = 0 if model.kv_rank else model.kv_heads
    if kv_heads % axes.tp and not find_shared_heads(model.heads or kv_heads, kv_heads, axes.tp):
        yield f"{kv_heads} key and value heads can neither be divided nor shared by tp={axes.tp}"
    stages = axes.pp * job.stages_per_rank
    if 0 < model.layers < stages:
        yield f"{model.layers} layers cannot fill {stages} stages"
    if axes.dp % axes.dp_replicate or axes.edp % axes.dp_replicate:
        yield f"dp={axes.dp} does not divide by dp_replicate={axes.dp_replicate}"


def _find_batch_problems(job: Job, axes: Axes) -> Iterator[str]:
    """Yield a message if the trainer cannot split the global batch over the ranks."""
    micro_batches = job.micro_batches(axes.dp)  # 0 if the global batch is not known, or does not divide
    if job.global_batch and not micro_batches:
        batch = f"a global batch of {job.global_batch}"
        yield f"{batch} does not divide by dp={axes.dp} x micro-batches of {job.micro_batch}"
    elif job.is_torch and 0 < micro_batches < axes.pp:
        yield f"{micro_batches} micro-batches are fewer than the {axes.pp} stages, which torch's 1F1B rejects"
    elif job.stages_per_rank > 1 and micro_batches % axes.pp and not job.is_torch:
        needs = "as Megatron's interleaved schedule needs"
        yield f"{micro_batches} micro-batches do not divide by pp={axes.pp}, {needs}"


def best_partitions(partitions: Iterable[Partition], count: int) -> tuple[Partition, ...]:
    """Return the partitions that fit with the most tokens per second, the fastest first.

    Args:
        partitions: as :func:`list_partitions` returns them.
        count: the number of partitions.

    Raises:
        LayoutError: if sizes are missing without which a step cannot be estimated.
    """
    fitting = [partition for partition in partitions if partition.fits]
    if fitting and fitting[0].job.missing:
        raise LayoutError(f"a ranking needs {', '.join(fitting[0].job.missing)}; give them too")
    fitting.sort(key=lambda partition: -partition.tokens_per_second)
    return tuple(fitting[:count])


def find_partition(partitions: Sequence[Partition], sizes: Mapping[str, int]) -> Partition:
    """Return the partition with the given sizes.

    Args:
        partitions: as :func:`list_partitions` returns them.
        sizes: sizes by axis; without a size, tp, cp, pp and ep are 1, and the other axes may have
            any.

    Raises:
        LayoutError: if no partition has these sizes.
    """
    required = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, **sizes}
    # Several partitions may match, such as those with different etp; the list has the smallest etp
    # first.
    for partition in partitions:
        if required.items() <= partition.axes._asdict().items():
            return partition
    given = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise LayoutError(f"{given} is none of these partitions; name tp, cp, pp, dp, with experts ep and etp")


def explain(first: Partition, second: Partition) -> str:
    """Explain why one of two partitions is faster: the largest differences in time and memory.

    Args:
        first: a partition whose step is estimated.
        second: another partition, whose step is estimated.

    Raises:
        LayoutError: if the step of one of them is not estimated.
    """
    faster, slower = sorted((first, second), key=lambda partition: -partition.tokens_per_second)
    memory = _memory_in_gigabytes(faster)
    slower_memory = _memory_in_gigabytes(slower)
    step = sum(faster.seconds.values())
    slower_step = sum(slower.seconds.values())
    comparison = f"{faster.specification} ({faster.policies}) is faster than {slower.specification} ({slower.policies})"
    saved = 1 - step / slower_step
    lines = [f"{comparison}: {step:.3g} s a step against {slower_step:.3g} s, {saved:.1%} less"]
    lines += _list_differences(faster.seconds, slower.seconds, "s")
    totals = (sum(memory.values()), sum(slower_memory.values()))
    lines.append(f"it needs {totals[0]:.3g} GB a GPU against {totals[1]:.3g} GB")
    lines += _list_differences(memory, slower_memory, "GB")
    lines += [
        f"{found.specification} is ruled out: {found.reasons[0]}"
        for found in (faster, slower)
        if found.reasons
    ]
    return "\n".join(lines)


def _memory_in_gigabytes(partition: Partition) -> dict[str, float]:
    """Return the gigabytes of each part of the memory; LayoutError if it is not estimated."""
    if partition.memory is None:
        missing = f"the seconds of a step need {', '.join(partition.job.missing)}"
        reason = "; ".join(partition.reasons) or missing
        raise LayoutError(f"{partition.specification} has no step to explain: {reason}")
    return {part: size / 1e9 for part, size in partition.memory._asdict().items()}


def _list_differences(faster: Mapping[str, float], slower: Mapping[str, float], unit: str) -> list[str]:
    """Return a line for each part that differs, the largest difference first."""
    smallest = _SMALLEST_DIFFERENCE * sum(faster.values())
    differences = []
    for part in {**faster, **slower}:
        # A part that takes no time is not listed in the breakdown.
        sizes = (faster.get(part, 0.0), slower.get(part, 0.0))
        difference = abs(sizes[0] - sizes[1])
        if difference >= smallest:
            differences.append(
                (-difference, f"  {part}: {sizes[0]:.3g} {unit} against {sizes[1]:.3g} {unit}")
            )
    return [line for _, line in sorted(differences)]
