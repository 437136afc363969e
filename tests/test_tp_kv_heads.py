"""Grouped attention over any number of ranks that divides the queries, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from tp_compare import sharded, tp_mesh, training_difference
from tp_models import Attention, Llama, attention_plan, llama_plan

from namedmesh.errors import PlanError
from namedmesh.sizes import SharedHeads
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    KeyValueParallel,
    plan_report,
)

COUNTS = [
    (queries, heads, size)
    for size in (2, 3, 4)
    for queries in (size, 2 * size, 3 * size)
    for heads in range(1, queries + 1)
    if queries % heads == 0 and heads % size
]


@pytest.mark.parametrize(("queries", "heads", "size"), [*COUNTS, (32, 4, 8), (64, 8, 16), (48, 6, 8)])
def test_every_query_gets_its_own_head(queries: int, heads: int, size: int) -> None:
    shared = SharedHeads(queries, heads, size)
    given = [head for rank in range(size) for head in shared.of_rank(rank) for _ in range(shared.repeats)]
    assert given == [query // (queries // heads) for query in range(queries)]


def llama_differences() -> dict[tuple[int, int, bool], float]:
    size = torch.distributed.get_world_size()
    found = {}
    for queries, heads, of_size in COUNTS:
        if of_size != size or queries == size:
            continue
        torch.manual_seed(0)
        reference = Llama(
            dim=4 * queries, n_heads=queries, n_kv_heads=heads, vocab=24, hidden=12 * size, layers=1
        ).double()
        ids = torch.randint(0, 24, (2, 12), generator=torch.Generator().manual_seed(0))
        for sequence in (False, True):
            whole = copy.deepcopy(reference)
            model = sharded(reference, llama_plan(queries, heads, sequence_parallel=sequence))
            found[queries, heads, sequence] = training_difference(model, whole, ids, steps=1)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_llama_with_any_number_of_kv_heads_trains_as_the_whole_one(size: int) -> None:
    for found in run_ranks(size, llama_differences):
        assert found
        assert max(found.values()) < 1e-11, found


def counts_difference() -> float:
    """Plain torch applies the style too, with counts that the caller gives."""
    torch.manual_seed(0)
    reference = Attention(16, 4, 1).double()
    model = copy.deepcopy(reference)
    parallelize_module(model, tp_mesh(), attention_plan(4, 1))
    return training_difference(model, reference, torch.randn(2, 5, 16, dtype=torch.float64))


def test_torch_applies_the_style_with_given_counts() -> None:
    assert max(run_ranks(2, counts_difference)) < 1e-12


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(PlanError) as caught:
        plan_report(Attention(24, 6, 2), 4, attention_plan(6, 2))
    assert str(caught.value) == (
        "wk, wv: 6 query heads and 2 kv heads cannot be shared by 4 ranks; choose a tp size that divides 6"
    )
    with pytest.raises(PlanError, match="3 kv heads do not divide out_features 8"):
        plan_report(nn.Linear(8, 8), 2, KeyValueParallel(6, 3))
    # Nothing is read off a module's attributes.
    block = nn.ModuleDict({"proj": nn.Linear(384, 384)})
    block.num_heads = 6  # type: ignore[assignment]
    assert "on each of 4 ranks" in plan_report(block, 4, {"proj": ColwiseParallel()})
