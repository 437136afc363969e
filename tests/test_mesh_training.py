"""FSDP2 on one axis with tensor parallelism on another, on every kind of mesh that a NamedMesh hands out."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import tiny
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import namedmesh
from namedmesh.mesh import close_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLAIN = {"dp": 2, "tp": 2}
# Megatron's order tp-cp-pp-dp puts the pipeline between the two data axes.
APART = namedmesh.Layout.from_order("tp-cp-pp-dp", tp=2, cp=2, pp=1, dp=2)
FAR_APART = namedmesh.Layout.from_order("tp-cp-pp-dp", tp=2, cp=2, pp=2, dp=2)
TWICE = {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
# By the number of ranks: the mesh, its view, the axes of the data (with a star flattened) and that of the tensors.
CASES: dict[int, dict[str, tuple[Any, dict[str, Any], str, str]]] = {
    4: {
        "axes": (PLAIN, {}, "dp", "tp"),
        "beside size one": ({"pp": 1, "dp": 2, "cp": 1, "tp": 2}, {}, "dp", "tp"),
        "data axis of one": ({"dp": 1, "tp": 4}, {}, "dp", "tp"),
        "flat with size one": ({"dp": 2, "cp": 1, "tp": 2}, {}, "dp*cp", "tp"),
        "view": ({"dp": 4, "tp": 1}, {"edp": 2, "ep": 2}, "edp", "ep"),
        "adopted": (PLAIN, {}, "dp", "tp"),
        "with options": (PLAIN, {}, "dp", "tp"),
    },
    8: {
        "hybrid": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {}, "dp_replicate dp_shard", "tp"),
        "flat": ({"dp": 2, "cp": 2, "tp": 2}, {}, "dp*cp", "tp"),
        "flat, apart": (APART, {}, "dp*cp", "tp"),
        # Over a view that joins two axes, tensor parallel on the mesh's own axis.
        "beside a view": (
            TWICE,
            {"dp_replicate": 2, "dp_shard_cp": 2, "tp": 2},
            "dp_replicate dp_shard_cp",
            "tp",
        ),
        "flat in a view": (
            {"dp": 4, "tp": 2},
            {"edp_outer": 2, "edp_inner": 2, "ep": 2},
            "edp_outer*edp_inner",
            "ep",
        ),
    },
    16: {"flat, far apart": (FAR_APART, {}, "dp*cp", "tp")},
}


def _meshes(name: str, case: tuple[Any, dict[str, Any], str, str]) -> tuple[DeviceMesh, DeviceMesh]:
    sizes, view, data, tensor = case
    if name == "adopted":
        torch_mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = namedmesh.NamedMesh.from_device_mesh(torch_mesh)
    elif name == "with options":
        mesh = namedmesh.init_mesh(sizes, options={"tp": namedmesh.GroupOptions(share=False)})
    else:
        mesh = namedmesh.init_mesh(sizes)
    if view:
        mesh.add_view("view", **view)
    over = mesh.flatten(*data.split("*")) if "*" in data else mesh[tuple(data.split())]
    return over, mesh[tensor]


def _train(name: str, case: tuple[Any, dict[str, Any], str, str]) -> list[float]:
    data_parallel, tensor_parallel = _meshes(name, case)
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


def _train_each(ranks: int, names: list[str]) -> list[list[float]]:
    """Each case on a mesh of its own, which is closed before the next."""
    found = []
    for name in names:
        found.append(_train(name, CASES[ranks][name]))
        close_all()
    return found


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("ranks", CASES)
def test_fsdp_with_tensor_parallelism_trains_as_one_process(ranks: int) -> None:
    names = list(CASES[ranks])
    by_rank = run_ranks(ranks, _train_each, ranks, names)
    alone = tiny.losses(tiny.model(), tiny.batch(8))
    assert alone[-1] < alone[0] - 1e-3  # something was learnt, so equal losses mean equal gradients
    for case, name in enumerate(names):
        mean = [fmean(losses[case][step] for losses in by_rank) for step in range(len(alone))]
        assert mean == pytest.approx(alone, abs=1e-9), name
