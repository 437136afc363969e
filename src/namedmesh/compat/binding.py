"""Which mesh a dialect answers from: the variables of its modules are filled from one mesh at a time.

Megatron, fairscale, ezpz and DeepSpeed keep their groups in module-level variables, which legacy code reads and
assigns. A dialect has the same variables: those of namedmesh's module, and once ``install()`` was called those of the
original's, whose own code then answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from namedmesh import current
from namedmesh.compat.errors import ContractError
from namedmesh.errors import MeshError
from namedmesh.mesh import NamedMesh

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

__all__ = ["Binding", "Bound", "require_default_group", "require_open"]


def require_default_group(or_call: str = "torch.distributed.init_process_group()") -> None:
    """Raise ContractError where there is no default group, which ``namedmesh.launch.init()`` makes, or another call."""
    if not dist.is_initialized():
        raise ContractError(
            f"torch.distributed has no default group; call namedmesh.launch.init() or {or_call} first"
        )


def require_open(mesh: object, call: str) -> None:
    """Raise MeshError where ``call`` was given something else than an open NamedMesh."""
    if not isinstance(mesh, NamedMesh):
        raise MeshError(
            f"{call} got a {type(mesh).__name__}; give it a NamedMesh, such as NamedMesh.from_device_mesh(...)"
        )
    if mesh.closed:
        raise MeshError(f"the mesh over {mesh.layout} was closed; give {call} an open one")


class Binding:
    """The variables of a dialect, in each module that has them, and the mesh that they show.

    They show the mesh that was selected with ``with mesh:``, or else the one that was bound last. What legacy code
    assigns while they show a mesh comes back with it.

    Args:
        dialect: its name, for messages.
        initialize: its function that makes a mesh.
        bind: its function that binds one.
        variables: the names of its variables; by default those that its first module annotates.
    """

    def __init__(self, dialect: str, initialize: str, bind: str, variables: Iterable[str] = ()) -> None:
        self.dialect, self.initialize, self.bind = dialect, initialize, bind
        self.variables = tuple(variables)
        self.base: NamedMesh | None = None
        self.shown: NamedMesh | None = None
        self.owned: NamedMesh | None = None
        # Of each mesh that is bound: what its groups were made with, and what they are.
        self._bound: WeakKeyDictionary[NamedMesh, tuple[object, Mapping[str, Any]]] = WeakKeyDictionary()
        # Of each module: its variables without a mesh, and those of the meshes that are not shown.
        self._modules: dict[ModuleType, dict[str, Any]] = {}
        self._kept: dict[ModuleType, WeakKeyDictionary[NamedMesh, dict[str, Any]]] = {}
        current.watch(self)

    # The modules.

    @property
    def first_module(self) -> dict[str, Any]:
        """The variables of namedmesh's own module."""
        return vars(next(iter(self._modules)))

    def add_module(self, module: ModuleType) -> None:
        """Fill the variables of a further module, as they are now without a mesh."""
        self.variables = self.variables or tuple(module.__annotations__)
        self._modules[module] = {name: vars(module)[name] for name in self.variables if hasattr(module, name)}
        self._kept[module] = WeakKeyDictionary()
        if self.shown is not None:
            self._fill(module, self.shown)

    def remove_module(self, module: ModuleType) -> None:
        """Give a module the values back that it had without a mesh."""
        vars(module).update(_copied(self._modules.pop(module)))
        del self._kept[module]

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign variables, in every module that has them."""
        for module, empty in self._modules.items():
            for name in empty.keys() & values.keys():
                vars(module)[name] = values[name]

    def _fill(self, module: ModuleType, mesh: NamedMesh | None) -> None:
        """Write the variables of a module as they were left for a mesh, as its groups are, or as without one."""
        empty = _copied(self._modules[module])
        values = None
        if mesh is not None:
            values = self._kept[module].pop(mesh, None)
            if values is None and mesh in self._bound:
                values = {name: value for name, value in self._bound[mesh][1].items() if name in empty}
        vars(module).update(empty | (values or {}))

    # The meshes.

    def is_bound(self, mesh: NamedMesh) -> bool:
        """Return whether there are groups for a mesh."""
        return mesh in self._bound

    def current_mesh(self) -> NamedMesh:
        """Return the mesh that the accessors answer from at this moment; a MeshError where they answer from none."""
        if self.shown is None or not self.is_bound(self.shown):
            raise MeshError(
                f"{self.dialect} is not bound to a mesh; call {self.initialize}(...) or {self.bind}(mesh) first"
            )
        return self.shown

    def rebind(self, mesh: NamedMesh, config: object) -> Bound | None:
        """Bind a mesh that was bound before with the same configuration; None if the dialect has to make groups."""
        require_open(mesh, self.bind)
        if mesh not in self._bound or self._bound[mesh][0] != config:
            return None
        return self._show(mesh)

    def take(
        self, mesh: NamedMesh, config: object, groups: Mapping[str, Any], *, owned: bool = False
    ) -> Bound:
        """Bind a mesh to the groups that were made for it.

        Args:
            mesh: the mesh.
            config: what the groups were made with.
            groups: the value of each variable that a mesh determines; others stay as they were assigned.
            owned: whether the dialect made the mesh, and closes it.
        """
        self._bound[mesh] = config, dict(groups)
        if owned:
            self.owned = mesh
        for kept in self._kept.values():
            kept.pop(mesh, None)
        if self.shown is None or self.shown is mesh:  # what was assigned before any mesh stays
            self.assign(groups)
            self.shown = mesh
        return self._show(mesh)

    def _show(self, mesh: NamedMesh) -> Bound:
        before, self.base = self.base, mesh
        self.changed()
        return Bound(self, mesh, before)

    def refuse_second(self) -> None:
        """Refuse to make a mesh for the dialect where it has one, or groups by hand, or where it would not be seen."""
        assigned = False
        for module, empty in self._modules.items():
            for name, value in empty.items():
                if name.endswith(("_GROUP", "_RANKS")) and vars(module)[name] is not value:
                    assigned = True
        if assigned or self.owned is not None or self.base is not None:
            mesh = self.owned or self.base or self.shown
            what = "groups that were assigned by hand" if mesh is None else str(mesh.layout)
            raise ContractError(
                f"{self.dialect} is already initialized, for {what}; call the function that destroys it first, or bind "
                f"another mesh beside it with {self.bind}(mesh)"
            )
        if self.shown is not None:
            raise MeshError(
                f"the mesh over {self.shown.layout} is selected, and {self.dialect} would not answer for another one; "
                f"bind it with {self.bind}(mesh), or call {self.initialize}(...) outside of the 'with' block"
            )

    def unbind(self) -> None:
        """Forget the mesh that is bound; it stays as it is, with its groups."""
        if self.base is not None:
            self._drop(self.base)

    def destroy(self) -> None:
        """Forget every group and assignment; a mesh that the dialect made is closed, one that was bound stays."""
        if self.owned is not None:
            self.owned.close()  # calls changed()
        else:
            self._drop(self.shown)

    # Called by whatever selects, deselects or closes a mesh.

    def changed(self, closed: NamedMesh | None = None) -> None:
        """Follow a mesh that was selected, deselected or closed."""
        if closed is not None:
            self._drop(closed)
            return
        mesh: Any = current.process_selection() or self.base
        if mesh is self.shown:
            return
        for module, empty in self._modules.items():
            if self.shown is not None:
                self._kept[module][self.shown] = {name: vars(module)[name] for name in empty}
            self._fill(module, mesh)
        self.shown = mesh

    def _drop(self, mesh: NamedMesh | None) -> None:
        """Forget a mesh, or without one, what was assigned."""
        for known in (self._bound, *self._kept.values()):
            if mesh is not None:
                known.pop(mesh, None)  # type: ignore[attr-defined]
        if self.base is mesh:
            self.base = None
        if self.owned is mesh:
            self.owned = None
        if self.shown is mesh:
            self.shown = None
            for module in self._modules:
                self._fill(module, None)
        self.changed()


class Bound:
    """A mesh that a dialect is bound to: until the next one, or with ``with``, in the block, which selects it."""

    def __init__(self, binding: Binding, mesh: NamedMesh, before: NamedMesh | None) -> None:
        self.mesh, self._binding, self._before = mesh, binding, before

    def __enter__(self) -> NamedMesh:
        return self.mesh.__enter__()

    def __exit__(self, *_error: object) -> None:
        before = self._before
        self._binding.base = None if before is not None and before.closed else before
        self.mesh.__exit__(None, None, None)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values, with a fresh list or dictionary for each: the originals fill theirs in place."""
    return {
        name: value.copy() if isinstance(value, (list, dict)) else value for name, value in values.items()
    }
