"""Megatron's helpers for splitting tensors, lengths and vocabularies, where a call works, and the attributes of shards.

By the attributes Megatron's optimizers and checkpoints know a shard of a parameter from a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh.compat.errors import ContractError
from namedmesh.compat.partition import (
    VocabUtility,
    check_shards,
    divide,
    ensure_divisibility,
    split_tensor_along_last_dim,
)
from namedmesh.compat.regions import RankGroup, all_gather
from namedmesh.launch import default_group_device

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

_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


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


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a tensor as a shard of a larger one, or as a whole one.

    Args:
        tensor: a parameter; a ContractError where it is marked already.
        is_parallel: whether it is a shard: each rank has another one.
        dim: the dim along which the whole was sharded.
        stride: the number of blocks, each of which was sharded on its own.

    Example:
        >>> import torch
        >>> weight, master, norm = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2)
        >>> set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        >>> copy_tensor_model_parallel_attributes(master, weight)
        >>> master.tensor_model_parallel, master.partition_dim, master.partition_stride
        (True, 0, 1)
        >>> set_defaults_if_not_set_tensor_model_parallel_attributes(norm)
        >>> norm.tensor_model_parallel, norm.partition_dim
        (False, -1)
        >>> param_is_not_tensor_parallel_duplicate(weight)
        True
    """
    present = [name for name in _DEFAULTS if hasattr(tensor, name)]
    if present:
        raise ContractError(
            f"the tensor of shape {tuple(tensor.shape)} has {', '.join(present)} already; mark a tensor once, or "
            "delete the attributes first"
        )
    marks = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in marks.items():
        setattr(tensor, name, value)


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
    """Return whether this rank counts a parameter, in a norm over all ranks for example.

    A shard counts on every rank; a copy on the first of ``tp_group``, or of the tensor-model-parallel group.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    if tp_group is not None:
        return tp_group.rank() == 0
    from namedmesh.compat.megatron import parallel_state

    # By the accessor and not by the group: a rank that was set by hand counts here.
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)
