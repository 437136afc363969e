"""Losses of vocabulary-sharded logits, without an all-gather of the logits.

The logits of a rank are its local shard of the vocabulary, as an output layer under
``ColwiseParallel()`` returns them. The results are replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from namedmesh._errors import ShapeError
from namedmesh.mesh.internal import AxisMesh, get_axis_mesh
from namedmesh.tensor_parallel.collectives import (
    Group,
    all_reduce,
    check_ids_in_vocab,
    reduce_from_tp_region,
)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    mesh: AxisMesh,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of vocabulary-sharded logits; the same on every rank.

    The result equals ``torch.nn.functional.cross_entropy`` of the full logits. It is computed in
    float32 at least. No probabilities are stored: it needs three times the memory of the logits at
    most, torch's ``loss_parallel`` five to nine times.

    Forward: two all-reduces, of one and of three numbers for each row. Backward: no communication.
    Collective: every rank of ``mesh`` must call it.

    Args:
        logits: ``(..., vocabulary / ranks)``, the local shard of the vocabulary.
        target: ``(...)``, ids in the full vocabulary, of dtype int64, the same on every rank.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with the one axis over which the
            vocabulary is sharded.
        ignore_index: the id of targets that do not count.
        reduction: ``"mean"`` over the targets that count, ``"sum"``, or ``"none"`` for the loss of
            each target.
        label_smoothing: from 0 to 1: the share of the target's weight that is distributed over the
            full vocabulary.

    Returns:
        The loss, in float32 at least, differentiable once.

    Raises:
        ShapeError: the target has another shape than the logits without their last dim, or holds no
            ids, or an option is out of range.
        IndexError: on a CPU: a target is outside of the vocabulary.
    """
    mesh = get_axis_mesh(mesh, "tp", "cross_entropy")
    group = Group.of(mesh)
    problems = target_problems(logits.shape, target) + logits_problems(logits)
    if reduction not in {"mean", "sum", "none"}:
        problems.append(f"reduction is {reduction!r}; it can be 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1:
        problems.append(f"label_smoothing is {label_smoothing}; it can be from 0 to 1")
    if problems:
        raise ShapeError(*problems)
    counts = target != ignore_index
    check_ids_in_vocab(
        target.masked_fill(~counts, 0), logits.shape[-1] * group.size, "target is out of bounds"
    )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = rows_cross_entropy(logits, target, counts, group, dtype, label_smoothing, False)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def token_log_probs(logits: Tensor, target: Tensor, mesh: AxisMesh, *, ignore_index: int = -100) -> Tensor:
    """Return the log-probability of each target over a sharded vocabulary, replicated.

    Policy gradients and preference losses use them. They communicate like :func:`cross_entropy`.
    Collective: every rank of ``mesh`` must call it.

    Args:
        logits: ``(..., vocabulary / ranks)``, the local shard, as for :func:`cross_entropy`.
        target: ``(...)``, ids in the full vocabulary, of dtype int64, the same on every rank.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with the one axis over which the
            vocabulary is sharded.
        ignore_index: a target whose log-probability and gradient are 0.

    Returns:
        ``(...)``, in float32 at least, differentiable once.

    Raises:
        ShapeError: the target has another shape than the logits without their last dim, or holds no
            ids.
        IndexError: on a CPU: a target is outside of the vocabulary.
    """
    mesh = get_axis_mesh(mesh, "tp", "token_log_probs")
    return -cross_entropy(logits, target, mesh, ignore_index=ignore_index, reduction="none")


def logsumexp(logits: Tensor, mesh: AxisMesh) -> Tensor:
    """Return ``torch.logsumexp`` over a sharded vocabulary; the same on every rank.

    A z-loss is ``z * logsumexp(logits, mesh) ** 2``.

    Forward: two all-reduces of one number for each row. The first backward does not communicate.
    Collective: every rank of ``mesh`` must call it.

    Args:
        logits: ``(..., vocabulary / ranks)``, the local shard, as for :func:`cross_entropy`.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with the one axis over which the
            vocabulary is sharded.

    Returns:
        ``(...)``, in float32 at least, differentiable any number of times.

    Raises:
        ShapeError: the logits are a DTensor or no floating-point numbers.
    """
    mesh = get_axis_mesh(mesh, "tp", "logsumexp")
    _check_logits(logits)
    group = Group.of(mesh)
    shifted, highest = _subtract_row_max(logits, group)
    exp_sum = reduce_from_tp_region(shifted.exp().sum(-1), group)
    return exp_sum.log() + highest


def entropy(logits: Tensor, mesh: AxisMesh) -> Tensor:
    """Return the entropy of each row over a sharded vocabulary; the same on every rank.

    A logit of minus infinity has the probability 0, and contributes nothing.

    Forward: two all-reduces, of one and of two numbers for each row. The first backward does not
    communicate.
    Collective: every rank of ``mesh`` must call it.

    Args:
        logits: ``(..., vocabulary / ranks)``, the local shard, as for :func:`cross_entropy`.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with the one axis over which the
            vocabulary is sharded.

    Returns:
        ``(...)``, in nats, in float32 at least, differentiable any number of times.

    Raises:
        ShapeError: the logits are a DTensor or no floating-point numbers.
    """
    mesh = get_axis_mesh(mesh, "tp", "entropy")
    _check_logits(logits)
    group = Group.of(mesh)
    shifted, _ = _subtract_row_max(logits, group)
    weights = shifted.exp()
    # exp(-inf) is 0, and 0 * -inf would be NaN.
    products = weights * shifted.masked_fill(shifted == -torch.inf, 0)
    sums = torch.stack([weights.sum(-1), products.sum(-1)])
    exp_sum, weighted_sum = reduce_from_tp_region(sums, group).unbind()
    return exp_sum.log() - weighted_sum / exp_sum


def target_problems(shape: torch.Size, target: Tensor) -> list[str]:
    """Return the reasons why a target does not fit logits of a shape (empty if it fits).

    Args:
        shape: the shape of the logits.
        target: the target.
    """
    problems = []
    if target.shape != shape[:-1]:
        got = f"the target has shape {tuple(target.shape)} and the logits {tuple(shape)}"
        problems.append(f"{got}; pass one id for each row of logits: shape {tuple(shape[:-1])}")
    if target.dtype not in {torch.int32, torch.int64}:
        problems.append(f"the target has dtype {target.dtype}; pass ids of dtype torch.int64")
    return problems


def logits_problems(logits: Tensor) -> list[str]:
    """Return the reasons why a tensor cannot be the local shard of logits (empty if it can).

    Args:
        logits: the local tensor of this rank.
    """
    if isinstance(logits, DTensor):
        return [f"the logits are a DTensor, {logits.placements}; pass each rank's to_local()"]
    if not logits.is_floating_point():
        return [f"the logits have dtype {logits.dtype}; pass floating-point numbers"]
    return []


def _check_logits(logits: Tensor) -> None:
    """Raise a ShapeError if a tensor cannot be the local shard of logits."""
    problems = logits_problems(logits)
    if problems:
        raise ShapeError(*problems)


def _subtract_row_max(logits: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Subtract the maximum of each row of logits over all ranks, with one all-reduce.

    Returns:
        The difference and the maxima, in float32 at least.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    highest = all_reduce(logits.detach().amax(-1).to(dtype), group, "max")
    return logits - highest.unsqueeze(-1), highest


class _CrossEntropy(torch.autograd.Function):
    """Computes ``lse(x) - (1 - s) x[target] - s mean(x)`` for each row x of logits.

    The label smoothing is s, ``lse`` the logsumexp. All of it is computed in ``dtype``. The mean
    is over the full vocabulary. With ``smooth_over_shard`` it is over the local shard of the
    vocabulary, as in Megatron; the loss then differs between ranks.

    Forward: two all-reduces. Backward: no communication, because the gradient of a local logit
    depends on the local shard and on sums that the forward has all-reduced.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        counts: Tensor | None,
        group: Group,
        dtype: torch.dtype,
        smoothing: float,
        smooth_over_shard: bool,
    ) -> Tensor:
        shard_size = logits.shape[-1]
        local_target = target - group.rank * shard_size
        not_local = (local_target < 0) | (local_target >= shard_size)
        # Exactly one rank has the logit of a target. The others read any logit, and add zero.
        local_target = local_target.masked_fill(not_local, 0)
        highest = all_reduce(logits.amax(-1).to(dtype), group, "max")
        # The subtraction promotes to the larger of the two dtypes.
        shifted = logits - highest.unsqueeze(-1)
        target_logit = shifted.gather(-1, local_target.unsqueeze(-1)).squeeze(-1)
        target_logit = target_logit.masked_fill(not_local, 0)
        mean = shifted.mean(-1) if smoothing else torch.zeros_like(target_logit)
        # One all-reduce for all sums, because its cost is its latency.
        sums = torch.stack([shifted.exp().sum(-1), target_logit, mean / group.size])
        exp_sum, target_logit, full_mean = all_reduce(sums, group).unbind()
        if not smooth_over_shard:
            mean = full_mean
        loss = exp_sum.log() - (1 - smoothing) * target_logit - smoothing * mean
        # The backward computes the probabilities again from the logits, so that they are not
        # stored.
        ctx.save_for_backward(logits, exp_sum.log() + highest, not_local, local_target, counts)
        ctx.smoothing = smoothing
        ctx.averaged_logits = shard_size if smooth_over_shard else shard_size * group.size
        return loss if counts is None else loss.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, not_local, local_target, counts = ctx.saved_tensors
        if counts is not None:
            grad = grad.masked_fill(~counts, 0)
        # The gradient of lse(x) is softmax(x).
        logits_grad = (logits - lse.unsqueeze(-1)).exp_().mul_(grad.unsqueeze(-1))
        target_grad = grad.masked_fill(not_local, 0) * (ctx.smoothing - 1)
        logits_grad.scatter_add_(-1, local_target.unsqueeze(-1), target_grad.unsqueeze(-1))
        if ctx.smoothing:
            logits_grad.sub_(grad.unsqueeze(-1) * (ctx.smoothing / ctx.averaged_logits))
        return logits_grad.to(logits.dtype), *[None] * 6


rows_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply
"""The cross entropy of each row of logits, or of those that ``counts`` selects."""
