"""Compute a plan: the layouts of a job, the groups of each kind, warnings, and the place of one rank; numbers, no text."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.dialects import DIALECTS, PLAIN, DialectLayout, GroupSpec, groups_of, layouts_for
from namedmesh.errors import AxisError, LayoutError, did_you_mean
from namedmesh.layout import Layout
from namedmesh.plan.members import Groups, Members, group_of
from namedmesh.plan.nodes import Placement, node_warnings, placements
from namedmesh.plan.spec import Spec, UsageError, kept, near_misses, parse_spec, raise_all, size_problems

if TYPE_CHECKING:
    from collections.abc import Iterable

    from namedmesh.errors import NamedMeshError

_EXPERT_SHARDS = ("pp", "ep", "etp")  # the axes that shard the experts; over the others they are replicated
_DATA = ("dp", "dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Plan:
    """The sizes, groups, communicators and warnings of a job's layout.

    Args:
        arrangement: the layouts and whose rank table they are.
        kinds: the groups of each kind, in the order the dialect makes them.
        gpus_per_node: how many ranks a node has, if given.
        nvlink_domain: how many ranks are joined by NVLink, if given.
        placements: which axes stay inside a node; empty if no nodes are given.
        warnings: a sentence for each thing that may be a mistake.
    """

    arrangement: DialectLayout
    kinds: tuple[Groups, ...]
    gpus_per_node: int | None = None
    nvlink_domain: int | None = None
    placements: tuple[Placement, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """The dense layout."""
        return self.arrangement.dense

    @property
    def expert(self) -> Layout | None:
        """The layout of the experts, if they have one of their own."""
        return self.arrangement.expert

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.world_size

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes over which one full copy of the parameters is spread."""
        return tuple(axis for axis in self.layout if axis in self.arrangement.dialect.shards)

    @property
    def replicas(self) -> Groups:
        """The full copies of the parameters: each group holds one."""
        kind = GroupSpec("model replica", self.replica_axes)
        return Groups(kind, self.arrangement.layout(kind.view))

    @property
    def asked(self) -> int:
        """How many process groups a rank asks for (rank 0, which is in one of every kind)."""
        return sum(groups.process_groups for groups in self.kinds)

    @property
    def communicators(self) -> int:
        """How many communicators it holds if groups over the same ranks are shared, beside the world's."""
        most: dict[str, int] = {}
        for groups in self.kinds:
            if groups.communicator != "none":
                owner = groups.name if groups.communicator == "own" else groups.communicator
                most[owner] = max(most.get(owner, 0), groups.process_groups)
        # The default group is there already; a gloo group over the same ranks is not.
        return sum(most.values()) - (1 if "world" in most else 0)

    @property
    def calls(self) -> int:
        """How many groups the whole world is made of, if each is made."""
        return sum(groups.count * groups.process_groups for groups in self.kinds)

    def groups(self, name: str) -> Groups:
        """Return the groups of one kind, by its name.

        Raises:
            AxisError: no kind of groups has this name.
        """
        by_name = {groups.name: groups for groups in self.kinds}
        if name not in by_name:
            raise AxisError(f"{name!r} is not one of {tuple(by_name)}{did_you_mean(name, by_name)}")
        return by_name[name]


def make_plan(
    spec: str | Spec | Layout = "",
    /,
    *,
    world_size: int | None = None,
    like: str | None = None,
    order: str | None = None,
    gpus_per_node: int | None = None,
    nvlink_domain: int | None = None,
    **sizes: int,
) -> Plan:
    """Plan a layout, without a process group, a GPU or torch.

    Args:
        spec: a spec string, ``"pp=2,dp=-1,tp=2"`` or ``"megatron tp=2,pp=4"``, or a layout. A string without a
            dialect means exactly these axes in this order.
        world_size: how many ranks there are.
        like: a dialect, for ``sizes``.
        order: the order of the axes, fastest first, for ``sizes``.
        gpus_per_node: how many consecutive ranks one node has.
        nvlink_domain: how many consecutive ranks NVLink joins, if that is not a node.
        **sizes: instead of a spec, a size for each axis that matters. ``dp`` is inferred; the order is
            Megatron's. A size for ``ep``, ``etp`` or ``edp`` gives the experts a layout of their own.

    Returns:
        A :class:`Plan`. The cost does not depend on the number of ranks.

    Raises:
        UsageError: arguments that do not go together; a SpecError if the string cannot be read.
        AxisError: an axis that the dialect does not have.
        LayoutError: sizes, an order or a dialect that do not fit.

    Example:
        >>> plan = make_plan(world_size=16, tp=2, pp=4)
        >>> plan.layout
        Layout(pp=4, dp=2, tp=2)
        >>> [group[:] for group in plan.groups("dp").first(3)]
        [(0, 2), (1, 3), (4, 6)]
        >>> [group[:] for group in plan.replicas.first(2)]
        [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]
    """
    errors: list[NamedMeshError] = []
    with kept(errors):
        arrangement = resolve(spec, world_size=world_size, like=like, order=order, **sizes)
    problems = size_problems({"gpus_per_node": gpus_per_node, "nvlink_domain": nvlink_domain})
    if problems:
        errors.append(LayoutError(*problems))
    raise_all(errors)
    node = gpus_per_node or nvlink_domain
    placed = placements(arrangement, node, nvlink_domain) if node is not None else ()
    warnings = [*arrangement.notes, *near_misses(arrangement.dense)]
    warnings += node_warnings(arrangement, placed, gpus_per_node, nvlink_domain)
    return Plan(arrangement, _shared(arrangement), gpus_per_node, nvlink_domain, placed, tuple(warnings))


def resolve(
    spec: str | Spec | Layout = "",
    /,
    *,
    world_size: int | None = None,
    like: str | None = None,
    order: str | None = None,
    **sizes: int,
) -> DialectLayout:
    """Resolve a spec, or sizes, to layouts; arguments and errors are those of :func:`make_plan`."""
    if isinstance(spec, str) and spec.strip():
        spec = parse_spec(spec)
    named = spec.dialect if isinstance(spec, Spec) else None
    problems = _argument_problems(not isinstance(spec, str), named, like, order, sizes)
    if isinstance(spec, str) and not sizes and world_size is None:
        problems.append(
            "neither sizes nor the number of ranks were given; name sizes, such as tp=2, or the number, or both"
        )
    if problems:
        raise UsageError(*problems)
    if isinstance(spec, Layout):
        return DialectLayout(PLAIN, spec)
    name = named or like
    if isinstance(spec, Spec):
        sizes = spec.sizes
    if isinstance(spec, Spec) and name is None:
        made = DialectLayout(PLAIN, Layout.from_shape(sizes, sizes.values(), world_size=world_size))
    else:
        made = layouts_for(DIALECTS[name] if name else PLAIN, sizes, world_size=world_size, order=order)
    if made.dense.world_size > sys.maxsize:
        raise LayoutError(f"the world has {made.dense.world_size} ranks; it may have {sys.maxsize} at most")
    return made


def _argument_problems(
    given: bool, named: str | None, like: str | None, order: str | None, sizes: Iterable[str]
) -> list[str]:
    """Return a sentence for each argument that does not go with a given layout, or with the dialect named in it."""
    problems = []
    if given and sizes:
        problems.append(
            f"both a layout and sizes for {', '.join(sizes)} were given; give a spec, or sizes by name"
        )
    if named is not None and like not in {None, named}:
        problems.append(f"the layout is {named}'s, but it should be like {like}; leave one of them out")
    if given and order is not None and named is None and like is None:
        problems.append(
            "a layout without a dialect has its order already; leave the order out, or name sizes"
        )
    if like is not None and like not in DIALECTS:
        problems.append(f"{like!r} is not one of {', '.join(DIALECTS)}{did_you_mean(like, DIALECTS)}")
    return problems


def _shared(arrangement: DialectLayout) -> tuple[Groups, ...]:
    """Return the groups of each kind, with the communicator that serves them."""
    owners: dict[Members | None, str] = {}
    shared = []
    for kind in groups_of(arrangement):
        groups = Groups(kind, arrangement.layout(kind.view), "own")
        if groups.size == 1:
            served = "none"
        elif groups.size == arrangement.dense.world_size:
            served = "world"
        else:
            # Rank 0 is in a group of every kind, and kinds that have the same ranks there have them everywhere.
            owner = owners.setdefault(groups.of_rank(0), kind.name)
            served = "own" if owner == kind.name else owner
        shared.append(replace(groups, communicator=served))
    return tuple(shared)


class OnAxis(NamedTuple):
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
    axes, shards, copies = _shards(dense, rank, plan.replica_axes)
    expert_axes, expert_shards, expert_copies = _shards(expert, rank, _EXPERT_SHARDS)
    data = tuple(axis for axis in dense if axis in _DATA)
    stage, stages = (dense.coords(rank)["pp"], dense["pp"]) if "pp" in dense else (0, 1)
    groups = {kind.name: kind.of_rank(rank) for kind in plan.kinds}
    return RankPlan(
        rank,
        axes + tuple(own for own in expert_axes if own.axis not in dense),
        rank // plan.gpus_per_node if plan.gpus_per_node else None,
        previous=dense.neighbor(rank, "pp", -1) if stage > 0 else None,
        next=dense.neighbor(rank, "pp") if stage < stages - 1 else None,
        batch=_shards(dense, rank, data)[2],
        data_rank=dense.group_rank(rank, *data) if data else 0,
        data_size=dense.size(*data) if data else 1,
        slice=shards,
        copies=copies,
        expert_slice=expert_shards,
        expert_copies=expert_copies,
        groups={name: group for name, group in groups.items() if group is not None},
    )


def _shards(
    layout: Layout | None, rank: int, sharding: tuple[str, ...]
) -> tuple[tuple[OnAxis, ...], tuple[OnAxis, ...], Members]:
    """Return a rank's place on each axis, on those that shard something, and the ranks that have the same shard."""
    if layout is None:
        return (), (), Members(rank, ())
    axes = tuple(
        OnAxis(axis, at, layout[axis], group_of(layout, rank, axis))
        for axis, at in layout.coords(rank).items()
    )
    shards = tuple(own for own in axes if own.axis in sharding and own.size > 1)
    return axes, shards, group_of(layout, rank, *(axis for axis in layout if axis not in sharding))
