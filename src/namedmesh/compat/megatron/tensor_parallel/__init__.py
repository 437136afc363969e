"""Megatron's tensor-parallel layers, region mappings, loss and helpers, under its names.

The same as ``megatron.core.tensor_parallel`` in arguments and results, on this library's groups and
arithmetic. Every layer and function takes its process group as an argument; left out, it is the group that
:mod:`namedmesh.compat.megatron.parallel_state` answers with.
"""

from namedmesh.compat.megatron.tensor_parallel.cross_entropy import *
from namedmesh.compat.megatron.tensor_parallel.cross_entropy import __all__ as _cross_entropy
from namedmesh.compat.megatron.tensor_parallel.layers import *
from namedmesh.compat.megatron.tensor_parallel.layers import __all__ as _layers
from namedmesh.compat.megatron.tensor_parallel.mappings import *
from namedmesh.compat.megatron.tensor_parallel.mappings import __all__ as _mappings
from namedmesh.compat.megatron.tensor_parallel.utils import *
from namedmesh.compat.megatron.tensor_parallel.utils import __all__ as _utils

__all__ = [*_cross_entropy, *_layers, *_mappings, *_utils]  # noqa: PLE0604  they are lists of names
__all__.sort()
