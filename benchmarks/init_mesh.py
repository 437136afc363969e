"""Making the groups of a mesh: ``namedmesh.init_mesh`` against plain ``init_device_mesh`` for the same axes.

    python benchmarks/init_mesh.py [--rounds N] [--forks N] [--only gloo|fake]

At 64 forked gloo ranks and at 16,384 ranks of the fake backend, and ours alone in larger worlds; ``making.py`` says
what is measured.
"""

from __future__ import annotations

import argparse
import gc
from typing import TYPE_CHECKING

import making
import paired
import torch.distributed as dist
from ranks import fake_world
from torch.distributed.device_mesh import init_device_mesh

import namedmesh

if TYPE_CHECKING:
    from collections.abc import Callable

GLOO_RANKS = 64
FAKE_RANKS = 16_384
WORLDS = (16_384, 131_072, 1_048_576)
# Axis sizes, slowest first; one is whatever is left.
GLOO_MESHES = ({"pp": 2, "dp": -1, "cp": 2, "tp": 2}, {"pp": 1, "dp": -1, "cp": 1, "tp": 2})
FAKE_MESHES = ({"pp": 8, "dp": -1, "cp": 2, "tp": 8}, {"pp": 1, "dp": -1, "cp": 1, "tp": 8})


def ours(layout: namedmesh.Layout) -> Callable[[], None]:
    """Make our mesh, with torch's, which is made when it is asked for; what is returned destroys its groups."""
    mesh = namedmesh.init_mesh(layout, device="cpu")
    _ = mesh.device_mesh
    return mesh.close


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
        making.take_turns(CONTESTANTS, namedmesh.Layout(dp=2, cp=1, tp=2), 1)
    # What is alive now stays: collecting garbage need not look at it again, 64 times over.
    gc.collect()
    gc.freeze()
    if arguments.only != "fake":
        print(f"\n{GLOO_RANKS} forked gloo ranks, first start to last end")
        for sizes in GLOO_MESHES:
            layout = namedmesh.Layout(**sizes, world_size=GLOO_RANKS)
            making.show(
                layout, *making.on_gloo(CONTESTANTS, layout, GLOO_RANKS, arguments.rounds, arguments.forks)
            )
    if arguments.only != "gloo":
        print(f"\n{FAKE_RANKS:,} ranks of the fake backend, one process")
        for sizes in FAKE_MESHES:
            layout = namedmesh.Layout(**sizes, world_size=FAKE_RANKS)
            rounds = arguments.rounds * arguments.forks
            making.show(layout, *making.on_fake(CONTESTANTS, layout, FAKE_RANKS, rounds))
        for sizes in FAKE_MESHES:
            measured = {}
            for world_size in WORLDS:
                layout = namedmesh.Layout(**sizes, world_size=world_size)
                seconds, last = making.on_fake({"namedmesh": ours}, layout, world_size, arguments.rounds)
                measured[world_size] = seconds["namedmesh"], last["namedmesh"]
            making.show_sizes(f"namedmesh alone, {sizes}; medians of {arguments.rounds} rounds", measured)


if __name__ == "__main__":
    main()
