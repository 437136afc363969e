"""The topology that a grid is asked for: what it may be, and what it is where none is named."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from namedmesh.compat.deepspeed.process_topology import (
    PipeDataParallelTopology,
    ProcessTopology,
    _prime_factors,
)
from namedmesh.compat.errors import ContractAttributeError, ContractError
from namedmesh.errors import LayoutError, listing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Topology", "alternating", "check_group", "checked_topology"]


class Topology(Protocol):
    """What a grid asks of a topology: DeepSpeed's own are as good as ours."""

    def get_axis_names(self) -> Sequence[str]:
        """The names, slowest axis first."""

    def get_dim(self, axis: str) -> int:
        """The size of an axis."""

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank."""


def alternating(world: int) -> PipeDataParallelTopology:
    """The topology for who names none: the prime factors of the world, to pipe and data in turns.

    Example:
        >>> alternating(12)
        PipeDataParallelTopology(axes=['pipe', 'data'], dims=[6, 2])
    """
    factors = _prime_factors(world)
    return PipeDataParallelTopology(num_pp=prod(factors[::2]), num_dp=prod(factors[1::2]))


def checked_topology(asked: Topology, world: int, rank: int) -> ProcessTopology:
    """A topology that a grid can be of, as one of ours.

    Args:
        asked: ours, DeepSpeed's, or one that looks like them.
        world: how many ranks there are.
        rank: this one.

    Raises:
        ContractError: it has another number of ranks.
        ContractAttributeError: it has no axis pipe, or no axis data.
        LayoutError: it has this rank where row-major order does not.
    """
    ours = asked
    if not isinstance(ours, ProcessTopology):
        axes = asked.get_axis_names()
        ours = ProcessTopology(axes, [asked.get_dim(axis) for axis in axes])
    sizes = " x ".join(f"{axis}={ours.get_dim(axis)}" for axis in ours.axes)
    if ours.world_size() != world:
        raise ContractError(
            f"the topology {sizes} has {ours.world_size()} ranks, but the world has {world}; change a size, or start "
            "another number of ranks"
        )
    missing = [axis for axis in ("pipe", "data") if axis not in ours.axes]
    if missing:
        raise ContractAttributeError(
            *(
                f"the topology {sizes} has no axis {axis!r}; give it one, of size 1 if need be"
                for axis in missing
            )
        )
    theirs, expected = tuple(asked.get_coord(rank=rank)), tuple(ours.layout.coords(rank).values())
    if theirs != expected:
        raise LayoutError(
            f"the topology {sizes} has rank {rank} at {theirs}, and row-major order at {expected}; the last axis has to be "
            "the fastest"
        )
    return ours


def check_group(group: object, world: int) -> None:
    """Refuse a group of fewer ranks than the world: the original would not look at it, and take all ranks.

    Raises:
        LayoutError: it is one.
    """
    if isinstance(group, dist.ProcessGroup) and group.size() != world:
        raise LayoutError(
            f"process_group has the ranks {listing(dist.get_process_group_ranks(group))}, but a grid is over the whole "
            f"world of {world} ranks (DeepSpeed's is, too, whatever group it is given); leave it out"
        )
