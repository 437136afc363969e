"""The DeepSpeed dialect: topologies, the pipeline grid, the mpu and DeepSpeed's groups, over one NamedMesh.

- *Unchanged code*: :func:`install` lets DeepSpeed's own pipelines make topologies and grids of ours; :func:`bind` lets
  its engine, experts, sequence parallelism and ZeRO take their groups from a mesh.
- *Code that builds topologies or a grid*: :class:`ProcessTopology` and its kin, and :class:`PipelineParallelGrid`.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.
"""

from __future__ import annotations

from typing import Any

from namedmesh.compat.deepspeed import topology
from namedmesh.compat.deepspeed.groups import bind, mark_parameters, unbind
from namedmesh.compat.deepspeed.model_parallel_unit import ModelParallelUnit, SequenceParallelUnit, mpu
from namedmesh.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from namedmesh.compat.install import Original

__all__ = [
    "ModelParallelUnit",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "SequenceParallelUnit",
    "bind",
    "install",
    "mark_parameters",
    "mpu",
    "unbind",
    "uninstall",
]

_PLACE = "deepspeed.runtime.pipe.topology"


def _replace(_module: Any) -> dict[str, object]:
    """Return our topologies and grid, which take the place of the original's."""
    return {name: getattr(topology, name) for name in topology.__all__}


_ORIGINAL = Original(_PLACE, _replace, {_PLACE: f"{__name__}.topology"})


def install() -> None:
    """Let DeepSpeed's pipelines work on our topologies and grids; a second call does nothing.

    Where DeepSpeed is installed, the classes of ``deepspeed.runtime.pipe.topology`` are ours, also where they were
    imported before. Where it is not, the module is this dialect's. Which mesh its engine works on is said by :func:`bind`.

    Example, as the first lines of a program::

        from namedmesh.compat import deepspeed as dialect
        dialect.install()
        from deepspeed.pipe import PipelineModule      # on our topologies and grids
    """
    _ORIGINAL.install()


uninstall = _ORIGINAL.uninstall
