"""Model-parallel state in the style of fairscale and ezpz.

ezpz has the interface of fairscale with other names, so both compatibility layers use this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from namedmesh.agreement import agree_on
from namedmesh.compat.errors import ContractError
from namedmesh.compat.layers import scatter
from namedmesh.compat.state import (
    Bound,
    State,
    agree_before_creation,
    check_axes,
    check_default_group,
    get_or_create_group,
)
from namedmesh.errors import LayoutError
from namedmesh.init import make_mesh
from namedmesh.legacy import LEGACY_APIS, JobLayout, compute_layouts
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions
from namedmesh.tensor_parallel.collectives import (
    Group,
    copy_to_tp_region,
    gather,
    reduce_from_tp_region,
)

T = TypeVar("T")


def return_value(value: Any) -> Any:
    """Return the argument, as the ``read`` function of an accessor that returns the variable."""
    return value


def get_first_rank(group: Any) -> int:
    """Return the global rank of the first member of a group."""
    return dist.get_process_group_ranks(group)[0]


class ModelParallel:
    """The model-parallel state of one legacy API, in the variables of a module.

    Args:
        name: the name of the API in ``LEGACY_APIS``.
        initializer: the name of its function that makes a mesh, for messages.
        module: the compatibility layer. Its variables are created here.

    Attributes:
        state: the variables of the module, with separate values for each mesh.
    """

    def __init__(self, name: str, initializer: str, module: ModuleType) -> None:
        self.name = name
        self.initializer = initializer
        self.group_specs = LEGACY_APIS[name].groups
        tensor_group_variable = ""
        # The variables must exist before State, which looks for variables that are None.
        for spec in self.group_specs:
            vars(module)[spec.variable] = None
            if spec.ranks:
                vars(module)[spec.ranks] = None
            if spec.axes == ("tp",):
                tensor_group_variable = spec.variable
        self.state = State(f"{name}'s model parallelism", initializer, module)
        self._get_tensor_group = self.make_accessor(tensor_group_variable, return_value)

    def attach(self, module: ModuleType) -> None:
        """Use the variables of another module: our own, or the installed upstream's.

        Ends all bindings.
        """
        self.state.destroy()
        self.state.module = module

    def bind(self, mesh: NamedMesh) -> Bound:
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
        call = f"{self.name}.bind"
        # The first binding of a mesh makes missing groups; the values of a later one are known.
        if self.state.has_values(mesh):
            return self.state.bind(mesh)
        with agree_before_creation(mesh, call):
            check_axes(mesh.layout, self.name)
            values = self._collect_values(mesh)
        return self.state.bind_with_values(mesh, values)

    def initialize(
        self, sizes: Mapping[str, int], backends: Mapping[str, str | None], timeout: timedelta | None = None
    ) -> None:
        """Make a mesh over all ranks, and bind it.

        Collective: every rank must call it with the same arguments.

        Args:
            sizes: the sizes of tp, pp and cp. The size of dp follows from them.
            backends: the backend of the groups along each axis; None for the default group's
                backend.
            timeout: the timeout of the groups; by default the default group's timeout.
        """
        check_default_group()
        options: dict[str, GroupOptions] = {}
        for axis, backend in backends.items():
            if backend is not None:
                options[axis] = GroupOptions(backend=backend)
        with agree_on(f"{self.name}.{self.initializer}") as compare:
            # Upstream checks its arguments before it finds out that it is initialized already.
            job = self._compute_layouts(sizes)
            self._check_uninitialized()
            for note in job.notes:
                # The caller of the function that called this one.
                warnings.warn(note, stacklevel=3)
            mesh = make_mesh(compare, job.dense, {}, options, GroupOptions(timeout=timeout))
            values = self._collect_values(mesh)
        self.state.bind_with_values(mesh, values, owned=True)

    def has_values_for(self, *variables: str) -> bool:
        """Return whether none of the given variables is None."""
        return all(getattr(self.state.module, variable) is not None for variable in variables)

    def make_accessor(
        self, variable: str, read: Callable[[Any], T], default: T | None = None
    ) -> Callable[[], T]:
        """Make an accessor: a function without arguments that reads a variable.

        Args:
            variable: the name of the variable.
            read: computes the result of the function from the value of the variable.
            default: the result while the variable is None; without it, the function raises a
                ContractError.
        """

        def access() -> T:
            # The variable is read on each call, because legacy code may assign it.
            value = getattr(self.state.module, variable)
            if value is not None:
                return read(value)
            if default is not None:
                return default
            raise ContractError(
                f"{variable} is None: {self.name}'s model parallelism is not initialized; call "
                f"{self.initializer}(...), or namedmesh.compat.{self.name}.bind(mesh) with an existing mesh"
            )

        if read is return_value:
            access.__doc__ = f"Return ``{variable}``."
        else:
            access.__doc__ = f"Return ``{read.__name__}({variable})``."
        return access

    def get_tensor_group(self) -> Group:
        """Return the tensor-parallel group from the variables, that is of the current mesh."""
        return Group.of(self._get_tensor_group())

    # Region functions: each one is the backward of another one. They return new tensors, because
    # selective activation checkpointing may have kept the inputs.

    def copy_to_region(self, input_: Tensor) -> Tensor:
        """Forward: identity. Backward: all-reduce.

        Args:
            input_: a replicated tensor.
        """
        return copy_to_tp_region(input_, self.get_tensor_group())

    def reduce_from_region(self, input_: Tensor) -> Tensor:
        """Forward: all-reduce. Backward: identity.

        Args:
            input_: a partial tensor.
        """
        return reduce_from_tp_region(input_, self.get_tensor_group())

    def scatter_to_region(self, input_: Tensor) -> Tensor:
        """Forward: keep the local shard of the last dim. Backward: all-gather.

        Args:
            input_: a replicated tensor ``(..., n)``.

        Returns:
            The local shard ``(..., n / t)``, for t tensor-parallel ranks.

        Raises:
            ContractError: t does not divide n.
        """
        return scatter(input_, self.get_tensor_group(), -1)

    def gather_from_region(self, input_: Tensor) -> Tensor:
        """Forward: all-gather along the last dim. Backward: keep the local shard.

        Args:
            input_: a local shard ``(..., n / t)``, for t tensor-parallel ranks.

        Returns:
            The replicated tensor ``(..., n)``.
        """
        return gather(input_, self.get_tensor_group(), -1)

    def _compute_layouts(self, sizes: Mapping[str, int]) -> JobLayout:
        """Compute the layouts of a world from axis sizes; raise ContractError if they do not fit."""
        try:
            return compute_layouts(
                LEGACY_APIS[self.name], {"dp": -1, **sizes}, world_size=dist.get_world_size()
            )
        except LayoutError as error:
            # Callers of upstream catch its AssertionError.
            raise ContractError(*error.problems) from None

    def _check_uninitialized(self) -> None:
        """Raise a ContractError if a mesh exists or a variable was assigned by hand."""
        self.state.check_uninitialized()
        assigned = [variable for variable in self.state.names if self.has_values_for(variable)]
        if assigned:
            raise ContractError(
                f"{', '.join(assigned)} were assigned by hand; call the function that destroys "
                f"{self.name}'s groups first"
            )

    def _collect_values(self, mesh: NamedMesh) -> dict[str, Any]:
        """Return the values of the variables for a mesh: its groups, and their global ranks.

        Collective: every rank of the mesh must call it, as groups may have to be created.
        """
        values: dict[str, Any] = {}
        # An axis that the mesh does not have has a group of one rank.
        for spec in self.group_specs:
            group, ranks = get_or_create_group(mesh, spec.axes)
            values[spec.variable] = group
            if spec.ranks:
                values[spec.ranks] = ranks
        return values
