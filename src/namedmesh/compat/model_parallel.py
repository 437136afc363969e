"""What the dialects with one group for each of tp, pp, cp and dp share: fairscale's and ezpz's.

Which variable is over which axes is a table, :data:`namedmesh.dialects.DIALECTS`; one :class:`ModelParallel` fills the
variables, and its getters read them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from namedmesh.agreement import agreed
from namedmesh.compat import ContractError
from namedmesh.compat.layers import scatter
from namedmesh.compat.state import (
    Bound,
    State,
    agreed_groups,
    check_axes,
    group_over,
    require_default_group,
    require_open,
)
from namedmesh.dialects import DIALECTS, layouts_for
from namedmesh.errors import LayoutError
from namedmesh.groups import GroupOptions
from namedmesh.init import make_mesh
from namedmesh.mesh import NamedMesh
from namedmesh.tensor_parallel.collectives import Group, enter, gather, leave


def first_rank(group: Any) -> int:
    """Return the global rank of the first of a group."""
    return dist.get_process_group_ranks(group)[0]


class ModelParallel:
    """One dialect: the variables of its module, made here, which the function of a name initializes, and the mesh behind them."""

    def __init__(self, name: str, function: str, module: ModuleType) -> None:
        self.name, self.function, self.rows = name, function, DIALECTS[name].kinds
        names = [variable for row in self.rows for variable in (row.variable, row.ranks) if variable]
        vars(module).update(dict.fromkeys(names))
        self.state = State(f"{name}'s model parallelism", function, module)
        (tensor_group,) = (row.variable for row in self.rows if row.axes == ("tp",))
        self._tensor_group = self.getter(tensor_group)

    def answer_from(self, module: ModuleType) -> None:
        """Let the variables of a module answer from now on, namedmesh's own or the original's: the two change their values."""
        old, new = vars(self.state.module), vars(module)
        for name in self.state.names:
            new[name], old[name] = old[name], new.get(name)  # some are of later sources only
        self.state.module = module

    def bind(self, mesh: NamedMesh) -> Bound:
        """Answer from a mesh that exists; communicates the first time, and then every rank of the world calls it.

        Its axes are any of ``tp``, ``cp``, ``pp``, and ``dp`` or ``dp_replicate`` and ``dp_shard``, in any order. In
        ``with bind(mesh):`` the mesh is selected, and the binding ends with the block. Otherwise it lasts until the next
        one, ``unbind()``, or the mesh's end.

        Raises:
            LayoutError: the mesh has axes that the dialect has no group for.
            MeshError: what was given is no open mesh.
            AgreementError: the other ranks did not call this, or not with the same mesh.
        """
        call = f"{self.name}.bind"
        require_open(mesh, call)
        if self.state.is_bound(mesh):
            return self.state.bind(mesh)
        with agreed_groups(mesh, call):
            check_axes(mesh.layout, self.name)
            values = self._values(mesh)
        return self.state.take(mesh, values)

    def initialize(
        self, sizes: Mapping[str, int], backends: Mapping[str, str | None], timeout: timedelta | None = None
    ) -> None:
        """Make a mesh over the world, of sizes of tp, pp and cp, with a backend for each axis, and answer from it."""
        require_default_group()
        options = {axis: GroupOptions(backend=name) for axis, name in backends.items() if name is not None}
        with agreed(f"{self.name}.{self.function}") as compare:
            self.state.refuse_second()
            assigned = [name for name in self.state.names if self.are_there(name)]
            if assigned:
                raise ContractError(
                    f"{', '.join(assigned)} were assigned; destroy {self.name}'s groups first"
                )
            try:
                ranks = layouts_for(
                    DIALECTS[self.name], {"dp": -1, **sizes}, world_size=dist.get_world_size()
                )
            except LayoutError as error:
                raise ContractError(*error.problems) from None
            for note in ranks.notes:
                warnings.warn(note, stacklevel=3)
            mesh = make_mesh(compare, ranks.dense, {}, options, GroupOptions(timeout=timeout))
            values = self._values(mesh)
        self.state.take(mesh, values, owned=True)

    def are_there(self, *variables: str) -> bool:
        """Return whether variables have values."""
        return all(getattr(self.state.module, name) is not None for name in variables)

    def getter(
        self, variable: str, answer: Callable[[Any], Any] | None = None, before: int | None = None
    ) -> Callable[[], Any]:
        """Return a function that returns a variable, or an answer of it; without a value ``before``, or a ContractError."""

        def get() -> Any:
            value = getattr(self.state.module, variable)
            if value is not None:
                return value if answer is None else answer(value)
            if before is not None:
                return before
            raise ContractError(
                f"{variable} is None: {self.name}'s model parallelism is not initialized; call {self.function}(...), or "
                f"namedmesh.compat.{self.name}.bind(mesh) with a mesh that exists"
            )

        get.__doc__ = f"Return {variable}." if answer is None else f"Return {answer.__name__}({variable})."
        return get

    def group(self) -> Group:
        """Return the tensor-parallel ranks of this moment."""
        return Group.of(self._tensor_group())

    # The ways in and out of tensor-parallel regions, each with its partner as backward; results are new tensors.

    def copy(self, input_: Tensor) -> Tensor:
        """Hand in a tensor of any shape that every rank has; its gradient, a part on each rank, is summed."""
        return enter(input_, self.group())

    def reduce(self, input_: Tensor) -> Tensor:
        """Sum the ranks' parts, of any shape, on every rank; the gradient is handed through."""
        return leave(input_, self.group())

    def scatter(self, input_: Tensor) -> Tensor:
        """Keep this rank's ``(..., n / t)`` of an ``(..., n)`` that every rank has; a ContractError if t does not divide n."""
        return scatter(input_, self.group(), -1)

    def gather(self, input_: Tensor) -> Tensor:
        """Join the ranks' ``(..., n / t)`` to ``(..., n)``, on every rank; each gets its shard of the gradient."""
        return gather(input_, self.group(), -1)

    def _values(self, mesh: NamedMesh) -> dict[str, Any]:
        """Return the value of each variable: the groups of the mesh, and their ranks."""
        values: dict[str, Any] = {}
        for row in self.rows:
            values[row.variable], ranks = group_over(mesh, row.axes)
            if row.ranks:
                values[row.ranks] = ranks
        return values
