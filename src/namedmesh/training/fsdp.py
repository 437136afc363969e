"""The mesh over which FSDP2 shards parameters and averages gradients."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from namedmesh._torch import concatenate_meshes
from namedmesh.arguments import named_mesh
from namedmesh.axes import FSDP_AXES
from namedmesh.errors import AxisError
from namedmesh.mesh import NamedMesh
from namedmesh.training.data import data_axes


def fsdp_mesh(mesh: NamedMesh) -> DeviceMesh:
    """Return the mesh that ``fully_shard(mesh=...)`` wants.

    It is 1-D, over dp (or dp_shard) times cp, whose ranks see other tokens of the same samples;
    with ``dp_replicate`` it is 2-D, for HSDP. Axes of one rank are left out. Call ``fully_shard``
    after tensor parallelism.

    Collective: every rank must call it. The first call makes a group if the mesh has dp and cp.

    Raises:
        AxisError: no axis to shard parameters over, or an axis of unknown meaning.
    """
    mesh = named_mesh(mesh, "fsdp_mesh")
    data_axes(mesh)
    shard = [axis for axis in mesh.layout if axis in FSDP_AXES]
    if not shard:
        raise AxisError(
            f"{mesh.layout} has no axis to shard parameters over; add dp, dp_shard or cp, if of size 1"
        )
    sharded = mesh.flatten(*([axis for axis in shard if mesh.size(axis) > 1] or shard[:1]))
    if "dp_replicate" not in mesh.layout or mesh.size("dp_replicate") == 1:
        return sharded
    return concatenate_meshes([mesh["dp_replicate"], sharded])
