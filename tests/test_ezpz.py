"""The ezpz dialect, against calculations of its own: plain layers, and ranks worked out by hand."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from installing import run_python, without
from messages import refuses
from ranks import fake_world

from namedmesh.compat import ezpz
from namedmesh.compat.ezpz import tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

AXES = ("tensor", "context", "pipeline", "data")


@pytest.fixture(autouse=True)
def _nothing_bound() -> Iterator[None]:
    yield
    tp.destroy_tensor_parallel()
    assert not tp.tensor_parallel_is_initialized()


# --- names --------------------------------------------------------------------------------------------------

SIGNATURES = {
    "initialize_tensor_parallel": "tensor_parallel_size=1, pipeline_parallel_size=1, context_parallel_size=1, "
    "tensor_parallel_backend=None, pipeline_parallel_backend=None, context_parallel_backend=None, "
    "data_parallel_backend=None, timeout=None",
    "ensure_divisibility": "numerator, denominator",
    "divide_and_check_no_remainder": "numerator, denominator",
    "split_tensor_along_last_dim": "tensor, num_partitions, contiguous_split_chunks=False",
    "layers.ColumnParallelLinear": "in_features, out_features, bias=True, gather_output=True, "
    "init_method=xavier_normal_, stride=1, keep_master_weight_for_test=False",
    "layers.RowParallelLinear": "in_features, out_features, bias=True, input_is_parallel=False, "
    "init_method=xavier_normal_, stride=1, keep_master_weight_for_test=False",
    "layers.ColumnParallelLinear.get_master_weight": "self",
    "layers.RowParallelLinear.get_master_weight": "self",
    "layers.VocabParallelEmbedding.forward": "self, input_",
    "layers.ParallelEmbedding.forward": "self, input_",
    "utils.VocabUtility.vocab_range_from_global_vocab_size": "global_vocab_size, rank, world_size",
    **{f"mappings.{name}_tensor_parallel_region": "input_" for name in ("copy_to", "reduce_from", "scatter_to", "gather_from")},
    **{
        f"get_{axis}_parallel_{answer}": ""
        for axis in AXES
        for answer in ("group", "ranks", "rank", "world_size")
    },
    "get_tensor_parallel_src_rank": "",
    "tensor_parallel_is_initialized": "",
    "destroy_tensor_parallel": "",
}  # fmt: skip


def told(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={getattr(default, '__name__', default)}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    function: Any = tp
    for part in name.split("."):
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters.values()
    assert ", ".join(map(told, parameters)) == SIGNATURES[name]


@pytest.mark.parametrize("name", ["", ".tp", ".tp.layers", ".tp.mappings", ".tp.utils"])
def test_every_module_exports_what_it_names(name: str) -> None:
    module = importlib.import_module(f"namedmesh.compat.ezpz{name}")
    assert module.__all__ == sorted(set(module.__all__))
    for one in module.__all__:
        assert getattr(module, one) is not None


# --- groups -------------------------------------------------------------------------------------------------


def ranks_by_hand(rank: int, t: int, p: int, c: int, d: int) -> dict[str, list[int]]:
    """The groups of a rank of t x c x p x d, tp fastest, then cp, pp and dp."""
    at = {"tensor": rank % t, "context": rank // t % c, "pipeline": rank // (t * c) % p, "data": 0}
    step = {"tensor": 1, "context": t, "pipeline": t * c, "data": t * c * p}
    at["data"] = rank // step["data"]
    size = {"tensor": t, "context": c, "pipeline": p, "data": d}
    return {axis: [rank + (one - at[axis]) * step[axis] for one in range(size[axis])] for axis in AXES}


def answers() -> dict[str, list[int]]:
    found = {}
    for axis in AXES:
        group, ranks, rank, size = (
            getattr(tp, f"get_{axis}_parallel_{answer}")()
            for answer in ("group", "ranks", "rank", "world_size")
        )
        assert dist.get_process_group_ranks(group) == ranks
        assert (ranks[rank], len(ranks)) == (dist.get_rank(), size)
        found[axis] = ranks
    assert tp.get_tensor_parallel_src_rank() == found["tensor"][0]
    return found


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 1, 1, 6), (4, 1, 2, 3), (2, 3, 1, 1), (3, 2, 2, 1)])
def test_groups(sizes: tuple[int, int, int, int]) -> None:
    t, p, c, d = sizes
    for rank in range(t * p * c * d):
        with fake_world(t * p * c * d, rank):
            tp.initialize_tensor_parallel(t, p, c)
            assert tp.tensor_parallel_is_initialized()
            assert answers() == ranks_by_hand(rank, *sizes)
            tp.destroy_tensor_parallel()


VARIABLES = [name for name in ezpz.dialect.DIALECT.binding.variables if name != "_rank_group"]


def test_variables_can_be_assigned() -> None:
    assert set(VARIABLES) <= set(dir(tp))
    with fake_world(8, 3):
        tp.initialize_tensor_parallel(2, 2)
        mesh = ezpz.current_mesh()
        assert [getattr(tp, f"_{axis.upper()}_PARALLEL_GROUP") for axis in AXES] == [
            mesh.group(axis) for axis in ("tp", "cp", "pp", "dp")
        ]
        assert (tp._TENSOR_PARALLEL_RANKS, tp._CONTEXT_PARALLEL_GROUP_RANKS) == ([2, 3], [3])
        tp._TENSOR_PARALLEL_GROUP = dist.group.WORLD
        assert (tp.get_tensor_parallel_world_size(), tp.get_tensor_parallel_rank()) == (8, 3)
        assert tp.get_tensor_parallel_src_rank() == 0
        own = {variable: getattr(tp, variable) for variable in VARIABLES}
        own["_TENSOR_PARALLEL_GROUP"] = mesh.group("tp")
        for variable in VARIABLES:
            setattr(tp, variable, "mine")
            assert getattr(tp, variable) == "mine"
        got: list[Any] = [tp.get_data_parallel_ranks(), tp.get_context_parallel_ranks()]
        assert got == ["mine", "mine"]
        for variable in VARIABLES:
            setattr(tp, variable, own[variable])
        assert answers() == ranks_by_hand(3, 2, 2, 1, 2)
        tp._CONTEXT_PARALLEL_GROUP = None
        assert not tp.tensor_parallel_is_initialized()
        tp.destroy_tensor_parallel()
        assert [getattr(tp, variable) for variable in VARIABLES] == [None] * 8


def test_helpers() -> None:
    assert tp.divide_and_check_no_remainder(12, 4) == 3
    tp.ensure_divisibility(12, 4)
    parts = tp.split_tensor_along_last_dim(torch.arange(8).view(2, 4), 2, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert all(part.is_contiguous() for part in parts)
    assert tp.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 4) == (3, 6)
    assert tp.VocabUtility.vocab_range_from_per_partition_vocab_size(3, 2, 4) == (6, 9)


# --- under the original's import path -----------------------------------------------------------------------

USE = """
from namedmesh.compat import ezpz as ours
ours.install()
import ezpz.tp as short
import ezpz.tp.layers
from ezpz.tp import get_tensor_parallel_rank, mappings
from ezpz.tp.utils import VocabUtility
assert short is ezpz.tp is ours.tp and ezpz.tp.layers is ours.tp.layers and mappings is ours.tp.mappings
ezpz.tp._TENSOR_PARALLEL_GROUP = "mine"
assert ezpz.tp.get_tensor_parallel_group() == "mine"
ezpz.tp._TENSOR_PARALLEL_GROUP = None
"""


def test_without_ezpz_the_import_path_is_made_up() -> None:
    code = (
        without("ezpz")
        + USE
        + textwrap.dedent("""
        ours.uninstall()
        assert not [name for name in sys.modules if name.partition(".")[0] == "ezpz"]
        try:
            import ezpz
        except ModuleNotFoundError:
            print("gone")
    """)
    )
    assert run_python(code) == "gone\n"


def test_with_ezpz_its_own_modules_use_it(tmp_path: Path) -> None:
    package = tmp_path / "ezpz"
    (package / "tp").mkdir(parents=True)
    (package / "__init__.py").write_text("from ezpz.tp import get_tensor_parallel_rank\n")
    (package / "tp" / "__init__.py").write_text("def get_tensor_parallel_rank(): return -1\n")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{USE}" + textwrap.dedent("""
        assert ezpz.get_tensor_parallel_rank is ours.tp.get_tensor_parallel_rank
        ours.uninstall()
        import ezpz
        print(ezpz.get_tensor_parallel_rank(), ezpz.tp.get_tensor_parallel_rank())
    """)
    assert run_python(code) == "-1 -1\n"


# --- mistakes -----------------------------------------------------------------------------------------------


NOT_INITIALIZED = " is not there: ezpz's model parallelism ... initialize_tensor_parallel(...), or namedmesh.compat.ezpz.bind(mesh) ..."
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (tp.get_tensor_parallel_group, AssertionError, "the tensor-parallel group" + NOT_INITIALIZED),
    (tp.get_data_parallel_ranks, AssertionError, "the list of data-parallel ranks" + NOT_INITIALIZED),
    (
        ezpz.current_mesh,
        RuntimeError,
        "ezpz's ... initialize_tensor_parallel(...) or namedmesh.compat.ezpz.bind(mesh) first",
    ),
]


def test_before_initialization_a_rank_is_alone() -> None:
    for _ in range(2):
        assert (tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_world_size()) == (0, 1)
        with pytest.raises(AssertionError, match="not initialized"):
            tp.get_pipeline_parallel_rank()
        with fake_world(4, 3):
            tp.initialize_tensor_parallel(4)
            assert (tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_world_size()) == (3, 4)
            tp.destroy_tensor_parallel()


@pytest.mark.parametrize(("call", "kind", "text"), MISTAKES)
def test_mistakes_are_reported(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    refuses(call, kind, text)
