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
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from tp_compare import assert_no_difference, get_grad, make_tp_mesh

from namedmesh.tensor_parallel import cross_entropy, entropy, logsumexp, token_log_probs

TARGET = torch.tensor([[1, 7, -100], [0, 5, 6]])


def differences() -> dict[str, float]:
    mesh = make_tp_mesh()
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
        apart_by = max(apart(loss, expected), apart(whole(get_grad(placed)), logits.grad))
        found[f"{reduction}, {smoothing}, {ignored}"] = apart_by
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_is_that_of_the_whole_logits(size: int) -> None:
    assert_no_difference(run_ranks(size, differences), cases=12)


def padded_logits() -> Tensor:
    """Logits of a vocabulary whose last two entries are padding, which is all that the last of four ranks has."""
    logits = numbers(2, 3, 8, seed=0) * 4
    return torch.cat([logits[..., :6], torch.full((2, 3, 2), -torch.inf, dtype=torch.float64)], -1)


def whole_log_probs(logits: Tensor) -> Tensor:
    target = TARGET.clamp(0, 5)
    log_probs = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return log_probs.masked_fill(TARGET == -100, 0)


def of_distributions() -> dict[str, float]:
    """Each function of sharded logits and its gradient against torch's of the whole logits."""
    mesh = make_tp_mesh()
    target = TARGET.clamp(0, 5).masked_fill(TARGET == -100, -100)
    functions: dict[str, tuple[Any, Any]] = {
        "logsumexp": (logsumexp, lambda logits: logits.logsumexp(-1)),
        "z-loss": (
            lambda logits, mesh: logsumexp(logits, mesh) ** 2,
            lambda logits: logits.logsumexp(-1) ** 2,
        ),
        "entropy": (entropy, lambda logits: torch.distributions.Categorical(logits=logits).entropy()),
        "log-probabilities": (lambda logits, mesh: token_log_probs(logits, target, mesh), whole_log_probs),
    }
    found = {}
    for (name, (mine, theirs)), padded in product(functions.items(), (False, True)):
        logits = padded_logits() if padded else numbers(2, 3, 8, seed=0) * 4
        part = logits.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone().requires_grad_()
        # The whole entropy is that of the entries which are not padding: torch's has no gradient at minus infinity.
        kept = logits[..., :6].clone().requires_grad_() if padded else logits.requires_grad_()
        weights = numbers(2, 3, seed=1)
        value, expected = mine(part, mesh), theirs(kept)
        (value * weights).sum().backward()
        (expected * weights).sum().backward()
        wanted = torch.nn.functional.pad(get_grad(kept), (0, 2 * padded)).chunk(mesh.size(), -1)
        here = wanted[mesh.get_local_rank()]
        found[f"{name}, padded {padded}"] = max(apart(value, expected), apart(part.grad, here))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_other_functions_of_the_vocabulary_are_those_of_the_whole_logits(size: int) -> None:
    assert_no_difference(run_ranks(size, of_distributions), cases=8)


def surroundings() -> dict[str, float]:
    """Under the compiler and checkpointing, and in half precision: what float32 makes of the same logits."""
    mesh = make_tp_mesh()
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
        wanted_part = get_grad(theirs).chunk(mesh.size(), -1)[mesh.get_local_rank()].to(dtype)
        found[name] = max(apart(loss, wanted), apart(mine.grad, wanted_part))
    return found


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_compiled_checkpointed_and_in_half_precision() -> None:
    assert_no_difference(run_ranks(2, surroundings), 1e-6)


def test_nothing_counts() -> None:
    target = torch.full((2, 3), -100)
    with fake_world(1):
        assert cross_entropy(torch.zeros(2, 3, 8), target, make_tp_mesh()).isnan()
        assert float(cross_entropy(torch.zeros(2, 3, 8), target, make_tp_mesh(), reduction="sum")) == 0


def test_what_is_refused() -> None:
    target = torch.zeros(3, dtype=torch.long)
    with fake_world(2):
        logits = DTensor.from_local(torch.zeros(2, 4), make_tp_mesh(), [Shard(1)])
        call = partial(cross_entropy, logits, target, make_tp_mesh(), reduction="median", label_smoothing=2.0)
        assert error_of(call) == (
            "ShapeError: 4 problems:\n"
            "  - the target has shape (3,) and the logits (2, 8); pass one id for each row of logits: shape (2,)\n"
            "  - the logits are a DTensor, (Shard(dim=1),); pass each rank's to_local()\n"
            "  - reduction is 'median'; it can be 'mean', 'sum' or 'none'\n"
            "  - label_smoothing is 2.0; it can be from 0 to 1"
        )
        for ids in (target.float(), target.bool(), target.to(torch.uint8)):
            assert error_of(partial(cross_entropy, torch.zeros(3, 4), ids, make_tp_mesh())) == (
                f"ShapeError: the target has dtype {ids.dtype}; pass ids of dtype torch.int64"
            )
        for function in (logsumexp, entropy):
            told = error_of(partial(function, torch.zeros(3, 4, dtype=torch.long), make_tp_mesh()))
            assert told == "ShapeError: the logits have dtype torch.int64; pass floating-point numbers"
        with pytest.raises(IndexError, match="bounds: the ids run from 1 to 8, the vocabulary from 0 to 7"):
            cross_entropy(torch.zeros(2, 4), torch.tensor([1, 8]), make_tp_mesh())
