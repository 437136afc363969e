"""Data-parallel groups, with and without the context-parallel ranks, whole or in parts, on gloo too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError, ContractKeyError
from namedmesh.compat.megatron.state import STATE, late, missing, unknown_size

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_group_gloo",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_hybrid_data_context_parallel_groups",
    "has_separate_all_gather_group",
    "set_data_parallel_rank",
]

_REPLICAS = "the data-parallel group"
_TWIN = "the gloo twin of the data-parallel group"
_GLOO = "make the groups with create_gloo_process_groups=True"
_GATHER = "make the groups with create_all_gather_group=True"


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> dist.ProcessGroup:
    """The replicas of this rank's parameters: ``mesh.group("dp")``.

    Args:
        with_context_parallel: together with the ranks that share a sequence: ``mesh.group("dp", "cp")``.
        partial_data_parallel: only those of this rank's optimizer instance; they include cp.
        independent_all_gather: the second communicator over the same ranks, for all-gathers; it includes cp.

    Raises:
        ContractError: there are no groups yet, not this one, or a part was asked for without cp.
    """
    if not with_context_parallel:
        group = STATE.dp_group or late("dp_group", _REPLICAS)
        if partial_data_parallel:
            raise _without_context()
        return group
    if partial_data_parallel:
        return STATE.intra_dp_cp_group or late("intra_dp_cp_group", _REPLICAS)
    if independent_all_gather:
        return STATE.dp_cp_gather_group or late("dp_cp_gather_group", _REPLICAS, _GATHER)
    return STATE.dp_cp_group or late("dp_cp_group", _REPLICAS)


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> dist.ProcessGroup:
    """The gloo twin of :func:`get_data_parallel_group`, for tensors on the CPU.

    Args:
        with_context_parallel: together with the ranks that share a sequence.
        partial_data_parallel: only those of this rank's optimizer instance; they include cp.

    Raises:
        ContractError: there are no twins, or a part was asked for without cp.
    """
    if not with_context_parallel:
        group = STATE.dp_gloo or late("dp_gloo", _TWIN, _GLOO)
        if partial_data_parallel:
            raise _without_context()
        return group
    if partial_data_parallel:
        return STATE.intra_dp_cp_gloo or late("intra_dp_cp_gloo", _TWIN, _GLOO)
    return STATE.dp_cp_gloo or late("dp_cp_gloo", _TWIN, _GLOO)


def _without_context() -> ContractError:
    return ContractError(
        "partial_data_parallel is True without with_context_parallel; a part for the optimizer includes the "
        "context-parallel ranks, so say with_context_parallel=True too"
    )


def has_separate_all_gather_group() -> bool:
    """Whether there is a second communicator over the data- and context-parallel ranks."""
    return STATE.separate_gather


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """How many replicas there are, as for the group; what was set wins; 0 without ``torch.distributed``."""
    if not with_context_parallel and not partial_data_parallel:
        size = STATE.dp_size
    elif with_context_parallel:
        size = STATE.intra_dp_cp_size if partial_data_parallel else STATE.dp_cp_size
    else:
        size = STATE.set_dp_size
    if size is not None:
        return size
    if partial_data_parallel and not with_context_parallel:
        get_data_parallel_group(partial_data_parallel=True)  # raises, and says why
    return unknown_size(_REPLICAS)


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's place among the replicas, as for the group; what was set wins; 0 without ``torch.distributed``."""
    if not with_context_parallel and not partial_data_parallel:
        rank = STATE.dp_rank
    elif with_context_parallel:
        rank = STATE.intra_dp_cp_rank if partial_data_parallel else STATE.dp_cp_rank
    else:
        rank = STATE.set_dp_rank
    if rank is not None:
        return rank
    if partial_data_parallel and not with_context_parallel:
        get_data_parallel_group(partial_data_parallel=True)  # raises, and says why
    return unknown_size(_REPLICAS)


def set_data_parallel_rank(rank: int | None) -> None:
    """Let the data-parallel rank be this, whatever the mesh says; None undoes it."""
    STATE.put("set_dp_rank", rank)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The first global rank of the data-parallel group, with the context-parallel ranks if asked."""
    try:
        return STATE.dp_cp_ranks[0] if with_context_parallel else STATE.dp_ranks[0]
    except TypeError:  # None, for want of ranks
        raise missing(_REPLICAS) from None


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> dist.ProcessGroup:
    """A group of ``group_size`` neighbours among the data- and context-parallel ranks.

    Args:
        check_initialized: raise where there are no groups.
        group_size: a power of two, or the size of the whole data- and context-parallel group.

    Raises:
        ContractError: there are no groups yet.
        ContractKeyError: there is no group of this size.
    """
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return late(
            "dp_cp_group", "the data- and context-parallel group", check_initialized=check_initialized
        )
    groups = STATE.hybrid_groups or {}
    if group_size not in groups:
        raise ContractKeyError(
            f"there is no hybrid group of size {group_size}; there are {sorted(map(str, groups)) or 'none'}: "
            "make them with hybrid_context_parallel=True"
        )
    return groups[group_size]
