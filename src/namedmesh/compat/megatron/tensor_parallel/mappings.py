"""Megatron's ways in and out of tensor- and sequence-parallel regions, each with its partner as backward.

Every function takes the process group as ``group``; left out, it is the tensor-model-parallel group. Below, t
is the number of its ranks, and a dim of length n is sharded into t shards of n / t in rank order. On one rank all
of them hand the tensor through. Results are new tensors; the input is never written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.tensor_parallel.peers import peers_of
from namedmesh.compat.partition import divisible, shapes_as_contract
from namedmesh.tensor_parallel.collectives import (
    gather,
    gather_parts,
    split,
    sum_backward,
    sum_forward,
    sum_scatter,
)
from namedmesh.tensor_parallel.regions import exchange, gather_uneven, sum_scatter_uneven

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Hand in a tensor that every rank has; its gradient, of which each rank makes a part, is summed.

    Args:
        input_: any shape, the same on every rank.
        group: the ranks.

    Returns:
        The same tensor.
    """
    return sum_backward(input_, peers_of(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum the ranks' parts; the gradient, the same on every rank, is handed through.

    Args:
        input_: this rank's part, any shape.
        group: the ranks.

    Returns:
        The sum, on every rank.
    """
    return sum_forward(input_, peers_of(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Keep my shard of the last dim of a tensor that every rank has; the gradient is gathered.

    Args:
        input_: ``(..., n)``, the same on every rank.
        group: the ranks.

    Returns:
        ``(..., n / t)``.

    Raises:
        ContractError: t does not divide n.
    """
    peers = peers_of(group)
    return split(divisible(input_, -1, peers), peers, input_.ndim - 1)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Join the ranks' shards of the last dim; each rank gets back the gradient of its own shard.

    Args:
        input_: ``(..., n / t)``, this rank's shard.
        group: the ranks, which all go on with the same computation. Where they differ, use
            :func:`all_gather_last_dim_from_tensor_parallel_region`.

    Returns:
        ``(..., n)``, the same on every rank.
    """
    return gather(input_, peers_of(group), input_.ndim - 1)


def scatter_to_sequence_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Keep my shard of the first dim of a tensor that every rank has; the gradient is gathered.

    Args:
        input_: ``(s, ...)``, the same on every rank.
        group: the ranks.

    Returns:
        ``(s / t, ...)``.

    Raises:
        ContractError: t does not divide s.
    """
    peers = peers_of(group)
    return split(divisible(input_, 0, peers), peers, 0)


@shapes_as_contract()
def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001  see below
) -> Tensor:
    """Join the ranks' shards of the first dim.

    Args:
        input_: ``(s / t, ...)``, this rank's shard.
        tensor_parallel_output_grad: the ranks go on with different parts of the work, as in a column-parallel
            layer: the gradients are summed, and each rank gets its shard. False where they all do the same:
            the gradient is only split.
        group: the ranks.
        output_split_sizes: the lengths of all ranks' shards, where they differ.
        use_global_buffer: taken and not used. The result is a tensor of its own, because the next call would
            overwrite a shared one.

    Returns:
        ``(s, ...)``, the same on every rank.

    Raises:
        ContractError: the sizes are not one for each rank, or mine is not the length of my shard.
    """
    peers = peers_of(group)
    if output_split_sizes is not None:
        return gather_uneven(input_, peers, output_split_sizes, parts=tensor_parallel_output_grad)
    return gather_parts(input_, peers, 0) if tensor_parallel_output_grad else gather(input_, peers, 0)


@shapes_as_contract()
def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: ProcessGroup | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001  see below
) -> Tensor:
    """Sum the ranks' parts, of which each rank keeps its shard of the first dim; the gradient is gathered.

    Args:
        input_: ``(s, ...)``, this rank's part of the sum.
        group: the ranks.
        input_split_sizes: the lengths of the shards, where they differ; they add up to s.
        use_global_buffer: taken and not used. The result is a tensor of its own, because the next call would
            overwrite a shared one.

    Returns:
        ``(s / t, ...)``.

    Raises:
        ContractError: t does not divide s, or the sizes are not one for each rank or do not add up to s.
    """
    peers = peers_of(group)
    if input_split_sizes is not None:
        return sum_scatter_uneven(input_, peers, input_split_sizes)
    return sum_scatter(divisible(input_, 0, peers), peers, 0)


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Join the ranks' shards of the last dim; their gradients are summed, and each rank gets its shard.

    Args:
        input_: ``(..., n / t)``, this rank's shard.
        group: the ranks, which go on with different parts of the work.

    Returns:
        ``(..., n)``, the same on every rank.
    """
    return gather_parts(input_, peers_of(group), input_.ndim - 1)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Sum the ranks' parts, of which each rank keeps its shard of the last dim; the gradient is gathered.

    Args:
        input_: ``(..., n)``, this rank's part of the sum.
        group: the ranks.

    Returns:
        ``(..., n / t)``.

    Raises:
        ContractError: t does not divide n.
    """
    peers = peers_of(group)
    return sum_scatter(divisible(input_, -1, peers), peers, input_.ndim - 1)


@shapes_as_contract()
def all_to_all(
    group: ProcessGroup | None,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send a shard of the first dim to each rank, and join what comes back; gradients travel the other way.

    Args:
        group: the ranks. It must be named.
        input_: ``(n, ...)``: the shard for rank 0, then the one for rank 1, and so on.
        output_split_sizes_: the lengths of what each rank sends here; equal shards by default.
        input_split_sizes: the lengths of the shards to send; equal ones by default.

    Returns:
        The shards received, in rank order.

    Raises:
        ContractError: there is no group, the lengths are not one for each rank or do not add up to n, or by
            default t does not divide n.
    """
    if group is None:
        raise ContractError("all_to_all was called without a group; pass the process group of its ranks")
    return exchange(input_, peers_of(group), input_split_sizes, output_split_sizes_)


def all_to_all_sp2hp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Exchange tokens that are sharded over the ranks for features that are.

    Args:
        input_: ``(tokens / t, h)``, or with more dims before the last, which are taken as one.
        group: the ranks.

    Returns:
        ``(tokens, h / t)``.

    Raises:
        ContractError: t does not divide h.

    Example:
        >>> import torch
        >>> from namedmesh import launch
        >>> _ = launch.init("cpu")
        >>> all_to_all_sp2hp(torch.zeros(2, 3, 4), group=torch.distributed.group.WORLD).shape
        torch.Size([6, 4])
        >>> torch.distributed.destroy_process_group()
    """
    peers = peers_of(group)
    rows = divisible(input_, -1, peers).reshape(-1, input_.shape[-1])
    # A block of features for each rank, one below the other.
    return exchange(torch.cat(rows.chunk(peers.size, dim=1)), peers)


def all_to_all_hp2sp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Exchange features that are sharded over the ranks for tokens that are.

    Args:
        input_: ``(tokens, h / t)``, or with more dims before the last, which are taken as one.
        group: the ranks.

    Returns:
        ``(tokens / t, h)``.

    Raises:
        ContractError: t does not divide the tokens.

    Example:
        >>> import torch
        >>> from namedmesh import launch
        >>> _ = launch.init("cpu")
        >>> all_to_all_hp2sp(torch.zeros(2, 3, 4), group=torch.distributed.group.WORLD).shape
        torch.Size([6, 4])
        >>> torch.distributed.destroy_process_group()
    """
    peers = peers_of(group)
    rows = divisible(input_.reshape(-1, input_.shape[-1]), 0, peers)
    return torch.cat(exchange(rows, peers).chunk(peers.size), dim=-1)
