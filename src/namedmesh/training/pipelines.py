"""Pipelines: torch.distributed.pipelining over ``pp``, for batches of any size, with nothing kept that was not asked for."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from namedmesh._torch import frees_after_forward, remove_backwards
from namedmesh.errors import ShapeError, TrainingError
from namedmesh.training.stages import RETURNING, schedule_class, stage_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from namedmesh.mesh import NamedMesh

    Loss = Callable[[Tensor, Any], Tensor]

_SPLIT = {*RETURNING, "ScheduleInterleavedZeroBubble"}  # they compute the gradients of weights later
_SHAPES = 4  # how many shapes of a batch are remembered: each holds the buffers of its stages


def pipeline(
    model: nn.Module | Sequence[nn.Module],
    mesh: NamedMesh,
    schedule: str = "1F1B",
    *,
    microbatches: int,
    loss: Loss,
    reduction: Literal["mean", "sum"] = "mean",
    whole: Sequence[str] = (),
) -> Pipeline:
    """Return a pipeline over ``pp``, on one of torch's schedules; the stages may be tensor-parallel and in FSDP2.

    Prevents: torch takes the mean of the micro-batches' losses for that of the batch, also where the last one is smaller. Schedules
    that compute the gradients of weights later (zero bubble, ZBV, DualPipeV) leave out weights that FSDP2 has put away. And the run
    in which torch finds out the shapes of a batch drops gradients that are there already. No outputs are kept but those of ``eval``.

    FSDP2 modules whose ``reshard_after_forward`` was left to FSDP2 keep their weights until the last backward of a step, as
    there are many forwards in it; one that was given as True counts, and is refused by the schedules that it breaks.

    Args:
        model: this rank's stage, or its stages in the order of :func:`stage_indices`.
        mesh: a mesh with an axis ``pp``, which may have size 1.
        schedule: a name that ``torch.distributed.pipelining.schedules.get_schedule_class`` knows, or ``"ZBV"``.
        microbatches: into how many parts a batch is cut.
        loss: from the output of the last stage and the target, for some rows of the batch, their loss. The target is a
            tensor, or tuples, lists and dicts of tensors.
        reduction: whether ``loss`` is a mean over its rows, or a part of a sum, as of :func:`token_mean`.
        whole: the names of keyword arguments that every micro-batch gets as they are, such as positions: all others that are
            tensors have a row for each row of the batch.

    Returns:
        An object with ``step`` and ``eval``, which get the batch on every rank of ``pp``.

    Raises:
        LayoutError: the schedule has no such name, or takes another number of stages.
        TrainingError: the schedule needs weights that FSDP2 was told to put away.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(pp=1, device="cpu")
        >>> pipe = pipeline(torch.nn.Linear(2, 1), mesh, microbatches=2, loss=torch.nn.functional.mse_loss)
        >>> loss = pipe.step(torch.ones(3, 2), target=torch.ones(3, 1))   # 3 rows in 2 parts
        >>> output = pipe.eval(torch.ones(3, 2))
        >>> bool(torch.isclose(loss, torch.nn.functional.mse_loss(output, torch.ones(3, 1))))
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    kind, indices = schedule_class(schedule), stage_indices(mesh, schedule, len(modules))
    sharded: list[FSDPModule] = [
        each for module in modules for each in module.modules() if isinstance(each, FSDPModule)
    ]
    if mesh.size("pp") > 1 or not issubclass(kind, PipelineScheduleSingle):
        for each in sharded:
            frees = frees_after_forward(each)
            if frees and kind.__name__ in _SPLIT:
                raise TrainingError(
                    f"{schedule} computes the gradients of weights after the backward of the others, and "
                    "fully_shard(..., reshard_after_forward=True) puts weights away before; pass False, or leave it out"
                )
            if frees is None:
                each.set_reshard_after_forward(False, recurse=False)
    for module in modules:
        module.register_forward_pre_hook(_unpacked, with_kwargs=True)
    return Pipeline(mesh, modules, indices, kind, microbatches, loss, reduction, frozenset(whole), sharded)


@dataclass(eq=False, repr=False)
class Pipeline:
    """What :func:`pipeline` returns."""

    _mesh: NamedMesh
    _modules: list[nn.Module]
    _indices: tuple[int, ...]
    _kind: Any
    _microbatches: int
    _loss: Loss
    _reduction: str
    _whole: frozenset[str]
    _sharded: list[FSDPModule]
    # By what runs, and the shape of a batch: the rows of a part of it, and torch's schedule.
    _built: dict[object, tuple[int, Any]] = field(default_factory=dict)
    _target: Any = None
    _count: int = 0

    def step(self, *args: Tensor, target: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over a batch, of any size; the gradients are those of the loss of the batch.

        For the first batch of a shape, and for a larger one, the stages run once more to find out the shapes between
        them. In that, FSDP2's ranks take part together: give them batches of one size, or the largest first.

        Args:
            *args: the inputs of the first stage, on every rank.
            target: what the loss compares with, on every rank.
            **kwargs: what every stage's ``forward`` gets; tensors are split into micro-batches, but for those that are ``whole``.

        Returns:
            The loss of this rank's batch on the rank of the last stage, and 0 on the others, for :func:`mean_loss`; without a graph.

        Raises:
            ShapeError: the tensors have not the same number of rows, or none.
        """
        losses: list[Tensor] = []
        self._run("step", args, kwargs, target, losses)
        return self._sum(losses)

    @torch.no_grad()
    def eval(self, *args: Tensor, target: Any = None, **kwargs: Any) -> Tensor | None:
        """Run forward over a batch, of any size, without gradients; the arguments are those of :meth:`step`.

        Returns:
            With a target the loss, as of :meth:`step`: of one micro-batch after the other, whose outputs are not kept.
            Without one the output for the batch on the rank of the last stage, and None on the others.
        """
        losses: list[Tensor] = []
        output = self._run("output" if target is None else "loss", args, kwargs, target, losses)
        for each in self._sharded:
            each.reshard()
        return output if target is None else self._sum(losses)

    def _sum(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=self._mesh.device)
        for each in losses:
            local = each.full_tensor() if isinstance(each, DTensor) else each
            total = total + local.detach()
        return total

    def _run(
        self, what: str, args: tuple[Tensor, ...], kwargs: dict[str, Any], target: Any, losses: list[Tensor]
    ) -> Tensor | None:
        by_row = [each for key, each in kwargs.items() if key not in self._whole]
        cut = [*args, *(each for each in by_row if isinstance(each, Tensor))]
        counts = {each.shape[0] if each.ndim else 0 for each in cut}
        _of_tensors(target, lambda each: counts.add(each.shape[0] if each.ndim else 0))
        if len(counts) != 1 or not args or 0 in counts:
            raise ShapeError(
                f"the batch has {sorted(counts)} rows; give inputs and target with the same number of rows, one at "
                "least, on every rank of pp; name keyword arguments without them in pipeline(..., whole=(...))"
            )
        (self._count,) = counts
        shape = what, tuple((each.shape[1:], each.dtype, each.requires_grad) for each in cut)
        known = self._built.get(shape, (0, None))[0]
        rows = max(-(-self._count // self._microbatches), known)
        if rows != known:  # the buffers of a stage are made for one shape
            self._built[shape] = rows, self._schedule(what)
            if len(self._built) > _SHAPES:
                del self._built[next(iter(self._built))]
        schedule = self._built[shape][1]
        # Parts of one size: the last row again, which the loss leaves out.
        index = torch.arange(rows * self._microbatches)
        filled = index.clamp(max=self._count - 1)

        def fill(value: Any) -> Any:
            whole = not isinstance(value, Tensor) or len(index) == self._count
            return value if whole else value[filled.to(value.device)]

        given = [fill(each) for each in args] if self._mesh.is_first("pp") else []
        named = {key: _Whole(value) if key in self._whole else fill(value) for key, value in kwargs.items()}
        run = schedule.step if what == "step" else schedule.eval
        if (
            what != "output"
        ):  # torch splits the numbers of rows in place of the target, which may be of any form
            named |= {"target": index, "losses": losses, "return_outputs": False}
        self._target = target
        with _gradients_kept(self._modules if rows != known else []):
            output = run(*given, **named)
        self._target = None
        return None if output is None else output[: self._count]

    def _schedule(self, what: str) -> Any:
        mesh = self._mesh
        count = len(self._modules) * mesh.size("pp")
        stages = [
            _Stage(module, index, count, mesh.device, group=mesh.group("pp"))
            for module, index in zip(self._modules, self._indices, strict=True)
        ]
        single = issubclass(self._kind, PipelineScheduleSingle)
        kind: Any = ScheduleGPipe if single and what != "step" else self._kind
        loss = None if what == "output" else self._part
        schedule = kind(stages[0] if single else stages, self._microbatches, loss_fn=loss, scale_grads=False)
        if what != "step" and not single:
            remove_backwards(schedule)
        return schedule

    def _part(self, output: Tensor, index: Tensor) -> Tensor:
        """Return what the rows of one micro-batch add to the loss of the batch."""
        first = int(index[0])
        rows = min(len(index), self._count - first)
        if rows < 1:
            # Without a row of the batch, a row's loss times zero: the backward is the same on every rank.
            return 0 * self._loss(output[:1], _rows_of(self._target, slice(self._count - 1, self._count)))
        real = (
            output if rows == len(index) else output[:rows]
        )  # a slice costs memory of its size in the backward
        loss = self._loss(real, _rows_of(self._target, slice(first, first + rows)))
        return loss * (rows / self._count) if self._reduction == "mean" else loss


class _Stage(PipelineStage):
    """torch's, which in evaluation keeps the outputs of the last stage for a backward that never comes."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = (), []
        return output


class _Whole:
    """A keyword argument that torch is not to split; what is no tensor, every micro-batch gets."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _unpacked(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a stage its keyword arguments as they were given to the pipeline."""
    return args, {key: each.value if isinstance(each, _Whole) else each for key, each in kwargs.items()}


def _of_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return tuples, lists and dicts with what a function makes of each tensor in them."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _of_tensors(each, function) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_of_tensors(each, function) for each in value])
    return value


def _rows_of(target: Any, rows: slice) -> Any:
    return _of_tensors(target, lambda each: each[rows])


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
