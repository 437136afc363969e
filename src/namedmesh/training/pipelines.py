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
    all_gather_object,
    has_run_forward,
    remove_backwards,
    reshards_after_forward,
    set_schedule_loss,
    tree_leaves,
    tree_map,
)
from namedmesh.arguments import named_mesh
from namedmesh.errors import ShapeError, TrainingError
from namedmesh.mesh import NamedMesh
from namedmesh.training.loss import sum_of
from namedmesh.training.microbatches import (
    ROWLESS,
    Batch,
    Built,
    describe,
    stage_hooks,
    take_rows,
    tensors_of,
    twice,
)
from namedmesh.training.stages import SPLIT_BACKWARD, schedule_class, stage_indices

Loss: TypeAlias = Callable[[Any, Any], Tensor]

# Beside 0, a schedule that fits, and 1, a new one. Of all ranks the greatest counts.
_REJECTED = 2


class Pipeline:
    """A pipeline over ``pp``, on one of torch's schedules.

    The stages may be tensor-parallel and in FSDP2.
    FSDP2 modules whose ``reshard_after_forward`` was left to FSDP2 keep their weights until the
    last backward of a step. One that was given as True counts, but is rejected if the schedule
    needs weights later (zero bubble, ZBV, DualPipeV).

    Args:
        model: this rank's stage, or its stages in the order of :func:`stage_indices`.
        mesh: a mesh with an axis ``pp``, which may have size 1.
        schedule: a name that ``torch.distributed.pipelining.schedules.get_schedule_class`` knows,
            or ``"ZBV"``.
        n_microbatches: the number of micro-batches that a batch is split into.
        loss_fn: makes the loss of some rows, a tensor of one number, from the output of the last stage
            (a tensor, or a tuple of tensors) and the target (a tensor, or tuples, lists and dicts
            of them).
        reduction: ``"mean"`` if ``loss_fn`` is a mean over its rows, ``"sum"`` if it is a part of a
            sum, as of :func:`normalize_loss`.
        replicate_kwargs: the names of keyword arguments that every micro-batch gets as they are; all other
            tensors, in tuples, lists and dicts too, have the rows of the batch.

    Raises:
        TrainingError: if ``reduction`` is neither, or FSDP2 frees weights that the schedule needs.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        mesh: NamedMesh,
        schedule: str = "1F1B",
        *,
        n_microbatches: int,
        loss_fn: Loss,
        reduction: Literal["mean", "sum"] = "mean",
        replicate_kwargs: Sequence[str] = (),
    ) -> None:
        mesh = named_mesh(mesh, "Pipeline")
        if reduction not in {"mean", "sum"}:
            raise TrainingError(f'reduction must be "mean" or "sum", got {reduction!r}')
        self._modules = [model] if isinstance(model, nn.Module) else list(model)
        self._mesh = mesh
        self._name = schedule
        self._kind = schedule_class(schedule)
        self._indices = stage_indices(mesh, schedule, len(self._modules))
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._replicate_kwargs = replicate_kwargs
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
        """Let FSDP2 keep weights between micro-batches, unless the user told it otherwise."""
        for module in self._sharded:
            frees = reshards_after_forward(module)
            if frees and self._kind.__name__ in SPLIT_BACKWARD:
                wrong = f"{self._name} needs weights that reshard_after_forward=True frees"
                raise TrainingError(f"{wrong}; pass False")
            if frees is None:
                module.set_reshard_after_forward(False, recurse=False)

    def step(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over a batch, of any size, which every rank of ``pp`` is given.

        For a first batch, one of another shape, a larger one, and after a change of autocast or of
        which parameters train, the stages run once more to find out the shapes between them, and
        the loss is called a few times more. In that, FSDP2's ranks take part together: give them
        batches of one size, or the largest first.

        Collective: every rank of ``pp`` must call it.

        Returns:
            The loss of this rank's batch on the rank of the last stage, and 0 on the others, for
            :func:`mean_loss`; without a graph.

        Raises:
            ShapeError: on every rank, if the arguments or the output cannot be cut by rows.
            TrainingError: on every rank, if the last stage returns something else than tensors, the
                loss is no number or not reduced as ``reduction`` says, or the schedule splits
                backward passes and the first stages are frozen, which torch gets wrong.
        """
        loss: Tensor = self._run(args, kwargs, target, backward=True)
        return loss

    @torch.no_grad()
    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run forward over a batch without gradients; the arguments are those of :meth:`step`.

        Collective: every rank of ``pp`` must call it.

        Returns:
            With a target the loss, as of :meth:`step`: of one micro-batch after the other, whose
            outputs are not kept. Without one the output for the batch on the rank of the last
            stage, and None on the others.

        Raises:
            ShapeError: as of :meth:`step`.
            TrainingError: as of :meth:`step`.
        """
        found = self._run(args, kwargs, target, backward=False)
        for module in self._sharded:
            module.reshard()
        return found

    def _run(self, args: Any, kwargs: dict[str, Any], target: Any, *, backward: bool) -> Any:
        by_row = dict(kwargs)
        whole = {name: by_row.pop(name) for name in kwargs if name in self._replicate_kwargs}
        batch = Batch(args, by_row, whole, target, backward)
        key = self._key(batch)
        rows = -(-batch.count // self._n_microbatches)
        use = (backward, target is not None)
        # It comes back after the batch: an exception leaves torch's schedule in the middle of one.
        built = self._built.pop(use, None)
        if built is not None and (built.key != key or built.rows < rows):
            built = None
        if built is not None and self._lacks_rows(batch, built):
            batch.problems.append(ROWLESS)
        if self._agree(batch.problems, needs_new=built is None) or built is None:
            built = self._build(key, rows, batch)
            batch.checks_output = True
            batch.checks_reduction = backward
        output, losses = self._run_schedule(batch, built)
        if batch.checks_output:
            self._agree_on_output(batch, built)
        self._built[use] = built
        if target is not None:
            return sum_of(losses, self._mesh)
        if output is None:
            return None
        return tree_map(partial(take_rows, slice(batch.count)), output)

    def _key(self, batch: Batch) -> object:
        """Return all on this rank that the tensors between the stages depend on."""
        key: list[object] = [tuple(batch.by_row), tuple(batch.whole)]
        key.extend(describe(1, value) for value in tree_leaves((batch.args, batch.by_row)))
        key.extend(describe(0, value) for value in tree_leaves(batch.whole))
        device = self._mesh.device.type
        if torch.is_autocast_enabled(device):
            key.append(torch.get_autocast_dtype(device))
        for module in self._modules:
            key.extend((param.dtype, param.requires_grad) for param in module.parameters())
        return key

    def _agree(self, problems: list[str], *, needs_new: bool) -> bool:
        """Return whether any rank of ``pp`` needs a new schedule; raise the problems of all ranks.

        One number is reduced for each batch. No rank can see that parameters of another stage were
        frozen, and torch's stages would send and expect different tensors.
        """
        found = _REJECTED if problems else int(needs_new)
        group = self._mesh.group("pp")
        if group.size() > 1:
            greatest = torch.tensor(found, device=self._mesh.device)
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
            found = int(greatest)
        if found == _REJECTED:
            raise ShapeError(*dict.fromkeys(chain.from_iterable(all_gather_object(group, problems))))
        return bool(found)

    def _lacks_rows(self, batch: Batch, built: Built) -> bool:
        padded = batch.count < built.rows * self._n_microbatches
        return built.rowless and (padded or batch.target is None)

    def _agree_on_output(self, batch: Batch, built: Built) -> None:
        """Raise the problems that the last stage found in a first run, on every rank of ``pp``."""
        for problems, rowless in all_gather_object(self._mesh.group("pp"), (batch.problems, built.rowless)):
            built.rowless |= rowless
            if self._lacks_rows(batch, built):
                raise ShapeError(ROWLESS)
            if problems:
                raise TrainingError(*problems)

    def _build(self, key: object, rows: int, batch: Batch) -> Built:
        group = self._mesh.group("pp")
        total = len(self._modules) * self._mesh.size("pp")
        stages: list[PipelineStage] = []
        trained: list[int] = []
        for module, index in zip(self._modules, self._indices, strict=True):
            stages.append(PipelineStage(module, index, total, self._mesh.device, group=group))
            if any(param.requires_grad for param in module.parameters()):
                trained.append(index)
        first_trained = min(chain.from_iterable(all_gather_object(group, trained)), default=0)
        given_tensors = tensors_of((batch.args, batch.by_row, batch.whole))
        input_trains = any(tensor.requires_grad for tensor in given_tensors)
        splits = batch.backward and self._kind.__name__ in SPLIT_BACKWARD
        if splits and first_trained > 0 and not input_trains:
            raise TrainingError(
                f"stage {first_trained} is the first that trains, and {self._name} splits its "
                "backward pass, which torch gets wrong behind frozen stages; take 1F1B or "
                "Interleaved1F1B, or train a parameter of stage 0"
            )
        # GPipe evaluates schedules with one stage on each rank: there is no backward to wait for.
        kind: Any = ScheduleGPipe if self._is_single and not batch.backward else self._kind
        given: Any = stages[0] if self._is_single else stages
        # Every batch replaces the loss by one that knows its target.
        schedule = kind(given, self._n_microbatches, loss_fn=self._loss_fn, scale_grads=False)
        if not batch.backward and not self._is_single:
            remove_backwards(schedule)
        return Built(key, rows, stages, schedule)

    def _run_schedule(self, batch: Batch, built: Built) -> tuple[Any, list[Tensor]]:
        index = torch.arange(built.rows * self._n_microbatches, device="cpu")
        args, by_row = batch.args, batch.by_row
        if batch.count < len(index):
            # Micro-batches of one size: the last row is repeated, and the loss leaves it out.
            filled = index.clamp(max=batch.count - 1)
            args, by_row = tree_map(partial(take_rows, filled), (args, by_row))
        given = args if self._mesh.is_first("pp") else ()
        run = built.schedule.step if batch.backward else built.schedule.eval
        losses: list[Tensor] = []
        with (
            stage_hooks(self._modules, batch, built),
            _gradients_kept(self._modules if batch.checks_output else []),
            set_schedule_loss(built.schedule, partial(self._loss_of_rows, batch, built)),
        ):
            # torch cuts the numbers of the rows in place of the target, which may be of any form.
            wants_output = batch.target is None
            output = run(*given, **by_row, target=index, losses=losses, return_outputs=wants_output)
        return output, losses

    def _loss_of_rows(self, batch: Batch, built: Built, output: Any, index: Tensor) -> Tensor:
        """Return what the rows of one micro-batch add to the loss of the batch."""
        if batch.target is None:
            return torch.zeros((), device="cpu")  # the output is asked for
        start = int(index[0])
        counted = max(0, min(len(index), batch.count - start))
        # If all rows are repeated ones: one of them, times zero, so that every rank has a backward.
        first = min(start, batch.count - 1)
        size = max(counted, 1)
        target = tree_map(partial(take_rows, slice(first, first + size)), batch.target)
        if size < len(index):
            # Not without need: the backward of a part takes memory of the whole output's size.
            output = tree_map(partial(take_rows, slice(size)), output)
        loss = self._checked_loss(batch, built, output, target)
        if not batch.backward:
            # With the output, which torch keeps for a backward that never comes.
            built.stages[-1].clear_runtime_states()
        return loss * (counted / batch.count if self._reduction == "mean" else min(counted, 1))

    def _checked_loss(self, batch: Batch, built: Built, output: Any, target: Any) -> Tensor:
        """Return the loss; after a problem 0, with which the other stages end their first run."""
        if not batch.problems and not self._lacks_rows(batch, built):
            loss = self._loss_fn(output, target)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                # Not while torch finds out the shapes: the input is uninitialized memory then.
                if batch.checks_reduction and has_run_forward(built.stages[-1]):
                    batch.checks_reduction = False
                    self._check_reduction(batch, output, target)
                return loss
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            wrong = f"loss_fn must return a tensor of one number, got {shown}"
            batch.problems.append(f"{wrong}; reduce it")
        return torch.stack([tensor.sum().double() * 0 for tensor in tensors_of(output)]).sum()

    @torch.no_grad()
    def _check_reduction(self, batch: Batch, output: Any, target: Any) -> None:
        """Compare the loss of one row with that of the row twice: only a sum doubles."""
        once = tree_map(partial(take_rows, slice(1)), (output, target))
        device = self._mesh.device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            try:
                of_one = sum_of([self._loss_fn(*once)], self._mesh)
                of_both = sum_of([self._loss_fn(*tree_map(twice, once))], self._mesh)
            except Exception:  # noqa: BLE001  a loss for whole micro-batches only may be right
                return
        factor, other, remedy = 2, "sum", 'pass reduction="sum"'
        if self._reduction == "sum":
            factor, other = 1, "mean"
            remedy = 'return the mean of the rows, undivided, and pass reduction="mean"'
        # Half precision is this exact. Other losses, such as contrastive ones, have any factor.
        if abs(float(of_both / of_one) - factor) < 0.02:  # noqa: PLR2004
            batch.problems.append(
                f"the loss of a row that is given twice is {factor} times its loss, as of a "
                f'{other}, but reduction is "{self._reduction}"; {remedy}'
            )


@contextmanager
def _gradients_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Keep the gradients of FSDP2. torch drops them when it finds out the shapes in a first run."""
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
