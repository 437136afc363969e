"""Every dialect on one mesh at the same time: the same process groups, whoever is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from messages import error_of
from ranks import fake_world, run_ranks

import namedmesh
from namedmesh.compat import deepspeed, diff, ezpz, fairscale, megatron
from namedmesh.compat.ezpz import tp as ezpz_tp
from namedmesh.compat.fairscale import initialize
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.process_groups import ProcessGroups

if TYPE_CHECKING:
    from collections.abc import Callable


def groups(mesh: namedmesh.NamedMesh) -> dict[str, list[dist.ProcessGroup]]:
    """Every dialect's group over each axis, in the order Megatron, fairscale, ezpz, DeepSpeed, torch."""
    for dialect in (megatron, fairscale, ezpz):
        dialect.bind(mesh)
    unit: Any = deepspeed.mpu(mesh)
    return {
        "tp": [
            parallel_state.get_tensor_model_parallel_group(),
            initialize.get_model_parallel_group(),
            ezpz_tp.get_tensor_parallel_group(),
            unit.get_tensor_model_parallel_group(),
            mesh["tp"].get_group(),
        ],
        "pp": [
            parallel_state.get_pipeline_model_parallel_group(),
            initialize.get_pipeline_parallel_group(),
            ezpz_tp.get_pipeline_parallel_group(),
            unit.get_pipeline_model_parallel_group(),
            mesh["pp"].get_group(),
        ],
        "dp": [
            parallel_state.get_data_parallel_group(),
            initialize.get_data_parallel_group(),
            ezpz_tp.get_data_parallel_group(),
            unit.get_data_parallel_group(),
            mesh["dp"].get_group(),
        ],
    }


def _closed_by_rank_0() -> list[str]:
    """A group that a mesh lacks, and that another mesh has on all ranks but one."""
    closed, mesh = (namedmesh.init_mesh(pp=2, dp_replicate=2, dp_shard=2) for _ in range(2))
    closed.flatten("dp_replicate", "dp_shard")
    if dist.get_rank() == 0:
        closed.close()
    return [error_of(lambda bind=bind: bind(mesh)) for bind in BINDS]  # type: ignore[misc]


BINDS: list[Callable[[namedmesh.NamedMesh], object]] = [
    megatron.bind,
    fairscale.bind,
    ezpz.bind,
    deepspeed.mpu,
    deepspeed.PipelineParallelGrid.from_mesh,
    ProcessGroups.bind,
]


def test_a_group_that_only_some_ranks_have_is_named_on_every_rank() -> None:
    for errors in run_ranks(8, _closed_by_rank_0):
        assert len(errors) == len(BINDS)
        for error in errors:
            assert error.startswith("AgreementError: ")
            assert "the group over dp_replicate x dp_shard of ranks 0, 1, 2, 3" in error
            assert "still belongs to an earlier mesh on ranks 1 to 3 only" in error or "1, 2, 3 only" in error


def _together() -> list[Any]:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    told: list[Any] = []
    for axis, asked in groups(mesh).items():
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=asked[0])
        told.append((axis, len({id(group) for group in asked}), tensor.item() == sum(mesh.ranks(axis))))
    dist.barrier()
    mesh.close()
    told.append([dialect.is_initialized() for dialect in (parallel_state,)])
    told.append(initialize.model_parallel_is_initialized() or ezpz_tp.tensor_parallel_is_initialized())
    return told


def test_all_dialects_hand_out_the_same_groups() -> None:
    assert (
        run_ranks(8, _together) == [[("tp", 1, True), ("pp", 1, True), ("dp", 1, True), [False], False]] * 8
    )


def test_with_switches_every_dialect() -> None:
    with fake_world(8, 5):
        wide, narrow = (namedmesh.init_mesh(dp=-1, tp=size, device="cpu") for size in (4, 2))
        for mesh in (wide, narrow):
            for dialect in (megatron, fairscale, ezpz):
                dialect.bind(mesh)
        sizes = [
            parallel_state.get_tensor_model_parallel_world_size,
            initialize.get_model_parallel_world_size,
            ezpz_tp.get_tensor_parallel_world_size,
        ]
        assert [size() for size in sizes] == [2, 2, 2]
        with wide:
            assert [size() for size in sizes] == [4, 4, 4]
        assert [size() for size in sizes] == [2, 2, 2]
        for mesh in (wide, narrow):
            mesh.close()


def test_the_difference_between_dialects_is_that_of_their_groups() -> None:
    """What `diff` says of Megatron and fairscale is what their own initializations make."""
    sizes = {"tp": 2, "pp": 4}
    said = {
        kind.axes: kind.same
        for kind in diff("megatron tp=2,pp=4", "fairscale tp=2,pp=4", world_size=16).kinds
    }
    same = dict.fromkeys([("tp",), ("pp",), ("dp",)], True)
    for rank in range(16):
        seen: list[dict[tuple[str, ...], list[int]]] = []
        with fake_world(16, rank):
            parallel_state.initialize_model_parallel(sizes["tp"], sizes["pp"])
            seen.append({(axis,): list(megatron.current_mesh().ranks(axis)) for axis in ("tp", "pp", "dp")})
            parallel_state.destroy_model_parallel()
            initialize.initialize_model_parallel(sizes["tp"], sizes["pp"])
            mesh = fairscale.current_mesh()
            seen.append({(axis,): list(mesh.ranks(axis)) for axis in ("tp", "pp", "dp")})
            initialize.destroy_model_parallel()
        for axes in same:
            same[axes] = same[axes] and seen[0][axes] == seen[1][axes]
    assert {axes: said[axes] for axes in same} == same == {("tp",): True, ("pp",): False, ("dp",): False}
