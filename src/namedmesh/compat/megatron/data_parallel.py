"""The data-parallel accessors whose arguments release 0.19 changed: as they are there, and as they were before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron import release
from namedmesh.compat.megatron.state import STATE, zero_or_raise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "of_selected_release",
    "partial_without_cp",
]


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    *,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    """Return the group of the ranks that have other samples: ``mesh.group("dp", "gtp_remat")``.

    Args:
        with_context_parallel: together with the ranks that share a sequence, those of cp.
        with_gtp_remat: False for the replicas of this rank's parameters only: ``mesh.group("dp")``.
        partial_data_parallel: only those of this rank's optimizer instance; they include cp.
        independent_all_gather: the second communicator over dp and cp, for all-gathers.

    Raises:
        ContractError: there is no such group, or a part is asked for without cp.
    """
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return STATE.dp_cp_gather_group or STATE.get_or_create("dp_cp_gather_group")
    base = _base(with_context_parallel, with_gtp_remat, partial_data_parallel)
    return getattr(STATE, base + "_group") or STATE.get_or_create(base + "_group")


def _group_before(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    if not with_context_parallel:
        if partial_data_parallel:
            raise partial_without_cp()
        return STATE.dp_group or STATE.get_or_create("dp_group")
    if partial_data_parallel:
        return STATE.intra_dp_cp_group or STATE.get_or_create("intra_dp_cp_group")
    if independent_all_gather:
        return STATE.dp_cp_gather_group or STATE.get_or_create("dp_cp_gather_group")
    return STATE.dp_cp_group or STATE.get_or_create("dp_cp_group")


_BASES = {(False, False): "dp", (False, True): "dp_gtp", (True, False): "dp_cp", (True, True): "dp_cp_gtp"}


def _base(cp: bool, gtp: bool, part: bool) -> str:
    if part and not cp:
        raise partial_without_cp()
    return ("intra_" if part else "") + _BASES[bool(cp), bool(gtp)]


def partial_without_cp() -> ContractError:
    """Return the error of an accessor that is asked for a part of the data-parallel ranks without cp."""
    return ContractError(
        "partial_data_parallel is True without with_context_parallel; a part for the optimizer includes the "
        "context-parallel ranks, so say with_context_parallel=True too"
    )


def _numbers(answer: str, text: str) -> tuple[Callable[..., int], Callable[..., int]]:
    """Make the accessor of a size or a rank, as it is and as it was before; its answers are slots of the state."""
    dp, dp_cp, dp_gtp, dp_cp_gtp = (f"{base}_{answer}" for base in ("dp", "dp_cp", "dp_gtp", "dp_cp_gtp"))

    def newest(
        with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
    ) -> int:
        if partial_data_parallel:
            return _part(answer, cp=with_context_parallel, gtp=with_gtp_remat)
        if with_gtp_remat:
            number = getattr(STATE, dp_cp_gtp if with_context_parallel else dp_gtp)
        else:
            number = getattr(STATE, dp_cp if with_context_parallel else dp)
        return zero_or_raise("dp_group") if number is None else number

    def before(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
        if partial_data_parallel:
            return _part(answer, cp=with_context_parallel, gtp=False)
        number = getattr(STATE, dp_cp if with_context_parallel else dp)
        return zero_or_raise("dp_group") if number is None else number

    newest.__doc__ = f"{text} in :func:`get_data_parallel_group`; a manual override takes precedence."
    return newest, before


def _part(answer: str, *, cp: bool, gtp: bool) -> int:
    """Return the size or rank in the part of the data-parallel ranks that is in this rank's optimizer instance."""
    number: int | None = getattr(STATE, f"{'intra_dp_cp_gtp' if gtp else 'intra_dp_cp'}_{answer}")
    if not cp and getattr(STATE, f"set_dp_{answer}") is None and dist.is_initialized():
        raise partial_without_cp()
    return zero_or_raise("intra_dp_cp_group") if number is None else number


get_data_parallel_world_size, _world_size_before = _numbers("size", "Return the number of ranks")
get_data_parallel_rank, _rank_before = _numbers("rank", "Return this rank's index")


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Return the group of the ranks that have the same experts and other samples.

    Args:
        check_initialized: raise where there is no such group.
        with_gtp_remat: False for the replicas of this rank's experts only: ``mesh.group("edp")``.
        partial_expert_data_parallel: only those of this rank's optimizer instance.
    """
    if not with_gtp_remat:
        return _expert_group_before(check_initialized, partial_expert_data_parallel)
    if partial_expert_data_parallel:
        return STATE.intra_edp_gtp_group or STATE.get_or_create("intra_edp_gtp_group", check_initialized)
    return STATE.edp_gtp_group or STATE.get_or_create("edp_gtp_group", check_initialized)


def _expert_group_before(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    if partial_expert_data_parallel:
        return STATE.intra_edp_group or STATE.get_or_create("intra_edp_group", check_initialized)
    return STATE.edp_group or STATE.get_or_create("edp_group", check_initialized)


def _expert_numbers(answer: str, text: str) -> tuple[Callable[..., int], Callable[..., int]]:
    """As :func:`_numbers`, for the experts."""
    edp, intra, edp_gtp, intra_gtp = (
        f"{base}_{answer}" for base in ("edp", "intra_edp", "edp_gtp", "intra_edp_gtp")
    )

    def newest(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
        if not with_gtp_remat:
            return before(partial_expert_data_parallel)
        number = getattr(STATE, intra_gtp if partial_expert_data_parallel else edp_gtp)
        return zero_or_raise("edp_group") if number is None else number

    def before(partial_expert_data_parallel: bool = False) -> int:
        number = getattr(STATE, intra if partial_expert_data_parallel else edp)
        return zero_or_raise("edp_group") if number is None else number

    newest.__doc__ = f"{text} in :func:`get_expert_data_parallel_group`; 0 without ``torch.distributed``."
    return newest, before


get_expert_data_parallel_world_size, _expert_world_size_before = _expert_numbers(
    "size", "Return the number of ranks"
)
get_expert_data_parallel_rank, _expert_rank_before = _expert_numbers("rank", "Return this rank's index")


_NEWEST_AND_BEFORE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "get_data_parallel_group": (get_data_parallel_group, _group_before),
    "get_data_parallel_rank": (get_data_parallel_rank, _rank_before),
    "get_data_parallel_world_size": (get_data_parallel_world_size, _world_size_before),
    "get_expert_data_parallel_group": (get_expert_data_parallel_group, _expert_group_before),
    "get_expert_data_parallel_rank": (get_expert_data_parallel_rank, _expert_rank_before),
    "get_expert_data_parallel_world_size": (get_expert_data_parallel_world_size, _expert_world_size_before),
}


def of_selected_release() -> dict[str, Callable[..., Any]]:
    """Return the accessors of this module, by name, with the arguments of the selected release."""
    return {
        name: newest if release.newest() else before for name, (newest, before) in _NEWEST_AND_BEFORE.items()
    }


for _name, (_newest, _before) in _NEWEST_AND_BEFORE.items():
    _newest.__name__ = _before.__name__ = _name
    _before.__doc__ = _newest.__doc__
