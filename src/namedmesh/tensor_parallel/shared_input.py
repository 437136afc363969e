"""One gather of a module's input, and one sum of its gradient, for all the column layers inside the module.

Every column layer makes a part of its input's gradient, which has to be summed over the ranks. Where several of
them have the same input (queries, keys and values; gate and up), their parts can be added up first.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from namedmesh._torch import backward_pass, synchronous
from namedmesh.tensor_parallel.collectives import (
    Pending,
    all_gather,
    local_shard,
    my_shard,
    start_all_reduce,
    start_reduce_scatter,
)
from namedmesh.tensor_parallel.module_setup import Setup, sharded_dim
from namedmesh.tensor_parallel.placements import ActivationStyle

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.collectives import RankGroup

_MARK = "_namedmesh_shared_gradient"


class SharedInput(ActivationStyle):
    """Gather a module's first input once for all the column styles inside, and sum its gradient once.

    For an attention or a feed-forward module: the column styles inside keep their default input layout,
    ``Replicate()``. The module gets a plain tensor, the whole input on every rank, and may use it for other
    things too, as long as every rank computes the same with it. A layer that is not given this very tensor
    but one computed from it sums its gradient by itself.

    Args:
        input_layouts: how the input is laid out: ``Shard(dim)`` to gather it (sequence parallelism), or
            ``Replicate()`` (the default) for the sum of the gradient only.

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
        setup = Setup(device_mesh, self.input_layouts, Replicate(), use_local_output=True)
        module.register_forward_pre_hook(_Share(setup, name), with_kwargs=True)
        return module


@dataclass(frozen=True)
class _Share:
    """The hook: an object, and no closure, so that the module can be copied and pickled."""

    setup: Setup
    name: str

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.share(args[0]), *args[1:]), kwargs
        return args, kwargs | {self.name: self.share(kwargs[self.name])}

    def share(self, value: Tensor) -> Tensor:
        """Return the whole input, marked for the column layers."""
        setup = self.setup
        layout = setup.layout_of(value)
        dim = None if layout is None else sharded_dim(layout, value.ndim)
        if (
            torch.compiler.is_compiling()
            or layout is None
            or (dim is None and not isinstance(layout, Replicate))
        ):
            return local_shard(setup.annotated(value).redistribute(placements=(Replicate(),)))
        value = local_shard(value)
        shared = SharedGradient(setup.peers, dim)
        whole_value = _shared(value, shared)
        setattr(whole_value, _MARK, shared)
        return whole_value


def shared_gradient(value: Tensor, peers: RankGroup) -> SharedGradient | None:
    """Return where the parts of this tensor's gradient are to go, if it is a shared input of the same ranks."""
    shared: SharedGradient | None = getattr(value, _MARK, None)
    return shared if shared is not None and shared.peers == peers else None


class SharedGradient:
    """The gradient of one input of several column layers, of which each adds its part.

    Args:
        peers: the ranks, over whom it is summed.
        scatter_dim: leave each its shard of the sum, along this dim.
    """

    def __init__(self, peers: RankGroup, scatter_dim: int | None) -> None:
        self.peers, self.scatter_dim = peers, scatter_dim
        self._layers = 0
        self._clear()

    def _clear(self) -> None:
        self._pass, self._added = -1, 0
        self._sum: Tensor | None = None
        self._pending: Pending | None = None

    def expect(self, needed: bool) -> None:
        """Note a layer, and whether it will add a part."""
        self._layers += needed

    def add(self, rows: Tensor, weight: Tensor, leading: torch.Size) -> None:
        """Add ``rows @ weight``; with the last layer's part, the sum over the ranks is started.

        Args:
            rows: the gradient of the layer's output, a row for each token.
            weight: the layer's.
            leading: the dims of the input before its features.
        """
        if self._pass != backward_pass():  # what is left of a pass that failed does not count
            self._clear()
            self._pass = backward_pass()
        if self._sum is None:
            part = rows @ weight
        else:
            part = torch.addmm(self._sum.view(-1, weight.shape[1]), rows, weight)
        self._sum = part.view(*leading, weight.shape[1])
        self._added += 1
        if self._added == self._layers:
            self._pending, self._sum = self._start(self._sum), None

    def _start(self, part: Tensor) -> Pending:
        if self.scatter_dim is None:
            return start_all_reduce(part, self.peers, mine=True)
        return start_reduce_scatter(part, self.peers, self.scatter_dim)

    def result(self) -> Tensor | None:
        """Return the sum over the ranks of all parts that were added in this pass; None where there were none."""
        if self._pass != backward_pass():
            return None
        pending = self._pending
        if self._sum is not None:  # not every layer took part in this pass
            pending = self._start(self._sum)
        self._clear()
        return None if pending is None else pending.wait().contiguous()


class _Shared(torch.autograd.Function):
    """The whole input; its gradient is the sum of the layers' parts, and what every rank computed alike."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, shared: SharedGradient) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        value = synchronous(value)
        if shared.scatter_dim is None or shared.peers.size == 1:
            return value.view_as(value)
        return all_gather(value, shared.peers, shared.scatter_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        shared = ctx.shared
        parts = shared.result()
        if gradient is not None and shared.scatter_dim is not None:
            gradient = my_shard(gradient, shared.peers, shared.scatter_dim)
        if gradient is None or parts is None:
            return parts if gradient is None else gradient, None
        return parts + gradient, None


_shared: Callable[[Tensor, SharedGradient], Tensor] = _Shared.apply
