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
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["clocked", "interleaved", "machine", "ratio", "row", "turns"]

# The forked gloo ranks and the fake worlds of the tests serve the benchmarks too: `from ranks import ...`.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def turns(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """Yield the order of the contestants in each round: rotated, and every second time round reversed.

    Example:
        >>> list(turns(["a", "b"], 4))
        [['a', 'b'], ['b', 'a'], ['b', 'a'], ['a', 'b']]
    """
    names = list(names)
    for number in range(rounds):
        shift = number % len(names)
        order = names[shift:] + names[:shift]
        yield order[::-1] if number // len(names) % 2 else order


def interleaved(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Let every contestant take its turn in each round.

    Args:
        contestants: by name, what measures itself and returns the seconds that it took.
        rounds: how many rounds are kept; one more comes first and is thrown away.

    Returns:
        The seconds of each contestant, round by round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in [list(contestants), *turns(list(contestants), rounds)]:
        for name in order:
            seconds[name].append(contestants[name]())
    return {name: measured[1:] for name, measured in seconds.items()}


def clocked(work: Callable[[], object]) -> float:
    """Return the processor's seconds for some work in this process that waits for nothing.

    Unlike the time on the wall, they leave out what other processes take. Garbage of others is collected
    before, the result is freed after.
    """
    gc.collect()
    start = time.process_time()
    result = work()
    seconds = time.process_time() - start
    del result
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median, over the rounds, of our time divided by theirs.

    Example:
        >>> ratio([1.0, 2.0, 9.0], [2.0, 4.0, 3.0])
        0.5
    """
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def row(cells: Sequence[object], widths: Sequence[int]) -> str:
    """Return a line of a table: the first cell to the left, the others to the right.

    Example:
        >>> row(["tp", 1.5], [4, 5])
        'tp     1.50'
    """
    texts = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
    return " ".join(
        text.rjust(width) if i else text.ljust(width)
        for i, (text, width) in enumerate(zip(texts, widths, strict=True))
    )


def machine() -> str:
    """Return what the figures were taken on, as far as it matters for ratios."""
    import torch

    python = platform.python_version()
    return f"torch {torch.__version__}, Python {python}, {os.cpu_count()} cores"
