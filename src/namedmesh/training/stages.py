"""Stages of a pipeline: which layers and which places of the schedule a rank has, and a weight that the first and the last one share."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from namedmesh.errors import LayoutError, ShapeError
from namedmesh.sizes import stage_range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from namedmesh.mesh import NamedMesh

    Layers = Sequence[nn.Module] | nn.ModuleList | nn.ModuleDict

RETURNING = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
"""Schedules whose stages go to the last rank and back."""
_ties = count()  # the same on the ranks of a pipeline, which tie together


def stage_layers(
    layers: int | Layers | nn.Sequential,
    mesh: NamedMesh | None,
    *,
    stage: int | None = None,
    stages: int | None = None,
) -> Any:
    """Return the layers of one pipeline stage: as even as can be, the longer stages last.

    Prevents: stages that number their layers from 0 each, so that checkpoints and first weights take one layer for another.

    Args:
        layers: the number of layers of the whole model, or the layers.
        mesh: the mesh; may be None where ``stage`` and ``stages`` are given.
        stage: which stage; by default this rank's, with one stage on each rank of ``pp``.
        stages: the number of stages; by default the size of ``pp``.

    Returns:
        The numbers of the stage's layers; or the layers, in an ``nn.ModuleDict`` (of an ``nn.Sequential``, in one)
        under their numbers in the whole model (of an ``nn.ModuleDict``, their names): the same in every layout.

    Raises:
        LayoutError: there are more stages than layers, or no mesh.

    Example:
        >>> [list(stage_layers(5, None, stage=stage, stages=2)) for stage in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    if mesh is not None:
        stages = mesh.size("pp") if stages is None else stages
        stage = mesh.rank("pp") if stage is None else stage
    if stage is None or stages is None:
        raise LayoutError("there is no mesh to say which stage this is; give the mesh, or stage and stages")
    total = layers if isinstance(layers, int) else len(layers)
    if stages > total:
        raise LayoutError(f"{total} layers cannot fill {stages} stages; give every stage one at least")
    numbers = stage_range(total, stage, stages)
    if isinstance(layers, int):
        return numbers
    named = list(layers.items()) if isinstance(layers, nn.ModuleDict) else list(enumerate(layers))
    own = OrderedDict((str(name), layer) for name, layer in named[numbers.start : numbers.stop])
    return nn.Sequential(own) if isinstance(layers, nn.Sequential) else nn.ModuleDict(own)


def stage_indices(mesh: NamedMesh, schedule: str = "1F1B", stages: int = 1) -> tuple[int, ...]:
    """Return which stages of the pipeline a rank has, when each has ``stages`` of them.

    Prevents: stages in the order of one schedule, run by another. Rank 0 of two has stages 0 and 2 where stages go round
    (interleaved), and 0 and 3 where they go there and back (ZBV, DualPipeV).

    Raises:
        LayoutError: the schedule has no such name, or takes another number of stages.
    """
    kind, size, rank = schedule_class(schedule), mesh.size("pp"), mesh.rank("pp")
    returns = kind.__name__ in RETURNING
    if (issubclass(kind, PipelineScheduleSingle) and stages != 1) or (returns and stages != 2):  # noqa: PLR2004
        raise LayoutError(
            f"{schedule} takes {2 if returns else 1} of the stages on each rank, not {stages}; give as many, or "
            "another schedule"
        )
    return (rank, 2 * size - 1 - rank) if returns else tuple(rank + size * turn for turn in range(stages))


def schedule_class(name: str) -> Any:
    """Return torch's class of a schedule."""
    try:
        return get_schedule_class("ZBVZeroBubble" if name.lower() == "zbv" else name)
    except ValueError as error:
        raise LayoutError(f"{error}; name one of them") from None


@torch.no_grad()
def tie_stages(mesh: NamedMesh, first: Tensor | None, last: Tensor | None) -> Callable[[], None]:
    """Tie a parameter of the first pipeline stage to one of the last, such as an embedding to the output; communicates.

    Prevents: two copies of one weight that learn apart, and a norm of the gradients that counts them twice. The last stage's copy
    takes the first one's values and is marked as ``shared`` for :func:`clip_grad_norm_`; a checkpoint has one weight for both. Call
    it after ``fully_shard``, on every rank. A rank with both ends (``pp=1``, ZBV) gives both: one parameter, or two that are tied.

    Args:
        mesh: a mesh with an axis ``pp``.
        first: the first stage's parameter where this rank has that stage, and otherwise None.
        last: the same for the last stage; sharded as the first.

    Returns:
        A function that sums the two gradients: every rank calls it once a step, before clipping.

    Raises:
        ShapeError: on every rank of ``pp``: no rank or several have one of the two, or they have other shapes or types.

    Example:
        >>> import namedmesh
        >>> mesh = namedmesh.init_mesh(pp=1, device="cpu")
        >>> embed, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
        >>> sum_gradients = tie_stages(mesh, embed.weight, head.weight)
        >>> head(embed(torch.arange(4))).sum().backward()
        >>> sum_gradients()
        >>> torch.equal(embed.weight, head.weight) and torch.equal(embed.weight.grad, head.weight.grad)
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    ends, group = (first, last), mesh.group("pp")
    described = [None if each is None else (tuple(_local(each).shape), str(each.dtype)) for each in ends]
    found: list[Any] = [(described, next(_ties))] * mesh.size("pp")
    if mesh.size("pp") > 1:
        dist.all_gather_object(found, found[0], group=group)
    ranks = [[rank for rank, (each, _) in enumerate(found) if each[end] is not None] for end in range(2)]
    shown = [each[end] for end in range(2) for each, _ in found if each[end] is not None]
    if [len(each) for each in ranks] != [1, 1] or shown[0] != shown[1]:
        raise ShapeError(
            f"the ranks {ranks[0]} and {ranks[1]} of pp tie {shown}; give one parameter of the first stage on the rank that has it, and "
            "one of the last, of one shape and type, sharded alike; None on all others"
        )
    here = [each for each in ends if each is not None]
    if not here or first is last:
        return lambda: None
    peer = ranks[0 if first is None else 1][0]
    for end, each in zip(("first", "last"), ends, strict=True):
        if each is not None:
            each.tied_stages = (str(found[ranks[0][0]][1]), end)  # type: ignore[attr-defined]  # for checkpoints
            each.shared = end == "last"  # type: ignore[attr-defined]  # for clipping
    values = _exchanged([_local(each) for each in here], group, peer)
    if last is not None:
        _local(last).copy_(values[-1] if first is None else values[0])

    @torch.no_grad()
    def sum_gradients() -> None:
        for each in here:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        grads = [_local(each.grad) for each in here if each.grad is not None]
        one, other = _exchanged(grads, group, peer)
        total = one + other
        for each in grads:
            each.copy_(total)

    return sum_gradients


def _exchanged(here: list[Tensor], group: dist.ProcessGroup, peer: int) -> list[Tensor]:
    """Return the tensors of both ends: this rank's, and the peer's where this rank has one of them."""
    if len(here) > 1:
        return here
    received = torch.empty_like(here[0])
    operations = [
        dist.P2POp(dist.isend, here[0].contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [here[0], received]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
