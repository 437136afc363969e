"""What the names and sizes of a layout may be, and what -1 stands for; a sentence for each thing that is wrong."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from keyword import iskeyword
from math import gcd, prod
from typing import SupportsIndex, cast

from namedmesh.axes import DATA_PARTS, USUAL_AXES
from namedmesh.errors import did_you_mean, listing

# What `Layout` and `init_mesh` take by keyword beside the axes.
RESERVED = ("backend", "device", "layout", "options", "rank_offset", "replace", "timeout", "world_size")


def axis_name_problems(axes: Sequence[object]) -> list[str]:
    """Return what is wrong with the names of some axes, a sentence each; nothing if they can name a layout."""
    problems = [] if axes else ["no axis is named; name at least one, such as dp=-1"]
    for name in dict.fromkeys(axes):
        if isinstance(name, str) and iskeyword(name):
            problems.append(f"axis name {name!r} is a keyword of Python; choose another name")
        elif not isinstance(name, str) or not name.isidentifier():
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


def nearest_axis(axis: object, allowed: Iterable[str]) -> str:
    """Return the tail of a message about an unknown axis: the nearest one, or nothing if the name is a usual one.

    A usual name is no typing mistake. ``dp`` may exist in two parts.

    Example:
        >>> nearest_axis("tq", ("pp", "tp")), nearest_axis("ep", ("pp", "tp"))
        ("; did you mean 'tp'?", '')
        >>> nearest_axis("dp", ("dp_replicate", "dp_shard"))
        "; 'dp' is in two parts here: name both, 'dp_replicate' and 'dp_shard'"
    """
    allowed = tuple(allowed)
    if axis == "dp" and set(DATA_PARTS) <= set(allowed):
        return f"; 'dp' is in two parts here: name both, {' and '.join(map(repr, DATA_PARTS))}"
    return "" if axis in USUAL_AXES else did_you_mean(axis, allowed)


def product(axes: Iterable[str], sizes: Iterable[int]) -> str:
    """Return sizes in words.

    Example:
        >>> product(("dp", "tp"), (4, 2))
        'dp=4 x tp=2'
    """
    return " x ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))


def as_int(value: object) -> int | None:
    """Return the int that a value is, if it is one; True and False are none."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def fitted_sizes(
    axes: Sequence[str], sizes: Sequence[object], world_size: object, rank_offset: object
) -> tuple[tuple[int, ...], list[str]]:
    """Return the sizes of some axes with -1 replaced, and what is wrong with them, a sentence each."""
    problems = axis_name_problems(axes)
    numbers: list[int] = []
    for axis, value in zip(axes, sizes, strict=True):
        size = as_int(value)
        if size is None or (size < 1 and size != -1):
            problems.append(
                f"axis {axis!r} has size {value!r}; a size is an int of at least 1, or -1 for whatever is left"
            )
            size = 1
        numbers.append(size)
    world = as_int(world_size)
    if world_size is not None and (world is None or world < 1):
        problems.append(f"world_size is {world_size!r}; it is an int of at least 1")
    first = as_int(rank_offset)
    if first is None or first < 0:
        problems.append(f"rank_offset is {rank_offset!r}; it is an int of at least 0")
    open_axes = [axis for axis, size in zip(axes, numbers, strict=True) if size == -1]
    if len(open_axes) > 1:
        problems.append(
            f"axes {listing(map(repr, open_axes))} are all -1; only one axis can be whatever is left"
        )
    if open_axes and world_size is None:
        problems.append(
            f"axis {open_axes[0]!r} is -1, but the number of ranks is not known; give its size, or world_size"
        )
    if world is None or problems:
        return tuple(numbers), problems
    return _fit_into_world(axes, numbers, world)


def _fit_into_world(
    axes: Sequence[str], sizes: Sequence[int], world_size: int
) -> tuple[tuple[int, ...], list[str]]:
    fixed = {axis: size for axis, size in zip(axes, sizes, strict=True) if size != -1}
    known = prod(fixed.values())
    if len(fixed) == len(axes):
        if known == world_size:
            return tuple(sizes), []
        problem = (
            f"{product(axes, sizes)} needs {known} ranks, but the world has {world_size}; change a size, or "
            "give one axis -1 for whatever is left"
        )
    elif world_size % known == 0:
        return tuple([fixed.get(axis, world_size // known) for axis in axes]), []
    else:
        total = f" = {known}" if len(fixed) > 1 else ""
        problem = (
            f"{product(fixed, fixed.values())}{total} does not divide the world of {world_size} ranks; "
            f"change a size, or the number of ranks to a multiple of {known}"
        )
    return tuple(sizes), [problem]


def stage_range(layers: int, stage: int, stages: int) -> range:
    """Return the numbers of the layers of one pipeline stage: as even as can be, the longer stages last.

    Example:
        >>> [list(stage_range(5, stage, 2)) for stage in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def shared_heads(queries: int, heads: int, size: int) -> list[list[int]]:
    """Return which kv heads each rank computes where the ranks do not divide them; nothing where they cannot share them.

    Each rank has as many queries as any other, and needs the heads that those attend to. It hands out one head for equally many of
    its queries, in their order: the fewest with which every head serves equally many of them.

    Args:
        queries: the number of query heads; ranks and kv heads have to divide it.
        heads: the number of kv heads.
        size: the number of ranks.

    Example:
        12 queries of 6 heads over four ranks, of which the second has three: the last of head 1, and both of head 2.

        >>> shared_heads(12, 6, 4)
        [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]
    """
    if queries % size or queries % heads:
        return []
    of_head, own = queries // heads, queries // size
    step = gcd(of_head, own)
    return [[query // of_head for query in range(rank * own, (rank + 1) * own, step)] for rank in range(size)]
