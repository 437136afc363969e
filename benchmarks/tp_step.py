"""A training step of 8 MLP blocks under tensor parallelism of 2: fairscale's explicit layers, torch's styles, and ours.

    python benchmarks/tp_step.py [--rounds FACTOR]

Models with the same weights live in the same two processes (gloo, one thread each). The explicit layers are fairscale's
ColumnParallelLinear and RowParallelLinear, as published; without fairscale they are left out.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import paired
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import namedmesh.tensor_parallel as ours

if TYPE_CHECKING:
    from collections.abc import Callable

TP_SIZE, BLOCKS = 2, 8
# hidden, feed-forward, batch, sequence, rounds
SIZES = ((64, 256, 1, 16, 300), (256, 1024, 2, 64, 120), (1024, 4096, 4, 128, 16))


class Block(nn.Module):
    """A feed-forward network with a residual connection."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(nn.functional.gelu(self.first(x)))
        return out


def reference(hidden: int, wide: int) -> nn.Sequential:
    """Return the unsharded model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(hidden, wide), nn.Linear(wide, hidden)) for _ in range(BLOCKS)))


def explicit(hidden: int, wide: int) -> nn.Module:
    """Return fairscale's layers, filled with the reference's weights."""
    from fairscale.nn.model_parallel import initialize_model_parallel
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    initialize_model_parallel(TP_SIZE)
    blocks = []
    for _ in range(BLOCKS):
        first = ColumnParallelLinear(hidden, wide, gather_output=False)
        blocks.append(Block(first, RowParallelLinear(wide, hidden, input_is_parallel=True)))
    model = nn.Sequential(*blocks)
    with torch.no_grad():
        for mine, shard in zip(model.parameters(), reference(hidden, wide).parameters(), strict=True):
            whole = shard.detach()
            for dim in range(mine.ndim):
                if mine.shape[dim] != whole.shape[dim]:
                    whole = whole.chunk(TP_SIZE, dim)[dist.get_rank()]
            mine.copy_(whole)
    return model


def contestants(hidden: int, wide: int, batch: int, sequence: int) -> dict[str, Callable[[], float]]:
    """Return a step of each model by name; ours first."""
    mesh = init_device_mesh("cpu", (TP_SIZE,), mesh_dim_names=("tp",))
    plan = {"*.first": ours.ColwiseParallel(), "*.second": ours.RowwiseParallel()}
    torchs = {"*.first": ColwiseParallel(), "*.second": RowwiseParallel()}
    models: dict[str, Any] = {
        "namedmesh": ours.parallelize(reference(hidden, wide), mesh, plan),
        "torch's styles": parallelize_module(reference(hidden, wide), mesh, torchs),
    }
    if find_spec("fairscale"):
        models["fairscale"] = explicit(hidden, wide)
    torch.manual_seed(1)
    inputs = torch.randn(batch, sequence, hidden, requires_grad=True)
    return {name: partial(step, model, inputs) for name, model in models.items()}


def step(model: nn.Module, inputs: Any) -> float:
    """Run forward and backward; return the size of the gradient of the input, which depends on all of both."""
    model.zero_grad()
    inputs.grad = None
    model(inputs).square().mean().backward()
    return float(inputs.grad.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step under tensor parallelism of 2, on gloo.")
    parser.add_argument("--rounds", type=float, default=1.0, help="multiply the number of rounds")
    factor = parser.parse_args().rounds
    print(f"{paired.machine()}; {BLOCKS} blocks, {TP_SIZE} ranks; medians in ms")
    for *size, rounds in SIZES:
        seconds = paired.on_ranks(TP_SIZE, max(3, int(rounds * factor)), contestants, *size)
        paired.show(f"{size[0]}x{size[1]}", seconds)


if __name__ == "__main__":
    main()
