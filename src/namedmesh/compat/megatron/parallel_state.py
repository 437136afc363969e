"""Megatron's ``parallel_state``: the names, signatures and answers of release 0.19, over the groups of one NamedMesh.

Like the original it is a module with variables, which ``bind`` and ``initialize_model_parallel`` fill; an accessor reads
its variable. Code may read and assign them, as it does the original's: an assignment stays with the mesh that the
variables show.

Every accessor raises :class:`~namedmesh.compat.errors.ContractError`, which is also an ``AssertionError``, where its
group is not initialized or its flags contradict each other. With ``check_initialized=False`` it returns None where
there is no group.

Example:
    >>> import namedmesh, torch.distributed as dist
    >>> from namedmesh.compat.megatron import parallel_state
    >>> _ = namedmesh.launch.init("cpu")
    >>> parallel_state.initialize_model_parallel()
    >>> parallel_state.get_tensor_model_parallel_world_size()
    1
    >>> parallel_state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS
    [0]
    >>> parallel_state.destroy_model_parallel()
    >>> dist.destroy_process_group()
"""
# ruff: noqa: I001, PLC0414, PLW0603  names of the original that other modules define are exported, variables assigned

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.errors import ContractError, ContractKeyError
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer, GlobalSymmetricMemoryBuffer
from namedmesh.compat.megatron.groups import (
    default_embedding_ranks as default_embedding_ranks,
    default_position_embedding_ranks as default_position_embedding_ranks,
)
from namedmesh.compat.megatron.initialize import (
    destroy_model_parallel as destroy_model_parallel,
    initialize_model_parallel as initialize_model_parallel,
)
from namedmesh.compat.megatron.rank_generator import (
    RankGenerator as RankGenerator,
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from namedmesh.compat.megatron.single_groups import (
    create_all_gather_groups as create_all_gather_groups,
    create_group as create_group,
    create_hierarchical_groups as create_hierarchical_groups,
    create_hybrid_dp_cp_groups as create_hybrid_dp_cp_groups,
    get_nccl_options as get_nccl_options,
    logger as logger,
    overwrite_nccl_comm_cfgs as overwrite_nccl_comm_cfgs,
    update_pg_timeout as update_pg_timeout,
)
from namedmesh.compat.megatron.variables import BINDING, missing, warn_deprecated, zero_or_raise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SYMMETRIC_MEGABYTES = 256

# The variables.

_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None
_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: Any = None
_DATA_PARALLEL_GROUP_GLOO: Any = None
_CONTEXT_PARALLEL_GROUP: Any = None
_CONTEXT_PARALLEL_GLOBAL_RANKS: Any = None
_MODEL_PARALLEL_GROUP: Any = None
_MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_PIPELINE_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_GLOBAL_RANKS: Any = None
_EMBEDDING_GROUP: Any = None
_EMBEDDING_GLOBAL_RANKS: Any = None
_POSITION_EMBEDDING_GROUP: Any = None
_POSITION_EMBEDDING_GLOBAL_RANKS: Any = None
_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_TENSOR_AND_DATA_PARALLEL_GROUP: Any = None
_TENSOR_AND_CONTEXT_PARALLEL_GROUP: Any = None
_GTP_WEIGHT_REMAT_GROUP: Any = None
_GTP_WEIGHT_REMAT_GLOBAL_RANKS: Any = None
_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT: Any = None
_EXPERT_MODEL_PARALLEL_GROUP: Any = None
_EXPERT_MODEL_PARALLEL_RANKS: Any = None
_EXPERT_TENSOR_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP: Any = None
_EXPERT_DATA_PARALLEL_GROUP: Any = None
_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None
_EXPERT_GTP_WEIGHT_REMAT_GROUP: Any = None
_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS: Any = None
_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP: Any = None
_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_AG: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT: Any = None
_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS: Any = None
_HYBRID_DP_CP_GROUPS: Any = {}
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None
_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_TENSOR_MODEL_PARALLEL_RANK: Any = None
_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_PIPELINE_MODEL_PARALLEL_RANK: Any = None
_MPU_DATA_PARALLEL_WORLD_SIZE: Any = None
_MPU_DATA_PARALLEL_RANK: Any = None
_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_EXPERT_MODEL_PARALLEL_RANK: Any = None
_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE: Any = None
_MPU_EXPERT_TENSOR_PARALLEL_RANK: Any = None
_GLOBAL_MEMORY_BUFFER: Any = None
_GLOBAL_SYMMETRIC_MEMORY_BUFFER: Any = None
_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK: Any = None
_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None
_global_process_group_list: Any = None


# Whether there are groups.


def is_initialized() -> bool:
    """Return whether there are groups."""
    return _DATA_PARALLEL_GROUP is not None


def is_unitialized() -> bool:
    """Return whether there are no groups; deprecated and spelled as in the original."""
    warn_deprecated("is_unitialized is deprecated; call is_initialized instead")
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Return whether there are tensor-, pipeline- and data-parallel groups."""
    if _TENSOR_MODEL_PARALLEL_GROUP is None or _PIPELINE_MODEL_PARALLEL_GROUP is None:
        return False
    return _DATA_PARALLEL_GROUP is not None


def get_all_ranks() -> str:
    """Return this rank's coordinates in tp, gtp_remat, dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_gtp_weight_remat_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


# Tensor-, model- and context-parallel groups.


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that together hold one replica of the model: ``mesh.group("pp", "tp")``."""
    return _MODEL_PARALLEL_GROUP or missing("_MODEL_PARALLEL_GROUP", check_initialized)


def get_model_parallel_src_rank() -> int:
    """Return the first global rank of the model-parallel group."""
    return (_MODEL_PARALLEL_GLOBAL_RANKS or missing("_MODEL_PARALLEL_GLOBAL_RANKS"))[0]


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that share each layer: ``mesh.group("tp")``."""
    return _TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP", check_initialized)


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of the tensor-parallel group."""
    return (_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS or missing("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"))[0]


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_tensor_model_parallel_group`, unless a setter overrides it."""
    if _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return (_TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP")).size()


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Override what :func:`get_tensor_model_parallel_world_size` returns; None undoes it."""
    global _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = world_size


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's index in :func:`get_tensor_model_parallel_group`, unless a setter overrides it."""
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return (_TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP")).rank()


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Override what :func:`get_tensor_model_parallel_rank` returns; None undoes it."""
    global _MPU_TENSOR_MODEL_PARALLEL_RANK
    _MPU_TENSOR_MODEL_PARALLEL_RANK = rank


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over which the weights are sharded that are gathered for each use."""
    return _GTP_WEIGHT_REMAT_GROUP or missing("_GTP_WEIGHT_REMAT_GROUP", check_initialized)


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the global ranks of the group over which the weights are sharded, ascending."""
    return _GTP_WEIGHT_REMAT_GLOBAL_RANKS or missing("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)


def get_gtp_weight_remat_world_size() -> int:
    """Return the number of ranks in :func:`get_gtp_weight_remat_group`."""
    return _GTP_WEIGHT_REMAT_GROUP.size() if _GTP_WEIGHT_REMAT_GROUP else 0


def get_gtp_weight_remat_rank() -> int:
    """Return this rank's index in :func:`get_gtp_weight_remat_group`."""
    return _GTP_WEIGHT_REMAT_GROUP.rank() if _GTP_WEIGHT_REMAT_GROUP else 0


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that share each sequence: ``mesh.group("cp")``."""
    return _CONTEXT_PARALLEL_GROUP or missing("_CONTEXT_PARALLEL_GROUP", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the global ranks of the context-parallel group, ascending."""
    return _CONTEXT_PARALLEL_GLOBAL_RANKS or missing("_CONTEXT_PARALLEL_GLOBAL_RANKS", check_initialized)


def get_context_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_context_parallel_group`."""
    if _CONTEXT_PARALLEL_GROUP is None:
        return zero_or_raise("_CONTEXT_PARALLEL_GROUP")
    return _CONTEXT_PARALLEL_GROUP.size()


def get_context_parallel_rank() -> int:
    """Return this rank's index in :func:`get_context_parallel_group`."""
    if _CONTEXT_PARALLEL_GROUP is None:
        return zero_or_raise("_CONTEXT_PARALLEL_GROUP")
    return _CONTEXT_PARALLEL_GROUP.rank()


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup]:
    """Return the groups of the levels of the context-parallel group, innermost first."""
    return _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS or missing(
        "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", check_initialized
    )


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over tp and cp together: ``mesh.group("cp", "tp")``."""
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP or missing(
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", check_initialized
    )


def get_tensor_and_context_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_tensor_and_context_parallel_group`."""
    if _TENSOR_AND_CONTEXT_PARALLEL_GROUP is None:
        return zero_or_raise("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP.size()


def get_tensor_and_context_parallel_rank() -> int:
    """Return this rank's index in :func:`get_tensor_and_context_parallel_group`."""
    if _TENSOR_AND_CONTEXT_PARALLEL_GROUP is None:
        return zero_or_raise("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP.rank()


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return the group over tp and dp, and cp if ``with_context_parallel``: every rank of one pipeline stage."""
    if with_context_parallel:
        return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP or missing(
            "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", check_initialized
        )
    return _TENSOR_AND_DATA_PARALLEL_GROUP or missing("_TENSOR_AND_DATA_PARALLEL_GROUP", check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Return the group in which FP8 scaling reduces its maxima.

    Args:
        with_context_parallel: include the ranks of cp.
        tp_only_amax_red: leave out the ranks of dp.
    """
    if with_context_parallel:
        if tp_only_amax_red:
            return get_tensor_and_context_parallel_group()
        return get_tensor_and_data_parallel_group(with_context_parallel=True)
    if tp_only_amax_red:
        return _TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP")
    return _TENSOR_AND_DATA_PARALLEL_GROUP or missing("_TENSOR_AND_DATA_PARALLEL_GROUP")


# Data-parallel groups, with and without the context-parallel ranks, whole or in parts, on gloo too.


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    """Return the group of the ranks that have other samples: ``mesh.group("dp", "gtp_remat")``.

    Args:
        with_context_parallel: together with the ranks that share a sequence, those of cp.
        with_gtp_remat: False for the replicas of this rank's parameters only: ``mesh.group("dp")``.
        partial_data_parallel: only those of this rank's optimizer instance; they include cp.
        independent_all_gather: the second communicator over dp and cp, for all-gathers.
    """
    if not with_context_parallel:
        if partial_data_parallel:
            raise _partial_without_cp()
        if with_gtp_remat:
            return _DATA_PARALLEL_GROUP_WITH_GTP_REMAT or missing("_DATA_PARALLEL_GROUP")
        return _DATA_PARALLEL_GROUP or missing("_DATA_PARALLEL_GROUP")
    if partial_data_parallel:
        if with_gtp_remat:
            group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        else:
            group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
    elif independent_all_gather:
        return _DATA_PARALLEL_GROUP_WITH_CP_AG or missing("_DATA_PARALLEL_GROUP_WITH_CP_AG")
    elif with_gtp_remat:
        group = _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
    else:
        group = _DATA_PARALLEL_GROUP_WITH_CP
    return group or missing("_DATA_PARALLEL_GROUP_WITH_CP")


def _partial_without_cp() -> ContractError:
    return ContractError(
        "partial_data_parallel is True without with_context_parallel; a part for the optimizer includes the "
        "context-parallel ranks, so say with_context_parallel=True too"
    )


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return the number of ranks in :func:`get_data_parallel_group`, unless ``_MPU_...`` overrides it."""
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(with_context_parallel, with_gtp_remat, partial_data_parallel).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return this rank's index in :func:`get_data_parallel_group`, unless a setter overrides it."""
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(with_context_parallel, with_gtp_remat, partial_data_parallel).rank()


def set_data_parallel_rank(rank: int | None) -> None:
    """Override what :func:`get_data_parallel_rank` returns; None undoes it."""
    global _MPU_DATA_PARALLEL_RANK
    _MPU_DATA_PARALLEL_RANK = rank


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the gloo group over the ranks of :func:`get_data_parallel_group`, for tensors on the CPU."""
    if with_context_parallel:
        if partial_data_parallel:
            return _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO or missing(
                "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO"
            )
        return _DATA_PARALLEL_GROUP_WITH_CP_GLOO or missing("_DATA_PARALLEL_GROUP_WITH_CP_GLOO")
    group = _DATA_PARALLEL_GROUP_GLOO or missing("_DATA_PARALLEL_GROUP_GLOO")
    if partial_data_parallel:
        raise _partial_without_cp()
    return group


def has_separate_all_gather_group() -> bool:
    """Return whether there is a second communicator over the data- and context-parallel ranks."""
    return _DATA_PARALLEL_GROUP_WITH_CP_AG is not None


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first global rank of the data-parallel group, with the context-parallel ranks if asked."""
    if with_context_parallel:
        return (_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP or missing("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"))[0]
    return (_DATA_PARALLEL_GLOBAL_RANKS or missing("_DATA_PARALLEL_GLOBAL_RANKS"))[0]


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Return a group of ``group_size`` neighboring ranks out of the data- and context-parallel group.

    Args:
        check_initialized: raise where there are no groups.
        group_size: a power of two, or the size of the whole data- and context-parallel group; ContractKeyError is
            raised for any other.
    """
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return _DATA_PARALLEL_GROUP_WITH_CP or missing("_DATA_PARALLEL_GROUP_WITH_CP", check_initialized)
    groups = _HYBRID_DP_CP_GROUPS or {}
    if group_size not in groups:
        raise ContractKeyError(
            f"there is no hybrid group of size {group_size}; there are {sorted(map(str, groups)) or 'none'}: "
            "make them with hybrid_context_parallel=True"
        )
    return groups[group_size]


# Pipeline stages, virtual stages, and the stages that share an embedding.


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the stages of this rank's pipeline: ``mesh.group("pp")``."""
    return _PIPELINE_MODEL_PARALLEL_GROUP or missing("_PIPELINE_MODEL_PARALLEL_GROUP", check_initialized)


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_pipeline_model_parallel_group`, unless a setter overrides it."""
    if _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    return (_PIPELINE_MODEL_PARALLEL_GROUP or missing("_PIPELINE_MODEL_PARALLEL_GROUP")).size()


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Override what :func:`get_pipeline_model_parallel_world_size` returns; None undoes it."""
    global _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def get_pipeline_model_parallel_rank() -> int:
    """Return this rank's index in :func:`get_pipeline_model_parallel_group`, unless a setter overrides it."""
    if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_RANK
    return (_PIPELINE_MODEL_PARALLEL_GROUP or missing("_PIPELINE_MODEL_PARALLEL_GROUP")).rank()


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Override what :func:`get_pipeline_model_parallel_rank` returns; None undoes it."""
    global _MPU_PIPELINE_MODEL_PARALLEL_RANK
    _MPU_PIPELINE_MODEL_PARALLEL_RANK = rank


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last comes the first: ``mesh.next("pp")``."""
    ranks = _PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS")
    return ranks[(get_pipeline_model_parallel_rank() + 1) % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; before the first comes the last: ``mesh.prev("pp")``."""
    ranks = _PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS")
    return ranks[(get_pipeline_model_parallel_rank() - 1) % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of the first stage."""
    return (_PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS"))[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage."""
    ranks = _PIPELINE_GLOBAL_RANKS or missing("_PIPELINE_GLOBAL_RANKS")
    return ranks[get_pipeline_model_parallel_world_size() - 1]


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is the first stage.

    Args:
        ignore_virtual: look at the rank only.
        vp_stage: the virtual stage that is asked about, where there are any and they are not ignored.
    """
    stages = _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    if not ignore_virtual and stages is not None and _required(vp_stage) != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is the last stage; the arguments are those of :func:`is_pipeline_first_stage`."""
    stages = _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    if not ignore_virtual and stages is not None and _required(vp_stage) != stages - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _required(vp_stage: int | None) -> int:
    if vp_stage is None:
        raise ContractError(
            f"there are {_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE} virtual stages on each rank; say which one is meant "
            "with vp_stage="
        )
    return vp_stage


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the virtual stage that was set; None without virtual stages."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages of each rank; None without virtual stages."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage; deprecated, as in the original: pass ``vp_stage`` to the functions that take it."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
    warn_deprecated(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage() and "
        "is_pipeline_last_stage() instead"
    )
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages of each rank."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the stages that hold the word embeddings; only they have it."""
    return _EMBEDDING_GROUP or missing("_EMBEDDING_GROUP", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the stages that hold the position embeddings; only they have it."""
    return _POSITION_EMBEDDING_GROUP or missing("_POSITION_EMBEDDING_GROUP", check_initialized)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank holds word embeddings.

    Args:
        ignore_virtual: look at the rank only; otherwise the first rank of the group holds them in its first
            virtual stage and the last one in its last.
        vp_stage: the virtual stage that is asked about.
    """
    ranks, rank = _EMBEDDING_GLOBAL_RANKS, dist.get_rank()
    if ranks is None or rank not in ranks:
        return False
    if ignore_virtual:
        return True
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if rank == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds position embeddings."""
    return (
        _POSITION_EMBEDDING_GLOBAL_RANKS is not None and dist.get_rank() in _POSITION_EMBEDDING_GLOBAL_RANKS
    )


# The experts' groups, and the groups of the instances of a distributed optimizer.


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over which the experts' weights are sharded that are gathered for each use."""
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP or missing("_EXPERT_GTP_WEIGHT_REMAT_GROUP", check_initialized)


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the global ranks of the group over which the experts' weights are sharded, ascending."""
    return _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS or missing(
        "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized
    )


def get_expert_gtp_weight_remat_world_size() -> int:
    """Return the number of ranks in :func:`get_expert_gtp_weight_remat_group`."""
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP.size() if _EXPERT_GTP_WEIGHT_REMAT_GROUP else 0


def get_expert_gtp_weight_remat_rank() -> int:
    """Return this rank's index in :func:`get_expert_gtp_weight_remat_group`."""
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP.rank() if _EXPERT_GTP_WEIGHT_REMAT_GROUP else 0


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks over which the experts are distributed: ``mesh.group("ep")``."""
    return _EXPERT_MODEL_PARALLEL_GROUP or missing("_EXPERT_MODEL_PARALLEL_GROUP", check_initialized)


def get_expert_model_parallel_src_rank() -> int:
    """Return the first global rank of the expert-parallel group."""
    return (_EXPERT_MODEL_PARALLEL_RANKS or missing("_EXPERT_MODEL_PARALLEL_RANKS"))[0]


def get_expert_model_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_expert_model_parallel_group`, unless a setter overrides it."""
    if _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    if _EXPERT_MODEL_PARALLEL_GROUP is None:
        return zero_or_raise("_EXPERT_MODEL_PARALLEL_GROUP")
    return _EXPERT_MODEL_PARALLEL_GROUP.size()


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Override what :func:`get_expert_model_parallel_world_size` returns; None undoes it."""
    global _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE = world_size


def get_expert_model_parallel_rank() -> int:
    """Return this rank's index in :func:`get_expert_model_parallel_group`, unless a setter overrides it."""
    if _MPU_EXPERT_MODEL_PARALLEL_RANK is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_RANK
    if _EXPERT_MODEL_PARALLEL_GROUP is None:
        return zero_or_raise("_EXPERT_MODEL_PARALLEL_GROUP")
    return _EXPERT_MODEL_PARALLEL_GROUP.rank()


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Override what :func:`get_expert_model_parallel_rank` returns; None undoes it."""
    global _MPU_EXPERT_MODEL_PARALLEL_RANK
    _MPU_EXPERT_MODEL_PARALLEL_RANK = rank


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that share each expert: ``mesh.group("etp")``."""
    return _EXPERT_TENSOR_PARALLEL_GROUP or missing("_EXPERT_TENSOR_PARALLEL_GROUP", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_expert_tensor_parallel_group`, unless a setter overrides it."""
    if _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    if _EXPERT_TENSOR_PARALLEL_GROUP is None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return _EXPERT_TENSOR_PARALLEL_GROUP.size()


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Override what :func:`get_expert_tensor_parallel_world_size` returns; None undoes it."""
    global _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = world_size


def get_expert_tensor_parallel_rank() -> int:
    """Return this rank's index in :func:`get_expert_tensor_parallel_group`, unless a setter overrides it."""
    if _MPU_EXPERT_TENSOR_PARALLEL_RANK is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_RANK
    if _EXPERT_TENSOR_PARALLEL_GROUP is None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return _EXPERT_TENSOR_PARALLEL_GROUP.rank()


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Override what :func:`get_expert_tensor_parallel_rank` returns; None undoes it."""
    global _MPU_EXPERT_TENSOR_PARALLEL_RANK
    _MPU_EXPERT_TENSOR_PARALLEL_RANK = rank


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over etp and ep together: one full set of the experts of a layer."""
    return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP or missing(
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", check_initialized
    )


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_expert_tensor_and_model_parallel_group`."""
    if _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP is None:
        return zero_or_raise("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
    return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP.size()


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Return this rank's index in :func:`get_expert_tensor_and_model_parallel_group`."""
    if _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP is None:
        return zero_or_raise("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
    return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP.rank()


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Return the group over etp, ep and pp, and egtp_remat if asked: one full set of the experts of the model."""
    if with_egtp_remat:
        return _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP or missing(
            "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", check_initialized
        )
    return _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP or missing(
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", check_initialized
    )


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """Return the group of the ranks that have the same experts and other samples.

    Args:
        check_initialized: raise where there is no such group.
        with_gtp_remat: False for the replicas of this rank's experts only: ``mesh.group("edp")``.
        partial_expert_data_parallel: only those of this rank's optimizer instance.
    """
    if not partial_expert_data_parallel:
        if with_gtp_remat:
            return _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT or missing(
                "_EXPERT_DATA_PARALLEL_GROUP", check_initialized
            )
        group = _EXPERT_DATA_PARALLEL_GROUP
    elif with_gtp_remat:
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
    else:
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
    return group or missing("_EXPERT_DATA_PARALLEL_GROUP", check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the number of ranks in :func:`get_expert_data_parallel_group`."""
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(True, with_gtp_remat, partial_expert_data_parallel).size()


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return this rank's index in :func:`get_expert_data_parallel_group`."""
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(True, with_gtp_remat, partial_expert_data_parallel).rank()


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return :func:`get_expert_data_parallel_group`, of which this is the deprecated name."""
    warn_deprecated(
        "get_data_modulo_expert_parallel_group is deprecated; call get_expert_data_parallel_group instead"
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the gloo group over the ranks of :func:`get_expert_data_parallel_group`."""
    if partial_expert_data_parallel:
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO
    else:
        group = _EXPERT_DATA_PARALLEL_GROUP_GLOO
    return group or missing("_EXPERT_DATA_PARALLEL_GROUP_GLOO")


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of every rank of this rank's optimizer instance; the world, where there is one instance."""
    return _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP or missing(
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", check_initialized
    )


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that hold the same part of the state in each optimizer instance."""
    return _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP or missing(
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized
    )


# The names of Megatron-DeepSpeed. Its sequence parallelism is cp here, or an axis sp of a mesh that is bound.


def sequence_parallel_is_initialized() -> bool:
    """Return whether there are sequence- and data-parallel groups, of one rank too."""
    return _CONTEXT_PARALLEL_GROUP is not None and _DATA_PARALLEL_GROUP is not None


def sequence_data_parallel_is_initialized() -> bool:
    """Return whether there is a group over the data- and sequence-parallel ranks."""
    return _DATA_PARALLEL_GROUP_WITH_CP is not None


def get_sequence_parallel_group() -> ProcessGroup:
    """Return the group of the ranks that share each sequence, :func:`get_context_parallel_group`."""
    return get_context_parallel_group()


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_sequence_parallel_group`."""
    return get_sequence_parallel_group().size()


def get_sequence_parallel_rank() -> int:
    """Return this rank's index in :func:`get_sequence_parallel_group`."""
    return get_sequence_parallel_group().rank()


def get_sequence_parallel_src_rank() -> int:
    """Return the first global rank of :func:`get_sequence_parallel_group`."""
    return get_context_parallel_global_ranks()[0]


def get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the group of the ranks with the same parameters, over which ZeRO shards: ``mesh.group("dp", "cp")``."""
    return get_data_parallel_group(with_context_parallel=True, with_gtp_remat=False)


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks in :func:`get_sequence_data_parallel_group`."""
    return get_sequence_data_parallel_group().size()


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's index in :func:`get_sequence_data_parallel_group`."""
    return get_sequence_data_parallel_group().rank()


def get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of the data-parallel group, ascending."""
    return _DATA_PARALLEL_GLOBAL_RANKS or missing("_DATA_PARALLEL_GLOBAL_RANKS")


def get_model_parallel_world_size() -> int:
    """Return the number of tensor-parallel ranks; ContractError where there is a pipeline, too."""
    _refuse_pipeline("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    return get_tensor_model_parallel_world_size()


def get_model_parallel_rank() -> int:
    """Return this rank's index among the tensor-parallel ranks; ContractError where there is a pipeline, too."""
    _refuse_pipeline("get_model_parallel_rank", "get_tensor_model_parallel_rank")
    return get_tensor_model_parallel_rank()


def _refuse_pipeline(name: str, instead: str) -> None:
    stages = get_pipeline_model_parallel_world_size()
    if stages != 1:
        raise ContractError(
            f"{name}() is of the tensor-parallel ranks, and there are {stages} pipeline stages, which are model-parallel, "
            f"too; call {instead}()"
        )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # The mpu of trees before megatron.core has the layers, mappings and helpers for tensors, too.
        tensor_parallel = import_module(f"{__package__}.tensor_parallel")
        if name in tensor_parallel.__all__:
            return getattr(tensor_parallel, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Buffers.


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the buffer for temporary tensors, which is made with the groups."""
    return _GLOBAL_MEMORY_BUFFER or missing("_GLOBAL_MEMORY_BUFFER")


def get_global_symmetric_memory_buffer() -> GlobalSymmetricMemoryBuffer:
    """Return the buffer in symmetric memory, once ``_set_global_symmetric_memory_buffer()`` has made it."""
    return _GLOBAL_SYMMETRIC_MEMORY_BUFFER or missing("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")


def destroy_global_memory_buffer() -> None:
    """Release the buffer for temporary tensors."""
    global _GLOBAL_MEMORY_BUFFER
    _GLOBAL_MEMORY_BUFFER = None


def destroy_global_symmetric_memory_buffer() -> None:
    """Release the buffer in symmetric memory."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = None


def _set_global_memory_buffer() -> None:
    """Make the buffer for temporary tensors."""
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is not None:
        raise ContractError("there is a global memory buffer; call destroy_global_memory_buffer() first")
    _GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer(None if BINDING.shown is None else BINDING.shown.device)


def _set_global_symmetric_memory_buffer() -> None:
    """Make the buffer in the symmetric memory of the tensor-parallel ranks, all of which call this."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    if _GLOBAL_SYMMETRIC_MEMORY_BUFFER is not None:
        raise ContractError(
            "there is a global symmetric memory buffer; call destroy_global_symmetric_memory_buffer() first"
        )
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = GlobalSymmetricMemoryBuffer(
        size_in_mb=_SYMMETRIC_MEGABYTES, process_group=get_tensor_model_parallel_group()
    )


if not TYPE_CHECKING:  # Megatron's names: what the modules of the dialect define
    __all__ = [
        name
        for name, value in list(globals().items())
        if not name.startswith("_")
        and name not in {"BINDING", "missing", "warn_deprecated", "zero_or_raise"}
        and (value is logger or getattr(value, "__module__", "").startswith(f"{__package__}."))
    ]

BINDING.add_module(sys.modules[__name__])
