"""What the accessors answer from: one object, filled from one mesh at a time.

An accessor reads a slot and returns. :data:`VARIABLES` says which slot each of the original's variables is.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.state import LegacyState, answer_of

__all__ = ["STATE", "VARIABLES", "State", "late", "missing", "unknown_size", "warn_deprecated"]

VARIABLES = {
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp_ranks",
    "_CONTEXT_PARALLEL_GROUP": "cp_group",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp_ranks",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp_ranks",
    "_DATA_PARALLEL_GROUP": "dp_group",
    "_DATA_PARALLEL_GROUP_GLOO": "dp_gloo",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp_group",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_gather_group",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp_cp_gloo",
    "_EMBEDDING_GLOBAL_RANKS": "embedding_ranks",
    "_EMBEDDING_GROUP": "embedding_group",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp_group",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "edp_gloo",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep_group",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep_ranks",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp_ep_group",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp_group",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "etp_group",
    "_GLOBAL_MEMORY_BUFFER": "memory_buffer",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "symmetric_buffer",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "cp_levels",
    "_HYBRID_DP_CP_GROUPS": "hybrid_groups",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_edp_group",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer_group",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp_group",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "intra_dp_cp_gloo",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_edp_group",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": "intra_edp_gloo",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp_ranks",
    "_MODEL_PARALLEL_GROUP": "mp_group",
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
    "_PIPELINE_GLOBAL_RANKS": "pp_ranks",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp_group",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "position_embedding_ranks",
    "_POSITION_EMBEDDING_GROUP": "position_embedding_group",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp_group",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_group",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp_group",
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp_ranks",
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp_group",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": "vpp_rank",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": "vpp_size",
    "_global_process_group_list": "group_list",
}
"""The original's variables, and the slot of :class:`State` that each of them is."""

# The groups whose size and rank are asked for, and whose setters win over them.
_ANSWERED = {
    "tp": "tp",
    "pp": "pp",
    "cp": None,
    "tp_cp": None,
    "dp": "dp",
    "dp_cp": "dp",
    "intra_dp_cp": "dp",
    "ep": "ep",
    "etp": "etp",
    "etp_ep": None,
    "edp": None,
    "intra_edp": None,
}
_SLOTS = (
    *VARIABLES.values(),
    *(f"{name}_{answer}" for name in _ANSWERED for answer in ("size", "rank")),
    "initialised",
    "model_parallel",
    "separate_gather",
)


class State(LegacyState):
    """Every answer of the dialect, for one mesh; all None where there is none.

    Slots other than those of :data:`VARIABLES`: ``tp_size``, ``tp_rank``, ``initialised`` and so on, which follow
    from groups and setters.
    """

    __slots__ = slots = _SLOTS

    if TYPE_CHECKING:  # the slots

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def read(self, slot: str) -> Any:
        """The value of a slot; a group that is made now is noted in the list of groups, as the original does."""
        late = slot in self.later
        value = super().read(slot)
        if late and value not in self.group_list:
            self.group_list.append(value)
        return value

    def follow(self) -> None:
        """Work out again what follows from groups and setters."""
        self.initialised = self.dp_group is not None
        self.model_parallel = self.initialised and self.tp_group is not None and self.pp_group is not None
        self.separate_gather = self.dp_cp_gather_group is not None
        for name, setter in _ANSWERED.items():
            group = self.later.get(f"{name}_group") or getattr(self, f"{name}_group")
            for answer in ("size", "rank"):
                value = getattr(self, f"set_{setter}_{answer}") if setter else None
                setattr(self, f"{name}_{answer}", answer_of(group, answer) if value is None else value)
        if (
            self.etp_group is None and "etp_group" not in self.later
        ):  # the original asks what was set for tp where there are no expert groups
            for answer in ("size", "rank"):
                if getattr(self, f"etp_{answer}") is None:
                    setattr(self, f"etp_{answer}", getattr(self, f"set_tp_{answer}"))


STATE = State()
"""The answers of the mesh that the dialect is bound to at this moment."""


def late(slot: str, what: str, remedy: str = "", *, check_initialized: bool = True) -> Any:
    """What an accessor hands out whose slot is empty: a group made now, or None if that will do.

    Args:
        slot: the slot.
        what: what was asked for, in words.
        remedy: as for :func:`missing`.
        check_initialized: raise where there is nothing to hand out.

    Raises:
        ContractError: there is nothing to hand out.
    """
    compiling = torch.compiler.is_compiling()
    value = STATE.read_constant(slot, STATE.version) if compiling else STATE.read(slot)
    if value is None and check_initialized:
        raise missing(what, remedy)
    return value


def missing(what: str, remedy: str = "") -> ContractError:
    """The error of an accessor that has nothing to hand out.

    Args:
        what: what was asked for.
        remedy: what to do in a state that is initialised, but does not have it.
    """
    if STATE.mesh is not None:
        return ContractError(f"{what} is not there: {remedy or 'it was set to None'}")
    return ContractError(
        f"{what} is not there: Megatron's parallel state is not initialised; call initialize_model_parallel(...), "
        "or namedmesh.compat.megatron.bind(mesh) with a mesh that exists (once, on every rank)"
    )


def warn_deprecated(text: str) -> None:
    """Warn of a deprecated accessor, where the compiler is not looking: a warning would break the graph."""
    if not torch.compiler.is_compiling():
        warnings.warn(text, DeprecationWarning, stacklevel=3)


def unknown_size(what: str) -> int:
    """The size or rank of a group that is not there: 0 without torch.distributed, as the original says."""
    if dist.is_available() and dist.is_initialized():
        raise missing(what)
    return 0
