"""The explicit collectives of tensor parallelism, on local tensors.

Each differentiable one has its partner as its backward: what is summed on the way forward is handed to
everybody on the way back, what is gathered is cut, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._torch import all_gather_single, reduce_scatter_single, settled
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class Peers:
    """The ranks that share a tensor-parallel module: their process group, how many, and which one is mine.

    Args:
        source: the one-dimensional mesh of those ranks, their process group, or None for this process alone,
            whose collectives then do nothing.

    Example:
        >>> alone = Peers(None)
        >>> alone.size, alone.rank
        (1, 0)
    """

    source: DeviceMesh | dist.ProcessGroup | None
    group: dist.ProcessGroup | None = field(init=False, repr=False, compare=False)
    size: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        # Accessors of a mesh cost microseconds each: too much for every forward.
        source = self.source
        if isinstance(source, DeviceMesh):
            group, size, rank = source.get_group(), source.size(), source.get_local_rank()
        elif source is None:
            group, size, rank = None, 1, 0
        else:
            group, size, rank = source, source.size(), source.rank()
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "rank", rank)

    def __deepcopy__(self, memo: dict[int, object]) -> Peers:
        # Immutable, and a process group cannot be copied.
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if isinstance(self.source, dist.ProcessGroup):
            raise MeshError(
                f"a layer over a process group of {self.size} ranks cannot be pickled: the group lives in this "
                "process only; save the layer's state_dict(), and load it into a layer made where it is needed"
            )
        return Peers, (self.source,)


@dataclass(frozen=True)
class Pending:
    """A tensor that is being filled by a collective."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The tensor, once it is filled."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def start_all_reduce(tensor: Tensor, peers: Peers) -> Pending:
    """Start summing a contiguous tensor over the peers, in place."""
    if peers.size == 1:
        return Pending(tensor, None)
    return Pending(tensor, dist.all_reduce(tensor, group=peers.group, async_op=True))


def all_reduce(
    tensor: Tensor, peers: Peers, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Sum a contiguous tensor over the peers (or combine it otherwise), in place."""
    if peers.size > 1:
        dist.all_reduce(tensor, operation, group=peers.group)
    return tensor


def start_all_gather(local: Tensor, peers: Peers, dim: int) -> Pending:
    """Start joining every peer's tensor, one after the other along ``dim``."""
    if peers.size == 1:
        return Pending(local, None)
    # Collectives know dim 0 only.
    first = local.movedim(dim, 0).contiguous()
    full = first.new_empty((first.shape[0] * peers.size, *first.shape[1:]))
    work = all_gather_single(full, first, peers.group)
    return Pending(full.movedim(0, dim), work)


def all_gather(local: Tensor, peers: Peers, dim: int) -> Tensor:
    """Every peer's tensor, one after the other along ``dim``; contiguous."""
    return start_all_gather(local, peers, dim).wait().contiguous()


def start_reduce_scatter(full: Tensor, peers: Peers, dim: int) -> Pending:
    """Start summing over the peers; each keeps its piece of ``dim``, which must be divisible."""
    if peers.size == 1:
        return Pending(full, None)
    first = full.movedim(dim, 0).contiguous()
    piece = first.new_empty((first.shape[0] // peers.size, *first.shape[1:]))
    work = reduce_scatter_single(piece, first, peers.group)
    return Pending(piece.movedim(0, dim), work)


def reduce_scatter(full: Tensor, peers: Peers, dim: int) -> Tensor:
    """The sum over the peers, of which each keeps its piece of ``dim``; contiguous."""
    return start_reduce_scatter(full, peers, dim).wait().contiguous()


def my_piece(full: Tensor, peers: Peers, dim: int) -> Tensor:
    """My piece of ``dim`` of a tensor that every peer has; contiguous."""
    width = full.shape[dim] // peers.size
    return full.narrow(dim, peers.rank * width, width).contiguous()


class _SumForward(torch.autograd.Function):
    """Sum over the peers; the gradient, the same on every peer, passes through."""

    @staticmethod
    def forward(_ctx: Any, partial: Tensor, peers: Peers) -> Tensor:
        """Sum a copy: the caller may still need its own part."""
        return all_reduce(settled(partial).clone(memory_format=torch.contiguous_format), peers)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Each part counts once in the sum."""
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """Pass a tensor that every peer has; sum its gradient, of which each peer makes a part."""

    @staticmethod
    def forward(ctx: Any, replicated: Tensor, peers: Peers) -> Tensor:
        """A fresh view, so that autograd does not write on the caller's tensor."""
        ctx.peers = peers
        replicated = settled(replicated)
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum a copy: another consumer may hold the same gradient."""
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.peers), None


class _Gather(torch.autograd.Function):
    """Join the peers' pieces along a dim; each gets back the gradient of its own piece."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, peers: Peers, dim: int) -> Tensor:
        """Every peer gets the whole tensor."""
        ctx.peers, ctx.dim = peers, dim
        return all_gather(settled(piece), peers, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The whole gradient is the same on every peer: cut it."""
        return my_piece(gradient, ctx.peers, ctx.dim), None, None


class _Split(torch.autograd.Function):
    """Keep my piece of a tensor that every peer has; the gradient is joined again."""

    @staticmethod
    def forward(ctx: Any, replicated: Tensor, peers: Peers, dim: int) -> Tensor:
        """No communication: everybody cuts for itself."""
        ctx.peers, ctx.dim = peers, dim
        return my_piece(settled(replicated), peers, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Everybody gets the whole gradient."""
        return all_gather(gradient, ctx.peers, ctx.dim), None, None


class _SumScatter(torch.autograd.Function):
    """Sum over the peers, each keeping its piece of a dim; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, peers: Peers, dim: int) -> Tensor:
        """Each peer gets its piece of the sum."""
        ctx.peers, ctx.dim = peers, dim
        return reduce_scatter(settled(partial), peers, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Each part counts once in each piece of the sum."""
        return all_gather(gradient, ctx.peers, ctx.dim), None, None


# The functions to call: torch leaves ``apply`` without types.
sum_forward: Callable[[Tensor, Peers], Tensor] = _SumForward.apply
sum_backward: Callable[[Tensor, Peers], Tensor] = _SumBackward.apply
gather: Callable[[Tensor, Peers, int], Tensor] = _Gather.apply
split: Callable[[Tensor, Peers, int], Tensor] = _Split.apply
sum_scatter: Callable[[Tensor, Peers, int], Tensor] = _SumScatter.apply
