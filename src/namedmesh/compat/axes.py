"""Where the axes of the legacy APIs, tp, pp, cp and dp, are in a mesh that may name and split them otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from namedmesh.mesh import NamedMesh

__all__ = ["DENSE", "dense_layout", "groups_over", "with_ones"]

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


def groups_over(mesh: NamedMesh, dialect: str) -> dict[str, tuple[ProcessGroup, list[int]]]:
    """This rank's group over each of pp, dp, cp and tp, and the ranks in it; communicates where one is made.

    They are the groups of the mesh. One has to be made for an axis that the mesh does not have (this rank alone,
    the same for all such axes), and for a dp that it has in two parts; it belongs to the mesh, and whoever asks
    next gets the same.

    Raises:
        LayoutError: as for :func:`dense_layout`.
    """
    layout, names = dense_layout(mesh.layout, dialect)
    groups = {}
    for axis in DENSE:
        axes = tuple(own for own in layout.axes if own in names[axis])
        if len(axes) == 1 and axes[0] in mesh.layout:
            group = mesh.group(axes[0])
        else:
            group = mesh.pool.make(layout, axes, mesh.options_of(axes))
        groups[axis] = group, list(layout.group(mesh.global_rank, *axes))
    return groups


def with_ones(layout: Layout, axes: Sequence[str]) -> Layout:
    """A layout with the axes that it lacks, of size 1: the same ranks in the same places."""
    more = [axis for axis in axes if axis not in layout]
    return Layout.from_shape(
        (*layout.axes, *more), (*layout.sizes, *(1 for _ in more)), rank_offset=layout.rank_offset
    )
