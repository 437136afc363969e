"""The Megatron dialect: ``parallel_state``, its accessors and its layers, over one NamedMesh.

Three ways in, for code at different stages of a move:

- *Unchanged code*: :func:`install` lets megatron-core answer from our meshes, or where it is not installed puts the
  dialect under its import path.
- *Code that imports the dialect*: ``from namedmesh.compat.megatron import parallel_state``.
- *Code with a mesh*: :func:`bind` lets the accessors answer from a mesh that exists, and :func:`current_mesh`
  leads from the accessors back to the mesh; both have the same process groups.

``python -m namedmesh migrate PATH`` lists the legacy calls of a code base beside the mesh calls for them.
"""

from __future__ import annotations

from namedmesh.compat.binding import Bound
from namedmesh.compat.megatron import parallel_state, tensor_parallel
from namedmesh.compat.megatron.initialize import (
    bind,
    current_mesh,
    destroy_model_parallel,
    initialize_model_parallel,
    unbind,
)
from namedmesh.compat.megatron.original import ORIGINAL, hyper_comm_grid

__all__ = [
    "Bound",
    "bind",
    "current_mesh",
    "destroy_model_parallel",
    "hyper_comm_grid",
    "initialize_model_parallel",
    "install",
    "parallel_state",
    "tensor_parallel",
    "unbind",
    "uninstall",
]

mpu = parallel_state
"""The short name that much code imports it by."""


def install() -> None:
    """Let megatron-core answer from our meshes; a second call does nothing.

    Where it is installed, the variables of ``megatron.core.parallel_state`` are filled from the mesh that the dialect is
    bound to: its own accessors, layers and process group collections work on our groups, with the signatures of its
    release. Only ``initialize_model_parallel`` and ``destroy_model_parallel`` are ours, also where they were imported before.
    Where it is not, ``megatron.core.parallel_state``, ``megatron.core.mpu`` and ``megatron.core.tensor_parallel`` are
    this dialect's modules.

    Raises:
        ContractRuntimeError: the release of megatron-core is not one of 0.14 to 0.19, which were compared.

    Example, as the first lines of a program::

        from namedmesh.compat import megatron
        megatron.install()
        from megatron.core import mpu
    """
    ORIGINAL.install()


uninstall = ORIGINAL.uninstall
