"""Plans are strict: a plan that does not fit raises, with the complete message."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from messages import error_of, match_message
from ranks import fake_world, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, SequenceParallel
from torch.nn.utils.parametrizations import weight_norm
from tp_compare import get_plan_error, make_tp_mesh
from tp_models import UP_DOWN, Attention, Llama, Mlp, OwnForward, make_attention_plan, make_llama_plan

from namedmesh.tensor_parallel import (
    AllReduceOutput,
    AllReduceOutputGradient,
    ColwiseParallel,
    KeyValueParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
    Style,
    parallelize,
    plan_report,
    split_linear,
)

NO_MODULE = "matches no module of the model"
STAGE = " (pass strict=False for a pipeline stage, which has only some of the modules)"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"dwon": RowwiseParallel()}, f"'dwon' {NO_MODULE}; did you mean 'down'?{STAGE}"),
        ({"up.weight.x": ColwiseParallel()}, f"'up.weight.x' {NO_MODULE}{STAGE}"),
        (
            {"up": ColwiseParallel(), "u*": RowwiseParallel()},
            "'up' and 'u*' both match up; one module takes one style",
        ),
        (
            {"": ColwiseParallel()},
            "the model: ColwiseParallel fits nn.Linear and nn.Embedding, not Mlp; use SequenceParallel for a norm, or "
            "name the linear inside (base_layer of an adapter)",
        ),
        (
            "colwise",
            "plan must be a parallel style or a dict of module names to parallel styles, got 'colwise' (str); write "
            "{'layers.*.up': ColwiseParallel()}",
        ),
        (
            None,
            "plan must be a parallel style or a dict of module names to parallel styles, got None (NoneType); write "
            "{'layers.*.up': ColwiseParallel()}",
        ),
        (
            ["up"],
            "plan must be a parallel style or a dict of module names to parallel styles, got ['up'] (list); write "
            "{'layers.*.up': ColwiseParallel()}",
        ),
        ({0: ColwiseParallel()}, "0 (int) is not the name of a module, which is a str"),
        ({"up": "colwise"}, "'up': 'colwise' is not a parallel style, such as ColwiseParallel()"),
        (
            {"up": LocalParameters({"scale": Shard(0)})},
            "up: LocalParameters names 'scale', but Linear owns ('weight', 'bias'); name its own parameters, and remove a "
            "parametrization such as weight_norm first",
        ),
        (
            {"up": LocalParameters({"weight": Shard(5), "bias": Partial()})},
            "2 problems:\n"
            "  - up: Shard(5) is not a placement of weight, which has 2 dims; name one of them\n"
            "  - up: Partial(sum) is not a placement of a parameter (bias); use Shard(dim) or Replicate()",
        ),
    ],
)
def test_wrong_entries_of_a_plan_raise(plan: Any, message: str) -> None:
    assert get_plan_error(Mlp(), plan) == message


def test_sizes_that_tp_does_not_divide_raise() -> None:
    assert get_plan_error(Mlp(hidden=15), UP_DOWN) == (
        "2 problems:\n"
        "  - up: dim 0 of weight 15 is not divisible by the tp size 2; pad it to 16\n"
        "  - down: dim 1 of weight 15 is not divisible by the tp size 2; pad it to 16"
    )
    layers = nn.ModuleList(nn.Embedding(65, 6) for _ in range(5))
    for style, problem in (
        (RowwiseParallel(input_layouts=Replicate()), "dim 0 of weight 65 ... 4; pad it to 68"),
        (ColwiseParallel(), "dim 1 of weight 6 ... 4; pad it to 8"),
    ):
        pattern = match_message(f"0, 1, 2 and 2 more: {problem}")
        assert re.match(pattern, get_plan_error(layers, {"*": style}, 4))


def test_embeddings_with_unsupported_options_raise() -> None:
    model = nn.Embedding(8, 8, max_norm=1.0, sparse=True, scale_grad_by_freq=True)
    assert get_plan_error(model, RowwiseParallel(input_layouts=Replicate())) == (
        "3 problems:\n"
        "  - the model: RowwiseParallel does not support max_norm=1.0 of an embedding; remove it\n"
        "  - the model: RowwiseParallel does not support sparse=True of an embedding; remove it\n"
        "  - the model: RowwiseParallel does not support scale_grad_by_freq=True of an embedding; remove it"
    )


def test_tied_parameters_with_several_placements_raise() -> None:
    model = Llama(tied=True)
    columns = make_llama_plan() | {"tok_embeddings": ColwiseParallel(output_layouts=Replicate())}
    remedy = (
        "give all the same, such as RowwiseParallel for an embedding and ColwiseParallel for the output head, "
        "or untie them first"
    )
    tied = "one parameter (tied) has several placements (tok_embeddings.weight:"
    assert get_plan_error(model, columns) == f"{tied} Shard(1), output.weight: Shard(0)); {remedy}"
    no_head = {key: style for key, style in make_llama_plan().items() if key != "output"}
    assert get_plan_error(model, no_head) == f"{tied} Shard(0), output.weight: not in the plan); {remedy}"


def test_all_problems_are_reported_at_once() -> None:
    plan = {"upp": ColwiseParallel(), "down": RowwiseParallel()}
    assert get_plan_error(Mlp(hidden=15), plan, must_divide={"heads": 5, "experts": 4}) == (
        "3 problems:\n"
        f"  - 'upp' {NO_MODULE}; did you mean 'up'?{STAGE}\n"
        "  - down: dim 1 of weight 15 is not divisible by the tp size 2; pad it to 16\n"
        "  - heads: 5 is not divisible by the tp size 2 (from must_divide)"
    )


def test_a_wildcard_without_match_suggests_the_nearest_name() -> None:
    assert get_plan_error(Llama(), {"layers.*.attn.wq": ColwiseParallel()}) == (
        f"'layers.*.attn.wq' {NO_MODULE}; did you mean 'layers.*.attention.wq'?{STAGE}"
    )


def test_strict_false_ignores_modules_that_a_stage_lacks() -> None:
    stage: Any = Llama()
    stage.tok_embeddings = None
    stage.output = None
    assert "'tok_embeddings' matches no module" in get_plan_error(stage, make_llama_plan())
    report = plan_report(stage, 2, make_llama_plan(), strict=False)
    assert {line.partition(".")[0] for line in report.splitlines()[1:-2]} == {"layers"}
    assert "'tok_embeddings' matches no module" in get_plan_error(stage, make_llama_plan(), strict=True)


def test_heads_that_ranks_cannot_share_raise() -> None:
    assert get_plan_error(Attention(24, 6, 2), make_attention_plan(6, 2), 4) == (
        "wk, wv: 6 query heads and 2 kv heads cannot be shared by 4 ranks; choose a tp size that divides 6"
    )
    linear = nn.Linear(8, 8)
    assert "3 kv heads do not divide out_features 8" in get_plan_error(linear, KeyValueParallel(6, 3))
    linear.register_forward_hook(lambda *_: None)
    problem = "with the forward of nn.Linear only, without hooks, not Linear's"
    assert problem in get_plan_error(linear, KeyValueParallel(4, 2), 4)
    # Attributes of modules around a linear are not interpreted.
    block = nn.ModuleDict({"proj": nn.Linear(384, 384)})
    block.num_heads = 6  # type: ignore[assignment]
    assert "on each of 4 ranks" in plan_report(block, 4, {"proj": ColwiseParallel()})


# --- fused linears ------------------------------------------------------------------------------


def make_linears(**widths: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*width) for name, width in widths.items()})


BLOCK = {"o": (16, 16), "up": (16, 64), "down": (64, 16)}
STYLES: dict[str, Any] = {"qkv": ColwiseParallel(), "o": RowwiseParallel(), **UP_DOWN}


Q_KV: dict[str, Any] = {"to_q": ColwiseParallel(), "to_kv": ColwiseParallel(), "to_out": RowwiseParallel()}
FUSED = "it is a fused linear (q|k|v, gate|up); split it with split_linear, or use ColwiseParallel(heads=...)"


@pytest.mark.parametrize(
    ("model", "plan", "problem"),
    [
        (
            make_linears(qkv=(16, 48), **BLOCK),
            STYLES,
            "qkv: has 48 output features, but the row layers of its block take 16, 64",
        ),
        (
            nn.ModuleDict({"attn": make_linears(qkv=(16, 48), o=(16, 16)), "o": nn.Linear(48, 8)}),
            {f"attn.{name}": STYLES[name] for name in ("qkv", "o")},
            "attn.qkv: has 48 output features, but the row layers of its block take 16",
        ),
        # The output features of another column layer do not matter.
        (
            make_linears(to_q=(16, 16), to_kv=(16, 32), to_out=(16, 16)),
            Q_KV,
            "to_kv: has 32 output features, but the row layers of its block take 16",
        ),
        (
            make_linears(to_q=(16, 16), to_kv=(16, 32), to_out=(16, 16)),
            Q_KV | {"to_q": ColwiseParallel(heads=4)},
            "to_kv: has 32 output features, but the row layers of its block take 16",
        ),
    ],
)
def test_a_fused_column_layer_raises(model: nn.Module, plan: Any, problem: str) -> None:
    assert get_plan_error(model, plan) == f"{problem}: {FUSED} if it is interleaved per head"
    assert plan_report(model, 1, plan)


def test_a_row_layer_whose_features_no_column_layer_computes_raises() -> None:
    model = make_linears(k=(16, 8), o=(16, 16))
    assert get_plan_error(model, {"k": ColwiseParallel(), "o": RowwiseParallel()}) == (
        "o: takes 16 features, which no column layer of its block computes; name the layer that computes them"
    )


def test_the_remedies_for_fused_linears_work() -> None:
    with_heads = STYLES | {"qkv": ColwiseParallel(heads=4)}
    assert plan_report(make_linears(qkv=(16, 48), **BLOCK), 2, with_heads)
    assert get_plan_error(make_linears(qkv=(16, 48), **BLOCK), with_heads, 8) == (
        "qkv: 4 heads are not divisible by the tp size 8; choose one that divides them"
    )
    model = make_linears(qkv=(16, 48), **BLOCK)
    split_linear(model, "qkv", [16, 16, 16])
    split_plan = {name: style for name, style in STYLES.items() if name != "qkv"}
    for index in range(3):
        split_plan[f"qkv.{index}"] = ColwiseParallel()
    assert plan_report(model, 2, split_plan)


def test_layers_that_only_look_fused_are_accepted() -> None:
    # Fewer keys and values, and an output head behind the row layers.
    grouped = make_linears(to_q=(16, 16), k=(16, 8), v=(16, 8), to_out=(16, 16), head=(16, 50))
    columns = dict.fromkeys(("to_q", "k", "v", "head"), ColwiseParallel())
    assert plan_report(grouped, 2, columns | {"to_out": RowwiseParallel()})
    # A plan with column layers only, or row layers only.
    for names in ({"o"}, {"qkv"}, {"qkv", "up"}):
        assert plan_report(make_linears(qkv=(16, 48), **BLOCK), 2, {name: STYLES[name] for name in names})


def make_hooked() -> nn.ModuleDict:
    model = nn.ModuleDict({"qkv": nn.Linear(8, 48)})
    model["qkv"].register_forward_hook(lambda *_: None)
    return model


def make_tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"qkv": nn.Linear(8, 48), "other": nn.Linear(8, 48)})
    model["other"].weight = model["qkv"].weight
    return model


@pytest.mark.parametrize(
    ("model", "name", "sizes", "problem"),
    [
        (nn.ModuleDict({"qkv": nn.Linear(8, 48)}), "qkv", [16, 16], "sizes that add up to its out_features"),
        (nn.ModuleDict({"norm": nn.LayerNorm(16)}), "norm", [8, 8], "give an nn.Linear"),
        (make_hooked(), "qkv", [16, 32], "qkv has hooks or a forward that the new linears would not have"),
        (make_tied(), "qkv", [16, 32], "qkv.weight is shared with other.weight"),
    ],
)
def test_split_linear_rejects_modules_that_cannot_be_split(
    model: nn.Module, name: str, sizes: list[int], problem: str
) -> None:
    message = error_of(lambda: split_linear(model, name, sizes))
    assert message.startswith("PlanError: ")
    assert problem in message
    assert type(model.get_submodule(name)) in {nn.Linear, nn.LayerNorm}


def test_a_split_linear_computes_the_same() -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"qkv": nn.Linear(8, 48)}).eval()
    model["again"] = model["qkv"]
    fused = copy.deepcopy(model["qkv"])
    x = torch.randn(2, 8)
    model["qkv"].bias.requires_grad_(requires_grad=False)
    model["qkv"].weight.no_decay = True
    split_linear(model, "qkv", [32, 8, 8])
    assert model["again"] is model["qkv"]
    assert all(linear.weight.no_decay for linear in model["qkv"])
    torch.testing.assert_close(model["qkv"](x), fused(x))
    assert [param.requires_grad for param in model.parameters()] == [True, False] * 3
    assert not model["qkv"].training
    weights = [linear.weight for linear in model["qkv"]]
    torch.testing.assert_close(torch.cat(weights), fused.weight)


def count_calls(layers: int) -> int:
    """Return the number of function calls to check a plan with one key for each linear."""
    model = nn.ModuleList(Mlp(2, 2) for _ in range(layers))
    plan: dict[str, Any] = {}
    for layer in range(layers):
        for name, style in UP_DOWN.items():
            plan[f"{layer}.{name}"] = style
    calls = 0

    def count_call(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count_call)
    try:
        plan_report(model, 2, plan)
    finally:
        sys.setprofile(None)
    return calls


def test_checking_a_plan_takes_time_proportional_to_the_model() -> None:
    assert count_calls(80) < 2.2 * count_calls(40)


# --- applying a plan ----------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_changes_nothing() -> None:
    with fake_world(2):
        model = Mlp()
        apply = partial(parallelize, model, make_tp_mesh())
        assert error_of(lambda: apply(UP_DOWN | {"dwon": RowwiseParallel()})).startswith("PlanError: ")
        assert type(model.up) is nn.Linear
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        for wrong, problem in (
            (weight_norm(nn.Linear(8, 16)), "'weight'"),
            (nn.LazyLinear(16), "no shape yet"),
        ):
            two = nn.ModuleDict({"up": nn.Linear(4, 8), "wrong": wrong})
            assert problem in error_of(partial(parallelize, two, make_tp_mesh(), {"*": ColwiseParallel()}))
            assert type(two.get_parameter("up.weight")) is nn.Parameter
        # The plan that fits can then be applied, once.
        apply(UP_DOWN)
        assert error_of(lambda: apply(UP_DOWN)) == (
            "PlanError: up, down: already parallelized (weight is a DTensor); parallelize a model once, "
            "and before fully_shard"
        )


class RecordSource(ParallelStyle):
    """A third-party style that records its ``src_data_rank``."""

    recorded: Any = "nothing"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  its signature
        self.recorded = self.src_data_rank
        return module


@pytest.mark.parametrize("key", ["", "up"])
@pytest.mark.parametrize("source", [0, 1, None])
def test_src_data_rank_reaches_every_style(key: str, source: int | None) -> None:
    with fake_world(2):
        style = RecordSource()
        parallelize(Mlp(), make_tp_mesh(), {key: style}, src_data_rank=source)
        assert style.recorded == source


def test_a_frozen_norm_stays_frozen() -> None:
    with fake_world(2):
        model = Llama()
        model.norm.weight.requires_grad_(False)
        parallelize(
            model, make_tp_mesh(), {"norm": SequenceParallel(), "layers.*.ffn_norm": SequenceParallel()}
        )
        assert isinstance(model.norm.weight, DTensor)
        assert not model.norm.weight.requires_grad
        assert model.layers[0].ffn_norm.weight.requires_grad  # type: ignore[union-attr]


# --- lengths that cannot be split into equal shards ---------------------------------------------

SEQUENCE = Shard(1)
REPLICATED = Replicate()


def split_odd_lengths() -> dict[str, tuple[str, str]]:
    """Give each style an input of 17 positions; return its error and the expected one.

    Every rank must raise before the collective, in which gloo would end the process.
    """
    tp = torch.distributed.get_world_size()
    local_features = torch.zeros(2, 17, 16 // tp)
    features = torch.zeros(2, 17, 16)
    ids = torch.zeros(2, 17, dtype=torch.long)
    split: dict[str, Any] = {"output_layouts": SEQUENCE}
    split_ids: dict[str, Any] = {"input_layouts": REPLICATED, **split}
    results = {}
    for name, module, style, value, shape in (
        ("rows", nn.Linear(16, 8), RowwiseParallel(**split), local_features, (2, 17, 8)),
        ("torch's rows", nn.Linear(16, 8), torchs.RowwiseParallel(**split), local_features, (2, 17, 8)),
        ("own forward", OwnForward(16, 8), RowwiseParallel(**split), local_features, (2, 17, 8)),
        ("dim 0", nn.Linear(16, 8), RowwiseParallel(output_layouts=Shard(0)), local_features[0], (17, 8)),
        ("columns", nn.Linear(16, 8), ColwiseParallel(**split), features, (2, 17, 8)),
        ("torch's columns", nn.Linear(16, 8), torchs.ColwiseParallel(**split), features, (2, 17, 8)),
        ("embedding", nn.Embedding(32, 16), RowwiseParallel(**split_ids), ids, (2, 17, 16)),
        ("torch's embedding", nn.Embedding(32, 16), torchs.RowwiseParallel(**split_ids), ids, (2, 17, 16)),
        ("column embedding", nn.Embedding(32, 16), ColwiseParallel(**split), ids, (2, 17, 16)),
    ):
        model: Any = parallelize(nn.ModuleDict({"layer": module}), make_tp_mesh(), {"layer": style})
        message = error_of(partial(model["layer"], value))
        torch.distributed.barrier()
        expected = (
            f"ShapeError: dim {shape.index(17)} of an activation of shape {shape} cannot be split into "
            f"{tp} equal shards (the tp size); pad it to {17 + (-17 % tp)}, or to another multiple of {tp}"
        )
        results[name] = (message, expected)
    return results


@pytest.mark.parametrize("tp", [2, 4])
def test_every_style_rejects_lengths_that_it_cannot_split(tp: int) -> None:
    for results in run_ranks(tp, split_odd_lengths):
        for name, (message, expected) in results.items():
            assert message == expected, name


def test_one_rank_accepts_any_length() -> None:
    with fake_world(1):
        model = parallelize(Llama(), make_tp_mesh(), make_llama_plan(sequence_parallel=True))
        assert model(torch.zeros(1, 17, dtype=torch.long)).shape == (1, 17, 32)


def check_contiguous() -> list[bool]:
    """Return whether outputs and input gradients are contiguous, as a pipeline has to send them."""
    results = []
    for style, width in (
        (ColwiseParallel(input_layouts=SEQUENCE), 8),
        (ColwiseParallel(), 8),
        (RowwiseParallel(output_layouts=SEQUENCE), 4),
        (RowwiseParallel(), 4),
    ):
        layer = parallelize(nn.Linear(8, 8), make_tp_mesh(), style)
        x = torch.ones(2, 4, width, requires_grad=True)
        output = layer(x)
        grads: list[torch.Tensor] = []
        x.register_hook(grads.append)
        output.sum().backward()
        results += [output.is_contiguous(), grads[0].is_contiguous()]
    return results


def test_outputs_and_input_gradients_are_contiguous() -> None:
    assert run_ranks(2, check_contiguous) == [[True] * 8] * 2


# --- the report ---------------------------------------------------------------------------------


def test_the_report_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"embed": nn.Embedding(1000, 64), "mlp": Mlp(64, 256), "norm": nn.LayerNorm(64)}
        )
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": torchs.RowwiseParallel(),
    }
    assert plan_report(model, 4, plan) == (
        "module       style               parameter  placement        global   local\n"
        "embed        RowwiseParallel     weight     Shard(0)         1000x64  250x64\n"
        "mlp          PrepareModuleInput\n"
        "mlp.up       ColwiseParallel     weight     Shard(0)         256x64   64x64\n"
        "mlp.up       ColwiseParallel     bias       Shard(0)         256      64\n"
        "mlp.down     RowwiseParallel     weight     Shard(1)         64x256   64x64\n"
        "mlp.down     RowwiseParallel     bias       Replicate()      64       64\n"
        "norm.weight  -                              not in the plan  64       64\n"
        "norm.bias    -                              not in the plan  64       64\n"
        "24,448 of 97,216 parameters on each of 4 ranks, 192 of them replicated"
    )
    assert type(model["mlp"].up) is nn.Linear
    assert not any(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_the_report_counts_the_local_parameters(tied: bool) -> None:
    with fake_world(4):
        mesh = make_tp_mesh()
        model = Llama(tied=tied)
        plan = make_llama_plan(sequence_parallel=True)
        report = plan_report(model, mesh, plan)
        assert report == plan_report(model, 4, plan)
        total = sum(param.numel() for param in model.parameters())
        parallelize(model, mesh, plan)
        local = sum(param.to_local().numel() for param in model.parameters() if isinstance(param, DTensor))
        assert f"\n{local:,} of {total:,} parameters on each of 4 ranks, " in report


def test_styles_are_subclasses_of_torchs_with_the_same_repr() -> None:
    assert isinstance(ColwiseParallel(), torchs.ColwiseParallel)
    assert repr(RowwiseParallel()) == (
        "RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Replicate(),), use_local_output=True)"
    )


# --- modules whose computation a plan can see ---------------------------------------------------


class Normed(nn.Module):
    """A norm between a column layer and a row layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), norm, nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.norm(self.up(x)))
        return output


SHARDED_NORM = LocalParameters({"weight": Shard(0)})


@pytest.mark.parametrize(
    ("norm", "styles", "problem"),
    [
        (nn.RMSNorm(16, elementwise_affine=False), {}, "norm: normalizes over 16 features of a column layer"),
        (nn.GroupNorm(4, 16, affine=False), {}, "norm: normalizes over 16 features of a column layer"),
        (nn.GroupNorm(4, 16), {}, "norm: normalizes over 16 features of a column layer"),
        (nn.RMSNorm(16), {"norm": SHARDED_NORM}, "norm: RMSNorm normalizes over all features"),
        (
            nn.GroupNorm(1, 16),
            {"norm": SHARDED_NORM},
            "norm: 1 groups of GroupNorm are not divisible by the tp size 2",
        ),
    ],
)
def test_norms_over_a_shard_of_the_features_raise(
    norm: nn.Module, styles: dict[str, Any], problem: str
) -> None:
    assert problem in get_plan_error(Normed(norm), UP_DOWN | styles)


def test_norms_over_other_features_are_accepted() -> None:
    # A norm in front of the column layer, of each head, and over features that only it computes.
    for norm in (nn.RMSNorm(8), nn.RMSNorm(4), nn.GroupNorm(2, 8)):
        plan_report(Normed(norm), 2, UP_DOWN)
    model = Normed(nn.RMSNorm(16))
    plan_report(model, 2, {"up": ColwiseParallel(output_layouts=Replicate())})


def test_the_output_layer_of_torchs_attention_raises() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    for style in (RowwiseParallel(), LocalParameters()):
        message = get_plan_error(model, {"attention.out_proj": style})
        assert "attention.out_proj: nn.MultiheadAttention reads the weight of its out_proj" in message


def test_replicated_parameters_in_a_module_whose_output_is_summed_raise() -> None:
    def error(**placements: Any) -> str:
        return get_plan_error(
            Mlp(), {"": AllReduceOutput(), "up": LocalParameters(placements), "down": SHARDED}
        )

    assert "where up.bias would count once per rank" in error(weight=Shard(0))
    assert "where up.bias would count once per rank" in error(weight=Shard(0), bias=Replicate())
    plan_report(nn.Sequential(nn.Linear(8, 8)), 2, {"": AllReduceOutput(), "0": SHARDED})
    plan_report(Mlp(), 1, {"": AllReduceOutput()})


SHARDED = LocalParameters({"weight": Shard(0), "bias": Shard(0)})


def test_features_that_the_output_does_not_have_raise() -> None:
    features: Any
    for features in (slice(16, None), slice(0, 4, 2), 3):
        assert "pass " in get_plan_error(Mlp(), {"up": AllReduceOutputGradient(features)})


def test_a_replicated_input_cannot_be_resharded() -> None:
    message = get_plan_error(Mlp(), {"": SharedInput(reshard_after_forward=True), **UP_DOWN})
    assert message.startswith("the model: reshard_after_forward needs a sharded input, got Replicate()")


def apply_norms_to_weights() -> list[str]:
    errors = []
    norm: Any
    for norm in (weight_norm, torch.nn.utils.weight_norm):
        model: Any = parallelize(Mlp(), make_tp_mesh(), UP_DOWN, check_gradients=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's old weight_norm is deprecated
            norm(model.down)
        errors.append(error_of(partial(model, torch.ones(2, 8))))
    return errors


def test_a_parametrization_after_parallelize_raises_with_its_remedy() -> None:
    for errors in run_ranks(2, apply_norms_to_weights):
        for error in errors:
            # The shape depends on the release of torch.
            assert re.match(r"ShapeError: weight has shape \(\d+, \d+\) on this rank", error)
            assert (
                "remove that (remove_parametrizations, remove_weight_norm), or leave the module out" in error
            )


# --- styles of a user ---------------------------------------------------------------------------


class NeedsScale(Style):
    """A style that shards a scale, and states what the plan can know of it."""

    sums_ranks = True

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Any]:  # noqa: ARG002  its signature
        return {"scale": Shard(0)}

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:  # noqa: ARG002  its signature
        return [] if hasattr(module, "scale") else ["has no scale; leave it out"]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return LocalParameters({"scale": Shard(0)})._apply(module, device_mesh)


class Scaled(nn.Module):
    def __init__(self, width: int, *, biased: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        if biased:
            self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_style_of_a_user_states_what_a_plan_can_check() -> None:
    assert get_plan_error(nn.Identity(), NeedsScale()) == "the model: has no scale; leave it out"
    assert get_plan_error(Scaled(3), NeedsScale()) == (
        "the model: dim 0 of scale 3 is not divisible by the tp size 2; pad it to 4"
    )
    assert "NeedsScale sums the output over the ranks, where bias would count" in get_plan_error(
        Scaled(4, biased=True), NeedsScale()
    )
    assert "(model)  NeedsScale  scale      Shard(0)   4       2" in plan_report(Scaled(4), 2, NeedsScale())
    with fake_world(2):
        model: Any = parallelize(Scaled(4), make_tp_mesh(), NeedsScale())
        assert isinstance(model.scale, DTensor)


def test_the_base_class_has_every_member_that_parallelize_asks_for() -> None:
    """A misspelled member in the sources is an AttributeError, because there is always a default."""
    members = {name for name in dir(Style) if not name.startswith("_")}
    members -= {name for name in dir(ParallelStyle) if not name.startswith("_")}
    assert members == {
        *("name", "layout", "problems", "heads", "fused"),
        *("sums_ranks", "takes_distributed", "ranks_have_own_data"),
    }
