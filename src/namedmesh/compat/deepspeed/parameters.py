"""The attribute by which DeepSpeed tells a sharded parameter from a replicated one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from namedmesh.errors import PlanError, listing

if TYPE_CHECKING:
    from torch import nn

__all__ = ["mark_parameters"]


def mark_parameters(model: nn.Module) -> list[str]:
    """Mark the shards of tensor-parallel parameters as every version of DeepSpeed expects them.

    DeepSpeed counts a parameter that is not marked on the first model-parallel rank only, so without the mark the
    norm of the gradients, and what is clipped by it, is silently too small. Call it before
    ``deepspeed.initialize``. The layers of namedmesh's Megatron dialect mark their shards with
    ``tensor_model_parallel``, which DeepSpeed 0.19 reads; this adds ``model_parallel``, which all versions do.

    Args:
        model: a model of plain parameters.

    Returns:
        The names of the parameters that are shards.

    Raises:
        PlanError: there are DTensors among the parameters, which DeepSpeed's optimizers cannot work with.

    Example:
        >>> import torch, namedmesh
        >>> from namedmesh.compat.megatron.tensor_parallel import RowParallelLinear
        >>> _ = namedmesh.launch.init("cpu")
        >>> layer = RowParallelLinear(4, 4, input_is_parallel=True, tp_group=torch.distributed.group.WORLD)
        >>> mark_parameters(layer)
        ['weight']
        >>> layer.weight.model_parallel
        True
        >>> torch.distributed.destroy_process_group()
    """
    parameters = dict(model.named_parameters())
    dtensors = [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
    if dtensors:
        raise PlanError(
            f"parameters {listing(dtensors)} are DTensors, which DeepSpeed's optimizers cannot work with; use layers whose "
            "parameters are plain shards, such as those of namedmesh.compat.megatron.tensor_parallel"
        )
    shards = {
        name: parameter
        for name, parameter in parameters.items()
        if getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
    }
    for parameter in shards.values():
        parameter.model_parallel = True  # type: ignore[attr-defined]
    return list(shards)
