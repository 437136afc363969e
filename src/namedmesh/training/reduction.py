"""Sums and maxima over named axes, where the groups stand ready: nothing here creates one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh._torch import (
    constant_of_mesh,
    functional_collective,
    needs_functional_collectives,
    wait_tensor,
)
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from namedmesh.mesh import NamedMesh


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduced(tensor: Tensor, mesh: NamedMesh, axes: Sequence[str], operation: str = "sum") -> Tensor:
    """Return a tensor's sum (or ``"max"``) over the ranks along some axes, in a new tensor; communicates.

    One collective where the mesh has a group over all the axes, and otherwise one for each axis.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> all_reduced(torch.ones(2), mesh, ("dp", "tp"))
        tensor([1., 1.])
        >>> mesh.close(); dist.destroy_process_group()
    """
    for span in _spans(mesh, tuple(axes)):
        if needs_functional_collectives(tensor):
            name = _group_name(mesh, span)
            tensor = wait_tensor(functional_collective("all_reduce", tensor, operation, group=name))
        else:
            tensor = tensor.clone()
            dist.all_reduce(tensor, _OPERATIONS[operation], group=mesh.group(*span))
    return tensor


@constant_of_mesh
def _spans(mesh: NamedMesh, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the axes of the groups that together span some axes; none where they have one rank."""
    large = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not large:
        return ()
    try:
        mesh.group(*large)
    except MeshError:
        mesh.group(large[0])  # raises where the mesh is closed
        return tuple((axis,) for axis in large)
    return (large,)


@constant_of_mesh
def _group_name(mesh: NamedMesh, axes: tuple[str, ...]) -> str:
    return mesh.group(*axes).group_name
