"""What knows of ranks: the mesh, a stage of the model on each ``pp`` rank, its shards over the other axes, and a step.

Each axis is used by name: ``pp`` by training.Pipeline, ``cp`` by training.context_attention, ``tp`` by a plan, ``ep`` by
ExpertParallel, ``dp`` and ``cp`` by FSDP2, which comes last, over what tensor parallelism left.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInputOutput
from torch.utils.checkpoint import checkpoint

import namedmesh
from namedmesh import NamedMesh, TrainingError, training
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    ExpertParallel,
    ExpertTensorParallel,
    KeyValueParallel,
    LocalParameters,
    NoParallel,
    RowwiseParallel,
    SharedInput,
    cross_entropy,
    parallelize,
)

IGNORED = -100  # a target that does not count
HEAD = 8  # the features of an attention head


def make_mesh(settings: Any) -> NamedMesh:
    """Make the mesh, and with experts another view of the same ranks."""
    context = {"cp": settings.cp} if settings.cp > 1 else {}
    sizes = {"pp": settings.pp, "dp": settings.dp, **context, "tp": settings.tp}
    mesh = namedmesh.init_mesh(sizes, device=settings.device or None)
    if settings.moe:
        mesh.add_view("expert", pp=settings.pp, edp=-1, ep=settings.ep, etp=settings.etp)
    elif settings.ep * settings.etp > 1:
        raise TrainingError("--ep and --etp are for experts; give --moe, too")
    if settings.batch % mesh.size("dp"):
        raise TrainingError(f"--batch {settings.batch} is not divisible by dp={mesh.size('dp')}")
    return mesh


def llama_plan(heads: int, etp: int | None) -> dict[str, ParallelStyle]:
    """Return the plan: each rank has some of the features inside of attention and feed-forward network, or of ``etp`` for experts.

    Between them it has a part of the sequence, and at the end the logits of a part of the vocabulary. The input of ``attention``, and
    of ``feed_forward``, is gathered once for its column layers, and its gradient summed once.
    """
    sequence = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "output": ColwiseParallel(input_layouts=sequence),
        "norm": LocalParameters(),  # as torch's SequenceParallel, on plain tensors
        "layers.*.*_norm": LocalParameters(),
        "layers.*.attention": SharedInput(input_layouts=sequence),
        "layers.*.attention.wq": ColwiseParallel(heads=heads),
        # There may be fewer heads of keys and values than ranks.
        "layers.*.attention.w[kv]": KeyValueParallel(heads, heads // 2),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=sequence),
    }
    if etp is None:
        plan["layers.*.feed_forward"] = SharedInput(input_layouts=sequence)
        plan["layers.*.feed_forward.w[13]"] = ColwiseParallel()
        plan["layers.*.feed_forward.w2"] = RowwiseParallel(output_layouts=sequence)
    elif etp == 1:
        # Each tp rank routes its part of the sequence; the parts of the router's gradient are summed.
        plan["layers.*.feed_forward.router"] = LocalParameters()
    else:
        # The ranks along etp work on the same tokens, each on a part of every expert's features.
        plan["layers.*.feed_forward.router"] = NoParallel()
        plan["layers.*.feed_forward"] = PrepareModuleInputOutput(
            input_layouts=sequence,
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=sequence,
        )
    return plan


def shard_model(model: Any, settings: Any, mesh: NamedMesh) -> None:
    """Spread this rank's stage over the other axes, in place."""
    layers = list(model.layers.values())
    experts = [layer.feed_forward.experts for layer in layers if settings.moe]
    for each in experts:  # before the plan over tp, which leaves them alone
        if mesh.size("etp") > 1:
            features = ExpertTensorParallel({"gate": Shard(2), "up": Shard(2), "down": Shard(1)})
            parallelize(each, mesh["etp"], features)
        parallelize(each, mesh["ep"], ExpertParallel(mesh))
    if mesh.size("tp") > 1:
        plan = llama_plan(settings.dim // HEAD, settings.etp if settings.moe else None)
        parallelize(model, mesh["tp"], plan, strict=False)  # a stage has some of the modules
    for layer in layers:
        if "cp" in mesh.layout:
            layer.attention.attend = partial(training.context_attention, mesh=mesh["cp"])
        if settings.compile:
            layer.forward = torch.compile(layer.forward)
        if settings.recompute:  # around what is compiled: the compiler does not follow random streams
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for each in experts:
        fully_shard(each, mesh=mesh["edp"])  # the few ranks that share them
    over = training.fsdp_mesh(mesh)
    for layer in layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)


class Step:
    """Forward and backward over a batch: leaves the gradients in this rank's part of the model."""

    def __init__(self, model: nn.Module, mesh: NamedMesh, *, microbatches: int) -> None:
        self._mesh, self._tokens = mesh, torch.tensor(0)
        self._pipe = training.Pipeline(
            model,
            mesh,
            n_microbatches=microbatches,
            loss_fn=self._loss,
            reduction="sum",
            replicate_kwargs=("positions",),
        )

    def __call__(self, inputs: Tensor, targets: Tensor, *, evaluate: bool = False) -> Tensor:
        """Return the mean loss over the batch of all ranks, the same on every rank; without gradients to ``evaluate``."""
        mesh = self._mesh
        inputs, targets = inputs.to(mesh.device), targets.to(mesh.device)
        positions = torch.arange(inputs.shape[1], device=mesh.device)
        if "cp" in mesh.layout:
            inputs, targets, positions = training.shard_sequence(inputs, targets, mesh=mesh["cp"])
        self._tokens = training.count_tokens(targets != IGNORED, mesh)  # once a step, for all micro-batches
        run: Any = self._pipe.eval if evaluate else self._pipe.step
        return training.mean_loss(run(inputs, target=targets, positions=positions), mesh)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy(logits, targets, self._mesh["tp"], ignore_index=IGNORED, reduction="sum")
        return training.normalize_loss(total, self._tokens, self._mesh)
