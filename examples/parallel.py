"""The model over the mesh: a pipeline stage on each ``pp`` rank, cut over ``tp``, its parameters spread over the rest.

Each axis is used by name: ``pp`` by training.pipeline, ``cp`` by training.context_attention, ``tp`` by a plan, ``ep`` by
ExpertParallel, ``dp`` and ``cp`` by FSDP2, which comes last, over what tensor parallelism left.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from llama import Llama, first_weights
from moe import add_experts, expert_plan, shard_experts
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel

from namedmesh import parallelize, training
from namedmesh.tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

if TYPE_CHECKING:
    from settings import Settings

    from namedmesh import NamedMesh


IGNORED = -100  # a target that does not count


def whole_model(settings: Settings, layers: range | None = None) -> Llama:
    """The model, or some of its layers, with its first weights: the same whoever makes it."""
    model = Llama(settings.sizes, layers)
    if settings.moe:
        add_experts(model, settings.sizes)
    training.init_parameters(model, settings.seed, distribution=partial(first_weights, settings.sizes))
    return model


def make_model(settings: Settings, mesh: NamedMesh) -> Llama:
    """This rank's part of the model."""
    model = whole_model(settings, training.stage_layers(settings.layers, mesh))
    model.to(mesh.device, settings.precision)
    if "cp" in mesh.layout:
        for layer in model.layers.values():
            attention: Any = layer.get_submodule("attention")
            attention.attend = partial(training.context_attention, mesh=mesh["cp"])
    experts = [layer.get_submodule("feed_forward.experts") for layer in model.layers.values() if settings.moe]
    for each in experts if mesh.size() > 1 else ():
        shard_experts(each, mesh)
    if mesh.size("tp") > 1:
        plan = tensor_parallel_plan(model)
        parallelize(model, mesh["tp"], expert_plan(plan, mesh) if settings.moe else plan)
    if mesh.size() == 1:
        return model
    for each in experts:
        fully_shard(each, mesh=mesh["edp"])  # the few ranks that share them
    for layer in model.layers.values():
        fully_shard(layer, mesh=training.fsdp_mesh(mesh))
    fully_shard(model, mesh=training.fsdp_mesh(mesh))
    if settings.moe:
        training.set_expert_divisor(model, mesh)
    return model


def tensor_parallel_plan(model: Llama) -> dict[str, ParallelStyle]:
    """How each module of this part of the model is cut over ``tp``.

    Between the modules each rank has a part of the *sequence*, so the norms and the residual path are cut too.
    Attention and feed-forward network gather the sequence, work on some of their *features*, and scatter the
    sum over the sequence again.
    """
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {}
    for module, columns, row in (
        ("attention", ("query", "key", "value"), "out"),
        ("feed_forward", ("gate", "up"), "down"),
    ):
        plan |= {f"layers.*.{module}_norm": SequenceParallel(), f"layers.*.{module}": gather}
        plan |= {f"layers.*.{module}.{column}": ColwiseParallel() for column in columns}
        plan[f"layers.*.{module}.{row}"] = RowwiseParallel(output_layouts=Shard(1))
    # A plan may name only what is there: the middle stages of a pipeline have no embedding and no head.
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1))
    return plan


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of the tokens that count, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


class Step:
    """Forward and backward over a batch, in so many pieces: leaves the gradients in this rank's part of the model."""

    def __init__(self, model: Llama, mesh: NamedMesh, pieces: int) -> None:
        self._model, self._mesh, self._tokens = model, mesh, torch.tensor(0)
        self._pipe = training.pipeline(mesh, model, microbatches=pieces, loss=self._loss, reduction="sum")

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the batch of all ranks, the same on every rank."""
        mesh = self._mesh
        if "cp" in mesh.layout:
            inputs, targets, self._model.positions = training.shard_sequence(inputs, targets, mesh=mesh["cp"])
        self._tokens = (targets != IGNORED).sum()
        losses: list[Tensor] = []
        with loss_parallel() if mesh.size("tp") > 1 else contextlib.nullcontext():
            self._pipe.step(inputs, target=targets, losses=losses)
        # Only the last stage knows the loss.
        total = torch.zeros((), device=mesh.device, dtype=torch.float64)
        total += sum(each.item() for each in losses)
        dist.all_reduce(total, group=mesh.group("pp"))
        return total

    def next_byte(self, text: bytes | bytearray, seq: int) -> int:
        """The likeliest byte after some, fewer than ``seq`` of them: the same on every rank."""
        mesh, positions = self._mesh, torch.arange(seq)
        # What stands behind the text is not seen by it, and the shape is always the same.
        inputs = torch.tensor([[*text, *[0] * (seq - len(text))]], device=mesh.device)
        if "cp" in mesh.layout:
            inputs, positions = training.shard_sequence(inputs, mesh=mesh["cp"])
            self._model.positions = positions
        logits = self._pipe.eval(inputs)
        found = torch.tensor(0, device=mesh.device)
        if logits is not None:  # the last stage
            if mesh.size("tp") > 1:
                logits = DTensor.from_local(logits, mesh["tp"], [Shard(-1)]).full_tensor()
            found += logits[0, positions.to(mesh.device) == len(text) - 1].argmax(-1).sum()  # on one cp rank
        for axis in [each for each in ("pp", "cp") if each in mesh.layout]:
            dist.all_reduce(found, group=mesh.group(axis))
        return int(found)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._mesh.size("tp") > 1:  # each rank has the logits of a part of the vocabulary, and only that
            logits = DTensor.from_local(logits, self._mesh["tp"], [Shard(-1)])
        return training.token_mean(loss_sum(logits, targets), self._tokens, self._mesh)
