"""The views of a mesh, its flattened axes, and the torch meshes over both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from namedmesh._errors import AxisError, LayoutError, format_items
from namedmesh._torch.execution import disable_dispatch_modes
from namedmesh._torch.groups import own_group_requests
from namedmesh._torch.meshes import concatenate_meshes, flatten_mesh
from namedmesh.layout.axes import DATA_PARTS, DENSE_AXES
from namedmesh.layout.layout import Layout, make_partition_key
from namedmesh.layout.sizes import format_axes, quote_axes, suggest_axis
from namedmesh.mesh.groups import Groups

ROOT_VIEW = "mesh"
"""The name of the view with which the mesh was made."""


class MeshViews:
    """The part of ``NamedMesh`` that finds axes by name, and makes torch meshes.

    A view is a layout of the ranks of the mesh: one factorization of their number. Views that have
    an axis of the same name have the same groups on it.

    Args:
        layout: the layout of the mesh, which is the first view.
        device: the device of this rank.
        groups: the process groups of the mesh.
    """

    def __init__(self, layout: Layout, device: torch.device, groups: Groups) -> None:
        self.layout = layout
        self.device = device
        self._groups = groups
        # The layout of each view, in the order in which they were added, and its torch mesh.
        self._layouts = {ROOT_VIEW: layout}
        self._roots: dict[str, DeviceMesh] = {}
        # The axes of each flattened axis, and its torch mesh.
        self._flattened_axes: dict[str, tuple[str, ...]] = {}
        self._flattened_meshes: dict[str, DeviceMesh] = {}

    # Names.

    def _map_axes_to_views(self) -> dict[str, str]:
        """Return by axis the name of the first view that has it."""
        views: dict[str, str] = {}
        for view, layout in self._layouts.items():
            for axis in layout:
                views.setdefault(axis, view)
        return views

    def _expand(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return names with each flattened axis replaced by the axes that it consists of.

        Args:
            names: axes and flattened axes.
        """
        axes: list[str] = []
        for name in names:
            axes += self._flattened_axes.get(name, (name,))
        return tuple(axes)

    def _find_view(self, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Find the first view that has all of some axes.

        Args:
            names: axes and flattened axes.

        Returns:
            The name of the view, and the axes in the order of its layout.

        Raises:
            AxisError: no axis is named, an axis does not exist, or no view has all of them.
        """
        axes = self._expand(names)
        views_by_axis = self._map_axes_to_views()
        if not axes:
            raise AxisError(f"no axis is named; name one or more of {tuple(views_by_axis)}")
        # The mesh's own layout comes first, so that views cannot change the meaning of its axes.
        for view, layout in self._layouts.items():
            if set(axes) <= set(layout):
                return view, tuple(axis for axis in layout if axis in axes)
        unknown = [axis for axis in axes if axis not in views_by_axis]
        if unknown:
            raise AxisError(*(_format_unknown_axis(axis, tuple(views_by_axis)) for axis in unknown))
        locations = []
        for axis in axes:
            view = views_by_axis[axis]
            location = "the mesh" if view == ROOT_VIEW else f"view {view!r}"
            locations.append(f"{axis!r} in {location}")
        raise AxisError(
            f"axes {format_axes(axes)} are not together in one view ({' and '.join(locations)}); "
            "combine axes of one view only"
        )

    def _check_view(self, name: str, layout: Layout) -> None:
        """Check that a new view does not contradict the others.

        Args:
            name: the name of the new view.
            layout: its layout.

        Raises:
            LayoutError: the name is taken, or an axis has other ranks than in the other views; all
                problems.
        """
        problems = []
        rank = self._groups.rank
        # An axis in two views has one group, so both views must put the same ranks on it.
        for axis, view in self._map_axes_to_views().items():
            existing = self._layouts[view]
            if axis in layout and make_partition_key(layout, axis) != make_partition_key(existing, axis):
                problems.append(
                    f"axis {axis!r} has the ranks {format_items(layout.group(rank, axis))} in view "
                    f"{name!r} (on rank {rank}), but {format_items(existing.group(rank, axis))} in "
                    f"{existing}; views that share an axis must have the same ranks on it: change "
                    "sizes or their order, or give the axis another name"
                )
        if name in self._layouts:
            problems.append(f"the name {name!r} is taken by another view; choose another name")
        problems += [
            f"axis {axis!r} has the name of a flattened axis; choose another name"
            for axis in layout
            if axis in self._flattened_axes
        ]
        if problems:
            raise LayoutError(*problems)

    def _check_flattened_name(self, name: str, axes: tuple[str, ...]) -> None:
        """Raise a LayoutError if the name of a new flattened axis is taken.

        Args:
            name: the name.
            axes: the axes of the flattened axis.
        """
        if name in self._map_axes_to_views():
            raise LayoutError(f"the name {name!r} is taken by an axis; choose another with name=")
        existing = self._flattened_axes.get(name, axes)
        if existing != axes:
            raise LayoutError(
                f"the name {name!r} is taken by the flattened axes {format_axes(existing)}; choose "
                "another with name="
            )

    # Groups and torch meshes.

    @disable_dispatch_modes
    def _create_mesh(self, layout: Layout) -> DeviceMesh:
        """Return the torch mesh over the axes of a layout; create the groups that do not exist.

        ``init_device_mesh`` creates the groups of several axes in one call, so it is used if all of
        them are new. It would create another group for each axis of size 1, and for ranks that have
        a group already. Those come from the cache instead.

        Collective: every rank of the world must call it.

        Args:
            layout: the layout of a view.
        """
        root: DeviceMesh | None = None
        # torch creates one group for each axis it is given, also for an axis of size 1.
        large_axes = {axis: size for axis, size in layout.items() if size > 1}
        keys = {axis: self._groups.make_key(layout, (axis,)) for axis in large_axes}
        overrides = self._groups.find_backend_overrides(keys)
        if len(large_axes) > 1 and overrides is not None:
            with own_group_requests():
                root = init_device_mesh(
                    self.device.type,
                    tuple(large_axes.values()),
                    mesh_dim_names=tuple(large_axes),
                    backend_override=overrides or None,
                )
            # The groups exist now. They enter the cache, from which the loop below finds them.
            for axis, key in keys.items():
                self._groups.acquire(key, axis, partial(root.get_group, axis))
        for axis in layout:
            self._groups.get_or_create(layout, (axis,))
        if root is not None and len(large_axes) == len(layout):
            return root
        # Axes of size 1 are missing in torch's mesh, or there is none.
        return self._build_mesh(layout)

    @disable_dispatch_modes
    def _build_mesh(self, layout: Layout) -> DeviceMesh:
        """Return the torch mesh over the axes of a layout, on groups that exist.

        Does not communicate.

        Args:
            layout: the layout of a view.
        """
        groups: Any = []
        for axis in layout:
            groups.append(self._groups.get_existing(self._groups.make_key(layout, (axis,))))
        ranks = torch.arange(layout.ranks.start, layout.ranks.stop, dtype=torch.int, device="cpu")
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=ranks.reshape(layout.sizes), mesh_dim_names=layout.axes
        )

    @disable_dispatch_modes
    def _create_flattened_mesh(self, view: str, axes: tuple[str, ...], name: str) -> dist.ProcessGroup:
        """Create the group over some axes, and register it in torch's mesh under a name.

        Other libraries look up flattened axes in torch's mesh by name.
        Collective: every rank of the world must call it.

        Args:
            view: the name of the view that has the axes.
            axes: the axes, in the order of the view.
            name: the name of the flattened axis.

        Returns:
            The group of this rank.
        """
        group = self._groups.get_or_create(self._layouts[view], axes)
        self._flattened_meshes[name] = flatten_mesh(self._roots[view], axes, name, group)
        return group

    @disable_dispatch_modes
    def _make_slice(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh over axes and flattened axes. Does not communicate.

        Args:
            names: axes and flattened axes, in the order of the view.

        Raises:
            AxisError: an axis does not exist or is named twice, or no view has all axes.
            LayoutError: the axes are not in the order of the view.
        """
        view, axes = self._find_view(names)
        root = self._roots[view]
        order = root.mesh_dim_names or ()
        if len(axes) != len(self._expand(names)):
            raise AxisError(f"axes {names} are not a selection of {order}; name each axis once")
        # A flattened axis has the position of its first axis in the root.
        ordered = tuple(sorted(names, key=lambda name: order.index(self._expand((name,))[0])))
        if ordered != names:
            raise LayoutError(
                f"mesh[{quote_axes(names)}] is out of order; torch slices in the order of the "
                f"mesh: mesh[{quote_axes(ordered)}]"
            )
        if self._flattened_axes.keys().isdisjoint(names):
            return root[names]
        # A slice of torch's mesh by the names of flattened axes warns; torch concatenates their
        # meshes.
        meshes = [
            self._flattened_meshes[name] if name in self._flattened_axes else root[name] for name in names
        ]
        return meshes[0] if len(meshes) == 1 else concatenate_meshes(meshes)


def _format_unknown_axis(axis: str, allowed: tuple[str, ...]) -> str:
    # With hybrid sharding, "dp" can be made as a flattened axis, which the user may have forgotten.
    argument: object = axis
    if not isinstance(argument, str):
        return f"axes have names, got {argument!r}; write {allowed[0]!r} or another of {allowed}"
    problem = f"axis {axis!r} is not one of {allowed}{suggest_axis(axis, allowed)}"
    if axis == "dp" and set(DATA_PARTS) <= set(allowed):
        problem += f', or call mesh.flatten({quote_axes(DATA_PARTS)}, name="dp") once, on every rank'
    elif axis in DENSE_AXES:
        problem += f"; if the mesh needs no such axis, make it with {axis}=1"
    return problem
