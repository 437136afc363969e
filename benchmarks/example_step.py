"""A step of the training example beside the same model in plain torch: FSDP2, tensor and sequence parallelism, the loss over shards.

    python benchmarks/example_step.py [--rounds N]

Both have the same weights and batches and live in the same four processes (gloo, one thread each), on FSDP2 alone and on
FSDP2 with tensor parallelism. A step is forward, backward, clipping, AdamW, and the loss of all ranks as a number.
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
from parallel import Step, make_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch_plans import TORCH, make_torchs_plan
from train import Settings, make_model, make_optimizer, new_model, set_rate

from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from namedmesh import NamedMesh

LAYOUTS = {"fsdp 4": 1, "fsdp 2 x tp 2": 2}  # the size of tp
SIZES = ((128, 64), (256, 256))  # the width of the model, and the length of the sequences
BATCH = 16


def plain_step(settings: Settings, mesh: NamedMesh) -> Callable[[Tensor, Tensor], float]:
    """Return a step of the model on torch's own styles."""
    model, dp = new_model(settings), mesh["dp"]
    if settings.tp > 1:
        parallelize_module(model, mesh["tp"], make_torchs_plan(*TORCH, Shard(1), prepared=True, loss=True))
    for layer in model.layers.values():
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    optimizer = make_optimizer(model)
    set_rate(optimizer, settings, 0)
    positions = torch.arange(settings.seq)

    def step(inputs: Tensor, targets: Tensor) -> float:
        with loss_parallel():
            loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), targets.flatten())
            loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()
        dist.all_reduce(mean, group=dp.get_group())
        return float(mean.item() / dp.size())

    return step


def example_step(settings: Settings, mesh: NamedMesh) -> Callable[[Tensor, Tensor], float]:
    """Return a step of the training example."""
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model)
    set_rate(optimizer, settings, 0)
    run = Step(model, mesh, microbatches=1)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = run(inputs, targets)
        training.clip_grad_norm_(model.parameters(), settings.clip, mesh).item()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def contestants(tp: int, dim: int, seq: int) -> dict[str, Callable[[], float]]:
    settings = Settings(batch=BATCH, dim=dim, seq=seq, device="cpu", tp=tp)
    mesh = make_mesh(settings)
    generator = torch.Generator().manual_seed(mesh.rank("dp"))
    tokens = torch.randint(0, 256, (BATCH // mesh.size("dp"), seq + 1), generator=generator)
    steps = {"example": example_step(settings, mesh), "plain torch": plain_step(settings, mesh)}
    return {name: partial(step, tokens[:, :-1], tokens[:, 1:]) for name, step in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="The training example beside plain torch.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(f"{paired.machine()}; {BATCH} sequences, float32, {rounds} rounds; ms of the processor's time")
    for name, tp in LAYOUTS.items():
        for dim, seq in SIZES:
            seconds = paired.on_ranks(4, rounds, contestants, tp, dim, seq, clock=time.process_time)
            paired.show(f"{name}, width {dim}, {seq} tokens", seconds)


if __name__ == "__main__":
    main()
