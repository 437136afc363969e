"""DeepSpeed's names for axes, and those of a NamedMesh for the same."""

from __future__ import annotations

import operator
from keyword import iskeyword
from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractIndexError, ContractTypeError
from namedmesh.errors import LayoutError
from namedmesh.layout import Layout
from namedmesh.sizes import RESERVED

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CANONICAL", "layout_of", "mesh_names", "place_of"]

CANONICAL = {"pipe": "pp", "data": "dp", "model": "tp"}
"""DeepSpeed's names, and the axes of a NamedMesh that they are."""


def layout_of(axes: Sequence[str], dims: Sequence[int]) -> Layout:
    """The layout of a topology, under names that a NamedMesh can have.

    Args:
        axes: DeepSpeed's names, slowest axis first.
        dims: the size of each.

    Raises:
        LayoutError: names or sizes that no topology can have; all problems at once.
        ContractIndexError: fewer sizes than names.
        ContractTypeError: names in one string, or a size that is no int.

    Example:
        >>> layout_of(["pipe", "data"], [2, 4])
        Layout(pp=2, dp=4)
    """
    if isinstance(axes, str):
        raise ContractTypeError(f"axes is the string {axes!r}; give a list with one name for each axis")
    names, sizes = list(axes), list(dims)
    problems = [] if names else ["no axis is named; name at least one"]
    for name in dict.fromkeys(names):
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name.startswith("_"):
            problems.append(
                f"axis name {name!r} cannot be a field of a coordinate; use letters, digits and underscores, the first a "
                "letter"
            )
        if names.count(name) > 1:
            problems.append(
                f"axis {name!r} is named {names.count(name)} times; each axis needs a name of its own"
            )
    if len(sizes) > len(names):
        problems.append(
            f"{len(names)} axes {names} but {len(sizes)} dims {sizes}; give one size for each axis"
        )
    if problems:
        raise LayoutError(*problems)
    if len(sizes) < len(names):
        raise ContractIndexError(
            f"{len(names)} axes {names} but {len(sizes)} dims {sizes}; give one size for each axis"
        )
    strange = [
        (name, size) for name, size in zip(names, sizes, strict=True) if not hasattr(size, "__index__")
    ]
    if strange:
        raise ContractTypeError(
            *(f"axis {name!r} has size {size!r}; a size is an int of at least 1" for name, size in strange)
        )
    whole = [operator.index(size) for size in sizes]
    empty = [(name, size) for name, size in zip(names, whole, strict=True) if size < 1]
    if empty:
        raise LayoutError(
            *(f"axis {name!r} has size {size}; a size is an int of at least 1" for name, size in empty)
        )
    return Layout.from_shape(mesh_names(names), whole)


def mesh_names(axes: Sequence[str]) -> list[str]:
    """The names that a mesh has for the axes of a topology: the canonical ones, unless they are in use.

    Example:
        >>> mesh_names(["pipe", "data", "expert"]), mesh_names(["pipe", "pp", "device"])
        (['pp', 'dp', 'expert'], ['pipe', 'pp', 'device_axis'])
    """
    chosen: list[str] = []
    for axis in axes:
        name = CANONICAL.get(axis, axis)
        name = axis if name != axis and name in axes else name
        while name in {*RESERVED, "self"} or name in chosen or (name != axis and name in axes):
            name += "_axis"
        chosen.append(name)
    return chosen


def place_of(value: object, size: int) -> int | None:
    """A coordinate or rank as an int, if it equals one below ``size``: the original looks it up by equality.

    Example:
        >>> place_of(2, 3), place_of(2.0, 3), place_of(3, 3), place_of(-1, 3), place_of("2", 3)
        (2, 2, None, None, None)
    """
    try:
        at = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return range(size).index(value) if value in range(size) else None  # type: ignore[arg-type]
    return at if 0 <= at < size else None
