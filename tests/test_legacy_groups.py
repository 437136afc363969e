"""fairscale's and ezpz's groups and variables, three overlapping groups, and several dialects on one mesh."""

from __future__ import annotations

import importlib
import random
import sys
import textwrap
import warnings
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from installing import run_python, without
from legacy import arguments, more_arguments, original, outcome
from messages import error_of, refuses
from ranks import fake_world, live_groups, run_ranks, summed
from tensors import numbers
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
def _nothing_bound() -> Iterator[None]:
    yield
    fairscale.uninstall()
    fairscale.destroy_model_parallel()
    tp.destroy_tensor_parallel()
    assert not fairscale.model_parallel_is_initialized()
    assert not tp.tensor_parallel_is_initialized()


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.oracle("fairscale")
def test_every_name_of_fairscale_s_is_there_with_its_arguments() -> None:
    seen = set()
    for part in ("cross_entropy", "initialize", "layers", "mappings", "utils"):
        theirs = original(f"fairscale.nn.model_parallel.{part}")
        ours = importlib.import_module(f"namedmesh.compat.fairscale.{part}")
        for name, value in vars(theirs).items():
            if name.startswith("_") or getattr(value, "__module__", "") != theirs.__name__:
                continue
            seen.add(name)
            more = more_arguments(value, getattr(ours, name))
            assert all(one.default is not one.empty for one in more), name
    assert len(seen) == 25
    seen |= {name for name in vars(original(START)) if name.isupper() and name.startswith("_")}
    assert seen <= {*dir(fairscale)}


KINDS = ("group", "ranks", "rank", "world_size")
SIZES = ("tensor", "pipeline", "context")
INITIALIZE: list[tuple[str, Any]] = [(f"{axis}_parallel_size", 1) for axis in SIZES]
INITIALIZE += [(f"{axis}_parallel_backend", None) for axis in (*SIZES, "data")]


def test_ezpz_s_names_are_fairscale_s_for_tensor_parallelism() -> None:
    assert arguments(tp.initialize_tensor_parallel) == [*INITIALIZE, ("timeout", None)]
    aside = {"initialize_model_parallel", "vocab_parallel_cross_entropy"}
    for name in {*fairscale.__all__} - aside:
        of_ezpz = getattr(tp, name.replace("model_parallel", "tensor_parallel"))
        assert arguments(of_ezpz) == arguments(getattr(fairscale, name)), name
    for axis, kind in product(AXES, KINDS):
        assert arguments(getattr(tp, f"get_{axis}_parallel_{kind}")) == []
    for part in ("tp", "tp.layers", "tp.mappings", "tp.utils"):
        assert importlib.import_module(f"namedmesh.compat.ezpz.{part}") is tp


# --- groups -------------------------------------------------------------------------------------------------


def fairscale_s(module: Any, *sizes: int) -> Any:
    """What a module answers to all questions of fairscale's before, between and after; or the kind of its error."""
    names = [name for name in dir(original(START)) if name.startswith(("get_", "model_parallel_is"))]
    told: list[Any] = []

    def ask() -> None:
        told.append({name: outcome(getattr(module, name)) for name in names})

    ask()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told.append(outcome(module.initialize_model_parallel, *sizes))
    ask()
    told.append(outcome(module.initialize_model_parallel, *sizes))
    module.destroy_model_parallel()
    module._MODEL_PARALLEL_GROUP = "assigned"
    told.append(outcome(module.initialize_model_parallel, 1))
    module.destroy_model_parallel()
    ask()
    return told


@pytest.mark.oracle("fairscale")
def test_fairscale_s_groups_in_random_configurations() -> None:
    source, kinds = random.Random(4), []
    for _ in range(120):
        world = source.choice((1, 2, 4, 6, 8, 12, 16, 24))
        sizes = source.choice((1, 2, 3, 4, 6, 8, 16)), source.choice((1, 1, 2, 3, 4))
        for rank in {0, world - 1, source.randrange(world)}:
            with fake_world(world, rank):
                told = [fairscale_s(module, *sizes) for module in (original(START), state)]
            assert told[0] == told[1], (world, rank, sizes)
        kinds.append("refused" if told[0][1] else "cut" if sizes[0] > world else "made")
    assert min(kinds.count(kind) for kind in ("refused", "cut", "made")) > 10


def by_hand(rank: int, sizes: tuple[int, ...]) -> dict[str, list[int]]:
    """The groups of a rank of t x c x p x d, tp fastest, then cp, pp and dp."""
    found, step = {}, 1
    for axis, size in zip(AXES, sizes, strict=True):
        first = rank - rank // step % size * step
        found[axis] = [first + place * step for place in range(size)]
        step *= size
    return found


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 1, 1, 6), (4, 2, 1, 3), (2, 1, 3, 1), (3, 2, 2, 1)])
def test_groups_by_hand(sizes: tuple[int, int, int, int]) -> None:
    t, c, p, d = sizes
    for rank in range(t * p * c * d):
        expected = by_hand(rank, sizes)
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


# --- the variables, and the mesh behind them ----------------------------------------------------------------


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


def test_a_layer_keeps_the_group_that_it_was_made_with() -> None:
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


# A call with a mesh, and the object that answers then, if it is not what the call returns.
BINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "fairscale": (fairscale.bind, state),
    "ezpz": (ezpz.bind, tp),
    "megatron": (megatron.bind, megatron.parallel_state),
    "mpu": (deepspeed.mpu, None),
    "grid": (deepspeed.PipelineParallelGrid.from_mesh, None),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about itself
@pytest.mark.parametrize("place", BINDS)
def test_accessors_make_no_break_in_a_graph(place: str) -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2, device="cpu")
        bind, answering = BINDS[place]
        made = bind(mesh)
        made = answering or made
        names = [
            name for name in dir(made) if name.startswith(("get_", "is_")) or name.endswith("_initialized")
        ]
        calls = [getattr(made, name) for name in names]
        calls = [call for call in calls if not isinstance(outcome(call), type)]
        plain = [call for call in calls if isinstance(call(), (int, list))]
        assert len(calls) > len(plain) > 8

        def ask(x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            for call in calls:  # no graph hands out a group
                call()
            x = fairscale.copy_to_model_parallel_region(x) + 1 if place == "fairscale" else x
            return x, [call() for call in plain]

        torch._dynamo.reset()
        compiled = torch.compile(ask, backend="eager", fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert [compiled(torch.ones(2))[1] for _ in range(2)] == [[call() for call in plain]] * 2
        mesh.close()


# --- one mesh for several -----------------------------------------------------------------------------------


# fairscale's, ezpz's, DeepSpeed's and Megatron's.
WORDS = {
    "tp": ("model", "tensor", "slice", "tensor_model"),
    "pp": ("pipeline", "pipeline", "pipe", "pipeline_model"),
    "dp": ("data",) * 4,
}


def of_axes(mesh: namedmesh.NamedMesh) -> dict[str, list[Any]]:
    """Every dialect's group over each axis, and the mesh's."""
    modules = state, tp, deepspeed.mpu(mesh), megatron.parallel_state
    found = {}
    for axis, words in WORDS.items():
        names = [f"get_{word}_parallel_group" for word in words]
        found[axis] = [getattr(module, name)() for module, name in zip(modules, names, strict=True)]
        if axis in mesh.layout:
            found[axis] += [mesh.group(axis), mesh[axis].get_group()]
    return found


SHARED = [{"pp": 2, "dp": 2, "tp": 2}, {"tp": 2, "dp": 4}, {"dp": 8}]
SHARED += [{"dp_replicate": 2, "dp_shard": 2, "tp": 2}]
CYCLES: list[tuple[Any, Any]] = [
    (state.initialize_model_parallel, state.destroy_model_parallel),
    (megatron.parallel_state.initialize_model_parallel, megatron.parallel_state.destroy_model_parallel),
]


def adds_up(group: Any) -> bool:
    return summed(group, dist.get_rank()) == sum(dist.get_process_group_ranks(group))


def share() -> None:
    for sizes in SHARED:
        mesh = namedmesh.init_mesh(Layout(**sizes))
        with fairscale.bind(mesh), ezpz.bind(mesh), megatron.bind(mesh):
            for groups in of_axes(mesh).values():
                assert len({*groups}) == 1
                assert adds_up(groups[0])
            data = mesh.ranks(*(axis for axis in mesh.layout if axis.startswith("dp")))
            assert state.get_data_parallel_ranks() == list(data)
        assert not state.model_parallel_is_initialized()
        assert not tp.tensor_parallel_is_initialized()
        held = len(mesh.communicators)
        fairscale.bind(mesh)
        ezpz.bind(mesh)
        assert len(mesh.communicators) == held
        fairscale.destroy_model_parallel()
        assert not mesh.closed
        assert not state.model_parallel_is_initialized()
        ezpz.unbind()
        assert not tp.tensor_parallel_is_initialized()
        ezpz.bind(mesh)
        dist.barrier()
        mesh.close()
        assert not tp.tensor_parallel_is_initialized()
        before = live_groups()
        for start, destroy in CYCLES:
            start(2, 2)
            group = namedmesh.current_mesh().group("pp")
            assert adds_up(group)
            fairscale.bind(namedmesh.current_mesh())
            assert fairscale.get_pipeline_parallel_group() is group
            destroy()
            assert not state.model_parallel_is_initialized()
            assert live_groups() <= before


def test_dialects_that_are_bound_to_one_mesh_share_its_groups() -> None:
    run_ranks(8, share)


def test_the_page_of_the_book_runs() -> None:
    text = (Path(__file__).parents[1] / "examples" / "README.md").read_text(encoding="utf-8")
    page = text.partition("## fairscale and ezpz")[2].partition("```python")[2].partition("```")[0]
    assert "bind" in run_python(page + "print(fairscale.bind)")


def test_three_overlapping_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes, rank in product([(2, 2, 2), (1, 1, 8), (8, 1, 1), (1, 8, 1), (2, 4, 1)], range(8)):
        with fake_world(8, rank):
            groups = ProcessGroups(*sizes)
            ranks = by_hand(rank, (sizes[0], 1, *sizes[1:]))
            found = {"tensor": groups.tp_group, "pipeline": groups.pp_group, "data": groups.dp_group}
            for axis, group in found.items():
                assert dist.get_process_group_ranks(group) == ranks[axis]
            assert (groups.tp_size, groups.pp_size, groups.dp_size) == sizes
            places = [ranks[axis].index(rank) for axis in found]
            assert [groups.tp_rank, groups.pp_rank, groups.dp_rank] == places
            ends = places[1] == 0, places[1] == sizes[1] - 1
            assert (groups.is_first_stage, groups.is_last_stage) == ends
            groups.mesh.close()
    with fake_world(12):
        groups = ProcessGroups(2, 3, 2)
        groups.log(1)
        groups.log(0)
        groups.mesh.close()
        with pytest.raises(LayoutError, match="dp=2 x pp=2 x tp=2 needs 8 ranks, but the world has 12"):
            ProcessGroups(2, 2, 2)
    assert capsys.readouterr().out == "world size 12: tp=2, pp=3, dp=2\n"


# --- unmodified code ----------------------------------------------------------------------------------------


def train_llama(ours: bool, present: bool) -> tuple[bool, list[float]]:
    """Whether it is on our groups, and the losses of four steps of the reference-style model, each after an update of all weights."""
    warnings.simplefilter("ignore" if present else "error")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fairscale"]:
        del sys.modules[name]  # in a forked rank: as if it had not been imported yet, or were not installed
    if not present:
        exec(without("fairscale"), {})  # noqa: S102  our own
    if ours:
        fairscale.install()
    llama = importlib.import_module("old_llama")
    rank, size = llama.setup(dist.get_world_size()), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    model = llama.Transformer()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" not in name:
                dim = {"wo": 1, "w2": 1, "tok_embeddings": 1}.get(name.split(".")[-2], 0)
                shape = [length * (size if at == dim else 1) for at, length in enumerate(parameter.shape)]
                parameter.copy_(numbers(*shape, seed=seed).chunk(size, dim)[rank] * 0.2)
    tokens = torch.randint(0, llama.VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    used = llama.fs_init.initialize_model_parallel is fairscale.initialize_model_parallel
    llama.fs_init.destroy_model_parallel()
    return used, losses


@pytest.mark.parametrize("present", [False, pytest.param(True, marks=pytest.mark.oracle("fairscale"))])
def test_an_unmodified_llama_trains_on_two_ranks_as_on_one_and_as_on_fairscale(present: bool) -> None:
    ((_, alone),) = run_ranks(1, train_llama, True, present)
    assert alone[-1] < alone[0]
    for ours in {True, not present}:
        for used, losses in run_ranks(2, train_llama, ours, present):
            assert used is ours
            assert losses == pytest.approx(alone, abs=1e-12)


ABSENT = {
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


@pytest.mark.parametrize("package", ABSENT)
def test_without_the_original_its_import_paths_are_made_up(package: str) -> None:
    code = f"""
        from namedmesh.compat import {package} as ours
        before = set(sys.modules)
        ours.install(); ours.install()
        {ABSENT[package].strip()}
        ours.uninstall(); ours.uninstall()
        assert set(sys.modules) == before
        try:
            import {package}
        except ModuleNotFoundError:
            print("gone")
        """
    assert run_python(without(package) + textwrap.dedent(code)) == "gone\n"


OF_THEIRS = """
from fairscale.nn.model_parallel import initialize_model_parallel as theirs
import namedmesh
from namedmesh.compat import fairscale as ours
namedmesh.launch.init("cpu")
for turn in range(2):
    ours.install()
    from fairscale.nn.model_parallel import get_model_parallel_group, initialize, initialize_model_parallel, layers
    assert layers is not ours.layers and initialize is not ours.initialize
    assert initialize_model_parallel is ours.initialize_model_parallel
    initialize_model_parallel(1)
    mesh = ours.current_mesh()
    assert get_model_parallel_group() is mesh.group("tp") is ours.get_model_parallel_group()
    assert initialize._PIPELINE_PARALLEL_RANKS == ours.get_context_parallel_ranks() == [0]
    assert ours.initialize._MODEL_PARALLEL_GROUP is None  # there is one truth
    initialize.destroy_model_parallel()
    assert mesh.closed and not initialize.model_parallel_is_initialized()
    ours.uninstall()
    from fairscale.nn.model_parallel import initialize_model_parallel
    assert initialize_model_parallel is theirs
"""


@pytest.mark.oracle("fairscale")
def test_with_fairscale_its_own_modules_answer_from_our_meshes() -> None:
    """Here it was imported before; the Llama's setup imports it after ``install()``."""
    run_python(OF_THEIRS, action="ignore")


@pytest.mark.oracle("fairscale")
def test_installing_forgets_meshes_and_uninstalling_leaves_nothing() -> None:
    """In another order of the axes: where model-parallel ranks are no neighbors, the original has another first rank."""
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
            assert set(vars(theirs)) == names  # without the variables of later sources
            assert theirs._MODEL_PARALLEL_GROUP is vars(fairscale)["_MODEL_PARALLEL_GROUP"] is None
            assert not mesh.closed
            mesh.close()


# --- mistakes -----------------------------------------------------------------------------------------------


def test_mistakes_are_reported() -> None:
    text = (
        "_MODEL_PARALLEL_GROUP is None: fairscale's model parallelism is not initialized; call "
        "initialize_model_parallel(...), or namedmesh.compat.fairscale.bind(mesh) with an existing mesh"
    )
    refuses(fairscale.get_model_parallel_group, AssertionError, text)
    refuses(tp.get_data_parallel_ranks, AssertionError, "_DATA_PARALLEL_RANKS is None: ...")
    assert (tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_world_size()) == (0, 1)
    text = "_PIPELINE_PARALLEL_GROUP is None: ezpz's ... is not initialized; ..."
    refuses(tp.get_pipeline_parallel_rank, AssertionError, text)
    start = fairscale.initialize_model_parallel
    refuses(lambda: start(1), AssertionError, "torch.distributed has no default group; ...")
    refuses(ezpz.current_mesh, RuntimeError, "ezpz's model parallelism is not bound to a mesh; ...")
    with fake_world(8):
        before = live_groups()
        text = "pp=3 x cp=1 x tp=2 = 6 does not divide the world of 8 ranks; ..."
        refuses(lambda: start(2, 3), AssertionError, text)
        refuses(lambda: start(0), AssertionError, "axis 'tp' ...")
        refuses(lambda: start(-1), AssertionError, "axes 'dp', 'tp' are all -1; ...")
        assert live_groups() == before
        start(4)
        refuses(lambda: start(2), AssertionError, "fairscale's ... for ... tp=4 ...")


# What such a call says of a mesh of some axes, each of size 2.
CANNOT = [
    ("fairscale", "dp xp", "axis 'xp' has no place in fairscale's groups, which are over ...; did you ..."),
    ("megatron", "dp ep", "axis 'ep' is one of the experts', ... and add a view for it: ..."),
    ("megatron", "dp xp", "axis 'xp' has no place in Megatron's groups, which are over ...; did you ..."),
    ("mpu", "dp ep", "axis 'ep' is one of the experts', and DeepSpeed makes its own groups for them; ..."),
    ("mpu", "tq ep", "2 problems:\n ...'tq' has no place in DeepSpeed's groups, ...axis 'ep' is one of ..."),
]


@pytest.mark.parametrize("place", BINDS)
def test_what_is_no_open_mesh_is_refused(place: str) -> None:
    bind, _ = BINDS[place]
    with pytest.raises(MeshError, match="got a NoneType; give it a NamedMesh, such as"):
        bind(None)
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=8, device="cpu")
        mesh.close()
        text = "the mesh over dp=8 (8 ranks) was closed; give ... an open one"
        refuses(lambda: bind(mesh), MeshError, text)


@pytest.mark.parametrize(("place", "axes", "text"), CANNOT)
def test_meshes_that_a_dialect_cannot_be_bound_to(place: str, axes: str, text: str) -> None:
    with fake_world(4, 3):
        mesh = namedmesh.init_mesh(dict.fromkeys(axes.split(), 2), device="cpu")
        refuses(lambda: BINDS[place][0](mesh), LayoutError, text)
        mesh.close()


def test_a_size_above_the_world_is_cut_down() -> None:
    with fake_world(4):
        with pytest.warns(UserWarning, match="tp=8") as caught:
            fairscale.initialize_model_parallel(8)
        assert fairscale.get_model_parallel_world_size() == 4
    text = "fairscale reduces tp=8 to the world of 4 ranks without an error"
    assert str(caught[0].message) == text
    assert caught[0].filename == __file__


# A call that gets a size of tensor parallelism, or of the pipeline; 2 is right, and 3 is not.
STARTS: dict[str, Callable[[int], Any]] = {
    "fairscale.initialize_model_parallel": fairscale.initialize_model_parallel,
    "ezpz.initialize_tensor_parallel": tp.initialize_tensor_parallel,
    "megatron.initialize_model_parallel": megatron.parallel_state.initialize_model_parallel,
    "deepspeed.PipelineParallelGrid": lambda size: deepspeed.PipelineParallelGrid(
        deepspeed.PipeDataParallelTopology(size, 4 // size if size != 3 else 2)
    ),
}


def disagree(call: str, size: int) -> str:
    start = STARTS[call]
    return error_of(lambda: start(size if dist.get_rank() == 3 else 2))


@pytest.mark.parametrize(("call", "size"), [*product(STARTS, (4, 3))])
def test_ranks_that_differ_or_fail_are_reported_instead_of_hanging(call: str, size: int) -> None:
    *others, guilty = run_ranks(4, disagree, call, size)
    expected = "differs between ranks: ... on rank 3; ..." if size == 4 else f"rank 3 gave up on {call}..."
    for text in others:
        assert text.startswith("AgreementError: ")
        assert all(part in text for part in expected.split("..."))
    assert guilty.startswith("AgreementError" if size == 4 else "Contract")
