"""The mesh that Megatron's variables are filled from, and the errors of those that are empty."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from namedmesh.compat.binding import Binding
from namedmesh.compat.errors import ContractError
from namedmesh.dialects import MEGATRON_GROUPS

__all__ = ["BINDING", "ROWS", "missing", "warn_deprecated", "zero_or_raise"]

ROWS = {row.name: row for row in MEGATRON_GROUPS}
"""The rows of the table of groups, by name."""

BINDING = Binding("Megatron's parallel state", "initialize_model_parallel", "namedmesh.compat.megatron.bind")
"""The variables of ``parallel_state``, and the mesh that they show."""

_NO_EMBEDDING = "this rank is in no such group: its stage holds no such embedding"
_REMEDIES = {
    "_EMBEDDING_GROUP": _NO_EMBEDDING,
    "_POSITION_EMBEDDING_GROUP": _NO_EMBEDDING,
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": "make the groups with create_all_gather_group=True",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "make the groups with hierarchical_context_parallel_sizes",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "make the groups with num_distributed_optimizer_instances above 1",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "call _set_global_symmetric_memory_buffer() on every rank",
    "_GLOBAL_MEMORY_BUFFER": "it was destroyed",
}


def missing(variable: str, check_initialized: bool = True) -> Any:
    """Raise the error of an accessor whose variable is empty; its text has the original's "is not initialized".

    Where the accessor is not to check, return None.
    """
    if not check_initialized:
        return None
    what = variable.strip("_").replace("_", " ").lower()
    mesh = BINDING.shown
    if mesh is None or not BINDING.is_bound(mesh):
        raise ContractError(
            f"the {what} is not initialized; call initialize_model_parallel(...), or "
            "namedmesh.compat.megatron.bind(mesh) with a mesh that exists (once, on every rank)"
        )
    remedy = _REMEDIES.get(variable, "it was set to None")
    if variable.endswith("_GLOO"):
        remedy = "make the groups with create_gloo_process_groups=True"
    raise ContractError(f"the {what} is not initialized: {remedy}")


def zero_or_raise(variable: str) -> int:
    """Return 0, the original's size and rank of a group without ``torch.distributed``; raise if that is initialized."""
    if dist.is_available() and dist.is_initialized():
        missing(variable)
    return 0


def warn_deprecated(text: str) -> None:
    """Warn of a deprecated accessor, except in code that is compiled, where a warning would break the graph."""
    if not torch.compiler.is_compiling():
        warnings.warn(text, DeprecationWarning, stacklevel=3)
