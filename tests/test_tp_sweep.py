"""Every configuration of Hugging Face with a tensor-parallel plan: right, or refused for a reason.

On two ranks as it is, and, where keys and values have heads of their own, with two of them on four ranks, with eager attention
and padding.

``python tests/test_tp_sweep.py 2 4 8`` goes through more ranks, which takes minutes.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hf_models
import pytest
import torch
from ranks import run_ranks
from tensors import apart_by_size
from threads import run_threads
from torch.distributed.tensor import DTensor, distribute_tensor
from tp_compare import make_tp_mesh

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import parallelize, plan_from_hf, plan_report, reduce_gradients

TOLERANCE = 1e-5

# What is refused, and the reason as the error tells it.
REFUSED = {
    "CodeGenConfig": "features, which no column layer of its block computes",
    "Glm5NextTextConfig": "features, which no column layer of its block computes",
    "InklingTextConfig": "'all_reduce' is not supported",
    "LongcatFlashConfig": "'moe_identity_expert' is not supported",
    "DogeConfig": "dt_proj computes a value for every head",
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
    mesh = make_tp_mesh()
    model = parallelize(copy.deepcopy(reference), mesh, plan, src_data_rank=None)
    found = {"output": _difference(step(model, name), wanted)}
    reduce_gradients(model)
    for (fqn, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        found[fqn] = _difference(mine.grad, theirs.grad)
    return found


def _difference(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    if isinstance(mine, DTensor) and theirs is not None:
        # This rank's shard, and that of the whole model's, whose experts may be fused.
        theirs = theirs.reshape(mine.shape)
        theirs = distribute_tensor(theirs, mine.device_mesh, mine.placements, src_data_rank=None).to_local()
        mine = mine.to_local()
    return apart_by_size(mine, theirs, 1e-3)


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
) -> Iterator[tuple[str, int, str]]:
    """The outcome for each configuration and tp size."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # of transformers, about what the configurations are not meant for
    for name in names:
        try:
            reference = hf_models.tiny_model(name, kv_heads, None if kv_heads is None else "eager")
            wanted = step(reference, name)
        except Exception:  # noqa: BLE001  told with what is wrong of the others
            yield name, 1, f"failed: {traceback.format_exc()}"
            continue
        for tp_size in tp_sizes:
            yield name, tp_size, outcome(name, tp_size, reference, wanted)


PARTS = 6
# A dense model, a mixture of experts, latent attention, and what has an embedding with a forward of its own.
MORE_RANKS = ["LlamaConfig", "MixtralConfig", "DeepseekV2Config", "Gemma3TextConfig"]


def unexpected(names: list[str], tp_sizes: tuple[int, ...], kv_heads: int | None = None) -> dict[str, str]:
    """What is not as expected, by configuration."""
    found = {}
    for name, tp_size, result in sweep(names, tp_sizes, kv_heads):
        reason = REFUSED.get(name)
        as_expected = (
            result == "right" if reason is None else result.startswith("refused") and reason in result
        )
        if not as_expected:
            found[f"{name}, tp {tp_size}, kv heads {kv_heads}"] = result
    return found


def unexpected_of_part(names: list[str]) -> dict[str, str]:
    """Every second one of the names, those of this process, on two ranks; and two kv heads on four."""
    mine = names[int(os.environ["RANK"]) :: 2]
    grouped = [name for name in mine if hf_models.has_kv_heads(hf_models.configurations()[name])]
    return unexpected(mine, (2,)) | unexpected(grouped, (4,), kv_heads=2)


def unexpected_of_more_ranks() -> dict[str, str]:
    return unexpected(MORE_RANKS[int(os.environ["RANK"]) :: 2], (4, 8))


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_configuration_is_right_or_refused(part: int) -> None:
    names = list(hf_models.configurations())[part::PARTS]
    # The ranks of the world are threads of these two processes, of which each takes half of the models.
    assert run_ranks(2, unexpected_of_part, names, init=False, timeout=240) == [{}, {}]


@pytest.mark.oracle("transformers")
def test_how_many_share_kv_heads() -> None:
    grouped = [name for name, kind in hf_models.configurations().items() if hf_models.has_kv_heads(kind)]
    assert len(grouped) > 80


@pytest.mark.oracle("transformers")
def test_more_ranks() -> None:
    hf_models.configurations()
    assert run_ranks(2, unexpected_of_more_ranks, init=False, timeout=240) == [{}, {}]


def experts_differences(names: list[str]) -> dict[str, float]:
    """In single precision, which is what the experts' faster implementations are made for."""
    found = {}
    for name in names:
        model = hf_models.tiny_model(name).float()
        for implementation in ("grouped_mm", "batched_mm"):
            model.config._experts_implementation = implementation
            wanted = step(model, name)
            ranks = run_threads(2, differences, model, plan_from_hf(model), wanted, name)
            found[f"{name}, {implementation}"] = max(value for rank in ranks for value in rank.values())
    return {name: value for name, value in found.items() if not value < TOLERANCE}


@pytest.mark.oracle("transformers")
def test_every_implementation_of_experts() -> None:
    names = ["MixtralConfig", "Qwen3MoeConfig", "AriaTextConfig", "NemotronHConfig"]
    hf_models.configurations()
    assert run_ranks(1, experts_differences, names, init=False) == [{}]


def without_attention(name: str) -> float:
    """A model whose attention is refused, with its plan changed as the error says."""
    model = hf_models.tiny_model(name)
    with pytest.raises(PlanError, match=r"take the entries of self_attn out of model\._tp_plan"):
        plan_from_hf(model)
    model._tp_plan = {key: each for key, each in model._tp_plan.items() if ".self_attn." not in key}
    ranks = run_threads(2, differences, model, plan_from_hf(model), step(model, name), name)
    return max(value for rank in ranks for value in rank.values())


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("name", ["DogeConfig", "EsmcConfig"])
def test_what_is_refused_is_right_when_left_out_as_the_error_says(name: str) -> None:
    hf_models.configurations()
    assert run_ranks(1, without_attention, name, init=False)[0] < TOLERANCE


def main(arguments: list[str]) -> None:
    sizes = tuple(int(argument) for argument in arguments if argument.isdigit()) or (2, 4, 8)
    names = [argument for argument in arguments if not argument.isdigit()] or list(hf_models.configurations())
    counts: Counter[tuple[int, str]] = Counter()
    for name, tp_size, result in sweep(names, sizes):
        counts[tp_size, result.partition(":")[0]] += 1
        print(f"{name:40} tp {tp_size}  {result}", flush=True)  # noqa: T201  a script
    print(*sorted(counts.items()), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
