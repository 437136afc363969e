"""Why one partition is faster than another, and what those that do not fit lack."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from namedmesh.errors import LayoutError
from namedmesh.plan.memory import Memory, estimate_memory
from namedmesh.plan.partitions import AXES, Partition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.plan.job import Job
    from namedmesh.plan.step import Step

_LARGEST = 4  # how many differences are named
_LEAST = 0.005  # and from which part of the whole on
MEMORY_PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "loss", "backward", "merged")


def find_partition(partitions: Sequence[Partition], sizes: Mapping[str, int]) -> Partition:
    """Return the partition with these sizes; other axes have size 1, and dp is whatever is left.

    Raises:
        LayoutError: there is none.
    """
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
    faster, slower = _step(first), _step(second)
    if faster.total > slower.total:
        first, second, faster, slower = second, first, slower, faster
    both = f"{faster.total:.3g} s a step against {slower.total:.3g} s, {1 - faster.total / slower.total:.1%} less"
    lines = [f"{first.words} is faster than {second.words}: {both}"]
    lines += _differences(faster.seconds, slower.seconds, faster.total, "s")
    if first.memory is not None and second.memory is not None:
        totals = [memory.total / 1e9 for memory in (first.memory, second.memory)]
        lines.append(f"it needs {totals[0]:.3g} GB a GPU against {totals[1]:.3g} GB")
        lines += _differences(_gigabytes(first.memory), _gigabytes(second.memory), totals[0], "GB")
    lines += [f"{one.words} is ruled out: {'; '.join(one.reasons)}" for one in (first, second) if one.reasons]
    return "\n".join(lines)


def _step(partition: Partition) -> Step:
    if partition.step is not None:
        return partition.step
    missing = partition.job.missing
    why = f"the seconds of a step need {', '.join(missing)}" if missing else "; ".join(partition.reasons)
    raise LayoutError(f"{partition.words} has no step to explain: {why}")


def _gigabytes(memory: Memory) -> dict[str, float]:
    return {part: getattr(memory, part) / 1e9 for part in MEMORY_PARTS}


def _differences(
    ours: Mapping[str, float], theirs: Mapping[str, float], whole: float, unit: str
) -> list[str]:
    """Return a line for each of the largest differences."""
    parts = dict.fromkeys((*ours, *theirs))
    gaps = {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in parts}
    large = [part for part in parts if abs(gaps[part]) >= _LEAST * whole]
    largest = sorted(large, key=lambda part: -abs(gaps[part]))[:_LARGEST]
    return [
        f"  {part}: {ours.get(part, 0.0):.3g} {unit} against {theirs.get(part, 0.0):.3g} {unit}"
        for part in largest
    ]


def remedies(partition: Partition) -> list[str]:
    """Return the changes of a job, one or else two, under which a partition needs no more memory than there is."""
    job, limit = partition.job, partition.limit
    if limit is None or partition.memory is None:
        return []
    found = []
    for words, fields in _changes(job):
        changed = replace(job, **fields)
        if changed == job or (job.global_batch is not None and changed.micro_batches(partition.dp) is None):
            continue
        if estimate_memory(changed, partition.sizes).total <= limit:
            found.append(words)
    single = [words for words in found if words.count("--") == 1]
    return single or found


def _changes(job: Job) -> list[tuple[str, dict[str, Any]]]:
    changes: list[tuple[str, dict[str, Any]]] = []
    changes += [(f"--stage {stage}", {"stage": stage}) for stage in range(job.stage + 1, 4)]
    for policy in ("selective", "op", "full"):
        changes.append((f"--checkpointing {policy}", {"checkpointing": policy, "recompute": ()}))
    changes += [
        ("--micro-batch 1", {"micro_batch": 1}),
        ("--sequence-parallel", {"sequence_parallel": True}),
        ("--optimizer-bytes 8", {"optimizer_bytes": 8}),
    ]
    if job.is_torch:
        both = {"checkpointing": "full", "recompute": (), "fused_loss": True}
        changes += [("--fused-loss", {"fused_loss": True}), ("--checkpointing full --fused-loss", both)]
    return changes


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
