"""Layouts as users write them, who is with whom in them, and how two differ: ``namedmesh plan`` and ``namedmesh diff``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh.dialects import AXES, DIALECTS, EXPERT_AXES, PLAIN, DialectLayout, groups_of, layouts_for
from namedmesh.errors import LayoutError, UsageError, count_of, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Sequence

STATUS = 3  # where layouts differ, or none fits; beside 1, a layout that is wrong, and 2, arguments that are
_DATA = ("dp", "dp_replicate", "dp_shard")
_EXPERT_SHARDS = ("pp", "ep", "etp")  # the axes that shard the experts
_INSIDE = ("tp", "etp", "ep")  # the axes that exchange activations inside every layer
_SHOWN, _LONGEST, _COMPARED = (
    32,
    16,
    4,
)  # ranks of a kind and of a group, and groups of a difference, that are shown

Group = tuple[int, ...]


def parse_spec(text: str) -> tuple[str | None, dict[str, int]]:
    """Parse a layout as users write it: axes with their sizes, slowest first, -1 for whatever is left, or a dialect and sizes.

    Example:
        >>> parse_spec("pp=2,dp=-1,tp=2")
        (None, {'pp': 2, 'dp': -1, 'tp': 2})
        >>> parse_spec("megatron tp=2, pp=4")
        ('megatron', {'tp': 2, 'pp': 4})
    """
    dialect, sizes, problems = None, dict[str, int](), []
    for place, item in enumerate(text.replace(",", " ").split()):
        name, _, size = item.partition("=")
        if place == 0 and item in DIALECTS:
            dialect = item
        elif not size.removeprefix("-").isdecimal():
            near = did_you_mean(item, DIALECTS) if place == 0 else ""
            names = ", ".join(DIALECTS)
            problems.append(
                f"{item!r} is no axis with a size, such as tp=2 or dp=-1, and none of {names}{near}"
            )
        elif name in sizes:
            problems.append(f"axis {name!r} has a size already; give each axis one")
        else:
            sizes[name] = int(size)
    if problems:
        raise UsageError(*(f"layout {text!r}: {problem}" for problem in problems))
    return dialect, sizes


def resolve(
    spec: str | Layout = "", /, *, world_size: int | None = None, order: str | None = None, **sizes: int
) -> DialectLayout:
    """Return the layouts that a spec, a layout or sizes describe; arguments and errors as for ``make_plan``."""
    if isinstance(spec, Layout):
        if sizes or order or world_size not in {None, spec.world_size}:
            raise UsageError(
                f"{spec} has its sizes, its order and its world; leave out what was given beside it"
            )
        return DialectLayout(PLAIN, spec)
    dialect, named = parse_spec(spec)
    if named and sizes:
        raise UsageError(f"both {spec!r} and sizes for {', '.join(sizes)} were given; give one of them")
    if not (named or sizes or world_size):
        raise UsageError(
            "neither sizes nor the number of ranks were given; name sizes, such as tp=2, or the number"
        )
    if named and dialect is None:
        if order is not None:
            raise UsageError(f"{spec!r} has its order already; leave the order out, or give sizes by name")
        return DialectLayout(PLAIN, Layout.from_shape(named, named.values(), world_size=world_size))
    return layouts_for(DIALECTS.get(dialect or "", PLAIN), named or sizes, world_size=world_size, order=order)


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
    gpus_per_node: int | None
    across_nodes: dict[str, int]
    warnings: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The dense layout."""
        return self.arrangement.dense

    def groups(self, kind: Kind, limit: int | None = None) -> list[Group]:
        """Return the first groups of a kind, by their lowest rank, or all of them."""
        layout = self.arrangement.layout(kind.view)
        return [_part(group, kind.members) for group in first_groups(layout, kind.axes, limit)]


def make_plan(
    spec: str | Layout = "",
    /,
    *,
    world_size: int | None = None,
    order: str | None = None,
    gpus_per_node: int | None = None,
    **sizes: int,
) -> Plan:
    """Plan a layout, without a process group, a GPU or torch.

    Args:
        spec: axes and sizes, slowest first, ``"pp=2,dp=-1,tp=2"``, or a dialect and sizes, ``"megatron tp=2,pp=4"``, or a layout.
        world_size: how many ranks there are.
        order: the order of the axes, fastest first, for sizes of a dialect, or by keyword.
        gpus_per_node: how many consecutive ranks fast links join.
        **sizes: instead of those in a spec, a size for each axis that matters. ``dp`` is inferred; the order is Megatron's. A size
            for ``ep``, ``etp`` or ``edp`` gives the experts a layout of their own.

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
    arrangement = resolve(spec, world_size=world_size, order=order, **sizes)
    across, warnings = _across_nodes(arrangement, gpus_per_node) if gpus_per_node else ({}, [])
    return Plan(arrangement, *_kinds(arrangement), gpus_per_node, across, (*arrangement.notes, *warnings))


def _layouts(arrangement: DialectLayout) -> list[Layout]:
    return [layout for layout in (arrangement.dense, arrangement.expert) if layout is not None]


def _across_nodes(arrangement: DialectLayout, node: int) -> tuple[dict[str, int], list[str]]:
    """Return by axis how many of its groups have ranks on several nodes, and what may be a mistake; the experts' axes at the end."""
    across, warnings, world = dict[str, int](), list[str](), arrangement.dense.world_size
    if world > node and world % node:
        warnings.append(f"{world} ranks do not fill nodes of {node}: the last has {world % node}")
    for layout in _layouts(arrangement):
        for axis in layout:
            if axis not in across:
                last = layout.group(0, axis)[-1]
                firsts = layout.where(**{axis: 0})
                across[axis] = sum(rank // node != (rank + last) // node for rank in firsts)
                if across[axis] and axis in _INSIDE:
                    leaves = f"{axis}={layout[axis]} leaves a node of {count_of(node, 'GPU')}, with what it sends in every layer"
                    warnings.append(
                        f"{leaves}; put it first in --order, or choose a size that divides {node}"
                    )
    return across, warnings


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


def _in_words(ranks: Sequence[int]) -> str:
    """Write ranks for people: all of them, or the first ones, the last one and how many."""
    if len(ranks) <= _LONGEST:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]} ({len(ranks)} ranks)"


def as_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write rows under named columns, numbers to the right.

    Example:
        >>> print(as_text(("axis", "size"), (("pp", 4), ("dp", 16))))
        axis  size
        pp       4
        dp      16
    """
    table = []
    for name, *cells in zip(columns, *rows, strict=True):
        texts = [name, *map(str, cells)]
        width = max(map(len, texts))
        number = not any(isinstance(cell, str) and cell for cell in cells)
        table.append([text.rjust(width) if number else text.ljust(width) for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*table, strict=True))


def plan_text(plan: Plan) -> str:
    """Write a plan for people."""
    dialect, layout = plan.arrangement.dialect, plan.layout
    lines = [f"{dialect.name}: {layout}, the last axis fastest"]
    if plan.arrangement.expert is not None:
        lines.append(f"experts: {plan.arrangement.expert}")
    if dialect.words:
        lines.append(
            f"in its words, {', '.join(f'{axis} is {word}' for axis, word in dialect.words.items())}"
        )
    rows = []
    for kind in plan.kinds:
        members = {"all": "", "ends": "ends of ", "first": "first of "}[kind.members]
        rows.append((kind.name, members + " x ".join(kind.axes), kind.size, kind.count, kind.communicator))
    lines += ["", as_text(("kind", "axes", "size", "groups", "communicator"), rows), ""]
    shards = tuple(axis for axis in layout if axis in dialect.shards)
    size = layout.size(*shards) if shards else 1
    replicas = Kind("model replicas", shards, "dense", "all", size, layout.world_size // size, "its own")
    for kind in (*plan.kinds, replicas):
        if kind.communicator == "its own":
            groups = plan.groups(kind, max(2, _SHOWN // kind.size))
            more = f" and {kind.count - len(groups)} more" if len(groups) < kind.count else ""
            lines.append(f"{kind.name}: {' '.join(f'({_in_words(group)})' for group in groups)}{more}")
    asked, held, in_world = plan.communicators
    asks = f"A rank asks for {count_of(asked, 'group')} beside the world's, and holds {count_of(held, 'communicator')}"
    shared = "if groups over the same ranks are shared"
    lines += ["", f"{asks} {shared}; the world has {count_of(in_world, 'group')}."]
    if plan.gpus_per_node:
        crossed = (
            ", ".join(f"{count} of {axis}" for axis, count in plan.across_nodes.items() if count) or "none"
        )
        lines.append(f"Groups with ranks on several nodes of {plan.gpus_per_node}: {crossed}.")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan.warnings)])


def rank_text(plan: Plan, rank: int) -> str:
    """Write for people where a rank stands, and what it shares with whom."""
    layout, node, experts = plan.layout, plan.gpus_per_node, plan.arrangement.expert
    lines = [f"rank {rank} of {layout}{f', node {rank // node}' if node else ''}"]
    for own in _layouts(plan.arrangement):
        for axis, at in own.coords(rank).items():
            if own is layout or axis not in layout:
                peers = _in_words(own.group(rank, axis))
                lines.append(f"  {axis} {at} of 0 to {own[axis] - 1}, with ranks {peers}")
    if "pp" in layout and layout["pp"] > 1:
        at, group = layout.coords(rank)["pp"], layout.group(rank, "pp")
        before = f"receives from rank {group[at - 1]}" if at else "the first stage"
        after = f"sends to rank {group[at + 1]}" if at + 1 < len(group) else "the last stage"
        lines.append(f"  pipeline: {before}, {after}")
    data = [axis for axis in layout if axis in _DATA]
    if data:
        same = _in_words(group_over(layout, rank, [axis for axis in layout if axis not in data]))
        part = f"part {layout.group_rank(rank, *data)} of 0 to {layout.size(*data) - 1}"
        lines.append(f"  batch: {part}, the same samples as ranks {same}")
    lines.append(f"  parameters: {_shards_in_words(layout, rank, plan.arrangement.dialect.shards)}")
    if experts is not None:
        lines.append(f"  experts: {_shards_in_words(experts, rank, _EXPERT_SHARDS)}")
    return "\n".join(lines)


def _shards_in_words(layout: Layout, rank: int, sharding: Sequence[str]) -> str:
    shards = []
    for axis, at in layout.coords(rank).items():
        if axis in sharding and layout[axis] > 1:
            shards.append(f"{axis} part {at} of 0 to {layout[axis] - 1}")
    copies = group_over(layout, rank, [axis for axis in layout if axis not in sharding])
    return f"{', '.join(shards) or 'all of them'}, the same on ranks {_in_words(copies)}"


class Difference(NamedTuple):
    """The groups over some axes in two layouts: whether they are the same ranks, and the first groups of each."""

    axes: tuple[str, ...]
    same: bool
    first: list[Group]
    second: list[Group]


class Comparison(NamedTuple):
    """Two arrangements of one world, and their differences by kind of group."""

    first: DialectLayout
    second: DialectLayout
    kinds: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether all groups are the same."""
        return all(kind.same for kind in self.kinds)


def compare(first: str, second: str, *, world_size: int | None = None) -> Comparison:
    """Compare the groups of two layouts, specs as for :func:`make_plan`, axis by axis, and the model replicas.

    Raises:
        UsageError: a layout cannot be read.
        LayoutError: sizes that do not fit, or two worlds of different size.

    Example:
        >>> comparison = compare("megatron tp=2,pp=4", "fairscale tp=2,pp=4", world_size=16)
        >>> {" x ".join(kind.axes): kind.same for kind in comparison.kinds}
        {'pp': False, 'dp': False, 'cp': True, 'tp': True, 'pp x tp': False}
    """
    one, other = resolve(first, world_size=world_size), resolve(second, world_size=world_size)
    if one.dense.world_size != other.dense.world_size:
        raise LayoutError(
            f"{one.dense} and {other.dense} are not over the same ranks; give sizes that fit one world_size"
        )
    axes = list(dict.fromkeys((*one.dense, *other.dense)))
    if "dp" in axes:  # where only one of them splits dp in two, both parts together are the other's dp
        axes = [axis for axis in axes if axis not in _DATA[1:]]
    kinds = [_difference((axis,), one.dense, other.dense) for axis in axes]
    if {"pp", "tp"} <= {*one.dense, *other.dense}:
        kinds.append(_difference(("pp", "tp"), one.dense, other.dense))
    if one.expert is not None and other.expert is not None:
        own = dict.fromkeys((*one.expert, *other.expert))
        kinds += [_difference((axis,), one.expert, other.expert) for axis in own if axis not in axes]
    return Comparison(one, other, tuple(kinds))


def _difference(axes: tuple[str, ...], one: Layout, other: Layout) -> Difference:
    """Return whether two layouts have the same groups over some axes; one that they do not have is of size 1."""
    names, keys, groups = {*axes, *(_DATA if "dp" in axes else ())}, [], []
    for layout in (one, other):
        own = [axis for axis in layout if axis in names]
        keys.append(layout.partition(*own)[2] if own else ())
        groups.append(first_groups(layout, own, _COMPARED))
    return Difference(axes, keys[0] == keys[1], *groups)


def comparison_text(comparison: Comparison) -> str:
    """Write a comparison for people."""
    lines = [
        f"{name}: {side.dialect.name} {side.dense}" for name, side in zip("ab", comparison[:2], strict=True)
    ]
    for kind in comparison.kinds:
        lines.append(f"{' x '.join(kind.axes)}: {'same' if kind.same else 'different'}")
        for name, groups in (("a", kind.first), ("b", kind.second)):
            if not kind.same:
                lines.append(f"  {name}: {' '.join(f'({_in_words(group)})' for group in groups)} ...")
    lines.insert(2, "")
    differing = sum(not kind.same for kind in comparison.kinds)
    return "\n".join([*lines, "", f"{differing} of {len(comparison.kinds)} kinds of groups differ"])


def positive(text: str) -> int:
    """Return a number of 1 or more; a ValueError, which argparse words, for another."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def add_layout(parser: ArgumentParser) -> None:
    """Add a spec string, a flag for each axis, and the order."""
    text = "axes and sizes, slowest first, such as pp=2,dp=-1,tp=2 (-1: whatever is left), or a dialect and sizes, such as: megatron "
    parser.add_argument(
        "spec", nargs="*", metavar="SPEC", help=f"{text}tp=2,pp=4; the dialects are {', '.join(DIALECTS)}"
    )
    for axis in (*AXES, *EXPERT_AXES):
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, metavar="N", help=f"the size of {axis}")
    text = "the order of the axes, fastest first (default: Megatron's, tp-cp-ep-dp-pp)"
    parser.add_argument("--order", help=text)


def layout_arguments(arguments: Namespace) -> tuple[str, dict[str, Any]]:
    """Return the spec and the keywords that :func:`resolve` takes."""
    names = (*AXES, *EXPERT_AXES, "order")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return " ".join(arguments.spec), given


def _configure_plan(parser: ArgumentParser) -> None:
    add_layout(parser)
    parser.add_argument("--world-size", type=positive, metavar="N", help="how many ranks there are")
    text = "consecutive ranks that fast links join"
    parser.add_argument("--gpus-per-node", type=positive, metavar="N", help=text)
    parser.add_argument("--rank", type=int, metavar="N", help="explain one rank instead")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the ranks into this file")
    text = "the axis that gives the colors (default: the slowest above 1)"
    parser.add_argument("--color-by", metavar="AXIS", help=text)


def _plan(arguments: Namespace) -> int:
    from namedmesh.plan.svg import draw_svg

    spec, given = layout_arguments(arguments)
    plan = make_plan(spec, world_size=arguments.world_size, gpus_per_node=arguments.gpus_per_node, **given)
    text = plan_text(plan) if arguments.rank is None else rank_text(plan, arguments.rank)
    if arguments.svg is not None:
        arguments.svg.write_text(draw_svg(plan, color_by=arguments.color_by), encoding="utf-8")
    sys.stdout.write(f"{text}\n")
    return 0


def _configure_diff(parser: ArgumentParser) -> None:
    parser.add_argument("--a", metavar="SPEC", required=True, help='one layout, such as "megatron tp=2,pp=4"')
    parser.add_argument("--b", metavar="SPEC", required=True, help='the other, such as "fairscale tp=2,pp=4"')
    parser.add_argument("--world-size", type=positive, metavar="N", help="how many ranks there are")


def _diff(arguments: Namespace) -> int:
    comparison = compare(arguments.a, arguments.b, world_size=arguments.world_size)
    sys.stdout.write(f"{comparison_text(comparison)}\n")
    return 0 if comparison.same else STATUS


_PLAN = "what a layout amounts to: groups, replicas, communicators, nodes"
_DIFF = "which groups differ between two layouts; the exit status is 3 if some do"
COMMANDS = {"plan": (_PLAN, _configure_plan, _plan), "diff": (_DIFF, _configure_diff, _diff)}
"""For each command its summary, the function that declares its arguments, and the one that runs it."""
