"""Which axes of which layout each of Megatron's groups varies over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.compat.axes import dense_layout, with_ones

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh

__all__ = ["Shape", "shape_of"]

_EXPERT = ("edp", "ep", "etp")


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
            >>> from namedmesh import Layout
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
    problems = [
        f"axis {axis!r} is one of the experts', and they factor the world another way; leave it out of the mesh and add "
        "a view for it: mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)"
        for axis in layout
        if axis in _EXPERT
    ]
    dense, names = dense_layout(layout, "Megatron", problems, ignored=_EXPERT)
    view = next((view for view in mesh.views.values() if any(axis in view for axis in _EXPERT)), None)
    if view is None:
        dense = with_ones(dense, ["ep"])
        return Shape(
            dense, dense, names | {"ep": ("ep",), "etp": names["tp"], "edp": names["dp"] + names["cp"]}
        )
    expert = with_ones(view, ["pp", *_EXPERT])
    return Shape(dense, expert, names | {axis: (axis,) for axis in _EXPERT})
