"""What the tests of the dialects' layers share: running a layer or a function, and comparing ours with the original's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tp_compare import apart, numbers

from namedmesh.compat import fairscale, megatron
from namedmesh.compat.ezpz import tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType


class Dialect(NamedTuple):
    layers: ModuleType
    mappings: ModuleType
    region: str
    start: Callable[[int], None]
    stop: Callable[[], None]
    init_dtype: torch.dtype = torch.float64


DIALECTS = {
    "megatron": Dialect(
        megatron.tensor_parallel,
        megatron.tensor_parallel,
        "tensor_model_parallel",
        megatron.parallel_state.initialize_model_parallel,
        megatron.parallel_state.destroy_model_parallel,
        torch.float32,
    ),
    "fairscale": Dialect(
        fairscale.layers,
        fairscale.mappings,
        "model_parallel",
        fairscale.initialize_model_parallel,
        fairscale.destroy_model_parallel,
    ),
    "ezpz": Dialect(
        tp.layers, tp.mappings, "tensor_parallel", tp.initialize_tensor_parallel, tp.destroy_tensor_parallel
    ),
}


@contextmanager
def started(*names: str) -> Iterator[list[Dialect]]:
    """Dialects over the whole world, or as rank 0 of a fake one."""
    torch.set_default_dtype(torch.float64)
    dialects = [DIALECTS[name] for name in names or DIALECTS]
    for dialect in dialects:
        dialect.start(dist.get_world_size())
    yield dialects
    for dialect in dialects:
        dialect.stop()


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


def differences(functions: Sequence[Callable[[Tensor], Any]], given: Tensor, others: Any = ()) -> list[float]:
    """How far the results of two functions are apart."""
    both = [results(function, given, others) for function in functions]
    return [apart(*two) for two in zip(*both, strict=True)]


def facts(theirs: Any, ours: Any, given: Tensor) -> dict[str, Any]:
    """What two layers of the same seed have alike, and how far their results are apart."""
    found = {
        "weights": all(map(torch.equal, theirs.parameters(), ours.parameters())),
        "names": [name for name, _ in theirs.named_parameters()]
        == [name for name, _ in ours.named_parameters()],
        "state": list(theirs.state_dict()) == list(ours.state_dict()),
        "master": apart(getattr(theirs, "master_weight", None), ours.master_weight),
    }
    for layer in (theirs, ours):
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = numbers(*layer.bias.shape, seed=9).to(layer.bias.dtype)
    wanted, got = (results(layer, given, list(layer.parameters())) for layer in (theirs, ours))
    return found | {
        "apart": max(map(apart, got, wanted)),
        "gradients": sum(one is not None for one in got[1:]),
    }
