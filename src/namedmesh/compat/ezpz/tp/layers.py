"""``ezpz.tp.layers``: parallel layers over the tensor-parallel ranks that they were made with; each returns a tensor.

Their documentation is that of the classes of the same names in :mod:`namedmesh.compat.layers`.
"""

from __future__ import annotations

from namedmesh.compat import layers
from namedmesh.compat.ezpz.tp import DIALECT


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """A linear layer whose output features are sharded over the tensor-parallel ranks."""

    current_group = staticmethod(DIALECT.group)


class RowParallelLinear(layers.RowParallelLinear):
    """A linear layer whose input features are sharded over the tensor-parallel ranks."""

    current_group = staticmethod(DIALECT.group)


class VocabParallelEmbedding(layers.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded over the tensor-parallel ranks."""

    current_group = staticmethod(DIALECT.group)


class ParallelEmbedding(layers.ParallelEmbedding):
    """An embedding whose features are sharded over the tensor-parallel ranks."""

    current_group = staticmethod(DIALECT.group)
