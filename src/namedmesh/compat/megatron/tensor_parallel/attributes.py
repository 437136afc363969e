"""The attributes by which Megatron's optimizers and checkpoints know a shard of a parameter from a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.compat.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


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
