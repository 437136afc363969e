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
    "ROWS",
    "STATE",
    "VARIABLES",
    "State",
    "missing",
    "raise_missing",
    "warn_deprecated",
    "zero_or_raise",
]

ROWS = {row.slot: row for row in MEGATRON_GROUPS}
"""The rows of the table of groups, by the slot of :class:`State` that the group is in."""
_OVERRIDES = {"size": "WORLD_SIZE", "rank": "RANK"}

VARIABLES = {
    **variables_of(MEGATRON_GROUPS),
    **{
        f"_MPU_{ROWS[f'{base}_group'].name.upper()}_{word}": f"set_{base}_{answer}"
        for base in ("tp", "pp", "dp", "ep", "etp")
        for answer, word in _OVERRIDES.items()
    },
    "_GLOBAL_MEMORY_BUFFER": "memory_buffer",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "symmetric_buffer",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": "vpp_rank",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": "vpp_size",
    "_global_process_group_list": "group_list",
}
"""The original's variables, and the slot of :class:`State` that each of them is."""

# The groups whose size and rank the state keeps, and whose manual override takes precedence over them.
_NUMBERED = {
    **{base: base for base in ("tp", "pp", "dp", "ep", "etp")},
    **dict.fromkeys(("dp_gtp", "dp_cp", "dp_cp_gtp", "intra_dp_cp", "intra_dp_cp_gtp"), "dp"),
    **dict.fromkeys(
        ("gtp", "cp", "tp_cp", "egtp", "etp_ep", "edp", "edp_gtp", "intra_edp", "intra_edp_gtp"), ""
    ),
}
_LABELS = {
    **{row.gloo_slot: f"the {row.name.replace('_', ' ')} gloo group" for row in MEGATRON_GROUPS},
    **{row.slot: f"the {row.name.replace('_', ' ')} group" for row in MEGATRON_GROUPS},
    "group_list": "the list of groups",
    "memory_buffer": "the global memory buffer",
    "symmetric_buffer": "the global symmetric memory buffer",
}
_REMEDIES = {
    **{row.gloo_slot: "make the groups with create_gloo_process_groups=True" for row in MEGATRON_GROUPS},
    **dict.fromkeys(
        ("embedding_group", "position_embedding_group"),
        "this rank is in no such group: its stage holds no such embedding",
    ),
    "dp_cp_gather_group": "make the groups with create_all_gather_group=True",
    "hierarchical_cp_groups": "make the groups with hierarchical_context_parallel_sizes",
    "inter_edp_group": "make the groups with num_distributed_optimizer_instances above 1",
    "symmetric_buffer": "call _set_global_symmetric_memory_buffer() on every rank",
    "memory_buffer": "it was destroyed",
}


class State(LegacyState):
    """The answers of the dialect for one mesh; all None where there is none.

    Slots beside those of :data:`VARIABLES`: sizes and ranks such as ``tp_size`` and ``tp_rank``, and the flags
    ``initialized``, ``model_parallel`` and ``separate_gather``.
    """

    __slots__ = slots = (
        *VARIABLES.values(),
        *(f"{base}_{answer}" for base in _NUMBERED for answer in _OVERRIDES),
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
        """Compute flags, sizes and ranks from the groups; a manual override takes precedence."""
        self.initialized = self.dp_group is not None
        self.model_parallel = self.initialized and self.tp_group is not None and self.pp_group is not None
        self.separate_gather = self.dp_cp_gather_group is not None
        for base, override in _NUMBERED.items():
            group = self.lazy.get(f"{base}_group") or getattr(self, f"{base}_group")
            for answer in _OVERRIDES:
                value = getattr(self, f"set_{override}_{answer}") if override else None
                setattr(self, f"{base}_{answer}", ask_group(group, answer) if value is None else value)
        if self.etp_group is None and "etp_group" not in self.lazy:
            # Without expert groups the original answers with what was set for tp.
            for answer in _OVERRIDES:
                if getattr(self, f"etp_{answer}") is None:
                    setattr(self, f"etp_{answer}", getattr(self, f"set_tp_{answer}"))


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
