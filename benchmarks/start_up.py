"""How long a job takes to have its groups: namedmesh against torch and megatron-core, in turns at forked gloo ranks.

    python benchmarks/start_up.py [--ranks N] [--rounds N] [--forks N]

Groups are destroyed after each turn, so every turn makes them anew; of a whole start there is one turn in a process.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import paired
import torch.distributed as dist
from ranks import fake_world
from torch.distributed.device_mesh import init_device_mesh

import namedmesh
from namedmesh.compat import megatron

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    # Makes something on every rank; what it returns takes it away.
    Maker = Callable[[], Callable[[], object]]

SIZES = {"pp": 2, "dp": -1, "cp": 2, "tp": 2}
DEGREES: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


def our_mesh() -> Callable[[], object]:
    mesh = namedmesh.init_mesh(SIZES, device="cpu")
    owned = [communicator.group for communicator in mesh.communicators if communicator.owned]

    def destroy() -> None:
        mesh.close()
        for group in reversed(owned):
            dist.destroy_process_group(group)

    return destroy


def torchs_mesh() -> Callable[[], object]:
    layout = namedmesh.Layout(**SIZES, world_size=dist.get_world_size())
    mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=layout.axes)

    def destroy() -> None:
        for axis in reversed(layout.axes):
            dist.destroy_process_group(mesh.get_group(axis))

    return destroy


def our_job() -> Callable[[], object]:
    namedmesh.init_mesh(SIZES, device="cpu", timeout=timedelta(minutes=5))
    return dist.destroy_process_group


def torchs_job() -> Callable[[], object]:
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torchs_mesh()
    return dist.destroy_process_group


def our_megatron() -> Callable[[], object]:
    """Make the groups that Megatron has at start-up, by our stand-in."""
    megatron.parallel_state.initialize_model_parallel(**DEGREES)
    return megatron.parallel_state.destroy_model_parallel


def megatrons_own() -> Callable[[], object]:
    from megatron.core import parallel_state

    before = set(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  its destroy leaves groups behind
    parallel_state.initialize_model_parallel(**DEGREES)

    def destroy() -> None:
        parallel_state.destroy_model_parallel()
        for group in [group for group in dist.distributed_c10d._world.pg_map if group not in before]:  # noqa: SLF001
            dist.destroy_process_group(group)

    return destroy


MESHES: dict[str, Maker] = {"init_mesh": our_mesh, "init_device_mesh": torchs_mesh}
GROUPS: dict[str, Maker] = {"namedmesh": our_megatron, "megatron-core": megatrons_own}
JOBS: dict[str, Maker] = {"init_mesh": our_job, "torch": torchs_job}


def launched(makers: Mapping[str, Maker]) -> Mapping[str, Maker]:
    namedmesh.launch.init("cpu")
    return makers


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a job takes to have its groups.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8, help="rounds in each fork of the ranks")
    parser.add_argument("--forks", type=int, default=3, help="how often the ranks are forked")
    arguments = parser.parse_args()
    print(f"{paired.machine()}; {arguments.ranks} gloo ranks, seconds")
    with fake_world(8):  # what is imported at the first call is imported before the fork
        our_mesh()()
        torchs_mesh()()
    if find_spec("megatron") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it would like to find installed
            import_module("megatron.core.parallel_state")
    gc.collect()
    gc.freeze()  # what is alive now need not be looked at in every rank
    for title, makers in (("a mesh of four axes", MESHES), ("Megatron's groups", GROUPS)):
        if makers is GROUPS and find_spec("megatron") is None:
            continue
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(arguments.forks):
            found = paired.on_ranks(arguments.ranks, arguments.rounds, launched, makers, init=False)
            for name, measured in found.items():
                seconds[name] += measured
        paired.show(title, seconds, unit=1)
    seconds = {name: [] for name in JOBS}
    for _ in range(arguments.forks * 2):
        for name, maker in JOBS.items():
            seconds[name].append(paired.once(arguments.ranks, maker))
    paired.show("a whole start from the environment", seconds, unit=1)


if __name__ == "__main__":
    main()
