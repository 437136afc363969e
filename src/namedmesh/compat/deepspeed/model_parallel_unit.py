"""The model-parallel unit: what ``deepspeed.initialize(mpu=...)`` reads ranks, sizes and groups from.

DeepSpeed knows many names for them, and checks with ``hasattr`` which exist: a name that exists changes what it does.
So a unit has the names that mean something on its mesh, and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh.compat.state import USUAL_AXES, agreed_groups, check_axes, group_over, require_open
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from namedmesh.mesh import NamedMesh


class Answers(NamedTuple):
    """What the getters answer for one kind of parallelism: this rank's group, and what follows from its ranks."""

    group: dist.ProcessGroup
    ranks: list[int]
    size: int
    rank: int
    first_rank: int


def answers(mesh: NamedMesh, kinds: Mapping[str, Sequence[str]]) -> dict[str, Answers]:
    """Return what the getters answer for each kind of parallelism, by its axes; groups that are missing are made."""
    of_kinds = {}
    for kind, axes in kinds.items():
        group, ranks = group_over(mesh, axes)
        of_kinds[kind] = Answers(group, ranks, len(ranks), ranks.index(mesh.global_rank), ranks[0])
    return of_kinds


def _getter(kind: str, answer: str) -> Any:
    """Make a method that returns one answer for a kind of parallelism."""

    def getter(self: Getters) -> Any:
        if answer == "group" and self.mesh.closed:
            raise MeshError(f"the mesh over {self.mesh.layout} was closed; make another")
        return getattr(self._answers[kind], answer)

    getter.__doc__ = f"Return this rank's {kind}-parallel {answer.replace('_', ' ')}."
    return getter


class Getters:
    """The getters that a model-parallel unit and a pipeline grid have in common. None of them communicates."""

    mesh: NamedMesh
    _answers: dict[str, Answers]

    def get_global_rank(self) -> int:
        """Return this rank."""
        return self.mesh.global_rank

    get_model_parallel_group = _getter("model", "group")
    get_model_parallel_world_size = _getter("model", "size")
    get_model_parallel_rank = _getter("model", "rank")
    get_data_parallel_group = _getter("data", "group")
    get_data_parallel_group_ranks = _getter("data", "ranks")
    get_data_parallel_world_size = _getter("data", "size")
    get_data_parallel_rank = _getter("data", "rank")
    get_slice_parallel_group = _getter("slice", "group")
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = _getter("slice", "size")
    get_slice_parallel_rank = get_tensor_model_parallel_rank = _getter("slice", "rank")
    get_pipe_parallel_group = _getter("pipe", "group")
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size = _getter("pipe", "size")
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = _getter("pipe", "rank")


def mpu(mesh: NamedMesh) -> ModelParallelUnit:
    """Make the unit of a mesh, for ``deepspeed.initialize(mpu=...)``; every rank calls it; communicates.

    The mesh has any of the axes dp (or dp_replicate and dp_shard), tp, pp, and sp or cp. sp is DeepSpeed's Ulysses; cp,
    Megatron's context parallelism, means the same to an optimizer: ranks with the same parameters, each with a part of a
    sequence. With both, sequences are sharded over their product.

    Returns:
        A :class:`ModelParallelUnit`; with sp or cp a :class:`SequenceParallelUnit`.

    Raises:
        LayoutError: the mesh has an axis of no kind of parallelism of DeepSpeed's.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> unit = mpu(mesh)
        >>> unit.get_data_parallel_group() is mesh.group("dp"), hasattr(unit, "get_sequence_parallel_group")
        (True, False)
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    require_open(mesh, "deepspeed.mpu")
    with agreed_groups(mesh, "deepspeed.mpu"):
        check_axes(
            mesh.layout,
            "DeepSpeed",
            (*USUAL_AXES, "sp"),
            experts=("edp", "ep", "etp"),
            instead="DeepSpeed makes its own groups for them; leave it out of the mesh",
        )
        kinds = {"pipe": ["pp"], "data": ["dp"], "model": ["pp", "tp"], "slice": ["tp"]}
        if "sp" not in mesh and "cp" not in mesh:
            return ModelParallelUnit(mesh, answers(mesh, kinds))
        kinds |= {"sequence": ["cp"], "sequence_data": ["dp", "cp"]}
        return SequenceParallelUnit(mesh, answers(mesh, kinds))


class ModelParallelUnit(Getters):
    """Ranks, sizes and groups of one mesh under DeepSpeed's names; :func:`mpu` makes it. ``mesh`` is the mesh.

    *Model*-parallel are the ranks of one replica, all its stages and slices: pp and tp. *Tensor-* (or slice-)
    parallel are those that share a layer: tp. Groups of one rank are groups, too.
    """

    def __init__(self, mesh: NamedMesh, answers: dict[str, Answers]) -> None:
        self.mesh, self._answers = mesh, answers

    get_model_parallel_src_rank = _getter("model", "first_rank")
    get_data_parallel_src_rank = _getter("data", "first_rank")
    get_tensor_model_parallel_group = Getters.get_slice_parallel_group
    get_tensor_model_parallel_src_rank = _getter("slice", "first_rank")
    get_pipeline_model_parallel_group = Getters.get_pipe_parallel_group


class SequenceParallelUnit(ModelParallelUnit):
    """The unit of a mesh with an axis sp or cp; it adds the getters of DeepSpeed's sequence parallelism.

    DeepSpeed reduces gradients, and shards optimizer states, over the *sequence-data*-parallel ranks: those of the
    data- and sequence-parallel axes together. Up to ZeRO stage 2 it divides the sum by the number of data-parallel
    ranks only: a rank's loss has to be the mean over its own tokens, divided by the number of parts.

    With stage 3 ``deepspeed.initialize`` shards the parameters over the data-parallel ranks alone, and silently never
    adds the gradients of the parts. Shard them before, over all ranks that have the same ones; the loss is then the mean
    over a rank's own tokens, undivided::

        group = unit.get_sequence_data_parallel_group()
        deepspeed.zero.Init(module=model, data_parallel_group=group, config_dict_or_path=config, mpu=unit)
        engine, *_ = deepspeed.initialize(model=model, mpu=unit, config=config)
    """

    get_sequence_parallel_group = _getter("sequence", "group")
    get_sequence_parallel_world_size = _getter("sequence", "size")
    get_sequence_parallel_rank = _getter("sequence", "rank")
    get_sequence_data_parallel_group = _getter("sequence_data", "group")
    get_sequence_data_parallel_world_size = _getter("sequence_data", "size")
    get_sequence_data_parallel_rank = _getter("sequence_data", "rank")
