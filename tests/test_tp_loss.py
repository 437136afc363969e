"""The loss of logits whose vocabulary is sharded, against torch's of the whole logits."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from messages import error_of
from ranks import fake_world, run_ranks
from tensors import apart, numbers, whole
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from tp_compare import assert_right, gradient_of, tp_mesh

from namedmesh.tensor_parallel import cross_entropy

TARGET = torch.tensor([[1, 7, -100], [0, 5, 6]])


def differences() -> dict[str, float]:
    mesh = tp_mesh()
    found = {}
    for reduction, smoothing, ignored in product(("mean", "sum", "none"), (0.0, 0.1), (-100, 5)):
        options: Any = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        target = TARGET.masked_fill(TARGET == -100, ignored)
        logits = (numbers(2, 3, 8, seed=0) * 4).requires_grad_()
        expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)
        expected = expected.view(target.shape) if reduction == "none" else expected
        weights = numbers(2, 3, seed=1) if reduction == "none" else torch.tensor(2.0)
        (expected * weights).sum().backward()
        part = logits.detach().chunk(mesh.size(), -1)[mesh.get_local_rank()]
        placed: Any = DTensor.from_local(part, mesh, [Shard(2)]).detach().requires_grad_()
        loss = cross_entropy(placed.to_local(), target, mesh, **options)
        (loss * weights).sum().backward()
        apart_by = max(apart(loss, expected), apart(whole(gradient_of(placed)), logits.grad))
        found[f"{reduction}, {smoothing}, {ignored}"] = apart_by
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_is_that_of_the_whole_logits(size: int) -> None:
    assert_right(run_ranks(size, differences), cases=12)


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
    with fake_world(1):
        assert cross_entropy(torch.zeros(2, 3, 8), target, tp_mesh()).isnan()
        assert float(cross_entropy(torch.zeros(2, 3, 8), target, tp_mesh(), reduction="sum")) == 0


def test_what_is_refused() -> None:
    target = torch.zeros(3, dtype=torch.long)
    with fake_world(2):
        logits = DTensor.from_local(torch.zeros(2, 4), tp_mesh(), [Shard(1)])
        call = partial(cross_entropy, logits, target, tp_mesh(), reduction="median", label_smoothing=2.0)
        assert error_of(call) == (
            "ShapeError: 4 problems:\n"
            "  - the target has shape (3,) and the logits (2, 8); pass one id for each row of logits: shape (2,)\n"
            "  - the logits are a DTensor, (Shard(dim=1),); pass each rank's to_local()\n"
            "  - reduction is 'median'; it can be 'mean', 'sum' or 'none'\n"
            "  - label_smoothing is 2.0; it can be from 0 to 1"
        )
        with pytest.raises(IndexError, match="bounds: the ids run from 1 to 8, the vocabulary from 0 to 7"):
            cross_entropy(torch.zeros(2, 4), torch.tensor([1, 8]), tp_mesh())
