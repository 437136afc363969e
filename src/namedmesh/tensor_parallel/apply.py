"""``parallelize``: torch's ``parallelize_module``, on a plan that has been checked first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
    parallelize_module,
)

from namedmesh.tensor_parallel.collectives import check_divides
from namedmesh.tensor_parallel.gradients import compare_gradients, sum_before_steps
from namedmesh.tensor_parallel.plan import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.plan import Plan


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    src_data_rank: int | None = 0,
    must_divide: Mapping[str, int] | None = None,
    missing: str = "raise",
    check: bool = True,
) -> nn.Module:
    """Apply tensor parallelism to a model, strictly: a plan that does not fit changes nothing.

    All the ranks of ``mesh`` call it with the same plan, once for a model, and before ``fully_shard``. Sharded parameters become
    DTensors; tied ones stay tied. What a forward does with the parameters that the plan leaves out, or with what the sharded
    layers make, is not guessed: the ranks compare gradients (:func:`compare_gradients`), :func:`verify` compares with the whole model.

    Args:
        model: the model; changed in place, and returned. It may be on the meta device.
        mesh: a one-dimensional mesh, such as ``mesh["tp"]``.
        plan: a parallel style for the model itself, or a dict of module names to parallel styles. In a name
            every token may be a pattern (``"layers.*.attention.wq"``); ``""`` is the model.
        src_data_rank: the group rank whose values everybody gets a part of; None to let each rank take its
            own copy, without communication.
        must_divide: further sizes that the number of ranks has to divide, such as ``{"heads": 32}``.
        missing: what a name means that matches nothing: ``"raise"`` a PlanError, or ``"ignore"`` it, for a stage of a pipeline.
        check: compare gradients. False is for a model whose gradients the caller sums over the axis after the backward.

    Raises:
        PlanError: with every problem there is.
        GradientError: in the first backward, or before a step, on every rank: something that is whole on every rank differs.
    """
    entries, ties = resolve(model, mesh, plan, must_divide, missing)
    for entry in entries:
        short_way = getattr(entry.style, "short_way", None)
        if mesh.size() > 1 and not (short_way and short_way(entry.module)):
            _refuse_uneven(entry.style, entry.module, mesh.size())
        # One style at a time: with a dict, torch drops src_data_rank at the name "".
        frozen = [name for name, each in entry.module.named_parameters() if not each.requires_grad]
        applied = parallelize_module(entry.module, mesh, entry.style, src_data_rank=src_data_rank)
        for name in frozen:  # which some of torch's styles forget
            applied.get_parameter(name).requires_grad_(False)
        if entry.module is model:
            model = applied
    for (first, own_name), *others in ties:
        for module, name in others:
            module.register_parameter(name, first.get_parameter(own_name))
    # Ranks that have data of their own have other gradients of everything.
    if check and not any(hasattr(entry.style, "ranks_have_own_data") for entry in entries):
        compare_gradients(model, mesh)
    sum_before_steps()
    return model


# --- lengths that cannot be split ---------------------------------------------------------------------------
# torch's styles split them into unequal shards, and the next gather of those ends the process.

Move: TypeAlias = "tuple[Placement | None, Placement | None]"
"""From one layout to another."""


def _refuse_uneven(style: ParallelStyle, module: nn.Module, tp_size: int) -> None:
    """Check what a module gets and makes before a style of torch's splits it."""
    inputs, outputs = _moves(style)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        for place, move in inputs.items():
            _check(given.get(place), move, tp_size)

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        values = output if isinstance(output, tuple) else (output,)
        for value, move in zip(values, outputs, strict=False):
            _check(value, move, tp_size)

    if inputs:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if outputs:
        module.register_forward_hook(after)


def _moves(style: Any) -> tuple[dict[int | str, Move], list[Move]]:
    """Return how a style moves inputs, by place or name, and outputs."""
    if isinstance(style, PrepareModuleInputOutput):
        return _moves(style.prepare_module_input)[0], _moves(style.prepare_module_output)[1]
    if isinstance(style, PrepareModuleInput):
        moves = zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False)
        inputs: dict[int | str, Move] = dict(enumerate(moves))
        for name, layout in style.input_kwarg_layouts.items():
            inputs[name] = layout, style.desired_input_kwarg_layouts.get(name)
        return inputs, []
    if isinstance(style, PrepareModuleOutput):
        return {}, [*zip(style.output_layouts, style.desired_output_layouts, strict=False)]
    if isinstance(style, SequenceParallel):
        return {0: (None, style.sequence_sharding[0])}, []  # a plain input counts as a shard already
    # Of columns and rows: before torch's hook the output is still a DTensor of the global shape.
    return {}, [(None, layout) for layout in getattr(style, "output_layouts", ())]


def _check(value: object, move: Move, tp_size: int) -> None:
    """Check that a value that is whole at present can be split into equal shards."""
    layout, wanted = move
    layout = value.placements[0] if isinstance(value, DTensor) else layout
    if layout is None or not isinstance(value, Tensor) or not isinstance(wanted, Shard):
        return
    if layout not in {wanted, Shard(wanted.dim % value.ndim)}:
        check_divides(value.shape, wanted.dim, tp_size)
