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

ROWS = {row.slot: row for row in MEGATRON_GROUPS}
"""The rows of the table of groups, by the slot of :class:`State` that the group is in."""
_BASES = [row.slot.removesuffix("_group") for row in MEGATRON_GROUPS if row.slot.endswith("_group")]

VARIABLES = {
    **variables_of(MEGATRON_GROUPS),
    **{
        f"_MPU_{ROWS[f'{base}_group'].name.upper()}_{word}": f"set_{base}_{answer}"
        for base in ("tp", "pp", "dp", "ep", "etp")
        for answer, word in (("size", "WORLD_SIZE"), ("rank", "RANK"))
    },
    "_GLOBAL_MEMORY_BUFFER": "memory_buffer",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "symmetric_buffer",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": "vpp_rank",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": "vpp_size",
    "_global_process_group_list": "group_list",
}
"""The original's variables, and the slot of :class:`State` that each of them is."""

_OTHER_LABELS = {
    "group_list": "the list of groups",
    "memory_buffer": "the global memory buffer",
    "symmetric_buffer": "the global symmetric memory buffer",
}
_REMEDIES = {
    "embedding_group": "this rank is in no such group: its stage holds no such embedding",
    "position_embedding_group": "this rank is in no such group: its stage holds no such embedding",
    "dp_cp_gather_group": "make the groups with create_all_gather_group=True",
    "hierarchical_cp_groups": "make the groups with hierarchical_context_parallel_sizes",
    "inter_edp_group": "make the groups with num_distributed_optimizer_instances above 1",
    "symmetric_buffer": "call _set_global_symmetric_memory_buffer() on every rank",
    "memory_buffer": "it was destroyed",
}


class State(LegacyState):
    """The answers of the dialect for one mesh; all None where there is none.

    Slots beside those of :data:`VARIABLES`: the size and rank of each group, such as ``tp_size`` and ``tp_rank``, and
    the flags ``initialized``, ``model_parallel`` and ``separate_gather``.
    """

    __slots__ = slots = (
        *VARIABLES.values(),
        *(f"{base}_{answer}" for base in _BASES for answer in ("size", "rank")),
        "initialized",
        "model_parallel",
        "separate_gather",
    )

    if TYPE_CHECKING:  # the slots

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def require(self, slot: str, check_initialized: bool = True) -> Any:
        """Return the value of a slot that an accessor found empty.

        Args:
            slot: the slot.
            check_initialized: raise ContractError instead of returning None.
        """
        value = getattr(self, slot)
        if value is None and check_initialized:
            raise_missing(slot)
        return value

    def update(self) -> None:
        """Compute flags, sizes and ranks from the groups; a manual override takes precedence."""
        self.initialized = self.dp_group is not None
        self.model_parallel = self.initialized and self.tp_group is not None and self.pp_group is not None
        self.separate_gather = self.dp_cp_gather_group is not None
        for base in _BASES:
            group = getattr(self, f"{base}_group")
            override = "dp" if base.startswith(("dp_", "intra_dp_")) else base
            for answer in ("size", "rank"):
                value = getattr(self, f"set_{override}_{answer}", None)
                if value is None:
                    value = ask_group(group, answer)
                if value is None and base == "etp" and group is None:  # as the original without expert groups
                    value = getattr(self, f"set_tp_{answer}")
                setattr(self, f"{base}_{answer}", value)


STATE = State()
"""The answers of the mesh that the dialect is bound to at this moment."""


def raise_missing(slot: str) -> NoReturn:
    """Raise the error of an accessor whose slot is empty; its text has the original's "is not initialized"."""
    row, gloo = ROWS.get(slot.replace("_gloo", "_group")), slot.endswith("_gloo")
    what = (
        _OTHER_LABELS.get(slot) if row is None else f"the {row.name.replace('_', ' ')} {'gloo ' * gloo}group"
    )
    if STATE.mesh is None:
        raise ContractError(
            f"{what} is not initialized; call initialize_model_parallel(...), or "
            "namedmesh.compat.megatron.bind(mesh) with a mesh that exists (once, on every rank)"
        )
    remedy = "make the groups with create_gloo_process_groups=True" if gloo else "it was set to None"
    raise ContractError(f"{what} is not initialized: {_REMEDIES.get(slot, remedy)}")


def zero_or_raise(slot: str) -> int:
    """Return 0, the original's size and rank of a group without ``torch.distributed``; raise if that is initialized."""
    if dist.is_available() and dist.is_initialized():
        raise_missing(slot)
    return 0


def warn_deprecated(text: str) -> None:
    """Warn of a deprecated accessor, except in code that is compiled, where a warning would break the graph."""
    if not torch.compiler.is_compiling():
        warnings.warn(text, DeprecationWarning, stacklevel=3)
