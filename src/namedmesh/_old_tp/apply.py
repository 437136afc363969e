"""``parallelize``: torch's ``parallelize_module``, on a plan that has been checked first."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
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

from namedmesh._torch import apply_style, avoid_native_encoders
from namedmesh.tensor_parallel.gradient_comparison import GradientComparison
from namedmesh.tensor_parallel.gradient_sums import reduce_before_use
from namedmesh.tensor_parallel.module_setup import NAME, check_divides, same_layout, sharded_dim
from namedmesh.tensor_parallel.placements import accepts_sharded_module, whole_sides
from namedmesh.tensor_parallel.plan import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.placements import Entry
    from namedmesh.tensor_parallel.plan import Plan


Move: TypeAlias = "tuple[Placement | None, Placement | None]"
"""From one layout to another."""


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    src_data_rank: int | None = 0,
    must_divide: Mapping[str, int] | None = None,
    check: bool = True,
) -> nn.Module:
    """Apply tensor parallelism to a model, strictly: a plan that does not fit changes nothing.

    All the ranks of ``mesh`` call it with the same plan, once for a model, and before ``fully_shard``. A linear with
    LoRA adapters is named as if it had none.

    What a forward does with the parameters that the plan leaves out, or with what the sharded layers make, is not
    guessed: at the first backward the ranks compare what is the same on all of them, the gradients of whole
    parameters, and the inputs and outputs of sharded layers that are whole. See :func:`compare_gradients`, and
    :func:`verify` for a comparison with the whole model.

    Args:
        model: the model; changed in place. It may be on the meta device.
        mesh: a one-dimensional mesh, such as ``mesh["tp"]``.
        plan: a parallel style for the model itself, or a dict of module names to parallel styles. In a name
            every token may be a pattern (``"layers.*.attention.wq"``); ``""`` is the model. A submodule that
            is set to None, as on pipeline stages that do not have it, may be named all the same.
        src_data_rank: the group rank whose values everybody gets a part of; None to let each rank take its
            own copy, without communication.
        must_divide: further sizes that the number of ranks has to divide, by a name for the message, such as
            ``{"kv heads": 2}``.
        check: compare at the first backward: one small collective. False leaves it out, for a model whose
            gradients the caller sums over the axis after the backward.

    Returns:
        The model. Its sharded parameters are DTensors; parameters that were tied are still tied. A Hugging Face
        model's ``save_pretrained``, called by every rank of the default group, writes whole tensors, on rank 0.

    Raises:
        PlanError: with every problem there is: the mesh has several axes, a name matches nothing, two names
            match one module, a style does not fit a module, features, vocabulary or heads do not divide, a column
            layer is several layers in one and the plan does not say how they lie, a tie would break, or the model
            is already parallelized.
        GradientError: in the first backward, on every rank: something that is whole on every rank differs, by name. Under
            ``torch.compile``, and in the two passes of zero-bubble schedules, at the optimizer's first step.

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
    entries, ties = resolve(model, mesh, plan, must_divide)
    with _restored_on_error(model):
        for entry in entries:
            applied = _apply_entry(entry, mesh, src_data_rank)
            if entry.module is model:
                model = applied
        for tie in ties:
            (_, first, own_name), *others = tie
            for _, module, name in others:
                module.register_parameter(name, first.get_parameter(own_name))
    reduce_before_use(model)
    # Ranks that have data of their own have other gradients of everything.
    own_data = any(getattr(entry.style, "ranks_have_own_data", False) for entry in entries)
    if check and mesh.size() > 1 and not own_data:
        sides = ((entry.fqn, entry.module, *whole_sides(entry.style)) for entry in entries)
        GradientComparison(model, mesh, sides)
    avoid_native_encoders(model)
    if hasattr(model, "save_pretrained"):  # of a Hugging Face model
        vars(model)["save_pretrained"] = partial(_save_pretrained, model)
    return model


def _apply_entry(entry: Entry, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    """Apply one style through torch, keeping what it forgets: which parameters are frozen."""
    trainable = {name: parameter.requires_grad for name, parameter in entry.module.named_parameters()}
    setattr(entry.module, NAME, entry.fqn)
    _install_guards(entry.module, entry.style, mesh.size())
    # One style at a time: with a dict, torch drops src_data_rank at the name "".
    apply = apply_style if accepts_sharded_module(entry.style) else parallelize_module
    applied = apply(entry.module, mesh, entry.style, src_data_rank=src_data_rank)
    for name, parameter in applied.named_parameters():
        parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
    return applied


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restore every module if the block fails: no model is left half sharded."""
    before = []
    for module in model.modules():
        state = vars(module).copy()
        for name, value in state.items():
            if isinstance(value, dict | set | list):  # parameters, hooks and submodules stand in such
                state[name] = copy.copy(value)
        before.append((module, type(module), state))
    try:
        yield
    except BaseException:
        for module, kind, state in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(state)
        raise


def _save_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Write what ``save_pretrained`` of the class would of the model that is not sharded, one parameter after the other."""
    writes = is_main_process and dist.get_rank() == 0
    whole = _whole(model.state_dict() if state_dict is None else state_dict, keep=writes)
    saved = type(model).save_pretrained(model, save_directory, writes, whole, *arguments, **options)
    dist.barrier()  # nobody reads what is being written
    return saved


def _whole(state_dict: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return the tensors of a state dict, gathered on the CPU; those that share memory still do."""
    whole: dict[str, Any] = {}
    gathered: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for name, value in state_dict.items():
        result = value
        if isinstance(value, DTensor):
            place = (value.to_local().data_ptr(), value.shape)
            if place not in gathered:
                full = value.full_tensor().detach()
                gathered[place] = full.cpu() if keep else full[:0]
            result = gathered[place]
        if keep:
            whole[name] = result
    return whole


# Checks in front of torch's own styles: left alone, torch splits a length into unequal shards, and the next gather of
# them ends the process inside gloo.


def _install_guards(module: nn.Module, style: ParallelStyle, tp_size: int) -> None:
    """Register the checks that a style needs; before the style itself, so that they run before its hooks."""
    inputs, outputs = _moves_of(style)
    if tp_size == 1:
        return

    def check_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        for place, move in inputs.items():
            _check_move(module, f"input {place!r}", given.get(place), move, tp_size)

    def check_outputs(module: nn.Module, _args: Any, output: Any) -> None:
        for value, move in zip(output if isinstance(output, tuple) else (output,), outputs, strict=False):
            _check_move(module, "the output", value, move, tp_size)

    if inputs:
        module.register_forward_pre_hook(check_inputs, with_kwargs=True)
    if outputs:
        module.register_forward_hook(check_outputs)


def _moves_of(style: ParallelStyle) -> tuple[dict[int | str, Move], list[Move]]:
    """Return how a style moves inputs, by place or name, and outputs."""
    if isinstance(style, PrepareModuleInputOutput):
        return _moves_of(style.prepare_module_input)[0], _moves_of(style.prepare_module_output)[1]
    inputs: dict[int | str, Move] = {}
    outputs: list[Move] = []
    if isinstance(style, PrepareModuleInput):
        inputs.update(
            enumerate(zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False))
        )
        for name, layout in style.input_kwarg_layouts.items():
            inputs[name] = layout, style.desired_input_kwarg_layouts.get(name)
    elif isinstance(style, PrepareModuleOutput):
        outputs += zip(style.output_layouts, style.desired_output_layouts, strict=False)
    elif isinstance(style, SequenceParallel):
        inputs[0] = None, style.sequence_sharding[0]  # a plain input counts as a shard already
    elif isinstance(style, ColwiseParallel | RowwiseParallel) and type(style).__module__.startswith("torch."):
        # The fast styles look for themselves. Here the output is still a DTensor of the global shape.
        outputs += [(None, wanted) for wanted in style.output_layouts]
    return inputs, outputs


def _check_move(module: nn.Module, what: str, value: object, move: Move, tp_size: int) -> None:
    """Check one redistribution of a style: it may not split a dim into unequal shards."""
    layout, wanted = move
    if not isinstance(value, torch.Tensor) or not isinstance(wanted, Shard):
        return
    if isinstance(value, DTensor):
        layout = value.placements[0]
    dim = sharded_dim(wanted, value.ndim)
    if dim is not None and layout is not None and not same_layout(layout, wanted, value.ndim):
        # The dim that gets sharded is whole at present: the local length is the global one.
        check_divides(module, what, value.shape, dim, tp_size)
