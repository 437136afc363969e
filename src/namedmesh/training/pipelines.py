"""Pipeline parallelism over ``pp``: torch's schedules for batches of any size."""

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
from namedmesh.training.loss import sum_losses
from namedmesh.training.microbatches import (
    UNBATCHED_OUTPUT,
    BuiltSchedule,
    PipelineBatch,
    find_tensors,
    make_shape_key,
    register_stage_hooks,
    repeat_rows,
    select_rows,
)
from namedmesh.training.stages import SPLIT_BACKWARD_SCHEDULES, find_schedule_class, stage_indices

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]

# Every rank of pp proposes one of these before a batch. The largest proposal decides.
_REUSE_SCHEDULE = 0
_BUILD_SCHEDULE = 1
_REJECT_BATCH = 2

# The loss of a duplicated row is compared with twice its loss up to the rounding of half precision.
_LOSS_FACTOR_TOLERANCE = 0.02


class Pipeline:
    """Train and evaluate a model in pipeline stages over ``pp``, on one of torch's schedules.

    The stages may be tensor-parallel and sharded by FSDP2. FSDP2 modules whose
    ``reshard_after_forward`` has its default value keep their unsharded weights until the last
    backward of a step. An explicit True is respected, but raises an error if the schedule runs
    weight gradients later (InterleavedZeroBubble, ZBV, DualPipeV).

    Args:
        model: this rank's stage, or its stages in the order of :func:`stage_indices`.
        mesh: a mesh with an axis ``pp``, which may have size 1.
        schedule: a name that ``torch.distributed.pipelining.schedules.get_schedule_class`` knows,
            or ``"ZBV"``.
        n_microbatches: the number of micro-batches that a batch is split into.
        loss_fn: computes the loss of one micro-batch, or of some of its rows, from the output of
            the last stage (a tensor, or a tuple of tensors) and the target (a tensor, or tuples,
            lists and dicts of tensors). It returns a tensor with one element.
        reduction: ``"mean"`` if ``loss_fn`` returns the mean over its rows, ``"sum"`` if the
            losses of micro-batches are added, as with :func:`normalize_loss`.
        replicate_kwargs: the names of keyword arguments that every micro-batch gets unchanged. All
            other tensors, also in tuples, lists and dicts, are split along dim 0.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        OptionError: torch does not know the schedule.
        LayoutError: the schedule runs another number of stages per rank.
        TrainingError: ``reduction`` has another value, or FSDP2 reshards weights that the schedule
            needs.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        mesh: NamedMesh,
        schedule: str = "1F1B",
        *,
        n_microbatches: int,
        loss_fn: LossFunction,
        reduction: Literal["mean", "sum"] = "mean",
        replicate_kwargs: Sequence[str] = (),
    ) -> None:
        mesh = named_mesh(mesh, "Pipeline")
        if reduction not in {"mean", "sum"}:
            raise TrainingError(f'reduction must be "mean" or "sum", got {reduction!r}')
        self._modules = [model] if isinstance(model, nn.Module) else list(model)
        self._mesh = mesh
        self._schedule_name = schedule
        self._schedule_class = find_schedule_class(schedule)
        self._stage_indices = stage_indices(mesh, schedule, len(self._modules))
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._replicate_kwargs = replicate_kwargs
        # The last schedule with and without backward, and with and without a target.
        self._built_schedules: dict[tuple[bool, bool], BuiltSchedule] = {}
        self._fsdp_modules: list[FSDPModule] = []
        for module in self._modules:
            for submodule in module.modules():
                if isinstance(submodule, FSDPModule):
                    self._fsdp_modules.append(submodule)
        if mesh.size("pp") > 1 or not self._has_single_stages:
            self._keep_weights_unsharded()

    @property
    def _has_single_stages(self) -> bool:
        return issubclass(self._schedule_class, PipelineScheduleSingle)

    @property
    def _splits_backward(self) -> bool:
        return self._schedule_class.__name__ in SPLIT_BACKWARD_SCHEDULES

    def _keep_weights_unsharded(self) -> None:
        """Let FSDP2 keep weights between micro-batches, unless the user set it explicitly."""
        for module in self._fsdp_modules:
            reshards = reshards_after_forward(module)
            if reshards and self._splits_backward:
                raise TrainingError(
                    f"{self._schedule_name} needs weights that reshard_after_forward=True frees; pass False"
                )
            if reshards is None:
                module.set_reshard_after_forward(False, recurse=False)

    def step(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over a batch.

        Batches may differ in size. If the batch size is not a multiple of the number of
        micro-batches, the last row is repeated and its copies do not count in the loss.

        torch first runs the stages once to infer the shapes between them: for the first batch, a
        batch of another shape or a larger batch, and after a change of autocast or of the trained
        parameters. In this run ``loss_fn`` is called a few more times. FSDP2 communicates in it, so
        pass batches of one size to all data-parallel ranks, or the largest batch first.

        Collective: every rank of ``pp`` must call it.

        Args:
            *args: the inputs of the first stage. Every rank of ``pp`` must pass the same.
            target: the second argument of ``loss_fn``. Every rank of ``pp`` must pass it.
            **kwargs: keyword arguments of every stage.

        Returns:
            On the rank of the last stage the loss of this rank's batch, and 0 on the other ranks,
            for :func:`mean_loss`. It is detached from the graph.

        Raises:
            ShapeError: on every rank of ``pp``; the inputs or the output cannot be split into
                micro-batches.
            TrainingError: on every rank of ``pp``; the last stage does not return tensors,
                ``loss_fn`` does not return one element or is not reduced as ``reduction`` says, or
                the first stages are frozen and the schedule splits backward passes, for which torch
                computes wrong gradients.
        """
        _, losses = self._run(args, kwargs, target, backward=True)
        return sum_losses(losses, self._mesh)

    @torch.no_grad()
    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run forward over a batch, without gradients.

        Collective: every rank of ``pp`` must call it.

        Args:
            *args: the inputs, as in :meth:`step`.
            target: the second argument of ``loss_fn``; None to get the output.
            **kwargs: keyword arguments of every stage.

        Returns:
            With a target, the loss as in :meth:`step`. The output of a micro-batch is freed after
            its loss is computed. Without a target, the output for the batch on the rank of the last
            stage, and None on the other ranks.

        Raises:
            ShapeError: as in :meth:`step`.
            TrainingError: as in :meth:`step`.
        """
        output, losses = self._run(args, kwargs, target, backward=False)
        # Without a backward, nothing else frees the weights that were kept for it.
        for module in self._fsdp_modules:
            module.reshard()
        return output if target is None else sum_losses(losses, self._mesh)

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, backward: bool
    ) -> tuple[Any, list[Tensor]]:
        """Run a schedule over a batch. Collective: every rank of ``pp`` must call it.

        Returns:
            The output for the batch, if there is no target, and the losses of its micro-batches;
            both on the rank of the last stage only.
        """
        batch = self._make_batch(args, kwargs, target, backward=backward)
        # The schedule is stored again after the batch: an exception interrupts torch's schedule
        # within a batch, so that it cannot be used again.
        mode = (backward, target is not None)
        built = self._find_schedule(batch, self._built_schedules.pop(mode, None))
        output, losses = self._run_schedule(batch, built)
        if batch.checks_output:
            self._raise_output_problems(batch, built)
        self._built_schedules[mode] = built
        # Without the padding rows.
        return tree_map(partial(select_rows, slice(batch.size)), output), losses

    def _make_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, backward: bool
    ) -> PipelineBatch:
        split_kwargs: dict[str, Any] = {}
        replicate_kwargs: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in self._replicate_kwargs:
                replicate_kwargs[name] = value
            else:
                split_kwargs[name] = value
        return PipelineBatch(args, split_kwargs, replicate_kwargs, target, backward)

    def _find_schedule(self, batch: PipelineBatch, cached: BuiltSchedule | None) -> BuiltSchedule:
        """Return the cached schedule if it fits the batch on every rank, else build one.

        Collective: every rank of ``pp`` must call it. Raises the problems of all ranks.
        """
        inputs_key = self._make_inputs_key(batch)
        microbatch_size = -(-batch.size // self._n_microbatches)
        if cached is not None:
            if cached.inputs_key != inputs_key or cached.microbatch_size < microbatch_size:
                cached = None
            elif self._lacks_batch_dim(batch, cached):
                batch.problems.append(UNBATCHED_OUTPUT)
        if self._any_rank_must_build(batch.problems, must_build=cached is None):
            cached = None
        if cached is not None:
            return cached
        batch.checks_output = True
        batch.checks_reduction = batch.backward
        return self._build_schedule(inputs_key, microbatch_size, batch)

    def _make_inputs_key(self, batch: PipelineBatch) -> object:
        """Return a key with all local properties that the tensors between stages depend on."""
        key: list[object] = [tuple(batch.split_kwargs), tuple(batch.replicate_kwargs)]
        split_inputs = tree_leaves((batch.args, batch.split_kwargs))
        key.extend(map(partial(make_shape_key, skip_batch_dim=True), split_inputs))
        replicated_inputs = tree_leaves(batch.replicate_kwargs)
        key.extend(map(partial(make_shape_key, skip_batch_dim=False), replicated_inputs))
        device_type = self._mesh.device.type
        if torch.is_autocast_enabled(device_type):
            key.append(torch.get_autocast_dtype(device_type))
        for module in self._modules:
            key.extend((param.dtype, param.requires_grad) for param in module.parameters())
        return key

    def _any_rank_must_build(self, problems: list[str], *, must_build: bool) -> bool:
        """Return whether any rank of ``pp`` needs a new schedule; raise the problems of all ranks.

        A rank cannot see that parameters of another stage were frozen. If it kept its schedule,
        torch's stages would send and expect different tensors. So the ranks all-reduce one number
        for each batch.
        """
        proposal = _BUILD_SCHEDULE if must_build else _REUSE_SCHEDULE
        if problems:
            proposal = _REJECT_BATCH
        group = self._mesh.group("pp")
        if group.size() > 1:
            largest = torch.tensor(proposal, device=self._mesh.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            proposal = int(largest)
        if proposal == _REJECT_BATCH:
            by_rank = all_gather_object(group, problems)
            raise ShapeError(*dict.fromkeys(chain.from_iterable(by_rank)))
        return proposal == _BUILD_SCHEDULE

    def _lacks_batch_dim(self, batch: PipelineBatch, built: BuiltSchedule) -> bool:
        """Return whether an output without a batch dim would have to be split or concatenated."""
        is_padded = batch.size < built.microbatch_size * self._n_microbatches
        return built.has_unbatched_output and (is_padded or batch.target is None)

    def _raise_output_problems(self, batch: PipelineBatch, built: BuiltSchedule) -> None:
        """Raise on every rank of ``pp`` the problems that the last stage found in a first run.

        Collective: one all-gather over ``pp``.
        """
        local_report = (batch.problems, built.has_unbatched_output)
        for problems, has_unbatched_output in all_gather_object(self._mesh.group("pp"), local_report):
            built.has_unbatched_output |= has_unbatched_output
            if self._lacks_batch_dim(batch, built):
                raise ShapeError(UNBATCHED_OUTPUT)
            if problems:
                raise TrainingError(*problems)

    def _build_schedule(
        self, inputs_key: object, microbatch_size: int, batch: PipelineBatch
    ) -> BuiltSchedule:
        group = self._mesh.group("pp")
        num_stages = len(self._modules) * self._mesh.size("pp")
        stages: list[PipelineStage] = []
        trained_stages: list[int] = []
        for module, index in zip(self._modules, self._stage_indices, strict=True):
            stages.append(PipelineStage(module, index, num_stages, self._mesh.device, group=group))
            if any(param.requires_grad for param in module.parameters()):
                trained_stages.append(index)
        trained_by_rank = all_gather_object(group, trained_stages)
        first_trained = min(chain.from_iterable(trained_by_rank), default=0)
        inputs = find_tensors((batch.args, batch.split_kwargs, batch.replicate_kwargs))
        input_requires_grad = any(tensor.requires_grad for tensor in inputs)
        if batch.backward and self._splits_backward and first_trained > 0 and not input_requires_grad:
            raise TrainingError(
                f"stage {first_trained} is the first that trains, and {self._schedule_name} splits "
                "backward passes, for which torch computes wrong gradients behind frozen stages; use "
                "1F1B or Interleaved1F1B, or train a parameter of stage 0"
            )
        schedule_class: Any = self._schedule_class
        if self._has_single_stages and not batch.backward:
            # Without a backward, GPipe runs the same forward passes as every other schedule with
            # one stage on each rank, and waits for no backward.
            schedule_class = ScheduleGPipe
        # torch needs a loss function here. Each run replaces it by one that knows its batch.
        schedule = schedule_class(
            stages[0] if self._has_single_stages else stages,
            self._n_microbatches,
            loss_fn=self._loss_fn,
            scale_grads=False,
        )
        if not batch.backward and not self._has_single_stages:
            remove_backwards(schedule)
        return BuiltSchedule(inputs_key, microbatch_size, stages, schedule)

    def _run_schedule(self, batch: PipelineBatch, built: BuiltSchedule) -> tuple[Any, list[Tensor]]:
        """Run a schedule over a batch; return torch's output and the losses of micro-batches.

        Collective: every rank of ``pp`` must call it. Only the last stage gets output and losses.
        """
        row_numbers = torch.arange(built.microbatch_size * self._n_microbatches, device="cpu")
        args = batch.args
        split_kwargs = batch.split_kwargs
        if batch.size < len(row_numbers):
            # torch needs micro-batches of one size. The last row is repeated, and the loss leaves
            # out its copies.
            padded = row_numbers.clamp(max=batch.size - 1)
            args, split_kwargs = tree_map(partial(select_rows, padded), (args, split_kwargs))
        if not self._mesh.is_first("pp"):
            args = ()  # torch raises if another stage gets positional arguments
        run = built.schedule.step if batch.backward else built.schedule.eval
        losses: list[Tensor] = []
        with (
            register_stage_hooks(self._modules, batch, built),
            _keep_gradients(self._modules if batch.checks_output else []),
            set_schedule_loss(built.schedule, partial(self._compute_loss, batch, built)),
        ):
            # torch splits a tensor of row numbers as the target. The target itself may also be a
            # tuple or a dict, which torch cannot split.
            output = run(
                *args,
                **split_kwargs,
                target=row_numbers,
                losses=losses,
                return_outputs=batch.target is None,
            )
        return output, losses

    def _compute_loss(
        self, batch: PipelineBatch, built: BuiltSchedule, output: Any, row_numbers: Tensor
    ) -> Tensor:
        """Return the contribution of one micro-batch to the loss of the batch.

        Args:
            batch: the batch.
            built: the schedule that runs.
            output: the output of the last stage for the micro-batch.
            row_numbers: the positions of its rows in the padded batch.
        """
        if batch.target is None:
            return torch.zeros((), device="cpu")  # the caller wants the output
        start = int(row_numbers[0])
        num_counted = max(0, min(len(row_numbers), batch.size - start))
        # If all rows are padding, one of them is used with weight 0: every rank needs a backward
        # for its collectives.
        first = min(start, batch.size - 1)
        num_used = max(num_counted, 1)
        target = tree_map(partial(select_rows, slice(first, first + num_used)), batch.target)
        if num_used < len(row_numbers):
            # Only if there is padding: the backward of a slice allocates a full output.
            output = tree_map(partial(select_rows, slice(num_used)), output)
        loss = self._call_loss_fn(batch, built, output, target)
        if not batch.backward:
            # Free the output, which torch keeps for a backward. Evaluation runs none.
            built.stages[-1].clear_runtime_states()
        if self._reduction == "mean":
            return loss * (num_counted / batch.size)
        return loss * min(num_counted, 1)

    def _call_loss_fn(self, batch: PipelineBatch, built: BuiltSchedule, output: Any, target: Any) -> Tensor:
        """Return the loss; 0 after a problem, so that the other stages can finish their first run."""
        if not batch.problems and not self._lacks_batch_dim(batch, built):
            loss = self._loss_fn(output, target)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                # While torch infers the shapes, the inputs are uninitialized memory, whose losses
                # cannot be compared.
                if batch.checks_reduction and has_run_forward(built.stages[-1]):
                    batch.checks_reduction = False
                    self._check_reduction(batch, output, target)
                return loss
            got: object = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            batch.problems.append(f"loss_fn must return a tensor with one element, got {got}; reduce it")
        # It depends on every output, so that torch's backward finds a graph.
        zeros = [tensor.sum().double() * 0 for tensor in find_tensors(output)]
        return torch.stack(zeros).sum()

    @torch.no_grad()
    def _check_reduction(self, batch: PipelineBatch, output: Any, target: Any) -> None:
        """Compare the loss of one row with the loss of that row twice: only a sum doubles."""
        row = tree_map(partial(select_rows, slice(1)), (output, target))
        device = self._mesh.device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            try:
                loss_of_row = sum_losses([self._loss_fn(*row)], self._mesh)
                loss_of_two = sum_losses([self._loss_fn(*tree_map(repeat_rows, row))], self._mesh)
            except Exception:  # noqa: BLE001  a loss that needs a full micro-batch may be right
                return
        if self._reduction == "sum":
            wrong_factor = 1
            actual = "mean"
            remedy = 'return the mean over the rows, undivided, and pass reduction="mean"'
        else:
            wrong_factor = 2
            actual = "sum"
            remedy = 'pass reduction="sum"'
        # Only the factor of the other reduction is an error. The factor of other losses, such as
        # contrastive ones, can be anything.
        if abs(float(loss_of_two / loss_of_row) - wrong_factor) < _LOSS_FACTOR_TOLERANCE:
            batch.problems.append(
                f"loss_fn returns a {actual}, as the loss of a duplicated row is {wrong_factor} times "
                f'the loss of the row, but reduction is "{self._reduction}"; {remedy}'
            )


@contextmanager
def _keep_gradients(modules: list[nn.Module]) -> Iterator[None]:
    """Context manager: keep gradients that exist before a first run.

    torch sets the gradients of FSDP2's parameters to None after it has inferred the shapes between
    stages, also gradients that were accumulated before.
    """
    kept: list[tuple[nn.Parameter, Tensor]] = []
    for module in modules:
        for param in module.parameters():
            if param.grad is not None:
                kept.append((param, param.grad))
                param.grad = None
    try:
        yield
    finally:
        for param, grad in kept:
            if param.grad is not None:
                grad = param.grad + grad  # noqa: PLW2901
            param.grad = grad
