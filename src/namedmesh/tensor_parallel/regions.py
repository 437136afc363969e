"""Ways between regions where every rank has the whole tensor and regions where each has a shard.

The simple ones stand beside the collectives: ``sum_backward``, ``sum_forward``, ``split``, ``gather``,
``gather_parts`` and ``sum_scatter``. Here is what legacy code does beyond them, with shards of different lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import all_gather, all_to_all, reduce_scatter, with_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import RankGroup


def gather_uneven(shard: Tensor, peers: RankGroup, sizes: Sequence[int], *, parts: bool = True) -> Tensor:
    """Join shards of different lengths along dim 0.

    Args:
        shard: this rank's, of length ``sizes[peers.rank]``.
        peers: the ranks.
        sizes: the length of each peer's shard, the same on every peer.
        parts: each peer makes a part of the gradient, so that they are summed. Without it every peer makes
            the whole gradient, which is then only split.

    Raises:
        ShapeError: the sizes are not one for each peer, or mine is not the length of this rank's shard.
    """
    lengths = _lengths(sizes, peers)
    if shard.shape[0] != lengths[peers.rank]:
        raise ShapeError(
            f"rank {peers.rank} has a shard of length {shard.shape[0]} (shape {tuple(shard.shape)}), but the "
            f"sizes {lengths} say {lengths[peers.rank]}; pass the length of every rank's shard, in rank order"
        )
    join = _gather_uneven_parts if parts else _gather_uneven
    return shard if peers.size == 1 else join(shard, peers, lengths)


def sum_scatter_uneven(partial: Tensor, peers: RankGroup, sizes: Sequence[int]) -> Tensor:
    """Sum over the peers, each keeping a shard of dim 0, of different lengths; the gradient is gathered.

    Args:
        partial: this rank's part of the sum.
        peers: the ranks.
        sizes: the length of the shard that each peer keeps, the same on every peer.

    Raises:
        ShapeError: the sizes are not one for each peer, or do not add up to the length of dim 0.
    """
    lengths = _lengths(sizes, peers)
    _check_sum(partial, lengths, "the sizes")
    return partial if peers.size == 1 else _sum_scatter_uneven(partial, peers, lengths)


def exchange(
    outgoing: Tensor,
    peers: RankGroup,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> Tensor:
    """Send one shard of dim 0 to each peer, and join what is received in rank order.

    Args:
        outgoing: the shards to send, one after the other.
        peers: the ranks.
        send: the lengths of the shards; equal ones by default.
        receive: the lengths of what each peer sends here; equal ones by default.

    Raises:
        ShapeError: the lengths are not one for each peer, or do not add up to the length of dim 0; or by
            default, the number of peers does not divide it.
    """
    if torch.compiler.is_compiling():  # lengths that are computed are known when the graph runs
        return outgoing if peers.size == 1 else _exchange(outgoing, peers, (send, receive))
    sending, receiving = (None if sizes is None else _lengths(sizes, peers) for sizes in (send, receive))
    length = outgoing.shape[0]
    if sending is not None:
        _check_sum(outgoing, sending, "the lengths to send")
    elif length % peers.size:  # by default it is sharded into equal shards
        raise ShapeError(
            f"dim 0 of shape {tuple(outgoing.shape)} has length {length}, which cannot be split into "
            f"{peers.size} equal shards; pass the length of each shard"
        )
    return outgoing if peers.size == 1 else _exchange(outgoing, peers, (sending, receiving))


def _lengths(sizes: Sequence[int], peers: RankGroup) -> list[int]:
    lengths = [int(size) for size in sizes]
    if len(lengths) != peers.size or min(lengths) < 0:
        raise ShapeError(
            f"the sizes are {lengths}, for {peers.size} ranks; pass one length for each rank, none negative"
        )
    return lengths


def _check_sum(whole: Tensor, lengths: list[int], what: str) -> None:
    if whole.shape[0] != sum(lengths):
        raise ShapeError(
            f"{what} {lengths} add up to {sum(lengths)}, but dim 0 of shape {tuple(whole.shape)} has length "
            f"{whole.shape[0]}; they must add up to it"
        )


def _join(shard: Tensor, peers: RankGroup, lengths: list[int]) -> Tensor:
    """Gather all shards. They travel at one common length: not every backend takes others."""
    longest = max(lengths)
    padded = all_gather(_padded(shard, longest), peers, 0)
    return torch.cat([padded.narrow(0, i * longest, length) for i, length in enumerate(lengths)])


def _shard_of_mine(whole: Tensor, peers: RankGroup, lengths: list[int]) -> Tensor:
    mine: Tensor = whole.split(lengths)[peers.rank]
    return mine.contiguous()


def _sum_and_shard(whole: Tensor, peers: RankGroup, lengths: list[int]) -> Tensor:
    """Return this rank's shard of the sum."""
    longest = max(lengths)
    padded = torch.cat([_padded(shard, longest) for shard in whole.split(lengths)])
    return reduce_scatter(padded, peers, 0).narrow(0, 0, lengths[peers.rank]).contiguous()


def _padded(shard: Tensor, length: int) -> Tensor:
    missing = length - shard.shape[0]
    return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard


_Lengths = tuple["Sequence[int] | None", "Sequence[int] | None"]


def _exchange_lengths(outgoing: Tensor, peers: RankGroup, lengths: _Lengths) -> Tensor:
    """Exchange shards of lengths to send and to receive."""
    return all_to_all(outgoing, peers, *lengths)


def _exchange_back(gradient: Tensor, peers: RankGroup, lengths: _Lengths) -> Tensor:
    """Apply the exchange itself, so that it has a derivative again."""
    return _exchange(gradient, peers, lengths[::-1])


_gather_uneven = with_backward(_join, _shard_of_mine)
_gather_uneven_parts = with_backward(_join, _sum_and_shard)
_sum_scatter_uneven = with_backward(_sum_and_shard, _join)
_exchange: Callable[..., Tensor] = with_backward(_exchange_lengths, _exchange_back)
