"""What the layers of all dialects share: the arithmetic of shards, weights of which each rank has a shard, and the loss.

Legacy code reads ``weight.shape`` as the shape of the shard and marks it with attributes, so parameters are no DTensors. A
layer keeps the group that it was made with. A length that its ranks do not divide is a ContractError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn

from namedmesh.compat import ContractError
from namedmesh.tensor_parallel.collectives import Group, split
from namedmesh.tensor_parallel.loss import rows_cross_entropy, target_problems

__all__ = [
    "VocabUtility",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "split_tensor_along_last_dim",
]

ALONE = Group("", 1, 0)
Initializer: TypeAlias = "Callable[[Tensor], Any]"
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""


# The arithmetic.


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Refuse a division that leaves a remainder, with a ContractError, which is an ``AssertionError`` too."""
    if numerator % denominator:
        raise ContractError(f"{numerator} is not divisible by {denominator}; use a multiple of {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of a division that leaves no remainder; one that leaves one is a ContractError."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


divide_and_check_no_remainder = divide


def check_shards(length: int, ranks: int, stride: int = 1, *, what: str) -> None:
    """Refuse a length that cannot be split into ``stride`` blocks of equal shards; on one rank a whole has no blocks.

    A collective of unequal shards ends the process from inside the backend.
    """
    if ranks > 1 and length % (ranks * stride):
        blocks = "" if stride == 1 else f" for each of {stride} blocks (the stride)"
        raise ContractError(
            f"{what} is {length}, which cannot be split into {ranks} equal shards{blocks}; use a multiple of {ranks * stride}"
        )


def check_even(tensor: Tensor, dim: int, ranks: int) -> None:
    """Refuse a tensor of which a dim cannot be split into equal shards."""
    length, shape = tensor.shape[dim], tuple(tensor.shape)
    check_shards(length, ranks, what=f"the length of dim {dim} of a tensor of shape {shape}")


def scatter(whole: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's shard of a tensor that every rank has, if the dim can be split; the gradient is gathered."""
    check_even(whole, dim, group.size)
    return split(whole, group, dim)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor ``(..., n)`` into equal parts, each ``(..., n / num_partitions)``: views, or contiguous copies."""
    parts: tuple[Tensor, ...] = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Which ids of a vocabulary a rank holds: from the first, up to and without the second number.

    Example:
        >>> [VocabUtility.vocab_range_from_global_vocab_size(12, rank, 4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 12)]
    """

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int,
        rank: int,
        world_size: int,  # noqa: ARG004  the legacy signature has it
    ) -> tuple[int, int]:
        """Return the range of a rank of the group, from the number of ids that each rank holds."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of a rank of the group, from the length of the whole vocabulary, which the ranks divide."""
        part = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(part, rank, world_size)


# The weights.


def fill_shard(shard: Tensor, initialize: Initializer, group: Group) -> None:
    """Fill this rank's shard with numbers of its own, on its device, also where ranks are seeded alike."""
    device = shard.device
    seed = int(torch.randint(2**62, (), device=device)) + group.rank
    others = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=others, device_type=device.type):
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
            whole = torch.empty(shape, dtype=self.init_dtype or shard.dtype, device=shard.device)
            initialize(whole)
            blocks = whole.unflatten(self.dim, (stride if self.group.size > 1 else 1, self.group.size, -1))
            shard.copy_(blocks.select(self.dim + 1, self.group.rank).flatten(self.dim, self.dim + 1))
            self.master_weight = whole if keep else None
        self.weight = nn.Parameter(shard)

    def make_bias(self, wanted: bool) -> None:
        """Make the bias of a linear layer, of zeros, sharded where the output features are."""
        zeros = torch.zeros(self._shape[0], dtype=self.params_dtype, device=self.params_device)
        self.register_parameter("bias", nn.Parameter(zeros) if wanted else None)


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


# The loss.


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
