"""The arithmetic of shards that the legacy APIs share: division without a remainder, and ranges of a vocabulary."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.layers import check_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import RankGroup

__all__ = [
    "VocabUtility",
    "divide",
    "divide_and_check_no_remainder",
    "divisible",
    "ensure_divisibility",
    "shapes_as_contract",
    "split_tensor_along_last_dim",
]


@contextmanager
def shapes_as_contract() -> Iterator[None]:
    """Raise a ShapeError from inside as the AssertionError that legacy callers catch. Also a decorator.

    Example:
        >>> with shapes_as_contract():
        ...     raise ShapeError("9 features on 2 ranks")
        Traceback (most recent call last):
        ...
        namedmesh.compat.errors.ContractError: 9 features on 2 ranks
    """
    try:
        yield
    except ShapeError as error:
        raise ContractError(*error.problems) from None


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Refuse a division that leaves a remainder.

    Raises:
        ContractError: it does. It is an ``AssertionError`` too.

    Example:
        >>> ensure_divisibility(12, 4)
        >>> ensure_divisibility(10, 4)
        Traceback (most recent call last):
        ...
        namedmesh.compat.errors.ContractError: 10 is not divisible by 4; use 8 or 12, or another multiple of 4
    """
    if numerator % denominator:
        below = numerator // denominator * denominator
        nearest = f"{below} or {below + denominator}" if below else f"{denominator}"
        raise ContractError(
            f"{numerator} is not divisible by {denominator}; use {nearest}, or another multiple of {denominator}"
        )


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of a division that leaves no remainder.

    Raises:
        ContractError: it leaves one.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


divide_and_check_no_remainder = divide
"""The same, by the name that some APIs have for it."""


@shapes_as_contract()
def divisible(tensor: Tensor, dim: int, peers: RankGroup) -> Tensor:
    """Return the tensor, if a dim of it can be split into equal shards.

    Raises:
        ContractError: it cannot.
    """
    what = f"the length of dim {dim} of a tensor of shape {tuple(tensor.shape)}"
    check_blocks(tensor.shape[dim], peers.size, what=what)
    return tensor


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into equal parts along its last dim.

    Args:
        tensor: of shape ``(..., n)``.
        num_partitions: how many parts; it divides n.
        contiguous_split_chunks: hand out contiguous copies instead of views.

    Returns:
        The parts in order, each ``(..., n / num_partitions)``.

    Raises:
        ContractError: the number does not divide the last dim.

    Example:
        >>> import torch
        >>> [part.tolist() for part in split_tensor_along_last_dim(torch.arange(4), 2)]
        [[0, 1], [2, 3]]
    """
    parts: tuple[Tensor, ...] = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Which ids of a vocabulary a rank holds: from the first, up to and without the second number.

    Example:
        A vocabulary of 12 over 4 ranks:

        >>> [VocabUtility.vocab_range_from_global_vocab_size(12, rank, 4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 12)]
        >>> VocabUtility.vocab_range_from_per_partition_vocab_size(3, rank=2, world_size=4)
        (6, 9)
    """

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int,
        rank: int,
        world_size: int,  # noqa: ARG004  the legacy signature has it
    ) -> tuple[int, int]:
        """Return the range of a rank, from the length of each part.

        Args:
            per_partition_vocab_size: how many ids a rank holds.
            rank: the rank in the group.
            world_size: how many ranks; it changes nothing.
        """
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of a rank, from the length of the whole vocabulary.

        Args:
            global_vocab_size: how many ids there are.
            rank: the rank in the group.
            world_size: how many ranks; it divides the vocabulary.

        Raises:
            ContractError: it does not.
        """
        part = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(part, rank, world_size)
