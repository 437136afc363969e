"""The cross entropy of logits whose vocabulary is sharded over the ranks, without gathering them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import Group, all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

_REDUCTIONS = ("mean", "sum", "none")
_ALONE = Group("", 1, 0)


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

    What ``torch.nn.functional.cross_entropy`` makes of the whole logits, in float32 at least, with two small collectives.
    It keeps the logits themselves, and no probabilities: three times their memory at most, where torch's
    ``loss_parallel`` needs five to nine times.

    Args:
        logits: ``(..., vocabulary)``, a DTensor sharded along its last dim, as a column style with
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
    counts = target != ignore_index
    refuse_strangers(target.masked_fill(~counts, 0), local.shape[-1] * group.size, "target is out of bounds")
    rows = Rows(torch.promote_types(local.dtype, torch.float32), label_smoothing, z_loss)
    losses = rows_cross_entropy(local, target, counts, group, rows)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def _part(logits: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, Group]:
    """Return this rank's part of the logits, and the ranks that have the others."""
    if not isinstance(logits, DTensor):
        return logits, _ALONE if mesh is None else Group.of(mesh)
    if logits.placements == (Replicate(),):
        return logits.to_local(), _ALONE
    axis, last = logits.device_mesh, logits.ndim - 1
    if logits.placements in {(Shard(-1),), (Shard(last),)} and logits.shape[last] % axis.size() == 0:
        return logits.to_local(), Group.of(axis)
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


def refuse_strangers(ids: Tensor, vocabulary: int, what: str) -> None:
    """Refuse an id outside the vocabulary, on a CPU: it belongs to no rank, and would silently count as zeros."""
    if (
        torch.compiler.is_compiling()
        or type(ids) is not Tensor
        or ids.device.type != "cpu"
        or not ids.numel()
    ):
        return
    low, high = torch.aminmax(ids)
    if low < 0 or high >= vocabulary:
        raise IndexError(
            f"{what}: the ids run from {int(low)} to {int(high)}, the vocabulary from 0 to {vocabulary - 1}"
        )


class Rows(NamedTuple):
    """How the cross entropy of each row is computed.

    ``dtype``: in which type. ``spread``: what is taken off the target and spread evenly over all entries. ``z_loss``: what
    the square of the logarithm of the softmax's denominator is multiplied by. ``over_part``: spread over the entries of
    this rank only, which then has another loss than its group.
    """

    dtype: torch.dtype
    spread: float = 0.0
    z_loss: float = 0.0
    over_part: bool = False


class _CrossEntropy(torch.autograd.Function):
    """``lse(x) - (1 - s) x[target] - s mean(x) + z lse(x) ** 2`` for each row x, with the spread s."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any, logits: Tensor, target: Tensor, counts: Tensor | None, group: Group, rows: Rows
    ) -> Tensor:
        part = logits.shape[-1]
        mine = target - group.rank * part
        elsewhere = (mine < 0) | (mine >= part)
        mine = mine.masked_fill(elsewhere, 0)
        highest = all_reduce(logits.amax(-1).to(rows.dtype), group, "max")
        shifted = logits - highest.unsqueeze(-1)  # in the larger of the two types
        of_target = shifted.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        mean = shifted.mean(-1) if rows.spread else torch.zeros_like(of_target)
        sums = [shifted.exp().sum(-1), of_target]
        if not rows.over_part:
            sums.append(mean / group.size)
        total, of_target, *means = all_reduce(torch.stack(sums), group).unbind()
        loss = total.log() - (1 - rows.spread) * of_target - rows.spread * (means[0] if means else mean)
        lse = total.log() + highest
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


rows_cross_entropy: Callable[[Tensor, Tensor, Tensor | None, Group, Rows], Tensor] = _CrossEntropy.apply
"""The cross entropy of each row of logits, with its target, whether it counts (None: all do), the ranks, and how."""
