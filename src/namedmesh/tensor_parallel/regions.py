"""Sending shards of different lengths from every rank of a group to every other one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import RankGroup, all_to_all, with_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def exchange(
    outgoing: Tensor,
    group: RankGroup,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> Tensor:
    """Send one shard of dim 0 to each rank, and join what is received in rank order.

    Args:
        outgoing: the shards to send, one after the other.
        group: the ranks.
        send: the lengths of the shards; equal ones by default.
        receive: the lengths of what each rank sends here; equal ones by default.

    Raises:
        ShapeError: the lengths are not one for each rank, or do not add up to the length of dim 0; or by
            default, the number of ranks does not divide it.
    """
    if torch.compiler.is_compiling():  # lengths that are computed are known when the graph runs
        return outgoing if group.size == 1 else _exchange(outgoing, group, (send, receive))
    sending, receiving = (None if sizes is None else check_lengths(sizes, group) for sizes in (send, receive))
    length = outgoing.shape[0]
    if sending is not None and sum(sending) != length:
        raise ShapeError(
            f"the lengths to send {sending} add up to {sum(sending)}, but dim 0 of shape {tuple(outgoing.shape)} has length "
            f"{length}; they must add up to it"
        )
    if sending is None and length % group.size:  # by default it is sharded into equal shards
        raise ShapeError(
            f"dim 0 of shape {tuple(outgoing.shape)} has length {length}, which cannot be split into "
            f"{group.size} equal shards; pass the length of each shard"
        )
    return outgoing if group.size == 1 else _exchange(outgoing, group, (sending, receiving))


def check_lengths(sizes: Sequence[int], group: RankGroup) -> list[int]:
    """Return the lengths of the ranks' shards as integers; a ShapeError where they are not one for each rank."""
    lengths = [int(size) for size in sizes]
    if len(lengths) != group.size or min(lengths) < 0:
        raise ShapeError(
            f"the sizes are {lengths}, for {group.size} ranks; pass one length for each rank, none negative"
        )
    return lengths


_Lengths = tuple["Sequence[int] | None", "Sequence[int] | None"]


def _exchange_lengths(outgoing: Tensor, group: RankGroup, lengths: _Lengths) -> Tensor:
    """Exchange shards of lengths to send and to receive."""
    return all_to_all(outgoing, group, *lengths)


def _exchange_back(gradient: Tensor, group: RankGroup, lengths: _Lengths) -> Tensor:
    """Apply the exchange itself, so that it has a derivative again."""
    return _exchange(gradient, group, lengths[::-1])


_exchange: Callable[..., Tensor] = with_backward(_exchange_lengths, _exchange_back)
