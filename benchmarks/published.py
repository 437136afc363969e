"""What the planner predicts for published runs: memory, tokens a second, and the rank of the layout.

    python benchmarks/published.py [--only TEXT]

The rank is the place of the published layout by tokens a second among all that fit the hardware with the same policies
and the same global batch. Where the planner takes it not to fit, it is the place among all that need no more memory, in
brackets, with the reason below. The efficiency of the hardware stands in its file: src/namedmesh/plan/cards.json.
"""

from __future__ import annotations

import argparse
from math import prod
from statistics import median
from typing import NamedTuple

from published_runs import GROUPS, RUNS, Run

from namedmesh.plan import (
    Job,
    best_partitions,
    estimate_memory,
    estimate_step,
    find_partition,
    list_partitions,
)

MEMORY_GOAL, SPEED_GOAL, RANK_GOAL = 0.15, 0.25, 5


class Result(NamedTuple):
    """A run's predictions: errors are of the published figure, None where none is published."""

    memory: float | None
    tokens: float | None
    rank: str
    reason: str


def job_of(run: Run) -> Job:
    """Return the job of a run."""
    return Job(run.model, run.hardware, **run.job).settled  # nothing is left to be searched


def ranks_of(run: Run) -> int:
    """Return how many GPUs it ran on."""
    return prod(run.sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))


def tokens_per_gpu(run: Run) -> float:
    """Return the tokens a second and GPU."""
    job = job_of(run)
    return (job.global_batch or 0) * (job.seq or 0) / estimate_step(job, run.sizes).total / ranks_of(run)


def place(run: Run) -> tuple[str, str]:
    """Return the place of the published layout among all that fit, and why it is ruled out if it is."""
    ranks = ranks_of(run)
    published = find_partition(list_partitions(ranks, job_of(run), margin=0, dp_replicate=1), run.sizes)
    limit = None
    if published.mismatches:
        return "none", "; ".join(published.mismatches)
    if published.reasons and published.memory is not None:
        limit = max(run.hardware.memory, published.memory.total)
    partitions = list_partitions(ranks, job_of(run), memory=limit, margin=0, dp_replicate=1)
    fitting = best_partitions(partitions, len(partitions))
    where = [one.sizes for one in fitting].index(published.sizes) + 1
    text = f"{where}/{len(fitting)}"
    return (text, "") if limit is None else (f"({text})", "; ".join(published.reasons))


def compare(run: Run) -> Result:
    """Compare one run with what is predicted for it."""
    memory = tokens = None
    rank, reason = "", ""
    if run.memory is not None:
        memory = estimate_memory(job_of(run), run.sizes).total / 2**30 / run.memory - 1
    if run.tokens is not None:
        tokens = tokens_per_gpu(run) / run.tokens - 1
        rank, reason = place(run)
    return Result(memory, tokens, rank, reason)


def within_the_best(result: Result) -> bool:
    """Return whether the published layout is among the best that fit."""
    place = result.rank.partition("/")[0]
    return place.isdigit() and int(place) <= RANK_GOAL


def _row(run: Run, result: Result) -> str:
    cells = [run.name]
    pairs = [(run.memory, result.memory), (run.tokens, result.tokens)]
    for published, error in pairs:
        if published is None or error is None:
            cells.append("")
            continue
        digits = 0 if published >= 1000 else 1  # noqa: PLR2004  four digits say enough
        cells.append(f"{published * (1 + error):,.{digits}f} for {published:,.{digits}f}: {error:+.0%}")
    return f"| {' | '.join([*cells, result.rank])} |"


def main() -> None:
    """Print the table, what differs row by row, and how many rows are within the goals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="runs whose name or source has this text")
    only = parser.parse_args().only.lower()
    rows = [(run, compare(run)) for run in RUNS if only in f"{run.name} {run.source}".lower()]
    print("| predicted for published: error | GiB | tokens/s a GPU | place |\n|---|---|---|---|")
    source = ""
    notes: dict[str, list[str]] = {}
    for run, result in rows:
        if run.source != source:
            source = run.source
            print(f"| **{source}** | | | |")
        print(_row(run, result))
        for note in (run.assumed, result.reason):
            if note:
                notes.setdefault(note, []).append(run.name)
    print()
    for note, names in notes.items():
        print(f"{', '.join(names)}: {note}")
    for group in GROUPS:
        chosen = [result for run, result in rows if run.group == group]
        if chosen:
            print(f"\n{group.capitalize()}")
            _summaries(chosen)


def _summaries(results: list[Result]) -> None:
    _summary("memory", [result.memory for result in results], MEMORY_GOAL)
    _summary("tokens a second", [result.tokens for result in results], SPEED_GOAL)
    ranked = [within_the_best(result) for result in results if result.rank]
    print(f"  published layout among the best {RANK_GOAL} that fit: {sum(ranked)} of {len(ranked)}")


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
