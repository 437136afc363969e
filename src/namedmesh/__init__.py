"""Name your parallel axes once; get a torch ``DeviceMesh``, and every group over them.

Importing the package does not import torch: names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh._errors import (
    AgreementError,
    AxisError,
    CheckpointError,
    GradientError,
    LaunchError,
    LayoutError,
    MeshError,
    NamedMeshError,
    OptionError,
    PlanError,
    ShapeError,
    TrainingError,
)
from namedmesh._version import __version__
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from namedmesh import launch, tensor_parallel, training
    from namedmesh.mesh import GroupOptions, NamedMesh, current_mesh, init_mesh, share_groups, trace
    from namedmesh.tensor_parallel import parallelize
    from namedmesh.tools import plan

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
    "OptionError",
    "PlanError",
    "ShapeError",
    "TrainingError",
    "__version__",
    "current_mesh",
    "init_mesh",
    "launch",
    "parallelize",
    "plan",
    "share_groups",
    "tensor_parallel",
    "trace",
    "training",
]

# The modules of names that are loaded when they are first used. The other names are rooms
# themselves.
_HOMES = {
    "GroupOptions": "mesh",
    "NamedMesh": "mesh",
    "current_mesh": "mesh",
    "init_mesh": "mesh",
    "parallelize": "tensor_parallel",
    "plan": "tools.plan",
    "share_groups": "mesh",
    "trace": "mesh",
}


if not TYPE_CHECKING:
    # A type checker knows every name from the imports above. With this function, it would accept any.
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"namedmesh.{_HOMES.get(name, name)}")
        value = globals()[name] = getattr(module, name, module)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
