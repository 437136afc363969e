"""Topologies, grid, mpu and groups of DeepSpeed, compared with DeepSpeed itself."""

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
from messages import check_error, error_of
from ranks import fake_world, live_groups, run_ranks, summed

import namedmesh
from namedmesh import Layout
from namedmesh.compat import deepspeed
from namedmesh.compat.deepspeed import PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology

# Axes that have another name in a mesh, and other axes.
AXES = ("pipe", "data", "model", "pp", "dp", "tp", "expert", "a", "x1", "slice")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's module, with torch.distributed instead of its own communication layer."""
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    monkeypatch.setattr(module, "dist", dist)
    return module


# --- topologies -----------------------------------------------------------------------------------


def make_calls(source: random.Random, axes: list[str], dims: list[int]) -> list[tuple[Any, ...]]:
    """Return calls of a topology's methods, with right and wrong arguments."""
    world = prod(dims)
    calls: list[tuple[Any, ...]] = [(name, (), {}) for name in ("get_axis_names", "world_size", "__str__")]
    for rank in (0, world - 1, source.randrange(world), -1, world, 0.0, 1.5, "0", None, True):
        calls += [("get_coord", (rank,), {}), ("get_coord", (), {"rank": rank})]
        for omit in ([], ["data", "pipe"], axes[:1], axes, ("nothing",), "data", None):
            calls.append(("get_rank_repr", (rank,), {"omit_axes": omit}))
        calls.append(("get_rank_repr", (rank,), {"inner_sep": "=", "outer_sep": ", "}))
    for axis in [*axes, "data", "nothing", None, 3]:
        calls += [("get_dim", (axis,), {}), ("get_axis_comm_lists", (axis,), {})]
        calls += [("get_axis_list", (), {"axis": axis, "idx": at}) for at in (-1, 0, 1, 2, 9, 1.0, "0", None)]
    for _ in range(12):
        pairs = source.sample(list(zip(axes, dims, strict=True)), len(axes))
        coords: dict[str, Any] = {
            axis: source.choice([*range(dim), *range(dim), -1, dim, 0.0, "0"]) for axis, dim in pairs
        }
        subset = dict(source.sample(list(coords.items()), source.randint(0, len(coords))))
        one_unknown = {**dict(list(coords.items())[1:]), "nothing": 0}
        for kwargs in (coords, subset, {**subset, "nothing": 0}, one_unknown, {"nothing": 0, **subset}):
            calls += [("get_rank", (), kwargs), ("filter_match", (), kwargs)]
    return calls


@pytest.mark.oracle("deepspeed")
def test_random_topologies_have_the_results_and_errors_of_deepspeed(theirs: Any) -> None:
    source = random.Random(11)
    errors = set()
    num_results = 0
    while num_results < 20_000:
        axes = source.sample(AXES, source.randint(1, 5))
        dims = [source.choice((1, 1, 2, 2, 3, 4, 5, 7)) for _ in axes]
        if prod(dims) > 240:
            continue
        upstream = theirs.ProcessTopology(list(axes), list(dims))
        ours = ProcessTopology(list(axes), list(dims))
        assert comparable(upstream.mapping) == comparable(ours.mapping)
        for name, args, kwargs in make_calls(source, axes, dims):
            expected = outcome(getattr(upstream, name), *args, **kwargs)
            assert outcome(getattr(ours, name), *args, **kwargs) == expected, (axes, dims, name, args, kwargs)
            if isinstance(expected, type):
                errors.add(expected)
            else:
                num_results += 1
    assert errors >= {ValueError, AssertionError, AttributeError, TypeError}


WRONG_ARGUMENTS: list[tuple[Any, Any]] = [
    (["a", "a"], [2, 2]),
    (["for", "b"], [2, 2]),
    (["_a", "b-c"], [2, 2]),
]
WRONG_ARGUMENTS += [([1], [2]), (["a", "b"], [2]), (["a", "b"], [2, 1.5]), (["a"], ["2"]), (["a"], [None])]
WRONG_ARGUMENTS += [("ab", [2, 2])]


@pytest.mark.oracle("deepspeed")
def test_constructors_have_the_results_and_errors_of_deepspeed(theirs: Any) -> None:
    for axes, dims in WRONG_ARGUMENTS:
        expected = outcome(theirs.ProcessTopology, axes, dims)
        assert isinstance(expected, type)
        assert outcome(ProcessTopology, axes, dims) is expected
    for pp, mp, dp in product((1, 2, 3), repeat=3):
        for name, sizes in (
            ("PipeDataParallelTopology", (pp, dp)),
            ("PipeModelDataParallelTopology", (pp, mp, dp)),
        ):
            expected = getattr(theirs, name)(*sizes)
            ours = getattr(deepspeed, name)(*sizes)
            assert (str(ours), ours.axes, ours.dims) == (str(expected), expected.axes, expected.dims)
    for number in range(-2, 200):
        assert outcome(deepspeed.topology._prime_factors, number) == outcome(theirs._prime_factors, number)


@pytest.mark.oracle("deepspeed")
def test_names_and_arguments_are_those_of_deepspeed(theirs: Any) -> None:
    for name in deepspeed.topology.__all__:
        upstream = getattr(theirs, name)
        ours = getattr(deepspeed.topology, name)
        for method in vars(upstream):
            if method == "__init__" or (not method.startswith("_") and method != "topology"):
                expected = arguments(getattr(upstream, method))
                assert arguments(getattr(ours, method)) == expected, (name, method)


# --- the grid -------------------------------------------------------------------------------------


def record_grid(grid: Any) -> dict[str, Any]:
    """Return all attributes of a grid and the results of all its methods, groups by their ranks."""
    results: dict[str, Any] = {"topology": str(grid.topology()), "_topo": grid._topo is grid.topology()}
    for name in dir(grid):
        is_skipped = name.startswith("_") and name != "_is_grid_valid"
        is_skipped = is_skipped or name in {"topology", "stage_to_global", "mesh", "from_mesh"}
        if is_skipped or not hasattr(grid, name):
            continue
        value = getattr(grid, name)
        results[name] = comparable(value() if inspect.ismethod(value) else value)
    for stage in (*range(grid.pipe_parallel_size), -1, 99):
        for more in ({}, {"data": 0}, {"data": 99}, {"nothing": 0}):
            results[f"{stage} {more}"] = outcome(grid.stage_to_global, stage, **more)
    return results


def make_and_record_grid(module: Any, axes: list[str], dims: list[int]) -> Any:
    grid = module.PipelineParallelGrid(module.ProcessTopology(list(axes), list(dims)) if axes else None)
    results = record_grid(grid)
    if hasattr(grid, "mesh"):
        assert len({*grid.mesh.communicators}) <= 6
        grid.mesh.close()
    return results


@pytest.mark.oracle("deepspeed")
def test_random_grids_have_the_attributes_and_errors_of_deepspeed(theirs: Any) -> None:
    source = random.Random(5)
    last_results = []
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
                expected = outcome(make_and_record_grid, theirs, axes, dims)
                ours = outcome(make_and_record_grid, deepspeed.topology, axes, dims)
                assert ours == expected, (axes, dims, rank)
        last_results.append(expected)
    assert last_results.count(AttributeError) > 5
    assert last_results.count(AssertionError) > 5


@pytest.mark.oracle("deepspeed")
def test_a_grid_and_a_unit_have_the_groups_of_an_equal_mesh(theirs: Any) -> None:
    for rank in (0, 7, 11):
        with fake_world(12, rank):
            mesh = namedmesh.init_mesh(pp=2, dp=3, tp=2, device="cpu")
            topology = theirs.PipeModelDataParallelTopology(2, 2, 3)
            grid = PipelineParallelGrid(topology=topology)
            unit = deepspeed.mpu(mesh)
            assert grid.topology() is topology
            assert grid.get_data_parallel_group() is unit.get_data_parallel_group() is mesh.group("dp")
            expected = record_grid(theirs.PipelineParallelGrid(topology))
            from_mesh = record_grid(PipelineParallelGrid.from_mesh(mesh)) | {"topology": str(topology)}
            assert record_grid(grid) == from_mesh == expected
            results = record_unit(unit)
            shared = results.keys() & expected.keys()
            assert len(shared) >= 17
            for name in shared:
                assert results[name] == expected[name], name
            grid.mesh.close()
            mesh.close()


def all_reduce_over_grid_groups() -> tuple[Any, ...]:
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data", "model"], [2, 2, 2]))
    groups = {name: group for name, group in vars(grid).items() if isinstance(group, dist.ProcessGroup)}
    sums = {name: sum(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    is_right = [summed(group, dist.get_rank()) == sums[name] for name, group in groups.items()]
    grid.mesh.close()
    num_groups = live_groups()
    for _ in range(3):
        PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2)).mesh.close()
    sizes = {name: group.size() for name, group in groups.items()}
    return sizes, all(is_right), live_groups() - num_groups


def test_grid_groups_work_on_gloo_and_are_reused() -> None:
    sizes = {"pp_proc_group": 2, "dp_proc_group": 2, "ds_model_proc_group": 4, "slice_proc_group": 2}
    assert run_ranks(8, all_reduce_over_grid_groups) == [(sizes, True, 0)] * 8


def test_a_grid_needs_a_default_group() -> None:
    text = "torch.distributed has no default group; ... deepspeed.init_distributed() first"
    check_error(PipelineParallelGrid, AssertionError, text)


def test_a_grid_of_a_mesh_needs_its_axes() -> None:
    with fake_world(4):
        mesh = namedmesh.init_mesh(tp=4, device="cpu")
        text = error_of(lambda: PipelineParallelGrid.from_mesh(mesh))
        mesh.close()
    assert text == (
        "AxisError: tp=4 (4 ranks) has no axis pp and no axis dp; a grid needs pp and dp: make the mesh with both, "
        "if only of size 1"
    )


# --- the unit -------------------------------------------------------------------------------------

FIELDS = ("group", "rank", "world_size")
KINDS = ("model", "data", "slice", "pipe", "tensor_model", "pipeline_model")
ALWAYS = {f"get_{kind}_parallel_{field}" for kind in KINDS for field in FIELDS}
ALWAYS |= {f"get_{kind}_parallel_src_rank" for kind in ("model", "data", "tensor_model")}
ALWAYS |= {"get_data_parallel_group_ranks", "get_global_rank"}
SEQUENCE = {f"get_sequence{kind}_parallel_{field}" for kind in ("", "_data") for field in FIELDS}


def record_unit(unit: Any) -> dict[str, Any]:
    return {name: comparable(getattr(unit, name)()) for name in dir(unit) if name.startswith("get_")}


def test_a_unit_has_the_accessors_of_its_mesh_and_no_others() -> None:
    with fake_world(16, 11):
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        unit = deepspeed.mpu(mesh)
        results = record_unit(unit)
        assert set(results) == ALWAYS
        assert unit.get_pipe_parallel_group() is mesh.group("pp")
        assert results["get_model_parallel_group"] == ("group", [2, 3, 10, 11])
        assert (results["get_model_parallel_rank"], results["get_model_parallel_src_rank"]) == (3, 2)
        assert results["get_data_parallel_group_ranks"] == [9, 11, 13, 15]
        assert not hasattr(unit, "get_sequence_parallel_group")
        mesh.close()


@pytest.mark.parametrize("axes", [("sp",), ("cp",), ("cp", "sp")])
def test_a_unit_has_sequence_accessors_if_the_mesh_has_sp_or_cp(axes: tuple[str, ...]) -> None:
    with fake_world(16, 9):
        mesh = namedmesh.init_mesh(dp=-1, **dict.fromkeys(axes, 2), device="cpu")  # type: ignore[arg-type]
        unit = deepspeed.mpu(mesh)
        results = record_unit(unit)
        ranks = [8, 9, 10, 11][: 2 ** len(axes)]
        assert set(results) == ALWAYS | SEQUENCE
        texts = [inspect.getdoc(getattr(type(unit), name)) for name in sorted(results)]
        # Accessors of tensor and slice, and of pipeline and pipe, are the same functions.
        assert len(set(texts) - {None}) == 23
        assert results["get_sequence_parallel_group"] == ("group", ranks)
        assert results["get_sequence_parallel_world_size"] == len(ranks)
        assert results["get_sequence_parallel_rank"] == 1
        assert results["get_sequence_data_parallel_group"] == ("group", list(range(16)))
        assert results["get_data_parallel_group_ranks"] == list(range(9 % len(ranks), 16, len(ranks)))
        assert unit.get_model_parallel_world_size() == 1
        # If a unit had this name, DeepSpeed would ignore the data-parallel group.
        assert not hasattr(unit, "initialize_sequence_parallel")
        mesh.close()


# --- variables of DeepSpeed -----------------------------------------------------------------------


def record_accessors(groups: Any) -> dict[str, Any]:
    """Return the results of all accessors without arguments."""
    results = {}
    for name, getter in vars(groups).items():
        # This one makes groups, whose size is the number of local devices.
        makes_groups = name == "_get_local_all_to_all_group"
        if name.startswith(("get_", "_get_")) and not getter.__code__.co_argcount and not makes_groups:
            results[name] = outcome(getter)
    return results


@pytest.mark.oracle("deepspeed")
def test_accessors_of_a_bound_mesh_equal_those_of_its_mpu() -> None:
    """In addition, tensor-parallel accessors work, which DeepSpeed does not take from an mpu."""
    module = deepspeed_groups()
    source = random.Random(1)
    num_compared = 0
    for _ in range(25):
        sizes = {axis: source.choice([1, 2, 3]) for axis in ("pp", "dp", "sp", "tp")}
        layout = Layout(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"})
        with fake_world(layout.world_size, source.randrange(layout.world_size)):
            init_deepspeed()
            mesh = namedmesh.init_mesh(layout, device="cpu")
            vars(module)["mpu"] = deepspeed.mpu(mesh)
            expected = record_accessors(module)
            module._release_process_group_references()
            deepspeed.bind(mesh)
            results = record_accessors(module)
            for name, result in expected.items():
                if not isinstance(result, type):
                    assert results[name] == result, (sizes, name)
                    num_compared += 1
            mesh.close()
            assert module.mpu is module._TENSOR_MODEL_PARALLEL_GROUP is None
    assert num_compared > 300


@pytest.mark.oracle("deepspeed")
def test_deepspeed_uses_the_groups_of_a_bound_mesh_and_of_its_expert_view() -> None:
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
        mesh.close()
        other.close()


# --- install() ------------------------------------------------------------------------------------

INSTALL_WITH_UPSTREAM = """
import sys, warnings
from deepspeed.runtime.pipe import module as early
from deepspeed.runtime.pipe.topology import PipelineParallelGrid as theirs, ProcessTopology as topology
import namedmesh, deepspeed
from namedmesh.compat import deepspeed as ours
namedmesh.launch.init("cpu")
vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
ours.install(); ours.install()
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
assert PipelineParallelGrid is early.PipelineParallelGrid and issubclass(PipelineParallelGrid, theirs)
assert ProcessTopology is topology
grid = PipelineParallelGrid()
assert grid.pp_proc_group is grid.mesh.group("pp") and grid.mesh is namedmesh.current_mesh()
ours.uninstall()
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
assert PipelineParallelGrid is early.PipelineParallelGrid is theirs
"""


@pytest.mark.oracle("deepspeed")
def test_the_grid_of_deepspeed_uses_a_mesh_after_install() -> None:
    run_python(INSTALL_WITH_UPSTREAM, action="ignore")
