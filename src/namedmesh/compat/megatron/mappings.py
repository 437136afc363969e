"""Megatron's functions beside its layers: ways in and out of tensor- and sequence-parallel regions, the loss, and helpers.

A way in has a way out as its backward, and the other way round. ``group`` is left out for the tensor-model-parallel group.
Below, t is the number of its ranks; a length that t does not divide is a ContractError. Results are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from namedmesh.compat import ContractError
from namedmesh.compat.layers import (
    SELF_GROUP,
    VocabUtility,
    check_even,
    cross_entropy,
    divide,
    ensure_divisibility,
    scatter,
    split_tensor_along_last_dim,
)
from namedmesh.tensor_parallel.collectives import Group, enter, exchange, gather, leave

__all__ = [
    "VocabUtility",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "divide",
    "ensure_divisibility",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
]

Ranks: TypeAlias = "ProcessGroup | None"


def current_group(group: Ranks, *, is_expert: bool = False) -> Group:
    """Return the group that a call names, or the tensor-parallel one, of experts if asked; this process alone without torch's."""
    if group is None and not dist.is_initialized():
        return SELF_GROUP
    if group is None:
        # Here, not at the top: install() puts the original's in its place.
        from namedmesh.compat.megatron import parallel_state

        kind = "get_expert_tensor_parallel_group" if is_expert else "get_tensor_model_parallel_group"
        group = getattr(parallel_state, kind)()
    return Group.of(group)


# The ways in and out.


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Hand in what every rank has; its gradient, a part on each rank, is summed."""
    return enter(input_, current_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Sum the ranks' parts on every rank; the gradient is handed through."""
    return leave(input_, current_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Keep this rank's ``(..., n / t)`` of an ``(..., n)`` that every rank has; the gradient is gathered."""
    return scatter(input_, current_group(group), -1)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Join the ranks' ``(..., n / t)`` to ``(..., n)``; each gets its shard of the gradient."""
    return gather(input_, current_group(group), -1)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Keep this rank's ``(s / t, ...)`` of an ``(s, ...)`` that every rank has; the gradient is gathered."""
    return scatter(input_, current_group(group), 0)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Join the ranks' ``(..., n / t)`` to ``(..., n)``, of which each uses a part: the gradients are summed."""
    return enter(input_, current_group(group), -1)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Ranks = None) -> Tensor:
    """Sum the ranks' ``(..., n)``, of which each keeps its ``(..., n / t)``; the gradient is gathered."""
    return sum_shards(input_, current_group(group), -1)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Ranks = None,
    *,
    use_global_buffer: bool = False,  # noqa: ARG001  the result is a tensor of its own, which no next call overwrites
) -> Tensor:
    """Join the ranks' ``(s / t, ...)`` to ``(s, ...)``.

    The gradients are summed, and each rank gets its shard; without ``tensor_parallel_output_grad``, where all ranks go on
    alike, the gradient is only split.
    """
    join = enter if tensor_parallel_output_grad else gather
    return join(input_, current_group(group), 0)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Ranks = None,
    *,
    use_global_buffer: bool = False,  # noqa: ARG001  as above
) -> Tensor:
    """Sum the ranks' ``(s, ...)``, of which each keeps ``(s / t, ...)``; the gradient is gathered."""
    return sum_shards(input_, current_group(group), 0)


def all_to_all(
    group: Ranks,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send a shard of the first dim to each rank, and join what they send; shards are equal where no lengths are given."""
    if group is None:
        raise ContractError("all_to_all was called without a group; pass the process group of its ranks")
    ranks = current_group(group)
    if input_split_sizes is None:
        check_even(input_, 0, ranks.size)
    return exchange(input_, ranks, (input_split_sizes, output_split_sizes_))


def all_to_all_sp2hp(input_: Tensor, group: Ranks = None) -> Tensor:
    """Exchange tokens that are sharded over the ranks, ``(tokens / t, h)``, for features that are, ``(tokens, h / t)``."""
    ranks = current_group(group)
    check_even(input_, -1, ranks.size)
    rows = input_.reshape(-1, input_.shape[-1])
    return exchange(torch.cat(rows.chunk(ranks.size, dim=1)), ranks)  # a block of features for each rank


def all_to_all_hp2sp(input_: Tensor, group: Ranks = None) -> Tensor:
    """Exchange features that are sharded over the ranks for tokens that are, the way back."""
    ranks = current_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    check_even(rows, 0, ranks.size)
    return torch.cat(exchange(rows, ranks).chunk(ranks.size), dim=-1)


def sum_shards(parts: Tensor, group: Group, dim: int) -> Tensor:
    """Sum the ranks' parts, of which each keeps its shard of a dim that can be split; the gradient is gathered."""
    check_even(parts, dim, group.size)
    return leave(parts, group, dim)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Ranks = None
) -> Tensor:
    """Return the cross entropy of each token, ``(s, b)``, in float32, from this rank's logits, ``(s, b, v / t)``.

    An id outside of the vocabulary has a loss that means nothing. What smoothing takes off the target is spread over **this
    rank's part** of the vocabulary, as Megatron has it: ranks get different losses.
    """
    return cross_entropy(
        vocab_parallel_logits, target, current_group(tp_group), torch.float32, label_smoothing
    )


# Helpers.


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a tensor as a shard (``is_parallel``) of ``stride`` blocks along a dim; a ContractError where it is marked."""
    if hasattr(tensor, "tensor_model_parallel"):
        raise ContractError(
            f"the tensor of shape {tuple(tensor.shape)} is marked already; mark a tensor once, or delete its marks first"
        )
    vars(tensor).update(tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: Ranks = None) -> bool:
    """Return whether this rank counts a parameter, in a norm for example: a shard everywhere, a copy on the first rank."""
    return getattr(param, "tensor_model_parallel", False) or current_group(tp_group).rank == 0
