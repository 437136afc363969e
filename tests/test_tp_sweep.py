"""Every configuration of Hugging Face with a tensor-parallel plan: right, or refused for a reason.

On two ranks as it is, and, where keys and values have heads of their own, with two of them on four ranks.

``python tests/hf_sweep.py 2 4 8`` goes through more ranks, which takes minutes.
"""

from __future__ import annotations

import os

import hf_models
import pytest
from hf_sweep import REFUSED, TOLERANCE, differences, step, sweep
from ranks import run_ranks
from threads import run_threads

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import plan_from_hf

PARTS = 6
# A dense model, a mixture of experts, latent attention, and what has an embedding with a forward of its own.
MORE_RANKS = ["LlamaConfig", "MixtralConfig", "DeepseekV2Config", "Gemma3TextConfig"]


def unexpected(names: list[str], tp_sizes: tuple[int, ...], kv_heads: int | None = None) -> dict[str, str]:
    """What is not as expected, by configuration."""
    found = {}
    for name, tp_size, result, _ in sweep(names, tp_sizes, kv_heads):
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
