"""What autocast does to the operands of a linear layer; our arithmetic is below it, and has to do it itself."""

from __future__ import annotations

import torch
from torch import Tensor

from namedmesh._torch import cast_in_autocast_cache, local_tensor


def _cast_to(tensor: Tensor) -> torch.dtype | None:
    """Return the type that autocast would give a tensor; None where it leaves it as it is."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    kept = not tensor.is_floating_point() or tensor.dtype in {torch.float64, dtype}
    return None if kept else dtype


def autocast_value(value: Tensor) -> Tensor:
    """Return an activation in the type that autocast gives it; the cast is a step of the backward."""
    dtype = _cast_to(value)
    return value if dtype is None else value.to(dtype)


def autocast_shard(parameter: Tensor) -> Tensor:
    """Return this rank's plain shard of a parameter, in the type that autocast gives it; inside a forward of our own only.

    As autocast does, it casts a parameter once, however often it is used in one autocast block.
    """
    shard = local_tensor(parameter)
    dtype = _cast_to(shard)
    return shard if dtype is None else cast_in_autocast_cache(parameter, shard, dtype)
