"""The only file here that touches torch API which is private, or which has changed its name."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.parallel import ParallelStyle

# torch 2.13 renamed both and warns at the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's ``local``, one after the other along dim 0, into ``out``."""
    _all_gather(out, local, group=group)


def reduce_scatter_single(out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start summing ``full`` over the ranks, each keeping its piece of dim 0 in ``out``."""
    work: dist.Work = _reduce_scatter(out, full, group=group, async_op=True)
    return work


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind an asynchronous result, waited for; any other tensor as it is. Not differentiable."""
    if isinstance(tensor, AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.wait()
        return waited
    return tensor


def gradient_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """A gradient of ``parameter``'s own layout around this rank's ``local`` piece.

    The public ``DTensor.from_local`` works out the global shape again and passes through autograd: ten times
    the cost, once per parameter and step.
    """
    # A copy, because torch may write into the specification of a tensor that it dispatches on.
    spec = copy.copy(parameter._spec)  # noqa: SLF001
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


def rank_in_mesh(tensor: DTensor) -> int:
    """This rank's place on a one-dimensional mesh."""
    return tensor.device_mesh.get_local_rank()


def apply_style(style: ParallelStyle, module: torch.nn.Module, mesh: dist.DeviceMesh) -> torch.nn.Module:
    """Apply another style from inside a style, through the extension point that torch documents."""
    applied: torch.nn.Module = style._apply(module, mesh)  # noqa: SLF001
    return applied


def absent_children(model: torch.nn.Module) -> list[str]:
    """The names of the submodules that were deliberately set to None, as pipeline stages do."""
    absent = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():  # noqa: SLF001  named_children() leaves None out
            if child is None:
                absent.append(f"{fqn}.{name}" if fqn else name)
    return absent
