"""Megatron's groups over one mesh: the value of each variable of the original."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh.compat.axis_map import group_over
from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer
from namedmesh.compat.megatron.variables import ROWS
from namedmesh.dialects import DENSE, EXPERT, MEGATRON_GROUPS
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from namedmesh.compat.megatron.config import Factorings, ParallelConfig
    from namedmesh.dialects import GroupSpec
    from namedmesh.groups import GroupMaker
    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh

OVER_AXES = [row for row in MEGATRON_GROUPS if row.members == "all" and row.key != "intra_dist_opt_instance"]
"""The groups over whole axes."""


def default_embedding_ranks(pp_ranks: Iterable[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the word embeddings: the first and the last stage.

    Example:
        >>> default_embedding_ranks([0, 4, 8, 12]), default_embedding_ranks([3])
        ([0, 12], [3])
    """
    ranks = list(pp_ranks)
    return ranks if len(ranks) == 1 else [ranks[0], ranks[-1]]


def default_position_embedding_ranks(pp_ranks: Iterable[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the position embeddings: the first stage."""
    return [next(iter(pp_ranks))]


def group_options(
    factorings: Factorings, config: ParallelConfig
) -> tuple[dict[str, dict[str, GroupOptions]], list[tuple[Layout, tuple[str, ...], GroupOptions]]]:
    """Return the options of the groups over whole axes, by view and name, and layout, axes and options of each, to compare.

    Megatron gives each group the options of its own name and no other; a mesh lets a group over two axes have those
    of both. So every group has an entry.
    """
    backend, default = config.pipeline_model_parallel_comm_backend, GroupOptions()
    by_view: dict[str, dict[str, GroupOptions]] = {DENSE: {}, EXPERT: {}}
    groups = []
    for row in OVER_AXES:
        options = config.options.get(row.key, default)
        if row.key == "pp" and backend is not None:
            # The original gives no NCCL settings to a backend that is not NCCL.
            options = GroupOptions(backend="ucc") if backend == "ucc" else replace(options, backend="nccl")
        layout, axes = factorings.locate(row.axes)
        if axes:
            # The first row over these axes; a later one spans gtp_remat too, which is 1.
            options = by_view[row.view].setdefault("_".join(axes), options)
            groups.append((layout, axes, options))
    return by_view, groups


def build_groups(
    mesh: NamedMesh, maker: GroupMaker, factorings: Factorings, config: ParallelConfig
) -> dict[str, Any]:
    """Create the groups that the mesh does not have yet, and return the value of every variable that a mesh determines."""
    builder = _Builder(mesh, maker, factorings, config)
    values = builder.values
    builder.build_data_parallel()
    for row in OVER_AXES:  # those that span gtp_remat are those that do not where it is 1
        if row.variable not in values:
            builder.build(row)
    builder.build_context_levels()
    builder.build_embeddings()
    builder.build_optimizer_instances()
    if config.virtual_pipeline_model_parallel_size is not None:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = config.virtual_pipeline_model_parallel_size
    values["_GLOBAL_MEMORY_BUFFER"] = GlobalMemoryBuffer(mesh.device)
    # None stands for the default group, as in the original's list.
    values["_global_process_group_list"] = [None, *[made.group for made in mesh.communicators if made.owned]]
    return values


class _Builder:
    """Builds groups on one mesh, and keeps them by variable; every rank calls the same methods in the same order."""

    def __init__(
        self, mesh: NamedMesh, maker: GroupMaker, factorings: Factorings, config: ParallelConfig
    ) -> None:
        self.mesh, self.maker, self.factorings, self.config = mesh, maker, factorings, config
        self.instances = config.num_distributed_optimizer_instances
        self.values: dict[str, Any] = {}
        for row in MEGATRON_GROUPS:
            if row.gloo:  # where none is requested it is None, whatever the mesh was bound with before
                self.values[row.gloo] = None
        # Beside weights that are gathered for each use the original makes no gloo groups.
        dense = config.create_gloo_process_groups and factorings.size("gtp_remat") == 1
        self.with_gloo = {DENSE: dense, EXPERT: dense and factorings.size("egtp_remat") == 1}

    def build(self, row: GroupSpec) -> None:
        """Build a group over whole axes, and its gloo group."""
        layout, axes = self.factorings.locate(row.axes)
        self.values[row.variable], ranks = group_over(self.mesh, self.maker, axes, layout=layout)
        if row.ranks:
            self.values[row.ranks] = ranks
        if row.gloo and self.with_gloo[row.view]:
            options = self.mesh.pool.gloo_options(self.mesh.options_of(axes))
            self.values[row.gloo], _ = group_over(self.mesh, self.maker, axes, layout=layout, options=options)

    def build_sets(
        self, row: GroupSpec, sets: Sequence[Sequence[int]], options: GroupOptions | None = None
    ) -> Any:
        """Build groups over sets of ranks, of which each rank is in one at most, and return this rank's."""
        if options is None:
            # An optimizer instance spans every axis, and has the options of none.
            spanned = () if row.key == "intra_dist_opt_instance" else self.factorings.locate(row.axes)[1]
            options = self.config.options.get(row.key) or self.mesh.options_of(spanned)
        wanted = {row.variable: options}
        if row.gloo and self.with_gloo[row.view]:
            wanted[row.gloo] = self.mesh.pool.gloo_options(options)
        for variable, of_group in wanted.items():
            made = self.maker.make_sets(sets, row.name, of_group)
            self.values[variable] = next(iter(made.values()), None)
        return self.values[row.variable]

    def build_data_parallel(self) -> None:
        """Build the groups over dp and cp, which may use SHARP, and the second ones over them."""
        whole = ROWS["data_parallel with_context_parallel"]
        with self.sharp("dp", whole):
            self.build(whole)
            if self.config.create_all_gather_group:
                gather = ROWS["data_parallel with_context_parallel independent_all_gather"]
                options = replace(self.mesh.options_of(self.factorings.locate(whole.axes)[1]), share=False)
                self.build_sets(gather, self.factorings.groups(*whole.axes), options)
            self.build_part(ROWS["data_parallel with_context_parallel partial_data_parallel"], whole)

    def build_context_levels(self) -> None:
        """Build the levels of cp, and the groups of every power of two inside dp and cp."""
        levels, row = self.config.hierarchical_context_parallel_sizes, ROWS["hierarchical_context_parallel"]
        if levels:
            self.values[row.variable] = [
                self.build_sets(row, self.split(row, size, prod(levels[:level])))
                for level, size in enumerate(levels)
            ]
        row = ROWS["hybrid_data_context_parallel"]
        hybrid = {}
        if self.config.hybrid_context_parallel:
            for size in hybrid_sizes(self.factorings.size("dp", "cp")):
                hybrid[size] = self.build_sets(row, self.split(row, size))
        self.values[row.variable] = hybrid

    def build_embeddings(self) -> None:
        """Build the groups of the stages that hold embeddings."""
        for name, choose in (
            ("embedding", self.config.get_embedding_ranks or default_embedding_ranks),
            (
                "position_embedding",
                self.config.get_position_embedding_ranks or default_position_embedding_ranks,
            ),
        ):
            row, sets = ROWS[name], []
            self.values[row.ranks] = None
            for pipeline in self.factorings.groups("pp"):
                sets.append(_embedding_stages(choose, list(pipeline)))
                if self.mesh.global_rank in sets[-1]:
                    self.values[row.ranks] = sets[-1]
            self.build_sets(row, sets)

    def build_optimizer_instances(self) -> None:
        """Build the groups inside each instance of the distributed optimizer, and between them."""
        between = ROWS["inter_distributed_optimizer_instance"]
        with self.sharp("dp_replica", between):
            self.build_part(
                ROWS["expert_data_parallel partial_expert_data_parallel"], ROWS["expert_data_parallel"]
            )
            part = self.factorings.size("edp") // self.instances
            self.build_sets(between, self.split(between, self.instances, part) if self.instances > 1 else [])
        models = self.factorings.groups("etp", "ep", "pp")
        instances = split_ranks(models, len(models) // self.instances)
        sets = [list(chain(*instance)) for instance in instances]
        self.build_sets(ROWS["intra_distributed_optimizer_instance"], sets)
        # Weights that are gathered for each use go with one instance.
        for name, part_of in (
            ("data_parallel with_context_parallel", "partial_data_parallel"),
            ("expert_data_parallel", "partial_expert_data_parallel"),
        ):
            without = f"{name} {part_of}" if self.instances > 1 else f"{name} with_gtp_remat"
            target = ROWS[f"{name} {part_of} with_gtp_remat"].variable
            self.values[target] = self.values[ROWS[without].variable]

    def build_part(self, row: GroupSpec, whole: GroupSpec) -> None:
        """Build the part of a group that is inside one optimizer instance; the group itself where there is one."""
        if self.instances > 1:
            self.build_sets(row, self.split(row, self.factorings.size(*row.axes) // self.instances))
        else:
            self.values[row.variable] = self.values[whole.variable]
            self.values[row.gloo] = self.values[whole.gloo]

    def split(self, row: GroupSpec, size: int, stride: int = 1) -> list[list[int]]:
        """Return the sets of ranks that :func:`split_ranks` makes of every group over the axes of a row."""
        parts = []
        for ranks in self.factorings.groups(*row.axes):
            parts += split_ranks(ranks, size, stride)
        return parts

    @contextmanager
    def sharp(self, name: str, row: GroupSpec) -> Iterator[None]:
        """Let the groups that are created inside use SHARP, if those of this name do.

        NCCL reads the environment when it creates a communicator, which a first collective makes sure of. gloo, which has
        nothing of it, connects only once all groups are created.
        """
        config = self.config
        if not config.use_sharp or (config.sharp_enabled_group or "dp") != name:
            yield
            return
        os.environ["NCCL_COLLNET_ENABLE"] = "1"
        try:
            yield
            group = self.values[row.variable]
            if group is not None and self.mesh.device.type == "cuda":
                dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
                torch.cuda.synchronize()
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
