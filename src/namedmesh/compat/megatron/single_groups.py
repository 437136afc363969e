"""Single groups that a caller makes as in the original: every rank calls, also for groups that it is not in."""

from __future__ import annotations

import logging
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh._torch import set_group_timeout
from namedmesh.compat.errors import ContractError, ContractRuntimeError
from namedmesh.compat.megatron.config import Factorings, check_net_names
from namedmesh.compat.megatron.groups import hybrid_sizes, split_ranks
from namedmesh.compat.megatron.variables import BINDING, ROWS, missing
from namedmesh.errors import LayoutError
from namedmesh.groups import new_group_by_everyone
from namedmesh.options import GroupOptions, nccl_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import timedelta

logger = logging.getLogger(__name__)


def create_group(  # noqa: PLR0917  the original's signature
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """Create a process group beside those of the mesh, and return what ``torch.distributed.new_group`` does; communicates.

    The arguments are those of that function. The group belongs to the caller: it is on the list that
    :func:`update_pg_timeout` goes through, and ``destroy_model_parallel`` does not destroy it.
    """
    group = new_group_by_everyone(
        ranks,
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    variables = BINDING.first_module
    if variables["_global_process_group_list"] is None:
        variables["_global_process_group_list"] = [None]  # the default group
    if ranks is None or dist.get_rank() in ranks:
        variables["_global_process_group_list"].append(group)
    return group


def _create_mine(rank: int, sets: Iterable[Sequence[int]], group_desc: str, **options: Any) -> Any:
    """Create a group over each set of ranks, and return the one that a rank is in, if any."""
    mine = None
    for ranks in sets:
        group = create_group(ranks, group_desc=group_desc, **options)
        mine = group if rank in ranks else mine
    return mine


def create_hierarchical_groups(  # noqa: PLR0917  the original's signature
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[Any], list[Any]]:
    """Create the groups at each level of a hierarchy over some ranks; communicates.

    With sizes ``[2, 4]`` over 8 ranks, the groups of level 0 join neighboring ranks, (0, 1) (2, 3) (4, 5) (6, 7), and
    those of level 1 join one rank of each: (0, 2, 4, 6) and (1, 3, 5, 7).

    Args:
        rank: this rank.
        ranks: the ranks.
        hierarchical_group_sizes: the size of each level, which multiply to the number of ranks.
        create_gloo_process_groups: whether there are gloo groups too.
        pg_options: for all levels, or a list of one for each.
        timeout: as for :func:`create_group`.
        group_desc: the same.

    Returns:
        This rank's groups, one for each level, and the gloo groups (None where there are none); empty on a rank
        that is not in ``ranks``.

    Raises:
        ContractError: the sizes do not multiply to the number of ranks.
    """
    sizes = list(hierarchical_group_sizes)
    if prod(sizes) != len(ranks):
        raise ContractError(
            f"the hierarchical sizes {sizes} multiply to {prod(sizes)}, but the group has {len(ranks)} ranks; "
            "change a size"
        )
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
    groups: list[Any] = []
    gloo_groups: list[Any] = []
    for level, level_options in enumerate(options):
        sets, name = split_ranks(ranks, sizes[level], prod(sizes[:level])), f"HIERARCHICAL_{group_desc}"
        groups.append(_create_mine(rank, sets, f"{name}_L{level}", timeout=timeout, pg_options=level_options))
        gloo = None
        if create_gloo_process_groups:
            gloo = _create_mine(rank, sets, f"{name}_GLOO_L{level}", timeout=timeout, backend="gloo")
        gloo_groups.append(gloo)
    return (groups, gloo_groups) if rank in ranks else ([], [])


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
    """Create groups of neighboring ranks, for each power of two from 2 to below the number of ranks; communicates.

    The ranks are those of a data- and context-parallel group, and ``rank`` is this one, whose group is returned for each size.
    """
    groups = {}
    for size in hybrid_sizes(len(ranks)):
        name = f"HYBRID_DP_CP_GROUP_{size}"
        groups[size] = _create_mine(rank, split_ranks(ranks, size), name, pg_options=pg_options)
    return groups if rank in ranks else {}


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Any, Any]:
    """Create second groups over the ranks of dp and cp, so that all-gathers overlap with reduce-scatters; communicates.

    Every rank of the world calls it. The groups belong to the caller. Their ranks are those of
    ``get_data_parallel_group`` in every order of the axes; the original has those of its default order.

    Args:
        for_expert_parallelism: create one over edp too, if ep is above 1.
        timeout: the timeout of the groups.
        nccl_comm_cfgs: NCCL settings by the names of groups, ``dp_cp`` and ``ep_dp``.

    Returns:
        This rank's group over dp and cp, and its group over edp or None.

    Raises:
        ContractRuntimeError: there is no parallel state yet.
    """
    mesh = BINDING.shown
    if mesh is None or not BINDING.is_bound(mesh):
        raise ContractRuntimeError(
            "create_all_gather_groups() needs the groups of the parallel state; call initialize_model_parallel(...) first"
        )
    factorings = Factorings.of_mesh(mesh)

    def create(name: str) -> Any:
        row = ROWS[name]
        options = get_nccl_options(row.key, nccl_comm_cfgs or {})
        sets, description = factorings.groups(*row.axes), f"{row.variable}_AG"
        return _create_mine(mesh.global_rank, sets, description, timeout=timeout, pg_options=options)

    dense = create("data_parallel with_context_parallel")
    with_experts = for_expert_parallelism and factorings.size("ep") > 1
    return dense, create("expert_data_parallel") if with_experts else None


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the NCCL options of a group, from settings by group name; None where it has none.

    The settings are by name, such as ``"dp_cp"``, as in the file of ``nccl_communicator_config_path``.

    Raises:
        ContractRuntimeError: a setting that NCCL does not have, or a ``net_name`` other than IB or socket.
        MeshError: this torch was built without NCCL.
    """
    settings = nccl_comm_cfgs.get(pg_name)
    if settings is None:
        return None
    check_net_names({pg_name: settings.get("net_name")})
    try:
        options = GroupOptions.from_settings(settings)
    except LayoutError as error:
        raise ContractRuntimeError(*(f"{pg_name}: {problem}" for problem in error.problems)) from None
    return nccl_options(options)


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one setting of one group, in settings by group name.

    Example:
        >>> settings = {}
        >>> overwrite_nccl_comm_cfgs(settings, "dp_cp", ("max_ctas", 8))
        >>> settings
        {'dp_cp': {'max_ctas': 8}}
    """
    name, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})[name] = value


def update_pg_timeout(timeout: timedelta, pg: dist.ProcessGroup | None = None) -> None:
    """Change the timeout of a group, or of all groups of the mesh and the default one; communicates.

    The ranks of the group (of the world, for all groups) wait for each other first, so that no collective is
    under way with the old one.

    Args:
        timeout: the new timeout.
        pg: the group; by default all of them.

    Raises:
        ContractError: there are no groups yet.
    """
    known = BINDING.first_module["_global_process_group_list"]
    if pg is None and known is None:
        missing("_global_process_group_list")
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in known if pg is None else [pg]:
        set_group_timeout(timeout, group)
