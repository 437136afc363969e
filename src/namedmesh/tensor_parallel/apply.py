"""``parallelize``: torch's ``parallelize_module``, on a plan that has been checked first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from namedmesh._torch import avoid_native_encoders
from namedmesh.tensor_parallel.collectives import check_divides
from namedmesh.tensor_parallel.gradients import compare_gradients, sum_before_steps
from namedmesh.tensor_parallel.plan import PARALLELIZED, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.plan import Entry, Plan


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

    All the ranks of ``mesh`` call it with the same plan, once for a model, and before ``fully_shard``. A linear with
    adapters (LoRA) is named as what is inside: ``"layers.*.wq.base_layer"``.

    What a forward does with the parameters that the plan leaves out, or with what the sharded layers make, is not
    guessed: the ranks compare the gradients of whole parameters, see :func:`compare_gradients`; :func:`verify` compares with
    the whole model.

    Args:
        model: the model; changed in place. It may be on the meta device.
        mesh: a one-dimensional mesh, such as ``mesh["tp"]``.
        plan: a parallel style for the model itself, or a dict of module names to parallel styles. In a name
            every token may be a pattern (``"layers.*.attention.wq"``); ``""`` is the model.
        src_data_rank: the group rank whose values everybody gets a part of; None to let each rank take its
            own copy, without communication.
        must_divide: further sizes that the number of ranks has to divide, by a name for the message, such as
            ``{"heads": 32}``.
        missing: what a name means that matches nothing: ``"raise"`` a PlanError, or ``"ignore"`` it, for a stage of a
            pipeline, which has some of the modules.
        check: compare gradients. False leaves it out, for a model whose gradients the caller sums over the axis after
            the backward.

    Returns:
        The model. Its sharded parameters are DTensors; parameters that were tied are still tied.

    Raises:
        PlanError: with every problem there is: the mesh has several axes, a name matches nothing, two names
            match one module, a style does not fit a module, features, vocabulary or heads do not divide, a row layer's input
            comes from several layers in one, a tie would break, or the model is already parallelized.
        GradientError: in the first backward, or before a step, on every rank: something that is whole on every rank differs.

    Example:
        Under plain python, a world of one, rank 0 has all 16 rows of ``w1``; on 2 ranks each has 8 of them:

        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize
        >>> mesh = namedmesh.init_mesh(tp=-1, device="cpu")
        >>> model = torch.nn.ModuleDict({"w1": torch.nn.Linear(8, 16), "w2": torch.nn.Linear(16, 8)})
        >>> model = parallelize(model, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        >>> tuple(model["w1"].weight.to_local().shape), tuple(model["w1"].weight.shape)
        ((16, 8), (16, 8))
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    entries, ties = resolve(model, mesh, plan, must_divide, missing)
    for entry in entries:
        guard = _Guard(entry, mesh.size())
        if guard.inputs:
            entry.module.register_forward_pre_hook(guard.check_inputs, with_kwargs=True)
        if guard.outputs:
            entry.module.register_forward_hook(guard.check_outputs)
        # One style at a time: with a dict, torch drops src_data_rank at the name "".
        frozen = [name for name, each in entry.module.named_parameters() if not each.requires_grad]
        applied = parallelize_module(entry.module, mesh, entry.style, src_data_rank=src_data_rank)
        for name in frozen:  # which some of torch's styles forget
            applied.get_parameter(name).requires_grad_(False)
        setattr(applied, PARALLELIZED, type(entry.style).__name__)
        if entry.module is model:
            model = applied
    for (_, first, own_name), *others in ties:
        for _, module, name in others:
            module.register_parameter(name, first.get_parameter(own_name))
    # Ranks that have data of their own have other gradients of everything.
    if check and not any(getattr(entry.style, "ranks_have_own_data", False) for entry in entries):
        compare_gradients(model, mesh)
    sum_before_steps()
    avoid_native_encoders(model)
    return model


Move: TypeAlias = "tuple[Placement | None, Placement | None]"
"""From one layout to another."""


class _Guard:
    """Checks in front of torch's own styles, which split a length into unequal shards; the next gather of them ends the process.

    The short ways check for themselves.
    """

    def __init__(self, entry: Entry, tp_size: int) -> None:
        self.tp_size = tp_size
        self.inputs: dict[int | str, Move] = {}
        self.outputs: list[Move] = []
        takes_short_way = getattr(entry.style, "takes_short_way", None)
        if tp_size > 1 and not (takes_short_way and takes_short_way(entry.module)):
            self.add(entry.style)

    def add(self, style: ParallelStyle) -> None:
        """Note how a style moves inputs, by place or name, and outputs."""
        if isinstance(style, PrepareModuleInputOutput):
            self.add(style.prepare_module_input)
            self.add(style.prepare_module_output)
        elif isinstance(style, PrepareModuleInput):
            moves = zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False)
            self.inputs.update(enumerate(moves))
            for name, layout in style.input_kwarg_layouts.items():
                self.inputs[name] = layout, style.desired_input_kwarg_layouts.get(name)
        elif isinstance(style, PrepareModuleOutput):
            self.outputs += zip(style.output_layouts, style.desired_output_layouts, strict=False)
        elif isinstance(style, SequenceParallel):
            self.inputs[0] = None, style.sequence_sharding[0]  # a plain input counts as a shard already
        elif isinstance(style, ColwiseParallel | RowwiseParallel):
            # Before torch's hook the output is still a DTensor of the global shape.
            self.outputs += [(None, layout) for layout in style.output_layouts]

    def check_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        for place, move in self.inputs.items():
            self.check(given.get(place), move)

    def check_outputs(self, _module: nn.Module, _args: Any, output: Any) -> None:
        for value, move in zip(
            output if isinstance(output, tuple) else (output,), self.outputs, strict=False
        ):
            self.check(value, move)

    def check(self, value: object, move: Move) -> None:
        """Check that a value that is whole at present can be split into equal shards."""
        layout, wanted = move
        layout = value.placements[0] if isinstance(value, DTensor) else layout
        if layout is None or not isinstance(value, Tensor) or not isinstance(wanted, Shard):
            return
        if layout not in {wanted, Shard(wanted.dim % value.ndim)}:
            check_divides(value.shape, wanted.dim, self.tp_size)
