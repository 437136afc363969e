"""The DeepSpeed dialect: topologies, the pipeline grid and the model-parallel unit, over one NamedMesh.

Three ways in, for code at different stages of a move:

- *Code that builds topologies*: :class:`ProcessTopology` and its kin. They need no process group and no torch.
- *Code that builds a grid*: :class:`PipelineParallelGrid`, with the arguments of DeepSpeed's. It makes a mesh, and
  ``grid.mesh`` leads to it; :meth:`PipelineParallelGrid.from_mesh` takes one that exists.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.

Importing the package does not import torch: what needs it is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

if TYPE_CHECKING:
    from namedmesh.compat.deepspeed.grid import PipelineParallelGrid
    from namedmesh.compat.deepspeed.parameters import mark_parameters
    from namedmesh.compat.deepspeed.unit import ModelParallelUnit, SequenceParallelUnit, mpu

__all__ = [
    "ModelParallelUnit",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "SequenceParallelUnit",
    "mark_parameters",
    "mpu",
]

_LAZY = {
    "ModelParallelUnit": "unit",
    "PipelineParallelGrid": "grid",
    "SequenceParallelUnit": "unit",
    "mark_parameters": "parameters",
    "mpu": "unit",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
