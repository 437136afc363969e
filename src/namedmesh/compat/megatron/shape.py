"""Which axes of which layout each of Megatron's groups varies over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.mesh import NamedMesh

__all__ = ["Shape", "shape_of"]

_DENSE = ("pp", "dp", "cp", "tp")
_EXPERT = ("edp", "ep", "etp")
_REPLICATED = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Shape:
    """Two layouts over one world, the dense one and the experts', and where Megatron's axes are in them.

    Args:
        dense: the layout of tp, cp, dp and pp.
        expert: the layout of etp, ep, edp and pp.
        names: for each of Megatron's axes the axes of its layout that it stands for.
    """

    dense: Layout
    expert: Layout
    names: Mapping[str, tuple[str, ...]]

    def place(self, axes: Sequence[str]) -> tuple[Layout, tuple[str, ...]]:
        """The layout that Megatron's axes belong to, and its own axes for them, in its order.

        Example:
            >>> dense, expert = Layout(pp=2, dp=2, cp=1, tp=2), Layout(pp=2, edp=1, ep=2, etp=2)
            >>> shape = Shape(dense, expert, {axis: (axis,) for axis in (*dense, *expert)})
            >>> shape.place(("tp", "pp"))
            (Layout(pp=2, dp=2, cp=1, tp=2), ('pp', 'tp'))
        """
        layout = self.expert if any(axis in _EXPERT for axis in axes) else self.dense
        chosen = {own for axis in axes for own in self.names[axis]}
        return layout, tuple(axis for axis in layout.axes if axis in chosen)


def shape_of(mesh: NamedMesh) -> Shape:
    """Megatron's axes in a mesh that exists.

    An axis that the mesh does not have is of size 1; ``dp_replicate`` and ``dp_shard`` together are Megatron's
    dp. The experts' axes come from the view that has any of them. Without such a view the experts are laid out
    as everything else: etp is tp, ep is 1 and edp is dp and cp together.

    Raises:
        LayoutError: the mesh has an axis that Megatron does not know, or an expert's axis outside a view.
    """
    layout = mesh.layout
    split = tuple(axis for axis in _REPLICATED if axis in layout)
    problems = [
        f"axis {axis!r} is one of the experts', and they factor the world another way; leave it out of the mesh and add "
        "a view for it: mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)"
        for axis in layout
        if axis in _EXPERT
    ]
    allowed = (*_DENSE, *_REPLICATED)
    problems += [
        f"axis {axis!r} has no place in Megatron's groups, which are over {', '.join(allowed)}{did_you_mean(axis, allowed)}"
        for axis in layout
        if axis not in allowed and axis not in _EXPERT
    ]
    if split and "dp" in layout:
        problems.append(f"the mesh has both 'dp' and {' and '.join(map(repr, split))}; use one or the other")
    if problems:
        raise LayoutError(*problems)
    dense = _with_ones(layout, [axis for axis in _DENSE if axis != "dp" or not split])
    names = {axis: (axis,) for axis in _DENSE} | {"dp": split or ("dp",)}
    view = next((view for view in mesh.views.values() if any(axis in view for axis in _EXPERT)), None)
    if view is None:
        dense = _with_ones(dense, ["ep"])
        return Shape(
            dense, dense, names | {"ep": ("ep",), "etp": names["tp"], "edp": names["dp"] + names["cp"]}
        )
    expert = _with_ones(view, ["pp", *_EXPERT])
    return Shape(dense, expert, names | {axis: (axis,) for axis in _EXPERT})


def _with_ones(layout: Layout, axes: Sequence[str]) -> Layout:
    """A layout with the axes that it lacks, of size 1: the same ranks in the same places."""
    more = [axis for axis in axes if axis not in layout]
    return Layout.from_shape(
        (*layout.axes, *more), (*layout.sizes, *(1 for _ in more)), rank_offset=layout.rank_offset
    )
