"""Pipeline parallelism over ``pp``: torch's schedules for batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from namedmesh._errors import ShapeError, TrainingError
from namedmesh._torch.modules import reshards_after_forward
from namedmesh._torch.pipelines import MicrobatchStage, set_schedule_loss
from namedmesh._torch.tensors import tree_leaves, tree_map
from namedmesh.mesh.groups import get_backends
from namedmesh.mesh.internal import get_groups, require_named_mesh
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.training.loss import sum_losses
from namedmesh.training.stages import SPLIT_BACKWARD_SCHEDULES, find_schedule_class, stage_indices

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


_SCHEDULES_OF_ANY_NUMBER: dict[type, type] = {
    ScheduleDualPipeV: ScheduleZBVZeroBubble,
    ScheduleInterleaved1F1B: ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble: ScheduleLoopedBFS,
}


class Pipeline:
    """Train and evaluate a model in pipeline stages over ``pp``, on one of torch's schedules.

    The stages may be tensor-parallel and sharded by FSDP2. FSDP2 modules whose
    ``reshard_after_forward`` has its default value keep their unsharded weights until the last
    backward of a step. An explicit True is respected, but raises an error if the schedule runs
    weight gradients later (InterleavedZeroBubble, ZBV, DualPipeV). These schedules reject stages in
    DistributedDataParallel.

    Args:
        model: this rank's stage, or its stages in the order of :func:`stage_indices`.
        mesh: a mesh with an axis ``pp``, which may have size 1.
        schedule: a name that ``torch.distributed.pipelining.schedules.get_schedule_class`` knows,
            or ``"ZBV"``.
        n_microbatches: the number of micro-batches that a batch is split into.
        loss_fn: computes the loss of one micro-batch from the output of
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
            needs, or DDP would not average gradients.
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
        mesh = require_named_mesh(mesh, "Pipeline")
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
        # torch's schedules with their stages, with or without backward, by number of micro-batches.
        self._schedules: dict[tuple[bool, int], tuple[Any, list[MicrobatchStage]]] = {}
        self._fsdp_modules: list[FSDPModule] = []
        for module in self._modules:
            for submodule in module.modules():
                if isinstance(submodule, FSDPModule):
                    self._fsdp_modules.append(submodule)
        if mesh.size("pp") > 1 or not self._has_single_stages:
            self._keep_weights_unsharded()
        has_ddp = any(isinstance(module, DistributedDataParallel) for module in self._modules)
        if has_ddp and self._splits_backward:
            raise TrainingError(
                f"{schedule} computes gradients of weights without the backward hooks of DDP, "
                "which would not average them; use fully_shard(stage, "
                "mesh=training.fsdp_mesh(mesh)) with the axes dp_replicate and dp_shard=1, or "
                "the schedule 1F1B, GPipe or Interleaved1F1B"
            )

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

        Batches may differ in size and shape. The sizes of the micro-batches differ by one row at
        most. A batch with fewer rows than micro-batches has one micro-batch for each row.

        The modules and ``loss_fn`` run once for each micro-batch, and never else.

        Collective: every rank of ``pp`` must call it.

        Args:
            *args: the inputs of the first stage. Every rank of ``pp`` must pass the same.
            target: the second argument of ``loss_fn``. Every rank of ``pp`` must pass it.
            **kwargs: keyword arguments of every stage.

        Returns:
            On the rank of the last stage the loss of this rank's batch, and 0 on the other ranks,
            for :func:`mean_loss`. It is detached from the graph.

        Raises:
            ShapeError: the inputs cannot be split into micro-batches.
            TrainingError: on the rank of the stage; a stage does not return tensors, or ``loss_fn``
                does not return one element. The other ranks wait for this rank until it ends.
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
            stage, and None on the other ranks. Its tensors must have a batch dim.

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
        split_kwargs = {name: kwargs[name] for name in kwargs if name not in self._replicate_kwargs}
        size = _find_batch_size(args, split_kwargs, target)
        n_microbatches = min(self._n_microbatches, size)
        # The schedule is stored again after the batch: an exception interrupts torch's schedule
        # within a batch, so that it cannot be used again.
        key = (backward, n_microbatches)
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(n_microbatches, backward)
        schedule, stages = self._schedules.pop(key)
        for stage in stages:
            stage.begin({name: kwargs[name] for name in kwargs if name in self._replicate_kwargs})
        if not self._mesh.is_first("pp"):
            args = ()  # torch raises if another stage gets positional arguments
        run = schedule.step if backward else schedule.eval
        losses: list[Tensor] = []
        with set_schedule_loss(schedule, partial(self._compute_loss, target, size)):
            # The target may be a tuple or a dict, which torch cannot split. It splits row numbers.
            output = run(
                *args,
                **split_kwargs,
                target=torch.arange(size, device="cpu"),
                losses=losses,
                return_outputs=target is None,
            )
        for stage in stages:
            stage.finish()
        self._schedules[key] = schedule, stages
        return output, losses

    def _build_schedule(self, n_microbatches: int, backward: bool) -> tuple[Any, list[MicrobatchStage]]:
        """Return one of torch's schedules, and its stages. Collective over ``pp``."""
        group = self._mesh.group("pp")
        cpu_group = _get_cpu_group(self._mesh)
        num_stages = len(self._modules) * self._mesh.size("pp")
        stages: list[MicrobatchStage] = []
        for module, index in zip(self._modules, self._stage_indices, strict=True):
            stage = MicrobatchStage(
                module, index, num_stages, self._mesh.device, group=group, cpu_group=cpu_group
            )
            stages.append(stage)
        if group.size() > 1:
            # NCCL creates a communicator in its first call, for which all ranks must come together.
            dist.all_reduce(torch.zeros((), device=self._mesh.device), group=group)
        schedule_class: Any = self._schedule_class
        is_smaller = n_microbatches < self._n_microbatches
        if self._has_single_stages and (is_smaller or not backward):
            # GPipe runs the same passes as every other schedule with one stage on each rank. Without
            # a backward it waits for none, and it may have fewer micro-batches than stages.
            schedule_class = ScheduleGPipe
        elif is_smaller:
            # Some schedules need a multiple or a smallest number of micro-batches. Others, with the
            # same stages on each rank, take any number.
            schedule_class = _SCHEDULES_OF_ANY_NUMBER.get(schedule_class, schedule_class)
        # torch needs a loss function here. Each run replaces it by one that knows its batch.
        schedule = schedule_class(
            stages[0] if self._has_single_stages else stages,
            n_microbatches,
            loss_fn=self._loss_fn,
            scale_grads=False,
        )
        return schedule, stages

    def _compute_loss(self, target: Any, size: int, output: Any, row_numbers: Tensor) -> Tensor:
        """Return the contribution of one micro-batch to the loss of the batch.

        Args:
            target: the target of the batch.
            size: the number of its rows.
            output: the output of the last stage for the micro-batch.
            row_numbers: the positions of its rows in the batch.
        """
        if target is None:
            return torch.zeros((), device="cpu")  # the caller wants the output
        # The offset of the view that torch took of the row numbers is the first of them.
        start = row_numbers.storage_offset()
        rows = slice(start, start + len(row_numbers))
        loss = self._loss_fn(output, tree_map(partial(_select_rows, rows), target))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got: object = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainingError(f"loss_fn must return a tensor with one element, got {got}; reduce it")
        return loss * (len(row_numbers) / size) if self._reduction == "mean" else loss


def _find_batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> int:
    """Return the number of rows of a batch.

    Args:
        args: positional arguments, whose tensors have the batch dim.
        kwargs: keyword arguments whose tensors have the batch dim.
        target: the target of the loss; None if there is no loss.

    Raises:
        ShapeError: the arguments cannot be split into micro-batches. Lists all problems.
    """
    values: dict[object, Any] = dict(enumerate(args))
    values.update(kwargs)
    values["target"] = target
    problems: list[str] = []
    sizes: set[int] = set()
    for name, value in values.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                sizes.add(leaf.shape[0] if leaf.ndim else 0)
            elif any(isinstance(attribute, Tensor) for attribute in getattr(leaf, "__dict__", {}).values()):
                # torch passes such objects unchanged to every micro-batch.
                problems.append(
                    f"the argument {name} is a {type(leaf).__name__}, which cannot be split into "
                    "micro-batches; pass tensors, or name it in Pipeline(..., replicate_kwargs=...)"
                )
    if len(sizes) != 1 or not args or 0 in sizes:
        problems.append(
            f"the batch sizes of the inputs and the target are {sorted(sizes)}; pass at least one "
            "positional input, and tensors of one batch size of at least 1; name keyword arguments "
            "without a batch dim in Pipeline(..., replicate_kwargs=...)"
        )
    if problems:
        raise ShapeError(*problems)
    return sizes.pop()


def _select_rows(rows: slice, value: Any) -> Any:
    """Return some rows (dim 0) of a tensor. Return other objects unchanged."""
    return value[rows] if isinstance(value, Tensor) else value


def _get_cpu_group(mesh: NamedMesh) -> dist.ProcessGroup:
    """Return a group over ``pp`` for tensors on the CPU; create it if needed.

    With a group that has no backend for the CPU, such as NCCL's, the host would have to wait for
    the device in each batch. Collective: every rank of ``pp`` must call it.
    """
    group = mesh.group("pp")
    if "cpu" in get_backends(group):
        return group
    return get_groups(mesh).get_gloo_group(mesh.ranks("pp"), "pipelines")
