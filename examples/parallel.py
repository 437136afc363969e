"""What knows of ranks: the mesh, a stage of the model on each ``pp`` rank, its shards over the other axes, and a step.

Each axis is used by name: ``pp`` by training.pipeline, ``cp`` by training.context_attention, ``tp`` by a plan, ``ep`` by
ExpertParallel, ``dp`` and ``cp`` by FSDP2, which comes last, over what tensor parallelism left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInputOutput
from torch.utils.checkpoint import checkpoint

import namedmesh
from namedmesh import Layout, NamedMesh, training
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    ExpertParallel,
    KeepWhole,
    KeyValueParallel,
    LocalParameters,
    RowwiseParallel,
    ShardedExperts,
    SharedInput,
    cross_entropy,
    parallelize,
)

IGNORED = -100  # a target that does not count


def make_mesh(settings: Any, device: torch.device) -> NamedMesh:
    """Make the mesh, and with experts another view of the same ranks."""
    context = {"cp": settings.cp} if settings.cp > 1 else {}
    sizes = {"pp": settings.pp, "dp": settings.dp, **context, "tp": settings.tp}
    mesh = namedmesh.init_mesh(sizes, device=device)
    if settings.moe:
        mesh.add_view("expert", pp=settings.pp, edp=-1, ep=settings.ep, etp=settings.etp)
    return mesh


def llama_plan(heads: int, kv_heads: int) -> dict[str, ParallelStyle]:
    """Return the plan: each rank has some of the features inside of attention and feed-forward network.

    Between them it has a part of the sequence, and at the end the logits of a part of the vocabulary. The input of ``attention``, and
    of ``feed_forward``, is gathered once for its column layers, and its gradient summed once.
    """
    sequence = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "output": ColwiseParallel(input_layouts=sequence),
        "norm": LocalParameters(),  # as torch's SequenceParallel, on plain tensors
        "layers.*.*_norm": LocalParameters(),
    }
    for name in ("attention", "feed_forward"):
        plan[f"layers.*.{name}"] = SharedInput(input_layouts=sequence)
    for name in ("attention.wq", "feed_forward.w1", "feed_forward.w3"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("attention.wk", "attention.wv"):
        plan[f"layers.*.{name}"] = KeyValueParallel(heads, kv_heads)  # there may be fewer of them than ranks
    for name in ("attention.wo", "feed_forward.w2"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=sequence)
    return plan


def expert_plan(plan: dict[str, ParallelStyle], mesh: NamedMesh) -> dict[str, ParallelStyle]:
    """Return a plan with experts in place of feed-forward networks."""
    plan = {key: style for key, style in plan.items() if not key.startswith("layers.*.feed_forward")}
    if mesh.size("etp") == 1:
        # Each tp rank routes its part of the sequence; the parts of the router's gradient are summed.
        plan["layers.*.feed_forward.router"] = LocalParameters()
        return plan
    # The ranks along etp work on the same tokens, each on a part of every expert's features.
    plan["layers.*.feed_forward"] = PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )
    plan["layers.*.feed_forward.router"] = KeepWhole()
    return plan


def shard_experts(experts: nn.Module, mesh: NamedMesh) -> None:
    """Shard the experts over ``ep``, their features over ``etp``; the plan over ``tp``, which comes later, leaves them alone."""
    if mesh.size("etp") > 1:
        features = ShardedExperts({"gate": Shard(2), "up": Shard(2), "down": Shard(1)})
        parallelize(experts, mesh["etp"], features)
    parallelize(experts, mesh["ep"], ExpertParallel(mesh))


def shard_model(model: Any, settings: Any, mesh: NamedMesh) -> None:
    """Spread this rank's stage over the other axes, in place."""
    layers, several = list(model.layers.values()), mesh.size() > 1
    experts = [layer.feed_forward.experts for layer in layers if settings.moe and several]
    for each in experts:
        shard_experts(each, mesh)
    if mesh.size("tp") > 1:
        plan = llama_plan(settings.heads, settings.kv_heads)
        plan = expert_plan(plan, mesh) if settings.moe else plan
        parallelize(model, mesh["tp"], plan, missing="ignore")  # a stage has some of the modules
    for layer in layers:
        if "cp" in mesh.layout:
            layer.attention.attend = partial(training.context_attention, mesh=mesh["cp"])
        if settings.compile:
            layer.forward = torch.compile(layer.forward)
        if settings.recompute:  # around what is compiled: the compiler does not follow random streams
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if several:
        for each in experts:
            fully_shard(each, mesh=mesh["edp"])  # the few ranks that share them
        over = training.fsdp_mesh(mesh)
        for layer in layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)


class Step:
    """Forward and backward over a batch: leaves the gradients in this rank's part of the model."""

    def __init__(self, model: nn.Module, mesh: NamedMesh, *, microbatches: int) -> None:
        self._model: Any = model
        self._mesh, self._tokens = mesh, torch.tensor(0)
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


def picture(layout: Layout, layers: int) -> str:
    """Draw a table of the ranks: a column for each pipeline stage, a row for each data-parallel rank."""
    stages = layout["pp"]
    rows = [[""]] + [[f"dp {dp}"] for dp in range(layout["dp"])]
    for stage in range(stages):
        here = training.stage_layers(layers, None, stage=stage, stages=stages)
        rows[0].append(f"pp {stage}, layers {here[0]}-{here[-1]}")
        for dp, row in enumerate(rows[1:]):
            row.append(f"[{' '.join(map(str, layout.where(pp=stage, dp=dp)))}]")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(["", *map(str.ljust, row, widths)]).rstrip() for row in rows]
    return "\n".join(
        [*lines, "In brackets: the ranks that work together on these layers and this part of the batch."]
    )
