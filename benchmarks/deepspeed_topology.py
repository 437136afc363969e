"""DeepSpeed's topology of 4,096 ranks: ours against its own.

    python benchmarks/deepspeed_topology.py [--rounds N]

What a job asks for once on every rank: the topology is made, some ranks are placed, and the groups of every axis are
listed. Both answer in the same run, in turns, and must give the same answers; needs deepspeed (extra "oracles").
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import paired

from namedmesh.compat.deepspeed import PipeModelDataParallelTopology

if TYPE_CHECKING:
    from collections.abc import Callable

PP, MP, DP = 8, 8, 64
WORLD = PP * MP * DP
PLACED = range(0, WORLD, 255)  # 17 ranks, the first and the last among them
AXES = ("pipe", "data", "model")


def their_topology() -> Callable[..., Any]:
    """Return DeepSpeed's class."""
    os.environ.setdefault("DS_BUILD_OPS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of accelerators that are not here
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology as Theirs

    made: Callable[..., Any] = Theirs
    return made


def parts(topology: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Return what is measured, one by one and together."""
    ready = topology(num_pp=PP, num_mp=MP, num_dp=DP)

    def places(asked: Any) -> list[tuple[int, ...]]:
        return [tuple(asked.get_coord(rank)) for rank in PLACED]

    def lists(asked: Any) -> list[list[list[int]]]:
        return [asked.get_axis_comm_lists(axis) for axis in AXES]

    def everything() -> list[Any]:
        fresh = topology(num_pp=PP, num_mp=MP, num_dp=DP)
        return [places(fresh), lists(fresh)]

    return {
        "construct": lambda: topology(num_pp=PP, num_mp=MP, num_dp=DP),
        f"get_coord of {len(PLACED)} ranks": lambda: places(ready),
        "get_axis_comm_lists of 3 axes": lambda: lists(ready),
        "all of it": everything,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="DeepSpeed's topology of 4,096 ranks, ours and its own.")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that are kept")
    rounds = parser.parse_args().rounds
    print(paired.machine())
    try:
        theirs = parts(their_topology())
    except ImportError:
        sys.exit("the topology is compared with deepspeed, which is not installed (extra 'oracles')")
    ours = parts(PipeModelDataParallelTopology)
    assert ours["all of it"]() == theirs["all of it"](), "the answers differ"
    print(f"pipe={PP} x data={DP} x model={MP}, {WORLD:,} ranks; medians of {rounds} rounds, ms")
    print(paired.row(["", "ours", "deepspeed", "ratio"], [32, 10, 10, 10]))
    for name, mine in ours.items():
        contestants = {"ours": mine, "deepspeed": theirs[name]}
        seconds = paired.interleaved(
            {who: partial(paired.clocked, work) for who, work in contestants.items()}, rounds
        )
        medians = [f"{statistics.median(seconds[who]) * 1e3:.3f}" for who in contestants]
        relative = paired.ratio(seconds["ours"], seconds["deepspeed"])
        print(paired.row([name, *medians, f"1/{1 / relative:.0f}"], [32, 10, 10, 10]))


if __name__ == "__main__":
    main()
