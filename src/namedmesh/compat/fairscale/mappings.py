"""fairscale's ways in and out of model-parallel regions, each with its partner as backward.

Below, t is the number of model-parallel ranks, and the last dim, of length n, is sharded into t shards in rank order.
Results are new tensors: the input is never written to (the original sums in place).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.fairscale.initialize import DIALECT
from namedmesh.compat.partition import divisible
from namedmesh.tensor_parallel.collectives import gather, split, sum_backward, sum_forward

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
]


def copy_to_model_parallel_region(input_: Tensor) -> Tensor:
    """Hand in a tensor that every rank has; its gradient, of which each rank makes a part, is summed.

    Args:
        input_: any shape, the same on every rank.
    """
    return sum_backward(input_, DIALECT.peers())


def reduce_from_model_parallel_region(input_: Tensor) -> Tensor:
    """Sum the ranks' parts, on every rank; the gradient, the same on every rank, is handed through.

    Args:
        input_: this rank's part, any shape.
    """
    return sum_forward(input_, DIALECT.peers())


def scatter_to_model_parallel_region(input_: Tensor) -> Tensor:
    """Keep my shard of the last dim of a tensor that every rank has; the gradient is gathered.

    Args:
        input_: ``(..., n)``, the same on every rank.

    Returns:
        ``(..., n / t)``.

    Raises:
        ContractError: t does not divide n.
    """
    peers = DIALECT.peers()
    return split(divisible(input_, -1, peers), peers, input_.ndim - 1)


def gather_from_model_parallel_region(input_: Tensor) -> Tensor:
    """Join the ranks' shards of the last dim; each rank gets back the gradient of its own shard.

    Args:
        input_: ``(..., n / t)``, this rank's shard.

    Returns:
        ``(..., n)``, the same on every rank.
    """
    return gather(input_, DIALECT.peers(), input_.ndim - 1)
