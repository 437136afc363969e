"""The dry run: what a plan would do to a model, with no mesh and nothing allocated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from namedmesh.errors import listing
from namedmesh.plan.tables import Table, as_text
from namedmesh.tensor_parallel.placements import placement_name
from namedmesh.tensor_parallel.plan import laid_out, resolve

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from namedmesh.tensor_parallel.plan import Plan

_Details = TypeVar("_Details", bound="Hashable")


@dataclass(frozen=True)
class Row:
    """One parameter of a module in the plan, or the module itself if its style touches no parameters.

    Attributes:
        module: its fully qualified name; empty for the model.
        style: the name of the style's class.
        parameter: the parameter's name in the module; empty if the style has none.
        placement: ``"Shard(0)"``, ``"Replicate()"``, ``"?"`` if only the style knows, or empty.
        global_shape: the whole parameter.
        local_shape: what each rank holds.
    """

    module: str
    style: str
    parameter: str
    placement: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The parameter's fully qualified name."""
        return f"{self.module}.{self.parameter}".lstrip(".")


@dataclass(frozen=True)
class PlanReport:
    """What a plan does: a table when printed.

    Attributes:
        tp_size: the number of ranks.
        rows: what the plan names, in the order of the plan.
        unsharded: the names and shapes of the parameters that every rank keeps whole, outside the plan.
        parameters: how many numbers the model's parameters have.
        parameters_per_rank: how many of them each rank holds under the plan.
        dropouts: the modules that drop out: between sharded layers the ranks need random numbers of their own.
    """

    tp_size: int
    rows: tuple[Row, ...]
    unsharded: tuple[tuple[str, tuple[int, ...]], ...]
    parameters: int
    parameters_per_rank: int
    dropouts: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = ("module", "style", "parameter", "placement", "global", "local")
        rows = []
        for row in self.rows:
            shapes = (_shape(row.global_shape), _shape(row.local_shape)) if row.parameter else ("", "")
            rows.append((row.module or "(model)", (row.style, row.parameter, row.placement, *shapes)))
        for name, shape in self.unsharded:
            rows.append((name, ("-", "", "not in the plan", _shape(shape), _shape(shape))))
        folded = [(name, *cells) for name, cells in fold(rows)]
        text = f"{as_text(Table(columns, tuple(folded)))}\n{self._total()}"
        if self.tp_size == 1:
            return text
        whole = (self.parameters_per_rank * self.tp_size - self.parameters) // (self.tp_size - 1)
        return f"{text}, {whole:,} of them whole{dropout_note(self.dropouts)}"

    def _total(self) -> str:
        return (
            f"{self.parameters_per_rank:,} of {self.parameters:,} parameters on each of {self.tp_size} ranks"
        )


def fold(rows: Iterable[tuple[str, _Details]]) -> list[tuple[str, _Details]]:
    """Fold rows whose names differ in one number, and in nothing else, where the numbers follow each other.

    Example:
        >>> fold([("layers.0.up", 1), ("layers.1.up", 1), ("layers.3.up", 1), ("norm", 2)])
        [('layers.0-1.up', 1), ('layers.3.up', 1), ('norm', 2)]
    """
    folded = list(rows)
    depth = max((name.count(".") for name, _ in folded), default=0)
    for place in range(depth, -1, -1):
        runs: dict[tuple[str, _Details], list[int]] = {}
        result: list[tuple[str, _Details, list[int]]] = []
        for name, details in folded:
            parts = name.split(".")
            if place >= len(parts) or re.fullmatch(r"[0-9]+", parts[place]) is None:
                result.append((name, details, []))
                continue
            number = int(parts[place])
            pattern = ".".join([*parts[:place], "{}", *parts[place + 1 :]])
            run = runs.get((pattern, details), [])
            if not run or run[-1] != number - 1:
                run = runs[pattern, details] = []
                result.append((pattern, details, run))
            run.append(number)
        folded = [
            (name.replace("{}", "-".join(map(str, dict.fromkeys((*run[:1], *run[-1:]))))), details)
            for name, details, run in result
        ]
    return folded


def plan_report(
    model: nn.Module,
    mesh_or_tp_size: DeviceMesh | int,
    plan: Plan,
    *,
    must_divide: Mapping[str, int] | None = None,
) -> PlanReport:
    """Report what ``parallelize`` would do, without doing it: no communication, and a meta model will do.

    Args:
        model: the model, not parallelized yet.
        mesh_or_tp_size: the mesh that ``parallelize`` would get, or just the number of its ranks.
        plan: the plan.
        must_divide: as for ``parallelize``.

    Returns:
        The report, the same on every rank.

    Raises:
        PlanError: the one that ``parallelize`` would raise.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, plan_report
        >>> with torch.device("meta"):
        ...     model = torch.nn.ModuleDict({"w1": torch.nn.Linear(8, 16), "w2": torch.nn.Linear(16, 8)})
        >>> print(plan_report(model, 2, {"w1": ColwiseParallel(), "w2": RowwiseParallel()}))
        module  style            parameter  placement    global  local
        w1      ColwiseParallel  weight     Shard(0)     16x8    8x8
        w1      ColwiseParallel  bias       Shard(0)     16      8
        w2      RowwiseParallel  weight     Shard(1)     8x16    8x8
        w2      RowwiseParallel  bias       Replicate()  8       8
        144 of 280 parameters on each of 2 ranks, 8 of them whole
    """
    entries, _ = resolve(model, mesh_or_tp_size, plan, must_divide)
    tp_size = mesh_or_tp_size.size() if isinstance(mesh_or_tp_size, DeviceMesh) else mesh_or_tp_size
    rows: list[Row] = []
    held: dict[int, int] = {}  # of each parameter that the plan touches, how many numbers a rank has
    for entry in entries:
        style, before = type(entry.style).__name__, len(rows)
        for name, parameter, placement in laid_out(entry):
            shape, local = tuple(parameter.shape), list(parameter.shape)
            if isinstance(placement, Shard):
                local[placement.dim] //= tp_size
            layout = "?" if placement is None else placement_name(placement)
            rows.append(Row(entry.fqn, style, name, layout, shape, tuple(local)))
            held[id(parameter)] = prod(local)
        if len(rows) == before:
            rows.append(Row(entry.fqn, style, "", "", (), ()))
    unsharded, total, per_rank = [], 0, 0
    for fqn, parameter in model.named_parameters():
        total += parameter.numel()
        per_rank += held.get(id(parameter), parameter.numel())
        if id(parameter) not in held:
            unsharded.append((fqn, tuple(parameter.shape)))
    return PlanReport(tp_size, tuple(rows), tuple(unsharded), total, per_rank, dropouts_of(model))


def dropouts_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules of a model that drop something out."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:  # noqa: SLF001  their common base
            found.append(name)
    return tuple(found)


def dropout_note(names: tuple[str, ...]) -> str:
    """Return a line about dropout between sharded layers; nothing where there is none."""
    if not names:
        return ""
    return (
        f"\ndropout in {listing(names, 4)}: between sharded layers all ranks draw one mask for their features, unless "
        f"each draws from a stream of its own: namedmesh.training.streams"
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
