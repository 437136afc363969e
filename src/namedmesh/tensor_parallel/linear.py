"""Sharded linear layers: arithmetic on this rank's plain tensors, whatever the parameters are.

DTensor decides anew at every operation how its operands are laid out, which on small layers costs more than
the arithmetic. The layout of a column or row layer is known when it is made, so its forward and backward can
be written down once, as two matrix products and a collective. The parameters are DTensors in the layers that
the styles make, and plain pieces in those of legacy code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from namedmesh._torch import gradient_like, settled
from namedmesh.errors import MeshError
from namedmesh.tensor_parallel.collectives import (
    all_gather,
    all_reduce,
    gather,
    reduce_scatter,
    split,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from namedmesh.tensor_parallel.setup import Setup, check_cut, is_replicated, sharded_dim

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh.tensor_parallel.collectives import Peers


class ColwiseLinear(nn.Linear):
    """An ``nn.Linear`` whose output features are cut over the ranks. Made by ``ColwiseParallel``."""

    _setup: Setup

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """This rank's output features, or what the style's output layout says."""
        setup = self._setup
        if torch.compiler.is_compiling():
            return through_dtensor(self, input, Replicate())
        local = input if type(input) is Tensor else setup.plain(input)
        if local is None:
            return through_dtensor(self, input, Replicate())
        last = local.ndim - 1
        gather_dim = sharded_dim(setup.input_layout, local.ndim)
        whole_output = is_replicated(setup.output_layout)
        if (
            gather_dim == last
            or (gather_dim is None and not is_replicated(setup.input_layout))
            or not (whole_output or sharded_dim(setup.output_layout, local.ndim) == last)
        ):
            return through_dtensor(self, input, Replicate())
        output = column(local, self.weight, self.bias, setup.peers, gather_dim)
        if whole_output:
            output = gather(output, setup.peers, last)
        return output if setup.use_local_output else setup.hand_out(output)


class RowwiseLinear(nn.Linear):
    """An ``nn.Linear`` whose input features are cut over the ranks. Made by ``RowwiseParallel``."""

    _setup: Setup

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """The sum of all ranks' products: whole, or cut along another dim."""
        setup = self._setup
        if torch.compiler.is_compiling():
            return through_dtensor(self, input, Shard(-1))
        local = input if type(input) is Tensor else setup.plain(input)
        if local is None:
            return through_dtensor(self, input, Shard(-1))
        last = local.ndim - 1
        scatter_dim = sharded_dim(setup.output_layout, local.ndim)
        whole_input = is_replicated(setup.input_layout)
        if not (whole_input or sharded_dim(setup.input_layout, local.ndim) == last) or (
            scatter_dim is None and not is_replicated(setup.output_layout)
        ):
            return through_dtensor(self, input, Shard(-1))
        if scatter_dim is not None:
            shape = torch.Size((*local.shape[:-1], self.out_features))
            check_cut(self, "the output", shape, scatter_dim, setup.peers.size)
        if whole_input:
            local = split(local, setup.peers, last)
        output = row(local, self.weight, self.bias, setup.peers, scatter_dim)
        return output if setup.use_local_output else setup.hand_out(output)


def through_dtensor(
    module: ColwiseLinear | RowwiseLinear, value: Tensor, desired: Replicate | Shard
) -> Tensor:
    """The same layer in DTensor arithmetic: for layouts the short way does not know, and for the compiler."""
    setup = module._setup  # noqa: SLF001  the module is one of ours
    annotated = setup.annotated(value)
    if annotated.placements != (desired,):
        annotated = annotated.redistribute(placements=(desired,))
    return setup.finish(module, F.linear(annotated, module.weight, module.bias))


def column(
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    peers: Peers,
    gather_dim: int | None = None,
    *,
    gather_again: bool = False,
) -> Tensor:
    """My output features: ``value @ weight.T + bias`` with my rows of the weight and of the bias.

    Args:
        value: what every peer has; or, with ``gather_dim``, my piece of it along that dim.
        weight: a DTensor or a plain piece, ``(my outputs, inputs)``; its gradient is of the same kind.
        bias: my part of the bias, or None.
        peers: over whom the gradient of the input is summed.
        gather_dim: gather the input along this dim first; its gradient is reduced and scattered.
        gather_again: keep only the piece of the input for the backward, and gather it there once more: less
            memory, one more collective.
    """
    return _column(*_autocast(value, weight, bias), peers, gather_dim, gather_again)


def row(
    value: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers, scatter_dim: int | None = None
) -> Tensor:
    """The peers' sum of ``value @ weight.T``, plus the bias, with my columns of the weight.

    Args:
        value: my input features.
        weight: a DTensor or a plain piece, ``(outputs, my inputs)``; its gradient is of the same kind.
        bias: the whole bias, which counts once, or None. Its gradient is the whole one, on every peer.
        peers: over whom the output is summed.
        scatter_dim: keep only my piece of the sum, along this dim.
    """
    return _row(*_autocast(value, weight, bias), peers, scatter_dim)


def _autocast(value: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three operands in the type that autocast would give them; outside autocast, as they are.

    The backward runs outside autocast, so the casts have to be operations of their own.
    """
    device = value.device.type
    if not torch.is_autocast_enabled(device) or not value.is_floating_point():
        return value, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return value.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _refuse_double_backward() -> None:
    """Say it, rather than give second derivatives that leave out the collectives."""
    if torch.is_grad_enabled():
        raise MeshError(
            "the fast parallel styles have no second derivative, and backward was called with "
            "create_graph=True; put torch's own ColwiseParallel and RowwiseParallel in the plan instead"
        )


def _parameter_gradients(
    ctx: Any, rows: Tensor, value: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, from the output's, each of the same kind as its parameter."""
    weight_gradient = bias_gradient = None
    if value is not None and weight is not None:
        products = rows.t() @ value.reshape(-1, value.shape[-1])
        weight_gradient = _gradient(weight, products)
    if bias is not None and ctx.needs_input_grad[2]:
        bias_gradient = _gradient(bias, rows.sum(0))
    return weight_gradient, bias_gradient


def _piece(parameter: Tensor) -> Tensor:
    """My plain piece of a parameter. Inside a forward or backward only, where no gradients are recorded."""
    if not isinstance(parameter, DTensor):
        return parameter
    local: Tensor = parameter.to_local()  # where nothing is recorded, an attribute access
    return local


def _gradient(parameter: Tensor, local: Tensor) -> Tensor:
    """A gradient of my piece of a parameter, of the same kind as the parameter."""
    return gradient_like(parameter, local) if isinstance(parameter, DTensor) else local


class _Column(torch.autograd.Function):
    """``gather(x) @ W.T + b`` with my rows of W; the input's gradient is summed while W's is computed."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        peers: Peers,
        gather_dim: int | None,
        gather_again: bool,
    ) -> Tensor:
        piece = value = settled(value)
        if gather_dim is not None:
            value = all_gather(piece, peers, gather_dim)
        gather_again = gather_again and gather_dim is not None
        _keep(ctx, piece if gather_again else value, weight, bias)
        ctx.peers, ctx.gather_dim, ctx.gather_again = peers, gather_dim, gather_again
        return F.linear(value, _piece(weight), None if bias is None else _piece(bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        value, weight, bias = ctx.saved_tensors
        gradient = settled(gradient)
        rows = gradient.reshape(-1, gradient.shape[-1])
        pending = gathering = None
        if value is not None and ctx.gather_again:
            gathering = start_all_gather(value, ctx.peers, ctx.gather_dim)
        if ctx.needs_input_grad[0]:
            partial = (rows @ _piece(weight)).view(*gradient.shape[:-1], -1)
            if ctx.gather_dim is None:
                pending = start_all_reduce(partial, ctx.peers)
            else:
                pending = start_reduce_scatter(partial, ctx.peers, ctx.gather_dim)
        if gathering is not None:
            value = gathering.wait()
        gradients = _parameter_gradients(ctx, rows, value, weight, bias)
        # Contiguous: a pipeline sends it to the stage before as it is.
        return None if pending is None else pending.wait().contiguous(), *gradients, None, None, None


class _Row(torch.autograd.Function):
    """``reduce(x @ W.T) + b`` with my columns of W and of x; the reduction is done when this returns."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers, scatter_dim: int | None
    ) -> Tensor:
        value = settled(value)
        _keep(ctx, value, weight, bias)
        ctx.peers, ctx.scatter_dim = peers, scatter_dim
        output = F.linear(value, _piece(weight))
        if scatter_dim is None:
            output = all_reduce(output, peers)
        else:
            output = reduce_scatter(output, peers, scatter_dim)
        if bias is not None:
            mine = _piece(bias)
            if scatter_dim == output.ndim - 1 and peers.size > 1:
                width = output.shape[-1]
                mine = mine.narrow(0, peers.rank * width, width)
            output.add_(mine)  # after the sum: the bias counts once
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        value, weight, bias = ctx.saved_tensors
        gradient = settled(gradient)
        if ctx.scatter_dim is not None:
            # The whole gradient also makes the bias' gradient the same, and whole, on every rank.
            gradient = all_gather(gradient, ctx.peers, ctx.scatter_dim)
        rows = gradient.reshape(-1, gradient.shape[-1])
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = (rows @ _piece(weight)).view(*gradient.shape[:-1], -1)
        return input_gradient, *_parameter_gradients(ctx, rows, value, weight, bias), None, None


def _keep(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Save what the backward will need, and not the input when the weight is frozen."""
    needs_value, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(
        value if needs_weight else None, weight if needs_value or needs_weight else None, bias
    )


# The functions to call: torch leaves ``apply`` without types.
_column: Callable[[Tensor, Tensor, Tensor | None, Peers, int | None, bool], Tensor] = _Column.apply
_row: Callable[[Tensor, Tensor, Tensor | None, Peers, int | None], Tensor] = _Row.apply
