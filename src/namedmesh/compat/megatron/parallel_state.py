"""Stands in for ``megatron.core.parallel_state`` where megatron-core is not installed: names and answers of 0.19.

Like the original it is a module with variables; ``initialize_model_parallel`` fills them, and an accessor reads its
own. One whose group is not there raises :class:`~namedmesh.compat.errors.ContractError`, an ``AssertionError``. Flags
that stand at other places in other releases are keywords only.
"""
# ruff: noqa: PLW0603, PLR0917, D103, E702  the original's signatures; what an accessor answers is its name

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh._torch import set_group_timeout
from namedmesh.compat.errors import ContractError, ContractKeyError, ContractRuntimeError
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer
from namedmesh.compat.megatron.mesh_ranks import MEGATRON_WORDS, split
from namedmesh.compat.megatron.rank_generator import (
    RankGenerator,
    generate_masked_orthogonal_rank_groups,  # noqa: F401  a name of this module, too
)
from namedmesh.dialects import DENSE, MEGATRON_GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from namedmesh.dialects import GroupSpec

logger = logging.getLogger(__name__)

# fmt: off
_DATA_PARALLEL_GROUP_WITH_CP: Any = None; _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None; _DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: Any = None; _DATA_PARALLEL_GROUP_GLOO: Any = None
_CONTEXT_PARALLEL_GROUP: Any = None; _CONTEXT_PARALLEL_GLOBAL_RANKS: Any = None
_MODEL_PARALLEL_GROUP: Any = None; _MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_TENSOR_MODEL_PARALLEL_GROUP: Any = None; _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_PIPELINE_MODEL_PARALLEL_GROUP: Any = None; _PIPELINE_GLOBAL_RANKS: Any = None; _EMBEDDING_GROUP: Any = None
_EMBEDDING_GLOBAL_RANKS: Any = None; _POSITION_EMBEDDING_GROUP: Any = None
_POSITION_EMBEDDING_GLOBAL_RANKS: Any = None; _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_TENSOR_AND_DATA_PARALLEL_GROUP: Any = None; _TENSOR_AND_CONTEXT_PARALLEL_GROUP: Any = None
_GTP_WEIGHT_REMAT_GROUP: Any = None; _GTP_WEIGHT_REMAT_GLOBAL_RANKS: Any = None
_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None; _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT: Any = None
_EXPERT_MODEL_PARALLEL_GROUP: Any = None; _EXPERT_MODEL_PARALLEL_RANKS: Any = None
_EXPERT_TENSOR_PARALLEL_GROUP: Any = None; _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP: Any = None; _EXPERT_DATA_PARALLEL_GROUP: Any = None
_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None; _EXPERT_GTP_WEIGHT_REMAT_GROUP: Any = None
_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS: Any = None
_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP: Any = None
_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP: Any = None; _DATA_PARALLEL_GROUP_WITH_CP_AG: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT: Any = None
_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS: Any = None; _HYBRID_DP_CP_GROUPS: Any = {}
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None; _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_TENSOR_MODEL_PARALLEL_RANK: Any = None; _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_PIPELINE_MODEL_PARALLEL_RANK: Any = None; _MPU_DATA_PARALLEL_WORLD_SIZE: Any = None
_MPU_DATA_PARALLEL_RANK: Any = None; _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_EXPERT_MODEL_PARALLEL_RANK: Any = None; _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE: Any = None
_MPU_EXPERT_TENSOR_PARALLEL_RANK: Any = None; _GLOBAL_MEMORY_BUFFER: Any = None
_GLOBAL_SYMMETRIC_MEMORY_BUFFER: Any = None; _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK: Any = None
_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None; _global_process_group_list: Any = None
# fmt: on


def missing(variable: str, check_initialized: bool = True) -> Any:
    """Raise the error of an accessor whose variable is empty; return None where it is not to check."""
    if not check_initialized:
        return None
    raise ContractError(
        f"the {variable.strip('_').replace('_', ' ').lower()} is not initialized; call "
        "initialize_model_parallel(...), with the option that makes this group, or "
        "namedmesh.compat.megatron.bind(mesh)"
    )


# Groups.


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """Create a group that belongs to the caller, as ``torch.distributed.new_group`` does; every rank calls."""
    global _global_process_group_list
    group = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    _global_process_group_list = _global_process_group_list or [None]  # the default group
    if ranks is None or dist.get_rank() in ranks:
        _global_process_group_list.append(group)
    return group


def _create_mine(sets: Sequence[Sequence[int]], **options: Any) -> Any:
    """Create a group over each set of ranks, and return the one that this rank is in."""
    mine = None
    for ranks in sets:
        group = create_group(ranks, **options)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[Any], list[Any]]:
    """Create the groups at each level of a hierarchy over some ranks, and return this rank's, and those of gloo."""
    sizes = list(hierarchical_group_sizes)
    if prod(sizes) != len(ranks):
        raise ContractError(
            f"the hierarchical sizes {sizes} multiply to {prod(sizes)}, but the group has {len(ranks)} ranks; change a size"
        )
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
    groups, twins = [], []
    for level, size in enumerate(sizes):
        sets = split(ranks, size, prod(sizes[:level]))
        name = f"HIERARCHICAL_{group_desc}_L{level}"
        groups.append(_create_mine(sets, timeout=timeout, pg_options=options[level], group_desc=name))
        twin = None
        if create_gloo_process_groups:
            twin = _create_mine(sets, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO")
        twins.append(twin)
    return (groups, twins) if rank in ranks else ([], [])


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
    """Create groups of neighboring ranks, for each power of two from 2 to below the number of ranks."""
    groups = {}
    for power in range(1, len(ranks).bit_length() - 1):
        size = 2**power
        name = f"HYBRID_DP_CP_GROUP_{size}"
        groups[size] = _create_mine(split(ranks, size), pg_options=pg_options, group_desc=name)
    return groups if rank in ranks else {}


def create_all_gather_groups(
    for_expert_parallelism: bool = False, timeout: timedelta | None = None, nccl_comm_cfgs: Any = None
) -> tuple[Any, Any]:
    """Create second groups over the ranks of dp and cp, and of edp if asked, so that all-gathers overlap."""
    get_nccl_options("dp_cp", nccl_comm_cfgs or {})
    dense = _create_mine(
        _sets_of("_DATA_PARALLEL_GROUP_WITH_CP"), timeout=timeout, group_desc="DATA_PARALLEL_GROUP_WITH_CP_AG"
    )
    sets = _sets_of("_EXPERT_DATA_PARALLEL_GROUP")
    if not for_expert_parallelism or get_expert_model_parallel_world_size() == 1:
        return dense, None
    return dense, _create_mine(sets, timeout=timeout, group_desc="EXPERT_DATA_PARALLEL_GROUP_AG")


def _sets_of(variable: str) -> list[list[int]]:
    """Return the ranks of the groups that every rank has under a name; communicates."""
    if not is_initialized():
        raise ContractRuntimeError(
            "create_all_gather_groups() needs the groups of the parallel state; call initialize_model_parallel(...) first"
        )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_process_group_ranks(globals()[variable]))
    return [list(ranks) for ranks in dict.fromkeys(map(tuple, everyone))]


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Any]) -> None:
    """Return None for a group without NCCL settings; those of others are megatron-core's."""
    if nccl_comm_cfgs.get(pg_name):
        raise ContractError(
            f"the settings of {pg_name!r} are made by megatron-core only; install it, or bind a mesh with these "
            "GroupOptions"
        )


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one setting of a group."""
    nccl_comm_cfgs.setdefault(pg_name, {})[key_value_pair[0]] = key_value_pair[1]


def update_pg_timeout(timeout: timedelta, pg: Any = None) -> None:
    """Change the timeout of a group, or of all groups and the default one, after their ranks have met."""
    groups = [pg]
    if pg is None:
        groups = _global_process_group_list or missing("_global_process_group_list")
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        set_group_timeout(timeout, group)


# The groups of a job.


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold word embeddings: the first and the last."""
    return [pp_ranks[0], pp_ranks[-1]] if len(pp_ranks) > 1 else [pp_ranks[0]]


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold position embeddings: the first."""
    return [pp_ranks[0]]


def initialize_model_parallel(  # noqa: C901, PLR0912  one row of the table after the other
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    *,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    create_all_gather_group: bool | None = False,
) -> None:
    """Make the groups of a job of some sizes; every rank calls it with the same arguments, the original's."""
    settings = [use_sharp, sharp_enabled_group, nccl_communicator_config_path, high_priority_stream_groups]
    if any(settings) or pipeline_model_parallel_comm_backend not in {None, "nccl"}:
        raise ContractError(
            "settings of NCCL, SHARP and the backends of pipelines are megatron-core's; install it, or leave them out"
        )
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size == 1:
        raise ContractRuntimeError(
            "virtual stages interleave the stages of a pipeline; set pipeline_model_parallel_size to 2 or more"
        )
    if max(gtp_remat_size, expert_gtp_remat_size) > 1 and num_distributed_optimizer_instances > 1:
        raise ContractError(
            "weights that are gathered for each use go with one optimizer instance; set "
            "num_distributed_optimizer_instances to 1"
        )
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    etp = tp if expert_tensor_parallel_size is None else expert_tensor_parallel_size
    world = dist.get_world_size() if local_world_size is None else local_world_size
    dp = _what_is_left(world, tp, pp, context_parallel_size, gtp_remat_size)
    edp = _what_is_left(world, etp, expert_model_parallel_size, pp, expert_gtp_remat_size)
    sizes = (tp, 1, dp, pp, context_parallel_size)
    dense = RankGenerator(*sizes, _with_gtp(order, "tp"), rank_offset, gtp_remat_size)
    sizes = (etp, expert_model_parallel_size, edp, pp, 1)
    expert = RankGenerator(*sizes, _with_gtp(order, "ep"), rank_offset, expert_gtp_remat_size)
    unlike = not order.endswith("pp") and pp > 1 and dp != edp
    if unlike or dense.get_ranks("pp") != expert.get_ranks("pp"):
        raise ContractError(
            f"the pipelines of the layers and of their experts do not fit together in the order {order!r}; put pp last in "
            "it, or choose expert sizes that leave edp = dp"
        )
    replicas = dp * context_parallel_size
    _check_instances(num_distributed_optimizer_instances, replicas, edp)
    if hybrid_context_parallel and replicas % 2:
        raise ContractError(f"hybrid_context_parallel needs an even dp x cp, and it is {replicas}")
    timeout = timedelta(minutes=distributed_timeout_minutes)
    gloo = create_gloo_process_groups and gtp_remat_size == 1
    pipelines = {
        "_EMBEDDING_GROUP": get_embedding_ranks or default_embedding_ranks,
        "_POSITION_EMBEDDING_GROUP": get_position_embedding_ranks or default_position_embedding_ranks,
    }
    for row in MEGATRON_GROUPS:
        token = "-".join(MEGATRON_WORDS.get(axis, axis) for axis in row.axes)
        sets = (dense if row.view == DENSE else expert).get_ranks(token)
        if row.variable in pipelines:
            sets = [list(pipelines[row.variable](ranks)) for ranks in sets]
        elif row.members == "part":
            if row.variable == "_HYBRID_DP_CP_GROUPS":
                for ranks in sets if hybrid_context_parallel else ():
                    _HYBRID_DP_CP_GROUPS.update(create_hybrid_dp_cp_groups(dist.get_rank(), ranks, None))
                continue
            if row.variable == "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS":
                _make_hierarchical(row, sets, hierarchical_context_parallel_sizes or (), timeout)
                continue
            if row.variable == "_DATA_PARALLEL_GROUP_WITH_CP_AG":
                sets = sets if create_all_gather_group else []
            else:
                sets = _parts(row, sets, num_distributed_optimizer_instances)
        elif row.variable == "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP":
            sets = _instances(expert, num_distributed_optimizer_instances)
        if sets:
            _make(row, sets, timeout, gloo=gloo and (row.view == DENSE or expert_gtp_remat_size == 1))
    if virtual_pipeline_model_parallel_size is not None:
        globals()["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        set_virtual_pipeline_model_parallel_world_size(virtual_pipeline_model_parallel_size)
    _set_global_memory_buffer()


def _check_instances(instances: int, replicas: int, edp: int) -> None:
    for name, size in (("dp x cp", replicas), ("edp", edp)):
        if instances < 1 or size % instances:
            raise ContractError(
                f"num_distributed_optimizer_instances is {instances}, which does not divide {name} = {size}; choose one that "
                "does"
            )


def _parts(row: GroupSpec, sets: list[list[int]], instances: int) -> list[list[int]]:
    """Return the ranks of an optimizer's instance in each of some sets, or of one rank in all instances.

    With one instance the first are the sets themselves, whose groups have other variables, and the second none.
    """
    across = row.variable == "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"
    if instances == 1:
        whole = row.variable.replace("INTRA_PARTIAL_", "")
        for variable, source in ((row.variable, whole), (row.gloo, f"{whole}_GLOO")):
            if variable and not across:
                globals()[variable] = globals()[source]
        return []
    parts = []
    for ranks in sets:
        size = len(ranks) // instances
        parts += split(ranks, instances, size) if across else split(ranks, size)
    return parts


def _instances(expert: RankGenerator, instances: int) -> list[list[int]]:
    """Return the ranks of each instance of the optimizer: whole models, one after the other."""
    models = expert.get_ranks("tp-ep-pp")
    each = len(models) // instances
    return [list(chain(*models[first : first + each])) for first in range(0, len(models), each)]


def _make(row: GroupSpec, sets: Sequence[Sequence[int]], timeout: timedelta, *, gloo: bool) -> None:
    """Make the groups of a row of the table, and assign this rank's to the variables of the row."""
    values, name = globals(), row.variable.strip("_")
    values[row.variable] = _create_mine(sets, timeout=timeout, group_desc=name)
    if row.ranks:
        values[row.ranks] = next((list(ranks) for ranks in sets if dist.get_rank() in ranks), None)
    if row.gloo and gloo:
        values[row.gloo] = _create_mine(sets, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO")


def _make_hierarchical(
    row: GroupSpec, sets: Sequence[Sequence[int]], sizes: Sequence[int], timeout: timedelta
) -> None:
    for ranks in sets if sizes else ():
        groups, _ = create_hierarchical_groups(
            dist.get_rank(), ranks, sizes, timeout=timeout, group_desc="CONTEXT_PARALLEL_GROUP"
        )
        if groups:
            globals()[row.variable] = groups


def _what_is_left(world: int, *sizes: int) -> int:
    if min(sizes) < 1 or world % prod(sizes):
        raise ContractRuntimeError(
            f"the sizes {' x '.join(map(str, sizes))} do not divide the world of {world} ranks; change a size"
        )
    return world // prod(sizes)


def _with_gtp(order: str, after: str) -> str:
    """Return an order with the axis ``gtp_remat`` after another one, or after tp; it stays where it is named."""
    tokens = order.split("-")
    if "gtp_remat" not in tokens:
        place = next((tokens.index(name) + 1 for name in (after, "tp") if name in tokens), 0)
        tokens.insert(place, "gtp_remat")
    return "-".join(tokens)


def destroy_model_parallel() -> None:
    """Forget the groups, which belong to meshes."""


# What is asked for: the group or its ranks, the size and the rank in it, and what overrides them.
# fmt: off
def is_initialized() -> bool:
    return _DATA_PARALLEL_GROUP is not None
def is_unitialized() -> bool:
    _deprecated("is_unitialized", "is_initialized")
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
def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    global _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = world_size
def set_tensor_model_parallel_rank(rank: int | None) -> None:
    global _MPU_TENSOR_MODEL_PARALLEL_RANK
    _MPU_TENSOR_MODEL_PARALLEL_RANK = rank
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
def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    global _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size
def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    global _MPU_PIPELINE_MODEL_PARALLEL_RANK
    _MPU_PIPELINE_MODEL_PARALLEL_RANK = rank
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
def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size
def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
    _deprecated("set_virtual_pipeline_model_parallel_rank", "is_pipeline_first_stage(vp_stage=...)")
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank
def get_embedding_group(check_initialized: bool = True) -> Any:
    return _EMBEDDING_GROUP or missing("_EMBEDDING_GROUP", check_initialized)
def get_position_embedding_group(check_initialized: bool = True) -> Any:
    return _POSITION_EMBEDDING_GROUP or missing("_POSITION_EMBEDDING_GROUP", check_initialized)
def is_rank_in_position_embedding_group() -> bool:
    return dist.get_rank() in (_POSITION_EMBEDDING_GLOBAL_RANKS or ())
def get_gtp_weight_remat_group(check_initialized: bool = True) -> Any:
    return _GTP_WEIGHT_REMAT_GROUP or missing("_GTP_WEIGHT_REMAT_GROUP", check_initialized)
def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> Any:
    ranks = _GTP_WEIGHT_REMAT_GLOBAL_RANKS
    return ranks or missing("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)
def get_gtp_weight_remat_world_size() -> int:
    return _GTP_WEIGHT_REMAT_GROUP.size() if _GTP_WEIGHT_REMAT_GROUP else 0
def get_gtp_weight_remat_rank() -> int:
    return _GTP_WEIGHT_REMAT_GROUP.rank() if _GTP_WEIGHT_REMAT_GROUP else 0
def get_context_parallel_group(check_initialized: bool = True) -> Any:
    return _CONTEXT_PARALLEL_GROUP or missing("_CONTEXT_PARALLEL_GROUP", check_initialized)
def get_context_parallel_global_ranks(check_initialized: bool = True) -> Any:
    return _CONTEXT_PARALLEL_GLOBAL_RANKS or missing("_CONTEXT_PARALLEL_GLOBAL_RANKS", check_initialized)
def get_context_parallel_world_size() -> int:
    return _CONTEXT_PARALLEL_GROUP.size() if _CONTEXT_PARALLEL_GROUP else _zero("_CONTEXT_PARALLEL_GROUP")
def get_context_parallel_rank() -> int:
    return _CONTEXT_PARALLEL_GROUP.rank() if _CONTEXT_PARALLEL_GROUP else _zero("_CONTEXT_PARALLEL_GROUP")
def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> Any:
    groups = _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS
    return groups or missing("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", check_initialized)
def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Any:
    group = _TENSOR_AND_CONTEXT_PARALLEL_GROUP
    return group or missing("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", check_initialized)
def get_tensor_and_context_parallel_world_size() -> int:
    group = _TENSOR_AND_CONTEXT_PARALLEL_GROUP
    return group.size() if group else _zero("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
def get_tensor_and_context_parallel_rank() -> int:
    group = _TENSOR_AND_CONTEXT_PARALLEL_GROUP
    return group.rank() if group else _zero("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
def set_data_parallel_rank(rank: int | None) -> None:
    global _MPU_DATA_PARALLEL_RANK
    _MPU_DATA_PARALLEL_RANK = rank
def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    if with_context_parallel:
        return (_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP or missing("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"))[0]
    return (_DATA_PARALLEL_GLOBAL_RANKS or missing("_DATA_PARALLEL_GLOBAL_RANKS"))[0]
def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> Any:
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP or missing("_EXPERT_GTP_WEIGHT_REMAT_GROUP", check_initialized)
def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> Any:
    ranks = _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS
    return ranks or missing("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)
def get_expert_gtp_weight_remat_world_size() -> int:
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP.size() if _EXPERT_GTP_WEIGHT_REMAT_GROUP else 0
def get_expert_gtp_weight_remat_rank() -> int:
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP.rank() if _EXPERT_GTP_WEIGHT_REMAT_GROUP else 0
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
def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    global _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE = world_size
def set_expert_model_parallel_rank(rank: int | None) -> None:
    global _MPU_EXPERT_MODEL_PARALLEL_RANK
    _MPU_EXPERT_MODEL_PARALLEL_RANK = rank
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
def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    global _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = world_size
def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    global _MPU_EXPERT_TENSOR_PARALLEL_RANK
    _MPU_EXPERT_TENSOR_PARALLEL_RANK = rank
def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Any:
    group = _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
    return group or missing("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", check_initialized)
def get_expert_tensor_and_model_parallel_world_size() -> int:
    group = _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
    return group.size() if group else _zero("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
def get_expert_tensor_and_model_parallel_rank() -> int:
    group = _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
    return group.rank() if group else _zero("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    group = _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP
    return group or missing("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", check_initialized)
def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    group = _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
    return group or missing("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized)
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
# fmt: on


def _set_global_memory_buffer() -> None:
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is not None:
        raise ContractError("there is a global memory buffer; call destroy_global_memory_buffer() first")
    _GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()


def _set_global_symmetric_memory_buffer() -> None:
    raise ContractError("buffers in symmetric memory are megatron-core's; install it")


def _zero(variable: str) -> int:
    """Return the original's answer without ``torch.distributed``."""
    if dist.is_initialized():
        missing(variable)
    return 0


def _deprecated(name: str, instead: str) -> None:
    if not torch.compiler.is_compiling():  # a warning would break the graph
        warnings.warn(f"{name} is deprecated; call {instead} instead", DeprecationWarning, stacklevel=3)


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
        if with_gtp_remat:
            return _DATA_PARALLEL_GROUP_WITH_GTP_REMAT or missing("_DATA_PARALLEL_GROUP")
        return _DATA_PARALLEL_GROUP or missing("_DATA_PARALLEL_GROUP")
    if partial_data_parallel:
        group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
        if with_gtp_remat:
            group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        return group or missing("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP")
    if independent_all_gather:
        return _DATA_PARALLEL_GROUP_WITH_CP_AG or missing("_DATA_PARALLEL_GROUP_WITH_CP_AG")
    if with_gtp_remat:
        return _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT or missing("_DATA_PARALLEL_GROUP_WITH_CP")
    return _DATA_PARALLEL_GROUP_WITH_CP or missing("_DATA_PARALLEL_GROUP_WITH_CP")


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Any:
    if not with_context_parallel:
        if partial_data_parallel:
            raise ContractError("partial_data_parallel goes with with_context_parallel=True only; say it too")
        return _DATA_PARALLEL_GROUP_GLOO or missing("_DATA_PARALLEL_GROUP_GLOO")
    group = _DATA_PARALLEL_GROUP_WITH_CP_GLOO
    if partial_data_parallel:
        group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO
    return group or missing("_DATA_PARALLEL_GROUP_WITH_CP_GLOO")


def get_data_parallel_world_size(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(
        with_context_parallel, with_gtp_remat=with_gtp_remat, partial_data_parallel=partial_data_parallel
    ).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, *, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    if not dist.is_initialized():
        return 0
    return get_data_parallel_group(
        with_context_parallel, with_gtp_remat=with_gtp_remat, partial_data_parallel=partial_data_parallel
    ).rank()


def get_expert_data_parallel_group(
    check_initialized: bool = True, *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> Any:
    if partial_expert_data_parallel:
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
        if with_gtp_remat:
            group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
        return group or missing("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized)
    if with_gtp_remat:
        return _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT or missing(
            "_EXPERT_DATA_PARALLEL_GROUP", check_initialized
        )
    return _EXPERT_DATA_PARALLEL_GROUP or missing("_EXPERT_DATA_PARALLEL_GROUP", check_initialized)


def get_expert_data_parallel_world_size(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).size()


def get_expert_data_parallel_rank(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    if not dist.is_initialized():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).rank()


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    group = _EXPERT_DATA_PARALLEL_GROUP_GLOO
    if partial_expert_data_parallel:
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO
    return group or missing("_EXPERT_DATA_PARALLEL_GROUP_GLOO")


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    _deprecated("get_data_modulo_expert_parallel_group", "get_expert_data_parallel_group")
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> Any:
    if with_egtp_remat:
        group = _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP
    else:
        group = _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP
    return group or missing("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", check_initialized)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> Any:
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return _DATA_PARALLEL_GROUP_WITH_CP or missing("_DATA_PARALLEL_GROUP_WITH_CP", check_initialized)
    if group_size not in _HYBRID_DP_CP_GROUPS:
        raise ContractKeyError(
            f"there is no hybrid group of size {group_size}; make them with hybrid_context_parallel=True"
        )
    return _HYBRID_DP_CP_GROUPS[group_size]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Any:
    if with_context_parallel:
        group = _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP
    else:
        group = _TENSOR_AND_DATA_PARALLEL_GROUP
    return group or missing("_TENSOR_AND_DATA_PARALLEL_GROUP", check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Any:
    if with_context_parallel:
        if tp_only_amax_red:
            return _TENSOR_AND_CONTEXT_PARALLEL_GROUP or missing("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
        return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP or missing("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
    if tp_only_amax_red:
        return _TENSOR_MODEL_PARALLEL_GROUP or missing("_TENSOR_MODEL_PARALLEL_GROUP")
    return _TENSOR_AND_DATA_PARALLEL_GROUP or missing("_TENSOR_AND_DATA_PARALLEL_GROUP")


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    stages = _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    if not ignore_virtual and stages is not None and _required(vp_stage) != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    stages = _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    if not ignore_virtual and stages is not None and _required(vp_stage) != stages - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _required(vp_stage: int | None) -> int:
    if vp_stage is None:
        raise ContractError("ignore_virtual=False asks about one virtual stage; say which with vp_stage=")
    return vp_stage


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    ranks, rank = _EMBEDDING_GLOBAL_RANKS or [], dist.get_rank()
    if ignore_virtual or rank not in ranks:
        return rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return rank != ranks[-1] or is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


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
