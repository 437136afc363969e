"""Ranks that do not do the same: latecomers, parts, lonely questions, threads, and a mesh that only some close."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import tiny
import torch.distributed as dist
from messages import error_of
from ranks import limits_begin_with, live_groups, run_ranks, summed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh.compat.megatron import parallel_state

LATE = 2


def everybody_waited(name: str) -> None:
    """A barrier in the store: it needs no group."""
    store = c10d._get_default_store()
    if store.add(f"test/{name}", 1) == dist.get_world_size():
        store.set(f"test/{name}/all", "")
    store.wait([f"test/{name}/all"])


def some_gave_up(name: str, number: int) -> None:
    """Wait until ``number`` ranks have come here; called by the late one, and by those that gave up."""
    store = c10d._get_default_store()
    if store.add(f"test/{name}", int(dist.get_rank() != LATE)) == number:
        store.set(f"test/{name}/all", "")
    store.wait([f"test/{name}/all"])


def _late() -> list[Any]:
    """The late rank calls when the others have given up; then all try again, twice."""
    rank = dist.get_rank()
    second, minute = timedelta(seconds=1), timedelta(minutes=1)
    everybody_waited("start")
    if rank == LATE:
        some_gave_up("mesh", 3)
    errors = [error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=second))]
    if rank != LATE:
        some_gave_up("mesh", 3)
    everybody_waited("mesh tried")
    mesh = namedmesh.init_mesh(dp=2, tp=2, timeout=minute)
    sums = [summed(mesh.group("tp"), rank)]
    mesh.close()
    short = namedmesh.init_mesh(dp=2, tp=2, timeout=second)
    everybody_waited("mesh made")
    if rank == LATE:
        some_gave_up("product", 3)
    errors.append(error_of(lambda: short.flatten("dp", "tp")))
    if rank != LATE:
        some_gave_up("product", 3)
    everybody_waited("product tried")
    product = short.flatten("dp", "tp", options=namedmesh.GroupOptions(timeout=minute))
    sums.append(summed(product.get_group(), rank))
    short.close()
    return [errors, sums, live_groups()]


def test_a_latecomer_gets_the_error_of_the_others_and_the_next_try_works() -> None:
    with limits_begin_with(3):
        results = run_ranks(4, _late)
    for rank, (errors, *rest) in enumerate(results):
        assert [text.partition(";")[0] for text in errors] == [
            f"AgreementError: rank 2 of 0 to 3 did not call {call} within 1 s"
            for call in ("init_mesh", "mesh.flatten")
        ]
        assert rest == [[rank // 2 * 4 + 1.0, 6.0], 1]


def _lonely_question() -> list[Any]:
    """Groups that rank 0 alone asks for, and torch's own groups with local synchronization afterwards."""
    parallel_state.initialize_model_parallel(2, 2)
    if dist.get_rank() == 0:
        parallel_state.get_tensor_and_data_parallel_group()
    sums = [summed(dist.new_group(range(8), use_local_synchronization=True))]
    net = tiny.model()
    sharded: Any = fully_shard(net, mesh=namedmesh.current_mesh()["dp"])
    if hasattr(sharded, "set_separate_reduce_scatter_group"):
        sharded.set_separate_reduce_scatter_group(True)
    tiny.losses(net, tiny.batch(4), steps=1)
    sums.append(summed(parallel_state.get_tensor_and_data_parallel_group()))
    parallel_state.destroy_model_parallel()
    return sums


def test_a_group_that_one_rank_asks_for_disturbs_no_group_of_torch() -> None:
    assert run_ranks(8, _lonely_question) == [[8.0, 4.0]] * 8


def _lonely_part() -> list[float]:
    part = None
    if dist.get_rank() < 2:
        part = namedmesh.init_mesh(dp=1, tp=2, part=True)
        part.add_view("expert", ep=2)
    sums = [summed(dist.new_group(range(4), use_local_synchronization=True))]
    whole = namedmesh.init_mesh(dp=2, tp=2)
    sums += [summed(whole.group("tp")), summed(whole.group("dp"))]
    if part is not None:
        part.close()
    sums.append(summed(whole.group("tp")))
    return sums


def test_a_part_of_some_ranks_disturbs_no_group_of_all() -> None:
    assert run_ranks(4, _lonely_part) == [[4.0, 2.0, 2.0, 2.0]] * 4


def _closed_by_one() -> list[Any]:
    """Rank 0 closes a mesh that the others keep."""
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    if dist.get_rank() == 0:
        mesh.close()
    error = error_of(lambda: namedmesh.init_mesh(dp=2, tp=2))
    mesh.close()
    again = namedmesh.init_mesh(dp=2, tp=2)
    sums = [summed(again.group("tp")), summed(again.group("dp"))]
    again.close()
    return [error, sums, live_groups()]


def test_a_mesh_that_one_rank_closed_is_named() -> None:
    for error, *rest in run_ranks(4, _closed_by_one):
        assert (
            "init_mesh needs the group over tp of ranks 0, 1, and it still belongs to an earlier mesh on rank 1 only; "
            "close() that mesh on every rank"
        ) in error
        assert rest == [[2.0, 2.0], 1]


def _ahead() -> list[Any]:
    """Calls that fail on every rank, three in a row, for which one rank is late; and then one that succeeds."""
    rank = dist.get_rank()
    errors = []
    everybody_waited("begin")
    if rank == LATE:
        some_gave_up("three calls", 3)
    errors += [error_of(lambda tp=tp: namedmesh.init_mesh(dp=2, tp=tp)) for tp in (3, 5, 7)]  # type: ignore[misc]
    if rank != LATE:
        some_gave_up("three calls", 3)
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    total = summed(mesh.group("tp"))
    mesh.close()
    return [[error.partition(";")[0] for error in errors], total]


def test_a_rank_that_is_several_failed_calls_behind_catches_up() -> None:
    for errors, total in run_ranks(4, _ahead):
        assert [f"tp={tp}" in error for tp, error in zip((3, 5, 7), errors, strict=True)] == [True] * 3
        assert total == 2.0


def _threads() -> list[Any]:
    """Threads of every rank make the same products at once, each in another order."""
    naming = c10d._hash_ranks_to_str
    gloo = {name: value for name, value in os.environ.items() if "GLOO" in name}
    mesh = namedmesh.init_mesh(pp=1, dp=2, tp=2)
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(mesh.flatten("dp", "tp"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [len({id(each) for each in made}), summed(made[0].get_group())]
    mesh.close()
    return [
        *told,
        naming is c10d._hash_ranks_to_str,
        gloo == {name: value for name, value in os.environ.items() if "GLOO" in name},
        live_groups(),
    ]


def test_threads_get_the_same_groups_and_leave_torch_as_it_was() -> None:
    assert run_ranks(4, _threads) == [[1, 4.0, True, True, 1]] * 4


def _two_threads_of_one_rank() -> list[str]:
    """Rank 0 calls twice, from two threads, before rank 1 calls at all."""
    mesh = namedmesh.init_mesh(dp=2)
    told: list[str] = []

    def call() -> None:
        told.append(error_of(lambda: namedmesh.init_mesh(dp=2)))

    if dist.get_rank() == 0:
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        everybody_waited("both started")
        for thread in threads:
            thread.join()
    else:
        everybody_waited("both started")
        call()
        call()
    mesh.close()
    return told


def test_two_threads_of_one_rank_are_not_two_ranks() -> None:
    assert run_ranks(2, _two_threads_of_one_rank) == [["", ""]] * 2


def _different_parts(alone: int) -> list[Any]:
    """One rank makes a mesh over ranks 0 and 1, the others over the world; then all of them over the world."""

    def make(size: int, *, part: bool) -> namedmesh.NamedMesh:
        return namedmesh.init_mesh(dp=size // 2, tp=2, part=part)

    error = error_of(lambda: make(2, part=True) if dist.get_rank() == alone else make(4, part=False))
    everybody_waited("parts tried")
    mesh = make(4, part=False)
    sums = [summed(mesh.group("tp")), summed(mesh.group("dp"))]
    mesh.close()
    return [error, sums, live_groups()]


@pytest.mark.parametrize("alone", [0, 1])
def test_ranks_that_wait_for_each_other_in_different_parts(alone: int) -> None:
    for error, *rest in run_ranks(4, _different_parts, alone):
        assert rest == [[2.0, 2.0], 1]
        assert error == (
            f"AgreementError: rank {alone} is in init_mesh of ranks 0 to 1 and rank {1 - alone} is in init_mesh of ranks 0 to 3, and each "
            "waits for the other; give these ranks the same sizes, and let them make their meshes in the same order"
        )
