"""FSDP2 on one axis with tensor parallelism on another, on every kind of mesh that a NamedMesh hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import namedmesh
from namedmesh import current
from namedmesh._torch import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

Where = tuple["DeviceMesh", "DeviceMesh"]  # data parallel, tensor parallel


def _axes() -> Where:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    return mesh["dp"], mesh["tp"]


def _axes_beside_size_one() -> Where:
    mesh = namedmesh.init_mesh(pp=1, dp=2, cp=1, tp=2)
    return mesh["dp"], mesh["tp"]


def _data_axis_of_one() -> Where:
    mesh = namedmesh.init_mesh(dp=1, tp=4)
    return mesh["dp"], mesh["tp"]


def _hybrid() -> Where:
    mesh = namedmesh.init_mesh(dp_replicate=2, dp_shard=2, tp=2)
    return mesh["dp_replicate", "dp_shard"], mesh["tp"]


def _flat() -> Where:
    mesh = namedmesh.init_mesh(dp=2, cp=2, tp=2)
    return mesh.flatten("dp", "cp"), mesh["tp"]


def _flat_with_size_one() -> Where:
    mesh = namedmesh.init_mesh(dp=2, cp=1, tp=2)
    return mesh.flatten("dp", "cp"), mesh["tp"]


def _flat_apart() -> Where:
    """Megatron's order tp-cp-pp-dp puts the pipeline between the two data axes."""
    mesh = namedmesh.init_mesh(namedmesh.Layout.from_order("tp-cp-pp-dp", tp=2, cp=2, pp=1, dp=2))
    return mesh.flatten("dp", "cp"), mesh["tp"]


def _flat_far_apart() -> Where:
    mesh = namedmesh.init_mesh(namedmesh.Layout.from_order("tp-cp-pp-dp", tp=2, cp=2, pp=2, dp=2))
    return mesh.flatten("dp", "cp"), mesh["tp"]


def _view() -> Where:
    mesh = namedmesh.init_mesh(dp=4, tp=1)
    mesh.add_view("expert", edp=2, ep=2)
    return mesh["edp"], mesh["ep"]


def _flat_in_view() -> Where:
    mesh = namedmesh.init_mesh(dp=4, tp=2)
    mesh.add_view("expert", edp_outer=2, edp_inner=2, ep=2)
    return mesh.flatten("edp_outer", "edp_inner"), mesh["ep"]


def _beside_a_view() -> Where:
    """Hybrid sharding over a view that joins two axes, tensor parallel on the mesh's own axis."""
    mesh = namedmesh.init_mesh(dp_replicate=2, dp_shard=2, cp=1, tp=2)
    mesh.add_view("fsdp", dp_replicate=2, dp_shard_cp=2, tp=2)
    return mesh["dp_replicate", "dp_shard_cp"], mesh["tp"]


def _adopted() -> Where:
    torch_mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = namedmesh.NamedMesh.from_device_mesh(torch_mesh)
    return mesh["dp"], mesh["tp"]


def _with_options() -> Where:
    mesh = namedmesh.init_mesh(dp=2, tp=2, options={"tp": namedmesh.GroupOptions(share=False)})
    return mesh["dp"], mesh["tp"]


def _train(make: Callable[[], Where]) -> list[float]:
    data_parallel, tensor_parallel = make()
    net = tiny.model()
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(net, tensor_parallel, plan)
    for block in net:
        fully_shard(block, mesh=data_parallel)
    fully_shard(net, mesh=data_parallel)
    shares = data_parallel.size()
    share = data_parallel.get_local_rank() if data_parallel.ndim == 1 else _row_major(data_parallel)
    rows = tiny.batch(8).chunk(shares)[share]
    return tiny.losses(net, rows)


def _row_major(mesh: DeviceMesh) -> int:
    place = mesh.get_coordinate()
    assert place is not None
    return place[0] * mesh.size(1) + place[1]


# Torch up to 2.9 combines only meshes of one root, and adjoining axes.
SINCE_2_10 = {_flat_far_apart, _beside_a_view}
CASES: dict[int, tuple[Callable[[], Where], ...]] = {
    4: (_axes, _axes_beside_size_one, _data_axis_of_one, _flat_with_size_one, _view, _adopted, _with_options),
    8: (_hybrid, _flat, _flat_apart, _beside_a_view, _flat_in_view),
    16: (_flat_far_apart,),
}


def _train_each(cases: list[Callable[[], Where]]) -> list[list[float]]:
    """Each case on a mesh of its own, which is closed before the next."""
    found = []
    for make in cases:
        found.append(_train(make))
        alive: list[Any] = list(current._alive)
        for mesh in alive:
            mesh.close()
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_fsdp_with_tensor_parallelism_trains_as_one_process(ranks: int) -> None:
    cases = [make for make in CASES[ranks] if make not in SINCE_2_10 or TORCH.release >= (2, 10)]
    by_rank = run_ranks(ranks, _train_each, cases)
    alone = tiny.losses(tiny.model(), tiny.batch(8))
    assert alone[-1] < alone[0] - 1e-3  # something was learnt, so equal losses mean equal gradients
    for case, make in enumerate(cases):
        mean = [tiny.mean(losses[case][step] for losses in by_rank) for step in range(len(alone))]
        assert mean == pytest.approx(alone, abs=1e-9), make.__name__
