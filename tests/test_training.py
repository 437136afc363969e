"""What every training job needs, on every layout against one process."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import training_checks as checks
from ranks import run_ranks

import namedmesh
from namedmesh import training

TOLERANCE = 1e-9


def check_layout(layout: dict[str, Any]) -> dict[str, float]:
    mesh = namedmesh.init_mesh(**layout)
    told = {}
    loss, expected = checks.reference(mesh)
    net = checks.my_model(mesh)
    found = checks.step(net, mesh)
    told["loss"] = 0.0 if found is None else abs(found - loss)
    told["gradients"] = checks.gradients_differ(net, expected)
    parameters = list(expected.parameters())
    for order in (1.0, 2.0, 3.0, math.inf):
        wanted = torch.nn.utils.get_total_norm(
            [each.grad for each in parameters if each.grad is not None], order
        )
        norm = training.clip_grad_norm_(net.parameters(), math.inf, mesh, order)
        told[f"norm {order}"] = abs(norm.item() - wanted.item())
    largest = wanted.item() / 3
    norm = training.clip_grad_norm_(net.parameters(), largest, mesh)
    torch.nn.utils.clip_grad_norm_(parameters, largest)
    told["clipped"] = checks.gradients_differ(net, expected)
    with mock.patch("namedmesh.training.initialization.NUMBERS_AT_ONCE", 40):  # a few rows
        training.init_parameters(net, 5)
        training.init_parameters(expected, 5)
    first = dict(expected.named_parameters())
    told["first weights"] = max(
        (checks.whole(each) - first[name]).abs().max().item() for name, each in net.named_parameters()
    )
    mesh.close()
    return told


HYBRID_WITH_CONTEXT = (
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "cp": 2, "tp": 2},
)


def check_layouts(layouts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {checks.layout_name(layout): check_layout(layout) for layout in layouts}


@pytest.mark.parametrize(
    ("ranks", "pipelined"),
    [(4, False), (8, False), pytest.param(8, True, marks=checks.PIPELINES)],
    ids=["4 ranks", "8 ranks", "pipelines"],
)
def test_a_step_is_that_of_one_process(ranks: int, pipelined: bool) -> None:
    layouts = [
        each
        for each in (*checks.LAYOUTS, *HYBRID_WITH_CONTEXT)
        if ("pp" in each) == pipelined and math.prod(each.values()) == ranks
    ]
    assert len(layouts) > 1
    for by_layout in run_ranks(ranks, check_layouts, layouts, timeout=240.0):
        assert len(by_layout) == len(layouts)
        for name, differences in by_layout.items():
            assert max(differences.values()) < TOLERANCE, (name, differences)


def averaged_by_ddp() -> float:
    """The gradients of a model that DistributedDataParallel averages over dp and cp."""
    mesh = namedmesh.init_mesh(dp=2, cp=2)
    _, expected = checks.reference(mesh)
    inputs, targets = checks.my_batch(mesh)
    group = training.fsdp_mesh(mesh).get_group()
    net = torch.nn.parallel.DistributedDataParallel(checks.whole_model(mesh), process_group=group)
    tokens = int((targets != checks.IGNORED).sum())
    training.token_mean(checks.loss_sum(net(inputs), targets), tokens, mesh).backward()
    difference = checks.gradients_differ(net.module, expected)
    with pytest.raises(namedmesh.ShapeError) as raised:
        training.token_mean(torch.ones(2, 3), tokens, mesh)
    assert str(raised.value) == (
        "loss_sum has shape (2, 3), and must be one number: the sum over this rank's tokens, as "
        'cross_entropy(..., reduction="sum") returns it'
    )
    assert training.token_mean(torch.zeros(()), 0, mesh).isnan()
    torch.distributed.barrier()
    mesh.close()
    return difference


def test_gradients_that_ddp_averages_are_those_of_one_process() -> None:
    assert max(run_ranks(4, averaged_by_ddp)) < TOLERANCE
