"""What belongs to a default group ends with it: nothing keeps it alive, and the next one starts afresh."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from ranks import fake_world, live_groups, run_ranks, summed

import namedmesh
from namedmesh import MeshError, current, launch
from namedmesh.compat import ezpz, fairscale
from namedmesh.compat.deepspeed import PipelineParallelGrid, mpu
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.process_groups import ProcessGroups

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent


def views_and_products() -> object:
    mesh = namedmesh.init_mesh(dp=4, tp=2, device="cpu")
    mesh.add_view("expert", edp=4, ep=2)
    return mesh, mesh.flatten("dp", "tp")


def two_meshes() -> object:
    return [namedmesh.init_mesh(dp=4, tp=2, device="cpu").__enter__() for _ in range(2)]


def megatron() -> object:
    parallel_state.initialize_model_parallel(2, 2, create_gloo_process_groups=False)
    parallel_state.get_tensor_and_data_parallel_group()
    return parallel_state


def megatron_bound() -> object:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2, device="cpu")
    return namedmesh.compat.megatron.bind(mesh)


def with_fairscale() -> object:
    fairscale.initialize_model_parallel(2, 2)
    return fairscale


def with_ezpz() -> object:
    ezpz.tp.initialize_tensor_parallel(2)
    return ezpz


def with_process_groups() -> object:
    return ProcessGroups(2, 2, 2)


def deepspeed_grid() -> object:
    return PipelineParallelGrid()


def deepspeed_unit() -> object:
    return mpu(namedmesh.init_mesh(pp=2, dp=2, tp=2, device="cpu"))


MAKERS = (
    views_and_products,
    two_meshes,
    megatron,
    megatron_bound,
    with_fairscale,
    with_ezpz,
    with_process_groups,
    deepspeed_grid,
    deepspeed_unit,
)


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_keeps_a_destroyed_default_group(make: Callable[[], object]) -> None:
    with fake_world(8, 3):
        kept = make()
        world = weakref.ref(dist.group.WORLD)
        assert world() is not None
    # Reference counting alone: an exit collects no garbage before it is too late.
    assert world() is None
    assert not current._alive
    del kept


def test_a_mesh_that_ended_says_so() -> None:
    with fake_world(8, 3):
        mesh = namedmesh.init_mesh(dp=4, tp=2, device="cpu")
    for ask in (lambda: mesh["tp"], lambda: mesh.group("dp"), lambda: mesh.size("tp"), mesh.__enter__):
        with pytest.raises(MeshError) as caught:
            ask()
        assert str(caught.value) == (
            "the mesh over dp=4 x tp=2 (8 ranks) ended with the default process group, which was destroyed; make another "
            "with init_mesh()"
        )
    assert mesh.closed
    mesh.close()
    with fake_world(8, 3), pytest.raises(MeshError, match="no mesh is alive"):
        namedmesh.current_mesh()


def _again(*, same_store: bool) -> list[Any]:
    """A mesh and a dialect that nobody closes, and one of each on the default group that comes after."""
    rank, world = dist.get_rank(), dist.get_world_size()
    told: list[Any] = []
    host = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    for life in range(3):
        old = namedmesh.init_mesh(dp=2, tp=2, timeout=timedelta(seconds=20))
        namedmesh.compat.megatron.bind(old)
        old.flatten("dp", "tp")
        told.append(summed(old.group("tp"), rank))
        told.append(summed(parallel_state.get_data_parallel_group(), rank))
        summed(None)
        dist.destroy_process_group()
        prefix = "again" if same_store else f"again/{life}"
        if same_store:
            _forget_addresses(host, f"again/0//cpu//0/{rank}", life)
        store = dist.PrefixStore(prefix, host)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        old.close()
    told.append(live_groups())
    return told


def _forget_addresses(host: dist.Store, key: str, life: int) -> None:
    """Where this rank was reached: over the same store torch's own default group finds the old addresses."""
    assert host.delete_key(key) or life == 0
    if host.add(f"forgotten/{life}", 1) == 4:
        host.set(f"all forgotten/{life}", "")
    host.wait([f"all forgotten/{life}"])


@pytest.mark.parametrize("same_store", [False, True])
def test_a_default_group_after_another(same_store: bool) -> None:
    for rank, told in enumerate(run_ranks(4, lambda: _again(same_store=same_store))):
        assert told == [rank // 2 * 4 + 1.0, rank % 2 * 2 + 2.0] * 3 + [1]


def _dry_run_first() -> float:
    """Rank 1 tries its layout on the fake backend before the job starts."""
    if os.environ["RANK"] == "1":
        with fake_world(64, 5):
            for _ in range(3):
                namedmesh.init_mesh(dp=32, tp=2, device="cpu").flatten("dp", "tp")
            parallel = namedmesh.init_mesh(dp=8, pp=4, sp=2, device="cpu")
            parallel.add_view("expert", edp=16, ep=4)
    launch.init("cpu", timeout=timedelta(seconds=20))
    with namedmesh.init_mesh(dp=2, tp=2) as mesh:
        mesh.flatten("dp", "tp")
        told = summed(mesh.group("tp"), dist.get_rank())
    mesh.close()
    return told


def test_a_dry_run_on_one_rank_changes_nothing() -> None:
    assert run_ranks(4, _dry_run_first, init=False) == [1.0, 1.0, 5.0, 5.0]


def test_every_way_to_end_is_a_clean_exit() -> None:
    """One run, in which each rank ends in another way; ``benchmarks/exits.py`` is for many."""
    command = [sys.executable, "benchmarks/exits.py", "--runs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    ends = dict(line.split(": ") for line in done.stdout.splitlines() if " of 1 failed" in line)
    ends.pop("control")
    assert len(ends) == 7, done.stdout + done.stderr
    assert set(ends.values()) == {"0 of 1 failed"}, done.stdout + done.stderr


def _fork_with_its_own_mesh() -> bool:
    """What a fork says that ends the default group of its parent, and makes a mesh of its own over the same axes."""
    mesh = namedmesh.init_mesh(dp=1, tp=1)
    mesh.flatten("dp", "tp")
    parent = os.getpid()
    child = os.fork()
    if not child:
        dist.destroy_process_group()
        own = namedmesh.init_mesh({"dp": 1, "tp": 1}, device="cpu")
        alone = namedmesh.current_mesh() is own
        os._exit(0 if alone else 1)
    status = os.waitpid(child, 0)[1]
    same = namedmesh.current_mesh() is mesh
    mesh.close()
    return status == 0 and same and os.getpid() == parent


def test_a_fork_may_have_a_mesh_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert run_ranks(1, _fork_with_its_own_mesh) == [True]
