"""The state of the ezpz dialect, apart from its names: the layers are below them, and need it too."""

from __future__ import annotations

from namedmesh.compat.model_parallel import ModelParallel
from namedmesh.dialects import DIALECTS, variables_of

DIALECT = ModelParallel(
    "ezpz",
    "namedmesh.compat.ezpz",
    "initialize_tensor_parallel",
    {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "context_parallel_size"},
)

VARIABLES = variables_of(DIALECTS["ezpz"].kinds)
"""The variables of ``ezpz.tp``, and the slot that each of them is."""
