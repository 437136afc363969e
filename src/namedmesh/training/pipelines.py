"""Pipelines over ``pp``: which layers a rank has, torch's schedules for batches of any size, and a weight of two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from namedmesh._torch import frees_after_forward, from_all, remove_backwards, tree_leaves, tree_map
from namedmesh.errors import LayoutError, ShapeError, TrainingError
from namedmesh.mesh import NamedMesh
from namedmesh.sizes import stage_range
from namedmesh.training.loss import sum_of

Layers: TypeAlias = Sequence[nn.Module] | nn.ModuleList | nn.ModuleDict
Loss: TypeAlias = Callable[[Tensor, Any], Tensor]

_RETURNING = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}  # their stages go to the last rank and back
_SPLIT = {*_RETURNING, "ScheduleInterleavedZeroBubble"}  # they compute the gradients of weights later
_ties = count()  # the same on the ranks of a pipeline, which tie together


def stage_layers(
    layers: int | Layers, mesh: NamedMesh | None, *, stage: int | None = None, stages: int | None = None
) -> Any:
    """Return the layers of one pipeline stage: as even as can be, the longer stages last.

    By default this rank's, with one stage on each rank of ``pp``; the mesh may be None where ``stage`` and ``stages`` are given.

    Returns:
        The layers, in an ``nn.ModuleDict`` under their numbers in the whole model, or the names that they have in one: the same in
        every layout. Of a number the numbers of the layers.

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
    named = layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)
    own = list(named)[numbers.start : numbers.stop]
    return nn.ModuleDict({str(name): layer for name, layer in own})


def stage_indices(mesh: NamedMesh, schedule: str = "1F1B", stages: int = 1) -> tuple[int, ...]:
    """Return which stages of the pipeline a rank has, when each has ``stages`` of them.

    Rank 0 of two has stages 0 and 2 where stages go round (interleaved), and 0 and 3 where they go there and back (ZBV, DualPipeV).
    """
    kind, size, rank = _schedule_class(schedule), mesh.size("pp"), mesh.rank("pp")
    returns = kind.__name__ in _RETURNING
    if (issubclass(kind, PipelineScheduleSingle) and stages != 1) or (returns and stages != 2):  # noqa: PLR2004
        takes = 2 if returns else 1
        raise LayoutError(f"{schedule} takes {takes} of the stages on each rank, not {stages}; give as many")
    return (rank, 2 * size - 1 - rank) if returns else tuple(rank + size * turn for turn in range(stages))


def _schedule_class(name: str) -> Any:
    try:
        return get_schedule_class("ZBVZeroBubble" if name.lower() == "zbv" else name)
    except ValueError as error:
        raise LayoutError(f"{error}; name one of them") from None


class Pipeline:
    """A pipeline over ``pp``, on one of torch's schedules; the stages may be tensor-parallel and in FSDP2.

    FSDP2 modules whose ``reshard_after_forward`` was left to FSDP2 keep their weights until the last backward of a step. One
    that was given as True counts, but is refused where weights are needed later (zero bubble, ZBV, DualPipeV).

    Args:
        model: this rank's stage, or its stages in the order of :func:`stage_indices`.
        mesh: a mesh with an axis ``pp``, which may have size 1.
        schedule: a name that ``torch.distributed.pipelining.schedules.get_schedule_class`` knows, or ``"ZBV"``.
        microbatches: into how many parts a batch is cut.
        loss: from the output of the last stage and the target (a tensor, or tuples, lists and dicts of tensors), for some rows
            of the batch, their loss.
        reduction: whether ``loss`` is a mean over its rows, or a part of a sum, as of :func:`token_mean`.
        whole: the names of keyword arguments that every micro-batch gets as they are; other tensors have the rows of the batch.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        mesh: NamedMesh,
        schedule: str = "1F1B",
        *,
        microbatches: int,
        loss: Loss,
        reduction: Literal["mean", "sum"] = "mean",
        whole: Sequence[str] = (),
    ) -> None:
        self._modules = modules = [model] if isinstance(model, nn.Module) else list(model)
        self._mesh, self._kind = mesh, _schedule_class(schedule)
        self._indices = stage_indices(mesh, schedule, len(modules))
        self._microbatches, self._loss, self._reduction, self._whole = microbatches, loss, reduction, whole
        # With backward, and without: the shape and the number of rows that a schedule is for, and the schedule.
        self._built: dict[bool, tuple[object, int, Any]] = {}
        # Of the batch that runs.
        self._target: Any = None
        self._count = 0
        self._kept: dict[str, Any] = {}  # keyword arguments that torch is not to split
        inside = [each for module in modules for each in module.modules()]
        self._sharded = [each for each in inside if isinstance(each, FSDPModule)]
        several = mesh.size("pp") > 1 or not issubclass(self._kind, PipelineScheduleSingle)
        for each in self._sharded if several else ():
            frees = frees_after_forward(each)
            if frees and self._kind.__name__ in _SPLIT:
                wrong = f"{schedule} needs weights that reshard_after_forward=True frees"
                raise TrainingError(f"{wrong}; pass False")
            if frees is None:
                each.set_reshard_after_forward(False, recurse=False)
        for module in modules:
            module.register_forward_pre_hook(self._with_kept, with_kwargs=True)

    def step(self, *args: Tensor, target: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over a batch, of any size, which every rank of ``pp`` is given.

        For a first batch, one of another shape, and a larger one, the stages run once more to find out the shapes between
        them. In that, FSDP2's ranks take part together: give them batches of one size, or the largest first.

        Returns:
            The loss of this rank's batch on the rank of the last stage, and 0 on the others, for :func:`mean_loss`; without a graph.
        """
        loss: Tensor = self._run(args, kwargs, target, backward=True)
        return loss

    @torch.no_grad()
    def eval(self, *args: Tensor, target: Any = None, **kwargs: Any) -> Tensor | None:
        """Run forward over a batch, of any size, without gradients; the arguments are those of :meth:`step`.

        Returns:
            With a target the loss, as of :meth:`step`: of one micro-batch after the other, whose outputs are not kept.
            Without one the output for the batch on the rank of the last stage, and None on the others.
        """
        found: Tensor | None = self._run(args, kwargs, target, backward=False)
        for each in self._sharded:
            each.reshard()
        return found

    def _run(self, args: tuple[Tensor, ...], kwargs: dict[str, Any], target: Any, *, backward: bool) -> Any:
        kept = {key: each for key, each in kwargs.items() if key in self._whole}
        by_row = {key: each for key, each in kwargs.items() if key not in self._whole}
        cut = [each for each in (*args, *by_row.values()) if isinstance(each, Tensor)]
        with_rows = cut if target is None else [*cut, *tree_leaves(target)]
        counts = {each.shape[0] if each.ndim else 0 for each in with_rows}
        if len(counts) != 1 or not args or 0 in counts:
            remedy = "give all as many, one at least; name keyword arguments without rows in pipeline(..., whole=...)"
            raise ShapeError(f"the batch has {sorted(counts)} rows; {remedy}")
        (count,) = counts
        shape = [(each.shape[1:], each.dtype, each.requires_grad) for each in cut]
        known, rows, schedule = self._built.get(backward, (None, 0, None))
        needed = -(-count // self._microbatches)
        new = known != shape or rows < needed
        if new:
            rows, schedule = needed, self._schedule(backward=backward)
            self._built[backward] = shape, rows, schedule
        index = torch.arange(rows * self._microbatches, device="cpu")
        # Parts of one size: the last row again, which the loss leaves out.
        filled = index.clamp(max=count - 1)

        def fill(value: Any) -> Any:
            short = isinstance(value, Tensor) and len(index) > count
            return value[filled.to(value.device)] if short else value

        given = [fill(each) for each in args] if self._mesh.is_first("pp") else []
        named = {key: fill(each) for key, each in by_row.items()}
        self._target, self._count, self._kept = target, count, kept
        run = schedule.step if backward else schedule.eval
        losses: list[Tensor] = []
        with _gradients_kept(self._modules if new else []):
            # torch splits the numbers of rows in place of the target, which may be of any form.
            output = run(*given, **named, target=index, losses=losses, return_outputs=target is None)
        self._target, self._kept = None, {}
        if target is not None:
            return sum_of(losses, self._mesh)
        return None if output is None else output[:count]

    def _schedule(self, *, backward: bool) -> Any:
        mesh = self._mesh
        total = len(self._modules) * mesh.size("pp")
        stages = [
            PipelineStage(module, index, total, mesh.device, group=mesh.group("pp"))
            for module, index in zip(self._modules, self._indices, strict=True)
        ]

        def loss(output: Tensor, index: Tensor) -> Tensor:
            if self._target is None:
                return torch.zeros((), device="cpu")  # the output is asked for
            part = self._part(output, index)
            if not backward:
                stages[-1].clear_runtime_states()  # with the output, kept for a backward that never comes
            return part

        single = issubclass(self._kind, PipelineScheduleSingle)
        kind: Any = ScheduleGPipe if single and not backward else self._kind
        schedule = kind(stages[0] if single else stages, self._microbatches, loss_fn=loss, scale_grads=False)
        if not backward and not single:
            remove_backwards(schedule)
        return schedule

    def _with_kept(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | self._kept

    def _part(self, output: Tensor, index: Tensor) -> Tensor:
        """Return what the rows of one micro-batch add to the loss of the batch."""
        start = int(index[0])
        counted = max(0, min(len(index), self._count - start))
        # Where all rows are repeated ones, one of them, times zero, so that the backward is the same on every rank.
        first, size = min(start, self._count - 1), max(counted, 1)
        # Its backward has memory of its size.
        real = output if size == len(index) else output[:size]
        loss = self._loss(real, tree_map(lambda each: each[first : first + size], self._target))
        return loss * (counted / self._count if self._reduction == "mean" else min(counted, 1))


pipeline = Pipeline  # called as a function, as its neighbors


@contextmanager
def _gradients_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Keep the first run of new stages, in which torch finds out the shapes, from dropping the gradients that FSDP2 has."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@torch.no_grad()
def tie_stages(first: Tensor | None, last: Tensor | None, mesh: NamedMesh) -> Callable[[], None]:
    """Tie a parameter of the first pipeline stage to one of the last, such as an embedding to the output; communicates.

    The last stage's copy takes the first one's values, :func:`clip_grad_norm_` counts them once, and a checkpoint has one weight
    for both. Call it after ``fully_shard``, on every rank.

    Args:
        first: the first stage's parameter where this rank has that stage, and otherwise None.
        last: the same for the last stage; sharded as the first. With ``pp=1`` or ZBV a rank gives both.
        mesh: a mesh with an axis ``pp``.

    Returns:
        A function that sums the two gradients: every rank calls it once a step, before clipping.
    """
    ends, group = (first, last), mesh.group("pp")
    described = [None if each is None else (tuple(_local(each).shape), str(each.dtype)) for each in ends]
    found = from_all(group, (described, next(_ties)))
    ranks = [[rank for rank, (each, _) in enumerate(found) if each[end] is not None] for end in range(2)]
    shown = [each[end] for end in range(2) for each, _ in found if each[end] is not None]
    if [len(each) for each in ranks] != [1, 1] or shown[0] != shown[1]:
        remedy = "give one of the first stage and one of the last, of one shape and type; None elsewhere"
        raise ShapeError(f"the ranks {ranks[0]} and {ranks[1]} of pp tie {shown}; {remedy}")
    here = [each for each in ends if each is not None]
    if not here or first is last:
        return lambda: None
    peer = ranks[0 if first is None else 1][0]
    for end, each in zip(("first", "last"), ends, strict=True):
        if each is not None:
            each.tied_stages = (str(found[ranks[0][0]][1]), end)  # type: ignore[attr-defined]  # for checkpoints
            each.shared = end == "last"  # type: ignore[attr-defined]  # for clipping
    others = _other_ends([_local(each) for each in here], group, peer)
    if last is not None:
        _local(last).copy_(others[-1])

    @torch.no_grad()
    def sum_gradients() -> None:
        for each in here:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        grads = [_local(each.grad) for each in here if each.grad is not None]
        for grad, other in zip(grads, _other_ends(grads, group, peer), strict=True):
            grad.add_(other)

    return sum_gradients


def _other_ends(here: list[Tensor], group: dist.ProcessGroup, peer: int) -> list[Tensor]:
    """Return the tensor of the other end for each of this rank's: the peer's, or copies where this rank has both."""
    if len(here) > 1:
        return [each.clone() for each in reversed(here)]
    received = torch.empty_like(here[0])
    operations = [
        dist.P2POp(dist.isend, here[0].contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [received]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
