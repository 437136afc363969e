"""Gradients of DTensors in the layout of their parameters, wherever DTensor arithmetic leaves them in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from namedmesh._torch import replaced_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn


def align_gradients(module: nn.Module) -> None:
    """Let the gradients of a module's parameters, and of those inside, come in the layout of the parameters.

    torch leaves the gradients of the replicated parameters of ``SequenceParallel`` partial, and those of a subclass
    of ``nn.Linear`` in whatever layout its operations end in: then a rank's shard of the gradient is not the gradient,
    and the optimizers of some of its versions drop the update. A hook on a parameter would not outlive
    ``to_empty``, ``to(dtype)``, or a copy of the module.
    """
    for inner in module.modules():
        if next(inner.parameters(recurse=False), None) is not None:
            inner.forward = _AlignedForward(inner)


class _AlignedForward:
    """A module's own forward, with parameters whose gradients are moved before they arrive. An object, to be copied."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.original = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.module.named_parameters(recurse=False)
        values = {name: _aligned(parameter) for name, parameter in own}
        with replaced_parameters(self.module, values):
            return self.original(*args, **kwargs)


def _aligned(parameter: Tensor) -> Tensor:
    """Return a parameter as it is, a DTensor with a move of its gradient to its own layout on the way back."""
    if isinstance(parameter, DTensor):
        return parameter.redistribute(placements=parameter.placements)
    return parameter
