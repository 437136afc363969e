"""NamedMesh on real gloo ranks and on fake worlds: groups, accessors, views, adoption, closing."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from messages import error_of, match_message
from ranks import fake_world, live_groups, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import namedmesh
from namedmesh import AxisError, GroupOptions, Layout, LayoutError, MeshError, NamedMesh, OptionError
from namedmesh.mesh.internal import get_groups

if TYPE_CHECKING:
    from collections.abc import Callable


def member_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def sum_of_ranks(group: dist.ProcessGroup) -> int:
    """What a collective over the group gives: only the right member_ranks make the right sum."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total)


# Real ranks.


def _flatten_all_axes() -> dict[str, tuple[tuple[int, ...], int]]:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    results = {}
    for count in (1, 2, 3):
        for axes in combinations(("pp", "dp", "tp"), count):
            if count > 1:
                mesh.flatten(*axes)
            group = mesh.group(*axes)
            results["_".join(axes)] = member_ranks(group), sum_of_ranks(group)
    mesh.close()
    return results


def test_every_group_has_its_members_and_works() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    for rank, results in enumerate(run_ranks(8, _flatten_all_axes)):
        assert len(results) == 7
        for name, (ranks, total) in results.items():
            assert ranks == layout.group(rank, *name.split("_"))
            assert total == sum(ranks)


def _add_expert_view() -> dict[str, tuple[tuple[int, ...], int]]:
    mesh = namedmesh.init_mesh(pp=2, dp=4, tp=1)
    mesh.add_view("expert", pp=2, edp=-1, ep=2, etp=1)
    mesh.flatten("edp", "ep")
    assert mesh.group("edp", "ep") is mesh.group("dp")
    results = {
        axis: (member_ranks(mesh.group(axis)), sum_of_ranks(mesh.group(axis)))
        for axis in ("edp", "ep", "pp", "etp")
    }
    assert mesh.coords == {
        "pp": mesh.rank("pp"),
        "dp": mesh.rank("dp"),
        "tp": 0,
        "edp": mesh.rank("edp"),
        "ep": mesh.rank("ep"),
        "etp": 0,
    }
    mesh.close()
    return results


def test_a_view_is_a_factorization_of_the_same_ranks_and_shares_axes() -> None:
    layout = Layout(pp=2, edp=2, ep=2, etp=1)
    for rank, results in enumerate(run_ranks(8, _add_expert_view)):
        for axis, (ranks, total) in results.items():
            assert ranks == layout.group(rank, axis)
            assert total == sum(ranks)


def _check_options_of_groups() -> list[bool]:
    short = timedelta(seconds=77)
    mesh = namedmesh.init_mesh(
        dp=2,
        cp=2,
        tp=1,
        timeout=timedelta(seconds=55),
        options={"dp": GroupOptions(timeout=short), "cp": GroupOptions(create_gloo_group=True)},
    )
    mesh.flatten("dp", "cp")
    device = torch.device("cpu")

    def timeout(*axes: str) -> timedelta:
        return mesh.group(*axes)._get_backend(device).options._timeout

    return [
        timeout("dp") == short,
        timeout("cp") == timedelta(seconds=55),
        timeout("dp", "cp") == short,
        mesh.gloo_group("cp") is mesh.group("cp"),  # gloo already
        sum_of_ranks(mesh.group("dp", "cp")) == 6,
        mesh.group("dp", "cp") is not dist.group.WORLD,  # another timeout, so another communicator
    ]


def test_options_apply_to_groups_over_an_axis_and_over_flattened_axes() -> None:
    assert run_ranks(4, _check_options_of_groups) == [[True] * 6] * 4


def _inherit_timeout() -> bool:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    world, tp = (
        group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
        for group in (dist.group.WORLD, mesh.group("tp"))
    )
    return bool(world == tp != timedelta(minutes=30))


def test_the_default_groups_timeout_is_inherited() -> None:
    assert run_ranks(4, _inherit_timeout) == [True] * 4


def _create_gloo_groups() -> list[object]:
    """Axes on a backend that is not gloo, with gloo groups beside them, shared and not."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

    results: list[object] = []
    for share in (True, False):
        options = {"tp": GroupOptions(backend="fake", create_gloo_group=True, share=share)}
        mesh = namedmesh.init_mesh(dp=2, tp=2, options=options)
        gloo = mesh.gloo_group("tp")
        results += [dist.get_backend(mesh.group("tp")), dist.get_backend(gloo), sum_of_ranks(gloo)]
        mesh.close()
    return results


def test_additional_gloo_groups_have_the_same_ranks() -> None:
    for rank, results in enumerate(run_ranks(4, _create_gloo_groups)):
        assert results == ["fake", "gloo", 1 if rank < 2 else 5] * 2


def _find_missing_gloo_group() -> str:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

    with namedmesh.init_mesh(dp=2, tp=2, options={"dp": GroupOptions(backend="fake")}) as mesh:
        text = error_of(lambda: mesh.gloo_group("dp"))
        dist.barrier()  # a rank that ends takes its connections along, and others may be connecting
        mesh.close()
    return text


def test_a_gloo_group_that_was_not_requested_does_not_exist() -> None:
    text = (
        "MeshError: there is no gloo group over 'dp'; ask for one when the group is made, with "
        "options=GroupOptions(create_gloo_group=True)"
    )
    assert run_ranks(4, _find_missing_gloo_group) == [text] * 4


def test_with_the_fake_backend_the_group_itself_is_the_gloo_group() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
        assert mesh.gloo_group("dp") is mesh.group("dp")
        mesh.close()


# Fake worlds: any size, any rank, in this process.


def test_accessors_return_the_values_of_this_rank() -> None:
    layout = Layout(pp=4, dp=8, cp=2, tp=8)
    for rank in (0, 137, 511):
        with fake_world(512, rank):
            mesh = namedmesh.init_mesh(pp=4, dp=-1, cp=2, tp=8)
            for axes in (("tp",), ("pp",), ("dp", "cp"), ("pp", "dp", "cp", "tp"), ("tp", "dp")):
                assert mesh.ranks(*axes) == layout.group(rank, *axes)
                assert mesh.size(*axes) == len(mesh.ranks(*axes))
                assert mesh.ranks(*axes)[mesh.rank(*axes)] == rank
            assert (mesh.size(), mesh.rank(), mesh.ranks()) == (512, rank, tuple(range(512)))
            assert [mesh.prev("pp"), mesh.next("pp")] == [(rank - 128) % 512, (rank + 128) % 512]
            assert mesh.coords == layout.coords(rank)
            assert mesh.is_first("pp") == (rank < 128)
            assert mesh.is_last("pp") == (rank >= 384)
            assert (mesh.next("pp"), mesh.prev("pp")) == ((rank + 128) % 512, (rank - 128) % 512)
            assert member_ranks(mesh.group("cp")) == mesh.ranks("cp")
            assert mesh["dp", "cp"].mesh.flatten().tolist() == list(mesh.ranks("dp", "cp"))
            mesh.close()


def test_sub_meshes_are_the_same_objects_and_share_groups() -> None:
    with fake_world(16, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=2, cp=1, tp=4)
        assert mesh["tp"] is mesh["tp"] is mesh["tp",]
        assert mesh["dp", "tp"] is mesh["dp", "tp"]
        assert mesh["pp", "dp", "cp", "tp"] is mesh.device_mesh
        for axis in mesh.layout:
            assert mesh.group(axis) is mesh[axis].get_group() is mesh.device_mesh.get_group(axis)
        flat = mesh.flatten("cp", "dp")
        assert flat is mesh.flatten("dp", "cp") is mesh["dp_cp"]
        assert flat.mesh_dim_names == ("dp_cp",)
        assert mesh.group("dp_cp") is flat.get_group()
        both = mesh["dp_cp", "tp"]
        assert (both.mesh_dim_names, both.get_group("dp_cp")) == (("dp_cp", "tp"), flat.get_group())
        assert (mesh.size("dp_cp"), mesh.rank("dp_cp"), mesh.ranks("dp_cp", "tp")) == (2, 1, tuple(range(8)))
        assert mesh.group("dp", "cp") is mesh.group("cp", "dp") is flat.get_group() is mesh.group("dp")
        mesh.close()


def test_the_torch_mesh_equals_the_result_of_init_device_mesh() -> None:
    with fake_world(16, 5):
        theirs = init_device_mesh("cpu", (2, 1, 8), mesh_dim_names=("pp", "cp", "tp"))
        mesh = namedmesh.init_mesh(pp=2, cp=1, tp=8)
        assert mesh.device_mesh == theirs
        assert hash(mesh.device_mesh) == hash(theirs)
        mesh.close()


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ({"pp": 1, "dp": 1, "tp": 16}, 0),  # the default group serves; nothing is made but the group of one
        ({"pp": 1, "dp": 8, "cp": 1, "tp": 2}, 2),
        ({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, 4),
    ],
)
def test_one_communicator_for_each_set_of_ranks(sizes: dict[str, Any], held: int) -> None:
    with fake_world(16):
        before = live_groups()
        mesh = namedmesh.init_mesh(**sizes)
        for count in range(2, len(sizes) + 1):
            for axes in combinations(sizes, count):
                mesh.flatten(*axes)
        owned = [made for made in mesh.communicators if made.owned and len(made.ranks) > 1]
        distinct = {mesh.ranks(*axes) for n in range(1, len(sizes) + 1) for axes in combinations(sizes, n)}
        expected = {ranks for ranks in distinct if 1 < len(ranks) < 16}
        assert {made.ranks for made in owned} == expected
        assert len(owned) == len(expected) >= held
        assert live_groups() - before == len(owned) + (1 in sizes.values())
        mesh.close()
        assert live_groups() - before == len(owned) + (1 in sizes.values())  # they stay for the next mesh


def test_accessors_never_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(pp=2, dp=2, cp=1, tp=2)

        def forbidden(*_: object, **__: object) -> None:
            raise AssertionError("an accessor made a group")

        for name in ("new_group", "split_group"):
            monkeypatch.setattr(dist, name, forbidden)
            monkeypatch.setattr(c10d, name, forbidden)
        for axis in mesh.layout:
            assert mesh.group(axis) is mesh[axis].get_group()
        assert mesh.group("dp", "cp") is mesh.group("dp")
        assert mesh.group("pp", "dp", "tp") is dist.group.WORLD
        assert "with 3 communicators" in mesh.explain()
        mesh.close()


PUBLIC_NAMES = [
    "add_view",
    "adopt_view",
    "axes",
    "close",
    "closed",
    "communicators",
    "coords",
    "device",
    "device_mesh",
    "explain",
    "flatten",
    "from_device_mesh",
    "from_groups",
    "global_rank",
    "gloo_group",
    "group",
    "is_first",
    "is_last",
    "layout",
    "next",
    "prev",
    "rank",
    "ranks",
    "shape",
    "size",
    "views",
]


def test_a_mesh_shows_its_public_interface_only() -> None:
    """In the tab completion of a notebook, for example."""
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=4, tp=2)
        assert [name for name in dir(mesh) if not name.startswith("_")] == PUBLIC_NAMES
        mesh.close()


def test_several_meshes_can_be_open_at_once() -> None:
    with fake_world(8):
        first, second = namedmesh.init_mesh(dp=8), namedmesh.init_mesh(dp=2, tp=4)
        with pytest.raises(MeshError) as caught:
            namedmesh.current_mesh()
        assert str(caught.value) == (
            "2 meshes are open in this process and none is selected: dp=2 x tp=4 (8 ranks), dp=8 (8 ranks); "
            "select one with 'with mesh:', or make the last one with init_mesh(close_existing=True), which closes the others"
        )
        with first as entered:
            assert entered is first is namedmesh.current_mesh()
            with second:
                assert namedmesh.current_mesh() is second
            assert namedmesh.current_mesh() is first
        first.close()
        assert namedmesh.current_mesh() is second
        second.close()
        with pytest.raises(MeshError, match=r"no mesh is open in this process; call namedmesh.init_mesh"):
            namedmesh.current_mesh()


def test_a_transposed_torch_mesh_is_adopted_with_its_axes_by_stride() -> None:
    """Its axes are in the order of strides; slices keep the order that torch knows."""
    with fake_world(8, 3):
        theirs = DeviceMesh("cpu", torch.arange(8).reshape(2, 4).T, mesh_dim_names=("tp", "dp"))
        mesh = NamedMesh.from_device_mesh(theirs)
        assert mesh.layout == Layout(dp=2, tp=4)
        assert mesh.ranks("tp") == (0, 1, 2, 3) == member_ranks(mesh.group("tp"))
        assert mesh["tp", "dp"] is theirs
        both = mesh.flatten("tp", "dp")
        assert both.mesh.tolist() == list(range(8)) == list(mesh.ranks("dp", "tp"))
        assert both.get_local_rank() == 3
        assert mesh["dp_tp"] is both
        assert both.get_group() is mesh.group("dp_tp")
        mesh.close()


MESSAGES: list[tuple[Callable[[NamedMesh], object], type[Exception], str]] = [
    (lambda mesh: mesh["tq"], AxisError, "axis 'tq' ... ('pp', 'dp', 'tp', 'edp', 'ep'); did you mean 'tp'?"),
    (
        lambda mesh: mesh.group("dp", "ep"),
        AxisError,
        "axes 'dp' and 'ep' are not together in one view ('dp' in the mesh and 'ep' in view 'expert'); combine axes "
        "of one view only",
    ),
    (
        lambda mesh: mesh["tp", "dp"],
        LayoutError,
        'mesh["tp", "dp"] is out of order; torch slices in the order of the mesh: mesh["dp", "tp"]',
    ),
    (
        lambda mesh: mesh["tp", "tp"],
        AxisError,
        "axes ('tp', 'tp') are not a selection of ('pp', 'dp', 'tp'); name each axis once",
    ),
    (
        lambda mesh: mesh.group("pp", "dp"),
        MeshError,
        "there is no group over 'pp' and 'dp' yet; call mesh.flatten(\"pp\", \"dp\") once, on every rank, before it is "
        "asked for",
    ),
    (lambda mesh: mesh.group(), AxisError, "no axis is named; ... ('pp', 'dp', 'tp', 'edp', 'ep')"),
    (
        lambda mesh: mesh.flatten("dp", "tp", name="pp"),
        LayoutError,
        "the name 'pp' is taken by an axis; choose another with name=",
    ),
    (
        lambda mesh: mesh.add_view("expert", pp=4, ep=2),
        LayoutError,
        "2 problems:\n"
        "  - axis 'pp' has the ranks 0, 2, 4, 6 in view 'expert' (on rank 0), but 0, 4 in pp=2 x dp=2 x tp=2 (8 "
        "ranks); views that share an axis must have the same ranks on it: change sizes or their order, or give the axis "
        "another name\n"
        "  - the name 'expert' is taken by another view; choose another name",
    ),
    (lambda mesh: mesh.add_view("other", a=3, b=-1), LayoutError, "a=3 ... 8 ranks; ... multiple of 3"),
    (
        lambda mesh: mesh.flatten("pp", "tp"),
        OptionError,
        "axes 'pp' and 'tp' set different values of timeout, datetime.timedelta(seconds=5) and "
        "datetime.timedelta(seconds=6); set the one of the group over both with options=",
    ),
    (lambda mesh: mesh.explain(rank=8), LayoutError, "rank 8 is outside ..."),
    (
        lambda mesh: mesh.explain("tp"),  # type: ignore[arg-type]
        MeshError,
        "group must be a process group, got 'tp'; write mesh.explain(mesh.group(\"dp\")), or rank=...",
    ),
    (
        lambda mesh: mesh.flatten("dp", "tp", options={}),  # type: ignore[arg-type]
        OptionError,
        "options must be GroupOptions, got {}; write GroupOptions(timeout=...)",
    ),
    (
        lambda mesh: NamedMesh.from_device_mesh(mesh),  # type: ignore[arg-type]
        LayoutError,
        "mesh must be torch's DeviceMesh, got <NamedMesh ...>; a NamedMesh has one: mesh.device_mesh",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), MESSAGES)
def test_messages(call: Callable[[NamedMesh], object], kind: type[Exception], text: str) -> None:
    five, six = (GroupOptions(timeout=timedelta(seconds=seconds)) for seconds in (5, 6))
    with fake_world(8):
        mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2, options={"pp": five, "tp": six})
        mesh.add_view("expert", pp=2, edp=2, ep=2)
        try:
            with pytest.raises(kind, match=match_message(text)):
                call(mesh)
        finally:
            mesh.close()


HINTS = {
    "dp": 'write mesh.size("dp"), mesh.rank("dp"), mesh.group("dp") or mesh["dp"]',
    "ep": 'write mesh.size("ep"), mesh.rank("ep"), mesh.group("ep") or mesh["ep"]',
    "get_group": 'write mesh.group("dp")',
    "world_size": "write mesh.size()",
    "names": "write mesh.axes",
    "flaten": "did you mean 'flatten'?",
}


def test_attribute_errors_suggest_the_name_to_use() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=4, tp=2)
        mesh.add_view("expert", edp=2, ep=4)
        for name, hint in HINTS.items():
            with pytest.raises(
                AttributeError, match=match_message(f"'NamedMesh' object has no attribute {name!r}; {hint}")
            ):
                getattr(mesh, name)
        mesh.close()


def test_a_named_mesh_in_the_place_of_a_torch_mesh_is_one_message() -> None:
    with fake_world(2):
        mesh: Any = namedmesh.init_mesh(dp=1, tp=2)
        layer = torch.nn.Linear(2, 2)
        calls: list[Callable[[], object]] = [
            lambda: fully_shard(layer, mesh=mesh),
            lambda: distribute_tensor(torch.ones(2), mesh, [Replicate()]),
            lambda: parallelize_module(layer, mesh, ColwiseParallel()),
        ]
        for call in calls:
            with pytest.raises(
                AttributeError, match=r'DeviceMesh, give it mesh\["dp"\] or mesh.device_mesh$'
            ):
                call()
        for call in (lambda: mesh.size(0), lambda: mesh.group(1), lambda: mesh[0]):
            with pytest.raises(AxisError, match=r"axes have names, got [01]; write 'dp' or another of "):
                call()
        assert mesh._ipython_key_completions_() == ["dp", "tp"]
        mesh.close()


INIT_MESSAGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dp": 3}, LayoutError, "dp=3 needs 3 ranks, ..."),
    (
        {"layout": Layout(dp=4)},
        LayoutError,
        "dp=4 (4 ranks) covers ranks 0 to 3, but the world has ranks 0 to 7; change a size, or give one axis -1 for the "
        "remaining ranks",
    ),
    (
        {"layout": Layout(dp=4), "tp": 2},
        LayoutError,
        "both Layout(dp=4) and tp=2 were given; give one of them",
    ),
    (
        {"layout": (2, 4)},
        LayoutError,
        "layout must be a Layout or a mapping of axis names to sizes, got (2, 4); name the axes instead: init_mesh(dp=2, "
        "tp=2)",
    ),
    (
        {"dp": 8, "options": {"dp": {"share": False}, "tq": GroupOptions()}},
        OptionError,
        "2 problems:\n"
        "  - options of axis 'dp' must be GroupOptions, got {'share': False}; write GroupOptions(timeout=...)\n"
        "  - options are given for axis 'tq', which is not one of ('dp',)",
    ),
    (
        {"dp": 8, "options": GroupOptions()},
        OptionError,
        "options must be a mapping of axis names to GroupOptions, ...",
    ),
    ({"dp": 8, "timeout": 30}, OptionError, "timeout must be a positive datetime.timedelta, got 30"),
    (
        {"dp": 8, "options": {"tp_": GroupOptions(), "dq": GroupOptions(), "ep": GroupOptions()}},
        AxisError,
        "3 problems:\n"
        "  - options are given for axis 'tp_', which is not one of ('dp',)\n"
        "  - options are given for axis 'dq', which is not one of ('dp',); did you mean 'dp'?\n"
        "  - options are given for axis 'ep', which is not one of ('dp',)",
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), INIT_MESSAGES)
def test_messages_of_init_mesh(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with fake_world(8):
        before = live_groups()
        with pytest.raises(kind, match=match_message(text)):
            namedmesh.init_mesh(**arguments)
        assert live_groups() == before


def test_hybrid_sharding_axes_and_their_flattened_dp() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh({"dp_replicate": 2, "dp_shard": 2, "tp": -1})
        mesh.add_view("expert", edp=2, ep=4)
        assert (mesh.axes, mesh.shape) == (("dp_replicate", "dp_shard", "tp"), (2, 2, 2))
        assert mesh.shape == mesh.device_mesh.shape
        assert not hasattr(mesh, "dp")
        text = (
            "'dp' is in two parts here: name both, 'dp_replicate' and 'dp_shard', or call "
            'mesh.flatten("dp_replicate", "dp_shard", name="dp") once, on every rank'
        )
        for call in (lambda: mesh["dp"], lambda: mesh.size("dp"), lambda: mesh.group("dp")):
            with pytest.raises(AxisError, match=match_message(f"axis 'dp' is not one of ...; {text}")):
                call()
        mesh.flatten("dp_replicate", "dp_shard", name="dp")
        assert mesh.size("dp") == 4
        mesh.close()


def test_accessors_of_a_closed_mesh_raise() -> None:
    with fake_world(4):
        mesh = namedmesh.init_mesh(dp=2, tp=2)
        mesh.group("tp")
        mesh.close()
        text = "the mesh over dp=2 x tp=2 (4 ranks) was closed; make another with init_mesh()"
        calls: list[Callable[[], object]] = [
            lambda: mesh["tp"],
            lambda: mesh.group("tp"),
            lambda: mesh.size("tp"),
            lambda: mesh.rank("tp"),
            lambda: mesh.ranks("tp"),
            lambda: mesh.coords,
            lambda: "tp" in mesh,
            lambda: list(mesh),
            lambda: len(mesh),
            lambda: mesh.axes,
            lambda: mesh.shape,
            lambda: mesh.views,
            lambda: mesh.communicators,
            lambda: mesh.device_mesh,
            lambda: mesh.flatten("dp", "tp"),
            lambda: mesh.add_view("v", a=4),
            lambda: mesh.explain(),
            lambda: mesh.__enter__(),
        ]
        for call in calls:
            with pytest.raises(MeshError, match=match_message(text)):
                call()
        assert repr(mesh) == "<NamedMesh dp=2 x tp=2 (4 ranks), closed>"
        assert mesh


def test_meshes_and_groups_that_form_no_layout_are_not_adopted() -> None:
    with fake_world(8, 2):
        slice_of_tp = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["pp", "dp"]
        with pytest.raises(LayoutError) as caught:
            NamedMesh.from_device_mesh(slice_of_tp)
        assert str(caught.value) == (
            "the ranks of the DeviceMesh are not a contiguous range in row-major order of ('pp', 'dp'): expected rank 1 "
            "at position 1, got rank 2; adopt the full mesh instead of a slice, or make the mesh with init_mesh"
        )
        nameless = init_device_mesh("cpu", (8,))
        with pytest.raises(LayoutError, match="has no names; make it with mesh_dim_names="):
            NamedMesh.from_device_mesh(nameless)
        whole = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(LayoutError) as caught:
            NamedMesh.from_groups({"tp": whole.get_group("tp"), "dp": whole.get_group("dp")})
        assert str(caught.value).startswith(
            "2 problems:\n  - the group of axis 'tp' has ranks 2, 3, but tp=2 x dp=4"
        )


def test_explain_describes_a_mesh_a_rank_and_a_group() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=1, dp=4, tp=2)
        assert mesh.explain() == (
            "rank 5 of pp=1 x dp=4 x tp=2 (8 ranks)\n"
            "  pp: 0 of 1, alone\n"
            "  dp: 2 of 4, with ranks 1, 3, 5, 7\n"
            "  tp: 1 of 2, with ranks 4, 5\n"
            "  on cpu, with 2 communicators in addition to the default group: dp (4 ranks), tp (2 ranks)"
        )
        assert mesh.explain(rank=0).splitlines()[2] == "  dp: 0 of 4, with ranks 0, 2, 4, 6"
        name = mesh.group("tp").group_name
        assert mesh.explain(mesh.group("tp")) == (
            f"group tp: ranks 4, 5 (2), fake, made by this mesh, torch name {name}"
        )
        stranger = dist.new_group([4, 5])
        with pytest.raises(MeshError, match=r"is not one of this mesh's"):
            mesh.explain(stranger)
        mesh.close()


def test_a_slice_made_under_dispatch_modes_has_real_tensors() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(dp=4, tp=2)
        with torch.device("meta"), FakeTensorMode(), torch.inference_mode():
            data, whole = mesh["dp"], mesh.device_mesh
        assert not data.mesh.is_inference()
        assert (tuple(data.get_coordinate() or ()), tuple(whole.get_coordinate() or ())) == ((2,), (2, 1))
        assert data.mesh.tolist() == [1, 3, 5, 7]
        assert whole["dp"].get_group() is mesh.group("dp")
        mesh.close()


def test_groups_and_meshes_without_this_rank_are_not_adopted() -> None:
    with fake_world(8, 5):
        elsewhere = dist.new_group([0, 1])
        part = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
        calls: dict[str, Callable[[], object]] = {
            "'tp' is one that rank 5 is not in": lambda: NamedMesh.from_groups({"tp": elsewhere}),
            "rank 5 is not in the DeviceMesh over ranks 0, 1, 2, 3": lambda: NamedMesh.from_device_mesh(part),
        }
        for text, call in calls.items():
            with pytest.raises(LayoutError, match=re.escape(text)):
                call()


def test_errors_about_large_worlds_are_short() -> None:
    with fake_world(2**16, 5):
        mesh = namedmesh.init_mesh(dp=-1, tp=8, device="cpu")
        with pytest.raises(LayoutError) as caught:
            mesh.add_view("expert", dp=8, ep=-1)
        assert len(str(caught.value)) < 500


def test_options_of_flattened_axes_with_a_common_prefix() -> None:
    with fake_world(8, 5):
        prior = GroupOptions(high_priority=True)
        mesh = namedmesh.init_mesh(dp=2, dp_shard=2, cp=2, options={"dp_shard_cp": prior}, device="cpu")
        assert get_groups(mesh).get_options(("dp_shard", "cp")) == prior
        assert get_groups(mesh).get_options(("dp", "cp")) == GroupOptions()
