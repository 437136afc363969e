"""A fallback for ``megatron.core.parallel_state``, with the results of release 0.16.1.

Like upstream it is a module with variables: ``initialize_model_parallel`` fills them, and each
accessor returns its own variable. An accessor whose variable is empty raises
:class:`~namedmesh.compat.ContractError`, an ``AssertionError``. A size or a rank that was assigned
with a ``set_`` function takes precedence over the value of the group.

Most accessors are rows of :mod:`namedmesh.compat.megatron.tables`. The others, below, have flags or
results of their own. Flags whose position differs between releases are keyword-only. ``with_gtp_remat`` has no effect, as
weights that are gathered for each use need megatron-core.
"""
# ruff: noqa: ARG001, SLF001  upstream's arguments, and its private variables

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.groups import *  # noqa: F403  upstream has these here
from namedmesh.compat.megatron.groups import GlobalMemoryBuffer, ParallelStateFallback
from namedmesh.compat.megatron.ranks import *  # noqa: F403  the same
from namedmesh.compat.megatron.tables import AccessorTable, list_variables

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


logger: logging.Logger = logging.getLogger(__name__)
_module: Any = sys.modules[__name__]

_fallback = ParallelStateFallback(globals())
for _name in ("create_group", "create_hierarchical_groups", "create_hybrid_dp_cp_groups"):
    globals()[_name] = getattr(_fallback, _name)
for _name in ("create_all_gather_groups", "update_pg_timeout", "initialize_model_parallel"):
    globals()[_name] = getattr(_fallback, _name)


def destroy_model_parallel() -> None:
    """Reset the variables. The groups belong to meshes, which the caller closes."""


# --- the variables --------------------------------------------------------------------------------


VARIABLES = list_variables()
"""The value of each variable at import, by name."""

globals().update(VARIABLES)
_table = AccessorTable(_module)
globals().update(_table.functions)
_read = _table.read
_read_number = _table.read_number


# --- initialization -------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Return whether the groups exist."""
    return _module._DATA_PARALLEL_GROUP is not None


def is_unitialized() -> bool:
    """Return whether the groups do not exist. Upstream deprecates it, in this spelling."""
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Return whether the tensor, pipeline and data parallel groups exist."""
    groups = (_module._TENSOR_MODEL_PARALLEL_GROUP, _module._PIPELINE_MODEL_PARALLEL_GROUP)
    return None not in groups and is_initialized()


# --- pipelines and embeddings ---------------------------------------------------------------------

# These functions use the accessors above, so that an assigned size or rank counts here too.


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last one comes the first."""
    return _find_stage(_module.get_pipeline_model_parallel_rank() + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; before the first one comes the last."""
    return _find_stage(_module.get_pipeline_model_parallel_rank() - 1)


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage."""
    return _find_stage(-1)


def _find_stage(stage: int) -> int:
    """Return the global rank of a stage of this rank's pipeline; stages wrap around."""
    ranks: list[int] = _read("_PIPELINE_GLOBAL_RANKS")
    return ranks[stage % _module.get_pipeline_model_parallel_world_size()]


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the index of the current virtual stage of this rank, or None without any."""
    return _module._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages on each rank, or None without any."""
    return _module._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank has the first stage.

    Args:
        ignore_virtual: whether to disregard the virtual stage.
        vp_stage: the virtual stage, which otherwise must be the first one of this rank.
    """
    return _is_stage(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank has the last stage.

    Args:
        ignore_virtual: whether to disregard the virtual stage.
        vp_stage: the virtual stage, which otherwise must be the last one of this rank.
    """
    return _is_stage(-1, ignore_virtual, vp_stage)


def _is_stage(index: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Return whether this rank, and its virtual stage, is the first (0) or the last (-1) one."""
    count = _module._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    if not ignore_virtual and count is not None:
        if vp_stage is None:
            raise ContractError("ignore_virtual=False needs a virtual stage; pass vp_stage=")
        if vp_stage != index % count:
            return False
    stages = _module.get_pipeline_model_parallel_world_size()
    return bool(_module.get_pipeline_model_parallel_rank() == index % stages)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or one of its virtual stages, holds word embeddings.

    Args:
        ignore_virtual: whether to disregard the virtual stage.
        vp_stage: the virtual stage, which otherwise decides on the first and the last of these
            ranks.
    """
    ranks = _module._EMBEDDING_GLOBAL_RANKS or []
    rank = dist.get_rank()
    if not ignore_virtual:
        # With virtual stages, only the first and the last one of the pipeline hold embeddings.
        for index in (0, -1):
            if ranks and rank == ranks[index]:
                return _is_stage(index, ignore_virtual, vp_stage)
    return rank in ranks


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds position embeddings."""
    return dist.get_rank() in (_module._POSITION_EMBEDDING_GLOBAL_RANKS or ())


# --- data parallelism -----------------------------------------------------------------------------


def has_separate_all_gather_group() -> bool:
    """Return whether there is a duplicate of the data parallel group for all-gathers."""
    return _module._DATA_PARALLEL_GROUP_WITH_CP_AG is not None


def _name_data_group(with_context_parallel: bool, partial: bool, end: str = "") -> str:
    """Return the variable of a data parallel group; a partial one is over dp and cp only."""
    start = "_INTRA_PARTIAL" if partial else ""
    middle = "_WITH_CP" if with_context_parallel else ""
    return f"{start}_DATA_PARALLEL_GROUP{middle}{end}"


def get_data_parallel_group(
    with_context_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> Any:
    """Return the data parallel group.

    Args:
        with_context_parallel: whether to return the group over dp and cp.
        with_gtp_remat: no effect.
        partial_data_parallel: whether to return its subgroup in this rank's optimizer
            instance.
        independent_all_gather: whether to return the duplicate for all-gathers.

    Raises:
        ContractError: the group does not exist. Only the group over dp and cp has the subgroup.
    """
    is_second = independent_all_gather and with_context_parallel and not partial_data_parallel
    end = "_AG" if is_second else ""
    return _read(_name_data_group(with_context_parallel, partial_data_parallel, end))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Any:
    """Return the gloo group over the ranks of the data parallel group.

    Args:
        with_context_parallel: whether to return the group over dp and cp.
        partial_data_parallel: whether to return its subgroup in this rank's optimizer
            instance.
    """
    return _read(_name_data_group(with_context_parallel, partial_data_parallel, "_GLOO"))


def get_data_parallel_world_size(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> Any:
    """Return the number of data parallel ranks; 0 without torch's default group.

    The arguments are those for :func:`get_data_parallel_group`.
    """
    variable = _name_data_group(with_context_parallel, partial_data_parallel)
    return _read_number("world_size", variable, "_MPU_DATA_PARALLEL")


def get_data_parallel_rank(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> Any:
    """Return this rank's data parallel index; 0 without torch's default group.

    The arguments are those for :func:`get_data_parallel_group`.
    """
    variable = _name_data_group(with_context_parallel, partial_data_parallel)
    return _read_number("rank", variable, "_MPU_DATA_PARALLEL")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first global rank of the data parallel group, or of the group over dp and cp."""
    end = "_WITH_CP" if with_context_parallel else ""
    ranks: list[int] = _read(f"_DATA_PARALLEL_GLOBAL_RANKS{end}")
    return ranks[0]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Any:
    """Return the group over tp and dp, or over tp, dp and cp."""
    end = "_WITH_CP" if with_context_parallel else ""
    return _read(f"_TENSOR_AND_DATA_PARALLEL_GROUP{end}", check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Any:
    """Return the group over which FP8 maxima are reduced.

    Args:
        with_context_parallel: whether the group includes cp.
        tp_only_amax_red: whether the group excludes dp.
    """
    if not tp_only_amax_red:
        return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)
    return _read(
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP" if with_context_parallel else "_TENSOR_MODEL_PARALLEL_GROUP"
    )


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: Any = None) -> Any:
    """Return the group of ``group_size`` neighboring ranks over dp and cp."""
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return get_data_parallel_group(with_context_parallel=True)
    return _module._HYBRID_DP_CP_GROUPS[group_size]


# --- experts --------------------------------------------------------------------------------------


def _name_expert_group(partial: bool, end: str = "") -> str:
    """Return the variable of a data parallel group of the experts."""
    start = "_INTRA_PARTIAL" if partial else ""
    return f"{start}_EXPERT_DATA_PARALLEL_GROUP{end}"


def get_expert_data_parallel_group(
    check_initialized: bool = True, *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> Any:
    """Return the data parallel group of the experts.

    Args:
        check_initialized: whether to raise if the group does not exist, instead of returning None.
        with_gtp_remat: no effect.
        partial_expert_data_parallel: whether to return its subgroup in this rank's optimizer
            instance.
    """
    return _read(_name_expert_group(partial_expert_data_parallel), check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    """Return the data parallel group of the experts. Upstream deprecates this name."""
    return _read(_name_expert_group(partial_expert_data_parallel))


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """Return the gloo group over the ranks of :func:`get_expert_data_parallel_group`."""
    return _read(_name_expert_group(partial_expert_data_parallel, "_GLOO"))


def get_expert_data_parallel_world_size(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the size of the experts' data parallel group; 0 without torch's default group."""
    return _read_number("world_size", _name_expert_group(partial_expert_data_parallel))


def get_expert_data_parallel_rank(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return this rank's index in the experts' data parallel group; 0 without a default group."""
    return _read_number("rank", _name_expert_group(partial_expert_data_parallel))


# --- coordinates and buffers ----------------------------------------------------------------------


def get_all_ranks() -> str:
    """Return this rank's indices in the tp, dp, cp, pp and ep groups, joined by underscores."""
    kinds = ("tensor_model", "data", "context", "pipeline_model", "expert_model")
    ranks = [getattr(_module, f"get_{kind}_parallel_rank")() for kind in kinds]
    # A rank that was assigned may be None.
    return "_".join(str(rank or 0) for rank in ranks)


def get_global_memory_buffer() -> Any:
    """Return the global memory buffer."""
    return _read("_GLOBAL_MEMORY_BUFFER")


def get_global_symmetric_memory_buffer() -> Any:
    """Return the global buffer in symmetric memory, which only megatron-core makes."""
    return _read("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")


def destroy_global_memory_buffer() -> None:
    """Delete the global memory buffer."""
    _module._GLOBAL_MEMORY_BUFFER = None


def destroy_global_symmetric_memory_buffer() -> None:
    """Delete the global buffer in symmetric memory."""
    _module._GLOBAL_SYMMETRIC_MEMORY_BUFFER = None


def _set_global_memory_buffer() -> None:
    """Make the global memory buffer; raise if it exists."""
    if _module._GLOBAL_MEMORY_BUFFER is not None:
        raise ContractError(
            "the global memory buffer exists already; call destroy_global_memory_buffer() first"
        )
    _module._GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()


def _set_global_symmetric_memory_buffer() -> None:
    """Raise: buffers in symmetric memory need megatron-core."""
    raise ContractError(
        "buffers in symmetric memory are not supported without megatron-core; install megatron-core"
    )
