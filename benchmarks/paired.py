"""Paired measurements: contestants take turns in one run, and are compared within a turn.

On a machine that others use too, two runs differ by more than two contestants do. In one round every
contestant has a turn, in an order that changes from round to round, so that all of them meet the same
disturbances; the ratio of two of them is the median, over the rounds, of the quotient within a round.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
# What serves tests and examples serves the benchmarks too.
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples")]
from ranks import run_ranks  # noqa: E402


def interleaved(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Let each contestant measure itself in each round, in an order that rotates and reverses; a first round is thrown away."""
    measured: dict[str, list[T]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(-1, rounds):
        shift = number % len(names)
        order = names[shift:] + names[:shift]
        for name in order[::-1] if number // len(names) % 2 else order:
            measured[name].append(contestants[name]())
    return {name: found[1:] for name, found in measured.items()}


def on_ranks(
    ranks: int,
    rounds: int,
    build: Callable[..., Mapping[str, Callable[[], object]]],
    *arguments: object,
    clock: Callable[[], float] = time.perf_counter,
    init: bool = True,
) -> dict[str, list[float]]:
    """Measure what takes turns on forked gloo ranks, and return the seconds of each contestant, round by round.

    ``build(*arguments)`` returns the contestants of a rank. Each is called after a barrier, and returns the loss of its
    step, which is compared first, or what takes away what it made, which is not timed. On the wall a turn lasts from the first
    rank's start to the last one's end; of the processor's time it is the mean of the ranks.
    """
    spans = run_ranks(ranks, _spans, rounds, build, arguments, clock, init=init, timeout=1800)
    return {name: _lasted([rank[name] for rank in spans], clock) for name in spans[0]}


def once(ranks: int, make: Callable[[], object]) -> float:
    """Return the seconds in which fresh ranks make something, such as their default group."""
    return _lasted(run_ranks(ranks, _first_span, make, init=False, timeout=1800), time.perf_counter)[0]


def _lasted(spans: Sequence[Sequence[tuple[float, float]]], clock: Callable[[], float]) -> list[float]:
    """Return the seconds of each round, from the starts and ends of each rank."""
    seconds = []
    for turn in zip(*spans, strict=True):
        if clock is time.perf_counter:  # one clock for all processes
            seconds.append(max(end for _, end in turn) - min(start for start, _ in turn))
        else:
            seconds.append(statistics.mean(end - start for start, end in turn))
    return seconds


def _first_span(make: Callable[[], object]) -> list[tuple[float, float]]:
    return [_span(make, time.perf_counter, [])]


def _spans(rounds: int, build: Any, arguments: Any, clock: Any) -> dict[str, list[tuple[float, float]]]:
    contestants = build(*arguments)
    losses: dict[str, list[Any]] = {name: [] for name in contestants}
    spans = interleaved(
        {name: partial(_span, step, clock, losses[name]) for name, step in contestants.items()}, rounds
    )
    for found in losses.values():  # the same work, or the figures mean nothing
        torch.testing.assert_close(found, next(iter(losses.values())), rtol=1e-3, atol=0)
    return spans


def _span(step: Callable[[], Any], clock: Callable[[], float], losses: list[Any]) -> tuple[float, float]:
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    start = clock()
    made = step()
    end = clock()
    dist.barrier()  # nobody's cleaning up disturbs a rank that is still at work
    if callable(made):
        made()
    else:
        losses.append(made)
    return start, end


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median, over the rounds, of our time divided by theirs.

    Example:
        >>> ratio([1.0, 2.0, 9.0], [2.0, 4.0, 3.0])
        0.5
    """
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def show(title: str, seconds: Mapping[str, Sequence[float]], unit: float = 1e-3) -> None:
    """Print the median of each contestant in a unit of seconds, and the ratio of the first one to it."""
    print(f"{title:44} {'median':>10} {'ratio to':>8}")
    ours = next(iter(seconds.values()))
    for name, measured in seconds.items():
        print(f"  {name:42} {statistics.median(measured) / unit:10,.2f} {ratio(ours, measured):8.2f}")


def machine() -> str:
    """Return what the figures were taken on, as far as it matters for ratios."""
    return f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
