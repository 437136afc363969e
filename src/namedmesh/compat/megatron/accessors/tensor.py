"""Tensor-, model- and context-parallel groups: sizes, ranks and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.megatron.state import STATE, late, missing, unknown_size

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_hierarchical_context_parallel_groups",
    "get_model_parallel_group",
    "get_model_parallel_src_rank",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
]

_MAXIMA = "the group for the reduction of FP8 maxima"

# Everywhere below: `check_initialized=False` returns None instead of raising, and ContractError, which is also
# an AssertionError, means that there are no groups yet.


def get_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that together hold one replica of the model: ``mesh.group("tp", "pp")``."""
    return STATE.mp_group or late("mp_group", "the model-parallel group", check_initialized=check_initialized)


def get_model_parallel_src_rank() -> int:
    """The first global rank of the model-parallel group."""
    try:
        return STATE.mp_ranks[0]
    except TypeError:  # None, for want of ranks
        raise missing("the model-parallel group") from None


def get_tensor_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each layer: ``mesh.group("tp")``."""
    return STATE.tp_group or late(
        "tp_group", "the tensor-parallel group", check_initialized=check_initialized
    )


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share each layer; what was set wins."""
    size = STATE.tp_size
    if size is None:
        raise missing("the tensor-parallel group")
    return size


def get_tensor_model_parallel_rank() -> int:
    """This rank's place among those that share each layer; what was set wins."""
    rank = STATE.tp_rank
    if rank is None:
        raise missing("the tensor-parallel group")
    return rank


def get_tensor_model_parallel_src_rank() -> int:
    """The first global rank of the tensor-parallel group."""
    try:
        return STATE.tp_ranks[0]
    except TypeError:  # None, for want of ranks
        raise missing("the tensor-parallel group") from None


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Let the tensor-parallel size be this, whatever the mesh says; None undoes it."""
    STATE.put("set_tp_size", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Let the tensor-parallel rank be this, whatever the mesh says; None undoes it."""
    STATE.put("set_tp_rank", rank)


def get_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each sequence: ``mesh.group("cp")``."""
    return STATE.cp_group or late(
        "cp_group", "the context-parallel group", check_initialized=check_initialized
    )


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """The global ranks of the context-parallel group, ascending."""
    return STATE.cp_ranks or late(
        "cp_ranks", "the context-parallel group", check_initialized=check_initialized
    )


def get_context_parallel_world_size() -> int:
    """How many ranks share each sequence; 0 without ``torch.distributed``."""
    size = STATE.cp_size
    return unknown_size("the context-parallel group") if size is None else size


def get_context_parallel_rank() -> int:
    """This rank's place among those that share each sequence; 0 without ``torch.distributed``."""
    rank = STATE.cp_rank
    return unknown_size("the context-parallel group") if rank is None else rank


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[dist.ProcessGroup]:
    """The groups of the levels of the context-parallel group, innermost first."""
    return STATE.cp_levels or late(
        "cp_levels",
        "the list of hierarchical context-parallel groups",
        "give hierarchical_context_parallel_sizes when the groups are made",
        check_initialized=check_initialized,
    )


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks of tp and cp together: ``mesh.group("tp", "cp")``."""
    return STATE.tp_cp_group or late(
        "tp_cp_group", "the tensor- and context-parallel group", check_initialized=check_initialized
    )


def get_tensor_and_context_parallel_world_size() -> int:
    """The number of ranks of tp and cp together; 0 without ``torch.distributed``."""
    size = STATE.tp_cp_size
    return unknown_size("the tensor- and context-parallel group") if size is None else size


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place in tp and cp together; 0 without ``torch.distributed``."""
    rank = STATE.tp_cp_rank
    return unknown_size("the tensor- and context-parallel group") if rank is None else rank


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> dist.ProcessGroup:
    """The ranks of tp and dp together, and of cp if asked: every rank of one pipeline stage."""
    return (STATE.tp_dp_cp_group if with_context_parallel else STATE.tp_dp_group) or late(
        "tp_dp_cp_group" if with_context_parallel else "tp_dp_group",
        "the tensor- and data-parallel group",
        check_initialized=check_initialized,
    )


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> dist.ProcessGroup:
    """The ranks over which FP8 scaling takes its maximum: tp, with dp unless told otherwise, with cp if asked."""
    if with_context_parallel:
        if tp_only_amax_red:
            return STATE.tp_cp_group or late("tp_cp_group", _MAXIMA)
        return STATE.tp_dp_cp_group or late("tp_dp_cp_group", _MAXIMA)
    if tp_only_amax_red:
        return STATE.tp_group or late("tp_group", _MAXIMA)
    return STATE.tp_dp_group or late("tp_dp_group", _MAXIMA)
