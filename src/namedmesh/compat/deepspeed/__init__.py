"""Compatibility layer for DeepSpeed: topologies, the pipeline grid, the mpu, its groups.

- *Unchanged code*: after :func:`install`, DeepSpeed's own pipelines use our topologies and grids.
  After :func:`bind`, its engine, experts, sequence parallelism and ZeRO use the groups of a mesh.
- *Code that builds topologies or a grid*: :class:`ProcessTopology` and its subclasses, and
  :class:`PipelineParallelGrid`.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.
"""

from namedmesh.compat.deepspeed.binding import bind, install, unbind, uninstall
from namedmesh.compat.deepspeed.topology import *
from namedmesh.compat.deepspeed.topology import PipelineParallelGrid, ProcessTopology
from namedmesh.compat.deepspeed.units import ModelParallelUnit, SequenceParallelUnit, mpu

__all__ = ["ModelParallelUnit", "SequenceParallelUnit", "bind", "install", "mpu", "unbind", "uninstall"]
__all__ += ["PipeDataParallelTopology", "PipeModelDataParallelTopology"]  # noqa: F405  of the topologies
__all__ += ["PipelineParallelGrid", "ProcessTopology"]
