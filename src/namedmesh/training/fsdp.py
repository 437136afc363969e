"""The mesh over which FSDP2 shards parameters and averages gradients."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from namedmesh._errors import AxisError
from namedmesh._torch.meshes import concatenate_meshes
from namedmesh.layout.axes import FSDP_AXES
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.training.data import find_data_axes


def fsdp_mesh(mesh: NamedMesh) -> DeviceMesh:
    """Return the mesh for ``fully_shard(module, mesh=...)``.

    Its ranks are the product of dp (or dp_shard) and cp: ranks along cp have different tokens of
    the same samples, so their gradients are averaged, too. With ``dp_replicate`` the mesh is 2-D,
    for HSDP, otherwise 1-D. Axes of size 1 are omitted. Call ``fully_shard`` after tensor
    parallelism.

    Collective: every rank of the mesh must call it. The first call creates a process group if the
    mesh has both dp and cp.

    Args:
        mesh: the mesh.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        AxisError: the mesh has no axis to shard parameters over, or an axis of unknown meaning.
    """
    mesh = require_named_mesh(mesh, "fsdp_mesh")
    find_data_axes(mesh)  # an axis of unknown meaning is an error
    shard_axes = [axis for axis in mesh.layout if axis in FSDP_AXES]
    if not shard_axes:
        raise AxisError(
            f"{mesh.layout} has no axis to shard parameters over; add dp, dp_shard or cp, if only of size 1"
        )
    # Axes of size 1 would only make the name of the flattened axis longer. If all have size 1, one
    # of them remains, because fully_shard needs a mesh.
    larger_axes = [axis for axis in shard_axes if mesh.size(axis) > 1]
    shard_mesh = mesh.flatten(*larger_axes or shard_axes[:1])
    if "dp_replicate" not in mesh.layout or mesh.size("dp_replicate") == 1:
        return shard_mesh
    return concatenate_meshes([mesh["dp_replicate"], shard_mesh])
