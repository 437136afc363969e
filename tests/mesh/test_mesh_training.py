"""FSDP2 on one axis with tensor parallelism on another, on every kind of mesh that a NamedMesh returns."""

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
from namedmesh.mesh.mesh import close_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SIZES = {"dp": 2, "tp": 2}
# Megatron's order tp-cp-pp-dp puts the pipeline between the two data axes.
SEPARATED_BY_SIZE_ONE = namedmesh.Layout.from_order("tp-cp-pp-dp", tp=2, cp=2, pp=1, dp=2)
SEPARATED_BY_PP = namedmesh.Layout.from_order("tp-cp-pp-dp", tp=2, cp=2, pp=2, dp=2)
HSDP = {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
# By world size: the mesh, its view, the data axes (flattened if a star joins them) and the tensor-parallel axis.
CASES: dict[int, dict[str, tuple[Any, dict[str, Any], str, str]]] = {
    4: {
        "axes": (SIZES, {}, "dp", "tp"),
        "with axes of size one": ({"pp": 1, "dp": 2, "cp": 1, "tp": 2}, {}, "dp", "tp"),
        "tensor axis first": ({"tp": 2, "dp": 2}, {}, "dp", "tp"),
        "data axis of one": ({"dp": 1, "tp": 4}, {}, "dp", "tp"),
        "flat with size one": ({"dp": 2, "cp": 1, "tp": 2}, {}, "dp*cp", "tp"),
        "view": ({"dp": 4, "tp": 1}, {"edp": 2, "ep": 2}, "edp", "ep"),
        "adopted": (SIZES, {}, "dp", "tp"),
        "with options": (SIZES, {}, "dp", "tp"),
    },
    8: {
        "hybrid": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {}, "dp_replicate dp_shard", "tp"),
        "tensor axis in the middle": (
            {"dp_replicate": 2, "tp": 2, "dp_shard": 2},
            {},
            "dp_replicate dp_shard",
            "tp",
        ),
        "flat": ({"dp": 2, "cp": 2, "tp": 2}, {}, "dp*cp", "tp"),
        "flat, axes separated by size one": (SEPARATED_BY_SIZE_ONE, {}, "dp*cp", "tp"),
        # FSDP2 on a view that merges two axes, tensor parallelism on an axis of the mesh itself.
        "view with merged axes": (
            HSDP,
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
    16: {"flat, axes separated by pp": (SEPARATED_BY_PP, {}, "dp*cp", "tp")},
}


def _make_meshes(name: str, case: tuple[Any, dict[str, Any], str, str]) -> tuple[DeviceMesh, DeviceMesh]:
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
    data_mesh = mesh.flatten(*data.split("*")) if "*" in data else mesh[tuple(data.split())]
    return data_mesh, mesh[tensor]


def _train(name: str, case: tuple[Any, dict[str, Any], str, str]) -> list[float]:
    data_mesh, tp_mesh = _make_meshes(name, case)
    net = tiny.model()
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(net, tp_mesh, plan)
    for block in net:
        fully_shard(block, mesh=data_mesh)
    fully_shard(net, mesh=data_mesh)
    position = data_mesh.get_local_rank() if data_mesh.ndim == 1 else _find_row_major_rank(data_mesh)
    rows = tiny.batch(8).chunk(data_mesh.size())[position]
    return tiny.losses(net, rows)


def _find_row_major_rank(mesh: DeviceMesh) -> int:
    coords = mesh.get_coordinate()
    assert coords is not None
    return coords[0] * mesh.size(1) + coords[1]


def _train_cases(ranks: int, names: list[str]) -> list[list[float]]:
    """Train each case on its own mesh, which is closed before the next one."""
    losses: list[list[float]] = []
    for name in names:
        losses.append(_train(name, CASES[ranks][name]))
        close_all()
    return losses


@pytest.mark.ci
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (4, ["with axes of size one", "view", "adopted"]),
        *(pytest.param(ranks, list(cases), marks=pytest.mark.slow) for ranks, cases in CASES.items()),
    ],
)
def test_fsdp_with_tensor_parallelism_equals_one_process(ranks: int, names: list[str]) -> None:
    by_rank = run_ranks(ranks, _train_cases, ranks, names)
    expected = tiny.losses(tiny.model(), tiny.batch(8))
    # The loss has decreased, so equal losses mean equal gradients.
    assert expected[-1] < expected[0] - 1e-3
    for case, name in enumerate(names):
        mean = [fmean(losses[case][step] for losses in by_rank) for step in range(len(expected))]
        assert mean == pytest.approx(expected, abs=1e-9), name
