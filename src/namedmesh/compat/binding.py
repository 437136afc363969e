"""How a dialect is bound to a mesh, follows ``with mesh:``, and lets go; the same for every dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from namedmesh import current
from namedmesh.consistency import report_failure
from namedmesh.errors import MeshError
from namedmesh.mesh import NamedMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from namedmesh.compat.state import LegacyState

__all__ = ["Bindings", "Bound"]


class Bindings:
    """Which mesh a state shows: the one entered with ``with mesh:``, or else the one that was bound last.

    The answers of the others are kept aside, together with what was patched into them.

    Args:
        state: the state of the dialect.
    """

    def __init__(self, state: LegacyState) -> None:
        self.state = state
        self.base: NamedMesh | None = None
        self.shown: NamedMesh | None = None
        self.wishes: WeakKeyDictionary[NamedMesh, object] = WeakKeyDictionary()
        self._aside: WeakKeyDictionary[NamedMesh, tuple[Any, ...]] = WeakKeyDictionary()
        current.watch(self.changed)

    def bind(
        self,
        mesh: NamedMesh,
        call: str,
        wish: object,
        plan: Callable[[], tuple[Mapping[str, str], Callable[[], Mapping[str, Any]]]],
    ) -> Bound:
        """Let the state answer for a mesh that exists; communicates the first time.

        Args:
            mesh: the mesh.
            call: what the user called, for messages.
            wish: what was asked for besides; with the same wish, a mesh that is bound needs nothing new.
            plan: checks whether the mesh will do; returns what the ranks have to agree about, and what makes
                the answers.

        Raises:
            MeshError: what was given is no open mesh.
            NamedMeshError: the mesh will not do, or the ranks do not agree.
        """
        if not isinstance(mesh, NamedMesh):
            raise MeshError(
                f"bind() got a {type(mesh).__name__}; give it a NamedMesh, such as NamedMesh.from_device_mesh(...)"
            )
        if mesh.closed:
            raise MeshError(f"the mesh over {mesh.layout} was closed; bind another one")
        before = self.base
        if mesh in self.wishes and self.wishes[mesh] == wish:
            self.base = mesh
            self.changed(None)
            return Bound(self, mesh, before)
        with report_failure(call, mesh.layout.ranks):
            words, make = plan()
        mesh.check_consistency(call, words)
        self.fill(mesh, wish, make(), owned=False)
        return Bound(self, mesh, before)

    def unbind(self) -> None:
        """Let go of the mesh that is bound; it stays as it is, with its groups."""
        if self.base is not None:
            self.drop(self.base)
            self.changed(None)

    def destroy(self) -> None:
        """Forget every answer and whatever was set; a mesh that the dialect made is closed."""
        mesh, owned = self.shown, self.state.owned
        if mesh is not None and owned:
            mesh.close()  # tells the bindings
        elif mesh is not None:
            self.drop(mesh)
            self.changed(None)
        else:
            self.state.clear()

    def changed(self, closed: NamedMesh | None) -> None:
        """Follow what was selected, deselected or closed."""
        if closed is not None:
            self.drop(closed)
        self.show(cast("NamedMesh | None", current.selected_mesh()) or self.base)

    def show(self, mesh: NamedMesh | None) -> None:
        """Let the state answer for a mesh, which need not be bound."""
        if mesh is self.shown:
            return
        if self.shown is not None:
            self._aside[self.shown] = self.state.saved()
        aside = None if mesh is None else self._aside.pop(mesh, None)
        if aside is None:
            self.state.clear()
        else:
            self.state.load(aside)
        self.shown = mesh

    def fill(self, mesh: NamedMesh, wish: object, answers: Mapping[str, Any], *, owned: bool) -> None:
        """Take the answers of a mesh that is bound now."""
        if self.shown is not None:  # what was set by hand before any mesh stays
            self.show(mesh)
        self.shown = mesh
        self.state.fill(mesh, answers, owned=owned)
        self.wishes[mesh] = wish
        self.base = mesh
        self.changed(None)

    def drop(self, mesh: NamedMesh) -> None:
        """Forget a mesh."""
        self.wishes.pop(mesh, None)
        self._aside.pop(mesh, None)
        if self.base is mesh:
            self.base = None
        if self.shown is mesh:
            self.state.clear()
            self.shown = None


class Bound:
    """A mesh that a dialect is bound to; leaving a ``with`` block goes back to the one before.

    Args:
        bindings: the dialect's.
        mesh: the mesh.
        before: the mesh that the dialect was bound to before, if any.
    """

    def __init__(self, bindings: Bindings, mesh: NamedMesh, before: NamedMesh | None) -> None:
        self.mesh = mesh
        self._bindings = bindings
        self._before = before

    def __enter__(self) -> NamedMesh:
        return self.mesh

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = self._before
        self._bindings.base = None if before is not None and before.closed else before
        self._bindings.changed(None)
