"""What a cycle leaves behind: init_mesh, a step of DTensors, close, a thousand times in one job.

    python benchmarks/cycles.py [--cycles N] [--ranks N]

Rank 0's groups, requests in the store, memory and file descriptors, after the tenth cycle and in the end.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import paired
import torch
import torch.distributed as dist
from ranks import live_groups, run_ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import namedmesh
from namedmesh._torch import default_store

WIDTHS = [16, 8, 12, 12, 18]


def cycle() -> None:
    """Make a mesh, run forward and backward of a matrix product on it, close it."""
    mesh = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
    mesh.flatten("dp", "tp")
    weight = distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(0)]).requires_grad_()
    rows = distribute_tensor(torch.ones(4, 8), mesh["tp"], [Replicate()])
    (rows @ weight.t()).sum().backward()
    dist.all_reduce(weight.grad.to_local(), group=mesh.group("dp"))  # type: ignore[union-attr]
    mesh.close()


def held() -> list[int]:
    """Return what this process holds, when every rank is between two cycles."""
    gc.collect()
    dist.barrier()
    kib = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    told = [
        live_groups(),
        default_store().num_keys(),
        int(kib.split()[1]),
        len(list(Path("/proc/self/fd").iterdir())),
    ]
    dist.barrier()
    return told


def on_rank(cycles: int) -> list[tuple[int, list[int]]]:
    """Return all cycles of one rank."""
    told = []
    for number in range(1, cycles + 1):
        cycle()
        if number in {10, 100, cycles}:
            told.append((number, held()))
    return told


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description="What a cycle leaves behind.")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4, help="how many ranks, an even number")
    arguments = parser.parse_args()
    print(paired.machine())
    print(paired.row(["after cycle", "groups", "store keys", "RSS (KiB)", "file descriptors"], WIDTHS))
    for number, figures in run_ranks(arguments.ranks, on_rank, arguments.cycles, timeout=3600)[0]:
        print(paired.row([number, *figures], WIDTHS))


if __name__ == "__main__":
    main()
