"""What the tests of the dialects' layers share: running a layer or a function, and comparing ours with the original's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ranks import fake_world
from torch import Tensor
from tp_compare import apart, numbers

if TYPE_CHECKING:
    from collections.abc import Callable


def shard(whole: Tensor, dim: int | None) -> Tensor:
    return whole if dim is None else whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def results(function: Callable[[Tensor], Any], given: Tensor, others: Any = ()) -> list[Tensor | None]:
    """The output, and the gradients of the input and of other tensors, for a gradient of this rank's own."""
    value = given.clone().requires_grad_(given.is_floating_point())
    output = function(value * 1 if given.is_floating_point() else value)
    output, extra = output if isinstance(output, tuple) else (output, None)
    loss = (output * numbers(*output.shape, seed=50 + dist.get_rank())).sum()
    if extra is not None:
        loss = loss + (extra * 3).sum()
    for other in others:
        other.grad = None
    kept = output.detach().clone()  # megatron-core's backward may reuse the memory
    loss.backward()
    return [kept, value.grad, *(other.grad for other in others)]


def differences(functions: list[Any], given: Tensor, others: Any = ()) -> list[float]:
    """How far the results of two functions are apart; of layers also the gradients of their parameters."""
    both = [
        results(function, given, others or list(getattr(function, "parameters", list)()))
        for function in functions
    ]
    return [apart(*two) for two in zip(*both, strict=True)]


def facts(theirs: Any, ours: Any, given: Tensor) -> dict[str, Any]:
    """What two layers of the same seed have alike, and how far they are apart."""
    return {
        "weights": all(map(torch.equal, theirs.parameters(), ours.parameters())),
        "names": dict(theirs.named_parameters()).keys() == dict(ours.named_parameters()).keys(),
        "state": list(theirs.state_dict()) == list(ours.state_dict()),
        "master": apart(getattr(theirs, "master_weight", None), ours.master_weight),
        "apart": max(differences([theirs, ours], given)),
        "gradients": sum(parameter.grad is not None for parameter in ours.parameters()),
    }


def in_world(size: int, call: Callable[..., Any], start: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """A call on rank 0 of a world of fakes, after another one, whose result it gets."""

    def inside() -> Any:
        with fake_world(size):
            return call() if start is None else call(start())

    return inside
