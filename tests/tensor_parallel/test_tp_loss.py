"""Losses of vocabulary-sharded logits equal torch's losses of the full logits."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from messages import error_of
from ranks import fake_world, run_ranks
from tensors import compute_difference, full_tensor, random_tensor, rounding_tolerance
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from tp_compare import assert_no_difference, get_grad, make_tp_mesh

from namedmesh.tensor_parallel import cross_entropy, entropy, logsumexp, token_log_probs

TARGET = torch.tensor([[1, 7, -100], [0, 5, 6]])


def compare_losses() -> dict[str, float]:
    """Return the difference of the loss and its gradient for each combination of options."""
    mesh = make_tp_mesh()
    differences = {}
    for reduction, smoothing, ignored in product(("mean", "sum", "none"), (0.0, 0.1), (-100, 5)):
        options: Any = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        target = TARGET.masked_fill(TARGET == -100, ignored)
        logits = (random_tensor(2, 3, 8, seed=0) * 4).requires_grad_()
        expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)
        weights = torch.tensor(2.0)
        if reduction == "none":
            expected = expected.view(target.shape)
            weights = random_tensor(2, 3, seed=1)
        (expected * weights).sum().backward()
        shard = logits.detach().chunk(mesh.size(), -1)[mesh.get_local_rank()]
        sharded: Any = DTensor.from_local(shard, mesh, [Shard(2)]).detach().requires_grad_()
        loss = cross_entropy(sharded.to_local(), target, mesh, **options)
        (loss * weights).sum().backward()
        grad_difference = compute_difference(full_tensor(get_grad(sharded)), logits.grad)
        differences[f"{reduction}, {smoothing}, {ignored}"] = max(
            compute_difference(loss, expected), grad_difference
        )
    return differences


@pytest.mark.parametrize("size", [1, 2, 4])
def test_cross_entropy_equals_torchs_of_the_full_logits(size: int) -> None:
    assert_no_difference(run_ranks(size, compare_losses), cases=12)


def make_padded_logits() -> Tensor:
    """Make logits whose last two entries are padding; the last of four ranks has only padding."""
    logits = random_tensor(2, 3, 8, seed=0) * 4
    return torch.cat([logits[..., :6], torch.full((2, 3, 2), -torch.inf, dtype=torch.float64)], -1)


def compute_log_probs(logits: Tensor) -> Tensor:
    """Return the log-probabilities of the targets from the full logits."""
    target = TARGET.clamp(0, 5)
    log_probs = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return log_probs.masked_fill(TARGET == -100, 0)


def compare_functions() -> dict[str, float]:
    """Return the largest difference of the value and the gradient for each function of logits."""
    mesh = make_tp_mesh()
    target = TARGET.clamp(0, 5).masked_fill(TARGET == -100, -100)
    functions: dict[str, tuple[Any, Any]] = {
        "logsumexp": (logsumexp, lambda logits: logits.logsumexp(-1)),
        "z-loss": (
            lambda logits, mesh: logsumexp(logits, mesh) ** 2,
            lambda logits: logits.logsumexp(-1) ** 2,
        ),
        "entropy": (entropy, lambda logits: torch.distributions.Categorical(logits=logits).entropy()),
        "log-probabilities": (lambda logits, mesh: token_log_probs(logits, target, mesh), compute_log_probs),
    }
    differences = {}
    for (name, (sharded, unsharded)), is_padded in product(functions.items(), (False, True)):
        logits = make_padded_logits() if is_padded else random_tensor(2, 3, 8, seed=0) * 4
        shard = logits.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone().requires_grad_()
        # torch's entropy has no gradient at minus infinity. Without the padding it is the same.
        full = logits[..., :6].clone() if is_padded else logits
        full.requires_grad_()
        weights = random_tensor(2, 3, seed=1)
        value = sharded(shard, mesh)
        expected = unsharded(full)
        (value * weights).sum().backward()
        (expected * weights).sum().backward()
        padding = 2 if is_padded else 0
        expected_grad = F.pad(get_grad(full), (0, padding)).chunk(mesh.size(), -1)[mesh.get_local_rank()]
        grad_difference = compute_difference(shard.grad, expected_grad)
        differences[f"{name}, padded {is_padded}"] = max(compute_difference(value, expected), grad_difference)
    return differences


@pytest.mark.parametrize("size", [1, 2, 4])
def test_other_functions_equal_torchs_of_the_full_logits(size: int) -> None:
    assert_no_difference(run_ranks(size, compare_functions), cases=8)


def compare_modes() -> dict[str, float]:
    """Return the difference from torch's cross entropy in each mode, as a part of what is allowed."""
    mesh = make_tp_mesh()
    target = TARGET.clamp(min=0)
    differences = {}
    for mode in ("compiled", "checkpointed", "bfloat16"):
        logits = random_tensor(2, 3, 8, seed=0)
        loss_tolerance = grad_tolerance = 1e-12
        if mode == "bfloat16":
            logits = logits.bfloat16()
            # The loss is computed in float32: a mean of six sums over eight logits.
            loss_tolerance = rounding_tolerance(torch.float32, 6 * 8)
            grad_tolerance = rounding_tolerance(torch.bfloat16, 1)
        full = logits.detach().clone().double().requires_grad_()
        expected = F.cross_entropy(full.flatten(0, 1), target.flatten(), label_smoothing=0.1)
        expected.backward()
        shard = logits.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone().requires_grad_()
        call: Any = partial(cross_entropy, label_smoothing=0.1)
        if mode == "compiled":
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        if mode == "checkpointed":
            call = partial(checkpoint, call, use_reentrant=False)
        loss = call(shard, target, mesh)
        loss.backward()
        assert loss.dtype is (torch.float32 if mode == "bfloat16" else torch.float64)
        grad = get_grad(shard)
        assert grad.dtype is logits.dtype
        expected_grad = get_grad(full).chunk(mesh.size(), -1)[mesh.get_local_rank()]
        differences[mode] = max(
            compute_difference(loss.double(), expected) / loss_tolerance,
            compute_difference(grad.double(), expected_grad) / grad_tolerance,
        )
    return differences


@pytest.mark.ci
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_cross_entropy_compiled_checkpointed_and_in_half_precision() -> None:
    assert_no_difference(run_ranks(2, compare_modes), 1.0)


def test_the_mean_without_targets_that_count_is_nan() -> None:
    target = torch.full((2, 3), -100)
    with fake_world(1):
        assert cross_entropy(torch.zeros(2, 3, 8), target, make_tp_mesh()).isnan()
        assert float(cross_entropy(torch.zeros(2, 3, 8), target, make_tp_mesh(), reduction="sum")) == 0


def test_wrong_arguments_raise() -> None:
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
            message = error_of(partial(function, torch.zeros(3, 4, dtype=torch.long), make_tp_mesh()))
            assert message == "ShapeError: the logits have dtype torch.int64; pass floating-point numbers"
        with pytest.raises(IndexError, match="bounds: the ids run from 1 to 8, the vocabulary from 0 to 7"):
            cross_entropy(torch.zeros(2, 4), torch.tensor([1, 8]), make_tp_mesh())
