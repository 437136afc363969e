"""Model-parallel units, DeepSpeed's ``mpu``: the groups of a mesh under DeepSpeed's names."""

from __future__ import annotations

from namedmesh.axes import DENSE_AXES, EXPERT_AXES
from namedmesh.compat.deepspeed.accessors import GroupAccessors, make_accessor
from namedmesh.compat.state import agree_before_creation, check_axes
from namedmesh.mesh import NamedMesh


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
    with agree_before_creation(mesh, "deepspeed.mpu"):
        instead = "DeepSpeed makes its own groups for them; omit it from the mesh"
        check_axes(mesh.layout, "DeepSpeed", (*DENSE_AXES, "sp"), experts=EXPERT_AXES, instead=instead)
        kinds = {"pipe": ["pp"], "data": ["dp"], "model": ["pp", "tp"], "slice": ["tp"]}
        if "sp" not in mesh and "cp" not in mesh:
            return ModelParallelUnit(mesh, kinds)
        # The legacy axis cp covers both: get_or_create_group finds sp under this name, too.
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

    get_model_parallel_src_rank = make_accessor("model", "first_rank")
    get_data_parallel_src_rank = make_accessor("data", "first_rank")
    get_tensor_model_parallel_group = GroupAccessors.get_slice_parallel_group
    get_tensor_model_parallel_src_rank = make_accessor("slice", "first_rank")
    get_pipeline_model_parallel_group = GroupAccessors.get_pipe_parallel_group


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

    get_sequence_parallel_group = make_accessor("sequence", "group")
    get_sequence_parallel_world_size = make_accessor("sequence", "size")
    get_sequence_parallel_rank = make_accessor("sequence", "rank")
    get_sequence_data_parallel_group = make_accessor("sequence_data", "group")
    get_sequence_data_parallel_world_size = make_accessor("sequence_data", "size")
    get_sequence_data_parallel_rank = make_accessor("sequence_data", "rank")
