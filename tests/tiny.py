"""A model small enough to reason about, and its training step, with and without parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def losses(net: nn.Module, data: torch.Tensor, steps: int = 3) -> list[float]:
    """Train on the same batch for some steps; the loss of each."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)  # one call for all DTensors
    told = []
    for _ in range(steps):
        loss = net(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def mean(values: Iterable[float]) -> float:
    collected = list(values)
    return sum(collected) / len(collected)
