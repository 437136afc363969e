"""Where the axes of a legacy API are in a mesh, which may lack some of them and have dp in two parts."""

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.groups import kept_groups

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh

_NOTHING: Mapping[str, object] = MappingProxyType({})
USUAL_AXES = ("pp", "dp", "cp", "tp", "dp_replicate", "dp_shard")
"""The axes that every legacy API has groups over, with the two parts of dp."""


def own_axes(layout: Layout, axes: Collection[str]) -> tuple[str, ...]:
    """Return the axes of a layout that stand for some of a legacy API's, in its order; one that it lacks has size 1.

    Example:
        >>> from namedmesh import Layout
        >>> own_axes(Layout(dp_replicate=2, dp_shard=2, tp=2), ("tp", "cp", "dp"))
        ('dp_replicate', 'dp_shard', 'tp')
    """
    stand_in = {"dp_replicate": "dp", "dp_shard": "dp", "sp": "cp"}
    return tuple(axis for axis in layout.axes if axis in axes or stand_in.get(axis) in axes)


def group_over(mesh: NamedMesh, axes: Collection[str]) -> tuple[ProcessGroup, list[int]]:
    """Return this rank's group over some of a legacy API's axes, made unless it is there, and its ranks; every rank calls."""
    own = own_axes(mesh.layout, axes)
    if not own:
        return mesh.groups.alone(), [mesh.global_rank]
    group = mesh.groups.over(mesh.layout, own, mesh.options_of(own))
    return group, list(mesh.layout.group(mesh.global_rank, *own))


@contextmanager
def agreed_groups(mesh: NamedMesh, call: str, request: Mapping[str, object] = _NOTHING) -> Iterator[None]:
    """Make groups of a mesh in a context, once every rank has come with the same mesh and request; communicates."""
    with mesh.agreed(call) as compare:
        layouts = {"layout": repr(mesh.layout), "views": repr(mesh.views)}
        compare({**layouts, **request, "groups that exist": kept_groups()})
        yield


def check_axes(
    layout: Layout,
    dialect: str,
    allowed: Collection[str] = USUAL_AXES,
    *,
    experts: Collection[str] = (),
    instead: str = "",
) -> None:
    """Refuse a mesh with axes that a legacy API has no group for, or that are of its experts: ``instead`` says what to do."""
    problems = []
    for axis in layout:
        if axis in experts:
            problems.append(f"axis {axis!r} is one of the experts', and {instead}")
        elif axis not in allowed:
            place = f"has no place in {dialect}'s groups, which are over {', '.join(allowed)}"
            problems.append(f"axis {axis!r} {place}{did_you_mean(axis, allowed)}")
    split = [repr(axis) for axis in ("dp_replicate", "dp_shard") if axis in layout]
    if split and "dp" in layout:
        problems.append(f"the mesh has both 'dp' and {' and '.join(split)}; use one or the other")
    if problems:
        raise LayoutError(*problems)
