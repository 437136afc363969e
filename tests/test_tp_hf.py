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

WHOLE, LAST = "Replicate(),", "Shard(dim=-1),"


def column(inputs: str, outputs: str) -> str:
    return f"ColwiseParallel(input_layouts=({inputs}), output_layouts=({outputs}), use_local_output=True)"


def row(inputs: str, outputs: str) -> str:
    return f"RowwiseParallel(input_layouts=({inputs}), output_layouts=({outputs}), use_local_output=True)"


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("colwise", column(WHOLE, LAST)),
        ("colwise_gather_output", column(WHOLE, WHOLE)),
        ("colwise_rep", column(WHOLE, WHOLE)),
        ("rowwise", row(LAST, WHOLE)),
        ("rowwise_split_input", row(WHOLE, WHOLE)),
        ("rowwise_rep", row(WHOLE, WHOLE)),
        ("embedding_rowwise", row(WHOLE, WHOLE).replace("Parallel", "Embedding")),
        ("embedding_colwise", column(WHOLE, WHOLE)),
        ("sequence_parallel", "SequenceParallel(sequence_dim=1, use_local_output=True)"),
        ("replicated_with_grad_allreduce", "LocalParameters()"),
        ("all_reduce", "SumOutput()"),
        ("moe_identity_expert", "IdentityExpert()"),
    ],
)
def test_what_a_name_means(name: str, style: str) -> None:
    assert repr(plan_from_hf({"layers.*.x": name})["layers.*.x"]) == style


def test_a_replicated_module_is_left_out() -> None:
    assert plan_from_hf({"embed_tokens": "replicate"}) == {}


def test_every_name_without_an_answer_is_reported_at_once() -> None:
    plan = {
        "a": "packed_colwise",
        "b": "grouped_gemm",
        "c": "colwize",
        "d": "colwise",
        "e": "local_params",
        "f": "mla_kv_a_proj",
    }
    with pytest.raises(PlanError) as caught:
        plan_from_hf(plan)
    assert str(caught.value) == (
        "5 problems:\n"
        "  - 'a': 'packed_colwise' depends on the model: pass the model instead of a dict; change or remove this "
        "entry\n"
        "  - 'b': 'grouped_gemm' is not supported: it gives each rank whole experts (expert parallelism), while "
        "tensor parallelism gives each rank a shard of every expert; change or remove this entry\n"
        "  - 'c': 'colwize' is not a style that transformers has; did you mean 'colwise'?; change or remove this "
        "entry\n"
        "  - 'e': 'local_params' depends on the model: pass the model instead of a dict; change or remove this "
        "entry\n"
        "  - 'f': 'mla_kv_a_proj' depends on the model: pass the model instead of a dict; change or remove this "
        "entry"
    )
    with pytest.raises(PlanError, match="'x': 'ep_dispatch_experts' is not supported"):
        plan_from_hf({"x": "ep_dispatch_experts"})
    for name in ("packed_rowwise", "moe_tp_experts"):
        with pytest.raises(PlanError, match=f"'x': '{name}' depends on the model: pass the model"):
            plan_from_hf({"x": name})


def test_entries_that_are_left_out() -> None:
    plan = {"a.q.x": "colwise", "a.o": "grouped_gemm", "b": "colwise"}
    assert list(plan_from_hf(plan, leave_out=["a.*"])) == ["b"]
    with pytest.raises(PlanError) as caught:
        plan_from_hf(plan, leave_out=["a.*", "c.*"])
    assert str(caught.value) == "leave_out: 'c.*' matches no entry of the plan"


def test_a_model_without_a_plan() -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_hf(nn.Linear(2, 2))
    assert str(caught.value) == (
        "Linear states no tensor-parallel plan, neither in its configuration's base_model_tp_plan nor in its "
        "_tp_plan; write a plan for it, a dict of names to styles"
    )
    with pytest.raises(PlanError, match=r"^plan_from_hf reads a model or a dict of style names, not a list$"):
        plan_from_hf([])  # type: ignore[arg-type]


# --- styles that only such plans use, on a model that states one itself -------------------------------------


class Config:
    qk_rope_head_dim = 2
    base_model_tp_plan = {  # noqa: RUF012  as transformers writes it
        "attn.up": "colwise",
        "attn.norm": "replicated_with_grad_allreduce",
        "attn.latent": "mla_kv_a_proj",
        "attn.expand": "colwise",
        "attn.down": "rowwise",
        "attn.scale": "colwise",
        "attn": "local_params",
        "experts.*": "moe_tp_experts",  # of another variant: this model has none
    }


def stated() -> Any:
    model: Any = Net(lambda m, x: m.attn(x), attn=heads_and_tail())
    model.config = Config()
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


def test_a_bare_parameter_needs_its_module_in_the_plan() -> None:
    model = stated()
    model.config.base_model_tp_plan = {"attn.scale": "colwise"}
    with pytest.raises(PlanError) as caught:
        plan_from_hf(model)
    assert str(caught.value) == (
        "'attn.scale': 'colwise' shards a bare parameter, which needs 'local_params' or 'moe_tp_experts' at its "
        "module; change or remove this entry"
    )


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
    model.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model._tp_plan = {  # type: ignore[assignment]  # as transformers writes it
        "layers.*.q_proj": "colwise",
        "layers.*.sinks": "colwise",
        "layers.*": "local_params",
        "layers.*.kv_a_proj": "mla_kv_a_proj",
        "layers.*.o_proj": "rowwise",
        "heads": "colwise_gather_output",
    }
    plan = plan_from_hf(model)
    row = repr(plan.pop("layers.1.o_proj"))
    assert row.startswith("RowwiseParallel(")
    assert row == repr(plan.pop("layers.2.o_proj"))
    assert {key: repr(style).partition("(input")[0] for key, style in plan.items()} == {
        "layers.*.q_proj": "ColwiseParallel",
        "layers.1": "LocalParameters({'sinks': Shard(dim=0)})",
        "layers.2": "LocalParameters({'sinks': Shard(dim=0)})",
        "layers.1.kv_a_proj": "SumTailGradient(2)",
        "layers.2.kv_a_proj": "SumTailGradient(3)",
        "heads.*": "ColwiseParallel",
    }


# --- transformers itself ------------------------------------------------------------------------------------


TIED = {"head_dim": 8, "tie_word_embeddings": True}


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "options"), [("Llama", {"head_dim": 8}), ("Llama", TIED), ("Qwen3", TIED), ("Phi3", {})]
)
def test_a_random_model_trains_as_the_whole_one(kind: str, options: dict[str, Any], tp_size: int) -> None:
    assert max(run_ranks(tp_size, hf_difference, hf_model(kind, **options))) < 1e-10


@pytest.mark.oracle("transformers")
def test_every_style_name_of_transformers_has_an_answer() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    for name in ALL_PARALLEL_STYLES.keys():  # noqa: SIM118  it is no mapping
        try:
            plan_from_hf({"x": name})
        except PlanError as error:
            assert "is not a style" not in str(error)  # noqa: PT017  both ways are right


def tied_difference() -> float:
    """A head tied to the embedding, of which the plan names the head only."""
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(16, 8), "lm_head": nn.Linear(8, 16, bias=False)}
    reference: Any = Net(lambda m, ids: m.lm_head(m.embed(ids)), **parts).double()
    reference.lm_head.weight = reference.embed.weight
    reference._tp_plan = {"lm_head": "colwise_rep"}
    model = sharded(reference, plan_from_hf(reference))
    assert model.lm_head.weight is model.embed.weight
    return training_difference(model, reference, torch.arange(16).view(2, 8))


def test_the_embedding_of_a_tied_head_is_cut_as_the_head() -> None:
    assert max(run_ranks(2, tied_difference)) < 1e-12
