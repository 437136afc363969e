"""Pipelines: torch.distributed.pipelining over ``pp``, for batches of any size, the layers of stages, and weights that two share."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from namedmesh._torch import remove_backwards, tree_leaves, tree_map
from namedmesh.errors import LayoutError, ShapeError
from namedmesh.sizes import stage_range
from namedmesh.tensor_parallel.collectives import local_shard
from namedmesh.training.seeds import streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from namedmesh.mesh import NamedMesh

    Layers = Sequence[nn.Module] | nn.ModuleList
    Loss = Callable[[Tensor, Any], Tensor]

# Schedules whose stages go to the last rank and back; torch 2.8 does not have the second.
_RETURNING = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
_SHAPES = 4  # how many shapes of a batch are remembered: each holds the buffers of its stages


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

    The silent mistake it prevents: stages that number their layers from 0 each, so that checkpoints, learning
    rates and first weights by name take the layers of one stage for those of another.

    Args:
        layers: the number of layers of the whole model, or the layers.
        mesh: the mesh; may be None where ``stage`` and ``stages`` are given.
        stage: which stage; by default this rank's, with one stage on each rank of ``pp``.
        stages: the number of stages; by default the size of ``pp``.

    Returns:
        The numbers of the stage's layers; or the layers, in an ``nn.ModuleDict`` (of an ``nn.Sequential``, in one)
        under their numbers in the whole model: a layer has the same name in every layout.

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
    numbers = stage_range(count, stage, stages)
    if isinstance(layers, int):
        return numbers
    named = OrderedDict((str(each), layers[each]) for each in numbers)
    return nn.Sequential(named) if isinstance(layers, nn.Sequential) else nn.ModuleDict(named)


def stage_indices(mesh: NamedMesh, schedule: str = "1F1B", stages: int = 1) -> tuple[int, ...]:
    """Return which stages of the pipeline a rank has, when each has ``stages`` of them.

    The silent mistake it prevents: stages in the order of one schedule, run by another. Rank 0 of two has stages
    0 and 2 where stages go round (interleaved), and 0 and 3 where they go there and back (ZBV, DualPipeV).

    Raises:
        LayoutError: the schedule has no such name, or takes another number of stages.
    """
    kind, size, rank = _schedule_class(schedule), mesh.size("pp"), mesh.rank("pp")
    returns = kind.__name__ in _RETURNING
    if (issubclass(kind, PipelineScheduleSingle) and stages != 1) or (returns and stages != 2):  # noqa: PLR2004
        raise LayoutError(
            f"{schedule} takes {2 if returns else 1} of the stages on each rank, not {stages}; give as many, or "
            "another schedule"
        )
    return (rank, 2 * size - 1 - rank) if returns else tuple(rank + size * turn for turn in range(stages))


def _schedule_class(name: str) -> Any:
    try:
        return get_schedule_class("ZBVZeroBubble" if name.lower() == "zbv" else name)
    except ValueError as error:
        raise LayoutError(f"{error}; name one of them") from None


def pipeline(
    mesh: NamedMesh,
    stages: nn.Module | Sequence[nn.Module],
    schedule: str = "1F1B",
    *,
    microbatches: int,
    loss: Loss,
    reduction: Literal["mean", "sum"] = "mean",
    whole: Sequence[str] = (),
) -> Pipeline:
    """Return a pipeline over ``pp``, on one of torch's schedules; the stages may be tensor-parallel and in FSDP2.

    The silent mistakes it prevents: torch takes the mean of the microbatches' losses for the loss of the batch,
    which it is not where a last microbatch is smaller (or holds fewer tokens: ``reduction="sum"``). And schedules
    that compute the gradients of the weights later (zero bubble, ZBV, DualPipeV) leave out weights that FSDP2 has
    put away after the forward: here FSDP2 keeps them until the last backward of a step, and gathers them once. Nor does the
    run in which torch finds out the shape of a batch change anything: gradients that were there before, buffers (such as
    those of BatchNorm), and random generators and :data:`streams` are afterwards what they were, so that a job that goes on
    from a checkpoint draws what it would have drawn.

    Args:
        mesh: a mesh with an axis ``pp``, which may have size 1.
        stages: this rank's stage, or its stages in the order of :func:`stage_indices`.
        schedule: a name that ``torch.distributed.pipelining.schedules.get_schedule_class`` knows, or ``"ZBV"``.
        microbatches: into how many parts a batch is cut.
        loss: from the output of the last stage and the target, for some rows of the batch, their loss. The target is a
            tensor, or tuples, lists and dicts of tensors.
        reduction: whether ``loss`` is a mean over its rows, and so is that of the batch; or a part of a sum, such
            as of token losses that are divided by the number of tokens in the whole batch.
        whole: the names of keyword arguments that every microbatch gets as they are, such as positions: all others that are
            tensors have a row for each row of the batch.

    Returns:
        An object with ``step`` and ``eval``, which are called as those of torch's schedules, but with the batch on
        every rank of ``pp``.

    Raises:
        LayoutError: the schedule has no such name, or takes another number of stages.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(pp=1, device="cpu")
        >>> model = torch.nn.Linear(2, 1)
        >>> pipe = pipeline(mesh, model, microbatches=2, loss=torch.nn.functional.mse_loss)
        >>> losses = []
        >>> output = pipe.step(torch.ones(3, 2), target=torch.ones(3, 1), losses=losses)   # 3 rows in 2 parts
        >>> bool(torch.isclose(sum(losses), torch.nn.functional.mse_loss(output, torch.ones(3, 1))))
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    modules = [stages] if isinstance(stages, nn.Module) else list(stages)
    return Pipeline(mesh, modules, schedule, microbatches, loss, reduction, frozenset(whole))


@dataclass(eq=False, repr=False)
class Pipeline:
    """What :func:`pipeline` returns, and its arguments."""

    mesh: NamedMesh
    modules: list[nn.Module]
    schedule: str
    microbatches: int
    loss: Loss
    reduction: str
    whole: frozenset[str]

    def __post_init__(self) -> None:
        self._kind = _schedule_class(self.schedule)
        self._indices = stage_indices(self.mesh, self.schedule, len(self.modules))
        inside = [each for module in self.modules for each in module.modules()]
        self._sharded = [each for each in inside if isinstance(each, FSDPModule)]
        if self.mesh.size("pp") > 1 or not issubclass(self._kind, PipelineScheduleSingle):
            for each in self._sharded:
                each.set_reshard_after_forward(False, recurse=False)
        for module in self.modules:
            module.register_forward_pre_hook(_unpacked, with_kwargs=True)
        # By the shape of a batch, the rows of a part of it, and torch's schedule.
        self._built: dict[object, tuple[int, Any]] = {}
        self._target: Any = None
        self._count = 0

    def step(
        self, *args: Tensor, target: Any, losses: list[Tensor] | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Run forward and backward over a batch, of any size; the gradients are those of the loss of the batch.

        For the first batch of a shape, and for a larger one, the stages run once more to find out the shapes between
        them. In that, FSDP2's ranks take part together: give them batches of one size, or the largest first.

        Args:
            *args: the inputs of the first stage, on every rank.
            target: what the loss compares with, on every rank.
            losses: a list to put the losses of the microbatches in, on the rank of the last stage; the sum of
                them is the loss of the batch.
            **kwargs: what every stage's ``forward`` gets; tensors are split into microbatches as well, but for those that
                the pipeline was told are ``whole``.

        Returns:
            The output for the batch on the rank of the last stage, None on the others.

        Raises:
            ShapeError: the tensors have not the same number of rows, or none.
        """
        return self._run(args, kwargs, target, losses, train=True)

    def eval(
        self, *args: Tensor, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Run forward over a batch, of any size, without gradients; ``losses`` gets the loss of the batch.

        Args:
            *args: as for :meth:`step`, as are all arguments; without ``target`` no loss is computed.
            target: the same.
            losses: the same.
            **kwargs: the same.
        """
        with torch.no_grad():
            output = self._run(args, kwargs, target, None, train=False)
            if output is not None and target is not None and losses is not None:
                losses[:] = [self.loss(output, target)]
        for each in self._sharded:
            each.reshard()
        return output

    def _run(
        self,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Tensor] | None,
        *,
        train: bool,
    ) -> Tensor | None:
        by_row = [each for key, each in kwargs.items() if key not in self.whole]
        cut = [*args, *(each for each in by_row if isinstance(each, Tensor))]
        split = [*cut, *(each for each in tree_leaves(target) if isinstance(each, Tensor))]
        counts = {each.shape[0] if each.ndim else 0 for each in split}
        if len(counts) != 1 or not args or 0 in counts:
            raise ShapeError(
                f"the batch has {sorted(counts)} rows; give inputs and target with the same number of rows, one at "
                "least, on every rank of pp; name keyword arguments without them in pipeline(..., whole=(...))"
            )
        (count,) = counts
        shape = train, tuple((each.shape[1:], each.dtype, each.requires_grad) for each in cut)
        known = self._built.get(shape, (0, None))[0]
        rows = max(-(-count // self.microbatches), known)
        if rows != known:  # the buffers of a stage are made for one shape
            self._built[shape] = rows, self._schedule(train=train)
            if len(self._built) > _SHAPES:
                del self._built[next(iter(self._built))]
        schedule = self._built[shape][1]
        self._count = count
        # Parts of one size: the last row again, which the loss leaves out.
        index = torch.arange(rows * self.microbatches)
        filled = index.clamp(max=count - 1)

        def fill(value: Any) -> Any:
            whole = not isinstance(value, Tensor) or len(index) == count
            return value if whole else value[filled.to(value.device)]

        given = [fill(each) for each in args] if self.mesh.is_first("pp") else []
        named = {key: _Whole(value) if key in self.whole else fill(value) for key, value in kwargs.items()}
        with _unchanged_by_first_run(self.modules if rows != known else []):
            if train and target is not None:
                self._target = target
                output = schedule.step(*given, target=index, losses=losses, **named)
            else:
                output = schedule.step(*given, **named)
        return None if output is None else output[:count]

    def _schedule(self, *, train: bool) -> Any:
        mesh = self.mesh
        count = len(self.modules) * mesh.size("pp")
        stages = [
            PipelineStage(module, index, count, mesh.device, group=mesh.group("pp"))
            for module, index in zip(self.modules, self._indices, strict=True)
        ]
        single = issubclass(self._kind, PipelineScheduleSingle)
        loss = self._part if train else None
        # Without gradients, 1F1B does what GPipe does; torch 2.8 lets only the latter leave the backwards out.
        kind: Any = self._kind if train or not single else ScheduleGPipe
        schedule = kind(stages[0] if single else stages, self.microbatches, loss_fn=loss, scale_grads=False)
        if not train and not single:
            remove_backwards(schedule)
        return schedule

    def _part(self, output: Tensor, index: Tensor) -> Tensor:
        """Return what the rows of one microbatch add to the loss of the batch."""
        first = int(index[0])
        rows = min(len(index), self._count - first)
        if rows < 1:
            # Without a row of the batch, a row's loss times zero: the backward is the same on every rank.
            return 0 * self.loss(output[:1], _rows_of(self._target, slice(self._count - 1, self._count)))
        loss = self.loss(output[:rows], _rows_of(self._target, slice(first, first + rows)))
        return loss * (rows / self._count) if self.reduction == "mean" else loss


class _Whole:
    """A keyword argument that torch is not to split; what is no tensor, every microbatch gets."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _unpacked(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a stage its keyword arguments as they were given to the pipeline."""
    return args, {key: each.value if isinstance(each, _Whole) else each for key, each in kwargs.items()}


def _rows_of(target: Any, rows: slice) -> Any:
    """Return some rows of each tensor of a target."""
    return tree_map(lambda each: each[rows] if isinstance(each, Tensor) else each, target)


@contextmanager
def _unchanged_by_first_run(modules: list[nn.Module]) -> Iterator[None]:
    """Keep the first forward of new stages, in which torch finds out the shapes, from changing anything.

    torch drops the gradients of FSDP2 in it, and puts back its own default generators only.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    for module in modules:
        _protect_once(module)
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _protect_once(module: nn.Module) -> None:
    """Let the next forward of a module leave its buffers and all random generators as they are."""
    owners = [
        (owner, name, each) for owner in module.modules() for name, each in owner.named_buffers(recurse=False)
    ]
    around = ExitStack()

    def before(*_: Any) -> None:
        first.remove()
        around.enter_context(streams.unchanged())
        for owner, name, buffer in owners:
            setattr(owner, name, buffer.clone())

    def after(*_: Any) -> None:
        last.remove()
        around.close()
        for owner, name, buffer in owners:
            setattr(owner, name, buffer)

    first = module.register_forward_pre_hook(before, prepend=True)
    last = module.register_forward_hook(after, always_call=True)


@torch.no_grad()
def tie_stages(mesh: NamedMesh, parameter: Tensor | None) -> Callable[[], None]:
    """Tie a parameter of the first pipeline stage to one of the last, such as an embedding to the output; communicates.

    Prevents: two copies of one weight that learn apart, each from the gradients of its stage; and a norm of the gradients
    that counts them twice. The last stage's copy takes the first one's values, and is marked as ``shared`` for
    :func:`clip_grad_norm_`. Call it after ``fully_shard``, on every rank; both copies are sharded alike.

    Args:
        mesh: a mesh with an axis ``pp``.
        parameter: the first and the last stage's; None on the stages between them.

    Returns:
        A function that sums the two gradients: every rank calls it once a step, before clipping.

    Raises:
        ShapeError: the two have other shapes or types, or a stage has none; on the ranks of both.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(pp=1, device="cpu")
        >>> weight = torch.nn.Parameter(torch.ones(4, 2))
        >>> sum_gradients = training.tie_stages(mesh, weight)   # nothing to do on one stage
        >>> sum_gradients()
        >>> mesh.close(); dist.destroy_process_group()
    """
    if mesh.size("pp") == 1:
        return lambda: None
    with mesh.agreed("tie_stages") as maker:
        maker.compare({})
        made = maker.make_sets([(each[0], each[-1]) for each in mesh.layout.groups("pp")], "first_last_pp")
    if not (mesh.is_first("pp") or mesh.is_last("pp")):
        return lambda: None
    ((ranks, group),) = [(ranks, group) for ranks, group in made.items() if mesh.global_rank in ranks]
    described: list[Any] = [None, None]
    mine = None if parameter is None else (tuple(local_shard(parameter).shape), str(parameter.dtype))
    dist.all_gather_object(described, mine, group=group)
    if parameter is None or described[0] != described[1]:
        raise ShapeError(
            f"ranks {ranks[0]} and {ranks[1]} tie {described[0]} and {described[1]}; give both stages a parameter of one shape "
            "and type"
        )
    dist.broadcast(local_shard(parameter), src=ranks[0], group=group)
    if mesh.is_last("pp"):
        parameter.shared = True  # type: ignore[attr-defined]
    tied = parameter

    @torch.no_grad()
    def sum_gradients() -> None:
        if tied.grad is None:
            tied.grad = torch.zeros_like(tied)
        dist.all_reduce(local_shard(tied.grad), group=group)

    return sum_gradients
