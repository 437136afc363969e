"""Single groups made as in the original: every rank calls, also for groups that it is not in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh._torch import set_group_timeout
from namedmesh.compat.axis_map import AxisMap
from namedmesh.compat.errors import ContractRuntimeError
from namedmesh.compat.megatron.config import check_net_names
from namedmesh.compat.megatron.rank_generator import chunks, hybrid_sizes, level_groups
from namedmesh.compat.megatron.state import ROWS, STATE, missing
from namedmesh.errors import LayoutError
from namedmesh.groups import new_group_by_everyone
from namedmesh.options import GroupOptions, nccl_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

__all__ = [
    "create_all_gather_groups",
    "create_group",
    "create_hierarchical_groups",
    "create_hybrid_dp_cp_groups",
    "get_nccl_options",
    "logger",
    "overwrite_nccl_comm_cfgs",
    "update_pg_timeout",
]

logger = logging.getLogger(__name__)


def create_group(  # noqa: PLR0917  the original's signature
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """Create a process group beside those of the mesh; communicates. The group belongs to the caller.

    The arguments are those of ``torch.distributed.new_group``. The group is on the list that
    :func:`update_pg_timeout` goes through; ``destroy_model_parallel`` does not destroy it.

    Returns:
        The group; on a rank outside it, what torch returns to those.
    """
    group = new_group_by_everyone(
        ranks,
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    if STATE.group_list is None:
        STATE.group_list = [None]  # the default group
    if ranks is None or dist.get_rank() in ranks:
        STATE.group_list.append(group)
    return group


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
        pg_options: options of the groups, for all levels or a list of one for each.
        timeout: the timeout of the groups.
        group_desc: a description, for torch's messages.

    Returns:
        This rank's groups, one for each level, and the gloo groups (None where there are none); empty on a rank
        that is not in ``ranks``.

    Raises:
        ContractError: the sizes do not multiply to the number of ranks.
    """
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(hierarchical_group_sizes)
    groups: list[Any] = []
    gloo_groups: list[Any] = []
    for level, level_options in enumerate(options):
        for members in level_groups(ranks, hierarchical_group_sizes, level):
            name = f"HIERARCHICAL_{group_desc}"
            group = create_group(
                members, timeout=timeout, pg_options=level_options, group_desc=f"{name}_L{level}"
            )
            gloo_group = None
            if create_gloo_process_groups:
                gloo_group = create_group(
                    members, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO_L{level}"
                )
            if rank in members:
                groups.append(group)
                gloo_groups.append(gloo_group)
    return groups, gloo_groups


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
    """Create groups of neighboring ranks, for each power of two from 2 to below the number of ranks; communicates.

    Args:
        rank: this rank.
        ranks: the ranks of a data- and context-parallel group.
        pg_options: options of the groups.

    Returns:
        This rank's group for each size.
    """
    groups: dict[int, Any] = {}
    for size in hybrid_sizes(len(ranks)):
        for members in chunks(ranks, size):
            group = create_group(members, pg_options=pg_options, group_desc=f"HYBRID_DP_CP_GROUP_{size}")
            if rank in members:
                groups[size] = group
    return groups


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
    mesh = STATE.mesh
    if mesh is None:
        raise ContractRuntimeError(
            "create_all_gather_groups() needs the groups of the parallel state; call initialize_model_parallel(...) first"
        )
    axis_map = AxisMap.from_layout(mesh.layout, "Megatron", mesh.views)

    def create(slot: str) -> Any:
        options = get_nccl_options(ROWS[slot].key, nccl_comm_cfgs or {})
        mine = None
        for members in axis_map.groups(*ROWS[slot].axes):
            group = create_group(
                members, timeout=timeout, pg_options=options, group_desc=f"{ROWS[slot].variable}_AG"
            )
            mine = group if mesh.global_rank in members else mine
        return mine

    return create("dp_cp_group"), create(
        "edp_group"
    ) if for_expert_parallelism and STATE.ep_size > 1 else None


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the NCCL options of a group, from settings by group name; None where it has none.

    Args:
        pg_name: the name, such as ``"dp_cp"``.
        nccl_comm_cfgs: settings by name, as in the file of ``nccl_communicator_config_path``.

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
    if pg is None and STATE.group_list is None:
        raise missing("group_list")
    if pg is None:
        STATE.read_all()
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in STATE.group_list if pg is None else [pg]:
        set_group_timeout(timeout, group)
