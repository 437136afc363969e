"""Run the initializer of a legacy library, upstream's or our fallback's, on a mesh."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial, update_wrapper
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist

from namedmesh._errors import AgreementError, LayoutError, NamedMeshError
from namedmesh.compat.errors import ContractError
from namedmesh.compat.patching import UPSTREAM, Patch, is_installed
from namedmesh.compat.state import AccessorState, BindingContext, check_open
from namedmesh.layout import Layout
from namedmesh.layout.orders import LEGACY_APIS
from namedmesh.mesh.init import init_mesh
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.mesh.options import GroupOptions
from namedmesh.mesh.sharing import find_shared_options


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


class Binding(AccessorState):
    """The variables of one module of a library, and the module's own functions.

    Attributes:
        initialize: the module's own function that makes the groups.
        destroy: the module's own function that forgets them; resets the variables without one.
        signature: the signature of ``initialize``.
    """

    def __init__(self, library: Library, module: ModuleType) -> None:
        super().__init__(library.title, library.initializer, module, library.find_variables(module))
        self.initialize: Callable[..., Any] = getattr(module, library.initializer)
        self.destroy: Callable[[], Any] = getattr(module, library.destroyer, self.reset)
        self.signature: Signature = signature(self.initialize)


class Library(Patch):
    """A legacy library: our fallback, and upstream's module if it can be imported.

    A subclass knows how the library reads sizes, and how its variables are filled for a mesh.

    Args:
        module: our module.
        fallbacks: the name of our module for each name of an upstream module.

    Attributes:
        name: the name in ``LEGACY_APIS``, and of the layer in this package.
        title: the name for messages.
        initializer: the name of the function that makes the groups.
        destroyer: the name of the function that forgets them; a fork may lack it.
        ours: the variables of our module.
        active: the variables that count: upstream's after :meth:`install`, otherwise ours.
    """

    name: str
    title: str
    initializer: str
    destroyer: str

    def __init__(self, module: ModuleType, fallbacks: Mapping[str, str]) -> None:
        super().__init__(UPSTREAM[self.name], fallbacks)
        # Several releases of upstream may be imported, one after the other.
        self._bindings: dict[ModuleType, Binding] = {}
        self.ours: Binding = self._find_binding(module)
        self.active: Binding = self.ours

    def find_variables(self, module: ModuleType) -> Mapping[str, Any]:
        """Return the value of each variable of a module at its import, by name."""
        raise NotImplementedError

    def read_request(self, arguments: Mapping[str, Any]) -> MeshRequest:
        """Return the mesh for the arguments of the initializer.

        Args:
            arguments: all arguments by name, with defaults.

        Raises:
            LayoutError: there is no mesh for these arguments.
        """
        raise NotImplementedError

    def make_filler(
        self, binding: Binding, mesh: NamedMesh, options: Mapping[str, Any]
    ) -> Callable[[], object]:
        """Return the function that assigns the groups of an existing mesh to the variables.

        Args:
            binding: the variables.
            mesh: the mesh.
            options: the options of :meth:`bind`.
        """
        raise NotImplementedError

    def activate(self, binding: Binding) -> None:
        """Use the variables of a module from now on, with the groups that they hold."""
        self.unbind()
        self.active = binding

    def make_replacements(self, binding: Binding) -> dict[str, object]:
        """Return the functions that a module gets in place of its own, by name."""
        # Partial objects, because update_wrapper cannot set the attributes of a bound method.
        initialize = partial(self.initialize, binding)
        replacements: dict[str, object] = {self.initializer: update_wrapper(initialize, binding.initialize)}
        if hasattr(binding.module, self.destroyer):
            destroy = partial(self.destroy, binding)
            replacements[self.destroyer] = update_wrapper(destroy, binding.destroy)
        return replacements

    def replace(self, module: ModuleType) -> Mapping[str, object]:
        """Use the variables of upstream's module, and return the replacements of its functions."""
        # The module may be a package that re-exports the function.
        home = getattr(module, self.initializer).__module__
        self.activate(self._find_binding(sys.modules[home]))
        return self.make_replacements(self.active)

    def restore(self) -> None:
        """Use the variables of our module, after upstream's groups were destroyed."""
        if self.active is not self.ours:
            self.destroy()
            self.activate(self.ours)

    def bind(self, mesh: NamedMesh, **options: Any) -> BindingContext:
        """Bind a mesh to our module, or after ``install()`` to upstream's.

        Without ``install()``, an upstream that can be imported is bound in addition.

        Raises:
            LayoutError: the library makes other groups than the mesh has.
        """
        check_open(mesh, f"{self.name}.bind")
        bindings: list[Binding] = []
        # If upstream cannot be imported here, no code asks it for groups.
        with warnings.catch_warnings(), suppress(ImportError):
            warnings.simplefilter("ignore")
            if self.active is self.ours and is_installed(self.upstream):
                bindings.append(self._find_binding(import_module(self.upstream)))
        before: dict[AccessorState, NamedMesh | None] = {}
        bound = BindingContext(mesh, before)
        for binding in [*bindings, self.active]:
            before[binding] = binding.bind(mesh, self.make_filler(binding, mesh, options), options)
            problem = self._find_difference(binding, mesh)
            if problem:
                bound.end()
                raise LayoutError(
                    f"{self.title} cannot express the order of the axes of {mesh.layout}: {problem}"
                )
        return bound

    def unbind(self) -> None:
        """End the binding of the mesh that is bound. The mesh stays open, with its groups."""
        for binding in self._bindings.values():
            binding.unbind()

    def current_mesh(self) -> NamedMesh:
        """Return the mesh whose groups the accessors return now; raise a MeshError without one."""
        return self.active.current_mesh()

    def initialize(self, binding: Binding | None, *args: Any, **kwargs: Any) -> None:
        """Make a mesh, run the library's own initializer on its groups, and bind the mesh.

        If there is no mesh for the arguments, the initializer runs by itself: it raises its own
        errors, or makes groups of its own, about which there is a warning.

        Collective: every rank must call it, with the same arguments.

        Args:
            binding: the module; None for the active one.
            *args: the arguments of the initializer.
            **kwargs: the same.
        """
        binding = binding or self.active
        initialize = partial(binding.initialize, *args, **kwargs)
        if not dist.is_initialized() or binding.shown in binding.requests:
            initialize()  # raises its own error: there is no default group, or it is initialized
            return
        if binding.shown is not None:
            raise ContractError(
                f"{self.name} is already initialized, for {binding.shown.layout}, which "
                "is selected; leave the block of the mesh, or call bind(mesh)"
            )
        try:
            bound = binding.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            request = self.read_request(bound.arguments)
            mesh = _make_mesh(request)
        except AgreementError:
            raise  # no rank can make groups any more
        except (NamedMeshError, TypeError, ValueError) as error:
            # A fork may take other arguments, or values that are no sizes.
            initialize()
            text = f"{self.initializer}() has made its own groups, without a mesh: {error}"
            warnings.warn(text, stacklevel=2)
            return
        for note in request.notes:
            warnings.warn(note, stacklevel=2)
        try:
            binding.bind(mesh, initialize)
        except BaseException:
            # The mesh is known to this call alone.
            mesh.close()
            raise
        binding.owned = mesh
        problem = self._find_difference(binding, mesh)
        if problem:
            values = binding.read()
            mesh.close()
            binding.write(values)
            warnings.warn(f"{self.initializer}() has no mesh: {problem}", stacklevel=2)

    def destroy(self, binding: Binding | None = None) -> None:
        """End all bindings, and destroy the groups of the mesh that ``initialize`` made.

        Args:
            binding: the module; None for the active one.
        """
        binding = binding or self.active
        if binding.shown is not None:
            # Megatron destroys the gloo groups in its variables, but meshes may use them.
            for name in binding.empty:
                if name.endswith("_GLOO"):
                    vars(binding.module)[name] = None
        binding.destroy()
        binding.reset()

    def _find_binding(self, module: ModuleType) -> Binding:
        """Return the variables of a module."""
        if module not in self._bindings:
            self._bindings[module] = Binding(self, module)
        return self._bindings[module]

    def _find_difference(self, binding: Binding, mesh: NamedMesh) -> str:
        """Return which axis has other ranks in the library; empty if there is none.

        A fork may order ranks in another way than the library of which it is a copy.
        """
        for spec in LEGACY_APIS[self.name].groups:
            axis = spec.axes[0]
            group = binding.values[mesh].get(spec.variable)
            if spec.members != "all" or len(spec.axes) > 1 or axis not in mesh or group is None:
                continue
            ranks = dist.get_process_group_ranks(group)
            if tuple(ranks) != mesh.ranks(axis):
                return (
                    f"{spec.variable} has the ranks {ranks}, and {axis!r} would have {list(mesh.ranks(axis))}"
                )
        return ""


def _make_mesh(request: MeshRequest) -> NamedMesh:
    """Make a mesh, with the view for experts. Collective: every rank must call it.

    If an open mesh has an axis over the same ranks, both use its groups: torch does not distinguish
    two meshes of the same names over the same ranks.
    """
    options = _find_open_options(request.sizes) | dict(request.options)
    mesh = init_mesh(request.sizes, timeout=request.timeout, options=options)
    if request.expert_sizes:
        options = _find_open_options(request.expert_sizes)
        for axis in mesh:
            options.pop(axis, None)
        try:
            mesh.add_view("expert", options=options, **request.expert_sizes)
        except BaseException:
            mesh.close()
            raise
    return mesh


def make_layout(sizes: Mapping[str, int]) -> Layout:
    """Return the layout of the world for sizes in this order; LayoutError if they do not fit."""
    return Layout.from_shape([*sizes], [*sizes.values()], world_size=dist.get_world_size())


def _find_open_options(sizes: Mapping[str, int]) -> dict[str, GroupOptions]:
    """Return options with which axes use the groups of open meshes; none for wrong sizes."""
    with suppress(LayoutError):  # init_mesh raises the error on every rank
        return find_shared_options(make_layout(sizes))
    return {}
