"""Which meshes of this process are open, and which of them is selected with ``with mesh:``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch.distributed as dist

from namedmesh.errors import MeshError, format_items
from namedmesh.groups import backends_of

NamedMesh: TypeAlias = Any  # its file imports this one

_open: list[NamedMesh] = []  # the oldest first
_selected: list[NamedMesh] = []  # of the process: autograd runs backward functions in threads of its own
_watchers: list[Callable[..., None]] = []


def selection() -> NamedMesh | None:
    """Return the mesh that was selected, if one was."""
    return _selected[-1] if _selected else None


def alive() -> list[NamedMesh]:
    """Return the meshes that are open, the oldest first; those whose default group was destroyed are not."""
    return [mesh for mesh in _open if not mesh.is_outlived()]


def every() -> list[NamedMesh]:
    """Return the meshes that were not closed, the oldest first."""
    return _open.copy()


def opened(mesh: NamedMesh, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Note that a mesh is open, with its group on each axis."""
    check_groups(mesh, groups)
    _open.append(mesh)


def closed(mesh: NamedMesh) -> None:
    """Note that a mesh was closed."""
    _open.remove(mesh)
    _tell(mesh)


def select(mesh: NamedMesh) -> None:
    """Make a mesh the current one of the process, until :func:`deselect`."""
    _selected.append(mesh)
    _tell()


def deselect(mesh: NamedMesh) -> None:
    """Undo the last :func:`select` of this mesh."""
    last = max(place for place, each in enumerate(_selected) if each is mesh)
    del _selected[last]
    _tell()


def watch(watcher: Callable[..., None]) -> None:
    """Call a function whenever a mesh was selected or deselected, and with a mesh that was closed."""
    _watchers.append(watcher)


def _tell(*closed: NamedMesh) -> None:
    for watcher in _watchers:
        watcher(*closed)


def check_groups(mesh: NamedMesh, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Raise MeshError for groups that a mesh cannot use, by the names that they have in it.

    A group may have no backend for the device of the mesh, which torch would find out at the first collective. And its name
    may be one of another open mesh, whose group is another: DTensor remembers operations by mesh, and takes meshes with the
    same names, ranks and device for one, so results of one mesh would come back on the groups of the other.
    """
    problems = []
    for name, group in groups.items():
        backends = backends_of(group)
        if group.size() > 1 and mesh.device.type not in backends:
            problems.append(
                f"the mesh is on {mesh.device.type}, but the group of {name!r} serves {format_items(backends)} only; make the "
                f"groups with a backend for {mesh.device.type}, such as backend='cpu:gloo,cuda:nccl', or choose another device"
            )
    for other in alive():
        if other is mesh or other.device.type != mesh.device.type:
            continue
        for name, group in groups.items():
            if name not in other or other.size(name) == 1 or other.group(name) is group:
                continue
            if other.ranks(name) == tuple(dist.get_process_group_ranks(group)):
                problems.append(
                    f"{name!r} would be on another process group than the {name!r} of the open mesh over {other.layout}, and "
                    "torch takes meshes with the same names and ranks for one; share the groups (the same options on "
                    "both meshes), close the other mesh first, or choose another name"
                )
    if problems:
        raise MeshError(*problems)
