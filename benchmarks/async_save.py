"""How long training stands still for a checkpoint that is written in the background.

    python benchmarks/async_save.py [--rounds N] [--layers N]

``namedmesh.training.save(async_=True)`` against ``torch.distributed.checkpoint.async_save`` of the same model and its
optimizer, sharded with FSDP2 over 4 forked gloo ranks: from a barrier until the last rank goes on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import paired
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

RANKS, WIDTH = 4, 256


def ours(path: str, mesh: namedmesh.NamedMesh, model: nn.Module, optimizer: Optimizer) -> Any:
    """Begin to write a checkpoint with ours; it also compares the ranks, and keeps random states."""
    return training.save(path, mesh, model, optimizer, async_=True)


def plain(path: str, mesh: namedmesh.NamedMesh, model: nn.Module, optimizer: Optimizer) -> Any:
    """Begin to write one with torch's functions."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return dcp.async_save(state, checkpoint_id=path, process_group=mesh.group("dp"))


CONTESTANTS: dict[str, Callable[..., Any]] = {"namedmesh": ours, "async_save": plain}


def measured(path: str, layers: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant, round by round, on one rank."""
    warnings.simplefilter("ignore")  # of torch's, about what it uses itself
    mesh = namedmesh.init_mesh(dp=RANKS, device="cpu")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()

    def turn(name: str, begin: Callable[..., Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        written = begin(f"{path}/{name}", mesh, model, optimizer)
        stopped = torch.tensor(time.perf_counter() - start)
        written.result()
        dist.all_reduce(stopped, dist.ReduceOp.MAX)
        return stopped.item()

    contestants = {name: partial(turn, name, begin) for name, begin in CONTESTANTS.items()}
    seconds = paired.interleaved(contestants, rounds)
    mesh.close()
    return seconds


def main() -> None:
    """Print the medians, and their ratio."""
    parser = argparse.ArgumentParser(description="Checkpoints written in the background.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=30, help=f"linear layers of width {WIDTH}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        seconds = run_ranks(RANKS, measured, path, arguments.layers, arguments.rounds, timeout=600.0)[0]
    print(f"{paired.machine()}; medians of {arguments.rounds} rounds, {arguments.layers} layers")
    for name, each in seconds.items():
        print(paired.row([name, f"{statistics.median(each) * 1e3:.0f} ms"], [12, 8]))
    print(paired.row(["ratio", paired.ratio(*seconds.values())], [12, 8]))


if __name__ == "__main__":
    main()
