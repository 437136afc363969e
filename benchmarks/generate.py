"""One token without gradients: namedmesh beside torch's own styles, and beside plain shards by hand.

    python benchmarks/generate.py [--ranks N] [--rounds N]

A Llama of four layers in one process, on torch's fake backend: the figures are the work of the host alone, in the processor's time.
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import paired
import torch
import torch.distributed as dist
from ranks import fake_world
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from tp_models import Llama, make_llama_plan

import namedmesh
from namedmesh.tensor_parallel import parallelize

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, TOKENS = 512, 20
ROW_LAYERS = ("wo", "w2")


def torchs_plan() -> dict[str, Any]:
    """Return the plan of ``make_llama_plan`` in torch's own styles."""
    replicated = Replicate()
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=replicated, output_layouts=replicated),
        "output": ColwiseParallel(input_layouts=replicated, output_layouts=replicated),
    }
    for name in ("attention", "feed_forward"):
        plan[f"layers.*.{name}"] = PrepareModuleInput(
            input_layouts=replicated, desired_input_layouts=replicated
        )
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=replicated)
    return plan


def shard_by_hand(model: nn.Module, ranks: int) -> nn.Module:
    """Keep the shards of the first rank as plain parameters, with collectives in hooks."""

    def reduce(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        dist.all_reduce(output)
        return output

    def gather(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        shard = output.transpose(0, -1).contiguous()
        full = shard.new_empty(ranks * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(full, shard)
        return full.transpose(0, -1).contiguous()

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            last = name.rpartition(".")[2]
            shard = module.weight.detach().chunk(ranks, 1 if last in ROW_LAYERS else 0)[0]
            module.weight = nn.Parameter(shard.clone())
            if last in ROW_LAYERS:
                module.register_forward_hook(reduce)
            elif last == "output":
                module.register_forward_hook(gather)
    return model


@torch.no_grad()
def measure(model: nn.Module, ids: Tensor) -> float:
    """Return the seconds that a token takes."""
    start = time.process_time()
    for _ in range(TOKENS):
        model(ids)
    return (time.process_time() - start) / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description="One token without gradients.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{paired.machine()}; tp={given.ranks}, fake backend, {given.rounds} rounds; ms of the processor's time"
    )
    with fake_world(given.ranks):
        mesh = namedmesh.init_mesh(tp=given.ranks, device="cpu")
        full = Llama(vocab=VOCABULARY, dim=64, n_heads=8, n_kv_heads=4, hidden=128, layers=4)
        models = {
            "namedmesh": parallelize(copy.deepcopy(full), mesh["tp"], make_llama_plan()),
            "by hand": shard_by_hand(copy.deepcopy(full), given.ranks),
            "torch's styles": parallelize_module(copy.deepcopy(full), mesh["tp"], torchs_plan()),
        }
        ids = torch.zeros(1, 1, dtype=torch.long)
        contestants: dict[str, Callable[[], float]] = {}
        for name, model in models.items():
            contestants[name] = partial(measure, model, ids)
        paired.show("a token", paired.interleaved(contestants, given.rounds))
        mesh.close()


if __name__ == "__main__":
    main()
