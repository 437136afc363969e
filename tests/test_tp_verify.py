"""A model under a plan against itself in one process: what ``verify`` reports, and the command."""

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
from messages import error_of, printed_by
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from tp_compare import make_tp_mesh
from tp_models import UP_DOWN, Attention, Llama, Mlp, Net, llama_plan

from namedmesh.__main__ import main
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    VerifyReport,
    parallelize,
    verify,
)


def softened(softmax: bool) -> Net:
    """A softmax over all features, and a number for all of the input that the plan has summed."""

    def compute(m: Any, x: Tensor) -> Any:
        features = m.up(m.factor(x))
        return m.down(m.dropout(features.softmax(-1) if softmax else torch.tanh(features)))

    parts = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "factor": nn.PReLU()}
    return Net(compute, **parts, dropout=nn.Dropout(0.5))


def softened_in_evaluation() -> Net:
    """A softmax over a rank's features where no gradients are needed, as kernels of their own for evaluation may have it."""

    def compute(m: Any, x: Tensor) -> Any:
        features = m.up(x)
        return m.down(features if torch.is_grad_enabled() else features.softmax(-1))

    return Net(compute, up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def between(work: Callable[..., Any], after: Callable[[Tensor], Any] = lambda out: out) -> Net:
    """A feed-forward; ``work`` makes its input of what the model gets, and ``after`` its output."""
    compute = lambda m, *given, **named: after(m.down(torch.tanh(m.up(m.factor(work(*given, **named))))))  # noqa: E731
    return Net(compute, factor=nn.PReLU(), up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def zero(model: Net) -> Net:
    """The same with a last layer of zeros, through which no gradient comes."""
    nn.init.zeros_(model.get_parameter("down.weight"))
    return model


def with_indices() -> Net:
    """The places of the largest features, of those that a rank has."""
    return Net(lambda m, x: m.up(x).topk(8).indices, up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def with_heads() -> Net:
    """A tensor for each head that a rank has."""
    return Net(lambda m, x: m.up(x).split(4, -1), up=nn.Linear(8, 16))


def once_for_each_rank() -> Net:
    """The whole output, and once more where the weight is sharded."""
    return Net(lambda m, x: [m.up(x)] * (1 + isinstance(m.up.weight, DTensor)), up=nn.Linear(8, 16))


def reports() -> dict[str, VerifyReport]:
    mesh = make_tp_mesh()
    torch.manual_seed(torch.distributed.get_rank())  # the first rank's values count
    x, ids = torch.randn(2, 5, 8), torch.randint(0, 32, (2, 8))
    twice = UP_DOWN | {"factor": LocalParameters()}
    heads = dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel()) | {"wo": RowwiseParallel()}
    given: Any = {"x": [x]}, torch.arange(8)  # beside the tensors that are given by name
    with torch.no_grad():  # around the call; the copies have gradients all the same
        doubled = verify(between(lambda x: x), mesh, twice, x)
    return {
        "doubled": doubled,
        # Its gradient is zero but for rounding.
        "a bias of keys": verify(Attention(32, 8, 4, bias=True), mesh, heads, 30 * torch.randn(20, 50, 32)),
        "random": verify(between(lambda x: x + torch.randn_like(x)), mesh, UP_DOWN, x),
        "written into": verify(between(lambda x: x.mul_(2)), mesh, UP_DOWN, x),
        "in containers": verify(
            between(lambda d, i, *, y: d["x"][0][..., i] + y), mesh, UP_DOWN, *given, y=x.clone()
        ),
        "minus infinity": verify(
            between(lambda x: x, lambda out: torch.where(out > 0, out, -math.inf)), mesh, UP_DOWN, x
        ),
        "of integers": verify(with_indices(), mesh, UP_DOWN, x),
        "llama": verify(Llama(), mesh, llama_plan(sequence_parallel=True), ids),
        "logits as DTensors": verify(Llama(), mesh, llama_plan(loss_parallel=True), ids),
        "softmax of a rank's features": verify(softened(softmax=True), mesh, UP_DOWN, x),
        "right": verify(softened(softmax=False), mesh, UP_DOWN, x),
        "softmax behind zeros": verify(zero(softened(softmax=True)), mesh, UP_DOWN, x),
        "summed twice": verify(softened(softmax=False), mesh, twice, x),
        "in evaluation": verify(softened_in_evaluation(), mesh, UP_DOWN, x),
        "shards": verify(nn.Linear(8, 16), mesh, ColwiseParallel(), x),
        "fewer outputs": verify(with_heads(), mesh, {"up": ColwiseParallel()}, x),
        "more outputs": verify(
            once_for_each_rank(), mesh, {"up": ColwiseParallel(output_layouts=Replicate())}, x
        ),
    }


def test_what_differs_is_named() -> None:
    first, second = run_ranks(2, reports)
    assert first == second
    wrong = {"doubled", "summed twice", "softmax of a rank's features", "softmax behind zeros"}
    wrong |= {"of integers", "shards", "fewer outputs", "more outputs", "in evaluation"}
    assert "output 0" not in first["more outputs"].mismatches
    assert "output 1" in first["more outputs"].mismatches
    assert {name for name, report in first.items() if not report.passed} == wrong
    # Ranks that agree on a wrong sum: the forward is exact, and so is everything but what is summed twice.
    for name in ("summed twice", "doubled"):
        assert [*first[name].mismatches] == ["gradient of factor.weight"]
    assert [*first["of integers"].mismatches] == ["output 0", "output 0 under no_grad"]
    assert [*first["in evaluation"].mismatches] == ["output 0 under no_grad"]
    assert {"output 2", "output 3"} <= first["fewer outputs"].mismatches.keys()
    different = first["softmax of a rank's features"].mismatches
    assert {"output 0", "gradient of up.weight", "gradient of input 0"} <= different.keys()
    assert (
        "on rank 1, The values for attribute 'shape' do not match" in first["shards"].mismatches["output 0"]
    )
    assert re.fullmatch(
        r"gradient of factor\.weight: on rank 0, Tensor-likes are not close! .*; on rank 1, Tensor-likes are not close! .*\n"
        r"1 of 8 tensors on 2 ranks differ from one process",
        str(first["summed twice"]),
    )


def refusals() -> list[str]:
    mesh, x = make_tp_mesh(), torch.randn(2, 8)
    cases: list[tuple[nn.Module, Any, Any]] = [
        (between(lambda x: x, lambda _: object()), mesh, UP_DOWN),
        (Mlp().to("meta"), mesh, UP_DOWN),
        (parallelize(Mlp(), mesh, UP_DOWN), mesh, {}),
        (Mlp(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), UP_DOWN),
    ]
    return [error_of(partial(verify, *case, x)).removeprefix("PlanError: ") for case in cases]


def test_what_cannot_be_compared_is_refused() -> None:
    wanted = (
        "no tensor is in the output, a object; return some in plain containers",
        "up.weight is on the meta device or sharded; verify an unsharded model with values",
        "up.weight is on the meta device or sharded",
        "MeshError: verify works along one axis, ",
    )
    for found in run_ranks(2, refusals):
        assert all(map(str.startswith, found, wanted)), found


def state_of(model: nn.Module, *tensors: Tensor) -> list[Any]:
    """Copies of all that a run could change."""
    found = [*model.state_dict().values(), torch.get_rng_state(), *tensors]
    found += [each.grad for each in (*model.parameters(), *tensors) if each.grad is not None]
    flags = [torch.tensor([each.training for each in model.modules()])]
    return [each.detach().clone() for each in [*found, *flags]]


def changed() -> list[bool]:
    model = Net(lambda m, x: m.mlp(m.norm(x + torch.rand_like(x))), norm=nn.BatchNorm1d(8), mlp=Mlp())
    model.get_submodule("mlp").eval()
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    before = state_of(model, x)
    verify(model, make_tp_mesh(), {f"mlp.{name}": style for name, style in UP_DOWN.items()}, x)
    return [not torch.equal(*pair) for pair in zip(before, state_of(model, x), strict=True)]


def test_the_model_is_left_as_it_is() -> None:
    for found in run_ranks(2, changed):
        assert not any(found)


SCRIPT = """
import torch
from torch import nn
from namedmesh.tensor_parallel import ColwiseParallel, LocalParameters, RowwiseParallel

def right():
    model = nn.Sequential(nn.PReLU(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return model, {"1": ColwiseParallel(), "3": RowwiseParallel()}, (torch.randn(2, 8),)

def wrong():
    model, plan, inputs = right()
    return model, plan | {"0": LocalParameters()}, inputs

def named():
    model, plan, (x,) = right()
    return model, plan, {"input": x}

def nothing():
    return None
"""


def command(folder: str, function: str) -> tuple[int, str]:
    os.chdir(folder)
    status, printed, errors = printed_by(lambda: main(["verify", function]))
    return status, printed + errors


@pytest.mark.parametrize(
    ("function", "status", "text"),
    [
        ("right", 0, "0 of 8 tensors"),
        ("named", 0, "0 of 8 tensors"),
        ("wrong", 3, "0.weight"),
        ("nothing", 1, "returned a NoneType"),
    ],
)
def test_the_command(tmp_path: Path, function: str, status: int, text: str) -> None:
    (tmp_path / "verified_job.py").write_text(SCRIPT, encoding="utf-8")
    first, second = run_ranks(2, command, str(tmp_path), f"verified_job:{function}", init=False)
    assert first[0] == second[0] == status
    assert text in first[1]
    assert second[1] == ("" if status != 1 else first[1])
