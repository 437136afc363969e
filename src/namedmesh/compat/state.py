"""What a dialect answers from: an object with a slot for every answer, filled from one mesh at a time.

Legacy code asks several times in every layer of every step, so each answer stands ready in a slot. It also reads
and assigns the variables that the original keeps its answers in; :func:`make_patchable` makes a module of ours
have them, as the slots that they are.
"""

from __future__ import annotations

import sys
import threading
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from namedmesh._torch import constant_under_compile
from namedmesh.lazy_group import LazyGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.mesh import NamedMesh

__all__ = ["LegacyState", "answer_of", "make_patchable"]


_versions = count()
_reading = threading.RLock()


class LegacyState:
    """The answers of a dialect for one mesh; all None where there is none.

    A dialect names its slots, and says in :meth:`follow` which of them are worked out from others.

    Attributes:
        slots: the names of the slots.
        mesh: the mesh that the answers are of.
        made: the answers before anybody patched them.
        owned: whether the dialect made the mesh, and therefore closes it.
        later: the groups that are created on first use.
        constants: those of them that compiled code has as constants.
        version: another number whenever the answers are those of another mesh.
    """

    __slots__ = ("constants", "later", "made", "mesh", "owned", "version")

    slots: ClassVar[tuple[str, ...]] = ()
    made: dict[str, Any]
    mesh: NamedMesh | None
    owned: bool
    later: dict[str, LazyGroup]
    constants: set[str]
    version: int

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every answer, and what was set or patched."""
        for slot in self.slots:
            setattr(self, slot, None)
        self.made, self.mesh, self.owned, self.later, self.constants = {}, None, False, {}, set()
        self.version = next(_versions)
        self.follow()

    def fill(self, mesh: NamedMesh, answers: Mapping[str, Any], *, owned: bool) -> None:
        """Take the answers of a mesh; slots that are not among them stay as they were set by hand."""
        self.mesh, self.owned, self.version = mesh, owned, next(_versions)
        self.later = {slot: value for slot, value in answers.items() if isinstance(value, LazyGroup)}
        self.made = {slot: value for slot, value in answers.items() if slot not in self.later}
        for slot in answers:
            setattr(self, slot, self.made.get(slot))
        self.follow()

    def read(self, slot: str) -> Any:
        """The value of a slot; a group that is made when it is first asked for is made now."""
        with _reading:  # another thread may be creating it
            if slot in self.constants:
                return self.later[slot].get_or_create()
            if getattr(self, slot) is None and slot in self.later:
                value = self.made[slot] = self.later[slot].get_or_create()
                del self.later[slot]
                self.put(slot, value)
            return getattr(self, slot)

    @constant_under_compile
    def read_constant(self, slot: str, _version: int) -> Any:
        """As :meth:`read`, while code is compiled that keeps the value: the slot stays empty, which the code guards."""
        if slot not in self.later:
            return getattr(self, slot)
        self.constants.add(slot)
        return self.read(slot)

    def read_all(self) -> None:
        """Make every group that nobody has asked for yet."""
        for slot in list(self.later):
            self.read(slot)

    def put(self, slot: str, value: Any) -> None:
        """Patch a slot; those that are worked out from it follow."""
        if slot in self.later:
            self.read(
                slot
            )  # so that the patch can be undone, and None is not taken for a group that nobody asked for
        setattr(self, slot, value)
        self.follow()

    def restore(self, slot: str) -> None:
        """Undo a patch: back to what the mesh says."""
        self.put(slot, self.made.get(slot))

    def saved(self) -> tuple[Any, ...]:
        """Everything, to be put back with :meth:`load`."""
        own = (self.made, self.mesh, self.owned, self.later, self.constants, self.version)
        return (*own, *(getattr(self, slot) for slot in self.slots))

    def load(self, saved: tuple[Any, ...]) -> None:
        """Put back what :meth:`saved` returned."""
        self.made, self.mesh, self.owned, self.later, self.constants, self.version, *values = saved
        for slot, value in zip(self.slots, values, strict=True):
            setattr(self, slot, value)

    def follow(self) -> None:
        """Work out again the slots that follow from others."""


def answer_of(group: Any, answer: str) -> int | None:
    """The ``"size"`` or ``"rank"`` of a group; None for a stand-in that somebody patched in and that cannot say.

    Example:
        >>> answer_of("no group", "size") is None
        True
    """
    ask = getattr(group, answer, None)
    return None if ask is None else ask()


def make_patchable(module: str, state: LegacyState, variables: Mapping[str, str]) -> None:
    """Let a module have legacy variables that can be read, assigned and deleted (which undoes an assignment).

    Args:
        module: the name of a module that is imported, or is being so.
        state: what the variables are slots of.
        variables: the slot of each variable.
    """

    class Patchable(ModuleType):
        """A module whose legacy variables are slots of a state."""

        def __getattr__(self, name: str) -> Any:
            if name in variables:
                return state.read(variables[name])
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
