"""The fairscale dialect does what fairscale does, on the groups of one mesh."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from installing import run_python, without
from messages import refuses
from ranks import fake_world, live_groups, run_ranks
from tp_compare import apart, numbers

import namedmesh
from namedmesh.compat import fairscale
from namedmesh.compat.fairscale import initialize as state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PARTS = ("cross_entropy", "initialize", "layers", "mappings", "utils")


@pytest.fixture(autouse=True)
def _nothing_bound() -> Iterator[None]:
    yield
    fairscale.destroy_model_parallel()
    assert not fairscale.model_parallel_is_initialized()


def oracle(part: str = "initialize") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"fairscale.nn.model_parallel.{part}")


@pytest.fixture(scope="module")
def _imported() -> None:
    """Import the original before the ranks are forked, once."""
    oracle("layers")


# --- the names ----------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[tuple[Any, ...]]:
    return [
        (one.name, one.kind, one.default)
        for one in inspect.signature(function).parameters.values()
        # What later sources have besides can only be given by name, so every call of the original stays one.
        if (one.name, one.kind)
        not in {(name, one.KEYWORD_ONLY) for name in ("context_parallel_size", "cp_backend")}
    ]


@pytest.mark.oracle("fairscale")
def test_every_public_name_is_there_with_the_same_signature() -> None:
    seen = set()
    for part in PARTS:
        theirs = oracle(part)
        ours = importlib.import_module(f"namedmesh.compat.fairscale.{part}")
        for name, value in vars(theirs).items():
            if name.startswith("_") or getattr(value, "__module__", "") != theirs.__name__:
                continue
            seen.add(name)
            assert parameters(getattr(ours, name)) == parameters(value), name
            if inspect.isclass(value):
                for method, function in vars(value).items():
                    if inspect.isfunction(function) and method != "__init__":
                        assert parameters(getattr(getattr(ours, name), method)) == parameters(function), name
    assert len(seen) == 25
    package = importlib.import_module("fairscale.nn.model_parallel")
    exported = {name for name, value in vars(package).items() if callable(value) and name in seen}
    assert exported <= set(dir(fairscale))
    variables = {name for name in vars(oracle()) if name.isupper() and name.startswith("_")}
    assert variables <= set(state.DIALECT.binding.variables) <= set(dir(state))


def test_every_name_that_is_exported_is_there() -> None:
    for module in (fairscale, *(getattr(fairscale, part) for part in PARTS)):
        assert len(module.__all__) == len(set(module.__all__))
        for name in module.__all__:
            assert getattr(module, name) is not None


# --- the groups ---------------------------------------------------------------------------------------------

GROUPS = ("get_model_parallel_group", "get_data_parallel_group", "get_pipeline_parallel_group")
NUMBERS = (
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_model_parallel_src_rank",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_pipeline_parallel_ranks",
    "model_parallel_is_initialized",
)


def answers(module: Any) -> dict[str, Any]:
    told = {name: getattr(module, name)() for name in NUMBERS}
    return told | {name: dist.get_process_group_ranks(getattr(module, name)()) for name in GROUPS}


def outcome(module: Any, *sizes: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.initialize_model_parallel(*sizes)
        return answers(module)
    except Exception as error:  # noqa: BLE001  which one is what is compared
        return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    finally:
        module.destroy_model_parallel()


@pytest.mark.oracle("fairscale")
def test_the_same_groups_in_random_configurations() -> None:
    source = random.Random(4)
    theirs = oracle()
    valid = refused = cut = 0
    while valid < 150:
        world = source.choice((1, 2, 4, 6, 8, 12, 16, 24, 32))
        sizes = source.choice((1, 2, 3, 4, 6, 8, 16)), source.choice((1, 1, 2, 3, 4))
        for rank in {0, world - 1, source.randrange(world)}:
            with fake_world(world, rank):
                told = [outcome(module, *sizes) for module in (theirs, state)]
            assert told[0] == told[1], (world, rank, sizes)
        valid += isinstance(told[0], dict)
        refused += not isinstance(told[0], dict)
        cut += isinstance(told[0], dict) and sizes[0] > world
    assert refused > 20
    assert cut > 10


def sums_on_gloo() -> list[Any]:
    told = []
    for sizes in ((2, 2), (4, 1), (1, 4), (8, 1)):
        before = live_groups()
        theirs = outcome(oracle(), *sizes)
        after_theirs = live_groups()
        state.initialize_model_parallel(*sizes)
        same, right = theirs == answers(state), True
        for name in (*GROUPS, "get_context_parallel_group"):
            group = getattr(state, name)()
            tensor = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(tensor, group=group)
            right = right and tensor.item() == sum(dist.get_process_group_ranks(group))
        state.destroy_model_parallel()
        told.append((same, right, live_groups() == after_theirs >= before))
    return told


@pytest.mark.oracle("fairscale")
@pytest.mark.usefixtures("_imported")
def test_the_same_groups_on_gloo() -> None:
    assert run_ranks(8, sums_on_gloo) == [[(True, True, True)] * 4] * 8


def test_context_parallel_groups_and_the_lists_of_ranks() -> None:
    for rank in range(16):
        with fake_world(16, rank):
            state.initialize_model_parallel(2, 2, context_parallel_size=2)
            dp, pp, cp, tp = rank // 8, rank // 4 % 2, rank // 2 % 2, rank % 2
            assert state.get_model_parallel_ranks() == [8 * dp + 4 * pp + 2 * cp + one for one in range(2)]
            assert state.get_context_parallel_ranks() == [8 * dp + 4 * pp + 2 * one + tp for one in range(2)]
            assert state.get_pipeline_parallel_ranks() == [8 * dp + 4 * one + 2 * cp + tp for one in range(2)]
            assert state.get_data_parallel_ranks() == [8 * one + 4 * pp + 2 * cp + tp for one in range(2)]
            assert (state.get_context_parallel_rank(), state.get_context_parallel_world_size()) == (cp, 2)
            assert state.get_model_parallel_src_rank() == rank - tp
            state.destroy_model_parallel()


# --- the mesh behind them -----------------------------------------------------------------------------------


def test_the_accessors_and_the_mesh_hand_out_the_same_groups() -> None:
    with fake_world(16, 5):
        fairscale.initialize_model_parallel(2, 2)
        mesh = fairscale.current_mesh()
        assert mesh is namedmesh.current_mesh()
        assert str(mesh.layout) == "dp=4 x pp=2 x cp=1 x tp=2 (16 ranks)"
        assert fairscale.get_model_parallel_group() is mesh["tp"].get_group()
        assert fairscale.get_data_parallel_group() is mesh.group("dp")
        assert fairscale.get_pipeline_parallel_group() is mesh.group("pp")


def test_a_layer_is_used_with_the_mesh_that_it_was_made_with() -> None:
    with fake_world(8, 5):
        first, second = (namedmesh.init_mesh(dp=-1, tp=size, device="cpu") for size in (2, 4))
        fairscale.bind(first)
        layer = fairscale.ColumnParallelLinear(4, 8)
        with fairscale.bind(second):
            with first:
                layer(torch.zeros(1, 4))
            with pytest.raises(AssertionError) as caught:
                layer(torch.zeros(1, 4))
        assert str(caught.value) == (
            "ColumnParallelLinear was made as rank 1 of 2, and is used as rank 1 of 4; use it with the mesh that it was "
            "made with, or make it anew"
        )
        for mesh in (first, second):
            mesh.close()


# --- the variables ------------------------------------------------------------------------------------------


def test_variables_can_be_assigned() -> None:
    with fake_world(8, 3):
        fairscale.initialize_model_parallel(4)
        mesh = fairscale.current_mesh()
        assert state._MODEL_PARALLEL_GROUP is mesh.group("tp")
        assert state._DATA_PARALLEL_GROUP is mesh.group("dp")
        assert state._PIPELINE_PARALLEL_RANKS == [3]
        state._MODEL_PARALLEL_GROUP = mesh.group("dp")
        assert fairscale.get_model_parallel_group() is mesh.group("dp")
        assert fairscale.get_model_parallel_world_size() == 2
        assert fairscale.get_model_parallel_ranks() == [3, 7]
        assert fairscale.get_model_parallel_src_rank() == 3
        assert fairscale.ColumnParallelLinear(4, 6).weight.shape == (3, 4)
        state._MODEL_PARALLEL_GROUP = mesh.group("tp")
        assert fairscale.get_model_parallel_world_size() == 4
        state._DATA_PARALLEL_GROUP = None
        assert not fairscale.model_parallel_is_initialized()
        with pytest.raises(AssertionError, match="the data-parallel group is not there: it was set"):
            fairscale.get_data_parallel_group()
        fairscale.destroy_model_parallel()
        assert [getattr(state, name) for name in state.DIALECT.binding.variables] == [None] * 7
        state._MODEL_PARALLEL_GROUP = dist.group.WORLD  # without any mesh
        assert fairscale.get_model_parallel_rank() == 3
        with pytest.raises(
            AssertionError, match="already initialized, for groups that were assigned by hand"
        ):
            fairscale.initialize_model_parallel(2)
        fairscale.destroy_model_parallel()


def test_a_stand_in_that_cannot_say_much() -> None:
    with fake_world(8, 5):
        state._MODEL_PARALLEL_GROUP = "mine"
        assert fairscale.get_model_parallel_group() == "mine"  # type: ignore[comparison-overlap]

        class Four:
            def size(self) -> int:
                return 4

        state._MODEL_PARALLEL_GROUP = Four()
        assert fairscale.get_model_parallel_src_rank() == 4
        fairscale.destroy_model_parallel()


# --- unmodified code ----------------------------------------------------------------------------------------


def forget_fairscale(present: bool) -> None:
    """In a forked rank: as if fairscale had not been imported yet, or were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fairscale"]:
        del sys.modules[name]
    if not present:
        exec(without("fairscale"), {})  # noqa: S102  our own


def train_llama(ours: bool, present: bool) -> tuple[bool, list[float], dict[str, Any], bool]:
    """Losses and final weights, as lists, of three steps of the reference-style model."""
    warnings.simplefilter("ignore" if present else "error")
    forget_fairscale(present)
    if ours:
        fairscale.install()
    llama = importlib.import_module("old_llama")
    rank, size = llama.setup(dist.get_world_size()), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    model = llama.Transformer()
    dims = {"wo": 1, "w2": 1, "tok_embeddings": 1}
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:
                continue
            dim = dims.get(name.split(".")[-2], 0)
            shape = [length * (size if at == dim else 1) for at, length in enumerate(parameter.shape)]
            parameter.copy_(numbers(*shape, seed=seed).chunk(size, dim)[rank] * 0.2)
    tokens = torch.randint(0, llama.VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {name: (parameter.detach().tolist()) for name, parameter in model.named_parameters()}
    used = llama.fs_init.initialize_model_parallel is fairscale.initialize_model_parallel
    made = present or sys.modules["fairscale.nn.model_parallel"] is fairscale
    llama.fs_init.destroy_model_parallel()
    return used, losses, weights, made


def check_llama(ranks: list[Any], alone: Any) -> None:
    dims = {"wo": 1, "w2": 1, "tok_embeddings": 1}
    for _, losses, _, _ in ranks:
        assert losses == pytest.approx(alone[1], abs=1e-12)
    assert alone[1][-1] < alone[1][0]
    for name, whole in alone[2].items():
        shards = [torch.tensor(weights[name], dtype=torch.float64) for _, _, weights, _ in ranks]
        joined = shards[0] if "norm" in name else torch.cat(shards, dims.get(name.split(".")[-2], 0))
        assert apart(joined, torch.tensor(whole, dtype=torch.float64)) < 1e-12, name


def test_an_unmodified_llama_trains_on_two_ranks_as_on_one() -> None:
    alone = run_ranks(1, train_llama, True, False)[0]
    ranks = run_ranks(2, train_llama, True, False)
    assert all(used and made for used, _, _, made in (alone, *ranks))
    check_llama(ranks, alone)


@pytest.mark.oracle("fairscale")
def test_an_unmodified_llama_trains_as_on_fairscale() -> None:
    originals = run_ranks(2, train_llama, False, True)
    alone = run_ranks(1, train_llama, True, True)[0]
    assert not any(used for used, _, _, _ in originals)
    assert alone[0]
    check_llama(originals, alone)
    check_llama(run_ranks(2, train_llama, True, True), alone)


def test_without_fairscale_the_import_paths_are_made_up() -> None:
    code = without("fairscale") + textwrap.dedent("""
        from namedmesh.compat import fairscale as ours
        before = set(sys.modules)
        ours.install()
        ours.install()
        import fairscale.nn.model_parallel.initialize as fs_init
        import fairscale.nn.model_parallel as mpu
        from fairscale.nn.model_parallel import get_model_parallel_rank, initialize, layers, mappings, utils
        from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
        assert fs_init is initialize is ours.initialize and mpu is ours and layers is ours.layers
        import fairscale.nn.model_parallel.utils
        assert fairscale.nn.model_parallel.utils is utils is ours.utils
        ours.uninstall()
        ours.uninstall()
        assert set(sys.modules) == before
        try:
            import fairscale
        except ModuleNotFoundError:
            print("gone")
    """)
    assert run_python(code) == "gone\n"


@pytest.mark.oracle("fairscale")
@pytest.mark.parametrize("late", [False, True])
def test_with_fairscale_its_own_modules_answer_from_our_meshes(late: bool) -> None:
    first = "from fairscale.nn.model_parallel import initialize_model_parallel\ntheirs = initialize_model_parallel\n"
    code = "import sys\n" + first * late
    code += textwrap.dedent("""
        import namedmesh
        from namedmesh.compat import fairscale as ours
        ours.install()
        from fairscale.nn.model_parallel import get_model_parallel_group, initialize, initialize_model_parallel, layers
        assert layers is not ours.layers and initialize is not ours.initialize
        assert initialize_model_parallel is ours.initialize_model_parallel
        namedmesh.launch.init("cpu")
        initialize_model_parallel(1)
        mesh = ours.current_mesh()
        assert get_model_parallel_group() is mesh.group("tp") is ours.get_model_parallel_group()
        assert initialize._PIPELINE_PARALLEL_RANKS == [0]
        initialize.destroy_model_parallel()
        assert mesh.closed and not initialize.model_parallel_is_initialized()
        ours.uninstall()
        from fairscale.nn.model_parallel import initialize_model_parallel
        print(initialize_model_parallel.__module__)
    """)
    code += "assert initialize_model_parallel is theirs\n" * late
    assert run_python(code, action="ignore") == "fairscale.nn.model_parallel.initialize\n"


def axes_in_another_order() -> list[int]:
    """What fairscale's first rank is where model-parallel ranks are no neighbors."""
    fairscale.install()
    from fairscale.nn.model_parallel import get_model_parallel_src_rank

    mesh = namedmesh.init_mesh(tp=2, dp=-1)
    with fairscale.bind(mesh):
        told = [get_model_parallel_src_rank(), mesh.ranks("tp")[0]]
    mesh.close()
    return told


@pytest.mark.oracle("fairscale")
def test_the_first_rank_is_right_in_another_order_of_the_axes() -> None:
    assert run_ranks(4, axes_in_another_order) == [[rank % 2] * 2 for rank in range(4)]


# --- mistakes -----------------------------------------------------------------------------------------------


def started(size: int, *arguments: int) -> None:
    """Initialize twice, in a world of one size."""
    with fake_world(size):
        fairscale.initialize_model_parallel(size)
        fairscale.initialize_model_parallel(*arguments)


NOT_INITIALIZED = (
    " is not there: fairscale's model parallelism is not initialized; call initialize_model_parallel(...), or "
    "namedmesh.compat.fairscale.bind(mesh) with a mesh that exists (once, on every rank)"
)
MISTAKES: dict[str, Callable[[], Any]] = {
    "torch.distributed has no default group; call namedmesh.launch.init() or torch.distributed.init_process_group() first": (
        lambda: fairscale.initialize_model_parallel(1)
    ),
    "fairscale's model parallelism is already initialized, for dp=1 x pp=1 x cp=1 x tp=4 (4 ranks); call the function that "
    "destroys it first, or bind another mesh beside it with namedmesh.compat.fairscale.bind(mesh)": (
        lambda: started(4, 2)
    ),
    "the model-parallel group" + NOT_INITIALIZED: fairscale.get_model_parallel_group,
    "the list of pipeline-parallel ranks" + NOT_INITIALIZED: fairscale.get_pipeline_parallel_ranks,
    "the tensor-parallel group" + NOT_INITIALIZED: lambda: fairscale.ColumnParallelLinear(4, 4),
    "10 ... by 4; ...": lambda: fairscale.utils.divide_and_check_no_remainder(10, 4),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_reported(text: str) -> None:
    refuses(MISTAKES[text], AssertionError, text)


def test_without_a_mesh_there_is_none() -> None:
    refuses(
        fairscale.current_mesh,
        RuntimeError,
        "fairscale's model parallelism is not bound to a mesh; call initialize_model_parallel(...) or "
        "namedmesh.compat.fairscale.bind(mesh) first",
    )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((2, 3), "pp=3 x cp=1 x tp=2 = 6 does not divide the world of 8 ranks; ..."),
        ((0,), "axis 'tp' has size 0; ..."),
    ],
)
def test_sizes_that_do_not_fit_leave_everything_as_it_was(sizes: tuple[int, ...], text: str) -> None:
    with fake_world(8):
        before = live_groups()
        refuses(lambda: fairscale.initialize_model_parallel(*sizes), AssertionError, text)
        assert live_groups() == before
        assert not fairscale.model_parallel_is_initialized()
