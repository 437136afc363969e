"""Making the groups of a mesh: ``namedmesh.init_mesh`` against plain ``init_device_mesh`` for the same axes.

    python benchmarks/init_mesh.py [--rounds N] [--forks N] [--only gloo|fake]

At 64 forked gloo ranks a round takes from the moment that the first rank starts until the last one is done;
at 16,384 ranks of the fake backend, where one process stands for one rank and nothing is sent or waited for,
it is the processor's time of the call. Both contestants make and destroy their groups in the same processes, in turns.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import paired
import torch.distributed as dist
from ranks import fake_world, run_ranks
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import namedmesh
from namedmesh import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GLOO_RANKS = 64
FAKE_RANKS = 16_384
# Axis sizes, slowest first; one is whatever is left.
GLOO_MESHES = ({"pp": 2, "dp": -1, "cp": 2, "tp": 2}, {"pp": 1, "dp": -1, "cp": 1, "tp": 2})
FAKE_MESHES = ({"pp": 8, "dp": -1, "cp": 2, "tp": 8}, {"pp": 1, "dp": -1, "cp": 1, "tp": 8})


class Turn(NamedTuple):
    """What one rank saw of one contestant's turn."""

    start: float
    end: float
    processor: float  # seconds between the two that this process was at work
    calls: int  # of new_group and split_group
    held: int  # communicators that the rank holds for it, beside the default group


def ours(layout: namedmesh.Layout) -> Callable[[], None]:
    """Make our mesh; what is returned destroys its groups."""
    return namedmesh.init_mesh(layout, device="cpu").close


def plain(layout: namedmesh.Layout) -> Callable[[], None]:
    """Make torch's mesh; what is returned destroys its groups."""
    mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=layout.axes)

    def close() -> None:
        for axis in reversed(layout.axes):
            group = mesh.get_group(axis)
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    return close


CONTESTANTS = {"namedmesh": ours, "init_device_mesh": plain}


def take_turns(layout: namedmesh.Layout, rounds: int) -> dict[str, list[Turn]]:
    """One rank's view of all rounds; the first round of each contestant warms up and is thrown away."""
    seen: dict[str, list[Turn]] = {name: [] for name in CONTESTANTS}
    for order in [list(CONTESTANTS), *paired.turns(list(CONTESTANTS), rounds)]:
        for name in order:
            seen[name].append(_turn(CONTESTANTS[name], layout))
    return {name: turns[1:] for name, turns in seen.items()}


def on_rank(layout: namedmesh.Layout, rounds: int) -> dict[str, list[Turn]]:
    """What a forked rank does: a default group as most jobs make it, then all rounds."""
    launch.init("cpu")
    return take_turns(layout, rounds)


def _turn(make: Callable[[namedmesh.Layout], Callable[[], None]], layout: namedmesh.Layout) -> Turn:
    gc.collect()
    before = _held()
    with _counted() as calls:
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        close = make(layout)
        end, processor = time.perf_counter(), time.process_time() - worked
    turn = Turn(start, end, processor, len(calls), _held() - before)
    dist.barrier()  # nobody's cleaning up disturbs a rank that is still at work
    close()
    return turn


def _held() -> int:
    return len(c10d._world.pg_map)  # noqa: SLF001  torch does not count them publicly


@contextmanager
def _counted() -> Iterator[list[str]]:
    """The calls that make a group, on this rank; every public spelling of them ends in one of these."""
    calls: list[str] = []

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return counted

    originals = {name: getattr(c10d, name) for name in ("_new_group_with_tag", "split_group")}
    for name, function in originals.items():
        setattr(c10d, name, counting(function))
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(c10d, name, function)


def on_gloo(
    layout: namedmesh.Layout, rounds: int, forks: int
) -> tuple[dict[str, list[float]], dict[str, Turn]]:
    """Seconds of each round, and one rank's last turn for the counts."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    last: dict[str, Turn] = {}
    for _ in range(forks):
        ranks = run_ranks(layout.world_size, on_rank, layout, rounds, timeout=900, init=False)
        for name in CONTESTANTS:
            for turns in zip(*(seen[name] for seen in ranks), strict=True):
                # The clock is one for all processes of a machine.
                seconds[name].append(max(turn.end for turn in turns) - min(turn.start for turn in turns))
            last[name] = ranks[0][name][-1]
    return seconds, last


def on_fake(layout: namedmesh.Layout, rounds: int) -> tuple[dict[str, list[float]], dict[str, Turn]]:
    """The same for one process of a world in which nothing is sent."""
    with fake_world(layout.world_size):
        seen = take_turns(layout, rounds)
    seconds = {name: [turn.processor for turn in turns] for name, turns in seen.items()}
    return seconds, {name: turns[-1] for name, turns in seen.items()}


def show(layout: namedmesh.Layout, seconds: dict[str, list[float]], last: dict[str, Turn]) -> None:
    """One table."""
    mine, theirs = seconds.values()
    widths = [18, 10, 12, 8]
    print(f"\n{layout}; medians of {len(mine)} rounds")
    print(paired.row(["", "ms", "group calls", "held"], widths))
    for name, measured in seconds.items():
        counts = last[name]
        print(paired.row([name, statistics.median(measured) * 1e3, counts.calls, counts.held], widths))
    print(paired.row(["ratio", paired.ratio(mine, theirs)], widths[:2]))


def main() -> None:
    """Print one table for each mesh."""
    parser = argparse.ArgumentParser(description="init_mesh against init_device_mesh.")
    parser.add_argument("--rounds", type=int, default=8, help="rounds in each fork of the gloo ranks")
    parser.add_argument("--forks", type=int, default=4, help="how often the gloo ranks are forked")
    parser.add_argument("--only", choices=("gloo", "fake"), help="leave the other one out")
    arguments = parser.parse_args()
    print(paired.machine())
    # Whatever is imported at the first call is imported before the fork.
    with fake_world(4):
        take_turns(namedmesh.Layout(dp=2, cp=1, tp=2), 1)
    # What is alive now stays: collecting garbage need not look at it again, 64 times over.
    gc.collect()
    gc.freeze()
    if arguments.only != "fake":
        print(f"\n{GLOO_RANKS} forked gloo ranks, first start to last end")
        for sizes in GLOO_MESHES:
            layout = namedmesh.Layout(**sizes, world_size=GLOO_RANKS)
            show(layout, *on_gloo(layout, arguments.rounds, arguments.forks))
    if arguments.only != "gloo":
        print(f"\n{FAKE_RANKS:,} ranks of the fake backend, one process")
        for sizes in FAKE_MESHES:
            layout = namedmesh.Layout(**sizes, world_size=FAKE_RANKS)
            show(layout, *on_fake(layout, arguments.rounds * arguments.forks))


if __name__ == "__main__":
    main()
