"""Run the initializer of a legacy API, upstream's or our fallback's, on a mesh."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial, update_wrapper
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.patching import UPSTREAM, Patch, is_installed
from namedmesh.compat.state import Bound, State, check_open
from namedmesh.errors import AgreementError, LayoutError, NamedMeshError
from namedmesh.init import init_mesh
from namedmesh.layout import Layout
from namedmesh.legacy import LEGACY_APIS
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions
from namedmesh.sharing import find_shared_options


class MeshRequest(NamedTuple):
    """The mesh that an initializer of a legacy API asks for with its arguments.

    Attributes:
        sizes: the size of each axis, slowest first.
        expert_sizes: the same of the view for experts; empty if there is none.
        timeout: the timeout of the groups; None for the default group's.
        options: the options of the groups along axes, by axis.
        notes: warnings about sizes that the legacy API changes.
    """

    sizes: Mapping[str, int]
    expert_sizes: Mapping[str, int] = {}
    timeout: timedelta | None = None
    options: Mapping[str, GroupOptions] = {}
    notes: tuple[str, ...] = ()


class Binding:
    """Binds meshes to the variables of one module of a legacy API.

    Make one binding for each module: a second one would mistake the values that the first one has
    set for the values without a mesh.

    Args:
        api: the name of the legacy API in ``LEGACY_APIS``.
        title: its name for messages.
        module: the module, upstream's or our own.
        initializer: the name of its function that makes the groups.
        destroyer: the name of its function that forgets them, if it has one.
        empty: the value of each variable at import, by name.

    Attributes:
        module: the module.
        state: the variables of the module, with separate values for each mesh.
        replacements: the functions that the module gets in place of its own, by name.
    """

    def __init__(  # noqa: PLR0917  the names of one module
        self,
        api: str,
        title: str,
        module: ModuleType,
        initializer: str,
        destroyer: str,
        empty: Mapping[str, Any],
    ) -> None:
        self.api = api
        self.module = module
        self.state = State(title, initializer, module, empty)
        self.upstream_initialize = getattr(module, initializer)
        self.signature = signature(self.upstream_initialize)
        self.upstream_destroy = getattr(module, destroyer, self.state.destroy)
        # Partial objects, because update_wrapper cannot set the attributes of a bound method.
        self.replacements = {initializer: update_wrapper(partial(self.initialize), self.upstream_initialize)}
        if hasattr(module, destroyer):
            self.replacements[destroyer] = update_wrapper(partial(self.destroy), self.upstream_destroy)

    def bind(self, mesh: NamedMesh, **options: Any) -> Bound:
        """Let the accessors of the module return the groups of an existing mesh."""
        raise NotImplementedError

    def read_request(self, arguments: Mapping[str, Any]) -> MeshRequest:
        """Return the mesh for the arguments of the initializer.

        Args:
            arguments: all arguments by name, with defaults.

        Raises:
            LayoutError: there is no mesh for these arguments.
        """
        raise NotImplementedError

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Make a mesh, run the legacy API's own initializer on its groups, and bind the mesh.

        If there is no mesh for the arguments, the initializer runs by itself: it raises its own
        errors, or makes groups of its own, about which there is a warning.

        Collective: every rank must call it, with the same arguments.
        """
        self.run_initializer(args, kwargs)

    def run_initializer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do the work of :meth:`initialize`. Warnings are about the caller of its caller."""
        initialize = partial(self.upstream_initialize, *args, **kwargs)
        if not dist.is_initialized() or self.state.shown in self.state.requests:
            initialize()  # raises its own error: there is no default group, or it is initialized
            return
        if self.state.shown is not None:
            raise ContractError(
                f"{self.state.api} is already initialized, for {self.state.shown.layout}, which "
                "is selected; leave the block of the mesh, or call bind(mesh)"
            )
        try:
            request = self._read_call(args, kwargs)
            mesh = _make_mesh(request)
        except AgreementError:
            raise  # no rank can make groups any more
        except NamedMeshError as error:
            initialize()
            text = f"{self.state.initialize}() has made its own groups, without a mesh: {error}"
            warnings.warn(text, stacklevel=3)
            return
        for note in request.notes:
            warnings.warn(note, stacklevel=3)
        try:
            values = self.state.fill(mesh, initialize)
        except BaseException:
            # The mesh is known to this call alone.
            mesh.close()
            raise
        problem = self._find_difference(mesh, values)
        if problem:
            vars(self.module).update(values)
            mesh.close()
            warnings.warn(f"{self.state.initialize}() has no mesh: {problem}", stacklevel=3)
            return
        self.state.bind_with_values(mesh, values, owned=True)

    def _find_difference(self, mesh: NamedMesh, values: Mapping[str, Any]) -> str:
        """Return which axis has other ranks in the legacy API; empty if there is none.

        A fork may order ranks in another way than the API of which it is a copy.
        """
        for spec in LEGACY_APIS[self.api].groups:
            axis = spec.axes[0]
            group = values.get(spec.variable)
            if spec.members != "all" or len(spec.axes) > 1 or axis not in mesh or group is None:
                continue
            ranks = dist.get_process_group_ranks(group)
            if tuple(ranks) != mesh.ranks(axis):
                return f"{spec.variable} has the ranks {ranks}, and axis {axis!r} would have {list(mesh.ranks(axis))}"
        return ""

    def _read_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MeshRequest:
        """Return the mesh for a call of the initializer; LayoutError if there is none."""
        try:
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return self.read_request(bound.arguments)
        except (TypeError, ValueError) as error:
            # A fork may take other arguments. NamedMeshErrors of sizes are ValueErrors, too.
            raise LayoutError(str(error)) from None

    def destroy(self) -> None:
        """End all bindings, and destroy the groups of the mesh that :meth:`initialize` made."""
        if self.state.shown is not None:
            # Megatron destroys the gloo groups in its variables, but meshes may use them.
            for name in self.state.empty:
                if name.endswith("_GLOO"):
                    vars(self.module)[name] = None
        self.upstream_destroy()
        self.state.destroy()


def _make_mesh(request: MeshRequest) -> NamedMesh:
    """Make a mesh, with the view for experts. Collective: every rank must call it.

    If an open mesh has an axis over the same ranks, both use its groups: torch does not distinguish
    two meshes of the same names over the same ranks.
    """
    options = _find_open_options(request.sizes) | dict(request.options)
    mesh = init_mesh(request.sizes, timeout=request.timeout, options=options)
    try:
        if request.expert_sizes:
            options = _find_open_options(request.expert_sizes)
            for axis in mesh:
                options.pop(axis, None)
            mesh.add_view("expert", options=options, **request.expert_sizes)
    except BaseException:
        mesh.close()
        raise
    return mesh


def _find_open_options(sizes: Mapping[str, int]) -> dict[str, GroupOptions]:
    """Return options with which axes use the groups of open meshes; none for wrong sizes."""
    try:
        layout = Layout.from_shape(list(sizes), list(sizes.values()), world_size=dist.get_world_size())
    except LayoutError:
        return {}  # init_mesh raises the error on every rank
    return find_shared_options(layout)


class Api:
    """A legacy API: our fallback, and upstream's module if it can be imported.

    Args:
        name: its name, which is also that of its layer in this package.
        make_binding: makes the binding of an imported module of upstream.
        fallback: the binding of our own module.
        fallback_names: the name of our module for each name of an upstream module.
        activate: called with the module whose variables count from now on: upstream's after
            :meth:`install`, otherwise our own.

    Attributes:
        active: the binding of this module.
    """

    def __init__(
        self,
        name: str,
        make_binding: Callable[[ModuleType], Binding],
        fallback: Binding,
        fallback_names: Mapping[str, str],
        activate: Callable[[ModuleType], object] = lambda _: None,
    ) -> None:
        self.name = name
        self.upstream = UPSTREAM[name]
        self.make_binding = make_binding
        self.fallback = fallback
        self.active = fallback
        self.activate = activate
        # One for each imported module. Tests import several releases.
        self.bindings: dict[ModuleType, Binding] = {}
        self.patch = Patch(self.upstream, self._activate_upstream, fallback_names, self._activate_fallback)

    def find_binding(self, module: ModuleType) -> Binding:
        """Return the binding of an imported module of upstream."""
        if module not in self.bindings:
            self.bindings[module] = self.make_binding(module)
        return self.bindings[module]

    def bind(self, mesh: NamedMesh, **options: Any) -> Bound:
        """Bind a mesh to our module, or after ``install()`` to upstream's.

        Without ``install()``, an upstream that can be imported is bound in addition.
        """
        check_open(mesh, f"{self.name}.bind")
        more = None
        # If upstream cannot be imported here, no code asks it for groups.
        with warnings.catch_warnings(), suppress(ImportError):
            warnings.simplefilter("ignore")
            if self.active is self.fallback and is_installed(self.upstream):
                module = import_module(self.upstream)
                more = self.find_binding(module).bind(mesh, **options)
        bound = self.active.bind(mesh, **options)
        if more is not None:
            bound.add(more)
        return bound

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Make a mesh and bind it, by the function of the active module."""
        self.active.run_initializer(args, kwargs)

    def destroy(self) -> None:
        """End all bindings, and close the mesh that :meth:`initialize` made."""
        self.active.destroy()

    def unbind(self) -> None:
        """End the binding of the mesh that is bound. The mesh stays open, with its groups."""
        for binding in (self.fallback, *self.bindings.values()):
            binding.state.unbind()

    def current_mesh(self) -> NamedMesh:
        """Return the mesh whose groups the accessors return now; raise a MeshError without one."""
        return self.active.state.current_mesh()

    def _activate_upstream(self, module: ModuleType) -> Mapping[str, object]:
        """Use the variables of upstream's module, and return the replacements of its functions."""
        # The module may be a package that re-exports the function.
        home = getattr(module, self.fallback.state.initialize).__module__
        binding = self.find_binding(sys.modules[home])
        self._activate(binding)
        return binding.replacements

    def _activate_fallback(self) -> None:
        """Use the variables of our module, after upstream's groups were destroyed."""
        if self.active is not self.fallback:
            self.active.destroy()
            self._activate(self.fallback)

    def _activate(self, binding: Binding) -> None:
        """Use the variables of a module from now on, with the groups that they hold."""
        self.unbind()
        self.active = binding
        self.activate(binding.module)
