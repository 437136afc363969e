"""Differentiable collectives for tensor parallelism.

The region functions can be differentiated any number of times. All functions return new tensors and
never write into their input: selective activation checkpointing may have saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._errors import ShapeError
from namedmesh._torch.execution import is_transformed
from namedmesh._torch.tensors import assert_on_device, run_functional_collective


class Group(NamedTuple):
    """The process group over which a module is sharded, as plain data.

    A ``ProcessGroup`` can be neither copied nor pickled, and torch.compile does not trace it. Its
    registered name can be.

    Attributes:
        name: the name under which torch's functional collectives find the process group.
        size: the number of ranks.
        rank: the index of this rank in the group.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, ranks: DeviceMesh | dist.ProcessGroup) -> Group:
        """Return the group of a one-dimensional mesh, or of a process group.

        Args:
            ranks: the mesh or the process group.
        """
        group = ranks if isinstance(ranks, dist.ProcessGroup) else ranks.get_group()
        return cls(group.group_name, group.size(), group.rank())


# --- differentiable -----------------------------------------------------------------------------


def copy_to_tp_region(x: Tensor, group: Group) -> Tensor:
    """Forward: identity. Backward: all-reduce.

    Args:
        x: a replicated input of column-parallel layers. Each rank computes a partial gradient of
            it.
        group: the ranks.
    """
    return _apply_collective(x, _copy, all_reduce, group, "sum")


def reduce_from_tp_region(x: Tensor, group: Group) -> Tensor:
    """Forward: all-reduce. Backward: identity.

    Args:
        x: the output of a row-parallel layer, which is partial on each rank.
        group: the ranks.
    """
    return _apply_collective(x, all_reduce, _copy, group, "sum")


def all_gather_to_tp_region(x: Tensor, group: Group, dim: int) -> Tensor:
    """Forward: all-gather along ``dim``. Backward: reduce-scatter along ``dim``.

    Args:
        x: the local shard of an input of column-parallel layers (sequence parallelism).
        group: the ranks.
        dim: the dim along which ``x`` is sharded.
    """
    return _apply_collective(x, all_gather, _reduce_scatter, group, dim)


def reduce_scatter_from_tp_region(x: Tensor, group: Group, dim: int) -> Tensor:
    """Forward: reduce-scatter along ``dim``. Backward: all-gather along ``dim``.

    Args:
        x: the output of a row-parallel layer, which is partial on each rank.
        group: the ranks.
        dim: the dim along which the result is sharded (sequence parallelism).

    Raises:
        ShapeError: ``dim`` cannot be split into equal shards.
    """
    return _apply_collective(x, _reduce_scatter, all_gather, group, dim)


def enter_tp_region(x: Tensor, group: Group, dim: int | None) -> Tensor:
    """Make the input of a tensor-parallel layer replicated; its gradient is partial.

    Forward: identity, or all-gather along ``dim``. Backward: all-reduce, or reduce-scatter.

    Args:
        x: the local tensor.
        group: the ranks.
        dim: the dim along which ``x`` is sharded; None if it is replicated.
    """
    if dim is None:
        return copy_to_tp_region(x, group)
    return all_gather_to_tp_region(x, group, dim)


def exit_tp_region(x: Tensor, group: Group, dim: int | None) -> Tensor:
    """Sum the partial output of a tensor-parallel layer.

    Forward: all-reduce, or reduce-scatter along ``dim``. Backward: identity, or all-gather.

    Args:
        x: the local tensor.
        group: the ranks.
        dim: the dim along which the result is sharded; None if it is replicated.
    """
    if dim is None:
        return reduce_from_tp_region(x, group)
    return reduce_scatter_from_tp_region(x, group, dim)


def gather(
    x: Tensor, group: Group, dim: int, keep_gradient: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Forward: all-gather along ``dim``. Backward: keep the local shard.

    The consumers of the result must be replicated: its gradient is then the same on every rank,
    and is not summed.

    Args:
        x: the local shard.
        group: the ranks.
        dim: the dim along which ``x`` is sharded.
        keep_gradient: called in the backward with the gradient of the result.
    """
    if group.size == 1:
        return x

    def keep_and_shard(grad: Tensor, group: Group, dim: int) -> Tensor:
        """Return the local shard of the gradient, after it was kept."""
        if keep_gradient is not None:
            keep_gradient(grad)
        return local_shard(grad, group, dim)

    return _apply_collective(x, all_gather, keep_and_shard, group, dim)


def split(x: Tensor, group: Group, dim: int) -> Tensor:
    """Forward: keep the local shard of ``dim``. Backward: all-gather.

    Args:
        x: a replicated tensor.
        group: the ranks.
        dim: the dim to shard.

    Raises:
        ShapeError: ``dim`` cannot be split into equal shards.
    """
    return _apply_collective(x, local_shard, all_gather, group, dim)


def all_to_all_single(
    x: Tensor, group: Group, split_sizes: Sequence[Sequence[int] | None] = (None, None)
) -> Tensor:
    """Forward: all-to-all of dim 0. Backward: all-to-all in the opposite direction.

    Args:
        x: the local tensor, with the rows for each rank in rank order.
        group: the ranks.
        split_sizes: the numbers of rows sent to each rank, and received from each rank; None for
            equal numbers.
    """
    return _apply_collective(x, _all_to_all, _all_to_all_backward, group, split_sizes)


class _Collective(torch.autograd.Function):
    """Applies ``forward_op`` in the forward and ``backward_op`` in the backward.

    The two operations are adjoint. The backward therefore applies this function with both of them
    exchanged, which makes it differentiable any number of times.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes arguments by position
        ctx: Any, x: Tensor, forward_op: Any, backward_op: Any, group: Group, argument: Any
    ) -> Tensor:
        ctx.forward_op = forward_op
        ctx.backward_op = backward_op
        ctx.group = group
        ctx.argument = argument
        result: Tensor = forward_op(x, group, argument)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad = _apply_differentiably(grad, ctx.backward_op, ctx.forward_op, ctx.group, ctx.argument)
        return x_grad, None, None, None, None


_apply_differentiably: Callable[..., Tensor] = _Collective.apply  # torch's method has no type


def _apply_collective(x: Tensor, forward_op: Any, backward_op: Any, group: Group, argument: Any) -> Tensor:
    """Apply ``forward_op``; in the backward, ``backward_op`` is applied to the gradient."""
    if group.size == 1:
        return x
    if not torch.is_grad_enabled() and (torch.compiler.is_compiling() or not is_transformed()):
        # For one token, autograd's bookkeeping takes as long as the layer.
        result: Tensor = forward_op(x, group, argument)
        return result
    return _apply_differentiably(x, forward_op, backward_op, group, argument)


def _copy(x: Tensor, _group: Group, _operation: str) -> Tensor:
    """Return a view of the input: the identity."""
    # An autograd function must not return its input, but may return a view of it.
    return x.view_as(x)


def _reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum a tensor over the ranks, and return the local shard of ``dim``."""
    check_divides(x.shape, dim, group.size)
    first = x.movedim(dim, 0)  # NCCL and gloo split dim 0 only.
    shard = run_functional_collective("reduce_scatter_tensor", first, "sum", group.size, group.name)
    return _move_first_dim(shard, dim)


def _all_to_all(x: Tensor, group: Group, split_sizes: Sequence[Sequence[int] | None]) -> Tensor:
    """Exchange rows of dim 0; ``split_sizes`` are the numbers to send and to receive."""
    send_sizes, receive_sizes = split_sizes
    equal_sizes = [x.shape[0] // group.size] * group.size
    send = send_sizes or equal_sizes
    receive = receive_sizes or equal_sizes
    return run_functional_collective("all_to_all_single", x, [*receive], [*send], group.name)


def _all_to_all_backward(x: Tensor, group: Group, split_sizes: Sequence[Sequence[int] | None]) -> Tensor:
    """Send the rows that :func:`_all_to_all` has received back to their ranks."""
    return _all_to_all(x, group, split_sizes[::-1])


# --- not differentiable -------------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, operation: str = "sum") -> Tensor:
    """All-reduce a tensor, outside of autograd.

    Args:
        x: the local tensor.
        group: the ranks.
        operation: ``"sum"`` or ``"max"``.

    Returns:
        A new tensor with the sum or the maximum, the same on every rank.
    """
    if group.size == 1:
        return x
    return run_functional_collective("all_reduce", x, operation, group.name)


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """All-gather a tensor, outside of autograd.

    Args:
        x: the local shard.
        group: the ranks.
        dim: the dim along which the shards are concatenated, in rank order.

    Returns:
        The full tensor, the same on every rank.
    """
    if group.size == 1:
        return x
    first = x.movedim(dim, 0)  # NCCL and gloo concatenate along dim 0 only.
    full = run_functional_collective("all_gather_into_tensor", first, group.size, group.name)
    return _move_first_dim(full, dim)


def local_shard(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return a copy of the local shard of a replicated tensor, outside of autograd.

    Args:
        x: the replicated tensor.
        group: the ranks.
        dim: the dim to shard.

    Raises:
        ShapeError: ``dim`` cannot be split into equal shards.
    """
    check_divides(x.shape, dim, group.size)
    width = x.shape[dim] // group.size
    shard = x.narrow(dim, group.rank * width, width)
    # A view would keep the memory of the full tensor in use.
    return shard.clone(memory_format=torch.contiguous_format)


def check_divides(shape: Sequence[int], dim: int, size: int) -> None:
    """Check that a dim of an activation can be split into equal shards.

    Unequal shards would end the process in gloo, without a Python error.

    Args:
        shape: the shape of the activation.
        dim: the dim to split.
        size: the number of ranks.

    Raises:
        ShapeError: the number of ranks does not divide the dim.
    """
    if shape[dim] % size:
        raise ShapeError(
            f"dim {dim} of an activation of shape {tuple(shape)} cannot be split into {size} equal "
            f"shards (the tp size); pad it to {-(-shape[dim] // size) * size}, or to another "
            f"multiple of {size}"
        )


def check_ids_in_vocab(ids: Tensor, vocabulary: int, name: str) -> None:
    """Check that all ids are in the vocabulary.

    Any other id is in the shard of no rank: its embedding would silently be zeros. On an
    accelerator the check is a device-side assertion, as in torch's own kernels, because an
    exception would need to synchronize with the host. Compiled code, subclasses and meta tensors
    are not checked.

    Args:
        ids: the ids, replicated.
        vocabulary: the number of ids in the full vocabulary.
        name: the start of the message.

    Raises:
        IndexError: on a CPU: an id is negative, or not less than ``vocabulary``.
    """
    if torch.compiler.is_compiling() or type(ids) is not Tensor or ids.is_meta or not ids.numel():
        return
    if not ids.is_cpu:
        all_in_vocab = ((ids >= 0) & (ids < vocabulary)).all()
        message = f"{name}: an id is outside the vocabulary, from 0 to {vocabulary - 1}"
        assert_on_device(all_in_vocab, message)
        return
    # One pass over the ids finds both bounds.
    low, high = map(int, torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        got = f"the ids run from {low} to {high}"
        raise IndexError(f"{name}: {got}, the vocabulary from 0 to {vocabulary - 1}")


def _move_first_dim(x: Tensor, dim: int) -> Tensor:
    """Return a contiguous copy of a tensor, with dim 0 moved to ``dim``."""
    if dim == 0:
        return x
    # Users may write into an activation in place. autograd forbids that for a view which an
    # autograd function has returned.
    return x.movedim(0, dim).clone(memory_format=torch.contiguous_format)
