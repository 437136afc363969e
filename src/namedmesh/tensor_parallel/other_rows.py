"""Column layers that work on other rows of their weight than the ones that a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Shard, distribute_module

from namedmesh.tensor_parallel.collectives import whole_parameter
from namedmesh.tensor_parallel.linear import column, column_operand
from namedmesh.tensor_parallel.module_setup import StyleContext
from namedmesh.tensor_parallel.styles import shard_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel


def with_forward(
    style: ColwiseParallel, module: nn.Module, mesh: DeviceMesh, kind: type[nn.Module], **attributes: Any
) -> nn.Module:
    """Lay out a linear's parameters as its style says, and give it the forward of another class."""
    distribute_module(module, mesh, shard_parameters(style))
    module.__class__ = kind
    setup = StyleContext(mesh, style.input_layouts[0], Shard(-1), use_local_output=True)
    for name, value in {"_setup": setup, **attributes}.items():
        setattr(module, name, value)
    return module


def rows_of(parameter: Tensor, blocks: Sequence[int], count: int) -> Tensor:
    """Return some of the ``count`` equal blocks of rows of a parameter that every rank has whole, as a plain tensor.

    The gradient of the parameter is summed over the ranks, each of which makes the part of its own blocks.
    """
    whole = whole_parameter(parameter)
    width = whole.shape[0] // count
    first, last = blocks[0], blocks[-1]
    if list(blocks) == list(range(first, last + 1)):
        return whole.narrow(0, first * width, (last + 1 - first) * width)
    index = torch.tensor(blocks, device=whole.device)
    picked: Tensor = whole.unflatten(0, (count, width)).index_select(0, index).flatten(0, 1)
    return picked


def column_of(module: nn.Module, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a column layer of this rank's rows: as many on every rank, wherever they come from."""
    setup: StyleContext = module._setup  # type: ignore[assignment]  # noqa: SLF001  the module is one of ours
    operand = column_operand(module, setup, value)
    return column(operand.value, weight, bias, *operand[1:])
