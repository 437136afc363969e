"""Pipeline stages over ``pp``: the layers of each stage, and the stages of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from namedmesh._errors import LayoutError, OptionError
from namedmesh.layout.sizes import split_layers
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh

Layers: TypeAlias = Sequence[nn.Module] | nn.ModuleList | nn.ModuleDict

# Each rank has two stages: the stages run from the first rank to the last, and back.
V_SHAPED_SCHEDULES = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
# A backward pass first computes the gradients of activations, and later the gradients of weights.
SPLIT_BACKWARD_SCHEDULES = {*V_SHAPED_SCHEDULES, "ScheduleInterleavedZeroBubble"}


def stage_layers(
    layers: int | Layers, mesh: NamedMesh | None, *, stage: int | None = None, stages: int | None = None
) -> Any:
    """Return the layers of one pipeline stage.

    Layers are divided as evenly as possible. The longer stages come last, as the first one often
    has an embedding in addition.

    Args:
        layers: all layers of the model, or their number.
        mesh: a mesh with an axis ``pp``; None if ``stage`` and ``stages`` are given.
        stage: the index of the stage; by default this rank's, with one stage per rank of ``pp``.
        stages: the number of stages; by default the size of ``pp``.

    Returns:
        An ``nn.ModuleDict`` of the layers, or a range of indices if ``layers`` is a number. The
        keys are the indices in the full model, or the keys of ``layers`` if it is a ModuleDict, so
        that parameters have the same names in every layout.

    Raises:
        LayoutError: the stage does not exist, or there are fewer layers than stages.

    Example:
        >>> [list(stage_layers(5, None, stage=stage, stages=2)) for stage in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    if mesh is not None:
        if stages is None:
            stages = mesh.size("pp")
        if stage is None:
            stage = mesh.rank("pp")
    if stage is None or stages is None:
        raise LayoutError("without a mesh the stage is not known; pass the mesh, or stage and stages")
    if not 0 <= stage < stages:
        raise LayoutError(f"stage must be at least 0 and less than stages={stages}, got {stage}")
    num_layers = layers if isinstance(layers, int) else len(layers)
    if stages > num_layers:
        raise LayoutError(
            f"cannot split {num_layers} layers into {stages} stages; each stage needs at least one layer"
        )
    indices = split_layers(num_layers, stage, stages)
    if isinstance(layers, int):
        return indices
    named_layers = layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)
    stage_modules = nn.ModuleDict()
    for name, layer in list(named_layers)[indices.start : indices.stop]:
        stage_modules[str(name)] = layer
    return stage_modules


def stage_indices(mesh: NamedMesh, schedule: str = "1F1B", stages: int = 1) -> tuple[int, ...]:
    """Return the indices of this rank's pipeline stages.

    With ``pp=2`` and two stages per rank, rank 0 has stages 0 and 2 if the schedule is interleaved,
    and stages 0 and 3 if it is V-shaped (ZBV, DualPipeV).

    Args:
        mesh: a mesh with an axis ``pp``.
        schedule: the name of the schedule, as for :class:`Pipeline`.
        stages: the number of stages on each rank.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        OptionError: torch does not know the schedule.
        LayoutError: the schedule runs another number of stages per rank.
    """
    mesh = require_named_mesh(mesh, "stage_indices")
    schedule_class = find_schedule_class(schedule)
    size = mesh.size("pp")
    rank = mesh.rank("pp")
    if schedule_class.__name__ in V_SHAPED_SCHEDULES:
        _check_stages_per_rank(schedule, stages, allowed=2)
        return rank, 2 * size - 1 - rank
    if issubclass(schedule_class, PipelineScheduleSingle):
        _check_stages_per_rank(schedule, stages, allowed=1)
    return tuple(range(rank, size * stages, size))


def _check_stages_per_rank(schedule: str, stages: int, *, allowed: int) -> None:
    if stages != allowed:
        raise LayoutError(f"the number of stages per rank must be {allowed} for {schedule}, got {stages}")


def find_schedule_class(name: str) -> Any:
    """Return torch's schedule class with this name.

    Args:
        name: a name that torch knows, or ``"ZBV"`` for ``"ZBVZeroBubble"``.

    Raises:
        OptionError: torch does not know the name. The message lists the names.
    """
    try:
        return get_schedule_class("ZBVZeroBubble" if name.lower() == "zbv" else name)
    except ValueError as error:
        raise OptionError(f"{error}; name one of them") from None
