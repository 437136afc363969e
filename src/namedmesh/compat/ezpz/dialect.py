"""The ezpz dialect, apart from its names: the layers are below them, and need it too."""

from __future__ import annotations

from namedmesh.compat.model_parallel import ModelParallel

DIALECT = ModelParallel(
    "ezpz",
    "initialize_tensor_parallel",
    {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "context_parallel_size"},
)
