"""Megatron's ways in and out of tensor- and sequence-parallel regions, each with its partner as backward.

``group`` is the process group of the ranks; left out, it is the tensor-model-parallel group. Below, t is the number of
its ranks, and a dim of length n is sharded into t shards of n / t in rank order; a length that t does not divide is a
ContractError. On one rank all of them hand the tensor through. Results are new tensors; the input is never written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.tensor_parallel.utils import current_group
from namedmesh.compat.partition import check_even, scatter
from namedmesh.compat.regions import (
    RankGroup,
    exchange,
    gather,
    gather_parts,
    sum_backward,
    sum_forward,
    sum_scatter,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

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

Group: TypeAlias = "ProcessGroup | None"


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Hand in a tensor of any shape that every rank has; its gradient, a part on each rank, is summed."""
    return sum_backward(input_, current_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Sum the ranks' parts, of any shape, on every rank; the gradient is handed through."""
    return sum_forward(input_, current_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Keep this rank's ``(..., n / t)`` of an ``(..., n)`` that every rank has; the gradient is gathered."""
    return scatter(input_, current_group(group), -1)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Join the ranks' ``(..., n / t)`` to ``(..., n)``, on every rank; each gets its shard of the gradient.

    It is for ranks that go on with the same computation. Where they differ, use
    :func:`all_gather_last_dim_from_tensor_parallel_region`.
    """
    return gather(input_, current_group(group), -1)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Keep this rank's ``(s / t, ...)`` of an ``(s, ...)`` that every rank has; the gradient is gathered."""
    return scatter(input_, current_group(group), 0)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001  see below
) -> Tensor:
    """Join the ranks' ``(s / t, ...)`` to ``(s, ...)``, on every rank.

    Args:
        input_: this rank's shard.
        tensor_parallel_output_grad: the ranks go on with different parts of the work, as in a column-parallel
            layer: the gradients are summed, and each rank gets its shard. False where they all do the same:
            the gradient is only split.
        group: the ranks.
        output_split_sizes: the lengths of all ranks' shards, where they differ.
        use_global_buffer: taken and not used. The result is a tensor of its own, because the next call would
            overwrite a shared one.

    Raises:
        ContractError: the sizes are not one for each rank, or not the length of this rank's shard.
    """
    ranks = current_group(group)
    if output_split_sizes is not None:
        return _gather_uneven(input_, ranks, output_split_sizes, sum_gradients=tensor_parallel_output_grad)
    return gather_parts(input_, ranks, 0) if tensor_parallel_output_grad else gather(input_, ranks, 0)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Group = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001  as above
) -> Tensor:
    """Sum the ranks' ``(s, ...)``, of which each rank keeps its ``(s / t, ...)``; the gradient is gathered.

    Args:
        input_: this rank's part of the sum.
        group: the ranks.
        input_split_sizes: the lengths of the shards, where they differ; they add up to s.
        use_global_buffer: taken and not used.

    Raises:
        ContractError: t does not divide s, or the sizes are not one for each rank or do not add up to s.
    """
    ranks = current_group(group)
    if input_split_sizes is not None:
        return _sum_scatter_uneven(input_, ranks, input_split_sizes)
    check_even(input_, 0, ranks.size)
    return sum_scatter(input_, ranks, 0)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Join the ranks' ``(..., n / t)`` to ``(..., n)``; the gradients are summed, and each rank gets its shard.

    It is for ranks that go on with different parts of the work.
    """
    return gather_parts(input_, current_group(group), -1)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Sum the ranks' ``(..., n)``, of which each rank keeps its ``(..., n / t)``; the gradient is gathered."""
    ranks = current_group(group)
    check_even(input_, -1, ranks.size)
    return sum_scatter(input_, ranks, -1)


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send a shard of the first dim to each rank, and join in rank order what they send; gradients travel the other way.

    Args:
        group: the ranks. It must be named.
        input_: ``(n, ...)``: the shard for rank 0, then the one for rank 1, and so on.
        output_split_sizes_: the lengths of what each rank sends here; equal shards by default.
        input_split_sizes: the lengths of the shards to send; equal ones by default.

    Raises:
        ContractError: there is no group, the lengths are not one for each rank or do not add up to n, or by
            default t does not divide n.
    """
    if group is None:
        raise ContractError("all_to_all was called without a group; pass the process group of its ranks")
    return _exchange(input_, current_group(group), input_split_sizes, output_split_sizes_)


def all_to_all_sp2hp(input_: Tensor, group: Group = None) -> Tensor:
    """Exchange tokens that are sharded over the ranks, ``(tokens / t, h)``, for features that are, ``(tokens, h / t)``.

    More dims before the last are taken as one.

    Example:
        >>> import torch
        >>> from namedmesh import launch
        >>> _ = launch.init("cpu")
        >>> all_to_all_sp2hp(torch.zeros(2, 3, 4), group=torch.distributed.group.WORLD).shape
        torch.Size([6, 4])
        >>> torch.distributed.destroy_process_group()
    """
    ranks = current_group(group)
    check_even(input_, -1, ranks.size)
    rows = input_.reshape(-1, input_.shape[-1])
    # A block of features for each rank, one below the other.
    return _exchange(torch.cat(rows.chunk(ranks.size, dim=1)), ranks)


def all_to_all_hp2sp(input_: Tensor, group: Group = None) -> Tensor:
    """Exchange features that are sharded over the ranks for tokens that are: the way back from :func:`all_to_all_sp2hp`."""
    ranks = current_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    check_even(rows, 0, ranks.size)
    return torch.cat(_exchange(rows, ranks).chunk(ranks.size), dim=-1)


def _exchange(
    outgoing: Tensor,
    group: RankGroup,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> Tensor:
    """Send a shard of dim 0 to each rank, and join what is received; of equal lengths, unless they are given."""
    if not torch.compiler.is_compiling():  # lengths that are computed are known when the graph runs
        send, receive = (None if sizes is None else _checked(sizes, group) for sizes in (send, receive))
        length = outgoing.shape[0]
        what = f"dim 0 of shape {tuple(outgoing.shape)} has length {length}"
        if send is not None and sum(send) != length:
            raise ContractError(
                f"the lengths to send {send} add up to {sum(send)}, but {what}; they must add up to it"
            )
        if send is None and length % group.size:
            raise ContractError(
                f"{what}, which cannot be split into {group.size} equal shards; pass the length of each shard"
            )
    return exchange(outgoing, group, (send, receive))


def _checked(sizes: Sequence[int], group: RankGroup) -> list[int]:
    """Return the lengths of the ranks' shards as integers, one for each rank."""
    lengths = [int(size) for size in sizes]
    if len(lengths) != group.size or min(lengths) < 0:
        raise ContractError(
            f"the sizes are {lengths}, for {group.size} ranks; pass one length for each rank, none negative"
        )
    return lengths


def _gather_uneven(shard: Tensor, group: RankGroup, sizes: Sequence[int], *, sum_gradients: bool) -> Tensor:
    """Join shards of different lengths along dim 0: every rank sends its own to each of them."""
    lengths = _checked(sizes, group)
    length = lengths[group.rank]
    if shard.shape[0] != length:
        raise ContractError(
            f"rank {group.rank} has a shard of length {shard.shape[0]} (shape {tuple(shard.shape)}), but the "
            f"sizes {lengths} say {length}; pass the length of every rank's shard, in rank order"
        )
    if group.size == 1:
        return shard
    sent = shard if sum_gradients else shard.detach()
    whole = _exchange(torch.cat([sent] * group.size), group, [length] * group.size, lengths)
    if sum_gradients:
        return whole
    before = sum(lengths[: group.rank])
    return torch.cat([whole[:before], shard, whole[before + length :]])


def _sum_scatter_uneven(partial: Tensor, group: RankGroup, sizes: Sequence[int]) -> Tensor:
    """Sum the ranks' parts, of which each rank keeps a shard of dim 0 of another length."""
    lengths = _checked(sizes, group)
    length = lengths[group.rank]
    received = _exchange(partial, group, lengths, [length] * group.size)
    if group.size == 1:
        return received
    parts: Tensor = received.unflatten(0, (group.size, length))
    return parts.sum(0)
