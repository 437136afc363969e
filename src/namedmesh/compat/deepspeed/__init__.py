"""The DeepSpeed dialect: topologies, the pipeline grid, the mpu and ``utils.groups``, over one NamedMesh.

Four ways in, for code at different stages of a move:

- *Unchanged code*: :func:`install` puts the dialect under ``deepspeed.runtime.pipe.topology`` and
  ``deepspeed.utils.groups``, so that DeepSpeed's own pipelines, experts, sequence parallelism and ZeRO++ work on it; call
  it before the first import of ``deepspeed``. ``groups.bind(mesh)`` then says which mesh they work on.
- *Code that builds topologies*: :class:`ProcessTopology` and its kin. They need no process group and no torch.
- *Code that builds a grid*: :class:`PipelineParallelGrid`, with the arguments of DeepSpeed's. It makes a mesh, and
  ``grid.mesh`` leads to it; :meth:`PipelineParallelGrid.from_mesh` takes one that exists.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.

Importing the package does not import torch: what needs it is loaded when it is first used.
"""

from __future__ import annotations

import sys
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
    {
        "deepspeed.runtime.pipe.topology": f"{__name__}.topology",
        "deepspeed.utils.groups": f"{__name__}.groups",
    },
    without=dict.fromkeys(("deepspeed.runtime", "deepspeed.runtime.pipe", "deepspeed.utils"), __name__),
)
# What else is replaced: the maker of the mesh for mesh_param, and what it was.
_MESH_MAKERS = ("deepspeed.comm", "deepspeed.comm.comm")
_replaced: list[tuple[Any, Any]] = []


def install() -> None:
    """Put the dialect under ``deepspeed.runtime.pipe.topology`` and ``deepspeed.utils.groups``.

    DeepSpeed's ``PipelineModule`` then makes grids of ours, and takes topologies of ours; its engine, MoE layers and
    ZeRO take their groups from a mesh, and ``deepspeed.initialize(mesh_param=...)`` makes its torch mesh on the same
    groups. Where DeepSpeed is not installed, the packages around the two modules are empty ones. Call it
    before the first import of ``deepspeed``; a second call does nothing.

    Warns:
        UserWarning: modules of DeepSpeed were imported before, and keep the original; it names them.

    Example, as the first lines of a program::

        from namedmesh.compat import deepspeed as dialect
        dialect.install()
        from deepspeed.pipe import PipelineModule      # on our topologies and grids
    """
    _REPLACEMENT.install()
    maker = import_module(f"{__name__}.groups").initialize_mesh_device
    for module in [sys.modules[name] for name in _MESH_MAKERS if name in sys.modules]:
        original = vars(module).get("initialize_mesh_device")
        if original not in {None, maker}:
            _replaced.append((module, original))
            vars(module)["initialize_mesh_device"] = maker


def uninstall() -> None:
    """Undo :func:`install`; modules that were imported in between are forgotten, and imported anew on demand."""
    while _replaced:
        module, original = _replaced.pop()
        vars(module)["initialize_mesh_device"] = original
    _REPLACEMENT.uninstall()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
