"""Ways between regions where every rank has the whole tensor and regions where each has a shard.

The five simple ones stand beside the collectives: ``sum_backward``, ``sum_forward``, ``split``, ``gather`` and
``sum_scatter``. Here is what legacy code does beyond them: it gathers for ranks that each make a part of the
gradient, cuts into shards of different lengths, and exchanges shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from namedmesh._torch import synchronous
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import all_gather, all_to_all, reduce_scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import RankGroup


class _GatherParts(torch.autograd.Function):
    """Join the peers' shards along a dim; each gets back its shard of the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, peers: RankGroup, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return all_gather(synchronous(shard), peers, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient, ctx.peers, ctx.dim), None, None


def gather_parts(shard: Tensor, peers: RankGroup, dim: int) -> Tensor:
    """Join the peers' shards along a dim, for ranks that go on differently: each gradient is a part of the whole."""
    return shard if peers.size == 1 else _gather_parts(shard, peers, dim)


def gather_uneven(shard: Tensor, peers: RankGroup, sizes: Sequence[int], *, parts: bool = True) -> Tensor:
    """Join shards of different lengths along dim 0.

    Args:
        shard: mine, of length ``sizes[peers.rank]``.
        peers: the ranks.
        sizes: the length of each peer's shard, the same on every peer.
        parts: each peer makes a part of the gradient, so that they are summed. Without it every peer makes
            the whole gradient, which is then only cut.

    Raises:
        ShapeError: the sizes are not one for each peer, or mine is not the length of my shard.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel.collectives import RankGroup
        >>> gather_uneven(torch.arange(3), RankGroup(None), [3])
        tensor([0, 1, 2])
    """
    lengths = _lengths(sizes, peers)
    if shard.shape[0] != lengths[peers.rank]:
        raise ShapeError(
            f"rank {peers.rank} has a shard of length {shard.shape[0]} (shape {tuple(shard.shape)}), but the "
            f"sizes {lengths} say {lengths[peers.rank]}; pass the length of every rank's shard, in rank order"
        )
    return shard if peers.size == 1 else _gather_uneven(shard, peers, lengths, parts)


def sum_scatter_uneven(partial: Tensor, peers: RankGroup, sizes: Sequence[int]) -> Tensor:
    """Sum over the peers, each keeping a shard of dim 0, of different lengths; the gradient is gathered.

    Args:
        partial: my part of the sum.
        peers: the ranks.
        sizes: the length of the shard that each peer keeps, the same on every peer.

    Raises:
        ShapeError: the sizes are not one for each peer, or do not add up to the length of dim 0.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel.collectives import RankGroup
        >>> sum_scatter_uneven(torch.arange(3), RankGroup(None), [3])
        tensor([0, 1, 2])
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
    """Every peer sends one shard of dim 0 to each peer, and joins what it receives in rank order.

    Args:
        outgoing: the shards to send, one after the other.
        peers: the ranks.
        send: the lengths of the shards; equal ones by default.
        receive: the lengths of what each peer sends here; equal ones by default.

    Raises:
        ShapeError: the lengths are not one for each peer, or do not add up to the length of dim 0; or by
            default, the number of peers does not divide it.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel.collectives import RankGroup
        >>> exchange(torch.arange(3), RankGroup(None))
        tensor([0, 1, 2])
    """
    if torch.compiler.is_compiling():  # lengths that are computed are known when the graph runs
        return outgoing if peers.size == 1 else _exchange(outgoing, peers, send, receive)
    sending, receiving = (None if sizes is None else _lengths(sizes, peers) for sizes in (send, receive))
    length = outgoing.shape[0]
    if sending is not None:
        _check_sum(outgoing, sending, "the lengths to send")
    elif length % peers.size:  # by default it is cut into equal shards
        raise ShapeError(
            f"dim 0 of shape {tuple(outgoing.shape)} has length {length}, which cannot be cut into "
            f"{peers.size} equal shards; pass the length of each shard"
        )
    return outgoing if peers.size == 1 else _exchange(outgoing, peers, sending, receiving)


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
    """All shards. They travel at one common length: not every backend takes others."""
    longest = max(lengths)
    padded = all_gather(_padded(shard, longest), peers, 0)
    return torch.cat([padded.narrow(0, i * longest, length) for i, length in enumerate(lengths)])


def _cut(whole: Tensor, peers: RankGroup, lengths: list[int]) -> Tensor:
    mine: Tensor = whole.split(lengths)[peers.rank]
    return mine.contiguous()


def _sum_and_cut(whole: Tensor, peers: RankGroup, lengths: list[int]) -> Tensor:
    """My shard of the sum."""
    longest = max(lengths)
    padded = torch.cat([_padded(shard, longest) for shard in whole.split(lengths)])
    return reduce_scatter(padded, peers, 0).narrow(0, 0, lengths[peers.rank]).contiguous()


def _padded(shard: Tensor, length: int) -> Tensor:
    missing = length - shard.shape[0]
    return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard


class _GatherUneven(torch.autograd.Function):
    """Join shards of different lengths along dim 0."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, peers: RankGroup, lengths: list[int], parts: bool) -> Tensor:
        ctx.peers, ctx.lengths, ctx.parts = peers, lengths, parts
        return _join(synchronous(shard), peers, lengths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        take = _sum_and_cut if ctx.parts else _cut
        return take(gradient, ctx.peers, ctx.lengths), None, None, None


class _SumScatterUneven(torch.autograd.Function):
    """Sum over the peers, each keeping a shard of its own length."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, peers: RankGroup, lengths: list[int]) -> Tensor:
        ctx.peers, ctx.lengths = peers, lengths
        return _sum_and_cut(synchronous(partial), peers, lengths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _join(gradient, ctx.peers, ctx.lengths), None, None


class _Exchange(torch.autograd.Function):
    """Send a shard to each peer; on the way back every gradient returns to where its shard came from."""

    @staticmethod
    def forward(
        ctx: Any, outgoing: Tensor, peers: RankGroup, send: list[int] | None, receive: list[int] | None
    ) -> Tensor:
        ctx.peers, ctx.send, ctx.receive = peers, send, receive
        return all_to_all(synchronous(outgoing), peers, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # An exchange itself, so that it has a derivative again.
        return _exchange(gradient, ctx.peers, ctx.receive, ctx.send), None, None, None


_gather_parts: Callable[[Tensor, RankGroup, int], Tensor] = _GatherParts.apply
_gather_uneven: Callable[[Tensor, RankGroup, list[int], bool], Tensor] = _GatherUneven.apply
_sum_scatter_uneven: Callable[[Tensor, RankGroup, list[int]], Tensor] = _SumScatterUneven.apply
_exchange: Callable[[Tensor, RankGroup, Sequence[int] | None, Sequence[int] | None], Tensor] = _Exchange.apply
