"""fairscale's ways in and out of model-parallel regions; :class:`namedmesh.compat.model_parallel.ModelParallel` has them."""

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
