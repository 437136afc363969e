"""The stages of a pipeline over ``pp``: which layers each has, and which stages a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from namedmesh.arguments import named_mesh
from namedmesh.errors import LayoutError
from namedmesh.mesh import NamedMesh
from namedmesh.sizes import stage_range

Layers: TypeAlias = Sequence[nn.Module] | nn.ModuleList | nn.ModuleDict

# Their stages go from the first rank to the last and back.
RETURNING = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
# They compute the gradients of activations first, and those of weights later.
SPLIT_BACKWARD = {*RETURNING, "ScheduleInterleavedZeroBubble"}


def stage_layers(
    layers: int | Layers, mesh: NamedMesh | None, *, stage: int | None = None, stages: int | None = None
) -> Any:
    """Return the layers of one pipeline stage: as even as can be, the longer stages last.

    By default this rank's, with one stage on each rank of ``pp``.

    Args:
        layers: all layers of the model, or their number.
        mesh: a mesh with an axis ``pp``; None if ``stage`` and ``stages`` are given.
        stage: the number of the stage.
        stages: the number of all stages.

    Returns:
        The layers, in an ``nn.ModuleDict`` under their numbers in the whole model, or the names
        that they have in one: the same in every layout. If ``layers`` is a number, a range of
        numbers.

    Raises:
        LayoutError: if there is no such stage, or if there are fewer layers than stages.

    Example:
        >>> [list(stage_layers(5, None, stage=stage, stages=2)) for stage in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    if mesh is not None:
        stages = mesh.size("pp") if stages is None else stages
        stage = mesh.rank("pp") if stage is None else stage
    if stage is None or stages is None:
        raise LayoutError("there is no mesh to say which stage this is; give the mesh, or stage and stages")
    if not 0 <= stage < stages:
        raise LayoutError(f"stage must be at least 0 and less than stages={stages}, got {stage}")
    total = layers if isinstance(layers, int) else len(layers)
    if stages > total:
        raise LayoutError(f"{total} layers cannot fill {stages} stages; give every stage one at least")
    numbers = stage_range(total, stage, stages)
    if isinstance(layers, int):
        return numbers
    named = layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)
    own = list(named)[numbers.start : numbers.stop]
    return nn.ModuleDict({str(name): layer for name, layer in own})


def stage_indices(mesh: NamedMesh, schedule: str = "1F1B", stages: int = 1) -> tuple[int, ...]:
    """Return which stages of the pipeline a rank has, when each has ``stages`` of them.

    Rank 0 of two has stages 0 and 2 if stages go round (interleaved), and 0 and 3 if they go there
    and back (ZBV, DualPipeV).
    """
    mesh = named_mesh(mesh, "stage_indices")
    kind, size, rank = schedule_class(schedule), mesh.size("pp"), mesh.rank("pp")
    returns = kind.__name__ in RETURNING
    single = issubclass(kind, PipelineScheduleSingle)
    if (single and stages != 1) or (returns and stages != 2):  # noqa: PLR2004
        takes = 2 if returns else 1
        raise LayoutError(f"{schedule} takes {takes} of the stages on each rank, not {stages}; give as many")
    return (rank, 2 * size - 1 - rank) if returns else tuple(rank + size * turn for turn in range(stages))


def schedule_class(name: str) -> Any:
    """Return torch's class of schedules with this name; ``"ZBV"`` is short for ZBVZeroBubble."""
    try:
        return get_schedule_class("ZBVZeroBubble" if name.lower() == "zbv" else name)
    except ValueError as error:
        raise LayoutError(f"{error}; name one of them") from None
