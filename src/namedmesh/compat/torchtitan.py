"""torchtitan's own ``ParallelDims``, with the meshes of one NamedMesh.

torchtitan makes a process group for every axis of four to five factorings of the world. Here each factoring is a view
of one mesh, so axes over the same ranks have one group.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

from namedmesh.compat.axis_map import check_axes
from namedmesh.compat.binding import require_open
from namedmesh.compat.errors import ContractRuntimeError
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from namedmesh.mesh import NamedMesh

__all__ = ["parallel_dims"]

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_PRODUCTS = {
    "batch": ("dp_replicate", "dp_shard"),
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
}
# What the parameters outside of the experts are sharded over, and what the dense layers compute on.
_DENSE = {
    "partial_dtensor": (("pp", "dp_replicate", "fsdp", "tp"), ("dp_replicate", "fsdp", "tp")),
    "full_dtensor": (_AXES, _AXES[1:]),
    "spmd_types": (_AXES, ("dp", "cp", "tp")),
}
_SPARSE = ("dp_replicate", "efsdp", "ep")
# The fields of the release that was compared.
_FIELDS = {*_AXES, "ep", "world_size", "spmd_backend"}
_FIELDS |= {"_single_axis_meshes", "_multi_axis_meshes", "_world_mesh", "_spmd_meshes"}


def parallel_dims(mesh: NamedMesh, *, ep: int | None = None, spmd_backend: str = "spmd_types") -> Any:
    """Return torchtitan's ``ParallelDims`` over a mesh, on its groups; communicates for the factorings that it lacks.

    Every rank of the mesh calls it. The factorings become views of the mesh: its accessors know the axes ``batch``,
    ``efsdp``, ``ep`` and so on, too. torchtitan's own code answers, so ``dims.get_mesh("tp")`` is what its trainer and its
    models are given.

    Args:
        mesh: a mesh of axes ``pp``, ``dp_replicate``, ``dp_shard`` (or ``dp``), ``cp`` and ``tp`` in this order; one
            that it lacks is of size 1.
        ep: how many ranks share the experts; by default the size of the axis ``ep`` of a view, or 1.
        spmd_backend: as for ``ParallelDims``: "spmd_types", "full_dtensor" or "partial_dtensor".

    Raises:
        ContractRuntimeError: torchtitan is not installed, or is not release 0.3, which was compared.
        LayoutError: the mesh has other axes, its ranks are in another order, or ``ep`` does not divide them.
        MeshError: ``mesh`` is no open mesh.
        AgreementError: the other ranks did not call this, or not with the same arguments.

    Example::

        mesh = namedmesh.init_mesh(pp=1, dp_replicate=1, dp_shard=-1, cp=1, tp=2)
        dims = namedmesh.compat.torchtitan.parallel_dims(mesh)
        dims.get_mesh("tp").get_group() is mesh.group("tp")
    """
    kind = _original()
    require_open(mesh, "torchtitan.parallel_dims")
    check_axes(mesh.layout, "torchtitan")
    if spmd_backend not in _DENSE:
        raise LayoutError(
            f"spmd_backend is {spmd_backend!r}, which is not one of {tuple(_DENSE)}{did_you_mean(spmd_backend, _DENSE)}"
        )
    sizes = dict.fromkeys(_AXES, 1)
    for axis, size in mesh.layout.items():
        sizes["dp_shard" if axis == "dp" else axis] = size
    if ep is None:
        ep = mesh.size("ep") if "ep" in mesh else 1
    dims = kind(**sizes, ep=ep, world_size=mesh.layout.world_size, spmd_backend=spmd_backend)
    sizes |= {product: prod(sizes[axis] for axis in axes) for product, axes in _PRODUCTS.items()}
    sizes |= {"ep": ep, "efsdp": -1}

    def factoring(name: str, *axes: str) -> Any:
        by_axis = {axis: sizes[axis] for axis in axes}
        layout = Layout(**by_axis, world_size=mesh.layout.world_size, rank_offset=mesh.layout.rank_offset)
        if layout not in (mesh.layout, *mesh.views.values()):
            mesh.add_view(f"torchtitan {name}", options=None, **dict(layout.items()))
        return mesh[axes]

    dense, computed_on = _DENSE[spmd_backend]
    meshes = {
        "dense": factoring("dense", *dense),
        "dataloading": factoring("data", "pp", "batch", "cp", "tp"),
        "sparse": factoring("sparse", "pp", *_SPARSE),
    }
    meshes["loss"] = mesh.flatten("batch", "cp", name="loss_mesh")
    if spmd_backend == "spmd_types":
        meshes["spmd_dense_for_fwdbwd"] = factoring("spmd", "pp", *computed_on)[computed_on]
        if ep > 1:
            meshes["spmd_sparse_for_fwdbwd"] = mesh[_SPARSE]
    used = dict.fromkeys(("pp", "batch", "dp_replicate", "cp", "tp", "ep", "efsdp", *dense, *computed_on))
    whole = mesh.layout.axes
    vars(dims).update(
        _world_mesh=mesh.flatten(*whole, name="world") if len(whole) > 1 else mesh.device_mesh,
        _global_meshes=meshes,
        _single_axis_meshes={axis: mesh[axis] for axis in used} | {"loss": meshes["loss"]},
    )
    activated = [dims.get_activated_mesh(list(axes)) for axes in (computed_on, _SPARSE)]
    vars(dims)["_spmd_meshes"] = [each for each in activated if each is not None]
    return dims


def _original() -> Any:
    """Return torchtitan's class; raise ContractRuntimeError where it is not the one that was compared."""
    try:
        kind = import_module("torchtitan.distributed.parallel_dims").ParallelDims
    except ModuleNotFoundError as error:
        raise ContractRuntimeError(
            f"parallel_dims() fills the ParallelDims of torchtitan, which cannot be imported ({error}); install it, or use "
            "the mesh itself: mesh['tp'], mesh.flatten(...), mesh.add_view(...)"
        ) from None
    if {field.name for field in fields(kind)} != _FIELDS:
        raise ContractRuntimeError(
            "torchtitan's ParallelDims has other fields than in release 0.3, which namedmesh was compared with; install that "
            "release, or use the mesh itself"
        )
    return kind
