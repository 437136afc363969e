"""Which mesh legacy code means when it names none: the one selected with ``with mesh:``, or the only one alive."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch

from namedmesh._torch import backward_pass
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh


class Watcher(Protocol):
    """A dialect, whose variables follow the selection: its accessors are too fast to ask here each time."""

    dialect: str
    shown: Any

    def changed(self, closed: Any = None) -> None:
        """Follow a mesh that was selected, deselected or closed."""

    def is_bound(self, mesh: Any) -> bool:
        """Return whether there are groups for a mesh."""


# A mesh is alive until it is closed, as its groups are.
_alive: list[NamedMesh] = []
_selected: ContextVar[tuple[NamedMesh, ...]] = ContextVar("selected", default=())
# The same of the thread that selected first, with its number: autograd runs backward functions in threads of its own,
# which see this one, and the variables of a dialect are the process's.
_of_process: list[tuple[NamedMesh, int]] = []
_watchers: list[Watcher] = []


def current_mesh() -> NamedMesh:
    """Return the mesh that code without a mesh argument works on.

    Returns:
        The innermost mesh entered with ``with mesh:``; outside of any, the only mesh that is alive.

    Raises:
        MeshError: there is no mesh, or there are several and none was selected, or the selected one is closed.

    Example:
        >>> current_mesh()
        Traceback (most recent call last):
        namedmesh.errors.MeshError: no mesh is alive in this process; call namedmesh.init_mesh(...) first
    """
    mesh = selected_mesh()
    if mesh is not None:
        if mesh.closed:
            raise MeshError(
                f"the mesh over {mesh.layout}, selected with 'with mesh:', was closed; leave the block first"
            )
        return mesh
    alive = _living()
    if not alive:
        raise MeshError("no mesh is alive in this process; call namedmesh.init_mesh(...) first")
    if len(alive) == 1:
        return alive[0]
    shown = ", ".join(sorted(str(mesh.layout) for mesh in alive))
    raise MeshError(
        f"{len(alive)} meshes are alive in this process and none is selected: {shown}; select one with 'with mesh:', or "
        "make the last one with init_mesh(replace=True), which closes the others"
    )


def close_all() -> None:
    """Close every mesh that is alive in this process, the newest first."""
    for mesh in reversed(_living()):
        mesh.close()


def _living() -> list[NamedMesh]:
    """Return the meshes that are alive: not closed, and in a fork, not the parent's after its default group ended."""
    return [mesh for mesh in _alive if not mesh.pool.registry.ended]


def selected_mesh() -> NamedMesh | None:
    """Return the innermost mesh that this thread entered with ``with mesh:``, if there is one.

    In a backward pass it is the process's, and in compiled code, which cannot look into a context.
    """
    if torch.compiler.is_compiling():
        return process_selection()
    selected = _selected.get()
    if selected:
        return selected[-1]
    return process_selection() if backward_pass() >= 0 else None


def process_selection() -> NamedMesh | None:
    """Return the mesh that the variables of the dialects show, if one is selected."""
    return _of_process[-1][0] if _of_process else None


def refuse_ambiguous_mesh(
    layout: Layout,
    device_type: str,
    groups: Mapping[str, dist.ProcessGroup],
    ordered: Sequence[str] | None = None,
) -> None:
    """Refuse a mesh that torch would take for another one that is alive, but that has other groups.

    DTensor remembers operations by mesh, and takes meshes of the same names, ranks and device for one: results
    of one mesh would come back on the groups of the other.

    Args:
        layout: the layout of the new mesh.
        device_type: its kind of device.
        groups: the group of each name.
        ordered: the axes of the name, where it is a product.

    Raises:
        MeshError: all problems at once.
    """
    problems = []
    for other in _living():
        if other.device.type != device_type:
            continue
        for name, group in groups.items():
            theirs = other.group_named(name)
            if theirs is None or theirs is group:
                continue
            ranks = layout.group(other.global_rank, *(ordered or (name,)))
            if len(ranks) > 1 and ranks == other.ranks(name):
                problems.append(
                    f"{name!r} would be on another process group than the {name!r} of the open mesh over {other.layout}, and "
                    "torch takes meshes with the same names and ranks for one; share the groups (the same options on "
                    "both meshes), close the other mesh first, or choose another name"
                )
    if problems:
        raise MeshError(*problems)


def watch(watcher: Watcher) -> None:
    """Tell a dialect of every mesh that is selected, deselected or closed."""
    _watchers.append(watcher)


def register(mesh: NamedMesh) -> None:
    """Note that a mesh is alive."""
    _alive.append(mesh)


def unregister(mesh: NamedMesh, *, deselect: bool = False) -> None:
    """Note that a mesh was closed; ``deselect`` it, too, where its default group is gone and every mesh with it."""
    _alive[:] = [other for other in _alive if other is not mesh]
    if deselect:
        _of_process[:] = [(other, thread) for other, thread in _of_process if other is not mesh]
        _selected.set(tuple(other for other in _selected.get() if other is not mesh))
    for watcher in _watchers:
        watcher.changed(mesh)


def select(mesh: NamedMesh) -> None:
    """Make a mesh the current one of this thread, until :func:`deselect`.

    Raises:
        MeshError: another thread has selected another mesh, and a dialect answers for it.
    """
    thread = threading.get_ident()
    if not _of_process or _of_process[-1][1] == thread:
        _of_process.append((mesh, thread))
        _tell_watchers()
    elif _of_process[-1][0] is not mesh:
        problems = [
            f"another thread has selected the mesh over {watcher.shown.layout}, for which the variables of {watcher.dialect} "
            f"answer in every thread; leave that 'with' block before the mesh over {mesh.layout} is selected here"
            for watcher in _watchers
            if watcher.shown is not None and watcher.is_bound(watcher.shown)
        ]
        if problems:
            raise MeshError(*problems)
    _selected.set((*_selected.get(), mesh))


def deselect(mesh: NamedMesh) -> None:
    """Undo the last :func:`select` of this mesh."""
    selected = _selected.get()
    last = max((i for i, other in enumerate(selected) if other is mesh), default=len(selected))
    _selected.set(selected[:last] + selected[last + 1 :])
    thread = threading.get_ident()
    for i in reversed(range(len(_of_process))):
        if _of_process[i] == (mesh, thread):
            del _of_process[i]
            _tell_watchers()
            return


def _tell_watchers() -> None:
    for watcher in _watchers:
        watcher.changed()
