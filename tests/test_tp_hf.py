"""Hugging Face's plans: what each style name means, and random small models against their whole selves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import Shard
from tp_checks import heads_and_tail
from tp_compare import hf_difference, sharded, training_difference
from tp_models import Net, hf_model

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import LocalParameters, plan_from_hf


def test_what_has_no_answer_is_reported_at_once() -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    model._tp_plan = {"a": "colwize", "b": "mla_kv_a_proj", "c": "replicate", "e": "x"}
    with pytest.raises(PlanError) as caught:
        plan_from_hf(model)
    end = "change or remove it in model._tp_plan"
    assert str(caught.value) == (
        "2 problems:\n"
        f"  - 'a': 'colwize' is not supported; did you mean 'colwise'?; {end}\n"
        f"  - 'b': 'mla_kv_a_proj' depends on the model: its config has no qk_rope_head_dim; {end}"
    )
    with pytest.raises(PlanError, match=r"^Linear states no plan in its _tp_plan; write one"):
        plan_from_hf(nn.Linear(2, 2))


# --- styles that only such plans use, on a model that states one itself -------------------------------------


class Config:
    qk_rope_head_dim = 2


def stated() -> Any:
    model: Any = Net(lambda m, x: m.attn(x), attn=heads_and_tail())
    model.config = Config()
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


class Layer(nn.Module):
    """Attention of one of two kinds, with names that the plan of the model has for either."""

    def __init__(self, *, linear: bool, tail: int) -> None:
        super().__init__()
        self.qk_rope_head_dim = tail
        self.mixed = nn.Linear(4, 8)
        if not linear:
            self.q_proj, self.sinks = nn.Linear(4, 8), nn.Parameter(torch.zeros(2))
        self.kv_a_proj, self.o_proj = nn.Linear(4, 6), nn.Linear(8, 4)


def test_layers_that_differ_get_entries_of_their_own() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(linear=True, tail=0), Layer(linear=False, tail=2)])
    model.layers.append(Layer(linear=False, tail=3))
    model.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])  # a list of layers stays whole
    model._tp_plan = {  # type: ignore[assignment]  # as transformers writes it
        "layers.*.q_proj": "colwise",
        "layers.*.sinks": "colwise",
        "layers.*": "local_params",
        "layers.*.kv_a_proj": "mla_kv_a_proj",
        "layers.*.o_proj": "rowwise",
        "heads": "colwise_gather_output",
    }
    plan = plan_from_hf(model)
    assert {key: repr(style).partition("(input")[0] for key, style in plan.items() if "kv" not in key} == {
        "layers.0.o_proj": "RowwiseParallel",
        "layers.1": "LocalParameters({'sinks': Shard(dim=0)})",
        "layers.1.q_proj": "ColwiseParallel",
        "layers.1.o_proj": "RowwiseParallel",
        "layers.2": "LocalParameters({'sinks': Shard(dim=0)})",
        "layers.2.q_proj": "ColwiseParallel",
        "layers.2.o_proj": "RowwiseParallel",
    }
    tails: Any = [plan[f"layers.{layer}.kv_a_proj"] for layer in range(3)]
    assert [tail.width for tail in tails] == [0, 2, 3]


# --- transformers itself ------------------------------------------------------------------------------------


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "options"), [("Llama", {"head_dim": 8, "tie_word_embeddings": True}), ("Phi3", {})]
)
def test_a_random_model_trains_as_the_whole_one(kind: str, options: dict[str, Any], tp_size: int) -> None:
    assert max(run_ranks(tp_size, hf_difference, hf_model(kind, **options))) < 1e-10
