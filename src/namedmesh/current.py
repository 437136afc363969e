"""Which mesh legacy code means when it names none: the one selected with ``with mesh:``, or the only one alive."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.mesh import NamedMesh


class Watcher(Protocol):
    """A dialect, whose variables follow the selection."""

    def changed(self, closed: Any = None) -> None:
        """Follow a mesh that was selected, deselected or closed."""


_open: list[NamedMesh] = []  # the oldest first
_selected: list[
    NamedMesh
] = []  # one stack for the process: autograd runs backward functions in threads of its own
_watchers: list[Watcher] = []


def current_mesh() -> NamedMesh:
    """Return the mesh that code without a mesh argument works on.

    Returns:
        The innermost mesh entered with ``with mesh:``, in whatever thread; outside of any, the only mesh that is alive.

    Raises:
        MeshError: there is no mesh, or there are several and none was selected, or the selected one is closed.

    Example:
        >>> current_mesh()
        Traceback (most recent call last):
        namedmesh.errors.MeshError: no mesh is alive in this process; call namedmesh.init_mesh(...) first
    """
    mesh = selection()
    if mesh is not None:
        if mesh.closed:
            raise MeshError(
                f"the mesh over {mesh.layout}, selected with 'with mesh:', was closed; leave the block first"
            )
        return mesh
    meshes = alive()
    if not meshes:
        raise MeshError("no mesh is alive in this process; call namedmesh.init_mesh(...) first")
    if len(meshes) == 1:
        return meshes[0]
    raise MeshError(
        f"{len(meshes)} meshes are alive in this process and none is selected: "
        f"{', '.join(sorted(str(mesh.layout) for mesh in meshes))}; select one with 'with mesh:', or make the last one "
        "with init_mesh(replace=True), which closes the others"
    )


def selection() -> NamedMesh | None:
    """Return the mesh that was selected, if one was."""
    return _selected[-1] if _selected else None


def alive() -> list[NamedMesh]:
    """Return the meshes that are open, the oldest first; those whose default group was destroyed are not."""
    return [mesh for mesh in _open if not mesh.outlived]


def opened(mesh: NamedMesh, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Note that a mesh is open, with its group on each axis."""
    refuse_ambiguous(mesh, groups)
    _open.append(mesh)


def closed(mesh: NamedMesh) -> None:
    """Note that a mesh was closed."""
    _open.remove(mesh)
    for watcher in _watchers:
        watcher.changed(mesh)


def select(mesh: NamedMesh) -> None:
    """Make a mesh the current one of the process, until :func:`deselect`."""
    _selected.append(mesh)
    _tell()


def deselect(mesh: NamedMesh) -> None:
    """Undo the last :func:`select` of this mesh."""
    last = max(place for place, each in enumerate(_selected) if each is mesh)
    del _selected[last]
    _tell()


def watch(watcher: Watcher) -> None:
    """Tell a dialect of every mesh that is selected, deselected or closed."""
    _watchers.append(watcher)


def _tell() -> None:
    for watcher in _watchers:
        watcher.changed()


@atexit.register
def close_all() -> None:
    """Close every mesh that is open in this process, the newest first."""
    for mesh in reversed(_open.copy()):
        mesh.close()


def refuse_ambiguous(mesh: NamedMesh, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Refuse names that torch would take for those of another open mesh, whose groups are others.

    DTensor remembers operations by mesh, and takes meshes of the same names, ranks and device for one: results of one
    mesh would come back on the groups of the other.

    Args:
        mesh: the mesh that the names are for.
        groups: the group of each name.

    Raises:
        MeshError: all problems at once.
    """
    problems = []
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
