"""Compute a plan: the layouts of a job, the groups of each kind, one rank of it, and warnings; numbers, no text."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from namedmesh.dialects import DIALECTS, EXPERT, PLAIN, Arrangement, Kind, arrange, kinds_of
from namedmesh.errors import AxisError, LayoutError, count_of, did_you_mean
from namedmesh.layout import Layout
from namedmesh.plan.members import Members, first_groups, group_of, group_of_kind
from namedmesh.plan.nodes import Placement, bandwidth_bound, better_order, placements
from namedmesh.plan.spec import Spec, UsageError, near_misses, parse_spec, size_problems

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXPERT_SHARDS = ("pp", "ep", "etp")  # the axes that shard the experts; over the others they are replicated
_DATA = ("dp", "dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Groups:
    """The groups of one kind.

    Args:
        kind: the kind, with its axes.
        layout: the layout that the axes are of.
        size: how many ranks a group has.
        count: how many groups there are.
        communicator: what serves it if groups over the same ranks are shared: ``"own"``, ``"world"`` (the
            default group), ``"none"`` (a single rank), or the name of the kind that has the same ranks.
    """

    kind: Kind
    layout: Layout
    size: int
    count: int
    communicator: str

    @property
    def name(self) -> str:
        """The dialect's name of the kind."""
        return self.kind.name

    def first(self, limit: int) -> list[Members]:
        """Return the first groups, by their lowest rank; the cost is that of ``limit``.

        Example:
            >>> [group[:] for group in make_plan("pp=2,tp=2").groups("tp").first(1)]
            [(0, 1)]
        """
        return first_groups(self.layout, self.kind, limit)


@dataclass(frozen=True)
class Plan:
    """The sizes, groups, communicators and warnings of a job's layout.

    Args:
        arrangement: the layouts and whose rank table they are.
        kinds: the groups of each kind, in the order the dialect makes them.
        replica_axes: the axes over which one full copy of the parameters is spread.
        asked: how many process groups a rank asks for (rank 0, which is in one of every kind).
        held: how many communicators it holds if groups over the same ranks are shared, beside the world's.
        calls: how many groups the whole world is made of, if each is made.
        gpus_per_node: how many ranks a node has, if given.
        nvlink_domain: how many ranks are joined by NVLink, if given.
        placements: which axes stay inside a node; empty if no nodes are given.
        warnings: a sentence for each thing that may be a mistake.
    """

    arrangement: Arrangement
    kinds: tuple[Groups, ...]
    replica_axes: tuple[str, ...]
    asked: int
    held: int
    calls: int
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
        return self.arrangement.dense.world_size

    @property
    def replicas(self) -> Groups:
        """The full copies of the parameters: each group holds one."""
        return _groups(self.arrangement, Kind("model replica", self.replica_axes), "")

    def groups(self, name: str) -> Groups:
        """Return the groups of one kind, by its name.

        Raises:
            AxisError: no kind of groups has this name.
        """
        by_name = {groups.name: groups for groups in self.kinds}
        if name in by_name:
            return by_name[name]
        names = tuple(by_name)
        raise AxisError(f"{name!r} is not one of {names}{did_you_mean(name, names)}")


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
    arrangement = resolve(spec, world_size=world_size, like=like, order=order, **sizes)
    problems = size_problems({"gpus_per_node": gpus_per_node, "nvlink_domain": nvlink_domain})
    if problems:
        raise LayoutError(*problems)
    kinds = _shared(arrangement)
    # Rank 0 is the first of every axis, so it is in a group of every kind.
    members = [(kind.kind, group_of_kind(kind.layout, 0, kind.kind)) for kind in kinds]
    communicators = {
        (group, gloo)
        for kind, group in members
        if group is not None and len(group) > 1
        for gloo in range(kind.gloo_groups + 1)
        if gloo or len(group) < arrangement.dense.world_size
    }
    node = gpus_per_node or nvlink_domain
    placed = placements(arrangement, node, nvlink_domain) if node is not None else ()
    return Plan(
        arrangement,
        kinds,
        tuple(axis for axis in arrangement.dense if axis in arrangement.dialect.shards),
        asked=sum(groups.kind.gloo_groups + 1 for groups in kinds),
        held=len(communicators),
        calls=sum(groups.count * (groups.kind.gloo_groups + 1) for groups in kinds),
        gpus_per_node=gpus_per_node,
        nvlink_domain=nvlink_domain,
        placements=placed,
        warnings=_warnings(arrangement, placed, gpus_per_node, nvlink_domain),
    )


def plan_rank(plan: Plan, rank: int) -> RankPlan:
    """Describe one rank of a plan.

    Args:
        plan: the plan.
        rank: a rank of its world.

    Raises:
        LayoutError: the rank is not in the layout.

    Example:
        >>> five = plan_rank(make_plan(world_size=16, tp=2, pp=4), 5)
        >>> five.previous, five.next, five.batch[:], five.copies[:], five.share
        (1, 9, (0, 1, 4, 5, 8, 9, 12, 13), (5, 7), 8)
    """
    dense = plan.layout
    axes = _on_axes(dense, rank)
    data = tuple(axis for axis in dense if axis in _DATA)
    previous, following = _stages(dense, rank)
    expert_axes = () if plan.expert is None else _on_axes(plan.expert, rank)
    groups = {kind.name: group_of_kind(kind.layout, rank, kind.kind) for kind in plan.kinds}
    return RankPlan(
        rank,
        axes + tuple(own for own in expert_axes if own.axis not in dense),
        rank // plan.gpus_per_node if plan.gpus_per_node else None,
        previous,
        following,
        batch=group_of(dense, rank, *(axis for axis in dense if axis not in data)),
        data_rank=dense.group_rank(rank, *data) if data else 0,
        data_size=dense.size(*data) if data else 1,
        slice=tuple(own for own in axes if own.axis in plan.replica_axes and own.size > 1),
        copies=group_of(dense, rank, *(axis for axis in dense if axis not in plan.replica_axes)),
        expert_slice=tuple(own for own in expert_axes if own.axis in _EXPERT_SHARDS and own.size > 1),
        expert_copies=Members(rank, ())
        if plan.expert is None
        else group_of(plan.expert, rank, *(axis for axis in plan.expert if axis not in _EXPERT_SHARDS)),
        groups={name: group for name, group in groups.items() if group is not None},
    )


def resolve(
    spec: str | Spec | Layout = "",
    /,
    *,
    world_size: int | None = None,
    like: str | None = None,
    order: str | None = None,
    **sizes: int,
) -> Arrangement:
    """Resolve a spec, or sizes, to layouts; arguments and errors are those of :func:`make_plan`.

    Example:
        >>> resolve("fairscale tp=2,pp=4", world_size=16).dense
        Layout(dp=2, pp=4, cp=1, tp=2)
    """
    if isinstance(spec, str) and spec.strip():
        spec = parse_spec(spec)
    _check_arguments(spec, world_size, like, order, sizes)
    if isinstance(spec, Layout):
        return Arrangement(PLAIN, spec)
    name = like
    if isinstance(spec, Spec):
        sizes, name = spec.sizes, spec.dialect or like
    if name is None and isinstance(spec, Spec):
        arrangement = Arrangement(PLAIN, Layout.from_shape(sizes, sizes.values(), world_size=world_size))
    else:
        arrangement = arrange(DIALECTS[name] if name else PLAIN, sizes, world_size=world_size, order=order)
    if arrangement.dense.world_size > sys.maxsize:
        raise LayoutError(
            f"the world has {arrangement.dense.world_size} ranks; it may have {sys.maxsize} at most"
        )
    return arrangement


def _check_arguments(
    spec: str | Spec | Layout,
    world_size: int | None,
    like: str | None,
    order: str | None,
    sizes: Mapping[str, int],
) -> None:
    problems = []
    given = not isinstance(spec, str)
    named = spec.dialect if isinstance(spec, Spec) else None
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
    if not given and not sizes and world_size is None:
        problems.append(
            "neither sizes nor the number of ranks were given; name sizes, such as tp=2, or the number, or both"
        )
    if problems:
        raise UsageError(*problems)


def _groups(arrangement: Arrangement, kind: Kind, communicator: str) -> Groups:
    layout = arrangement.layout(kind.view)
    axes = kind.axes
    size = layout.size(*axes) if axes else 1
    size = {"all": size, "ends": min(size, 2), "first": 1}[kind.members]
    count = layout.count(*axes) if axes else layout.world_size
    return Groups(kind, layout, size, count, communicator)


def _shared(arrangement: Arrangement) -> tuple[Groups, ...]:
    """Return the groups of each kind, with the communicator that serves them."""
    owners: dict[object, str] = {}
    shared = []
    for kind in kinds_of(arrangement):
        groups = _groups(arrangement, kind, "")
        if groups.size == 1:
            communicator = "none"
        elif groups.size == arrangement.dense.world_size:
            communicator = "world"
        else:
            # Two kinds that have the same ranks at one rank have the same ranks everywhere.
            owner = owners.setdefault(group_of_kind(groups.layout, 0, kind), kind.name)
            communicator = "own" if owner == kind.name else owner
        shared.append(replace(groups, communicator=communicator))
    return tuple(shared)


def _warnings(
    arrangement: Arrangement,
    placed: tuple[Placement, ...],
    gpus_per_node: int | None,
    nvlink_domain: int | None,
) -> tuple[str, ...]:
    dense = arrangement.dense
    warnings = [*arrangement.notes, *near_misses(dense)]
    if gpus_per_node is not None and dense.world_size % gpus_per_node and dense.world_size > gpus_per_node:
        warnings.append(
            f"{dense.world_size} ranks do not fill nodes of {gpus_per_node}: the last has {dense.world_size % gpus_per_node}"
        )
    far = bandwidth_bound(placed)
    block = nvlink_domain or gpus_per_node
    if far and block is not None:
        warnings.append(
            _crossing_warning(arrangement, far, block, "node" if nvlink_domain is None else "domain")
        )
    return tuple(warnings)


def _crossing_warning(arrangement: Arrangement, far: list[Placement], block: int, what: str) -> str:
    where = f"{'a node' if what == 'node' else 'an NVLink domain'} of {count_of(block, 'GPU')}"
    names = " and ".join(f"{place.axis}={place.size}" for place in far)
    verb, them = ("leaves", "it") if len(far) == 1 else ("leave", "them")
    order = better_order(arrangement, block)
    if order is not None:
        return f"{names} {verb} {where}; the order {order!r} (fastest first, as --order takes it) keeps {them} inside"
    inner = "etp x ep" if any(place.view == EXPERT for place in far) else "tp"
    dialect = arrangement.dialect
    orders = "in any order" if dialect.orderable else f"in the order of {dialect.name}"
    return f"{names} {verb} {where}, {orders}; choose {inner} so that it divides {block}"


def _on_axes(layout: Layout, rank: int) -> tuple[OnAxis, ...]:
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
