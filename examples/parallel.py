"""The model over the mesh: a pipeline stage on each ``pp`` rank, sharded over ``tp``, its parameters over the rest.

Each axis is used by name: ``pp`` by training.pipeline, ``cp`` by training.context_attention, ``tp`` by a plan, ``ep`` by
ExpertParallel, ``dp`` and ``cp`` by FSDP2, which comes last, over what tensor parallelism left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from llama import Llama, first_weights, llama_plan
from moe import add_experts, expert_plan, shard_experts
from settings import Settings
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from namedmesh import NamedMesh, parallelize, training
from namedmesh.tensor_parallel import ColwiseParallel, cross_entropy

IGNORED = -100  # a target that does not count


def new_model(settings: Settings, layers: range | None = None) -> Llama:
    """Return the model, or some of its layers."""
    model = Llama(settings.sizes, layers)
    if settings.moe:
        add_experts(model, settings.sizes)
    return model


def whole_model(settings: Settings, layers: range | None = None) -> Llama:
    """Return the whole model with its first weights, which do not depend on who makes it."""
    model = new_model(settings, layers)
    training.init_parameters(model, settings.seed, distribution=partial(first_weights, settings.sizes))
    return model


def make_model(settings: Settings, mesh: NamedMesh) -> Llama:
    """Return this rank's part of the model."""
    model = whole_model(settings, training.stage_layers(settings.layers, mesh))
    model.to(mesh.device, settings.precision)
    for layer in model.layers.values():
        attention: Any = layer.get_submodule("attention")
        if "cp" in mesh.layout:
            attention.attend = partial(training.context_attention, mesh=mesh["cp"])
        if settings.dropout:
            attention.attend = partial(attend_and_drop, attention.attend, settings.dropout)
    experts = [layer.get_submodule("feed_forward.experts") for layer in model.layers.values() if settings.moe]
    for each in experts if mesh.size() > 1 else ():
        shard_experts(each, mesh)
    if mesh.size("tp") > 1:
        # Each rank has some of the features inside of attention and feed-forward network, between them a part of the
        # sequence, and at the end the logits of a part of the vocabulary.
        sizes = settings.sizes
        plan = llama_plan(sizes.heads, sizes.kv_heads, sequence_parallel=True)
        plan["output"] = ColwiseParallel(input_layouts=Shard(1))
        if settings.moe:
            plan = expert_plan(plan, mesh)
        parallelize(model, mesh["tp"], plan, missing="ignore")  # a stage has some of the modules
    for layer in model.layers.values():
        recompute_and_compile(layer, settings)
    if mesh.size() > 1:
        share_parameters(model, experts, mesh)
    return model


def recompute_and_compile(layer: Any, settings: Settings) -> None:
    """Compile a layer, and let it keep only what goes into it, as far as it is asked for; before FSDP2."""
    if settings.compile:
        layer.forward = torch.compile(layer.forward)
    if settings.recompute:  # around what is compiled: the compiler does not follow random streams
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def share_parameters(model: Llama, experts: list[Any], mesh: NamedMesh) -> None:
    """Spread the parameters over the ranks that hold the same ones."""
    over = training.fsdp_mesh(mesh)
    for each in experts:
        fully_shard(each, mesh=mesh["edp"])  # the few ranks that share them
    for layer in model.layers.values():
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)


def attend_and_drop(attend: Callable[..., Tensor], dropout: float, *heads: Tensor) -> Tensor:
    """Return attention, of which some outputs are dropped: others on each tp rank, which has other heads."""
    with training.streams("tensor"):
        return F.dropout(attend(*heads), dropout, training=torch.is_grad_enabled())


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of the tokens that count, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


class Step:
    """Forward and backward over a batch: leaves the gradients in this rank's part of the model."""

    def __init__(self, model: Llama, mesh: NamedMesh, *, microbatches: int) -> None:
        self._model, self._mesh, self._tokens = model, mesh, torch.tensor(0)
        self._pipe = training.pipeline(
            model, mesh, "1F1B", microbatches=microbatches, loss=self._loss, reduction="sum"
        )

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the batch of all ranks, the same on every rank."""
        return self._run(self._pipe.step, inputs, targets)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the same, without gradients."""
        return self._run(self._pipe.eval, inputs, targets)

    def _run(self, run: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        mesh = self._mesh
        inputs, targets = inputs.to(mesh.device), targets.to(mesh.device)
        if "cp" in mesh.layout:
            inputs, targets, self._model.positions = training.shard_sequence(inputs, targets, mesh=mesh["cp"])
        self._tokens = training.count_tokens(targets != IGNORED, mesh)  # once a step, for all micro-batches
        return training.mean_loss(run(inputs, target=targets), mesh)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy(logits, targets, self._mesh["tp"], ignore_index=IGNORED, reduction="sum")
        return training.token_mean(total, self._tokens, self._mesh)

    def generate(self, prompt: bytes, seq: int, count: int) -> bytes:
        """Return the likeliest text after some, up to ``seq`` bytes in all: the same on every rank."""
        mesh, text, positions = self._mesh, bytearray(prompt), torch.arange(seq)
        while len(text) < min(seq, len(prompt) + count):
            # What stands behind the text is not seen by it, and the shape is always the same.
            inputs = torch.tensor([[*text, *[0] * (seq - len(text))]], device=mesh.device)
            if "cp" in mesh.layout:
                inputs, positions = training.shard_sequence(inputs, mesh=mesh["cp"])
                self._model.positions = positions
            logits = self._pipe.eval(inputs)
            found = torch.tensor(0, device=mesh.device)
            if logits is not None:  # the last stage; the byte before is on one cp rank
                # Each tp rank has a part of the vocabulary.
                scores = DTensor.from_local(logits, mesh["tp"], [Shard(-1)]).full_tensor()
                found += scores[0, positions.to(mesh.device) == len(text) - 1].argmax(-1).sum()
            for axis in [each for each in ("pp", "cp") if each in mesh.layout]:
                dist.all_reduce(found, group=mesh.group(axis))
            text.append(int(found))
        return bytes(text[len(prompt) :])
