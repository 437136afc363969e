"""Megatron's groups on a mesh: their options, and the groups themselves."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer
from namedmesh.compat.megatron.rank_generator import chunks, hybrid_sizes, level_groups
from namedmesh.compat.megatron.state import ROWS
from namedmesh.dialects import DENSE, EXPERT, MEGATRON_GROUPS
from namedmesh.lazy_group import LazyGroup
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from namedmesh.compat.axis_map import AxisMap
    from namedmesh.compat.megatron.config import ParallelConfig
    from namedmesh.dialects import Kind
    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh

__all__ = ["axis_options", "build_groups", "wanted_groups"]

_OVER_AXES = [row for row in MEGATRON_GROUPS if row.members == "all" and row.slot != "optimizer_group"]


def _rows_to_build(axis_map: AxisMap) -> list[Kind]:
    """Return the rows over whole axes, but for those that are other groups because gtp_remat or egtp_remat is 1."""
    return [row for row in _OVER_AXES if not _without_gtp(row, axis_map)]


def _without_gtp(row: Kind, axis_map: AxisMap) -> str:
    """Return the slot of the group that a row is where its gtp_remat or egtp_remat is 1; none for any other row."""
    gtp = "egtp_remat" if row.view == EXPERT else "gtp_remat"
    return row.slot.replace("_gtp_group", "_group") if "_gtp_" in row.slot and axis_map.size(gtp) == 1 else ""


def axis_options(axis_map: AxisMap, config: ParallelConfig) -> dict[str, dict[str, GroupOptions]]:
    """Return the options of the groups over whole axes, by view, under the names that a mesh has for them.

    Megatron gives each group the options of its own name and no other; a mesh lets a group over two axes have those
    of both. So once any options are given, every group has an entry.
    """
    backend = config.pipeline_model_parallel_comm_backend
    options: dict[str, dict[str, GroupOptions]] = {DENSE: {}, EXPERT: {}}
    for row in _rows_to_build(axis_map) if config.options or backend is not None else ():
        of_group = config.options.get(row.key, GroupOptions())
        if row.key == "pp" and backend is not None:
            # The original gives no NCCL settings to a backend that is not NCCL.
            of_group = GroupOptions(backend="ucc") if backend == "ucc" else replace(of_group, backend="nccl")
        axes = axis_map.locate(row.axes)[1]
        if axis_map.added.isdisjoint(axes):
            options[row.view]["_".join(axes)] = of_group
    return options


def wanted_groups(
    axis_map: AxisMap, options: Mapping[str, Mapping[str, GroupOptions]]
) -> list[tuple[Layout, tuple[str, ...], GroupOptions]]:
    """Return the layout, axes and options of every group over whole axes."""
    located = [(row.view, *axis_map.locate(row.axes)) for row in _rows_to_build(axis_map)]
    return [
        (layout, axes, options[view].get("_".join(axes), GroupOptions())) for view, layout, axes in located
    ]


def build_groups(mesh: NamedMesh, axis_map: AxisMap, config: ParallelConfig) -> dict[str, Any]:
    """Create the groups that the mesh does not have yet, or reserve them; communicates.

    Every rank of the mesh calls this with the same arguments. Megatron has many groups that most jobs never use: a
    group that can be created without blocking on other ranks is reserved, and created on first use.

    Returns:
        For this rank, the value of every slot of the state that a mesh determines.

    Raises:
        ContractError: a callback returns ranks that are not in the pipeline that it was given.
    """
    builder = _Builder(mesh, axis_map, config)
    values = builder.values
    with _sharp_environment(config, "dp"):
        builder.over_axes("dp_cp_group")
        builder.all_gather_group()
        builder.part("intra_dp_cp_group", "dp_cp_group")
        _connect_with_sharp(mesh, values["dp_cp_group"], config, "dp")
    for row in _rows_to_build(axis_map):
        if row.slot not in values:
            builder.over_axes(row.slot)
    builder.context_parallel_levels()
    builder.hybrid_groups()
    for slot, choose in config.stages_with_embeddings.items():
        builder.embedding(slot, choose)
    with _sharp_environment(config, "dp_replica"):
        builder.part("intra_edp_group", "edp_group")
        builder.across_instances()
        _connect_with_sharp(mesh, values["inter_edp_group"], config, "dp_replica")
    builder.optimizer_instance()
    builder.groups_without_gtp()
    if config.virtual_pipeline_model_parallel_size is not None:
        values |= {"vpp_rank": 0, "vpp_size": config.virtual_pipeline_model_parallel_size}
    values["memory_buffer"] = GlobalMemoryBuffer(mesh.device)
    # None stands for the default group, as in the original's list.
    values["group_list"] = [None, *(made.group for made in mesh.communicators if made.owned)]
    return values


class _Builder:
    """Builds groups on one mesh, and keeps them by slot; every rank calls the same methods in the same order."""

    def __init__(self, mesh: NamedMesh, axis_map: AxisMap, config: ParallelConfig) -> None:
        self.mesh, self.axis_map, self.config = mesh, axis_map, config
        self.instances = config.num_distributed_optimizer_instances
        self.values: dict[str, Any] = {}

    def over_axes(self, slot: str) -> None:
        """Build a group over whole axes, with its ranks and its gloo group."""
        row = ROWS[slot]
        layout, axes = self.axis_map.locate(row.axes)
        self._build(row, partial(self.mesh.pool.reserve, layout, axes), self.mesh.options_of(axes))
        if row.ranks:
            self.values[row.ranks_slot] = list(layout.group(self.mesh.global_rank, *axes))

    def over_sets(self, slot: str, sets: Sequence[Sequence[int]], *, own_options: bool = False) -> Any:
        """Build the one of some sets of ranks that has this rank, with options of its own or else those of its axes."""
        row, pool = ROWS[slot], self.mesh.pool
        axes = () if own_options else self.axis_map.locate(row.axes)[1]
        options = self.config.options.get(row.key) or self.mesh.options_of(axes)
        return self._build(row, lambda options: pool.reserve_set(sets, row.key, options), options)

    def _build(self, row: Kind, reserve: Callable[[GroupOptions], Any], options: GroupOptions) -> Any:
        group = self.values[row.slot] = reserve(options)
        if row.gloo:
            # Beside weights that are gathered for each use the original makes no gloo groups.
            with_gloo = self.config.create_gloo_process_groups and self.axis_map.size("gtp_remat") == 1
            with_gloo = with_gloo and (row.view == DENSE or self.axis_map.size("egtp_remat") == 1)
            self.values[row.gloo_slot] = reserve(self.mesh.pool.gloo_options(options)) if with_gloo else None
        return group

    def part(self, slot: str, whole: str) -> None:
        """Build the part of a group that is inside one optimizer instance; the group itself where there is one."""
        row = ROWS[slot]
        if self.instances > 1:
            size = self.axis_map.size(*row.axes) // self.instances
            groups = self.axis_map.groups(*row.axes)
            self.over_sets(slot, [part for ranks in groups for part in chunks(ranks, size)])
        else:
            self.values[slot], self.values[row.gloo_slot] = (
                self.values[whole],
                self.values[ROWS[whole].gloo_slot],
            )

    def all_gather_group(self) -> None:
        """Build the second group over dp and cp, for all-gathers."""
        if self.config.create_all_gather_group:
            layout, axes = self.axis_map.locate(ROWS["dp_cp_gather_group"].axes)
            options = replace(self.mesh.options_of(axes), share=False)
            self.values["dp_cp_gather_group"] = self.mesh.pool.make(layout, axes, options)

    def context_parallel_levels(self) -> None:
        """Build the levels of cp, innermost first."""
        sizes, groups = self.config.levels, self.axis_map.groups("cp")
        levels = []
        for level in range(len(sizes)):
            sets = [
                ranks_of_level for ranks in groups for ranks_of_level in level_groups(ranks, sizes, level)
            ]
            levels.append(_created(self.over_sets("hierarchical_cp_groups", sets)))
        if levels:
            self.values["hierarchical_cp_groups"] = levels

    def hybrid_groups(self) -> None:
        """Build a group for each power of two inside dp and cp."""
        groups: dict[int, Any] = {}
        for size in (
            hybrid_sizes(self.axis_map.size("dp", "cp")) if self.config.hybrid_context_parallel else ()
        ):
            sets = [part for ranks in self.axis_map.groups("dp", "cp") for part in chunks(ranks, size)]
            groups[size] = _created(self.over_sets("hybrid_groups", sets))
        self.values["hybrid_groups"] = groups

    def embedding(self, slot: str, choose: Callable[[list[int]], list[int]]) -> None:
        """Build the group of the stages that share an embedding; none on a rank of another stage."""
        sets = [_embedding_stages(choose, list(ranks)) for ranks in self.axis_map.groups("pp")]
        self.over_sets(slot, sets)
        mine = next((ranks for ranks in reversed(sets) if self.mesh.global_rank in ranks), None)
        self.values[ROWS[slot].ranks_slot] = mine

    def across_instances(self) -> None:
        """Build the group of the ranks that hold the same part of edp in each optimizer instance."""
        size = self.axis_map.size("edp") // self.instances
        groups = self.axis_map.groups("edp") if self.instances > 1 else ()
        self.over_sets("inter_edp_group", [ranks[start::size] for ranks in groups for start in range(size)])

    def optimizer_instance(self) -> None:
        """Build the group of one optimizer instance: the model-parallel ranks of a part of the experts' replicas."""
        models = self.axis_map.groups("etp", "ep", "pp")
        replicas = len(models) // self.instances
        sets = [
            [rank for model in models[start : start + replicas] for rank in model]
            for start in range(0, len(models), replicas)
        ]
        self.over_sets("optimizer_group", sets, own_options=True)

    def groups_without_gtp(self) -> None:
        """Let the groups that span gtp_remat be those that do not where its size is 1; they are in one instance."""
        for row in ROWS.values():
            other = _without_gtp(row, self.axis_map)
            if other or (row.slot not in self.values and "_gtp_" in row.slot):
                self.values[row.slot] = self.values[other or row.slot.removeprefix("intra_")]


def _created(group: dist.ProcessGroup | LazyGroup | None) -> dist.ProcessGroup | None:
    """Return a group that is handed out in a container, and therefore cannot be created on first use."""
    return group.get_or_create() if isinstance(group, LazyGroup) else group


def _embedding_stages(choose: Callable[[list[int]], list[int]], pipeline: list[int]) -> list[int]:
    """Return the ranks that a callback chooses out of a pipeline."""
    stages = list(choose(list(pipeline)))
    if not stages or not set(stages) <= set(pipeline) or len(set(stages)) != len(stages):
        raise ContractError(
            f"{getattr(choose, '__name__', choose)} chose {stages} of the pipeline {pipeline}; "
            "it has to return one or more of these ranks, each once"
        )
    return stages


@contextmanager
def _sharp_environment(config: ParallelConfig, group: str) -> Iterator[None]:
    """NCCL reads the environment when it creates a communicator; those created inside use SHARP."""
    if config.sharp_group != group:
        yield
        return
    os.environ["NCCL_COLLNET_ENABLE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("NCCL_COLLNET_ENABLE", None)


def _connect_with_sharp(
    mesh: NamedMesh, reserved: dist.ProcessGroup | LazyGroup | None, config: ParallelConfig, name: str
) -> None:
    """Run a first collective, so that NCCL creates the communicator while the environment asks for SHARP."""
    if config.sharp_group != name or reserved is None:
        return
    group = _created(reserved)
    if mesh.device.type == "cuda":
        dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
    else:
        dist.barrier(group=group)
