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


def _number(answer: str, cp: bool, gtp: bool, part: bool) -> int:
    if part and not cp:
        override: int | None = getattr(STATE, f"set_dp_{answer}")
        if override is None and dist.is_initialized():
            raise partial_without_cp()
        return override or 0
    base = _base(cp, gtp, part)
    number: int | None = getattr(STATE, f"{base}_{answer}")
    return zero_or_raise(f"{base}_group") if number is None else number


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return the size of :func:`get_data_parallel_group`; a manual override takes precedence; 0 without ``torch.distributed``."""
    return _number("size", with_context_parallel, with_gtp_remat, partial_data_parallel)


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return this rank's index in :func:`get_data_parallel_group`; a manual override takes precedence; 0 without ``torch.distributed``."""
    return _number("rank", with_context_parallel, with_gtp_remat, partial_data_parallel)


def _number_before(answer: str) -> Callable[..., int]:
    def before(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
        return _number(answer, with_context_parallel, gtp=False, part=partial_data_parallel)

    return before


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
    base = _expert_base(with_gtp_remat, partial_expert_data_parallel)
    return getattr(STATE, base + "_group") or STATE.get_or_create(base + "_group", check_initialized)


def _expert_group_before(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    if partial_expert_data_parallel:
        return STATE.intra_edp_group or STATE.get_or_create("intra_edp_group", check_initialized)
    return STATE.edp_group or STATE.get_or_create("edp_group", check_initialized)


def _expert_base(gtp: bool, part: bool) -> str:
    return ("intra_" if part else "") + ("edp_gtp" if gtp else "edp")


def _expert_number(answer: str, gtp: bool, part: bool) -> int:
    base = _expert_base(gtp, part)
    number: int | None = getattr(STATE, f"{base}_{answer}")
    return zero_or_raise(f"{base}_group") if number is None else number


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the size of :func:`get_expert_data_parallel_group`; 0 without ``torch.distributed``."""
    return _expert_number("size", with_gtp_remat, partial_expert_data_parallel)


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return this rank's index in :func:`get_expert_data_parallel_group`; 0 without ``torch.distributed``."""
    return _expert_number("rank", with_gtp_remat, partial_expert_data_parallel)


def _expert_number_before(answer: str) -> Callable[..., int]:
    def before(partial_expert_data_parallel: bool = False) -> int:
        return _expert_number(answer, gtp=False, part=partial_expert_data_parallel)

    return before


_BEFORE_0_19: dict[Callable[..., Any], Callable[..., Any]] = {
    get_data_parallel_group: _group_before,
    get_data_parallel_rank: _number_before("rank"),
    get_data_parallel_world_size: _number_before("size"),
    get_expert_data_parallel_group: _expert_group_before,
    get_expert_data_parallel_rank: _expert_number_before("rank"),
    get_expert_data_parallel_world_size: _expert_number_before("size"),
}


def of_selected_release() -> dict[str, Callable[..., Any]]:
    """Return the accessors of this module, by name, with the arguments of the selected release."""
    return {
        function.__name__: function if release.newest() else before
        for function, before in _BEFORE_0_19.items()
    }


for _function, _before in _BEFORE_0_19.items():
    _before.__name__, _before.__qualname__, _before.__doc__ = (
        _function.__name__,
        _function.__qualname__,
        _function.__doc__,
    )
