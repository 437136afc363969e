"""The factorings of one mesh: which view has which axes, which products have a name, whether views agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.errors import AxisError, LayoutError, did_you_mean, listing
from namedmesh.sizes import nearest_axis

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from namedmesh.layout import Layout

ROOT_VIEW = "mesh"
"""The name of the view that the mesh was made with."""


class Views:
    """The layouts of a mesh by name, in the order they were added, and its flattened products.

    Args:
        layout: that of the mesh itself.

    Attributes:
        layouts: those of the views, the mesh's own first.
        products: the axes of each flattened product, by its name.
    """

    def __init__(self, layout: Layout) -> None:
        self.layouts = {ROOT_VIEW: layout}
        self.products: dict[str, tuple[str, ...]] = {}

    def axes(self) -> dict[str, str]:
        """Return every axis, and the first view that has it."""
        homes: dict[str, str] = {}
        for name, layout in self.layouts.items():
            for axis in layout:
                homes.setdefault(axis, name)
        return homes

    def expand(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return axes as they are, and the axes of flattened products in place of the products' names."""
        return tuple(axis for name in names for axis in self.products.get(name, (name,)))

    def find(self, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return the first view that has axes and products together, and all their axes in its order.

        Raises:
            AxisError: no name, a name that is no axis, or axes that are not together in one view.
        """
        wanted = self.expand(names)
        if not wanted:
            raise AxisError(f"no axis is named; name one or more of {tuple(self.axes())}")
        for view, layout in self.layouts.items():
            if all(axis in layout for axis in wanted):
                return view, tuple(axis for axis in layout if axis in wanted)
        homes = self.axes()
        unknown = [
            f"axis {axis!r} is not one of {tuple(homes)}{nearest_axis(axis, homes)}"
            for axis in wanted
            if axis not in homes
        ]
        if unknown:
            raise AxisError(*unknown)
        places = []
        for axis in wanted:
            home = "the mesh" if homes[axis] == ROOT_VIEW else f"view {homes[axis]!r}"
            places.append(f"{axis!r} in {home}")
        raise AxisError(
            f"axes {join_names(wanted)} are not together in one view ({' and '.join(places)}); combine axes of one view only"
        )

    def check_order(self, names: tuple[str, ...], order: Sequence[str]) -> None:
        """Refuse names of axes and products that are no selection in some order.

        Raises:
            AxisError: an axis that is named twice.
            LayoutError: the names are out of order.
        """
        axes = self.expand(names)
        if len(set(axes)) != len(axes):
            raise AxisError(f"axes {names} are not a selection of {tuple(order)}; name each axis once")
        ordered = tuple(sorted(names, key=lambda name: order.index(self.expand((name,))[0])))
        if ordered != names:
            raise LayoutError(
                f"mesh[{quoted(names)}] is out of order; torch slices in the order of the mesh: mesh[{quoted(ordered)}]"
            )

    def check(self, name: str, layout: Layout, rank: int) -> None:
        """Refuse a new view that contradicts the others.

        Raises:
            LayoutError: a name that is taken, or a shared axis that is not the same ranks; all problems.
        """
        problems = []
        for axis, home in self.axes().items():
            other = self.layouts[home]
            if axis in layout and layout.partition(axis) != other.partition(axis):
                problems.append(
                    f"axis {axis!r} groups rank {rank} with {listing(layout.group(rank, axis))} in view {name!r}, but with "
                    f"{listing(other.group(rank, axis))} in {other}; an axis that views share must be the same ranks in both: "
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

    def check_options(self, name: str, layout: Layout, options: Iterable[str]) -> None:
        """Refuse options of a new view that are for no new axis of it.

        Raises:
            AxisError: all problems at once.
        """
        known = self.axes()
        new = [axis for axis in layout if axis not in known]
        problems = []
        for axis in options:
            if axis in known:
                problems.append(
                    f"options are given for {axis!r}, an axis that the mesh has already, with its group; give them to init_mesh"
                )
            elif axis not in layout and not product_axes(axis, layout.axes):
                problems.append(
                    f"options are given for {axis!r}, which is not one of the new axes {tuple(new)} of view {name!r}"
                    f"{did_you_mean(axis, new)}"
                )
        if problems:
            raise AxisError(*problems)

    def check_product(self, name: str, axes: tuple[str, ...]) -> None:
        """Refuse a name for a product that means something else already.

        Raises:
            LayoutError: an axis or another product has the name.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise LayoutError(
                f"name is {name!r}; the name of a product is a Python identifier, such as 'dp_cp'"
            )
        if name in self.axes():
            raise LayoutError(f"the name {name!r} is taken by an axis; give the product another with name=")
        if self.products.get(name, axes) != axes:
            raise LayoutError(
                f"the name {name!r} is taken by the product of {join_names(self.products[name])}; give this one another "
                "with name="
            )


def merged(layout: Layout, products: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]] | None:
    """Return the axes of a layout with each product in the place of its own; None where those do not adjoin.

    Example:
        >>> from namedmesh import Layout
        >>> merged(Layout(pp=2, dp=2, cp=2, tp=2), {"data": ("dp", "cp")})
        {'pp': ('pp',), 'data': ('dp', 'cp'), 'tp': ('tp',)}
        >>> merged(Layout(pp=2, dp=2, tp=2), {"pp_tp": ("pp", "tp")}) is None
        True
    """
    places: dict[str, tuple[int, tuple[str, ...]]] = {
        axis: (place, (axis,)) for place, axis in enumerate(layout)
    }
    for name, axes in products.items():
        for axis in axes:
            del places[axis]
        # Those of size 1 may stand anywhere.
        large = [layout.axes.index(axis) for axis in axes if layout[axis] > 1] or [layout.axes.index(axes[0])]
        if layout.size(*layout.axes[large[0] : large[-1] + 1]) != layout.size(*axes):
            return None
        places[name] = large[0], axes
    return {name: axes for name, (_, axes) in sorted(places.items(), key=lambda item: item[1][0])}


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
