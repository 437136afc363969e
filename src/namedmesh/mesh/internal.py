"""The internal interface of a mesh, for the other modules of namedmesh.

``share_groups`` and the checkpoints need more of a mesh than its public interface. They get it from
these functions, so that a mesh shows its users nothing else. Every function with an argument ``mesh``
checks it here.
"""

# ruff: noqa: SLF001  # the one module that uses private attributes of a mesh on behalf of others

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from namedmesh._errors import CheckpointError, MeshError
from namedmesh.mesh.accessors import MeshAccessors
from namedmesh.mesh.groups import Groups
from namedmesh.mesh.mesh import NamedMesh

AxisMesh: TypeAlias = NamedMesh | DeviceMesh
"""A NamedMesh, whose usual axis is used, or a torch mesh of one axis."""


def get_groups(mesh: MeshAccessors) -> Groups:
    """Return the process groups of a mesh, with their options. Does not communicate.

    Args:
        mesh: the mesh.
    """
    return mesh._groups


def agree_on_call(mesh: NamedMesh, call: str) -> AbstractContextManager[Callable[..., None]]:
    """Return a context in which the ranks agree on a call before groups are created.

    Collective: every rank of the world must enter it.

    Args:
        mesh: the mesh.
        call: the call that the user made, for messages.

    Yields:
        The function that compares a request with the other ranks, as
        :func:`namedmesh.launch.agreement.agree_on` yields it.

    Raises:
        MeshError: the mesh is closed, or it is over some ranks of the world only.
        AgreementError: the other ranks did not make the call, or not with the same request.
    """
    return mesh._agree_on(call)


def get_axis_mesh(mesh: object, axis: str, call: str) -> DeviceMesh:
    """Check the mesh argument of a function that communicates along one axis.

    Args:
        mesh: a NamedMesh, or the DeviceMesh of one axis.
        axis: the axis to take from a NamedMesh, such as ``"tp"``.
        call: the name of the function, for messages.

    Returns:
        The one-dimensional torch mesh of the axis.

    Raises:
        AxisError: the NamedMesh does not have the axis.
        MeshError: the argument is a DeviceMesh of several axes, or not a mesh.
    """
    if isinstance(mesh, NamedMesh):
        return mesh[axis]
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f'mesh of {call} must be a NamedMesh, or a DeviceMesh of one axis such as mesh["{axis}"], got {mesh!r}'
        )
    if mesh.ndim != 1:
        raise MeshError(
            f"{call} works along one axis, but its mesh is a DeviceMesh of "
            f"{mesh.mesh_dim_names or mesh.ndim}; give it the "
            f'NamedMesh, or one axis, such as mesh["{axis}"]'
        )
    return mesh


def require_named_mesh(mesh: object, call: str) -> NamedMesh:
    """Check the mesh argument of a function that needs all axes by name, and return it.

    Args:
        mesh: the argument of the function.
        call: the name of the function, for messages.

    Raises:
        MeshError: the argument is not a NamedMesh.
    """
    if isinstance(mesh, NamedMesh):
        return mesh
    got = repr(mesh)
    if isinstance(mesh, DeviceMesh):
        got = f"a DeviceMesh of {mesh.mesh_dim_names or mesh.ndim}"
    raise MeshError(
        f"mesh of {call} must be the NamedMesh, as init_mesh() returns it, got {got}; make one "
        "from a DeviceMesh over all axes with NamedMesh.from_device_mesh(mesh)"
    )


def parse_checkpoint_arguments(path: object, mesh: object, call: str) -> tuple[Path, NamedMesh | None]:
    """Check the path and the mesh of a function that saves or loads checkpoints.

    Args:
        path: the directory.
        mesh: the mesh; None in a process without process groups.
        call: the name of the function, for messages.

    Returns:
        The path and the mesh.

    Raises:
        CheckpointError: the path is neither a string nor path-like.
        MeshError: the mesh is not a NamedMesh.
    """
    # A model as the first argument is the usual mistake; its whole repr would be no help.
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"path of {call} must be a directory, got a {type(path).__name__}; give path and mesh first"
        )
    return Path(path), None if mesh is None else require_named_mesh(mesh, call)
