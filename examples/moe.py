"""A small mixture of experts in place of a feed-forward network, and how it is laid out over ``ep`` and ``tp``.

    torchrun --nproc-per-node 8 examples/train.py --moe --ep 8 --verify

Attention and embeddings are laid out over ``pp, dp, cp, tp``; the experts of the same ranks over ``pp, edp, ep, etp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

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
        """One row for each token; ``counts`` says how many are each expert's."""
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
    """A tensor-parallel plan with experts in place of feed-forward networks."""
    plan = {key: style for key, style in plan.items() if not key.startswith("layers.*.feed_forward.")}
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
        del plan["layers.*.feed_forward"]
        plan["layers.*.feed_forward_norm"] = SequenceParallel(use_local_output=True)
        plan["layers.*.feed_forward.router"] = LocalParameters()
    return plan


def shard_experts(experts: nn.Module, mesh: NamedMesh) -> None:
    """Experts over ``ep``, their features over ``etp``; before the plan over ``tp``, which then leaves them alone."""
    if mesh.size("etp") > 1:
        features = ShardedExperts({"gate": Shard(2), "up": Shard(2), "down": Shard(1)})
        parallelize(experts, mesh["etp"], features)
    parallelize(experts, mesh["ep"], ExpertParallel())
