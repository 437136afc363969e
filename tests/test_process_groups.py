"""Three overlapping groups in one object."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from ranks import fake_world

import namedmesh
from namedmesh.compat import megatron
from namedmesh.compat.process_groups import ProcessGroups

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_bound() -> Iterator[None]:
    yield
    megatron.unbind()


def ranks_of(groups: ProcessGroups) -> list[list[int]]:
    return [dist.get_process_group_ranks(one) for one in (groups.tp_group, groups.pp_group, groups.dp_group)]


def test_the_worked_example_of_eight_ranks() -> None:
    tp = [[0, 1], [2, 3], [4, 5], [6, 7]]
    pp = [[0, 2], [1, 3], [4, 6], [5, 7]]
    dp = [[0, 4], [1, 5], [2, 6], [3, 7]]
    for rank in range(8):
        with fake_world(8, rank):
            groups = ProcessGroups(2, 2, 2)
            assert ranks_of(groups) == [next(one for one in each if rank in one) for each in (tp, pp, dp)]
            assert (groups.tp_rank, groups.pp_rank, groups.dp_rank) == (rank % 2, rank // 2 % 2, rank // 4)
            assert (groups.tp_size, groups.pp_size, groups.dp_size) == (2, 2, 2)
            assert (groups.is_first_stage, groups.is_last_stage) == (
                rank in {0, 1, 4, 5},
                rank in {2, 3, 6, 7},
            )
            assert groups.mesh is namedmesh.current_mesh()
            groups.close()


@pytest.mark.parametrize("sizes", [(1, 1, 12), (12, 1, 1), (1, 12, 1), (3, 2, 2), (2, 3, 2)])
def test_other_sizes(sizes: tuple[int, int, int]) -> None:
    tp, pp, _ = sizes
    for rank in range(12):
        with fake_world(12, rank):
            groups = ProcessGroups(*sizes)
            assert (groups.tp_size, groups.pp_size, groups.dp_size) == sizes
            assert (groups.tp_rank, groups.pp_rank) == (rank % tp, rank // tp % pp)
            assert groups.dp_rank == rank // (tp * pp)
            assert all(dist.get_rank() in ranks for ranks in ranks_of(groups))
            groups.close()


def test_log_prints_the_sizes_on_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_world(12):
        groups = ProcessGroups(2, 3, 2)
        groups.log(1)
        assert capsys.readouterr().out == ""
        groups.log(0)
        assert capsys.readouterr().out == "world size 12: tp=2, pp=3, dp=2\n"
        groups.close()


def test_bound_to_a_mesh_it_hands_out_the_groups_that_a_dialect_does() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=2, dp_replicate=2, dp_shard=1, tp=2, device="cpu")
        megatron.bind(mesh)
        groups = ProcessGroups.bind(mesh)
        assert groups.mesh is mesh
        assert (
            groups.tp_group is mesh.group("tp") is megatron.parallel_state.get_tensor_model_parallel_group()
        )
        assert groups.dp_group is megatron.parallel_state.get_data_parallel_group()
        assert ranks_of(groups) == [[4, 5], [1, 5], [5, 7]]
        mesh.close()
        whole = namedmesh.init_mesh(dp=8, device="cpu")
        groups = ProcessGroups.bind(whole)
        assert (groups.tp_size, groups.tp_rank, groups.is_last_stage) == (1, 0, True)
        assert groups.tp_group is groups.pp_group
        whole.close()


@pytest.mark.parametrize("sizes", [(2, 2, 3), (2, 2, 1), (-2, -2, 2)])
def test_a_world_of_another_size_is_an_error(sizes: tuple[int, int, int]) -> None:
    with fake_world(8), pytest.raises(ValueError, match=str(sizes[0])) as caught:
        ProcessGroups(*sizes)
    assert isinstance(caught.value, namedmesh.LayoutError)
