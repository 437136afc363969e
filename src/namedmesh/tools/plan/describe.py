"""Describe a layout: its groups and communicators, and a rank (``namedmesh plan``)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from namedmesh._command_line import MOST_RANKS, int_between
from namedmesh._errors import UsageError, format_count, format_items
from namedmesh.layout import Layout
from namedmesh.layout.axes import DATA_AXES, EXPERT_SHARDING_AXES, LAYER_AXES, SHARDING_AXES
from namedmesh.layout.orders import EXPERT, JobLayout, list_groups
from namedmesh.tools.plan.spec import (
    add_layout_arguments,
    format_table,
    make_layouts,
    read_layout_arguments,
)
from namedmesh.tools.plan.svg import draw_svg

# Text about thousands of ranks stays readable: a kind shows groups of up to 32 ranks in all, a
# group 16 ranks.
_SHOWN_RANKS_OF_KIND = 32
_SHOWN_RANKS_OF_GROUP = 16

Group = tuple[int, ...]
"""The global ranks of a process group."""


@dataclass(frozen=True)
class Kind:
    """The process groups of one kind, such as all data-parallel groups.

    Attributes:
        name: the name in the legacy API, or the axes.
        axes: the axes that vary inside a group.
        layout: the dense or the expert layout that has these axes.
        members: "all" ranks along the axes, the first and the last rank ("ends"), or only the
            "first".
        size: the number of ranks in a group.
        count: the number of groups.
        communicator: the owner of the groups' communicator, if groups over the same ranks share
            one: "its own", "the world's", "none, one rank", or "that of" another kind.
    """

    name: str
    axes: tuple[str, ...]
    layout: Layout
    members: str
    size: int
    count: int
    communicator: str

    def groups(self, limit: int | None = None) -> list[Group]:
        """Return the groups in order of their lowest rank.

        Args:
            limit: the number of groups; by default all.
        """
        return list_first_groups(self.layout, self.axes, self.members, limit)


@dataclass(frozen=True)
class LayoutPlan:
    """The groups, communicators and warnings of a layout; ``str`` formats them as text.

    Attributes:
        arrangement: the dense and the expert layout, and the legacy API whose groups are listed.
        kinds: the kinds of groups, in the order in which they are created.
        groups_per_rank: the number of groups that a rank requests, without the default group.
        communicators_per_rank: the number of communicators that a rank holds if groups over the
            same ranks are shared, without the default group.
        groups_in_world: the number of groups of all ranks together.
        gpus_per_node: the number of consecutive ranks of a node, if known.
        across_nodes: by axis, the number of its groups that have ranks on several nodes.
        warnings: likely mistakes, and sizes that the legacy API changes.
    """

    arrangement: JobLayout
    kinds: tuple[Kind, ...]
    groups_per_rank: int
    communicators_per_rank: int
    groups_in_world: int
    gpus_per_node: int | None
    across_nodes: dict[str, int]
    warnings: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The dense layout."""
        return self.arrangement.dense

    def __str__(self) -> str:
        # The order is from the layout to its groups to numbers, so that a reader can stop early.
        lines = [f"{self.arrangement.api.name}: {self.layout}, the last axis fastest"]
        if self.arrangement.expert is not None:
            lines.append(f"experts: {self.arrangement.expert}")
        # "ends" are Megatron's embedding groups: the first and the last pipeline stage share the
        # word embedding.
        prefixes = {"all": "", "ends": "ends of ", "first": "first of "}
        rows = []
        for kind in self.kinds:
            axes = prefixes[kind.members] + " x ".join(kind.axes)
            rows.append((kind.name, axes, kind.size, kind.count, kind.communicator))
        lines += ["", format_table(("kind", "axes", "size", "groups", "communicator"), rows), ""]
        for kind in (*self.kinds, _find_model_replicas(self.layout)):
            # A kind that shares the groups of another kind has the same ranks; listing them once is
            # enough.
            if kind.communicator == "its own":
                groups = kind.groups(max(2, _SHOWN_RANKS_OF_KIND // kind.size))
                more = f" and {kind.count - len(groups)} more" if len(groups) < kind.count else ""
                lines.append(f"{kind.name}: {format_groups(groups)}{more}")
        asks = format_count(self.groups_per_rank, "group")
        holds = format_count(self.communicators_per_rank, "communicator")
        lines.append(
            f"\nA rank asks for {asks} in addition to the default group, and holds {holds} if groups over the "
            f"same ranks are shared; the world has {format_count(self.groups_in_world, 'group')}."
        )
        if self.gpus_per_node:
            crossing = [f"{count} of {axis}" for axis, count in self.across_nodes.items() if count]
            text = ", ".join(crossing) or "none"
            lines.append(f"Groups with ranks on several nodes of {self.gpus_per_node}: {text}.")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _find_model_replicas(layout: Layout) -> Kind:
    """Return the groups of ranks that together hold one replica of the model."""
    # ZeRO and FSDP shards along dp do not count here: which of them a trainer uses is not part of a
    # layout.
    axes = tuple(axis for axis in layout if axis in SHARDING_AXES)
    size = layout.size(*axes) if axes else 1
    return Kind("model replicas", axes, layout, "all", size, layout.world_size // size, "its own")


def make_plan(
    spec: str | Layout = "",
    /,
    *,
    world_size: int | None = None,
    order: str | None = None,
    gpus_per_node: int | None = None,
    **sizes: int,
) -> LayoutPlan:
    """Describe a layout without a process group, a GPU or torch.

    Args:
        spec: a layout, or text: ``"pp=2,dp=-1,tp=2"``, slowest first, ``"megatron tp=2,pp=4"``, or
            the name of a legacy API; may be empty if ``sizes`` are given.
        world_size: the number of ranks; needed if a size is inferred.
        order: the axes, fastest first; by default the legacy API's order, without one Megatron's.
        gpus_per_node: the number of consecutive ranks that fast links connect.
        **sizes: the axis sizes, if ``spec`` has none. ``dp`` is inferred. ``ep``, ``etp`` or
            ``edp`` give the experts a separate layout.

    Raises:
        LayoutError: if the sizes do not fit together or into the world.

    Example:
        >>> plan = make_plan(world_size=16, tp=2, pp=4)
        >>> [(kind.name, kind.groups(2)) for kind in plan.kinds[:2]]
        [('pp', [(0, 4, 8, 12), (1, 5, 9, 13)]), ('dp', [(0, 2), (1, 3)])]
    """
    layouts = make_layouts(spec, world_size=world_size, order=order, **sizes)
    crossings: dict[str, int] = {}
    warnings = list(layouts.notes)
    if gpus_per_node:
        crossings, node_warnings = _check_nodes(layouts, gpus_per_node)
        warnings += node_warnings
    kinds: list[Kind] = []
    # Rank 0 is in a group of every kind. Two kinds with the same group there have the same groups
    # everywhere.
    owners: dict[Group, str] = {}
    # NCCL and gloo cannot share a communicator: a group with gloo in addition counts twice.
    communicators: set[tuple[Group, bool]] = set()
    requested = 0
    total = 0
    for row in list_groups(layouts):
        layout = layouts.get_layout(row.view)
        [group] = list_first_groups(layout, row.axes, row.members, limit=1)
        count = layout.count(*row.axes)
        backends = {False, bool(row.gloo)}
        owner = owners.setdefault(group, row.name)
        # A group of one rank needs no communication, and torch's default group serves a group of
        # all ranks.
        communicator = "its own" if owner == row.name else f"that of {owner}"
        if len(group) == 1:
            communicator = "none, one rank"
        else:
            communicators.update((group, is_gloo) for is_gloo in backends)
            if len(group) == layout.world_size:
                communicator = "the world's"
        requested += len(backends)
        total += len(backends) * count
        kinds.append(Kind(row.name, row.axes, layout, row.members, len(group), count, communicator))
    communicators.discard((tuple(layouts.dense.ranks), False))  # the default group exists already
    return LayoutPlan(
        layouts, tuple(kinds), requested, len(communicators), total, gpus_per_node, crossings, tuple(warnings)
    )


def _map_axes_to_layouts(layouts: JobLayout) -> dict[str, Layout]:
    """Return the layout of each axis; an axis of both layouts is an axis of the dense one."""
    by_axis = dict.fromkeys(layouts.dense, layouts.dense)
    for axis in layouts.expert or ():
        by_axis.setdefault(axis, layouts.get_layout(EXPERT))
    return by_axis


def _check_nodes(layouts: JobLayout, gpus_per_node: int) -> tuple[dict[str, int], list[str]]:
    """Find the groups that leave a node.

    Returns:
        By axis, the number of groups that have ranks on several nodes; and warnings about nodes
        that are not full, and about axes that should not leave a node.
    """
    crossings = {}
    warnings = []
    # A world smaller than a node is no mistake, such as four ranks on a node of eight GPUs.
    world_size = layouts.dense.world_size
    remainder = world_size % gpus_per_node
    if world_size > gpus_per_node and remainder:
        warnings.append(f"{world_size} ranks do not fill nodes of {gpus_per_node}: the last has {remainder}")
    for axis, layout in _map_axes_to_layouts(layouts).items():
        # Every group is a translation of rank 0's group, so the first and the last rank of each are
        # enough.
        extent = layout.group(0, axis)[-1]
        count = 0
        for first_rank in layout.where(**{axis: 0}):
            count += first_rank // gpus_per_node != (first_rank + extent) // gpus_per_node
        crossings[axis] = count  # 0 is kept: callers look up every axis
        if count and axis in LAYER_AXES:
            warnings.append(
                f"{axis}={layout[axis]} leaves a node of {format_count(gpus_per_node, 'GPU')}, "
                "with what it sends in every layer; put it first in --order, or choose a size "
                f"that divides {gpus_per_node}"
            )
    return crossings, warnings


def list_first_groups(
    layout: Layout, axes: Sequence[str], members: str = "all", limit: int | None = None
) -> list[Group]:
    """Return the groups over some axes in order of their lowest rank.

    Args:
        layout: the layout of the ranks.
        axes: the axes that vary inside a group; without axes, each rank is a group.
        members: as in :class:`Kind`.
        limit: the number of groups; by default all.
    """
    groups: list[Group] = []
    for first_rank in layout.where(**dict.fromkeys(axes, 0))[:limit]:
        group = layout.group(first_rank, *axes) if axes else (first_rank,)
        if members == "first":
            group = group[:1]
        elif members == "ends" and len(group) > 1:
            group = (group[0], group[-1])
        groups.append(group)
    return groups


def format_groups(groups: Iterable[Group]) -> str:
    """Format groups of ranks as text; long groups are abbreviated."""
    return " ".join(f"({format_items(group, _SHOWN_RANKS_OF_GROUP)})" for group in groups)


def format_rank(plan: LayoutPlan, rank: int) -> str:
    """Format the coordinates of a rank, its peers, its batch and its parameters as text.

    Args:
        plan: as :func:`make_plan` returns it.
        rank: a global rank.

    Raises:
        LayoutError: if the layout does not have this rank.
    """
    layout = plan.layout
    expert_layout = plan.arrangement.expert
    heading = f"rank {rank} of {layout}"
    if plan.gpus_per_node:
        heading += f", node {rank // plan.gpus_per_node}"
    lines = [heading]
    for axis, axis_layout in _map_axes_to_layouts(plan.arrangement).items():
        position = axis_layout.coords(rank)[axis]
        peers = format_items(axis_layout.group(rank, axis), _SHOWN_RANKS_OF_GROUP)
        lines.append(f"  {axis} {position} of 0 to {axis_layout[axis] - 1}, with ranks {peers}")
    # The neighbors of a stage, the batch and the shards follow from the usual names of the axes
    # (namedmesh.layout.axes).
    coords = layout.coords(rank)
    if "pp" in layout and layout["pp"] > 1:
        stage = coords["pp"]
        stages = layout.group(rank, "pp")
        before = f"receives from rank {stages[stage - 1]}" if stage > 0 else "the first stage"
        after = f"sends to rank {stages[stage + 1]}" if stage + 1 < len(stages) else "the last stage"
        lines.append(f"  pipeline: {before}, {after}")
    data_coords = {}
    for axis, position in coords.items():
        if axis in DATA_AXES:
            data_coords[axis] = position
    if data_coords:
        part = f"part {layout.group_rank(rank, *data_coords)} of 0 to {layout.size(*data_coords) - 1}"
        same = format_items(layout.where(**data_coords), _SHOWN_RANKS_OF_GROUP)
        lines.append(f"  batch: {part}, the same samples as ranks {same}")
    lines.append(f"  parameters: {_describe_shard(layout, rank, SHARDING_AXES)}")
    # Experts are sharded over axes of their own, so their replicas are on other ranks.
    if expert_layout is not None:
        lines.append(f"  experts: {_describe_shard(expert_layout, rank, EXPERT_SHARDING_AXES)}")
    return "\n".join(lines)


def _describe_shard(layout: Layout, rank: int, sharding_axes: Sequence[str]) -> str:
    """Describe the shard of the parameters that a rank has, and the ranks with the same shard."""
    # An axis of size 1 shards nothing. Ranks with the same coordinates on the other axes are
    # replicas.
    coords = layout.coords(rank)
    shard_coords = {}
    parts = []
    for axis in layout:
        if axis in sharding_axes and layout[axis] > 1:
            shard_coords[axis] = coords[axis]
            parts.append(f"{axis} part {coords[axis]} of 0 to {layout[axis] - 1}")
    shard = ", ".join(parts) or "all of them"
    return f"{shard}, the same on ranks {format_items(layout.where(**shard_coords), _SHOWN_RANKS_OF_GROUP)}"


def _configure(parser: ArgumentParser) -> None:
    add_layout_arguments(parser)
    count = int_between(1)
    parser.add_argument("--world-size", type=count, metavar="N", help="how many ranks there are")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="ranks that fast links join")
    rank = int_between(0, MOST_RANKS - 1)
    parser.add_argument("--rank", type=rank, metavar="N", help="explain one rank instead")
    parser.add_argument("--svg", metavar="FILE", help="draw the ranks into this file")
    text = "with --svg: gives the colors (default: the slowest above 1)"
    parser.add_argument("--color-by", metavar="AXIS", help=text)


def _run(arguments: Namespace) -> tuple[int, str]:
    if arguments.color_by is not None and arguments.svg is None:
        raise UsageError("--color-by is for the picture of --svg; give --svg FILE, too")
    spec, keywords = read_layout_arguments(arguments)
    plan = make_plan(spec, world_size=arguments.world_size, gpus_per_node=arguments.gpus_per_node, **keywords)
    text = str(plan) if arguments.rank is None else format_rank(plan, arguments.rank)
    if arguments.svg is not None:
        picture = draw_svg(plan.layout, gpus_per_node=plan.gpus_per_node, color_by=arguments.color_by)
        try:
            Path(arguments.svg).write_text(picture, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"the picture cannot be written: {error}; give --svg another FILE") from None
    return 0, f"{text}\n"


_SUMMARY = "what a layout amounts to: groups, replicas, communicators, nodes"
COMMANDS = {"plan": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
