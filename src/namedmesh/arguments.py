"""The mesh that a function was given: a whole one with names, or one axis, as the function needs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from namedmesh.errors import CheckpointError, MeshError
from namedmesh.mesh import NamedMesh

AxisMesh: TypeAlias = NamedMesh | DeviceMesh
"""A named mesh, of which a function takes the axis of its own role, or a mesh of one axis, whatever its name is."""


def one_axis(mesh: object, axis: str, call: str) -> DeviceMesh:
    """Return the mesh of one axis along which a function works.

    Args:
        mesh: a NamedMesh, of which the axis is taken, or the DeviceMesh of one axis.
        axis: the axis of the function's role, such as ``"tp"``.
        call: the function, for messages.

    Raises:
        AxisError: a NamedMesh without the axis.
        MeshError: a DeviceMesh of several axes, or something else.
    """
    if isinstance(mesh, NamedMesh):
        return mesh[axis]
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f'mesh of {call} must be a NamedMesh, or a DeviceMesh of one axis such as mesh["{axis}"], got {mesh!r}'
        )
    if mesh.ndim != 1:
        raise MeshError(
            f"{call} works along one axis, but its mesh is a DeviceMesh of {mesh.mesh_dim_names or mesh.ndim}; give it the "
            f'NamedMesh, or one axis, such as mesh["{axis}"]'
        )
    return mesh


def named_mesh(mesh: object, call: str) -> NamedMesh:
    """Return the mesh of a function that needs all axes by name; MeshError if it is something else."""
    if isinstance(mesh, NamedMesh):
        return mesh
    got = repr(mesh)
    if isinstance(mesh, DeviceMesh):
        got = f"a DeviceMesh of {mesh.mesh_dim_names or mesh.ndim}"
    raise MeshError(
        f"mesh of {call} must be the NamedMesh, as init_mesh() returns it, got {got}; a whole mesh of torch's becomes one with "
        "NamedMesh.from_device_mesh(mesh)"
    )


def checkpoint_place(path: object, mesh: object, call: str) -> tuple[Path, NamedMesh | None]:
    """Return the path and the mesh of a function of checkpoints; MeshError or CheckpointError if they are something else.

    The mesh is None in a process without process groups.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"path of {call} must be a directory, got a {type(path).__name__}; give path and mesh first"
        )
    return Path(path), None if mesh is None else named_mesh(mesh, call)
