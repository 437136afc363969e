"""Groups and variables of fairscale and ezpz, and several compatibility layers on one mesh."""

from __future__ import annotations

import importlib
import random
import sys
import textwrap
import warnings
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from installing import run_python, without
from legacy import arguments, more_arguments, original, outcome
from messages import check_error, error_of
from pages import find_blocks
from ranks import fake_world, live_groups, run_ranks, summed
from tensors import random_tensor
from torch.utils.checkpoint import checkpoint

import namedmesh
from namedmesh import Layout, LayoutError, MeshError
from namedmesh.compat import deepspeed, ezpz, fairscale, megatron
from namedmesh.compat.ezpz import tp
from namedmesh.compat.fairscale import initialize as state
from namedmesh.compat.process_groups import ProcessGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START = "fairscale.nn.model_parallel.initialize"
AXES = ("tensor", "context", "pipeline", "data")


@pytest.fixture(autouse=True)
def _uninstall_and_destroy() -> Iterator[None]:
    yield
    fairscale.uninstall()
    fairscale.destroy_model_parallel()
    tp.destroy_tensor_parallel()
    assert not fairscale.model_parallel_is_initialized()
    assert not tp.tensor_parallel_is_initialized()


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.oracle("fairscale")
def test_names_and_arguments_are_those_of_fairscale() -> None:
    seen = set()
    for part in ("cross_entropy", "initialize", "layers", "mappings", "utils"):
        theirs = original(f"fairscale.nn.model_parallel.{part}")
        ours = importlib.import_module(f"namedmesh.compat.fairscale.{part}")
        for name, value in vars(theirs).items():
            if name.startswith("_") or getattr(value, "__module__", "") != theirs.__name__:
                continue
            seen.add(name)
            # Additional arguments must be optional.
            more = more_arguments(value, getattr(ours, name))
            assert all(parameter.default is not parameter.empty for parameter in more), name
    assert len(seen) == 25
    seen |= {name for name in vars(original(START)) if name.isupper() and name.startswith("_")}
    assert seen <= {*dir(fairscale)}


KINDS = ("group", "ranks", "rank", "world_size")
SIZES = ("tensor", "pipeline", "context")
INITIALIZE: list[tuple[str, Any]] = [(f"{axis}_parallel_size", 1) for axis in SIZES]
INITIALIZE += [(f"{axis}_parallel_backend", None) for axis in (*SIZES, "data")]


def test_names_of_ezpz_are_those_of_fairscale_with_tensor_for_model() -> None:
    assert arguments(tp.initialize_tensor_parallel) == [*INITIALIZE, ("timeout", None)]
    only_in_fairscale = {"initialize_model_parallel", "vocab_parallel_cross_entropy"}
    for name in {*fairscale.__all__} - only_in_fairscale:
        ezpz_function = getattr(tp, name.replace("model_parallel", "tensor_parallel"))
        assert arguments(ezpz_function) == arguments(getattr(fairscale, name)), name
    for axis, kind in product(AXES, KINDS):
        assert arguments(getattr(tp, f"get_{axis}_parallel_{kind}")) == []
    for part in ("tp", "tp.layers", "tp.mappings", "tp.utils"):
        assert importlib.import_module(f"namedmesh.compat.ezpz.{part}") is tp


# --- groups ---------------------------------------------------------------------------------------


def record_life_cycle(module: Any, *sizes: int) -> Any:
    """Return the results, or error types, of all accessors before and after initialization."""
    names = [name for name in dir(original(START)) if name.startswith(("get_", "model_parallel_is"))]
    results: list[Any] = []

    def record_accessors() -> None:
        results.append({name: outcome(getattr(module, name)) for name in names})

    record_accessors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results.append(outcome(module.initialize_model_parallel, *sizes))
    record_accessors()
    results.append(outcome(module.initialize_model_parallel, *sizes))
    module.destroy_model_parallel()
    module._MODEL_PARALLEL_GROUP = "assigned"
    results.append(outcome(module.initialize_model_parallel, 1))
    module.destroy_model_parallel()
    record_accessors()
    return results


@pytest.mark.oracle("fairscale")
def test_random_configurations_have_the_groups_and_errors_of_fairscale() -> None:
    source = random.Random(4)
    cases = []
    for _ in range(120):
        world = source.choice((1, 2, 4, 6, 8, 12, 16, 24))
        sizes = source.choice((1, 2, 3, 4, 6, 8, 16)), source.choice((1, 1, 2, 3, 4))
        for rank in {0, world - 1, source.randrange(world)}:
            with fake_world(world, rank):
                upstream = record_life_cycle(original(START), *sizes)
                ours = record_life_cycle(state, *sizes)
            assert ours == upstream, (world, rank, sizes)
        if upstream[1]:
            cases.append("error")
        elif sizes[0] > world:
            cases.append("reduced tp")
        else:
            cases.append("made")
    assert min(cases.count(case) for case in ("error", "reduced tp", "made")) > 10


def compute_groups(rank: int, sizes: tuple[int, ...]) -> dict[str, list[int]]:
    """Return the groups of a rank by hand, for the sizes of tp, cp, pp and dp, tp fastest."""
    groups = {}
    step = 1
    for axis, size in zip(AXES, sizes, strict=True):
        first = rank - rank // step % size * step
        groups[axis] = [first + index * step for index in range(size)]
        step *= size
    return groups


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 1, 1, 6), (4, 2, 1, 3), (2, 1, 3, 1), (3, 2, 2, 1)])
def test_groups_equal_a_computation_by_hand(sizes: tuple[int, int, int, int]) -> None:
    t, c, p, d = sizes
    for rank in range(t * p * c * d):
        expected = compute_groups(rank, sizes)
        with fake_world(t * p * c * d, rank):
            tp.initialize_tensor_parallel(t, p, c)
            fairscale.initialize_model_parallel(t, p, context_parallel_size=c)
            for axis, ranks in expected.items():
                group, *numbers_ = (getattr(tp, f"get_{axis}_parallel_{kind}")() for kind in KINDS)
                assert dist.get_process_group_ranks(group) == ranks
                assert numbers_ == [ranks, ranks.index(rank), len(ranks)]
                assert getattr(state, f"get_{axis.replace('tensor', 'model')}_parallel_ranks")() == ranks
            firsts = tp.get_tensor_parallel_src_rank(), state.get_model_parallel_src_rank()
            assert firsts == (expected["tensor"][0],) * 2
            assert state.get_context_parallel_rank() == tp.get_context_parallel_rank()
            fairscale.destroy_model_parallel()
            tp.destroy_tensor_parallel()


# --- the variables, and the mesh behind them ------------------------------------------------------


def test_variables_can_be_assigned() -> None:
    tp: Any = ezpz
    with fake_world(8, 3):
        tp.initialize_tensor_parallel(2, 2, tensor_parallel_backend="fake", timeout=timedelta(seconds=60))
        mesh = ezpz.current_mesh()
        assert mesh is namedmesh.current_mesh()
        assert str(mesh.layout) == "dp=2 x pp=2 x cp=1 x tp=2 (8 ranks)"
        assert tp._TENSOR_PARALLEL_GROUP is mesh.group("tp")
        assert (tp._TENSOR_PARALLEL_RANKS, tp._CONTEXT_PARALLEL_GROUP_RANKS) == ([2, 3], [3])
        tp._TENSOR_PARALLEL_GROUP = dist.group.WORLD
        assert (tp.get_tensor_parallel_world_size(), tp.get_tensor_parallel_src_rank()) == (8, 0)
        assert tp.layers.ColumnParallelLinear(4, 8).weight.shape == (1, 4)
        tp._DATA_PARALLEL_RANKS = "patched"
        assert tp.get_data_parallel_ranks() == "patched"
        tp._CONTEXT_PARALLEL_GROUP = None
        assert not tp.tensor_parallel_is_initialized()
        tp.destroy_tensor_parallel()
        assert tp._TENSOR_PARALLEL_GROUP is tp._DATA_PARALLEL_RANKS is None
        assert mesh.closed


def test_a_layer_keeps_the_group_that_it_was_created_with() -> None:
    with fake_world(8, 5):
        first, second = (namedmesh.init_mesh(dp=-1, tp=size, device="cpu") for size in (2, 4))
        fairscale.bind(first)
        layer = fairscale.ColumnParallelLinear(4, 8)
        with fairscale.bind(second):
            output = checkpoint(layer, torch.ones(1, 4), use_reentrant=False)
            assert layer(torch.zeros(1, 4)).shape == (1, 8)
            assert fairscale.ColumnParallelLinear(4, 8).weight.shape == (2, 4)
        output.sum().backward()
        assert layer.weight.grad is not None
        for mesh in (first, second):
            mesh.close()


# A function of a mesh, and the object with the accessors if the function does not return it.
BINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "fairscale": (fairscale.bind, state),
    "ezpz": (ezpz.bind, tp),
    "megatron": (megatron.bind, megatron.parallel_state),
    "mpu": (deepspeed.mpu, None),
    "grid": (deepspeed.PipelineParallelGrid.from_mesh, None),
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about itself
@pytest.mark.parametrize("api", BINDS)
def test_accessors_compile_without_graph_breaks(api: str) -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2, device="cpu")
        bind, module = BINDS[api]
        bound = bind(mesh)
        accessors = module or bound
        names = [
            name
            for name in dir(accessors)
            if name.startswith(("get_", "is_")) or name.endswith("_initialized")
        ]
        calls = [getattr(accessors, name) for name in names]
        calls = [call for call in calls if not isinstance(outcome(call), type)]
        number_calls = [call for call in calls if isinstance(call(), (int, list))]
        assert len(calls) > len(number_calls) > 8

        def call_all(x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            for call in calls:
                call()
            # A compiled function cannot return a group.
            if api == "fairscale":
                x = fairscale.copy_to_model_parallel_region(x) + 1
            return x, [call() for call in number_calls]

        torch._dynamo.reset()
        compiled = torch.compile(call_all, backend="eager", fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                assert compiled(torch.ones(2))[1] == [call() for call in number_calls]
        mesh.close()


# --- several compatibility layers on one mesh -----------------------------------------------------


# The names of an axis in fairscale, ezpz, DeepSpeed and Megatron.
AXIS_NAMES = {
    "tp": ("model", "tensor", "slice", "tensor_model"),
    "pp": ("pipeline", "pipeline", "pipe", "pipeline_model"),
    "dp": ("data",) * 4,
}


def collect_groups(mesh: namedmesh.NamedMesh) -> dict[str, list[Any]]:
    """Return the groups of every compatibility layer and of the mesh along each axis."""
    modules = state, tp, deepspeed.mpu(mesh), megatron.parallel_state
    groups: dict[str, list[Any]] = {}
    for axis, names in AXIS_NAMES.items():
        groups[axis] = []
        for module, name in zip(modules, names, strict=True):
            groups[axis].append(getattr(module, f"get_{name}_parallel_group")())
        if axis in mesh.layout:
            groups[axis] += [mesh.group(axis), mesh[axis].get_group()]
    return groups


SHARED = [{"pp": 2, "dp": 2, "tp": 2}, {"tp": 2, "dp": 4}, {"dp": 8}]
SHARED += [{"dp_replicate": 2, "dp_shard": 2, "tp": 2}]
CYCLES: list[tuple[Any, Any]] = [
    (state.initialize_model_parallel, state.destroy_model_parallel),
    (megatron.parallel_state.initialize_model_parallel, megatron.parallel_state.destroy_model_parallel),
]


def can_all_reduce(group: Any) -> bool:
    return summed(group, dist.get_rank()) == sum(dist.get_process_group_ranks(group))


def bind_all_to_one_mesh(layouts: list[dict[str, int]]) -> None:
    for sizes in layouts:
        mesh = namedmesh.init_mesh(Layout(**sizes))
        with fairscale.bind(mesh), ezpz.bind(mesh), megatron.bind(mesh):
            for groups in collect_groups(mesh).values():
                assert len({*groups}) == 1
                assert can_all_reduce(groups[0])
            data = mesh.ranks(*(axis for axis in mesh.layout if axis.startswith("dp")))
            assert state.get_data_parallel_ranks() == list(data)
        assert not state.model_parallel_is_initialized()
        assert not tp.tensor_parallel_is_initialized()
        num_communicators = len(mesh.communicators)
        fairscale.bind(mesh)
        ezpz.bind(mesh)
        assert len(mesh.communicators) == num_communicators
        fairscale.destroy_model_parallel()
        assert not mesh.closed
        assert not state.model_parallel_is_initialized()
        ezpz.unbind()
        assert not tp.tensor_parallel_is_initialized()
        ezpz.bind(mesh)
        dist.barrier()
        mesh.close()
        assert not tp.tensor_parallel_is_initialized()
        counts = []
        for _ in range(2):
            for initialize, destroy in CYCLES:
                initialize(2, 2)
                group = namedmesh.current_mesh().group("pp")
                assert can_all_reduce(group)
                fairscale.bind(namedmesh.current_mesh())
                assert fairscale.get_pipeline_parallel_group() is group
                destroy()
                assert not state.model_parallel_is_initialized()
            counts.append(live_groups())
        # The groups stay for the next initialization, which makes no others.
        assert counts[0] == counts[1]


@pytest.mark.ci
@pytest.mark.parametrize("layouts", [SHARED[:1], pytest.param(SHARED[1:], marks=pytest.mark.slow)])
def test_compatibility_layers_on_one_mesh_share_its_groups(layouts: list[dict[str, int]]) -> None:
    run_ranks(8, bind_all_to_one_mesh, layouts)


def test_the_example_of_the_page_on_fairscale_runs() -> None:
    for source in find_blocks("python", r"run: fairscale"):
        assert "bind" in run_python(source + "print(fairscale.bind)")


def test_process_groups_equal_a_computation_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes, rank in product([(2, 2, 2), (1, 1, 8), (8, 1, 1), (1, 8, 1), (2, 4, 1)], range(8)):
        with fake_world(8, rank):
            groups = ProcessGroups(*sizes)
            ranks = compute_groups(rank, (sizes[0], 1, *sizes[1:]))
            by_axis = {"tensor": groups.tp_group, "pipeline": groups.pp_group, "data": groups.dp_group}
            for axis, group in by_axis.items():
                assert dist.get_process_group_ranks(group) == ranks[axis]
            assert (groups.tp_size, groups.pp_size, groups.dp_size) == sizes
            group_ranks = [ranks[axis].index(rank) for axis in by_axis]
            assert [groups.tp_rank, groups.pp_rank, groups.dp_rank] == group_ranks
            assert groups.is_first_stage == (group_ranks[1] == 0)
            assert groups.is_last_stage == (group_ranks[1] == sizes[1] - 1)
            groups.mesh.close()
    with fake_world(12):
        groups = ProcessGroups(2, 3, 2)
        groups.log(1)
        groups.log(0)
        groups.mesh.close()
        with pytest.raises(LayoutError, match="dp=2 x pp=2 x tp=2 needs 8 ranks, but the world has 12"):
            ProcessGroups(2, 2, 2)
    assert capsys.readouterr().out == "world size 12: tp=2, pp=3, dp=2\n"


# --- unmodified code ------------------------------------------------------------------------------


def train_llama(ours: bool, present: bool) -> tuple[bool, list[float]]:
    """Train a Llama in the style of the reference code for four steps.

    Returns:
        Whether it used our groups, and the loss of each step.
    """
    warnings.simplefilter("ignore" if present else "error")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fairscale"]:
        # In this forked rank, fairscale must look as if it was not imported yet or not installed.
        del sys.modules[name]
    if not present:
        exec(without("fairscale"), {})  # noqa: S102  our own
    if ours:
        fairscale.install()
    llama = importlib.import_module("old_llama")
    size = dist.get_world_size()
    rank = llama.setup(size)
    torch.set_default_dtype(torch.float64)
    model = llama.Transformer()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" not in name:
                dim = {"wo": 1, "w2": 1, "tok_embeddings": 1}.get(name.split(".")[-2], 0)
                shape = [length * (size if at == dim else 1) for at, length in enumerate(parameter.shape)]
                parameter.copy_(random_tensor(*shape, seed=seed).chunk(size, dim)[rank] * 0.2)
    tokens = torch.randint(0, llama.VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    used = hasattr(llama.fs_init.initialize_model_parallel, "__wrapped__")
    llama.fs_init.destroy_model_parallel()
    return used, losses


@pytest.mark.parametrize("present", [False, pytest.param(True, marks=pytest.mark.oracle("fairscale"))])
def test_an_unmodified_llama_trains_on_two_ranks_as_on_one_rank_and_as_on_fairscale(present: bool) -> None:
    ((_, single_rank_losses),) = run_ranks(1, train_llama, True, present)
    assert single_rank_losses[-1] < single_rank_losses[0]
    for ours in {True, not present}:
        for used, losses in run_ranks(2, train_llama, ours, present):
            assert used is ours
            assert losses == pytest.approx(single_rank_losses, abs=1e-12)


IMPORTS_WITHOUT_UPSTREAM = {
    "fairscale": """
        import fairscale.nn.model_parallel.initialize as fs_init
        import fairscale.nn.model_parallel as mpu
        from fairscale.nn.model_parallel import get_model_parallel_rank, initialize, layers, mappings, utils
        from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
        assert fs_init is initialize is ours.initialize and mpu is ours and layers is ours.layers and utils is ours.utils
        """,
    "ezpz": """
        import ezpz.tp as short
        import ezpz.tp.layers
        from ezpz.tp import get_tensor_parallel_rank, mappings
        from ezpz.tp.utils import VocabUtility
        assert short is ezpz.tp is ours.tp and ezpz.tp.layers is ours.tp.layers and mappings is ours.tp.mappings
        """,
    "megatron": """
        import megatron.core.parallel_state as ps
        from megatron.core import mpu, parallel_state, tensor_parallel
        from megatron.core.parallel_state import get_tensor_model_parallel_group
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.utils import VocabUtility
        assert ps is mpu is parallel_state is ours.parallel_state and tensor_parallel is ours.tensor_parallel
        """,
    "deepspeed": """
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, _prime_factors
        import deepspeed.runtime.pipe
        assert deepspeed.runtime.pipe.topology.ProcessTopology is ours.ProcessTopology
        """,
}


@pytest.mark.parametrize("package", IMPORTS_WITHOUT_UPSTREAM)
def test_without_upstream_our_modules_have_its_import_paths(package: str) -> None:
    code = f"""
        from namedmesh.compat import {package} as ours
        before = set(sys.modules)
        ours.install(); ours.install()
        {IMPORTS_WITHOUT_UPSTREAM[package].strip()}
        ours.uninstall(); ours.uninstall()
        assert set(sys.modules) == before
        try:
            import {package}
        except ModuleNotFoundError:
            print("gone")
        """
    assert run_python(without(package) + textwrap.dedent(code)) == "gone\n"


INSTALL_WITH_UPSTREAM = """
from fairscale.nn.model_parallel import initialize_model_parallel as theirs
import namedmesh
from namedmesh.compat import fairscale as ours
namedmesh.launch.init("cpu")
for turn in range(2):
    ours.install()
    from fairscale.nn.model_parallel import get_model_parallel_group, initialize, initialize_model_parallel, layers
    assert layers is not ours.layers and initialize is not ours.initialize
    assert initialize_model_parallel.__wrapped__ is theirs
    initialize_model_parallel(1)
    mesh = ours.current_mesh()
    assert get_model_parallel_group() is mesh.group("tp") is ours.get_model_parallel_group()
    assert initialize._PIPELINE_PARALLEL_RANKS == ours.get_data_parallel_ranks() == [0]
    assert ours.initialize._MODEL_PARALLEL_GROUP is None  # upstream's variables are used
    initialize.destroy_model_parallel()
    assert mesh.closed and not initialize.model_parallel_is_initialized()
    ours.uninstall()
    from fairscale.nn.model_parallel import initialize_model_parallel
    assert initialize_model_parallel is theirs
"""


@pytest.mark.oracle("fairscale")
def test_an_installed_fairscale_uses_the_groups_of_our_meshes() -> None:
    """fairscale was imported before ``install()``; the Llama imports it afterwards."""
    run_python(INSTALL_WITH_UPSTREAM, action="ignore")


@pytest.mark.oracle("fairscale")
def test_install_forgets_meshes_and_uninstall_restores_upstream() -> None:
    """Model-parallel ranks are not neighbors here, so upstream's own first rank would be wrong."""
    theirs = original(START)
    names = set(vars(theirs))
    for rank in range(4):
        with fake_world(4, rank):
            mesh = namedmesh.init_mesh(tp=2, dp=-1, device="cpu")
            fairscale.bind(mesh)
            fairscale.install()
            assert not theirs.model_parallel_is_initialized()
            theirs._DATA_PARALLEL_GROUP = "its own"
            with fairscale.bind(mesh):
                assert theirs.get_model_parallel_group() is mesh.group("tp")
                assert theirs.get_model_parallel_src_rank() == mesh.ranks("tp")[0] == rank % 2
            assert (theirs._MODEL_PARALLEL_GROUP, theirs._DATA_PARALLEL_GROUP) == (None, "its own")
            fairscale.bind(mesh)
            fairscale.uninstall()
            # The variables of later sources are removed again.
            assert set(vars(theirs)) == names
            assert theirs._MODEL_PARALLEL_GROUP is vars(fairscale)["_MODEL_PARALLEL_GROUP"] is None
            assert not mesh.closed
            mesh.close()


# --- errors ---------------------------------------------------------------------------------------


def test_errors_name_the_variable_or_size_and_the_remedy() -> None:
    text = (
        "_MODEL_PARALLEL_GROUP is None: fairscale's model parallelism is not initialized; call "
        "initialize_model_parallel(...), or namedmesh.compat.fairscale.bind(mesh) with an existing mesh"
    )
    check_error(fairscale.get_model_parallel_group, AssertionError, text)
    check_error(tp.get_data_parallel_ranks, AssertionError, "_DATA_PARALLEL_RANKS is None: ...")
    assert (tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_world_size()) == (0, 1)
    text = "_PIPELINE_PARALLEL_GROUP is None: ezpz's ... is not initialized; ..."
    check_error(tp.get_pipeline_parallel_rank, AssertionError, text)
    initialize = fairscale.initialize_model_parallel
    check_error(lambda: initialize(1), AssertionError, "torch.distributed has no default group; ...")
    check_error(ezpz.current_mesh, RuntimeError, "ezpz's model parallelism is not bound to a mesh; ...")
    with fake_world(8):
        num_groups = live_groups()
        text = "pp=3 x cp=1 x tp=2 = 6 does not divide the world of 8 ranks; ..."
        check_error(lambda: initialize(2, 3), AssertionError, text)
        check_error(lambda: initialize(0), AssertionError, "size of axis 'tp' ...")
        check_error(lambda: initialize(-1), AssertionError, "axes 'dp', 'tp' are all -1; ...")
        assert live_groups() == num_groups
        initialize(4)
        check_error(lambda: initialize(2), AssertionError, "fairscale's ... already initialized: ...")


# An API, axes of size 2 that it has no group for, and the error.
UNKNOWN_AXES = [
    ("fairscale", "dp xp", "axis 'xp' has no place in fairscale's groups, which are over ...; did you ..."),
    ("megatron", "dp ep", "axis 'ep' is one of the experts', ... and add a view for it: ..."),
    ("megatron", "dp xp", "axis 'xp' has no place in Megatron's groups, which are over ...; did you ..."),
    ("mpu", "dp ep", "axis 'ep' is one of the experts', and DeepSpeed makes its own groups for them; ..."),
    ("mpu", "tq ep", "2 problems:\n ...'tq' has no place in DeepSpeed's groups, ...axis 'ep' is one of ..."),
]


@pytest.mark.parametrize("api", BINDS)
def test_binding_anything_but_an_open_mesh_raises(api: str) -> None:
    bind, _ = BINDS[api]
    with pytest.raises(MeshError, match="got a NoneType; give it a NamedMesh, such as"):
        bind(None)
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=8, device="cpu")
        mesh.close()
        text = "the mesh over dp=8 (8 ranks) was closed; give ... an open one"
        check_error(lambda: bind(mesh), MeshError, text)


@pytest.mark.parametrize(("api", "axes", "text"), UNKNOWN_AXES)
def test_binding_a_mesh_with_unknown_axes_raises(api: str, axes: str, text: str) -> None:
    with fake_world(4, 3):
        mesh = namedmesh.init_mesh(dict.fromkeys(axes.split(), 2), device="cpu")
        check_error(lambda: BINDS[api][0](mesh), LayoutError, text)
        mesh.close()


def test_a_tp_size_above_the_world_size_is_reduced_with_a_warning() -> None:
    with fake_world(4):
        with pytest.warns(UserWarning, match="tp=8") as caught:
            fairscale.initialize_model_parallel(8)
        assert fairscale.get_model_parallel_world_size() == 4
    text = "fairscale reduces tp=8 to the world of 4 ranks without an error"
    assert str(caught[0].message) == text
    assert caught[0].filename == __file__


# Functions of the size of one axis; 2 and 4 divide the world of 4 ranks, 3 does not.
INITIALIZERS: dict[str, Callable[[int], Any]] = {
    "fairscale.initialize_model_parallel": fairscale.initialize_model_parallel,
    "ezpz.initialize_tensor_parallel": tp.initialize_tensor_parallel,
    "megatron.initialize_model_parallel": megatron.parallel_state.initialize_model_parallel,
    "deepspeed.PipelineParallelGrid": lambda size: deepspeed.PipelineParallelGrid(
        deepspeed.PipeDataParallelTopology(size, 4 // size if size != 3 else 2)
    ),
}


def initialize_with_other_size_on_rank_3(call: str, size: int) -> str:
    initialize = INITIALIZERS[call]
    return error_of(lambda: initialize(size if dist.get_rank() == 3 else 2))


@pytest.mark.parametrize(("call", "size"), [*product(INITIALIZERS, (4, 3))])
def test_every_rank_raises_if_sizes_differ_or_one_rank_fails(call: str, size: int) -> None:
    *others, rank_3 = run_ranks(4, initialize_with_other_size_on_rank_3, call, size)
    expected = "differs between ranks: ... on rank 3; ..." if size == 4 else "rank 3 failed in init_mesh..."
    for text in others:
        assert text.startswith("AgreementError: ")
        assert all(part in text for part in expected.split("..."))
    assert rank_3.startswith("AgreementError" if size == 4 else "Contract")
