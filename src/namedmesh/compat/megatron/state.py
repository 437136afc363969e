"""What Megatron's accessors answer from: one object, filled from one mesh at a time.

:data:`VARIABLES` names the slot of each of the original's module-level variables.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from namedmesh.compat.binding import LegacyState, ask_group
from namedmesh.compat.errors import ContractError
from namedmesh.dialects import MEGATRON_GROUPS, variables_of

__all__ = [
    "STATE",
    "VARIABLES",
    "State",
    "missing",
    "raise_missing",
    "warn_deprecated",
    "zero_or_raise",
]

VARIABLES = {
    **variables_of(MEGATRON_GROUPS),
    "_GLOBAL_MEMORY_BUFFER": "memory_buffer",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "symmetric_buffer",
    "_MPU_DATA_PARALLEL_RANK": "set_dp_rank",
    "_MPU_DATA_PARALLEL_WORLD_SIZE": "set_dp_size",
    "_MPU_EXPERT_MODEL_PARALLEL_RANK": "set_ep_rank",
    "_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE": "set_ep_size",
    "_MPU_EXPERT_TENSOR_PARALLEL_RANK": "set_etp_rank",
    "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE": "set_etp_size",
    "_MPU_PIPELINE_MODEL_PARALLEL_RANK": "set_pp_rank",
    "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": "set_pp_size",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK": "set_tp_rank",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": "set_tp_size",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": "vpp_rank",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": "vpp_size",
    "_global_process_group_list": "group_list",
}
"""The original's variables, and the slot of :class:`State` that each of them is."""

_COMPUTED = (
    "tp",
    "pp",
    "cp",
    "tp_cp",
    "dp",
    "dp_cp",
    "intra_dp_cp",
    "ep",
    "etp",
    "etp_ep",
    "edp",
    "intra_edp",
)
_LABELS = {row.slot: f"the {row.name.replace('_', ' ')} group" for row in MEGATRON_GROUPS} | {
    row.gloo_slot: f"the {row.name.replace('_', ' ')} gloo group" for row in MEGATRON_GROUPS if row.gloo
}
_LABELS |= {
    "group_list": "the list of groups",
    "memory_buffer": "the global memory buffer",
    "symmetric_buffer": "the global symmetric memory buffer",
}
_NO_EMBEDDING = "this rank is in no such group: its stage holds no such embedding"
_REMEDIES = {
    "dp_cp_gather_group": "make the groups with create_all_gather_group=True",
    "embedding_group": _NO_EMBEDDING,
    "hierarchical_cp_groups": "make the groups with hierarchical_context_parallel_sizes",
    "inter_edp_group": "make the groups with num_distributed_optimizer_instances above 1",
    "position_embedding_group": _NO_EMBEDDING,
    "symmetric_buffer": "call _set_global_symmetric_memory_buffer() on every rank",
    "memory_buffer": "it was destroyed",
    **{
        row.gloo_slot: "make the groups with create_gloo_process_groups=True"
        for row in MEGATRON_GROUPS
        if row.gloo
    },
}


class State(LegacyState):
    """The answers of the dialect for one mesh; all None where there is none.

    Slots beside those of :data:`VARIABLES`: sizes and ranks such as ``tp_size`` and ``tp_rank``, and the flags
    ``initialized``, ``model_parallel`` and ``separate_gather``.
    """

    __slots__ = slots = (
        *VARIABLES.values(),
        *(f"{name}_{answer}" for name in _COMPUTED for answer in ("size", "rank")),
        "initialized",
        "model_parallel",
        "separate_gather",
    )

    if TYPE_CHECKING:  # the slots

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def read(self, slot: str) -> Any:
        """Return the value of a slot; a group that is created now is added to the list of groups, as in the original."""
        was_lazy = slot in self.lazy
        value = super().read(slot)
        if was_lazy and value not in self.group_list:
            self.group_list.append(value)
        return value

    def get_or_create(self, slot: str, check_initialized: bool = True) -> Any:
        """Return the value of a slot that an accessor found empty: a group created now, or None.

        Args:
            slot: the slot.
            check_initialized: raise instead of returning None.

        Raises:
            ContractError: there is no such group.
        """
        compiling = torch.compiler.is_compiling()
        value = self.read_constant(slot, self.version) if compiling else self.read(slot)
        if value is None and check_initialized:
            raise_missing(slot)
        return value

    def update(self) -> None:
        """Compute flags, sizes and ranks from the groups; what a setter set takes precedence."""
        self.initialized = self.dp_group is not None
        self.model_parallel = self.initialized and self.tp_group is not None and self.pp_group is not None
        self.separate_gather = self.dp_cp_gather_group is not None
        self.tp_size, self.tp_rank = self._size_and_rank("tp_group", self.set_tp_size, self.set_tp_rank)
        self.pp_size, self.pp_rank = self._size_and_rank("pp_group", self.set_pp_size, self.set_pp_rank)
        self.cp_size, self.cp_rank = self._size_and_rank("cp_group")
        self.tp_cp_size, self.tp_cp_rank = self._size_and_rank("tp_cp_group")
        dp_set = (self.set_dp_size, self.set_dp_rank)
        self.dp_size, self.dp_rank = self._size_and_rank("dp_group", *dp_set)
        self.dp_cp_size, self.dp_cp_rank = self._size_and_rank("dp_cp_group", *dp_set)
        self.intra_dp_cp_size, self.intra_dp_cp_rank = self._size_and_rank("intra_dp_cp_group", *dp_set)
        self.ep_size, self.ep_rank = self._size_and_rank("ep_group", self.set_ep_size, self.set_ep_rank)
        self.etp_size, self.etp_rank = self._size_and_rank("etp_group", self.set_etp_size, self.set_etp_rank)
        if self.etp_group is None and "etp_group" not in self.lazy:
            # Without expert groups the original answers with what was set for tp.
            self.etp_size = self.set_tp_size if self.etp_size is None else self.etp_size
            self.etp_rank = self.set_tp_rank if self.etp_rank is None else self.etp_rank
        self.etp_ep_size, self.etp_ep_rank = self._size_and_rank("etp_ep_group")
        self.edp_size, self.edp_rank = self._size_and_rank("edp_group")
        self.intra_edp_size, self.intra_edp_rank = self._size_and_rank("intra_edp_group")

    def _size_and_rank(
        self, slot: str, set_size: int | None = None, set_rank: int | None = None
    ) -> tuple[Any, Any]:
        group = self.lazy.get(slot) or getattr(self, slot)
        return (
            ask_group(group, "size") if set_size is None else set_size,
            ask_group(group, "rank") if set_rank is None else set_rank,
        )


STATE = State()
"""The answers of the mesh that the dialect is bound to at this moment."""


def missing(slot: str) -> ContractError:
    """Return the error of an accessor whose slot is empty; its text has the original's "is not initialized"."""
    what = _LABELS[slot]
    if STATE.mesh is not None:
        return ContractError(f"{what} is not initialized: {_REMEDIES.get(slot, 'it was set to None')}")
    return ContractError(
        f"{what} is not initialized; call initialize_model_parallel(...), or "
        "namedmesh.compat.megatron.bind(mesh) with a mesh that exists (once, on every rank)"
    )


def raise_missing(slot: str) -> NoReturn:
    """Raise the error of an accessor whose slot is empty."""
    raise missing(slot)


def zero_or_raise(slot: str) -> int:
    """Return the size or rank of a group that is not there: 0 without torch.distributed, as the original does.

    Raises:
        ContractError: ``torch.distributed`` is initialized.
    """
    if dist.is_available() and dist.is_initialized():
        raise_missing(slot)
    return 0


def warn_deprecated(text: str) -> None:
    """Warn of a deprecated accessor, except in code that is compiled, where a warning would break the graph."""
    if not torch.compiler.is_compiling():
        warnings.warn(text, DeprecationWarning, stacklevel=3)
