"""The collectives of tensor parallelism, each differentiable any number of times.

All of them return new tensors and write into none: selective checkpointing may have kept the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._torch import assert_on_device, functional_collective
from namedmesh.errors import ShapeError


class Group(NamedTuple):
    """The ranks that share a module: their process group's name, which can be copied and compiled, how many, and this rank's place."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, ranks: DeviceMesh | dist.ProcessGroup) -> Group:
        """Return the ranks of a one-dimensional mesh, or of a process group."""
        group = ranks if isinstance(ranks, dist.ProcessGroup) else ranks.get_group()
        return cls(group.group_name, group.size(), group.rank())


# --- with gradients -----------------------------------------------------------------------------------------


def enter(x: Tensor, group: Group, dim: int | None = None) -> Tensor:
    """Return what every rank works on with its own part of a layer: ``x`` itself, or the shards of ``dim`` joined.

    The gradient, of which each rank makes a part, is summed over the ranks; of ``dim`` each gets back its shard.
    """
    return x if group.size == 1 else _region(x, _joined, _summed, group, dim)


def leave(x: Tensor, group: Group, dim: int | None = None) -> Tensor:
    """Return the sum of the ranks' parts, whole or this rank's shard of ``dim``; the gradient comes back whole."""
    return x if group.size == 1 else _region(x, _summed, _joined, group, dim)


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Join the shards of ``dim`` for what every rank computes alike; each gets back the gradient of its own."""
    return x if group.size == 1 else _region(x, all_gather, my_shard, group, dim)


def split(x: Tensor, group: Group, dim: int) -> Tensor:
    """Keep this rank's shard of ``dim`` of what every rank has; the gradient is gathered."""
    return x if group.size == 1 else _region(x, my_shard, all_gather, group, dim)


def exchange(x: Tensor, group: Group, lengths: Sequence[Sequence[int] | None] = (None, None)) -> Tensor:
    """Send one shard of dim 0 to each rank, and join what comes from each, in rank order; the gradients travel back.

    ``lengths``: how many rows are sent to each rank, and how many come; by default equally many.
    """
    return x if group.size == 1 else _region(x, _sent, _returned, group, lengths)


class _Region(torch.autograd.Function):
    """One function there, another one back, whose own way back is the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any, group: Group, how: Any) -> Tensor:  # noqa: PLR0917  autograd's
        ctx.there, ctx.back, ctx.group, ctx.how = there, back, group, how
        result: Tensor = there(x, group, how)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _region(gradient, ctx.back, ctx.there, ctx.group, ctx.how), None, None, None, None


_region: Callable[..., Tensor] = _Region.apply  # torch leaves it without types


def _joined(x: Tensor, group: Group, dim: int | None) -> Tensor:
    return x.view_as(x) if dim is None else all_gather(x, group, dim)


def _summed(x: Tensor, group: Group, dim: int | None) -> Tensor:
    if dim is None:
        return all_reduce(x, group)
    check_divides(x.shape, dim, group.size)
    first = x.movedim(dim, 0)
    return _moved(functional_collective("reduce_scatter_tensor", first, "sum", group.size, group.name), dim)


def _sent(x: Tensor, group: Group, lengths: Sequence[Sequence[int] | None]) -> Tensor:
    equal = [x.shape[0] // group.size] * group.size
    send, receive = lengths[0] or equal, lengths[1] or equal
    return functional_collective("all_to_all_single", x, [*receive], [*send], group.name)


def _returned(x: Tensor, group: Group, lengths: Sequence[Sequence[int] | None]) -> Tensor:
    return _sent(x, group, lengths[::-1])


# --- without gradients --------------------------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, operation: str = "sum") -> Tensor:
    """Return the sum of a tensor over the ranks, or its ``"max"``."""
    return x if group.size == 1 else functional_collective("all_reduce", x, operation, group.name)


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return every rank's tensor, one after the other along ``dim``."""
    if group.size == 1:
        return x
    first = x.movedim(dim, 0)  # collectives know dim 0 only
    return _moved(functional_collective("all_gather_into_tensor", first, group.size, group.name), dim)


def my_shard(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's shard of ``dim`` of a tensor that every rank has; a copy."""
    check_divides(x.shape, dim, group.size)
    width = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * width, width).clone(memory_format=torch.contiguous_format)


def check_divides(shape: Sequence[int], dim: int, size: int) -> None:
    """Raise a ShapeError if a dim of an activation cannot be split into ``size`` equal shards: unequal ones end the process in gloo."""
    if shape[dim] % size:
        raise ShapeError(
            f"dim {dim} of an activation of shape {tuple(shape)} cannot be split into {size} equal shards (the tp size); "
            f"pad it to {-(-shape[dim] // size) * size}, or to another multiple of {size}"
        )


def refuse_strangers(ids: Tensor, vocabulary: int, what: str) -> None:
    """Reject an id outside the vocabulary: it belongs to no rank, and would silently count as zeros.

    On a CPU an IndexError is raised. On an accelerator the check is enqueued, as those of torch's own kernels are: no
    synchronization with the host, and a device-side assertion.
    """
    if torch.compiler.is_compiling() or type(ids) is not Tensor or ids.is_meta or not ids.numel():
        return
    if not ids.is_cpu:
        inside = ((ids >= 0) & (ids < vocabulary)).all()
        assert_on_device(inside, f"{what}: an id is outside the vocabulary, from 0 to {vocabulary - 1}")
        return
    low, high = map(int, torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        got = f"the ids run from {low} to {high}"
        raise IndexError(f"{what}: {got}, the vocabulary from 0 to {vocabulary - 1}")


def _moved(x: Tensor, dim: int) -> Tensor:
    """Put dim 0 to its place; a copy, because users may not write into the views that autograd functions return."""
    return x if dim == 0 else x.movedim(0, dim).clone(memory_format=torch.contiguous_format)
