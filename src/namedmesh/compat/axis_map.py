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

    from namedmesh.making import GroupMaker
    from namedmesh.mesh import NamedMesh

__all__ = ["DENSE_AXES", "AxisMap", "axis_groups"]

DENSE_AXES = ("pp", "dp", "cp", "tp")
"""The axes that every legacy API has groups over."""
_SPLIT_DP = ("dp_replicate", "dp_shard")
_GTP = "gtp_remat"
_VIEW_AXES = (*EXPERT_AXES, "egtp_remat")


@dataclass(frozen=True)
class AxisMap:
    """Two layouts over the same ranks, and the axes in them that stand for each axis of a legacy API.

    Args:
        dense: the layout of tp, gtp_remat, cp, dp and pp.
        expert: the layout of etp, ep, egtp_remat, edp and pp; the dense one where the API has no experts.
        names: for each legacy axis, the axes of its layout that it stands for.
        added: the axes of both layouts that the mesh does not have, of size 1.
    """

    dense: Layout
    expert: Layout
    names: Mapping[str, tuple[str, ...]]
    added: frozenset[str] = frozenset()

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
            >>> axis_map = AxisMap.from_layout(Layout(dp_replicate=2, dp_shard=2, tp=2), "fairscale")
            >>> axis_map.dense, axis_map.names["dp"]
            (Layout(dp_replicate=2, dp_shard=2, tp=2, pp=1, cp=1), ('dp_replicate', 'dp_shard'))
        """
        split = tuple(axis for axis in _SPLIT_DP if axis in layout)
        _check_axes(layout, dialect, split, has_experts=views is not None)
        names = {axis: (axis,) for axis in (*DENSE_AXES, _GTP, *_VIEW_AXES)} | {"dp": split or ("dp",)}
        own = [axis for axis in DENSE_AXES if axis != "dp" or not split]
        if views is None:
            dense = expert = _with_ones(layout, own)
        else:
            dense = _with_ones(layout, [*own, _GTP])
            view = next((view for view in views.values() if any(axis in view for axis in _VIEW_AXES)), None)
            if view is not None:
                expert = _with_ones(view, ("pp", *_VIEW_AXES))
            else:
                dense = expert = _with_ones(dense, ("ep", "egtp_remat"))
                names |= {"etp": names["tp"], "edp": (*names["dp"], "cp", _GTP)}
        in_mesh = {*layout, *(axis for view in (views or {}).values() for axis in view)}
        return cls(dense, expert, names, frozenset({*dense, *expert} - in_mesh))

    def locate(self, axes: Iterable[str]) -> tuple[Layout, tuple[str, ...]]:
        """Return the layout that some legacy axes are in, and its own axes for them, in its order.

        Axes that the mesh does not have are left out, unless there are no others.

        Example:
            >>> axis_map = AxisMap.from_layout(Layout(pp=2, dp=2, tp=2), "fairscale")
            >>> axis_map.locate(("tp", "cp", "pp")), axis_map.locate(("cp",))[1]
            ((Layout(pp=2, dp=2, tp=2, cp=1), ('pp', 'tp')), ('cp',))
        """
        axes = tuple(axes)
        layout = self.expert if any(axis in _VIEW_AXES for axis in axes) else self.dense
        named = {name for axis in axes for name in self.names[axis]}
        own = tuple(axis for axis in layout.axes if axis in named)
        return layout, tuple(axis for axis in own if axis not in self.added) or own

    def size(self, *axes: str) -> int:
        """Return the number of ranks over some legacy axes."""
        layout, own = self.locate(axes)
        return layout.size(*own)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the ranks of every group over some legacy axes."""
        layout, own = self.locate(axes)
        return list(layout.groups(*own))


def axis_groups(
    mesh: NamedMesh, maker: GroupMaker, dialect: str
) -> dict[str, tuple[ProcessGroup, list[int]]]:
    """Return this rank's group over each of pp, dp, cp and tp, and the ranks in it.

    They are the groups of the mesh. A group is made for an axis that the mesh does not have (this rank alone, the
    same for all such axes), and for a dp that it has in two parts; it belongs to the mesh, and later calls return
    the same one.

    Args:
        mesh: the mesh.
        maker: makes the groups that it lacks.
        dialect: the name of the API, for messages.

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
            group = maker.make(layout, axes, mesh.options_of(axes))
        groups[axis] = group, list(layout.group(mesh.global_rank, *axes))
    return groups


def _check_axes(layout: Layout, dialect: str, split: tuple[str, ...], *, has_experts: bool) -> None:
    experts = [axis for axis in layout if has_experts and axis in _VIEW_AXES]
    allowed = (*DENSE_AXES, *_SPLIT_DP, *((_GTP,) if has_experts else ()))
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
