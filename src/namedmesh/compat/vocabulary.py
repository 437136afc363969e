"""What legacy layers do with a sharded vocabulary: lookups with all options, and a loss that smooths over a rank's part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import all_reduce
from namedmesh.tensor_parallel.embedding import in_part, padding_in_part
from namedmesh.tensor_parallel.loss import Rows, rows_cross_entropy, target_problems

if TYPE_CHECKING:
    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import RankGroup


def lookup(
    ids: Tensor,
    weight: Tensor,
    first: int,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    by_index: bool = False,
) -> Tensor:
    """Return the vectors of the ids that are in this rank's part of the vocabulary, zeros for the others.

    Args:
        ids: any shape.
        weight: this rank's rows, as a plain tensor.
        first: the id of the first of them.
        padding_idx: the id, in the whole vocabulary, whose vector gets no gradient; not negative.
        scale_grad_by_freq: divide each vector's gradient by how often it was looked up.
        sparse: make the gradient a sparse tensor.
        by_index: index the weight instead of calling ``embedding``, whose gradient adds up in another order
            each time on some devices.

    Example:
        >>> part = torch.tensor([[1.0, 2.0], [3.0, 4.0]])    # of the ids 2 and 3
        >>> lookup(torch.tensor([0, 3, 2]), part, first=2).tolist()
        [[0.0, 0.0], [3.0, 4.0], [1.0, 2.0]]
    """
    rows = weight.shape[0]
    elsewhere, mine = in_part(ids, first, rows)
    padding = None if padding_idx is None else padding_in_part(padding_idx, first, rows)
    if scale_grad_by_freq:
        # Without the others, which would count as the id that stands in for them.
        vectors = F.embedding(mine[~elsewhere], weight, padding, scale_grad_by_freq=True, sparse=sparse)
        return vectors.new_zeros(*ids.shape, weight.shape[1]).index_put((~elsewhere,), vectors)
    vectors = weight[mine] if by_index else F.embedding(mine, weight, padding, sparse=sparse)
    return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


def shorten(
    weight: Tensor, ids: Tensor, max_norm: float, norm_type: float, group: RankGroup | None = None
) -> None:
    """Scale down, in the weight, those of some vectors whose norm is above a limit.

    Args:
        weight: ``(ids, features)``; changed in place, without a trace in the graph.
        ids: which vectors; one may come several times.
        max_norm: the limit.
        norm_type: which norm.
        group: the ranks that each have a part of the features, if they are sharded; each shortens its own part.

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
        if group is not None and group.size > 1:
            norms = _norm_of_parts(norms, norm_type, group)
        # The small number is that of nn.Embedding.
        weight[chosen] = torch.where(norms > max_norm, vectors * (max_norm / (norms + 1e-7)), vectors)


def _norm_of_parts(norms: Tensor, norm_type: float, group: RankGroup) -> Tensor:
    """Return the norms of whole vectors, from those of the group' parts of them."""
    if norm_type == math.inf:
        return all_reduce(norms, group, "max", mine=True)
    if norm_type == 0:  # the number of features that are not zero
        return all_reduce(norms, group, mine=True)
    return all_reduce(norms.pow(norm_type), group, mine=True).pow(1 / norm_type)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: RankGroup,
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """Return the cross entropy of logits whose vocabulary is sharded over the ranks, for each token.

    Without smoothing every rank gets the same, the loss over the whole vocabulary. With smoothing, the share
    of the probability that is taken off the target is spread over **this rank's part** of the vocabulary: ranks get
    different losses, whose mean is the loss smoothed over all of it but for the factor that normalizes it.

    Args:
        logits: ``(..., local part of the vocabulary)``; left as it is.
        target: ``(...)``, ids in the whole vocabulary, the same on every rank. For an id outside of it the
            loss is the logarithm of the softmax's denominator, and means nothing: mask it.
        group: the ranks over which the vocabulary is sharded.
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
    problems = target_problems(logits.shape, target)
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
    return rows_cross_entropy(logits, target, None, group, Rows(dtype, spread, over_part=True))
