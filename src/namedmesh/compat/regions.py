"""The regions and the group of the dialects' layers, on those of :mod:`namedmesh.tensor_parallel.collectives`."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch.distributed.device_mesh import DeviceMesh

from namedmesh.errors import MeshError
from namedmesh.tensor_parallel import collectives
from namedmesh.tensor_parallel.styles import autocast

if TYPE_CHECKING:
    from collections.abc import Callable

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

    @property
    def name(self) -> str:
        """The name of the process group, as the regions take it."""
        group = self.process_group
        return "" if group is None else group.group_name

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


# The regions ask for a name, a size and a rank.
all_reduce: Callable[..., Tensor] = collectives.all_reduce
all_gather: Callable[..., Tensor] = collectives.all_gather
reduce_scatter: Callable[..., Tensor] = collectives.reduce_scatter
all_to_all: Callable[..., Tensor] = collectives.all_to_all
sum_forward: Callable[..., Tensor] = collectives.leave
sum_backward: Callable[..., Tensor] = collectives.enter
gather: Callable[..., Tensor] = collectives.gather
gather_parts: Callable[..., Tensor] = collectives.enter
split: Callable[..., Tensor] = collectives.split
sum_scatter: Callable[..., Tensor] = collectives.leave
exchange: Callable[..., Tensor] = collectives.exchange


class ColumnInput(NamedTuple):
    """How the input of a column layer is laid out: over whom its gradient is summed, and the dim of which it is a shard."""

    group: RankGroup
    gather_dim: int | None = None


def column(value: Tensor, weight: Tensor, bias: Tensor | None, layout: ColumnInput) -> Tensor:
    """Return this rank's output features: ``value @ weight.T + bias`` with its rows of the weight and of the bias."""
    group: Any = layout.group
    return F.linear(collectives.enter(autocast(value), group, layout.gather_dim), weight, bias)


def row(
    value: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup, scatter_dim: int | None = None
) -> Tensor:
    """Return the ranks' sum of ``value @ weight.T``, plus the bias, with this rank's columns of the weight."""
    ranks: Any = group
    output = collectives.leave(F.linear(value, weight), ranks, scatter_dim)
    return output if bias is None else output + bias.to(output.dtype)


def in_part(ids: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return which ids are outside this rank's part; and each id's place in it, with 0 standing in for those outside."""
    elsewhere = (ids < first) | (ids >= first + length)
    return elsewhere, (ids - first).masked_fill(elsewhere, 0)


def padding_in_part(padding_idx: int | None, first: int, length: int) -> int | None:
    """Return the place in this rank's part of the id whose vector gets no gradient; None where it is elsewhere."""
    return padding_idx - first if padding_idx is not None and first <= padding_idx < first + length else None
