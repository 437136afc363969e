"""Hugging Face's plans: what each style name means, and random small models against their whole selves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from tp_compare import hf_difference, sharded, tp_mesh, training_difference
from tp_models import hf_model

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import LocalParameters, parallelize, plan_from_hf

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
        ("embedding_rowwise", row(WHOLE, WHOLE)),
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


class Sinks(nn.Module):
    """Attention in small: each head has a number of its own, and a latent whose tail every head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))
        self.q_proj, self.o_proj = nn.Linear(8, 16), nn.Linear(16, 8)
        self.kv_a_proj, self.kv_b_proj = nn.Linear(8, 6), nn.Linear(4, 16)
        self.q_norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, 4)))
        latent, tail = self.kv_a_proj(x).split([4, 2], dim=-1)
        k = self.kv_b_proj(latent).unflatten(-1, (-1, 4)) + tail.sum(-1)[..., None, None]
        heads = torch.tanh(q * k) * self.sinks.unsqueeze(-1)
        out: torch.Tensor = self.o_proj(heads.flatten(-2))
        return out


class Config:
    qk_rope_head_dim = 2
    base_model_tp_plan = {  # noqa: RUF012  as transformers writes it
        "attn.q_proj": "colwise",
        "attn.q_norm": "replicated_with_grad_allreduce",
        "attn.kv_a_proj": "mla_kv_a_proj",
        "attn.kv_b_proj": "colwise",
        "attn.o_proj": "rowwise",
        "attn.sinks": "colwise",
        "attn": "local_params",
        "experts.*": "moe_tp_experts",  # of another variant: this model has none
    }


class Stated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.attn = Sinks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attn(x)
        return out


def stated_difference() -> float:
    mesh = tp_mesh()
    torch.manual_seed(0)
    reference = Stated().double()
    model = copy.deepcopy(reference)
    plan = plan_from_hf(model)
    assert isinstance(plan["attn"], LocalParameters)
    assert plan["attn"].placements == {"sinks": Shard(0)}
    return training_difference(
        parallelize(model, mesh, plan), reference, torch.randn(3, 5, 8, dtype=torch.float64)
    )


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_local_parameters_shared_norms_and_latent_attention(tp_size: int) -> None:
    assert max(run_ranks(tp_size, stated_difference)) < 1e-12


def test_a_bare_parameter_needs_its_module_in_the_plan() -> None:
    model = Stated()
    model.config.base_model_tp_plan = {"attn.sinks": "colwise"}
    with pytest.raises(PlanError) as caught:
        plan_from_hf(model)
    assert str(caught.value) == (
        "'attn.sinks': 'colwise' shards a bare parameter, which needs 'local_params' or 'moe_tp_experts' at its "
        "module; change or remove this entry"
    )


class Parts(nn.Module):
    """Two branches, summed by hand over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x).sum(-1, keepdim=True)
        return out


def parts_difference() -> float:
    torch.manual_seed(0)
    reference = Parts().double()
    plan = plan_from_hf({"": "all_reduce", "inner.0": "colwise"})
    model = sharded(reference, plan)
    return training_difference(model, reference, torch.randn(3, 4, dtype=torch.float64))


def test_an_output_of_parts_is_summed() -> None:
    assert max(run_ranks(2, parts_difference)) < 1e-12


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


class Tied(nn.Module):
    """A head tied to the embedding, of which the plan names the head only."""

    _tp_plan = {"lm_head": "colwise_rep"}  # noqa: RUF012  as transformers writes it

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.embed(ids))
        return logits


def tied_difference() -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    reference = Tied().double()
    model = copy.deepcopy(reference)
    parallelize(model, mesh, plan_from_hf(model))
    assert model.lm_head.weight is model.embed.weight
    return training_difference(model, reference, torch.arange(16).view(2, 8))


def test_the_embedding_of_a_tied_head_is_cut_as_the_head() -> None:
    assert max(run_ranks(2, tied_difference)) < 1e-12
