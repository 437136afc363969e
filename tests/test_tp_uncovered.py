"""Trainable parameters between sharded layers that a plan leaves out: covered, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from messages import says
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from tp_compare import hf_difference, problem_of, tp_mesh, training_difference
from tp_models import Attention, Block, Llama, Mlp, hf_model

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    KeepWhole,
    KeyValueParallel,
    LocalParameters,
    RowwiseParallel,
    llama_plan,
    parallelize,
    plan_report,
)

UP_DOWN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
ATTENTION: dict[str, Any] = {
    "wq": ColwiseParallel(),
    "wk": KeyValueParallel(),
    "wv": KeyValueParallel(),
    "wo": RowwiseParallel(),
}


def difference(model: nn.Module, plan: Any, features: int) -> float:
    """Of training the model under a plan and alone, on this rank."""
    mesh = tp_mesh()
    torch.manual_seed(0)
    for parameter in model.parameters():  # a norm of ones, and a factor of 1, would hide what it does
        nn.init.uniform_(parameter, 0.2, 0.7)
    reference = model.double()
    model = parallelize(copy.deepcopy(reference), mesh, plan)
    return training_difference(model, reference, torch.randn(2, 6, features, dtype=torch.float64))


# --- what can only be meant ---------------------------------------------------------------------------------


class HeadNorms(nn.Module):
    """As in Qwen3: norms over the features of a head, which come after the projections in the module."""

    def __init__(self, dim: int = 32, n_heads: int = 4, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.wq, self.wk, self.wv)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        repeats = q.shape[1] // k.shape[1]
        out = nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        )
        result: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return result


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(32), HeadNorms()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))
        return out


@pytest.mark.parametrize("size", [2, 4])
def test_norms_of_heads_get_their_gradients_summed(size: int) -> None:
    plan = {f"attention.{name}": style for name, style in ATTENTION.items()}
    report = plan_report(Normed(), size, plan)
    assert {row.module: row.style for row in report.rows if "norm" in row.module} == {
        "attention.q_norm": "LocalParameters",
        "attention.k_norm": "LocalParameters",
    }
    assert [name for name, _ in report.unsharded] == ["norm.weight"]
    assert max(run_ranks(size, difference, Normed(), plan, 32)) < 1e-11


class Scales(nn.Module):
    """A number for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(4))

    def forward(self, heads: Tensor) -> Tensor:
        return heads * self.alpha.unsqueeze(-1)


class Sinks(HeadNorms):
    """With a number for each head, of the attention itself and of the module behind it that projects."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.ones(4))
        self.exclusive = Scales()
        self.projection: Any = nn.Module()
        self.projection.gate, self.projection.wo = nn.Linear(32, 32), self.wo
        del self.wo

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.wk, self.wv))
        k, v = (part.repeat_interleave(q.shape[-2] // k.shape[-2], -2) for part in (self.k_norm(k), v))
        heads = torch.tanh(self.q_norm(q) * k * self.sinks.unsqueeze(-1)) - self.exclusive(v)
        out: Tensor = self.projection.wo(heads.flatten(-2) * self.projection.gate(x))
        return out


def test_a_number_for_each_head_is_sharded() -> None:
    model = nn.Sequential(nn.RMSNorm(32))
    model.add_module("attention", Sinks())
    plan = {f"attention.{name}": style for name, style in ATTENTION.items() if name != "wo"}
    plan |= {"attention.projection.gate": ColwiseParallel(), "attention.projection.wo": RowwiseParallel()}
    placements = {(row.module, row.placement) for row in plan_report(model, 2, plan).rows}
    assert placements >= {("attention", "Shard(0)"), ("attention.exclusive", "Shard(0)")}
    assert max(run_ranks(2, difference, model, plan, 32)) < 1e-10


class Learned(nn.Module):
    """An activation with one number for all features, as Apertus has two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act_fn = nn.Linear(8, 16), nn.Linear(16, 8), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act_fn(self.up(x) - 2))
        return out


def test_an_activation_with_a_number_of_its_own_gets_its_gradient_summed() -> None:
    assert max(run_ranks(2, difference, Learned(), UP_DOWN, 8)) < 1e-11


@pytest.mark.oracle("transformers")
def test_apertus_trains_as_the_whole_model() -> None:
    assert max(run_ranks(2, hf_difference, hf_model("Apertus"))) < 1e-5


# --- what is refused, and that the remedies help ------------------------------------------------------------


def test_keys_and_values_left_out_or_gathered() -> None:
    model = Attention(32, 4, 1)
    left_out = {name: style for name, style in ATTENTION.items() if name in {"wq", "wo"}}
    between = "between wq, whose features are sharded, and wo"
    assert problem_of(model, left_out) == (
        f"wk.weight, wv.weight: trainable and in no style, but {between}: each rank would have another gradient; give "
        "its module KeyValueParallel()"
    )
    gathered = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("wk", "wv")}
    assert problem_of(model, left_out | gathered) == (
        f"wk.weight, wv.weight: every rank gets all the features of this column layer {between}, and uses other ones of "
        "them; give its module KeyValueParallel()"
    )
    assert plan_report(model, 2, ATTENTION).unsharded == ()
    wide = Attention(32, 4, 1)  # as many features as the model has: nothing but the name tells
    wide.wk = wide.wv = nn.Linear(32, 32)
    assert "wk.weight, wk.bias: trainable" in problem_of(wide, left_out)


class Scaled(Mlp):
    """A number of its own, between the two linears or after both."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.after, self.scale = after, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            return super().forward(x) * self.scale
        out: Tensor = self.down(torch.tanh(self.up(x)) * self.scale)
        return out


def test_a_number_of_the_module_itself_needs_a_word() -> None:
    text = (
        "scale: trainable ... between up, ... and down: ...; give its module LocalParameters() if the ranks use it on "
        "their own features, KeepWhole() if they all use it on the same values, or freeze it"
    )
    with pytest.raises(PlanError, match=says(text)):
        plan_report(Scaled(after=False), 2, UP_DOWN)
    assert max(run_ranks(2, difference, Scaled(after=False), UP_DOWN | {"": LocalParameters()}, 8)) < 1e-11
    assert max(run_ranks(2, difference, Scaled(after=True), UP_DOWN | {"": KeepWhole()}, 8)) < 1e-11
    frozen = Scaled(after=False)
    frozen.scale.requires_grad_(False)
    assert max(run_ranks(2, difference, frozen, UP_DOWN, 8)) < 1e-11


class NormEach(nn.Module):
    """As in StableLM: a norm for each head, taken one after the other."""

    def __init__(self, n_heads: int = 4, head_dim: int = 8) -> None:
        super().__init__()
        self.head_dim, self.n_heads = head_dim, n_heads
        self.wq, self.wo = nn.Linear(32, 32), nn.Linear(32, 32)
        self.q_norms = nn.ModuleList(nn.RMSNorm(head_dim) for _ in range(n_heads))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wq(x).split(self.head_dim, dim=-1)
        out: Tensor = self.wo(torch.cat([norm(h) for norm, h in zip(self.q_norms, heads, strict=False)], -1))
        return out


def test_a_norm_for_each_head_is_refused() -> None:
    model = nn.ModuleDict({"attention": NormEach()})
    plan = {"attention.wq": ColwiseParallel(), "attention.wo": RowwiseParallel()}
    text = (
        "attention.q_norms.0.weight, attention.q_norms.1.weight, attention.q_norms.2.weight, attention.q_norms.3.weight: "
        "trainable ... between attention.wq, ... and attention.wo: ...; leave these layers out of the plan"
    )
    with pytest.raises(PlanError, match=says(text)):
        plan_report(model, 2, plan)
    assert plan_report(model, 2, {}).rows == ()


def test_what_makes_or_takes_all_heads_is_refused() -> None:
    all_heads: Any = Attention(32, 4, 4)
    all_heads.q_norm, all_heads.k_norm = nn.RMSNorm(32), nn.RMSNorm(32)
    remedy = "where each rank has its heads; leave its attention out of the plan"
    assert problem_of(all_heads, ATTENTION) == (
        f"q_norm, k_norm: normalizes over the features of all heads, {remedy}"
    )
    numbers: Any = Attention(32, 4, 2)
    numbers.dt_proj = nn.Linear(32, 4)
    assert problem_of(numbers, ATTENTION | {"dt_proj": RowwiseParallel()}) == (
        f"dt_proj: makes a number for each head, those of all heads on every rank, {remedy}"
    )
    assert len(plan_report(all_heads, 2, {}).unsharded) == 6


def test_a_column_layer_that_gathers_what_the_ranks_use_parts_of() -> None:
    class Gated(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.up(x) * self.gate(x))
            return out

    gathered = UP_DOWN | {"gate": ColwiseParallel(output_layouts=Replicate())}
    text = (
        "gate.weight, gate.bias: every rank gets all ... between up, ... and down, ...; let each rank have its features, "
        "with output_layouts=Shard(-1)"
    )
    with pytest.raises(PlanError, match=says(text)):
        plan_report(Gated(), 2, gathered)
    assert max(run_ranks(2, difference, Gated(), UP_DOWN | {"gate": ColwiseParallel()}, 8)) < 1e-9


def two_steps() -> list[float]:
    """A plan for the model around its layers and one for each layer, in either order."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = llama_plan(sequence_parallel=True)
    around = {key: style for key, style in plan.items() if not key.startswith("layers")}
    block = {key.removeprefix("layers.*."): style for key, style in plan.items() if key not in around}
    found = []
    for first in (True, False):
        torch.manual_seed(0)
        reference = Llama().double()
        model: Any = copy.deepcopy(reference)
        if first:
            parallelize(model, mesh, around)
        for layer in model.layers:
            parallelize(layer, mesh, block)
        if not first:
            parallelize(model, mesh, around)
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
        found.append(training_difference(model, reference, ids))
    return found


def test_layers_may_have_a_plan_of_their_own() -> None:
    for found in run_ranks(2, two_steps):
        assert max(found) < 1e-11


# --- what stands outside is left alone ----------------------------------------------------------------------


def test_flat_blocks_backbones_and_heads_are_not_refused() -> None:
    plain = nn.TransformerEncoderLayer(16, 4, 32)
    assert plan_report(plain, 2, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}).rows
    backbone = nn.Sequential(
        nn.Conv1d(3, 5, 1),
        nn.BatchNorm1d(5),
        nn.Flatten(),
        nn.Linear(50, 8),
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
        nn.LayerNorm(3),
    )
    assert plan_report(backbone, 2, {"4": ColwiseParallel(), "6": RowwiseParallel()}).rows
    assert len(plan_report(Llama(), 2, llama_plan(loss_parallel=True)).unsharded) == 5
    block = Block(32, 8, 4, 48)
    inside = {key[9:]: style for key, style in llama_plan().items() if key.startswith("layers")}
    assert len(plan_report(block, 2, inside).unsharded) == 2


def test_what_chooses_the_tokens_to_attend_to_stays_whole() -> None:
    model: Any = HeadNorms()
    model.indexer = nn.Module()
    model.indexer.wq, model.indexer.wk = nn.Linear(32, 6), nn.Linear(32, 6)
    model.indexer.k_norm, model.indexer.weights = nn.LayerNorm(6), nn.Linear(32, 3)
    attention = nn.ModuleDict({"attention": model})
    plan = {f"attention.{name}": style for name, style in ATTENTION.items()}
    rows = {row.module for row in plan_report(attention, 2, plan).rows}
    assert rows == {*plan, "attention.q_norm", "attention.k_norm"}


class Latent(nn.Module):
    """Multi-head latent attention: what leads to the column layers stays whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 6
        self.q_a_proj, self.q_a_layernorm, self.q_b_proj = (
            nn.Linear(16, 10),
            nn.RMSNorm(10),
            nn.Linear(10, 24),
        )
        self.o_proj = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o_proj(torch.tanh(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))))
        return out


def test_latent_projections_stay_whole() -> None:
    model = nn.Sequential()
    model.add_module("self_attn", Latent())
    plan = {"self_attn.q_b_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
    assert max(run_ranks(2, difference, model, plan, 16)) < 1e-11
