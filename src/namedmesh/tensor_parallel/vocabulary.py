"""A vocabulary cut over the ranks: looking vectors up in my part, and the loss of logits that are cut.

Part number r of equal parts of n entries holds the ids from r * n up to, and without, (r + 1) * n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch.autograd.function import once_differentiable

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import Peers


def lookup(
    ids: Tensor, weight: Tensor, first: int, *, padding_idx: int | None = None, by_index: bool = False
) -> Tensor:
    """The vectors of the ids that are in my part of the vocabulary, zeros for the others.

    Args:
        ids: any shape.
        weight: my rows, as a plain tensor.
        first: the id of the first of them.
        padding_idx: the id, in the whole vocabulary, whose vector gets no gradient.
        by_index: index the weight instead of calling ``embedding``, whose gradient adds up in another order
            each time on some devices.

    Example:
        >>> import torch
        >>> part = torch.tensor([[1.0, 2.0], [3.0, 4.0]])    # of the ids 2 and 3
        >>> lookup(torch.tensor([0, 3, 2]), part, first=2).tolist()
        [[0.0, 0.0], [3.0, 4.0], [1.0, 2.0]]
    """
    elsewhere, mine = _in_part(ids, first, weight.shape[0])
    if by_index:
        vectors = weight[mine]
    else:
        inside = padding_idx is not None and first <= padding_idx < first + weight.shape[0]
        vectors = F.embedding(
            mine, weight, padding_idx - first if inside and padding_idx is not None else None
        )
    return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


def _in_part(ids: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Which ids are outside my part; and each id's place in it, with 0 standing in for those outside."""
    elsewhere = (ids < first) | (ids >= first + length)
    return elsewhere, (ids - first).masked_fill(elsewhere, 0)


def cross_entropy(logits: Tensor, target: Tensor, peers: Peers, label_smoothing: float = 0.0) -> Tensor:
    """The cross entropy of logits whose vocabulary is cut over the peers, for each token; in float32.

    Without smoothing every peer gets the same, the loss over the whole vocabulary. With smoothing, the share
    of the probability that is taken off the target is spread over **my part** of the vocabulary: peers get
    different losses, whose mean is the loss smoothed over all of it but for the factor that normalises it.

    Args:
        logits: ``(..., my part of the vocabulary)``; left as it is.
        target: ``(...)``, ids in the whole vocabulary, the same on every peer. For an id outside of it the
            loss is the logarithm of the softmax's denominator, and means nothing: mask it.
        peers: the ranks over which the vocabulary is cut.
        label_smoothing: from 0 up to, and without, 1.

    Raises:
        ShapeError: the target has another shape than the logits without their last dim, the smoothing is out
            of range, or there is one entry only to spread it over.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel.collectives import Peers
        >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 3]), Peers(None))
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
    return _cross_entropy(logits, target, peers, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(x))) - x[target]``, from three sums over the peers, of which two travel together."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, peers: Peers, label_smoothing: float) -> Tensor:
        part = logits.shape[-1]
        elsewhere, mine = _in_part(target, peers.rank * part, part)
        numbers = logits.float()
        highest = all_reduce(numbers.amax(-1), peers, dist.ReduceOp.MAX)
        shifted = numbers - highest.unsqueeze(-1)
        of_target = shifted.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0)
        mean = shifted.mean(-1) if label_smoothing else None
        probabilities = shifted.exp_()  # in place: the difference is ours
        sums = all_reduce(torch.stack([of_target, probabilities.sum(-1)]), peers)
        of_target, total = sums[0], sums[1]
        normaliser = total.log()
        loss = normaliser - of_target
        probabilities.div_(total.unsqueeze(-1))
        spread = label_smoothing * part / (part - 1) if label_smoothing else 0.0
        if mean is not None:
            # The logarithm of a probability is the shifted logit less the normaliser; of a probability that
            # is too small for its type it would be minus infinity.
            loss = (1 - spread) * loss - spread * (mean - normaliser)
        ctx.save_for_backward(probabilities, elsewhere, mine)
        ctx.spread, ctx.dtype = spread, logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, elsewhere, mine = ctx.saved_tensors
        gradient = gradient.unsqueeze(-1)
        result = probabilities * gradient
        on_target = gradient.masked_fill(elsewhere.unsqueeze(-1), 0) * (ctx.spread - 1)
        result.scatter_add_(-1, mine.unsqueeze(-1), on_target)
        if ctx.spread:
            result.sub_(gradient * (ctx.spread / probabilities.shape[-1]))
        return result.to(ctx.dtype), None, None, None


_cross_entropy: Callable[[Tensor, Tensor, Peers, float], Tensor] = _CrossEntropy.apply
