"""Where the axes of a legacy API are in a mesh, which may lack some of them and have dp in two parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch.distributed import ProcessGroup

    from namedmesh.groups import GroupMaker
    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh
    from namedmesh.options import GroupOptions

__all__ = ["DENSE_AXES", "USUAL_AXES", "axis_groups", "check_axes", "compare_mesh", "group_over", "own_axes"]

DENSE_AXES = ("pp", "dp", "cp", "tp")
"""The axes that every legacy API has groups over."""
_SPLIT_DP = ("dp_replicate", "dp_shard")
USUAL_AXES = (*DENSE_AXES, *_SPLIT_DP)
"""The same, with the two parts of dp."""
_STAND_IN = {"dp": _SPLIT_DP, "cp": ("sp",)}
"""What an axis may be in a mesh instead: dp in two parts, and cp under DeepSpeed's name, where a dialect takes it."""


def own_axes(layout: Layout, axes: Collection[str]) -> tuple[str, ...]:
    """Return the axes of a layout that stand for some of a legacy API's, in its order; one that it lacks has size 1.

    Example:
        >>> from namedmesh import Layout
        >>> own_axes(Layout(dp_replicate=2, dp_shard=2, tp=2), ("tp", "cp", "dp"))
        ('dp_replicate', 'dp_shard', 'tp')
    """
    named = {*axes}
    for axis in axes:
        named.update(_STAND_IN.get(axis, ()))
    return tuple([axis for axis in layout.axes if axis in named])


def group_over(
    mesh: NamedMesh,
    maker: GroupMaker,
    layout: Layout,
    axes: tuple[str, ...],
    options: GroupOptions | None = None,
) -> tuple[ProcessGroup, list[int]]:
    """Return this rank's group over some axes, made unless the mesh has it, and its ranks; without axes of this rank alone.

    Args:
        mesh: the mesh, which owns the group.
        maker: makes it.
        layout: the layout of the mesh, or of one of its views.
        axes: some of its axes, in its order.
        options: options of the group; by default those that the mesh has for the axes.
    """
    if not axes:
        return maker.alone(), [mesh.global_rank]
    group = maker.make(layout, axes, options or mesh.options_of(axes))
    return group, list(layout.group(mesh.global_rank, *axes))


def compare_mesh(mesh: NamedMesh, maker: GroupMaker, kinds: Iterable[Collection[str]]) -> None:
    """Compare a mesh, and the groups over some of its axes that will be made, with the other ranks; communicates.

    Raises:
        AgreementError: the ranks do not agree, or only some of them have a group already.
    """
    groups = []
    for axes in kinds:
        own = own_axes(mesh.layout, axes)
        if own:
            groups.append((mesh.layout, own, mesh.options_of(own)))
    maker.compare({"layout": repr(mesh.layout)}, groups)


def axis_groups(
    mesh: NamedMesh, maker: GroupMaker, dialect: str
) -> dict[str, tuple[ProcessGroup, list[int]]]:
    """Return this rank's group over each of pp, dp, cp and tp, and the ranks in it.

    Raises:
        LayoutError: the mesh has an axis that the dialect has no group for.
    """
    check_axes(mesh.layout, dialect)
    return {axis: group_over(mesh, maker, mesh.layout, own_axes(mesh.layout, (axis,))) for axis in DENSE_AXES}


def check_axes(
    layout: Layout,
    dialect: str,
    allowed: Collection[str] = USUAL_AXES,
    *,
    experts: Collection[str] = (),
    instead: str = "",
) -> None:
    """Refuse a mesh with axes that a legacy API has no group for.

    Args:
        layout: the layout of the mesh.
        dialect: the name of the API, for messages.
        allowed: the axes that it has groups over.
        experts: axes of the experts, which are none of the mesh.
        instead: why, and what to do about them.
    """
    problems = []
    for axis in layout:
        if axis in experts:
            problems.append(f"axis {axis!r} is one of the experts', and {instead}")
        elif axis not in allowed:
            problems.append(
                f"axis {axis!r} has no place in {dialect}'s groups, which are over {', '.join(allowed)}"
                f"{did_you_mean(axis, allowed)}"
            )
    split = [repr(axis) for axis in _SPLIT_DP if axis in layout]
    if split and "dp" in layout:
        problems.append(f"the mesh has both 'dp' and {' and '.join(split)}; use one or the other")
    if problems:
        raise LayoutError(*problems)
