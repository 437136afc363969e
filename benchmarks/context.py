"""Attention over a sequence of which each rank has a part, beside torch's own over the whole sequence.

    python benchmarks/context.py [--tokens N] [--cp N] [--rounds N]

Forward and backward of causal attention, with keys and values gathered and with heads exchanged (``ulysses``), on forked gloo ranks.
Each rank also computes torch's attention over all of it: that, divided by the ranks, is what a rank's share costs by itself.
"by hand" gathers keys and values together, and keeps them until the backward.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import paired
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, DIM = 4, 64
WHOLE = "a share of the whole sequence's"
BY_HAND = "by hand"


def contestants(tokens: int) -> dict[str, Callable[[], float]]:
    """Return a step of each way by name."""
    mesh = namedmesh.init_mesh(cp=dist.get_world_size(), device="cpu")["cp"]
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, tokens, DIM) for _ in range(3)]
    parts = [training.shard_sequence(each, mesh=mesh, dim=2)[0] for each in whole]
    attend = partial(training.context_attention, mesh=mesh)
    return {
        "gathered": partial(step, attend, parts, spread=True),
        "ulysses": partial(step, partial(attend, ulysses=True), parts, spread=True),
        BY_HAND: partial(step, by_hand, parts, spread=True),
        WHOLE: partial(step, partial(F.scaled_dot_product_attention, is_causal=True), whole, spread=False),
    }


class GatherTogether(torch.autograd.Function):
    """All-gathers keys and values; the backward reduce-scatters their gradients."""

    @staticmethod
    def forward(_: Any, keys_values: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        full = keys_values.new_empty(ranks * keys_values.shape[0], *keys_values.shape[1:])
        dist.all_gather_into_tensor(full, keys_values)
        return full.view(ranks, *keys_values.shape)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        shard = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(shard, grad.contiguous().flatten(0, 1))
        return shard


gather_together: Callable[[Tensor], Tensor] = GatherTogether.apply  # torch's method has no type


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to keys and values that one collective gathers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    early, late = gather_together(torch.stack([key, value])).chunk(2, -2)
    key, value = torch.cat([*early.unbind(), *reversed(late.unbind())], -2)
    outputs = []
    for chunk, queries in zip((rank, 2 * ranks - 1 - rank), query.chunk(2, 2), strict=True):
        rows = queries.shape[2]
        end = (chunk + 1) * rows
        for start in range(0, rows, 512):
            block = queries[:, :, start : start + 512]
            stop = end - rows + start + block.shape[2]
            mask = query.new_full((block.shape[2], stop), -torch.inf).triu(stop - block.shape[2] + 1)
            outputs.append(F.scaled_dot_product_attention(block, key[:, :, :stop], value[:, :, :stop], mask))
    return torch.cat(outputs, 2)


def step(attend: Callable[..., Tensor], inputs: list[Tensor], *, spread: bool) -> float:
    """Run forward and backward; return the size of the gradients of the whole sequence, of which ranks may have parts."""
    for each in inputs:
        each.requires_grad_().grad = None
    attend(*inputs).square().sum().backward()
    size = torch.stack([each.grad.square().sum() for each in inputs if each.grad is not None]).sum()
    if spread:
        dist.all_reduce(size)
    return size.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention over a sequence that is spread over ranks.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    print(f"{paired.machine()}; cp={given.cp}, float32, {given.rounds} rounds; ms of the processor's time")
    seconds = paired.on_ranks(given.cp, given.rounds, contestants, given.tokens, clock=time.process_time)
    share = {WHOLE: [each / given.cp for each in seconds[WHOLE]]}
    for way in ("gathered", "ulysses"):
        paired.show(f"{given.tokens} tokens", {way: seconds[way], BY_HAND: seconds[BY_HAND]} | share)


if __name__ == "__main__":
    main()
