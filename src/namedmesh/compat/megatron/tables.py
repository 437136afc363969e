"""The variables and accessors of Megatron's ``parallel_state`` that follow from tables.

Each accessor is one row. :mod:`namedmesh.compat.megatron.parallel_state` adds the accessors with
flags, or with results of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.state import add_function
from namedmesh.layout.orders import MEGATRON_GROUPS

# By the name of an accessor, the variable whose first entry it returns.
_FIRST_RANKS = {
    "get_model_parallel_src_rank": "_MODEL_PARALLEL_GLOBAL_RANKS",
    "get_tensor_model_parallel_src_rank": "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "get_pipeline_model_parallel_first_rank": "_PIPELINE_GLOBAL_RANKS",
    "get_expert_model_parallel_src_rank": "_EXPERT_MODEL_PARALLEL_RANKS",
}

# By the name of two accessors without get_ and _world_size or _rank: the start of the variables that
# the set_ functions assign, and the group. Without a variable there is no such function.
_NUMBERS = {
    "tensor_model_parallel": ("_MPU_TENSOR_MODEL_PARALLEL", "_TENSOR_MODEL_PARALLEL_GROUP"),
    "pipeline_model_parallel": ("_MPU_PIPELINE_MODEL_PARALLEL", "_PIPELINE_MODEL_PARALLEL_GROUP"),
    "context_parallel": ("", "_CONTEXT_PARALLEL_GROUP"),
    "expert_model_parallel": ("_MPU_EXPERT_MODEL_PARALLEL", "_EXPERT_MODEL_PARALLEL_GROUP"),
    "expert_tensor_parallel": ("_MPU_EXPERT_TENSOR_PARALLEL", "_EXPERT_TENSOR_PARALLEL_GROUP"),
    "tensor_and_context_parallel": ("", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    "expert_tensor_and_model_parallel": ("", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    # The accessors of these two are not in a table.
    "virtual_pipeline_model_parallel": ("_VIRTUAL_PIPELINE_MODEL_PARALLEL", ""),
    "data_parallel": ("_MPU_DATA_PARALLEL", ""),
}

_ALWAYS_RAISE = {"_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP"}


def list_variables() -> dict[str, Any]:
    """Return the value of each variable at import, under upstream's name."""
    names = ["_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER"]
    for row in MEGATRON_GROUPS:
        # This rank's group; its global ranks, and a gloo group over the same ranks, if upstream has
        # them.
        names += filter(None, (row.variable, row.ranks, row.gloo))
    for assigned, _ in _NUMBERS.values():
        if assigned:
            # A size and a rank that were assigned with a set_ function.
            names += [f"{assigned}_WORLD_SIZE", f"{assigned}_RANK"]
    # The groups of this rank after None, which is the default group.
    names.append("_global_process_group_list")
    # The last ones are by the number of ranks.
    return dict.fromkeys(names) | {"_HYBRID_DP_CP_GROUPS": {}}


class AccessorTable:
    """The accessors of a module, made from the tables above.

    Legacy code may assign a variable, so accessors read it on each call.

    Args:
        module: the module with the variables.

    Attributes:
        functions: the accessors, by name.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.functions: dict[str, Callable[..., Any]] = {}
        for row in MEGATRON_GROUPS:
            if " " not in row.name:  # the accessors of the other rows have flags
                end = "groups" if row.members == "several" else "group"
                self._add_reader(f"get_{row.name}_{end}", row.variable)
        self._add_reader("get_context_parallel_global_ranks", "_CONTEXT_PARALLEL_GLOBAL_RANKS")
        for name, variable in _FIRST_RANKS.items():
            self._add_first_rank(name, variable)
        for kind, (assigned, variable) in _NUMBERS.items():
            for use in ("world_size", "rank"):
                if assigned:
                    self._add_setter(f"set_{kind}_{use}", use, f"{assigned}_{use.upper()}")
                if variable:
                    self._add_number(f"get_{kind}_{use}", use, variable, assigned)
        # Upstream has no such function.
        del self.functions["set_data_parallel_world_size"]

    def read(self, variable: str, check_initialized: bool = True) -> Any:
        """Return the value of a variable; if it is empty, raise a ContractError or return None.

        Args:
            variable: the name of the variable; one that does not exist is empty.
            check_initialized: whether to raise.
        """
        value = getattr(self.module, variable, None)
        if value:
            return value
        if not check_initialized:
            return None
        name = variable.strip("_").replace("_", " ").lower()
        raise ContractError(
            f"the {name} is not initialized; call initialize_model_parallel(...) with the option that "
            "makes it, or namedmesh.compat.megatron.bind(mesh)"
        )

    def read_number(self, use: str, variable: str, assigned: str = "") -> Any:
        """Return the size of a group, or this rank's index in it.

        Args:
            use: ``"world_size"`` or ``"rank"``.
            variable: the variable of the group.
            assigned: the start of the variable that the ``set_`` function assigns; empty without
                such a function.
        """
        value = getattr(self.module, f"{assigned}_{use.upper()}") if assigned else None
        if value is not None:
            return value
        if not getattr(self.module, variable, None):
            if variable == "_EXPERT_TENSOR_PARALLEL_GROUP":
                # As upstream: the number that was assigned for the dense layers, or None.
                return getattr(self.module, f"_MPU_TENSOR_MODEL_PARALLEL_{use.upper()}")
            # Without torch's default group, upstream raises for these two groups, and returns 0 for
            # others.
            if variable not in _ALWAYS_RAISE and not dist.is_initialized():
                return 0
        group = self.read(variable)
        return group.size() if use == "world_size" else group.rank()

    def _add(self, function: Callable[..., Any], name: str, text: str) -> None:
        """Add an accessor under a name, with a docstring."""
        function.__module__ = self.module.__name__
        add_function(self.functions, name, function, text)

    def _add_reader(self, name: str, variable: str) -> None:
        """Add the accessor that returns a variable."""

        def get(check_initialized: bool = True) -> Any:
            return self.read(variable, check_initialized)

        self._add(get, name, f"Return ``{variable}``; without a check, None if it is empty.")

    def _add_first_rank(self, name: str, variable: str) -> None:
        """Add the accessor that returns the first global rank of a group."""

        def get() -> int:
            ranks: list[int] = self.read(variable)
            return ranks[0]

        self._add(get, name, f"Return ``{variable}[0]``.")

    def _add_number(self, name: str, use: str, variable: str, assigned: str) -> None:
        """Add the accessor of the size of a group, or of this rank's index in it."""

        def get() -> Any:
            return self.read_number(use, variable, assigned)

        self._add(get, name, f"Return the {use.replace('_', ' ')} in ``{variable}``, or the assigned one.")

    def _add_setter(self, name: str, use: str, variable: str) -> None:
        """Add the function that assigns a size or a rank to a variable."""
        # Legacy code may pass the argument by name, and the two functions have different names for it.

        def set_size(world_size: int | None) -> None:
            setattr(self.module, variable, world_size)

        def set_rank(rank: int | None) -> None:
            setattr(self.module, variable, rank)

        text = f"Override the {use.replace('_', ' ')} that the accessor returns; None restores the group's."
        self._add(set_size if use == "world_size" else set_rank, name, text)
