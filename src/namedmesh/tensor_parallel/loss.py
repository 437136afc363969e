"""The cross entropy of logits whose vocabulary is sharded over the ranks, without gathering them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._torch import needs_functional_collectives
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import RankGroup, all_reduce
from namedmesh.tensor_parallel.module_setup import sharded_dim
from namedmesh.tensor_parallel.vocabulary import in_part

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
    the ranks. Of the logits it keeps one copy for the backward.

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
    local, peers = _part(logits, mesh)
    _check(logits.shape, target, reduction, label_smoothing)
    _refuse_strangers(target, local.shape[-1] * peers.size, ignore_index)
    dtype = torch.promote_types(local.dtype, torch.float32)
    counts = target != ignore_index
    losses = _cross_entropy(local, target, counts, peers, (label_smoothing, z_loss, dtype))
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def _part(logits: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, RankGroup]:
    """Return this rank's part of the logits, and the ranks that have the others."""
    if not isinstance(logits, DTensor):
        return logits, RankGroup(mesh)
    if logits.device_mesh.ndim == 1:
        (layout,) = logits.placements
        if isinstance(layout, Replicate):
            return logits.to_local(), RankGroup(None)
        if (
            sharded_dim(layout, logits.ndim) == logits.ndim - 1
            and logits.shape[-1] % logits.device_mesh.size() == 0
        ):
            return logits.to_local(), RankGroup(logits.device_mesh)
    raise ShapeError(
        f"the logits, of shape {tuple(logits.shape)}, are laid out as {logits.placements}; shard their last dim, and "
        f"nothing else, into equal parts, as ColwiseParallel(use_local_output=False) does"
    )


def _check(shape: torch.Size, target: Tensor, reduction: str, label_smoothing: float) -> None:
    problems = []
    if target.shape != shape[:-1]:
        problems.append(
            f"the target has shape {tuple(target.shape)} and the logits {tuple(shape)}; pass one id for each row of "
            f"logits: shape {tuple(shape[:-1])}"
        )
    if reduction not in _REDUCTIONS:
        problems.append(f"reduction is {reduction!r}; it can be one of {_REDUCTIONS}")
    if not 0 <= label_smoothing <= 1:
        problems.append(f"label_smoothing is {label_smoothing}; it can be from 0 to 1")
    if problems:
        raise ShapeError(*problems)


def _refuse_strangers(target: Tensor, vocabulary: int, ignore_index: int) -> None:
    if torch.compiler.is_compiling() or type(target) is not Tensor or target.device.type != "cpu":
        return
    strange = target[(target != ignore_index) & ((target < 0) | (target >= vocabulary))]
    if strange.numel():
        raise IndexError(
            f"target {int(strange[0])} is out of bounds: the vocabulary runs from 0 to {vocabulary - 1}, and "
            f"ignore_index is {ignore_index}"
        )


class _CrossEntropy(torch.autograd.Function):
    """``lse - (1 - s) x[target] - s mean(x) + z lse ** 2``, for each row x, where lse is ``log(sum(exp(x)))``."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        counts: Tensor,
        peers: RankGroup,
        options: tuple[float, float, torch.dtype],
    ) -> Tensor:
        smoothing, z_loss, dtype = options
        part = logits.shape[-1]
        elsewhere, mine = in_part(target, peers.rank * part, part)
        highest = all_reduce(logits.amax(-1).to(dtype), peers, "max", mine=True)
        shifted = logits.to(dtype) - highest.unsqueeze(-1)
        of_target = shifted.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        mean = shifted.sum(-1) / (part * peers.size) if smoothing else torch.zeros_like(of_target)
        # Into the memory of the difference, unless somebody may have kept that.
        into = None if needs_functional_collectives(shifted) else shifted
        probabilities = torch.exp(shifted, out=into)
        sums = all_reduce(torch.stack([of_target, probabilities.sum(-1), mean]), peers, mine=True)
        of_target, total, mean = sums.unbind()
        probabilities = torch.div(probabilities, total.unsqueeze(-1), out=into)
        normalizer = total.log()
        loss = normalizer - (1 - smoothing) * of_target - smoothing * mean
        lse = normalizer + highest
        if z_loss:
            loss += z_loss * lse.square()
        ctx.save_for_backward(probabilities, elsewhere, mine, counts, lse if z_loss else None)
        ctx.options, ctx.vocabulary, ctx.dtype = options, part * peers.size, logits.dtype
        return loss.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, elsewhere, mine, counts, lse = ctx.saved_tensors
        smoothing, z_loss, _ = ctx.options
        gradient = gradient.masked_fill(~counts, 0).unsqueeze(-1)
        scale = gradient if lse is None else gradient * (1 + 2 * z_loss * lse.unsqueeze(-1))
        result = probabilities * scale
        on_target = gradient.masked_fill(elsewhere.unsqueeze(-1), 0) * (smoothing - 1)
        result.scatter_add_(-1, mine.unsqueeze(-1), on_target)
        if smoothing:
            result.sub_(gradient * (smoothing / ctx.vocabulary))
        return result.to(ctx.dtype), None, None, None, None


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply
