"""The DeepSpeed dialect: topologies, the pipeline grid and the model-parallel unit, over one NamedMesh.

Four ways in, for code at different stages of a move:

- *Unchanged code*: :func:`install` puts the dialect under ``deepspeed.runtime.pipe.topology``, so that DeepSpeed's own
  pipelines work on it; call it before the first import of ``deepspeed``.
- *Code that builds topologies*: :class:`ProcessTopology` and its kin. They need no process group and no torch.
- *Code that builds a grid*: :class:`PipelineParallelGrid`, with the arguments of DeepSpeed's. It makes a mesh, and
  ``grid.mesh`` leads to it; :meth:`PipelineParallelGrid.from_mesh` takes one that exists.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.

Importing the package does not import torch: what needs it is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh.compat.deepspeed.process_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from namedmesh.compat.install import Replacement

if TYPE_CHECKING:
    from namedmesh.compat.deepspeed.grid import PipelineParallelGrid
    from namedmesh.compat.deepspeed.model_parallel_unit import ModelParallelUnit, SequenceParallelUnit, mpu
    from namedmesh.compat.deepspeed.parameters import mark_parameters

__all__ = [
    "ModelParallelUnit",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "SequenceParallelUnit",
    "install",
    "mark_parameters",
    "mpu",
    "uninstall",
]

_LAZY = {
    "ModelParallelUnit": "model_parallel_unit",
    "PipelineParallelGrid": "grid",
    "SequenceParallelUnit": "model_parallel_unit",
    "mark_parameters": "parameters",
    "mpu": "model_parallel_unit",
}

_REPLACEMENT = Replacement(
    "deepspeed",
    {"deepspeed.runtime.pipe.topology": f"{__name__}.topology"},
    without=dict.fromkeys(("deepspeed.runtime", "deepspeed.runtime.pipe"), __name__),
)


def install() -> None:
    """Put the dialect under ``deepspeed.runtime.pipe.topology``.

    DeepSpeed's ``PipelineModule`` then makes grids of ours, and takes topologies of ours. Where DeepSpeed is not
    installed, the module is made up with the packages that it is in. Call it before the first import of
    ``deepspeed``; a second call does nothing.

    Warns:
        UserWarning: modules of DeepSpeed were imported before, and keep the original; it names them.

    Example, as the first lines of a program::

        from namedmesh.compat import deepspeed as dialect
        dialect.install()
        from deepspeed.pipe import PipelineModule      # on our topologies and grids
    """
    _REPLACEMENT.install()


def uninstall() -> None:
    """Undo :func:`install`; modules that were imported in between are forgotten, and imported anew on demand."""
    _REPLACEMENT.uninstall()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
