"""Tokens from vocabulary-sharded logits are those of one process with the full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import error_of
from ranks import fake_world, run_ranks
from tensors import random_tensor
from torch import Tensor
from tp_compare import make_tp_mesh

from namedmesh.tensor_parallel import argmax, sample

TIES = torch.tensor([[1.0, 3, 0, 3, 3, 2, 3], [0, 0, 0, 0, 0, 0, 0], [-torch.inf] * 6 + [1]])
NAN = torch.tensor([[1.0, torch.nan, 2, torch.inf, torch.nan, 0, 0]])
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.3}, {"top_k": 3}, {"top_k": 100}, {"temperature": 0}]


def shard(logits: Tensor) -> Tensor:
    """Return the local shard as torch shards a dim: the last ones are smaller or empty."""
    size = torch.distributed.get_world_size()
    shards = list(logits.chunk(size, -1))
    shards += [logits[..., :0]] * (size - len(shards))
    return shards[torch.distributed.get_rank()]


def draw_all() -> list[list[Any]]:
    """Return the ids for several logits and options, with another generator on each rank but the first."""
    mesh = make_tp_mesh()
    ids = []
    for logits in (TIES, NAN, random_tensor(4, 3, 13, seed=0), random_tensor(6, 5, seed=1).bfloat16()):
        ids.append(argmax(shard(logits), mesh).tolist())
        generator = torch.Generator().manual_seed(mesh.get_local_rank())
        for options in OPTIONS:
            drawn = [sample(shard(logits), mesh, generator=generator, **options).tolist() for _ in range(3)]
            ids.append(drawn)
    return ids


def test_ids_are_those_of_one_process() -> None:
    (expected,) = run_ranks(1, draw_all)
    full = [TIES, NAN, random_tensor(4, 3, 13, seed=0), random_tensor(6, 5, seed=1).bfloat16()]
    per_logits = 1 + len(OPTIONS)
    assert expected[::per_logits] == [logits.argmax(-1).tolist() for logits in full]
    assert len(set(map(str, expected[13]))) == 3  # each call draws other ids
    for ranks in (2, 4):
        assert run_ranks(ranks, draw_all) == [expected] * ranks


@pytest.mark.parametrize(("top_k", "temperature"), [(None, 1.0), (None, 2.0), (3, 1.0)])
def test_ids_have_the_probabilities_of_the_logits(top_k: int | None, temperature: float) -> None:
    draws = 40_000
    logits = random_tensor(8, seed=0)
    with fake_world(1):
        generator = torch.Generator().manual_seed(0)
        rows = logits.expand(draws, 8)
        ids = sample(rows, make_tp_mesh(), top_k=top_k, temperature=temperature, generator=generator)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    expected = (logits / temperature).softmax(-1)
    frequencies = ids.bincount(minlength=8) / draws
    # Four standard deviations.
    assert (frequencies - expected).abs().le(4 * (expected * (1 - expected) / draws).sqrt()).all()


def test_options_out_of_range_are_named() -> None:
    with fake_world(2):
        mesh = make_tp_mesh()
        assert error_of(lambda: sample(torch.zeros(2, 3), mesh, temperature=-1.0, top_k=0)) == (
            "ShapeError: 2 problems:\n"
            "  - temperature is -1.0; it can be 0 or a positive number\n"
            "  - top_k is 0; it can be 1 or more, or None for the full vocabulary"
        )
        assert error_of(lambda: argmax(torch.zeros(2, 3, dtype=torch.int64), mesh)) == (
            "ShapeError: the logits have dtype torch.int64; pass floating-point numbers"
        )
