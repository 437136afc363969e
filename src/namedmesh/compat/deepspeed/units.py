"""DeepSpeed's names for the groups of a mesh: accessors, and the ``mpu``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from namedmesh.compat.state import check_axes, check_open, list_group_ranks, make_groups
from namedmesh.layout.axes import DENSE_AXES
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.mesh.sharing import share_groups


class GroupInfo(NamedTuple):
    """This rank's group for one kind of parallelism.

    Attributes:
        group: the process group.
        group_ranks: its global ranks.
        world_size: the number of its ranks.
        rank: the group rank of this rank.
        src_rank: the global rank of its first member.
    """

    group: dist.ProcessGroup
    group_ranks: list[int]
    world_size: int
    rank: int
    src_rank: int


class GroupAccessors:
    """Base class with accessors of groups, sizes and ranks under DeepSpeed's names.

    The accessors do not communicate. Subclasses get theirs from a table, by :func:`add_accessors`.
    Collective: every rank must create the object, because the groups may have to be created.

    Args:
        mesh: the mesh whose groups are returned.
        kinds: by kind of parallelism, such as ``"pipe"``, the axes of its groups. Axes that the
            mesh does not have are ignored.
    """

    def __init__(self, mesh: NamedMesh, kinds: Mapping[str, Sequence[str]]) -> None:
        self.mesh = mesh
        # The accessors are called in every step, so everything that they return is computed here.
        self._group_infos: dict[str, GroupInfo] = {}
        with share_groups(mesh):
            for kind, axes in kinds.items():
                group = make_groups(list_group_ranks(mesh.layout, axes))
                ranks = dist.get_process_group_ranks(group)
                group_rank = ranks.index(mesh.global_rank)
                self._group_infos[kind] = GroupInfo(group, ranks, len(ranks), group_rank, ranks[0])

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def get_global_rank(self) -> int:
        """Return the global rank of this rank."""
        return self.mesh.global_rank


def add_accessors(owner: type[GroupAccessors], rows: Mapping[tuple[str, str], str]) -> None:
    """Add accessors to a class.

    Args:
        owner: the class.
        rows: by the kind of parallelism and DeepSpeed's name for it, the fields of
            :class:`GroupInfo` that have an accessor, separated by blanks.
    """
    for (kind, name), fields in rows.items():
        for field in fields.split():
            accessor = _make_accessor(kind, field)
            accessor.__name__ = f"get_{name}_parallel_{field}"
            setattr(owner, accessor.__name__, accessor)


def _make_accessor(kind: str, field: str) -> Any:
    """Make an accessor method, which returns one field of a kind's :class:`GroupInfo`."""

    def access(self: GroupAccessors) -> Any:
        return getattr(self._group_infos[kind], field)

    access.__doc__ = f"Return this rank's {kind}-parallel {field.replace('_', ' ')}."
    return access


_NUMBERS = "world_size rank"
_ALL = f"group {_NUMBERS}"
GRID_ROWS = {
    ("model", "model"): _ALL,
    ("data", "data"): f"{_ALL} group_ranks",
    # DeepSpeed has two names for the ranks that share a layer, and two for the stages of a pipeline.
    ("slice", "slice"): _ALL,
    ("slice", "tensor_model"): _NUMBERS,
    ("pipe", "pipe"): _ALL,
    ("pipe", "pipeline_model"): _NUMBERS,
}
"""The accessors of a grid, for :func:`add_accessors`."""


def mpu(mesh: NamedMesh) -> ModelParallelUnit:
    """Make the model-parallel unit of a mesh, for ``deepspeed.initialize(mpu=...)``.

    Collective: every rank of the mesh must call it.

    DeepSpeed counts a sharded parameter without the attribute ``tensor_model_parallel`` on the
    first model-parallel rank only, so the norm by which it clips gradients is silently too small.
    The layers of :mod:`namedmesh.compat.megatron` set the attribute.

    Args:
        mesh: a mesh with any of the axes dp (or dp_replicate and dp_shard), tp, pp, and sp or cp.
            sp is DeepSpeed's Ulysses. cp, Megatron's context parallelism, means the same to an
            optimizer: ranks with the same parameters and different shards of a sequence. With both
            axes, sequences are sharded across the two.

    Returns:
        A :class:`ModelParallelUnit`; with sp or cp a :class:`SequenceParallelUnit`.

    Raises:
        LayoutError: the mesh has an axis for which DeepSpeed has no group.
        MeshError: the argument is not an open mesh.
        AgreementError: the other ranks did not call this, or called it with a different mesh.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> unit = mpu(mesh)
        >>> unit.get_data_parallel_group() is mesh.group("dp"), hasattr(unit, "get_sequence_parallel_group")
        (True, False)
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    check_open(mesh, "deepspeed.mpu")
    instead = "DeepSpeed makes its own groups for them; omit it from the mesh"
    check_axes(mesh.layout, "DeepSpeed", (*DENSE_AXES, "sp"), instead)
    kinds = {"pipe": ["pp"], "data": ["dp"], "model": ["pp", "tp"], "slice": ["tp"]}
    if "sp" not in mesh and "cp" not in mesh:
        return ModelParallelUnit(mesh, kinds)
    # The legacy axis cp covers both: make_groups finds sp under this name, too.
    kinds["sequence"] = ["cp"]
    kinds["sequence_data"] = ["dp", "cp"]
    return SequenceParallelUnit(mesh, kinds)


class ModelParallelUnit(GroupAccessors):
    """The ranks, sizes and groups of a mesh under DeepSpeed's names.

    Create it with :func:`mpu`.

    DeepSpeed checks with ``hasattr`` which of many names a unit has, and behaves accordingly. A
    unit therefore has only the names that are meaningful for its mesh.

    *Model*-parallel ranks are the ranks of one replica of the model: all stages and all
    tensor-parallel ranks (pp and tp). *Tensor*-parallel (or *slice*-parallel) ranks share a layer
    (tp). A size of 1 has a group, too.

    Attributes:
        mesh: the mesh.
    """


class SequenceParallelUnit(ModelParallelUnit):
    """The unit of a mesh with sequence parallelism: an axis sp or cp.

    DeepSpeed all-reduces gradients, and shards optimizer states, across the
    *sequence-data*-parallel ranks: the data-parallel and the sequence-parallel axes together. The
    loss of a rank must be the mean over its own tokens. Up to ZeRO stage 2, DeepSpeed divides the
    sum of the gradients by the number of data-parallel ranks only, so divide the loss by the number
    of sequence shards.

    With ZeRO stage 3, ``deepspeed.initialize`` shards parameters across the data-parallel ranks
    only, and silently never adds the gradients of different sequence shards. Shard the parameters
    before, across all ranks with the same parameters, and do not divide the loss::

        group = unit.get_sequence_data_parallel_group()
        deepspeed.zero.Init(
            module=model, data_parallel_group=group, config_dict_or_path=config, mpu=unit
        )
        engine, *_ = deepspeed.initialize(model=model, mpu=unit, config=config)
    """


add_accessors(ModelParallelUnit, GRID_ROWS)
_UNIT_ROWS = {
    ("model", "model"): "src_rank",
    ("data", "data"): "src_rank",
    ("slice", "tensor_model"): "group src_rank",
    ("pipe", "pipeline_model"): "group",
}
add_accessors(ModelParallelUnit, _UNIT_ROWS)
add_accessors(SequenceParallelUnit, {(kind, kind): _ALL for kind in ("sequence", "sequence_data")})
