"""Megatron's helpers for splitting tensors, the group of a call, and the attributes by which its optimizers know a shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh.compat.errors import ContractError
from namedmesh.compat.layers import ALONE
from namedmesh.compat.partition import (
    VocabUtility,
    check_shards,
    divide,
    ensure_divisibility,
    split_tensor_along_last_dim,
)
from namedmesh.launch import default_group_device
from namedmesh.tensor_parallel.collectives import Group, all_gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "VocabUtility",
    "copy_tensor_model_parallel_attributes",
    "divide",
    "ensure_divisibility",
    "gather_split_1d_tensor",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
]

_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def current_group(group: ProcessGroup | None, *, is_expert: bool = False) -> Group:
    """Return the group that a call names, or the tensor-parallel one, of experts if asked; this process alone without torch's."""
    if group is None and not dist.is_initialized():
        return ALONE
    if group is None:
        from namedmesh.compat.megatron import (
            parallel_state,
        )  # here: install() puts the original's in its place

        kind = "get_expert_tensor_parallel_group" if is_expert else "get_tensor_model_parallel_group"
        group = getattr(parallel_state, kind)()
    return Group.of(group)


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
    """Return this rank's shard of the numbers of a contiguous tensor: a view, with ``new_buffer`` a copy outside of any graph."""
    group = current_group(tp_group)
    check_shards(
        tensor.numel(), group.size, what=f"the number of elements of a tensor of shape {tuple(tensor.shape)}"
    )
    shard = tensor.view(group.size, -1)[group.rank]
    return shard.detach().clone() if new_buffer else shard


def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Gather all ranks' shards, of equal lengths, in one dim; a new tensor, through which no gradient flows."""
    group = current_group(tp_group)
    shard = tensor.detach()
    return shard.clone() if group.size == 1 else all_gather(shard, group, 0)


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a tensor as a shard (``is_parallel``) of ``stride`` blocks along a dim; a ContractError where it is marked.

    Example:
        >>> import torch
        >>> weight, master = torch.zeros(2, 3), torch.zeros(2, 3)
        >>> set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        >>> copy_tensor_model_parallel_attributes(master, weight)
        >>> master.tensor_model_parallel, master.partition_dim, param_is_not_tensor_parallel_duplicate(master)
        (True, 0, True)
    """
    present = [name for name in _DEFAULTS if hasattr(tensor, name)]
    if present:
        raise ContractError(
            f"the tensor of shape {tuple(tensor.shape)} has {', '.join(present)} already; mark a tensor once, or "
            "delete the attributes first"
        )
    vars(tensor).update(tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a tensor as whole on every rank, as far as it is not marked as something else."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Mark a tensor as another one is marked, such as a master copy of a parameter."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: ProcessGroup | None = None) -> bool:
    """Return whether this rank counts a parameter, in a norm for example: a shard everywhere, a copy on the first rank."""
    if getattr(param, "tensor_model_parallel", False):
        return True
    if tp_group is not None:
        return tp_group.rank() == 0
    from namedmesh.compat.megatron import parallel_state

    # By the accessor and not by the group: a rank that was set by hand counts here.
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)
