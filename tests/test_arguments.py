"""Arguments that would have no effect are refused, and a call that fails leaves nothing behind."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from messages import says
from ranks import fake_world, live_groups, run_ranks, summed

import namedmesh
from namedmesh import (
    AxisError,
    GroupOptions,
    LaunchError,
    Layout,
    LayoutError,
    NamedMesh,
    _torch,
    agreement,
    groups,
)
from namedmesh.compat.fairscale import initialize
from namedmesh.compat.megatron import parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW = GroupOptions(timeout=timedelta(minutes=7))


def _flattened_otherwise(mesh: NamedMesh) -> object:
    mesh.flatten("dp", "tp")
    return mesh.flatten("dp", "tp", name="other", options=SLOW)


IGNORED: list[tuple[Callable[[NamedMesh], object], type[Exception], str]] = [
    (
        lambda mesh: mesh.add_view("expert", pp=2, edp=2, ep=2, options={"pp": SLOW}),
        AxisError,
        "options are given for 'pp', an axis that the mesh has already, with its group; give them to init_mesh",
    ),
    (
        lambda mesh: mesh.add_view("expert", pp=2, edp=2, ep=2, options={"eq": SLOW}),
        AxisError,
        "options are given for 'eq', which is not one of the new axes ('edp', 'ep') of view 'expert'; did you mean 'ep'?",
    ),
    (
        lambda mesh: mesh.add_view("expert", pp=2, edp=2, ep=2, options={"ep": 3}),  # type: ignore[dict-item]
        AxisError,
        "options of 'ep' are a int; give GroupOptions(...)",
    ),
    (
        _flattened_otherwise,
        LayoutError,
        "2 problems:\n"
        "  - 'dp' and 'tp' already have the name 'dp_tp', and name is 'other'; leave name out\n"
        "  - the group over 'dp' and 'tp' exists with GroupOptions(), and options is "
        "GroupOptions(timeout=datetime.timedelta(seconds=420)); leave options out, or give them where the group is made "
        "first",
    ),
    (
        lambda mesh: mesh.flatten("dp", name="x"),
        LayoutError,
        "'dp' already have the name 'dp', and name is 'x'; leave name out",
    ),
    (
        lambda _: namedmesh.init_mesh(Layout(dp=8), world_size=8),
        LayoutError,
        "both Layout(dp=8) and world_size=8 were given; ...",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), IGNORED)
def test_arguments_without_effect_are_refused(
    call: Callable[[NamedMesh], object], kind: type[Exception], text: str
) -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
        with pytest.raises(kind, match=says(text)):
            call(mesh)
        mesh.flatten("pp", "dp")  # and the mesh is as it was
        mesh.close()


def test_options_of_an_axis_are_not_those_of_a_product_of_the_same_name() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=2, cp=2, dp_cp=2, options={"dp_cp": SLOW})
        assert mesh.options_of(("dp_cp",)) == SLOW
        assert mesh.options_of(("dp", "cp")) == GroupOptions()
        mesh.close()
        mesh = namedmesh.init_mesh(dp=2, cp=2, tp=2, options={"dp_cp": SLOW})
        assert mesh.options_of(("dp", "cp")) == SLOW
        mesh.close()


def test_a_mapping_of_axes_is_as_good_as_keywords() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh({"dp": -1, "tp": 2}, device="cpu")
        assert mesh.layout == Layout(dp=4, tp=2)
        assert ("tp" in mesh, "dp_tp" in mesh, "pp" in mesh, ("dp", "tp") in mesh) == (
            True,
            False,
            False,
            False,
        )
        mesh.flatten("dp", "tp")
        mesh.add_view("expert", edp=2, ep=4)
        assert "dp_tp" in mesh
        assert list(mesh) == list(mesh.coords) == ["dp", "tp", "edp", "ep"]
        assert len(mesh) == 4
        mesh.close()
        for layout in (["dp", 2], {1: 2}):
            with pytest.raises(LayoutError) as caught:
                namedmesh.init_mesh(layout, device="cpu")  # type: ignore[arg-type]
            assert str(caught.value) == (
                f"{layout!r} is no layout; give a Layout, or sizes by name as in init_mesh(dp=2, tp=2) or "
                "init_mesh({'dp': 2})"
            )
        with pytest.raises(LayoutError, match="were given; give a layout"):
            namedmesh.init_mesh({"dp": 4}, tp=2, device="cpu")


def test_neighbors_on_a_product() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
        mesh.flatten("pp", "dp")  # ranks 1, 3, 5, 7
        assert (mesh.prev("pp_dp"), mesh.next("pp_dp")) == (3, 7)
        assert (mesh.is_first("pp_dp"), mesh.is_last("pp_dp")) == (False, False)
        mesh.close()


def _adopted() -> list[bool]:
    """A group of the whole world that somebody made is used for its axis, and for products of it with ones."""
    everybody = dist.new_group(list(range(4)))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = NamedMesh.from_groups({"dp": everybody, "cp": alone})
    same = [mesh.group("dp") is everybody, mesh.flatten("dp", "cp").get_group() is everybody]
    mesh.close()
    return same


def test_an_adopted_group_of_the_world_is_used_for_its_products() -> None:
    assert run_ranks(4, _adopted) == [[True, True]] * 4


# A call that fails.


def test_no_group_is_left_when_a_later_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    create = _torch.new_group_among_members
    labels: list[str] = []

    def fails_at_tp(ranks: Any, **arguments: Any) -> Any:
        labels.append(arguments["group_desc"])
        if arguments["group_desc"].endswith(":tp"):
            raise RuntimeError("no room for another communicator")
        return create(ranks, **arguments)

    with fake_world(8):
        monkeypatch.setattr(groups, "new_group_among_members", fails_at_tp)
        for make in (
            lambda: namedmesh.init_mesh(dp=4, tp=2),
            lambda: parallel_state.initialize_model_parallel(2),
            lambda: initialize.initialize_model_parallel(2),
        ):
            labels.clear()
            with pytest.raises(RuntimeError, match="no room"):
                make()
            assert len(labels) > 1
            assert live_groups() == 1
            with pytest.raises(namedmesh.MeshError, match="no mesh is alive"):
                namedmesh.current_mesh()
        monkeypatch.undo()
        namedmesh.init_mesh(dp=4, tp=2).close()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"dp": 3}, LayoutError),
        ({"dp": 1, "device": "cuda:7"}, LaunchError),
        ({"dp": 1, "timeout": 5}, LayoutError),
        ({"dp": 1, "options": {"tq": SLOW}}, AxisError),
    ],
)
def test_no_default_group_is_left_when_the_mesh_fails(
    arguments: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        namedmesh.init_mesh(**arguments)
    assert not dist.is_initialized()


# How a backend is spelled, and how often ranks compare.


def _spelled() -> list[bool]:
    plain = namedmesh.init_mesh(dp=2, tp=2)
    loud = namedmesh.init_mesh(dp=2, tp=2, options={"tp": GroupOptions(backend="GLOO")})
    same = [plain.group("tp") is loud.group("tp"), summed(loud.group("tp")) == 2.0]
    plain.close()
    loud.close()
    return same


def test_groups_are_shared_however_their_backend_is_spelled() -> None:
    assert run_ranks(4, _spelled) == [[True, True]] * 4


def _comparisons() -> list[int]:
    counts = []
    compared: list[object] = []
    compare = agreement.Agreement.compare

    def counted(self: agreement.Agreement, *arguments: Any, **keywords: Any) -> None:
        compared.append(self)
        compare(self, *arguments, **keywords)

    agreement.Agreement.compare = counted  # type: ignore[method-assign]
    for make, destroy in (
        (lambda: parallel_state.initialize_model_parallel(2, 2), parallel_state.destroy_model_parallel),
        (lambda: initialize.initialize_model_parallel(2, 2), initialize.destroy_model_parallel),
        (lambda: namedmesh.init_mesh(dp=2, tp=2), lambda: namedmesh.current_mesh().close()),
    ):
        compared.clear()
        make()
        counts.append(len(compared))
        destroy()
    return counts


def test_one_call_compares_the_ranks_once() -> None:
    assert run_ranks(4, _comparisons) == [[1, 1, 1]] * 4
