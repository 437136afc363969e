"""One rank of a plan: where it stands, with whom, and what it holds. The cost does not depend on the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.plan.members import Members, group_of, group_of_kind

if TYPE_CHECKING:
    from namedmesh.layout import Layout
    from namedmesh.plan.core import Plan

__all__ = ["OnAxis", "RankPlan", "plan_rank"]

_EXPERTS = ("pp", "ep", "etp")  # what cuts the experts; the other axes of their layout hold copies
_DATA = ("dp", "dp_replicate", "dp_shard")


@dataclass(frozen=True)
class OnAxis:
    """A rank on one axis: its place, the size of the axis, and the ranks that it shares the axis with."""

    axis: str
    at: int
    size: int
    peers: Members


@dataclass(frozen=True)
class RankPlan:
    """What a plan means for one rank.

    Args:
        rank: the rank.
        axes: its place on each axis, slowest first, those of the experts' layout at the end.
        node: the number of its node, if the plan knows nodes.
        previous: the rank of the pipeline stage before this one; None on the first stage, or without stages.
        next: the rank of the stage after it; None on the last.
        batch: the ranks that work on the same samples; itself included.
        data_rank: which part of the global batch it works on.
        data_size: how many parts there are.
        slice: the axes that cut the parameters, with the part of this rank and how many parts there are.
        copies: the ranks that hold the same slice; itself included.
        expert_slice: likewise the axes that cut the experts; empty without a layout of their own.
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
        parts = 1
        for place in self.slice:
            parts *= place.size
        return parts


def plan_rank(plan: Plan, rank: int) -> RankPlan:
    """What a plan means for one rank.

    Args:
        plan: the plan.
        rank: a rank of its world.

    Raises:
        LayoutError: the rank is not in the layout.

    Example:
        >>> from namedmesh.plan.core import make_plan
        >>> five = plan_rank(make_plan(world_size=16, tp=2, pp=4), 5)
        >>> five.previous, five.next, five.batch[:], five.copies[:], five.share
        (1, 9, (0, 1, 4, 5, 8, 9, 12, 13), (5, 7), 8)
    """
    dense = plan.layout
    places = _places(dense, rank)
    cut = tuple(place for place in places if place.axis in plan.replica_axes and place.size > 1)
    data = tuple(axis for axis in dense if axis in _DATA)
    previous, following = _stages(dense, rank)
    experts = () if plan.expert is None else _places(plan.expert, rank)
    groups = {found.name: group_of_kind(found.layout, rank, found.kind) for found in plan.kinds}
    return RankPlan(
        rank,
        places + tuple(place for place in experts if place.axis not in dense),
        rank // plan.gpus_per_node if plan.gpus_per_node else None,
        previous,
        following,
        batch=group_of(dense, rank, *(axis for axis in dense if axis not in data)),
        data_rank=dense.group_rank(rank, *data) if data else 0,
        data_size=dense.size(*data) if data else 1,
        slice=cut,
        copies=group_of(dense, rank, *(axis for axis in dense if axis not in plan.replica_axes)),
        expert_slice=tuple(place for place in experts if place.axis in _EXPERTS and place.size > 1),
        expert_copies=_copies(plan.expert, rank) if plan.expert is not None else Members(rank, ()),
        groups={name: group for name, group in groups.items() if group is not None},
    )


def _copies(expert: Layout, rank: int) -> Members:
    """The ranks that hold the same experts as a rank."""
    return group_of(expert, rank, *(axis for axis in expert if axis not in _EXPERTS))


def _places(layout: Layout, rank: int) -> tuple[OnAxis, ...]:
    return tuple(
        OnAxis(axis, at, layout[axis], group_of(layout, rank, axis))
        for axis, at in layout.coords(rank).items()
    )


def _stages(layout: Layout, rank: int) -> tuple[int | None, int | None]:
    if "pp" not in layout:
        return None, None
    at, last = layout.coords(rank)["pp"], layout["pp"] - 1
    before = layout.neighbour(rank, "pp", -1) if at > 0 else None
    return before, layout.neighbour(rank, "pp") if at < last else None
