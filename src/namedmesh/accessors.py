"""What a mesh answers about this rank: sub-meshes, groups, ranks and neighbors by name. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._torch import constant_under_compile
from namedmesh.errors import MeshError, did_you_mean, format_count, format_items
from namedmesh.groups import Communicator, Groups
from namedmesh.layout import Layout, format_axes, quote_axes
from namedmesh.views import ROOT_VIEW, Views


class Place(NamedTuple):
    """This rank's place on an axis or a product: among which ranks, the how manieth, on which group."""

    ranks: tuple[int, ...]
    rank: int
    group: Any


class Accessors:
    """The answers of a :class:`namedmesh.NamedMesh`: worked out when a group is made, as compiled code must not look for one."""

    layout: Layout
    device: torch.device
    _groups: Groups
    global_rank: int
    closed: bool
    _views: Views
    _meshes: dict[tuple[str, ...], DeviceMesh]
    _slices: dict[str, DeviceMesh]
    _places: dict[tuple[str, ...], Place]
    _axes: tuple[str, ...]
    _version: str

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh over axes and flattened products, in the order of the layout; the same object each time.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once; so for all accessors.
            LayoutError: axes out of order.
            MeshError: the mesh is closed; so for all accessors.
        """
        if isinstance(names, str):
            known = self._slices.get(names)
            return self._slice((names,), self._version) if known is None else known
        return self._slice(tuple(names), self._version)

    def __contains__(self, name: object) -> bool:
        """Return whether ``mesh[name]`` answers: for axes, those of views included, and flattened products by name."""
        return isinstance(name, str) and (name,) in self._places

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the axes, slowest first; those of a view come after the mesh's own."""
        return iter(self._axes)

    def __len__(self) -> int:
        """Return the number of axes."""
        return len(self._axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the layout's axes, slowest first; ``list(mesh)`` has those of views, too."""
        return self.layout.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the layout's axes, in the order of :attr:`axes`, as torch's ``DeviceMesh`` has them."""
        return self.layout.sizes

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for a name that does not exist, with what to write for an axis, or for what torch calls so."""
        remedy = _INSTEAD.get(name)
        if remedy is None and name in self.__dict__.get("_axes", ()):
            remedy = f'mesh.size("{name}"), mesh.rank("{name}"), mesh.group("{name}") or mesh["{name}"]'
        hint = f"; write {remedy}" if remedy else did_you_mean(name, _public_names(type(self)))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of this rank over one axis, or over several that were flattened; else MeshError."""
        known = self._places.get(axes)
        group: dist.ProcessGroup = self._find_group(axes, self._version) if known is None else known.group
        return group

    def size(self, *axes: str) -> int:
        """Return the number of ranks in this rank's group over ``axes``; without axes, in the whole mesh."""
        known = self._places.get(axes)
        return len(self._find_ranks(axes, self._version) if known is None else known.ranks)

    def rank(self, *axes: str) -> int:
        """Return this rank's position in its group over ``axes``; without axes, in the whole mesh."""
        known = self._places.get(axes)
        return self._find_ranks(axes, self._version).index(self.global_rank) if known is None else known.rank

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks in this rank's group over ``axes``, ascending; without axes, of the whole mesh."""
        known = self._places.get(axes)
        return self._find_ranks(axes, self._version) if known is None else known.ranks

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis; those of a view come after the mesh's own."""
        self._check_open()
        return {axis: self.rank(axis) for axis in self}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch mesh over all axes of the layout."""
        self._check_open()
        return self._views.roots[ROOT_VIEW]

    @property
    def views(self) -> dict[str, Layout]:
        """The layouts of the views that were added, by name."""
        return {name: layout for name, layout in self._views.layouts.items() if name != ROOT_VIEW}

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The process groups that this rank holds through this mesh, in the order they came."""
        self._check_open()
        return tuple(self._groups.acquired.values())

    def is_first(self, axis: str) -> bool:
        """Return whether this rank is the first on an axis, or on a flattened product."""
        return self.rank(axis) == 0

    def is_last(self, axis: str) -> bool:
        """Return whether this rank is the last on an axis, or on a flattened product."""
        return self.rank(axis) == self.size(axis) - 1

    def next(self, axis: str) -> int:
        """Return the global rank after this one on an axis or a flattened product; after the last comes the first."""
        return self.ranks(axis)[(self.rank(axis) + 1) % self.size(axis)]

    def prev(self, axis: str) -> int:
        """Return the global rank before this one on an axis or a flattened product; before the first comes the last."""
        return self.ranks(axis)[self.rank(axis) - 1]

    def gloo_group(self, *axes: str) -> dist.ProcessGroup:
        """Return the gloo group over the same ranks as :meth:`group`; MeshError where no option ``create_gloo_group`` made one."""
        return self._find_group(axes, self._version, gloo=True)

    def explain(self, group: dist.ProcessGroup | None = None, *, rank: int | None = None) -> str:
        """Describe a process group, the place of a rank, or, without either, the whole mesh."""
        layouts = self._views.layouts
        if group is not None:
            if not isinstance(group, dist.ProcessGroup):
                raise MeshError(
                    f'group must be a process group, got {group!r}; write mesh.explain(mesh.group("dp")), or rank=...'
                )
            return self._explain_group(group)
        if rank is not None:
            return explain_rank(layouts, rank)
        own = [known for known in self.communicators if known.owned and len(known.ranks) > 1]
        held = f"{format_count(len(own), 'communicator')} beside the world's"
        if own:
            held += f": {', '.join(f'{known.label} ({len(known.ranks)} ranks)' for known in own)}"
        return f"{explain_rank(layouts, self.global_rank)}\n  on {self.device}, with {held}"

    def _explain_group(self, group: dist.ProcessGroup) -> str:
        """Return what a process group is: its axes, its ranks, its backend, and who else uses it."""
        made = [known for known in self.communicators if known.group is group]
        if not made:
            raise MeshError(f"the group {group.group_name!r} ({group.group_desc}) is not one of this mesh's")
        ranks, uses = made[0].ranks, []
        for name, layout in self._views.layouts.items():
            of_view = "" if name == ROOT_VIEW else f" of {name!r}"
            uses += [f"{axis}{of_view}" for axis in layout if layout.group(self.global_rank, axis) == ranks]
        uses += [known.label for known in made]
        owner = "made by this mesh" if made[0].owned else "not owned by this mesh"
        return (
            f"group {'/'.join(dict.fromkeys(uses))}: ranks {format_items(ranks, limit=16)} ({len(ranks)}), "
            f"{dist.get_backend(group)}, {owner}, torch name {group.group_name}"
        )

    # Behind the accessors.

    def _check_open(self) -> None:
        if self.closed or self._groups.are_outlived():
            why = "was closed"
            if not self.closed:
                why = "has no groups any more, since the default group was destroyed"
            raise MeshError(f"the mesh over {self.layout} {why}; make another with init_mesh()")

    def _prepare(self) -> None:
        """Work out what can be asked: accessors are called often, and compiled code must not look for a group."""
        self._version = str(next(_versions))  # no two meshes, and no two states of one, have the same
        self._axes = tuple(self._views.map_axes_to_views())
        for axis in self._axes:
            self._places[axis,] = self._place((axis,))
        for name, axes in self._views.flattened_axes.items():
            self._places[name,] = self._places[axes] = self._place(axes)
        for name in (*self._axes, *self._views.flattened_axes):
            # Compiled code can ask a slice for its group if it finds the slice, but not if it is a
            # constant to it.
            self._slices[name] = self._slice((name,), self._version)

    def _place(self, axes: tuple[str, ...]) -> Place:
        view, ordered = self._views.find_view(axes)
        layout = self._views.layouts[view]
        ranks = layout.group(self.global_rank, *ordered)
        group = self._groups.get_existing(layout, ordered, self._groups.get_options(ordered))
        return Place(ranks, ranks.index(self.global_rank), group)

    # The compiler keeps what these answer, for the version that it was asked with.

    @constant_under_compile
    def _find_ranks(self, names: tuple[str, ...], _version: str) -> tuple[int, ...]:
        self._check_open()
        view, ordered = self._views.find_view(names or self.layout.axes)
        return self._views.layouts[view].group(self.global_rank, *ordered)

    @constant_under_compile
    def _find_group(self, names: tuple[str, ...], _version: str, *, gloo: bool = False) -> dist.ProcessGroup:
        self._check_open()
        view, ordered = self._views.find_view(names)
        options = self._groups.get_options(ordered)
        if gloo:
            options = self._groups.make_gloo_options(options)
        group = self._groups.get_existing(self._views.layouts[view], ordered, options)
        if group is None:
            axes = format_axes(ordered)
            if gloo:
                remedy = (
                    "ask for one when the group is made, with options=GroupOptions(create_gloo_group=True)"
                )
                raise MeshError(f"there is no gloo group over {axes}; {remedy}")
            remedy = f"call mesh.flatten({quote_axes(ordered)}) once, on every rank, before it is asked for"
            raise MeshError(f"there is no group over {axes} yet; {remedy}")
        return group

    @constant_under_compile
    def _slice(self, names: tuple[str, ...], _version: str) -> DeviceMesh:
        known = self._meshes.get(names)
        if known is None:
            self._check_open()
            known = self._meshes[names] = self._views.slice(names)
        return known


# What torch's DeviceMesh, and other libraries, call something that a mesh has under another name.
_INSTEAD = {
    "get_group": 'mesh.group("dp")',
    "get_local_rank": 'mesh.rank("dp")',
    "get_coordinate": "mesh.coords",
    "get_rank": "mesh.global_rank",
    "world_size": "mesh.size()",
    "names": "mesh.axes",
    "axis_names": "mesh.axes",
    "dim_names": "mesh.axes",
    "mesh_dim_names": "mesh.axes",
    "sizes": "mesh.shape",
    "ndim": "len(mesh.axes)",
    "mesh": "mesh.device_mesh",
    "device_type": "mesh.device.type",
    "local_rank": "mesh.device.index",
}


def _public_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


_versions = count()  # used as texts: the compiler guards those, but makes numbers symbolic that changed


def explain_rank(layouts: Mapping[str, Layout], rank: int) -> str:
    """Return where a rank stands on each axis, and with whom.

    Example:
        >>> from namedmesh import Layout
        >>> print(explain_rank({"mesh": Layout(pp=2, dp=2, tp=2)}, 5))
        rank 5 of pp=2 x dp=2 x tp=2 (8 ranks)
          pp: 1 of 2, with ranks 1, 5
          dp: 0 of 2, with ranks 5, 7
          tp: 1 of 2, with ranks 4, 5
    """
    lines: list[str] = []
    explained: set[str] = set()
    for name, layout in layouts.items():
        lines.append(f"rank {rank} of {layout}" if name == ROOT_VIEW else f"in view {name!r}, {layout}")
        for axis, at in layout.coords(rank).items():
            if axis not in explained:
                ranks = layout.group(rank, axis)
                among = f"with ranks {format_items(ranks)}" if len(ranks) > 1 else "alone"
                lines.append(f"  {axis}: {at} of {len(ranks)}, {among}")
        explained.update(layout)
    return "\n".join(lines)
