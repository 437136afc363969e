"""The state of the ezpz dialect, apart from its names: the layers are below them, and need it too."""

from __future__ import annotations

from namedmesh.compat.model_parallel import ModelParallel

DIALECT = ModelParallel(
    "ezpz",
    "namedmesh.compat.ezpz",
    "initialize_tensor_parallel",
    {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "context_parallel_size"},
)

VARIABLES = {
    "_CONTEXT_PARALLEL_GROUP": "cp_group",
    "_CONTEXT_PARALLEL_GROUP_RANKS": "cp_ranks",
    "_DATA_PARALLEL_GROUP": "dp_group",
    "_DATA_PARALLEL_RANKS": "dp_ranks",
    "_PIPELINE_PARALLEL_GROUP": "pp_group",
    "_PIPELINE_PARALLEL_RANKS": "pp_ranks",
    "_TENSOR_PARALLEL_GROUP": "tp_group",
    "_TENSOR_PARALLEL_RANKS": "tp_ranks",
}
"""The variables of ``ezpz.tp``, and the slot that each of them is."""
