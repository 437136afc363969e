"""Random numbers: which ranks draw the same, blocks beside the default ones, and first weights."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext, suppress
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from messages import error_of
from ranks import fake_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_checks import ON_EIGHT, ON_FOUR

import namedmesh
from namedmesh import training
from namedmesh.training import seeds


def draw(name: str | None = None) -> float:
    with nullcontext() if name is None else training.streams(name):
        return torch.rand(()).item()


def numbers_of_all() -> list[float]:
    numpys = float(np.random.rand())  # noqa: NPY002  the state that a job has
    return [random.random(), numpys, *map(draw, (None, "tensor", "expert", "data", "data"))]


def drawn(sizes: dict[str, Any], **view: Any) -> list[list[float]]:
    """What all ranks draw: by default, in Python, and from the streams of tensors and of experts."""
    found = []
    ranks = prod(sizes.values())
    for rank in range(ranks):
        with fake_world(ranks, rank):
            mesh = namedmesh.init_mesh(**sizes, device="cpu")
            if view:
                mesh.add_view("expert", **view)
            training.seed_all(7, mesh)
            found.append([draw(), random.random(), draw("tensor"), draw("expert")])
            mesh.close()
    return [list(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("sizes", [sizes for sizes, *_ in ON_FOUR + ON_EIGHT], ids=str)
def test_the_ranks_of_a_tensor_parallel_group_draw_the_same_by_default(sizes: dict[str, Any]) -> None:
    default, python, tensor, _ = drawn(sizes)
    ranks = range(len(default))
    first_of_group = [rank - rank % sizes["tp"] for rank in ranks]  # tp is the last axis everywhere
    for numbers in (default, python):
        assert [numbers.index(each) for each in numbers] == first_of_group
    assert len({*default, *tensor}) == len({*first_of_group}) + len(ranks)


@pytest.mark.parametrize(("ep", "etp", "different"), [(2, 2, 8), (2, 1, 8), (1, 1, 4)])
def test_ranks_of_one_tp_group_draw_by_their_experts(ep: int, etp: int, different: int) -> None:
    *_, experts = drawn({"dp": 4, "tp": 2}, edp=-1, ep=ep, etp=etp)
    assert len({*experts}) == different


def test_a_block_leaves_the_default_numbers_and_the_state_brings_all_back() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        training.seed_all(3, mesh)
        with training.streams("tensor"), training.streams("expert"):
            torch.rand(100)
        with training.streams("data"):
            torch.rand(100)
        after = torch.rand(3)
        training.seed_all(3, mesh)
        with training.streams("tensor"), suppress(ZeroDivisionError), training.streams("expert"):
            raise ZeroDivisionError
        assert torch.equal(torch.rand(3), after)  # outside: one number was drawn for the outer block
        state = copy.deepcopy(seeds.random_state())
        assert sorted(state) == ["cpu", "data", "numpy", "python"]
        numbers = numbers_of_all()
        assert len(set(numbers)) == len(numbers)
        seeds.set_random_state(state)
        assert numbers_of_all() == numbers
        said = error_of(training.streams("tenor").__enter__)
        mesh.close()
    assert said == "TrainingError: there is no stream 'tenor'; seed_all() makes tensor, expert and data"


@pytest.mark.parametrize("inside", [False, True])
def test_a_recomputation_draws_from_streams_as_the_forward_did(inside: bool) -> None:
    def layer(x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin())
        with training.streams("tensor"):
            return nn.functional.dropout(x * x)

    def gradient(recompute: bool) -> Tensor:
        training.seed_all(0, mesh)
        x = torch.ones(64, requires_grad=True)
        with training.streams("expert") if inside else nullcontext():
            out = x
            for _ in range(2):
                out = checkpoint(layer, out, use_reentrant=False) if recompute else layer(out)
        (grad,) = torch.autograd.grad(out.sum(), x)
        with training.streams("tensor"):
            return torch.cat([grad, torch.rand(1)])

    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        expected, found = gradient(recompute=False), gradient(recompute=True)
        mesh.close()
    assert 0 < (expected == 0).sum() < 64
    assert torch.equal(found, expected)


class Fused(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.scale = nn.Parameter(torch.empty(()))


def test_megatrons_shards_are_shards_of_the_same_weights() -> None:
    whole = Fused(8, 6)
    training.init_parameters(whole, 1, distribution=lambda *_: (0.5, 2.0))
    assert len(whole.weight.unique()) == 48
    for rank in range(2):
        with fake_world(2, rank):
            mesh = namedmesh.init_mesh(tp=2, device="cpu")
            mesh.add_view("expert", ep=2, etp=1)
            rows, columns, expert = Fused(4, 6), Fused(8, 3), Fused(8, 6)
            for module, dim, stride in ((rows, 0, 2), (columns, 1, 1), (expert, 0, 1)):
                marks: dict[str, Any] = {"tensor_model_parallel": True, "allreduce": module is not expert}
                marks |= {"partition_dim": dim, "partition_stride": stride}
                for name, value in marks.items():
                    setattr(module.weight, name, value)
                training.init_parameters(module, 1, distribution=lambda *_: (0.5, 2.0))
                assert torch.equal(module.scale, whole.scale)
            blocks = whole.weight.unflatten(0, (2, 2, 2))[:, rank].flatten(0, 1)
            assert torch.equal(rows.weight, blocks)
            assert torch.equal(columns.weight, whole.weight.chunk(2, 1)[rank])
            assert torch.equal(expert.weight, whole.weight)  # cut over etp, which is 1
            mesh.close()


def test_first_weights_have_the_distribution_and_the_name_of_the_parameter() -> None:
    layer: Any = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100))
    training.init_parameters(layer, 0)
    assert layer[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer[0].bias.tolist() + layer[1].bias.tolist() == [0] * 200
    assert layer[1].weight.tolist() == [1] * 100
    first = layer[0].weight.clone()
    compiled: Any = torch.compile(layer, backend="eager")
    training.init_parameters(compiled, 0)
    assert torch.equal(layer[0].weight, first)
    training.init_parameters(layer.double(), 0)
    assert torch.equal(layer[0].weight.float(), first)
    training.init_parameters(layer, 1)
    assert not torch.equal(layer[0].weight.float(), first)
    with torch.device("meta"):
        nothing = nn.Linear(2, 2)
    assert error_of(lambda: training.init_parameters(nothing, 0)) == (
        "TrainingError: weight, bias: on the meta device; call model.to_empty(device=...) first"
    )
