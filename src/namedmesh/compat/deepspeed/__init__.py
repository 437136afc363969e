"""The DeepSpeed dialect: topologies, the pipeline grid, the mpu and DeepSpeed's groups, over one NamedMesh.

Four ways in, for code at different stages of a move:

- *Unchanged code*: :func:`install` lets DeepSpeed's own pipelines make topologies and grids of ours; :func:`bind` lets
  its engine, experts, sequence parallelism and ZeRO take their groups from a mesh.
- *Code that builds topologies*: :class:`ProcessTopology` and its kin. They need no process group and no torch.
- *Code that builds a grid*: :class:`PipelineParallelGrid`, with the arguments of DeepSpeed's. It makes a mesh, and
  ``grid.mesh`` leads to it; :meth:`PipelineParallelGrid.from_mesh` takes one that exists.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.

Importing the package does not import torch: what needs it is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh.compat.deepspeed import topology
from namedmesh.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from namedmesh.compat.install import Original

if TYPE_CHECKING:
    from namedmesh.compat.deepspeed.grid import PipelineParallelGrid
    from namedmesh.compat.deepspeed.groups import bind, mark_parameters, unbind
    from namedmesh.compat.deepspeed.model_parallel_unit import ModelParallelUnit, SequenceParallelUnit, mpu

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

# Where the names are that need torch.
_HOMES = {
    "grid": ("PipelineParallelGrid",),
    "groups": ("bind", "mark_parameters", "unbind"),
    "model_parallel_unit": ("ModelParallelUnit", "SequenceParallelUnit", "mpu"),
}
_PLACE = "deepspeed.runtime.pipe.topology"
_REPLACED = (
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
)


def _replace(module: Any) -> dict[tuple[str, str], object]:
    """Return our topologies and grid, which take the place of the original's."""
    return {(module.__name__, name): getattr(topology, name) for name in _REPLACED}


_ORIGINAL = Original(_PLACE, None, _replace, {_PLACE: f"{__name__}.topology"})


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


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
