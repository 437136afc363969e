"""Every tiny model of Hugging Face, tensor-parallel, against the whole model.

As a script it goes through all the configurations: ``python tests/hf_sweep.py 2 4 8`` for three tp sizes.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import hf_models
import torch
from threads import run_threads
from torch.distributed.tensor import DTensor, distribute_tensor
from tp_compare import tp_mesh

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import parallelize, plan_from_hf, plan_report, reduce_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE = 1e-5

# What is refused, and the reason as the error tells it.
REFUSED = {
    "Glm5NextTextConfig": "features, which no column layer of its block makes",
    "InklingTextConfig": "'all_reduce' is not supported",
    "LongcatFlashConfig": "'moe_identity_expert' is not supported",
    "DogeConfig": "dt_proj makes a number for each head",
    "EsmcConfig": "k_norm normalizes over the features of all heads",
    "NeoMMEConfig": "value_embeddings adds",
}


def step(model: Any, name: str) -> torch.Tensor:
    """A forward, and the backward of a random loss; the output."""
    model.zero_grad()
    output = hf_models.forward(model, name)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    (output * weights).sum().backward()
    return output.detach()


def differences(reference: Any, plan: dict[str, Any], wanted: torch.Tensor, name: str) -> dict[str, float]:
    """On one rank: the largest relative difference of the output, and of every parameter's gradient."""
    mesh = tp_mesh()
    model = parallelize(copy.deepcopy(reference), mesh, plan, src_data_rank=None)
    found = {"output": _difference(step(model, name), wanted)}
    reduce_gradients(model)
    for (fqn, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        found[fqn] = _difference(mine.grad, theirs.grad)
    return found


def _difference(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    if mine is None or theirs is None:
        one = mine if theirs is None else theirs
        return 0.0 if one is None else float(one.detach().abs().max())
    if isinstance(
        mine, DTensor
    ):  # this rank's shard, and that of the whole model's, whose experts may be fused
        theirs = theirs.reshape(mine.shape)
        theirs = distribute_tensor(theirs, mine.device_mesh, mine.placements, src_data_rank=None).to_local()
        mine = mine.to_local()
    if mine.shape != theirs.shape or not torch.isfinite(mine).all():
        return float("inf")
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


def outcome(name: str, tp_size: int, reference: Any, wanted: torch.Tensor) -> str:
    """``"right"``; or what is wrong; or, where the plan is refused, ``"refused: "`` and the error."""
    try:
        plan = plan_from_hf(reference)
        plan_report(reference, tp_size, plan)
    except PlanError as error:
        return f"refused: {error}"
    except Exception:  # noqa: BLE001  told, so that the others are told too
        return f"failed: {traceback.format_exc()}"
    try:
        ranks = run_threads(tp_size, differences, reference, plan, wanted, name)
    except AssertionError as error:
        return f"failed: {error}"
    wrong = {fqn: value for found in ranks for fqn, value in found.items() if not value < TOLERANCE}
    return f"wrong: {wrong}" if wrong else "right"


def sweep(
    names: list[str], tp_sizes: tuple[int, ...], kv_heads: int | None = None
) -> Iterator[tuple[str, int, str, float]]:
    """The outcome for each configuration and tp size, and how many seconds it took."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # of transformers, about what the configurations are not meant for
    for name in names:
        start = time.perf_counter()
        reference = hf_models.tiny_model(name, kv_heads)
        wanted = step(reference, name)
        for tp_size in tp_sizes:
            result = outcome(name, tp_size, reference, wanted)
            yield name, tp_size, result, time.perf_counter() - start
            start = time.perf_counter()


def main(arguments: list[str]) -> None:
    sizes = tuple(int(argument) for argument in arguments if argument.isdigit()) or (2, 4, 8)
    names = [argument for argument in arguments if not argument.isdigit()] or list(hf_models.configurations())
    counts: dict[tuple[int, str], int] = {}
    for name, tp_size, result, seconds in sweep(names, sizes):
        kind = result.partition(":")[0]
        counts[tp_size, kind] = counts.get((tp_size, kind), 0) + 1
        shown = result if kind == "right" else f"{result[:300]} ... {result[-300:]}"
        print(f"{name:40} tp {tp_size}  {seconds:5.2f} s  {shown}", flush=True)  # noqa: T201  a script
    for (tp_size, kind), count in sorted(counts.items()):
        print(f"tp {tp_size}: {count} {kind}")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
