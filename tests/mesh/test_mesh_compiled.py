"""No accessor breaks a compiled graph or has it compiled again, whether it was asked before or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from ranks import fake_world

import namedmesh
from namedmesh import Layout
from namedmesh.mesh.internal import get_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh import NamedMesh

pytestmark = pytest.mark.ci

PLAIN = (int, tuple, list, dict)


def assert_one_graph(call: Callable[[], object]) -> None:
    """One graph serves the first call, the second, and those after a call outside of compiled code."""
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        call()
        return x + 1

    def return_result(x: torch.Tensor) -> tuple[torch.Tensor, object]:
        return x + 1, call()

    with torch._dynamo.config.patch(error_on_recompile=True):
        answers = torch.compile(return_result, backend="eager", fullgraph=True)
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        for _ in range(2):
            compiled(torch.ones(2))
        expected = call()
        compiled(torch.ones(2))
        if isinstance(expected, PLAIN):  # no graph hands out a group that it learnt of
            assert answers(torch.ones(2))[1] == answers(torch.ones(2))[1] == expected


MESH: dict[str, Callable[[NamedMesh], object]] = {
    "size": lambda mesh: mesh.size("tp"),
    "size of the mesh": lambda mesh: mesh.size(),
    "size over two axes": lambda mesh: mesh.size("dp", "tp"),
    "rank": lambda mesh: mesh.rank("tp"),
    "rank over two axes": lambda mesh: mesh.rank("tp", "dp"),
    "ranks": lambda mesh: mesh.ranks("dp", "tp"),
    "group": lambda mesh: mesh.group("tp"),
    "group over two axes": lambda mesh: mesh.group("dp", "cp"),
    "group of the world": lambda mesh: mesh.group("pp", "dp", "tp"),
    "gloo group": lambda mesh: mesh.gloo_group("dp"),
    "slice": lambda mesh: mesh["tp"],
    "slice of several": lambda mesh: mesh["dp", "tp"],
    "group of a slice": lambda mesh: (mesh["tp"].get_group().size(), mesh["dp"].get_local_rank()),
    "first": lambda mesh: mesh.is_first("pp"),
    "last": lambda mesh: mesh.is_last("pp"),
    "next": lambda mesh: mesh.next("pp"),
    "previous": lambda mesh: mesh.prev("tp"),
    "coordinates": lambda mesh: mesh.coords,
    "device": lambda mesh: mesh.device,
    "torch's mesh": lambda mesh: mesh.device_mesh,
    "views": lambda mesh: mesh.views,
    "options": lambda mesh: get_groups(mesh).get_options(("tp",)),
    "current mesh": lambda _: namedmesh.current_mesh().size("tp"),
}


@pytest.mark.parametrize("first", [True, False], ids=["at first", "after a call"])
@pytest.mark.parametrize("name", MESH)
def test_accessors_compile_to_one_graph(name: str, first: bool) -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=2, cp=1, tp=2)
        if not first:
            MESH[name](mesh)
        assert_one_graph(lambda: MESH[name](mesh))
        mesh.close()


def test_another_mesh_is_compiled_again() -> None:
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
