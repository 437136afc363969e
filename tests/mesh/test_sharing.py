"""``share_groups``: torch's function returns the groups of a mesh, to whatever code calls it."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from legacy import original
from messages import error_of
from ranks import TORCH, fake_world, live_groups, run_ranks, summed
from torch.distributed import distributed_c10d as c10d
from torch.distributed import new_group as imported_before
from torch.distributed.device_mesh import init_device_mesh

import namedmesh
from namedmesh import GroupOptions, Layout, MeshError, NamedMesh

NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def ask(rank_sets: Any, **arguments: Any) -> Any:
    """This rank's group of those that are made for sets of ranks, as legacy code makes them."""
    mine = None
    for ranks in rank_sets:
        group = dist.new_group(list(ranks), **arguments)
        if dist.get_rank() in ranks:
            mine = group
        else:
            assert group is NON_MEMBER
    return mine


def functions_of_torch() -> list[Any]:
    names = ("new_group", "split_group", "_new_group_with_tag", "new_subgroups_by_enumeration")
    found = [getattr(c10d, name) for name in names]
    return [*found, dist.new_group, namedmesh.mesh.views.init_device_mesh]  # type: ignore[attr-defined]


# --- what is shared -------------------------------------------------------------------------------


def _ask_in_every_way() -> list[Any]:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    mesh.add_view("expert", pp=2, edp=1, ep=4)
    layout = mesh.layout
    before, functions = live_groups(), functions_of_torch()
    facts: list[Any] = []
    with namedmesh.share_groups(mesh):
        facts.append(ask(layout.groups("tp")) is mesh.group("tp"))
        facts.append(ask([*reversed(layout.groups("dp"))], group_desc="data") is mesh.group("dp"))
        facts.append(ask([ranks[::-1] for ranks in layout.groups("pp")]) is mesh.group("pp"))
        facts.append(ask(mesh.views["expert"].groups("ep")) is mesh.group("ep"))
        facts.append(imported_before([0, 1]) in {mesh.group("tp"), NON_MEMBER})
        facts.append(ask((rank,) for rank in range(8)) is mesh.group("edp"))
        facts.append(dist.new_group() is dist.group.WORLD)
        pairs = [list(ranks) for ranks in layout.groups("tp")]
        facts.append(dist.new_subgroups_by_enumeration(pairs)[0] is mesh.group("tp"))
        facts.append(dist.new_subgroups(group_size=2)[0] is mesh.group("tp"))
        torch_mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"))
        facts.append(torch_mesh.get_group("b") is mesh.group("tp"))
        facts.append(live_groups() == before + 1)  # init_device_mesh has asked for (pp, dp)
        facts.append(ask(layout.groups("dp", "tp")) is mesh.group("dp", "tp"))
        facts.append(ask(layout.groups("dp", "tp")) is mesh.group("dp", "tp"))
        made = live_groups() - before
        ends = ask([(0, 6), (1, 7)])
        facts.append(ends is None or ends not in {group.group for group in mesh.communicators})
    facts += [made, functions_of_torch() == functions, summed(mesh.group("dp", "tp"))]
    return facts


def test_every_way_to_a_group_of_the_mesh_returns_it() -> None:
    """The group over dp and tp has the ranks of ep; both are one communicator."""
    for facts in run_ranks(8, _ask_in_every_way):
        assert facts == [*[True] * 14, 1, True, 4.0]


def test_split_group_of_the_world_returns_the_groups_of_the_mesh() -> None:
    for rank in (0, 5):
        with fake_world(8, rank):
            mesh = namedmesh.init_mesh(dp=4, tp=2, device="cpu")
            pairs = [list(ranks) for ranks in mesh.layout.groups("tp")]
            with namedmesh.share_groups(mesh):
                assert c10d.split_group(split_ranks=pairs) is mesh.group("tp")
                first = c10d.split_group(None, pairs[:1])
                assert first is (mesh.group("tp") if rank == 0 else None)
                if TORCH.release < (2, 15):  # torch's own error, without a device
                    with pytest.raises(RuntimeError, match="not safe to split"):
                        c10d.split_group(split_ranks=[[0, 3], [1, 2]])
            mesh.close()


# --- what a request asks for ----------------------------------------------------------------------

MINUTE = timedelta(minutes=1)
GLOO: Any = dist.ProcessGroupGloo
OWN: dict[str, dict[str, Any]] = {
    "a timeout": {"timeout": MINUTE},
    "options of the backend": {"pg_options": GLOO._Options()},
    "a second communicator": {"group_desc": "DATA_PARALLEL_GROUP_WITH_CP_AG"},
}


def _ask_with_options() -> dict[str, Any]:
    mesh = namedmesh.init_mesh(dp=2, tp=2, timeout=timedelta(minutes=3))
    pairs = mesh.layout.groups("tp")
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with namedmesh.share_groups(mesh):
            for name, arguments in OWN.items():
                group = ask(pairs, **arguments)
                found[name] = group is not mesh.group("tp") and summed(group) == 2
            # From torch 2.14 on, every group that only some ranks make changes the names of later groups: plain torch
            # hangs in the next one.
            if dist.get_rank() in {0, 1} and TORCH.release < (2, 14):
                local = dist.new_group([0, 1], use_local_synchronization=True)
                assert local is not mesh.group("tp")
            unsorted = dist.new_group([1, 0, 3, 2], sort_ranks=False)
            found["an order"] = dist.get_process_group_ranks(unsorted) == [1, 0, 3, 2]
            found["gloo, as the mesh"] = ask(pairs, backend="gloo") is mesh.group("tp")
            found["the timeout of the mesh"] = ask(pairs, timeout=timedelta(minutes=3)) is mesh.group("tp")
        with namedmesh.share_groups(mesh, keep_timeouts=True):
            found["kept"] = ask(pairs, timeout=MINUTE, backend="gloo") is mesh.group("tp")
        other = namedmesh.init_mesh(dp=4, options={"dp": GroupOptions(share=False)})
        with namedmesh.share_groups(mesh):
            found["a mesh inside"] = ask([range(4)]) is mesh.group("dp", "tp") is not other.group("dp")
            third = namedmesh.init_mesh(Layout(a=4), options={"a": GroupOptions(timeout=MINUTE)})
            found["its own groups"] = third.group("a") is not dist.group.WORLD
    found["texts"] = [str(warning.message) for warning in caught]
    return found


def test_options_of_a_request_decide_whether_it_is_shared() -> None:
    first, *others = run_ranks(4, _ask_with_options)
    (text,) = first.pop("texts")
    assert text == (
        "share_groups: a group over 'tp' with a timeout of 0:01:00 was made in addition to the group of the mesh, "
        "whose timeout is 0:03:00; share_groups(mesh, keep_timeouts=True) shares it, or init_mesh(timeout=...)"
    )
    assert all(first.values()), first
    for found in others:
        assert found.pop("texts") == []
        assert all(found.values()), found


# --- blocks ---------------------------------------------------------------------------------------


def test_blocks_nest_and_end_with_an_exception() -> None:
    functions = functions_of_torch()
    with fake_world(8, 3):
        outer = namedmesh.init_mesh(dp=4, tp=2, device="cpu")
        inner = namedmesh.init_mesh(a=2, b=4, device="cpu")
        with namedmesh.share_groups(outer):
            with suppress(KeyError), namedmesh.share_groups(inner), namedmesh.share_groups(inner):
                assert dist.new_group([0, 1, 2, 3]) is inner.group("b")
                assert dist.new_group([2, 3]) is outer.group("tp")
                raise KeyError
            assert dist.new_group([2, 3]) is outer.group("tp")
            assert dist.new_group([0, 1, 2, 3]) is not inner.group("b")
            outer.close()
            assert dist.new_group([2, 3]) is not None  # of torch
        assert functions_of_torch() == functions
        with pytest.raises(MeshError, match="was closed"), namedmesh.share_groups(outer):
            pass
        assert functions_of_torch() == functions
        inner.close()


def test_a_block_holds_in_all_threads_and_blocks_of_threads_end_in_any_order() -> None:
    functions = functions_of_torch()
    with fake_world(8, 3):
        first = namedmesh.init_mesh(dp=4, tp=2, device="cpu")
        second = namedmesh.init_mesh(a=2, b=4, device="cpu")
        found: list[Any] = []
        entered, ended = threading.Event(), threading.Event()

        def enter_and_wait() -> None:
            with namedmesh.share_groups(second):
                found.append(dist.new_group([2, 3]))
                entered.set()
                ended.wait()
                found.append(dist.new_group([0, 1, 2, 3]))

        thread = threading.Thread(target=enter_and_wait)
        with namedmesh.share_groups(first):
            thread.start()
            entered.wait()
            assert dist.new_group([0, 1, 2, 3]) is second.group("b")
        assert dist.new_group([2, 3]) is not first.group("tp")
        ended.set()
        thread.join()
        assert found == [first.group("tp"), second.group("b")]
        assert functions_of_torch() == functions
        first.close()
        second.close()


def test_another_order_of_the_axes_is_named_once_on_rank_0() -> None:
    ours, theirs = Layout(pp=2, dp=3, tp=2), Layout(dp=3, pp=2, tp=2)
    for rank in (0, 7):
        with fake_world(12, rank), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mesh = namedmesh.init_mesh(ours, device="cpu")
            with namedmesh.share_groups(mesh):
                for axis in ("dp", "pp", "tp"):
                    ask(theirs.groups(axis))
                ask([(0, 11)])  # of no order
            mesh.close()
        texts = [str(warning.message) for warning in caught]
        if rank == 0:
            (text,) = texts
            assert text.startswith(
                "share_groups: 3 of 4 groups that were asked for are over other ranks than the axes of pp=2 x dp=3 x "
                "tp=2 (12 ranks), such as "
            )
            assert text.endswith("; the order dp=3 x pp=2 x tp=2 (12 ranks) would share 2 of them")
            assert caught[0].filename == __file__
        else:
            assert texts == []


def test_the_groups_of_a_mesh_of_the_same_order_cause_no_warning() -> None:
    """Hierarchies inside of an axis, and the ends of a pipeline, are torch's without a word."""
    with fake_world(16):
        mesh = namedmesh.init_mesh(pp=2, cp=4, tp=2, device="cpu")
        with namedmesh.share_groups(mesh):
            for axis in mesh.layout:
                ask(mesh.layout.groups(axis))
            ask([(0, 2), (4, 6), (0, 4), (2, 6)])
        mesh.close()


# --- mistakes -------------------------------------------------------------------------------------


def _enter_differently() -> list[str]:
    rank = dist.get_rank()
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    part = NamedMesh.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "y"))["y"])
    enter: Any = namedmesh.share_groups
    texts = [error_of(lambda: enter(torch_mesh).__enter__()), error_of(lambda: enter(part).__enter__())]
    meshes = [namedmesh.init_mesh(a=4), namedmesh.init_mesh(b=2, c=2)]
    texts.append(error_of(lambda: namedmesh.share_groups(meshes[rank == 3]).__enter__()))
    return texts


def test_a_block_needs_one_mesh_over_all_ranks() -> None:
    for wrong, part, other in run_ranks(4, _enter_differently):
        assert wrong.startswith("MeshError: share_groups got a DeviceMesh; give it a NamedMesh")
        assert (
            part.startswith("MeshError: y=2 (2 ranks) is a part of the world of 4 ranks")
            or "ranks 2 to 3" in part
        )
        assert other.startswith("AgreementError: ")
        assert "layout differs between ranks" in other
        assert "on rank 3" in other


# --- from_groups ----------------------------------------------------------------------------------


def _adopt_combined_groups() -> list[Any]:
    layout = Layout(dp=2, cp=2, tp=2)
    keys: list[Any] = ["dp", "cp", "tp", ("cp", "dp"), ("tp",)]
    groups = {}
    for key in keys[:-1]:
        groups[key] = ask(layout.groups(*([key] if isinstance(key, str) else key)))
    before = live_groups()
    mesh = NamedMesh.from_groups(groups)
    combined = groups["cp", "dp"]
    facts = [mesh.group("dp", "cp") is combined, mesh.flatten("cp", "dp").get_group() is combined]
    facts += [mesh["dp_cp", "tp"].size(0) == 4, mesh.explain(combined) != ""]
    with namedmesh.share_groups(mesh):
        facts.append(ask(layout.groups("dp", "cp")) is combined)
    facts.append(live_groups() == before)
    text = error_of(lambda: NamedMesh.from_groups(groups | {("dp", "tp"): groups["dp"]}))
    return [*facts, text, error_of(lambda: NamedMesh.from_groups(groups | {("dp", "xp"): groups["dp"]}))]


def test_groups_over_several_axes_are_adopted() -> None:
    for rank, (*facts, other_ranks, unknown) in enumerate(run_ranks(8, _adopt_combined_groups)):
        assert all(facts), facts
        assert other_ranks.startswith("LayoutError: the group of axes 'dp' and 'tp' has ranks ")
        assert f"for rank {rank}; omit it, or name its axes" in other_ranks
        assert unknown.startswith("AxisError: ")


# --- libraries ------------------------------------------------------------------------------------


def _make_hyper_comm_grid() -> list[Any]:
    grid_class = original("megatron.core.hyper_comm_grid").HyperCommGrid
    collection = original("megatron.core.process_groups_config").ProcessGroupCollection
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    before = live_groups()
    with namedmesh.share_groups(mesh):
        grid = grid_class([2, 2, 2], ["tp", "dp", "pp"])
        groups = {axes: grid.create_pg(axes) for axes in ("tp", "dp", "pp")}
        combined = grid.create_pg(["tp", "dp"])
    groups_of_model = collection(tp=grid.get_pg("tp"), pp=grid.get_pg("pp"))
    facts = [groups[axis] is mesh.group(axis) for axis in ("tp", "dp", "pp")]
    facts += [groups_of_model.tp is mesh.group("tp"), combined is mesh.group("dp", "tp")]
    return [*facts, live_groups() - before]


@pytest.mark.oracle("megatron.core", "einops")
def test_hyper_comm_grid_makes_its_groups_on_a_mesh() -> None:
    original("megatron.core.hyper_comm_grid")
    assert run_ranks(8, _make_hyper_comm_grid) == [[True] * 5 + [1]] * 8
