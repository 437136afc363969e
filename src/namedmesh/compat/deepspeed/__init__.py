"""Compatibility layer for DeepSpeed: topologies, the pipeline grid, the mpu, its groups.

- *Unchanged code*: after :func:`install`, DeepSpeed's own pipelines use our topologies and grids.
  After :func:`bind`, its engine, experts, sequence parallelism and ZeRO use the groups of a mesh.
- *Code that builds topologies or a grid*: :class:`ProcessTopology` and its subclasses, and
  :class:`PipelineParallelGrid`.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.
"""

from namedmesh.compat.deepspeed.binding import bind, install, unbind, uninstall
from namedmesh.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from namedmesh.compat.deepspeed.units import ModelParallelUnit, SequenceParallelUnit, mpu

__all__ = ["bind", "install", "unbind", "uninstall"]
__all__ += ["ModelParallelUnit", "SequenceParallelUnit", "mpu"]
__all__ += ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]
__all__ += ["PipelineParallelGrid"]
