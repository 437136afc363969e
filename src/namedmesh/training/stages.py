"""Stages of a pipeline: which layers and which places of the schedule a rank has, and a weight that the first and the last one share."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from namedmesh.errors import LayoutError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from namedmesh.mesh import NamedMesh

    Layers = Sequence[nn.Module] | nn.ModuleList | nn.ModuleDict

RETURNING = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
"""Schedules whose stages go to the last rank and back."""


@overload
def stage_layers(
    layers: int, mesh: NamedMesh | None, *, stage: int | None = None, stages: int | None = None
) -> range: ...


@overload
def stage_layers(
    layers: nn.Sequential, mesh: NamedMesh | None, *, stage: int | None = None, stages: int | None = None
) -> nn.Sequential: ...


@overload
def stage_layers(
    layers: Layers, mesh: NamedMesh | None, *, stage: int | None = None, stages: int | None = None
) -> nn.ModuleDict: ...


def stage_layers(
    layers: int | Layers | nn.Sequential,
    mesh: NamedMesh | None,
    *,
    stage: int | None = None,
    stages: int | None = None,
) -> range | nn.Sequential | nn.ModuleDict:
    """Return the layers of one pipeline stage: as even as can be, the longer stages last.

    Prevents: stages that number their layers from 0 each, so that checkpoints, learning rates and first weights by name take
    the layers of one stage for those of another.

    Args:
        layers: the number of layers of the whole model, or the layers.
        mesh: the mesh; may be None where ``stage`` and ``stages`` are given.
        stage: which stage; by default this rank's, with one stage on each rank of ``pp``.
        stages: the number of stages; by default the size of ``pp``.

    Returns:
        The numbers of the stage's layers; or the layers, in an ``nn.ModuleDict`` (of an ``nn.Sequential``, in one)
        under their numbers in the whole model (of an ``nn.ModuleDict``, their names): the same in every layout.

    Raises:
        LayoutError: there are more stages than layers.

    Example:
        >>> [list(stage_layers(5, None, stage=stage, stages=2)) for stage in (0, 1)]
        [[0, 1], [2, 3, 4]]
        >>> list(stage_layers([torch.nn.Identity()] * 4, None, stage=1, stages=2))
        ['2', '3']
    """
    if mesh is not None:
        stages = mesh.size("pp") if stages is None else stages
        stage = mesh.rank("pp") if stage is None else stage
    if stage is None or stages is None:
        raise LayoutError("there is no mesh to say which stage this is; give the mesh, or stage and stages")
    count = layers if isinstance(layers, int) else len(layers)
    if stages > count:
        raise LayoutError(f"{count} layers cannot fill {stages} stages; give every stage one at least")
    numbers = range(count * stage // stages, count * (stage + 1) // stages)
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

    Prevents: two copies of one weight that learn apart, each from the gradients of its stage; and a norm of the gradients
    that counts them twice. The last stage's copy takes the first one's values, is marked as ``shared`` for
    :func:`clip_grad_norm_`, and a checkpoint has one weight for both. Call it after ``fully_shard``, on every rank; both are
    sharded alike. A rank that has both ends, as with ``pp=1`` or ZBV, gives both: one parameter, or two that are tied then.

    Args:
        mesh: a mesh with an axis ``pp``.
        first: the first stage's parameter where this rank has that stage, and otherwise None.
        last: the same for the last stage.

    Returns:
        A function that sums the two gradients: every rank calls it once a step, before clipping.

    Raises:
        ShapeError: on every rank of ``pp``: no rank or several have one of the two, or they have other shapes or types.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(pp=1, device="cpu")
        >>> embed, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
        >>> sum_gradients = training.tie_stages(mesh, embed.weight, head.weight)
        >>> loss = head(embed(torch.arange(4))).sum().backward()
        >>> sum_gradients()
        >>> torch.equal(embed.weight, head.weight) and torch.equal(embed.weight.grad, head.weight.grad)
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    ends = first, last
    described = [None if each is None else (tuple(_local(each).shape), str(each.dtype)) for each in ends]
    found: list[Any] = [described] * mesh.size("pp")
    if mesh.size("pp") > 1:
        dist.all_gather_object(found, described, group=mesh.group("pp"))
    ranks = [[rank for rank, each in enumerate(found) if each[end] is not None] for end in range(2)]
    shown = [each[end] for end in range(2) for each in found if each[end] is not None]
    if [len(each) for each in ranks] != [1, 1] or shown[0] != shown[1]:
        raise ShapeError(
            f"the ranks {ranks[0]} and {ranks[1]} of pp tie {shown}; give one parameter of the first stage on the rank that has it, and "
            "one of the last, of one shape and type, sharded alike; None on all others"
        )
    (one,), (other,) = ranks
    if first is last:
        return lambda: None
    tie = f"{one}-{other}-{tuple(found[one][0])}"
    for end, each in zip(("first", "last"), ends, strict=True):
        if each is not None:
            each.tied_stages = (tie, end)  # type: ignore[attr-defined]  # for checkpoints
    if last is not None:
        last.shared = True  # type: ignore[attr-defined]
    if first is not None and last is not None:
        _local(last).copy_(_local(first))
    elif first is not None:
        dist.send(_local(first).contiguous(), group=mesh.group("pp"), group_dst=other)
    elif last is not None:
        received = torch.empty_like(_local(last))
        dist.recv(received, group=mesh.group("pp"), group_src=one)
        _local(last).copy_(received)

    @torch.no_grad()
    def sum_gradients() -> None:
        here = [each for each in ends if each is not None]
        for each in here:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        grads = [_local(each.grad) for each in here if each.grad is not None]
        if len(grads) == 2:  # noqa: PLR2004
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif grads:
            peer, group = (other if last is None else one), mesh.group("pp")
            received = torch.empty_like(grads[0])
            sent = dist.isend(grads[0].contiguous(), group=group, group_dst=peer)
            dist.recv(received, group=group, group_src=peer)
            if sent is not None:
                sent.wait()
            grads[0].add_(received)

    return sum_gradients


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
