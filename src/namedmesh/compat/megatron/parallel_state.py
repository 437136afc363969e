"""Stands in for ``megatron.core.parallel_state`` where megatron-core is not installed: names and answers of 0.16.1.

Like the original it is a module with variables; ``initialize_model_parallel`` fills them, and an accessor reads its
own. One whose group is not there raises :class:`~namedmesh.compat.ContractError`, an ``AssertionError``. Flags
that stand at other places in other releases are keywords only, and ``with_gtp_remat`` changes nothing here.
"""
# ruff: noqa: ARG001, PLW0603, D103  the original's arguments and variables; what an accessor answers is its name

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from namedmesh.compat import ContractError
from namedmesh.compat.megatron.stand_in import (  # noqa: F401  names of this module, too
    GlobalMemoryBuffer,
    Maker,
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
    get_nccl_options,
    missing,
    overwrite_nccl_comm_cfgs,
)

logger = logging.getLogger(__name__)

_maker = Maker(globals())
create_group = _maker.create_group
create_hierarchical_groups = _maker.create_hierarchical_groups
create_hybrid_dp_cp_groups = _maker.create_hybrid_dp_cp_groups
create_all_gather_groups = _maker.create_all_gather_groups
update_pg_timeout = _maker.update_pg_timeout
initialize_model_parallel = _maker.initialize_model_parallel


def destroy_model_parallel() -> None:
    """Forget the groups, which belong to meshes."""


# The variables: of a kind of group this rank's, its ranks, and the group of gloo over them.
NOTHING: Any = None
_TENSOR_MODEL_PARALLEL_GROUP = _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = NOTHING
_PIPELINE_MODEL_PARALLEL_GROUP = NOTHING
_PIPELINE_GLOBAL_RANKS: Any = None
_CONTEXT_PARALLEL_GROUP = _CONTEXT_PARALLEL_GLOBAL_RANKS = _MODEL_PARALLEL_GROUP = NOTHING
_MODEL_PARALLEL_GLOBAL_RANKS = _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = NOTHING
_DATA_PARALLEL_GROUP = _DATA_PARALLEL_GLOBAL_RANKS = _DATA_PARALLEL_GROUP_GLOO = NOTHING
_DATA_PARALLEL_GROUP_WITH_CP = _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP = NOTHING
_DATA_PARALLEL_GROUP_WITH_CP_GLOO = _DATA_PARALLEL_GROUP_WITH_CP_AG = NOTHING
_EMBEDDING_GROUP = _EMBEDDING_GLOBAL_RANKS = NOTHING
_POSITION_EMBEDDING_GROUP = _POSITION_EMBEDDING_GLOBAL_RANKS = NOTHING
_TENSOR_AND_DATA_PARALLEL_GROUP = _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP = NOTHING
_TENSOR_AND_CONTEXT_PARALLEL_GROUP = NOTHING
_HYBRID_DP_CP_GROUPS: dict[int, Any] = {}
_EXPERT_MODEL_PARALLEL_GROUP = _EXPERT_MODEL_PARALLEL_RANKS = _EXPERT_TENSOR_PARALLEL_GROUP = NOTHING
_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP = NOTHING
_EXPERT_DATA_PARALLEL_GROUP = _EXPERT_DATA_PARALLEL_GROUP_GLOO = NOTHING
_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = NOTHING
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = NOTHING
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO = NOTHING
_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = _MPU_TENSOR_MODEL_PARALLEL_RANK = NOTHING
_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = _MPU_PIPELINE_MODEL_PARALLEL_RANK = NOTHING
_MPU_DATA_PARALLEL_WORLD_SIZE = _MPU_DATA_PARALLEL_RANK = NOTHING
_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE = _MPU_EXPERT_MODEL_PARALLEL_RANK = NOTHING
_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = _MPU_EXPERT_TENSOR_PARALLEL_RANK = NOTHING
_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = NOTHING
_GLOBAL_MEMORY_BUFFER = _GLOBAL_SYMMETRIC_MEMORY_BUFFER = _global_process_group_list = NOTHING


# What is asked for: the group or its ranks, the size and the rank in it, and what overrides them.
# fmt: off
def _size_setter(variable: str) -> Callable[[int | None], None]:
    def set_size(world_size: int | None) -> None:
        globals()[variable] = world_size
    return set_size
def _rank_setter(variable: str) -> Callable[[int | None], None]:
    def set_rank(rank: int | None) -> None:
        globals()[variable] = rank
    return set_rank
def is_initialized() -> bool:
    return _DATA_PARALLEL_GROUP is not None
def is_unitialized() -> bool:
    return not is_initialized()
def model_parallel_is_initialized() -> bool:
    if _TENSOR_MODEL_PARALLEL_GROUP is None or _PIPELINE_MODEL_PARALLEL_GROUP is None:
        return False
    return _DATA_PARALLEL_GROUP is not None
def has_separate_all_gather_group() -> bool:
    return _DATA_PARALLEL_GROUP_WITH_CP_AG is not None
def get_model_parallel_group(check_initialized: bool = True) -> Any:
    return _MODEL_PARALLEL_GROUP or missing("_MODEL_PARALLEL_GROUP", check_initialized)
def get_model_parallel_src_rank() -> int:
    return (_MODEL_PARALLEL_GLOBAL_RANKS or missing("_MODEL_PARALLEL_GLOBAL_RANKS"))[0]
def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    return _TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP", check_initialized)
def get_tensor_model_parallel_world_size() -> int:
    if _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return (_TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP")).size()
def get_tensor_model_parallel_rank() -> int:
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return (_TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP")).rank()
set_tensor_model_parallel_world_size = _size_setter("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE")
set_tensor_model_parallel_rank = _rank_setter("_MPU_TENSOR_MODEL_PARALLEL_RANK")
def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    return _PIPELINE_MODEL_PARALLEL_GROUP or missing("_PIPELINE_MODEL_PARALLEL_GROUP", check_initialized)
def get_pipeline_model_parallel_world_size() -> int:
    if _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    return (_PIPELINE_MODEL_PARALLEL_GROUP or missing("_PIPELINE_MODEL_PARALLEL_GROUP")).size()
def get_pipeline_model_parallel_rank() -> int:
    if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_RANK
    return (_PIPELINE_MODEL_PARALLEL_GROUP or missing("_PIPELINE_MODEL_PARALLEL_GROUP")).rank()
set_pipeline_model_parallel_world_size = _size_setter("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
set_pipeline_model_parallel_rank = _rank_setter("_MPU_PIPELINE_MODEL_PARALLEL_RANK")
def get_tensor_model_parallel_src_rank() -> int:
    return (_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS or missing("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"))[0]
def get_pipeline_model_parallel_next_rank() -> int:
    ranks: Any = _PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS")
    return ranks[(get_pipeline_model_parallel_rank() + 1) % get_pipeline_model_parallel_world_size()]
def get_pipeline_model_parallel_prev_rank() -> int:
    ranks: Any = _PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS")
    return ranks[(get_pipeline_model_parallel_rank() - 1) % get_pipeline_model_parallel_world_size()]
def get_pipeline_model_parallel_first_rank() -> int:
    return (_PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS"))[0]
def get_pipeline_model_parallel_last_rank() -> int:
    ranks: Any = _PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS")
    return ranks[get_pipeline_model_parallel_world_size() - 1]
def get_virtual_pipeline_model_parallel_rank() -> int | None:
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
set_virtual_pipeline_model_parallel_world_size = _size_setter("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
set_virtual_pipeline_model_parallel_rank = _rank_setter("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK")
def get_embedding_group(check_initialized: bool = True) -> Any:
    return _EMBEDDING_GROUP or missing("_EMBEDDING_GROUP", check_initialized)
def get_position_embedding_group(check_initialized: bool = True) -> Any:
    return _POSITION_EMBEDDING_GROUP or missing("_POSITION_EMBEDDING_GROUP", check_initialized)
def is_rank_in_position_embedding_group() -> bool:
    return dist.get_rank() in (_POSITION_EMBEDDING_GLOBAL_RANKS or ())
def get_context_parallel_group(check_initialized: bool = True) -> Any:
    return _CONTEXT_PARALLEL_GROUP or missing("_CONTEXT_PARALLEL_GROUP", check_initialized)
def get_context_parallel_global_ranks(check_initialized: bool = True) -> Any:
    return _CONTEXT_PARALLEL_GLOBAL_RANKS or missing("_CONTEXT_PARALLEL_GLOBAL_RANKS", check_initialized)
def get_context_parallel_world_size() -> int:
    return _CONTEXT_PARALLEL_GROUP.size() if _CONTEXT_PARALLEL_GROUP else _zero("_CONTEXT_PARALLEL_GROUP")
def get_context_parallel_rank() -> int:
    return _CONTEXT_PARALLEL_GROUP.rank() if _CONTEXT_PARALLEL_GROUP else _zero("_CONTEXT_PARALLEL_GROUP")
def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> Any:
    return _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS or missing(
        "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", check_initialized)
def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Any:
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP or missing(
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", check_initialized)
def get_tensor_and_context_parallel_world_size() -> int:
    group = _TENSOR_AND_CONTEXT_PARALLEL_GROUP
    return group.size() if group else _zero("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
def get_tensor_and_context_parallel_rank() -> int:
    group = _TENSOR_AND_CONTEXT_PARALLEL_GROUP
    return group.rank() if group else _zero("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
set_data_parallel_rank = _rank_setter("_MPU_DATA_PARALLEL_RANK")
def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    if with_context_parallel:
        return (_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP or missing("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"))[0]
    return (_DATA_PARALLEL_GLOBAL_RANKS or missing("_DATA_PARALLEL_GLOBAL_RANKS"))[0]
def get_expert_model_parallel_group(check_initialized: bool = True) -> Any:
    return _EXPERT_MODEL_PARALLEL_GROUP or missing("_EXPERT_MODEL_PARALLEL_GROUP", check_initialized)
def get_expert_model_parallel_src_rank() -> int:
    return (_EXPERT_MODEL_PARALLEL_RANKS or missing("_EXPERT_MODEL_PARALLEL_RANKS"))[0]
def get_expert_model_parallel_world_size() -> int:
    if _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    group = _EXPERT_MODEL_PARALLEL_GROUP
    return group.size() if group else _zero("_EXPERT_MODEL_PARALLEL_GROUP")
def get_expert_model_parallel_rank() -> int:
    if _MPU_EXPERT_MODEL_PARALLEL_RANK is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_RANK
    group = _EXPERT_MODEL_PARALLEL_GROUP
    return group.rank() if group else _zero("_EXPERT_MODEL_PARALLEL_GROUP")
set_expert_model_parallel_world_size = _size_setter("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE")
set_expert_model_parallel_rank = _rank_setter("_MPU_EXPERT_MODEL_PARALLEL_RANK")
def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    return _EXPERT_TENSOR_PARALLEL_GROUP or missing("_EXPERT_TENSOR_PARALLEL_GROUP", check_initialized)
def get_expert_tensor_parallel_world_size() -> int:
    if _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    group = _EXPERT_TENSOR_PARALLEL_GROUP
    return group.size() if group else _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
def get_expert_tensor_parallel_rank() -> int:
    if _MPU_EXPERT_TENSOR_PARALLEL_RANK is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_RANK
    group = _EXPERT_TENSOR_PARALLEL_GROUP
    return group.rank() if group else _MPU_TENSOR_MODEL_PARALLEL_RANK
set_expert_tensor_parallel_world_size = _size_setter("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE")
set_expert_tensor_parallel_rank = _rank_setter("_MPU_EXPERT_TENSOR_PARALLEL_RANK")
def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Any:
    return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP or missing(
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", check_initialized)
def get_expert_tensor_and_model_parallel_world_size() -> int:
    group = _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
    return group.size() if group else _zero("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
def get_expert_tensor_and_model_parallel_rank() -> int:
    group = _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
    return group.rank() if group else _zero("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> Any:
    return _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP or missing(
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", check_initialized)
def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    return _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP or missing(
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", check_initialized)
def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    return _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP or missing(
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized)
def get_global_memory_buffer() -> Any:
    return _GLOBAL_MEMORY_BUFFER or missing("_GLOBAL_MEMORY_BUFFER")
def get_global_symmetric_memory_buffer() -> Any:
    return _GLOBAL_SYMMETRIC_MEMORY_BUFFER or missing("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
def destroy_global_memory_buffer() -> None:
    global _GLOBAL_MEMORY_BUFFER
    _GLOBAL_MEMORY_BUFFER = None
def destroy_global_symmetric_memory_buffer() -> None:
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = None
def _set_global_memory_buffer() -> None:
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is not None:
        raise ContractError("there is a global memory buffer; call destroy_global_memory_buffer() first")
    _GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()
def _set_global_symmetric_memory_buffer() -> None:
    raise ContractError("buffers in symmetric memory are megatron-core's; install it")
# fmt: on


def _zero(variable: str) -> int:
    """Return the original's answer without ``torch.distributed``."""
    if dist.is_initialized():
        missing(variable)
    return 0


# What depends on flags.


def get_data_parallel_group(
    with_context_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> Any:
    if not with_context_parallel:
        if partial_data_parallel:
            raise ContractError("partial_data_parallel goes with with_context_parallel=True only; say it too")
        return _DATA_PARALLEL_GROUP or missing("_DATA_PARALLEL_GROUP")
    if partial_data_parallel:
        return _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP or missing("_DATA_PARALLEL_GROUP_WITH_CP")
    if independent_all_gather:
        return _DATA_PARALLEL_GROUP_WITH_CP_AG or missing("_DATA_PARALLEL_GROUP_WITH_CP_AG")
    return _DATA_PARALLEL_GROUP_WITH_CP or missing("_DATA_PARALLEL_GROUP_WITH_CP")


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Any:
    if not with_context_parallel:
        if partial_data_parallel:
            raise ContractError("partial_data_parallel goes with with_context_parallel=True only; say it too")
        return _DATA_PARALLEL_GROUP_GLOO or missing("_DATA_PARALLEL_GROUP_GLOO")
    if partial_data_parallel:
        return _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO or missing("_DATA_PARALLEL_GROUP_WITH_CP_GLOO")
    return _DATA_PARALLEL_GROUP_WITH_CP_GLOO or missing("_DATA_PARALLEL_GROUP_WITH_CP_GLOO")


def get_data_parallel_world_size(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel).rank()


def get_expert_data_parallel_group(
    check_initialized: bool = True, *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> Any:
    if partial_expert_data_parallel:
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP or missing(
            "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized
        )
    return _EXPERT_DATA_PARALLEL_GROUP or missing("_EXPERT_DATA_PARALLEL_GROUP", check_initialized)


def get_expert_data_parallel_world_size(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel).size()


def get_expert_data_parallel_rank(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel).rank()


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    if partial_expert_data_parallel:
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO or missing("_EXPERT_DATA_PARALLEL_GROUP_GLOO")
    return _EXPERT_DATA_PARALLEL_GROUP_GLOO or missing("_EXPERT_DATA_PARALLEL_GROUP_GLOO")


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: Any = None) -> Any:
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return get_data_parallel_group(with_context_parallel=True)
    return _HYBRID_DP_CP_GROUPS[group_size]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Any:
    if with_context_parallel:
        return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP or missing(
            "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", check_initialized
        )
    return _TENSOR_AND_DATA_PARALLEL_GROUP or missing("_TENSOR_AND_DATA_PARALLEL_GROUP", check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Any:
    if with_context_parallel:
        if tp_only_amax_red:
            return _TENSOR_AND_CONTEXT_PARALLEL_GROUP or missing("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
        return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP or missing("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
    if tp_only_amax_red:
        return _TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP")
    return _TENSOR_AND_DATA_PARALLEL_GROUP or missing("_TENSOR_AND_DATA_PARALLEL_GROUP")


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    return (ignore_virtual or _is_stage(vp_stage, 0)) and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    last = get_pipeline_model_parallel_world_size() - 1
    return (ignore_virtual or _is_stage(vp_stage, -1)) and get_pipeline_model_parallel_rank() == last


def _is_stage(vp_stage: int | None, place: int) -> bool:
    """Return whether a virtual stage, where there are some, is the first (0) or the last (-1)."""
    if _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is None:
        return True
    if vp_stage is None:
        raise ContractError("ignore_virtual=False asks about one virtual stage; say which with vp_stage=")
    return vp_stage == place % _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    ranks, rank = _EMBEDDING_GLOBAL_RANKS or [], dist.get_rank()
    if ignore_virtual or rank not in ranks:
        return rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return rank != ranks[-1] or is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def get_all_ranks() -> str:
    """Return this rank's coordinates in tp, dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)
