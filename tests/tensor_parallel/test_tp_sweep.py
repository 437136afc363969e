"""Every model of Hugging Face with a tensor-parallel plan equals one process, or is rejected.

Each runs on two ranks. If it has kv heads, it also runs with two of them on four ranks, with eager
attention and padding.

``python tests/tensor_parallel/test_tp_sweep.py 2 4 8`` runs more ranks, which takes minutes.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from tensors import relative_difference, rounding_tolerance
from threads import run_threads
from torch.distributed.tensor import DTensor, distribute_tensor
from tp_compare import make_tp_mesh

from namedmesh._errors import PlanError
from namedmesh.tensor_parallel import parallelize, plan_from_hf, plan_report, reduce_gradients

# In float64, where rounding alone gives at most 2e-12, mostly 1e-14.
TOLERANCE = 1e-9

# The configurations whose plans are rejected, and a part of the message.
REJECTED = {
    "CodeGenConfig": "features, which no column layer of its block computes",
    "Glm5NextTextConfig": "features, which no column layer of its block computes",
    "InklingTextConfig": "'all_reduce' is not supported",
    "LongcatFlashConfig": "'moe_identity_expert' is not supported",
    "DogeConfig": "dt_proj computes a value for every head",
    "EsmcConfig": "k_norm normalizes over the features of all heads",
    "NeoMMEConfig": "value_embeddings adds",
}


def step(model: Any, name: str) -> torch.Tensor:
    """Run a forward, and the backward of a random loss; return the output."""
    model.zero_grad()
    output = hf_models.run_forward(model, name)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    (output * weights).sum().backward()
    return output.detach()


def compare_step(reference: Any, plan: dict[str, Any], expected: torch.Tensor, name: str) -> dict[str, float]:
    """Return the relative differences of the output and of all local gradients, on one rank.

    Args:
        reference: the unsharded model, after a step.
        plan: its plan.
        expected: its output.
        name: the name of its configuration.
    """
    mesh = make_tp_mesh()
    model = parallelize(copy.deepcopy(reference), mesh, plan, src_data_rank=None)
    differences = {"output": compare_local(step(model, name), expected)}
    reduce_gradients(model)
    for (fqn, param), full_param in zip(model.named_parameters(), reference.parameters(), strict=True):
        differences[fqn] = compare_local(param.grad, full_param.grad)
    return differences


def compare_local(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Return the relative difference of a local tensor and the same shard of the expected one."""
    if isinstance(actual, DTensor) and expected is not None:
        # A fused expert parameter has one dim more when it is sharded.
        expected = expected.reshape(actual.shape)
        shard = distribute_tensor(expected, actual.device_mesh, actual.placements, src_data_rank=None)
        expected = shard.to_local()
        actual = actual.to_local()
    return relative_difference(actual, expected, 1e-3)


def run_configuration(name: str, tp_size: int, reference: Any, expected: torch.Tensor) -> str:
    """Return ``"equal"``, or the differences, or ``"rejected: "`` and the PlanError."""
    try:
        plan = plan_from_hf(reference)
        plan_report(reference, tp_size, plan)
    except PlanError as error:
        return f"rejected: {error}"
    except Exception:  # noqa: BLE001  reported with the results of the other configurations
        return f"failed: {traceback.format_exc()}"
    try:
        ranks = run_threads(tp_size, compare_step, reference, plan, expected, name)
    except AssertionError as error:
        return f"failed: {error}"
    too_large: dict[str, float] = {}
    for differences in ranks:
        too_large |= {fqn: value for fqn, value in differences.items() if not value < TOLERANCE}
    return f"different: {too_large}" if too_large else "equal"


def sweep(
    names: list[str], tp_sizes: tuple[int, ...], kv_heads: int | None = None
) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the tp size and the result of each configuration."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # transformers warns about the tiny sizes
    for name in names:
        try:
            reference = hf_models.make_tiny_model(name, kv_heads, None if kv_heads is None else "eager")
            expected = step(reference, name)
        except Exception:  # noqa: BLE001  reported with the results of the other configurations
            yield name, 1, f"failed: {traceback.format_exc()}"
            continue
        for tp_size in tp_sizes:
            yield name, tp_size, run_configuration(name, tp_size, reference, expected)


PARTS = 6
# A dense model, a mixture of experts, latent attention, and an embedding with its own forward.
NAMES_FOR_MORE_RANKS = ["LlamaConfig", "MixtralConfig", "DeepseekV2Config", "Gemma3TextConfig"]


def find_unexpected(
    names: list[str], tp_sizes: tuple[int, ...], kv_heads: int | None = None
) -> dict[str, str]:
    """Return the results that are not as expected, by configuration."""
    unexpected = {}
    for name, tp_size, result in sweep(names, tp_sizes, kv_heads):
        if name in REJECTED:
            is_expected = result.startswith("rejected") and REJECTED[name] in result
        else:
            is_expected = result == "equal"
        if not is_expected:
            unexpected[f"{name}, tp {tp_size}, kv heads {kv_heads}"] = result
    return unexpected


def sweep_half(names: list[str]) -> dict[str, str]:
    """Run every second configuration on two ranks, and with two kv heads on four ranks."""
    half = names[int(os.environ["RANK"]) :: 2]
    grouped = [name for name in half if hf_models.has_kv_heads(hf_models.find_configurations()[name])]
    return find_unexpected(half, (2,)) | find_unexpected(grouped, (4,), kv_heads=2)


def sweep_more_ranks() -> dict[str, str]:
    return find_unexpected(NAMES_FOR_MORE_RANKS[int(os.environ["RANK"]) :: 2], (4, 8))


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
def test_every_configuration_equals_one_process_or_is_rejected(part: int) -> None:
    names = list(hf_models.find_configurations())[part::PARTS]
    # The ranks of a model are threads. Each of two processes runs half of the models.
    assert run_ranks(2, sweep_half, names, init=False, timeout=240) == [{}, {}]


@pytest.mark.oracle("transformers")
def test_many_configurations_share_kv_heads() -> None:
    grouped = [name for name, kind in hf_models.find_configurations().items() if hf_models.has_kv_heads(kind)]
    assert len(grouped) > 80


@pytest.mark.oracle("transformers")
def test_more_ranks_equal_one_process() -> None:
    hf_models.find_configurations()
    assert run_ranks(2, sweep_more_ranks, init=False, timeout=240) == [{}, {}]


class DoubleExceptGrouped(hf_models.Double):
    """Uses float64 also around torch's grouped_mm, which does not support it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in {torch._grouped_mm, F.grouped_mm}:
            product: torch.Tensor = function(args[0].float(), args[1].float(), **(kwargs or {}))
            return product.double()
        return super().__torch_function__(function, types, args, kwargs)


def compare_expert_implementations(names: list[str]) -> dict[str, float]:
    """Return too large differences with transformers' faster implementations of experts."""
    too_large = {}
    # Two products of experts after each other, and their backward, over the largest size of the tiny models.
    tolerances = {"grouped_mm": rounding_tolerance(torch.float32, 4 * 64), "batched_mm": TOLERANCE}
    for name in names:
        model = hf_models.make_tiny_model(name)
        for implementation, tolerance in tolerances.items():
            model.config._experts_implementation = implementation
            expected = step(model, name)
            ranks = run_threads(2, compare_step, model, plan_from_hf(model), expected, name)
            largest = max(max(differences.values()) for differences in ranks)
            if not largest < tolerance:
                too_large[f"{name}, {implementation}"] = largest
    return too_large


@pytest.mark.oracle("transformers")
def test_every_implementation_of_experts_equals_one_process() -> None:
    names = ["MixtralConfig", "Qwen3MoeConfig", "AriaTextConfig", "NemotronHConfig"]
    hf_models.find_configurations()
    with mock.patch.object(hf_models, "Double", DoubleExceptGrouped):
        assert run_ranks(1, compare_expert_implementations, names, init=False) == [{}]


def compare_without_attention(name: str) -> float:
    """Follow the remedy in the error of a model whose attention is rejected."""
    model = hf_models.make_tiny_model(name)
    with pytest.raises(PlanError, match=r"remove the entries of self_attn from model\._tp_plan"):
        plan_from_hf(model)
    model._tp_plan = {key: style for key, style in model._tp_plan.items() if ".self_attn." not in key}
    ranks = run_threads(2, compare_step, model, plan_from_hf(model), step(model, name), name)
    return max(max(differences.values()) for differences in ranks)


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("name", ["DogeConfig", "EsmcConfig"])
def test_the_remedy_for_rejected_attention_works(name: str) -> None:
    hf_models.find_configurations()
    assert run_ranks(1, compare_without_attention, name, init=False)[0] < TOLERANCE


def main(arguments: list[str]) -> None:
    sizes = tuple(int(argument) for argument in arguments if argument.isdigit()) or (2, 4, 8)
    names = [argument for argument in arguments if not argument.isdigit()] or list(
        hf_models.find_configurations()
    )
    counts: Counter[tuple[int, str]] = Counter()
    for name, tp_size, result in sweep(names, sizes):
        counts[tp_size, result.partition(":")[0]] += 1
        print(f"{name:40} tp {tp_size}  {result}", flush=True)  # noqa: T201  a script
    print(*sorted(counts.items()), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
