"""Report how a tensor-parallel plan shards a model, without applying it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from torch import nn
from torch.distributed.tensor import Shard

from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.tensor_parallel.plan_checks import resolve_plan
from namedmesh.tensor_parallel.plan_entries import Plan, format_placement


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
        tp_size = one_axis(tp_size, "tp", "plan_report").size()
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
