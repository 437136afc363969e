"""Where the axes of a legacy API are in a mesh, which may name and split them otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.dialects import EXPERT_AXES
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed import ProcessGroup

    from namedmesh.mesh import NamedMesh

__all__ = ["DENSE_AXES", "AxisMap", "axis_groups"]

DENSE_AXES = ("pp", "dp", "cp", "tp")
"""The axes that every legacy API has groups over."""
_SPLIT_DP = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class AxisMap:
    """Two layouts over the same ranks, and the axes in them that stand for each axis of a legacy API.

    Args:
        dense: the layout of tp, cp, dp and pp.
        expert: the layout of etp, ep, edp and pp; the dense one where the API has no experts.
        names: for each legacy axis, the axes of its layout that it stands for.
    """

    dense: Layout
    expert: Layout
    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def identity(cls, dense: Layout, expert: Layout) -> AxisMap:
        """Map each axis of the two layouts to itself."""
        return cls(dense, expert, {axis: (axis,) for axis in (*dense, *expert)})

    @classmethod
    def from_layout(cls, layout: Layout, dialect: str, views: Mapping[str, Layout] | None = None) -> AxisMap:
        """Find the axes of a legacy API in the layout and views of a mesh.

        An axis that the mesh lacks is added, of size 1; ``dp_replicate`` and ``dp_shard`` together are dp. The
        experts' axes come from the view that has any of them. Without such a view the experts are laid out as
        everything else: etp is tp, ep is 1, and edp is dp and cp together.

        Args:
            layout: the layout of the mesh.
            dialect: the name of the API, for messages.
            views: the views of the mesh; None if the API has no groups of experts.

        Raises:
            LayoutError: the layout has an axis that the API has no group for.

        Example:
            >>> found = AxisMap.from_layout(Layout(dp_replicate=2, dp_shard=2, tp=2), "fairscale")
            >>> found.dense, found.names["dp"]
            (Layout(dp_replicate=2, dp_shard=2, tp=2, pp=1, cp=1), ('dp_replicate', 'dp_shard'))
        """
        split = tuple(axis for axis in _SPLIT_DP if axis in layout)
        _check_axes(layout, dialect, split, has_experts=views is not None)
        names = {axis: (axis,) for axis in DENSE_AXES} | {"dp": split or ("dp",)}
        dense = _with_ones(layout, (axis for axis in DENSE_AXES if axis != "dp" or not split))
        if views is None:
            return cls(dense, dense, names)
        view = next((view for view in views.values() if any(axis in view for axis in EXPERT_AXES)), None)
        if view is not None:
            expert = _with_ones(view, ("pp", *EXPERT_AXES))
            return cls(dense, expert, names | {axis: (axis,) for axis in EXPERT_AXES})
        dense = _with_ones(dense, ("ep",))
        expert_names = {"ep": ("ep",), "etp": names["tp"], "edp": names["dp"] + names["cp"]}
        return cls(dense, dense, names | expert_names)

    def locate(self, axes: Iterable[str]) -> tuple[Layout, tuple[str, ...]]:
        """Return the layout that some legacy axes are in, and its own axes for them, in its order.

        Example:
            >>> axis_map = AxisMap.identity(Layout(pp=2, dp=2, cp=1, tp=2), Layout(pp=2, edp=1, ep=2, etp=2))
            >>> axis_map.locate(("tp", "pp"))
            (Layout(pp=2, dp=2, cp=1, tp=2), ('pp', 'tp'))
        """
        axes = tuple(axes)
        layout = self.expert if any(axis in EXPERT_AXES for axis in axes) else self.dense
        own = {name for axis in axes for name in self.names[axis]}
        return layout, tuple(axis for axis in layout.axes if axis in own)

    def size(self, *axes: str) -> int:
        """Return the number of ranks over some legacy axes."""
        layout, own = self.locate(axes)
        return layout.size(*own)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the ranks of every group over some legacy axes."""
        layout, own = self.locate(axes)
        return list(layout.groups(*own))


def axis_groups(mesh: NamedMesh, dialect: str) -> dict[str, tuple[ProcessGroup, list[int]]]:
    """Return this rank's group over each of pp, dp, cp and tp, and the ranks in it; communicates where one is made.

    They are the groups of the mesh. A group is made for an axis that the mesh does not have (this rank alone, the
    same for all such axes), and for a dp that it has in two parts; it belongs to the mesh, and later calls return
    the same one.

    Raises:
        LayoutError: as for :meth:`AxisMap.from_layout`.
    """
    axis_map = AxisMap.from_layout(mesh.layout, dialect)
    groups = {}
    for axis in DENSE_AXES:
        layout, axes = axis_map.locate((axis,))
        if len(axes) == 1 and axes[0] in mesh.layout:
            group = mesh.group(axes[0])
        else:
            group = mesh.pool.make(layout, axes, mesh.options_of(axes))
        groups[axis] = group, list(layout.group(mesh.global_rank, *axes))
    return groups


def _check_axes(layout: Layout, dialect: str, split: tuple[str, ...], *, has_experts: bool) -> None:
    experts = [axis for axis in layout if has_experts and axis in EXPERT_AXES]
    allowed = (*DENSE_AXES, *_SPLIT_DP)
    problems = [
        f"axis {axis!r} is one of the experts', and they factor the world another way; leave it out of the mesh and add "
        "a view for it: mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)"
        for axis in experts
    ]
    problems += [
        f"axis {axis!r} has no place in {dialect}'s groups, which are over {', '.join(allowed)}{did_you_mean(axis, allowed)}"
        for axis in layout
        if axis not in allowed and axis not in experts
    ]
    if split and "dp" in layout:
        problems.append(f"the mesh has both 'dp' and {' and '.join(map(repr, split))}; use one or the other")
    if problems:
        raise LayoutError(*problems)


def _with_ones(layout: Layout, axes: Iterable[str]) -> Layout:
    """Return a layout with the axes that it lacks, of size 1: the same ranks in the same places."""
    more = [axis for axis in axes if axis not in layout]
    return Layout.from_shape(
        (*layout.axes, *more), (*layout.sizes, *(1 for _ in more)), rank_offset=layout.rank_offset
    )
