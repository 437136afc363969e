"""fairscale's ways in and out of model-parallel regions, each with its partner as backward.

Below, t is the number of model-parallel ranks, and the last dim, of length n, is split into t shards in rank order.
Results are new tensors: the input is never written to (the original sums in place).
"""

from namedmesh.compat.fairscale.initialize import DIALECT

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
]

copy_to_model_parallel_region = DIALECT.copy
reduce_from_model_parallel_region = DIALECT.reduce
scatter_to_model_parallel_region = DIALECT.scatter
gather_from_model_parallel_region = DIALECT.gather
