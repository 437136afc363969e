"""The one answer to "on which ranks is this tensor replicated?"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.tensor import Replicate

from namedmesh.axes import EXPERT_AXES, TOKEN_AXES
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import find_attribute_axes, find_placements, is_tp_shard

Name = TypeVar("Name", int, str)


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
