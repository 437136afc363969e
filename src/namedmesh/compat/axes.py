"""Where the axes of the legacy APIs, tp, pp, cp and dp, are in a mesh that may name and split them otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DENSE", "dense_layout", "with_ones"]

DENSE = ("pp", "dp", "cp", "tp")
_REPLICATED = ("dp_replicate", "dp_shard")


def dense_layout(
    layout: Layout, dialect: str, problems: Sequence[str] = (), *, ignored: Sequence[str] = ()
) -> tuple[Layout, dict[str, tuple[str, ...]]]:
    """A layout with all of tp, cp, dp and pp, and the axes that stand for each of them.

    An axis that is missing is added, of size 1; ``dp_replicate`` and ``dp_shard`` together are dp.

    Args:
        layout: that of a mesh.
        dialect: whose groups they are, for messages.
        problems: what was found wrong before.
        ignored: axes that the problems are about.

    Raises:
        LayoutError: there is an axis that the dialect has no group for, or the problems.

    Example:
        >>> dense_layout(Layout(dp_replicate=2, dp_shard=2, tp=2), "fairscale")
        (Layout(dp_replicate=2, dp_shard=2, tp=2, pp=1, cp=1), \
{'pp': ('pp',), 'dp': ('dp_replicate', 'dp_shard'), 'cp': ('cp',), 'tp': ('tp',)})
    """
    split = tuple(axis for axis in _REPLICATED if axis in layout)
    allowed = (*DENSE, *_REPLICATED)
    problems = [*problems]
    problems += [
        f"axis {axis!r} has no place in {dialect}'s groups, which are over {', '.join(allowed)}{did_you_mean(axis, allowed)}"
        for axis in layout
        if axis not in allowed and axis not in ignored
    ]
    if split and "dp" in layout:
        problems.append(f"the mesh has both 'dp' and {' and '.join(map(repr, split))}; use one or the other")
    if problems:
        raise LayoutError(*problems)
    names = {axis: (axis,) for axis in DENSE} | {"dp": split or ("dp",)}
    return with_ones(layout, [axis for axis in DENSE if axis != "dp" or not split]), names


def with_ones(layout: Layout, axes: Sequence[str]) -> Layout:
    """A layout with the axes that it lacks, of size 1: the same ranks in the same places."""
    more = [axis for axis in axes if axis not in layout]
    return Layout.from_shape(
        (*layout.axes, *more), (*layout.sizes, *(1 for _ in more)), rank_offset=layout.rank_offset
    )
