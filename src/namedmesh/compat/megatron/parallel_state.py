"""Megatron's ``parallel_state``: the same names, signatures and answers, over the groups of one NamedMesh.

The functions read one object, :data:`namedmesh.compat.megatron.state.STATE`. The original's variables, such as
``_TENSOR_MODEL_PARALLEL_GROUP``, can be read and assigned here too; an assignment takes precedence over the mesh until
the variable is deleted, or the state is destroyed.

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
# ruff: noqa: I001, PLC0414  names of the original that other modules define are exported from here

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from namedmesh.compat.binding import make_patchable
from namedmesh.compat.errors import ContractError, ContractKeyError
from namedmesh.compat.megatron import release
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer, GlobalSymmetricMemoryBuffer
from namedmesh.compat.megatron.groups import (
    create_all_gather_groups as create_all_gather_groups,
    create_group as create_group,
    create_hierarchical_groups as create_hierarchical_groups,
    create_hybrid_dp_cp_groups as create_hybrid_dp_cp_groups,
    get_nccl_options as get_nccl_options,
    logger as logger,
    overwrite_nccl_comm_cfgs as overwrite_nccl_comm_cfgs,
    update_pg_timeout as update_pg_timeout,
)
from namedmesh.compat.megatron.initialize import (
    destroy_model_parallel as destroy_model_parallel,
    initialize_model_parallel as initialize_model_parallel,
)
from namedmesh.compat.megatron.rank_generator import (
    RankGenerator as RankGenerator,
    default_embedding_ranks as default_embedding_ranks,
    default_position_embedding_ranks as default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from namedmesh.compat.megatron.state import (
    ROWS,
    STATE,
    VARIABLES,
    raise_missing,
    warn_deprecated,
    zero_or_raise,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

_SYMMETRIC_MEGABYTES = 256
_Before = TypeVar("_Before", bound="Callable[..., Any]")


# Release 0.19 put with_gtp_remat before the flags of the parts of data-parallel groups: such an accessor is here as it
# is there, and as it was before.

_NEWEST_AND_BEFORE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def _before(newest: Callable[..., Any]) -> Callable[[_Before], _Before]:
    """Let a function be an accessor as it was before release 0.19."""

    def register(before: _Before) -> _Before:
        before.__name__, before.__doc__ = newest.__name__, newest.__doc__
        _NEWEST_AND_BEFORE[newest.__name__] = newest, before
        return before

    return register


def _partial_without_cp() -> ContractError:
    return ContractError(
        "partial_data_parallel is True without with_context_parallel; a part for the optimizer includes the "
        "context-parallel ranks, so say with_context_parallel=True too"
    )


# Sizes and ranks, and the setters that override them.


def _described(accessor: Callable[..., int], answer: str, name: str) -> Callable[..., int]:
    """Give an accessor of the size or the rank of a group its name, and its docstring."""
    word, what = ("world_size", "the number of ranks") if answer == "size" else ("rank", "this rank's index")
    accessor.__name__ = f"get_{name}_{word}"
    accessor.__doc__ = f"Return {what} in :func:`get_{name}_group`, unless a setter overrides it."
    return accessor


def _number(answer: str, base: str, otherwise: Callable[[str], Any] = zero_or_raise) -> Callable[[], int]:
    """Make the accessor of the slot ``{base}_{answer}`` of the state: a size or a rank, or ``otherwise(slot)``."""
    slot, group = f"{base}_{answer}", f"{base}_group"

    def accessor() -> int:
        value = getattr(STATE, slot)
        return otherwise(group) if value is None else value

    return _described(accessor, answer, ROWS[group].name)


_size, _rank = partial(_number, "size"), partial(_number, "rank")


def _size_setter(base: str) -> Callable[[int | None], None]:
    def setter(world_size: int | None) -> None:
        """Override the size that the accessor returns; None undoes it."""
        STATE.put(f"set_{base}_size", world_size)

    return setter


def _rank_setter(base: str) -> Callable[[int | None], None]:
    def setter(rank: int | None) -> None:
        """Override the rank that the accessor returns; None undoes it."""
        STATE.put(f"set_{base}_rank", rank)

    return setter


def _data_parallel_number(answer: str) -> Callable[..., int]:
    """Make the accessor of a size or a rank in the data-parallel groups."""

    def newest(
        with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
    ) -> int:
        base = "intra_dp_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp"
        number = getattr(STATE, f"{base}_gtp_{answer}" if with_gtp_remat else f"{base}_{answer}")
        part_without_cp = partial_data_parallel and not with_context_parallel
        if part_without_cp and getattr(STATE, f"set_dp_{answer}") is None and dist.is_initialized():
            raise _partial_without_cp()
        return zero_or_raise(f"{base}_group") if number is None else number

    _described(newest, answer, "data_parallel")

    @_before(newest)
    def before(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
        return newest(with_context_parallel, False, partial_data_parallel)

    return newest


def _expert_data_parallel_number(answer: str) -> Callable[..., int]:
    """Make the accessor of a size or a rank in the experts' data-parallel groups."""

    def newest(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
        base = "intra_edp" if partial_expert_data_parallel else "edp"
        number = getattr(STATE, f"{base}_gtp_{answer}" if with_gtp_remat else f"{base}_{answer}")
        return zero_or_raise("edp_group") if number is None else number

    _described(newest, answer, "expert_data_parallel")

    @_before(newest)
    def before(partial_expert_data_parallel: bool = False) -> int:
        return newest(False, partial_expert_data_parallel)

    return newest


get_tensor_model_parallel_world_size = _size("tp", raise_missing)
get_tensor_model_parallel_rank = _rank("tp", raise_missing)
set_tensor_model_parallel_world_size = _size_setter("tp")
set_tensor_model_parallel_rank = _rank_setter("tp")
get_pipeline_model_parallel_world_size = _size("pp", raise_missing)
get_pipeline_model_parallel_rank = _rank("pp", raise_missing)
set_pipeline_model_parallel_world_size = _size_setter("pp")
set_pipeline_model_parallel_rank = _rank_setter("pp")
get_data_parallel_world_size = _data_parallel_number("size")
get_data_parallel_rank = _data_parallel_number("rank")
set_data_parallel_rank = _rank_setter("dp")
get_context_parallel_world_size = _size("cp")
get_context_parallel_rank = _rank("cp")
get_tensor_and_context_parallel_world_size = _size("tp_cp")
get_tensor_and_context_parallel_rank = _rank("tp_cp")
get_gtp_weight_remat_world_size = _size("gtp", lambda _: 0)
get_gtp_weight_remat_rank = _rank("gtp", lambda _: 0)
get_expert_model_parallel_world_size = _size("ep")
get_expert_model_parallel_rank = _rank("ep")
set_expert_model_parallel_world_size = _size_setter("ep")
set_expert_model_parallel_rank = _rank_setter("ep")
get_expert_tensor_parallel_world_size = _size("etp", lambda _: None)
get_expert_tensor_parallel_rank = _rank("etp", lambda _: None)
set_expert_tensor_parallel_world_size = _size_setter("etp")
set_expert_tensor_parallel_rank = _rank_setter("etp")
get_expert_tensor_and_model_parallel_world_size = _size("etp_ep")
get_expert_tensor_and_model_parallel_rank = _rank("etp_ep")
get_expert_data_parallel_world_size = _expert_data_parallel_number("size")
get_expert_data_parallel_rank = _expert_data_parallel_number("rank")
get_expert_gtp_weight_remat_world_size = _size("egtp", lambda _: 0)
get_expert_gtp_weight_remat_rank = _rank("egtp", lambda _: 0)


# Whether there are groups.


def is_initialized() -> bool:
    """Return whether there are groups."""
    return STATE.initialized


def is_unitialized() -> bool:
    """Return whether there are no groups; deprecated and spelled as in the original."""
    warn_deprecated("is_unitialized is deprecated; call is_initialized instead")
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Return whether there are tensor-, pipeline- and data-parallel groups."""
    return STATE.model_parallel


def get_all_ranks() -> str:
    """Return this rank's coordinates in tp, gtp_remat (from release 0.19), dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        *((get_gtp_weight_remat_rank(),) if release.newest() else ()),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


# Tensor-, model- and context-parallel groups.


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that together hold one replica of the model: ``mesh.group("pp", "tp")``."""
    return STATE.mp_group or STATE.require("mp_group", check_initialized)


def get_model_parallel_src_rank() -> int:
    """Return the first global rank of the model-parallel group."""
    return (STATE.mp_ranks or raise_missing("mp_group"))[0]


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that share each layer: ``mesh.group("tp")``."""
    return STATE.tp_group or STATE.require("tp_group", check_initialized)


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of the tensor-parallel group."""
    return (STATE.tp_ranks or raise_missing("tp_group"))[0]


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over which the weights are sharded that are gathered for each use."""
    return STATE.gtp_group or STATE.require("gtp_group", check_initialized)


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the global ranks of the group over which the weights are sharded, ascending."""
    if STATE.gtp_ranks is None and check_initialized:
        raise_missing("gtp_group")
    return STATE.gtp_ranks


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that share each sequence: ``mesh.group("cp")``."""
    return STATE.cp_group or STATE.require("cp_group", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the global ranks of the context-parallel group, ascending."""
    if STATE.cp_ranks is None and check_initialized:
        raise_missing("cp_group")
    return STATE.cp_ranks


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup]:
    """Return the groups of the levels of the context-parallel group, innermost first."""
    return STATE.hierarchical_cp_groups or STATE.require("hierarchical_cp_groups", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over tp and cp together: ``mesh.group("cp", "tp")``."""
    return STATE.tp_cp_group or STATE.require("tp_cp_group", check_initialized)


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return the group over tp and dp, and cp if ``with_context_parallel``: every rank of one pipeline stage."""
    if with_context_parallel:
        return STATE.tp_dp_cp_group or STATE.require("tp_dp_cp_group", check_initialized)
    return STATE.tp_dp_group or STATE.require("tp_dp_group", check_initialized)


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
            return STATE.tp_cp_group or STATE.require("tp_cp_group")
        return STATE.tp_dp_cp_group or STATE.require("tp_dp_cp_group")
    if tp_only_amax_red:
        return STATE.tp_group or STATE.require("tp_group")
    return STATE.tp_dp_group or STATE.require("tp_dp_group")


# Data-parallel groups, with and without the context-parallel ranks, whole or in parts, on gloo too.


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
    """
    if not with_gtp_remat or (independent_all_gather and with_context_parallel and not partial_data_parallel):
        return _data_parallel_group_before(
            with_context_parallel, partial_data_parallel, independent_all_gather
        )
    if not with_context_parallel:
        if partial_data_parallel:
            raise _partial_without_cp()
        return STATE.dp_gtp_group or STATE.require("dp_gtp_group")
    if partial_data_parallel:
        return STATE.intra_dp_cp_gtp_group or STATE.require("intra_dp_cp_gtp_group")
    return STATE.dp_cp_gtp_group or STATE.require("dp_cp_gtp_group")


@_before(get_data_parallel_group)
def _data_parallel_group_before(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    if not with_context_parallel:
        if partial_data_parallel:
            raise _partial_without_cp()
        return STATE.dp_group or STATE.require("dp_group")
    if partial_data_parallel:
        return STATE.intra_dp_cp_group or STATE.require("intra_dp_cp_group")
    if independent_all_gather:
        return STATE.dp_cp_gather_group or STATE.require("dp_cp_gather_group")
    return STATE.dp_cp_group or STATE.require("dp_cp_group")


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the gloo group over the ranks of :func:`get_data_parallel_group`, for tensors on the CPU."""
    if not with_context_parallel:
        group = STATE.dp_gloo or STATE.require("dp_gloo")
        if partial_data_parallel:
            raise _partial_without_cp()
        return group
    if partial_data_parallel:
        return STATE.intra_dp_cp_gloo or STATE.require("intra_dp_cp_gloo")
    return STATE.dp_cp_gloo or STATE.require("dp_cp_gloo")


def has_separate_all_gather_group() -> bool:
    """Return whether there is a second communicator over the data- and context-parallel ranks."""
    return STATE.separate_gather


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first global rank of the data-parallel group, with the context-parallel ranks if asked."""
    if with_context_parallel:
        return (STATE.dp_cp_ranks or raise_missing("dp_cp_group"))[0]
    return (STATE.dp_ranks or raise_missing("dp_group"))[0]


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
        return STATE.require("dp_cp_group", check_initialized)
    groups = STATE.hybrid_groups or {}
    if group_size not in groups:
        raise ContractKeyError(
            f"there is no hybrid group of size {group_size}; there are {sorted(map(str, groups)) or 'none'}: "
            "make them with hybrid_context_parallel=True"
        )
    return groups[group_size]


# Pipeline stages, virtual stages, and the stages that share an embedding.


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the stages of this rank's pipeline: ``mesh.group("pp")``."""
    return STATE.pp_group or STATE.require("pp_group", check_initialized)


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last comes the first: ``mesh.next("pp")``."""
    return (STATE.pp_ranks or raise_missing("pp_group"))[(STATE.pp_rank + 1) % STATE.pp_size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; before the first comes the last: ``mesh.prev("pp")``."""
    return (STATE.pp_ranks or raise_missing("pp_group"))[(STATE.pp_rank - 1) % STATE.pp_size]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of the first stage."""
    return (STATE.pp_ranks or raise_missing("pp_group"))[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage."""
    return (STATE.pp_ranks or raise_missing("pp_group"))[STATE.pp_size - 1]


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is the first stage.

    Args:
        ignore_virtual: look at the rank only.
        vp_stage: the virtual stage that is asked about, where there are any and they are not ignored.
    """
    if not ignore_virtual and STATE.vpp_size is not None and _required(vp_stage) != 0:
        return False
    rank = STATE.pp_rank
    return raise_missing("pp_group") if rank is None else bool(rank == 0)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is the last stage; the arguments are those of :func:`is_pipeline_first_stage`."""
    if not ignore_virtual and STATE.vpp_size is not None and _required(vp_stage) != STATE.vpp_size - 1:
        return False
    rank = STATE.pp_rank
    return raise_missing("pp_group") if rank is None else bool(rank == STATE.pp_size - 1)


def _required(vp_stage: int | None) -> int:
    if vp_stage is None:
        raise ContractError(
            f"there are {STATE.vpp_size} virtual stages on each rank; say which one is meant with vp_stage="
        )
    return vp_stage


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the virtual stage that was set; None without virtual stages."""
    return STATE.vpp_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages of each rank; None without virtual stages."""
    return STATE.vpp_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage; deprecated, as in the original: pass ``vp_stage`` to the functions that take it."""
    warn_deprecated(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage() and "
        "is_pipeline_last_stage() instead"
    )
    STATE.vpp_rank = rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages of each rank."""
    STATE.vpp_size = world_size


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the stages that hold the word embeddings; only they have it."""
    return STATE.embedding_group or STATE.require("embedding_group", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the stages that hold the position embeddings; only they have it."""
    return STATE.position_embedding_group or STATE.require("position_embedding_group", check_initialized)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank holds word embeddings.

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
    """Return whether this rank holds position embeddings."""
    ranks = STATE.position_embedding_ranks
    return ranks is not None and dist.get_rank() in ranks


# The experts' groups, and the groups of the instances of a distributed optimizer.


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over which the experts' weights are sharded that are gathered for each use."""
    return STATE.egtp_group or STATE.require("egtp_group", check_initialized)


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the global ranks of the group over which the experts' weights are sharded, ascending."""
    if STATE.egtp_ranks is None and check_initialized:
        raise_missing("egtp_group")
    return STATE.egtp_ranks


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks over which the experts are distributed: ``mesh.group("ep")``."""
    return STATE.ep_group or STATE.require("ep_group", check_initialized)


def get_expert_model_parallel_src_rank() -> int:
    """Return the first global rank of the expert-parallel group."""
    return (STATE.ep_ranks or raise_missing("ep_group"))[0]


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that share each expert: ``mesh.group("etp")``."""
    return STATE.etp_group or STATE.require("etp_group", check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over etp and ep together: one full set of the experts of a layer."""
    return STATE.etp_ep_group or STATE.require("etp_ep_group", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Return the group over etp, ep and pp, and egtp_remat if asked: one full set of the experts of the model."""
    if with_egtp_remat:
        return STATE.etp_ep_pp_gtp_group or STATE.require("etp_ep_pp_gtp_group", check_initialized)
    return STATE.etp_ep_pp_group or STATE.require("etp_ep_pp_group", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """Return the group of the ranks that have the same experts and other samples.

    Args:
        check_initialized: raise where there is no such group.
        with_gtp_remat: False for the replicas of this rank's experts only: ``mesh.group("edp")``.
        partial_expert_data_parallel: only those of this rank's optimizer instance.
    """
    if not with_gtp_remat:
        return _expert_data_parallel_group_before(check_initialized, partial_expert_data_parallel)
    if partial_expert_data_parallel:
        return STATE.intra_edp_gtp_group or STATE.require("intra_edp_gtp_group", check_initialized)
    return STATE.edp_gtp_group or STATE.require("edp_gtp_group", check_initialized)


@_before(get_expert_data_parallel_group)
def _expert_data_parallel_group_before(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    if partial_expert_data_parallel:
        return STATE.intra_edp_group or STATE.require("intra_edp_group", check_initialized)
    return STATE.edp_group or STATE.require("edp_group", check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return :func:`get_expert_data_parallel_group`, of which this is the deprecated name."""
    warn_deprecated(
        "get_data_modulo_expert_parallel_group is deprecated; call get_expert_data_parallel_group instead"
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the gloo group over the ranks of :func:`get_expert_data_parallel_group`."""
    if partial_expert_data_parallel:
        return STATE.intra_edp_gloo or STATE.require("intra_edp_gloo")
    return STATE.edp_gloo or STATE.require("edp_gloo")


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of every rank of this rank's optimizer instance; the world, where there is one instance."""
    return STATE.optimizer_group or STATE.require("optimizer_group", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the ranks that hold the same part of the state in each optimizer instance."""
    return STATE.inter_edp_group or STATE.require("inter_edp_group", check_initialized)


# Buffers.


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the buffer for temporary tensors, which is made with the groups."""
    return STATE.memory_buffer or STATE.require("memory_buffer")


def get_global_symmetric_memory_buffer() -> GlobalSymmetricMemoryBuffer:
    """Return the buffer in symmetric memory, once ``_set_global_symmetric_memory_buffer()`` has made it."""
    return STATE.symmetric_buffer or STATE.require("symmetric_buffer")


def destroy_global_memory_buffer() -> None:
    """Release the buffer for temporary tensors."""
    STATE.memory_buffer = None


def destroy_global_symmetric_memory_buffer() -> None:
    """Release the buffer in symmetric memory."""
    STATE.symmetric_buffer = None


def _set_global_memory_buffer() -> None:
    """Make the buffer for temporary tensors."""
    if STATE.memory_buffer is not None:
        raise ContractError("there is a global memory buffer; call destroy_global_memory_buffer() first")
    STATE.memory_buffer = GlobalMemoryBuffer(None if STATE.mesh is None else STATE.mesh.device)


def _set_global_symmetric_memory_buffer() -> None:
    """Make the buffer in the symmetric memory of the tensor-parallel ranks, all of which call this."""
    if STATE.symmetric_buffer is not None:
        raise ContractError(
            "there is a global symmetric memory buffer; call destroy_global_symmetric_memory_buffer() first"
        )
    STATE.symmetric_buffer = GlobalSymmetricMemoryBuffer(
        size_in_mb=_SYMMETRIC_MEGABYTES, process_group=get_tensor_model_parallel_group()
    )


if not TYPE_CHECKING:  # Megatron's names: what the modules of the dialect define, but for its state
    __all__ = [
        name
        for name, value in list(globals().items())
        if not name.startswith("_")
        and (value is logger or getattr(value, "__module__", "").startswith(f"{__package__}."))
        and getattr(value, "__module__", "") != STATE.__module__
    ]

make_patchable(__name__, STATE, VARIABLES)
release.on_change(
    lambda: globals().update(
        {name: pair[0 if release.newest() else 1] for name, pair in _NEWEST_AND_BEFORE.items()}
    )
)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
