"""A fallback for ``megatron.core.parallel_state``, with the results of release 0.16.1.

Like upstream it is a module with variables: ``initialize_model_parallel`` fills them, and each
accessor returns its own variable. An accessor whose variable is empty raises
:class:`~namedmesh.compat.ContractError`, an ``AssertionError``. A size or a rank that was assigned
with a ``set_`` function takes precedence over the value of the group.

Flags whose position differs between releases are keyword-only. ``with_gtp_remat`` has no effect, as
weights that are gathered for each use need megatron-core.
"""
# ruff: noqa: ARG001, PLW0603  upstream's arguments and variables

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from namedmesh.compat import ContractError
from namedmesh.compat.megatron.fallback import (  # noqa: F401  upstream has these here
    GlobalMemoryBuffer,
    ParallelStateFallback,
    get_nccl_options,
    overwrite_nccl_comm_cfgs,
    raise_uninitialized,
)
from namedmesh.compat.megatron.ranks import (  # noqa: F401  the same
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)

logger = logging.getLogger(__name__)

_fallback = ParallelStateFallback(globals())
create_group = _fallback.create_group
create_hierarchical_groups = _fallback.create_hierarchical_groups
create_hybrid_dp_cp_groups = _fallback.create_hybrid_dp_cp_groups
create_all_gather_groups = _fallback.create_all_gather_groups
update_pg_timeout = _fallback.update_pg_timeout
initialize_model_parallel = _fallback.initialize_model_parallel


def destroy_model_parallel() -> None:
    """Reset the variables. The groups belong to meshes, which the caller closes."""


# --- the variables --------------------------------------------------------------------------------

# Legacy code reads and assigns these names, so they are upstream's. For each kind of group there is
# this rank's group, in some cases the global ranks of that group, and in some a gloo group over the
# same ranks.

# Tensor, pipeline and context parallelism.
_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_PIPELINE_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_GLOBAL_RANKS: Any = None
_MODEL_PARALLEL_GROUP: Any = None
_MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_EMBEDDING_GROUP: Any = None
_EMBEDDING_GLOBAL_RANKS: Any = None
_POSITION_EMBEDDING_GROUP: Any = None
_POSITION_EMBEDDING_GLOBAL_RANKS: Any = None
_CONTEXT_PARALLEL_GROUP: Any = None
_CONTEXT_PARALLEL_GLOBAL_RANKS: Any = None
_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS: Any = None
_TENSOR_AND_CONTEXT_PARALLEL_GROUP: Any = None

# Data parallelism. _AG is a duplicate for all-gathers, _PARTIAL_ is this rank's optimizer instance.
_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: Any = None
_DATA_PARALLEL_GROUP_GLOO: Any = None
_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_AG: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None
_TENSOR_AND_DATA_PARALLEL_GROUP: Any = None
_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_HYBRID_DP_CP_GROUPS: dict[int, Any] = {}

# Experts.
_EXPERT_MODEL_PARALLEL_GROUP: Any = None
_EXPERT_MODEL_PARALLEL_RANKS: Any = None
_EXPERT_TENSOR_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP: Any = None
_EXPERT_DATA_PARALLEL_GROUP: Any = None
_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None
_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP: Any = None
_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None

# Sizes and ranks that were assigned with a set_ function.
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
_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK: Any = None
_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None

# Buffers, and the groups of this rank. The first entry of the list is None, the default group.
_GLOBAL_MEMORY_BUFFER: Any = None
_GLOBAL_SYMMETRIC_MEMORY_BUFFER: Any = None
_global_process_group_list: Any = None


# --- initialization -------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Return whether the groups exist."""
    return _DATA_PARALLEL_GROUP is not None


def is_unitialized() -> bool:
    """Return whether the groups do not exist. Upstream deprecates it, in this spelling."""
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Return whether the tensor, pipeline and data parallel groups exist."""
    if _TENSOR_MODEL_PARALLEL_GROUP is None or _PIPELINE_MODEL_PARALLEL_GROUP is None:
        return False
    return _DATA_PARALLEL_GROUP is not None


# Legacy code may pass the argument by name, so the two kinds of setters differ in its name.


def _make_size_setter(variable: str) -> Callable[[int | None], None]:
    """Make the ``set_`` function that assigns a size to a variable."""

    def set_size(world_size: int | None) -> None:
        """Override the size that the accessor returns; None restores the size of the group."""
        globals()[variable] = world_size

    return set_size


def _make_rank_setter(variable: str) -> Callable[[int | None], None]:
    """Make the ``set_`` function that assigns a rank to a variable."""

    def set_rank(rank: int | None) -> None:
        """Override the rank that the accessor returns; None restores the rank in the group."""
        globals()[variable] = rank

    return set_rank


def _zero_without_default_group(variable: str) -> int:
    """Return 0 without torch's default group, as upstream does; raise the error otherwise."""
    if dist.is_initialized():
        raise_uninitialized(variable)
    return 0


# --- tensor parallelism ---------------------------------------------------------------------------


def get_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group over pp and tp that holds one replica of the model."""
    return _MODEL_PARALLEL_GROUP or raise_uninitialized("_MODEL_PARALLEL_GROUP", check_initialized)


def get_model_parallel_src_rank() -> int:
    """Return the first global rank of the model parallel group."""
    return (_MODEL_PARALLEL_GLOBAL_RANKS or raise_uninitialized("_MODEL_PARALLEL_GLOBAL_RANKS"))[0]


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the tensor parallel group."""
    return _TENSOR_MODEL_PARALLEL_GROUP or raise_uninitialized(
        "_TENSOR_MODEL_PARALLEL_GROUP", check_initialized
    )


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of tensor parallel ranks."""
    if _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return (_TENSOR_MODEL_PARALLEL_GROUP or raise_uninitialized("_TENSOR_MODEL_PARALLEL_GROUP")).size()


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's index in the tensor parallel group."""
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return (_TENSOR_MODEL_PARALLEL_GROUP or raise_uninitialized("_TENSOR_MODEL_PARALLEL_GROUP")).rank()


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of the tensor parallel group."""
    return (
        _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS or raise_uninitialized("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")
    )[0]


set_tensor_model_parallel_world_size = _make_size_setter("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE")
set_tensor_model_parallel_rank = _make_rank_setter("_MPU_TENSOR_MODEL_PARALLEL_RANK")


# --- pipeline parallelism -------------------------------------------------------------------------


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the pipeline parallel group."""
    return _PIPELINE_MODEL_PARALLEL_GROUP or raise_uninitialized(
        "_PIPELINE_MODEL_PARALLEL_GROUP", check_initialized
    )


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    if _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    return (_PIPELINE_MODEL_PARALLEL_GROUP or raise_uninitialized("_PIPELINE_MODEL_PARALLEL_GROUP")).size()


def get_pipeline_model_parallel_rank() -> int:
    """Return this rank's stage."""
    if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_RANK
    return (_PIPELINE_MODEL_PARALLEL_GROUP or raise_uninitialized("_PIPELINE_MODEL_PARALLEL_GROUP")).rank()


set_pipeline_model_parallel_world_size = _make_size_setter("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
set_pipeline_model_parallel_rank = _make_rank_setter("_MPU_PIPELINE_MODEL_PARALLEL_RANK")


# The ranks of other stages use the accessors above, so that an assigned size or rank counts here
# too.


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last one comes the first."""
    ranks: Any = _PIPELINE_GLOBAL_RANKS or raise_uninitialized("_PIPELINE_GLOBAL_RANKS")
    return ranks[(get_pipeline_model_parallel_rank() + 1) % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; before the first one comes the last."""
    ranks: Any = _PIPELINE_GLOBAL_RANKS or raise_uninitialized("_PIPELINE_GLOBAL_RANKS")
    return ranks[(get_pipeline_model_parallel_rank() - 1) % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of the first stage."""
    return (_PIPELINE_GLOBAL_RANKS or raise_uninitialized("_PIPELINE_GLOBAL_RANKS"))[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage."""
    ranks: Any = _PIPELINE_GLOBAL_RANKS or raise_uninitialized("_PIPELINE_GLOBAL_RANKS")
    return ranks[get_pipeline_model_parallel_world_size() - 1]


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the index of the current virtual stage of this rank, or None without any."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages on each rank, or None without any."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


set_virtual_pipeline_model_parallel_world_size = _make_size_setter(
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
)
set_virtual_pipeline_model_parallel_rank = _make_rank_setter("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK")


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank has the first stage.

    Args:
        ignore_virtual: whether to disregard the virtual stage.
        vp_stage: the virtual stage, which otherwise must be the first one of this rank.
    """
    if not (ignore_virtual or _is_virtual_stage(vp_stage, 0)):
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank has the last stage.

    Args:
        ignore_virtual: whether to disregard the virtual stage.
        vp_stage: the virtual stage, which otherwise must be the last one of this rank.
    """
    last = get_pipeline_model_parallel_world_size() - 1
    if not (ignore_virtual or _is_virtual_stage(vp_stage, -1)):
        return False
    return get_pipeline_model_parallel_rank() == last


def _is_virtual_stage(vp_stage: int | None, index: int) -> bool:
    """Return whether a virtual stage is the first (0) or last (-1); True without any."""
    if _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is None:
        return True
    if vp_stage is None:
        raise ContractError("ignore_virtual=False needs a virtual stage; pass vp_stage=")
    return vp_stage == index % _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


# --- embeddings on the first and the last stage ---------------------------------------------------


def get_embedding_group(check_initialized: bool = True) -> Any:
    """Return the group of the stages that hold word embeddings."""
    return _EMBEDDING_GROUP or raise_uninitialized("_EMBEDDING_GROUP", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> Any:
    """Return the group of the stages that hold position embeddings."""
    return _POSITION_EMBEDDING_GROUP or raise_uninitialized("_POSITION_EMBEDDING_GROUP", check_initialized)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or one of its virtual stages, holds word embeddings.

    Args:
        ignore_virtual: whether to disregard the virtual stage.
        vp_stage: the virtual stage, which otherwise decides on the first and the last of these
            ranks.
    """
    ranks = _EMBEDDING_GLOBAL_RANKS or []
    rank = dist.get_rank()
    if ignore_virtual or rank not in ranks:
        return rank in ranks
    # With virtual stages, only the first and the last one of the pipeline hold embeddings.
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if rank == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds position embeddings."""
    return dist.get_rank() in (_POSITION_EMBEDDING_GLOBAL_RANKS or ())


# --- context parallelism --------------------------------------------------------------------------


def get_context_parallel_group(check_initialized: bool = True) -> Any:
    """Return the context parallel group."""
    return _CONTEXT_PARALLEL_GROUP or raise_uninitialized("_CONTEXT_PARALLEL_GROUP", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> Any:
    """Return the global ranks of the context parallel group."""
    return _CONTEXT_PARALLEL_GLOBAL_RANKS or raise_uninitialized(
        "_CONTEXT_PARALLEL_GLOBAL_RANKS", check_initialized
    )


def get_context_parallel_world_size() -> int:
    """Return the number of context parallel ranks; 0 without torch's default group."""
    if _CONTEXT_PARALLEL_GROUP:
        return _CONTEXT_PARALLEL_GROUP.size()
    return _zero_without_default_group("_CONTEXT_PARALLEL_GROUP")


def get_context_parallel_rank() -> int:
    """Return this rank's context parallel index; 0 without torch's default group."""
    if _CONTEXT_PARALLEL_GROUP:
        return _CONTEXT_PARALLEL_GROUP.rank()
    return _zero_without_default_group("_CONTEXT_PARALLEL_GROUP")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> Any:
    """Return the context parallel groups at each level of the hierarchy, innermost first."""
    return _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS or raise_uninitialized(
        "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", check_initialized
    )


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group over tp and cp."""
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP or raise_uninitialized(
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", check_initialized
    )


def get_tensor_and_context_parallel_world_size() -> int:
    """Return the number of ranks over tp and cp; 0 without torch's default group."""
    if _TENSOR_AND_CONTEXT_PARALLEL_GROUP:
        return _TENSOR_AND_CONTEXT_PARALLEL_GROUP.size()
    return _zero_without_default_group("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")


def get_tensor_and_context_parallel_rank() -> int:
    """Return this rank's index over tp and cp; 0 without torch's default group."""
    if _TENSOR_AND_CONTEXT_PARALLEL_GROUP:
        return _TENSOR_AND_CONTEXT_PARALLEL_GROUP.rank()
    return _zero_without_default_group("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")


# --- data parallelism -----------------------------------------------------------------------------


def has_separate_all_gather_group() -> bool:
    """Return whether there is a duplicate of the data parallel group for all-gathers."""
    return _DATA_PARALLEL_GROUP_WITH_CP_AG is not None


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
        ContractError: the group does not exist, or only the group over dp and cp has the subgroup.
    """
    if not with_context_parallel:
        if partial_data_parallel:
            _raise_partial_without_cp()
        return _DATA_PARALLEL_GROUP or raise_uninitialized("_DATA_PARALLEL_GROUP")
    if partial_data_parallel:
        # Initialization makes both groups, so the error names the one that legacy code knows.
        return _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP or raise_uninitialized(
            "_DATA_PARALLEL_GROUP_WITH_CP"
        )
    if independent_all_gather:
        return _DATA_PARALLEL_GROUP_WITH_CP_AG or raise_uninitialized("_DATA_PARALLEL_GROUP_WITH_CP_AG")
    return _DATA_PARALLEL_GROUP_WITH_CP or raise_uninitialized("_DATA_PARALLEL_GROUP_WITH_CP")


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Any:
    """Return the gloo group over the ranks of the data parallel group.

    Args:
        with_context_parallel: whether to return the group over dp and cp.
        partial_data_parallel: whether to return its subgroup in this rank's optimizer
            instance.
    """
    if not with_context_parallel:
        if partial_data_parallel:
            _raise_partial_without_cp()
        return _DATA_PARALLEL_GROUP_GLOO or raise_uninitialized("_DATA_PARALLEL_GROUP_GLOO")
    if partial_data_parallel:
        return _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO or raise_uninitialized(
            "_DATA_PARALLEL_GROUP_WITH_CP_GLOO"
        )
    return _DATA_PARALLEL_GROUP_WITH_CP_GLOO or raise_uninitialized("_DATA_PARALLEL_GROUP_WITH_CP_GLOO")


def _raise_partial_without_cp() -> None:
    """Raise: upstream has no group of an optimizer instance without cp."""
    raise ContractError("partial_data_parallel needs with_context_parallel=True; pass both")


def get_data_parallel_world_size(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return the number of data parallel ranks; 0 without torch's default group.

    Args:
        with_context_parallel: as for :func:`get_data_parallel_group`.
        with_gtp_remat: no effect.
        partial_data_parallel: as for :func:`get_data_parallel_group`.
    """
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return this rank's data parallel index; 0 without torch's default group.

    Args:
        with_context_parallel: as for :func:`get_data_parallel_group`.
        with_gtp_remat: no effect.
        partial_data_parallel: as for :func:`get_data_parallel_group`.
    """
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel).rank()


# There is no setter for the size, as upstream has none.
set_data_parallel_rank = _make_rank_setter("_MPU_DATA_PARALLEL_RANK")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first global rank of the data parallel group, or of the group over dp and cp."""
    if not with_context_parallel:
        return (_DATA_PARALLEL_GLOBAL_RANKS or raise_uninitialized("_DATA_PARALLEL_GLOBAL_RANKS"))[0]
    ranks = _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP
    return (ranks or raise_uninitialized("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"))[0]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Any:
    """Return the group over tp and dp, or over tp, dp and cp."""
    if with_context_parallel:
        return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP or raise_uninitialized(
            "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", check_initialized
        )
    return _TENSOR_AND_DATA_PARALLEL_GROUP or raise_uninitialized(
        "_TENSOR_AND_DATA_PARALLEL_GROUP", check_initialized
    )


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Any:
    """Return the group over which FP8 maxima are reduced.

    Args:
        with_context_parallel: whether the group includes cp.
        tp_only_amax_red: whether the group excludes dp.
    """
    if with_context_parallel:
        if tp_only_amax_red:
            return _TENSOR_AND_CONTEXT_PARALLEL_GROUP or raise_uninitialized(
                "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"
            )
        return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP or raise_uninitialized(
            "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"
        )
    if tp_only_amax_red:
        return _TENSOR_MODEL_PARALLEL_GROUP or raise_uninitialized("_TENSOR_MODEL_PARALLEL_GROUP")
    return _TENSOR_AND_DATA_PARALLEL_GROUP or raise_uninitialized("_TENSOR_AND_DATA_PARALLEL_GROUP")


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: Any = None) -> Any:
    """Return the group of ``group_size`` neighboring ranks over dp and cp."""
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return get_data_parallel_group(with_context_parallel=True)
    return _HYBRID_DP_CP_GROUPS[group_size]


# --- experts --------------------------------------------------------------------------------------


def get_expert_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the expert parallel group."""
    return _EXPERT_MODEL_PARALLEL_GROUP or raise_uninitialized(
        "_EXPERT_MODEL_PARALLEL_GROUP", check_initialized
    )


def get_expert_model_parallel_src_rank() -> int:
    """Return the first global rank of the expert parallel group."""
    return (_EXPERT_MODEL_PARALLEL_RANKS or raise_uninitialized("_EXPERT_MODEL_PARALLEL_RANKS"))[0]


def get_expert_model_parallel_world_size() -> int:
    """Return the number of expert parallel ranks; 0 without torch's default group."""
    if _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    if _EXPERT_MODEL_PARALLEL_GROUP:
        return _EXPERT_MODEL_PARALLEL_GROUP.size()
    return _zero_without_default_group("_EXPERT_MODEL_PARALLEL_GROUP")


def get_expert_model_parallel_rank() -> int:
    """Return this rank's expert parallel index; 0 without torch's default group."""
    if _MPU_EXPERT_MODEL_PARALLEL_RANK is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_RANK
    if _EXPERT_MODEL_PARALLEL_GROUP:
        return _EXPERT_MODEL_PARALLEL_GROUP.rank()
    return _zero_without_default_group("_EXPERT_MODEL_PARALLEL_GROUP")


set_expert_model_parallel_world_size = _make_size_setter("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE")
set_expert_model_parallel_rank = _make_rank_setter("_MPU_EXPERT_MODEL_PARALLEL_RANK")


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    """Return the tensor parallel group of the experts."""
    return _EXPERT_TENSOR_PARALLEL_GROUP or raise_uninitialized(
        "_EXPERT_TENSOR_PARALLEL_GROUP", check_initialized
    )


def get_expert_tensor_parallel_world_size() -> int:
    """Return the number of tensor parallel ranks of the experts."""
    if _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    if _EXPERT_TENSOR_PARALLEL_GROUP:
        return _EXPERT_TENSOR_PARALLEL_GROUP.size()
    # As upstream: without a group, the size that was assigned for the dense layers, or None.
    return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE


def get_expert_tensor_parallel_rank() -> int:
    """Return this rank's index in the tensor parallel group of the experts."""
    if _MPU_EXPERT_TENSOR_PARALLEL_RANK is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_RANK
    if _EXPERT_TENSOR_PARALLEL_GROUP:
        return _EXPERT_TENSOR_PARALLEL_GROUP.rank()
    return _MPU_TENSOR_MODEL_PARALLEL_RANK


set_expert_tensor_parallel_world_size = _make_size_setter("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE")
set_expert_tensor_parallel_rank = _make_rank_setter("_MPU_EXPERT_TENSOR_PARALLEL_RANK")


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group over ep and etp."""
    return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP or raise_uninitialized(
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", check_initialized
    )


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Return the number of ranks over ep and etp; 0 without torch's default group."""
    if _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP:
        return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP.size()
    return _zero_without_default_group("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Return this rank's index over ep and etp; 0 without torch's default group."""
    if _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP:
        return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP.rank()
    return _zero_without_default_group("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group over pp, ep and etp that holds one replica of the experts."""
    return _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP or raise_uninitialized(
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", check_initialized
    )


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
    if partial_expert_data_parallel:
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP or raise_uninitialized(
            "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized
        )
    return _EXPERT_DATA_PARALLEL_GROUP or raise_uninitialized(
        "_EXPERT_DATA_PARALLEL_GROUP", check_initialized
    )


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    """Return the data parallel group of the experts. Upstream deprecates this name."""
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """Return the gloo group over the ranks of :func:`get_expert_data_parallel_group`."""
    if partial_expert_data_parallel:
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO or raise_uninitialized(
            "_EXPERT_DATA_PARALLEL_GROUP_GLOO"
        )
    return _EXPERT_DATA_PARALLEL_GROUP_GLOO or raise_uninitialized("_EXPERT_DATA_PARALLEL_GROUP_GLOO")


def get_expert_data_parallel_world_size(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the size of the experts' data parallel group; 0 without torch's default group."""
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel).size()


def get_expert_data_parallel_rank(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return this rank's index in the experts' data parallel group; 0 without a default group."""
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel).rank()


# --- optimizer instances, coordinates and buffers -------------------------------------------------


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    """Return the group of all ranks in this rank's optimizer instance."""
    return _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP or raise_uninitialized(
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", check_initialized
    )


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    """Return the group of this rank's counterparts in all optimizer instances."""
    # As upstream: the dense layers and the experts have the same group across instances.
    return _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP or raise_uninitialized(
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized
    )


def get_all_ranks() -> str:
    """Return this rank's indices in the tp, dp, cp, pp and ep groups, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    # A rank that was assigned may be None.
    return "_".join(str(rank or 0) for rank in ranks)


def get_global_memory_buffer() -> Any:
    """Return the global memory buffer."""
    return _GLOBAL_MEMORY_BUFFER or raise_uninitialized("_GLOBAL_MEMORY_BUFFER")


def get_global_symmetric_memory_buffer() -> Any:
    """Return the global buffer in symmetric memory, which only megatron-core makes."""
    return _GLOBAL_SYMMETRIC_MEMORY_BUFFER or raise_uninitialized("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")


def destroy_global_memory_buffer() -> None:
    """Delete the global memory buffer."""
    global _GLOBAL_MEMORY_BUFFER
    _GLOBAL_MEMORY_BUFFER = None


def destroy_global_symmetric_memory_buffer() -> None:
    """Delete the global buffer in symmetric memory."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = None


def _set_global_memory_buffer() -> None:
    """Make the global memory buffer; raise if it exists."""
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is not None:
        raise ContractError(
            "the global memory buffer exists already; call destroy_global_memory_buffer() first"
        )
    _GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()


def _set_global_symmetric_memory_buffer() -> None:
    """Raise: buffers in symmetric memory need megatron-core."""
    raise ContractError(
        "buffers in symmetric memory are not supported without megatron-core; install megatron-core"
    )
