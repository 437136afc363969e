"""A model small enough to reason about, its optimizer and its training step, with and without parallelism."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block()).double()


def batch(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class AdamWOfShards(torch.optim.AdamW):
    """torch's AdamW on what this rank holds of each DTensor; its state is in DTensors, as torch's own is.

    For a first step on DTensors torch looks for a layout of every tensor: a third of what a short test takes.
    """

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002  torch's signature
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["step"] = torch.zeros(())
                    state.update({name: torch.zeros_like(each) for name in ("exp_avg", "exp_avg_sq")})
                adamw(
                    [shard(each)],
                    [shard(each.grad)],
                    [shard(state["exp_avg"])],
                    [shard(state["exp_avg_sq"])],
                    [],
                    [state["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
                )


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def losses(net: nn.Module, data: torch.Tensor, steps: int = 3) -> list[float]:
    """Train on the same batch for some steps; the loss of each."""
    optimizer = AdamWOfShards(net.parameters(), lr=0.01)
    told = []
    for _ in range(steps):
        loss = net(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told
