"""DeepSpeed's pipeline grid and model-parallel unit on a mesh, against DeepSpeed's own grid."""

from __future__ import annotations

import importlib
import inspect
import random
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from installing import run_python, without
from megatron_cases import comparable, kind_of
from messages import refuses
from ranks import fake_world, live_groups, run_ranks

import namedmesh
from namedmesh import Layout, LayoutError, MeshError, NamedMeshError
from namedmesh.compat import deepspeed
from namedmesh.compat.deepspeed import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    mpu,
    topology,
)

if TYPE_CHECKING:
    from collections.abc import Callable

GRIDS = 120
OURS = {"mesh", "close", "from_mesh"}
"""What leads from the grid to the mesh, and the original does not have."""


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's module. Of its communication layer a grid uses three functions that torch has too."""
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    monkeypatch.setattr(module, "dist", dist)
    return module


def everything(grid: Any) -> dict[str, Any]:
    """Every attribute and every answer of a grid, groups by their ranks."""
    told: dict[str, Any] = {}
    for name in dir(grid):
        if not hasattr(grid, name):
            continue
        if (name.startswith("_") and name != "_is_grid_valid") or name in {
            "topology",
            "stage_to_global",
            *OURS,
        }:
            continue
        value = getattr(grid, name)
        told[name] = comparable(value() if inspect.ismethod(value) else value)
    told["topology"] = str(grid.topology())
    told["_topo"] = grid._topo is grid.topology()
    return told


def moved(grid: Any, axes: list[str], dims: list[int]) -> list[Any]:
    """Where other stages are, and what is refused."""
    told: list[Any] = []
    for stage in (*range(dims[axes.index("pipe")]), -1, 99):
        for more in ({}, {"data": 0}, {"data": 99}, {axes[-1]: 0}, {"nothing": 0}):
            try:
                told.append(grid.stage_to_global(stage, **more))
            except Exception as error:  # noqa: BLE001  which one is what is compared
                told.append(kind_of(error))
    return told


def random_axes(source: random.Random) -> tuple[list[str], list[int]]:
    """Axes that a grid can have, in any order, and some that it cannot."""
    while True:
        axes = ["pipe", "data"]
        axes += source.sample(["model", "expert", "pp", "seq"], source.choice((0, 1, 1, 2)))
        source.shuffle(axes)
        if source.random() < 0.1:
            axes.pop()
        dims = [source.choice((1, 2, 2, 3, 4)) for _ in axes]
        if prod(dims) <= 48:
            return axes, dims


def made_by(module: Any, axes: list[str], dims: list[int]) -> Any:
    """A grid, or the builtin type of what is raised instead."""
    try:
        return module.PipelineParallelGrid(module.ProcessTopology(list(axes), list(dims)))
    except Exception as error:  # noqa: BLE001  which one is what is compared
        return kind_of(error)


@pytest.mark.oracle("deepspeed")
def test_the_same_grids_in_random_topologies(theirs: Any) -> None:
    source = random.Random(5)
    refused: list[Any] = []
    for number in range(GRIDS):
        axes, dims = random_axes(source)
        world = prod(dims) * (2 if number % 13 == 5 else 1)
        for rank in {0, world - 1, source.randrange(world)}:
            with fake_world(world, rank):
                alone = live_groups()
                grid = made_by(topology, axes, dims)
                made = live_groups() - alone
                if not isinstance(grid, type):
                    told = everything(grid), moved(grid, axes, dims)
                    shared = _groups_of(grid)
                    assert len({tuple(dist.get_process_group_ranks(group)) for group in shared}) == len(
                        shared
                    )
                    assert set(shared) <= {each.group for each in grid.mesh.communicators}
                    grid.close()
                assert live_groups() == alone
                original = made_by(theirs, axes, dims)
                if isinstance(original, type):
                    refused.append(original)
                    assert grid is original, (axes, dims, world)
                    continue
                assert made <= 6
                assert told[1] == moved(original, axes, dims), (axes, dims, rank)
                expected = everything(original)
                assert {name: told[0].get(name) for name in expected} == expected, (axes, dims, rank)
                assert set(told[0]) == set(expected)
    assert refused.count(AttributeError) > 5
    assert refused.count(AssertionError) > 5


def _groups_of(grid: Any) -> set[dist.ProcessGroup]:
    return {value for value in vars(grid).values() if isinstance(value, dist.ProcessGroup)}


@pytest.mark.oracle("deepspeed")
@pytest.mark.parametrize("world", [*range(1, 13), 16, 30, 36])
def test_the_same_grid_without_a_topology(theirs: Any, world: int) -> None:
    with fake_world(world, world // 2):
        grid = PipelineParallelGrid()
        told = everything(grid)
        expected = everything(theirs.PipelineParallelGrid())
        assert told == expected
        assert grid.mesh.layout == Layout(pp=grid.pipe_parallel_size, dp=grid.data_parallel_size)
        grid.close()


@pytest.mark.oracle("deepspeed")
def test_deepspeed_s_own_topology_is_as_good(theirs: Any) -> None:
    with fake_world(12, 7):
        own = theirs.PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=2)
        grid = PipelineParallelGrid(topology=own)
        assert grid.topology() is own
        told, expected = everything(grid), everything(theirs.PipelineParallelGrid(topology=own))
        assert told == expected
        grid.close()


@pytest.mark.oracle("deepspeed")
def test_the_same_names_and_arguments(theirs: Any) -> None:
    ours, original = PipelineParallelGrid, theirs.PipelineParallelGrid
    names = {name for name, value in vars(original).items() if callable(value) and not name.startswith("_")}
    assert len(names) >= 22
    for name in names:
        told = [list(inspect.signature(getattr(kind, name)).parameters) for kind in (ours, original)]
        assert told[0] == told[1], name
    assert topology.PipelineParallelGrid is ours
    assert {name for name in vars(theirs) if name.endswith(("Grid", "Topology", "_factors"))} <= {
        *vars(topology),
        *topology.__all__,
    }


# Real ranks.


def _on_gloo() -> Any:
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    vars(module)["dist"] = dist
    axes, dims = ["pipe", "data", "model"], [2, 2, 2]
    grid = PipelineParallelGrid(ProcessTopology(axes, dims))
    sums = {}
    for name, group in vars(grid).items():
        if isinstance(group, dist.ProcessGroup):
            tensor = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(tensor, group=group)
            sums[name] = (tensor.item(), float(sum(dist.get_process_group_ranks(group))), group.size())
    told = everything(grid)
    grid.close()
    expected = everything(module.PipelineParallelGrid(module.ProcessTopology(axes, dims)))
    return told == expected, sums


@pytest.mark.oracle("deepspeed")
def test_the_same_grid_and_working_groups_on_gloo() -> None:
    importlib.import_module("deepspeed.runtime.pipe.topology")  # once, not in every rank
    for same, sums in run_ranks(8, _on_gloo, timeout=120):
        assert same
        assert {name: size for name, (_, _, size) in sums.items()} == {
            "ds_model_proc_group": 4,
            "dp_proc_group": 2,
            "pp_proc_group": 2,
            "slice_proc_group": 2,
        }
        assert all(measured == expected for measured, expected, _ in sums.values())


def _again_and_again() -> list[int]:
    before = live_groups()
    counts = []
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    inside = live_groups()
    for turn in range(8):
        grid = PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2) if turn % 2 else None)
        dist.all_reduce(torch.ones(1), group=grid.get_model_parallel_group())
        grid.close()
        counts.append(live_groups() - inside)
    for _ in range(4):
        borrowed, unit = PipelineParallelGrid.from_mesh(mesh), mpu(mesh)
        dist.all_reduce(torch.ones(1), group=unit.get_model_parallel_group())
        borrowed.close()
        counts.append(live_groups() - inside - 1)  # one group over pp and tp, which is the mesh's
    dist.barrier()
    mesh.close()
    return [*counts, live_groups() - before]


def test_nothing_leaks() -> None:
    assert run_ranks(8, _again_and_again, timeout=120) == [[0] * 13] * 8


# Over a mesh that exists.


def test_a_grid_over_a_mesh_uses_its_groups() -> None:
    with fake_world(16, 13):
        mesh = namedmesh.init_mesh(pp=2, dp=2, cp=2, tp=2, device="cpu")
        grid = PipelineParallelGrid.from_mesh(mesh)
        assert repr(grid.topology()) == (
            "ProcessTopology(axes=['pipe', 'data', 'cp', 'model'], dims=[2, 2, 2, 2])"
        )
        assert grid.get_pipe_parallel_group() is mesh.group("pp")
        assert grid.get_data_parallel_group() is mesh.group("dp")
        assert grid.get_slice_parallel_group() is mesh.group("tp")
        assert grid.get_model_parallel_group() is mesh.group("pp", "cp", "tp")
        held = len(mesh.communicators)
        again, unit = PipelineParallelGrid.from_mesh(mesh), mpu(mesh)
        assert again.ds_model_proc_group is grid.ds_model_proc_group
        assert unit.get_tensor_model_parallel_group() is grid.slice_proc_group
        assert len(mesh.communicators) == held + 2  # over dp and cp, and over pp and tp
        grid.close()
        assert mesh.size("tp") == 2  # it was not the grid's to close
        mesh.close()


@pytest.mark.oracle("deepspeed")
@pytest.mark.parametrize(
    ("sizes", "axes", "dims"),
    [
        ({"pp": 2, "dp": 3, "tp": 2}, ["pipe", "data", "model"], [2, 3, 2]),
        ({"dp": 3, "tp": 4}, ["pipe", "data", "model"], [1, 3, 4]),
        ({"tp": 12}, ["pipe", "data", "model"], [1, 1, 12]),
        ({"dp": 12}, ["pipe", "data"], [1, 12]),
        ({"tp": 2, "pp": 3, "dp": 2}, ["model", "pipe", "data"], [2, 3, 2]),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 3}, ["pipe", "data"], [2, 6]),
        ({"pipe": 2, "ep": 2, "data": 3}, ["pipe", "ep", "data"], [2, 2, 3]),
    ],
)
def test_a_grid_over_a_mesh_is_the_original_s(
    theirs: Any, sizes: dict[str, int], axes: list[str], dims: list[int]
) -> None:
    for rank in (0, 7, 11):
        with fake_world(12, rank):
            mesh = namedmesh.init_mesh(Layout(**sizes), device="cpu")
            told = everything(PipelineParallelGrid.from_mesh(mesh))
            expected = everything(theirs.PipelineParallelGrid(theirs.ProcessTopology(axes, dims)))
            assert told == expected
            mesh.close()


def test_the_tables_of_the_world() -> None:
    with fake_world(8, 3):
        grid = PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2))
        assert "mapping" not in vars(grid.topology())
        assert grid.p2p_groups == [[0, 4], [1, 5], [2, 6], [3, 7], [4, 0], [5, 1], [6, 2], [7, 3]]
        assert grid.model_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
        grid.close()


def test_mistakes_are_explained_and_leave_no_group() -> None:
    with fake_world(8, 3):
        alone = live_groups()
        half = dist.new_group([0, 1, 2, 3])
        mistakes: list[tuple[type[Exception], Callable[[], Any], str]] = [
            (AssertionError, lambda: PipelineParallelGrid(PipeDataParallelTopology(2, 2)),
                "the topology pipe=2 x data=2 has 4 ranks, but the world has 8; change a size, or start another number of ranks"),
            (AttributeError, lambda: PipelineParallelGrid(ProcessTopology(["data", "model"], [2, 4])),
                "the topology data=2 x model=4 has no axis 'pipe'; give it one, of size 1 if need be"),
            (ValueError, lambda: PipelineParallelGrid(process_group=half),
                "process_group has the ranks 0, 1, 2, 3, but a grid is over the whole world of 8 ranks (DeepSpeed's is, too, "
                "whatever group it is given); leave it out"),
            (ValueError, lambda: PipelineParallelGrid(_ColumnMajor(["pipe", "data"], [2, 4])),
                "the topology pipe=2 x data=4 has rank 3 at (1, 1), and row-major order at (0, 3); the last axis has to be the "
                "fastest"),
        ]  # fmt: skip
        for kind, call, text in mistakes:
            refuses(call, kind, text)
            assert live_groups() == alone + 1
        grid = PipelineParallelGrid(PipeDataParallelTopology(2, 4), process_group=dist.group.WORLD)
        assert not hasattr(grid, "model_groups")
        assert not hasattr(grid, "mp_group")
        with pytest.raises(ValueError, match="dat=1, for pipe=2 x data=4; give one") as unknown:
            grid.stage_to_global(0, dat=1)
        assert isinstance(unknown.value, NamedMeshError)
        grid.close()
    with pytest.raises(AssertionError, match=r"no default group; .* deepspeed\.init_distributed\(\)"):
        PipelineParallelGrid()


class _ColumnMajor(ProcessTopology):
    """A topology that is none of DeepSpeed's."""

    def get_coord(self, rank: int) -> Any:
        return self.ProcessCoord(rank % self.dims[0], rank // self.dims[0])


def test_a_grid_is_over_the_whole_world_and_a_unit_over_any_part() -> None:
    with fake_world(8, 3):
        part = namedmesh.init_mesh(tp=2, rank_offset=2, part=True, world_size=2, device="cpu")
        with pytest.raises(
            LayoutError, match=r"is a part of the world of 8 ranks, and a grid of DeepSpeed's is over"
        ):
            PipelineParallelGrid.from_mesh(part)
        assert mpu(part).get_tensor_model_parallel_src_rank() == 2
        part.close()


# The unit.

ALWAYS = {
    *(
        f"get_{kind}_parallel_{what}"
        for kind in ("model", "data", "slice", "pipe")
        for what in ("group", "rank", "world_size")
    ),
    *(
        f"get_{kind}_model_parallel_{what}"
        for kind in ("tensor", "pipeline")
        for what in ("group", "rank", "world_size")
    ),
    *(f"get_{kind}_parallel_src_rank" for kind in ("model", "data", "tensor_model")),
    "get_data_parallel_group_ranks",
    "get_global_rank",
}
SEQUENCE = {
    f"get_sequence{kind}_parallel_{what}"
    for kind in ("", "_data")
    for what in ("group", "rank", "world_size")
}


def asked(unit: Any) -> dict[str, Any]:
    return {name: comparable(getattr(unit, name)()) for name in dir(unit) if name.startswith("get_")}


def test_a_unit_says_what_its_mesh_means_and_nothing_else() -> None:
    with fake_world(16, 11):
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        unit = mpu(mesh)
        told = asked(unit)
        assert set(told) == ALWAYS
        assert unit.get_pipe_parallel_group() is mesh.group("pp")
        assert unit.get_model_parallel_group() is mesh.group("pp", "tp")
        assert told["get_model_parallel_group"] == ("group", [2, 3, 10, 11])
        assert (told["get_model_parallel_rank"], told["get_model_parallel_src_rank"]) == (3, 2)
        assert told["get_data_parallel_group_ranks"] == [9, 11, 13, 15]
        assert told["get_data_parallel_group"] == ("group", [9, 11, 13, 15])
        assert (told["get_data_parallel_rank"], told["get_data_parallel_src_rank"]) == (1, 9)
        assert (told["get_tensor_model_parallel_rank"], told["get_slice_parallel_world_size"]) == (1, 2)
        assert (told["get_pipeline_model_parallel_rank"], told["get_pipe_parallel_world_size"]) == (1, 2)
        mesh.close()
        assert unit.get_model_parallel_world_size() == 4
        with pytest.raises(MeshError, match="was closed; make another, and an mpu of it"):
            unit.get_model_parallel_group()


@pytest.mark.oracle("deepspeed")
@pytest.mark.parametrize(
    "sizes", [{"pp": 2, "dp": 3, "tp": 2}, {"dp": 6, "tp": 2}, {"pp": 4, "dp": 3}, {"dp": 12}]
)
def test_a_unit_answers_as_the_original_s_grid(theirs: Any, sizes: dict[str, int]) -> None:
    for rank in (0, 5, 11):
        with fake_world(12, rank):
            mesh = namedmesh.init_mesh(Layout(**sizes), device="cpu")
            told = asked(mpu(mesh))
            original = theirs.PipelineParallelGrid(
                theirs.PipeModelDataParallelTopology(
                    sizes.get("pp", 1), sizes.get("tp", 1), sizes.get("dp", 1)
                )
            )
            expected = {name: value for name, value in asked(original).items() if name in told}
            assert len(expected) >= 17
            assert {name: told[name] for name in expected} == expected
            mesh.close()


@pytest.mark.parametrize(
    ("axes", "ranks"), [(("sp",), [8, 9]), (("cp",), [8, 9]), (("cp", "sp"), [8, 9, 10, 11])]
)
def test_sequence_parallelism_only_where_the_mesh_has_it(axes: tuple[str, ...], ranks: list[int]) -> None:
    with fake_world(16, 9):
        mesh = namedmesh.init_mesh(dp=-1, **dict.fromkeys(axes, 2), device="cpu")  # type: ignore[arg-type]
        unit = mpu(mesh)
        told = asked(unit)
        assert set(told) == ALWAYS | SEQUENCE
        texts = [inspect.getdoc(getattr(type(unit), name)) for name in sorted(told)]
        assert len(set(texts) - {None}) == 23  # one text for each answer; tensor is slice, and pipeline pipe
        assert told["get_sequence_parallel_group"] == ("group", ranks)
        assert told["get_sequence_parallel_world_size"] == len(ranks)
        assert told["get_sequence_parallel_rank"] == 1
        assert told["get_sequence_data_parallel_group"] == ("group", list(range(16)))
        assert told["get_sequence_data_parallel_rank"] == 9
        assert told["get_data_parallel_world_size"] == 16 // len(ranks)
        assert unit.get_model_parallel_world_size() == 1
        assert not hasattr(unit, "initialize_sequence_parallel")
        mesh.close()


@pytest.mark.parametrize(("rank", "sp"), [(0, 4), (5, 2), (7, 4), (6, 1)])
def test_sequence_groups_are_consecutive_ranks_as_in_megatron_deepspeed(rank: int, sp: int) -> None:
    first = rank - rank % sp
    with fake_world(8, rank):
        mesh = namedmesh.init_mesh(dp=-1, sp=sp, device="cpu")
        unit = mpu(mesh)
        told = asked(unit)
        for kind, ranks in (("sequence", list(range(first, first + sp))), ("sequence_data", list(range(8)))):
            assert told[f"get_{kind}_parallel_group"] == ("group", ranks)
            assert told[f"get_{kind}_parallel_world_size"] == len(ranks)
            assert told[f"get_{kind}_parallel_rank"] == ranks.index(rank)
        assert told["get_data_parallel_group_ranks"] == list(range(rank % sp, 8, sp))
        assert unit.sequence_parallel_is_initialized() is unit.sequence_data_parallel_is_initialized() is True
        mesh.close()
        assert not unit.sequence_parallel_is_initialized()
        mesh = namedmesh.init_mesh(dp=-1, device="cpu")
        assert not mpu(mesh).sequence_parallel_is_initialized()
        mesh.close()


def test_what_a_unit_does_not_have_it_explains() -> None:
    with fake_world(8, 3):
        mesh = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
        unit = mpu(mesh)
        texts = {
            "initialize_sequence_parallel": "the mpu has no 'initialize_sequence_parallel': DeepSpeed takes it for a sign "
            "that there is no data-parallel group",
            "get_sequence_parallel_group": "the mpu has no 'get_sequence_parallel_group': its mesh has no axis 'sp' or 'cp'; "
            "make the mesh with one, such as init_mesh(dp=-1, sp=2)",
            "get_expert_parallel_group": "the mpu has no 'get_expert_parallel_group': DeepSpeed makes the groups of its "
            "experts itself",
            "get_data_paralel_rank": "the mpu has no 'get_data_paralel_rank': it has what DeepSpeed asks of an mpu; did you "
            "mean 'get_data_parallel_rank'?",
        }
        for name, text in texts.items():
            assert not hasattr(unit, name)
            refuses(partial(getattr, unit, name), AttributeError, text)
        mesh.close()


def test_the_package_has_what_it_lists() -> None:
    assert set(deepspeed.__all__) <= set(dir(deepspeed))
    for name in deepspeed.__all__:
        assert getattr(deepspeed, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'initialize'"):
        deepspeed.initialize  # noqa: B018


# Under the original's path.

INSTALL = """
import sys
from namedmesh.compat import deepspeed as ours
ours.install()
"""
INSTALLED = f"""{INSTALL}
from deepspeed.runtime.pipe import ProcessTopology, module
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, _prime_factors
assert ProcessTopology is ours.ProcessTopology
assert PipelineParallelGrid is module.PipelineParallelGrid is ours.PipelineParallelGrid
ours.uninstall()
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
assert PipelineParallelGrid is module.PipelineParallelGrid is not ours.PipelineParallelGrid
"""
ABSENT = f"""{INSTALL}
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
import deepspeed.runtime.pipe
assert deepspeed.runtime.pipe.topology.ProcessTopology is ours.ProcessTopology
assert PipeDataParallelTopology is ours.PipeDataParallelTopology
ours.uninstall()
assert not [name for name in sys.modules if name.startswith("deepspeed")]
"""


@pytest.mark.oracle("deepspeed")
def test_deepspeed_imports_ours_once_installed() -> None:
    run_python(INSTALLED, action="ignore")


@pytest.mark.oracle("deepspeed")
def test_installing_late_works_and_can_be_undone(theirs: Any) -> None:
    module = importlib.import_module("deepspeed.runtime.pipe.module")
    grid = theirs.PipelineParallelGrid
    deepspeed.install()
    deepspeed.install()
    assert theirs.PipelineParallelGrid is module.PipelineParallelGrid is deepspeed.PipelineParallelGrid
    deepspeed.uninstall()
    assert theirs.PipelineParallelGrid is module.PipelineParallelGrid is grid


def test_the_path_is_there_without_deepspeed_too() -> None:
    run_python(without("deepspeed") + ABSENT)
