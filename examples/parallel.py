"""The model over the mesh: a pipeline stage on each ``pp`` rank, cut over ``tp``, its parameters spread over ``dp``.

Each axis is used by name, and by one library: ``pp`` by torch.distributed.pipelining, ``tp`` by a plan of
parallel styles, ``dp`` by FSDP2. The order matters: FSDP2 comes last, over what tensor parallelism left.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from llama import Llama, init_weights
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel

from namedmesh.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from settings import Settings

    from namedmesh import NamedMesh

    LossFunction = Callable[[Tensor, Tensor], Tensor]
    BatchFunction = Callable[[Tensor, Tensor], list[Tensor]]

__all__ = ["Step", "make_model", "stage_layers", "token_loss"]


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of one pipeline stage: as even as can be, the longer stages last.

    Example:
        >>> [list(stage_layers(5, 2, stage)) for stage in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def make_model(settings: Settings, mesh: NamedMesh) -> Llama:
    """This rank's part of the model, with its first weights."""
    layers = stage_layers(settings.layers, mesh.size("pp"), mesh.rank("pp"))
    model = Llama(settings.sizes, layers)
    init_weights(model, settings.sizes, settings.seed)
    model.to(mesh.device, settings.precision)
    if mesh.size("tp") > 1:
        parallelize(model, mesh["tp"], tensor_parallel_plan(model))
    if mesh.size("dp") > 1:
        # A pipeline comes back to its weights for every microbatch: gather them once a step and keep them.
        regather = mesh.size("pp") == 1
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=regather)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=regather)
    if mesh.size("dp") > 1 and mesh.size("tp") > 1:
        # Where DTensor sums over both axes, as for the gradient norm, it finds this and sums once.
        mesh.flatten("dp", "tp")
    return model


def tensor_parallel_plan(model: Llama) -> dict[str, ParallelStyle]:
    """How each module of this part of the model is cut over ``tp``.

    Between the modules each rank has a part of the *sequence*, so the norms and the residual path are cut too.
    Attention and feed-forward network gather the sequence, work on some of their *features*, and scatter the
    sum over the sequence again.
    """
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": gather,
        "layers.*.attention.query": ColwiseParallel(),
        "layers.*.attention.key": ColwiseParallel(),
        "layers.*.attention.value": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.feed_forward": gather,
        "layers.*.feed_forward.gate": ColwiseParallel(),
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    # A plan may name only what is there: the middle stages of a pipeline have no embedding and no head.
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1))
    return plan


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a token, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallel_loss(mesh: NamedMesh) -> LossFunction:
    """The same loss where each ``tp`` rank has the logits of a part of the vocabulary, and only that."""
    if mesh.size("tp") == 1:
        return token_loss

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        whole = DTensor.from_local(logits, mesh["tp"], [Shard(-1)])
        return token_loss(whole, targets)

    return loss


class Step:
    """Forward and backward over one batch: leaves the gradients in the model, returns the loss.

    Args:
        model: this rank's part of the model.
        mesh: where the other parts are.
        pieces: the number of microbatches.
    """

    def __init__(self, model: Llama, mesh: NamedMesh, pieces: int) -> None:
        self._model = model
        self._mesh = mesh
        self._pieces = pieces
        self._loss = parallel_loss(mesh)
        # Makes the group for the mean loss, all ranks together; from here on mesh.group() knows it.
        mesh.flatten("pp", "dp")
        self._run = self._pipelined() if mesh.size("pp") > 1 else self._in_turn

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the batch of all ranks, the same on every rank."""
        sharded = self._mesh.size("tp") > 1
        with loss_parallel() if sharded else contextlib.nullcontext():
            losses = self._run(inputs, targets)
        # Only the last stages know a loss, and the ranks of a tp group know the same one.
        mesh = self._mesh
        total = torch.zeros((), device=mesh.device, dtype=torch.float64)
        for loss in losses:
            local = loss.to_local() if isinstance(loss, DTensor) else loss
            total += local.detach() / (self._pieces * mesh.size("dp"))
        torch.distributed.all_reduce(total, group=mesh.group("pp", "dp"))
        return total

    def _in_turn(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses = []
        pairs = zip(inputs.chunk(self._pieces), targets.chunk(self._pieces), strict=True)
        for index, (some_inputs, some_targets) in enumerate(pairs):
            if isinstance(self._model, FSDPModule):
                # Gradients add up on their own rank until the last microbatch.
                self._model.set_requires_gradient_sync(index == self._pieces - 1)
            loss = self._loss(self._model(some_inputs), some_targets)
            (loss / self._pieces).backward()
            losses.append(loss)
        return losses

    def _pipelined(self) -> BatchFunction:
        mesh = self._mesh
        stage = PipelineStage(
            self._model, mesh.rank("pp"), mesh.size("pp"), mesh.device, group=mesh.group("pp")
        )
        schedule = Schedule1F1B(stage, self._pieces, loss_fn=self._loss)

        def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
            losses: list[Tensor] = []
            # The first stage is fed, the last one is told what is right, and those between are told nothing.
            schedule.step(
                *[inputs] * mesh.is_first("pp"),
                target=targets if mesh.is_last("pp") else None,
                losses=losses,
            )
            return losses

        return run
