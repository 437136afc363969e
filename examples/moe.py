"""A small mixture of experts on any layout: the losses and the gradients are those of one process.

    torchrun --nproc-per-node 8 examples/moe.py --ep 8
    torchrun --nproc-per-node 8 examples/moe.py --pp 2 --tp 2 --ep 2 --etp 2

Attention and embeddings are laid out over ``pp, dp, tp``; the experts of the same ranks over ``pp, edp, ep, etp``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from llama import Llama, ModelSizes, init_weights
from parallel import stage_layers, tensor_parallel_plan
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import (
    ExpertParallel,
    KeepWhole,
    LocalParameters,
    PrepareModuleInputOutput,
    SequenceParallel,
    ShardedExperts,
    parallelize,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = ModelSizes(dim=16, layers=2, heads=4, kv_heads=2, vocabulary=32)
EXPERTS, CHOSEN = 8, 2
BATCH, SEQUENCE, IGNORED = 8, 8, -100
TOLERANCE = 1e-9


class Experts(nn.Module):
    """Gated feed-forward networks, stacked; tokens come sorted by expert."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, dim, hidden))
        self.up = nn.Parameter(torch.empty(experts, dim, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """One row for each token; ``counts`` says how many are each expert's."""
        parts = zip(tokens.split(counts.tolist()), self.gate, self.up, self.down, strict=True)
        return torch.cat([(F.silu(part @ gate) * (part @ up)) @ down for part, gate, up, down in parts])


class MixtureOfExperts(nn.Module):
    """In place of a feed-forward network: each token goes to the experts that its router scores highest."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.dim, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS, sizes.dim, sizes.feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` on its own."""
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        token = order // CHOSEN
        output = self.experts(tokens[token], counts) * scores.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token, output).view_as(x)


def whole_model(layers: Sequence[int] | None = None) -> Llama:
    """The model, or some of its layers, with the same weights whoever makes it."""
    model = Llama(SIZES, layers)
    for layer in model.layers.values():
        layer.feed_forward = MixtureOfExperts(SIZES)
    init_weights(model, SIZES, seed=0)
    for name, parameter in model.named_parameters():
        parameter.data *= 10 if "feed_forward" in name else 1  # so that the experts' gradients are not tiny
    return model.double()


def make_model(mesh: namedmesh.NamedMesh) -> Llama:
    """This rank's part of the model."""
    model = whole_model(stage_layers(SIZES.layers, mesh.size("pp"), mesh.rank("pp")))
    plan = tensor_parallel_plan(model)
    if mesh.size("etp") > 1:
        # The ranks along etp work on the same tokens, each on a part of every expert's features.
        plan["layers.*.feed_forward"] = PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        )
        plan |= {"layers.*.feed_forward.router": KeepWhole()}
    else:
        # Each tp rank routes its part of the sequence; the parts of the router's gradient are summed.
        del plan["layers.*.feed_forward"]
        plan |= {"layers.*.feed_forward_norm": SequenceParallel(use_local_output=True)}
        plan |= {"layers.*.feed_forward.router": LocalParameters()}
    for name in ("gate", "up", "down"):
        del plan[f"layers.*.feed_forward.{name}"]
    parallelize(model, mesh["tp"], plan)
    features = ShardedExperts({"gate": Shard(2), "up": Shard(2), "down": Shard(1)})
    for layer in model.layers.values():
        experts: Any = layer.get_submodule("feed_forward.experts")
        if mesh.size("etp") > 1:
            parallelize(experts, mesh["etp"], features)
        parallelize(experts, mesh["ep"], ExpertParallel())
        # Once around the experts, over the few ranks that share them, and once around the rest.
        fully_shard(experts, mesh=mesh["edp"])
        fully_shard(layer, mesh=training.fsdp_mesh(mesh))
    fully_shard(model, mesh=training.fsdp_mesh(mesh))
    training.set_expert_divisor(model, mesh)
    return model


def whole_batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets, some of which do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SIZES.vocabulary, (BATCH, SEQUENCE + 1), generator=generator)
    padding = torch.rand(BATCH, SEQUENCE, generator=generator) < torch.linspace(0, 0.9, BATCH)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(padding, IGNORED)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over the targets that count."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def step(model: Llama, mesh: namedmesh.NamedMesh) -> float | None:
    """Leave the gradients in the model; the loss, on the last pipeline stage."""
    share = training.sampler_kwargs(mesh)
    inputs, targets = (each[share["rank"] :: share["num_replicas"]] for each in whole_batch())
    count = (targets != IGNORED).sum()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if mesh.size("tp") > 1:
            logits = DTensor.from_local(logits, mesh["tp"], [Shard(-1)])
        return training.token_mean(loss_sum(logits, targets), count, mesh)

    losses: list[Tensor] = []
    with loss_parallel() if mesh.size("tp") > 1 else contextlib.nullcontext():
        run = _pipelined(model, mesh, loss) if mesh.size("pp") > 1 else _at_once(model, loss)
        run(inputs, targets, losses)
    return sum(each.item() for each in losses) if losses else None


def _at_once(model: Llama, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., None]:
    def run(inputs: Tensor, targets: Tensor, losses: list[Tensor]) -> None:
        losses.append(loss(model(inputs), targets))
        losses[0].backward()

    return run


def _pipelined(model: Llama, mesh: namedmesh.NamedMesh, loss: Any) -> Callable[..., None]:
    stage = PipelineStage(model, mesh.rank("pp"), mesh.size("pp"), mesh.device, group=mesh.group("pp"))
    schedule = Schedule1F1B(stage, mesh.size("pp"), loss_fn=loss, scale_grads=False)

    def run(inputs: Tensor, targets: Tensor, losses: list[Tensor]) -> None:
        last = mesh.is_last("pp")
        schedule.step(*[inputs] * mesh.is_first("pp"), target=targets if last else None, losses=losses)

    return run


def differences(mesh: namedmesh.NamedMesh) -> dict[str, float]:
    """How far this rank's loss, gradients and their norm are from those of one process."""
    alone = whole_model()
    inputs, targets = whole_batch()
    expected = loss_sum(alone(inputs), targets) / (targets != IGNORED).sum()
    expected.backward()
    model = make_model(mesh)
    found = step(model, mesh)
    wanted = {name: each.grad for name, each in alone.named_parameters()}
    gradients = 0.0
    for name, each in model.named_parameters():
        grad = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        gradients = max(gradients, (grad - wanted[name]).abs().max().item())  # type: ignore[operator]
    norm = training.clip_grad_norm_(model.parameters(), 0.1, mesh)
    whole_norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    return {
        "loss": 0.0 if found is None else abs(found - expected.item()),
        "gradients": gradients,
        "norm": (norm - whole_norm).abs().item(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare one step with one process; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for axis in ("pp", "tp", "ep", "etp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    sizes = parser.parse_args(arguments)
    mesh = namedmesh.init_mesh(pp=sizes.pp, dp=-1, tp=sizes.tp)
    mesh.add_view("expert", pp=sizes.pp, edp=-1, ep=sizes.ep, etp=sizes.etp)
    found = differences(mesh)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"{mesh.layout} and {mesh.views['expert']}: differences {found}")
    dist.barrier()
    mesh.close()
    dist.destroy_process_group()
    return int(max(found.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
