"""The Megatron dialect: ``parallel_state``, its accessors and its layers, over one NamedMesh.

Three ways in, for code at different stages of a move:

- *Unchanged code*: :func:`install` puts the dialect under ``megatron.core.parallel_state`` and
  ``megatron.core.mpu``; call it before the first import of ``megatron.core``.
- *Code that imports the dialect*: ``from namedmesh.compat.megatron import parallel_state``.
- *Code with a mesh*: :func:`bind` lets the accessors answer from a mesh that exists, and :func:`current_mesh`
  leads from the accessors back to the mesh; both have the same process groups.

``python -m namedmesh migrate PATH`` lists the legacy calls of a code base beside the mesh calls for them.
"""

from __future__ import annotations

from namedmesh.compat.binding import Bound
from namedmesh.compat.install import Replacement
from namedmesh.compat.megatron import parallel_state, tensor_parallel
from namedmesh.compat.megatron.hyper_comm_grid import HyperCommGrid
from namedmesh.compat.megatron.initialize import (
    bind,
    current_mesh,
    destroy_model_parallel,
    initialize_model_parallel,
    unbind,
)
from namedmesh.compat.megatron.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
    process_groups,
)
from namedmesh.compat.megatron.release import select as select_release

__all__ = [
    "Bound",
    "HyperCommGrid",
    "MultiModuleProcessGroupCollection",
    "ProcessGroupCollection",
    "bind",
    "current_mesh",
    "destroy_model_parallel",
    "initialize_model_parallel",
    "install",
    "parallel_state",
    "process_groups",
    "select_release",
    "tensor_parallel",
    "unbind",
    "uninstall",
]

mpu = parallel_state
"""The short name that much code imports it by."""

_REPLACEMENT = Replacement(
    "megatron.core",
    dict.fromkeys(("megatron.core.parallel_state", "megatron.core.mpu"), parallel_state.__name__),
    without={
        "megatron.core.tensor_parallel": tensor_parallel.__name__,
        **{
            f"megatron.core.tensor_parallel.{part}": f"{tensor_parallel.__name__}.{part}"
            for part in ("cross_entropy", "layers", "mappings", "utils")
        },
        "megatron.core.process_groups_config": f"{__name__}.process_groups_config",
        "megatron.core.hyper_comm_grid": f"{__name__}.hyper_comm_grid",
    },
)


def install(version: str | None = None) -> None:
    """Put the dialect under ``megatron.core.parallel_state`` and ``megatron.core.mpu``.

    Where megatron-core is installed, its own modules then work on our groups. Where it is not, the packages
    ``megatron`` and ``megatron.core`` are made up, and also have ``tensor_parallel``, ``process_groups_config``
    and ``hyper_comm_grid``. Call it before the first import of ``megatron.core``; a second call does nothing.

    Args:
        version: the release to answer as, as for :func:`select_release`; by default the one that is selected.

    Raises:
        ContractError: it is no version.

    Warns:
        UserWarning: modules of megatron-core were imported before, and keep the original; it names them.

    Example, as the first lines of a program::

        from namedmesh.compat import megatron
        megatron.install()
        from megatron.core import mpu      # ours
    """
    if version is not None:
        select_release(version)
    _REPLACEMENT.install()


def uninstall() -> None:
    """Undo :func:`install`; modules that were imported in between are forgotten, and imported anew on demand."""
    _REPLACEMENT.uninstall()
