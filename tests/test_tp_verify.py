"""A model under a plan against itself in one process: what ``verify`` reports, and the command."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from torch import Tensor, nn
from tp_compare import tp_mesh
from tp_models import UP_DOWN, Llama, Net, gate_up

from namedmesh.__main__ import main
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    VerifyReport,
    llama_plan,
    verify,
)

if TYPE_CHECKING:
    from pathlib import Path


def softened(softmax: bool) -> Net:
    """A softmax over all features, and a number for all of the input that the plan has summed."""

    def compute(m: Any, x: Tensor) -> Any:
        features = m.up(m.factor(x))
        return m.down(m.dropout(features.softmax(-1) if softmax else torch.tanh(features)))

    parts = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "factor": nn.PReLU()}
    return Net(compute, **parts, dropout=nn.Dropout(0.5))


def of_pairs() -> Net:
    """Gate and up in one linear, pair by pair."""

    def compute(m: Any, x: Tensor) -> Any:
        gate, up = m.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return m.down(F.silu(gate) * up)

    return Net(compute, gate_up=nn.Linear(8, 48), down=nn.Linear(24, 8))


def zero(model: Net) -> Net:
    """The same with a last layer of zeros, through which no gradient comes."""
    nn.init.zeros_(model.get_parameter("down.weight"))
    return model


def names(report: VerifyReport) -> set[str]:
    return {each.name for each in report.different}


def reports() -> dict[str, VerifyReport]:
    mesh = tp_mesh()
    torch.manual_seed(torch.distributed.get_rank())  # the first rank's values count
    x, ids = torch.randn(2, 5, 8), torch.randint(0, 32, (2, 8))
    twice = UP_DOWN | {"factor": LocalParameters()}
    halves, pairs = (
        {"gate_up": fused, "down": RowwiseParallel()}
        for fused in (FusedColwiseParallel(blocks=2), FusedColwiseParallel(interleaved=24))
    )
    return {
        "llama": verify(Llama(), mesh, llama_plan(sequence_parallel=True), ids),
        "logits as DTensors": verify(Llama(), mesh, llama_plan(loss_parallel=True), ids),
        "softmax of a rank's features": verify(softened(softmax=True), mesh, UP_DOWN, x),
        "right": verify(softened(softmax=False), mesh, UP_DOWN, x),
        "softmax behind zeros": verify(zero(softened(softmax=True)), mesh, UP_DOWN, x),
        "writes into its input": verify(Net(lambda m, x: m.up(x.mul_(2)), up=nn.Linear(8, 8)), mesh, {}, x),
        "summed twice": verify(softened(softmax=False), mesh, twice, x),
        "halves": verify(gate_up(8), mesh, halves, x),
        "halves as pairs": verify(gate_up(8), mesh, pairs, x),
        "pairs": verify(of_pairs(), mesh, pairs, x),
        "shards": verify(nn.Linear(8, 16), mesh, ColwiseParallel(), x),
    }


def test_what_differs_is_named() -> None:
    first, second = run_ranks(2, reports)
    assert first == second
    right = ("llama", "logits as DTensors", "right", "writes into its input", "halves", "pairs")
    assert {name: report.right for name, report in first.items()} == {name: name in right for name in first}
    for name in right:
        assert max(each.difference for each in first[name].compared) < 1e-12
    # Ranks that agree on a wrong sum: the forward is exact, and so is everything but what is summed twice.
    assert names(first["summed twice"]) == {"factor.weight"}
    assert first["summed twice"].different[0].difference == pytest.approx(1.0)
    assert {"output 0", "up.weight", "input 0"} <= names(first["softmax of a rank's features"])
    assert "output 0" in names(first["halves as pairs"])
    assert first["shards"].compared[0].difference == math.inf


def test_the_text_of_a_report() -> None:
    report = run_ranks(2, reports)[0]["summed twice"]
    assert str(report) == (
        "name           what      difference\n"
        "factor.weight  gradient  1\n"
        "1 of 7 tensors on 2 ranks differ from one process, by up to 1 of the size\n"
        "dropout in dropout: between sharded layers all ranks draw one mask for their features, unless each draws from a "
        "stream of its own: namedmesh.training.streams"
    )


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

def nothing():
    return None
"""


def command(folder: str, function: str) -> tuple[int, str]:
    import contextlib
    import io
    import os

    os.chdir(folder)
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        status = main(["verify", function])
    return status, printed.getvalue() + errors.getvalue()


@pytest.mark.parametrize(
    ("function", "status", "text"),
    [("right", 0, "0 of 7 tensors"), ("wrong", 3, "0.weight"), ("nothing", 1, "returned a NoneType")],
)
def test_the_command(tmp_path: Path, function: str, status: int, text: str) -> None:
    (tmp_path / "verified_job.py").write_text(SCRIPT, encoding="utf-8")
    first, second = run_ranks(2, command, str(tmp_path), f"verified_job:{function}", init=False)
    assert first[0] == second[0] == status
    assert text in first[1]
    assert second[1] == ("" if status != 1 else first[1])
