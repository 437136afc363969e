"""The cross entropy of logits whose vocabulary is sharded over the ranks, without gathering them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._torch import needs_functional_collectives
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import RankGroup, all_reduce
from namedmesh.tensor_parallel.embedding import in_part, refuse_strangers
from namedmesh.tensor_parallel.module_setup import sharded_dim

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    mesh: DeviceMesh | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits of which each rank has its part of the vocabulary.

    What ``torch.nn.functional.cross_entropy`` makes of the whole logits, in float32 at least, with three small sums over
    the ranks. For the backward it keeps the logits themselves: nothing may write into them before.

    Args:
        logits: ``(..., vocabulary)``, a DTensor that is sharded along its last dim, as a column style with
            ``use_local_output=False`` makes; or this rank's part of it as a plain tensor, with ``mesh``.
        target: ``(...)``, ids in the whole vocabulary, the same on every rank.
        mesh: the one-dimensional mesh over which a plain tensor is sharded; without it the tensor is whole.
        ignore_index: a target that does not count.
        reduction: ``"mean"`` over the targets that count, ``"sum"``, or ``"none"`` for a loss for each target.
        label_smoothing: from 0 to 1: what is taken off the target and spread over the whole vocabulary.
        z_loss: what the square of the logarithm of the softmax's denominator is multiplied by and added.

    Returns:
        The loss, a plain tensor, the same on every rank.

    Raises:
        ShapeError: the target has another shape than the logits without their last dim, the logits are sharded
            otherwise, or an option is out of range.
        IndexError: on a CPU: a target is outside of the vocabulary.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel import cross_entropy
        >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
        tensor(1.3863)
    """
    local, group = _part(logits, mesh)
    problems = target_problems(logits.shape, target)
    if reduction not in _REDUCTIONS:
        problems.append(f"reduction is {reduction!r}; it can be one of {_REDUCTIONS}")
    if not 0 <= label_smoothing <= 1:
        problems.append(f"label_smoothing is {label_smoothing}; it can be from 0 to 1")
    if problems:
        raise ShapeError(*problems)
    dtype = torch.promote_types(local.dtype, torch.float32)
    counts = target != ignore_index
    vocabulary = local.shape[-1] * group.size
    refuse_strangers(target.masked_fill(~counts, 0), vocabulary, "target is out of bounds: the ids")
    losses = rows_cross_entropy(local, target, counts, group, Rows(dtype, label_smoothing, z_loss))
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def _part(logits: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, RankGroup]:
    """Return this rank's part of the logits, and the ranks that have the others."""
    if not isinstance(logits, DTensor):
        return logits, RankGroup(mesh)
    if logits.placements == (Replicate(),):
        return logits.to_local(), RankGroup(None)
    axis, last = logits.device_mesh, logits.ndim - 1
    is_last = axis.ndim == 1 and sharded_dim(logits.placements[0], logits.ndim) == last
    if is_last and logits.shape[last] % axis.size() == 0:
        return logits.to_local(), RankGroup(axis)
    raise ShapeError(
        f"the logits, of shape {tuple(logits.shape)}, are laid out as {logits.placements}; shard their last dim, and "
        f"nothing else, into equal parts, as ColwiseParallel(use_local_output=False) does"
    )


def target_problems(shape: torch.Size, target: Tensor) -> list[str]:
    """Return a sentence if a target does not have one id for each row of logits."""
    if target.shape == shape[:-1]:
        return []
    reason = (
        f"the target has shape {tuple(target.shape)} and the logits {tuple(shape)}; pass one id for each row of "
        f"logits: shape {tuple(shape[:-1])}"
    )
    return [reason]


class Rows(NamedTuple):
    """What the cross entropy of each row is computed with.

    Args:
        dtype: the type.
        spread: what is taken off the target and spread evenly over all entries.
        z_loss: what the square of the logarithm of the softmax's denominator is multiplied by and added.
        over_part: spread over the entries of this rank only, which then has another loss than its group.
    """

    dtype: torch.dtype
    spread: float = 0.0
    z_loss: float = 0.0
    over_part: bool = False


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(x))) - (1 - s) x[target] - s mean(x) + z log(sum(exp(x))) ** 2``, for each row x."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any, logits: Tensor, target: Tensor, counts: Tensor | None, group: RankGroup, rows: Rows
    ) -> Tensor:
        part = logits.shape[-1]
        elsewhere, mine = in_part(target, group.rank * part, part)
        highest = all_reduce(logits.amax(-1).to(rows.dtype), group, "max", mine=True)
        # In the larger of the two types, with no copy of the logits in it.
        shifted = logits - highest.unsqueeze(-1)
        of_target = shifted.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        mean = shifted.mean(-1) if rows.spread else torch.zeros_like(of_target)
        # Into the memory of the difference, unless somebody may have kept that.
        total = torch.exp(shifted, out=None if needs_functional_collectives(shifted) else shifted).sum(-1)
        sums = [of_target, total] if rows.over_part else [of_target, total, mean / group.size]
        of_target, total, *means = all_reduce(torch.stack(sums), group, mine=True).unbind()
        mean = means[0] if means else mean
        normalizer = total.log()
        loss = normalizer - (1 - rows.spread) * of_target - rows.spread * mean
        lse = normalizer + highest
        if rows.z_loss:
            loss = loss + rows.z_loss * lse.square()
        ctx.save_for_backward(logits, lse, elsewhere, mine, counts)
        ctx.rows, ctx.entries = rows, part if rows.over_part else part * group.size
        return loss if counts is None else loss.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, elsewhere, mine, counts = ctx.saved_tensors
        rows: Rows = ctx.rows
        gradient = gradient if counts is None else gradient.masked_fill(~counts, 0)
        scale = gradient * (1 + 2 * rows.z_loss * lse) if rows.z_loss else gradient
        result = (logits - lse.unsqueeze(-1)).exp_().mul_(scale.unsqueeze(-1))
        on_target = gradient.masked_fill(elsewhere, 0) * (rows.spread - 1)
        result.scatter_add_(-1, mine.unsqueeze(-1), on_target.unsqueeze(-1))
        if rows.spread:
            result.sub_(gradient.unsqueeze(-1) * (rows.spread / ctx.entries))
        return result.to(logits.dtype), None, None, None, None


rows_cross_entropy: Callable[[Tensor, Tensor, Tensor | None, RankGroup, Rows], Tensor] = _CrossEntropy.apply
"""The cross entropy of each row of logits, with its target, whether it counts (None: all do), the ranks, and how."""
