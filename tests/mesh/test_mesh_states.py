"""A state machine over meshes: what a program makes, closes and asks for, on real ranks, held against ``Layout`` alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from messages import error_of
from ranks import live_groups, run_ranks, summed

import namedmesh
from namedmesh import GroupOptions, Layout

pytestmark = pytest.mark.ci

WORLD = 4
LAYOUTS = (
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 1, "tp": 2},
    {"dp": 4},
    {"tp": 1, "cp": 4},
    {"pp": 1, "dp": 2, "cp": 2},
)
VIEWS = ({"edp": 2, "ep": 2}, {"edp": 1, "ep": 4})
Step = tuple[Any, ...]


def run(program: list[Step]) -> list[Any]:
    """What every group of every open mesh sums up to after each step, and the errors; on one rank."""
    meshes: dict[int, namedmesh.NamedMesh] = {}
    results: list[Any] = []
    rank = dist.get_rank()
    for step in program:
        kind, number, *arguments = step
        if kind == "make":
            options = {"tp": GroupOptions(share=False)} if arguments[1] else {}
            meshes[number] = namedmesh.init_mesh(LAYOUTS[arguments[0]], options=options)
        elif kind == "wrong":  # one rank asks for something else
            sizes = {"dp": WORLD // 2, "tp": 2} if rank == arguments[0] else {"dp": WORLD}
            results.append(error_of(lambda sizes=sizes: namedmesh.init_mesh(sizes)))  # type: ignore[misc]
        elif kind == "view":
            view: dict[str, Any] = VIEWS[arguments[0]]
            meshes[number].add_view("expert", **view)
        elif kind == "flatten":
            flat = meshes[number].flatten(*arguments)
            results.append(summed(flat.get_group(), rank))
        else:
            meshes.pop(number).close()
        for mesh in meshes.values():
            results.append([summed(mesh.group(axis), rank) for axis in mesh])
            results.append([mesh[axis].get_group() is mesh.group(axis) for axis in mesh])
    for mesh in meshes.values():
        mesh.close()
    dist.destroy_process_group()
    return [*results, live_groups()]


class Meshes(RuleBasedStateMachine):
    """Build a program of calls, and the results that each rank must return."""

    def __init__(self) -> None:
        super().__init__()
        self.program: list[Step] = []
        self.expected: list[list[Any]] = [[] for _ in range(WORLD)]
        self.open: dict[int, list[tuple[Layout, str]]] = {}  # each mesh's layouts, and the axes of each
        self.own: set[int] = set()
        self.numbers = 0

    def step(self, *step: Any) -> None:
        self.program.append(step)
        for rank in range(WORLD):
            for places in self.open.values():
                axes = [(layout, axis) for layout, names in places for axis in names.split()]
                self.expected[rank].append([float(sum(layout.group(rank, axis))) for layout, axis in axes])
                self.expected[rank].append([True] * len(axes))

    @rule(which=st.integers(0, len(LAYOUTS) - 1), own=st.booleans())
    def make(self, which: int, own: bool) -> None:
        """Make a mesh; its own tp only where no open mesh has that name, which torch could not tell apart."""
        own = own and "tp" in LAYOUTS[which]
        if self.own or (own and self.open):
            own, which = False, 2
        self.numbers += 1
        layout = Layout(**LAYOUTS[which])
        self.open[self.numbers] = [(layout, " ".join(layout))]
        if own:
            self.own.add(self.numbers)
        self.step("make", self.numbers, which, own)

    @rule(rank=st.integers(0, WORLD - 1))
    def ask_for_different_layouts(self, rank: int) -> None:
        others = [each for each in range(WORLD) if each != rank]
        text = (
            f"AgreementError: layout differs between ranks: Layout(dp={WORLD}) on ranks {', '.join(map(str, others))}; "
            f"Layout(dp={WORLD // 2}, tp=2) on rank {rank}; give every rank the same"
        )
        for each in range(WORLD):
            self.expected[each].append(text)
        self.step("wrong", 0, rank)

    @precondition(lambda self: any(len(places) == 1 for places in self.open.values()))
    @rule(data=st.data(), which=st.integers(0, len(VIEWS) - 1))
    def view(self, data: st.DataObject, which: int) -> None:
        number = data.draw(st.sampled_from([n for n, places in self.open.items() if len(places) == 1]))
        layout = Layout(**VIEWS[which])
        self.open[number].append((layout, " ".join(layout)))
        self.step("view", number, which)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def flatten(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.open)))
        layout, names = self.open[number][0]
        axes = data.draw(st.permutations(names.split()))[:2]
        for rank in range(WORLD):
            self.expected[rank].append(float(sum(layout.group(rank, *axes))))
        self.step("flatten", number, *axes)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.open)))
        del self.open[number]
        self.own.discard(number)
        self.step("close", number)

    @invariant()
    def programs_stay_short(self) -> None:
        assert len(self.program) <= 12

    def teardown(self) -> None:
        if self.program:
            # No group outlives the default group.
            expected = [[*results, 0] for results in self.expected]
            assert run_ranks(WORLD, run, self.program) == expected


TestMeshes = Meshes.TestCase
TestMeshes.settings = settings(max_examples=6, stateful_step_count=10, deadline=None, derandomize=True)
