"""The loss of logits whose vocabulary is sharded, against torch's of the whole logits."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from messages import error_of
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from tp_compare import apart, assert_right, gradient_of, numbers, tp_mesh, whole

from namedmesh.tensor_parallel import cross_entropy

TARGET = torch.tensor([[1, 7, -100], [0, 5, 6]])


def wanted_loss(logits: Tensor, target: Tensor, z_loss: float, options: dict[str, Any]) -> Tensor:
    """Torch's, with what z_loss adds to each target that counts."""
    reduction, ignored = options["reduction"], options["ignore_index"]
    found = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)
    if not z_loss:
        return found.view(target.shape) if reduction == "none" else found
    extra = (z_loss * logits.logsumexp(-1).square()).masked_fill(target == ignored, 0)
    if reduction == "none":
        return found.view(target.shape) + extra
    return found + (extra.sum() if reduction == "sum" else extra.sum() / (target != ignored).sum())


def differences() -> dict[str, float]:
    mesh = tp_mesh()
    found = {}
    for reduction, smoothing, z_loss, ignored in product(
        ("mean", "sum", "none"), (0.0, 0.1), (0.0, 1e-2), (-100, 5)
    ):
        options: dict[str, Any] = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "ignore_index": ignored,
        }
        target = TARGET.masked_fill(TARGET == -100, ignored)
        logits = (numbers(2, 3, 8, seed=0) * 4).requires_grad_()
        expected = wanted_loss(logits, target, z_loss, options)
        weights = numbers(2, 3, seed=1) if reduction == "none" else torch.tensor(2.0)
        (expected * weights).sum().backward()
        shard = logits.detach().chunk(mesh.size(), -1)[mesh.get_local_rank()].clone()
        placed = DTensor.from_local(shard, mesh, [Shard(2)]).detach()
        for kind, value in {
            "plain": shard,
            "DTensor": placed,
            "whole": logits.detach().clone(),
            "replicated": DTensor.from_local(logits.detach().clone(), mesh, [Replicate()]).detach(),
        }.items():
            value.requires_grad_()
            loss = cross_entropy(value, target, mesh if kind == "plain" else None, z_loss=z_loss, **options)
            (loss * weights).sum().backward()
            gradient = whole(gradient_of(value))
            if kind == "plain":
                gradient = DTensor.from_local(gradient, mesh, [Shard(2)]).full_tensor()
            name = f"{kind}, {reduction}, {smoothing}, {z_loss}, {ignored}"
            found[name] = max(apart(loss, expected), apart(gradient, logits.grad))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_is_that_of_the_whole_logits(size: int) -> None:
    assert_right(run_ranks(size, differences), cases=24 * 4)


def surroundings() -> dict[str, float]:
    """Under the compiler and checkpointing, and in half precision: what float32 makes of the same logits."""
    mesh = tp_mesh()
    target = TARGET.clamp(min=0)
    found = {}
    for name in ("compiled", "checkpointed", "bfloat16"):
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        logits = numbers(2, 3, 8, seed=0).to(dtype)
        theirs = logits.detach().clone().float().requires_grad_()
        wanted = F.cross_entropy(theirs.flatten(0, 1), target.flatten(), label_smoothing=0.1)
        wanted.backward()
        mine = logits.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone().requires_grad_()
        call: Any = partial(cross_entropy, label_smoothing=0.1)
        if name == "compiled":
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        if name == "checkpointed":
            call = partial(checkpoint, call, use_reentrant=False)
        loss = call(mine, target, mesh)
        loss.backward()
        assert loss.dtype is torch.float32
        wanted_part = gradient_of(theirs).chunk(mesh.size(), -1)[mesh.get_local_rank()].to(dtype)
        found[name] = max(apart(loss, wanted), apart(mine.grad, wanted_part))
    return found


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_compiled_checkpointed_and_in_half_precision() -> None:
    assert_right(run_ranks(2, surroundings), 1e-6)


def test_nothing_counts() -> None:
    target = torch.full((2, 3), -100)
    assert cross_entropy(torch.zeros(2, 3, 8), target).isnan()
    assert float(cross_entropy(torch.zeros(2, 3, 8), target, reduction="sum")) == 0


def test_what_is_refused() -> None:
    target = torch.zeros(3, dtype=torch.long)
    call = partial(cross_entropy, torch.zeros(2, 8), target, reduction="median", label_smoothing=2.0)
    assert error_of(call) == (
        "ShapeError: 3 problems:\n"
        "  - the target has shape (3,) and the logits (2, 8); pass one id for each row of logits: shape (2,)\n"
        "  - reduction is 'median'; it can be one of ('mean', 'sum', 'none')\n"
        "  - label_smoothing is 2.0; it can be from 0 to 1"
    )
    with pytest.raises(IndexError, match="bounds: the ids run from 1 to 8, the vocabulary from 0 to 7"):
        cross_entropy(torch.zeros(2, 8), torch.tensor([1, 8]))


def sharded_otherwise() -> str:
    logits = DTensor.from_local(torch.zeros(2, 3, 8), tp_mesh(), [Shard(1)])
    return error_of(partial(cross_entropy, logits, torch.zeros(2, 6, dtype=torch.long)))


def test_logits_that_are_sharded_otherwise() -> None:
    for text in run_ranks(2, sharded_otherwise):
        assert "are laid out as (Shard(dim=1),); shard their last dim" in text
