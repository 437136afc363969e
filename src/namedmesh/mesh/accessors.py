"""The accessors of a mesh: sub-meshes, groups and ranks by name, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._errors import MeshError, did_you_mean
from namedmesh._torch.execution import constant_under_compile
from namedmesh.layout.layout import Layout
from namedmesh.layout.sizes import format_axes, quote_axes
from namedmesh.mesh.groups import Communicator, Groups
from namedmesh.mesh.views import ROOT_VIEW, MeshViews


class Membership(NamedTuple):
    """The membership of this rank in its group over an axis or a flattened axis.

    Attributes:
        ranks: the global ranks of the members, in ascending order.
        rank: the group rank of this rank.
        group: the process group.
    """

    ranks: tuple[int, ...]
    rank: int
    group: Any


class MeshAccessors(MeshViews):
    """The part of :class:`namedmesh.NamedMesh` with the methods that do not communicate.

    The group, the ranks and the torch mesh of each axis and flattened axis are cached when the
    group is created. A call in a training step is then one look-up in a dict, which torch.compile
    can trace.

    Args:
        layout: the layout of the mesh.
        device: the device of this rank.
        groups: the process groups of the mesh.
    """

    def __init__(self, layout: Layout, device: torch.device, groups: Groups) -> None:
        super().__init__(layout, device, groups)
        self.closed = False
        self.global_rank: int = groups.rank
        # The caches: memberships by the names of axes, and slices by the name or names in the index.
        self._memberships: dict[tuple[str, ...], Membership] = {}
        self._slices: dict[str | tuple[str, ...], DeviceMesh] = {}
        self._axes: tuple[str, ...] = ()
        self._version = ""

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh over axes and flattened axes; the same object each time.

        Args:
            names: one name, or several in the order of the layout.

        Returns:
            A torch mesh with one dim for each name. This rank is in it.

        Raises:
            AxisError: an unknown axis, or axes that are not in one view. So do all accessors.
            LayoutError: the axes are not in the order of the layout.
            MeshError: the mesh is closed. So do all accessors.
        """
        if isinstance(names, str):
            cached = self._slices.get(names)
            return self._find_slice((names,), self._version) if cached is None else cached
        selected = tuple(names) if isinstance(names, Iterable) else (names,)
        return self._find_slice(selected, self._version)

    def __contains__(self, name: object) -> bool:
        """Return whether a name is an axis of the mesh or of a view, or a flattened axis."""
        self._check_cache()
        return isinstance(name, str) and (name,) in self._memberships

    def __iter__(self) -> Iterator[str]:
        """Yield the axes of the layout, slowest first, and then the axes of views."""
        self._check_cache()
        return iter(self._axes)

    def __len__(self) -> int:
        """Return the number of axes, including the axes of views."""
        self._check_cache()
        return len(self._axes)

    def __bool__(self) -> bool:
        """Return True: a closed mesh has no length, but code may still ask whether it has a mesh."""
        return True

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that IPython completes after ``mesh["``."""
        return [name for (name, *rest) in self._memberships if not rest]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the layout, slowest first. ``list(mesh)`` has the axes of views, too."""
        self._check_cache()
        return self.layout.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes of the layout, like the ``shape`` of torch's ``DeviceMesh``."""
        self._check_cache()
        return self.layout.sizes

    if not TYPE_CHECKING:
        # A type checker knows every attribute. With this method, it would accept any.

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that suggests the name to use."""
            # Python calls it for missing attributes only. During the construction "_axes" may be
            # missing, and looking it up as an attribute would call this method again.
            remedy = _ALTERNATIVES.get(name)
            if remedy is None and name in self.__dict__.get("_axes", ()):
                remedy = f'mesh.size("{name}"), mesh.rank("{name}"), mesh.group("{name}") or mesh["{name}"]'
            if remedy is not None:
                hint = f"; write {remedy}"
            else:
                hint = did_you_mean(name, [known for known in dir(type(self)) if not known.startswith("_")])
            if name in _ASKED_BY_TORCH:
                hint += '; where torch wants a DeviceMesh, give it mesh["dp"] or mesh.device_mesh'
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of this rank over axes.

        Args:
            *axes: an axis, or several for which :meth:`flatten` has created a group.

        Raises:
            MeshError: there is no group over the axes.
        """
        known = self._memberships.get(axes)
        group: dist.ProcessGroup = self._find_group(axes, self._version) if known is None else known.group
        return group

    def size(self, *axes: str) -> int:
        """Return the number of ranks in the group of this rank.

        Args:
            *axes: the axes of the group; without axes, all ranks of the mesh.
        """
        known = self._memberships.get(axes)
        return len(self._find_ranks(axes, self._version) if known is None else known.ranks)

    def rank(self, *axes: str) -> int:
        """Return the group rank of this rank: its position in its group.

        Args:
            *axes: the axes of the group; without axes, all ranks of the mesh.
        """
        known = self._memberships.get(axes)
        if known is None:
            return self._find_ranks(axes, self._version).index(self.global_rank)
        return known.rank

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks in the group of this rank, in ascending order.

        Args:
            *axes: the axes of the group; without axes, all ranks of the mesh.
        """
        known = self._memberships.get(axes)
        return self._find_ranks(axes, self._version) if known is None else known.ranks

    @property
    def coords(self) -> dict[str, int]:
        """The coordinate of this rank on each axis, including the axes of views."""
        self._check_open()
        return {axis: self.rank(axis) for axis in self}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch mesh over all axes of the layout."""
        self._check_open()
        return self._roots[ROOT_VIEW]

    @property
    def views(self) -> dict[str, Layout]:
        """The layouts of the views that were added, by name."""
        self._check_cache()
        layouts = dict(self._layouts)
        del layouts[ROOT_VIEW]
        return layouts

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The process groups of this rank that the mesh uses, in the order of their first use."""
        self._check_open()
        return tuple(self._groups.acquired.values())

    def is_first(self, axis: str) -> bool:
        """Return whether this rank is the first along an axis or a flattened axis.

        Args:
            axis: its name.
        """
        return self.rank(axis) == 0

    def is_last(self, axis: str) -> bool:
        """Return whether this rank is the last along an axis or a flattened axis.

        Args:
            axis: its name.
        """
        return self.rank(axis) == self.size(axis) - 1

    def next(self, axis: str) -> int:
        """Return the global rank after this one along an axis or a flattened axis.

        Args:
            axis: its name.

        Returns:
            The next rank. The first rank comes after the last.
        """
        return self.ranks(axis)[(self.rank(axis) + 1) % self.size(axis)]

    def prev(self, axis: str) -> int:
        """Return the global rank before this one along an axis or a flattened axis.

        Args:
            axis: its name.

        Returns:
            The previous rank. The last rank comes before the first.
        """
        return self.ranks(axis)[self.rank(axis) - 1]

    def gloo_group(self, *axes: str) -> dist.ProcessGroup:
        """Return the gloo group over the same ranks as :meth:`group`.

        Args:
            *axes: an axis, or several for which :meth:`flatten` has created a group.

        Raises:
            MeshError: the options of the group had no ``create_gloo_group=True``.
        """
        return self._find_group(axes, self._version, gloo=True)

    # Below are the functions behind the accessors. Views and memberships call them, too.

    def _check_cache(self) -> None:
        """Raise a MeshError if the caches were cleared, as when the mesh was closed."""
        # The version is a str, which torch.compile guards; it does not trace _check_open.
        if not self._version:
            self._check_open()

    def _check_open(self) -> None:
        """Raise a MeshError if the mesh is closed or its default group was destroyed."""
        if self.closed:
            reason = "was closed"
        elif self._groups.are_stale():
            reason = "has no groups any more, since the default group was destroyed"
        else:
            return
        raise MeshError(f"the mesh over {self.layout} {reason}; make another with init_mesh()")

    def _cache_memberships(self) -> None:
        """Cache the membership and the torch mesh of every axis and flattened axis.

        It is called whenever the mesh has new groups. A graph of torch.compile must find them: it
        cannot contain the search for a group.
        """
        # No two meshes, and no two states of one mesh, have the same version.
        self._version = str(next(_versions))
        self._axes = tuple(self._map_axes_to_views())
        for axis in self._axes:
            self._memberships[axis,] = self._make_membership((axis,))
        for name, axes in self._flattened_axes.items():
            membership = self._make_membership(axes)
            self._memberships[name,] = membership
            self._memberships[axes] = membership
        for name in (*self._axes, *self._flattened_axes):
            # Compiled code can call get_group() on a slice from a dict. It cannot if the slice is
            # the constant result of a function.
            self._slices[name] = self._find_slice((name,), self._version)

    def _clear_cache(self) -> None:
        """Clear the caches. The accessors then look for groups, and raise a MeshError."""
        self._version = ""
        self._memberships.clear()
        # The torch meshes hold groups, which destroy_process_group() has to end.
        self._slices.clear()
        self._roots.clear()
        self._flattened_meshes.clear()

    def _make_membership(self, axes: tuple[str, ...]) -> Membership:
        """Return the group over axes that exists, its ranks, and the group rank of this rank."""
        view, ordered = self._find_view(axes)
        layout = self._layouts[view]
        ranks = layout.group(self.global_rank, *ordered)
        group = self._groups.get_existing(self._groups.make_key(layout, ordered))
        return Membership(ranks, ranks.index(self.global_rank), group)

    # torch.compile takes the results of the next three as constants for their arguments. The version
    # is an argument so that a changed mesh, or another mesh, is compiled again.

    @constant_under_compile
    def _find_ranks(self, names: tuple[str, ...], _version: str) -> tuple[int, ...]:
        """Return the global ranks in the group over axes; over all axes if none is named."""
        self._check_open()
        view, ordered = self._find_view(names or self.layout.axes)
        return self._layouts[view].group(self.global_rank, *ordered)

    @constant_under_compile
    def _find_group(self, names: tuple[str, ...], _version: str, *, gloo: bool = False) -> dist.ProcessGroup:
        """Return the group over axes, or its additional gloo group; both must exist.

        Raises:
            MeshError: the mesh is closed, or no such group was created.
        """
        self._check_open()
        view, ordered = self._find_view(names)
        options = self._groups.get_options(ordered)
        if gloo:
            options = self._groups.make_gloo_options(options)
        group = self._groups.get_existing(self._groups.make_key(self._layouts[view], ordered, options))
        if group is not None:
            return group
        axes = format_axes(ordered)
        if gloo:
            raise MeshError(
                f"there is no gloo group over {axes}; ask for one when the group is made, with "
                "options=GroupOptions(create_gloo_group=True)"
            )
        raise MeshError(
            f"there is no group over {axes} yet; call mesh.flatten({quote_axes(ordered)}) once, on "
            "every rank, before it is asked for"
        )

    @constant_under_compile
    def _find_slice(self, names: tuple[str, ...], _version: str) -> DeviceMesh:
        """Return the sub-mesh over axes and flattened axes, from the cache or a new one."""
        cached = self._slices.get(names)
        if cached is None:
            self._check_open()
            cached = self._slices[names] = self._make_slice(names)
        return cached


# The names of torch's DeviceMesh, and of similar classes, for which a mesh has another name.
_ALTERNATIVES = {
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

# What fully_shard, distribute_tensor, parallelize_module and DistributedDataParallel ask of a mesh.
_ASKED_BY_TORCH = {"ndim", "device_type", "mesh_dim_names", "get_coordinate"}

# A version is a str: torch.compile guards the value of a str, but may make a changed int symbolic.
_versions = count()
