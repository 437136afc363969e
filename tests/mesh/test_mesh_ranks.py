"""Meshes on real ranks: what they share, what outlives them, and that they go together with torch's own features."""

from __future__ import annotations

import logging
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import namedmesh
from namedmesh import GroupOptions, Layout, NamedMesh
from namedmesh.mesh import groups, views

# Which groups are created, and which are shared.


def _count_calls_of_init_device_mesh() -> list[object]:
    torchs = mock.Mock(wraps=init_device_mesh)
    with mock.patch.object(views, "init_device_mesh", torchs):
        mesh = namedmesh.init_mesh(pp=1, dp=2, tp=2)
        results: list[object] = [call.kwargs["mesh_dim_names"] for call in torchs.call_args_list]
        same = namedmesh.init_mesh(stages=2, copies=2)
        results += [torchs.call_count, same.group("stages") is mesh.group("dp")]
        whole = namedmesh.init_mesh(all=4)
        results += [torchs.call_count, whole.group("all") is dist.group.WORLD]
    results.append(mesh.device_mesh == init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp")))
    return results


def test_torch_creates_the_mesh_if_all_its_axes_are_new() -> None:
    assert run_ranks(4, _count_calls_of_init_device_mesh) == [[("dp", "tp"), 1, True, 1, True, True]] * 4


def _share_groups() -> float:
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


def test_groups_with_the_same_ranks_and_options_are_shared() -> None:
    assert run_ranks(4, _share_groups) == [2.0] * 4


def _make_and_close_meshes() -> list[int]:
    """Create and close equal meshes. The first one creates the groups."""
    before, counts = live_groups(), []
    for _ in range(6):
        mesh = namedmesh.init_mesh(pp=1, dp=2, cp=2, tp=1, options={"dp": GroupOptions(share=False)})
        mesh.flatten("dp", "cp")
        mesh.add_view("expert", edp=1, ep=4)
        summed(mesh.group("dp"))
        mesh.close()
        mesh.close()
        counts.append(live_groups() - before)
    assert summed(None) == 4.0
    return counts


def test_equal_meshes_reuse_groups() -> None:
    # Of their own dp, and with it dp_cp; cp, and the group of one.
    assert run_ranks(4, _make_and_close_meshes) == [[4] * 6] * 4


def _split_world() -> list[float]:
    """A default group that is bound to a device: torch splits, with every rank in one of the parts."""

    def split_group(*, split_ranks: list[list[int]], **options: Any) -> Any:
        assert sorted(rank for ranks in split_ranks for rank in ranks) == list(range(4))
        made = [dist.new_group(ranks, **options) for ranks in split_ranks]
        return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)

    patch = pytest.MonkeyPatch()
    patch.setattr(groups, "get_bound_device", lambda: torch.device("cuda:0"))
    patch.setattr(dist, "split_group", split_group)
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=1)
    mesh.add_view("expert", ep=4, etp=1)
    return [summed(mesh.group(axis)) for axis in mesh]


def test_with_a_bound_device_torch_splits_the_world() -> None:
    assert run_ranks(4, _split_world) == [[2.0, 2.0, 1.0, 4.0, 1.0]] * 4


# Groups outlive a mesh, because torch's caches refer to them by name.


def _multiply_sharded(mesh: NamedMesh) -> float:
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


def _reopen_mesh() -> list[float]:
    """Threads have caches of their own; a mesh that is opened again is equal to the first one."""
    results: list[float] = []
    with ThreadPoolExecutor(1) as thread:  # It stays, as autograd's thread of a GPU does.
        for _ in range(4):
            mesh = namedmesh.init_mesh(dp=2, tp=2)
            results += [_multiply_sharded(mesh), thread.submit(_multiply_sharded, mesh).result()]
            mesh.close()
    return results


def test_a_reopened_mesh_computes_the_same_in_every_thread() -> None:
    for results in run_ranks(4, _reopen_mesh):
        assert len(results) == 8
        assert all(first == pytest.approx(second) for first, second in pairwise(results))


def _close_equal_meshes() -> list[object]:
    first, second, third = (namedmesh.init_mesh(dp=2, tp=2) for _ in range(3))
    found = [_multiply_sharded(first), _multiply_sharded(second)]
    first.close()
    found.append(_multiply_sharded(second))
    third.close()
    found.append(_multiply_sharded(second))  # DTensor finds groups by name
    results: list[object] = [found == pytest.approx([found[0]] * 4), first.closed, third.closed]
    second.close()
    dist.destroy_process_group()
    results.append(live_groups())
    return results


def test_groups_outlive_their_meshes_and_end_with_the_default_group() -> None:
    assert run_ranks(4, _close_equal_meshes) == [[True, True, True, 0]] * 4


def _replace_default_group() -> list[object]:
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
    results: list[object] = [text, error_of(namedmesh.current_mesh)]
    namedmesh.launch.init("cpu")
    again = namedmesh.init_mesh(dp=2, tp=2)
    results += [namedmesh.current_mesh() is again, summed(again.group("tp"))]
    dist.destroy_process_group()
    return results


def test_a_mesh_ends_with_the_default_group_and_a_new_mesh_gets_new_groups() -> None:
    text = (
        "MeshError: the mesh over dp=2 x tp=2 (4 ranks) has no groups any more, since the default group was destroyed; "
        "make another with init_mesh()"
    )
    none = "MeshError: no mesh is open in this process; call namedmesh.init_mesh(...) first"
    assert run_ranks(4, _replace_default_group) == [[text, none, True, 2.0]] * 4


def _make_mesh_on_wrong_device() -> list[object]:
    """A default group that serves GPUs only, as NCCL's does."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=2)
    results: list[object] = [error_of(lambda: namedmesh.init_mesh(dp=2, tp=1, device="cpu"))]
    mesh = namedmesh.init_mesh(dp=2, device="cpu", backend="gloo")
    view = GroupOptions(backend="cuda:gloo")
    results.append(error_of(lambda: mesh.add_view("v", x=2, options={"x": view})).partition(";")[0])
    return [*results, summed(mesh.group("dp"))]


def test_a_mesh_on_a_device_that_its_groups_do_not_serve_is_rejected() -> None:
    def text(axis: str) -> str:
        return f"MeshError: the mesh is on cpu, but the group of {axis!r} serves cuda only"

    remedy = "create the groups with a backend for cpu, such as backend='cpu:gloo,cuda:nccl', or choose another device"
    results = run_ranks(2, _make_mesh_on_wrong_device, init=False)
    assert results == [[f"{text('dp')}; {remedy}", text("x"), 2.0]] * 2


def _make_confusable_meshes() -> list[str]:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    own = {"tp": GroupOptions(share=False)}
    results = [error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, options=own))]
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results.append(error_of(lambda: NamedMesh.from_device_mesh(theirs)).partition(" cannot use")[0])
    mesh.close()
    adopted = NamedMesh.from_device_mesh(theirs)
    results.append(str(summed(adopted.group("tp"))))
    for _ in range(2):
        mesh = namedmesh.init_mesh(dp=2, tp=-1, close_existing=True)
        results += [str(namedmesh.current_mesh() is mesh), str(summed(mesh.group("tp")))]
    return results


def _gather_over_two_axes() -> list[str]:
    """Return the warnings of torch about a tensor that two collectives gather."""
    # A test in the parent may have made a mesh as another rank of a fake world.
    logging.getLogger("torch.distributed.tensor._redistribute").filters.clear()
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor").addHandler(handler)
    DTensor.from_local(torch.ones(2), mesh.device_mesh, (Partial(), Partial())).full_tensor()
    return messages


def test_the_warning_about_several_collectives_comes_from_one_rank() -> None:
    counts = [len(messages) for messages in run_ranks(4, _gather_over_two_axes)]
    assert counts == [1, 0, 0, 0]


def test_axes_that_dtensor_would_confuse_are_rejected_until_the_other_mesh_is_closed() -> None:
    text = (
        "MeshError: axis 'tp' cannot use this process group: the open mesh over dp=2 x tp=2 (4 ranks) has an axis of the "
        "same name and ranks on a different group, and DTensor cannot tell the two apart; share the groups (the same "
        "options on both meshes), close the other mesh first, or choose another name"
    )
    results = [text, "MeshError: 2 problems:\n  - axis 'dp'", "2.0", *["True", "2.0"] * 2]
    assert run_ranks(4, _make_confusable_meshes) == [results] * 4


# Adopted meshes.


def _adopt_mesh_over_some_ranks() -> list[object]:
    """torch creates a mesh over some ranks. The other ranks are not in it."""
    theirs = DeviceMesh("cpu", torch.arange(4, 8).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_rank() < 4:
        return [error_of(lambda: NamedMesh.from_device_mesh(theirs)).partition(";")[0]]
    mesh = NamedMesh.from_device_mesh(theirs)
    same = NamedMesh.from_groups({"a": theirs.get_group("dp"), "b": theirs.get_group("tp")})
    total = summed(mesh.group("tp"), dist.get_rank())
    results = [repr(mesh.layout), same.layout.rank_offset, total, mesh.ranks("dp")]
    return [*results, error_of(lambda: mesh.flatten("dp", "tp")).partition(";")[0]]


def test_a_torch_mesh_over_some_ranks_can_be_adopted() -> None:
    results = run_ranks(8, _adopt_mesh_over_some_ranks)
    for rank in range(4):
        assert results[rank] == [f"LayoutError: rank {rank} is not in the DeviceMesh over ranks 4, 5, 6, 7"]
    layout = Layout(dp=2, tp=2, rank_offset=4)
    for rank in range(4, 8):
        text = "MeshError: dp=2 x tp=2 (4 ranks) is a part of the world of 8 ranks, and torch makes groups with every rank"
        expected = [repr(layout), 4, float(sum(layout.group(rank, "tp"))), layout.group(rank, "dp"), text]
        assert results[rank] == expected


def _adopt_view() -> list[object]:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expert = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))
    before = live_groups()
    mesh = NamedMesh.from_device_mesh(dense)
    mesh.adopt_view("expert", expert)
    results = [mesh["ep"] == expert["ep"], mesh.group("ep") is expert.get_group("ep"), list(mesh)]
    part = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    results.append(error_of(lambda: mesh.adopt_view("other", part)).partition(", but")[0])
    return [*results, live_groups() - before]


def test_a_view_over_an_existing_torch_mesh_can_be_adopted() -> None:
    refusal = "LayoutError: axis 'tp' has the ranks 0, 1, 2, 3 in view 'other' (on rank {})"
    for rank, results in enumerate(run_ranks(4, _adopt_view)):
        assert results == [True, True, ["dp", "tp", "edp", "ep"], refusal.format(rank), 0]


# Flattened axes next to other axes.


def _train_on_flattened_axis(sizes: dict[str, int], outer: str | None, *flat: str) -> list[float]:
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


FLATTENED_CASES: list[tuple[Any, ...]] = [
    ({"dp": 2, "cp": 2, "tp": 2}, None, "dp", "cp"),
    ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 1}, "dp_replicate", "dp_shard", "cp"),
    ({"dp": 2, "pp": 2, "cp": 2, "tp": 1}, None, "dp", "cp"),  # they do not adjoin
]


@pytest.mark.ci
@pytest.mark.parametrize(
    "case",
    [FLATTENED_CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in FLATTENED_CASES[1:])],
)
def test_a_flattened_axis_can_be_combined_with_other_axes(case: tuple[Any, ...]) -> None:
    by_rank = run_ranks(8, _train_on_flattened_axis, *case)
    alone = tiny.losses(tiny.model(), tiny.batch(8))
    mean = [fmean(losses[step] for losses in by_rank) for step in range(len(alone))]
    assert mean == pytest.approx(alone, abs=1e-9)


# Selecting.


def _select_meshes() -> list[bool]:
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


def test_the_selected_mesh_is_the_same_in_every_thread() -> None:
    assert run_ranks(2, _select_meshes) == [[True, True]] * 2
