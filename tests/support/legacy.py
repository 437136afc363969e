"""Helpers of the tests of legacy APIs: run a call on ours and on upstream, and compare the results."""

from __future__ import annotations

import importlib
import sys
import warnings
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensors import compute_difference, random_tensor
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def original(module: str) -> Any:
    """Import a module of an upstream package without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def deepspeed_groups() -> Any:
    """DeepSpeed's module of groups, once its engine was imported, without warnings and compilation."""
    warnings.simplefilter("ignore")
    importlib.import_module("deepspeed.runtime.engine")
    # DeepSpeed compiles its shared-memory collectives on first use; no test here needs them.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    return sys.modules["deepspeed.utils.groups"]


def init_deepspeed() -> None:
    vars(importlib.import_module("deepspeed.comm.comm"))["cdb"] = None
    importlib.import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


# Answers.


def comparable(value: Any) -> Any:
    """A value that can be compared: a group becomes its ranks, a named tuple its items, another object its type."""
    if isinstance(value, dist.ProcessGroup):
        return ("group", dist.get_process_group_ranks(value))
    if hasattr(value, "_asdict"):
        return ("coord", type(value).__name__, value._asdict())
    if isinstance(value, dict):
        return [(comparable(key), comparable(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    return value if type(value).__module__ == "builtins" else type(value).__name__


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The comparable result of a call, or the builtin type of its error."""
    try:
        return comparable(call(*args, **kwargs))
    except Exception as error:  # noqa: BLE001  the type of the error is compared
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return next(kind for kind in kinds if kind is not Exception)


def arguments(function: Any) -> list[tuple[str, Any]]:
    """The names of a function's arguments, and their comparable defaults."""
    parameters = signature(function).parameters.values()
    return [(parameter.name, comparable(parameter.default)) for parameter in parameters]


def more_arguments(theirs: Any, ours: Any) -> list[Parameter]:
    """The arguments of our function after those of upstream, which must have the same defaults."""
    expected = arguments(theirs)
    assert arguments(ours)[: len(expected)] == expected, ours
    return [*signature(ours).parameters.values()][len(expected) :]


# Tensors.


def shard(tensor: Tensor, dim: int | None) -> Tensor:
    """The local shard of a replicated tensor, over all ranks; the tensor itself without a dim."""
    if dim is None:
        return tensor
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def results(function: Callable[[Tensor], Any], given: Tensor, others: Any = ()) -> list[Tensor | None]:
    """The output, and the gradients of the input and of other tensors, for a gradient that differs by rank."""
    value = given.clone().requires_grad_(given.is_floating_point())
    output = function(value * 1 if given.is_floating_point() else value)
    output, extra = output if isinstance(output, tuple) else (output, None)
    loss = (output * random_tensor(*output.shape, seed=50 + dist.get_rank())).sum()
    if extra is not None:
        loss = loss + (extra * 3).sum()
    for other in others:
        other.grad = None
    result = output.detach().clone()  # megatron-core's backward may reuse the memory
    loss.backward()
    return [result, value.grad, *(other.grad for other in others)]


def difference(functions: Any, given: Tensor, others: Any = ()) -> float:
    """The largest difference between the results of two functions."""
    first, second = (results(function, given, others) for function in functions)
    return max(map(compute_difference, first, second))


def facts(theirs: Any, ours: Any, given: Tensor) -> dict[str, Any]:
    """Comparisons of two layers of the same seed; see :func:`agrees`."""
    compared: dict[str, Any] = {
        "weights": all(map(torch.equal, theirs.parameters(), ours.parameters())),
        "names": [name for name, _ in theirs.named_parameters()]
        == [name for name, _ in ours.named_parameters()],
    }
    for layer in (theirs, ours):
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = random_tensor(*layer.bias.shape, seed=9).to(layer.bias.dtype)
    expected, actual = (results(layer, given, list(layer.parameters())) for layer in (theirs, ours))
    compared["gradients"] = any(grad is not None for grad in actual[1:])
    return compared | {"apart": max(map(compute_difference, actual, expected))}


def agrees(compared: Any, tolerance: float = 1e-12) -> bool:
    """Whether every comparison is True, or a difference of at most the tolerance."""
    if isinstance(compared, dict):
        return bool(compared) and all(agrees(item, tolerance) for item in compared.values())
    return compared if isinstance(compared, bool) else compared <= tolerance
