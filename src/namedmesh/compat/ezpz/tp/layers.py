"""``ezpz.tp.layers``: parallel layers over the tensor-parallel ranks of this moment; each returns a tensor.

Their documentation is that of the classes of the same names in :mod:`namedmesh.compat.layers`.
"""

from __future__ import annotations

from namedmesh.compat import layers
from namedmesh.compat.ezpz.dialect import DIALECT

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]


class _TensorParallel:
    current_group = staticmethod(DIALECT.peers)


class ColumnParallelLinear(_TensorParallel, layers.ColumnParallelLinear):
    """A linear layer whose output features are sharded over the tensor-parallel ranks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from namedmesh import launch
        >>> from namedmesh.compat.ezpz import tp
        >>> _ = launch.init("cpu")
        >>> tp.initialize_tensor_parallel()
        >>> ColumnParallelLinear(6, 8)(torch.zeros(5, 6)).shape
        torch.Size([5, 8])
        >>> tp.destroy_tensor_parallel()
        >>> dist.destroy_process_group()
    """


class RowParallelLinear(_TensorParallel, layers.RowParallelLinear):
    """A linear layer whose input features are sharded over the tensor-parallel ranks."""


class VocabParallelEmbedding(_TensorParallel, layers.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded over the tensor-parallel ranks."""


class ParallelEmbedding(_TensorParallel, layers.ParallelEmbedding):
    """An embedding whose features are sharded over the tensor-parallel ranks."""
