"""Experts on ranks of their own: losses and gradients of the example are those of one process, whatever the layout."""

from __future__ import annotations

import contextlib
import io
import re
from math import prod
from typing import Any
from unittest import mock

import moe
import pytest
import torch
import training_checks as checks
from ranks import fake_world, run_ranks
from torch import nn

import namedmesh
from namedmesh import training
from namedmesh._torch import TORCH
from namedmesh.tensor_parallel import ExpertParallel, parallelize

# Of the mesh over pp, dp and tp, and of the view over pp, edp, ep and etp.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep1": ({"pp": 1, "dp": 4, "tp": 1}, {"ep": 1, "etp": 1}),
    "ep2": ({"pp": 1, "dp": 4, "tp": 1}, {"ep": 2, "etp": 1}),
    "ep4": ({"pp": 1, "dp": 4, "tp": 1}, {"ep": 4, "etp": 1}),
    "ep8": ({"pp": 1, "dp": 8, "tp": 1}, {"ep": 8, "etp": 1}),
    "tp2 ep2": ({"pp": 1, "dp": 2, "tp": 2}, {"ep": 2, "etp": 1}),
    "tp2 ep8": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 8, "etp": 1}),
    "tp2 ep4 etp2": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 4, "etp": 2}),
    "pp2 ep2": ({"pp": 2, "dp": 4, "tp": 1}, {"ep": 2, "etp": 1}),
    "pp2 tp2 ep4": ({"pp": 2, "dp": 2, "tp": 2}, {"ep": 4, "etp": 1}),
    "pp2 tp2 ep2 etp2": ({"pp": 2, "dp": 2, "tp": 2}, {"ep": 2, "etp": 2}),
}


def compare(layouts: list[str]) -> dict[str, dict[str, float]]:
    told = {}
    for name in layouts:
        dense, expert = LAYOUTS[name]
        mesh = namedmesh.init_mesh(**dense)
        mesh.add_view("expert", pp=dense["pp"], edp=-1, **expert)
        told[name] = moe.differences(mesh)
        mesh.close()
    return told


@pytest.mark.parametrize(("ranks", "pp"), [(4, 1), (8, 1), pytest.param(8, 2, marks=checks.PIPELINES)])
def test_experts_are_those_of_one_process(ranks: int, pp: int) -> None:
    # Up to torch 2.9 FSDP2 takes no parameters that are cut over two axes already.
    largest = 1 if TORCH.release < (2, 10) else 8
    names = [
        name
        for name, (dense, expert) in LAYOUTS.items()
        if dense["pp"] == pp and prod(dense.values()) == ranks and expert["etp"] <= largest
    ]
    for told in run_ranks(ranks, compare, names):
        assert list(told) == names
        for differences in told.values():
            assert max(differences.values()) < 1e-9, told


def the_script() -> str:
    shown = io.StringIO()
    with mock.patch("sys.argv", ["moe.py", "--ep", "4", "--tp", "2"]), contextlib.redirect_stdout(shown):
        moe.main()
    return shown.getvalue()


def test_the_script_prints_the_largest_differences() -> None:
    first, *others = run_ranks(4, the_script, init=False)
    assert others == [""] * 3
    layouts, told = first.splitlines()
    assert layouts == "pp=1 x dp=2 x tp=2 (4 ranks), experts over pp=1 x edp=1 x ep=4 x etp=1 (4 ranks)"
    found = re.fullmatch(
        r"largest differences from one process: loss (\S+), gradients (\S+), norm (\S+)", told
    )
    assert found is not None
    assert max(map(float, found.groups())) < 1e-9


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.ones(8, 2, 3)), nn.Parameter(torch.ones(3))


def test_what_is_no_stack_of_experts_is_refused() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=8, device="cpu")
        mesh.add_view("expert", edp=2, ep=4)
        takes = "ExpertParallel takes a module that owns the weights of all its experts as parameters (experts, ...), but"
        for module, owns in (
            (Mixed(), "Mixed owns {'up': (8, 2, 3), 'bias': (3,)}"),
            (nn.ReLU(), "ReLU owns none"),
        ):
            with pytest.raises(namedmesh.PlanError) as raised:
                parallelize(module, mesh["ep"], ExpertParallel())
            assert str(raised.value) == f"the model: {takes} {owns}"
        with pytest.raises(namedmesh.PlanError, match="dim 0 of gate 6 is not divisible"):
            parallelize(moe.Experts(6, 2, 2), mesh["ep"], ExpertParallel())
        experts = parallelize(moe.Experts(8, 2, 2), mesh["ep"], ExpertParallel())
        with pytest.raises(namedmesh.PlanError, match="it was applied to before; apply it once"):
            parallelize(experts, mesh["ep"], ExpertParallel())
        with pytest.raises(namedmesh.ShapeError) as refused:
            experts(torch.ones(3, 2), torch.tensor([2, 1]))
        assert str(refused.value) == (
            "the numbers of tokens have shape (2,); pass one number for each of the 8 experts"
        )
        with pytest.raises(namedmesh.TrainingError) as unknown:
            training.set_expert_divisor(nn.Linear(2, 2), mesh)
        assert str(unknown.value) == (
            "no module of Linear is parallelized with ExpertParallel; call this after "
            'parallelize(model, mesh["ep"], {...: ExpertParallel()}), on every pipeline stage that has experts'
        )
        mesh.close()
