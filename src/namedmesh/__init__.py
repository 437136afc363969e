"""Name your parallel axes once; get a torch ``DeviceMesh``, and every group over them.

Importing the package does not import torch: names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh._version import __version__
from namedmesh.errors import (
    AgreementError,
    AxisError,
    CheckpointError,
    GradientError,
    LaunchError,
    LayoutError,
    MeshError,
    NamedMeshError,
    PlanError,
    ShapeError,
    TrainingError,
)
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from namedmesh import launch, plan, tensor_parallel, training
    from namedmesh.groups import GroupOptions
    from namedmesh.init import init_mesh
    from namedmesh.mesh import NamedMesh, current_mesh

__all__ = [
    "AgreementError",
    "AxisError",
    "CheckpointError",
    "GradientError",
    "GroupOptions",
    "LaunchError",
    "Layout",
    "LayoutError",
    "MeshError",
    "NamedMesh",
    "NamedMeshError",
    "PlanError",
    "ShapeError",
    "TrainingError",
    "__version__",
    "current_mesh",
    "init_mesh",
    "launch",
    "plan",
    "tensor_parallel",
    "training",
]

# Name -> the module that has it, and the name there; None for the module itself.
_LAZY: dict[str, tuple[str, str | None]] = {
    "GroupOptions": ("namedmesh.groups", "GroupOptions"),
    "NamedMesh": ("namedmesh.mesh", "NamedMesh"),
    "current_mesh": ("namedmesh.mesh", "current_mesh"),
    "init_mesh": ("namedmesh.init", "init_mesh"),
    "launch": ("namedmesh.launch", None),
    "plan": ("namedmesh.plan", None),
    "tensor_parallel": ("namedmesh.tensor_parallel", None),
    "training": ("namedmesh.training", None),
}


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    module = import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
