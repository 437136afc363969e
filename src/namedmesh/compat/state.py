"""The module-level variables of a legacy API, with separate values for each mesh.

Megatron, fairscale, ezpz and DeepSpeed keep their groups in module-level variables, which legacy
code reads and assigns. The module is our own or, after ``install()``, upstream's, whose accessors
then return our groups. The functions at the end of this file map the axes of a legacy API to the
axes of a mesh, which may lack some and may have ``dp_replicate`` and ``dp_shard`` instead of
``dp``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from namedmesh import current
from namedmesh._internal import agree_on_call, get_groups
from namedmesh._torch import add_default_group_finalizer
from namedmesh.axes import DENSE_AXES, LEGACY_AXES
from namedmesh.compat import ContractError
from namedmesh.errors import LayoutError, MeshError, did_you_mean
from namedmesh.groups import describe_group_cache
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh


class State:
    """The variables of one legacy module, with separate values for each mesh.

    Make one for each module. It does not communicate.

    At any time, the variables have the values of one mesh, the *shown* mesh: the mesh that is
    selected with ``with mesh:``, in whatever thread, or else the mesh that was bound last. If code
    assigns a variable, the assigned value belongs to the shown mesh, and returns when that mesh is
    shown again. The same holds for values that are assigned while no mesh is shown.

    Args:
        api: the name of the legacy API, for messages.
        initialize: the name of its function that makes a mesh, for messages.
        module: the module. Its variables are the private names that are None, a list or a dict at
            import.
        at_import: the module as it is right after its import; by default as it is now.
        more: the names of further variables.

    Attributes:
        empty: the values at import, by name.
        names: the names of the variables.
        values: for each mesh that was bound or selected, and for None (no mesh), the values of the
            variables by name.
        requests: the options with which each mesh was bound.
        shown: the mesh whose values the variables have now.
        bound: the mesh that was bound last.
        owned: the mesh that the legacy API's own function made.
    """

    def __init__(
        self,
        api: str,
        initialize: str,
        module: ModuleType,
        at_import: ModuleType | None = None,
        more: Iterable[str] = (),
    ) -> None:
        self.api = api
        self.initialize = initialize
        self.module = module
        self.empty: dict[str, Any] = {}
        for name, value in vars(at_import or module).items():
            if name in more or _is_variable(name, value):
                self.empty[name] = value
        self.names = tuple(self.empty)
        self.values: dict[NamedMesh | None, dict[str, Any]] = {None: self._read()}
        self.requests: dict[NamedMesh, object] = {}
        self.shown: NamedMesh | None = None
        self.bound: NamedMesh | None = None
        self.owned: NamedMesh | None = None
        current.watch(self.update_shown)

    def _read(self) -> dict[str, Any]:
        """Return the current values of the module's variables, by name."""
        return {name: vars(self.module)[name] for name in self.names}

    def _write(self, values: Mapping[str, Any]) -> None:
        """Set the module's variables; those that ``values`` lacks get their value at import."""
        vars(self.module).update({**_copy_containers(self.empty), **values})

    def run_initializer(self, initialize: Callable[[], object], **functions: Any) -> dict[str, Any]:
        """Run upstream's initialization, and return the values that it assigned to the variables.

        Afterwards the variables have their previous values again.

        Args:
            initialize: upstream's function. It sees the variables as if there were no other mesh.
            **functions: functions of the module that are replaced during this call.
        """
        module = vars(self.module)
        before = self._read()
        for name in functions:
            before[name] = module[name]
        # Without a mesh, a variable that was assigned by hand keeps its value, as it does upstream.
        self._write({} if self.shown else _copy_containers(self._read()))
        module.update(functions)
        try:
            initialize()
            return self._read()
        finally:
            module.update(before)

    def bind_with_values(
        self, mesh: NamedMesh, values: Mapping[str, Any], request: object = None, *, owned: bool = False
    ) -> Bound:
        """Bind a mesh, and set the values of the variables for it.

        Args:
            mesh: the mesh.
            values: the values of the variables for this mesh, by name.
            request: the options with which the values were computed.
            owned: whether :meth:`destroy` closes the mesh.
        """
        self.values[mesh] = dict(values)
        self.requests[mesh] = request
        if self.shown is mesh:
            self._write(values)
        if owned:
            self.owned = mesh
        # The variables hold groups, which destroy_process_group() has to end with their threads.
        add_default_group_finalizer(partial(self.update_shown, mesh))
        return self.bind(mesh)

    def bind(self, mesh: NamedMesh) -> Bound:
        """Bind a mesh whose values were set by an earlier :meth:`bind_with_values`."""
        bound = Bound(self, mesh, self.bound)
        self.bound = mesh
        self.update_shown()
        return bound

    def has_values(self, mesh: NamedMesh, request: object = None) -> bool:
        """Return whether a mesh was bound before with the same options."""
        return mesh in self.requests and self.requests[mesh] == request

    def current_mesh(self) -> NamedMesh:
        """Return the mesh whose groups the accessors return now; raise a MeshError without one."""
        if self.shown not in self.requests:
            raise MeshError(
                f"{self.api} is not bound to a mesh; call {self.initialize}(...) or bind(mesh) first"
            )
        return self.shown

    def find_blocking_mesh(self) -> NamedMesh | None:
        """Return a mesh that is bound, selected or owned: with one, no other can be initialized."""
        return self.owned or self.bound or self.shown

    def check_uninitialized(self) -> None:
        """Raise if the legacy API has a mesh already, or if another mesh is selected."""
        mesh = self.find_blocking_mesh()
        if mesh is not None:
            raise ContractError(
                f"{self.api} is already initialized, for {mesh.layout}; call the function that destroys it first, "
                "or bind another mesh in addition with bind(mesh)"
            )

    def unbind(self) -> None:
        """End the binding of the mesh that is bound. The mesh stays open, with its groups."""
        if self.bound is not None:
            self.update_shown(self.bound)

    def destroy(self) -> None:
        """End all bindings, reset the variables, and close the mesh that the legacy API made."""
        owned = self.owned
        self.values = {}
        self.requests = {}
        self.bound = None
        self.shown = None
        self.owned = None
        self._write({})
        if owned is not None:
            owned.close(destroy_groups=True)

    def update_shown(self, closed: NamedMesh | None = None) -> None:
        """Set the variables for the mesh that is selected or bound now, and store the old values.

        Called after a mesh was selected, bound or closed.

        Args:
            closed: the mesh that was closed, if that is the reason of the call.
        """
        if closed is None or closed is not self.shown:
            self.values[self.shown] = self._read()
        if closed is not None:
            self.values.pop(closed, None)
            self.requests.pop(closed, None)
            if self.bound is closed:
                self.bound = None
            if self.owned is closed:
                self.owned = None
        self.shown = current.selected_mesh() or self.bound
        self._write(self.values.get(self.shown, {}))


def _copy_containers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of variables, with lists and dicts copied: upstream fills them in place."""
    copies = {}
    for name, value in values.items():
        copies[name] = copy(value) if isinstance(value, (list, dict)) else value
    return copies


def _is_variable(name: str, value: object) -> bool:
    """Return whether a name of a module is a variable that upstream fills."""
    is_private = name.startswith("_") and not name.startswith("__")
    return is_private and (value is None or isinstance(value, (list, dict)))


class Bound:
    """The binding of a mesh to a legacy API.

    It lasts until the next one, or for a ``with`` block, which also selects the mesh.
    """

    def __init__(self, state: State, mesh: NamedMesh, before: NamedMesh | None) -> None:
        self.mesh = mesh
        self._state = state
        self._before = before

    def __enter__(self) -> NamedMesh:
        return self.mesh.__enter__()

    def __exit__(self, *_error: object) -> None:
        state = self._state
        if state.bound is self.mesh:  # a mesh that was bound in the block stays bound
            state.bound = self._before if self._before in state.requests else None
        self.mesh.__exit__(None, None, None)


def check_default_group(or_call: str = "torch.distributed.init_process_group()") -> None:
    """Raise a ContractError if torch has no default group.

    Args:
        or_call: a call that makes one, other than ``namedmesh.launch.init()``; for the message.
    """
    if not dist.is_initialized():
        raise ContractError(
            f"torch.distributed has no default group; call namedmesh.launch.init() or {or_call} first"
        )


def check_open(mesh: object, call: str) -> None:
    """Raise a MeshError unless ``call`` was given an open NamedMesh."""
    if not isinstance(mesh, NamedMesh):
        raise MeshError(
            f"{call} got a {type(mesh).__name__}; give it a NamedMesh, such as NamedMesh.from_device_mesh(...)"
        )
    if mesh.closed:
        raise MeshError(f"the mesh over {mesh.layout} was closed; give {call} an open one")


# --- the groups of a legacy API ------------------------------------------------------------------------------


def find_mesh_axes(layout: Layout, axes: Collection[str]) -> tuple[str, ...]:
    """Return the axes of a layout that correspond to axes of a legacy API, in layout order.

    An axis that the layout lacks has size 1 and does not appear.

    Example:
        >>> from namedmesh import Layout
        >>> find_mesh_axes(Layout(dp_replicate=2, dp_shard=2, tp=2), ("tp", "cp", "dp"))
        ('dp_replicate', 'dp_shard', 'tp')
    """
    return tuple(axis for axis in layout.axes if axis in axes or LEGACY_AXES.get(axis) in axes)


def get_or_create_group(mesh: NamedMesh, axes: Collection[str]) -> tuple[ProcessGroup, list[int]]:
    """Return this rank's group over axes of a legacy API, and its global ranks.

    Collective: every rank of the mesh must call it, as the group may have to be created.

    Args:
        mesh: the mesh.
        axes: the axes, by the names that the legacy API gives them.
    """
    own = find_mesh_axes(mesh.layout, axes)
    groups = get_groups(mesh)
    if not own:
        return groups.get_self_group(), [mesh.global_rank]
    group = groups.get_or_create(mesh.layout, own, groups.get_options(own))
    return group, list(mesh.layout.group(mesh.global_rank, *own))


@contextmanager
def agree_before_creation(
    mesh: NamedMesh, call: str, request: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Context manager in which groups of a mesh can be created.

    On entry the ranks compare the mesh and the request, so that no rank creates other groups.
    Collective: every rank of the mesh must enter it.

    Args:
        mesh: the mesh.
        call: the call of the user, for messages.
        request: further arguments of the call that must be equal on all ranks.

    Raises:
        MeshError: ``mesh`` is not an open NamedMesh.
        AgreementError: a rank did not enter it, or with different arguments.
    """
    check_open(mesh, call)
    with agree_on_call(mesh, call) as compare:
        layouts = {"layout": repr(mesh.layout), "views": repr(mesh.views)}
        compare({**layouts, **(request or {}), "groups that exist": describe_group_cache()})
        yield


def check_axes(
    layout: Layout,
    api: str,
    allowed: Collection[str] = DENSE_AXES,
    *,
    experts: Collection[str] = (),
    instead: str = "",
) -> None:
    """Raise a LayoutError for axes of a mesh for which a legacy API has no group.

    Args:
        layout: the layout of the mesh.
        api: the name of the legacy API, for messages.
        allowed: the axes that the legacy API has.
        experts: axes that a mesh may only have in a view for the experts.
        instead: for messages, the advice if the layout has one of ``experts``.
    """
    problems = []
    for axis in layout:
        if axis in experts:
            problems.append(f"axis {axis!r} is one of the experts', and {instead}")
        elif axis not in allowed:
            text = f"axis {axis!r} has no place in {api}'s groups, which are over {', '.join(allowed)}"
            problems.append(f"{text}{did_you_mean(axis, allowed)}")
    if problems:
        raise LayoutError(*problems)
