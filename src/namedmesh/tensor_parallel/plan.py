"""Apply a tensor-parallel plan to a model.

``parallelize`` checks the complete plan first. torch's ``parallelize_module`` then applies the
styles, one module at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from namedmesh._torch.list_operators import accept_mixed_lists
from namedmesh.mesh.internal import AxisMesh, get_axis_mesh
from namedmesh.tensor_parallel.gradients import (
    install_optimizer_step_hook,
    register_gradient_check,
    register_token_check,
)
from namedmesh.tensor_parallel.plan_checks import resolve_plan
from namedmesh.tensor_parallel.plan_entries import Plan, format_placement


def parallelize(
    model: nn.Module,
    mesh: AxisMesh,
    plan: Plan,
    *,
    src_data_rank: int | None = 0,
    must_divide: Mapping[str, int] | None = None,
    strict: bool = True,
    check_gradients: bool = True,
) -> nn.Module:
    """Apply tensor parallelism to a model; a plan that does not fit changes nothing.

    Call it before ``fully_shard``, once for each axis and module: first for the experts (``etp``, then
    ``ep``), then for the rest of the model. Sharded parameters become DTensors, tied
    parameters stay tied, and parameters outside of the plan stay plain tensors. From the first call
    on, the list operators that torch's optimizers, gradient clipping and gradient scaler use accept
    plain tensors and DTensors together.

    A plan cannot show how a forward uses the parameters that it leaves out, or the local shards
    that column layers return. Therefore the ranks compare gradients
    (:func:`register_gradient_check`); :func:`verify` compares with the full model.

    Collective: every rank of ``mesh`` must call it with the same plan.

    Args:
        model: the model; it is changed in place. It may be on the meta device.
        mesh: the NamedMesh, whose ``tp`` axis is used, or one axis of it, such as ``mesh["ep"]``.
        plan: a parallel style for the model itself, or a dict of module names to parallel styles.
            In a name every token may be a pattern (``"layers.*.attention.wq"``); ``""`` is the
            model.
        src_data_rank: the group rank whose parameter values are scattered to all ranks; None to let
            each rank keep the local shard of its own values, without communication.
        must_divide: further sizes that the number of ranks has to divide, by name, such as
            ``{"heads": 32}``.
        strict: whether a name in the plan that matches no module is a PlanError. Pass False for a
            stage of a pipeline, which has only some of the modules.
        check_gradients: whether the ranks compare gradients. Pass False for a model whose gradients
            the caller all-reduces over the axis after the backward.

    Returns:
        The model.

    Raises:
        PlanError: the plan does not fit the model; all problems at once.
        GradientError: later, before an optimizer's step, on every rank: gradients of replicated
            parameters differ.
    """
    mesh = get_axis_mesh(mesh, "tp", "parallelize")
    entries, ties = resolve_plan(model, mesh.size(), plan, must_divide, strict=strict)
    for entry in entries:
        # Some of torch's styles forget that a parameter is frozen.
        frozen = [name for name, param in entry.module.named_parameters() if not param.requires_grad]
        # One call for each module: with a dict, torch drops src_data_rank at the name "".
        applied = parallelize_module(entry.module, mesh, entry.style, src_data_rank=src_data_rank)
        for name in frozen:
            applied.get_parameter(name).requires_grad_(False)
        if entry.module is model:
            model = applied
    # Each slot of a tied parameter has got a DTensor of its own.
    for (first_module, first_name), *others in ties:
        for module, name in others:
            module.register_parameter(name, first_module.get_parameter(first_name))
    _disable_fused_encoders(model)
    if check_gradients:
        # Ranks with different tokens, as in expert parallelism, have different gradients of everything.
        if any(entry.style.ranks_have_own_data for entry in entries):
            register_token_check(model, mesh)
        else:
            register_gradient_check(model, mesh)
    install_optimizer_step_hook()
    accept_mixed_lists()
    return model


def _disable_fused_encoders(model: nn.Module) -> None:
    """Make torch's encoders call their layers in evaluation.

    Their fused kernel would read the weights of the layers, and expects them unsharded.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            # torch does not use the fused kernel if a module has a hook.
            module.register_forward_pre_hook(_do_nothing)


def _do_nothing(_module: nn.Module, _args: Any) -> None:
    """Do nothing: a forward pre-hook whose presence disables the fused encoder."""


# --- the report ---------------------------------------------------------------------------------


def plan_report(
    model: nn.Module,
    mesh_or_tp_size: AxisMesh | int,
    plan: Plan,
    *,
    must_divide: Mapping[str, int] | None = None,
    strict: bool = True,
) -> str:
    """Return a table of the placements that ``parallelize`` would give to the parameters.

    It does not change the model, which may be on the meta device, and does not communicate.

    Args:
        model: the model, not parallelized.
        mesh_or_tp_size: the mesh that ``parallelize`` would get, or only the number of its ranks.
        plan: as for :func:`parallelize`.
        must_divide: as for :func:`parallelize`.
        strict: as for :func:`parallelize`.

    Returns:
        A line for each parameter, with its global and its local shape, and the number of parameters
        on each rank. Layers whose names differ only in a number share a line.

    Raises:
        PlanError: the error that ``parallelize`` would raise.
    """
    tp_size = mesh_or_tp_size
    if not isinstance(tp_size, int):
        tp_size = get_axis_mesh(tp_size, "tp", "plan_report").size()
    entries, _ = resolve_plan(model, tp_size, plan, must_divide, strict=strict)
    rows = [("module", "style", "parameter", "placement", "global", "local")]
    local_numels: dict[nn.Parameter, int] = {}
    for entry in entries:
        module_cells = (entry.fqn or "(model)", entry.style.name)
        placed = list(entry.iter_placements(tp_size))
        if not placed:
            rows.append((*module_cells, "", "", "", ""))
        for name, param, placement in placed:
            local_shape = list(param.shape)
            if isinstance(placement, Shard):
                local_shape[placement.dim] //= tp_size
            local_numels[param] = prod(local_shape)
            shapes = (_format_shape(param.shape), _format_shape(local_shape))
            rows.append((*module_cells, name, format_placement(placement), *shapes))
    # Tied parameters count once: named_parameters() lists them under their first name only.
    total = 0
    per_rank = 0
    for fqn, param in model.named_parameters():
        total += param.numel()
        per_rank += local_numels.get(param, param.numel())
        if param not in local_numels:
            shape = _format_shape(param.shape)
            rows.append((fqn, "-", "", format_placement(None), shape, shape))
    summary = f"{per_rank:,} of {total:,} parameters on each of {tp_size} ranks"
    if tp_size > 1:
        # A replicated parameter counts tp_size times in the sum over the ranks, a sharded one once.
        replicated = (per_rank * tp_size - total) // (tp_size - 1)
        summary += f", {replicated:,} of them replicated"
    return "\n".join([*_format_rows(rows), summary])


def _format_rows(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; modules that differ only in a number share a line."""
    names_by_row: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, *cells in rows:
        row = (re.sub(r"\b\d+\b", "*", name), *cells)
        names_by_row[row].append(name)
    merged = []
    for row, names in names_by_row.items():
        # A single module keeps its number.
        merged.append(row if len(names) > 1 else (names[0], *row[1:]))
    widths = [max(map(len, column)) for column in zip(*merged, strict=True)]
    for row in merged:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _format_shape(shape: Sequence[int]) -> str:
    """Format a shape, such as ``64x32``."""
    return "x".join(map(str, shape))
