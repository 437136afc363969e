"""Pipeline stages, virtual stages, and the stages that share an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.state import STATE, late, missing, warn_deprecated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "get_embedding_group",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]

_NO_EMBEDDING = "this rank is in no such group: its stage holds no such embedding"


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """The stages of this rank's pipeline: ``mesh.group("pp")``."""
    return STATE.pp_group or late(
        "pp_group", "the pipeline-parallel group", check_initialized=check_initialized
    )


def get_pipeline_model_parallel_world_size() -> int:
    """How many stages a pipeline has; what was set wins."""
    size = STATE.pp_size
    if size is None:
        raise missing("the pipeline-parallel group")
    return size


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage; what was set wins."""
    rank = STATE.pp_rank
    if rank is None:
        raise missing("the pipeline-parallel group")
    return rank


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Let the number of stages be this, whatever the mesh says; None undoes it."""
    STATE.put("set_pp_size", world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Let the stage be this, whatever the mesh says; None undoes it."""
    STATE.put("set_pp_rank", rank)


def _stage(step: int) -> int:
    """The global rank some stages further on, round the end."""
    ranks = STATE.pp_ranks
    if ranks is None:
        raise missing("the pipeline-parallel group")
    place = (STATE.pp_rank + step) % STATE.pp_size
    return ranks[place]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; after the last comes the first: ``mesh.next("pp")``."""
    return _stage(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the stage before; before the first comes the last: ``mesh.prev("pp")``."""
    return _stage(-1)


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of the first stage."""
    try:
        return STATE.pp_ranks[0]
    except TypeError:  # None, for want of ranks
        raise missing("the pipeline-parallel group") from None


def get_pipeline_model_parallel_last_rank() -> int:
    """The global rank of the last stage."""
    ranks = STATE.pp_ranks
    if ranks is None:
        raise missing("the pipeline-parallel group")
    last = STATE.pp_size - 1
    return ranks[last]


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank is the first stage.

    Args:
        ignore_virtual: look at the rank only.
        vp_stage: the virtual stage that is asked about, where there are any and they are not ignored.

    Raises:
        ContractError: there are no groups yet, or ``vp_stage`` is needed and missing.
    """
    if not ignore_virtual and STATE.vpp_size is not None and _virtual(vp_stage) != 0:
        return False
    rank = STATE.pp_rank
    if rank is None:
        raise missing("the pipeline-parallel group")
    return bool(rank == 0)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank is the last stage.

    Args:
        ignore_virtual: look at the rank only.
        vp_stage: the virtual stage that is asked about, where there are any and they are not ignored.

    Raises:
        ContractError: there are no groups yet, or ``vp_stage`` is needed and missing.
    """
    if not ignore_virtual and STATE.vpp_size is not None and _virtual(vp_stage) != STATE.vpp_size - 1:
        return False
    rank = STATE.pp_rank
    if rank is None:
        raise missing("the pipeline-parallel group")
    return bool(rank == STATE.pp_size - 1)


def _virtual(vp_stage: int | None) -> int:
    if vp_stage is None:
        raise ContractError(
            f"there are {STATE.vpp_size} virtual stages on each rank; say which one is meant with vp_stage="
        )
    return vp_stage


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The virtual stage that was set; None without virtual stages."""
    return STATE.vpp_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """How many virtual stages each rank has; None without virtual stages."""
    return STATE.vpp_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage; deprecated, as in the original: pass ``vp_stage`` to who asks."""
    warn_deprecated(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage() and "
        "is_pipeline_last_stage() instead"
    )
    STATE.vpp_rank = rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages on each rank."""
    STATE.vpp_size = world_size


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """The stages of this rank's pipeline that hold the word embeddings; only they have the group."""
    return STATE.embedding_group or late(
        "embedding_group", "the embedding group", _NO_EMBEDDING, check_initialized=check_initialized
    )


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """The stages of this rank's pipeline that hold the position embeddings; only they have the group."""
    return STATE.position_embedding_group or late(
        "position_embedding_group",
        "the position-embedding group",
        _NO_EMBEDDING,
        check_initialized=check_initialized,
    )


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds word embeddings.

    Args:
        ignore_virtual: look at the rank only; otherwise the first rank of the group holds them in its first
            virtual stage and the last one in its last.
        vp_stage: the virtual stage that is asked about.
    """
    ranks = STATE.embedding_ranks
    rank = dist.get_rank()
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
    """Whether this rank holds position embeddings."""
    ranks = STATE.position_embedding_ranks
    return ranks is not None and dist.get_rank() in ranks
