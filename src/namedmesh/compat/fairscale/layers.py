"""fairscale's parallel layers, over the model-parallel ranks of this moment; each returns a tensor.

Arguments, attributes and results are the original's, but where its embeddings are not those of one whole
``torch.nn.Embedding``: there ``padding_idx`` stops the gradient of one vector on every rank, ``scale_grad_by_freq``
counts ids that other ranks hold, and ``max_norm`` of ``ParallelEmbedding`` is a limit for shards of vectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat import parallel_layers
from namedmesh.compat.fairscale.initialize import DIALECT

if TYPE_CHECKING:
    from namedmesh.tensor_parallel.collectives import RankGroup

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]


class _ModelParallel:
    """The ranks of a layer are fairscale's model-parallel ones."""

    @staticmethod
    def ask() -> RankGroup:
        return DIALECT.peers()


class ColumnParallelLinear(_ModelParallel, parallel_layers.ColumnParallelLinear):
    """A linear layer whose output features are sharded over the model-parallel ranks.

    Arguments, shapes and errors are those of :class:`namedmesh.compat.parallel_layers.ColumnParallelLinear`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from namedmesh import launch
        >>> from namedmesh.compat import fairscale
        >>> _ = launch.init("cpu")
        >>> fairscale.initialize_model_parallel(1)
        >>> layer = ColumnParallelLinear(6, 8, bias=False, gather_output=False, init_method=lambda x: x)
        >>> layer(torch.zeros(5, 6)).shape      # on each of t ranks: 8 / t features
        torch.Size([5, 8])
        >>> fairscale.destroy_model_parallel()
        >>> dist.destroy_process_group()
    """


class RowParallelLinear(_ModelParallel, parallel_layers.RowParallelLinear):
    """A linear layer whose input features are sharded over the model-parallel ranks.

    Arguments, shapes and errors are those of :class:`namedmesh.compat.parallel_layers.RowParallelLinear`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from namedmesh import launch
        >>> from namedmesh.compat import fairscale
        >>> _ = launch.init("cpu")
        >>> fairscale.initialize_model_parallel(1)
        >>> RowParallelLinear(8, 6, input_is_parallel=True)(torch.zeros(5, 8)).shape
        torch.Size([5, 6])
        >>> fairscale.destroy_model_parallel()
        >>> dist.destroy_process_group()
    """


class VocabParallelEmbedding(_ModelParallel, parallel_layers.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded over the model-parallel ranks.

    Arguments, shapes and errors are those of :class:`namedmesh.compat.parallel_layers.VocabParallelEmbedding`.
    """


class ParallelEmbedding(_ModelParallel, parallel_layers.ParallelEmbedding):
    """An embedding whose features are sharded over the model-parallel ranks.

    Arguments, shapes and errors are those of :class:`namedmesh.compat.parallel_layers.ParallelEmbedding`.
    """
