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
from namedmesh.tensor_parallel.collectives import enter, exchange, gather, leave

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from namedmesh.tensor_parallel.collectives import Group

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

Ranks: TypeAlias = "ProcessGroup | None"


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Hand in a tensor of any shape that every rank has; its gradient, a part on each rank, is summed."""
    return enter(input_, current_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Sum the ranks' parts, of any shape, on every rank; the gradient is handed through."""
    return leave(input_, current_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Keep this rank's ``(..., n / t)`` of an ``(..., n)`` that every rank has; the gradient is gathered."""
    return scatter(input_, current_group(group), -1)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Join the ranks' ``(..., n / t)`` to ``(..., n)``, for ranks that go on alike; each gets its shard of the gradient."""
    return gather(input_, current_group(group), -1)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Keep this rank's ``(s / t, ...)`` of an ``(s, ...)`` that every rank has; the gradient is gathered."""
    return scatter(input_, current_group(group), 0)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Join the ranks' ``(..., n / t)`` to ``(..., n)``, for ranks that go on with different parts; the gradients are summed."""
    return enter(input_, current_group(group), -1)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Sum the ranks' ``(..., n)``, of which each rank keeps its ``(..., n / t)``; the gradient is gathered."""
    ranks = current_group(group)
    check_even(input_, -1, ranks.size)
    return leave(input_, ranks, -1)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Ranks = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001  the result is a tensor of its own, which no next call overwrites
) -> Tensor:
    """Join the ranks' ``(s / t, ...)`` to ``(s, ...)``, on every rank.

    Args:
        input_: this rank's shard.
        tensor_parallel_output_grad: the ranks go on with different parts of the work, as in a column-parallel
            layer: the gradients are summed, and each rank gets its shard. False where they all do the same:
            the gradient is only split.
        group: the ranks.
        output_split_sizes: the lengths of all ranks' shards, where they differ; a ContractError where they do not fit.
        use_global_buffer: taken and not used.
    """
    ranks = current_group(group)
    if output_split_sizes is None:
        return enter(input_, ranks, 0) if tensor_parallel_output_grad else gather(input_, ranks, 0)
    # Every rank sends its own shard to each of them.
    lengths = [int(length) for length in output_split_sizes]
    length = input_.shape[0]
    if len(lengths) != ranks.size or lengths[ranks.rank] != length:
        raise ContractError(
            f"output_split_sizes are {lengths}, and rank {ranks.rank} of {ranks.size} has a shard of length {length}; pass the "
            "length of every rank's shard, in rank order"
        )
    sent = input_ if tensor_parallel_output_grad else input_.detach()
    whole = _exchange(torch.cat([sent] * ranks.size), ranks, [length] * ranks.size, lengths)
    if tensor_parallel_output_grad or ranks.size == 1:
        return whole
    before = sum(lengths[: ranks.rank])
    return torch.cat([whole[:before], input_, whole[before + length :]])


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Ranks = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001  as above
) -> Tensor:
    """Sum the ranks' ``(s, ...)``, of which each rank keeps its ``(s / t, ...)``; the gradient is gathered.

    ``input_split_sizes`` are the lengths of the shards, where they differ; a ContractError where they do not add up to s.
    """
    ranks = current_group(group)
    if input_split_sizes is None:
        check_even(input_, 0, ranks.size)
        return leave(input_, ranks, 0)
    length = int(input_split_sizes[ranks.rank])
    received = _exchange(input_, ranks, input_split_sizes, [length] * ranks.size)
    parts: Tensor = received.unflatten(0, (ranks.size, length))
    return parts.sum(0)


def all_to_all(
    group: Ranks,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send a shard of the first dim to each rank, and join in rank order what they send; gradients travel the other way.

    Args:
        group: the ranks; a ContractError without.
        input_: ``(n, ...)``: the shard for rank 0, then the one for rank 1, and so on.
        output_split_sizes_: the lengths of what each rank sends here; equal shards by default.
        input_split_sizes: the lengths of the shards to send, which add up to n; equal ones by default.
    """
    if group is None:
        raise ContractError("all_to_all was called without a group; pass the process group of its ranks")
    return _exchange(input_, current_group(group), input_split_sizes, output_split_sizes_)


def all_to_all_sp2hp(input_: Tensor, group: Ranks = None) -> Tensor:
    """Exchange tokens that are sharded over the ranks, ``(tokens / t, h)``, for features that are, ``(tokens, h / t)``.

    More dims before the last are taken as one.
    """
    ranks = current_group(group)
    check_even(input_, -1, ranks.size)
    rows = input_.reshape(-1, input_.shape[-1])
    # A block of features for each rank, one below the other.
    return exchange(torch.cat(rows.chunk(ranks.size, dim=1)), ranks)


def all_to_all_hp2sp(input_: Tensor, group: Ranks = None) -> Tensor:
    """Exchange features that are sharded over the ranks for tokens that are: the way back from :func:`all_to_all_sp2hp`."""
    ranks = current_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    check_even(rows, 0, ranks.size)
    return torch.cat(exchange(rows, ranks).chunk(ranks.size), dim=-1)


def _exchange(x: Tensor, group: Group, send: Sequence[int] | None, receive: Sequence[int] | None) -> Tensor:
    """Send a shard of dim 0 to each rank, and join what is received; of equal lengths, unless they are given."""
    if send is None:
        check_even(x, 0, group.size)
    elif not torch.compiler.is_compiling() and (len(send) != group.size or sum(send) != x.shape[0]):
        raise ContractError(
            f"the lengths to send are {[*map(int, send)]}, for {group.size} ranks and dim 0 of shape {tuple(x.shape)}; pass "
            "one for each rank, which add up to it"
        )
    return exchange(x, group, (send, receive))
