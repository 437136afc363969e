"""Sharded linear layers: arithmetic on this rank's plain tensors, whatever the parameters are.

DTensor decides anew at every operation how its operands are laid out, which on small layers costs more than
the arithmetic. The layout of a column or row layer is known when it is made, so its forward and backward can
be written down once, as two matrix products and a collective. The parameters are DTensors in the layers that
the styles make, and plain shards in those of legacy code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from namedmesh._torch import (
    as_non_view,
    gradient_like,
    grads_wanted_by_this_pass,
    in_function_transform,
    local_tensor,
    needs_functional_collectives,
    synchronous,
)
from namedmesh.errors import MeshError, PlanError
from namedmesh.tensor_parallel.autocast import autocast_shard, autocast_value
from namedmesh.tensor_parallel.collectives import (
    ALONE,
    all_gather,
    all_reduce,
    gather,
    local_shard,
    reduce_scatter,
    split,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from namedmesh.tensor_parallel.module_setup import (
    LAST,
    WHOLE,
    StyleContext,
    check_divides,
    check_features,
    name_of,
    sharded_dim,
)
from namedmesh.tensor_parallel.placements import placement_name
from namedmesh.tensor_parallel.shared_input import sums_gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh.tensor_parallel.collectives import RankGroup
    from namedmesh.tensor_parallel.shared_input import Shared


class ColwiseLinear(nn.Linear):
    """An ``nn.Linear`` whose output features are sharded over the ranks. Made by ``ColwiseParallel``."""

    _setup: StyleContext
    _namedmesh_shared_input: Shared | None = None  # so that no forward looks for what is not there

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """Return this rank's output features, or what the style's output layout says."""
        setup = self._setup
        value, layout = column_operand(self, setup, input)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if setup.rows is not None:
            weight = setup.rows(weight, setup.group)
            bias = None if bias is None else setup.rows(bias, setup.group)
        output = column(value, weight, bias, layout)
        if setup.whole_output:
            return setup.deliver(self, gather(output, setup.group, output.ndim - 1))
        return setup.deliver(self, output, LAST)


class RowwiseLinear(nn.Linear):
    """An ``nn.Linear`` whose input features are sharded over the ranks. Made by ``RowwiseParallel``."""

    _setup: StyleContext

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """Return the sum of all ranks' products: whole, or sharded along another dim."""
        setup = self._setup
        last = input.ndim - 1
        is_shard = not isinstance(input, DTensor) and sharded_dim(setup.input_layout, input.ndim) == last
        if not is_shard:
            check_features(self, input, self.in_features)
        if is_shard:
            local = input
        elif setup.whole_input and not isinstance(input, DTensor):
            local = split(input, setup.group, last)
        else:
            local = setup.redistribute_input(input, LAST).to_local()
        scatter_dim = sharded_dim(setup.output_layout, input.ndim)
        if scatter_dim is not None:
            shape = torch.Size((*local.shape[:-1], self.out_features))
            check_divides(self, "the output", shape, scatter_dim, setup.group.size)
        output = row(local, self.weight, self.bias, setup.group, scatter_dim)
        known = scatter_dim is not None or setup.whole_output
        return setup.deliver(self, output, None if known else WHOLE)


class ColumnInput(NamedTuple):
    """How the input of a column layer is laid out, and how its gradient is summed.

    ``group``: over whom the gradient is summed. ``gather_dim``: the input is this rank's shard along that dim, gathered first;
    its gradient is reduced and scattered. ``factor``: what the gradient is multiplied by, for whoever takes the mean over
    the ranks. ``gather_again``: keep only the shard for the backward, and gather it there once more: less memory, one
    more collective.
    """

    group: RankGroup
    gather_dim: int | None = None
    factor: int = 1
    gather_again: bool = False


def column_operand(module: nn.Module, setup: StyleContext, value: Tensor) -> tuple[Tensor, ColumnInput]:
    """Return an input of a column layer for explicit collectives.

    Raises:
        PlanError: the style is to gather an input that is gathered already.
    """
    gather_dim = sharded_dim(setup.input_layout, value.ndim)
    known = gather_dim is not None or setup.whole_input
    if isinstance(value, DTensor) or not known:
        # As in DTensor arithmetic: whoever made it sums the parts of its gradient, of all its users at once.
        whole = setup.redistribute_input(value, WHOLE)
        return whole.to_local(grad_placements=(Partial(),)), ColumnInput(ALONE)
    if not sums_gradient_of(module, setup.group, value):
        return value, ColumnInput(setup.group, gather_dim)
    if gather_dim is not None:
        raise PlanError(
            f"{name_of(module)}: the input is laid out as {placement_name(setup.input_layout)} by this style, but a "
            f"SharedInput above has made it whole; leave input_layouts at Replicate(), or take the SharedInput out of "
            f"the plan"
        )
    return value, ColumnInput(ALONE, factor=setup.group.size)


def column(value: Tensor, weight: Tensor, bias: Tensor | None, layout: ColumnInput) -> Tensor:
    """Return this rank's output features: ``value @ weight.T + bias`` with its rows of the weight and of the bias.

    Args:
        value: what every rank has, or a shard of it, as the layout says.
        weight: a DTensor or a plain shard, ``(local outputs, inputs)``; its gradient is of the same kind.
        bias: this rank's part of the bias, or None.
        layout: how the input is laid out.
    """
    return _column(*_operands(value, weight, bias), layout)


def row(
    value: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup, scatter_dim: int | None = None
) -> Tensor:
    """Return the ranks' sum of ``value @ weight.T``, plus the bias, with this rank's columns of the weight.

    Args:
        value: this rank's input features.
        weight: a DTensor or a plain shard, ``(outputs, local inputs)``; its gradient is of the same kind.
        bias: the whole bias, which counts once, or None. Its gradient is the whole one, on every rank.
        group: over whom the output is summed.
        scatter_dim: keep only this rank's shard of the sum, along this dim.
    """
    return _row(*_operands(value, weight, bias), group, scatter_dim)


def _operands(value: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands as the functions below take them."""
    # The compiler makes no DTensors in a backward of ours, and moves gradients by itself.
    if torch.compiler.is_compiling():
        return autocast_value(value), local_shard(weight), None if bias is None else local_shard(bias)
    if in_function_transform():
        raise MeshError(
            "the fast parallel styles do not take part in transforms of torch.func, such as grad, vmap and jvp; leave "
            "the layers that it passes through out of the plan, or use loss.backward()"
        )
    return autocast_value(value), weight, bias


def _refuse_double_backward() -> None:
    """Refuse second derivatives, which would leave out the collectives."""
    if torch.is_grad_enabled():
        raise MeshError(
            "the fast parallel styles have no second derivative, and backward was called with "
            "create_graph=True; leave the layers that it passes through out of the plan"
        )


def _rows(tensor: Tensor) -> Tensor:
    """Return one row for each token."""
    return tensor.reshape(-1, tensor.shape[-1])


def _conjugate(tensor: Tensor) -> Tensor:
    return tensor.conj() if tensor.is_complex() else tensor


def _input_part(rows: Tensor, mine: Tensor, factor: int = 1) -> Tensor:
    """Return a multiple of this rank's part of the gradient of a layer's input, from its shard of the weight, in a new tensor."""
    weight = _conjugate(mine)
    if factor == 1:
        return rows @ weight
    return torch.addmm(rows.new_empty(()), rows, weight, beta=0, alpha=factor)


def _parameter_gradients(
    now: tuple[bool, ...], rows: Tensor, value: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias, from the rows of the output's, each of the same kind as its parameter.

    ``now`` says which this pass is for: of the input, the weight and, where there is one, the bias.
    """
    weight_gradient = bias_gradient = None
    if now[1] and value is not None and weight is not None:
        weight_gradient = _gradient(weight, rows.t() @ _conjugate(_rows(value)))
    if bias is not None and now[2]:
        bias_gradient = _gradient(bias, rows.sum(0))
    return weight_gradient, bias_gradient


def _gradient(parameter: Tensor, local: Tensor) -> Tensor:
    return gradient_like(parameter, local) if isinstance(parameter, DTensor) else local


class _Column(torch.autograd.Function):
    """``gather(x) @ W.T + b`` with this rank's rows of W; the input's gradient is summed while W's is computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, layout: ColumnInput) -> Tensor:
        shard = value = synchronous(value)
        if layout.gather_dim is not None:
            value = all_gather(shard, layout.group, layout.gather_dim)
        mine, added = autocast_shard(weight, value), None if bias is None else autocast_shard(bias, value)
        _keep(ctx, shard if layout.gather_again else value, weight, bias, mine)
        ctx.layout = layout
        return as_non_view(F.linear(value, mine, added))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        now = grads_wanted_by_this_pass(ctx)
        value, weight, bias, mine = ctx.saved_tensors
        group, gather_dim, factor, gather_again = ctx.layout
        mine = local_tensor(weight) if mine is None else mine
        shape, rows = gradient.shape, _rows(synchronous(gradient))
        pending = gathering = None
        if now[1] and value is not None and gather_again and gather_dim is not None:
            gathering = start_all_gather(value, group, gather_dim)
        if now[0]:
            part = _input_part(rows, mine, factor).view(*shape[:-1], mine.shape[1])
            if gather_dim is None:
                pending = start_all_reduce(part, group, mine=True)
            else:
                pending = start_reduce_scatter(part, group, gather_dim)
        if gathering is not None:
            value = gathering.wait()
        gradients = _parameter_gradients(now, rows, value, weight, bias)
        # Contiguous: a pipeline sends it to the stage before as it is.
        return None if pending is None else pending.wait().contiguous(), *gradients, None


class _Row(torch.autograd.Function):
    """``reduce(x @ W.T) + b`` with this rank's columns of W and of x; the reduction is done when this returns."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: RankGroup,
        scatter_dim: int | None,
    ) -> Tensor:
        value = synchronous(value)
        mine = autocast_shard(weight, value)
        _keep(ctx, value, weight, bias, mine)
        ctx.group, ctx.scatter_dim, ctx.gathered = group, scatter_dim, None
        output = F.linear(value, mine)
        if scatter_dim is None:
            output = all_reduce(output, group, mine=True)
        else:
            output = reduce_scatter(output, group, scatter_dim)
        if bias is not None:
            added = autocast_shard(bias, value)
            if scatter_dim == output.ndim - 1 and group.size > 1:
                width = output.shape[-1]
                added = added.narrow(0, group.rank * width, width)
            # After the sum: the bias counts once. In place, unless somebody may have kept the sum.
            output = output + added if needs_functional_collectives(output) else output.add_(added)
        return as_non_view(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        now = grads_wanted_by_this_pass(ctx)
        value, weight, bias, mine = ctx.saved_tensors
        mine = local_tensor(weight) if mine is None else mine
        whole = synchronous(gradient)
        if ctx.scatter_dim is not None:
            # The whole gradient also makes the bias' gradient the same, and whole, on every rank.
            whole = _gathered_gradient(ctx, gradient, later=ctx.needs_input_grad[1] and not now[1])
        rows, input_gradient = _rows(whole), None
        if now[0]:
            input_gradient = _input_part(rows, mine).view(*whole.shape[:-1], mine.shape[1])
        return input_gradient, *_parameter_gradients(now, rows, value, weight, bias), None, None


def _gathered_gradient(ctx: Any, gradient: Tensor, *, later: bool) -> Tensor:
    """Return all shards of the output's gradient; kept from the pass for the input to that for the weight."""
    known, ctx.gathered = ctx.gathered, None
    if known is not None and known[0] is gradient:
        whole: Tensor = known[1]
    else:
        whole = all_gather(synchronous(gradient), ctx.group, ctx.scatter_dim)
    if later:
        ctx.gathered = gradient, whole
    return whole


def _keep(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, mine: Tensor) -> None:
    """Save what the backward will need: not the input when the weight is frozen, this rank's shard where it was cast."""
    needs_value, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(
        value if needs_weight else None,
        weight if needs_value or needs_weight else None,
        bias,
        mine if needs_value and mine.dtype is not weight.dtype else None,
    )


# The functions to call: torch leaves ``apply`` without types.
_column: Callable[[Tensor, Tensor, Tensor | None, ColumnInput], Tensor] = _Column.apply
_row: Callable[[Tensor, Tensor, Tensor | None, RankGroup, int | None], Tensor] = _Row.apply
