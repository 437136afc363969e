"""The variables of a legacy module, kept for each mesh: those of one mesh are in the module at a time.

Megatron, fairscale, ezpz and DeepSpeed keep their groups in module-level variables, which legacy code reads and assigns.
The module is namedmesh's own, or once ``install()`` was called the original's, whose own code then answers. What fills them
asks at the end of this file where the axes of a legacy API are in a mesh, which may lack some and have dp in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from namedmesh import current
from namedmesh.axes import DENSE_AXES, LEGACY_AXES
from namedmesh.compat import ContractError
from namedmesh.errors import LayoutError, MeshError, did_you_mean
from namedmesh.groups import kept_groups
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh


class State:
    """The variables of one module, and what they are for each mesh; make one for a module and process.

    They show the mesh that was selected with ``with mesh:``, in whatever thread, or else the one that was bound last. What
    legacy code assigns while they show a mesh comes back with it; what it assigned without a mesh comes back without one.

    Args:
        dialect: its name, for messages.
        initialize: its function that makes a mesh, for messages.
        module: the module. Its variables are the private names that are None, a list or a dictionary at import.
        at_import: the module as it is when it is imported; by default as it is at this moment.
        more: names of other variables.
    """

    def __init__(
        self,
        dialect: str,
        initialize: str,
        module: ModuleType,
        at_import: ModuleType | None = None,
        more: Iterable[str] = (),
    ) -> None:
        self.dialect, self.initialize, self.module = dialect, initialize, module
        values = vars(at_import or module)
        self.empty = {
            name: values[name] for name in values if name in more or _is_variable(name, values[name])
        }
        self.names = tuple(self.empty)
        # What they are for each mesh that was bound or selected, and without one.
        self.values: dict[NamedMesh | None, dict[str, Any]] = {None: self._read()}
        self.requests: dict[NamedMesh, object] = {}  # what each was bound with
        self.shown: NamedMesh | None = None
        self.base: NamedMesh | None = None
        self.owned: NamedMesh | None = None
        current.watch(self.changed)

    def _read(self) -> dict[str, Any]:
        return {name: vars(self.module)[name] for name in self.names}

    def _write(self, values: Mapping[str, Any]) -> None:
        """Fill the variables; those without a value are as at import."""
        vars(self.module).update({**_copied(self.empty), **values})

    def filled(self, initialize: Callable[[], object], **functions: Any) -> dict[str, Any]:
        """Return what a function makes of the variables, as if there were no other mesh; they stay as they are.

        For this call some functions of the module are others.
        """
        module = vars(self.module)
        before = self._read() | {name: module[name] for name in functions}
        # Without a mesh, what was assigned by hand stays, as in the original.
        self._write({} if self.shown else _copied(self._read()))
        module.update(functions)
        try:
            initialize()
            return self._read()
        finally:
            module.update(before)

    def take(
        self, mesh: NamedMesh, values: Mapping[str, Any], request: object = None, *, owned: bool = False
    ) -> Bound:
        """Answer from a mesh with the variables that were made for it, with a request; ``destroy`` closes an owned one."""
        self.values[mesh], self.requests[mesh] = dict(values), request
        if self.shown is mesh:
            self._write(values)
        if owned:
            self.owned = mesh
        return self.bind(mesh)

    def bind(self, mesh: NamedMesh) -> Bound:
        """Answer from a mesh whose variables were made."""
        bound, self.base = Bound(self, mesh, self.base), mesh
        self.changed()
        return bound

    def is_bound(self, mesh: NamedMesh, request: object = None) -> bool:
        """Return whether a mesh has its variables, made with a request."""
        return mesh in self.requests and self.requests[mesh] == request

    def current_mesh(self) -> NamedMesh:
        """Return the mesh that the accessors answer from at this moment; a MeshError where they answer from none."""
        if self.shown not in self.requests:
            raise MeshError(
                f"{self.dialect} is not bound to a mesh; call {self.initialize}(...) or bind(mesh) first"
            )
        return self.shown

    def refuse_second(self) -> None:
        """Refuse to make a mesh for the dialect where it has one, or where another one is selected."""
        mesh = self.owned or self.base or self.shown
        if mesh is not None:
            raise ContractError(
                f"{self.dialect} is already initialized, for {mesh.layout}; call the function that destroys it first, or "
                "bind another mesh beside it with bind(mesh)"
            )

    def unbind(self) -> None:
        """Forget the mesh that is bound; it stays as it is, with its groups."""
        if self.base is not None:
            self.changed(self.base)

    def destroy(self) -> None:
        """Forget every mesh and assignment. A mesh that the dialect made is closed, with its groups; one that was bound stays."""
        owned = self.owned
        self.values, self.requests = {}, {}
        self.base = self.shown = self.owned = None
        self._write({})
        if owned is not None:
            owned.close(destroy_groups=True)

    def changed(self, closed: NamedMesh | None = None) -> None:
        """Follow a mesh that was selected, deselected or closed."""
        if closed is None or closed is not self.shown:
            self.values[self.shown] = self._read()
        if closed is not None:
            self.values.pop(closed, None)
            self.requests.pop(closed, None)
            self.base = None if self.base is closed else self.base
            self.owned = None if self.owned is closed else self.owned
        self.shown = current.selection() or self.base
        self._write(self.values.get(self.shown, {}))


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with lists and dictionaries of their own, which the original fills in place."""
    return {name: copy(value) if isinstance(value, (list, dict)) else value for name, value in values.items()}


def _is_variable(name: str, value: object) -> bool:
    private = name.startswith("_") and not name.startswith("__")
    return private and (value is None or isinstance(value, (list, dict)))


class Bound:
    """A mesh that a dialect is bound to: until the next one, or with ``with``, in the block, which selects it."""

    def __init__(self, state: State, mesh: NamedMesh, before: NamedMesh | None) -> None:
        self.mesh, self._state, self._before = mesh, state, before

    def __enter__(self) -> NamedMesh:
        return self.mesh.__enter__()

    def __exit__(self, *_error: object) -> None:
        state, before = self._state, self._before
        if state.base is self.mesh:  # what was bound in the block stays
            state.base = before if before in state.requests else None
        self.mesh.__exit__(None, None, None)


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


# The groups of a legacy API.


def own_axes(layout: Layout, axes: Collection[str]) -> tuple[str, ...]:
    """Return the axes of a layout that stand for some of a legacy API's, in its order; one that it lacks has size 1.

    Example:
        >>> from namedmesh import Layout
        >>> own_axes(Layout(dp_replicate=2, dp_shard=2, tp=2), ("tp", "cp", "dp"))
        ('dp_replicate', 'dp_shard', 'tp')
    """
    return tuple(axis for axis in layout.axes if axis in axes or LEGACY_AXES.get(axis) in axes)


def group_over(mesh: NamedMesh, axes: Collection[str]) -> tuple[ProcessGroup, list[int]]:
    """Return this rank's group over some of a legacy API's axes, made unless it is there, and its ranks; every rank calls."""
    own = own_axes(mesh.layout, axes)
    if not own:
        return mesh.groups.alone(), [mesh.global_rank]
    group = mesh.groups.over(mesh.layout, own, mesh.options_of(own))
    return group, list(mesh.layout.group(mesh.global_rank, *own))


@contextmanager
def agreed_groups(mesh: NamedMesh, call: str, request: Mapping[str, object] | None = None) -> Iterator[None]:
    """Make groups of an open mesh in a context, once every rank has come with the same mesh and request; communicates."""
    require_open(mesh, call)
    with mesh.agreed(call) as compare:
        layouts = {"layout": repr(mesh.layout), "views": repr(mesh.views)}
        compare({**layouts, **(request or {}), "groups that exist": kept_groups()})
        yield


def check_axes(
    layout: Layout,
    dialect: str,
    allowed: Collection[str] = DENSE_AXES,
    *,
    experts: Collection[str] = (),
    instead: str = "",
) -> None:
    """Refuse a mesh with axes that a legacy API has no group for, or that are of its experts: ``instead`` says what to do."""
    problems = []
    for axis in layout:
        if axis in experts:
            problems.append(f"axis {axis!r} is one of the experts', and {instead}")
        elif axis not in allowed:
            place = f"has no place in {dialect}'s groups, which are over {', '.join(allowed)}"
            problems.append(f"axis {axis!r} {place}{did_you_mean(axis, allowed)}")
    if problems:
        raise LayoutError(*problems)
