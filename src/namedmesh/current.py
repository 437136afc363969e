"""Which mesh legacy code means when it names none: the one selected with ``with mesh:``, or the only one alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh.mesh import NamedMesh

__all__ = [
    "current_mesh",
    "deselect",
    "open_meshes",
    "register",
    "select",
    "selected_mesh",
    "unregister",
    "watch",
]

# Process-wide rather than per thread: autograd runs backward functions in threads of its own, and code in
# them must see the mesh that was selected around the training step.
# A mesh is alive until it is closed: its groups are.
_alive: list[NamedMesh] = []
_selected: list[NamedMesh] = []
# The dialects: their accessors are too fast to ask here each time, so they are told of every change.
_watchers: list[Callable[[NamedMesh | None], None]] = []


def current_mesh() -> NamedMesh:
    """The mesh that code without a mesh argument works on.

    Returns:
        The innermost mesh entered with ``with mesh:``; outside of any, the only mesh that is alive.

    Raises:
        MeshError: there is no mesh, or there are several and none was selected, or the selected one is closed.

    Example:
        >>> current_mesh()
        Traceback (most recent call last):
        namedmesh.errors.MeshError: no mesh is alive in this process; call namedmesh.init_mesh(...) first
    """
    if _selected:
        mesh = _selected[-1]
        if mesh.closed:
            raise MeshError(
                f"the mesh over {mesh.layout}, selected with 'with mesh:', was closed; leave the block first"
            )
        return mesh
    if len(_alive) == 1:
        return _alive[0]
    if not _alive:
        raise MeshError("no mesh is alive in this process; call namedmesh.init_mesh(...) first")
    shown = ", ".join(sorted(str(mesh.layout) for mesh in _alive))
    raise MeshError(
        f"{len(_alive)} meshes are alive in this process and none is selected: {shown}; select one with 'with mesh:'"
    )


def selected_mesh() -> NamedMesh | None:
    """The innermost mesh entered with ``with mesh:``, if there is one."""
    return _selected[-1] if _selected else None


def open_meshes() -> tuple[NamedMesh, ...]:
    """The meshes that are alive."""
    return tuple(_alive)


def watch(changed: Callable[[NamedMesh | None], None]) -> None:
    """Have a dialect told whenever a mesh is selected, deselected or closed; with the mesh if it was closed."""
    _watchers.append(changed)


def register(mesh: NamedMesh) -> None:
    """Note that a mesh is alive."""
    _alive.append(mesh)


def unregister(mesh: NamedMesh) -> None:
    """Note that a mesh was closed."""
    _alive[:] = [other for other in _alive if other is not mesh]
    _tell(closed=mesh)


def select(mesh: NamedMesh) -> None:
    """Make a mesh the current one, until :func:`deselect`."""
    _selected.append(mesh)
    _tell()


def deselect(mesh: NamedMesh) -> None:
    """Undo the last :func:`select` of this mesh."""
    for i in reversed(range(len(_selected))):
        if _selected[i] is mesh:
            del _selected[i]
            _tell()
            return


def _tell(closed: NamedMesh | None = None) -> None:
    for changed in _watchers:
        changed(closed)
