"""The module-level variables of a legacy API, with separate values for each mesh.

Megatron, fairscale, ezpz and DeepSpeed keep their groups in module-level variables, which legacy
code reads and assigns. The module is our own or upstream's, installed or vendored. Functions fill
the variables inside of :func:`namedmesh.share_groups`, so that they get the groups of a mesh.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from inspect import getsource
from types import ModuleType
from typing import Any, cast

import torch.distributed as dist

from namedmesh._errors import LayoutError, MeshError, did_you_mean
from namedmesh.compat.errors import ContractError
from namedmesh.layout import Layout
from namedmesh.layout.axes import DENSE_AXES, EXPERT_AXES, LEGACY_AXES
from namedmesh.mesh import current
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.mesh.sharing import share_groups


class AccessorState:
    """The variables of one legacy module, with separate values for each mesh.

    Make one for each module: a second one would mistake the values that the first one has set for
    the values without a mesh.

    At any time, the variables have the values of one mesh, the *shown* mesh: the mesh that is
    selected with ``with mesh:``, in whatever thread, or else the mesh that was bound last. If code
    assigns a variable, the assigned value belongs to the shown mesh, and returns when that mesh is
    shown again. The same holds for values that are assigned while no mesh is shown.

    Args:
        title: the name of the legacy API, for messages.
        initializer: the name of its function that makes groups, for messages.
        module: the module.
        empty: the value of each variable at import, by name.

    Attributes:
        values: for each mesh that was bound or selected, and for None (no mesh), the values of the
            variables by name.
        requests: the options with which each mesh was bound.
        shown: the mesh whose values the variables have now.
        bound: the mesh that was bound last.
        owned: the mesh that the legacy API's own function made.
    """

    def __init__(self, title: str, initializer: str, module: ModuleType, empty: Mapping[str, Any]) -> None:
        self.title = title
        self.initializer = initializer
        self.module = module
        self.empty: dict[str, Any] = dict(empty)
        self.values: dict[NamedMesh | None, dict[str, Any]] = {None: self.read()}
        self.requests: dict[NamedMesh, object] = {}
        self.shown: NamedMesh | None = None
        self.bound: NamedMesh | None = None
        self.owned: NamedMesh | None = None
        current.watch(self.update_shown)

    def read(self) -> dict[str, Any]:
        """Return the current values of the module's variables, by name."""
        return {name: vars(self.module)[name] for name in self.empty}

    def write(self, values: Mapping[str, Any]) -> None:
        """Set the module's variables; those that ``values`` lacks get their value at import."""
        vars(self.module).update({**_copy_containers(self.empty), **values})

    def bind(
        self, mesh: NamedMesh, initialize: Callable[[], object], request: object = None
    ) -> NamedMesh | None:
        """Bind a mesh. Its groups are assigned to the variables by a function.

        The function does not run if the mesh was bound with the same options before.
        Collective: every rank must call it.

        Args:
            mesh: the mesh.
            initialize: the function, which gets the groups of the mesh from torch. It sees the
                variables as if there were no other mesh.
            request: the options.

        Returns:
            The mesh that was bound before.
        """
        if mesh not in self.requests or self.requests[mesh] != request:
            shown = self.read()
            # Without a mesh, a variable that was assigned by hand keeps its value, as it does upstream.
            # Lists and dicts are copied, because upstream fills them in place.
            self.write({} if self.shown else _copy_containers(shown))
            try:
                with share_groups(mesh, keep_timeouts=True):
                    initialize()
                self.values[mesh] = self.read()
            finally:
                self.write(shown)
            self.requests[mesh] = request
            if self.shown is mesh:
                self.write(self.values[mesh])
        before = self.bound
        self.bound = mesh
        self.update_shown()
        return before

    def current_mesh(self) -> NamedMesh:
        """Return the mesh whose groups the accessors return now; raise a MeshError without one."""
        if self.shown not in self.requests:
            raise MeshError(
                f"{self.title} is not bound to a mesh; call {self.initializer}(...) or bind(mesh) first"
            )
        return self.shown

    def unbind(self) -> None:
        """End the binding of the mesh that is bound. The mesh stays open, with its groups."""
        if self.bound is not None:
            self.update_shown(self.bound)

    def reset(self) -> None:
        """End all bindings, reset the variables, and close the mesh that the legacy API made."""
        owned = self.owned
        self.values = {}
        self.requests = {}
        self.bound = self.shown = self.owned = None
        self.write({})
        if owned is not None:
            owned.close()

    def update_shown(self, closed: NamedMesh | None = None) -> None:
        """Set the variables for the mesh that is selected or bound now, and store the old values.

        Called after a mesh was selected, bound or closed, or its groups were destroyed.

        Args:
            closed: the mesh that was closed, if that is the reason of the call.
        """
        if closed is None or closed is not self.shown:
            self.values[self.shown] = self.read()
        if closed is not None:
            self.values.pop(closed, None)
            self.requests.pop(closed, None)
            if self.bound is closed:
                self.bound = None
            if self.owned is closed:
                self.owned = None
        self.shown = cast("NamedMesh | None", current.selected_mesh()) or self.bound
        self.write(self.values.get(self.shown, {}))


def _copy_containers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of variables, with lists and dicts copied."""
    copies = {}
    for name, value in values.items():
        copies[name] = copy(value) if isinstance(value, (list, dict)) else value
    return copies


class BindingContext:
    """The binding of a mesh to a legacy API.

    It lasts until the next one, or for a ``with`` block, which also selects the mesh.

    Args:
        mesh: the mesh.
        before: the variables to which it is bound, and the mesh that was bound to them before.
    """

    def __init__(self, mesh: NamedMesh, before: Mapping[AccessorState, NamedMesh | None]) -> None:
        self.mesh = mesh
        self._before = before

    def __enter__(self) -> NamedMesh:
        return self.mesh.__enter__()

    def __exit__(self, *_error: object) -> None:
        self.end()
        self.mesh.__exit__(None, None, None)

    def end(self) -> None:
        """Bind the meshes again that were bound before."""
        for state, before in self._before.items():
            if state.bound is self.mesh:  # a mesh that was bound in the block stays bound
                state.bound = before if before in state.requests else None
                state.update_shown()


def read_variables(module: ModuleType, more: Iterable[str] = ()) -> dict[str, Any]:
    """Return the variables of a module that its functions fill, with their values at import.

    The module may have filled them already, so their values come from its source.

    Args:
        module: the module. Its variables are the private names that are None, a list or a dict in
            its source.
        more: the names of further variables, which have a constant there.
    """
    variables = {}
    for statement in ast.parse(getsource(module)).body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        name = getattr(target, "id", "")
        try:
            value = ast.literal_eval(statement.value)
        except (TypeError, ValueError):
            continue  # it is computed
        is_private = name.startswith("_") and not name.startswith("__")
        if name in more or (is_private and (value is None or isinstance(value, (list, dict)))):
            variables[name] = value
    return variables


# --- the groups of a legacy API -----------------------------------------------------------------


def list_group_ranks(layout: Layout, axes: Collection[str]) -> list[list[int]]:
    """Return the ranks of every group over axes of a legacy API.

    Args:
        layout: a layout of all ranks of the world. An axis that it lacks has size 1.
        axes: the axes, by the names that the legacy API gives them.

    Example:
        >>> from namedmesh import Layout
        >>> list_group_ranks(Layout(dp_replicate=2, dp_shard=2, tp=2), ("cp", "dp"))
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    return list_rank_sets(layout, [axis for axis in layout if {axis, LEGACY_AXES.get(axis)} & {*axes}])


def list_rank_sets(layout: Layout, axes: Collection[str]) -> list[list[int]]:
    """Return the ranks of every group over axes of a layout; each rank by itself without axes.

    Args:
        layout: the layout.
        axes: the axes, by the names of the layout.
    """
    if not axes:
        return [[rank] for rank in layout.ranks]
    return [list(ranks) for ranks in layout.groups(*axes)]


def make_groups(
    rank_sets: Iterable[Sequence[int]], new_group: Callable[..., Any] = dist.new_group, **arguments: Any
) -> Any:
    """Make a group over each set of ranks; return this rank's (the last one), or None.

    Inside of :func:`namedmesh.share_groups` they are the groups of the mesh.
    Collective: every rank must call it.

    Args:
        rank_sets: the ranks of each group.
        new_group: the function that makes a group.
        **arguments: further arguments of the function.
    """
    local_group = None
    # torch requires every rank to make every group, also those that it is not in.
    for ranks in rank_sets:
        group = new_group(list(ranks), **arguments)
        if dist.get_rank() in ranks:
            local_group = group
    return local_group


def get_first_rank(group: dist.ProcessGroup) -> int:
    """Return the global rank of the first member of a group."""
    return dist.get_process_group_ranks(group)[0]


def add_function(functions: dict[str, Any], name: str, function: Callable[..., Any], text: str) -> None:
    """Add a function that was made from a row of a table.

    Args:
        functions: the functions by name.
        name: the name of the function.
        function: the function.
        text: its docstring.
    """
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    functions[name] = function


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
            f"{call} got a {type(mesh).__name__}; give it a NamedMesh, such as "
            "NamedMesh.from_device_mesh(...)"
        )
    if mesh.closed:
        raise MeshError(f"the mesh over {mesh.layout} was closed; give {call} an open one")


def check_axes(layout: Layout, api: str, allowed: Collection[str] = DENSE_AXES, instead: str = "") -> None:
    """Raise a LayoutError for axes of a mesh for which a legacy API has no group.

    Args:
        layout: the layout of the mesh.
        api: the name of the legacy API, for messages.
        allowed: the axes that the legacy API has.
        instead: the advice if the layout has an axis of the experts; without one, such an axis is
            unknown.
    """
    problems = []
    for axis in layout:
        if instead and axis in {*EXPERT_AXES, "egtp_remat"}:
            problems.append(f"axis {axis!r} is one of the experts', and {instead}")
        elif axis not in allowed:
            text = f"axis {axis!r} has no place in {api}'s groups, which are over {', '.join(allowed)}"
            problems.append(f"{text}{did_you_mean(axis, allowed)}")
    if problems:
        raise LayoutError(*problems)
