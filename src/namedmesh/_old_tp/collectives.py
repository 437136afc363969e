"""The explicit collectives of tensor parallelism, on local tensors.

Each differentiable one has its partner as its backward: what is summed on the way forward is passed through
on the way back, what is gathered is split, and so on.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from namedmesh._torch import (
    all_gather_single,
    as_non_view,
    fix_dropped_gradient_2_11,
    functional_collective,
    local_parameter,
    needs_functional_collectives,
    reduce_scatter_single,
    synchronous,
    wait_tensor,
)
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share a tensor-parallel module: their process group, how many, and which one is mine.

    Args:
        source: the one-dimensional mesh of those ranks, their process group, or None for this process alone,
            whose collectives then do nothing.
    """

    source: DeviceMesh | dist.ProcessGroup | None
    size: int = field(init=False)
    rank: int = field(init=False)
    # Weak: a layer must not keep a group alive after torch destroyed it.
    _reference: Callable[[], dist.ProcessGroup | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Accessors of a mesh cost microseconds each: too much for every forward.
        source = self.source
        group = source.get_group() if isinstance(source, DeviceMesh) else source
        if source is not None and group is source:
            object.__setattr__(self, "source", weakref.ref(group))
        # The compiler of torch 2.8 knows no get_local_rank.
        object.__setattr__(self, "size", 1 if group is None else group.size())
        object.__setattr__(self, "rank", 0 if group is None else group.rank())
        object.__setattr__(self, "_reference", _nothing if group is None else weakref.ref(group))

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group, or None for this process alone.

        Raises:
            MeshError: it was destroyed, and no group has been created in its place.
        """
        group = self._reference()
        if group is None and isinstance(self.source, DeviceMesh):
            # A mesh that is made again gets groups of the same names.
            with suppress(RuntimeError, ValueError):
                group = self.source.get_group()
                object.__setattr__(self, "_reference", weakref.ref(group))
        if group is None and self.source is not None:
            raise MeshError(
                f"the process group of {self.size} ranks that this layer works on was destroyed; make the layer again "
                "on a mesh that is open"
            )
        return group

    def __deepcopy__(self, memo: dict[int, object]) -> RankGroup:
        # Immutable, and a process group cannot be copied.
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if self.source is not None and not isinstance(self.source, DeviceMesh):
            raise MeshError(
                f"a layer over a process group of {self.size} ranks cannot be pickled: the group lives in this "
                "process only; save the layer's state_dict(), and load it into a layer made where it is needed"
            )
        return RankGroup, (self.source,)


def _nothing() -> None:
    """Stand in for the group of one rank alone, which needs none."""


ALONE = RankGroup(None)
"""One rank, with nobody to communicate with."""


class Pending(NamedTuple):
    """A tensor that is being filled by a collective."""

    tensor: Tensor
    finish: Callable[[Tensor], Tensor] | None = None

    def wait(self) -> Tensor:
        """Return the tensor, once it is filled."""
        return self.tensor if self.finish is None else self.finish(self.tensor)


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def start_all_reduce(
    tensor: Tensor, group: RankGroup, operation: str = "sum", *, mine: bool = False
) -> Pending:
    """Start summing a tensor over the ranks, or combining the parts by ``"max"``.

    ``mine``: the caller made the tensor and gave it to nobody, so that the sum may be written into it. It is not where
    somebody sees every operation, and may have kept the tensor.
    """
    if group.size == 1:
        return Pending(tensor)
    sent = contiguous_resolved(tensor)
    if needs_functional_collectives(sent):
        started = functional_collective("all_reduce", sent, operation, group=group.process_group)
        return Pending(started, wait_tensor)
    sent = sent if mine or sent is not tensor else tensor.clone()
    work = dist.all_reduce(sent, _OPERATIONS[operation], group.process_group, async_op=True)
    return Pending(sent, _after(work))


def all_reduce(tensor: Tensor, group: RankGroup, operation: str = "sum", *, mine: bool = False) -> Tensor:
    """Return the sum of a tensor over the ranks; the arguments are those of :func:`start_all_reduce`."""
    if group.size == 1 or needs_functional_collectives(tensor):
        return start_all_reduce(tensor, group, operation, mine=mine).wait()
    sent = contiguous_resolved(tensor)
    sent = sent if mine or sent is not tensor else tensor.clone()
    dist.all_reduce(sent, _OPERATIONS[operation], group.process_group)
    return sent


def start_all_gather(local: Tensor, group: RankGroup, dim: int) -> Pending:
    """Start joining every rank's tensor, one after the other along ``dim``."""
    if group.size == 1:
        return Pending(local)
    # Collectives know dim 0 only.
    first = contiguous_resolved(local.movedim(dim, 0))
    if needs_functional_collectives(first):
        full = functional_collective("all_gather_into_tensor", first, group.size, group=group.process_group)
        return Pending(full, lambda full: wait_tensor(full).movedim(0, dim))
    full = first.new_empty((first.shape[0] * group.size, *first.shape[1:]))
    work = all_gather_single(full, first, group=group.process_group, async_op=True)
    return Pending(full, _after(work, dim))


def all_gather(local: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Return every rank's tensor, one after the other along ``dim``; contiguous."""
    return as_non_view(start_all_gather(local, group, dim).wait().contiguous())


def start_reduce_scatter(full: Tensor, group: RankGroup, dim: int) -> Pending:
    """Start summing over the ranks; each keeps its shard of ``dim``, which must be divisible."""
    if group.size == 1:
        return Pending(full)
    first = contiguous_resolved(full.movedim(dim, 0))
    if needs_functional_collectives(first):
        shard = functional_collective(
            "reduce_scatter_tensor", first, "sum", group.size, group=group.process_group
        )
        return Pending(shard, lambda shard: wait_tensor(shard).movedim(0, dim))
    shard = first.new_empty((first.shape[0] // group.size, *first.shape[1:]))
    work = reduce_scatter_single(shard, first, group=group.process_group, async_op=True)
    return Pending(shard, _after(work, dim))


def reduce_scatter(full: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Return the sum over the ranks, of which each keeps its shard of ``dim``; contiguous."""
    return as_non_view(start_reduce_scatter(full, group, dim).wait().contiguous())


def all_to_all(
    outgoing: Tensor,
    group: RankGroup,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> Tensor:
    """Return what the ranks send me, in rank order, for one shard of dim 0 to each; of equal lengths by default."""
    outgoing = contiguous_resolved(outgoing)
    if needs_functional_collectives(outgoing):
        equal = [outgoing.shape[0] // group.size] * group.size
        lengths = (receive or equal, send or equal)
        started = functional_collective("all_to_all_single", outgoing, *lengths, group=group.process_group)
        return wait_tensor(started)
    length = outgoing.shape[0] if receive is None else sum(receive)
    incoming = outgoing.new_empty(length, *outgoing.shape[1:])
    dist.all_to_all_single(incoming, outgoing, receive, send, group=group.process_group)
    return incoming


def contiguous_resolved(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values, in order: a collective reads that, and nothing else."""
    if torch.compiler.is_compiling() or tensor.is_conj() or tensor.is_neg():  # the compiler cannot ask
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _after(work: dist.Work, dim: int = 0) -> Callable[[Tensor], Tensor]:
    """Wait for the work, then put the dim in front back to where it was."""

    def finish(filled: Tensor) -> Tensor:
        work.wait()
        return filled.movedim(0, dim) if dim else filled

    return finish


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's plain shard of a DTensor; a plain tensor as it is."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def whole_parameter(parameter: Tensor) -> Tensor:
    """Return all of a parameter as a plain tensor, of whose gradient each rank makes a part.

    The gradient of a sharded parameter is summed in the backward, and that of a replicated one left as a part: see
    :func:`namedmesh.tensor_parallel.gradient_sums.reduce_gradients`.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.placements != (Replicate(),):
        parameter = parameter.redistribute(placements=(Replicate(),))
    return local_parameter(parameter, (Partial(),))


def my_shard(full: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Return this rank's shard of ``dim`` of a tensor that every rank has; contiguous."""
    width = full.shape[dim] // group.size
    return full.narrow(dim, group.rank * width, width).contiguous()


def with_backward(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor], *, on_one_rank: bool = False
) -> Callable[..., Tensor]:
    """Make a function differentiable: another function of the same arguments computes its gradient.

    Both take a tensor, the ranks, and at most one thing more: called with two more where nothing needs a gradient, the
    compiler takes the context for the tensor. One rank alone gets the tensor as it is, unless ``on_one_rank``.
    """

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, group: RankGroup, *arguments: Any) -> Tensor:
            ctx.group, ctx.arguments = group, arguments
            return fix_dropped_gradient_2_11(forward(synchronous(tensor), group, *arguments))

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            found = backward(synchronous(gradient), ctx.group, *ctx.arguments)
            return found, None, *(None for _ in ctx.arguments)

    def call(tensor: Tensor, group: RankGroup, *arguments: Any) -> Tensor:
        skipped = group.size == 1 and not on_one_rank
        return tensor if skipped else apply(tensor, group, *arguments)

    apply: Callable[..., Tensor] = Collective.apply  # torch leaves it without types
    return call


def passed(tensor: Tensor, _group: RankGroup, *_arguments: Any) -> Tensor:
    """Return the same memory as a tensor of its own, into which operations may write: autograd sees that they do."""
    return tensor.view_as(tensor) if torch.compiler.is_compiling() else tensor.detach()


def with_gradient(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function that passes a tensor that every rank has, of which another function of the same arguments changes the gradient.

    What it returns is a view, so that what is written into it is written into the caller's tensor for autograd, too.
    """
    function = with_backward(passed, change)

    def call(tensor: Tensor, group: RankGroup, *arguments: Any) -> Tensor:
        if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or group.size == 1:
            return function(tensor, group, *arguments)
        view, shape, dtype, device = tensor.view_as(tensor), tensor.shape, tensor.dtype, tensor.device

        def changed(gradients: Sequence[Tensor | None]) -> tuple[Tensor]:
            if gradients[0] is None:  # on this rank
                return (change(torch.zeros(shape, dtype=dtype, device=device), group, *arguments),)
            return (change(synchronous(gradients[0]), group, *arguments),)

        if view.grad_fn is not None:
            view.grad_fn.register_prehook(changed)
        return view

    return call


own_tensor = with_backward(passed, passed, on_one_rank=True)
"""Return a tensor into which operations may write, unlike that of ``to_local``."""

sum_forward = with_backward(all_reduce, passed)
"""Sum over the ranks; the gradient, the same on every rank, passes through."""

sum_backward = with_gradient(all_reduce)
"""Pass a tensor that every rank has; its gradient, of which each rank makes a part, is summed."""

gather = with_backward(all_gather, my_shard)
"""Join the ranks' shards along a dim; each gets back the gradient of its own shard."""

gather_parts = with_backward(all_gather, reduce_scatter)
"""Join the ranks' shards along a dim, for ranks that go on differently: the gradients are summed."""

split = with_backward(my_shard, all_gather)
"""Keep this rank's shard, along a dim, of a tensor that every rank has; the gradient is gathered."""

sum_scatter = with_backward(reduce_scatter, all_gather)
"""Keep this rank's shard, along a dim, of the sum over the ranks; the gradient is gathered."""

exchange: Callable[..., Tensor] = with_backward(
    lambda outgoing, group, lengths=(None, None): all_to_all(outgoing, group, *lengths),
    lambda gradient, group, lengths=(None, None): exchange(gradient, group, lengths[::-1]),  # differentiable
)
"""Send one shard of dim 0 to each rank, and join what is received in rank order; of equal lengths, or of those given."""
