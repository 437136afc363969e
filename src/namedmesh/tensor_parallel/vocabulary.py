"""A vocabulary sharded over the ranks: looking vectors up in this rank's part, and the loss of logits that are sharded.

Part number r of equal parts of n entries holds the ids from r * n up to, and without, (r + 1) * n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch.autograd.function import once_differentiable

from namedmesh._torch import needs_functional_collectives
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import RankGroup


@dataclass(frozen=True)
class Lookup:
    """How vectors are looked up, in the terms of ``torch.nn.Embedding``; all of it means the whole embedding.

    Args:
        padding_idx: the id whose vector gets no gradient; not negative.
        max_norm: shorten, in the weight itself, each vector that is looked up and is longer than this.
        norm_type: which norm; 2 is the length.
        scale_grad_by_freq: divide each vector's gradient by how often it was looked up.
        sparse: make the gradient a sparse tensor.
        by_index: index the weight instead of calling ``embedding``, whose gradient adds up in another order
            each time on some devices.
    """

    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    by_index: bool = False


def lookup(ids: Tensor, weight: Tensor, first: int, how: Lookup | None = None) -> Tensor:
    """Return the vectors of the ids that are in this rank's part of the vocabulary, zeros for the others.

    Args:
        ids: any shape.
        weight: this rank's rows, as a plain tensor.
        first: the id of the first of them.
        how: how to look up.

    Example:
        >>> part = torch.tensor([[1.0, 2.0], [3.0, 4.0]])    # of the ids 2 and 3
        >>> lookup(torch.tensor([0, 3, 2]), part, first=2).tolist()
        [[0.0, 0.0], [3.0, 4.0], [1.0, 2.0]]
    """
    how = how or Lookup()
    rows = weight.shape[0]
    elsewhere, mine = in_part(ids, first, rows)
    padding = how.padding_idx
    padding = None if padding is None or not first <= padding < first + rows else padding - first
    if how.max_norm is not None:
        shorten(weight, mine[~elsewhere], how.max_norm, how.norm_type)
    if how.scale_grad_by_freq:
        # Without the others, which would count as the id that stands in for them.
        vectors = F.embedding(mine[~elsewhere], weight, padding, scale_grad_by_freq=True, sparse=how.sparse)
        return vectors.new_zeros(*ids.shape, weight.shape[1]).index_put((~elsewhere,), vectors)
    vectors = weight[mine] if how.by_index else F.embedding(mine, weight, padding, sparse=how.sparse)
    return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


def shorten(
    weight: Tensor, ids: Tensor, max_norm: float, norm_type: float, peers: RankGroup | None = None
) -> None:
    """Scale down, in the weight, those of some vectors whose norm is above a limit.

    Args:
        weight: ``(ids, features)``; changed in place, without a trace in the graph.
        ids: which vectors; one may come several times.
        max_norm: the limit.
        norm_type: which norm.
        peers: the ranks that each have a part of the features, if they are sharded; each shortens its own part.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
        >>> shorten(weight, torch.tensor([1]), max_norm=1.0, norm_type=2.0)
        >>> weight
        tensor([[3.0000, 4.0000],
                [0.6000, 0.8000]])
    """
    with torch.no_grad():
        chosen = ids.unique()
        vectors = weight[chosen]
        norms = torch.linalg.vector_norm(vectors, norm_type, dim=-1, keepdim=True)
        if peers is not None and peers.size > 1:
            norms = _norm_of_parts(norms, norm_type, peers)
        # The small number is that of nn.Embedding.
        weight[chosen] = torch.where(norms > max_norm, vectors * (max_norm / (norms + 1e-7)), vectors)


def _norm_of_parts(norms: Tensor, norm_type: float, peers: RankGroup) -> Tensor:
    """Return the norms of whole vectors, from those of the peers' parts of them."""
    if norm_type == math.inf:
        return all_reduce(norms, peers, "max", mine=True)
    if norm_type == 0:  # the number of features that are not zero
        return all_reduce(norms, peers, mine=True)
    return all_reduce(norms.pow(norm_type), peers, mine=True).pow(1 / norm_type)


def in_part(ids: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return which ids are outside this rank's part; and each id's place in it, with 0 standing in for those outside."""
    elsewhere = (ids < first) | (ids >= first + length)
    return elsewhere, (ids - first).masked_fill(elsewhere, 0)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    peers: RankGroup,
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """Return the cross entropy of logits whose vocabulary is sharded over the peers, for each token.

    Without smoothing every peer gets the same, the loss over the whole vocabulary. With smoothing, the share
    of the probability that is taken off the target is spread over **this rank's part** of the vocabulary: peers get
    different losses, whose mean is the loss smoothed over all of it but for the factor that normalizes it.

    Args:
        logits: ``(..., local part of the vocabulary)``; left as it is.
        target: ``(...)``, ids in the whole vocabulary, the same on every peer. For an id outside of it the
            loss is the logarithm of the softmax's denominator, and means nothing: mask it.
        peers: the ranks over which the vocabulary is sharded.
        label_smoothing: from 0 up to, and without, 1.
        dtype: what to compute in, and the type of the loss; None for that of the logits.

    Raises:
        ShapeError: the target has another shape than the logits without their last dim, the smoothing is out
            of range, or there is one entry only to spread it over.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel.collectives import RankGroup
        >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 3]), RankGroup(None))
        tensor([1.3863, 1.3863, 1.3863])
    """
    part = logits.shape[-1]
    problems = []
    if target.shape != logits.shape[:-1]:
        problems.append(
            f"the target has shape {tuple(target.shape)} and the logits {tuple(logits.shape)}; pass one id for "
            f"each row of logits: shape {tuple(logits.shape[:-1])}"
        )
    if not 0 <= label_smoothing < 1:
        problems.append(f"label_smoothing is {label_smoothing}; it can be 0, or between 0 and 1")
    elif label_smoothing and part == 1:
        problems.append(
            f"label_smoothing is {label_smoothing}, but a rank's part of the vocabulary has one entry only, and "
            "nothing to spread it over; cut the vocabulary over fewer ranks, or pass 0"
        )
    if problems:
        raise ShapeError(*problems)
    # Spread over the other entries of the part, as the dialects have it.
    spread = label_smoothing * part / (part - 1) if label_smoothing else 0.0
    dtype = dtype or logits.dtype
    if torch.promote_types(logits.dtype, dtype) is not dtype:
        logits = logits.to(dtype)
    return rows_cross_entropy(logits, target, None, peers, Rows(dtype, spread, over_part=True))


class Rows(NamedTuple):
    """What the cross entropy of each row is computed with.

    Args:
        dtype: the type.
        spread: what is taken off the target and spread evenly over all entries.
        z_loss: what the square of the logarithm of the softmax's denominator is multiplied by and added.
        over_part: spread over the entries of this rank only, which then has another loss than its peers.
    """

    dtype: torch.dtype
    spread: float = 0.0
    z_loss: float = 0.0
    over_part: bool = False


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(x))) - (1 - s) x[target] - s mean(x) + z log(sum(exp(x))) ** 2``, for each row x."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any, logits: Tensor, target: Tensor, counts: Tensor | None, peers: RankGroup, rows: Rows
    ) -> Tensor:
        part = logits.shape[-1]
        elsewhere, mine = in_part(target, peers.rank * part, part)
        highest = all_reduce(logits.amax(-1).to(rows.dtype), peers, "max", mine=True)
        shifted = logits - highest.unsqueeze(
            -1
        )  # in the larger of the two types, with no copy of the logits in it
        of_target = shifted.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        mean = shifted.mean(-1) if rows.spread else torch.zeros_like(of_target)
        # Into the memory of the difference, unless somebody may have kept that.
        total = torch.exp(shifted, out=None if needs_functional_collectives(shifted) else shifted).sum(-1)
        sums = [of_target, total] if rows.over_part else [of_target, total, mean / peers.size]
        of_target, total, *means = all_reduce(torch.stack(sums), peers, mine=True).unbind()
        mean = means[0] if means else mean
        normalizer = total.log()
        loss = normalizer - (1 - rows.spread) * of_target - rows.spread * mean
        lse = normalizer + highest
        if rows.z_loss:
            loss = loss + rows.z_loss * lse.square()
        ctx.save_for_backward(logits, lse, elsewhere, mine, counts)
        ctx.rows, ctx.entries = rows, part if rows.over_part else part * peers.size
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
"""The cross entropy of each row of logits, with its target, whether it counts (None: all do), the peers, and how."""
