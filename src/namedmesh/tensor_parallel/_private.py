"""The only file here that touches torch API which is private, or which has changed its name."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    if local.dtype != parameter.dtype:  # a backward under autocast that the forward was not under
        local = local.to(parameter.dtype)
    if not parameter.is_contiguous():  # a gradient is: the strides are not the parameter's
        strides = torch.empty(parameter.shape, device="meta").stride()
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=strides,
        )
    # A copy, because torch may write into the specification of a tensor that it dispatches on.
    spec = copy.copy(parameter._spec)  # noqa: SLF001
    return DTensor(local, spec, requires_grad=False)


@contextmanager
def replaced_parameters(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module see other tensors in place of some of its own parameters, for one forward."""
    parameters: dict[str, Any] = module._parameters  # noqa: SLF001  no public way to put a plain tensor here
    own = {name: parameters[name] for name in values}
    parameters.update(values)
    try:
        yield
    finally:
        parameters.update(own)


def absent_children(model: torch.nn.Module) -> list[str]:
    """The names of the submodules that were deliberately set to None, as pipeline stages do."""
    absent = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():  # noqa: SLF001  named_children() leaves None out
            if child is None:
                absent.append(f"{fqn}.{name}" if fqn else name)
    return absent
