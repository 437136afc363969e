"""Whether the gradients of an optimizer were used by a step, and need not be saved."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from namedmesh._torch import count_writes

# The first gradient of the last step of each optimizer, and the number of changes of the gradient
# until then. After the step, the gradient has no more effect, but most loops keep it for a while.
_used_gradients: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Tensor], int]] = (
    weakref.WeakKeyDictionary()
)


def _note_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Remember the first gradient of an optimizer: a hook after each step."""
    if torch.compiler.is_compiling():
        return
    grad = _find_first_gradient(optimizer)
    if grad is not None:
        _used_gradients[optimizer] = weakref.ref(grad), count_writes(grad)


register_optimizer_step_post_hook(_note_step)


def _find_first_gradient(optimizer: Optimizer) -> Tensor | None:
    """Return the first gradient of an optimizer; None if it has none."""
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            if param.grad is not None:
                grad: Tensor = param.grad
                return grad
    return None


def has_used_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has stepped since the last backward.

    If no step was seen, as in compiled code, its state shows whether there was one.

    Args:
        optimizer: the optimizer.
    """
    if optimizer not in _used_gradients:
        return bool(optimizer.state)
    used, writes = _used_gradients[optimizer]
    grad = _find_first_gradient(optimizer)
    return grad is not None and grad is used() and count_writes(grad) == writes
