"""The layers and mappings of the dialects: against one process, and fairscale's against the original."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from legacy_layers import Dialect, results, shard, started
from messages import refuses
from ranks import fake_world, run_ranks
from torch import nn
from tp_compare import apart, gradient_of, numbers

from namedmesh.compat import fairscale

if TYPE_CHECKING:
    from collections.abc import Callable

V, H, OUT = 16, 24, 48


# --- against one process ------------------------------------------------------------------------------------

LINEARS: list[tuple[str, dict[str, Any]]] = [
    ("Column", {}),
    ("Column", {"gather_output": False, "bias": False}),
    ("Row", {}),
    ("Row", {"input_is_parallel": True, "bias": False}),
]


def linear_difference(dialect: Dialect, kind: str, arguments: dict[str, Any]) -> float:
    """A linear layer beside a whole one of the same seed."""
    make, dim = getattr(dialect.layers, f"{kind}ParallelLinear"), int(kind == "Row")
    torch.manual_seed(3)
    layer = make(H, OUT, keep_master_weight_for_test=True, **arguments)
    whole = nn.Linear(H, OUT, bias="bias" not in arguments)
    with torch.no_grad():
        torch.manual_seed(3)
        whole.weight.copy_(nn.init.xavier_normal_(torch.empty(OUT, H, dtype=dialect.init_dtype)))
        if layer.bias is not None:
            whole.bias.copy_(numbers(OUT, seed=4))
            layer.bias.copy_(whole.bias if dim else shard(whole.bias, 0))
    inputs = [numbers(5, H, seed=1).requires_grad_() for _ in range(2)]
    taken = shard(inputs[1], 1) if "input_is_parallel" in arguments else inputs[1]
    outputs = [whole(inputs[0]), layer(taken)]
    if isinstance(outputs[1], tuple):
        outputs[1] = outputs[1][0]
    cut = 1 if "gather_output" in arguments else None
    gradient = numbers(5, OUT, seed=2)
    outputs[0].backward(gradient)
    outputs[1].backward(shard(gradient, cut))
    expected = gradient_of(inputs[0])
    if "input_is_parallel" in arguments:  # a rank gets the gradient of what it used
        used = torch.zeros_like(expected)
        width = H // dist.get_world_size()
        used[:, dist.get_rank() * width :][:, :width] = shard(expected, 1)
        expected = used
    found = [
        apart(outputs[1], shard(outputs[0], cut)),
        apart(inputs[1].grad, expected),
        apart(layer.weight.grad, shard(gradient_of(whole.weight), dim)),
        apart(layer.master_weight.double(), whole.weight),
    ]
    if layer.bias is not None:
        found.append(apart(layer.bias.grad, shard(gradient_of(whole.bias), None if dim else 0)))
    if hasattr(layer, "get_master_weight"):
        found.append(apart(layer.get_master_weight(), whole.weight))
    torch.manual_seed(3)
    layer = make(H, OUT, stride=2, keep_master_weight_for_test=True)
    halves = layer.master_weight.double().chunk(2, dim)
    return max(*found, apart(layer.weight, torch.cat([shard(half, dim) for half in halves], dim)))


def linear_layers() -> list[float]:
    with started() as dialects:
        return [linear_difference(dialect, *case) for dialect in dialects for case in LINEARS]


EMBEDDINGS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 5},
    {"padding_idx": -2},
    {"max_norm": 1.5},
    {"max_norm": 1.2, "norm_type": 3.0},
    {"max_norm": 0.5, "norm_type": math.inf},
    {"max_norm": 3.0, "norm_type": 0.0},
    {"scale_grad_by_freq": True},
    {"sparse": True},
    {"padding_idx": 3, "max_norm": 1.0, "scale_grad_by_freq": True},
    {"padding_idx": 0, "max_norm": 2.0, "sparse": True},
]


def embedding_difference(dialect: Dialect, kind: str, options: dict[str, Any]) -> float:
    """An embedding beside a whole one of the same weight: output, gradient, and the weight afterwards."""
    ids = torch.randint(0, V - 4, (3, 7), generator=torch.Generator().manual_seed(1))  # some never come
    dim = int(kind == "ParallelEmbedding")
    layer = getattr(dialect.layers, kind)(V, H, init_method=nn.init.ones_, **options)
    whole = nn.Embedding(V, H, **options)
    with torch.no_grad():
        whole.weight.copy_(numbers(V, H, seed=5))
        layer.weight.copy_(shard(whole.weight, dim))
    outputs = [whole(ids), layer(ids)]
    for output in outputs:
        output.backward(numbers(3, 7, H, seed=6))
    assert layer.weight.grad.is_sparse == ("sparse" in options)
    return max(
        apart(outputs[1], outputs[0]),
        apart(layer.weight.grad.to_dense(), shard(gradient_of(whole.weight).to_dense(), dim)),
        apart(layer.weight, shard(whole.weight, dim)),
    )


def embeddings() -> list[float]:
    with started("megatron", "ezpz") as (other, dialect):
        kinds = ("VocabParallelEmbedding", "ParallelEmbedding")
        found = [embedding_difference(dialect, kind, one) for kind in kinds for one in EMBEDDINGS]
        return [*found, embedding_difference(other, "VocabParallelEmbedding", {})]


def regions() -> list[float]:
    """Each way in or out of a region: its output, and the gradient for another one on each rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    wholes = [numbers(3, 8, seed=seed) for seed in range(size)]
    of_8, of_all = ([numbers(3, n, seed=50 + one) for one in range(size)] for n in (8, 8 * size))
    of_part = [numbers(3, 8 // size, seed=50 + one) for one in range(size)]
    # What goes in and comes out, and what gradient comes back.
    cases = {
        "copy_to": (wholes[0], wholes[0], torch.stack(of_8).sum(0)),
        "reduce_from": (wholes[rank], torch.stack(wholes).sum(0), of_8[rank]),
        "scatter_to": (wholes[0], shard(wholes[0], 1), torch.cat(of_part, 1)),
        "gather_from": (wholes[rank], torch.cat(wholes, 1), shard(of_all[rank], 1)),
    }
    found: list[float] = []
    with started() as dialects:
        for dialect in dialects:
            for name, (value, *wanted) in cases.items():
                got = results(getattr(dialect.mappings, f"{name}_{dialect.region}_region"), value)
                found += map(apart, got, wanted)
    return found


COMPARED: dict[Callable[[], list[float]], int] = {
    linear_layers: 12,
    embeddings: 2 * len(EMBEDDINGS) + 1,
    regions: 24,
}


def everything() -> list[list[float]]:
    return [compare() for compare in COMPARED]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_and_mappings_are_shards_of_whole_ones(world_size: int) -> None:
    for compared in run_ranks(world_size, everything):
        for found, number in zip(compared, COMPARED.values(), strict=True):
            assert len(found) == number
            assert max(found) < 1e-12, found


def reduce_twice() -> tuple[list[float], float]:
    with started("fairscale"):
        value = torch.ones(2)
        total = fairscale.reduce_from_model_parallel_region(value)
    return value.tolist(), total.sum().item()


def test_a_reduction_leaves_its_input_as_it_is() -> None:
    assert run_ranks(2, reduce_twice) == [([1.0, 1.0], 4.0)] * 2


def test_a_whole_weight_has_no_blocks() -> None:
    with fake_world(1), started("fairscale", "ezpz") as dialects:
        for dialect in dialects:
            assert dialect.layers.RowParallelLinear(4, 6, stride=3).weight.shape == (6, 4)


# --- mistakes -----------------------------------------------------------------------------------------------

MISTAKES: dict[str, Callable[[Any], Any]] = {
    "out_features is 10, which cannot be split into 4 equal shards; use 8 or 12, or another multiple of 4": (
        lambda one: one.layers.ColumnParallelLinear(4, 10)
    ),
    "in_features is 12, ... of 2 blocks (the stride); ...": (
        lambda one: one.layers.RowParallelLinear(12, 4, stride=2)
    ),
    "the length of dim -1 of a tensor of shape (2, 6) is 6, ...": (
        lambda one: one.layers.RowParallelLinear(4, 4)(torch.zeros(2, 6))
    ),
    "num_embeddings is 65, ...": lambda one: one.layers.VocabParallelEmbedding(65, 4),
    "embedding_dim is 6, ...": lambda one: one.layers.ParallelEmbedding(8, 6),
    "padding_idx is 8, and the ids run from 0 to 7; name one of them, or None": (
        lambda one: one.layers.ParallelEmbedding(8, 4, padding_idx=8)
    ),
    "the length of dim -1 of a tensor of shape (6,) is 6, ...": (
        lambda one: getattr(one.mappings, f"scatter_to_{one.region}_region")(torch.zeros(6))
    ),
    "4 is not divisible by 3; use 3 or 6, ...": lambda _: fairscale.layers._initialize_affine_weight(
        torch.zeros(4, 4), 16, 4, 4, 0, nn.init.zeros_, stride=3
    ),
    "the target has shape (3,) and the logits (2, 4); ...": (
        lambda _: fairscale.vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(3))
    ),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_reported(text: str) -> None:
    with fake_world(4), started("fairscale", "ezpz") as dialects:
        for dialect in dialects:
            refuses(partial(MISTAKES[text], dialect), AssertionError, text)
