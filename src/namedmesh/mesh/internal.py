"""The internal interface of a mesh, for the other modules of namedmesh.

``share_groups`` and the checkpoints need more of a mesh than its public interface. They get it from
these functions, so that a mesh shows its users nothing else.
"""

# ruff: noqa: SLF001  # the one module that uses private attributes of a mesh on behalf of others

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from namedmesh.mesh.accessors import MeshAccessors
from namedmesh.mesh.groups import Groups
from namedmesh.mesh.mesh import NamedMesh


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
