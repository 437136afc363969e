"""Sums and maxima over named axes, where the groups stand ready: nothing here creates one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh._torch import constant_of_mesh, functional_collective, wait_tensor
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from namedmesh.mesh import NamedMesh


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
    for name in group_names(mesh, tuple(axes)):
        tensor = wait_tensor(functional_collective("all_reduce", tensor, operation, group=name))
    return tensor


@constant_of_mesh
def group_names(mesh: NamedMesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the groups that together span the axes; none where they have one rank."""
    large = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not large:
        return ()
    try:
        return (mesh.group(*large).group_name,)
    except MeshError:
        mesh.group(large[0])  # raises where the mesh is closed
        return tuple(mesh.group(axis).group_name for axis in large)
