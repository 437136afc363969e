"""Pipelines over ``pp``: torch's schedules for batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from namedmesh._torch import (
    frees_after_forward,
    from_all,
    loss_of_schedule,
    remove_backwards,
    tree_leaves,
    tree_map,
)
from namedmesh.errors import ShapeError, TrainingError
from namedmesh.mesh import NamedMesh
from namedmesh.training.data import sum_of
from namedmesh.training.microbatches import (
    Batch,
    Built,
    count_rows,
    cut_rows,
    describe,
    rowless_problems,
    stage_hooks,
    take_rows,
    tensors_of,
    twice,
)
from namedmesh.training.stages import SPLIT_BACKWARD, schedule_class, stage_indices

Loss: TypeAlias = Callable[[Any, Any], Tensor]

# What a rank finds before it runs a batch; of several ranks the greatest counts.
_BUILT, _NEW, _REJECTED = range(3)

# How near a ratio of two losses, in half precision too, has to be to 1 or 2 to be taken for it.
_NEAR = 0.02


class Pipeline:
    """A pipeline over ``pp``, on one of torch's schedules; the stages may be tensor-parallel and in FSDP2.

    FSDP2 modules whose ``reshard_after_forward`` was left to FSDP2 keep their weights until the last backward of a step. One
    that was given as True counts, but is refused where weights are needed later (zero bubble, ZBV, DualPipeV).

    Args:
        model: this rank's stage, or its stages in the order of :func:`stage_indices`.
        mesh: a mesh with an axis ``pp``, which may have size 1.
        schedule: a name that ``torch.distributed.pipelining.schedules.getschedule_class`` knows, or ``"ZBV"``.
        microbatches: into how many parts a batch is cut.
        loss: from the output of the last stage (a tensor, or a tuple of tensors) and the target (a tensor, or tuples, lists
            and dicts of tensors), for some rows of the batch, their loss: a tensor of one number.
        reduction: ``"mean"`` if ``loss`` is a mean over its rows, ``"sum"`` if it is a part of a sum, as of :func:`token_mean`.
        whole: the names of keyword arguments that every micro-batch gets as they are; all other tensors, in tuples, lists and
            dicts too, have the rows of the batch.

    Raises:
        TrainingError: if ``reduction`` is neither, or FSDP2 frees weights that the schedule needs.
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
        if reduction not in {"mean", "sum"}:
            raise TrainingError(f'reduction must be "mean" or "sum", got {reduction!r}')
        self._modules = [model] if isinstance(model, nn.Module) else list(model)
        self._mesh = mesh
        self._name = schedule
        self._kind = schedule_class(schedule)
        self._indices = stage_indices(mesh, schedule, len(self._modules))
        self._microbatches = microbatches
        self._loss = loss
        self._reduction = reduction
        self._whole = whole
        # The last schedule with and without backward, and with and without a target.
        self._built: dict[tuple[bool, bool], Built] = {}
        self._sharded: list[FSDPModule] = []
        for module in self._modules:
            for submodule in module.modules():
                if isinstance(submodule, FSDPModule):
                    self._sharded.append(submodule)
        if mesh.size("pp") > 1 or not self._is_single:
            self._keep_weights()

    @property
    def _is_single(self) -> bool:
        return issubclass(self._kind, PipelineScheduleSingle)

    def _keep_weights(self) -> None:
        """Let FSDP2 keep weights from one micro-batch to the next, unless the user told it otherwise."""
        for module in self._sharded:
            frees = frees_after_forward(module)
            if frees and self._kind.__name__ in SPLIT_BACKWARD:
                wrong = f"{self._name} needs weights that reshard_after_forward=True frees"
                raise TrainingError(f"{wrong}; pass False")
            if frees is None:
                module.set_reshard_after_forward(False, recurse=False)

    def step(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over a batch, of any size, which every rank of ``pp`` is given.

        For a first batch, one of another shape, a larger one, and after a change of autocast or of which parameters train,
        the stages run once more to find out the shapes between them, and the loss is called a few times more. In that,
        FSDP2's ranks take part together: give them batches of one size, or the largest first.

        Collective: every rank of ``pp`` must call it.

        Returns:
            The loss of this rank's batch on the rank of the last stage, and 0 on the others, for :func:`mean_loss`; without a graph.

        Raises:
            ShapeError: on every rank, if an argument, the output or the loss cannot be cut into micro-batches.
            TrainingError: on every rank, if the loss is not reduced as ``reduction`` says, or if the schedule splits
                backward passes and the first stages are frozen, which torch gets wrong.
        """
        loss: Tensor = self._run(args, kwargs, target, backward=True)
        return loss

    @torch.no_grad()
    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run forward over a batch, of any size, without gradients; the arguments are those of :meth:`step`.

        Collective: every rank of ``pp`` must call it.

        Returns:
            With a target the loss, as of :meth:`step`: of one micro-batch after the other, whose outputs are not kept.
            Without one the output for the batch on the rank of the last stage, and None on the others.

        Raises:
            ShapeError: on every rank, if an argument, the output or the loss cannot be cut into micro-batches.
        """
        found = self._run(args, kwargs, target, backward=False)
        for module in self._sharded:
            module.reshard()
        return found

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, backward: bool) -> Any:
        whole: dict[str, Any] = {}
        by_row: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in self._whole:
                whole[name] = value
            else:
                by_row[name] = value
        count, problems = count_rows(args, by_row, target)
        key = self._key(args, by_row, whole)
        rows = -(-count // self._microbatches)
        use = (backward, target is not None)
        built = self._built.get(use)
        if built is not None and (built.key != key or built.rows < rows):
            built = None
        if built is not None and built.rowless:
            problems += rowless_problems(count, built.rows * self._microbatches, target)
        is_first_run = self._agree(problems, needs_new=built is None)
        if is_first_run or built is None:
            built = self._build(key, rows, backward=backward, args=args)
        batch = Batch(
            target,
            count,
            built.rows * self._microbatches,
            built,
            backward,
            is_first_run,
            checks_reduction=is_first_run and backward,
        )
        # It comes back when the batch is through: after an exception torch's schedule is in the middle of one.
        self._built.pop(use, None)
        output, losses = self._run_schedule(batch, args, by_row, whole)
        if is_first_run:
            self._agree_on_output(batch)
        self._built[use] = built
        if target is not None:
            return sum_of(losses, self._mesh)
        if output is None:
            return None
        return tree_map(lambda tensor: tensor[:count], output)

    def _key(self, args: tuple[Any, ...], by_row: dict[str, Any], whole: dict[str, Any]) -> object:
        """Return all on this rank that the tensors between the stages depend on."""
        key: list[object] = [tuple(kwargs) for kwargs in (by_row, whole)]
        key.extend(describe(value, skipped_dims=1) for value in tree_leaves((args, by_row)))
        key.extend(describe(value, skipped_dims=0) for value in tree_leaves(whole))
        device = self._mesh.device.type
        if torch.is_autocast_enabled(device):
            key.append(torch.get_autocast_dtype(device))
        for module in self._modules:
            key.extend((parameter.dtype, parameter.requires_grad) for parameter in module.parameters())
        return key

    def _agree(self, problems: list[str], *, needs_new: bool) -> bool:
        """Return whether any rank of ``pp`` needs a new schedule, as then all make one; raise all ranks' problems.

        One number is reduced for each batch: no rank can see that the parameters of another stage were frozen, and
        torch's stages would send and expect different tensors.
        """
        found = _BUILT
        if needs_new:
            found = _NEW
        if problems:
            found = _REJECTED
        group = self._mesh.group("pp")
        if group.size() > 1:
            greatest = torch.tensor(found, device=self._mesh.device)
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
            found = int(greatest)
        if found == _REJECTED:
            found_by_ranks = chain.from_iterable(from_all(group, problems))
            raise ShapeError(*dict.fromkeys(found_by_ranks))
        return found == _NEW

    def _agree_on_output(self, batch: Batch) -> None:
        """Raise what the last stage found wrong with the output and the loss of a first run, on every rank of ``pp``."""
        found = (batch.problems, batch.reduction_problem, batch.built.rowless)
        for problems, reduction_problem, rowless in from_all(self._mesh.group("pp"), found):
            if problems:
                raise ShapeError(*problems)
            if reduction_problem:
                raise TrainingError(reduction_problem)
            batch.built.rowless |= rowless

    def _build(self, key: object, rows: int, *, backward: bool, args: tuple[Any, ...]) -> Built:
        group = self._mesh.group("pp")
        total = len(self._modules) * self._mesh.size("pp")
        trained: list[int] = []
        for module, index in zip(self._modules, self._indices, strict=True):
            if any(parameter.requires_grad for parameter in module.parameters()):
                trained.append(index)
        first_trained = min(chain.from_iterable(from_all(group, trained)), default=0)
        input_trains = any(tensor.requires_grad for tensor in tensors_of(args))
        if backward and first_trained > 0 and not input_trains and self._kind.__name__ in SPLIT_BACKWARD:
            raise TrainingError(
                f"stage {first_trained} is the first that trains, and {self._name} splits its backward pass, which "
                "torch gets wrong behind frozen stages; take 1F1B or Interleaved1F1B, or train a parameter of stage 0"
            )
        stages: list[PipelineStage] = []
        for module, index in zip(self._modules, self._indices, strict=True):
            stages.append(PipelineStage(module, index, total, self._mesh.device, group=group))
        # Of the schedules with one stage on a rank torch evaluates by GPipe, as it has no backward to wait for.
        kind: Any = ScheduleGPipe if self._is_single and not backward else self._kind
        given: Any = stages[0] if self._is_single else stages
        # torch asks for a loss here. Every batch replaces it by one that knows the batch's target.
        schedule = kind(given, self._microbatches, loss_fn=self._loss, scale_grads=False)
        if not backward and not self._is_single:
            remove_backwards(schedule)
        return Built(key, rows, stages, schedule)

    def _run_schedule(
        self, batch: Batch, args: tuple[Any, ...], by_row: dict[str, Any], whole: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        built = batch.built
        index = torch.arange(batch.slots)
        if batch.count < batch.slots:
            # Micro-batches of one size: the last row is repeated, and the loss leaves the repeated ones out.
            filled = index.clamp(max=batch.count - 1)
            args, by_row = tree_map(partial(take_rows, filled), (args, by_row))
        given = args if self._mesh.is_first("pp") else ()
        run = built.schedule.step if batch.backward else built.schedule.eval
        losses: list[Tensor] = []
        with (
            stage_hooks(self._modules, batch, whole),
            _gradients_kept(self._modules if batch.is_first_run else []),
            loss_of_schedule(built.schedule, partial(self._loss_of_rows, batch)),
        ):
            # torch splits the numbers of the rows in place of the target, which may be of any form.
            output = run(*given, **by_row, target=index, losses=losses, return_outputs=batch.target is None)
        return output, losses

    def _loss_of_rows(self, batch: Batch, output: Any, index: Tensor) -> Tensor:
        """Return what the rows of one micro-batch add to the loss of the batch."""
        if batch.target is None:
            return torch.zeros(())  # the output is asked for
        start = int(index[0])
        counted = max(0, min(len(index), batch.count - start))
        # If all rows are repeated ones: one of them, times zero, so that the backward is the same on every rank.
        first = min(start, batch.count - 1)
        size = max(counted, 1)
        target = tree_map(partial(cut_rows, first, size), batch.target)
        if size < len(index) and not batch.problems:
            # A part of the output only where it has to be: its backward takes memory of the whole output's size.
            output = tree_map(partial(cut_rows, 0, size), output)
        loss = self._checked_loss(batch, output, target)
        if not batch.backward:
            # With the output, which torch keeps for a backward that never comes.
            batch.built.stages[-1].clear_runtime_states()
        if self._reduction == "mean":
            return loss * (counted / batch.count)
        return loss * min(counted, 1)

    def _checked_loss(self, batch: Batch, output: Any, target: Any) -> Tensor:
        """Return the loss; after a problem zero, so that the other stages come to the end of a first run."""
        if not batch.problems:
            loss = self._loss(output, target)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                if batch.checks_reduction:
                    batch.checks_reduction = False
                    batch.reduction_problem = self._reduction_problem(batch, output, target)
                return loss
            shown = type(loss).__name__
            if isinstance(loss, Tensor):
                shown = f"a tensor of shape {tuple(loss.shape)}"
            batch.problems.append(f"loss must return a tensor of one number, got {shown}; reduce it")
        zeros = [tensor.sum().double() * 0 for tensor in tensors_of(output)]
        return torch.stack(zeros).sum()

    @torch.no_grad()
    def _reduction_problem(self, batch: Batch, output: Any, target: Any) -> str:
        """Compare the loss of one row with that of the same row twice: a sum doubles, and a mean stays as it is."""
        if batch.built.rowless:
            return ""
        output, target = tree_map(partial(cut_rows, 0, 1), (output, target))
        both_outputs, both_targets = tree_map(twice, (output, target))
        try:
            of_one = sum_of([self._loss(output, target)], self._mesh)
            of_both = sum_of([self._loss(both_outputs, both_targets)], self._mesh)
        except Exception:  # noqa: BLE001  such as of a loss that takes whole micro-batches only, and is right on them
            return ""
        ratio = float(of_both / of_one)
        if self._reduction == "mean" and abs(ratio - 2) < _NEAR:
            return (
                'the loss is a sum: it doubles if a row is there twice, but reduction="mean" takes it for a mean; '
                'pass reduction="sum" (for token_mean, too)'
            )
        if self._reduction == "sum" and abs(ratio - 1) < _NEAR:
            return (
                'the loss is a mean: it stays the same if a row is there twice, but reduction="sum" takes it for a '
                'sum; pass reduction="mean"'
            )
        return ""


pipeline = Pipeline  # called as a function, as its neighbors


@contextmanager
def _gradients_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Keep the first run of new stages, in which torch finds out the shapes, from dropping the gradients that FSDP2 has."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is not None:
                kept.append((parameter, parameter.grad))
                parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
