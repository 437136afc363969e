"""What the names and sizes of a layout may be, and what -1 stands for; a sentence for each thing that is wrong."""

from __future__ import annotations

import operator
from keyword import iskeyword
from math import prod
from typing import TYPE_CHECKING, SupportsIndex, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# What `Layout` and `init_mesh` take by keyword beside the axes.
RESERVED = (
    "backend",
    "device",
    "layout",
    "options",
    "part",
    "rank_offset",
    "share_groups",
    "timeout",
    "world_size",
)


def axis_name_problems(axes: Sequence[object]) -> list[str]:
    """Return what is wrong with the names of some axes, a sentence each; nothing if they can name a layout.

    Example:
        >>> axis_name_problems(["dp", "tp", "dp"])
        ["axis 'dp' is named 2 times; each axis needs a name of its own"]
    """
    problems = [] if axes else ["no axis is named; name at least one, such as dp=-1"]
    for name in dict.fromkeys(axes):
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            problems.append(
                f"axis name {name!r} is not a Python identifier; use letters, digits and underscores, such as 'dp'"
            )
        elif name in RESERVED:
            problems.append(f"axis name {name!r} is taken by an argument; choose another name")
        if axes.count(name) > 1:
            problems.append(
                f"axis {name!r} is named {axes.count(name)} times; each axis needs a name of its own"
            )
    return problems


def product(axes: Iterable[str], sizes: Iterable[int]) -> str:
    """Return sizes in words.

    Example:
        >>> product(("dp", "tp"), (4, 2))
        'dp=4 x tp=2'
    """
    return " x ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))


def as_int(value: object) -> int | None:
    """Return the int that a value is, if it is one; True and False are none.

    Example:
        >>> as_int(2), as_int(2.0), as_int(True)
        (2, None, None)
    """
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def checked_int(what: str, value: SupportsIndex, least: int, problems: list[str]) -> int:
    """Return an int of at least ``least``; anything else is a problem, and ``least`` to go on checking with."""
    number = as_int(value)
    if number is None or number < least:
        problems.append(f"{what} is {value!r}; it is an int of at least {least}")
        return least
    return number


def checked_size(axis: object, value: SupportsIndex, problems: list[str]) -> int:
    """Return the size of an axis, or -1; anything else is a problem, and 1 to go on checking with."""
    size = as_int(value)
    if size is None or (size < 1 and size != -1):
        problems.append(
            f"axis {axis!r} has size {value!r}; a size is an int of at least 1, or -1 for whatever is left"
        )
        return 1
    return size


def fitted(
    axes: tuple[str, ...], sizes: tuple[int, ...], world_size: int | None, problems: list[str]
) -> tuple[int, ...]:
    """Return the sizes with -1 replaced; a world that they do not fit is a problem."""
    known = prod([size for size in sizes if size != -1])
    if world_size is None or (known == world_size and -1 not in sizes):
        return sizes
    if -1 in sizes and world_size % known == 0:
        return tuple(world_size // known if size == -1 else size for size in sizes)
    if -1 in sizes:
        fixed = [(axis, size) for axis, size in zip(axes, sizes, strict=True) if size != -1]
        total = f" = {known}" * (len(fixed) > 1)
        problems.append(
            f"{product(*zip(*fixed, strict=True))}{total} does not divide the world of {world_size} ranks; "
            f"change a size, or the number of ranks to a multiple of {known}"
        )
    else:
        problems.append(
            f"{product(axes, sizes)} needs {known} ranks, but the world has {world_size}; change a size, or "
            "give one axis -1 for whatever is left"
        )
    return sizes
