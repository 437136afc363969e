"""The registry of this process: the open meshes, and the one that ``with mesh:`` selects.

Every mesh is a ``NamedMesh``, whose module imports this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

from namedmesh._errors import MeshError, format_items
from namedmesh.mesh.accessors import MeshAccessors
from namedmesh.mesh.groups import Groups, get_backends

# The meshes that were not closed, the oldest first, each with its groups.
_meshes: dict[MeshAccessors, Groups] = {}
# The stack of selected meshes. It belongs to the process and not to a thread: autograd runs
# backward functions in its own threads, and they must see the same mesh.
_selected: list[MeshAccessors] = []
_watchers: list[Callable[..., None]] = []


def selected_mesh() -> MeshAccessors | None:
    """Return the mesh of the innermost ``with mesh:``; None outside of such a block."""
    return _selected[-1] if _selected else None


def open_meshes() -> list[MeshAccessors]:
    """Return the meshes that are not closed and whose default group exists, the oldest first."""
    return [mesh for mesh, groups in _meshes.items() if not groups.are_stale()]


def all_meshes() -> list[MeshAccessors]:
    """Return the meshes that are not closed, the oldest first.

    In contrast to :func:`open_meshes`, their default group may have been destroyed.
    """
    return list(_meshes)


def register(mesh: MeshAccessors, groups: Groups) -> None:
    """Add a mesh to the open meshes.

    Args:
        mesh: the mesh.
        groups: its groups.

    Raises:
        MeshError: the mesh cannot use one of the groups; see :func:`check_groups`.
    """
    check_groups(mesh, {axis: mesh.group(axis) for axis in mesh})
    _meshes[mesh] = groups


def unregister(mesh: MeshAccessors) -> None:
    """Remove a mesh that was closed from the open meshes.

    Args:
        mesh: the mesh.
    """
    del _meshes[mesh]
    notify(mesh)


def select(mesh: MeshAccessors) -> None:
    """Make a mesh the current one of the process, until :func:`deselect`.

    Args:
        mesh: the mesh.
    """
    _selected.append(mesh)
    notify()


def deselect(mesh: MeshAccessors) -> None:
    """Undo the last :func:`select` of a mesh.

    Args:
        mesh: the mesh.
    """
    # The same mesh may have been selected several times, and others after it.
    for index in reversed(range(len(_selected))):
        if _selected[index] is mesh:
            del _selected[index]
            break
    notify()


def watch(watcher: Callable[..., None]) -> None:
    """Call a function whenever the selection changes, or a mesh is closed or loses its groups.

    Args:
        watcher: the function. Its argument is the mesh that was closed, or whose default group was
            destroyed; after a selection it has none.
    """
    _watchers.append(watcher)


def notify(*closed: MeshAccessors) -> None:
    """Call the watchers, with the mesh that was closed or has lost its groups.

    Args:
        *closed: the mesh; nothing after a selection.
    """
    for watcher in _watchers:
        watcher(*closed)


def check_groups(mesh: MeshAccessors, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Check that a mesh can use its groups on some axes. Does not communicate.

    Args:
        mesh: the mesh.
        groups: the group on each axis, or flattened axis.

    Raises:
        MeshError: a group has no backend for the device of the mesh, or DTensor would confuse the
            axis with one of another open mesh; all problems at once.
    """
    problems = _find_missing_backends(mesh, groups) + _find_dtensor_aliases(mesh, groups)
    if problems:
        raise MeshError(*problems)


def _find_missing_backends(mesh: MeshAccessors, groups: Mapping[str, dist.ProcessGroup]) -> list[str]:
    """Return a message for each group without a backend for the device of the mesh.

    torch would only notice at the first collective.
    """
    problems = []
    device = mesh.device.type
    for axis, group in groups.items():
        backends = get_backends(group)
        if group.size() > 1 and device not in backends:
            problems.append(
                f"the mesh is on {device}, but the group of {axis!r} serves "
                f"{format_items(backends)} only; create the groups with a backend for {device}, "
                "such as backend='cpu:gloo,cuda:nccl', or choose another device"
            )
    return problems


def _find_dtensor_aliases(mesh: MeshAccessors, groups: Mapping[str, dist.ProcessGroup]) -> list[str]:
    """Return a message for each axis that DTensor would confuse with one of another open mesh.

    DTensor caches operations by mesh, and meshes with equal names, ranks and device type are equal.
    If their groups differ, results on one mesh would be returned on the groups of the other.
    """
    problems = []
    for other in open_meshes():
        if other is mesh or other.device.type != mesh.device.type:
            continue
        for axis, group in groups.items():
            if axis not in other or other.size(axis) == 1 or other.group(axis) is group:
                continue
            if other.ranks(axis) == tuple(dist.get_process_group_ranks(group)):
                problems.append(
                    f"axis {axis!r} cannot use this process group: the open mesh over "
                    f"{other.layout} has an axis of the same name and ranks on a different group, "
                    "and DTensor cannot tell the two apart; share the groups (the same options on "
                    "both meshes), close the other mesh first, or choose another name"
                )
    return problems
