"""``verify`` and its command report every difference between a sharded and an unsharded model."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import capture_printed, error_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from tp_compare import make_tp_mesh
from tp_models import UP_DOWN, Attention, Llama, Mlp, Net, make_llama_plan

from namedmesh.__main__ import main
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    VerifyReport,
    parallelize,
    verify,
)


def make_dropout_model(softmax: bool) -> Net:
    """Make a feed-forward with dropout; its softmax over the hidden features is wrong under tp."""

    def compute(m: Any, x: Tensor) -> Any:
        features = m.up(m.factor(x))
        return m.down(m.dropout(features.softmax(-1) if softmax else torch.tanh(features)))

    modules = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "factor": nn.PReLU()}
    return Net(compute, **modules, dropout=nn.Dropout(0.5))


def make_mlp(prepare: Callable[..., Any], finish: Callable[[Tensor], Any] = lambda out: out) -> Net:
    """Make a feed-forward, with functions that prepare its input and change its output."""

    def compute(m: Any, *args: Any, **kwargs: Any) -> Any:
        x = m.factor(prepare(*args, **kwargs))
        return finish(m.down(torch.tanh(m.up(x))))

    return Net(compute, factor=nn.PReLU(), up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def zero_last_layer(model: Net) -> Net:
    """Set the last layer to zeros, through which no gradient flows."""
    nn.init.zeros_(model.get_parameter("down.weight"))
    return model


def make_topk_model() -> Net:
    """Make a model that returns the indices of the largest features, which depend on the shard."""
    return Net(lambda m, x: m.up(x).topk(8).indices, up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def make_heads_model() -> Net:
    """Make a model that returns one tensor for each local head."""
    return Net(lambda m, x: m.up(x).split(4, -1), up=nn.Linear(8, 16))


def make_repeating_model() -> Net:
    """Make a model that returns its output twice if the weight is sharded."""
    return Net(lambda m, x: [m.up(x)] * (1 + isinstance(m.up.weight, DTensor)), up=nn.Linear(8, 16))


def make_reports() -> dict[str, VerifyReport]:
    mesh = make_tp_mesh()
    torch.manual_seed(torch.distributed.get_rank())  # verify uses the values of the first rank
    x = torch.randn(2, 5, 8)
    ids = torch.randint(0, 32, (2, 8))
    # Its gradient is complete on every rank: the all-reduce counts it twice.
    reduced_twice = UP_DOWN | {"factor": LocalParameters()}
    heads = dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel()) | {"wo": RowwiseParallel()}
    column = {"up": ColwiseParallel()}
    replicated_column = {"up": ColwiseParallel(output_layouts=Replicate())}
    # The output of a bias of keys does not depend on it: its gradient is rounding errors.
    attention = Attention(32, 8, 4, bias=True)
    with torch.no_grad():  # verify enables gradients for its copies
        without_grad = verify(make_mlp(lambda x: x), mesh, reduced_twice, x)
    in_containers = make_mlp(lambda d, i, *, y: d["x"][0][..., i] + y)
    infinite = make_mlp(lambda x: x, lambda out: torch.where(out > 0, out, -math.inf))
    return {
        "reduced twice, under no_grad": without_grad,
        "bias of keys": verify(attention, mesh, heads, 30 * torch.randn(20, 50, 32)),
        "random numbers": verify(make_mlp(lambda x: x + torch.randn_like(x)), mesh, UP_DOWN, x),
        "in-place": verify(make_mlp(lambda x: x.mul_(2)), mesh, UP_DOWN, x),
        "containers": verify(in_containers, mesh, UP_DOWN, {"x": [x]}, torch.arange(8), y=x.clone()),
        "minus infinity": verify(infinite, mesh, UP_DOWN, x),
        "integers": verify(make_topk_model(), mesh, UP_DOWN, x),
        "llama": verify(Llama(), mesh, make_llama_plan(sequence_parallel=True), ids),
        "DTensor logits": verify(Llama(), mesh, make_llama_plan(loss_parallel=True), ids),
        "softmax": verify(make_dropout_model(softmax=True), mesh, UP_DOWN, x),
        "dropout": verify(make_dropout_model(softmax=False), mesh, UP_DOWN, x),
        "softmax, zeros": verify(zero_last_layer(make_dropout_model(softmax=True)), mesh, UP_DOWN, x),
        "reduced twice": verify(make_dropout_model(softmax=False), mesh, reduced_twice, x),
        "sharded logits": verify(Llama(), mesh, make_llama_plan() | {"output": ColwiseParallel()}, ids),
        "local output": verify(nn.Linear(8, 16), mesh, ColwiseParallel(), x),
        "fewer outputs": verify(make_heads_model(), mesh, column, x),
        "more outputs": verify(make_repeating_model(), mesh, replicated_column, x),
    }


@pytest.mark.ci
def test_mismatches_are_named() -> None:
    first, second = run_ranks(2, make_reports)
    assert first == second
    wrong = {"reduced twice, under no_grad", "reduced twice", "softmax", "softmax, zeros", "integers"}
    wrong |= {"fewer outputs", "more outputs"}
    assert {name for name, report in first.items() if not report.passed} == wrong
    # The ranks agree on a wrong sum: the forward is exact, and all gradients but one.
    for name in ("reduced twice", "reduced twice, under no_grad"):
        assert [*first[name].mismatches] == ["gradient of factor.weight"]
    assert [*first["integers"].mismatches] == ["output 0"]
    assert {"output 2", "output 3"} <= first["fewer outputs"].mismatches.keys()
    assert "output 0" not in first["more outputs"].mismatches
    assert "output 1" in first["more outputs"].mismatches
    softmax = first["softmax"].mismatches
    assert {"output 0", "gradient of up.weight", "gradient of input 0"} <= softmax.keys()
    # Outputs that the plan leaves sharded are gathered, also if their loss takes the shards.
    assert first["local output"].gathered == first["sharded logits"].gathered == ("output 0",)
    assert len(first["sharded logits"].compared) > 10
    for name, layer in {"softmax": "dropout (Dropout)", "integers": "", "reduced twice": ""}.items():
        assert first[name].first_wrong == layer
    assert re.fullmatch(
        r"gradient of factor\.weight: on rank 0, Tensor-likes are not close! .*; "
        r"on rank 1, Tensor-likes are not close! .*\n"
        r"no layer has a wrong output where layers can be compared\n"
        r"1 of 7 tensors on 2 ranks differ from one process",
        str(first["reduced twice"]),
    )


def verify_unsupported() -> list[str]:
    mesh = make_tp_mesh()
    x = torch.randn(2, 8)
    cases: list[tuple[nn.Module, Any, Any]] = [
        (make_mlp(lambda x: x, lambda _: object()), mesh, UP_DOWN),
        (Mlp().to("meta"), mesh, UP_DOWN),
        (parallelize(Mlp(), mesh, UP_DOWN), mesh, {}),
        (Mlp(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), UP_DOWN),
    ]
    return [error_of(partial(verify, *case, x)).removeprefix("PlanError: ") for case in cases]


def verify_layer_that_needs_all_features() -> str:
    """Verify a model in which a layer adds a bias of all features to its shard of them."""
    layer = Net(lambda m, x: m.down(m.up(x) + m.bias.weight[0]), **mlp_modules(), bias=nn.Linear(16, 1))
    plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    return error_of(partial(verify, nn.Sequential(nn.Tanh(), layer), make_tp_mesh(), plan, torch.randn(2, 8)))


def mlp_modules() -> dict[str, nn.Module]:
    return {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}


def test_an_error_of_the_sharded_copy_names_the_module_and_the_plan() -> None:
    for text in run_ranks(2, verify_layer_that_needs_all_features):
        assert text.startswith(
            "PlanError: the sharded copy raises in 1 (Net): RuntimeError: The size of tensor a (8)"
        )
        assert text.endswith("in the plan, which is 1.up: ColwiseParallel, 1.down: RowwiseParallel")


def test_a_long_report_shows_the_first_mismatches() -> None:
    names = tuple(f"gradient of {number}" for number in range(50))
    report = VerifyReport(2, names, dict.fromkeys(names, "different"), (), "0 (Linear)")
    assert len(str(report).splitlines()) <= 20
    assert "and 35 more tensors; report.format() has all" in str(report)
    assert len(report.format().splitlines()) == 52


def test_models_that_cannot_be_compared_raise() -> None:
    expected = (
        "the output, of type object, has no tensors; return them in plain containers",
        "up.weight is on the meta device or sharded; verify an unsharded model with values",
        "up.weight is on the meta device or sharded",
        "MeshError: verify works along one axis, ",
    )
    for messages in run_ranks(2, verify_unsupported):
        assert all(map(str.startswith, messages, expected)), messages


def copy_state(model: nn.Module, *tensors: Tensor) -> list[Any]:
    """Copy everything that a run of the model could change."""
    state = [*model.state_dict().values(), torch.get_rng_state(), *tensors]
    state += [tensor.grad for tensor in (*model.parameters(), *tensors) if tensor.grad is not None]
    state.append(torch.tensor([module.training for module in model.modules()]))
    return [tensor.detach().clone() for tensor in state]


def find_changes() -> list[bool]:
    """Return, for each part of the state of a model, whether ``verify`` has changed it."""
    model = Net(lambda m, x: m.mlp(m.norm(x + torch.rand_like(x))), norm=nn.BatchNorm1d(8), mlp=Mlp())
    model.get_submodule("mlp").eval()
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    before = copy_state(model, x)
    verify(model, make_tp_mesh(), {f"mlp.{name}": style for name, style in UP_DOWN.items()}, x)
    return [not torch.equal(*pair) for pair in zip(before, copy_state(model, x), strict=True)]


def test_verify_does_not_change_the_model() -> None:
    for changes in run_ranks(2, find_changes):
        assert not any(changes)


SCRIPT = """
import torch
from torch import nn
from namedmesh.tensor_parallel import ColwiseParallel, LocalParameters, RowwiseParallel

def make_correct():
    model = nn.Sequential(nn.PReLU(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return model, {"1": ColwiseParallel(), "3": RowwiseParallel()}, (torch.randn(2, 8),)

def make_wrong():
    model, plan, inputs = make_correct()
    return model, plan | {"0": LocalParameters()}, inputs

def make_named():
    model, plan, (x,) = make_correct()
    return model, plan, {"input": x}

def make_nothing():
    return None
"""


def run_command(folder: str, function: str) -> tuple[int, str]:
    os.chdir(folder)
    status, printed, errors = capture_printed(lambda: main(["verify", function]))
    return status, printed + errors


@pytest.mark.parametrize(
    ("function", "status", "text"),
    [
        ("make_correct", 0, "0 of 7 tensors"),
        ("make_named", 0, "0 of 7 tensors"),
        ("make_wrong", 3, "0.weight"),
        ("make_nothing", 2, "returned a NoneType"),
        ("make_nowhere", 2, "has no function 'make_nowhere'; did you mean"),
    ],
)
def test_the_command_prints_the_report(tmp_path: Path, function: str, status: int, text: str) -> None:
    (tmp_path / "verified_job.py").write_text(SCRIPT, encoding="utf-8")
    first, second = run_ranks(2, run_command, str(tmp_path), f"verified_job:{function}", init=False)
    assert first[0] == second[0] == status
    assert text in first[1]
    # The first rank prints the report; an error is printed by every rank.
    assert second[1] == ("" if status != 2 else first[1])
