"""The accessors that the pipeline grid and the model-parallel units share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from namedmesh.compat.state import get_or_create_group
from namedmesh.mesh import NamedMesh


class GroupInfo(NamedTuple):
    """This rank's group for one kind of parallelism.

    Attributes:
        group: the process group.
        ranks: its global ranks.
        size: the number of its ranks.
        rank: the group rank of this rank.
        first_rank: the global rank of its first member.
    """

    group: dist.ProcessGroup
    ranks: list[int]
    size: int
    rank: int
    first_rank: int


def make_accessor(kind: str, field: str) -> Any:
    """Make an accessor method, which returns one field of a kind's :class:`GroupInfo`.

    Args:
        kind: the kind of parallelism, such as ``"pipe"``.
        field: a field of :class:`GroupInfo`.
    """

    def access(self: GroupAccessors) -> Any:
        return getattr(self._group_infos[kind], field)

    access.__doc__ = f"Return this rank's {kind}-parallel {field.replace('_', ' ')}."
    return access


class GroupAccessors:
    """Base class with accessors of groups, sizes and ranks under DeepSpeed's names.

    The accessors do not communicate. Collective: every rank must create the object, because the
    groups may have to be created.

    Args:
        mesh: the mesh whose groups are returned.
        kinds: by kind of parallelism, such as ``"pipe"``, the axes of its groups. Axes that the
            mesh does not have are ignored.
    """

    def __init__(self, mesh: NamedMesh, kinds: Mapping[str, Sequence[str]]) -> None:
        self.mesh = mesh
        # The accessors are called in every step, so everything that they return is computed here.
        self._group_infos: dict[str, GroupInfo] = {}
        for kind, axes in kinds.items():
            group, ranks = get_or_create_group(mesh, axes)
            group_rank = ranks.index(mesh.global_rank)
            self._group_infos[kind] = GroupInfo(group, ranks, len(ranks), group_rank, ranks[0])

    def get_global_rank(self) -> int:
        """Return the global rank of this rank."""
        return self.mesh.global_rank

    get_model_parallel_group = make_accessor("model", "group")
    get_model_parallel_world_size = make_accessor("model", "size")
    get_model_parallel_rank = make_accessor("model", "rank")

    get_data_parallel_group = make_accessor("data", "group")
    get_data_parallel_group_ranks = make_accessor("data", "ranks")
    get_data_parallel_world_size = make_accessor("data", "size")
    get_data_parallel_rank = make_accessor("data", "rank")

    # DeepSpeed has two names for the ranks that share a layer, and two for the stages of a
    # pipeline.
    get_slice_parallel_group = make_accessor("slice", "group")
    get_slice_parallel_world_size = make_accessor("slice", "size")
    get_slice_parallel_rank = make_accessor("slice", "rank")
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_rank = get_slice_parallel_rank

    get_pipe_parallel_group = make_accessor("pipe", "group")
    get_pipe_parallel_world_size = make_accessor("pipe", "size")
    get_pipe_parallel_rank = make_accessor("pipe", "rank")
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
