"""The parallel layers of the dialects, one family: plain parameters, of which each rank of the tensor-parallel group has a shard.

Legacy code reads ``weight.shape`` as the shape of the shard, marks the shard with attributes and hands it to optimizers
of its own, so parameters are plain tensors and no DTensors. A dialect derives a class of each layer, and says in
``current_group`` over which group it is sharded. The four layers here have the arguments of fairscale and of what follows
it: they take features, and return a tensor. Megatron's take a configuration, and return a bias beside it.

The group is asked for at every forward: a layer can be pickled, and follows ``with mesh:``; without a group it is a
ContractError. In the shapes below, t is the number of its ranks. Arguments that are not explained at a layer mean the same
for all of them:

``init_method`` fills a weight. Ranks must be seeded alike: each draws the whole weight and keeps its shard, and with
``keep_master_weight_for_test`` also the whole weight, in ``master_weight``. A linear layer with ``stride`` above 1 is
made of that many blocks of features, each sharded on its own. A ``bias`` is of zeros at first, and added once. The
options of the embeddings are those of ``torch.nn.Embedding``: ids, output and gradients are those of one whole embedding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn

from namedmesh.compat.errors import ContractError
from namedmesh.compat.partition import check_shards, scatter
from namedmesh.compat.regions import (
    ALONE,
    ColumnInput,
    all_gather,
    all_reduce,
    column,
    gather,
    in_part,
    padding_in_part,
    row,
    sum_forward,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh.compat.regions import RankGroup

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]

Initializer: TypeAlias = "Callable[[Tensor], Any]"
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""


# What the layers of all dialects share.


def draw_whole(  # noqa: PLR0917  what a weight is
    shard: Tensor,
    shape: tuple[int, int],
    dim: int,
    group: RankGroup,
    initialize: Initializer,
    stride: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Draw a whole weight, copy this rank's shard of ``dim`` into ``shard``, and return the whole one.

    Ranks that are seeded alike draw the same numbers, so that the shards do not depend on the number of ranks.
    """
    whole = torch.empty(shape, dtype=dtype or shard.dtype, device=shard.device)
    initialize(whole)
    with torch.no_grad():
        shard.copy_(block_shard(whole, group, dim, stride))
    return whole


def block_shard(whole: Tensor, group: RankGroup, dim: int, stride: int = 1) -> Tensor:
    """Return this rank's shard of each of ``stride`` blocks of a weight, joined.

    The projections of queries, keys and values in one weight are three blocks: sharded as one, the first rank
    would get the queries and the last the values.
    """
    blocks: Tensor = whole.unflatten(dim, (stride, group.size, -1))
    return blocks.select(dim + 1, group.rank).flatten(dim, dim + 1)


def fill_shard(shard: Tensor, initialize: Initializer, group: RankGroup) -> None:
    """Fill this rank's shard with numbers of its own, on its device.

    Ranks that are seeded alike would draw the same numbers. So one number is drawn as the seed of the shard,
    the same on all of them, and the rank is added to it; a rank's next layer starts from another one.
    """
    device = shard.device
    seed = int(torch.randint(2**62, (), device=device)) + group.rank
    others = [device] if device.type not in {"cpu", "meta"} else []
    with torch.random.fork_rng(devices=others, device_type=device.type if others else "cuda"):
        torch.manual_seed(seed)
        initialize(shard)


class ParallelLayer(nn.Module):
    """A layer whose weight is sharded along ``dim`` over the ranks of a group.

    Parameters are of ``params_dtype``. With a ``params_device`` each rank draws its own shard, there; otherwise all draw
    the whole weight, in ``init_dtype``. Without ``perform_initialization`` it is left as the allocator hands it out.
    """

    dim: ClassVar[int] = 0
    lengths: ClassVar[tuple[str, str]]  # the attributes that the lengths of the whole weight are
    params_dtype: torch.dtype | None = None
    params_device: torch.device | None = None
    init_dtype: torch.dtype | None = None
    perform_initialization = True
    weight: nn.Parameter
    master_weight: Tensor | None = None

    def current_group(self) -> RankGroup:
        """Return the tensor-parallel group; a dialect overrides this."""
        return ALONE

    @property
    def group(self) -> RankGroup:
        """The current group.

        Raises:
            ContractError: it is of another size than when the weight was sharded, or this rank has another place in it.
        """
        group = self.current_group()
        if (group.size, group.rank) != self._made_for:
            size, rank = self._made_for
            raise ContractError(
                f"{type(self).__name__} was made as rank {rank} of {size}, and is used as rank {group.rank} of {group.size}; "
                "use it with the mesh that it was made with, or make it anew"
            )
        return group

    def make_weight(
        self, initialize: Initializer, stride: int = 1, *, keep: bool = False, allocate: bool = True
    ) -> None:
        """Make this rank's shard of the weight, unless it is not to be allocated, and keep the whole one if drawn.

        Raises:
            ContractError: the ranks, times the stride, do not divide the length that is sharded.
        """
        group = self.current_group()
        self._made_for = group.size, group.rank
        first, second = (getattr(self, name) for name in self.lengths)
        check_shards((first, second)[self.dim], group.size, stride, what=self.lengths[self.dim])
        self._shape = [first, second]
        self._shape[self.dim] //= group.size
        if not allocate:
            self.register_parameter("weight", None)
            return
        shard = torch.empty(self._shape, dtype=self.params_dtype, device=self.params_device)
        if self.perform_initialization and self.params_device is not None:
            fill_shard(shard, initialize, group)
        elif self.perform_initialization:
            whole = draw_whole(shard, (first, second), self.dim, group, initialize, stride, self.init_dtype)
            self.master_weight = whole if keep else None
        self.weight = nn.Parameter(shard)

    def extra_repr(self) -> str:
        """Return the lengths of the whole weight, and over how many ranks it is sharded."""
        first, second = (getattr(self, name) for name in self.lengths)
        return f"{first}, {second}, TP={self._made_for[0]}"


class ParallelLinear(ParallelLayer):
    """A linear layer: its weight and its bias, which is sharded where the output features are."""

    bias: nn.Parameter | None

    def make_parameters(
        self, initialize: Initializer, stride: int, *, bias: bool, keep: bool, allocate: bool = True
    ) -> None:
        """Make this rank's shard of the weight, and the bias that goes with its rows, of zeros."""
        self.make_weight(initialize, stride, keep=keep, allocate=allocate)
        self.register_parameter("bias", None)
        if bias:
            zeros = torch.zeros(self._shape[0], dtype=self.params_dtype, device=self.params_device)
            self.bias = nn.Parameter(zeros)

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer, and over how many ranks it is sharded."""
        outputs, inputs = (getattr(self, name) for name in self.lengths)
        return f"in_features={inputs}, out_features={outputs}, bias={self.bias is not None}, TP={self._made_for[0]}"


class VocabEmbedding(ParallelLayer):
    """An embedding whose vocabulary is sharded, with the ids from ``vocab_start_index`` up to ``vocab_end_index`` here."""

    lengths = "num_embeddings", "embedding_dim"
    num_embeddings: int
    padding_idx: int | None = None
    scale_grad_by_freq = False
    sparse = False
    deterministic_mode = False

    def make_weight(self, *args: Any, **kwargs: Any) -> None:
        """Make the vectors of this rank's ids."""
        super().make_weight(*args, **kwargs)
        rows = self.num_embeddings_per_partition = self.weight.shape[0]
        self.vocab_start_index = self._made_for[1] * rows
        self.vocab_end_index = self.vocab_start_index + rows

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the vectors of the ids that are in this rank's part of the vocabulary, zeros for the others."""
        first, rows = self.vocab_start_index, self.num_embeddings_per_partition
        elsewhere, mine = in_part(ids, first, rows)
        padding = None
        if self.padding_idx is not None:
            padding = padding_in_part(self.padding_idx % self.num_embeddings, first, rows)
        if self.scale_grad_by_freq:
            # Without the others, which would count as the id that stands in for them.
            chosen = mine[~elsewhere]
            vectors = F.embedding(chosen, self.weight, padding, scale_grad_by_freq=True, sparse=self.sparse)
            return vectors.new_zeros(*ids.shape, self.weight.shape[1]).index_put((~elsewhere,), vectors)
        # The gradient of an embedding adds up in another order each time on some devices.
        if self.deterministic_mode:
            vectors = self.weight[mine]
        else:
            vectors = F.embedding(mine, self.weight, padding, sparse=self.sparse)
        return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


# The layers of fairscale and ezpz.


class _Linear(ParallelLinear):
    lengths = "out_features", "in_features"

    def __init__(
        self, sizes: tuple[int, int], bias: bool, initialize: Initializer, stride: int, keep: bool
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        whole = self.current_group().size == 1  # has no blocks
        self.make_parameters(initialize, 1 if whole else stride, bias=bias, keep=keep)

    def get_master_weight(self) -> Tensor:
        """Gather the shards of all ranks, ``(out_features, in_features)``, in rank order; communicates.

        With a stride above 1 that is not the order in which the whole weight was drawn, as in the original.
        """
        return all_gather(self.weight.data, self.group, self.dim)


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
        output = column(input_, self.weight, self.bias, ColumnInput(group))
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
        return row(input_, self.weight, self.bias, group)


class _Embedding(ParallelLayer):
    lengths = "num_embeddings", "embedding_dim"

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
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._weight = None  # the originals have it
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ContractError(
                f"padding_idx is {padding_idx}, and the ids run from 0 to {num_embeddings - 1}; name one of them, or None"
            )
        self.make_weight(init_method, keep=keep_master_weight_for_test)


class VocabParallelEmbedding(_Embedding, VocabEmbedding):
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

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)``, the same on every rank.

        Args:
            input_: ids, ``(...)``, the same on every rank. One outside of the vocabulary gets zeros.
        """
        if self.max_norm is not None:
            elsewhere, mine = in_part(input_, self.vocab_start_index, self.num_embeddings_per_partition)
            _shorten(self.weight, mine[~elsewhere], self.max_norm, self.norm_type, ALONE)
        return sum_forward(self.look_up(input_), self.group)


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
            _shorten(self.weight, input_, self.max_norm, self.norm_type, group)
        options = {"scale_grad_by_freq": self.scale_grad_by_freq, "sparse": self.sparse}
        return gather(F.embedding(input_, self.weight, self.padding_idx, **options), group, -1)


def _shorten(weight: Tensor, ids: Tensor, max_norm: float, norm_type: float, group: RankGroup) -> None:
    """Scale down, in the weight, those of some vectors whose norm is above a limit.

    The ranks of the group have each a part of the features, and each shortens its own.
    """
    with torch.no_grad():
        chosen = ids.unique()
        vectors = weight[chosen]
        norms = torch.linalg.vector_norm(vectors, norm_type, dim=-1, keepdim=True)
        if group.size > 1 and norm_type == math.inf:
            norms = all_reduce(norms, group, "max")
        elif group.size > 1 and norm_type == 0:  # the number of features that are not zero
            norms = all_reduce(norms, group)
        elif group.size > 1:
            norms = all_reduce(norms.pow(norm_type), group).pow(1 / norm_type)
        # The small number is that of nn.Embedding.
        weight[chosen] = torch.where(norms > max_norm, vectors * (max_norm / (norms + 1e-7)), vectors)
