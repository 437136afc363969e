"""Where the axes of a legacy API are in a mesh, which may lack some of them and have dp in two parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.errors import LayoutError, MeshError, did_you_mean
from namedmesh.mesh import NamedMesh

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch.distributed import ProcessGroup

    from namedmesh.layout import Layout

__all__ = ["USUAL_AXES", "make_groups", "own_axes", "require_default_group"]

_SPLIT_DP = ("dp_replicate", "dp_shard")
USUAL_AXES = ("pp", "dp", "cp", "tp", *_SPLIT_DP)
"""The axes that every legacy API has groups over, with the two parts of dp."""


def require_default_group(or_call: str = "torch.distributed.init_process_group()") -> None:
    """Raise ContractError where there is no default group, which ``namedmesh.launch.init()`` makes, or another call."""
    if not dist.is_initialized():
        raise ContractError(
            f"torch.distributed has no default group; call namedmesh.launch.init() or {or_call} first"
        )


def own_axes(layout: Layout, axes: Collection[str]) -> tuple[str, ...]:
    """Return the axes of a layout that stand for some of a legacy API's, in its order; one that it lacks has size 1.

    Example:
        >>> from namedmesh import Layout
        >>> own_axes(Layout(dp_replicate=2, dp_shard=2, tp=2), ("tp", "cp", "dp"))
        ('dp_replicate', 'dp_shard', 'tp')
    """
    named = {*axes, *(_SPLIT_DP if "dp" in axes else ())}
    return tuple(axis for axis in layout if axis in named)


def make_groups(mesh: NamedMesh, kinds: Iterable[Collection[str]]) -> list[ProcessGroup]:
    """Return this rank's group over each of some kinds of axes; those that the mesh lacks are made, by every rank."""
    groups = []
    for axes in kinds:
        own = own_axes(mesh.layout, axes)
        groups.append(mesh.groups.over(mesh.layout, own, mesh.options_of(own)) if own else mesh.groups.alone())
    return groups


def groups_of(
    mesh: NamedMesh, call: str, dialect: str, kinds: Iterable[Collection[str]], allowed: Collection[str] = USUAL_AXES
) -> list[ProcessGroup]:
    """Do the same for a mesh that a user gives to ``call``, which every rank calls; communicates.

    Raises:
        LayoutError: the mesh has axes that the dialect has no group for.
        MeshError: what was given is no open mesh.
    """
    if not isinstance(mesh, NamedMesh):
        raise MeshError(f"{call} got a {type(mesh).__name__}; give it a NamedMesh, such as namedmesh.init_mesh(...)")
    with mesh.agreed(call) as compare:
        check_axes(mesh.layout, dialect, allowed)
        compare({"layout": repr(mesh.layout)})
        return make_groups(mesh, kinds)


def check_axes(layout: Layout, dialect: str, allowed: Collection[str]) -> None:
    """Refuse a mesh with axes that a legacy API has no group for."""
    problems = [
        f"axis {axis!r} has no place in {dialect}'s groups, which are over {', '.join(allowed)}{did_you_mean(axis, allowed)}"
        for axis in layout
        if axis not in allowed and layout[axis] > 1
    ]
    split = [repr(axis) for axis in _SPLIT_DP if axis in layout]
    if split and "dp" in layout:
        problems.append(f"the mesh has both 'dp' and {' and '.join(split)}; use one or the other")
    if problems:
        raise LayoutError(*problems)
