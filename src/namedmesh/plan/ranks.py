"""One rank of a plan: its coordinates, groups and shards; numbers, no text."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from namedmesh.plan.members import Members, group_of

if TYPE_CHECKING:
    from namedmesh.layout import Layout
    from namedmesh.plan.core import Plan

_EXPERT_SHARDS = ("pp", "ep", "etp")  # the axes that shard the experts; over the others they are replicated
_DATA = ("dp", "dp_replicate", "dp_shard")


@dataclass(frozen=True)
class OnAxis:
    """A rank on one axis: its coordinate, the size of the axis, and the ranks of its group over the axis."""

    axis: str
    at: int
    size: int
    peers: Members


@dataclass(frozen=True)
class RankPlan:
    """The coordinates, groups and shards of one rank.

    Args:
        rank: the rank.
        axes: its coordinate on each axis, slowest first, those of the experts' layout at the end.
        node: the number of its node, if the plan has nodes.
        previous: the rank of the pipeline stage before this one; None on the first stage, or without stages.
        next: the rank of the stage after it; None on the last.
        batch: the ranks that work on the same samples; itself included.
        data_rank: which part of the global batch it works on.
        data_size: how many parts there are.
        slice: the axes that shard the parameters, with the shard of this rank and how many shards there are.
        copies: the ranks that hold the same shard; itself included.
        expert_slice: likewise the axes that shard the experts; empty without a layout of their own.
        expert_copies: the ranks that hold the same experts; itself included.
        groups: the group of each kind that it is in, by the name of the kind.
    """

    rank: int
    axes: tuple[OnAxis, ...]
    node: int | None
    previous: int | None
    next: int | None
    batch: Members
    data_rank: int
    data_size: int
    slice: tuple[OnAxis, ...]
    copies: Members
    expert_slice: tuple[OnAxis, ...]
    expert_copies: Members
    groups: dict[str, Members]

    @property
    def share(self) -> int:
        """One over the fraction of the parameters that it holds, experts aside."""
        return prod(axis.size for axis in self.slice)


def plan_rank(plan: Plan, rank: int) -> RankPlan:
    """Describe one rank of a plan.

    Args:
        plan: the plan.
        rank: a rank of its world.

    Raises:
        LayoutError: the rank is not in the layout.

    Example:
        >>> from namedmesh.plan import make_plan
        >>> five = plan_rank(make_plan(world_size=16, tp=2, pp=4), 5)
        >>> five.previous, five.next, five.batch[:], five.copies[:], five.share
        (1, 9, (0, 1, 4, 5, 8, 9, 12, 13), (5, 7), 8)
    """
    dense, expert = plan.layout, plan.expert
    axes = _on_axes(dense, rank)
    experts = _on_axes(expert, rank) if expert is not None else ()
    data = tuple(axis for axis in dense if axis in _DATA)
    groups = {kind.name: kind.of_rank(rank) for kind in plan.kinds}
    return RankPlan(
        rank,
        axes + tuple(own for own in experts if own.axis not in dense),
        rank // plan.gpus_per_node if plan.gpus_per_node else None,
        _stage(dense, rank, -1),
        _stage(dense, rank, 1),
        batch=_over_others(dense, rank, data),
        data_rank=dense.group_rank(rank, *data) if data else 0,
        data_size=dense.size(*data) if data else 1,
        slice=_shards(axes, plan.replica_axes),
        copies=_over_others(dense, rank, plan.replica_axes),
        expert_slice=_shards(experts, _EXPERT_SHARDS),
        expert_copies=Members(rank, ()) if expert is None else _over_others(expert, rank, _EXPERT_SHARDS),
        groups={name: group for name, group in groups.items() if group is not None},
    )


def _on_axes(layout: Layout, rank: int) -> tuple[OnAxis, ...]:
    coords = layout.coords(rank)
    return tuple(OnAxis(axis, coords[axis], layout[axis], group_of(layout, rank, axis)) for axis in layout)


def _shards(axes: tuple[OnAxis, ...], sharding: tuple[str, ...]) -> tuple[OnAxis, ...]:
    return tuple(own for own in axes if own.axis in sharding and own.size > 1)


def _over_others(layout: Layout, rank: int, axes: tuple[str, ...]) -> Members:
    return group_of(layout, rank, *(axis for axis in layout if axis not in axes))


def _stage(layout: Layout, rank: int, step: int) -> int | None:
    """Return the rank of the pipeline stage before or after that of a rank."""
    if "pp" not in layout or not 0 <= layout.coords(rank)["pp"] + step < layout["pp"]:
        return None
    return layout.neighbour(rank, "pp", step)
