"""The factorings of one mesh: which view has which axes, and whether views agree on the axes they share."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._torch import forget, without_modes
from namedmesh.errors import AxisError, LayoutError, listing
from namedmesh.sizes import nearest_axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from namedmesh.layout import Layout

ROOT_VIEW = "mesh"
"""The name of the view that the mesh was made with."""


class View:
    """One factoring of the ranks: a layout, this rank's groups, and the torch mesh over both.

    Args:
        layout: the layout.
        device_type: the kind of device of the torch mesh.
        groups: this rank's group on each axis; none once the mesh is closed.
        root: the torch mesh, where it exists. Otherwise it is made when it is asked for: nothing is sent for it, and it
            takes longer than a group.
    """

    def __init__(
        self,
        layout: Layout,
        device_type: str,
        groups: Mapping[str, dist.ProcessGroup],
        root: DeviceMesh | None = None,
    ) -> None:
        self.layout, self.groups = layout, groups
        self.device_type, self._root, self._lock = device_type, root, Lock()

    @property
    def root(self) -> DeviceMesh:
        """The torch mesh over all axes; the same object each time."""
        with self._lock:
            if self._root is None:
                self._root = self._make_root()
            return self._root

    @without_modes
    def _make_root(self) -> DeviceMesh:
        ranks = torch.arange(self.layout.ranks.start, self.layout.ranks.stop, dtype=torch.int, device="cpu")
        return DeviceMesh.from_group(
            [self.groups[axis] for axis in self.layout.axes],
            self.device_type,
            mesh=ranks.reshape(self.layout.sizes),
            mesh_dim_names=self.layout.axes,
        )

    @without_modes
    def slice(self, axes: tuple[str, ...]) -> DeviceMesh:
        """Return the torch mesh over some axes, in its order."""
        return self.root[axes]

    def forget(self) -> None:
        """Let what still refers to the torch mesh keep no group alive."""
        if self._root is not None:
            forget(self._root)

    def ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the given axes in the order of the layout.

        Raises:
            AxisError: there are none.
        """
        if not axes:
            raise AxisError(f"no axis is named; name one or more of {self.layout.axes}")
        return tuple(axis for axis in self.layout.axes if axis in axes)


class Views(dict[str, View]):
    """The views of a mesh by name, in the order they were added; the first is the mesh's own.

    Args:
        first: the mesh's own view.

    Attributes:
        products: the axes of each flattened product, by its name.
    """

    def __init__(self, first: View) -> None:
        super().__init__({ROOT_VIEW: first})
        self.products: dict[str, tuple[str, ...]] = {}

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts by the names of the views."""
        return {name: view.layout for name, view in self.items()}

    def homes(self) -> dict[str, str]:
        """Return every axis, and the first view that has it."""
        homes: dict[str, str] = {}
        for name, view in self.items():
            for axis in view.layout:
                homes.setdefault(axis, name)
        return homes

    def of(self, axes: Sequence[str]) -> View:
        """Return the first view that has all the given axes.

        Raises:
            AxisError: a name that is no axis, or axes that are not together in one view.
        """
        for view in self.values():
            if all(axis in view.layout for axis in axes):
                return view
        homes = self.homes()
        unknown = [
            f"axis {axis!r} is not one of {tuple(homes)}{nearest_axis(axis, homes)}"
            for axis in axes
            if axis not in homes
        ]
        if unknown:
            raise AxisError(*unknown)
        places = []
        for axis in axes:
            home = "the mesh" if homes[axis] == ROOT_VIEW else f"view {homes[axis]!r}"
            places.append(f"{axis!r} in {home}")
        raise AxisError(
            f"axes {join_names(axes)} are not together in one view ({' and '.join(places)}); combine axes of one view only"
        )

    def expand(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return axes as they are, and the axes of flattened products in place of the products' names."""
        return tuple(axis for name in names for axis in self.products.get(name, (name,)))

    def name_of(self, axes: tuple[str, ...]) -> str:
        """Return the name of an axis, or of some axes that have one together."""
        return next((name for name, each in self.products.items() if each == axes), axes[0])

    def check(self, name: str, layout: Layout, rank: int) -> None:
        """Refuse a new view that contradicts the others.

        Raises:
            LayoutError: a name that is taken, or a shared axis that is not the same ranks; all problems.
        """
        problems = []
        for axis, home in self.homes().items():
            other = self[home].layout
            if axis in layout and layout.partition(axis) != other.partition(axis):
                problems.append(
                    f"axis {axis!r} groups rank {rank} with {listing(layout.group(rank, axis))} in view {name!r}, but with "
                    f"{listing(other.group(rank, axis))} in {other}; an axis that views share must be the same ranks in both: "
                    "change sizes or order, or give it a name of its own"
                )
        if name in self:
            problems.append(f"the name {name!r} is taken by another view; choose another")
        problems += [
            f"axis {axis!r} has the name of a flattened product; choose another name"
            for axis in layout
            if axis in self.products
        ]
        if problems:
            raise LayoutError(*problems)

    def check_product(self, name: str, axes: tuple[str, ...]) -> None:
        """Refuse a name for a product that means something else already.

        Raises:
            LayoutError: an axis or another product has the name.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise LayoutError(
                f"name is {name!r}; the name of a product is a Python identifier, such as 'dp_cp'"
            )
        if name in self.homes():
            raise LayoutError(f"the name {name!r} is taken by an axis; give the product another with name=")
        if self.products.get(name, axes) != axes:
            raise LayoutError(
                f"the name {name!r} is taken by the product of {join_names(self.products[name])}; give this one another "
                "with name="
            )


def join_names(axes: Sequence[str]) -> str:
    """Return axes in a sentence.

    Example:
        >>> join_names(("dp", "tp"))
        "'dp' and 'tp'"
    """
    return " and ".join(repr(axis) for axis in axes)


def product_axes(name: str, axes: Sequence[str]) -> tuple[str, ...]:
    """Return those of some axes that a name joins by ``_`` in their order; none if it does not.

    Example:
        >>> product_axes("dp_tp", ("dp", "cp", "tp")), product_axes("tp_dp", ("dp", "tp"))
        (('dp', 'tp'), ())
        >>> product_axes("dp_shard_cp", ("dp", "dp_shard", "cp"))
        ('dp_shard', 'cp')
    """
    for first, axis in enumerate(axes):
        if name == axis:
            return (axis,)
        if name.startswith(f"{axis}_"):
            rest = product_axes(name.removeprefix(f"{axis}_"), axes[first + 1 :])
            if rest:
                return (axis, *rest)
    return ()


def quoted(axes: Sequence[str]) -> str:
    """Return axes as they stand in code.

    Example:
        >>> quoted(("dp", "tp"))
        '"dp", "tp"'
    """
    return ", ".join(f'"{axis}"' for axis in axes)
