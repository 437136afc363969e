"""Copy the weights of a policy into a rollout model of another layout: copy_weights, and a full state dict.

    python benchmarks/copy_weights.py [--rounds N] [--dim N]

Four gloo ranks. The policy has FSDP2 over dp=2 and tp=2, the rollout model tp=4. Processor's time of a rank, and the
most memory that a rank needs in addition to the two models.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import TYPE_CHECKING, Any

import paired
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from tp_models import Llama, make_llama_plan

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import parallelize

if TYPE_CHECKING:
    from collections.abc import Callable


def make_models(dim: int) -> tuple[Any, Any]:
    """Return the policy and the rollout model."""
    train = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
    generate = namedmesh.init_mesh(tp=4, device="cpu")
    sizes: Any = {"vocab": 8 * dim, "dim": dim, "hidden": 3 * dim, "layers": 4}
    policy = parallelize(Llama(**sizes), train["tp"], make_llama_plan())
    fully_shard(policy, mesh=training.fsdp_mesh(train))
    return policy, parallelize(Llama(**sizes), generate["tp"], make_llama_plan())


def gather(policy: Any, rollout: Any) -> None:
    """Copy the weights by way of a full state dict on every rank."""
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(rollout, get_model_state_dict(policy, options=options), options=options)


def build(dim: int) -> dict[str, Callable[[], float]]:
    """Return the contestants of a rank."""
    policy, rollout = make_models(dim)

    def measure(copy: Callable[[Any, Any], None]) -> Callable[[], float]:
        def step() -> float:
            copy(policy, rollout)
            return float(rollout.norm.weight.detach().sum())

        return step

    return {"copy_weights": measure(training.copy_weights), "full state dict": measure(gather)}


def peak(dim: int, name: str) -> float:
    """Return how many MiB a rank needs at most while it copies, in addition to the models, and their size."""
    policy, rollout = make_models(dim)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    copy: Callable[[Any, Any], None] = gather if name == "full state dict" else training.copy_weights
    copy(policy, rollout)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy weights between two layouts.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dim", type=int, default=512)
    given = parser.parse_args()
    size = sum(
        param.nbytes
        for param in Llama(vocab=8 * given.dim, dim=given.dim, hidden=3 * given.dim, layers=4).parameters()
    )
    print(f"{paired.machine()}; 4 gloo ranks, {size / 2**20:.0f} MiB of weights, {given.rounds} rounds; ms")
    paired.show(
        "processor's time", paired.on_ranks(4, given.rounds, build, given.dim, clock=time.process_time)
    )
    paired.show("wall", paired.on_ranks(4, given.rounds, build, given.dim))
    for name in ("copy_weights", "full state dict"):
        print(f"  memory, {name:34} {max(run_ranks(4, peak, given.dim, name)):10.0f} MiB")


if __name__ == "__main__":
    main()
