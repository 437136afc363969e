"""How long a job takes to have its groups: namedmesh against torch and megatron-core, in turns at forked gloo ranks.

    python benchmarks/start_up.py [--ranks N] [--rounds N] [--forks N]

A round takes from the moment that the first rank starts until the last one is done, on the wall: ranks wait for each other.
Groups are destroyed after each turn, so every turn makes them anew.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import paired
import torch.distributed as dist
from ranks import fake_world, run_ranks
from torch.distributed.device_mesh import init_device_mesh

import namedmesh
from namedmesh.compat import megatron

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    # Makes something on every rank; what it returns takes it away.
    Maker = Callable[[], Callable[[], object]]

SIZES = {"pp": 2, "dp": -1, "cp": 2, "tp": 2}
DEGREES = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


def our_mesh() -> Callable[[], object]:
    """Make our mesh; its axes are new."""
    mesh = namedmesh.init_mesh(SIZES, device="cpu")
    return lambda: mesh.close(destroy_groups=True)


def torchs_mesh() -> Callable[[], object]:
    """Make torch's mesh of the same axes."""
    layout = namedmesh.Layout(**SIZES, world_size=dist.get_world_size())
    mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=layout.axes)

    def destroy() -> None:
        for axis in reversed(layout.axes):
            dist.destroy_process_group(mesh.get_group(axis))

    return destroy


def our_job() -> Callable[[], object]:
    """Start from the environment."""
    namedmesh.init_mesh(SIZES, device="cpu", timeout=timedelta(minutes=5))
    return dist.destroy_process_group


def torchs_job() -> Callable[[], object]:
    """Start from the environment by torch alone."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torchs_mesh()
    return dist.destroy_process_group


def our_megatron() -> Callable[[], object]:
    """Make the groups that Megatron has at start-up, by our stand-in."""
    megatron.initialize_model_parallel(**DEGREES)
    return megatron.destroy_model_parallel


def megatrons_own() -> Callable[[], object]:
    """Make them by megatron-core."""
    from megatron.core import parallel_state

    before = set(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  its destroy leaves groups behind
    parallel_state.initialize_model_parallel(**DEGREES)

    def destroy() -> None:
        parallel_state.destroy_model_parallel()
        for group in [group for group in dist.distributed_c10d._world.pg_map if group not in before]:  # noqa: SLF001
            dist.destroy_process_group(group)

    return destroy


def take_turns(makers: Mapping[str, Maker], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return one rank's start and end of each round; the first round warms up and is thrown away."""
    namedmesh.launch.init("cpu")
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for order in [list(makers), *paired.turns(list(makers), rounds)]:
        for name in order:
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            take_away = makers[name]()
            seen[name].append((start, time.perf_counter()))
            dist.barrier()  # nobody's cleaning up disturbs a rank that is still at work
            take_away()
    return {name: turns[1:] for name, turns in seen.items()}


def start_once(maker: Maker) -> list[tuple[float, float]]:
    """Return one rank's start and end of the only start of this process."""
    start = time.perf_counter()
    take_away = maker()
    end = time.perf_counter()
    dist.barrier()  # one that ends takes its connections from those that still connect
    take_away()
    return [(start, end)]


def lasted(by_rank: list[list[tuple[float, float]]]) -> list[float]:
    """Return the seconds of each round, from the first start to the last end: the clock is one for all processes."""
    rounds = zip(*by_rank, strict=True)
    return [max(end for _, end in turns) - min(start for start, _ in turns) for turns in rounds]


def show(title: str, seconds: Mapping[str, list[float]]) -> None:
    """Print the median seconds of two contestants, and their ratio."""
    ours, theirs = seconds.values()
    print(f"\n{title}")
    for name, measured in seconds.items():
        print(paired.row([name, statistics.median(measured)], [18, 8]))
    print(paired.row(["ratio", paired.ratio(ours, theirs)], [18, 8]))


def main() -> None:
    """Print a table for each start."""
    parser = argparse.ArgumentParser(description="How long a job takes to have its groups.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8, help="rounds in each fork of the ranks")
    parser.add_argument("--forks", type=int, default=3, help="how often the ranks are forked")
    arguments = parser.parse_args()
    print(paired.machine())
    with fake_world(8):  # what is imported at the first call is imported before the fork
        our_mesh()()
        torchs_mesh()()
    if find_spec("megatron") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it would like to find installed
            import_module("megatron.core.parallel_state")
    gc.collect()
    gc.freeze()  # what is alive now need not be looked at in every rank
    meshes: dict[str, Maker] = {"init_mesh": our_mesh, "init_device_mesh": torchs_mesh}
    groups: dict[str, Maker] = {"namedmesh": our_megatron, "megatron-core": megatrons_own}
    for title, makers in (("A mesh of four axes", meshes), ("Megatron's groups", groups)):
        if makers is groups and find_spec("megatron") is None:
            continue
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(arguments.forks):
            by_rank = run_ranks(
                arguments.ranks, take_turns, makers, arguments.rounds, timeout=900, init=False
            )
            for name in makers:
                seconds[name] += lasted([seen[name] for seen in by_rank])
        show(f"{title}, {arguments.ranks} gloo ranks", seconds)
    jobs: dict[str, Maker] = {"init_mesh": our_job, "torch": torchs_job}
    seconds = {name: [] for name in jobs}
    for _ in range(arguments.forks * 2):
        for name, maker in jobs.items():
            seconds[name] += lasted(run_ranks(arguments.ranks, start_once, maker, timeout=900, init=False))
    show(f"A whole start from the environment, {arguments.ranks} gloo ranks", seconds)


if __name__ == "__main__":
    main()
