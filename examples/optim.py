"""The optimizer, its learning rate, and a gradient norm over parameters that live on different meshes."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

__all__ = ["clip_gradients", "make_optimizer", "set_learning_rate"]

WARM_UP = 10  # steps
LOWEST = 0.1  # of the highest learning rate, at the end


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW that lets the matrices decay, but not the norms."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        # Large: a gradient as small as its own rounding error should not make a full step.
        eps=1e-5,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, *, step: int, steps: int, highest: float) -> None:
    """A linear warm-up and a cosine: a function of the step, so there is no scheduler to save and restore."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    rate = highest * min(1.0, (step + 1) / WARM_UP) * (LOWEST + (1 - LOWEST) * cosine)
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale the gradients down to ``max_norm``, and return the norm that they had over the whole model.

    Args:
        parameters: those of this rank's part of the model.
        max_norm: the largest norm that is left as it is.
        pipeline: the group over the stages that hold the other parts.
    """
    buckets: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
    for each in parameters:
        if each.grad is not None:
            # torch takes the norm over one mesh at a time.
            buckets[each.device_mesh if isinstance(each, DTensor) else None].append(each)
    squares = [_norm(bucket).square() for bucket in buckets.values()]
    total = torch.stack(squares).sum()
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    norm = total.sqrt()
    for bucket in buckets.values():
        clip_grads_with_norm_(bucket, max_norm, norm)
    return norm


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
