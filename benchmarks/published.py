"""What the planner predicts for published runs: memory, activations, tokens a second, and the rank of the layout.

    python benchmarks/published.py [--only TEXT]

The rank is the place of the published layout by tokens a second among all that fit the hardware with the same policies
and the same global batch. Where the planner takes it not to fit, it is the place among all that need no more memory, in
brackets, with the reason below. The efficiency of the hardware stands in its file: src/namedmesh/plan/gpus.
"""

from __future__ import annotations

import argparse
from math import prod
from statistics import median
from typing import NamedTuple

from published_runs import RUNS, Run

from namedmesh.plan import Job, Memory, best_partitions, estimate_memory, estimate_step, list_partitions
from namedmesh.plan.job import axes_of, shares
from namedmesh.plan.memory import memory_of_share
from namedmesh.plan.why import find_partition

MEMORY_GOAL, SPEED_GOAL, RANK_GOAL = 0.15, 0.25, 5


class Result(NamedTuple):
    """A run's predictions: errors are of the published figure, None where none is published."""

    memory: float | None
    activations: float | None
    tokens: float | None
    rank: str
    reason: str


def job_of(run: Run) -> Job:
    """Return the job of a run."""
    return Job(run.model, run.hardware, **run.job)


def first_rank(run: Run) -> Memory:
    """Return the memory of the first pipeline rank, of which Korthikanti et al. give the activations."""
    job, axes = job_of(run), axes_of(run.sizes)
    return memory_of_share(job, axes, shares(job, axes.pp)[0], job.micro_batches(axes.dp))


def tokens_per_gpu(run: Run) -> float:
    """Return the tokens a second and GPU."""
    job, ranks = job_of(run), prod(run.sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    return (job.global_batch or 0) * (job.seq or 0) / estimate_step(job, run.sizes).total / ranks


def place(run: Run) -> tuple[str, str]:
    """Return the place of the published layout among all that fit, and why it is ruled out if it is."""
    ranks = prod(run.sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    published = find_partition(list_partitions(ranks, job_of(run)), run.sizes)
    limit = None
    if published.reasons and published.memory is not None:
        limit = max(run.hardware.memory, published.memory.total)
    partitions = list_partitions(ranks, job_of(run), memory=limit)
    fitting = best_partitions(partitions, len(partitions))
    where = [one.sizes for one in fitting].index(published.sizes) + 1
    text = f"{where}/{len(fitting)}"
    return (text, "") if limit is None else (f"({text})", "; ".join(published.reasons))


def compare(run: Run) -> Result:
    """Compare one run with what is predicted for it."""
    memory = activations = tokens = None
    rank, reason = "", ""
    if run.memory is not None:
        memory = estimate_memory(job_of(run), run.sizes).total / 2**30 / run.memory - 1
    if run.activations is not None:
        activations = first_rank(run).activations / run.activations - 1
    if run.tokens is not None:
        tokens = tokens_per_gpu(run) / run.tokens - 1
        rank, reason = place(run)
    return Result(memory, activations, tokens, rank, reason)


def _row(run: Run, result: Result) -> str:
    memory, speed = "", ""
    if run.memory is not None and result.memory is not None:
        memory = f"{run.memory * (1 + result.memory):6.1f} {run.memory:6.1f} {result.memory:+5.0%}"
    if run.activations is not None and result.activations is not None:
        gib = run.activations / 2**30
        memory = f"{gib * (1 + result.activations):6.1f} {gib:6.1f} {result.activations:+5.0%} (activations)"
    if run.tokens is not None and result.tokens is not None:
        speed = f"{run.tokens * (1 + result.tokens):8.1f} {run.tokens:8.1f} {result.tokens:+5.0%}"
    return f"{run.name:42} {memory:34} {speed:24} {result.rank:>9}"


def main() -> None:
    """Print the table, and how many rows are within the goals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="runs whose name or source has this text")
    only = parser.parse_args().only.lower()
    runs = [run for run in RUNS if only in f"{run.name} {run.source}".lower()]
    results = [compare(run) for run in runs]
    print(f"{'predicted, published, error':42} {'GiB':34} {'tokens/s a GPU':24} {'rank':>9}")
    source = ""
    for run, result in zip(runs, results, strict=True):
        if run.source != source:
            source = run.source
            print(f"\n{source}")
        print(_row(run, result))
        for note in (run.assumed, result.reason and f"the planner: {result.reason}"):
            if note:
                print(f"    {note}")
    for title, afterwards in (
        ("runs that the model was made with", False),
        ("runs that it was tried on afterwards", True),
    ):
        chosen = [result for run, result in zip(runs, results, strict=True) if run.afterwards is afterwards]
        if chosen:
            print(f"\n{title}")
            _summaries(chosen)


def _summaries(results: list[Result]) -> None:
    _summary("memory", [result.memory for result in results], MEMORY_GOAL)
    _summary("activations", [result.activations for result in results], MEMORY_GOAL)
    _summary("tokens a second", [result.tokens for result in results], SPEED_GOAL)
    ranked = [result.rank for result in results if result.rank]
    best = [rank for rank in ranked if "(" not in rank and int(rank.partition("/")[0]) <= RANK_GOAL]
    print(f"  published layout among the best {RANK_GOAL} that fit: {len(best)} of {len(ranked)}")


def _summary(what: str, errors: list[float | None], goal: float) -> None:
    known = [error for error in errors if error is not None]
    if known:
        within = sum(abs(error) <= goal for error in known)
        print(
            f"  {what}: {within} of {len(known)} within {goal:.0%}, from {min(known):+.0%} to {max(known):+.0%}, "
            f"median of the size {median(map(abs, known)):.0%}"
        )


if __name__ == "__main__":
    main()
