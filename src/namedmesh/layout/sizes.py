"""Check and format names and sizes of axes, infer -1, and divide layers and heads.

The checks return lists of messages, so that a caller can raise all problems at once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from keyword import iskeyword
from math import gcd, prod
from typing import SupportsIndex, cast

from namedmesh._errors import did_you_mean, format_items
from namedmesh.layout.axes import DATA_PARTS, USUAL_AXES

# The keyword arguments of `Layout` and `init_mesh`, in addition to the axes. No axis can have such
# a name.
RESERVED = (
    "backend",
    "device",
    "layout",
    "options",
    "rank_offset",
    "close_existing",
    "timeout",
    "world_size",
)


def check_axis_names(axes: Sequence[object]) -> list[str]:
    """Return the reasons why the names of axes are not valid (empty if they are).

    Args:
        axes: the names; objects of other types are reported.
    """
    problems = [] if axes else ["no axis is named; name at least one, such as dp=-1"]
    # A name that occurs twice is reported once.
    for name in dict.fromkeys(axes):
        if isinstance(name, str) and iskeyword(name):
            problems.append(f"axis name {name!r} is a keyword of Python; choose another name")
        elif not isinstance(name, str) or not name.isidentifier():
            problems.append(
                f"axis name {name!r} is not a Python identifier; use letters, digits and "
                "underscores, such as 'dp'"
            )
        elif name in RESERVED:
            problems.append(f"axis name {name!r} is taken by an argument; choose another name")
        if axes.count(name) > 1:
            problems.append(f"axis {name!r} is named {axes.count(name)} times; each axis needs its own name")
    return problems


def suggest_axis(axis: object, allowed: Iterable[str]) -> str:
    """Return a suggestion for a message about an unknown axis; empty if there is none.

    A usual name, such as ``ep``, is not a misspelling of another name, so nothing is suggested for
    it. If the layout has ``dp_replicate`` and ``dp_shard``, both are suggested for ``dp``.

    Args:
        axis: the unknown name.
        allowed: the axes of the layout.

    Example:
        >>> suggest_axis("tq", ("pp", "tp")), suggest_axis("ep", ("pp", "tp"))
        ("; did you mean 'tp'?", '')
        >>> suggest_axis("dp", ("dp_replicate", "dp_shard"))
        "; 'dp' is in two parts here: name both, 'dp_replicate' and 'dp_shard'"
    """
    allowed = tuple(allowed)
    if axis == "dp" and set(DATA_PARTS) <= set(allowed):
        return f"; 'dp' is in two parts here: name both, {' and '.join(map(repr, DATA_PARTS))}"
    return "" if axis in USUAL_AXES else did_you_mean(axis, allowed)


def format_sizes(axes: Iterable[str], sizes: Iterable[int]) -> str:
    """Format the sizes of axes.

    Args:
        axes: the names of the axes.
        sizes: the size of each axis.

    Example:
        >>> format_sizes(("dp", "tp"), (4, 2))
        'dp=4 x tp=2'
    """
    return " x ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))


def as_int(value: object) -> int | None:
    """Return a value as an int; None if it is not an integer.

    NumPy's integers are integers here. True and False are not.

    Args:
        value: any object.
    """
    # A fast path for the usual case: the planner makes many layouts.
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def infer_sizes(
    axes: Sequence[str], sizes: Sequence[object], world_size: object, rank_offset: object
) -> tuple[tuple[int, ...], list[str]]:
    """Check the sizes of axes, and infer the size of an axis with -1.

    Args:
        axes: the names of the axes.
        sizes: the size of each axis. One may be -1.
        world_size: the number of ranks; None if it is not known.
        rank_offset: the first rank of the layout. It is only checked.

    Returns:
        The sizes, and the reasons why they are not valid (empty if they are).
    """
    problems = check_axis_names(axes)
    numbers: list[int] = []
    for axis, value in zip(axes, sizes, strict=True):
        size = as_int(value)
        if size is None or (size < 1 and size != -1):
            problems.append(
                f"size of axis {axis!r} must be an int of at least 1, or -1 for the remaining "
                f"ranks, got {value!r}"
            )
            # Any valid size does, so that the remaining checks can run: all problems are reported
            # at once.
            size = 1
        numbers.append(size)
    world = as_int(world_size)
    if world_size is not None and (world is None or world < 1):
        problems.append(f"world_size must be an int of at least 1, got {world_size!r}")
    # It does not change the sizes. It is checked here so that all problems are reported at once.
    first = as_int(rank_offset)
    if first is None or first < 0:
        problems.append(f"rank_offset must be an int of at least 0, got {rank_offset!r}")
    open_axes = [axis for axis, size in zip(axes, numbers, strict=True) if size == -1]
    if len(open_axes) > 1:
        problems.append(
            f"axes {format_items(map(repr, open_axes))} are all -1; only one axis can have the "
            "remaining ranks"
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
    """Return sizes whose product is the number of ranks, or the reason why there are none."""
    # At most one size is -1 here: infer_sizes has checked it.
    fixed = {axis: size for axis, size in zip(axes, sizes, strict=True) if size != -1}
    known = prod(fixed.values())
    if len(fixed) == len(axes):
        if known == world_size:
            return tuple(sizes), []
        problem = (
            f"{format_sizes(axes, sizes)} needs {known} ranks, but the world has {world_size}; "
            "change a size, or give one axis -1 for the remaining ranks"
        )
    elif world_size % known == 0:
        inferred = world_size // known
        return tuple([fixed.get(axis, inferred) for axis in axes]), []
    else:
        total = f" = {known}" if len(fixed) > 1 else ""
        problem = (
            f"{format_sizes(fixed, fixed.values())}{total} does not divide the world of "
            f"{world_size} ranks; change a size, or the number of ranks to a multiple of {known}"
        )
    return tuple(sizes), [problem]


def split_layers(layers: int, stage: int, stages: int) -> range:
    """Return the indices of the layers of one pipeline stage.

    Stages differ by one layer at most. The longer stages come last.

    Args:
        layers: the number of layers of the model.
        stage: the index of the stage.
        stages: the number of stages.

    Example:
        >>> [list(split_layers(5, stage, 2)) for stage in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def find_shared_heads(queries: int, heads: int, size: int) -> list[list[int]]:
    """Return the kv heads of each rank if the number of ranks does not divide them.

    Each rank has the same number of query heads, and computes the kv heads to which they attend. A
    kv head that serves many of the rank's query heads is listed several times, so that every listed
    head serves the same number of them. That number is the largest possible one.

    Args:
        queries: the number of query heads. The number of ranks and the number of kv heads must
            divide it.
        heads: the number of kv heads.
        size: the number of ranks.

    Returns:
        By rank, the indices of kv heads in the order of the rank's query heads; empty if it is
        impossible.

    Example:
        12 query heads share 6 kv heads over 4 ranks. The second rank has three query heads: the
        last one of kv head 1, and both of kv head 2.

        >>> find_shared_heads(12, 6, 4)
        [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]
    """
    if queries % size or queries % heads:
        return []
    queries_per_head = queries // heads
    queries_per_rank = queries // size
    # Blocks of this many query heads lie within one rank and within one kv head each. They are the
    # largest blocks that do.
    step = gcd(queries_per_head, queries_per_rank)
    needed = []
    for rank in range(size):
        own_queries = range(rank * queries_per_rank, (rank + 1) * queries_per_rank, step)
        needed.append([query // queries_per_head for query in own_queries])
    return needed


def format_axes(axes: Sequence[str]) -> str:
    """Format axes for a sentence, such as ``'dp' and 'tp'``.

    Args:
        axes: the names of the axes.
    """
    return " and ".join(repr(axis) for axis in axes)


def quote_axes(axes: Sequence[str]) -> str:
    """Format axes as arguments in code, such as ``"dp", "tp"``.

    Args:
        axes: the names of the axes.
    """
    return ", ".join(f'"{axis}"' for axis in axes)
