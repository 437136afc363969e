"""Hugging Face's plans are converted to styles, and the models train as in one process."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from messages import error_of
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor, Shard
from tp_checks import make_latent_attention
from tp_compare import compare_hf_training, compare_training, parallelize_copy
from tp_models import Net, make_hf_model

from namedmesh.tensor_parallel import LocalParameters, plan_from_hf, plan_report


def test_all_unsupported_styles_are_reported_at_once() -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    model._tp_plan = {"a": "colwize", "b": "mla_kv_a_proj", "c": "replicate", "e": "x"}
    end = "change or remove it in model._tp_plan"
    assert error_of(lambda: plan_from_hf(model)) == (
        "PlanError: 2 problems:\n"
        f"  - 'a': 'colwize' is not supported; did you mean 'colwise'?; {end}\n"
        f"  - 'b': 'mla_kv_a_proj' depends on the model: its attention has no qk_rope_head_dim; {end}"
    )
    message = error_of(lambda: plan_from_hf(nn.Linear(2, 2)))
    assert message.startswith("PlanError: Linear states no plan in its _tp_plan; write one")


def test_a_plan_that_names_no_module_of_the_model_raises() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model._tp_plan = {"layers.*.up": "colwise"}
    message = error_of(lambda: plan_from_hf(model))
    assert message == "PlanError: Sequential has no module that its _tp_plan names (layers.*.up)"


def test_names_of_wrapped_modules() -> None:
    """The model's plan has names without wrappers, and the converted plan has the full names."""
    model: Any = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(4, 4)}), "c": nn.Linear(4, 4)})
    model._tp_plan = {"a.b": "colwise", "c": "rowwise"}
    wrapped = "_checkpoint_wrapped_module"
    apply_activation_checkpointing(model, check_fn=lambda module: module in {model["a"], model["a"]["b"]})
    compiled: Any = torch.compile(model, backend="eager")
    for wrapper, prefix in (
        (compiled, "_orig_mod."),
        (nn.Sequential(nn.Identity(), compiled), "1._orig_mod."),
    ):
        plan = plan_from_hf(wrapper)
        assert list(plan) == [f"{prefix}a.{wrapped}.b.{wrapped}", f"{prefix}c"]
        assert plan_report(wrapper, 2, plan)


# --- styles that only these plans use -----------------------------------------------------------


def make_model_with_plan() -> Any:
    model: Any = Net(lambda m, x: m.attn(x), attn=make_latent_attention())
    model.attn.qk_rope_head_dim = 2
    model._tp_plan = {
        "attn.up": "colwise",
        "attn.norm": "replicated_with_grad_allreduce",
        "attn.latent": "mla_kv_a_proj",
        "attn.expand": "colwise",
        "attn.down": "rowwise",
        "attn.scale": "colwise",
        "attn": "local_params",
        "experts.*": "moe_tp_experts",  # this model has no such module
    }
    return model


def compare_model_with_plan() -> float:
    torch.manual_seed(0)
    reference = make_model_with_plan().double()
    plan = plan_from_hf(reference)
    assert isinstance(plan["attn"], LocalParameters)
    assert plan["attn"].placements == {"scale": Shard(0)}
    data = torch.randn(3, 5, 8, dtype=torch.float64)
    return compare_training(parallelize_copy(reference, plan), reference, data)


@pytest.mark.ci
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_local_parameters_norms_and_latent_attention_equal_one_process(tp_size: int) -> None:
    assert max(run_ranks(tp_size, compare_model_with_plan)) < 1e-12


# --- adapters -----------------------------------------------------------------------------------


def make_adapted(**options: Any) -> Any:
    """Make a Llama with one kv head, and LoRA on all linears with random values."""
    peft: Any = importlib.import_module("peft")
    settings = peft.LoraConfig(r=3, target_modules="all-linear", **options)
    model = peft.get_peft_model(make_hf_model("Llama", num_key_value_heads=1, num_hidden_layers=1), settings)
    for name, param in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(param, std=0.3)
    return model.double()


def compare_adapted(reference: Any) -> float:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    model = parallelize_copy(reference, plan_from_hf(reference, adapters=True))
    dtensors = [param for param in model.parameters() if isinstance(param, DTensor)]
    # The embedding, the output head, and for each of seven linears the weight and one adapter.
    assert len(dtensors) == 2 + 2 * 7
    return compare_training(model, reference, ids, steps=2, pick="logits")


@pytest.mark.oracle("transformers", "peft")
def test_lora_equals_one_process() -> None:
    assert max(run_ranks(2, compare_adapted, make_adapted())) < 1e-12


@pytest.mark.oracle("transformers", "peft")
def test_unexpected_and_unsupported_adapters_raise() -> None:
    message = error_of(lambda: plan_from_hf(make_adapted()))
    assert "self_attn.q_proj': has adapters; call plan_from_hf(..., adapters=True)" in message
    message = error_of(lambda: plan_from_hf(make_adapted(use_dora=True), adapters=True))
    assert "self_attn.q_proj': 'colwise' does not support adapters other than plain LoRA" in message


# --- models of transformers ---------------------------------------------------------------------


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"head_dim": 8, "tie_word_embeddings": True}),
        # Every rank computes all heads, so the number of ranks does not have to divide them.
        ("Phi3", {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}),
    ],
)
def test_a_random_model_equals_one_process(kind: str, options: dict[str, Any], tp_size: int) -> None:
    assert max(run_ranks(tp_size, compare_hf_training, make_hf_model(kind, **options))) < 1e-10
