"""What the tests of the dialects share: running a call on ours and on the original's, and comparing what comes of it."""

from __future__ import annotations

import importlib
import sys
import warnings
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensors import apart, numbers
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def original(module: str) -> Any:
    """A module of a published package, which warns as it pleases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def deepspeed_groups() -> Any:
    """DeepSpeed's module of groups, with what its engines import; it warns no more, and compiles nothing."""
    warnings.simplefilter("ignore")
    importlib.import_module("deepspeed.runtime.engine")
    # Its collectives in shared memory are compiled on first use, and nothing here is about them.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    return sys.modules["deepspeed.utils.groups"]


def init_deepspeed() -> None:
    vars(importlib.import_module("deepspeed.comm.comm"))["cdb"] = None
    importlib.import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


# Answers.


def comparable(value: Any) -> Any:
    """Groups by their ranks, coordinates by their names and numbers, other objects by their types."""
    if isinstance(value, dist.ProcessGroup):
        return ("group", dist.get_process_group_ranks(value))
    if hasattr(value, "_asdict"):
        return ("coord", type(value).__name__, value._asdict())
    if isinstance(value, dict):
        return [(comparable(key), comparable(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    return value if type(value).__module__ == "builtins" else type(value).__name__


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call answers, comparable, or the builtin type of what it raises."""
    try:
        return comparable(call(*args, **kwargs))
    except Exception as error:  # noqa: BLE001  which one is what is compared
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return next(kind for kind in kinds if kind is not Exception)


def arguments(function: Any) -> list[tuple[str, Any]]:
    return [(one.name, comparable(one.default)) for one in signature(function).parameters.values()]


def more_arguments(theirs: Any, ours: Any) -> list[Parameter]:
    """What a function takes after the arguments of the original's, which have the same defaults."""
    wanted = arguments(theirs)
    assert arguments(ours)[: len(wanted)] == wanted, ours
    return [*signature(ours).parameters.values()][len(wanted) :]


# Tensors.


def shard(whole: Tensor, dim: int | None) -> Tensor:
    """This rank's part of a tensor, over the whole world."""
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


def difference(functions: Any, given: Tensor, others: Any = ()) -> float:
    """How far the results of two functions are apart."""
    first, second = (results(function, given, others) for function in functions)
    return max(map(apart, first, second))


def facts(theirs: Any, ours: Any, given: Tensor) -> dict[str, Any]:
    """In what two layers of the same seed differ: nothing is False, and no distance above a rounding."""
    found: dict[str, Any] = {
        "weights": all(map(torch.equal, theirs.parameters(), ours.parameters())),
        "names": [name for name, _ in theirs.named_parameters()]
        == [name for name, _ in ours.named_parameters()],
    }
    for layer in (theirs, ours):
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = numbers(*layer.bias.shape, seed=9).to(layer.bias.dtype)
    wanted, got = (results(layer, given, list(layer.parameters())) for layer in (theirs, ours))
    found["gradients"] = any(one is not None for one in got[1:])
    return found | {"apart": max(map(apart, got, wanted))}


def agrees(found: Any, tolerance: float = 1e-12) -> bool:
    """Whether all that a rank has found is True, or a distance near 0."""
    if isinstance(found, dict):
        return bool(found) and all(agrees(each, tolerance) for each in found.values())
    return found if isinstance(found, bool) else found <= tolerance
