"""Describe a layout: who is with whom, how many groups and communicators, which axis leaves a node; all by ``Layout``'s ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from namedmesh.dialects import DENSE, EXPERT, DialectLayout, GroupSpec, groups_of
from namedmesh.errors import count_of
from namedmesh.plan.spec import UsageError, resolve, size_problems
from namedmesh.plan.tables import Table, as_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from namedmesh.layout import Layout

_DATA = ("dp", "dp_replicate", "dp_shard")
_EXPERT_SHARDS = ("pp", "ep", "etp")  # the axes that shard the experts
_INSIDE = ("tp", "etp", "ep")  # the axes that exchange activations inside every layer
_SHOWN, _LONGEST = 32, 16  # ranks of a kind, and of a group, that are shown unless all are
_LISTED = 4096  # ranks of a kind that are listed for programs

Group = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """The groups of one kind: a dialect's row, how large and how many they are, and what serves them if ranks share groups."""

    name: str
    axes: tuple[str, ...]
    view: str
    members: str
    size: int
    count: int
    communicator: str  # "its own", "the world's", "none, one rank", or "that of" another kind


@dataclass(frozen=True)
class Plan:
    """The sizes, groups, communicators and warnings of a job's layout.

    Args:
        arrangement: the layouts and whose rank table they are.
        kinds: the groups of each kind, in the order the dialect makes them.
        communicators: how many groups a rank asks for, how many communicators it holds if groups over the same ranks are
            shared, both beside the world's, and how many groups the whole world has.
        gpus_per_node: how many ranks a node has, if given.
        across_nodes: by axis, how many of its groups have ranks on several nodes.
        warnings: a sentence for each thing that may be a mistake.
    """

    arrangement: DialectLayout
    kinds: tuple[Kind, ...]
    communicators: tuple[int, int, int]
    gpus_per_node: int | None = None
    across_nodes: dict[str, int] | None = None
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
    def replica_axes(self) -> tuple[str, ...]:
        """The axes over which one full copy of the parameters is spread."""
        return tuple(axis for axis in self.layout if axis in self.arrangement.dialect.shards)

    def groups(self, kind: Kind, limit: int | None = None) -> list[Group]:
        """Return the first groups of a kind, by their lowest rank, or all of them."""
        layout = self.arrangement.layout(kind.view)
        return [_part(group, kind.members) for group in first_groups(layout, kind.axes, limit)]

    def group_of(self, kind: Kind, rank: int) -> Group:
        """Return the group of a kind that a rank is in; an empty one if it is in none."""
        group = _part(group_over(self.arrangement.layout(kind.view), rank, kind.axes), kind.members)
        return group if rank in group else ()


def make_plan(
    spec: str | Layout = "",
    /,
    *,
    world_size: int | None = None,
    like: str | None = None,
    order: str | None = None,
    gpus_per_node: int | None = None,
    **sizes: int,
) -> Plan:
    """Plan a layout, without a process group, a GPU or torch.

    Args:
        spec: axes and sizes, slowest first, ``"pp=2,dp=-1,tp=2"``, or a dialect and sizes, ``"megatron tp=2,pp=4"``, or a layout.
        world_size: how many ranks there are.
        like: a dialect, for ``sizes``.
        order: the order of the axes, fastest first, for ``sizes``.
        gpus_per_node: how many consecutive ranks fast links join.
        **sizes: instead of a spec, a size for each axis that matters. ``dp`` is inferred; the order is Megatron's. A size for
            ``ep``, ``etp`` or ``edp`` gives the experts a layout of their own.

    Raises:
        UsageError: arguments that cannot be read or do not go together.
        AxisError: an axis that the dialect does not have.
        LayoutError: sizes or an order that do not fit.

    Example:
        >>> plan = make_plan(world_size=16, tp=2, pp=4)
        >>> plan.layout
        Layout(pp=4, dp=2, tp=2)
        >>> [(kind.name, plan.groups(kind, 2)) for kind in plan.kinds[:2]]
        [('pp', [(0, 4, 8, 12), (1, 5, 9, 13)]), ('dp', [(0, 2), (1, 3)])]
    """
    arrangement = resolve(spec, world_size=world_size, like=like, order=order, **sizes)
    problems = size_problems({"gpus_per_node": gpus_per_node})
    if problems:
        raise UsageError(*problems)
    kinds, communicators = _kinds(arrangement)
    across = None if gpus_per_node is None else _across_nodes(arrangement, gpus_per_node)
    warnings = [*arrangement.notes, *_node_warnings(arrangement, across or {}, gpus_per_node)]
    return Plan(arrangement, kinds, communicators, gpus_per_node, across, tuple(warnings))


def group_over(layout: Layout, rank: int, axes: Sequence[str]) -> Group:
    """Return the ranks that a rank shares a group over some axes with; over no axis itself."""
    return layout.group(rank, *axes) if axes else (rank,)


def first_groups(layout: Layout, axes: Sequence[str], limit: int | None = None) -> list[Group]:
    """Return the first groups over some axes by their lowest rank, or all of them."""
    return [group_over(layout, rank, axes) for rank in layout.where(**dict.fromkeys(axes, 0))[:limit]]


def _part(group: Group, members: str) -> Group:
    if members == "ends":
        return tuple(dict.fromkeys((group[0], group[-1])))
    return group if members == "all" else group[:1]


def _kinds(arrangement: DialectLayout) -> tuple[tuple[Kind, ...], tuple[int, int, int]]:
    """Return the groups of each kind, and how many a rank asks for, holds, and the world has.

    Rank 0 is in a group of every kind, and kinds that have the same ranks there have them everywhere. A gloo group over the same
    ranks is one more.
    """
    kinds, owners, held, asked, in_world = list[Kind](), dict[Group, str](), dict[str, int](), 0, 0
    for row in groups_of(arrangement):
        layout = arrangement.layout(row.view)
        group = _part(group_over(layout, 0, row.axes), row.members)
        count, each = layout.count(*row.axes) if row.axes else layout.world_size, 1 + row.gloo_groups
        owner, served = owners.setdefault(group, row.name), "its own"
        if len(group) == 1:
            served = "none, one rank"
        elif len(group) == layout.world_size:
            served, owner = "the world's", ""
        elif owner != row.name:
            served = f"that of {owner}"
        if len(group) > 1:  # the default group is there already
            held[owner] = max(held.get(owner, 0), each - (not owner))
        asked += each
        in_world += each * count
        kinds.append(Kind(row.name, row.axes, row.view, row.members, len(group), count, served))
    return tuple(kinds), (asked, sum(held.values()), in_world)


def _across_nodes(arrangement: DialectLayout, node: int) -> dict[str, int]:
    """Return by axis how many of its groups have ranks on several nodes; the experts' own axes at the end."""
    across = dict[str, int]()
    for layout in (arrangement.dense, arrangement.expert):
        for axis in layout or ():
            if axis not in across and layout is not None:
                last = layout.group(0, axis)[-1]
                firsts = layout.where(**{axis: 0})
                across[axis] = sum(rank // node != (rank + last) // node for rank in firsts)
    return across


def _node_warnings(arrangement: DialectLayout, across: dict[str, int], node: int | None) -> list[str]:
    world, warnings = arrangement.dense.world_size, []
    if node is not None and world > node and world % node:
        warnings.append(f"{world} ranks do not fill nodes of {node}: the last has {world % node}")
    for axis, count in across.items():
        if axis in _INSIDE and count:
            layout = arrangement.dense if axis in arrangement.dense else arrangement.layout(EXPERT)
            warnings.append(
                f"{axis}={layout[axis]} leaves a node of {count_of(node or 1, 'GPU')}, with what it sends in every layer; put it "
                f"first in --order, or choose a size that divides {node}"
            )
    return warnings


def in_words(ranks: Sequence[int], limit: int = _LONGEST) -> str:
    """Write ranks for people: all of them, or the first ones, the last one and how many."""
    if len(ranks) <= limit:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]} ({len(ranks)} ranks)"


def plan_text(plan: Plan, *, everything: bool = False) -> str:
    """Write a plan for people; with every group and rank if asked for."""
    dialect, across = plan.arrangement.dialect, plan.across_nodes
    head = [f"{dialect.name}: {plan.layout}, the last axis fastest"]
    if plan.expert is not None:
        head.append(f"experts: {plan.expert}")
    if dialect.words:
        head.append(f"in its words, {', '.join(f'{axis} is {word}' for axis, word in dialect.words.items())}")
    rows = []
    for kind in plan.kinds:
        members = {"all": "", "ends": "ends of ", "first": "first of "}[kind.members]
        rows.append((kind.name, members + " x ".join(kind.axes), kind.size, kind.count, kind.communicator))
    lines = [*head, "", as_text(Table(("kind", "axes", "size", "groups", "communicator"), tuple(rows))), ""]
    longest = plan.layout.world_size if everything else _LONGEST
    replicas = GroupSpec("model replicas", plan.replica_axes)
    size = plan.layout.size(*replicas.axes) if replicas.axes else 1
    last = Kind(replicas.name, replicas.axes, DENSE, "all", size, plan.layout.world_size // size, "its own")
    for kind in (*plan.kinds, last):
        if kind.communicator == "its own" or everything:
            limit = None if everything else max(2, _SHOWN // kind.size)
            texts = [f"({in_words(group, longest)})" for group in plan.groups(kind, limit)]
            more = f" and {kind.count - len(texts)} more" if len(texts) < kind.count else ""
            lines.append(f"{kind.name}: {' '.join(texts)}{more}")
    asked, held, in_world = plan.communicators
    asks = f"A rank asks for {count_of(asked, 'group')} beside the world's, and holds {count_of(held, 'communicator')}"
    lines += [
        "",
        f"{asks} if groups over the same ranks are shared; the world has {count_of(in_world, 'group')}.",
    ]
    if across is not None:
        crossed = ", ".join(f"{count} of {axis}" for axis, count in across.items() if count) or "none"
        lines.append(f"Groups with ranks on several nodes of {plan.gpus_per_node}: {crossed}.")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan.warnings)])


def rank_text(plan: Plan, rank: int) -> str:
    """Write for people where a rank stands, and what it shares with whom."""
    layout, expert, node = plan.layout, plan.expert, plan.gpus_per_node
    lines = [f"rank {rank} of {layout}{f', node {rank // node}' if node else ''}"]
    for own in (layout, expert):
        if own is None:
            continue
        for axis, at in own.coords(rank).items():
            if own is layout or axis not in layout:
                peers = in_words(own.group(rank, axis))
                lines.append(f"  {axis} {at} of 0 to {own[axis] - 1}, with ranks {peers}")
    if "pp" in layout and layout["pp"] > 1:
        at, group = layout.coords(rank)["pp"], layout.group(rank, "pp")
        before = f"receives from rank {group[at - 1]}" if at else "the first stage"
        after = f"sends to rank {group[at + 1]}" if at + 1 < len(group) else "the last stage"
        lines.append(f"  pipeline: {before}, {after}")
    data = [axis for axis in layout if axis in _DATA]
    if data:
        same = in_words(group_over(layout, rank, [axis for axis in layout if axis not in data]))
        part = f"part {layout.group_rank(rank, *data)} of 0 to {layout.size(*data) - 1}"
        lines.append(f"  batch: {part}, the same samples as ranks {same}")
    lines.append(f"  parameters: {_shards_in_words(layout, rank, plan.replica_axes)}")
    if expert is not None:
        lines.append(f"  experts: {_shards_in_words(expert, rank, _EXPERT_SHARDS)}")
    return "\n".join(lines)


def _shards_in_words(layout: Layout, rank: int, sharding: Sequence[str]) -> str:
    shards = [f"{axis} part {at} of 0 to {layout[axis] - 1}" for axis, at in layout.coords(rank).items()
              if axis in sharding and layout[axis] > 1]  # fmt: skip
    copies = group_over(layout, rank, [axis for axis in layout if axis not in sharding])
    return f"{', '.join(shards) or 'all of them'}, the same on ranks {in_words(copies)}"


def plan_data(plan: Plan, rank: int | None = None) -> dict[str, Any]:
    """Return a plan, or one rank of it, for programs; of each kind as many groups as have 4,096 ranks together."""
    expert = None if plan.expert is None else dict(plan.expert.items())
    asked, held, in_world = plan.communicators
    data: dict[str, Any] = {"dialect": plan.arrangement.dialect.name, "world_size": plan.layout.world_size}
    data |= {"axes": dict(plan.layout.items()), "expert_axes": expert}
    if rank is not None:
        coords = ({} if plan.expert is None else plan.expert.coords(rank)) | plan.layout.coords(rank)
        groups = {kind.name: plan.group_of(kind, rank) for kind in plan.kinds}
        return data | {"rank": rank, "coords": coords, "groups": groups}
    kinds = [asdict(kind) | {"groups": plan.groups(kind, _LISTED // kind.size)} for kind in plan.kinds]
    counts = {"asked": asked, "held": held, "groups_in_world": in_world}
    data |= {"kinds": kinds, "communicators": counts, "across_nodes": plan.across_nodes}
    return data | {"warnings": plan.warnings}
