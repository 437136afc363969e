"""What autocast does to the operands of a linear layer; our arithmetic is below it, and has to do it itself."""

from __future__ import annotations

import torch
from torch import Tensor

from namedmesh._torch import cast_in_autocast_cache, local_tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the type that autocast gives an operand of a linear; None where it leaves it as it is."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    return dtype if tensor.is_floating_point() and tensor.dtype not in {torch.float64, dtype} else None


def autocast_value(value: Tensor) -> Tensor:
    """Return an activation in the type that autocast gives it; the cast is a step of the backward."""
    dtype = autocast_dtype(value)
    return value if dtype is None else value.to(dtype)


def autocast_shard(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's plain shard in the type that autocast gives it beside a value of :func:`autocast_value`.

    It is cast once in a block, as autocast does. Inside a forward of our own only.
    """
    shard = local_tensor(parameter)
    dtype = None if shard.dtype is value.dtype else autocast_dtype(shard)
    return shard if dtype is None else cast_in_autocast_cache(parameter, shard, dtype)
