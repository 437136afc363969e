"""fairscale's parallel layers, over the model-parallel ranks of this moment; each returns a tensor.

Arguments, attributes and results are the original's, but where its embeddings are not those of one whole
``torch.nn.Embedding``: there ``padding_idx`` stops the gradient of one vector on every rank, ``scale_grad_by_freq``
counts ids that other ranks hold, and ``max_norm`` of ``ParallelEmbedding`` is a limit for shards of vectors.
Their documentation is that of the classes of the same names in :mod:`namedmesh.compat.layers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat import layers
from namedmesh.compat.fairscale.initialize import DIALECT
from namedmesh.compat.layers import draw_whole
from namedmesh.compat.partition import divide

if TYPE_CHECKING:
    from torch import Tensor

    from namedmesh.compat.layers import Initializer

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]


class _ModelParallel:
    current_group = staticmethod(DIALECT.peers)


class ColumnParallelLinear(_ModelParallel, layers.ColumnParallelLinear):
    """A linear layer whose output features are sharded over the model-parallel ranks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from namedmesh import launch
        >>> from namedmesh.compat import fairscale
        >>> _ = launch.init("cpu")
        >>> fairscale.initialize_model_parallel(1)
        >>> layer = ColumnParallelLinear(6, 8, bias=False, gather_output=False, init_method=lambda x: x)
        >>> layer(torch.zeros(5, 6)).shape      # on each of t ranks: 8 / t features
        torch.Size([5, 8])
        >>> RowParallelLinear(8, 6, input_is_parallel=True)(torch.zeros(5, 8)).shape
        torch.Size([5, 6])
        >>> fairscale.destroy_model_parallel()
        >>> dist.destroy_process_group()
    """


class RowParallelLinear(_ModelParallel, layers.RowParallelLinear):
    """A linear layer whose input features are sharded over the model-parallel ranks."""


class VocabParallelEmbedding(_ModelParallel, layers.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded over the model-parallel ranks."""


class ParallelEmbedding(_ModelParallel, layers.ParallelEmbedding):
    """An embedding whose features are sharded over the model-parallel ranks."""


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
    """Draw a whole weight, ``(out_features, in_features)``, and copy this rank's shard of it into ``weight``.

    Ranks must be seeded alike. The dim that is sharded is made of ``stride`` blocks; a ContractError where they do not
    divide the length of the shard.
    """
    group = DIALECT.peers()
    if group.size == 1:
        init_method(weight)
        return weight if return_master_weight else None
    divide(per_partition_size, stride)
    whole = draw_whole(weight, (out_features, in_features), partition_dim, group, init_method, stride)
    return whole if return_master_weight else None
