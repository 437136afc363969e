"""One gather of a module's input, and one sum of its gradient, for all the column layers inside the module.

Every column layer makes a part of its input's gradient, which has to be summed over the ranks. Where several of
them have the same input (queries, keys and values; gate and up), their parts can be added up first. Whatever else
the module does with its input, every rank computes alike: that gradient must not be summed. So a column layer that
leaves the sum to its module makes its part as many times as large as there are ranks, and the module takes the mean.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._torch import has_hooks, version_of
from namedmesh.errors import MeshError
from namedmesh.tensor_parallel.autocast import autocast_dtype
from namedmesh.tensor_parallel.collectives import (
    RankGroup,
    all_gather,
    all_reduce,
    reduce_scatter,
    with_backward,
    with_gradient,
)
from namedmesh.tensor_parallel.module_setup import StyleContext, name_of, sharded_dim
from namedmesh.tensor_parallel.placements import ActivationStyle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

SHARED_INPUT = "_namedmesh_shared_input"
"""The attribute in which a linear finds the :class:`Shared` of the nearest module around it that shares its input."""


class SharedInput(ActivationStyle):
    """Gather a module's first input once for all the column styles inside, and sum its gradient once.

    For an attention or a feed-forward module: the column styles inside keep their default input layout,
    ``Replicate()``. The module gets a plain tensor, the whole input on every rank, and may use it for other
    things too, as long as every rank computes the same with it. A layer that is not given this very tensor but one
    computed from it, or the same after an operation wrote into it, sums its gradient by itself; so does every layer if
    the tensor has a hook, or retains its gradient.

    Args:
        input_layouts: how the input is laid out: ``Shard(dim)`` to gather it (sequence parallelism), or
            ``Replicate()`` (the default) for the sum of the gradient only.

    Raises:
        MeshError: in the forward: the module registers a hook on the tensor after a column layer has used it.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> from namedmesh.tensor_parallel import ColwiseParallel, SharedInput
        >>> plan = {"attention": SharedInput(input_layouts=Shard(1))}
        >>> plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        >>> plan["attention"]
        SharedInput(input_layouts=Shard(dim=1))
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.whole_input = isinstance(self.input_layouts, Replicate)

    def __repr__(self) -> str:
        return f"SharedInput(input_layouts={self.input_layouts!r})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = next(iter(inspect.signature(module.forward).parameters))
        setup = StyleContext(RankGroup(device_mesh), self.input_layouts, Replicate())
        shared = Shared(setup, name, sum(1 for _ in module.modules()))
        module.register_forward_pre_hook(shared.open, with_kwargs=True)
        module.register_forward_hook(shared.close)
        for inner in module.modules():
            nearest = vars(inner).get(SHARED_INPUT)
            if isinstance(inner, nn.Linear) and (nearest is None or nearest.size > shared.size):
                setattr(inner, SHARED_INPUT, shared)
        return module


class Shared:
    """The input that the column layers inside a module share while its forward runs.

    Args:
        setup: how the input is laid out over the ranks.
        name: the name of the input in the module's forward.
        size: how many modules are inside: of two around a layer, the smaller one is nearer.
    """

    def __init__(self, setup: StyleContext, name: str, size: int) -> None:
        self.setup, self.name, self.size = setup, name, size
        self.value: Tensor | None = None
        self._version, self._used = 0, False

    def open(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the module's input with the whole one, and keep that for the column layers."""
        if args:
            return (self._share(args[0]), *args[1:]), kwargs
        return args, kwargs | {self.name: self._share(kwargs[self.name])}

    def _share(self, value: Tensor) -> Tensor:
        setup = self.setup
        dim = sharded_dim(setup.input_layout, value.ndim)
        if isinstance(value, DTensor) or (dim is None and not setup.whole_input):
            if dim is not None and value.shape[dim] % setup.group.size:  # torch pads such shards
                dim = None
            layout = Replicate() if dim is None else setup.input_layout
            value = setup.redistribute_input(value, layout).to_local()
        share = _pass if dim is None else _gather
        value = share(value, setup.group, (dim, autocast_dtype(value)))
        if setup.group.size > 1 and torch.is_grad_enabled():
            self.value, self._version, self._used = value, version_of(value), False
        return value

    def close(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Forget the input.

        Raises:
            MeshError: it has got a hook, which would see a rank's part of the gradient.
        """
        value, self.value = self.value, None
        if value is not None and self._used and has_hooks(value):
            raise MeshError(
                f"{name_of(module)}: its shared input has a hook, or retains its gradient, since a column layer used it, "
                f"and would get this rank's part of the gradient; register the hook before, or take the SharedInput "
                f"out of the plan"
            )

    def sums(self, value: Tensor) -> bool:
        """Return whether a column layer with this input leaves the sum of its gradient to the module."""
        if value is not self.value:
            return False
        # What the compiler traces is right without this, too, unless a parameter takes part in the writing.
        if not torch.compiler.is_compiling() and (version_of(value) != self._version or has_hooks(value)):
            return False
        self._used = True
        return True


def sums_gradient_of(module: nn.Module, group: RankGroup, value: Tensor) -> bool:
    """Return whether a module around a column layer sums the gradient of the layer's input, over the same ranks."""
    # Not from vars(): the compiler of torch 2.8 does not know that.
    shared: Shared | None = getattr(module, SHARED_INPUT, None)
    return shared is not None and shared.setup.group == group and shared.sums(value)


_Layout = tuple["int | None", "torch.dtype | None"]
"""The dim along which an input is gathered, and the type in which its gradient is summed, if not its own."""


def _mean(gradient: Tensor, group: RankGroup, layout: _Layout) -> Tensor:
    dim, dtype = layout
    sent = (gradient / group.size).to(dtype or gradient.dtype)
    total = all_reduce(sent, group, mine=True) if dim is None else reduce_scatter(sent, group, dim)
    return total.to(gradient.dtype)


_gather = with_backward(lambda value, group, layout: all_gather(value, group, layout[0]), _mean)
_pass = with_gradient(_mean)
