"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["make_optimizer", "set_learning_rate"]

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
