"""Model-parallel state in the style of fairscale and ezpz.

ezpz has the interface of fairscale with other names, so both compatibility layers use this module.
Everything follows from the API's table in :mod:`namedmesh.legacy`, which has a row for each group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from namedmesh.compat.binding import Api, Binding, MeshRequest
from namedmesh.compat.errors import ContractError
from namedmesh.compat.layers import REGIONS, describe_region
from namedmesh.compat.state import Bound, check_axes, check_default_group, make_groups
from namedmesh.errors import LayoutError
from namedmesh.layout import Layout
from namedmesh.legacy import LEGACY_APIS, GroupSpec
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions
from namedmesh.tensor_parallel.collectives import Group


class ModelParallel(Binding):
    """The model-parallel state of one legacy API, in the variables of a module.

    Args:
        name: the name of the API in ``LEGACY_APIS``.
        module: the module with the functions, our own or upstream's.
        initializer: the name of the function that makes the groups.
        destroyer: the name of the function that forgets them.
        parameters: by axis, the parameters of the initializer with its size and its backend.
    """

    def __init__(
        self,
        name: str,
        module: ModuleType,
        initializer: str,
        destroyer: str,
        parameters: Mapping[str, tuple[str, str]],
    ) -> None:
        self.name = name
        self.group_specs = LEGACY_APIS[name].groups
        self.parameters = parameters
        empty: dict[str, Any] = {}
        for spec in self.group_specs:
            for variable in (spec.variable, spec.ranks):
                # A release of upstream may lack some of the variables.
                if variable in vars(module):
                    empty[variable] = None
        super().__init__(name, f"{name}'s model parallelism", module, initializer, destroyer, empty)

    def read_request(self, arguments: Mapping[str, Any]) -> MeshRequest:
        """Return the mesh for the arguments of the initializer."""
        sizes = {"dp": -1}
        options = {}
        # Copies of fairscale have names without the underscore at the end.
        given = {name.rstrip("_"): value for name, value in arguments.items()}
        for axis, (size_name, backend_name) in self.parameters.items():
            if size_name.rstrip("_") in given:
                sizes[axis] = int(given[size_name.rstrip("_")])
            backend = arguments.get(backend_name)
            if backend is not None:
                options[axis] = GroupOptions(backend=backend)
        notes: tuple[str, ...] = ()
        world_size = dist.get_world_size()
        if sizes.get("tp", 1) > world_size:
            notes = (
                f"{self.name} reduces tp={sizes['tp']} to the world of {world_size} ranks without an error",
            )
            sizes["tp"] = world_size
        ordered = {axis: sizes.get(axis, 1) for axis in LEGACY_APIS[self.name].axes}
        return MeshRequest(ordered, timeout=arguments.get("timeout"), options=options, notes=notes)

    def make_all_groups(self, arguments: Mapping[str, Any]) -> None:
        """Make the groups and assign the variables: the initializer of our fallback.

        Collective: every rank must call it with the same arguments.

        Args:
            arguments: all arguments of the initializer, by name.

        Raises:
            ContractError: there is no default group, the sizes do not divide the world size, or a
                variable has a value already.
        """
        check_default_group()
        request = self.read_request(arguments)
        try:
            layout = Layout(world_size=dist.get_world_size(), **request.sizes)
        except LayoutError as error:
            # Callers of upstream catch its AssertionError.
            raise ContractError(*error.problems) from None
        assigned = [variable for variable in self.state.empty if vars(self.module)[variable] is not None]
        if assigned:
            raise ContractError(
                f"{self.state.api} is already initialized: {', '.join(assigned)} have values; "
                "call the function that destroys the groups first, or bind another mesh in "
                "addition with bind(mesh)"
            )
        for spec in self.group_specs:
            backend = arguments.get(self.parameters[spec.axes[0]][1])
            self._assign(spec, make_groups(layout, spec.axes, backend=backend, timeout=request.timeout))

    def bind(self, mesh: NamedMesh, **_options: Any) -> Bound:
        """Let accessors and layers use the groups of an existing mesh.

        Collective: every rank must call it when a mesh is bound for the first time. Later calls
        with the same mesh do not communicate.

        Args:
            mesh: a mesh with any of the axes ``tp``, ``cp``, ``pp``, and ``dp`` or ``dp_replicate``
                and ``dp_shard``, in any order.

        Returns:
            The binding. In ``with bind(mesh):`` the mesh is selected, and the binding ends with the
            block. Otherwise it lasts until the next one, until ``unbind()``, or until the mesh is
            closed.

        Raises:
            LayoutError: the mesh has axes for which the legacy API has no group.
            MeshError: the argument is not an open mesh.
            AgreementError: the other ranks did not call this, or called it with a different mesh.
        """
        if not self.state.has_values(mesh):
            check_axes(mesh.layout, self.name)
            values = self.state.fill(mesh, partial(self._assign_groups_of, mesh))
            return self.state.bind_with_values(mesh, values)
        return self.state.bind(mesh)

    def _assign_groups_of(self, mesh: NamedMesh) -> None:
        """Assign the groups of a mesh to the variables. An axis that it lacks has size 1."""
        for spec in self.group_specs:
            self._assign(spec, make_groups(mesh.layout, spec.axes))

    def _assign(self, spec: GroupSpec, group: dist.ProcessGroup) -> None:
        """Assign a group to its variable, and its ranks."""
        values = {spec.variable: group, spec.ranks: dist.get_process_group_ranks(group)}
        for variable, value in values.items():
            if variable in self.state.empty:
                vars(self.module)[variable] = value


def get_first_rank(group: Any) -> int:
    """Return the global rank of the first member of a group."""
    return dist.get_process_group_ranks(group)[0]


class ModelParallelLayer:
    """A compatibility layer: the functions of an API over its variables, in one module.

    The functions are in ``names``, by their legacy names: one for each row of the API's table and
    each use; the mappings over the tensor-parallel group; and the functions that bind meshes.

    Args:
        name: the name of the API in ``LEGACY_APIS``.
        initialize: the initializer, as a function with upstream's signature. It calls
            :meth:`make_all_groups` with its arguments.
        parameters: by axis, the parameters of the initializer with its size and its backend.
        modules: upstream's names of the package and its submodules, by their names in our module,
            which serves as all of them: they share the variables.
        before: the results of accessors before initialization, by their names; the other accessors
            raise a ContractError then.
    """

    def __init__(
        self,
        name: str,
        initialize: Callable[..., None],
        parameters: Mapping[str, tuple[str, str]],
        *,
        modules: Mapping[str, str],
        before: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        self.before = before or {}
        module = sys.modules[initialize.__module__]
        self.names: dict[str, Any] = {}
        # The variables must exist before the binding looks for them.
        for spec in LEGACY_APIS[name].groups:
            vars(module).update({variable: None for variable in (spec.variable, spec.ranks) if variable})
        vars(module)[initialize.__name__] = initialize
        destroyer = initialize.__name__.replace("initialize", "destroy")

        def make_binding(imported: ModuleType) -> ModelParallel:
            binding = ModelParallel(name, imported, initialize.__name__, destroyer, parameters)
            # Upstream's function is right only if the ranks of a group are neighbors.
            for accessor, function in self.names.items():
                if accessor.endswith("_src_rank"):
                    binding.replacements[accessor] = function
            return binding

        self.binding = make_binding(module)
        for name_here in modules:
            if name_here:
                vars(module)[name_here.rpartition(".")[2]] = module
                sys.modules[f"{module.__name__}.{name_here}"] = module
        fallback_names = dict.fromkeys(modules.values(), module.__name__)
        self.api = api = Api(name, make_binding, self.binding, fallback_names)
        for spec in LEGACY_APIS[name].groups:
            self._add_accessors(spec)
        self.names |= {
            initialize.__name__: update_wrapper(partial(api.initialize), initialize),
            destroyer: api.destroy,
            "bind": self.bind,
            "unbind": api.unbind,
            "current_mesh": api.current_mesh,
            "install": api.patch.install,
            "uninstall": api.patch.uninstall,
        }

    def bind(self, mesh: NamedMesh) -> Bound:
        """Let accessors and layers use a mesh; see :meth:`ModelParallel.bind`."""
        return self.api.bind(mesh)

    def make_all_groups(self, arguments: Mapping[str, Any]) -> None:
        """Make the groups of our module; see :meth:`ModelParallel.make_all_groups`."""
        self.binding.make_all_groups(arguments)

    def has_groups(self, *axes: str) -> bool:
        """Return whether the variables of the groups over all given axes have a value."""
        for spec in LEGACY_APIS[self.api.name].groups:
            if spec.axes[0] in axes and getattr(self.api.active.module, spec.variable) is None:
                return False
        return True

    def _add_accessors(self, spec: GroupSpec) -> None:
        """Add the functions of a group: accessors, and for the tensor-parallel group mappings."""
        start = f"get_{spec.name}_parallel"
        self._add(f"{start}_group", spec.variable)
        self._add(f"{start}_rank", spec.variable, dist.get_rank)
        self._add(f"{start}_world_size", spec.variable, dist.get_world_size)
        if spec.ranks:
            self._add(f"{start}_ranks", spec.ranks)
        else:
            self._add(f"{start}_ranks", spec.variable, dist.get_process_group_ranks)
        if spec.axes == ("tp",):
            self._get_group = self.names[f"{start}_group"]
            self._add(f"{start}_src_rank", spec.variable, get_first_rank)
            for kind in REGIONS:
                self._add_region(f"{kind}_{spec.name}_parallel_region", kind)

    def get_tensor_group(self) -> Group:
        """Return the tensor-parallel group from its variable, that is of the current mesh."""
        return Group.of(self._get_group())

    def _add(self, name: str, variable: str, read: Callable[[Any], Any] | None = None) -> None:
        """Add a function without arguments that reads a variable.

        Args:
            name: the name of the function.
            variable: the name of the variable.
            read: computes the result from the value of the variable; by default it is the value.
        """
        api = self.api
        before = self.before.get(name)

        def access() -> Any:
            # The variable is read on each call, because legacy code may assign it.
            value = getattr(api.active.module, variable, None)
            if value is not None:
                return value if read is None else read(value)
            if before is not None:
                return before()
            raise ContractError(
                f"{variable} is None: {api.name}'s model parallelism is not initialized; call "
                f"{api.active.state.initialize}(...), or namedmesh.compat.{api.name}.bind(mesh) "
                "with an existing mesh"
            )

        text = f"``{variable}``" if read is None else f"``{read.__name__}({variable})``"
        self._set(name, access, f"Return {text}.")

    def _add_region(self, name: str, kind: str) -> None:
        """Add a mapping of a tensor over the tensor-parallel group."""
        function, dims = REGIONS[kind]

        def region(input_: Tensor) -> Tensor:
            return function(input_, self.get_tensor_group(), *dims)

        self._set(name, region, describe_region(function))

    def _set(self, name: str, function: Callable[..., Any], text: str) -> None:
        function.__name__ = function.__qualname__ = name
        function.__doc__ = text
        self.names[name] = function
