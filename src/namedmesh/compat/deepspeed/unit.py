"""The model-parallel unit: what ``deepspeed.initialize(mpu=...)`` asks for ranks, sizes and groups.

DeepSpeed asks by many names, and looks with ``hasattr`` which of them there are: a name that is there changes what it
does. So a unit has the names that mean something on its mesh, and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.compat.deepspeed.places import checked_mesh, group_over, places_of
from namedmesh.compat.errors import ContractAttributeError
from namedmesh.consistency import report_failure
from namedmesh.errors import MeshError, did_you_mean

if TYPE_CHECKING:
    import torch.distributed as dist

    from namedmesh.mesh import NamedMesh

__all__ = ["ModelParallelUnit", "SequenceParallelUnit", "mpu"]


def mpu(mesh: NamedMesh) -> ModelParallelUnit:
    """The unit of a mesh, for ``deepspeed.initialize(mpu=...)``; communicates.

    Every rank of the mesh calls it. Groups that the mesh has are used; the one over pp and tp, and with sequence
    parallelism the one over the data-parallel and sequence-parallel ranks, is made unless it exists. All of them
    belong to the mesh.

    Args:
        mesh: a mesh with any of the axes dp (or dp_replicate and dp_shard), tp, pp, and sp or cp. One that it lacks
            is of size 1. The names data, model and pipe are as good. sp is DeepSpeed's Ulysses; cp, Megatron's
            context parallelism, means the same to an optimizer: ranks with the same parameters, each with a part of
            a sequence. A mesh that has both is sequence-parallel over their product.

    Returns:
        A :class:`ModelParallelUnit`; with sp or cp a :class:`SequenceParallelUnit`.

    Raises:
        LayoutError: the mesh has an axis that DeepSpeed has no word for, or two for the same thing.
        MeshError: what was given is no open mesh.
        AgreementError: the other ranks did not call this.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> unit = mpu(mesh)
        >>> unit.get_model_parallel_world_size(), unit.get_data_parallel_group() is mesh.group("dp")
        (1, True)
        >>> hasattr(unit, "get_sequence_parallel_group"), hasattr(unit, "initialize_sequence_parallel")
        (False, False)
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    call = "deepspeed.mpu"
    checked_mesh(mesh, call)
    ranks = mesh.layout.ranks
    with report_failure(call, ranks):
        places = places_of(mesh.layout)
        places.check_no_others()
    mesh.check_consistency(call, {"layout": repr(mesh.layout)})
    kinds = {
        "model": places.pipe + places.model,
        "data": places.data,
        "tensor": places.model,
        "pipe": places.pipe,
    }
    if not places.sequence:
        return ModelParallelUnit(mesh, kinds)
    kinds |= {"sequence": places.sequence, "sequence_data": places.data + places.sequence}
    return SequenceParallelUnit(mesh, kinds)


class ModelParallelUnit:
    """Ranks, sizes and groups of one mesh under DeepSpeed's names; :func:`mpu` makes it.

    *Model*-parallel are the ranks of one replica, all its stages and slices: pp and tp. *Tensor-* (or slice-)
    parallel are those that share a layer: tp. Groups of one rank are groups, too. Nothing here communicates.

    Args:
        mesh: the mesh.
        kinds: for each kind of parallelism the axes of the mesh that it is over.

    Attributes:
        mesh: the mesh, which leads to everything else that namedmesh does.
    """

    def __init__(self, mesh: NamedMesh, kinds: dict[str, tuple[str, ...]]) -> None:
        self.mesh = mesh
        layout, rank = mesh.layout, mesh.global_rank
        self._members = {kind: layout.group(rank, *axes) if axes else (rank,) for kind, axes in kinds.items()}
        self._groups = {kind: group_over(mesh, axes) for kind, axes in kinds.items()}

    def __getattr__(self, name: str) -> Any:
        # DeepSpeed looks for names with hasattr: an answer here would change what it does.
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "initialize_sequence_parallel":
            why = "DeepSpeed takes it for a sign that there is no data-parallel group"
        elif "sequence" in name:
            why = "its mesh has no axis 'sp' or 'cp'; make the mesh with one, such as init_mesh(dp=-1, sp=2)"
        elif "expert" in name:
            why = "DeepSpeed makes the groups of its experts itself"
        else:
            known = [each for each in dir(self) if each.startswith("get_")]
            why = f"it has what DeepSpeed asks of an mpu{did_you_mean(name, known)}"
        raise ContractAttributeError(f"the mpu has no {name!r}: {why}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.mesh!r}>"

    def _group(self, kind: str) -> dist.ProcessGroup:
        if self.mesh.closed:
            raise MeshError(f"the mesh over {self.mesh.layout} was closed; make another, and an mpu of it")
        return self._groups[kind]

    def _size(self, kind: str) -> int:
        return len(self._members[kind])

    def _rank(self, kind: str) -> int:
        return self._members[kind].index(self.mesh.global_rank)

    def get_global_rank(self) -> int:
        """This rank."""
        return self.mesh.global_rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The group of this rank's replica of the model."""
        return self._group("model")

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks of a replica of the model."""
        return self._size("model")

    def get_model_parallel_rank(self) -> int:
        """This rank's place in its replica of the model."""
        return self._rank("model")

    def get_model_parallel_src_rank(self) -> int:
        """The first rank of this rank's replica of the model."""
        return self._members["model"][0]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group of the ranks that have the same parameters and other samples."""
        return self._group("data")

    def get_data_parallel_world_size(self) -> int:
        """The number of replicas of the model."""
        return self._size("data")

    def get_data_parallel_rank(self) -> int:
        """Which replica this rank is in."""
        return self._rank("data")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The ranks of :meth:`get_data_parallel_group`."""
        return list(self._members["data"])

    def get_data_parallel_src_rank(self) -> int:
        """The first rank of :meth:`get_data_parallel_group`."""
        return self._members["data"][0]

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The group of the ranks that share a layer."""
        return self._group("tensor")

    def get_tensor_model_parallel_world_size(self) -> int:
        """Over how many ranks a layer is cut."""
        return self._size("tensor")

    def get_tensor_model_parallel_rank(self) -> int:
        """Which slice of a layer this rank has."""
        return self._rank("tensor")

    def get_tensor_model_parallel_src_rank(self) -> int:
        """The first of the ranks that share a layer."""
        return self._members["tensor"][0]

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        """The same as :meth:`get_tensor_model_parallel_group`."""
        return self._group("tensor")

    def get_slice_parallel_world_size(self) -> int:
        """The same as :meth:`get_tensor_model_parallel_world_size`."""
        return self._size("tensor")

    def get_slice_parallel_rank(self) -> int:
        """The same as :meth:`get_tensor_model_parallel_rank`."""
        return self._rank("tensor")

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """The group of this rank's pipeline."""
        return self._group("pipe")

    def get_pipeline_model_parallel_world_size(self) -> int:
        """The number of stages."""
        return self._size("pipe")

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's stage."""
        return self._rank("pipe")

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """The same as :meth:`get_pipeline_model_parallel_group`."""
        return self._group("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        """The same as :meth:`get_pipeline_model_parallel_world_size`."""
        return self._size("pipe")

    def get_pipe_parallel_rank(self) -> int:
        """The same as :meth:`get_pipeline_model_parallel_rank`."""
        return self._rank("pipe")


class SequenceParallelUnit(ModelParallelUnit):
    """The unit of a mesh with an axis sp or cp: it also has the names that DeepSpeed's sequence parallelism asks for.

    DeepSpeed reduces gradients, and shards optimizer states, over the *sequence-data*-parallel ranks: those of the
    data- and sequence-parallel axes together. Up to ZeRO stage 2 it divides the sum by the number of data-parallel
    ranks only, so a rank's loss has to be its part of the mean over the sequence: the mean over its own tokens,
    divided by the number of parts.

    Stage 3 is different, and says nothing about it: ``deepspeed.initialize`` shards the parameters over the
    data-parallel ranks alone, and the gradients of the parts are never added. Shard them before, over all ranks that
    have the same ones; the loss is then the mean over a rank's own tokens, undivided::

        group = unit.get_sequence_data_parallel_group()
        deepspeed.zero.Init(module=model, data_parallel_group=group, config_dict_or_path=config, mpu=unit)
        engine, *_ = deepspeed.initialize(model=model, mpu=unit, config=config)
    """

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The group of the ranks that share a sequence."""
        return self._group("sequence")

    def get_sequence_parallel_world_size(self) -> int:
        """Over how many ranks a sequence is cut."""
        return self._size("sequence")

    def get_sequence_parallel_rank(self) -> int:
        """Which part of a sequence this rank has."""
        return self._rank("sequence")

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """The group of the ranks that have the same parameters."""
        return self._group("sequence_data")

    def get_sequence_data_parallel_world_size(self) -> int:
        """The number of ranks that have the same parameters."""
        return self._size("sequence_data")

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's place among those that have the same parameters."""
        return self._rank("sequence_data")
