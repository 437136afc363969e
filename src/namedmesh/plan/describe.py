"""Layouts as users write them, who is with whom in them, and how two differ: ``namedmesh plan`` and ``namedmesh diff``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from namedmesh.axes import (
    DATA_AXES,
    DATA_PARTS,
    EXPERT_SHARDING_AXES,
    LAYER_AXES,
    SHARDING_AXES,
    USUAL_AXES,
)
from namedmesh.errors import LayoutError, UsageError, did_you_mean, format_count, format_items
from namedmesh.layout import Layout
from namedmesh.legacy import LEGACY_APIS, NAMEDMESH_API, JobLayout, compute_layouts, list_groups
from namedmesh.plan.svg import draw_svg

STATUS = 3  # where layouts or results differ, or nothing fits; beside 1, a layout that is wrong, and 2, arguments that are
_SHOWN, _LONGEST = 32, 16  # ranks of a kind, and of a group, that are shown
_COMPARED = 4  # groups of a difference that are shown

Group = tuple[int, ...]


def parse_spec(text: str) -> tuple[str | None, dict[str, int]]:
    """Parse a layout as users write it: axes with their sizes, slowest first, -1 for whatever is left, or a dialect and sizes.

    Example:
        >>> parse_spec("pp=2,dp=-1,tp=2"), parse_spec("megatron tp=2, pp=4")
        ((None, {'pp': 2, 'dp': -1, 'tp': 2}), ('megatron', {'tp': 2, 'pp': 4}))
    """
    dialect, sizes, problems = None, dict[str, int](), []
    for place, item in enumerate(text.replace(",", " ").split()):
        name, _, size = item.partition("=")
        if place == 0 and item in LEGACY_APIS:
            dialect = item
        elif not size.removeprefix("-").isdecimal():
            near = did_you_mean(item, LEGACY_APIS) if place == 0 else ""
            names = f"none of {', '.join(LEGACY_APIS)}{near}"
            problems.append(f"{item!r} is no size, such as tp=2 or dp=-1, and {names}")
        elif name in sizes:
            problems.append(f"axis {name!r} has a size already; give each axis one")
        else:
            sizes[name] = int(size)
    if problems:
        raise UsageError(*(f"layout {text!r}: {problem}" for problem in problems))
    return dialect, sizes


def resolve(
    spec: str | Layout = "", /, *, world_size: int | None = None, order: str | None = None, **sizes: int
) -> JobLayout:
    """Return the layouts that a spec, a layout or sizes describe; arguments and errors as for ``make_plan``."""
    dialect, named = (None, dict(spec.items())) if isinstance(spec, Layout) else parse_spec(spec)
    if named and sizes:
        raise UsageError(f"both {spec!r} and sizes for {', '.join(sizes)} were given; give one of them")
    if named and dialect is None:
        if order is not None:
            raise UsageError(f"{spec!r} has its order already; leave the order out, or give sizes by name")
        return JobLayout(NAMEDMESH_API, Layout.from_shape(named, named.values(), world_size=world_size))
    return compute_layouts(
        LEGACY_APIS.get(dialect or "", NAMEDMESH_API), named or sizes, world_size=world_size, order=order
    )


@dataclass(frozen=True)
class Kind:
    """The groups of one kind: a dialect's row, how large and how many they are, and what serves them if ranks share groups."""

    name: str
    axes: tuple[str, ...]
    layout: Layout
    members: str
    size: int
    count: int
    communicator: str  # "its own", "the world's", "none, one rank", or "that of" another kind

    def groups(self, limit: int | None = None) -> list[Group]:
        """Return the first groups, by their lowest rank, or all of them."""
        return _groups(self.layout, self.axes, self.members, limit)


@dataclass(frozen=True)
class Plan:
    """The groups, communicators and warnings of a job's layout; written for people by ``str``."""

    arrangement: JobLayout  # the layouts, and whose rank table they are
    kinds: tuple[Kind, ...]  # in the order the dialect makes them
    asked: int  # groups that a rank asks for beside the world's
    held: int  # communicators that it holds beside the world's, if groups over the same ranks are shared
    in_world: int  # groups of all ranks
    gpus_per_node: int | None
    across_nodes: dict[str, int]  # by axis, how many of its groups have ranks on several nodes
    warnings: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The dense layout."""
        return self.arrangement.dense

    def __str__(self) -> str:
        api, layout = self.arrangement.api, self.layout
        lines = [f"{api.name}: {layout}, the last axis fastest"]
        if self.arrangement.expert is not None:
            lines.append(f"experts: {self.arrangement.expert}")
        rows = []
        for kind in self.kinds:
            axes = {"all": "", "ends": "ends of ", "first": "first of "}[kind.members] + " x ".join(kind.axes)
            rows.append((kind.name, axes, kind.size, kind.count, kind.communicator))
        lines += ["", as_text(("kind", "axes", "size", "groups", "communicator"), rows), ""]
        shards = tuple(axis for axis in layout if axis in SHARDING_AXES)
        size = layout.size(*shards) if shards else 1
        replicas = Kind("model replicas", shards, layout, "all", size, layout.world_size // size, "its own")
        for kind in (*self.kinds, replicas):
            if kind.communicator == "its own":
                groups = kind.groups(max(2, _SHOWN // kind.size))
                more = f" and {kind.count - len(groups)} more" if len(groups) < kind.count else ""
                lines.append(f"{kind.name}: {_in_words(groups)}{more}")
        asks = f"A rank asks for {format_count(self.asked, 'group')} beside the world's"
        holds = f"holds {format_count(self.held, 'communicator')} if groups over the same ranks are shared"
        lines += ["", f"{asks}, and {holds}; the world has {format_count(self.in_world, 'group')}."]
        if self.gpus_per_node:
            crossed = ", ".join(f"{count} of {axis}" for axis, count in self.across_nodes.items() if count)
            lines.append(f"Groups with ranks on several nodes of {self.gpus_per_node}: {crossed or 'none'}.")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def make_plan(
    spec: str | Layout = "",
    /,
    *,
    world_size: int | None = None,
    order: str | None = None,
    gpus_per_node: int | None = None,
    **sizes: int,
) -> Plan:
    """Plan a layout, without a process group, a GPU or torch; a LayoutError names what does not fit.

    Args:
        spec: a layout, or text, ``"pp=2,dp=-1,tp=2"``, slowest first, or ``"megatron tp=2,pp=4"``; or a dialect, or nothing.
        world_size: how many ranks there are.
        order: the axes, fastest first; by default the dialect's, without one Megatron's.
        gpus_per_node: how many consecutive ranks fast links join.
        **sizes: beside a dialect, or alone; ``dp`` is inferred, and ``ep``, ``etp`` or ``edp`` give the experts a layout of their own.

    Example:
        >>> plan = make_plan(world_size=16, tp=2, pp=4)
        >>> [(kind.name, kind.groups(2)) for kind in plan.kinds[:2]]
        [('pp', [(0, 4, 8, 12), (1, 5, 9, 13)]), ('dp', [(0, 2), (1, 3)])]
    """
    arrangement = resolve(spec, world_size=world_size, order=order, **sizes)
    across, warnings = _across_nodes(arrangement, gpus_per_node) if gpus_per_node else ({}, [])
    return Plan(arrangement, *_kinds(arrangement), gpus_per_node, across, (*arrangement.notes, *warnings))


def _across_nodes(arrangement: JobLayout, node: int) -> tuple[dict[str, int], list[str]]:
    """Return by axis how many of its groups have ranks on several nodes, and what may be a mistake; the experts' axes at the end."""
    across, warnings, world = dict[str, int](), list[str](), arrangement.dense.world_size
    if world > node and world % node:
        warnings.append(f"{world} ranks do not fill nodes of {node}: the last has {world % node}")
    for layout in filter(None, (arrangement.dense, arrangement.expert)):
        for axis in layout:
            if axis not in across:
                last, firsts = layout.group(0, axis)[-1], layout.where(**{axis: 0})
                across[axis] = sum(rank // node != (rank + last) // node for rank in firsts)
                if across[axis] and axis in LAYER_AXES:
                    leaves = f"{axis}={layout[axis]} leaves a node of {format_count(node, 'GPU')}"
                    remedy = f"put it first in --order, or choose a size that divides {node}"
                    warnings.append(f"{leaves}, with what it sends in every layer; {remedy}")
    return across, warnings


def _groups(layout: Layout, axes: Sequence[str], members: str, limit: int | None) -> list[Group]:
    """Return the first groups over some axes by their lowest rank, or all: "all" of their ranks, both "ends", or the "first"."""
    firsts = layout.where(**dict.fromkeys(axes, 0))[:limit]
    groups = [layout.group(rank, *axes) if axes else (rank,) for rank in firsts]
    if members == "ends":
        return [tuple(dict.fromkeys((group[0], group[-1]))) for group in groups]
    return groups if members == "all" else [group[:1] for group in groups]


def _kinds(arrangement: JobLayout) -> tuple[tuple[Kind, ...], int, int, int]:
    """Return the groups of each kind, and how many a rank asks for, holds, and the world has.

    Rank 0 is in a group of every kind, and kinds that have the same ranks there have them everywhere. A gloo group over the same
    ranks is one more.
    """
    kinds, owners, held, asked, in_world = list[Kind](), dict[Group, str](), set[tuple[Group, bool]](), 0, 0
    for row in list_groups(arrangement):
        layout = arrangement.get_layout(row.view)
        [group] = _groups(layout, row.axes, row.members, 1)
        count, backends = layout.count(*row.axes), {False, bool(row.gloo)}
        owner = owners.setdefault(group, row.name)
        served = "its own" if owner == row.name else f"that of {owner}"
        if len(group) == 1:
            served = "none, one rank"
        elif len(group) == layout.world_size:
            served = "the world's"
        if len(group) > 1:
            held.update((group, gloo) for gloo in backends)
        asked += len(backends)
        in_world += len(backends) * count
        kinds.append(Kind(row.name, row.axes, layout, row.members, len(group), count, served))
    held.discard((tuple(arrangement.dense.ranks), False))  # the default group
    return tuple(kinds), asked, len(held), in_world


def _in_words(groups: Iterable[Group]) -> str:
    return " ".join(f"({format_items(group, _LONGEST)})" for group in groups)


def as_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write rows under named columns, numbers to the right."""
    table = []
    for name, *cells in zip(columns, *rows, strict=True):
        texts = [name, *map(str, cells)]
        width = max(map(len, texts))
        number = not any(isinstance(cell, str) and cell for cell in cells)
        table.append([text.rjust(width) if number else text.ljust(width) for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*table, strict=True))


def rank_text(plan: Plan, rank: int) -> str:
    """Write for people where a rank stands, and what it shares with whom."""
    layout, node, experts = plan.layout, plan.gpus_per_node, plan.arrangement.expert
    lines = [f"rank {rank} of {layout}{f', node {rank // node}' if node else ''}"]
    for own in filter(None, (layout, experts)):
        for axis, at in own.coords(rank).items():
            if own is layout or axis not in layout:
                peers = format_items(own.group(rank, axis), _LONGEST)
                lines.append(f"  {axis} {at} of 0 to {own[axis] - 1}, with ranks {peers}")
    if "pp" in layout and layout["pp"] > 1:
        at, group = layout.coords(rank)["pp"], layout.group(rank, "pp")
        before = f"receives from rank {group[at - 1]}" if at else "the first stage"
        after = f"sends to rank {group[at + 1]}" if at + 1 < len(group) else "the last stage"
        lines.append(f"  pipeline: {before}, {after}")
    data = {axis: at for axis, at in layout.coords(rank).items() if axis in DATA_AXES}
    if data:
        part = f"part {layout.group_rank(rank, *data)} of 0 to {layout.size(*data) - 1}"
        lines.append(
            f"  batch: {part}, the same samples as ranks {format_items(layout.where(**data), _LONGEST)}"
        )
    lines.append(f"  parameters: {_shards_in_words(layout, rank, SHARDING_AXES)}")
    if experts is not None:
        lines.append(f"  experts: {_shards_in_words(experts, rank, EXPERT_SHARDING_AXES)}")
    return "\n".join(lines)


def _shards_in_words(layout: Layout, rank: int, sharding: Sequence[str]) -> str:
    own = {axis: at for axis, at in layout.coords(rank).items() if axis in sharding and layout[axis] > 1}
    shards = ", ".join(f"{axis} part {at} of 0 to {layout[axis] - 1}" for axis, at in own.items())
    return f"{shards or 'all of them'}, the same on ranks {format_items(layout.where(**own), _LONGEST)}"


class Comparison(NamedTuple):
    """Two arrangements of one world, and by the axes of their groups the first groups of each, where they are not the same ranks.

    Written for people by ``str``.
    """

    first: JobLayout
    second: JobLayout
    kinds: dict[tuple[str, ...], tuple[list[Group], list[Group]] | None]

    def __str__(self) -> str:
        a, b = (f"{side.api.name} {side.dense}" for side in (self.first, self.second))
        lines = [f"a: {a}", f"b: {b}", ""]
        for axes, groups in self.kinds.items():
            lines.append(f"{' x '.join(axes)}: {'different' if groups else 'same'}")
            if groups:
                lines += [f"  {side}: {_in_words(each)} ..." for side, each in zip("ab", groups, strict=True)]
        differing = sum(groups is not None for groups in self.kinds.values())
        return "\n".join([*lines, "", f"{differing} of {len(self.kinds)} kinds of groups differ"])


def compare(first: str, second: str, *, world_size: int | None = None) -> Comparison:
    """Compare the groups of two layouts over the same ranks, specs as for :func:`make_plan`, axis by axis, and the model replicas."""
    one, other = resolve(first, world_size=world_size), resolve(second, world_size=world_size)
    if one.dense.world_size != other.dense.world_size:
        raise LayoutError(f"{one.dense} and {other.dense} are not over the same ranks; give one world_size")
    axes: list[tuple[str, ...]] = [(axis,) for axis in dict.fromkeys((*one.dense, *other.dense))]
    if ("dp",) in axes:  # where only one of them splits dp in two, both parts together are the other's dp
        axes = [each for each in axes if each[0] not in DATA_PARTS]
    if ("pp",) in axes and ("tp",) in axes:
        axes.append(("pp", "tp"))
    kinds = {each: _difference(each, one.dense, other.dense) for each in axes}
    if one.expert is not None and other.expert is not None:
        own = [axis for axis in (*one.expert, *other.expert) if axis not in (*one.dense, *other.dense)]
        kinds |= {(axis,): _difference((axis,), one.expert, other.expert) for axis in own}
    return Comparison(one, other, kinds)


def _difference(axes: tuple[str, ...], one: Layout, other: Layout) -> tuple[list[Group], list[Group]] | None:
    """Return the first groups of two layouts over some axes, unless all are the same; an axis that one does not have is of size 1."""
    names = {*axes, *(DATA_AXES if "dp" in axes else ())}
    over, others = ([axis for axis in layout if axis in names] for layout in (one, other))
    keys = [layout.partition(*own)[2] if own else () for layout, own in ((one, over), (other, others))]
    if keys[0] == keys[1]:
        return None
    return _groups(one, over, "all", _COMPARED), _groups(other, others, "all", _COMPARED)


def positive(text: str) -> int:
    """Return a number of 1 or more; argparse words the error for another."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def add_layout(parser: ArgumentParser) -> None:
    """Add a spec string, a flag for each axis, and the order."""
    text = f"axes and sizes, slowest first: pp=2,dp=-1,tp=2; or one of {', '.join(LEGACY_APIS)} and sizes"
    parser.add_argument("spec", nargs="*", metavar="SPEC", help=text)
    for axis in USUAL_AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, metavar="N", help=f"the size of {axis}")
    parser.add_argument("--order", help="the order of the axes, fastest first (default: tp-cp-ep-dp-pp)")


def layout_arguments(arguments: Namespace) -> tuple[str, dict[str, Any]]:
    """Return the spec and the keywords that :func:`resolve` takes."""
    given = {name: getattr(arguments, name) for name in (*USUAL_AXES, "order")}
    return " ".join(arguments.spec), {name: value for name, value in given.items() if value is not None}


def _configure_plan(parser: ArgumentParser) -> None:
    add_layout(parser)
    parser.add_argument("--world-size", type=positive, metavar="N", help="how many ranks there are")
    parser.add_argument("--gpus-per-node", type=positive, metavar="N", help="ranks that fast links join")
    parser.add_argument("--rank", type=int, metavar="N", help="explain one rank instead")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the ranks into this file")
    parser.add_argument("--color-by", metavar="AXIS", help="gives the colors (default: the slowest above 1)")


def _plan(arguments: Namespace) -> int:
    spec, given = layout_arguments(arguments)
    plan = make_plan(spec, world_size=arguments.world_size, gpus_per_node=arguments.gpus_per_node, **given)
    text = plan if arguments.rank is None else rank_text(plan, arguments.rank)
    if arguments.svg is not None:
        picture = draw_svg(plan.layout, gpus_per_node=plan.gpus_per_node, color_by=arguments.color_by)
        arguments.svg.write_text(picture, encoding="utf-8")
    sys.stdout.write(f"{text}\n")
    return 0


def _configure_diff(parser: ArgumentParser) -> None:
    for name in ("--a", "--b"):
        parser.add_argument(name, metavar="SPEC", required=True, help="a layout, such as megatron tp=2,pp=4")
    parser.add_argument("--world-size", type=positive, metavar="N", help="how many ranks there are")


def _diff(arguments: Namespace) -> int:
    comparison = compare(arguments.a, arguments.b, world_size=arguments.world_size)
    sys.stdout.write(f"{comparison}\n")
    return STATUS if any(comparison.kinds.values()) else 0


_PLAN = "what a layout amounts to: groups, replicas, communicators, nodes"
_DIFF = "which groups differ between two layouts; the exit status is 3 if some do"
COMMANDS = {"plan": (_PLAN, _configure_plan, _plan), "diff": (_DIFF, _configure_diff, _diff)}
