"""NamedMesh on real gloo ranks and on fake worlds: groups, accessors, views, adoption, closing."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from messages import error_of, says
from ranks import fake_world, live_groups, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import namedmesh
from namedmesh import AxisError, GroupOptions, Layout, LayoutError, MeshError, NamedMesh, groups
from namedmesh.compat import ezpz

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def sum_of_ranks(group: dist.ProcessGroup) -> int:
    """What a collective over the group gives: only the right members make the right sum."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total)


# Real ranks.


def _every_group() -> dict[str, tuple[tuple[int, ...], int]]:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    told = {}
    for count in (1, 2, 3):
        for axes in combinations(("pp", "dp", "tp"), count):
            if count > 1:
                mesh.flatten(*axes)
            group = mesh.group(*axes)
            told["_".join(axes)] = members(group), sum_of_ranks(group)
    mesh.close()
    return told


def test_every_group_has_its_members_and_works() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    for rank, told in enumerate(run_ranks(8, _every_group)):
        assert len(told) == 7
        for name, (ranks, total) in told.items():
            assert ranks == layout.group(rank, *name.split("_"))
            assert total == sum(ranks)


def _views() -> dict[str, tuple[tuple[int, ...], int]]:
    mesh = namedmesh.init_mesh(pp=2, dp=4, tp=1)
    mesh.add_view("expert", pp=2, edp=-1, ep=2, etp=1)
    mesh.flatten("edp", "ep")
    assert mesh.group("edp", "ep") is mesh.group("dp")
    told = {
        axis: (members(mesh.group(axis)), sum_of_ranks(mesh.group(axis)))
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
    return told


def test_a_view_factors_the_same_ranks_and_shares_axes() -> None:
    layout = Layout(pp=2, edp=2, ep=2, etp=1)
    for rank, told in enumerate(run_ranks(8, _views)):
        for axis, (ranks, total) in told.items():
            assert ranks == layout.group(rank, axis)
            assert total == sum(ranks)


def _leak() -> list[int]:
    before = live_groups()
    counts = []
    for _ in range(10):
        mesh = namedmesh.init_mesh(pp=1, dp=2, cp=2, tp=1)
        mesh.flatten("dp", "cp")
        mesh.add_view("expert", edp=1, ep=4)
        sum_of_ranks(mesh.group("dp"))
        mesh.close()
        mesh.close()
        counts.append(live_groups() - before)
    assert sum_of_ranks(dist.group.WORLD) == 6  # type: ignore[arg-type]
    return counts


def test_closing_gives_every_group_back_time_after_time() -> None:
    assert run_ranks(4, _leak) == [[0] * 10] * 4


def _with_options() -> list[bool]:
    short = timedelta(seconds=77)
    mesh = namedmesh.init_mesh(
        dp=2,
        cp=2,
        tp=1,
        timeout=timedelta(seconds=55),
        options={"dp": GroupOptions(timeout=short), "cp": GroupOptions(gloo_twin=True)},
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


def test_options_reach_axes_and_what_is_derived_from_them() -> None:
    assert run_ranks(4, _with_options) == [[True] * 6] * 4


def _inherited_timeout() -> bool:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    world, tp = (
        group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
        for group in (dist.group.WORLD, mesh.group("tp"))
    )
    return bool(world == tp != timedelta(minutes=30))


def test_the_default_groups_timeout_is_inherited() -> None:
    assert run_ranks(4, _inherited_timeout) == [True] * 4


def _parts() -> tuple[str, int, int]:
    """Two meshes over two halves of the world; only the members of each half know of it."""
    half = dist.get_rank() // 2
    sizes: dict[str, Any] = {"dp": 2, "tp": 1} if half == 0 else {"pp": 1, "tp": 2}
    mesh = namedmesh.init_mesh(**sizes, rank_offset=2 * half, part=True)
    axis = "dp" if half == 0 else "tp"
    told = (repr(mesh.layout), sum_of_ranks(mesh.group(axis)), mesh.rank(axis))
    if half == 0:  # one half makes more groups than the other ...
        namedmesh.init_mesh(dp=2, rank_offset=0, part=True)
    # ... and groups over everyone still come about, ours and torch's.
    both = namedmesh.init_mesh(dp=2, tp=2)
    assert sum_of_ranks(both.group("tp")) == 4 * half + 1
    assert sum_of_ranks(dist.new_group([0, 1, 2, 3])) == 6
    return told


def test_meshes_over_parts_of_the_world() -> None:
    first, second = "Layout(dp=2, tp=1)", "Layout(pp=1, tp=2, rank_offset=2)"
    assert run_ranks(4, _parts) == [(first, 1, 0), (first, 1, 1), (second, 5, 0), (second, 5, 1)]


def _unshared() -> list[bool]:
    mesh = namedmesh.init_mesh(dp=2, cp=1, tp=2, share_groups=False)
    mesh.flatten("dp", "cp")
    mesh.flatten("dp", "tp")
    apart = [
        mesh.group("dp", "cp") is not mesh.group("dp"),
        mesh.group("dp", "cp") is mesh.flatten("dp", "cp").get_group(),
        mesh.group("dp", "tp") is not dist.group.WORLD,
        sum_of_ranks(mesh.group("dp", "cp")) == sum(mesh.ranks("dp")),
    ]
    mesh.close()
    shared = namedmesh.init_mesh(dp=2, cp=1, tp=2, options={"tp": GroupOptions(share=False)})
    shared.flatten("dp", "cp")
    shared.flatten("cp", "tp")
    return [
        *apart,
        shared.group("dp", "cp") is shared.group("dp"),
        shared.group("cp", "tp") is not shared.group("tp"),
    ]


def test_sharing_can_be_turned_off() -> None:
    assert run_ranks(4, _unshared) == [[True] * 6] * 4


def _with_gloo_groups() -> list[object]:
    """Axes on a backend that is not gloo, with gloo groups beside them, shared and not."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

    told: list[object] = []
    for share in (True, False):
        options = {"tp": GroupOptions(backend="fake", gloo_twin=True, share=share)}
        mesh = namedmesh.init_mesh(dp=2, tp=2, options=options)
        gloo = mesh.gloo_group("tp")
        told += [dist.get_backend(mesh.group("tp")), dist.get_backend(gloo), sum_of_ranks(gloo)]
        mesh.close()
    return told


def test_gloo_groups_stand_beside_groups_of_another_backend() -> None:
    for rank, told in enumerate(run_ranks(4, _with_gloo_groups)):
        assert told == ["fake", "gloo", 1 if rank < 2 else 5] * 2


def _no_gloo_group() -> str:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

    with namedmesh.init_mesh(dp=2, tp=2, options={"dp": GroupOptions(backend="fake")}) as mesh:
        text = error_of(lambda: mesh.gloo_group("dp"))
        dist.barrier()  # a rank that ends takes its connections along, and others may be connecting
        mesh.close()
    return text


def test_a_gloo_group_that_nobody_asked_for() -> None:
    text = (
        "MeshError: there is no gloo group over 'dp'; ask for one when the group is made, with "
        "options=GroupOptions(gloo_twin=True)"
    )
    assert run_ranks(4, _no_gloo_group) == [text] * 4


def test_in_a_fake_world_a_group_is_its_own_gloo_group() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
        assert mesh.gloo_group("dp") is mesh.group("dp")
        mesh.close()


def make_sets(
    mesh: namedmesh.NamedMesh, sets: list[tuple[int, ...]], label: str
) -> dict[tuple[int, ...], Any]:
    with mesh.agreed(label) as maker:
        maker.compare({})
        return maker.make_sets(sets, label)


def _irregular() -> list[object]:
    """First and last stage of each pipeline, made by everyone."""
    mesh = namedmesh.init_mesh(pp=4, tp=2)
    before = live_groups()
    world = make_sets(mesh, [tuple(range(8))], "everyone")
    assert list(world.values()) == [dist.group.WORLD]
    made = make_sets(mesh, [(0, 6), (1, 7), (4,)], "embedding")
    again = make_sets(mesh, [(0, 6), (1, 7), (2, 3)], "embedding")
    told = [
        sorted(made),
        sorted(again),
        all(made[ranks] is again[ranks] for ranks in made if ranks in again),
        all(sum_of_ranks(group) == sum(ranks) for ranks, group in made.items()),
        again.get((2, 3)) in (None, mesh.group("tp")),
        live_groups() - before,
    ]
    mesh.close()
    return told


def test_irregular_sets_are_made_and_shared() -> None:
    ends = {0: (0, 6), 6: (0, 6), 1: (1, 7), 7: (1, 7)}
    for rank, told in enumerate(run_ranks(8, _irregular)):
        mine = [ends[rank]] if rank in ends else []
        first = [(4,)] if rank == 4 else mine
        second = [(2, 3)] if rank in (2, 3) else mine
        assert told == [first, second, True, True, True, 1 if rank in ends or rank == 4 else 0]


def _bound() -> list[object]:
    """A default group that is bound to a device: every rank takes part in every group, and torch splits."""

    def split_group(*, split_ranks: list[list[int]], **options: Any) -> Any:
        made = [dist.new_group(ranks, **options) for ranks in split_ranks]
        return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)

    patch = pytest.MonkeyPatch()
    patch.setattr(groups, "bound_device", lambda: torch.device("cuda:0"))
    patch.setattr(dist, "split_group", split_group)
    before = live_groups()
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=1)
    pipelines = make_sets(mesh, [(0, 2), (1, 3)], "ends")
    ends = make_sets(mesh, [(0, 3), (1,), (0, 1, 2, 3)], "others")
    again = make_sets(mesh, [(0, 3)], "more")
    told: list[object] = [
        list(pipelines.values()) == [mesh.group("pp")],
        ends[0, 1, 2, 3] is mesh.flatten("pp", "dp").get_group() is dist.group.WORLD,
        ends.get((1,)) in (None, mesh.group("tp")),
        all(ends[ranks] is group for ranks, group in again.items()),
        sorted(len(ranks) for ranks in ends),
        [sum_of_ranks(mesh.group(axis)) == sum(mesh.ranks(axis)) for axis in mesh],
    ]
    mesh.close()
    return [*told, live_groups() - before]


def test_with_a_bound_device_all_ranks_make_all_groups() -> None:
    for rank, told in enumerate(run_ranks(4, _bound)):
        sizes = {0: [2, 4], 1: [1, 4], 2: [4], 3: [2, 4]}[rank]
        assert told == [True, True, True, True, sizes, [True] * 3, 0]


def _made_by_torch() -> list[object]:
    patch, torchs = pytest.MonkeyPatch(), mock.Mock(wraps=init_device_mesh)
    patch.setattr(groups, "bound_device", lambda: torch.device("cuda:0"))
    patch.setattr(groups, "default_timeout_is_torchs", lambda: True)
    patch.setattr(groups, "init_device_mesh", torchs)
    before = live_groups()
    mesh = namedmesh.init_mesh(pp=2, dp=2)
    same = namedmesh.init_mesh(stages=2, copies=2)
    told: list[object] = [
        torchs.call_count == 1,
        mesh.device_mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")),
        same.group("stages") is mesh.group("pp"),
        [sum_of_ranks(mesh.group(axis)) for axis in mesh] == [sum(mesh.ranks(axis)) for axis in mesh],
        live_groups() - before,
    ]
    mesh.close()
    same.close()
    return [*told, live_groups() - before]


def test_with_a_bound_device_torch_makes_a_mesh_that_it_can_express() -> None:
    # Torch makes its own two for the comparison, which it shares with nobody.
    assert run_ranks(4, _made_by_torch) == [[True, True, True, True, 4, 2]] * 4


def _adopted() -> list[object]:
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {"dp": torch_mesh.get_group("dp"), "tp": torch_mesh.get_group("tp")}
    before = live_groups()
    one = NamedMesh.from_device_mesh(torch_mesh)
    other = NamedMesh.from_groups(groups)
    told = [
        one.layout == other.layout == Layout(dp=2, tp=2),
        one.device_mesh is torch_mesh,
        one.group("tp") is other.group("tp") is groups["tp"],
        other["tp"].get_group() is groups["tp"],
        one.flatten("dp", "tp").get_group() is dist.group.WORLD,
        other.device_mesh == torch_mesh,
        live_groups() == before,
    ]
    one.close()
    other.close()
    return [*told, live_groups() == before, sum_of_ranks(groups["tp"]) == sum(members(groups["tp"]))]


def test_adopting_makes_and_destroys_nothing() -> None:
    assert run_ranks(4, _adopted) == [[True] * 9] * 4


class _Asking(torch.autograd.Function):
    """Asks for the current mesh in its backward."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        _asked.append(namedmesh.current_mesh())
        return gradient


_asked: list[Any] = []


def test_a_suspended_generator_selects_for_its_caller_as_a_context_manager_must() -> None:
    """Whether somebody iterates a generator or enters it, Python does not say; torch's ``no_grad`` does the same."""

    @contextmanager
    def selected(mesh: NamedMesh) -> Iterator[None]:
        with mesh:
            yield

    with fake_world(4):
        first, second = (namedmesh.init_mesh({axis: 4}, device="cpu") for axis in ("dp", "tp"))
        with selected(first):
            assert namedmesh.current_mesh() is first
            with selected(second), first:
                assert namedmesh.current_mesh() is first
            assert namedmesh.current_mesh() is first
        with pytest.raises(MeshError, match="none is selected"):
            namedmesh.current_mesh()


def _selections_of_threads() -> list[bool]:
    first, second = namedmesh.init_mesh(dp=2), namedmesh.init_mesh(tp=2)

    def in_a_thread(call: Callable[[], Any]) -> Any:
        told: list[Any] = []
        thread = threading.Thread(target=lambda: told.append(call()))
        thread.start()
        thread.join()
        return told[0]

    def select_second() -> Any:
        with second:
            return namedmesh.current_mesh()

    def run_backward() -> None:
        _Asking.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]

    with first:
        told = [
            "2 meshes are alive" in in_a_thread(lambda: error_of(namedmesh.current_mesh)),
            in_a_thread(select_second) is second,
            namedmesh.current_mesh() is first,
        ]
        in_a_thread(run_backward)  # autograd's own threads have selected nothing either
        told.append(_asked == [first])
        with ezpz.bind(first):
            told.append("another thread has selected" in in_a_thread(lambda: error_of(select_second)))
            told.append(ezpz.current_mesh() is first)
    with second:
        return [*told, namedmesh.current_mesh() is second]


def test_a_selection_is_that_of_its_thread() -> None:
    assert run_ranks(2, _selections_of_threads) == [[True] * 7] * 2


# Fake worlds: any size, any rank, in this process.


def test_accessors_answer_for_this_rank() -> None:
    layout = Layout(pp=4, dp=8, cp=2, tp=8)
    for rank in (0, 137, 511):
        with fake_world(512, rank):
            mesh = namedmesh.init_mesh(pp=4, dp=-1, cp=2, tp=8)
            for axes in (("tp",), ("pp",), ("dp", "cp"), ("pp", "dp", "cp", "tp"), ("tp", "dp")):
                assert mesh.ranks(*axes) == layout.group(rank, *axes)
                assert mesh.size(*axes) == len(mesh.ranks(*axes))
                assert mesh.ranks(*axes)[mesh.rank(*axes)] == rank
            assert (mesh.size(), mesh.rank(), mesh.ranks()) == (512, rank, tuple(range(512)))
            ends = [mesh.prev("pp", wrap=False), mesh.next("pp", wrap=False)]
            assert ends == [None if rank < 128 else rank - 128, None if rank >= 384 else rank + 128]
            assert [mesh.prev("pp"), mesh.next("pp")] == [(rank - 128) % 512, (rank + 128) % 512]
            assert mesh.coords == layout.coords(rank)
            assert mesh.is_first("pp") == (rank < 128)
            assert mesh.is_last("pp") == (rank >= 384)
            assert (mesh.next("pp"), mesh.prev("pp")) == ((rank + 128) % 512, (rank - 128) % 512)
            assert members(mesh.group("cp")) == mesh.ranks("cp")
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
        assert (mesh.size("dp_cp"), mesh.rank("dp_cp"), mesh.ranks("dp_cp", "tp")) == (2, 1, tuple(range(8)))
        assert mesh.group("dp", "cp") is mesh.group("cp", "dp") is flat.get_group() is mesh.group("dp")
        mesh.close()


def test_equal_to_the_mesh_that_torch_makes() -> None:
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
        assert live_groups() == before


def test_few_calls_make_derived_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    original = c10d._new_process_group_helper

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return original(*args, **options)

    monkeypatch.setattr(c10d, "_new_process_group_helper", counted)
    with fake_world(16_384, 9_999):
        mesh = namedmesh.init_mesh(pp=8, dp=-1, cp=2, tp=8)
        calls.clear()
        mesh.flatten("dp", "cp")
        mesh.flatten("cp", "tp")
        mesh.add_view("expert", pp=8, edp=-1, ep=16, etp=2)
        assert len(calls) == 5  # dp_cp, cp_tp, edp, ep, etp; one call each
        mesh.close()


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


def test_meshes_of_any_number_can_live_at_once() -> None:
    with fake_world(8):
        first, second = namedmesh.init_mesh(dp=8), namedmesh.init_mesh(dp=2, tp=4)
        with pytest.raises(MeshError) as caught:
            namedmesh.current_mesh()
        assert str(caught.value) == (
            "2 meshes are alive in this process and none is selected: dp=2 x tp=4 (8 ranks), dp=8 (8 ranks); "
            "select one with 'with mesh:', or make the last one with init_mesh(replace=True), which closes the others"
        )
        with first as entered:
            assert entered is first is namedmesh.current_mesh()
            with second:
                assert namedmesh.current_mesh() is second
            assert namedmesh.current_mesh() is first
        first.close()
        assert namedmesh.current_mesh() is second
        second.close()
        with pytest.raises(MeshError, match=r"no mesh is alive in this process; call namedmesh.init_mesh"):
            namedmesh.current_mesh()


def test_adopting_a_transposed_mesh() -> None:
    """Its axes are in the order of strides; slices keep the order that torch knows."""
    with fake_world(8, 3):
        theirs = DeviceMesh("cpu", torch.arange(8).reshape(2, 4).T, mesh_dim_names=("tp", "dp"))
        mesh = NamedMesh.from_device_mesh(theirs)
        assert mesh.layout == Layout(dp=2, tp=4)
        assert mesh.ranks("tp") == (0, 1, 2, 3) == members(mesh.group("tp"))
        assert mesh["tp", "dp"] is theirs
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
    (lambda mesh: mesh.group(), AxisError, "no axis is named; ... ('pp', 'dp', 'tp')"),
    (
        lambda mesh: mesh.flatten("dp", "tp", name="pp"),
        LayoutError,
        "the name 'pp' is taken by an axis; give the product another with name=",
    ),
    (
        lambda mesh: mesh.add_view("expert", pp=4, ep=2),
        LayoutError,
        "2 problems:\n"
        "  - axis 'pp' groups rank 0 with 0, 2, 4, 6 in view 'expert', but with 0, 4 in pp=2 x dp=2 x tp=2 (8 "
        "ranks); an axis that views share must be the same ranks in both: change sizes or order, or give it a name "
        "of its own\n"
        "  - the name 'expert' is taken by another view; choose another",
    ),
    (lambda mesh: mesh.add_view("other", a=3, b=-1), LayoutError, "a=3 ... 8 ranks; ... multiple of 3"),
    (
        lambda mesh: mesh.flatten("pp", "tp"),
        LayoutError,
        "timeout of axes 'pp' and 'tp' is both datetime.timedelta(seconds=5) and datetime.timedelta(seconds=6); say "
        "which one the group over both should have with options=",
    ),
    (lambda mesh: mesh.explain(rank=8), LayoutError, "rank 8 is outside ..."),
]


@pytest.mark.parametrize(("call", "kind", "text"), MESSAGES)
def test_messages(call: Callable[[NamedMesh], object], kind: type[Exception], text: str) -> None:
    five, six = (GroupOptions(timeout=timedelta(seconds=seconds)) for seconds in (5, 6))
    with fake_world(8):
        mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2, options={"pp": five, "tp": six})
        mesh.add_view("expert", pp=2, edp=2, ep=2)
        try:
            with pytest.raises(kind, match=says(text)):
                call(mesh)
        finally:
            mesh.close()


INIT_MESSAGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dp": 3}, LayoutError, "dp=3 needs 3 ranks, ..."),
    (
        {"layout": Layout(dp=4)},
        LayoutError,
        "dp=4 (4 ranks) on ranks 0 to 3 is not the world of 8 ranks; change a size, give one axis -1 for whatever is "
        "left, or say part=True for a mesh over a part",
    ),
    (
        {"layout": Layout(dp=4), "tp": 2},
        LayoutError,
        "both Layout(dp=4) and tp=2 were given; give a layout, which says all of this itself, or sizes by name",
    ),
    (
        {"dp": 2, "rank_offset": 4, "part": True},
        LayoutError,
        "dp=2 (2 ranks) on ranks 4 to 5 does not hold rank 0 of the world of 8 ranks; only the ranks of the part may "
        "call init_mesh(part=True)",
    ),
    (
        {"dp": 8, "options": {"tp_": GroupOptions(), "dq": GroupOptions(), "ep": GroupOptions()}},
        AxisError,
        "2 problems:\n"
        "  - options are given for axis 'tp_', which is not one of ('dp',); did you mean 'tp'?\n"
        "  - options are given for axis 'dq', which is not one of ('dp',); did you mean 'dp'?",
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), INIT_MESSAGES)
def test_messages_of_init_mesh(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with fake_world(8):
        before = live_groups()
        with pytest.raises(kind, match=says(text)):
            namedmesh.init_mesh(**arguments)
        assert live_groups() == before


def test_a_closed_mesh_says_so() -> None:
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
            lambda: mesh.flatten("dp", "tp"),
            lambda: mesh.add_view("v", a=4),
            lambda: mesh.explain(),
            lambda: mesh.__enter__(),
        ]
        for call in calls:
            with pytest.raises(MeshError, match=says(text)):
                call()
        assert repr(mesh) == "<NamedMesh dp=2 x tp=2 (4 ranks), closed>"


def test_adoption_refuses_what_is_no_layout() -> None:
    with fake_world(8, 2):
        slice_of_tp = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["pp", "dp"]
        with pytest.raises(LayoutError) as caught:
            NamedMesh.from_device_mesh(slice_of_tp)
        assert str(caught.value) == (
            "the ranks of the DeviceMesh are not a range cut along its axes: rank 2 stands where a row-major order "
            "of ('pp', 'dp') has rank 1; adopt the whole mesh rather than a slice of it, or make the mesh with "
            "init_mesh"
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


def test_explanations() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=1, dp=4, tp=2)
        assert mesh.explain() == (
            "rank 5 of pp=1 x dp=4 x tp=2 (8 ranks)\n"
            "  pp: 0 of 1, alone\n"
            "  dp: 2 of 4, with ranks 1, 3, 5, 7\n"
            "  tp: 1 of 2, with ranks 4, 5\n"
            "  on cpu, with 2 communicators beside the world's: dp (4 ranks), tp (2 ranks)"
        )
        assert mesh.explain(rank=0).splitlines()[2] == "  dp: 0 of 4, with ranks 0, 2, 4, 6"
        name = mesh.group("tp").group_name
        assert mesh.explain(mesh.group("tp")) == (
            f"group tp: ranks 4, 5 (2), fake, made by this mesh, torch name {name}"
        )
        stranger = dist.new_group([4, 5])
        with pytest.raises(MeshError, match=r"of ranks 4, 5 is not one of this mesh's"):
            mesh.explain(stranger)
        mesh.close()


def test_a_slice_that_is_first_asked_for_in_other_modes_is_a_real_one() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(dp=4, tp=2)
        with torch.device("meta"), FakeTensorMode(), torch.inference_mode():
            data, whole = mesh["dp"], mesh.device_mesh
        assert not data.mesh.is_inference()
        assert (tuple(data.get_coordinate() or ()), tuple(whole.get_coordinate() or ())) == ((2,), (2, 1))
        assert data.mesh.tolist() == [1, 3, 5, 7]
        assert whole["dp"].get_group() is mesh.group("dp")
        mesh.close()


def test_the_first_close_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=2, tp=4, device="cpu")
        monkeypatch.delattr(torch.distributed.tensor, "debug", raising=False)
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor.debug", None)
        mesh.close()


def test_mistakes_that_torch_would_report_in_its_own_words() -> None:
    with fake_world(8, 5):
        elsewhere = dist.new_group([0, 1])
        part = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
        mesh = namedmesh.init_mesh(dp=4, tp=2, device="cpu")
        lost = dist.new_group([5, 6])
        dist.destroy_process_group(lost)
        wrong: Any = GroupOptions()
        calls: dict[str, Callable[[], object]] = {
            "'tp' is one that rank 5 is not in": lambda: NamedMesh.from_groups(
                {"tp": elsewhere}, device="cpu"
            ),
            "'tp' is a str, which is no": lambda: NamedMesh.from_groups({"tp": "x"}, device="cpu"),  # type: ignore[dict-item]
            "rank 5 is not in the DeviceMesh over ranks 0, 1, 2, 3": lambda: NamedMesh.from_device_mesh(part),
            "this is a NoneType; give a DeviceMesh": lambda: mesh.adopt_view("x", None),  # type: ignore[arg-type]
            "this is a int; give a DeviceMesh": lambda: NamedMesh.from_device_mesh(3),  # type: ignore[arg-type]
            "a group that was destroyed": lambda: mesh.explain(lost),
            "a group that is a int": lambda: mesh.explain(elsewhere),
            "options are a GroupOptions": lambda: namedmesh.init_mesh(a=8, options=wrong),
            "share_groups is 'yes'": lambda: namedmesh.init_mesh(a=8, share_groups="yes"),  # type: ignore[arg-type]
            "of at most a year": lambda: namedmesh.init_mesh(a=8, timeout=timedelta.max),
            "name is 3": lambda: mesh.flatten("dp", "tp", name=3),  # type: ignore[arg-type]
            "options are {}": lambda: mesh.flatten("dp", "tp", options={}),  # type: ignore[arg-type]
        }
        if not dist.is_mpi_available():
            calls["built without mpi"] = lambda: namedmesh.init_mesh(a=8, backend="mpi", device="cpu")
        for text, call in calls.items():
            with pytest.raises((LayoutError, MeshError), match=re.escape(text)):
                call()
    with fake_world(2**16, 5):
        mesh = namedmesh.init_mesh(dp=-1, tp=8, device="cpu")
        with pytest.raises(LayoutError) as caught:
            mesh.add_view("expert", dp=8, ep=-1)
        assert len(str(caught.value)) < 500


def _a_cell_that_is_run_again() -> list[bool]:
    before = live_groups()
    told = []
    for _ in range(3):
        mesh = namedmesh.init_mesh(dp=2, tp=-1, replace=True)
        told.append(namedmesh.current_mesh() is mesh)
        told.append(sum_of_ranks(mesh.group("tp")) == sum(mesh.ranks("tp")))
    mesh.close()
    return [*told, live_groups() == before]


def test_a_mesh_may_replace_those_that_are_open() -> None:
    assert run_ranks(4, _a_cell_that_is_run_again) == [[True] * 7] * 4


def test_options_of_a_product_whose_axes_begin_alike() -> None:
    with fake_world(8, 5):
        prior = GroupOptions(high_priority=True)
        mesh = namedmesh.init_mesh(dp=2, dp_shard=2, cp=2, options={"dp_shard_cp": prior}, device="cpu")
        assert mesh.options_of(("dp_shard", "cp")) == prior
        assert mesh.options_of(("dp", "cp")) == GroupOptions()
