"""What Megatron's layers read of its configuration, and the attributes by which its optimizers know a shard from a copy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh.compat.errors import ContractError, ContractRuntimeError
from namedmesh.launch import default_group_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


@dataclass(frozen=True)
class Settings:
    """What the layers read of Megatron's configuration object, or any other; what it lacks has these defaults.

    Args:
        params_dtype: of the parameters; by default torch's default dtype.
        use_cpu_initialization: draw the whole weight on every rank and shard it, so that the weights do not
            depend on the number of ranks. Otherwise so too, unless the ranks compute on an accelerator: there
            each draws its own shard.
        perform_initialization: fill the weights at all.
        sequence_parallel: outside of the layers, activations are sharded along their first dim.
        expert_model_parallel_size: more than 1 marks parameters of expert layers as not to be all-reduced
            over the data-parallel ranks.
        deterministic_mode: look embeddings up in a way whose gradient adds up in the same order each time.
        gradient_accumulation_fusion, defer_embedding_wgrad_compute: refused.
    """

    params_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    use_cpu_initialization: bool = False
    perform_initialization: bool = True
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False

    @classmethod
    def of(cls, config: object, layer: str) -> Settings:
        """Return the settings of a configuration object, or of None; one that asks for a fused gradient is refused."""
        names = [one.name for one in fields(cls)]
        settings = cls(**{name: getattr(config, name) for name in names if hasattr(config, name)})
        for name in ("gradient_accumulation_fusion", "defer_embedding_wgrad_compute"):
            if getattr(settings, name):
                raise ContractRuntimeError(
                    f"{layer}: {name} is set, but adding up gradients inside the matrix product needs APEX's CUDA extension "
                    f"fused_weight_gradient_mlp_cuda, which namedmesh's layers do not call; set {name}=False"
                )
        return settings

    def accelerator(self) -> torch.device | None:
        """Return the device on which each rank draws its own shard; None where it draws the whole weight."""
        if self.use_cpu_initialization:
            return None
        if dist.is_initialized():
            kind = default_group_device().type
        else:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        return None if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a tensor as a shard of a larger one, or as a whole one.

    Args:
        tensor: a parameter; a ContractError where it is marked already.
        is_parallel: whether it is a shard: each rank has another one.
        dim: the dim along which the whole was sharded.
        stride: the number of blocks, each of which was sharded on its own.

    Example:
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
