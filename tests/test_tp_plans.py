"""Plans are strict: every way in which one does not fit, with the whole text of the error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import says
from ranks import fake_world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from tp_compare import problem_of, tp_mesh
from tp_models import llama_plan as llama_plan
from tp_models import UP_DOWN, Llama, Mlp

import namedmesh.tensor_parallel as tp
from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    KeyValueParallel,
    LocalParameters,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize,
    plan_report,
)

NO_MODULE = "matches no module of the model"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"dwon": RowwiseParallel()}, f"'dwon' {NO_MODULE}; did you mean 'down'?"),
        ({"up.weight.x": ColwiseParallel()}, f"'up.weight.x' {NO_MODULE}"),
        (
            {"up": ColwiseParallel(), "u*": RowwiseParallel()},
            "'up' and 'u*' both match up; one module takes one style",
        ),
        (
            {"": ColwiseParallel()},
            "the model: ColwiseParallel fits nn.Linear and nn.Embedding, not Mlp; use SequenceParallel for a "
            "norm, or leave this module out of the plan",
        ),
        (
            {"": SequenceParallel()},
            "the model: SequenceParallel takes a module that owns its parameters itself, such as a norm, but "
            "this one has 'up.weight'; name the inner modules in the plan",
        ),
        (
            {"up": "colwise"},
            "'up': 'colwise' is not a parallel style, such as ColwiseParallel(); "
            "plan_from_hf reads Hugging Face's names",
        ),
        ([], "a plan is a dict of module names to parallel styles, not a list"),
        (
            {"up": LocalParameters({"scale": Shard(0)})},
            "up: LocalParameters names 'scale', but Linear owns ('weight', 'bias')",
        ),
    ],
)
def test_what_a_plan_says_wrongly(plan: Any, text: str) -> None:
    assert problem_of(Mlp(), plan) == text


def test_sizes_that_do_not_divide() -> None:
    model = Mlp(dim=8, hidden=15)
    assert problem_of(model, UP_DOWN) == (
        "2 problems:\n"
        "  - up: out_features 15 is not divisible by the tp size 2; pad it to 16\n"
        "  - down: in_features 15 is not divisible by the tp size 2; pad it to 16"
    )
    layers = nn.ModuleList(nn.Embedding(65, 6) for _ in range(5))
    for style, text in (
        (
            RowwiseParallel(input_layouts=Replicate()),
            "num_embeddings 65 ... 4; pad it to 68",
        ),
        (ColwiseParallel(), "embedding_dim 6 ... 4; pad it to 8"),
    ):
        with pytest.raises(PlanError, match=says(f"0, 1, 2 and 2 more: {text}")):
            plan_report(layers, 4, {"*": style})


def test_heads_that_do_not_divide() -> None:
    model = Llama(n_heads=8, n_kv_heads=2, layers=5)
    columns = {f"layers.*.attention.{name}": ColwiseParallel() for name in ("wk", "wv")}
    assert problem_of(model, llama_plan() | columns, 4) == (
        "layers.0.attention.wk, layers.1.attention.wk, layers.2.attention.wk and 7 more: n_kv_heads 2 is not divisible "
        "by the tp size 4, and heads would be cut; give them KeyValueParallel(), or choose a tp size that divides 2"
    )
    assert plan_report(model, 4, llama_plan()).tp_size == 4
    # A model that states heads can have its feed-forward split into any number of shards.
    feed_forward = {key: style for key, style in llama_plan().items() if "feed_forward" in key}
    few: Any = Llama(n_heads=2, n_kv_heads=2)
    for stating in (few, *few.layers):
        stating.n_heads = 2
    assert plan_report(few, 4, feed_forward).tp_size == 4


class Config:
    num_attention_heads, num_key_value_heads, hidden_size = 6, 3, 48


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.q_proj, self.k_proj, self.o_proj = nn.Linear(48, 48), nn.Linear(48, 24), nn.Linear(48, 48)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.up_proj = nn.Linear(48, 96)


def test_heads_from_a_configuration() -> None:
    model = nn.ModuleDict({"self_attn": SelfAttention(), "mlp": Gated()})
    plan = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": KeyValueParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
    }
    text = (
        "2 problems:\n  - self_attn.q_proj, self_attn.o_proj: num_attention_heads 6 ... and heads would be cut; choose "
        "a ... 6\n  - self_attn.k_proj: num_key_value_heads 3 ... and heads would be cut; choose a ... 3"
    )
    with pytest.raises(PlanError, match=says(text)):
        plan_report(model, 4, plan)
    gathered = plan | {
        "self_attn.q_proj": ColwiseParallel(output_layouts=Replicate()),
        "self_attn.k_proj": ColwiseParallel(output_layouts=Replicate()),
        "self_attn.o_proj": RowwiseParallel(input_layouts=Replicate()),
    }
    assert plan_report(model, 4, gathered).tp_size == 4


def test_heads_of_an_attention_that_states_no_width() -> None:
    attention: Any = Llama(n_heads=8, n_kv_heads=2).layers[0].attention
    del attention.head_dim
    plan = {
        "wq": ColwiseParallel(),
        "wk": KeyValueParallel(),
        "wv": KeyValueParallel(),
        "wo": RowwiseParallel(),
    }
    assert {row.module for row in plan_report(attention, 4, plan).rows} == set(plan)
    assert "wq, wo: n_heads 8 is not divisible" in problem_of(attention, plan, 16)


class Layered:
    """A configuration whose layers differ, and which says so when it is asked for one value."""

    num_attention_heads = 4

    def __getattr__(self, name: str) -> Any:
        if name in {"num_key_value_heads", "head_dim"}:
            raise RuntimeError(f"{name} varies across layers")
        raise AttributeError(name)


def test_a_configuration_whose_layers_differ() -> None:
    attention: Any = Llama(n_heads=4, n_kv_heads=2).layers[0].attention
    del attention.n_heads, attention.n_kv_heads
    attention.config, attention.num_key_value_groups = Layered(), 2
    model = nn.ModuleDict({"self_attn": attention})
    plan: dict[str, Any] = {f"self_attn.{name}": KeyValueParallel() for name in ("wk", "wv")}
    plan |= {"self_attn.wq": ColwiseParallel(), "self_attn.wo": RowwiseParallel()}
    rows = {row.module: row.placement for row in plan_report(model, 4, plan).rows}
    assert rows["self_attn.wk"] == "Replicate()"
    assert {row.placement for row in plan_report(model, 2, plan).rows} == {"Shard(0)", "Shard(1)"}


def test_sizes_that_only_the_caller_knows() -> None:
    assert problem_of(Mlp(), UP_DOWN, must_divide={"kv heads": 3, "experts": 4}) == (
        "kv heads: 3 is not divisible by the tp size 2 (from must_divide); choose a tp size that divides it"
    )


def test_embeddings_with_options_that_cannot_be_kept() -> None:
    model = nn.Embedding(8, 8, max_norm=1.0, sparse=True, scale_grad_by_freq=True)
    assert problem_of(model, RowwiseParallel(input_layouts=Replicate())) == (
        "3 problems:\n"
        "  - the model: RowwiseParallel cannot keep max_norm=1.0 of an embedding; use max_norm=None\n"
        "  - the model: RowwiseParallel has no sparse gradients for an embedding; use sparse=False\n"
        "  - the model: RowwiseParallel cannot scale an embedding's gradients by frequency; use ColwiseParallel, "
        "or scale_grad_by_freq=False"
    )


def test_ties_that_the_plan_would_break() -> None:
    model = Llama(tied=True)
    columns = llama_plan() | {"tok_embeddings": ColwiseParallel(output_layouts=Replicate())}
    remedy = (
        "give them the same layout, such as RowwiseParallel for an embedding and ColwiseParallel for the output "
        "head, or untie them first"
    )
    tied = "tok_embeddings.weight, output.weight are one parameter (tied), but the plan lays them out differently"
    assert problem_of(model, columns) == (
        f"{tied} (tok_embeddings.weight: Shard(1), output.weight: Shard(0)); {remedy}"
    )
    no_head = {key: style for key, style in llama_plan().items() if key != "output"}
    assert problem_of(model, no_head) == (
        f"{tied} (tok_embeddings.weight: Shard(0), output.weight: not sharded); {remedy}"
    )


def test_three_mistakes_are_reported_at_once() -> None:
    plan = {"upp": ColwiseParallel(), "down": RowwiseParallel()}
    upp = f"\n  - 'upp' {NO_MODULE}; did you mean 'up'?"
    assert problem_of(Mlp(hidden=15), plan, 0, must_divide={}) == (
        f"2 problems:\n  - the tp size is 0, but it must be at least 1{upp}"
    )
    with pytest.raises(
        PlanError, match=says(f"3 problems:{upp}\n  - down: in_features 15 ...\n  - heads: 5 ...")
    ):
        plan_report(Mlp(hidden=15), 2, plan, must_divide={"heads": 5})


def test_wildcards_find_the_nearest_name_without_numbers() -> None:
    assert problem_of(Llama(), {"layers.*.attn.wq": ColwiseParallel()}) == (
        f"'layers.*.attn.wq' {NO_MODULE}; did you mean 'layers.*.attention.wq'?"
    )


def test_a_stage_without_some_modules_takes_the_plan_of_the_whole_model() -> None:
    stage: Any = Llama()
    stage.tok_embeddings = None  # a child that was there
    del stage.output
    stage.output = None  # an attribute that never was one
    report = plan_report(stage, 2, llama_plan())
    assert {row.module.partition(".")[0] for row in report.rows} == {"layers"}


def test_a_stage_with_an_empty_container_takes_it_too() -> None:
    stage: Any = Llama()
    stage.layers = nn.ModuleList()
    assert {row.module for row in plan_report(stage, 2, llama_plan()).rows} == {"tok_embeddings", "output"}
    stage.layers = nn.ModuleDict()
    assert plan_report(stage, 2, llama_plan()).rows
    assert "'layer.*.attention.wq' matches no module" in problem_of(
        stage, {"layer.*.attention.wq": ColwiseParallel()}
    )


# --- the mesh, and applying twice ---------------------------------------------------------------------------


def test_the_mesh_must_be_one_axis() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        with pytest.raises(PlanError) as caught:
            parallelize(Mlp(), mesh, {"upp": ColwiseParallel()})
        assert str(caught.value) == (
            "2 problems:\n"
            "  - a plan is applied along one axis, but the mesh has 3 (axes ('pp', 'dp', 'tp')); pass one of "
            "them, such as mesh['tp']\n"
            f"  - 'upp' {NO_MODULE}; did you mean 'up'?"
        )
    assert problem_of(Mlp(), UP_DOWN, "tp") == (
        "a plan needs a one-dimensional torch DeviceMesh, not a str; pass mesh['tp']"
    )


def test_what_is_no_module_is_refused() -> None:
    no_model: Any = 3
    assert problem_of(no_model, UP_DOWN, 2) == (
        "model is a int; give the module whose submodules the plan names"
    )


def test_a_plan_that_does_not_fit_changes_nothing() -> None:
    with fake_world(2):
        mesh = tp_mesh()
        model = Mlp()
        with pytest.raises(PlanError):
            parallelize(model, mesh, UP_DOWN | {"dwon": RowwiseParallel()})
        assert type(model.up) is nn.Linear
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        parallelize(model, mesh, UP_DOWN)  # the same model, once the plan is right


def test_a_model_is_parallelized_once() -> None:
    with fake_world(2):
        mesh = tp_mesh()
        model = parallelize(Mlp(), mesh, UP_DOWN)
        with pytest.raises(PlanError) as caught:
            parallelize(model, mesh, UP_DOWN)
        once = "already parallelized; parallelize a model once"
        assert str(caught.value) == f"up, down: {once}"
        with pytest.raises(PlanError) as caught:
            dist.tensor.parallel.parallelize_module(model, mesh, UP_DOWN)
        assert str(caught.value) == (
            "ColwiseLinear: ColwiseParallel finds a module that is already distributed (weight, bias is a "
            "DTensor); parallelize a model once, and before fully_shard"
        )
        prepared = parallelize(
            Mlp(), mesh, PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        )
        with pytest.raises(PlanError, match=says(f"the model: {once}")):
            parallelize(prepared, mesh, {"": SequenceParallel()})


class Noting(ParallelStyle):
    """Somebody else's style: remembers from which rank it was told to take the data."""

    seen: Any = "nothing"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  its signature
        self.seen = self.src_data_rank
        return module


@pytest.mark.parametrize("key", ["", "up"])
@pytest.mark.parametrize("source", [0, 1, None])
def test_the_source_of_the_data_reaches_every_style(key: str, source: int | None) -> None:
    with fake_world(2):
        style = Noting()
        parallelize(Mlp(), tp_mesh(), {key: style}, src_data_rank=source)
        assert style.seen == source


def test_a_frozen_norm_stays_frozen() -> None:
    with fake_world(2):
        model = Llama()
        model.norm.weight.requires_grad_(False)
        parallelize(model, tp_mesh(), {"norm": SequenceParallel(), "layers.*.ffn_norm": SequenceParallel()})
        assert isinstance(model.norm.weight, DTensor)
        assert not model.norm.weight.requires_grad
        assert model.layers[0].ffn_norm.weight.requires_grad  # type: ignore[union-attr]


# --- the dry run --------------------------------------------------------------------------------------------


def test_a_dry_run_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"embed": nn.Embedding(1000, 64), "mlp": Mlp(64, 256), "norm": nn.LayerNorm(64)}
        )
    model["norm"].requires_grad_(False)  # or else the plan would have to say what it works on
    before = copy.deepcopy(model.state_dict())
    report = plan_report(
        model,
        4,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": TorchRowwise(),
        },
    )
    assert str(report) == (
        "module       style               parameter  placement        global   local\n"
        "embed        RowwiseParallel     weight     Shard(0)         1000x64  250x64\n"
        "mlp          PrepareModuleInput\n"
        "mlp.up       ColwiseParallel     weight     Shard(0)         256x64   64x64\n"
        "mlp.up       ColwiseParallel     bias       Shard(0)         256      64\n"
        "mlp.down     RowwiseParallel     weight     Shard(1)         64x256   64x64\n"
        "mlp.down     RowwiseParallel     bias       Replicate()      64       64\n"
        "norm.weight  -                              not in the plan  64       64\n"
        "norm.bias    -                              not in the plan  64       64\n"
        "24,448 of 97,216 parameters on each of 4 ranks, 192 of them whole"
    )
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert all(value is before[key] or value.is_meta for key, value in model.state_dict().items())
    assert type(model["mlp"].up) is nn.Linear


@pytest.mark.parametrize("tied", [False, True])
def test_the_report_counts_what_each_rank_then_holds(tied: bool) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = Llama(tied=tied)
        plan = llama_plan(sequence_parallel=True)
        report = plan_report(model, mesh, plan)
        assert report == plan_report(model, 4, plan)
        assert report.parameters == sum(p.numel() for p in model.parameters())
        parallelize(model, mesh, plan)
        held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        assert report.parameters_per_rank == held
        for row in report.rows:
            if not row.parameter:  # a style that moves activations only
                continue
            parameter = model.get_parameter(f"{row.module}.{row.parameter}")
            assert isinstance(parameter, DTensor)
            assert (row.global_shape, row.local_shape) == (parameter.shape, parameter.to_local().shape)


def test_the_public_names() -> None:
    assert all(hasattr(tp, name) for name in tp.__all__)
    assert sorted(tp.__all__) == list(tp.__all__)
    assert isinstance(ColwiseParallel(), dist.tensor.parallel.ColwiseParallel)
    assert repr(RowwiseParallel()) == (
        "RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Replicate(),), use_local_output=True)"
    )
