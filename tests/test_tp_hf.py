"""Hugging Face's plans: what each style name means, and random small models against their whole selves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import error_of
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import Shard
from tp_checks import heads_and_tail
from tp_compare import hf_difference, sharded, training_difference
from tp_models import Net, hf_model

from namedmesh.tensor_parallel import LocalParameters, plan_from_hf


def test_what_has_no_answer_is_reported_at_once() -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    model._tp_plan = {"a": "colwize", "b": "mla_kv_a_proj", "c": "replicate", "e": "x"}
    end = "change or remove it in model._tp_plan"
    assert error_of(lambda: plan_from_hf(model)) == (
        "PlanError: 2 problems:\n"
        f"  - 'a': 'colwize' is not supported; did you mean 'colwise'?; {end}\n"
        f"  - 'b': 'mla_kv_a_proj' depends on the model: its attention has no qk_rope_head_dim; {end}"
    )
    told = error_of(lambda: plan_from_hf(nn.Linear(2, 2)))
    assert told.startswith("PlanError: Linear states no plan in its _tp_plan; write one")


# --- styles that only such plans use, on a model that states one itself -------------------------------------


def stated() -> Any:
    model: Any = Net(lambda m, x: m.attn(x), attn=heads_and_tail())
    model.attn.qk_rope_head_dim = 2
    model._tp_plan = {
        "attn.up": "colwise",
        "attn.norm": "replicated_with_grad_allreduce",
        "attn.latent": "mla_kv_a_proj",
        "attn.expand": "colwise",
        "attn.down": "rowwise",
        "attn.scale": "colwise",
        "attn": "local_params",
        "experts.*": "moe_tp_experts",  # of another variant: this model has none
    }
    return model


def stated_difference() -> float:
    torch.manual_seed(0)
    reference = stated().double()
    plan = plan_from_hf(reference)
    assert isinstance(plan["attn"], LocalParameters)
    assert plan["attn"].placements == {"scale": Shard(0)}
    data = torch.randn(3, 5, 8, dtype=torch.float64)
    return training_difference(sharded(reference, plan), reference, data)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_local_parameters_shared_norms_and_latent_attention(tp_size: int) -> None:
    assert max(run_ranks(tp_size, stated_difference)) < 1e-12


# --- transformers itself ------------------------------------------------------------------------------------


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"head_dim": 8, "tie_word_embeddings": True}),
        # All heads on every rank, whose number the ranks do not have to divide.
        ("Phi3", {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}),
    ],
)
def test_a_random_model_trains_as_the_whole_one(kind: str, options: dict[str, Any], tp_size: int) -> None:
    assert max(run_ranks(tp_size, hf_difference, hf_model(kind, **options))) < 1e-10
