"""ezpz's ways in and out of tensor-parallel regions; :class:`namedmesh.compat.model_parallel.ModelParallel` has them."""

from namedmesh.compat.ezpz.tp import DIALECT

copy_to_tensor_parallel_region = DIALECT.copy
reduce_from_tensor_parallel_region = DIALECT.reduce
scatter_to_tensor_parallel_region = DIALECT.scatter
gather_from_tensor_parallel_region = DIALECT.gather
