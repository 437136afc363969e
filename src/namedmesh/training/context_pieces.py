"""Attention of a part of a sequence to all of it, in pieces that need no mask: what is before a chunk, and the chunk itself.

Each piece is one call of the kernel, which does no more than it has to; they are merged by their log-sum-exp. Kept for the
backward are this rank's own keys and values, which are gathered again then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from namedmesh._torch import attention_backward, attention_with_lse
from namedmesh.tensor_parallel.collectives import RankGroup, all_gather, all_to_all

if TYPE_CHECKING:
    from collections.abc import Sequence


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


class _Piece(NamedTuple):
    """Consecutive keys that a chunk of queries sees: from where to where, all of them or causally."""

    start: int
    stop: int
    causal: bool


def _pieces(turn: int, part: int, size: int, ranks: RankGroup, how: How) -> list[_Piece]:
    """Return what a chunk of queries sees of the keys that are gathered in one turn, in as few pieces as they lie in."""
    found: list[_Piece] = []
    for rank in range(ranks.size):
        chunk = chunks_of(rank, ranks.size, balanced=how.balanced)[turn]
        count = _seen(chunk, part, size, how)
        piece = _Piece(rank * size, rank * size + count, how.is_causal and chunk == part)
        if found and found[-1].stop == piece.start and not (found[-1].causal or piece.causal):
            found[-1] = found[-1]._replace(stop=piece.stop)
        elif count:
            found.append(piece)
    return found


def _seen(chunk: int, part: int, size: int, how: How) -> int:
    """Return how many of the keys in a chunk some query of another chunk sees."""
    if how.is_causal:
        return size if chunk <= part else 0
    return size if how.length is None else min(max(how.length - chunk * size, 0), size)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  torch passes them by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ranks: RankGroup, how: How
    ) -> Tensor:
        parts = chunks_of(ranks.rank, ranks.size, balanced=how.balanced)
        chunks = query.chunk(len(parts), 2)
        found: list[tuple[Tensor, Tensor] | None] = [None] * len(parts)
        for turn, own in enumerate(_chunks_of_both(key, value, len(parts))):
            both = all_gather(own, ranks, 0)
            for place, (part, chunk) in enumerate(zip(parts, chunks, strict=True)):
                for piece in _pieces(turn, part, chunk.shape[2], ranks, how):
                    more = _attend(chunk, *_keys_and_values(both, piece), piece.causal, how.scale)
                    found[place] = _merged(found[place], more)
        merged, sums = (torch.cat(each, 2) for each in zip(*filter(None, found), strict=True))
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.ranks, ctx.how = ranks, how
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        ranks, how = ctx.ranks, ctx.how
        parts = chunks_of(ranks.rank, ranks.size, balanced=how.balanced)
        known = [each.chunk(len(parts), 2) for each in (gradient, query, output, sums)]
        of_query = torch.zeros_like(query)
        of_own = []
        for turn, own in enumerate(_chunks_of_both(key, value, len(parts))):
            both = all_gather(own, ranks, 0)
            of_both = torch.zeros_like(both)
            for part, to_query, *chunk in zip(parts, of_query.chunk(len(parts), 2), *known, strict=True):
                for piece in _pieces(turn, part, to_query.shape[2], ranks, how):
                    found = _attend_backward(chunk, *_keys_and_values(both, piece), piece.causal, how.scale)
                    for whole, some in zip((to_query, *_keys_and_values(of_both, piece)), found, strict=True):
                        whole.add_(some)
            # gloo's reduce-scatter is an all-reduce of everything.
            of_own.append(all_to_all(of_both, ranks).unflatten(0, (ranks.size, -1)).sum(0))
        of_key, of_value = torch.cat(of_own).permute(1, 2, 3, 0, 4)
        return of_query, of_key, of_value, None, None


def _chunks_of_both(key: Tensor, value: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return this rank's chunks of keys and values: the sequence, which of the two, batch, heads, width.

    Gathered, each chunk with those in its place on the other ranks, they are in an order in which nearly all that some queries
    see lies together; what is before their own chunk they may see in any order.
    """
    return torch.stack([each.permute(2, 0, 1, 3) for each in (key, value)], 1).chunk(count)


def _keys_and_values(both: Tensor, piece: _Piece) -> tuple[Tensor, Tensor]:
    """Return views of some keys and values in the form that attention takes."""
    key, value = both[piece.start : piece.stop].permute(1, 2, 3, 0, 4)
    return key, value


def _merged(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of two pieces, of which each has its result and its log-sum-exp; in the type of the latter."""
    if one is None:
        return other
    both = torch.logaddexp(one[1], other[1])
    results = [result * (sums - both).exp()[..., None] for result, sums in (one, other)]
    return results[0] + results[1], both


def attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, ranks: RankGroup, how: How) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks."""
    result: Tensor = _InPieces.apply(query, key, value, ranks, how)  # type: ignore[no-untyped-call]
    return result


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
    known: Sequence[Tensor],
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
