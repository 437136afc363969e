"""The factorings of one mesh: which view has which axes, which products have a name, and torch's meshes over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from namedmesh._torch import concatenate_meshes, flattened, without_modes
from namedmesh.axes import DATA_PARTS
from namedmesh.errors import AxisError, LayoutError, format_items
from namedmesh.groups import GroupOptions, Groups
from namedmesh.layout import Layout
from namedmesh.sizes import suggest_axis

ROOT_VIEW = "mesh"
"""The name of the view that the mesh was made with."""


class Views:
    """The layouts of a mesh by name, in the order they were added, its flattened products, and torch's meshes of them.

    Attributes:
        layouts: those of the views, the mesh's own first.
        products: the axes of each flattened product, by its name.
        roots: torch's mesh of each view, by the view's name.
        flat: the meshes of products, which torch's own meshes know by name.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Groups,
        device_type: str,
        options_of: Callable[[tuple[str, ...]], GroupOptions],
    ) -> None:
        self.groups, self.device_type, self.options_of = groups, device_type, options_of
        self.layouts = {ROOT_VIEW: layout}
        self.products: dict[str, tuple[str, ...]] = {}
        self.roots: dict[str, DeviceMesh] = {}
        self.flat: dict[str, DeviceMesh] = {}

    # Names.

    def axes(self) -> dict[str, str]:
        """Return every axis, and the first view that has it."""
        homes: dict[str, str] = {}
        for name, layout in self.layouts.items():
            for axis in layout:
                homes.setdefault(axis, name)
        return homes

    def expand(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return axes as they are, and the axes of flattened products in place of the products' names."""
        return tuple(axis for name in names for axis in self.products.get(name, (name,)))

    def find(self, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return the first view that has axes and products together, and all their axes in its order."""
        wanted, homes = self.expand(names), self.axes()
        if not wanted:
            raise AxisError(f"no axis is named; name one or more of {tuple(homes)}")
        for view, layout in self.layouts.items():
            if all(axis in layout for axis in wanted):
                return view, tuple(axis for axis in layout if axis in wanted)
        unknown = [axis for axis in wanted if axis not in homes]
        if unknown:
            allowed = tuple(homes)
            problems = []
            for axis in unknown:
                problem = f"axis {axis!r} is not one of {allowed}{suggest_axis(axis, homes)}"
                if axis == "dp" and set(DATA_PARTS) <= set(homes):
                    problem += f', or call mesh.flatten({quoted(DATA_PARTS)}, name="dp") once, on every rank'
                problems.append(problem)
            raise AxisError(*problems)
        places = []
        for axis in wanted:
            home = "the mesh" if homes[axis] == ROOT_VIEW else f"view {homes[axis]!r}"
            places.append(f"{axis!r} in {home}")
        raise AxisError(
            f"axes {join_names(wanted)} are not together in one view ({' and '.join(places)}); combine axes of one view only"
        )

    def check(self, name: str, layout: Layout, rank: int) -> None:
        """Refuse a new view whose name is taken, or that contradicts the others."""
        problems = []
        for axis, home in self.axes().items():
            other = self.layouts[home]
            if axis in layout and layout.partition(axis) != other.partition(axis):
                problems.append(
                    f"axis {axis!r} groups rank {rank} with {format_items(layout.group(rank, axis))} in view {name!r}, but with "
                    f"{format_items(other.group(rank, axis))} in {other}; an axis that views share must be the same ranks in both: "
                    "change sizes or order, or give it a name of its own"
                )
        if name in self.layouts:
            problems.append(f"the name {name!r} is taken by another view; choose another")
        problems += [
            f"axis {axis!r} has the name of a flattened product; choose another name"
            for axis in layout
            if axis in self.products
        ]
        if problems:
            raise LayoutError(*problems)

    def check_product(self, name: str, axes: tuple[str, ...]) -> None:
        """Refuse a name for a product that means something else already."""
        if name in self.axes():
            raise LayoutError(f"the name {name!r} is taken by an axis; give the product another with name=")
        if self.products.get(name, axes) != axes:
            raise LayoutError(
                f"the name {name!r} is taken by the product of {join_names(self.products[name])}; give this one another "
                "with name="
            )

    # torch's meshes.

    def make_group(self, layout: Layout, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return this rank's group over some axes, on which all ranks agree; and make the gloo group beside it."""
        options = self.options_of(axes)
        if options.gloo_twin:
            self.groups.over(layout, axes, self.groups.gloo_options(options))
        return self.groups.over(layout, axes, options)

    @without_modes
    def make(self, layout: Layout) -> DeviceMesh:
        """Return the torch mesh over the axes of a layout, on groups that exist or are made now.

        ``init_device_mesh`` makes those of several axes at once where all of them are new; it would make one more for each
        axis of size 1, and for sets of ranks that have a group.
        """
        root: DeviceMesh | None = None
        large = {axis: size for axis, size in layout.items() if size > 1}
        keys = {axis: self.groups.key(layout, (axis,), self.options_of((axis,))) for axis in large}
        overrides = self.groups.overrides(keys)
        if len(large) > 1 and overrides is not None:
            root = init_device_mesh(
                self.device_type,
                tuple(large.values()),
                mesh_dim_names=tuple(large),
                backend_override=overrides or None,
            )
            for axis, key in keys.items():
                self.groups.take(key, axis, partial(root.get_group, axis))
        for axis in layout:
            self.make_group(layout, (axis,))
        if root is not None and len(large) == len(layout):
            return root
        return self.over(layout)

    @without_modes
    def over(self, layout: Layout) -> DeviceMesh:
        """Return the torch mesh over the axes of a layout, on groups that exist."""
        groups: Any = [self.groups.find(layout, (axis,), self.options_of((axis,))) for axis in layout]
        ranks = torch.arange(layout.ranks.start, layout.ranks.stop, dtype=torch.int, device="cpu")
        return DeviceMesh.from_group(
            groups, self.device_type, mesh=ranks.reshape(layout.sizes), mesh_dim_names=layout.axes
        )

    @without_modes
    def flatten(self, view: str, axes: tuple[str, ...], name: str) -> dist.ProcessGroup:
        """Make the group over some axes, which torch's mesh then has under a name: other libraries ask that one."""
        group = self.make_group(self.layouts[view], axes)
        self.flat[name] = flattened(self.roots[view], axes, name, group)
        return group

    @without_modes
    def slice(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh over some axes and flattened products."""
        view, axes = self.find(names)
        root = self.roots[view]
        order = root.mesh_dim_names or ()
        if len(axes) != len(self.expand(names)):
            raise AxisError(f"axes {names} are not a selection of {order}; name each axis once")
        ordered = tuple(sorted(names, key=lambda name: order.index(self.expand((name,))[0])))
        if ordered != names:
            raise LayoutError(
                f"mesh[{quoted(names)}] is out of order; torch slices in the order of the mesh: mesh[{quoted(ordered)}]"
            )
        if not any(name in self.products for name in names):
            return root[names]
        parts = [self.flat[name] if name in self.products else root[name] for name in names]
        return parts[0] if len(parts) == 1 else concatenate_meshes(parts)


def product_axes(name: str, axes: Sequence[str]) -> tuple[str, ...]:
    """Return those of some axes that a name joins by ``_`` in their order; none if it does not.

    Example:
        >>> product_axes("dp_tp", ("dp", "cp", "tp")), product_axes("dp_shard_cp", ("dp", "dp_shard", "cp"))
        (('dp', 'tp'), ('dp_shard', 'cp'))
    """
    for first, axis in enumerate(axes):
        if name == axis:
            return (axis,)
        if name.startswith(f"{axis}_"):
            rest = product_axes(name.removeprefix(f"{axis}_"), axes[first + 1 :])
            if rest:
                return (axis, *rest)
    return ()


def options_by_axes(
    options: Mapping[str, GroupOptions], axes: Sequence[str]
) -> dict[tuple[str, ...], GroupOptions]:
    """Return options by the axes that their names join.

    Args:
        options: by the name of an axis, or of several joined by ``_``.
        axes: those that are made now.

    Raises:
        AxisError: options for axes that are not there; all problems.
        LayoutError: options that are no ``GroupOptions``; all problems.
    """
    given: object = options
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"options must be a mapping of axis names to GroupOptions, got {given!r}; name the axes, such as "
            'options={"tp": GroupOptions(...)}'
        )
    found: dict[tuple[str, ...], GroupOptions] = {}
    problems = []
    unknown = []
    for name, of_axis in options.items():
        joined = product_axes(str(name), axes)
        found[joined or (name,)] = of_axis
        problems += options_problems(of_axis, f"options of axis {name!r}")
        if not joined:
            near = suggest_axis(name, axes)
            unknown.append(f"options are given for axis {name!r}, which is not one of {tuple(axes)}{near}")
    if problems:
        raise LayoutError(*problems, *unknown)
    if unknown:
        raise AxisError(*unknown)
    return found


def options_problems(options: object, what: str) -> list[str]:
    """Return a sentence if something that was given as options is not :class:`GroupOptions`."""
    if isinstance(options, GroupOptions):
        return []
    return [f"{what} must be GroupOptions, got {options!r}; write GroupOptions(timeout=...)"]


def join_names(axes: Sequence[str]) -> str:
    """Return axes in a sentence."""
    return " and ".join(repr(axis) for axis in axes)


def quoted(axes: Sequence[str]) -> str:
    """Return axes as they stand in code."""
    return ", ".join(f'"{axis}"' for axis in axes)
