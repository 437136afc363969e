"""``ezpz.tp.mappings``: ways in and out of tensor-parallel regions, each with its partner as backward.

Below, t is the number of tensor-parallel ranks, and the last dim, of length n, is split into t shards in rank order.
Results are new tensors: the input is never written to.
"""

from namedmesh.compat.ezpz.dialect import DIALECT

__all__ = [
    "copy_to_tensor_parallel_region",
    "gather_from_tensor_parallel_region",
    "reduce_from_tensor_parallel_region",
    "scatter_to_tensor_parallel_region",
]

copy_to_tensor_parallel_region = DIALECT.copy
reduce_from_tensor_parallel_region = DIALECT.reduce
scatter_to_tensor_parallel_region = DIALECT.scatter
gather_from_tensor_parallel_region = DIALECT.gather
