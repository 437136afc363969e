"""Checks in front of torch's own styles: a length that cannot be split is refused before it is split.

Left alone, torch splits it into unequal shards, and the next gather of them ends the process inside gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from namedmesh.tensor_parallel.module_setup import check_divides, same_layout, sharded_dim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement


def install_guards(module: nn.Module, style: ParallelStyle, tp_size: int) -> None:
    """Register the checks that a style needs; before the style itself, so that they run before its hooks."""
    if tp_size == 1:
        return
    if isinstance(style, PrepareModuleInput):
        _guard_inputs(module, style, tp_size)
    elif isinstance(style, PrepareModuleOutput):
        _guard_outputs(module, style.output_layouts, style.desired_output_layouts, tp_size)
    elif isinstance(style, PrepareModuleInputOutput):
        install_guards(module, style.prepare_module_input, tp_size)
        install_guards(module, style.prepare_module_output, tp_size)
    elif isinstance(style, SequenceParallel):
        _guard_sequence(module, style, tp_size)
    elif isinstance(style, ColwiseParallel | RowwiseParallel) and type(style).__module__.startswith("torch."):
        # The fast styles look for themselves. Here the output is still a DTensor of the global shape.
        _guard_outputs(module, (None,), style.output_layouts, tp_size)


def _guard_inputs(module: nn.Module, style: PrepareModuleInput, tp_size: int) -> None:
    layouts, desired = style.input_layouts or (), style.desired_input_layouts or ()

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index, (value, layout, wanted) in enumerate(zip(args, layouts, desired, strict=False)):
            _check_move(module, f"input {index}", value, layout, wanted, tp_size)
        for name, layout in style.input_kwarg_layouts.items():
            wanted = style.desired_input_kwarg_layouts.get(name)
            _check_move(module, f"input {name!r}", kwargs.get(name), layout, wanted, tp_size)

    module.register_forward_pre_hook(check, with_kwargs=True)


def _guard_outputs(
    module: nn.Module,
    layouts: Sequence[Placement | None],
    desired: Sequence[Placement | None],
    tp_size: int,
) -> None:
    def check(module: nn.Module, _args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        for value, layout, wanted in zip(outputs, layouts, desired, strict=False):
            _check_move(module, "the output", value, layout, wanted, tp_size)

    module.register_forward_hook(check)


def _guard_sequence(module: nn.Module, style: SequenceParallel, tp_size: int) -> None:
    (wanted,) = style.sequence_sharding

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        # A plain input counts as a shard already; only a DTensor of another layout gets sharded.
        if args and isinstance(args[0], DTensor):
            _check_move(module, "input 0", args[0], None, wanted, tp_size)

    module.register_forward_pre_hook(check)


def _check_move(  # noqa: PLR0917  one line at each call
    module: nn.Module,
    what: str,
    value: object,
    layout: Placement | None,
    wanted: Placement | None,
    tp_size: int,
) -> None:
    """Check one redistribution of a style: it may not split a dim into unequal shards."""
    if not isinstance(value, torch.Tensor) or not isinstance(wanted, Shard):
        return
    if isinstance(value, DTensor):
        layout = value.placements[0]
    dim = sharded_dim(wanted, value.ndim)
    if dim is None or layout is None or same_layout(layout, wanted, value.ndim):
        return
    # The dim that gets sharded is whole at present: the local length is the global one.
    check_divides(module, what, value.shape, dim, tp_size)
