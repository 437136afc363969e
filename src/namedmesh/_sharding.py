"""How a parameter is sharded: as a DTensor, or as a plain tensor with attributes.

Megatron-LM, DeepSpeed and fairscale shard plain tensors, and describe the shard by attributes of
the parameter. This is the only module that reads them:

===================================== =========================== ==================================
attribute                             set by                      meaning
===================================== =========================== ==================================
``tensor_model_parallel``             Megatron-LM                 a local shard over ``tp``
``partition_dim, partition_stride``   Megatron-LM                 its dim, and its number of blocks
``model_parallel``                    DeepSpeed, fairscale        a local shard over ``tp``
``allreduce`` (False)                 Megatron-LM, DeepSpeed      belongs to an expert
``shared``                            Megatron-LM, tie_stages()   a copy, of another stage
``ds_pipe_replicated``                DeepSpeed                   a copy, of another stage
===================================== =========================== ==================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from namedmesh._torch.modules import find_sharding_under_ddp
from namedmesh.layout.axes import EXPERT_AXES, TOKEN_AXES
from namedmesh.mesh.mesh import NamedMesh

Name = TypeVar("Name", int, str)


def to_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, and any other tensor as it is.

    Args:
        tensor: any tensor.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, and any other tensor as it is.

    Collective for a DTensor that is sharded or partial: every rank of its mesh must call it.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def find_placements(param: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return the mesh and placements of a DTensor, or of its local shard under DDP.

    Args:
        param: the parameter.

    Returns:
        The mesh, and the placement along each of its dims; None for every other plain tensor.
    """
    if isinstance(param, DTensor):
        return param.device_mesh, param.placements
    return find_sharding_under_ddp(param)


def is_tp_shard(param: Tensor) -> bool:
    """Return whether the attributes of a parameter make it a local shard over ``tp``.

    Args:
        param: the parameter.
    """
    return has_partition_dim(param) or bool(getattr(param, "model_parallel", False))


def is_expert(param: Tensor) -> bool:
    """Return whether a parameter belongs to an expert by its attributes.

    The gradients of experts are not all-reduced over the data axes, because the ranks of ``ep``
    have different experts. Megatron-LM and DeepSpeed set ``allreduce = False`` therefore.

    Args:
        param: the parameter.
    """
    return not getattr(param, "allreduce", True)


def is_copy_of_stage(param: Tensor) -> bool:
    """Return whether a parameter is a copy of another pipeline stage's by its attributes.

    Args:
        param: the parameter.
    """
    return bool(getattr(param, "shared", False) or getattr(param, "ds_pipe_replicated", False))


def set_copy_of_stage(param: Any, is_copy: bool) -> None:
    """Set the attribute by which Megatron-LM does not count the copy of a tied weight twice.

    Args:
        param: the parameter.
        is_copy: whether another stage owns the tied weight.
    """
    param.shared = is_copy


def find_attribute_axes(param: Tensor) -> list[str]:
    """Return the axes over which the attributes of a parameter shard it.

    Args:
        param: the parameter.
    """
    is_of_expert = is_expert(param)
    axes = ["ep"] if is_of_expert else []
    if is_tp_shard(param):
        axes.append("etp" if is_of_expert else "tp")
    return axes


class PlainShard(NamedTuple):
    """How a plain tensor is sharded along one dim.

    Attributes:
        mesh: the mesh of the axis over which it is sharded, with one dim.
        dim: the sharded dim.
        num_blocks: the number of equal fused blocks of the dim, such as 2 for gate and up
            (``partition_stride``). Each rank has a shard of every block.
    """

    mesh: DeviceMesh
    dim: int
    num_blocks: int


def has_partition_dim(param: Tensor) -> bool:
    """Return whether a parameter has Megatron-LM's attributes, which name the sharded dim.

    Args:
        param: the parameter.
    """
    return bool(getattr(param, "tensor_model_parallel", False))


def find_plain_shard(param: Tensor, mesh: NamedMesh | None) -> PlainShard | None:
    """Return how Megatron-LM's attributes shard a plain tensor over ``tp`` (experts: ``etp``).

    Args:
        param: the parameter.
        mesh: the mesh that has these axes, or None if there is no mesh.

    Returns:
        None for a DTensor, for a replicated tensor, and on a mesh with one rank along the axis.
    """
    if mesh is None or isinstance(param, DTensor) or not has_partition_dim(param):
        return None
    # Without an axis etp, the mesh shards experts over tp, as it does everything else.
    axis = "etp" if is_expert(param) and "etp" in mesh.coords else "tp"
    if axis not in mesh.coords or mesh.size(axis) == 1:
        return None
    dim = getattr(param, "partition_dim", 0)
    return PlainShard(mesh[axis], dim, getattr(param, "partition_stride", 1))


# --- the one answer to "on which ranks is this tensor replicated?" ---------------------------------


def make_layout_key(param: Tensor) -> object:
    """Return a dict key that is equal for parameters that are sharded in the same way.

    Args:
        param: a DTensor, keyed by its placements, or a plain tensor, keyed by Megatron-LM's
            attributes.
    """
    return find_placements(param), *find_attribute_axes(param)


def group_by_layout(params: Mapping[Name, Tensor]) -> dict[object, list[Name]]:
    """Return the names of the parameters of each layout: thousands of parameters share a few.

    Args:
        params: the parameters, by name or position.
    """
    names_by_layout: dict[object, list[Name]] = {}
    for name, param in params.items():
        names_by_layout.setdefault(make_layout_key(param), []).append(name)
    return names_by_layout


def is_replicated(tensor: Tensor, ranks: Collection[int]) -> bool:
    """Return whether all of these ranks hold the same shard of a tensor.

    A plain tensor is replicated, unless its attributes make it a shard. The mesh of a DTensor may
    be from another view than the ranks, such as the view of experts. Ranks outside of this mesh
    hold what this rank holds.

    Args:
        tensor: a parameter or a gradient.
        ranks: global ranks, this rank among them.
    """
    sharding = find_placements(tensor)
    if sharding is None:
        return not is_tp_shard(tensor)
    mesh, placements = sharding
    # The ranks with the same coordinates along the dims over which the tensor is sharded.
    index: list[Any] = [*(mesh.get_coordinate() or ())]
    for dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            index[dim] = slice(None)
    all_ranks = mesh.mesh
    replicas = {*all_ranks[tuple(index)].flatten().tolist()}
    return replicas.issuperset({*all_ranks.flatten().tolist()}.intersection(ranks))


def find_replicated_axes(param: Tensor, mesh: NamedMesh) -> list[str]:
    """Return the axes along which other ranks must have the same values of a parameter.

    Args:
        param: the parameter.
        mesh: the mesh.
    """
    device_mesh, placements = find_placements(param) or (mesh.device_mesh, ())
    names = (device_mesh.mesh_dim_names or ())[: len(placements)]
    attribute_axes = find_attribute_axes(param)
    is_expert = "ep" in attribute_axes or any(name in EXPERT_AXES for name in names)
    # The meaning of other axes is not known, except in a DTensor that is replicated over them.
    candidates = ["edp", "etp"] if is_expert else [*TOKEN_AXES, "tp"]
    for name, placement in zip(names, placements, strict=False):
        if isinstance(placement, Replicate) and name not in candidates:
            candidates.append(name)
    axes = []
    for axis in candidates:
        is_other = axis not in mesh or axis in attribute_axes or mesh.size(axis) == 1
        if not is_other and (not placements or is_replicated(param, mesh.ranks(axis))):
            axes.append(axis)
    return axes
