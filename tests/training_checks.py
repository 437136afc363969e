"""A tiny language model on any layout, beside the same in one process: what the training functions are checked with.

Every function of a rank returns the largest difference that it saw, so that one set of ranks checks all of it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import tiny
import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from namedmesh import training
from namedmesh._torch import TORCH
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

if TYPE_CHECKING:
    from namedmesh import NamedMesh

# Of no more ranks than they need: each costs as much as the others.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"tp": 4},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 4, "tp": 2},
)
# Plain torch does so too: the first exchange of a pipeline's stages has two sizes at its two ends.
PIPELINES = pytest.mark.skipif(
    TORCH.release[:2] == (2, 9), reason="torch 2.9's pipelines end the process on gloo"
)
VOCABULARY, BATCH, SEQUENCE = 8, 8, 8
IGNORED = -100


def layout_name(layout: dict[str, Any]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in layout.items())


def whole_model(mesh: NamedMesh) -> nn.Sequential:
    """Blocks and a head, position by position, with the same weights every time.

    Four blocks for the stages of a pipeline, and otherwise two: each costs every rank as much as a large one.
    """
    torch.manual_seed(3)
    blocks = 4 if "pp" in mesh.layout else 2
    return nn.Sequential(
        *(tiny.Block() for _ in range(blocks)), nn.Linear(tiny.WIDTH, VOCABULARY, bias=False)
    ).double()


def whole_batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets, of which more and more are ignored: every rank counts another number of tokens."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(BATCH, SEQUENCE, tiny.WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    masked = torch.rand(BATCH, SEQUENCE, generator=generator) < torch.linspace(0, 0.9, BATCH)[:, None]
    return inputs, targets.masked_fill(masked, IGNORED)


def my_batch(mesh: NamedMesh) -> tuple[Tensor, Tensor]:
    """This rank's samples, and of each its part of the sequence."""
    place = training.sampler_kwargs(mesh)
    inputs, targets = (each[place["rank"] :: place["num_replicas"]] for each in whole_batch())
    if "cp" in mesh.layout:
        inputs, targets = (each.chunk(mesh.size("cp"), 1)[mesh.rank("cp")] for each in (inputs, targets))
    return inputs, targets


def my_model(mesh: NamedMesh, **options: Any) -> nn.Sequential:
    """This rank's stage, sharded over tp and over the ranks of ``fsdp_mesh``; modules are named as in the whole."""
    net = whole_model(mesh)
    if "pp" in mesh.layout:
        keep_stage(net, mesh)
    if "tp" in mesh.layout:
        blocks = [name for name, module in net.named_children() if isinstance(module, tiny.Block)]
        plan: dict[str, Any] = {f"{name}.up": ColwiseParallel() for name in blocks}
        plan |= {f"{name}.down": RowwiseParallel() for name in blocks}
        if isinstance(net[-1], nn.Linear):
            plan[str(len(net) - 1)] = ColwiseParallel(use_local_output=False)
        parallelize(net, mesh["tp"], plan)
    if training.data_axes(mesh):
        for module in [each for each in net if isinstance(each, tiny.Block)] + [net]:
            fully_shard(module, mesh=training.fsdp_mesh(mesh), **options)
    return net


def keep_stage(net: nn.Sequential, mesh: NamedMesh) -> None:
    """Leave nothing of the model but this rank's pipeline stage; the last one has the head."""
    stages, stage = mesh.size("pp"), mesh.rank("pp")
    blocks = len(net) - 1
    for index in range(blocks + 1):
        if min(index * stages // blocks, stages - 1) != stage:
            net[index] = nn.Identity()


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def step(net: nn.Module, mesh: NamedMesh) -> float | None:
    """Leave the gradients of the global batch in the model; the loss, or None on a stage that is not the last.

    In two micro-batches of different lengths, or in two through the pipeline.
    """
    inputs, targets = my_batch(mesh)
    tokens = (targets != IGNORED).sum()

    def loss(logits: Tensor, some_targets: Tensor) -> Tensor:
        return training.token_mean(loss_sum(logits, some_targets), tokens, mesh)

    with loss_parallel() if "tp" in mesh.layout else contextlib.nullcontext():
        if "pp" in mesh.layout:
            return _pipelined(net, mesh, inputs, targets, loss)
        total = 0.0
        # Of one sample or two, and of what is left.
        parts = [len(inputs) - len(inputs) * 3 // 4, len(inputs) * 3 // 4]
        pairs = [pair for pair in zip(inputs.split(parts), targets.split(parts), strict=True) if len(pair[0])]
        for index, (some_inputs, some_targets) in enumerate(pairs):
            if isinstance(net, FSDPModule):
                net.set_requires_gradient_sync(index == len(pairs) - 1)
            value = loss(net(some_inputs), some_targets)
            value.backward()
            total += value.item()
        return total


def _pipelined(net: nn.Module, mesh: NamedMesh, inputs: Tensor, targets: Tensor, loss: Any) -> float | None:
    stage = PipelineStage(net, mesh.rank("pp"), mesh.size("pp"), mesh.device, group=mesh.group("pp"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss, scale_grads=False)
    losses: list[Tensor] = []
    last = mesh.is_last("pp")
    given = [inputs] if mesh.is_first("pp") else []
    schedule.step(*given, target=targets if last else None, losses=losses)
    return sum(each.item() for each in losses) if last else None


def reference(mesh: NamedMesh) -> tuple[float, nn.Sequential]:
    """The loss and the gradients of one process, plainly."""
    net = whole_model(mesh)
    inputs, targets = whole_batch()
    loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), net


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients_differ(net: nn.Module, expected: nn.Module) -> float:
    """The largest difference between a model's gradients and those of the whole model."""
    wanted = dict(expected.named_parameters())
    differences = [0.0]
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        grad = wanted[name].grad
        assert grad is not None
        differences.append((whole(parameter.grad) - grad).abs().max().item())
    return max(differences)
