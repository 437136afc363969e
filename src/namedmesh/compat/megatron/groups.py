"""Megatron's groups: those of a mesh with their options, and single ones that a caller makes as in the original."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh._torch import set_group_timeout
from namedmesh.compat.axis_map import AxisMap
from namedmesh.compat.errors import ContractError, ContractRuntimeError
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer
from namedmesh.compat.megatron.config import check_net_names
from namedmesh.compat.megatron.state import ROWS, STATE, raise_missing
from namedmesh.dialects import DENSE, EXPERT, MEGATRON_GROUPS
from namedmesh.errors import LayoutError
from namedmesh.groups import new_group_by_everyone
from namedmesh.options import GroupOptions, nccl_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from namedmesh.compat.megatron.config import ParallelConfig
    from namedmesh.layout import Layout
    from namedmesh.making import GroupMaker
    from namedmesh.mesh import NamedMesh

logger = logging.getLogger(__name__)


_OVER_AXES = [row for row in MEGATRON_GROUPS if row.members == "all" and row.slot != "optimizer_group"]


def axis_options(axis_map: AxisMap, config: ParallelConfig) -> dict[str, dict[str, GroupOptions]]:
    """Return the options of the groups over whole axes, by view, under the names that a mesh has for them.

    Megatron gives each group the options of its own name and no other; a mesh lets a group over two axes have those
    of both. So once any options are given, every group has an entry.
    """
    backend = config.pipeline_model_parallel_comm_backend
    options: dict[str, dict[str, GroupOptions]] = {DENSE: {}, EXPERT: {}}
    for row in _OVER_AXES if config.options or backend is not None else ():
        of_group = config.options.get(row.key, GroupOptions())
        if row.key == "pp" and backend is not None:
            # The original gives no NCCL settings to a backend that is not NCCL.
            of_group = GroupOptions(backend="ucc") if backend == "ucc" else replace(of_group, backend="nccl")
        axes = axis_map.locate(row.axes)[1]
        if axis_map.added.isdisjoint(axes):
            # The first row over these axes; a later one spans gtp_remat too, which is 1.
            options[row.view].setdefault("_".join(axes), of_group)
    return options


def wanted_groups(
    axis_map: AxisMap, options: Mapping[str, Mapping[str, GroupOptions]]
) -> list[tuple[Layout, tuple[str, ...], GroupOptions]]:
    """Return the layout, axes and options of every group over whole axes."""
    located = [(row.view, *axis_map.locate(row.axes)) for row in _OVER_AXES]
    return [
        (layout, axes, options[view].get("_".join(axes), GroupOptions())) for view, layout, axes in located
    ]


def build_groups(
    mesh: NamedMesh, maker: GroupMaker, axis_map: AxisMap, config: ParallelConfig
) -> dict[str, Any]:
    """Create the groups that the mesh does not have yet; every rank of the mesh calls this with the same arguments.

    Returns:
        For this rank, the value of every slot of the state that a mesh determines.
    """
    builder = _Builder(mesh, maker, axis_map, config)
    values, instances = builder.values, builder.instances
    with builder.sharp("dp", "dp_cp_group"):
        builder.build("dp_cp_group")
        if config.create_all_gather_group:
            layout, axes = axis_map.locate(("dp", "cp"))
            options = replace(mesh.options_of(axes), share=False)
            values["dp_cp_gather_group"] = maker.make(layout, axes, options)
        builder.build_part("intra_dp_cp_group", "dp_cp_group")
    for row in _OVER_AXES:  # those that span gtp_remat are those that do not where it is 1
        if row.slot not in values:
            builder.build(row.slot)
    if config.levels:
        values["hierarchical_cp_groups"] = [
            builder.build_split("hierarchical_cp_groups", size, prod(config.levels[:level]))
            for level, size in enumerate(config.levels)
        ]
    sizes = hybrid_sizes(axis_map.size("dp", "cp")) if config.hybrid_context_parallel else []
    values["hybrid_groups"] = {size: builder.build_split("hybrid_groups", size) for size in sizes}
    for slot, choose in config.stages_with_embeddings.items():
        sets = [_embedding_stages(choose, list(ranks)) for ranks in axis_map.groups("pp")]
        builder.build(slot, sets)
        values[ROWS[slot].ranks_slot] = next((ranks for ranks in sets if mesh.global_rank in ranks), None)
    with builder.sharp("dp_replica", "inter_edp_group"):
        builder.build_part("intra_edp_group", "edp_group")
        part = axis_map.size("edp") // instances
        sets = builder.split("inter_edp_group", instances, part) if instances > 1 else []
        builder.build("inter_edp_group", sets)
    models = axis_map.groups("etp", "ep", "pp")
    of_instances = split_ranks(models, len(models) // instances)
    builder.build("optimizer_group", [list(chain.from_iterable(models)) for models in of_instances])
    for base in ("dp_cp", "edp"):  # gtp_remat goes with one instance
        other = f"intra_{base}_group" if instances > 1 else f"{base}_gtp_group"
        values[f"intra_{base}_gtp_group"] = values[other]
    if config.virtual_pipeline_model_parallel_size is not None:
        values |= {"vpp_rank": 0, "vpp_size": config.virtual_pipeline_model_parallel_size}
    values["memory_buffer"] = GlobalMemoryBuffer(mesh.device)
    # None stands for the default group, as in the original's list.
    values["group_list"] = [None, *(made.group for made in mesh.communicators if made.owned)]
    return values


class _Builder:
    """Builds groups on one mesh, and keeps them by slot; every rank calls the same methods in the same order."""

    def __init__(self, mesh: NamedMesh, maker: GroupMaker, axis_map: AxisMap, config: ParallelConfig) -> None:
        self.mesh, self.maker, self.axis_map, self.config = mesh, maker, axis_map, config
        self.instances = config.num_distributed_optimizer_instances
        self.values: dict[str, Any] = {}

    def build(self, slot: str, sets: Sequence[Sequence[int]] | None = None) -> None:
        """Build a group, and its gloo group, over whole axes, with its ranks; or the one of some sets of ranks."""
        row = ROWS[slot]
        layout, axes = self.axis_map.locate(row.axes)
        make: Callable[[GroupOptions], Any]
        if sets is None:
            options = self.mesh.options_of(axes)
            make = partial(self.maker.make, layout, axes)
            if row.ranks:
                self.values[row.ranks_slot] = list(layout.group(self.mesh.global_rank, *axes))
        else:
            # An optimizer instance spans every axis, and has the options of none.
            own = self.config.options.get(row.key)
            options = own or self.mesh.options_of(() if slot == "optimizer_group" else axes)
            make = partial(self._make_set, sets, row.key)
        self.values[slot] = make(options)
        if row.gloo:
            # Beside weights that are gathered for each use the original makes no gloo groups.
            gathered = self.axis_map.size("gtp_remat") > 1
            gathered |= row.view == EXPERT and self.axis_map.size("egtp_remat") > 1
            with_gloo = self.config.create_gloo_process_groups and not gathered
            self.values[row.gloo_slot] = make(self.mesh.pool.gloo_options(options)) if with_gloo else None

    def split(self, slot: str, size: int, stride: int = 1) -> list[list[int]]:
        """Return the sets of ranks that :func:`split_ranks` makes of every group over the axes of a slot."""
        groups = self.axis_map.groups(*ROWS[slot].axes)
        return [part for ranks in groups for part in split_ranks(ranks, size, stride)]

    def build_split(self, slot: str, size: int, stride: int = 1) -> dist.ProcessGroup | None:
        """Build the groups that :meth:`split` returns the ranks of, and return this rank's."""
        self.build(slot, self.split(slot, size, stride))
        group: dist.ProcessGroup | None = self.values[slot]
        return group

    def _make_set(
        self, sets: Sequence[Sequence[int]], label: str, options: GroupOptions
    ) -> dist.ProcessGroup | None:
        """Return this rank's group among sets of which each rank is in one at most."""
        made = self.maker.make_sets(sets, label, options)
        return next(iter(made.values()), None)

    def build_part(self, slot: str, whole: str) -> None:
        """Build the part of a group that is inside one optimizer instance; the group itself where there is one."""
        if self.instances > 1:
            self.build(slot, self.split(slot, self.axis_map.size(*ROWS[slot].axes) // self.instances))
        else:
            self.values[slot] = self.values[whole]
            self.values[ROWS[slot].gloo_slot] = self.values[ROWS[whole].gloo_slot]

    @contextmanager
    def sharp(self, name: str, slot: str) -> Iterator[None]:
        """Let the groups that are created inside use SHARP, if those of this name do.

        NCCL reads the environment when it creates a communicator, which a first collective makes sure of.
        """
        if self.config.sharp_group != name:
            yield
            return
        os.environ["NCCL_COLLNET_ENABLE"] = "1"
        try:
            yield
            group = self.values[slot]
            if group is not None and self.mesh.device.type == "cuda":
                dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
                torch.cuda.synchronize()
            elif group is not None:
                dist.barrier(group=group)
        finally:
            os.environ.pop("NCCL_COLLNET_ENABLE", None)


def split_ranks(ranks: Sequence[Any], size: int, stride: int = 1) -> list[list[Any]]:
    """Split the ranks of a group into sets of some size, of every ``stride``-th rank each.

    Example:
        >>> split_ranks((0, 2, 4, 6), 2), split_ranks(range(8), 4, 2)
        ([[0, 2], [4, 6]], [[0, 2, 4, 6], [1, 3, 5, 7]])
    """
    span = size * stride
    return [list(ranks[i : i + span : stride]) for i in range(len(ranks)) if i % span < stride]


def hybrid_sizes(size: int) -> list[int]:
    """Return the sizes of the hybrid groups inside a group: powers of two, as far as the original goes.

    Example:
        >>> hybrid_sizes(16), hybrid_sizes(12), hybrid_sizes(2)
        ([2, 4, 8], [2, 4], [])
    """
    return [2**power for power in range(1, size.bit_length() - 1)]


def _embedding_stages(choose: Callable[[list[int]], list[int]], pipeline: list[int]) -> list[int]:
    """Return the ranks that a callback chooses out of a pipeline."""
    stages = list(choose(list(pipeline)))
    if not stages or not set(stages) <= set(pipeline) or len(set(stages)) != len(stages):
        raise ContractError(
            f"{getattr(choose, '__name__', choose)} chose {stages} of the pipeline {pipeline}; "
            "it has to return one or more of these ranks, each once"
        )
    return stages


# Single groups, made as in the original: every rank calls, also for groups that it is not in.


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


def _create_mine(rank: int, sets: Iterable[Sequence[int]], group_desc: str, **options: Any) -> Any:
    """Create a group over each set of ranks, and return the one that a rank is in; None if it is in none."""
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
        pg_options: options of the groups, for all levels or a list of one for each.
        timeout: the timeout of the groups.
        group_desc: a description, for torch's messages.

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
        gloo_groups.append(
            _create_mine(rank, sets, f"{name}_GLOO_L{level}", timeout=timeout, backend="gloo")
            if create_gloo_process_groups
            else None
        )
    return (groups, gloo_groups) if rank in ranks else ([], [])


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
    """Create groups of neighboring ranks, for each power of two from 2 to below the number of ranks; communicates.

    Args:
        rank: this rank.
        ranks: the ranks of a data- and context-parallel group.
        pg_options: options of the groups.

    Returns:
        This rank's group for each size.
    """
    groups = {
        size: _create_mine(
            rank, split_ranks(ranks, size), f"HYBRID_DP_CP_GROUP_{size}", pg_options=pg_options
        )
        for size in hybrid_sizes(len(ranks))
    }
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
    mesh = STATE.mesh
    if mesh is None:
        raise ContractRuntimeError(
            "create_all_gather_groups() needs the groups of the parallel state; call initialize_model_parallel(...) first"
        )
    axis_map = AxisMap.from_layout(mesh.layout, "Megatron", mesh.views)

    def create(slot: str) -> Any:
        row = ROWS[slot]
        options = get_nccl_options(row.key, nccl_comm_cfgs or {})
        sets, name = axis_map.groups(*row.axes), f"{row.variable}_AG"
        return _create_mine(mesh.global_rank, sets, name, timeout=timeout, pg_options=options)

    with_experts = for_expert_parallelism and STATE.ep_size > 1
    return create("dp_cp_group"), create("edp_group") if with_experts else None


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
        raise_missing("group_list")
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in STATE.group_list if pg is None else [pg]:
        set_group_timeout(timeout, group)
