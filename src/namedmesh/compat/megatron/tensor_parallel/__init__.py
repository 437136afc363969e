"""Megatron's tensor-parallel layers, region mappings, loss and helpers, under its names, on this library's arithmetic.

Each takes its process group as an argument; left out, it is the one that the parallel state answers with.
"""

from namedmesh.compat.megatron.tensor_parallel import layers, mappings, utils
from namedmesh.compat.megatron.tensor_parallel.layers import *
from namedmesh.compat.megatron.tensor_parallel.mappings import *
from namedmesh.compat.megatron.tensor_parallel.utils import *

__all__ = sorted({*layers.__all__, *mappings.__all__, *utils.__all__})  # noqa: PLE0605  it is a list of names
