"""The parallel layers of fairscale and of what follows it: they take features, and return a tensor.

A dialect derives a class of each, and says in ``current_group`` over which group they are sharded. It is asked at every
forward: a layer can be pickled, and follows ``with mesh:``; without a group it is a ContractError. In the shapes below, t is
the number of its ranks. Arguments that are not explained at a layer mean the same for all of them:

``init_method`` fills a weight. Ranks must be seeded alike: each draws the whole weight and keeps its shard, and with
``keep_master_weight_for_test`` also the whole weight, in ``master_weight``. A linear layer with ``stride`` above 1 is
made of that many blocks of features, each sharded on its own. A ``bias`` is of zeros at first, and added once. The
options of the embeddings are those of ``torch.nn.Embedding``: ids, output and gradients are those of one whole embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn

from namedmesh.compat.errors import ContractError
from namedmesh.compat.partition import scatter
from namedmesh.compat.sharded_layer import ParallelLayer
from namedmesh.compat.vocabulary import lookup, shorten
from namedmesh.tensor_parallel.collectives import all_gather, gather, sum_forward
from namedmesh.tensor_parallel.embedding import in_part
from namedmesh.tensor_parallel.linear import column, row

if TYPE_CHECKING:
    from namedmesh.compat.sharded_layer import Initializer

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]


class _Linear(ParallelLayer):
    """What the column and the row layer share: everything but the dim that is sharded, and the arithmetic."""

    shape_names = "out_features", "in_features"
    bias: nn.Parameter | None

    def __init__(
        self, sizes: tuple[int, int], bias: bool, initialize: Initializer, stride: int, keep: bool
    ) -> None:
        super().__init__(self.current_group())
        self.in_features, self.out_features = sizes
        if self.group.size == 1:
            stride = 1  # a whole weight has no blocks
        self.make_weight(sizes[::-1], initialize, stride, keep=keep)
        self.register_parameter("bias", self.make_bias(self.weight.shape[0]) if bias else None)

    def get_master_weight(self) -> Tensor:
        """Gather the shards of all ranks, ``(out_features, in_features)``, in rank order; communicates.

        With a stride above 1 that is not the order in which the whole weight was drawn, as in the original.
        """
        return all_gather(self.weight.data, self.group, self.dim)

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer, and over how many ranks it is sharded."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, ranks={self._made_for[0]}"


class ColumnParallelLinear(_Linear):
    """A linear layer whose output features are sharded over the ranks; it returns a tensor.

    The weight is this rank's ``(out_features / t, in_features)``, the bias its ``(out_features / t,)``.

    Args:
        in_features: input features.
        out_features: output features, of all ranks together.
        gather_output: join the output features on every rank.

    Raises:
        ContractError: the ranks, times the stride, do not divide ``out_features``.
    """

    def __init__(  # noqa: PLR0917  the original's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__((in_features, out_features), bias, init_method, stride, keep_master_weight_for_test)
        self.gather_output = gather_output
        self.output_size_per_partition = self.weight.shape[0]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., out_features)``, the same on every rank; without ``gather_output`` ``(..., out_features / t)``.

        Args:
            input_: ``(..., in_features)``, the same on every rank.
        """
        group = self.group
        output = column(input_, self.weight, self.bias, group)
        return gather(output, group, -1) if self.gather_output else output


class RowParallelLinear(_Linear):
    """A linear layer whose input features are sharded over the ranks; it returns a tensor.

    The weight is this rank's ``(out_features, in_features / t)``; every rank has the whole bias.

    Args:
        in_features: input features, of all ranks together.
        out_features: output features.
        input_is_parallel: the input is this rank's shard already; otherwise each rank takes its own.

    Raises:
        ContractError: the ranks, times the stride, do not divide ``in_features``.
    """

    dim = 1

    def __init__(  # noqa: PLR0917  the original's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__((in_features, out_features), bias, init_method, stride, keep_master_weight_for_test)
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = self.weight.shape[1]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., out_features)``, the same on every rank.

        Args:
            input_: ``(..., in_features / t)``, this rank's features, where the input is parallel; otherwise
                ``(..., in_features)``, the same on every rank.
        """
        group = self.group
        if not self.input_is_parallel:
            input_ = scatter(input_, group, -1)
        output = row(input_, self.weight, None, group)
        return output if self.bias is None else output + self.bias


class _Embedding(ParallelLayer):
    """What the two embeddings share: the options of ``torch.nn.Embedding``."""

    shape_names = "num_embeddings", "embedding_dim"

    def __init__(  # noqa: PLR0917  the original's signature
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__(self.current_group())
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._weight = None  # the originals have it
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ContractError(
                f"padding_idx is {padding_idx}, and the ids run from 0 to {num_embeddings - 1}; name one of them, or None"
            )
        self.make_weight((num_embeddings, embedding_dim), init_method, keep=keep_master_weight_for_test)

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer, and over how many ranks it is sharded."""
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self._made_for[0]}"


class VocabParallelEmbedding(_Embedding):
    """An embedding whose vocabulary is sharded over the ranks.

    The weight is this rank's ``(num_embeddings / t, embedding_dim)``: the ids from ``vocab_start_index`` up to,
    and without, ``vocab_end_index``.

    Args:
        num_embeddings: the number of ids, of all ranks together.
        embedding_dim: features of a vector.
        padding_idx: the id, in the whole vocabulary, whose vector gets no gradient.
        max_norm, norm_type, scale_grad_by_freq, sparse: as for ``torch.nn.Embedding``.

    Raises:
        ContractError: the ranks do not divide ``num_embeddings`` (pad the vocabulary), or ``padding_idx`` is outside of it.
    """

    def __init__(  # noqa: PLR0917  the original's signature
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
    ) -> None:
        options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        super().__init__(num_embeddings, embedding_dim, *options, init_method)
        rows = self.num_embeddings_per_partition = self.weight.shape[0]
        self.vocab_start_index = self.group.rank * rows
        self.vocab_end_index = self.vocab_start_index + rows

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)``, the same on every rank.

        Args:
            input_: ids, ``(...)``, the same on every rank. One outside of the vocabulary gets zeros.
        """
        first, padding = self.vocab_start_index, self.padding_idx
        if self.max_norm is not None:
            elsewhere, mine = in_part(input_, first, self.num_embeddings_per_partition)
            shorten(self.weight, mine[~elsewhere], self.max_norm, self.norm_type)
        vectors = lookup(
            input_,
            self.weight,
            first,
            padding_idx=padding if padding is None else padding % self.num_embeddings,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )
        return sum_forward(vectors, self.group)


class ParallelEmbedding(_Embedding):
    """An embedding whose features are sharded over the ranks.

    The weight is this rank's ``(num_embeddings, embedding_dim / t)``.

    Args:
        num_embeddings: the number of ids.
        embedding_dim: features of a vector, of all ranks together.
        padding_idx: the id whose vector gets no gradient.
        max_norm: as for ``torch.nn.Embedding``: a limit for whole vectors, whose norm the ranks add up.
        norm_type, scale_grad_by_freq, sparse: as for ``torch.nn.Embedding``.

    Raises:
        ContractError: the ranks do not divide ``embedding_dim``, or ``padding_idx`` is no id.
    """

    dim = 1

    @property
    def embedding_dim_per_partition(self) -> int:
        """How many features of a vector this rank has."""
        return self.weight.shape[1]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)``, the same on every rank.

        Args:
            input_: ids, ``(...)``, the same on every rank.
        """
        group = self.group
        if self.max_norm is not None:
            shorten(self.weight, input_, self.max_norm, self.norm_type, group)
        options = {"scale_grad_by_freq": self.scale_grad_by_freq, "sparse": self.sparse}
        return gather(F.embedding(input_, self.weight, self.padding_idx, **options), group, -1)
