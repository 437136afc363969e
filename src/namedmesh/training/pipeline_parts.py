"""What a pipeline does around torch's schedules: arguments that are not split, targets of any form, and a first run that changes nothing."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from namedmesh.training.seeds import streams

if TYPE_CHECKING:
    from collections.abc import Iterator


class Whole:
    """A keyword argument that torch is not to split; what is no tensor, every microbatch gets."""

    def __init__(self, value: Any) -> None:
        self.value = value


def unpacked(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a stage its keyword arguments as they were given to the pipeline."""
    return args, {key: each.value if isinstance(each, Whole) else each for key, each in kwargs.items()}


def tensors_of(target: Any) -> list[Tensor]:
    """Return the tensors of a target."""
    if isinstance(target, Tensor):
        return [target]
    if target is None:
        return []
    parts = target.values() if isinstance(target, dict) else target
    return [tensor for part in parts for tensor in tensors_of(part)]


def rows_of(target: Any, rows: slice) -> Any:
    """Return some rows of each tensor of a target."""
    if isinstance(target, Tensor) or target is None:
        return None if target is None else target[rows]
    if isinstance(target, dict):
        return {key: rows_of(each, rows) for key, each in target.items()}
    parts = [rows_of(each, rows) for each in target]
    return type(target)(*parts) if hasattr(target, "_fields") else type(target)(parts)


@contextmanager
def unchanged_by_first_run(modules: list[nn.Module]) -> Iterator[None]:
    """Keep the first forward of new stages, in which torch finds out the shapes, from changing anything.

    torch drops the gradients of FSDP2 in it, and puts back its own default generators only.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    for module in modules:
        _protect_once(module)
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _protect_once(module: nn.Module) -> None:
    """Let the next forward of a module leave its buffers and all random generators as they are."""
    owners = [
        (owner, name, each) for owner in module.modules() for name, each in owner.named_buffers(recurse=False)
    ]
    around = ExitStack()

    def before(*_: Any) -> None:
        first.remove()
        around.enter_context(streams.unchanged())
        for owner, name, buffer in owners:
            setattr(owner, name, buffer.clone())

    def after(*_: Any) -> None:
        last.remove()
        around.close()
        for owner, name, buffer in owners:
            setattr(owner, name, buffer)

    first = module.register_forward_pre_hook(before, prepend=True)
    last = module.register_forward_hook(after, always_call=True)
