"""Which mesh legacy code means when it names none: the one selected with ``with mesh:``, or the only one alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    import torch.distributed as dist

    from namedmesh.layout import Layout


class Mesh(Protocol):
    """What is asked of a mesh here."""

    layout: Layout
    device: torch.device
    global_rank: int
    closed: bool

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks over some axes."""

    def group_named(self, name: str) -> dist.ProcessGroup | None:
        """Return the group over an axis or a product."""


# A mesh is alive until it is closed, as its groups are.
_alive: list[Mesh] = []
# Process-wide rather than per thread: autograd runs backward functions in threads of its own, and code in
# them must see the mesh that was selected around the training step.
_selected: list[Mesh] = []
# The dialects: their accessors are too fast to ask here each time, so they are notified of every change.
_watchers: list[Callable[[Any], None]] = []


def current() -> Mesh:
    """Return the innermost mesh entered with ``with mesh:``; outside of any, the only mesh that is alive.

    Raises:
        MeshError: there is no mesh, or there are several and none was selected, or the selected one is closed.
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


def selected_mesh() -> Mesh | None:
    """Return the innermost mesh entered with ``with mesh:``, if there is one."""
    return _selected[-1] if _selected else None


def refuse_ambiguous_mesh(
    layout: Layout,
    device_type: str,
    groups: Mapping[str, dist.ProcessGroup | None],
    ordered: Sequence[str] | None = None,
) -> None:
    """Refuse a mesh that torch would take for another one that is alive, but that has other groups.

    DTensor remembers operations by mesh, and takes meshes of the same names, ranks and device for one: results
    of one mesh would come back on the groups of the other.

    Args:
        layout: the layout of the new mesh.
        device_type: its kind of device.
        groups: for each name, the group that it will have, or None for a new one.
        ordered: the axes of the name, where it is a product.

    Raises:
        MeshError: all problems at once.
    """
    problems = []
    for other in _alive:
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


def watch(changed: Callable[[Any], None]) -> None:
    """Call ``changed`` whenever a mesh is selected, deselected or closed; with the mesh if it was closed."""
    _watchers.append(changed)


def register(mesh: Mesh) -> None:
    """Note that a mesh is alive."""
    _alive.append(mesh)


def unregister(mesh: Mesh, *, deselect: bool = False) -> None:
    """Note that a mesh was closed; ``deselect`` it, too, where its default group is gone and every mesh with it."""
    _alive[:] = [other for other in _alive if other is not mesh]
    if deselect:
        _selected[:] = [other for other in _selected if other is not mesh]
    _notify(closed=mesh)


def select(mesh: Mesh) -> None:
    """Make a mesh the current one, until :func:`deselect`."""
    _selected.append(mesh)
    _notify()


def deselect(mesh: Mesh) -> None:
    """Undo the last :func:`select` of this mesh."""
    for i in reversed(range(len(_selected))):
        if _selected[i] is mesh:
            del _selected[i]
            _notify()
            return


def _notify(closed: Mesh | None = None) -> None:
    for changed in _watchers:
        changed(closed)
