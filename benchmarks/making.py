"""Making groups, in turns: how long each contestant takes on every rank, and what it holds afterwards.

At forked gloo ranks a round takes from the moment that the first rank starts until the last one is done; with
the fake backend, where one process stands for one rank and nothing is sent or waited for, it is the processor's
time of the call. All contestants make and destroy their groups in the same processes, in turns.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import paired
import torch.distributed as dist
from ranks import fake_world, run_ranks
from torch.distributed import distributed_c10d as c10d

from namedmesh import groups, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    # Makes groups of some description; what it returns destroys them.
    Maker = Callable[[Any], Callable[[], None]]


class Turn(NamedTuple):
    """What one rank saw of one contestant's turn."""

    start: float
    end: float
    processor: float  # seconds between the two that this process was at work
    calls: int  # that create a group: of new_group, split_group, or ours for members only
    held: int  # communicators that the rank holds for it, beside the default group


def take_turns(makers: Mapping[str, Maker], what: Any, rounds: int) -> dict[str, list[Turn]]:
    """Return one rank's view of all rounds; the first round of each contestant warms up and is thrown away."""
    seen: dict[str, list[Turn]] = {name: [] for name in makers}
    for order in [list(makers), *paired.turns(list(makers), rounds)]:
        for name in order:
            seen[name].append(_turn(makers[name], what))
    return {name: turns[1:] for name, turns in seen.items()}


def on_rank(makers: Mapping[str, Maker], what: Any, rounds: int) -> dict[str, list[Turn]]:
    """Return what a forked rank does: a default group as most jobs make it, then all rounds."""
    launch.init("cpu")
    return take_turns(makers, what, rounds)


def _turn(make: Maker, what: Any) -> Turn:
    gc.collect()
    before = _held()
    with _counted() as calls:
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        close = make(what)
        end, processor = time.perf_counter(), time.process_time() - worked
    turn = Turn(start, end, processor, len(calls), _held() - before)
    dist.barrier()  # nobody's cleaning up disturbs a rank that is still at work
    close()
    return turn


def _held() -> int:
    return len(c10d._world.pg_map)  # noqa: SLF001  torch does not count them publicly


@contextmanager
def _counted() -> Iterator[list[str]]:
    """Return this rank's calls that create a group; every public spelling of torch's ends in one of the first two."""
    calls: list[str] = []

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return counted

    places = ((c10d, "_new_group_with_tag"), (c10d, "split_group"), (groups, "new_group_among_members"))
    originals = [(module, name, getattr(module, name)) for module, name in places]
    for module, name, function in originals:
        setattr(module, name, counting(function))
    try:
        yield calls
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


def on_gloo(
    makers: Mapping[str, Maker], what: Any, world_size: int, rounds: int, forks: int
) -> tuple[dict[str, list[float]], dict[str, Turn]]:
    """Return seconds of each round, and one rank's last turn for the counts."""
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    last: dict[str, Turn] = {}
    for _ in range(forks):
        ranks = run_ranks(world_size, on_rank, makers, what, rounds, timeout=900, init=False)
        for name in makers:
            for turns in zip(*(seen[name] for seen in ranks), strict=True):
                # The clock is one for all processes of a machine.
                seconds[name].append(max(turn.end for turn in turns) - min(turn.start for turn in turns))
            last[name] = ranks[0][name][-1]
    return seconds, last


def on_fake(
    makers: Mapping[str, Maker], what: Any, world_size: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Turn]]:
    """Return the same for one process of a world in which nothing is sent."""
    with fake_world(world_size):
        seen = take_turns(makers, what, rounds)
    seconds = {name: [turn.processor for turn in turns] for name, turns in seen.items()}
    return seconds, {name: turns[-1] for name, turns in seen.items()}


def show(
    title: object, seconds: Mapping[str, list[float]], last: Mapping[str, Turn], width: int = 18
) -> None:
    """Print one table: the first contestant is ours, and is compared with the second."""
    mine, theirs = seconds.values()
    widths = [width, 10, 12, 8]
    print(f"\n{title}; medians of {len(mine)} rounds")
    print(paired.row(["", "ms", "group calls", "held"], widths))
    for name, measured in seconds.items():
        counts = last[name]
        print(paired.row([name, statistics.median(measured) * 1e3, counts.calls, counts.held], widths))
    held = [counts.held for counts in last.values()]
    print(paired.row(["ratio", paired.ratio(mine, theirs), "", held[0] / held[1]], widths))


def show_sizes(title: str, measured: Mapping[int, tuple[list[float], Turn]]) -> None:
    """Print one table of one contestant: a row for each size of the world."""
    widths = [18, 10, 12, 8]
    print(f"\n{title}")
    print(paired.row(["ranks", "ms", "group calls", "held"], widths))
    for world_size, (seconds, last) in measured.items():
        median = statistics.median(seconds) * 1e3
        print(paired.row([f"{world_size:,}", median, last.calls, last.held], widths))
