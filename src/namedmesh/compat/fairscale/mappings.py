"""fairscale's ways in and out of model-parallel regions, each with its partner as backward.

Below, t is the number of model-parallel ranks, and the last dim, of length n, is split into t shards in rank order.
Results are new tensors: the input is never written to (the original sums in place).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.fairscale.initialize import DIALECT
from namedmesh.compat.partition import scatter
from namedmesh.tensor_parallel.collectives import RankGroup, gather, sum_backward, sum_forward

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
]


def current_group() -> RankGroup:
    """Return the model-parallel group of this moment."""
    return DIALECT.peers()


def copy_to_model_parallel_region(input_: Tensor) -> Tensor:
    """Hand in a tensor of any shape that every rank has; its gradient, a part on each rank, is summed."""
    return sum_backward(input_, current_group())


def reduce_from_model_parallel_region(input_: Tensor) -> Tensor:
    """Sum the ranks' parts, of any shape, on every rank; the gradient is handed through."""
    return sum_forward(input_, current_group())


def scatter_to_model_parallel_region(input_: Tensor) -> Tensor:
    """Keep this rank's ``(..., n / t)`` of an ``(..., n)`` that every rank has; a ContractError if t does not divide n."""
    return scatter(input_, current_group(), -1)


def gather_from_model_parallel_region(input_: Tensor) -> Tensor:
    """Join the ranks' ``(..., n / t)`` to ``(..., n)``, on every rank; each gets its shard of the gradient."""
    return gather(input_, current_group(), -1)
