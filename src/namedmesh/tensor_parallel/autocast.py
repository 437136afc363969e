"""What autocast does to the operands of a linear layer; our arithmetic is below it, and has to do it itself."""

from __future__ import annotations

import torch
from torch import Tensor

from namedmesh._torch import cast_in_autocast_cache, local_tensor


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the type that autocast computes a linear in where a tensor lives; None where it is off."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _is_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in {torch.float64, dtype}


def autocast_value(value: Tensor) -> Tensor:
    """Return an activation in the type that autocast gives it; the cast is a step of the backward."""
    dtype = _autocast_dtype(value)
    return value.to(dtype) if dtype is not None and _is_cast(value, dtype) else value


def autocast_shards(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return this rank's plain shards of two parameters, in the type that autocast gives them; inside a forward of our own only.

    As autocast does, it casts a parameter once, however often it is used in one autocast block.
    """
    dtype = _autocast_dtype(weight)
    return _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    shard = local_tensor(parameter)
    if dtype is None or not _is_cast(shard, dtype):
        return shard
    return cast_in_autocast_cache(parameter, shard, dtype)
