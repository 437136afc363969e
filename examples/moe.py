"""A small mixture of experts in place of a feed-forward network, and how it is laid out over ``ep`` and ``tp``.

    torchrun --nproc-per-node 8 examples/moe.py --ep 4 --tp 2

prints how far a step is from that of one process, and ``examples/train.py --moe --ep 8 --verify`` trains with it.
Attention and embeddings are laid out over ``pp, dp, cp, tp``; the experts of the same ranks over ``pp, edp, ep, etp``.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from namedmesh import init_mesh, training
from namedmesh.tensor_parallel import (
    ExpertParallel,
    KeepWhole,
    LocalParameters,
    PrepareModuleInputOutput,
    ShardedExperts,
    parallelize,
)

if TYPE_CHECKING:
    from llama import Llama, ModelSizes
    from torch.distributed.tensor.parallel import ParallelStyle

    from namedmesh import NamedMesh


EXPERTS, CHOSEN = 8, 2


class Experts(nn.Module):
    """Gated feed-forward networks, stacked; tokens come sorted by expert."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, dim, hidden))
        self.up = nn.Parameter(torch.empty(experts, dim, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return one row for each token; ``counts`` says how many are each expert's."""
        parts = zip(tokens.split(counts.tolist()), self.gate, self.up, self.down, strict=True)
        return torch.cat([(F.silu(part @ gate) * (part @ up)) @ down for part, gate, up, down in parts])


class MixtureOfExperts(nn.Module):
    """Each token goes to the experts that its router scores highest."""

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


def add_experts(model: Llama, sizes: ModelSizes) -> None:
    """Give every layer experts for its feed-forward network."""
    for layer in model.layers.values():
        layer.feed_forward = MixtureOfExperts(sizes)


def expert_plan(plan: dict[str, ParallelStyle], mesh: NamedMesh) -> dict[str, ParallelStyle]:
    """Return a tensor-parallel plan with experts in place of feed-forward networks."""
    plan = {key: style for key, style in plan.items() if not key.startswith("layers.*.feed_forward")}
    if mesh.size("etp") > 1:
        # The ranks along etp work on the same tokens, each on a part of every expert's features.
        plan["layers.*.feed_forward"] = PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        )
        plan["layers.*.feed_forward.router"] = KeepWhole()
    else:
        # Each tp rank routes its part of the sequence; the parts of the router's gradient are summed.
        plan["layers.*.feed_forward.router"] = LocalParameters()
    return plan


def shard_experts(experts: nn.Module, mesh: NamedMesh) -> None:
    """Shard the experts over ``ep``, their features over ``etp``; the plan over ``tp``, which comes later, leaves them alone."""
    if mesh.size("etp") > 1:
        features = ShardedExperts({"gate": Shard(2), "up": Shard(2), "down": Shard(1)})
        parallelize(experts, mesh["etp"], features)
    parallelize(experts, mesh["ep"], ExpertParallel(mesh))


def differences(mesh: NamedMesh) -> dict[str, float]:
    """Return how far the loss, the gradients and their norm are from those of one process, on this rank, in float64."""
    from parallel import IGNORED, Step, loss_sum, make_model, whole_model
    from settings import Settings

    settings = Settings(dim=16, layers=mesh.size("pp"), heads=4, kv_heads=2, moe=True, dtype="float64")
    models = alone, model = whole_model(settings).double(), make_model(settings, mesh)
    for name, each in (item for one in models for item in one.named_parameters()):
        each.data *= 10 if "feed_forward" in name else 1  # so that gradients are not tiny
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(settings.sizes.vocabulary, (8, 9), generator=generator)
    padding = torch.rand(8, 8, generator=generator) < torch.linspace(0, 0.9, 8)[:, None]
    inputs, targets = tokens[:, :-1], tokens[:, 1:].masked_fill(padding, IGNORED)
    expected = loss_sum(alone(inputs), targets) / (targets != IGNORED).sum()
    expected.backward()
    share = training.sampler_kwargs(mesh)
    mine = (each[share["rank"] :: share["num_replicas"]].contiguous() for each in (inputs, targets))
    loss = Step(model, mesh, microbatches=mesh.size("pp"))(*(each.to(mesh.device) for each in mine))
    gradients = []
    for name, each in model.named_parameters():
        found: Any = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        gradients.append((found.cpu() - alone.get_parameter(name).grad).abs().max().item())
    norm = training.clip_grad_norm_(model.parameters(), 0.1, mesh).cpu()
    whole_norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    return {
        "loss": (loss.cpu() - expected).abs().item(),
        "gradients": max(gradients),
        "norm": (norm - whole_norm).abs().item(),
    }


def main() -> None:
    """Compare a layout with one process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for axis in ("pp", "tp", "ep", "etp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    sizes = parser.parse_args()
    mesh = init_mesh(pp=sizes.pp, dp=-1, tp=sizes.tp)
    mesh.add_view("expert", pp=sizes.pp, edp=-1, ep=sizes.ep, etp=sizes.etp)
    found = differences(mesh)
    largest = torch.tensor([*found.values()], device=mesh.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if mesh.global_rank == 0:
        told = ", ".join(f"{name} {each:.0e}" for name, each in zip(found, largest.tolist(), strict=True))
        print(
            f"{mesh.layout}, experts over {mesh.views['expert']}\nlargest differences from one process: {told}"
        )
    mesh.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
