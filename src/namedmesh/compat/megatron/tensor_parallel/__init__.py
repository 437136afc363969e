"""Megatron's tensor-parallel layers, region mappings, loss and helpers, under its names, on this library's arithmetic.

Each takes its process group as an argument; left out, it is the one that the parallel state answers with.
"""

from namedmesh.compat.megatron.tensor_parallel import mappings
from namedmesh.compat.megatron.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from namedmesh.compat.megatron.tensor_parallel.mappings import *

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += mappings.__all__
