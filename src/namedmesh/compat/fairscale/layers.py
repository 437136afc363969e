"""fairscale's parallel layers, over the model-parallel ranks that they were made with; each returns a tensor.

Their documentation is that of the classes of the same names in :mod:`namedmesh.compat.layers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from namedmesh.compat import layers
from namedmesh.compat.fairscale.initialize import DIALECT
from namedmesh.compat.partition import divide

if TYPE_CHECKING:
    from torch import Tensor

    from namedmesh.compat.layers import Initializer

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """A linear layer whose output features are sharded over the model-parallel ranks."""

    current_group = staticmethod(DIALECT.group)


class RowParallelLinear(layers.RowParallelLinear):
    """A linear layer whose input features are sharded over the model-parallel ranks."""

    current_group = staticmethod(DIALECT.group)


class VocabParallelEmbedding(layers.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded over the model-parallel ranks."""

    current_group = staticmethod(DIALECT.group)


class ParallelEmbedding(layers.ParallelEmbedding):
    """An embedding whose features are sharded over the model-parallel ranks."""

    current_group = staticmethod(DIALECT.group)


def _initialize_affine_weight(  # noqa: PLR0917  the original's signature
    weight: Tensor,
    out_features: int,
    in_features: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Initializer,
    stride: int = 1,
    return_master_weight: bool = False,
) -> Tensor | None:
    """Draw a whole weight, ``(out_features, in_features)``, and copy this rank's shard of it into ``weight``."""
    group = DIALECT.group()
    if group.size == 1:
        init_method(weight)
        return weight if return_master_weight else None
    divide(per_partition_size, stride)
    whole = torch.empty(out_features, in_features, dtype=weight.dtype)
    layers.draw_whole(weight, whole, partition_dim, group, init_method, stride)
    return whole if return_master_weight else None
