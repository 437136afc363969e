"""torch's meshes: flattened and concatenated ones, and the groups they keep alive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._torch.execution import torch_is_at_least
from namedmesh._torch.groups import add_default_group_finalizer


def flatten_mesh(root: Any, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> DeviceMesh:
    """Return a 1-D mesh over several axes of a root mesh, on a group that exists.

    ``DeviceMesh._flatten`` would create another group. As after that call, the root knows the mesh
    by its name, and the mesh can be combined with slices of the root.

    Args:
        root: the root mesh.
        axes: axes of the root, in any order.
        name: the name of the flattened axis.
        group: this rank's group over the axes.
    """
    # A slice would need the axes in the order of the root, which may not be the order of the ranks.
    selected: Any = concatenate_meshes([root[axis] for axis in axes])
    mesh: Any = DeviceMesh(
        root.device_type,
        _layout=_collapse_layout(selected._layout),
        _rank_map=root._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
        _init_backend=False,
    )
    mesh._dim_group_names = [group.group_name]
    root._pg_registry[group.group_name] = group
    root._flatten_mapping[name] = mesh
    return mesh  # type: ignore[no-any-return]


def _collapse_layout(layout: Any) -> Any:
    """Return torch's layout of a 1-D mesh over the ranks of a layout with several axes."""
    if torch_is_at_least("2.13"):
        return type(layout)([layout.collapse()])
    merged = layout.coalesce()
    return merged.nest() if len(merged) > 1 else merged


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh over the axes of several meshes, in the given order.

    Args:
        meshes: slices and flattened meshes of one root.
    """
    mesh: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return mesh


def release_groups_with_default_group(mesh: DeviceMesh) -> None:
    """Let ``destroy_process_group()`` free the groups of a mesh that is still referenced.

    Every DTensor refers to its mesh, and the mesh to its groups. A model that lives until the end
    of the program would keep the threads of gloo, and one that frees a tensor while the interpreter
    is being finalized ends the process with SIGABRT.

    Args:
        mesh: a root mesh, which has the groups of all meshes that are sliced from it.
    """
    reference = weakref.ref(mesh)

    def release() -> None:
        living_mesh: Any = reference()
        if living_mesh is not None:
            living_mesh._pg_registry.clear()

    add_default_group_finalizer(release)
