"""Model-parallel state in the style of fairscale and ezpz.

ezpz has the interface of fairscale with other names, so both compatibility layers use this module.
Everything follows from the API's table in :mod:`namedmesh.layout.orders`, which has a row for each group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from namedmesh._errors import LayoutError
from namedmesh.compat import state
from namedmesh.compat.binding import Binding, Library, MeshRequest, make_layout
from namedmesh.compat.errors import ContractError
from namedmesh.compat.layers import REGIONS, describe_region
from namedmesh.compat.state import BindingContext
from namedmesh.layout import Layout
from namedmesh.layout.orders import LEGACY_APIS, GroupSpec, ParallelApi, shrink_tp
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.mesh.options import GroupOptions
from namedmesh.tensor_parallel.collectives import Group

_FIELDS: dict[str, Callable[[Any], Any] | None] = {
    "group": None,
    "rank": dist.get_rank,
    "world_size": dist.get_world_size,
    "ranks": dist.get_process_group_ranks,
}
"""The accessors of a group by the ends of their names: functions of it, None for itself."""


class ModelParallelLibrary(Library):
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
        self.api: ParallelApi = LEGACY_APIS[name]
        self.parameters = parameters
        self.before: Mapping[str, Callable[[], Any]] = before or {}
        module = sys.modules[initialize.__module__]
        # The variables and the initializer must exist before the base class looks for them.
        for spec in self.api.groups:
            vars(module).update({variable: None for variable in (spec.variable, spec.ranks) if variable})
        vars(module)[initialize.__name__] = initialize
        for name_here in filter(None, modules):
            vars(module)[name_here.rpartition(".")[2]] = module
            sys.modules[f"{module.__name__}.{name_here}"] = module
        self.name = name
        self.title: str = f"{name}'s model parallelism"
        self.initializer: str = initialize.__name__
        self.destroyer: str = initialize.__name__.replace("initialize", "destroy")
        super().__init__(module, dict.fromkeys(modules.values(), module.__name__))
        self.names: dict[str, Any] = {}
        for spec in self.api.groups:
            self._add_accessors(spec)
        self.names[self.initializer] = update_wrapper(partial(self.initialize, None), initialize)
        self.names[self.destroyer] = self.destroy
        for function in ("bind", "unbind", "current_mesh", "install", "uninstall"):
            self.names[function] = getattr(self, function)

    def find_variables(self, module: ModuleType) -> Mapping[str, Any]:
        """Return None for each variable of a module, by name."""
        variables = [variable for spec in self.api.groups for variable in (spec.variable, spec.ranks)]
        # A release of upstream may lack some of them.
        return {variable: None for variable in variables if variable in vars(module)}

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
        notes = shrink_tp(self.api, sizes, dist.get_world_size())
        ordered = {axis: sizes.get(axis, 1) for axis in self.api.axes}
        return MeshRequest(ordered, timeout=arguments.get("timeout"), options=options, notes=notes)

    def make_replacements(self, binding: Binding) -> dict[str, object]:
        """Return the functions that a module gets in place of its own, by name."""
        replacements = super().make_replacements(binding)
        # Upstream's function is right only if the ranks of a group are neighbors.
        for accessor, function in self.names.items():
            if accessor.endswith("_src_rank") and hasattr(binding.module, accessor):
                replacements[accessor] = function
        return replacements

    def make_all_groups(self, arguments: Mapping[str, Any]) -> None:
        """Make the groups and assign the variables of our module: the initializer of our fallback.

        Collective: every rank must call it with the same arguments.

        Args:
            arguments: all arguments of the initializer, by name.

        Raises:
            ContractError: there is no default group, the sizes do not divide the world size, or a
                variable has a value already.
        """
        state.check_default_group()
        request = self.read_request(arguments)
        try:
            layout = make_layout(request.sizes)
        except LayoutError as error:
            # Callers of upstream catch its AssertionError.
            raise ContractError(*error.problems) from None
        assigned = [variable for variable, value in self.ours.read().items() if value is not None]
        if assigned:
            raise ContractError(
                f"{self.title} is already initialized: {', '.join(assigned)} have values; "
                "call the function that destroys the groups first, or bind another mesh in "
                "addition with bind(mesh)"
            )
        self._assign_groups(self.ours, layout, arguments)

    def bind(self, mesh: NamedMesh) -> BindingContext:  # type: ignore[override]  # without options
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
        return super().bind(mesh)

    def make_filler(
        self, binding: Binding, mesh: NamedMesh, options: Mapping[str, Any]
    ) -> Callable[[], object]:
        """Return the function that assigns the groups of a mesh. An axis that it lacks has size 1."""
        state.check_axes(mesh.layout, self.name)
        return partial(self._assign_groups, binding, mesh.layout, options)

    def _assign_groups(self, binding: Binding, layout: Layout, arguments: Mapping[str, Any]) -> None:
        """Make the groups over the axes of a layout, and assign them and their ranks to variables."""
        for spec in self.api.groups:
            backend = arguments.get(self.parameters[spec.axes[0]][1])
            rank_sets = state.list_group_ranks(layout, spec.axes)
            group = state.make_groups(rank_sets, backend=backend, timeout=arguments.get("timeout"))
            values = {spec.variable: group, spec.ranks: dist.get_process_group_ranks(group)}
            for variable, value in values.items():
                if variable in binding.empty:
                    vars(binding.module)[variable] = value

    def has_groups(self, *axes: str) -> bool:
        """Return whether the variables of the groups over all given axes have a value."""
        for spec in self.api.groups:
            if spec.axes[0] in axes and getattr(self.active.module, spec.variable) is None:
                return False
        return True

    def get_tensor_group(self) -> Group:
        """Return the tensor-parallel group from its variable, that is of the current mesh."""
        return Group.of(self._get_group())

    def _add_accessors(self, spec: GroupSpec) -> None:
        """Add the functions of a group: accessors, and for the tensor-parallel group mappings."""
        start = f"get_{spec.name}_parallel"
        for field, read in _FIELDS.items():
            self._add(f"{start}_{field}", spec.variable, read)
        if spec.ranks:
            self._add(f"{start}_ranks", spec.ranks)
        if spec.axes == ("tp",):
            self._get_group = self.names[f"{start}_group"]
            self._add(f"{start}_src_rank", spec.variable, state.get_first_rank)
            for kind in REGIONS:
                self._add_region(f"{kind}_{spec.name}_parallel_region", kind)

    def _add(self, name: str, variable: str, read: Callable[[Any], Any] | None = None) -> None:
        """Add a function without arguments that reads a variable.

        Args:
            name: the name of the function.
            variable: the name of the variable.
            read: computes the result from the value of the variable; by default it is the value.
        """
        before = self.before.get(name)

        def access() -> Any:
            # The variable is read on each call, because legacy code may assign it.
            value = getattr(self.active.module, variable, None)
            if value is not None:
                return value if read is None else read(value)
            if before is not None:
                return before()
            raise ContractError(
                f"{variable} is None: {self.title} is not initialized; call "
                f"{self.initializer}(...), or namedmesh.compat.{self.name}.bind(mesh) "
                "with an existing mesh"
            )

        text = f"``{variable}``" if read is None else f"``{read.__name__}({variable})``"
        state.add_function(self.names, name, access, f"Return {text}.")

    def _add_region(self, name: str, kind: str) -> None:
        """Add a mapping of a tensor over the tensor-parallel group."""
        function, dims = REGIONS[kind]

        def region(input_: Tensor) -> Tensor:
            return function(input_, self.get_tensor_group(), *dims)

        state.add_function(self.names, name, region, describe_region(function))
