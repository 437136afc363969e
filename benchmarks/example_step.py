"""A step of the training example beside the same model in plain torch: FSDP2, tensor and sequence parallelism, the loss over shards.

    python benchmarks/example_step.py [--rounds N]

Both have the same weights and batches and live in the same four processes (gloo, one thread each), on FSDP2 alone and on
FSDP2 with tensor parallelism. A step is forward, backward, clipping, AdamW, and the loss of all ranks as a number; the
losses are compared first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paired
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from parallel import Step
from ranks import run_ranks
from train import Settings, make_model, make_optimizer, new_model

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LAYOUTS = {"fsdp 4": 1, "fsdp 2 x tp 2": 2}  # the size of tp
SIZES = ((128, 64), (256, 256))  # the width of the model, and the length of the sequences
BATCH = 16
TOLERANCE = 1e-4  # of losses in float32


def in_plain_torch(settings: Settings, mesh: Any) -> Callable[[Tensor, Tensor], float]:
    """Return a step of the model on torch's own styles."""
    model = new_model(settings)
    tp, dp = mesh["tp"], mesh["dp"]
    if settings.tp > 1:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
            "layers.*.attention": whole,
            "layers.*.feed_forward": whole,
        }
        for name in ("attention_norm", "ffn_norm"):
            plan[f"layers.*.{name}"] = SequenceParallel()
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            plan[f"layers.*.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(model, tp, plan)
    for layer in model.layers.values():
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    optimizer = make_optimizer(model)
    positions = torch.arange(settings.seq)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), targets.flatten())
            loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        optimizer.step()
        mean = loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()
        dist.all_reduce(mean, group=dp.get_group())
        return float(mean.item() / dp.size())

    return step


def as_the_example(settings: Settings, mesh: namedmesh.NamedMesh) -> Callable[[Tensor, Tensor], float]:
    """Return a step of the training example."""
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model)
    run = Step(model, mesh, microbatches=1)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = run(inputs, targets)
        training.clip_grad_norm_(model.parameters(), settings.clip, mesh).item()
        optimizer.step()
        return loss.item()

    return step


def measured(tp: int, size: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step on this rank."""
    settings = Settings(batch=BATCH, dim=size[0], seq=size[1], device="cpu", tp=tp)
    mesh = namedmesh.init_mesh(pp=1, dp=-1, tp=tp, device="cpu")
    ways = {"example": as_the_example(settings, mesh), "plain torch": in_plain_torch(settings, mesh)}
    generator = torch.Generator().manual_seed(mesh.rank("dp"))
    tokens = torch.randint(0, 256, (BATCH // mesh.size("dp"), size[1] + 1), generator=generator)
    for _ in range(3):
        one, other = (step(tokens[:, :-1], tokens[:, 1:]) for step in ways.values())
        assert abs(one - other) < TOLERANCE, (one, other)  # they compute the same
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for order in paired.turns(list(ways), rounds):
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            ways[name](tokens[:, :-1], tokens[:, 1:])
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    mesh.close()
    return seconds


def main() -> None:
    """Print the steps a second of both, and their ratio."""
    parser = argparse.ArgumentParser(description="The training example beside plain torch.")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{paired.machine()}; {BATCH} sequences, float32, {arguments.rounds} rounds; steps a second")
    print(paired.row(["layout", "width", "tokens", "example", "plain torch", "ratio"], [14, 6, 7, 8, 12, 6]))
    for name, tp in LAYOUTS.items():
        for size in SIZES:
            seconds = run_ranks(4, measured, tp, size, arguments.rounds, timeout=300.0)[0]
            rates = [1 / statistics.median(seconds[each]) for each in ("example", "plain torch")]
            ratio = paired.ratio(seconds["plain torch"], seconds["example"])
            print(paired.row([name, *map(str, size), *rates, ratio], [14, 6, 7, 8, 12, 6]))


if __name__ == "__main__":
    main()
