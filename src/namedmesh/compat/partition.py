"""The arithmetic of shards that the legacy APIs share: division without a remainder, and ranges of a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError
from namedmesh.tensor_parallel.collectives import split

if TYPE_CHECKING:
    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import Group

__all__ = [
    "VocabUtility",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "split_tensor_along_last_dim",
]


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
    """Refuse a length that cannot be split into ``stride`` blocks of ``ranks`` equal shards, with a ContractError.

    A collective of unequal shards ends the process from inside the backend.
    """
    if stride < 1:
        raise ContractError(f"the stride is {stride}; it is a number of blocks, 1 or more")
    if length % (ranks * stride):
        blocks = "" if stride == 1 else f" for each of {stride} blocks (the stride)"
        raise ContractError(
            f"{what} is {length}, which cannot be split into {ranks} equal shards{blocks}; use a multiple of {ranks * stride}"
        )


def check_even(tensor: Tensor, dim: int, ranks: int) -> None:
    """Refuse a tensor of which a dim cannot be split into equal shards, with a ContractError."""
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
