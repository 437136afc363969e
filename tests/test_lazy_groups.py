"""Groups that are made when they are first asked for: by some ranks only, in any order, waiting for nobody."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from ranks import fake_world, live_groups, run_ranks, summed

import namedmesh
from namedmesh import GroupOptions
from namedmesh._torch import connects_without_blocking
from namedmesh.compat import megatron
from namedmesh.compat.megatron import parallel_state
from namedmesh.lazy_group import LazyGroup


def _some_ask() -> list[Any]:
    """One rank asks long before the others, and the groups over the same ranks are asked for in two orders."""
    rank = dist.get_rank()
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    before = live_groups()
    slow = GroupOptions(nccl={"max_ctas": 4})  # other options: a group of its own over the same ranks
    first, second = (
        mesh.pool.reserve(mesh.layout, ("dp", "tp"), options) for options in (GroupOptions(), slow)
    )
    assert isinstance(first, LazyGroup)
    assert isinstance(second, LazyGroup)
    told: list[Any] = [live_groups() - before, first.size(), first.rank()]
    if rank == 0:
        assert first.get_or_create() is first.get_or_create()
    dist.barrier()
    told.append(live_groups() - before)
    groups = (
        [first.get_or_create(), second.get_or_create()]
        if rank % 2
        else [second.get_or_create(), first.get_or_create()][::-1]
    )
    told += [
        summed(groups[0], dist.get_rank()),
        summed(groups[1], dist.get_rank()),
        groups[0] is not groups[1],
    ]
    told.append(mesh.group("dp", "tp") is groups[0])
    told.append(mesh.flatten("dp", "tp").get_group() is groups[0])
    mesh.close()
    told.append(live_groups() - before)
    return told


def test_a_reserved_group_is_created_whoever_asks_first() -> None:
    for rank, told in enumerate(run_ranks(8, _some_ask)):
        total = 6.0 if rank < 4 else 22.0
        # After close the three axes that were there before are gone, too.
        assert told == [0, 4, rank % 4, int(rank == 0), total, total, True, True, True, -3]


def _again_and_again() -> list[float]:
    """The same ranks, mesh after mesh: every group has a name of its own in the store."""
    told = []
    for turn in range(3):
        parallel_state.initialize_model_parallel(2)
        if (dist.get_rank() + turn) % 2:
            parallel_state.get_tensor_and_context_parallel_group()
        told.append(
            summed(parallel_state.get_data_parallel_group_gloo(with_context_parallel=True), dist.get_rank())
        )
        told.append(summed(parallel_state.get_tensor_and_data_parallel_group(), dist.get_rank()))
        parallel_state.destroy_model_parallel()
    return told


def test_reserved_groups_of_one_mesh_after_another() -> None:
    for rank, told in enumerate(run_ranks(4, _again_and_again)):
        assert told == [2.0 if rank % 2 == 0 else 4.0, 6.0] * 3


def test_only_what_is_asked_for_is_made() -> None:
    with fake_world(16, 5):
        before = live_groups()
        parallel_state.initialize_model_parallel(2, 4, create_gloo_process_groups=False)
        made = live_groups() - before
        assert (
            parallel_state.get_tensor_and_data_parallel_group() is parallel_state.get_amax_reduction_group()
        )
        assert live_groups() - before == made + 1
        assert len(parallel_state._global_process_group_list) == made + 2  # and the default group
        group = parallel_state._MODEL_PARALLEL_GROUP
        assert group is megatron.current_mesh().group("pp", "tp")
        parallel_state._MODEL_PARALLEL_GROUP = None
        del parallel_state._MODEL_PARALLEL_GROUP
        assert parallel_state.get_model_parallel_group() is group
        parallel_state.destroy_model_parallel()
        assert live_groups() == before


def test_groups_of_backends_that_connect_at_once_are_not_reserved(monkeypatch: Any) -> None:
    assert connects_without_blocking("gloo")
    assert connects_without_blocking("cpu:gloo,cuda:nccl")
    assert not connects_without_blocking("ucc")
    assert not connects_without_blocking("cpu:mpi,cuda:nccl")
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    assert not connects_without_blocking("gloo")


def _environment() -> list[str | None]:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    mesh.group("dp")
    lazy = mesh.pool.reserve(namedmesh.Layout(a=2, b=2), ("b",), GroupOptions(share=False))
    megatron.process_groups(mesh)
    told = [os.environ.pop("TORCH_GLOO_LAZY_INIT"), type(lazy).__name__]
    megatron.process_groups(mesh)
    dist.barrier()
    mesh.close()
    return [*told, os.environ.get("TORCH_GLOO_LAZY_INIT")]


def test_the_environment_is_left_as_it_was() -> None:
    assert run_ranks(4, _environment) == [["0", "ProcessGroup", None]] * 4
