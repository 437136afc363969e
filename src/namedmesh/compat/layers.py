"""The parallel layers of the dialects, and their loss, one family: plain parameters, of which each rank of a group has a shard.

Legacy code reads ``weight.shape`` as the shape of the shard and marks it with attributes, so parameters are no DTensors. A
layer keeps the group that it was made with, of t ranks. The four layers here are fairscale's and ezpz's: ``init_method``
fills a weight; ranks must be seeded alike, since each draws the whole weight and keeps its shard, and with
``keep_master_weight_for_test`` the whole one, too, in ``master_weight``. With ``stride`` a weight is made of that many
blocks of features, each sharded on its own. A length that the ranks do not divide is a ContractError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn

from namedmesh.compat.errors import ContractError
from namedmesh.compat.partition import check_shards, scatter
from namedmesh.tensor_parallel.collectives import (
    Group,
    all_gather,
    enter,
    gather,
    leave,
    rows_cross_entropy,
    target_problems,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]

ALONE = Group("", 1, 0)
Initializer: TypeAlias = "Callable[[Tensor], Any]"
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""


# What the layers of all dialects share.


def draw_whole(  # noqa: PLR0917  what a weight is
    shard: Tensor, whole: Tensor, dim: int, group: Group, initialize: Initializer, stride: int
) -> None:
    """Fill a whole weight, and copy this rank's shard of ``dim`` of each of ``stride`` blocks, joined."""
    initialize(whole)
    with torch.no_grad():
        blocks = whole.unflatten(dim, (stride, group.size, -1))
        shard.copy_(blocks.select(dim + 1, group.rank).flatten(dim, dim + 1))


def fill_shard(shard: Tensor, initialize: Initializer, group: Group) -> None:
    """Fill this rank's shard with numbers of its own, on its device, also where ranks are seeded alike."""
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
    lengths: ClassVar[tuple[str, str]] = "out_features", "in_features"  # the attributes: of the whole weight
    group: Group
    params_dtype: torch.dtype | None = None
    params_device: torch.device | None = None
    init_dtype: torch.dtype | None = None
    perform_initialization = True
    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None = None

    def make_weight(
        self, initialize: Initializer, stride: int = 1, *, keep: bool = False, allocate: bool = True
    ) -> None:
        """Make this rank's shard of the weight, unless it is not to be allocated."""
        shape = [getattr(self, name) for name in self.lengths]
        check_shards(shape[self.dim], self.group.size, stride, what=self.lengths[self.dim])
        self._shape = [*shape]
        self._shape[self.dim] //= self.group.size
        if not allocate:
            self.register_parameter("weight", None)
            return
        shard = torch.empty(self._shape, dtype=self.params_dtype, device=self.params_device)
        if self.perform_initialization and self.params_device is not None:
            fill_shard(shard, initialize, self.group)
        elif self.perform_initialization:
            whole = torch.empty(shape, dtype=self.init_dtype or shard.dtype)
            draw_whole(shard, whole, self.dim, self.group, initialize, stride)
            self.master_weight = whole if keep else None
        self.weight = nn.Parameter(shard)

    def make_bias(self, wanted: bool) -> None:
        """Make the bias of a linear layer, of zeros, sharded where the output features are."""
        zeros = torch.zeros(self._shape[0], dtype=self.params_dtype, device=self.params_device)
        self.register_parameter("bias", nn.Parameter(zeros) if wanted else None)

    def extra_repr(self) -> str:
        """Return the lengths of the whole weight, and over how many ranks it is sharded."""
        first, second = (getattr(self, name) for name in self.lengths)
        if "bias" not in self._parameters:
            return f"{first}, {second}, TP={self.group.size}"
        return (
            f"in_features={second}, out_features={first}, bias={self.bias is not None}, TP={self.group.size}"
        )


class VocabEmbedding(ParallelLayer):
    """An embedding whose vocabulary is sharded, with the ids from ``vocab_start_index`` up to ``vocab_end_index`` here."""

    lengths = "num_embeddings", "embedding_dim"
    num_embeddings: int
    padding_idx: int | None = None
    sparse = False

    def make_weight(self, *args: Any, **kwargs: Any) -> None:
        """Make the vectors of this rank's ids."""
        super().make_weight(*args, **kwargs)
        rows = self.num_embeddings_per_partition = self.weight.shape[0]
        self.vocab_start_index = self.group.rank * rows
        self.vocab_end_index = self.vocab_start_index + rows

    def look_up(self, ids: Tensor, *, deterministic: bool = False) -> Tensor:
        """Return the vectors of the ids in this rank's part of the vocabulary, zeros for the others."""
        elsewhere = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        mine = (ids - self.vocab_start_index).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        if padding is not None:
            padding = padding % self.num_embeddings - self.vocab_start_index
            if padding not in range(self.num_embeddings_per_partition):
                padding = None
        if deterministic:
            vectors = self.weight[mine]
        else:
            vectors = F.embedding(mine, self.weight, padding, sparse=self.sparse)
        return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


# The layers of fairscale and ezpz.


class _PlainLayer(ParallelLayer):
    def current_group(self) -> Group:
        """Return the group over which a new layer is sharded; a dialect overrides this."""
        return ALONE

    def get_master_weight(self) -> Tensor:
        """Gather the shards of all ranks of a linear layer, in rank order (as the original, whatever the stride); communicates."""
        return all_gather(self.weight.data, self.group, self.dim)


class ColumnParallelLinear(_PlainLayer):
    """A linear layer whose output features are sharded over the ranks; it returns a tensor.

    The weight is this rank's ``(out_features / t, in_features)``, the bias its ``(out_features / t,)``. With
    ``gather_output`` the output features are joined on every rank.
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
        super().__init__()
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self.group = self.current_group()
        whole = self.group.size == 1  # has no blocks
        self.make_weight(init_method, 1 if whole else stride, keep=keep_master_weight_for_test)
        self.make_bias(bias)
        self.output_size_per_partition = self.weight.shape[0]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., out_features)`` or, not gathered, ``(..., out_features / t)``."""
        output = F.linear(enter(input_, self.group), self.weight, self.bias)
        return gather(output, self.group, -1) if self.gather_output else output


class RowParallelLinear(_PlainLayer):
    """A linear layer whose input features are sharded over the ranks; it returns a tensor.

    The weight is this rank's ``(out_features, in_features / t)``; every rank has the whole bias. With ``input_is_parallel``
    the input is this rank's shard already; otherwise each rank takes its own.
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
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.group = self.current_group()
        whole = self.group.size == 1
        self.make_weight(init_method, 1 if whole else stride, keep=keep_master_weight_for_test)
        self.make_bias(bias)
        self.input_size_per_partition = self.weight.shape[1]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., out_features)``, the same on every rank."""
        part = input_ if self.input_is_parallel else scatter(input_, self.group, -1)
        output = leave(F.linear(part, self.weight), self.group)
        return output if self.bias is None else output + self.bias


class _Embedding(_PlainLayer):
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
        self.scale_grad_by_freq, self.sparse, self._weight = scale_grad_by_freq, sparse, None
        if max_norm is not None or scale_grad_by_freq:
            raise ContractError(
                "max_norm and scale_grad_by_freq are for whole embeddings, not for shards; leave them out"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ContractError(
                f"padding_idx is {padding_idx}, and the ids run from 0 to {num_embeddings - 1}; name one of them, or None"
            )
        self.group = self.current_group()
        self.make_weight(init_method, keep=keep_master_weight_for_test)


class VocabParallelEmbedding(_Embedding, VocabEmbedding):
    """An embedding whose vocabulary is sharded over the ranks; ``padding_idx`` is an id in the whole vocabulary.

    The weight is this rank's ``(num_embeddings / t, embedding_dim)``: the ids from ``vocab_start_index`` up to,
    and without, ``vocab_end_index``.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)``, the same on every rank; an id outside of the vocabulary gets zeros."""
        return leave(self.look_up(input_), self.group)


class ParallelEmbedding(_Embedding):
    """An embedding whose features are sharded over the ranks: the weight is this rank's ``(num_embeddings, embedding_dim / t)``."""

    dim = 1

    def make_weight(self, *args: Any, **kwargs: Any) -> None:
        """Make this rank's features of all vectors."""
        super().make_weight(*args, **kwargs)
        self.embedding_dim_per_partition = self.weight.shape[1]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)``, the same on every rank."""
        vectors = F.embedding(input_, self.weight, self.padding_idx, sparse=self.sparse)
        return gather(vectors, self.group, -1)


def cross_entropy(
    logits: Tensor, target: Tensor, group: Group, dtype: torch.dtype, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross entropy of each token, in ``dtype``, from logits of which each rank has a part of the vocabulary.

    What smoothing takes off the target is spread over the other entries of this rank's part: ranks get different losses.
    """
    part = logits.shape[-1]
    problems = target_problems(logits.shape, target)
    if not 0 <= label_smoothing < 1 or (label_smoothing and part == 1):
        problems.append(
            f"label_smoothing is {label_smoothing}, for a part of {part} entries; it can be 0, or between 0 and 1 where there "
            "are several entries"
        )
    if problems:
        raise ContractError(*problems)
    spread = label_smoothing * part / (part - 1) if label_smoothing else 0.0
    if torch.promote_types(logits.dtype, dtype) is not dtype:
        logits = logits.to(dtype)
    return rows_cross_entropy(logits, target, None, group, dtype, spread, True)
