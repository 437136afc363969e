"""Meshes on real ranks: what they share, what outlives them, and that they go together with torch's own features."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
import torch.distributed as dist
from messages import error_of
from ranks import live_groups, run_ranks, summed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import namedmesh
from namedmesh import GroupOptions, Layout, NamedMesh, groups, views

# Who makes the groups.


def _made_by_torch() -> list[object]:
    torchs = mock.Mock(wraps=init_device_mesh)
    with mock.patch.object(views, "init_device_mesh", torchs):
        mesh = namedmesh.init_mesh(pp=1, dp=2, tp=2)
        told: list[object] = [call.kwargs["mesh_dim_names"] for call in torchs.call_args_list]
        same = namedmesh.init_mesh(stages=2, copies=2)
        told += [torchs.call_count, same.group("stages") is mesh.group("dp")]
        whole = namedmesh.init_mesh(all=4)
        told += [torchs.call_count, whole.group("all") is dist.group.WORLD]
    told.append(mesh.device_mesh == init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp")))
    return told


def test_torch_makes_the_mesh_where_its_axes_are_new() -> None:
    assert run_ranks(4, _made_by_torch) == [[("dp", "tp"), 1, True, 1, True, True]] * 4


def _shared() -> float:
    mesh = namedmesh.init_mesh(dp=2, cp=1, tp=2)
    mesh.flatten("dp", "cp")
    mesh.flatten("dp", "tp")
    other = namedmesh.init_mesh(a=2, b=1, c=2, options={"c": GroupOptions(share=False)})
    apart = namedmesh.init_mesh(x=2, y=2, options={"y": GroupOptions(share=False)})
    assert mesh.group("dp", "cp") is mesh.group("dp") is other.group("a")
    assert mesh.group("dp", "tp") is dist.group.WORLD
    assert other.group("c") not in {mesh.group("tp"), apart.group("y")}
    assert other.group("b") is mesh.group("cp")
    return summed(apart.group("y"))


def test_one_communicator_for_one_set_of_ranks_and_options() -> None:
    assert run_ranks(4, _shared) == [2.0] * 4


def _cycles() -> list[int]:
    """Equal meshes, made and closed: the first makes the groups."""
    before, counts = live_groups(), []
    for _ in range(6):
        mesh = namedmesh.init_mesh(pp=1, dp=2, cp=2, tp=1, options={"dp": GroupOptions(share=False)})
        mesh.flatten("dp", "cp")
        mesh.add_view("expert", edp=1, ep=4)
        summed(mesh.group("dp"))
        mesh.close()
        mesh.close()
        counts.append(live_groups() - before)
    namedmesh.init_mesh(dp=2, tp=2).close(destroy_groups=True)
    counts.append(live_groups() - before)
    assert summed(None) == 4.0
    return counts


def test_cycles_of_equal_meshes_add_nothing_and_groups_can_be_given_back() -> None:
    # Of their own dp, and with it dp_cp; cp, and the group of one.
    assert run_ranks(4, _cycles) == [[4] * 6 + [0]] * 4


def _bound() -> list[float]:
    """A default group that is bound to a device: torch splits, with every rank in one of the parts."""

    def split_group(*, split_ranks: list[list[int]], **options: Any) -> Any:
        assert sorted(rank for ranks in split_ranks for rank in ranks) == list(range(4))
        made = [dist.new_group(ranks, **options) for ranks in split_ranks]
        return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)

    patch = pytest.MonkeyPatch()
    patch.setattr(groups, "bound_device", lambda: torch.device("cuda:0"))
    patch.setattr(dist, "split_group", split_group)
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=1)
    mesh.add_view("expert", ep=4, etp=1)
    return [summed(mesh.group(axis)) for axis in mesh]


def test_with_a_bound_device_torch_splits_the_world() -> None:
    assert run_ranks(4, _bound) == [[2.0, 2.0, 1.0, 4.0, 1.0]] * 4


# What outlives a mesh: its groups, so that what torch remembers by name stays true.


def _product(mesh: NamedMesh) -> float:
    """A sharded matrix product, and its gradient, on the slice of one axis."""
    torch.manual_seed(0)
    left = distribute_tensor(
        torch.rand(4, 6, requires_grad=True), mesh["tp"], [Replicate()], src_data_rank=None
    )
    right = distribute_tensor(torch.rand(6, 8), mesh["tp"], [Shard(1)], src_data_rank=None)
    total: Any = (left @ right).sum()
    total.backward()
    assert isinstance(left, DTensor)
    whole: Any = total.detach().full_tensor()
    return float(whole)


def _reopened() -> list[float]:
    """Threads have caches of their own; a mesh that is opened again is equal to the first one."""
    told: list[float] = []
    with ThreadPoolExecutor(1) as thread:  # It stays, as autograd's thread of a GPU does.
        for destroy in (False, False, True, True):  # after the first True the groups are new
            mesh = namedmesh.init_mesh(dp=2, tp=2)
            told += [_product(mesh), thread.submit(_product, mesh).result()]
            mesh.close(destroy_groups=destroy)
    return told


def test_a_reopened_mesh_computes_the_same_in_every_thread() -> None:
    for told in run_ranks(4, _reopened):
        assert len(told) == 8
        assert all(first == pytest.approx(second) for first, second in pairwise(told))


def _two_alive() -> list[object]:
    first, second, third = (namedmesh.init_mesh(dp=2, tp=2) for _ in range(3))
    found = [_product(first), _product(second)]
    first.close()
    found.append(_product(second))
    third.close(destroy_groups=True)
    found.append(_product(second))  # DTensor finds groups by name
    told: list[object] = [found == pytest.approx([found[0]] * 4), first.closed, third.closed]
    second.close(destroy_groups=True)
    told.append(live_groups())
    dist.destroy_process_group()
    return told


def test_of_equal_meshes_each_may_end_and_what_an_open_one_uses_is_not_destroyed() -> None:
    assert run_ranks(4, _two_alive) == [[True, True, True, 1]] * 4


def _new_default_group() -> list[object]:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    dist.destroy_process_group()
    calls: list[Callable[[], object]] = [
        lambda: mesh["dp", "tp"],
        lambda: mesh.group("tp"),
        lambda: mesh.size("tp"),
        lambda: mesh.size(),
        lambda: mesh.rank("tp"),
        lambda: mesh.ranks("tp"),
        lambda: mesh.coords,
        lambda: mesh.next("dp"),
        lambda: mesh.is_first("dp"),
        lambda: mesh.flatten("dp", "tp"),
        mesh.explain,
    ]
    [text] = {error_of(call) for call in calls}
    told: list[object] = [text, error_of(namedmesh.current_mesh)]
    namedmesh.launch.init("cpu")
    again = namedmesh.init_mesh(dp=2, tp=2)
    told += [namedmesh.current_mesh() is again, summed(again.group("tp"))]
    dist.destroy_process_group()
    return told


def test_a_mesh_ends_with_the_default_group_and_the_next_one_is_made_anew() -> None:
    text = (
        "MeshError: the mesh over dp=2 x tp=2 (4 ranks) has no groups any more, since the default group was destroyed; "
        "make another with init_mesh()"
    )
    none = "MeshError: no mesh is alive in this process; call namedmesh.init_mesh(...) first"
    assert run_ranks(4, _new_default_group) == [[text, none, True, 2.0]] * 4


def _for_another_device() -> list[object]:
    """A default group that serves GPUs only, as NCCL's does."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=2)
    told: list[object] = [error_of(lambda: namedmesh.init_mesh(dp=2, tp=1, device="cpu"))]
    mesh = namedmesh.init_mesh(dp=2, device="cpu", backend="gloo")
    view = GroupOptions(backend="cuda:gloo")
    told.append(error_of(lambda: mesh.add_view("v", x=2, options={"x": view})).partition(";")[0])
    return [*told, summed(mesh.group("dp"))]


def test_a_mesh_on_a_device_that_its_groups_do_not_serve_is_rejected() -> None:
    def text(axis: str) -> str:
        return f"MeshError: the mesh is on cpu, but the group of {axis!r} serves cuda only"

    remedy = "create the groups with a backend for cpu, such as backend='cpu:gloo,cuda:nccl', or choose another device"
    told = run_ranks(2, _for_another_device, init=False)
    assert told == [[f"{text('dp')}; {remedy}", text("x"), 2.0]] * 2


def _ambiguous() -> list[str]:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    own = {"tp": GroupOptions(share=False)}
    told = [error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, options=own))]
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    told.append(error_of(lambda: NamedMesh.from_device_mesh(theirs)).partition(" cannot use")[0])
    mesh.close()
    adopted = NamedMesh.from_device_mesh(theirs)
    told.append(str(summed(adopted.group("tp"))))
    for _ in range(2):
        mesh = namedmesh.init_mesh(dp=2, tp=-1, replace=True)
        told += [str(namedmesh.current_mesh() is mesh), str(summed(mesh.group("tp")))]
    return told


def test_axes_that_dtensor_would_confuse_are_rejected_until_the_other_mesh_is_closed() -> None:
    text = (
        "MeshError: axis 'tp' cannot use this process group: the open mesh over dp=2 x tp=2 (4 ranks) has an axis of the "
        "same name and ranks on a different group, and DTensor cannot tell the two apart; share the groups (the same "
        "options on both meshes), close the other mesh first, or choose another name"
    )
    told = [text, "MeshError: 2 problems:\n  - axis 'dp'", "2.0", *["True", "2.0"] * 2]
    assert run_ranks(4, _ambiguous) == [told] * 4


# Adopted meshes.


def _part_of_the_world() -> list[object]:
    """torch makes a mesh over some ranks; the others have none of it."""
    theirs = DeviceMesh("cpu", torch.arange(4, 8).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_rank() < 4:
        return [error_of(lambda: NamedMesh.from_device_mesh(theirs)).partition(";")[0]]
    mesh = NamedMesh.from_device_mesh(theirs)
    same = NamedMesh.from_groups({"a": theirs.get_group("dp"), "b": theirs.get_group("tp")})
    total = summed(mesh.group("tp"), dist.get_rank())
    told = [repr(mesh.layout), same.layout.rank_offset, total, mesh.ranks("dp")]
    return [*told, error_of(lambda: mesh.flatten("dp", "tp")).partition(";")[0]]


def test_a_mesh_over_a_part_of_the_world_is_torchs_and_adopted() -> None:
    told = run_ranks(8, _part_of_the_world)
    for rank in range(4):
        assert told[rank] == [f"LayoutError: rank {rank} is not in the DeviceMesh over ranks 4, 5, 6, 7"]
    layout = Layout(dp=2, tp=2, rank_offset=4)
    for rank in range(4, 8):
        text = "MeshError: dp=2 x tp=2 (4 ranks) is a part of the world of 8 ranks, and torch makes groups with every rank"
        expected = [repr(layout), 4, float(sum(layout.group(rank, "tp"))), layout.group(rank, "dp"), text]
        assert told[rank] == expected


def _adopted_view() -> list[object]:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expert = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))
    before = live_groups()
    mesh = NamedMesh.from_device_mesh(dense)
    mesh.adopt_view("expert", expert)
    told = [mesh["ep"] == expert["ep"], mesh.group("ep") is expert.get_group("ep"), list(mesh)]
    part = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    told.append(error_of(lambda: mesh.adopt_view("other", part)).partition(", but")[0])
    return [*told, live_groups() - before]


def test_a_view_can_be_adopted_too() -> None:
    refusal = "LayoutError: axis 'tp' has the ranks 0, 1, 2, 3 in view 'other' (on rank {})"
    for rank, told in enumerate(run_ranks(4, _adopted_view)):
        assert told == [True, True, ["dp", "tp", "edp", "ep"], refusal.format(rank), 0]


# Products beside other axes.


def _beside_tensor_parallelism(sizes: dict[str, int], outer: str | None, *flat: str) -> list[float]:
    mesh = namedmesh.init_mesh(sizes)
    name = mesh.flatten(*flat).mesh_dim_names[0]  # type: ignore[index]
    data = mesh[name] if outer is None else mesh[outer, name]
    both = mesh[name, "tp"]
    assert both.mesh_dim_names == (name, "tp")
    assert both.get_group(name) is mesh.group(name)
    net = tiny.model()
    parallelize_module(net, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    for block in net:
        fully_shard(block, mesh=data)
    fully_shard(net, mesh=data)
    axes = flat if outer is None else (outer, *flat)
    rows = tiny.batch(8).chunk(mesh.size(*axes))[mesh.rank(*axes)]
    return tiny.losses(net, rows)


PRODUCTS: list[tuple[Any, ...]] = [
    ({"dp": 2, "cp": 2, "tp": 2}, None, "dp", "cp"),
    ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 1}, "dp_replicate", "dp_shard", "cp"),
    ({"dp": 2, "pp": 2, "cp": 2, "tp": 1}, None, "dp", "cp"),  # they do not adjoin
]


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_goes_together_with_the_axes_beside_it(product: tuple[Any, ...]) -> None:
    by_rank = run_ranks(8, _beside_tensor_parallelism, *product)
    alone = tiny.losses(tiny.model(), tiny.batch(8))
    mean = [fmean(losses[step] for losses in by_rank) for step in range(len(alone))]
    assert mean == pytest.approx(alone, abs=1e-9)


# Selecting.


def _selected() -> list[bool]:
    first, second = namedmesh.init_mesh(dp=2), namedmesh.init_mesh(tp=2)
    seen: list[Any] = []
    in_backward: list[Any] = []

    def ask() -> None:
        seen.append(namedmesh.current_mesh())
        value = torch.ones(1, requires_grad=True)
        value.register_hook(lambda _: in_backward.append(namedmesh.current_mesh()))
        value.clone().backward()

    with first:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        with second:
            ask()
        ask()
    return [seen == [first, second, first], in_backward == seen]


def test_the_selection_is_the_processs() -> None:
    assert run_ranks(2, _selected) == [[True, True]] * 2
