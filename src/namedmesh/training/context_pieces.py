"""Causal attention of a part of a sequence to all of it, in pieces that need no mask: the part itself, and what it sees of the others.

Each piece is one call of the kernel, which does no more than it has to; they are merged by their log-sum-exp. Kept for the
backward are this rank's own keys and values; what it sees of the others' is sent again then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from namedmesh._torch import attention_backward, attention_with_lse
from namedmesh.tensor_parallel.collectives import RankGroup, all_to_all

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """Keys of other ranks, one after the other, and from which of this rank's queries on they are seen."""

    query: int
    keys: slice


class _Seen(NamedTuple):
    """What ranks see of each other: the first keys of each part. So many come from each rank, and so many go to each."""

    received: list[int]
    sent: list[int]
    pieces: list[_Piece]


def _seen(length: int, ranks: RankGroup, *, balanced: bool) -> _Seen:
    """In balanced order all queries see the first chunk of each rank before, and the second half both of each rank after."""
    before, after = (length // 2, length) if balanced else (length, 0)
    count_after = ranks.size - ranks.rank - 1
    received = [before] * ranks.rank + [0] + [after] * count_after
    sent = [after] * ranks.rank + [0] + [before] * count_after
    middle, end = before * ranks.rank, sum(received)
    pieces = [_Piece(0, slice(0, middle)), _Piece(before, slice(middle, end))]
    return _Seen(received, sent, [piece for piece in pieces if piece.keys.start < piece.keys.stop])


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  torch passes them by position
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ranks: RankGroup,
        seen: _Seen,
        scale: float | None,
    ) -> Tensor:
        output, sums = _attend(query, key, value, True, scale)
        both = _received(key, value, ranks, seen)
        for piece in seen.pieces:
            chunk, *merged = (each[:, :, piece.query :] for each in (query, output, sums))
            _merge(merged, _attend(chunk, *_keys_and_values(both[piece.keys]), False, scale))
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.ranks, ctx.seen, ctx.scale = ranks, seen, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        seen, known = ctx.seen, (gradient, query, output, sums)
        of_query, *of_own = _attend_backward(known, key, value, True, ctx.scale)
        both = _received(key, value, ctx.ranks, seen)
        for piece in seen.pieces:
            chunk = [each[:, :, piece.query :] for each in known]
            keys_and_values = _keys_and_values(both[piece.keys])
            more, *found = _attend_backward(chunk, *keys_and_values, False, ctx.scale)
            of_query[:, :, piece.query :].add_(more)
            # Gradients take the place of what they are of: the second exchange waits for the first, also where it sends nothing.
            for whole, some in zip(keys_and_values, found, strict=True):
                whole.copy_(some)
        of_own = [each.to(sums.dtype) for each in of_own]
        for part in all_to_all(both, ctx.ranks, seen.received, seen.sent).split(seen.sent):
            for own, some in zip(of_own, _keys_and_values(part), strict=True):
                own[:, :, : part.shape[0]].add_(some)
        of_key, of_value = (each.to(key.dtype) for each in of_own)
        return of_query, of_key, of_value, None, None, None


def _received(key: Tensor, value: Tensor, ranks: RankGroup, seen: _Seen) -> Tensor:
    """Return what a rank sees of the keys and values: the sequence, which of the two, batch, heads, width."""
    both = torch.stack([each.permute(2, 0, 1, 3) for each in (key, value)], 1)
    outgoing = torch.cat([both[:count] for count in seen.sent])
    return all_to_all(outgoing, ranks, seen.sent, seen.received)


def _keys_and_values(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of keys and values in the form that attention takes."""
    key, value = both.permute(1, 2, 3, 0, 4)
    return key, value


def _merge(merged: Sequence[Tensor], more: tuple[Tensor, Tensor]) -> None:
    """Add attention to further keys to a result and its log-sum-exp, in the type of the latter."""
    (result, sums), (other, other_sums) = merged, more
    weight = torch.sigmoid(other_sums - sums)[..., None]
    result.copy_(torch.lerp(result.to(sums.dtype), other.to(sums.dtype), weight))
    sums.copy_(torch.logaddexp(sums, other_sums))


def attend_in_pieces(
    query: Tensor, key: Tensor, value: Tensor, ranks: RankGroup, *, balanced: bool, scale: float | None
) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks."""
    seen = _seen(query.shape[2], ranks, balanced=balanced)
    result: Tensor = _InPieces.apply(query, key, value, ranks, seen, scale)  # type: ignore[no-untyped-call]
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
