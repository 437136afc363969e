"""What attention over a sequence that is spread over ranks costs: CPU time, and what it keeps for the backward.

    python benchmarks/context.py [--tokens N] [--cp N] [--rounds N]

``training.context_attention`` and its ``ulysses=True`` over forked gloo ranks, forward and backward of a causal sequence. The
limit of the time is torch's own attention over the whole sequence, which every rank computes at the same time, divided by the
ranks; that of the memory are a rank's queries, keys, values and outputs, and one number of each query.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import paired
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, DIM = 4, 64


def measured(tokens: int, rounds: int) -> dict[str, tuple[list[float], float]]:
    """Return for each way the seconds of CPU time of each round, and the MB that are kept, of this rank."""
    mesh = namedmesh.init_mesh(cp=dist.get_world_size(), device="cpu")["cp"]
    whole = [torch.randn(1, HEADS, tokens, DIM) for _ in range(3)]
    parts = [training.shard_sequence(each, mesh=mesh, dim=2)[0] for each in whole]
    ways: dict[str, tuple[list[Tensor], Callable[..., Tensor]]] = {
        "gathered": (parts, partial(training.context_attention, mesh=mesh)),
        "ulysses": (parts, partial(training.context_attention, mesh=mesh, ulysses=True)),
        "one process": (whole, partial(F.scaled_dot_product_attention, is_causal=True)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, dict[int, int]] = {name: {} for name in ways}
    for _ in range(rounds + 1):
        for name, (inputs, attend) in ways.items():
            for each in inputs:
                each.requires_grad_().grad = None

            def keep(tensor: Tensor, found: dict[int, int] = kept[name]) -> Tensor:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            kept[name].clear()
            dist.barrier()
            start = time.process_time()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
                output = attend(*inputs)
            output.sum().backward()
            seconds[name].append(time.process_time() - start)
    dist.barrier()
    return {name: (each[1:], sum(kept[name].values()) / 1e6) for name, each in seconds.items()}


def main() -> None:
    """Print the mean time of the ranks and the most memory of one, and how far they are from the limits."""
    parser = argparse.ArgumentParser(description="Attention over ranks.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    by_rank = run_ranks(arguments.cp, measured, arguments.tokens, arguments.rounds, timeout=900.0)
    part = arguments.tokens // arguments.cp
    least = 4 * (4 * HEADS * part * DIM + HEADS * part) / 1e6
    print(
        f"{paired.machine()}; {arguments.tokens} tokens, cp {arguments.cp}, float32, {arguments.rounds} rounds"
    )
    rounds = {
        name: [statistics.mean(each) for each in zip(*(one[name][0] for one in by_rank), strict=True)]
        for name in by_rank[0]
    }
    for name in ("gathered", "ulysses"):
        ratios = [
            mine * arguments.cp / limit
            for mine, limit in zip(rounds[name], rounds["one process"], strict=True)
        ]
        memory = max(each[name][1] for each in by_rank)
        cells = [
            name,
            f"{statistics.median(rounds[name]):.2f} s",
            f"{statistics.median(ratios):.3f}",
            f"({min(ratios):.3f} to {max(ratios):.3f})",
            f"{memory:.1f} MB",
            f"{memory / least:.2f}",
        ]
        print(paired.row(cells, [10, 8, 6, 17, 9, 6]))


if __name__ == "__main__":
    main()
