"""Megatron's helpers for splitting tensors, lengths and vocabularies, and where a call works: its group and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh.compat.partition import (
    VocabUtility,
    check_shards,
    divide,
    ensure_divisibility,
    split_tensor_along_last_dim,
)
from namedmesh.launch import default_group_device
from namedmesh.tensor_parallel.collectives import RankGroup, all_gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "VocabUtility",
    "divide",
    "ensure_divisibility",
    "gather_split_1d_tensor",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
]


def current_group(group: ProcessGroup | None, *, is_expert: bool = False) -> RankGroup:
    """Return the group that a call names or, where it names none, the tensor-parallel group, of experts if asked.

    Where ``torch.distributed`` has not been initialized it is this process alone. Where only model parallelism has not, it
    is a ContractError.
    """
    if group is None and dist.is_initialized():
        # Here, not at the top: whoever names his groups needs no global state.
        from namedmesh.compat.megatron import parallel_state

        if is_expert:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
    return RankGroup(group)


def accelerator() -> torch.device | None:
    """Return the current accelerator, if this is where the ranks compute."""
    if dist.is_initialized():
        kind = default_group_device().type
    else:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return None if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return this rank's shard of a tensor's numbers, in one dim.

    Args:
        tensor: contiguous, the same on every rank. Of its n numbers, rank r of t gets those from r * n / t up to
            (r + 1) * n / t; a ContractError where t does not divide n.
        new_buffer: hand out a copy that is no part of any graph, instead of a view.
        tp_group: the ranks; left out, the tensor-model-parallel group.

    Example:
        >>> split_tensor_into_1d_equal_chunks(torch.tensor([[1, 2], [3, 4]]))    # plain python: one rank
        tensor([1, 2, 3, 4])
    """
    group = current_group(tp_group)
    what = f"the number of elements of a tensor of shape {tuple(tensor.shape)}"
    check_shards(tensor.numel(), group.size, what=what)
    shard = tensor.view(group.size, -1)[group.rank]
    return shard.detach().clone() if new_buffer else shard


def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Gather all ranks' shards, of equal lengths, in one dim: the way back from :func:`split_tensor_into_1d_equal_chunks`.

    The result is a new tensor, the same on every rank, through which no gradient flows.

    Example:
        >>> gather_split_1d_tensor(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    group = current_group(tp_group)
    shard = tensor.detach()
    return shard.clone() if group.size == 1 else all_gather(shard, group, 0)
