"""No accessor breaks a compiled graph or has it compiled again, whether it was asked before or not."""

from __future__ import annotations

import inspect
import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from ranks import fake_world

import namedmesh
from namedmesh import Layout, NamedMeshError
from namedmesh.compat import deepspeed, ezpz, fairscale
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.process_groups import ProcessGroups

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh import NamedMesh

Made: TypeAlias = "tuple[Any, Callable[[], object]]"
"""What has accessors, and what ends it."""
PLAIN = (int, tuple, list, dict)


def assert_one_graph(call: Callable[[], object], *, plain: bool = False) -> None:
    """One graph serves the first call, the second, and those after a call outside of compiled code.

    With ``plain`` the call is known to answer with something that a graph can hand out.
    """
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        call()
        return x + 1

    def answering(x: torch.Tensor) -> tuple[torch.Tensor, object]:
        return x + 1, call()

    with torch._dynamo.config.patch(error_on_recompile=True):
        answers = torch.compile(answering, backend="eager", fullgraph=True)
        if plain:
            found = [answers(torch.ones(2))[1] for _ in range(2)]
            assert found == [call()] * 2
            assert answers(torch.ones(2))[1] == found[0]
            return
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        for _ in range(2):
            compiled(torch.ones(2))
        expected = call()
        compiled(torch.ones(2))
        if isinstance(expected, PLAIN):  # no graph hands out a group that it learnt of
            assert answers(torch.ones(2))[1] == answers(torch.ones(2))[1] == expected


def assert_one_graph_for_all(calls: list[tuple[Callable[[], object], bool]]) -> None:
    """The same of all calls together, which were made before; of each also whether it is plain."""
    for kind in (True, False):
        some = [call for call, plain in calls if plain == kind]
        assert some
        assert_one_graph(lambda some=some: tuple([call() for call in some]), plain=kind)  # type: ignore[misc]


MESH: dict[str, Callable[[NamedMesh], object]] = {
    "size": lambda mesh: mesh.size("tp"),
    "size of the mesh": lambda mesh: mesh.size(),
    "size of a product": lambda mesh: mesh.size("dp", "tp"),
    "rank": lambda mesh: mesh.rank("tp"),
    "rank in a product": lambda mesh: mesh.rank("tp", "dp"),
    "ranks": lambda mesh: mesh.ranks("dp", "tp"),
    "group": lambda mesh: mesh.group("tp"),
    "group of a product": lambda mesh: mesh.group("dp", "cp"),
    "group of the world": lambda mesh: mesh.group("pp", "dp", "tp"),
    "gloo group": lambda mesh: mesh.gloo_group("dp"),
    "slice": lambda mesh: mesh["tp"],
    "slice of several": lambda mesh: mesh["dp", "tp"],
    "first": lambda mesh: mesh.is_first("pp"),
    "last": lambda mesh: mesh.is_last("pp"),
    "next": lambda mesh: mesh.next("pp"),
    "previous": lambda mesh: mesh.prev("tp"),
    "coordinates": lambda mesh: mesh.coords,
    "device": lambda mesh: mesh.device,
    "torch's mesh": lambda mesh: mesh.device_mesh,
    "views": lambda mesh: mesh.views,
    "options": lambda mesh: mesh.options_of(("tp",)),
    "current mesh": lambda _: namedmesh.current_mesh().size("tp"),
}


@pytest.mark.parametrize("first", [True, False], ids=["at first", "after a call"])
@pytest.mark.parametrize("name", MESH)
def test_accessors_of_a_mesh(name: str, first: bool) -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=2, cp=1, tp=2)
        if not first:
            MESH[name](mesh)
        assert_one_graph(lambda: MESH[name](mesh))
        mesh.close()


def accessors(place: Any) -> list[str]:
    """The functions of a dialect that can be called without arguments and answer in these layouts."""
    names = []
    for name in dir(place):
        function = getattr(place, name)
        if not name.startswith(("get_", "is_")) and not name.endswith("_initialized"):
            continue
        if inspect.isroutine(function) and all(
            parameter.default is not parameter.empty
            for parameter in inspect.signature(function).parameters.values()
        ):
            names.append(name)
    return names


def plain_accessors(place: object, names: list[str]) -> dict[str, bool]:
    """Those that answer on this rank, and whether with numbers; the others are of groups that it is not in."""
    known = {}
    for name in names:
        with suppress(NamedMeshError):
            known[name] = isinstance(getattr(place, name)(), PLAIN)
    return known


def _started(place: Any, start: str, stop: str, *sizes: int, **more: int) -> Made:
    getattr(place, start)(*sizes, **more)
    return place, getattr(place, stop)


def _on_mesh(make: Callable[[NamedMesh], object]) -> Made:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    return make(mesh), mesh.close


STATE = "initialize_model_parallel", "destroy_model_parallel"
DIALECTS: dict[str, Callable[[], Made]] = {
    "megatron": partial(_started, parallel_state, *STATE, 2, 2, num_distributed_optimizer_instances=2),
    "fairscale": partial(_started, fairscale.initialize, *STATE, 2, 2),
    "ezpz": partial(_started, ezpz.tp, "initialize_tensor_parallel", "destroy_tensor_parallel", 2, 2),
    "deepspeed's mpu": partial(_on_mesh, deepspeed.mpu),
    "deepspeed's grid": partial(_on_mesh, deepspeed.PipelineParallelGrid.from_mesh),
}


@pytest.mark.parametrize("first", [True, False], ids=["at first", "after a call"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_accessors_of_dialects(dialect: str, first: bool) -> None:
    with fake_world(8, 5), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        place, stop = DIALECTS[dialect]()
        names = accessors(place)
        assert len(names) > 10
        known = plain_accessors(place, names)
        assert len(known) >= len(names) - 6  # two of Megatron-DeepSpeed's are refused beside a pipeline
        for name, plain in known.items() if first else ():
            stop()
            place, stop = DIALECTS[dialect]()
            assert_one_graph(getattr(place, name), plain=plain)
        if not first:
            assert_one_graph_for_all([(getattr(place, name), plain) for name, plain in known.items()])
        stop()


@pytest.mark.parametrize("first", [True, False], ids=["at first", "after a call"])
def test_accessors_of_three_groups(first: bool) -> None:
    with fake_world(8, 5):
        groups, stop = _on_mesh(ProcessGroups.bind)

        def ask() -> object:
            return groups.tp_group, groups.tp_rank, groups.dp_size, groups.is_last_stage

        if not first:
            ask()
        assert_one_graph(ask)
        stop()


def test_another_mesh_is_compiled_anew() -> None:
    """A constant of one mesh is never the answer of another."""
    with fake_world(8, 5):

        def step(x: torch.Tensor, mesh: NamedMesh) -> tuple[torch.Tensor, int, int]:
            return x + 1, mesh.rank("dp", "tp"), mesh.group("pp", "dp").size()

        compiled = torch.compile(step, backend="eager", fullgraph=True)
        for layout in (Layout(pp=2, dp=2, tp=2), Layout(pp=1, dp=2, tp=4)):
            mesh = namedmesh.init_mesh(layout)
            mesh.flatten("pp", "dp")
            _, *answers = compiled(torch.ones(2), mesh)
            assert answers == [mesh.rank("dp", "tp"), mesh.size("pp", "dp")]
            mesh.close()
