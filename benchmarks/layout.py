"""Who is in a group with whom, in a world of 1,048,576 ranks: ours against Megatron's rank generator.

    python benchmarks/layout.py [--rounds N]

Two questions. All groups of six kinds: both answer in the same run, in turns, and must give the same groups;
needs megatron-core (extra "oracles"). And the one group that a rank is in: asked of a world of 8 and of one of
1,048,576, where it must cost the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
import warnings
from functools import partial
from typing import TYPE_CHECKING

import paired

from namedmesh import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORLD = 1_048_576
TP, CP, PP = 8, 2, 8
ORDER = "tp-cp-ep-dp-pp"  # Megatron's default; the first axis is the fastest
KINDS = ("tp", "pp", "cp", "dp", "dp-cp", "tp-pp")


def all_groups(layout: Layout) -> list[tuple[tuple[int, ...], ...]]:
    """Return our groups of every kind."""
    return [layout.groups(*kind.split("-")) for kind in KINDS]


def their_groups() -> Callable[[str], Sequence[Sequence[int]]]:
    """Return Megatron's function from a kind to its groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages that are not here
        from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=TP, ep=1, dp=WORLD // (TP * CP * PP), pp=PP, cp=CP, order=ORDER)
    get_ranks: Callable[[str], Sequence[Sequence[int]]] = generator.get_ranks
    return get_ranks


def enumerate_all(rounds: int) -> None:
    """List every group of six kinds, by both."""
    layout = Layout.from_order(ORDER, tp=TP, cp=CP, pp=PP, ep=1, world_size=WORLD)
    theirs = their_groups()
    for kind in KINDS:  # the same work, or the figures mean nothing
        same = sorted(tuple(group) for group in theirs(kind)) == sorted(layout.groups(*kind.split("-")))
        assert same, f"the groups over {kind} differ"
    seconds = paired.interleaved(
        {
            "ours": lambda: paired.clocked(lambda: all_groups(layout)),
            "megatron-core": lambda: paired.clocked(lambda: [theirs(kind) for kind in KINDS]),
        },
        rounds,
    )
    print(f"all groups over {', '.join(KINDS)} of {WORLD:,} ranks; medians of {rounds} rounds")
    for name, measured in seconds.items():
        print(paired.row([name, f"{statistics.median(measured):.3f} s"], [16, 8]))
    print(
        paired.row(["ratio", f"1/{1 / paired.ratio(seconds['ours'], seconds['megatron-core']):.1f}"], [16, 8])
    )


def one_group(rounds: int) -> None:
    """Return the group of one rank, in a small world and in a large one, with groups of the same size.

    Python keeps ints up to 256 ready and makes larger ones anew: a small world whose ranks are as high as
    those of the large one shows what of a difference is due to that.
    """
    worlds = {
        "8 ranks": Layout(pp=2, dp=2, tp=2),
        "8 high ranks": Layout(pp=2, dp=2, tp=2, rank_offset=WORLD - 8),
        f"{WORLD:,} ranks": Layout(pp=2, dp=WORLD // 4, tp=2),
    }
    number = 10_000

    def asked(layout: Layout) -> float:
        rank = layout.ranks[-1]
        return (
            timeit.timeit(lambda: layout.group(rank, "pp", "tp"), timer=time.process_time, number=number)
            / number
        )

    contestants = {name: partial(asked, layout) for name, layout in worlds.items()}
    seconds = paired.interleaved(contestants, rounds)
    print(f"layout.group(rank, 'pp', 'tp'), 4 ranks; medians of {rounds} rounds of {number:,}")
    print(paired.row(["world", "us", "ratio"], [16, 8, 8]))
    for name, measured in seconds.items():
        relative = paired.ratio(measured, seconds["8 ranks"])
        print(paired.row([name, statistics.median(measured) * 1e6, relative], [16, 8, 8]))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Rank arithmetic in a world of a million ranks.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the enumeration (20 s each)")
    rounds = parser.parse_args().rounds
    print(paired.machine())
    one_group(rounds * 5)
    try:
        enumerate_all(rounds)
    except ImportError:
        print("the enumeration is compared with megatron-core, which is not installed (extra 'oracles')")


if __name__ == "__main__":
    main()
