"""Attention of a part of a sequence to all of it, in pieces that need no mask: what is before a chunk, and the chunk itself.

Each piece is one call of the kernel, which does no more than it has to; two of them are merged by their log-sum-exp. Kept for
the backward are this rank's own keys and values, which are gathered again then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from namedmesh._torch import attention_backward, attention_with_lse
from namedmesh.tensor_parallel.collectives import RankGroup, all_gather, reduce_scatter

if TYPE_CHECKING:
    from collections.abc import Iterator


class How(NamedTuple):
    """What decides which keys a query sees."""

    is_causal: bool
    balanced: bool
    length: int | None
    scale: float | None


def chunks_of(rank: int, size: int, *, balanced: bool) -> tuple[int, ...]:
    """Return which chunks of the whole sequence a rank has."""
    return (rank, 2 * size - 1 - rank) if balanced else (rank,)


def whole_order(joined: Tensor, size: int, *, balanced: bool) -> Tensor:
    """Return the sequence in its own order, from the parts of all ranks one after the other."""
    places = [part for rank in range(size) for part in chunks_of(rank, size, balanced=balanced)]
    return _ordered(joined, [places.index(part) for part in range(len(places))])


def rank_order(whole: Tensor, size: int, *, balanced: bool) -> Tensor:
    """Return the inverse of :func:`whole_order`."""
    return _ordered(
        whole, [part for rank in range(size) for part in chunks_of(rank, size, balanced=balanced)]
    )


def _ordered(tensor: Tensor, order: list[int]) -> Tensor:
    """Return chunks of the sequence, by their numbers."""
    if order == sorted(order):
        return tensor
    chunks = tensor.chunk(len(order), dim=2)
    return torch.cat([chunks[number] for number in order], dim=2)


def _pieces(query: Tensor, ranks: RankGroup, how: How) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Yield for each chunk of this rank's queries: where it is, and where the keys are that it sees, causally or all."""
    mine = chunks_of(ranks.rank, ranks.size, balanced=how.balanced)
    size = query.shape[2] // len(mine)
    for place, part in enumerate(mine):
        here, first = slice(place * size, (place + 1) * size), part * size
        if not how.is_causal:
            yield here, [(slice(0, how.length), False)]
        elif first == 0:
            yield here, [(slice(0, size), True)]
        else:
            yield here, [(slice(0, first), False), (slice(first, first + size), True)]


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  torch passes them by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ranks: RankGroup, how: How
    ) -> Tensor:
        keys, values = _gathered(torch.stack((key, value)), ranks, how)
        results, sums = [], []
        for here, pieces in _pieces(query, ranks, how):
            chunk = query[:, :, here]
            found = [
                _attend(chunk, keys[:, :, seen], values[:, :, seen], causal, how.scale)
                for seen, causal in pieces
            ]
            result, total = found[0]
            for other, more in found[1:]:
                both = torch.logaddexp(total, more)
                weights = ((each - both).exp()[..., None].to(query.dtype) for each in (total, more))
                result = result * next(weights) + other * next(weights)
                total = both
            results.append(result)
            sums.append(total)
        output, sums_of_exponentials = torch.cat(results, 2), torch.cat(sums, 2)
        ctx.save_for_backward(query, key, value, output, sums_of_exponentials)
        ctx.ranks, ctx.how = ranks, how
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        ranks, how = ctx.ranks, ctx.how
        both = _gathered(torch.stack((key, value)), ranks, how)
        of_query, of_both = torch.zeros_like(query), torch.zeros_like(both)
        for here, pieces in _pieces(query, ranks, how):
            known = (gradient[:, :, here], query[:, :, here], output[:, :, here], sums[:, :, here])
            for seen, causal in pieces:
                found = _attend_backward(known, both[0, :, :, seen], both[1, :, :, seen], causal, how.scale)
                of_query[:, :, here] += found[0]
                of_both[0, :, :, seen] += found[1]
                of_both[1, :, :, seen] += found[2]
        of_key, of_value = _scattered(of_both, ranks, how)
        return of_query, of_key, of_value, None, None


def attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, ranks: RankGroup, how: How) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks."""
    result: Tensor = _InPieces.apply(query, key, value, ranks, how)  # type: ignore[no-untyped-call]
    return result


def _gathered(both: Tensor, ranks: RankGroup, how: How) -> Tensor:
    """Return keys and values of the whole sequence in its own order, from those of each rank, in one collective."""
    parts = all_gather(both[None], ranks, 0)
    places: dict[int, Tensor] = {}
    for rank in range(ranks.size):
        mine = chunks_of(rank, ranks.size, balanced=how.balanced)
        places |= dict(zip(mine, parts[rank].chunk(len(mine), 3), strict=True))
    return torch.cat([places[part] for part in range(len(places))], 3)


def _scattered(both: Tensor, ranks: RankGroup, how: How) -> Tensor:
    """Return the sums over the ranks of the gradients for this rank's part: the inverse of :func:`_gathered`."""
    mine = [chunks_of(rank, ranks.size, balanced=how.balanced) for rank in range(ranks.size)]
    chunks = both.chunk(len(mine) * len(mine[0]), 3)
    parts = torch.stack([torch.cat([chunks[part] for part in parts], 3) for parts in mine])
    return reduce_scatter(parts, ranks, 0)[0]


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """Put the heads that share keys one behind the other, as more queries of one head."""
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups)).flatten(2, 3)


def _ungrouped(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.unflatten(2, (groups, -1)).flatten(1, 2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    if causal and groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        groups = 1
    result, sums = attention_with_lse(_grouped(query, groups), key, value, causal, scale)
    return _ungrouped(result, groups), _ungrouped(sums, groups)


def _attend_backward(
    known: tuple[Tensor, Tensor, Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = repeated = known[1].shape[1] // key.shape[1]
    if causal and groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        groups = 1
    gradient, query, output, sums = (_grouped(each, groups) for each in known)
    of_query, of_key, of_value = attention_backward(
        (gradient, query, key, value, output, sums), causal, scale
    )
    if causal and repeated > 1:
        of_key, of_value = (each.unflatten(1, (-1, repeated)).sum(2) for each in (of_key, of_value))
    return _ungrouped(of_query, groups), of_key, of_value
