"""DeepSpeed's topologies, grid, mpu and groups on a mesh, against DeepSpeed's own."""

from __future__ import annotations

import importlib
import inspect
import random
from itertools import product
from math import prod
from typing import Any

import pytest
import torch.distributed as dist
from installing import run_python
from legacy import arguments, comparable, deepspeed_groups, init_deepspeed, outcome
from messages import refuses
from ranks import fake_world, live_groups, run_ranks, summed

import namedmesh
from namedmesh import Layout
from namedmesh.compat import deepspeed
from namedmesh.compat.deepspeed import PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology

# Names that a mesh has other words for, and others.
NAMES = ("pipe", "data", "model", "pp", "dp", "tp", "expert", "a", "x1", "slice")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's module. Of its communication layer a grid uses three functions that torch has too."""
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    monkeypatch.setattr(module, "dist", dist)
    return module


# --- topologies ---------------------------------------------------------------------------------------------


def questions(source: random.Random, axes: list[str], dims: list[int]) -> list[tuple[Any, ...]]:
    """What is asked of a topology: sensible things, and others."""
    world = prod(dims)
    asked: list[tuple[Any, ...]] = [(name, (), {}) for name in ("get_axis_names", "world_size", "__str__")]
    for rank in (0, world - 1, source.randrange(world), -1, world, 0.0, 1.5, "0", None, True):
        asked += [("get_coord", (rank,), {}), ("get_coord", (), {"rank": rank})]
        for omit in ([], ["data", "pipe"], axes[:1], axes, ("nothing",), "data", None):
            asked.append(("get_rank_repr", (rank,), {"omit_axes": omit}))
        asked.append(("get_rank_repr", (rank,), {"inner_sep": "=", "outer_sep": ", "}))
    for axis in [*axes, "data", "nothing", None, 3]:
        asked += [("get_dim", (axis,), {}), ("get_axis_comm_lists", (axis,), {})]
        asked += [("get_axis_list", (), {"axis": axis, "idx": at}) for at in (-1, 0, 1, 2, 9, 1.0, "0", None)]
    for _ in range(12):
        pairs = source.sample(list(zip(axes, dims, strict=True)), len(axes))
        at: dict[str, Any] = {
            axis: source.choice([*range(dim), *range(dim), -1, dim, 0.0, "0"]) for axis, dim in pairs
        }
        some = dict(source.sample(list(at.items()), source.randint(0, len(at))))
        swapped = {**dict(list(at.items())[1:]), "nothing": 0}
        for which in (at, some, {**some, "nothing": 0}, swapped, {"nothing": 0, **some}):
            asked += [("get_rank", (), which), ("filter_match", (), which)]
    return asked


@pytest.mark.oracle("deepspeed")
def test_the_same_answers_in_random_topologies(theirs: Any) -> None:
    source, refused, answered = random.Random(11), set(), 0
    while answered < 20_000:
        axes = source.sample(NAMES, source.randint(1, 5))
        dims = [source.choice((1, 1, 2, 2, 3, 4, 5, 7)) for _ in axes]
        if prod(dims) > 240:
            continue
        both = [module.ProcessTopology(list(axes), list(dims)) for module in (theirs, deepspeed.topology)]
        assert comparable(vars(both[0])["mapping"]) == comparable(both[1].mapping)
        for name, args, kwargs in questions(source, axes, dims):
            wanted, got = (outcome(getattr(topo, name), *args, **kwargs) for topo in both)
            assert got == wanted, (axes, dims, name, args, kwargs)
            if isinstance(wanted, type):
                refused.add(wanted)
            answered += not isinstance(wanted, type)
    assert refused >= {ValueError, AssertionError, AttributeError, TypeError}


MADE: list[tuple[Any, Any]] = [(["a", "a"], [2, 2]), (["for", "b"], [2, 2]), (["_a", "b-c"], [2, 2])]
MADE += [([1], [2]), (["a", "b"], [2]), (["a", "b"], [2, 1.5]), (["a"], ["2"]), (["a"], [None])]
MADE += [("ab", [2, 2])]


@pytest.mark.oracle("deepspeed")
def test_what_cannot_be_made_and_the_named_topologies(theirs: Any) -> None:
    for axes, dims in MADE:
        wanted = outcome(theirs.ProcessTopology, axes, dims)
        assert isinstance(wanted, type)
        assert outcome(ProcessTopology, axes, dims) is wanted
    for pp, mp, dp in product((1, 2, 3), repeat=3):
        for name, sizes in (
            ("PipeDataParallelTopology", (pp, dp)),
            ("PipeModelDataParallelTopology", (pp, mp, dp)),
        ):
            wanted, got = (getattr(module, name)(*sizes) for module in (theirs, deepspeed.topology))
            assert (str(got), got.axes, got.dims) == (str(wanted), wanted.axes, wanted.dims)
    for number in range(-2, 200):
        assert outcome(deepspeed.topology._prime_factors, number) == outcome(theirs._prime_factors, number)


@pytest.mark.oracle("deepspeed")
def test_the_same_names_and_arguments(theirs: Any) -> None:
    for name in deepspeed.topology.__all__:
        wanted, got = getattr(theirs, name), getattr(deepspeed.topology, name)
        for key in vars(wanted):
            if key == "__init__" or (not key.startswith("_") and key != "topology"):
                assert arguments(getattr(wanted, key)) == arguments(getattr(got, key)), (name, key)


def test_a_million_ranks_without_a_dictionary_of_them() -> None:
    topo = PipeModelDataParallelTopology(16, 8, 8192)
    assert topo.world_size() == 1_048_576
    assert topo.get_rank(**topo.get_coord(777_777)._asdict()) == 777_777
    assert topo.get_rank_repr(777_777, omit_axes=[]) == "pipe_11-data_7110-model_01"
    assert topo.get_axis_comm_lists("data")[-1][-1] == 1_048_575  # 128 lists: as many as ranks are slow
    assert topo.filter_match(pipe=1, model=3)[:2] == [65_539, 65_547]
    assert "mapping" not in vars(topo)


# --- the grid -----------------------------------------------------------------------------------------------


def everything(grid: Any) -> dict[str, Any]:
    """Every attribute and every answer of a grid, groups by their ranks."""
    told: dict[str, Any] = {"topology": str(grid.topology()), "_topo": grid._topo is grid.topology()}
    for name in dir(grid):
        known = name.startswith("_") and name != "_is_grid_valid"
        known = known or name in {"topology", "stage_to_global", "mesh", "from_mesh"}
        if known or not hasattr(grid, name):
            continue
        value = getattr(grid, name)
        told[name] = comparable(value() if inspect.ismethod(value) else value)
    for stage in (*range(grid.pipe_parallel_size), -1, 99):
        for more in ({}, {"data": 0}, {"data": 99}, {"nothing": 0}):
            told[f"{stage} {more}"] = outcome(grid.stage_to_global, stage, **more)
    return told


def made_by(module: Any, axes: list[str], dims: list[int]) -> Any:
    """A grid's answers."""
    grid = module.PipelineParallelGrid(module.ProcessTopology(list(axes), list(dims)) if axes else None)
    told = everything(grid)
    if hasattr(grid, "mesh"):
        assert len({*grid.mesh.communicators}) <= 6
        grid.mesh.close()
    return told


@pytest.mark.oracle("deepspeed")
def test_the_same_grids_in_random_topologies(theirs: Any) -> None:
    source, refused = random.Random(5), []
    for number in range(110):
        axes = ["pipe", "data", *source.sample(["model", "expert", "pp", "seq"], source.choice((0, 1, 1, 2)))]
        source.shuffle(axes)
        if source.random() < 0.15:
            axes.pop()
        dims = [source.choice((1, 2, 2, 3)) for _ in axes]
        world = prod(dims) * (2 if number % 13 == 5 else 1)
        if number < 14:  # without a topology
            axes, dims, world = [], [], number + 1
        for rank in {0, world - 1, source.randrange(world)}:
            with fake_world(world, rank):
                wanted, got = (
                    outcome(made_by, module, axes, dims) for module in (theirs, deepspeed.topology)
                )
                assert got == wanted, (axes, dims, rank)
        refused.append(wanted)
    assert refused.count(AttributeError) > 5
    assert refused.count(AssertionError) > 5


@pytest.mark.oracle("deepspeed")
def test_a_grid_and_a_unit_have_the_groups_of_an_equal_mesh(theirs: Any) -> None:
    for rank in (0, 7, 11):
        with fake_world(12, rank):
            mesh = namedmesh.init_mesh(pp=2, dp=3, tp=2, device="cpu")
            own = theirs.PipeModelDataParallelTopology(2, 2, 3)
            grid, unit = PipelineParallelGrid(topology=own), deepspeed.mpu(mesh)
            assert grid.topology() is own
            assert grid.get_data_parallel_group() is unit.get_data_parallel_group() is mesh.group("dp")
            expected, told = everything(theirs.PipelineParallelGrid(own)), asked(unit)
            adopted = everything(PipelineParallelGrid.from_mesh(mesh)) | {"topology": str(own)}
            assert everything(grid) == adopted == expected
            shared = told.keys() & expected.keys()
            assert len(shared) >= 17
            assert {name: told[name] for name in shared} == {name: expected[name] for name in shared}
            grid.mesh.close()
            mesh.close()


def on_gloo() -> tuple[Any, ...]:
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data", "model"], [2, 2, 2]))
    groups = {name: group for name, group in vars(grid).items() if isinstance(group, dist.ProcessGroup)}
    sums = {name: sum(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    right = [summed(group, dist.get_rank()) == sums[name] for name, group in groups.items()]
    grid.mesh.close()
    made = live_groups()
    for _ in range(3):
        PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2)).mesh.close()
    return {name: group.size() for name, group in groups.items()}, all(right), live_groups() - made


def test_groups_work_on_gloo_and_are_used_again() -> None:
    sizes = {"pp_proc_group": 2, "dp_proc_group": 2, "ds_model_proc_group": 4, "slice_proc_group": 2}
    assert run_ranks(8, on_gloo) == [(sizes, True, 0)] * 8


def test_a_grid_needs_a_default_group() -> None:
    text = "torch.distributed has no default group; ... deepspeed.init_distributed() first"
    refuses(PipelineParallelGrid, AssertionError, text)


# --- the unit -----------------------------------------------------------------------------------------------

WHAT = ("group", "rank", "world_size")
KINDS = ("model", "data", "slice", "pipe", "tensor_model", "pipeline_model")
ALWAYS = {f"get_{kind}_parallel_{what}" for kind in KINDS for what in WHAT}
ALWAYS |= {f"get_{kind}_parallel_src_rank" for kind in ("model", "data", "tensor_model")}
ALWAYS |= {"get_data_parallel_group_ranks", "get_global_rank"}
SEQUENCE = {f"get_sequence{kind}_parallel_{what}" for kind in ("", "_data") for what in WHAT}


def asked(unit: Any) -> dict[str, Any]:
    return {name: comparable(getattr(unit, name)()) for name in dir(unit) if name.startswith("get_")}


def test_a_unit_says_what_its_mesh_means_and_nothing_else() -> None:
    with fake_world(16, 11):
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        unit = deepspeed.mpu(mesh)
        told = asked(unit)
        assert set(told) == ALWAYS
        assert unit.get_pipe_parallel_group() is mesh.group("pp")
        assert told["get_model_parallel_group"] == ("group", [2, 3, 10, 11])
        assert (told["get_model_parallel_rank"], told["get_model_parallel_src_rank"]) == (3, 2)
        assert told["get_data_parallel_group_ranks"] == [9, 11, 13, 15]
        assert not hasattr(unit, "get_sequence_parallel_group")
        mesh.close()


@pytest.mark.parametrize("axes", [("sp",), ("cp",), ("cp", "sp")])
def test_sequence_parallelism_only_where_the_mesh_has_it(axes: tuple[str, ...]) -> None:
    with fake_world(16, 9):
        mesh = namedmesh.init_mesh(dp=-1, **dict.fromkeys(axes, 2), device="cpu")  # type: ignore[arg-type]
        unit = deepspeed.mpu(mesh)
        told, ranks = asked(unit), [8, 9, 10, 11][: 2 ** len(axes)]
        assert set(told) == ALWAYS | SEQUENCE
        texts = [inspect.getdoc(getattr(type(unit), name)) for name in sorted(told)]
        assert len(set(texts) - {None}) == 23  # one text for each answer; tensor is slice, and pipeline pipe
        assert told["get_sequence_parallel_group"] == ("group", ranks)
        assert told["get_sequence_parallel_world_size"] == len(ranks)
        assert told["get_sequence_parallel_rank"] == 1
        assert told["get_sequence_data_parallel_group"] == ("group", list(range(16)))
        assert told["get_data_parallel_group_ranks"] == list(range(9 % len(ranks), 16, len(ranks)))
        assert unit.get_model_parallel_world_size() == 1
        # With it DeepSpeed would ignore the data-parallel group.
        assert not hasattr(unit, "initialize_sequence_parallel")
        mesh.close()


# --- DeepSpeed's own variables ------------------------------------------------------------------------------


def answers(groups: Any) -> dict[str, Any]:
    """What every getter without arguments says."""
    told = {}
    for name, getter in vars(groups).items():
        makes_groups = name == "_get_local_all_to_all_group"  # by the number of devices
        if name.startswith(("get_", "_get_")) and not getter.__code__.co_argcount and not makes_groups:
            told[name] = outcome(getter)
    return told


@pytest.mark.oracle("deepspeed")
def test_a_bound_mesh_is_answered_as_an_mpu_is() -> None:
    """The getters answer as where the engine was given the mpu; the tensor-parallel ones, which it leaves out, too."""
    module, source, compared = deepspeed_groups(), random.Random(1), 0
    for _ in range(25):
        sizes = {axis: source.choice([1, 2, 3]) for axis in ("pp", "dp", "sp", "tp")}
        layout = Layout(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"})
        with fake_world(layout.world_size, source.randrange(layout.world_size)):
            init_deepspeed()
            mesh = namedmesh.init_mesh(layout, device="cpu")
            vars(module)["mpu"] = deepspeed.mpu(mesh)
            expected = answers(module)
            module._release_process_group_references()
            deepspeed.bind(mesh)
            told = answers(module)
            for name, wanted in expected.items():
                if not isinstance(wanted, type):
                    assert told[name] == wanted, (sizes, name)
                    compared += 1
            mesh.close()
            assert module.mpu is module._TENSOR_MODEL_PARALLEL_GROUP is None
    assert compared > 300


@pytest.mark.oracle("deepspeed")
def test_a_bound_mesh_gives_its_groups_and_its_view_of_the_experts() -> None:
    module = deepspeed_groups()
    with fake_world(16, rank=5):
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, edp=2, ep=2, etp=2)
        other = namedmesh.init_mesh(dp=8, tp=2, device="cpu")
        deepspeed.bind(mesh)
        assert module._get_data_parallel_group() is module.get_data_parallel_group() is mesh.group("dp")
        assert module.get_tensor_model_parallel_group() is mesh.group("tp")
        assert module._get_expert_parallel_group("ep_size_2") is mesh.group("ep")
        assert module._get_expert_data_parallel_group("ep_size_2") is mesh.group("edp")
        assert {"ep_size_2": list(mesh.ranks("ep"))} == module._EXPERT_PARALLEL_GROUP_RANKS
        assert module._get_expert_model_parallel_world_size() == module.expert_tensor_parallel_world_size == 2
        with deepspeed.bind(other):
            assert module.get_tensor_model_parallel_group() is other.group("tp")
            assert not module._EXPERT_PARALLEL_GROUP
        assert module.get_tensor_model_parallel_group() is mesh.group("tp")
        deepspeed.unbind()
        assert module.mpu is None
        assert module.expert_tensor_parallel_world_size == 1
        for each in (mesh, other):
            each.close()


# --- under the original's path ------------------------------------------------------------------------------

INSTALLED = """
from deepspeed.runtime.pipe import module as early
from namedmesh.compat import deepspeed as ours
ours.install(); ours.install()
from deepspeed.runtime.pipe import ProcessTopology, module
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, _prime_factors
assert ProcessTopology is ours.ProcessTopology
assert PipelineParallelGrid is module.PipelineParallelGrid is ours.PipelineParallelGrid
ours.uninstall()
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
assert PipelineParallelGrid is module.PipelineParallelGrid is not ours.PipelineParallelGrid
"""


@pytest.mark.oracle("deepspeed")
def test_deepspeed_imports_ours_once_installed() -> None:
    run_python(INSTALLED, action="ignore")
