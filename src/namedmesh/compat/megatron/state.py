"""What the accessors answer from: one object, filled from one mesh at a time.

Legacy code asks these things several times in every layer of every step, so each answer stands ready in a slot:
an accessor reads it and returns. Third-party code also reads and assigns the variables that the original keeps
them in; :data:`VARIABLES` says which slot each of these is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.mesh import NamedMesh

__all__ = ["STATE", "VARIABLES", "State", "late", "missing", "unknown_size"]

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
    "mesh",
    "made",
    "owned",
    "later",
)


class State:
    """Every answer of the dialect, for one mesh; all None where there is none.

    Attributes other than the slots of :data:`VARIABLES`: ``tp_size``, ``tp_rank``, ``initialised`` and so on, which
    follow from groups and setters; ``mesh``, the mesh that the answers are of; ``made``, what they were before anybody
    patched them; ``owned``, whether the dialect made the mesh and therefore closes it; ``later``, the groups that
    are made when they are first asked for.
    """

    __slots__ = _SLOTS

    if TYPE_CHECKING:  # the slots
        made: dict[str, Any]
        later: dict[str, Promise]
        mesh: Any
        owned: Any

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every answer, and what was set or patched."""
        for slot in _SLOTS:
            setattr(self, slot, {} if slot in {"made", "later"} else None)
        self._follow()

    def fill(self, mesh: NamedMesh, answers: Mapping[str, Any], *, owned: bool) -> None:
        """Take the answers of a mesh; what was set before by hand stays, and wins."""
        self.mesh, self.owned = mesh, owned
        self.later = {slot: value for slot, value in answers.items() if isinstance(value, Promise)}
        self.made = {slot: value for slot, value in answers.items() if slot not in self.later}
        for slot in answers:
            setattr(self, slot, self.made.get(slot))
        self._follow()

    def read(self, slot: str) -> Any:
        """The value of a slot; a group that is made when it is first asked for is made now."""
        value = getattr(self, slot)
        if value is None and slot in self.later:
            value = self.later.pop(slot).group()
            self.made[slot] = value
            self.put(slot, value)
            if value not in self.group_list:
                self.group_list.append(value)
        return value

    def read_all(self) -> None:
        """Make every group that nobody has asked for yet."""
        for slot in list(self.later):
            self.read(slot)

    def put(self, slot: str, value: Any) -> None:
        """Patch one of the variables; sizes and ranks follow."""
        if slot in self.later:
            self.read(slot)  # so that the patch can be undone, and None is not taken for a promise
        setattr(self, slot, value)
        self._follow()

    def restore(self, slot: str) -> None:
        """Undo a patch: back to what the mesh says."""
        self.put(slot, self.made.get(slot))

    def saved(self) -> tuple[Any, ...]:
        """Everything, to be put back with :meth:`load`."""
        return tuple(getattr(self, slot) for slot in _SLOTS)

    def load(self, saved: tuple[Any, ...]) -> None:
        """Put back what :meth:`saved` returned."""
        for slot, value in zip(_SLOTS, saved, strict=True):
            setattr(self, slot, value)

    def _follow(self) -> None:
        """Work out again what follows from groups and setters."""
        self.initialised = self.dp_group is not None
        self.model_parallel = self.initialised and self.tp_group is not None and self.pp_group is not None
        self.separate_gather = self.dp_cp_gather_group is not None
        for name, setter in _ANSWERED.items():
            group = self.later.get(f"{name}_group") or getattr(self, f"{name}_group")
            for answer in ("size", "rank"):
                value = getattr(self, f"set_{setter}_{answer}") if setter else None
                setattr(self, f"{name}_{answer}", _ask(group, answer) if value is None else value)
        if (
            self.etp_group is None and "etp_group" not in self.later
        ):  # the original asks what was set for tp where there are no expert groups
            for answer in ("size", "rank"):
                if getattr(self, f"etp_{answer}") is None:
                    setattr(self, f"etp_{answer}", getattr(self, f"set_tp_{answer}"))


def _ask(group: Any, answer: str) -> int | None:
    """The size or rank of a group; nothing for a stand-in that somebody patched in and that cannot say."""
    ask = getattr(group, answer, None)
    return None if ask is None else ask()


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
    value = STATE.read(slot)
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


def unknown_size(what: str) -> int:
    """The size or rank of a group that is not there: 0 without torch.distributed, as the original says."""
    if dist.is_available() and dist.is_initialized():
        raise missing(what)
    return 0
