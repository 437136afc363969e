"""The cross entropy of logits whose vocabulary is sharded over the ranks, without gathering them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import Group, all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    mesh: DeviceMesh,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits of which each rank has its part of the vocabulary; the same on every rank.

    What ``torch.nn.functional.cross_entropy`` makes of the whole logits, in float32 at least, with two small collectives. It
    keeps no probabilities: three times the logits' memory at most, where torch's ``loss_parallel`` needs five to nine times.

    Args:
        logits: ``(..., part of the vocabulary)``: what an output layer under ``ColwiseParallel()`` makes.
        target: ``(...)``, ids in the whole vocabulary, the same on every rank.
        mesh: the one-dimensional mesh over which the vocabulary is sharded.
        ignore_index: a target that does not count.
        reduction: ``"mean"`` over the targets that count, ``"sum"``, or ``"none"`` for a loss for each target.
        label_smoothing: from 0 to 1: what is taken off the target and spread over the whole vocabulary.

    Raises:
        ShapeError: the target has another shape than the logits without their last dim, or an option is out of range.
        IndexError: on a CPU: a target is outside of the vocabulary.
    """
    group, problems = Group.of(mesh), target_problems(logits.shape, target)
    if isinstance(logits, DTensor):
        problems.append(f"the logits are a DTensor, {logits.placements}; pass each rank's to_local()")
    if reduction not in _REDUCTIONS:
        problems.append(f"reduction is {reduction!r}; it can be one of {_REDUCTIONS}")
    if not 0 <= label_smoothing <= 1:
        problems.append(f"label_smoothing is {label_smoothing}; it can be from 0 to 1")
    if problems:
        raise ShapeError(*problems)
    counts = target != ignore_index
    refuse_strangers(target.masked_fill(~counts, 0), logits.shape[-1] * group.size, "target is out of bounds")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = rows_cross_entropy(logits, target, counts, group, dtype, label_smoothing, False)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def target_problems(shape: torch.Size, target: Tensor) -> list[str]:
    """Return a sentence if a target does not have one id for each row of logits."""
    if target.shape == shape[:-1]:
        return []
    got = f"the target has shape {tuple(target.shape)} and the logits {tuple(shape)}"
    return [f"{got}; pass one id for each row of logits: shape {tuple(shape[:-1])}"]


def refuse_strangers(ids: Tensor, vocabulary: int, what: str) -> None:
    """Refuse an id outside the vocabulary, on a CPU: it belongs to no rank, and would silently count as zeros."""
    if torch.compiler.is_compiling() or type(ids) is not Tensor or not ids.is_cpu or not ids.numel():
        return
    low, high = map(int, torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        raise IndexError(
            f"{what}: the ids run from {low} to {high}, the vocabulary from 0 to {vocabulary - 1}"
        )


class _CrossEntropy(torch.autograd.Function):
    """``lse(x) - (1 - s) x[target] - s mean(x)`` for each row x, with the spread s, in ``dtype``.

    The mean is over the whole vocabulary, or over this rank's part of it, which then has another loss than its group.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        counts: Tensor | None,
        group: Group,
        dtype: torch.dtype,
        spread: float,
        over_part: bool,
    ) -> Tensor:
        part = logits.shape[-1]
        mine = target - group.rank * part
        elsewhere = (mine < 0) | (mine >= part)
        mine = mine.masked_fill(elsewhere, 0)
        highest = all_reduce(logits.amax(-1).to(dtype), group, "max")
        shifted = logits - highest.unsqueeze(-1)  # in the larger of the two types
        of_target = shifted.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        mean = shifted.mean(-1) if spread else torch.zeros_like(of_target)
        sums = [shifted.exp().sum(-1), of_target]
        if not over_part:
            sums.append(mean / group.size)
        total, of_target, *means = all_reduce(torch.stack(sums), group).unbind()
        loss = total.log() - (1 - spread) * of_target - spread * (means[0] if means else mean)
        ctx.save_for_backward(logits, total.log() + highest, elsewhere, mine, counts)
        ctx.spread, ctx.entries = spread, part if over_part else part * group.size
        return loss if counts is None else loss.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, elsewhere, mine, counts = ctx.saved_tensors
        gradient = gradient if counts is None else gradient.masked_fill(~counts, 0)
        result = (logits - lse.unsqueeze(-1)).exp_().mul_(gradient.unsqueeze(-1))
        on_target = gradient.masked_fill(elsewhere, 0) * (ctx.spread - 1)
        result.scatter_add_(-1, mine.unsqueeze(-1), on_target.unsqueeze(-1))
        if ctx.spread:
            result.sub_(gradient.unsqueeze(-1) * (ctx.spread / ctx.entries))
        return result.to(logits.dtype), *[None] * 6


rows_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply
"""The cross entropy of each row of logits; which of them count may be None: all do."""
