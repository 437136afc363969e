"""What a dialect answers from: an object with a slot for each answer, filled from one mesh at a time.

Legacy code asks several times in every layer of every step, so each answer is an attribute. It also reads and assigns
the module-level variables in which the original keeps its answers; :func:`make_patchable` gives them to a module of
namedmesh. :class:`Bindings` decides which mesh the answers are of.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from namedmesh import current
from namedmesh.compat.errors import ContractError
from namedmesh.errors import MeshError
from namedmesh.mesh import NamedMesh

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["Bindings", "Bound", "LegacyState", "ask_group", "make_patchable", "require_default_group"]


class LegacyState:
    """The answers of a dialect for one mesh; all None where there is none.

    A dialect names its slots, and computes in :meth:`update` those that follow from others.

    Attributes:
        slots: the names of the slots.
        mesh: the mesh that the answers are of.
        unpatched: the answers before any was assigned by hand.
        owned: whether the dialect made the mesh, and therefore closes it.
    """

    __slots__ = ("mesh", "owned", "unpatched")

    slots: ClassVar[tuple[str, ...]] = ()
    unpatched: dict[str, Any]
    mesh: NamedMesh | None
    owned: bool

    def __init__(self) -> None:
        self.clear()

    @property
    def described(self) -> str:
        """What the answers are of, for a message."""
        return "groups that were assigned by hand" if self.mesh is None else str(self.mesh.layout)

    def clear(self) -> None:
        """Set every slot to None, and undo every assignment."""
        for slot in self.slots:
            setattr(self, slot, None)
        self.unpatched, self.mesh, self.owned = {}, None, False
        self.update()

    def fill(self, mesh: NamedMesh, values: Mapping[str, Any], *, owned: bool) -> None:
        """Take the answers of a mesh; other slots stay as they were set by hand."""
        self.mesh, self.owned, self.unpatched = mesh, owned, dict(values)
        for slot, value in values.items():
            setattr(self, slot, value)
        self.update()

    def put(self, slot: str, value: Any) -> None:
        """Assign a slot, and compute again those that follow from it."""
        setattr(self, slot, value)
        self.update()

    def restore(self, slot: str) -> None:
        """Undo an assignment."""
        self.put(slot, self.unpatched.get(slot))

    def saved(self) -> tuple[Any, ...]:
        """Return everything, to be put back with :meth:`load`."""
        return tuple(getattr(self, slot) for slot in (*LegacyState.__slots__, *self.slots))

    def load(self, saved: tuple[Any, ...]) -> None:
        """Put back what :meth:`saved` returned."""
        for slot, value in zip((*LegacyState.__slots__, *self.slots), saved, strict=True):
            setattr(self, slot, value)

    def update(self) -> None:
        """Compute the slots that follow from others."""


def ask_group(group: Any, method: str) -> int | None:
    """Return the ``"size"`` or ``"rank"`` of a group; None for a stand-in without such a method.

    Example:
        >>> ask_group("no group", "size") is None
        True
    """
    ask = getattr(group, method, None)
    return None if ask is None else ask()


def require_default_group(or_call: str = "torch.distributed.init_process_group()") -> None:
    """Raise ContractError where ``torch.distributed`` has no default group.

    Args:
        or_call: what makes one, beside ``namedmesh.launch.init()``.
    """
    if not dist.is_initialized():
        raise ContractError(
            f"torch.distributed has no default group; call namedmesh.launch.init() or {or_call} first"
        )


def make_patchable(module: str, state: LegacyState, variables: Mapping[str, str]) -> None:
    """Give a module the variables of the original, to be read, assigned, and deleted (which undoes an assignment).

    Args:
        module: the name of a module that is imported, or is being imported.
        state: the state whose slots the variables are.
        variables: the slot of each variable.
    """

    class Patchable(ModuleType):
        """A module whose legacy variables are slots of a state."""

        def __getattr__(self, name: str) -> Any:
            if name in variables:
                return getattr(state, variables[name])
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name in variables:
                state.put(variables[name], value)
            else:
                super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            if name in variables:
                state.restore(variables[name])
            else:
                super().__delattr__(name)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *variables})

    sys.modules[module].__class__ = Patchable


class Bindings:
    """Which mesh a state shows: the one entered with ``with mesh:``, or else the one that was bound last.

    The answers of the other meshes are kept aside, with what was assigned to them.

    Args:
        state: the state of the dialect.
    """

    def __init__(self, state: LegacyState) -> None:
        self.state = state
        self.base: NamedMesh | None = None
        self.shown: NamedMesh | None = None
        self.configs: WeakKeyDictionary[NamedMesh, object] = WeakKeyDictionary()
        self._aside: WeakKeyDictionary[NamedMesh, tuple[Any, ...]] = WeakKeyDictionary()
        current.watch(self.changed)

    def rebind(self, mesh: NamedMesh, config: object) -> Bound | None:
        """Bind a mesh that was bound before with the same configuration; None if the dialect has to make groups.

        Raises:
            MeshError: ``mesh`` is not an open NamedMesh.
        """
        if not isinstance(mesh, NamedMesh):
            raise MeshError(
                f"bind() got a {type(mesh).__name__}; give it a NamedMesh, such as NamedMesh.from_device_mesh(...)"
            )
        if mesh.closed:
            raise MeshError(f"the mesh over {mesh.layout} was closed; bind another one")
        if mesh not in self.configs or self.configs[mesh] != config:
            return None
        before, self.base = self.base, mesh
        self.changed(None)
        return Bound(self, mesh, before)

    def fill(self, mesh: NamedMesh, config: object, values: Mapping[str, Any], *, owned: bool) -> Bound:
        """Bind a mesh, and take its answers."""
        before = self.base
        if self.shown is not None:  # what was assigned before any mesh stays
            self.show(mesh)
        self.shown = mesh
        self.state.fill(mesh, values, owned=owned)
        self.configs[mesh] = config
        self.base = mesh
        self.changed(None)
        return Bound(self, mesh, before)

    def unbind(self) -> None:
        """Forget the mesh that is bound; it stays as it is, with its groups."""
        if self.base is not None:
            self.drop(self.base)
            self.changed(None)

    def destroy(self) -> None:
        """Forget every answer and assignment; a mesh that the dialect made is closed."""
        mesh, owned = self.shown, self.state.owned
        if mesh is not None and owned:
            mesh.close()  # calls changed()
        elif mesh is not None:
            self.drop(mesh)
            self.changed(None)
        else:
            self.state.clear()

    def changed(self, closed: NamedMesh | None) -> None:
        """Follow a mesh that was selected, deselected or closed."""
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

    def drop(self, mesh: NamedMesh) -> None:
        """Forget a mesh."""
        self.configs.pop(mesh, None)
        self._aside.pop(mesh, None)
        if self.base is mesh:
            self.base = None
        if self.shown is mesh:
            self.state.clear()
            self.shown = None


class Bound:
    """A mesh that a dialect is bound to; leaving a ``with`` block goes back to the one before.

    Args:
        bindings: the bindings of the dialect.
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
