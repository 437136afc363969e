"""The ezpz dialect, against calculations of its own: plain layers, and ranks worked out by hand."""

from __future__ import annotations

import importlib
import inspect
import math
import textwrap
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from installing import run_python, without
from messages import refuses
from ranks import fake_world, live_groups, run_ranks
from torch import Tensor, nn
from tp_compare import apart, numbers

import namedmesh
from namedmesh.compat import ezpz, megatron
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


def test_the_worked_example_of_sixteen_ranks() -> None:
    expected = {
        0: {"tensor": [0, 1], "context": [0, 2], "pipeline": [0, 4], "data": [0, 8]},
        3: {"tensor": [2, 3], "context": [1, 3], "pipeline": [3, 7], "data": [3, 11]},
        8: {"tensor": [8, 9], "context": [8, 10], "pipeline": [8, 12], "data": [0, 8]},
    }
    for rank, groups in expected.items():
        with fake_world(16, rank):
            tp.initialize_tensor_parallel(2, 2, 2)
            assert answers() == groups
            tp.destroy_tensor_parallel()


def on_gloo() -> list[Any]:
    counts = []
    for _ in range(10):
        tp.initialize_tensor_parallel(2, 2, tensor_parallel_backend="gloo", timeout=timedelta(seconds=60))
        found = answers()
        sums = {}
        for axis in AXES:
            tensor = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(tensor, group=getattr(tp, f"get_{axis}_parallel_group")())
            sums[axis] = tensor.item() == sum(found[axis])
        tp.destroy_tensor_parallel()
        counts.append(live_groups())
    return [found == ranks_by_hand(dist.get_rank(), 2, 2, 1, 2), all(sums.values()), counts]


def test_groups_work_on_gloo_and_ten_times_leave_nothing_behind() -> None:
    assert run_ranks(8, on_gloo) == [[True, True, [1] * 10]] * 8


def test_a_size_above_the_world_is_cut_down() -> None:
    text = "tensor_parallel_size is 8, but the world has 4 ranks; ezpz's initialize_tensor_parallel goes on with 4"
    with fake_world(4):
        with pytest.warns(UserWarning, match=text) as caught:
            tp.initialize_tensor_parallel(8)
        assert tp.get_tensor_parallel_world_size() == 4
    assert caught[0].filename == __file__


def test_bound_beside_megatron_it_hands_out_the_same_groups() -> None:
    with fake_world(16, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=2, cp=2, tp=2, device="cpu")
        with ezpz.bind(mesh) as bound, megatron.bind(mesh):
            assert bound is ezpz.current_mesh() is megatron.current_mesh()
            assert tp.get_tensor_parallel_group() is megatron.parallel_state.get_tensor_model_parallel_group()
            assert tp.get_data_parallel_group() is megatron.parallel_state.get_data_parallel_group()
            assert tp.get_context_parallel_group() is mesh.group("cp")
            assert tp.get_pipeline_parallel_ranks() == [5, 13]  # the mesh's order, not ezpz's own
        assert not tp.tensor_parallel_is_initialized()
        ezpz.bind(mesh)
        ezpz.unbind()
        assert not tp.tensor_parallel_is_initialized()
        assert not mesh.closed
        mesh.close()


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


# --- layers -------------------------------------------------------------------------------------------------

V, H, OUT = 16, 8, 24


def shard(whole: Tensor, dim: int) -> Tensor:
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def linear_layers() -> dict[str, float]:
    """Each linear layer beside a whole one of the same seed."""
    torch.set_default_dtype(torch.float64)
    tp.initialize_tensor_parallel(dist.get_world_size())
    value, gradient = numbers(5, H, seed=1), numbers(5, OUT, seed=2)
    found = {}
    for name, kind, arguments in (
        ("column", "Column", {}),
        ("column, apart", "Column", {"gather_output": False, "bias": False}),
        ("row", "Row", {}),
        ("row, parallel", "Row", {"input_is_parallel": True, "bias": False}),
    ):
        dim = 0 if kind == "Column" else 1
        torch.manual_seed(3)
        layer = getattr(tp.layers, f"{kind}ParallelLinear")(
            H, OUT, keep_master_weight_for_test=True, **arguments
        )
        torch.manual_seed(3)
        whole = nn.Linear(H, OUT, bias="bias" not in arguments)
        with torch.no_grad():
            torch.manual_seed(3)
            nn.init.xavier_normal_(whole.weight)
            if whole.bias is not None:
                whole.bias.copy_(numbers(OUT, seed=4))
                layer.bias.copy_(whole.bias if dim else shard(whole.bias, 0))
        inputs = [value.clone().requires_grad_() for _ in range(2)]
        given = shard(inputs[1], 1) if "input_is_parallel" in arguments else inputs[1]
        outputs = [whole(inputs[0]), layer(given)]
        cut = "gather_output" in arguments
        for output, one in zip(outputs, (gradient, shard(gradient, 1) if cut else gradient), strict=True):
            output.backward(one)
        expected = inputs[0].grad
        assert expected is not None
        if "input_is_parallel" in arguments:  # a rank gets the gradient of what it used
            used = torch.zeros_like(expected)
            width = H // dist.get_world_size()
            used[:, dist.get_rank() * width :][:, :width] = shard(expected, 1)
            expected = used
        bias = whole.bias.grad if whole.bias is not None else None
        found[name] = max(
            apart(outputs[1], shard(outputs[0], 1) if cut else outputs[0]),
            apart(inputs[1].grad, expected),
            apart(layer.weight.grad, None if whole.weight.grad is None else shard(whole.weight.grad, dim)),
            apart(
                layer.bias.grad if layer.bias is not None else None,
                bias if dim or bias is None else shard(bias, 0),
            ),
            apart(layer.get_master_weight(), whole.weight),
            apart(layer.master_weight, whole.weight),
        )
    for kind, dim in (("Column", 0), ("Row", 1)):
        torch.manual_seed(3)
        layer = getattr(tp.layers, f"{kind}ParallelLinear")(
            H, OUT, stride=2, keep_master_weight_for_test=True
        )
        halves = layer.master_weight.chunk(2, dim)
        found[f"{kind}, stride"] = apart(layer.weight, torch.cat([shard(half, dim) for half in halves], dim))
    tp.destroy_tensor_parallel()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_linear_layers_are_shards_of_whole_ones(world_size: int) -> None:
    for found in run_ranks(world_size, linear_layers):
        assert len(found) == 6
        assert max(found.values()) < 1e-12, found


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 5},
    "padding from the end": {"padding_idx": -2},
    "norm": {"max_norm": 1.5},
    "norm of another type": {"max_norm": 1.2, "norm_type": 3.0},
    "norm, largest": {"max_norm": 0.5, "norm_type": math.inf},
    "norm, count": {"max_norm": 3.0, "norm_type": 0.0},
    "frequency": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
    "much": {"padding_idx": 3, "max_norm": 1.0, "scale_grad_by_freq": True},
    "much, sparse": {"padding_idx": 0, "max_norm": 2.0, "sparse": True},
}


def embeddings() -> dict[str, float]:
    """Each embedding beside a whole one of the same weight: output, gradient, and the weight afterwards."""
    torch.set_default_dtype(torch.float64)
    tp.initialize_tensor_parallel(dist.get_world_size())
    ids = torch.randint(
        0, V - 4, (3, 7), generator=torch.Generator().manual_seed(1)
    )  # some are never asked for
    found = {}
    for name, options in EMBEDDINGS.items():
        for kind, dim in (("VocabParallelEmbedding", 0), ("ParallelEmbedding", 1)):
            layer = getattr(tp.layers, kind)(V, H, init_method=nn.init.ones_, **options)
            whole = nn.Embedding(V, H, **options)
            with torch.no_grad():
                whole.weight.copy_(numbers(V, H, seed=5))
                layer.weight.copy_(shard(whole.weight, dim))
            outputs = [whole(ids), layer(ids)]
            for output in outputs:
                output.backward(numbers(3, 7, H, seed=6))
            assert layer.weight.grad.is_sparse == bool(options.get("sparse"))
            assert whole.weight.grad is not None
            expected = whole.weight.grad.to_dense()
            found[f"{kind}, {name}"] = max(
                apart(outputs[1], outputs[0]),
                apart(layer.weight.grad.to_dense(), shard(expected, dim)),
                apart(layer.weight, shard(whole.weight, dim)),
            )
    tp.destroy_tensor_parallel()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_embeddings_are_shards_of_whole_ones(world_size: int) -> None:
    for found in run_ranks(world_size, embeddings):
        assert len(found) == 2 * len(EMBEDDINGS)
        assert max(found.values()) < 1e-12, found


def regions() -> list[float]:
    tp.initialize_tensor_parallel(dist.get_world_size())
    size, rank = dist.get_world_size(), dist.get_rank()
    wholes = [numbers(3, 8, seed=seed) for seed in range(size)]
    found = []

    def check(
        function: Callable[[Tensor], Tensor],
        value: Tensor,
        output: Tensor,
        gradient: Callable[[list[Tensor]], Tensor],
    ) -> None:
        value = value.clone().requires_grad_()
        got = function(value)
        gradients = [numbers(*got.shape, seed=20 + seed) for seed in range(size)]
        got.backward(gradients[rank])
        found.extend([apart(got, output), apart(value.grad, gradient(gradients))])

    check(
        tp.mappings.copy_to_tensor_parallel_region,
        wholes[0],
        wholes[0],
        lambda all_: sum(all_, torch.zeros(())),
    )
    check(
        tp.mappings.reduce_from_tensor_parallel_region,
        wholes[rank],
        sum(wholes, torch.zeros(())),
        lambda all_: all_[rank],
    )
    check(
        tp.mappings.scatter_to_tensor_parallel_region,
        wholes[0],
        shard(wholes[0], 1),
        lambda all_: torch.cat(all_, 1),
    )
    check(
        tp.mappings.gather_from_tensor_parallel_region,
        wholes[rank],
        torch.cat(wholes, 1),
        lambda all_: shard(all_[rank], 1),
    )
    tp.destroy_tensor_parallel()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mappings(world_size: int) -> None:
    for found in run_ranks(world_size, regions):
        assert len(found) == 8
        assert max(found) < 1e-12


def test_helpers() -> None:
    assert tp.divide_and_check_no_remainder(12, 4) == 3
    tp.ensure_divisibility(12, 4)
    parts = tp.split_tensor_along_last_dim(torch.arange(8).view(2, 4), 2, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert all(part.is_contiguous() for part in parts)
    assert tp.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 4) == (3, 6)
    assert tp.VocabUtility.vocab_range_from_per_partition_vocab_size(3, 2, 4) == (6, 9)


def train() -> list[Any]:
    """Two layers and an embedding learn what plain ones learn."""
    torch.set_default_dtype(torch.float64)
    tp.initialize_tensor_parallel(2)
    torch.manual_seed(0)
    embedding = tp.layers.VocabParallelEmbedding(V, H)
    up = tp.layers.ColumnParallelLinear(H, OUT, gather_output=False)
    down = tp.layers.RowParallelLinear(OUT, V, input_is_parallel=True)
    mine = nn.Sequential(embedding, up, nn.GELU(), down)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(V, H), nn.Linear(H, OUT), nn.GELU(), nn.Linear(OUT, V))
    with torch.no_grad():
        torch.manual_seed(0)
        for one in plain:
            if not isinstance(one, nn.GELU):
                assert isinstance(one.weight, Tensor)
                nn.init.xavier_normal_(one.weight)
            if isinstance(one, nn.Linear):
                one.bias.zero_()
    ids = torch.randint(0, V, (4, 6), generator=torch.Generator().manual_seed(3))
    losses: list[list[float]] = [[], []]
    for model, seen in zip((mine, plain), losses, strict=True):
        step = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(4):
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            step.zero_grad()
            loss.backward()
            step.step()
            seen.append(loss.item())
    tp.destroy_tensor_parallel()
    return losses


def test_layers_train_as_plain_ones_do() -> None:
    for mine, plain in run_ranks(2, train):
        assert mine == pytest.approx(plain, abs=1e-12)
        assert mine[-1] < mine[0]


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


def started(call: Callable[[], Any]) -> Callable[[], Any]:
    """On rank 0 of 4 tensor-parallel ranks."""

    def inside() -> Any:
        with fake_world(4):
            tp.initialize_tensor_parallel(4)
            return call()

    return inside


NOT_INITIALIZED = " is not there: ezpz's model parallelism ... initialize_tensor_parallel(...), or namedmesh.compat.ezpz.bind(mesh) ..."
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        tp.initialize_tensor_parallel,
        AssertionError,
        "torch.distributed has no default group; call ... first",
    ),
    (
        started(lambda: tp.initialize_tensor_parallel(2)),
        AssertionError,
        "ezpz's model parallelism is already ... tp=4 (4 ranks); ... namedmesh.compat.ezpz.bind(mesh)",
    ),
    (tp.get_tensor_parallel_group, AssertionError, "the tensor-parallel group" + NOT_INITIALIZED),
    (tp.get_data_parallel_ranks, AssertionError, "the list of data-parallel ranks" + NOT_INITIALIZED),
    (
        ezpz.current_mesh,
        RuntimeError,
        "ezpz's ... initialize_tensor_parallel(...) or namedmesh.compat.ezpz.bind(mesh) first",
    ),
    (started(lambda: tp.layers.ColumnParallelLinear(4, 6)), AssertionError, "out_features is 6, ..."),
    (
        started(lambda: tp.mappings.scatter_to_tensor_parallel_region(torch.zeros(6))),
        AssertionError,
        "the length of dim -1 ... (6,) is 6, ...",
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
