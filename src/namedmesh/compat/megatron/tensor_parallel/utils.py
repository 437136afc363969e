"""Megatron's helpers for splitting tensors, lengths and vocabularies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.megatron.tensor_parallel.peers import peers_of
from namedmesh.compat.partition import (
    VocabUtility,
    divide,
    ensure_divisibility,
    shapes_as_contract,
    split_tensor_along_last_dim,
)
from namedmesh.tensor_parallel.collectives import all_gather
from namedmesh.tensor_parallel.layers import check_blocks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = [
    "VocabUtility",
    "divide",
    "ensure_divisibility",
    "gather_split_1d_tensor",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
]


@shapes_as_contract()
def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return this rank's shard of a tensor's numbers, in one dim.

    Args:
        tensor: contiguous, the same on every rank.
        new_buffer: hand out a copy that is no part of any graph, instead of a view.
        tp_group: the ranks; left out, the tensor-model-parallel group.

    Returns:
        On rank r of t, numbers r * n / t up to (r + 1) * n / t of the n that there are.

    Raises:
        ContractError: t does not divide n.

    Example:
        >>> import torch
        >>> split_tensor_into_1d_equal_chunks(torch.tensor([[1, 2], [3, 4]]))    # plain python: one rank
        tensor([1, 2, 3, 4])
    """
    peers = peers_of(tp_group)
    what = f"the number of elements of a tensor of shape {tuple(tensor.shape)}"
    check_blocks(tensor.numel(), peers.size, what=what)
    width = tensor.numel() // peers.size
    shard = tensor.view(-1).narrow(0, peers.rank * width, width)
    return shard.detach().clone() if new_buffer else shard


def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Gather all ranks' shards in one dim: the way back from :func:`split_tensor_into_1d_equal_chunks`.

    Args:
        tensor: this rank's shard, in one dim and as long as the others'.
        tp_group: the ranks; left out, the tensor-model-parallel group.

    Returns:
        A new tensor, the same on every rank, through which no gradient flows.

    Example:
        >>> import torch
        >>> gather_split_1d_tensor(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    peers = peers_of(tp_group)
    shard = tensor.detach()
    return shard.clone() if peers.size == 1 else all_gather(shard, peers, 0)
