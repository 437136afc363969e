"""A run that continues on one layout after the other, through checkpoints, is the run of one process."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
import training_checks as checks
from ranks import run_ranks
from training_checks import alone, loaded_alone, train_one_step, train_through

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from pathlib import Path


def test_every_layout_continues_the_run_of_one_process(tmp_path: Path) -> None:
    on_eight = checks.ON_EIGHT + ([] if checks.NO_PIPELINES else checks.PIPELINED)
    steps, first = len(checks.ON_FOUR + on_eight), len(checks.ON_FOUR)
    paths = [str(tmp_path / str(number)) for number in range(steps + 1)]
    ((expected, state),) = run_ranks(1, alone, paths[0], steps, init=False)
    assert all(after < before - 1e-3 for before, after, *_ in expected)
    on_four = run_ranks(4, train_through, checks.ON_FOUR, paths[: first + 1], timeout=120.0)
    by_rank = run_ranks(8, train_through, on_eight, paths[first:], timeout=200.0)
    for told in (on_four, by_rank):
        assert all(each == told[0] for each in told)
    assert on_four[0] + by_rank[0] == [pytest.approx(each, abs=1e-9) for each in expected]
    (loaded,) = run_ranks(1, loaded_alone, paths[-1], init=False)
    assert loaded == [pytest.approx(each, abs=1e-9) for each in state]


def compiled(source: str, target: str) -> list[float]:
    warnings.simplefilter("ignore")  # the compiler warns about what torch itself does
    sizes = {"pp": 1, "dp": 1, "cp": 2, "tp": 2}
    return train_one_step(sizes, "1F1B", 3, source, target, compiled=True)


def test_a_step_with_a_compiled_layer_is_that_of_one_process(tmp_path: Path) -> None:
    paths = str(tmp_path / "0"), str(tmp_path / "1")
    ((expected, state),) = run_ranks(1, alone, paths[0], 1, init=False)
    for told in run_ranks(4, compiled, *paths):
        assert told == pytest.approx(expected[0], abs=1e-9)
    (loaded,) = run_ranks(1, loaded_alone, paths[1], init=False)
    assert loaded == [pytest.approx(each, abs=1e-9) for each in state]


def averaged_by_ddp() -> float:
    """The gradients of a model that DistributedDataParallel averages over dp and cp."""
    mesh = namedmesh.init_mesh(dp=2, cp=2)
    (expected,), (model,) = checks.parts([0], 1), checks.parts([0], 1)
    tokens, targets = checks.batch(0)
    (checks.loss_sum(expected(tokens), targets) / (targets != checks.IGNORED).sum()).backward()
    checks.parallelized(model, mesh, ulysses=False)
    tokens, targets, model.positions = training.shard_sequence(tokens, targets, mesh=mesh["cp"])
    tokens, targets = (each.chunk(2)[mesh.rank("dp")] for each in (tokens, targets))
    group = training.fsdp_mesh(mesh).get_group()
    net = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    count = int((targets != checks.IGNORED).sum())
    training.token_mean(checks.loss_sum(net(tokens), targets), count, mesh).backward()
    wanted = dict(expected.named_parameters())
    difference = max(
        (checks.whole(each.grad) - checks.whole(wanted[name].grad)).abs().max().item()
        for name, each in model.named_parameters()
    )
    with pytest.raises(namedmesh.ShapeError) as raised:
        training.token_mean(torch.ones(2, 3), count, mesh)
    assert str(raised.value) == (
        "loss_sum has shape (2, 3), and must be one number: the sum over this rank's tokens, as "
        'cross_entropy(..., reduction="sum") returns it'
    )
    assert training.token_mean(torch.zeros(()), 0, mesh).isnan()
    torch.distributed.barrier()
    mesh.close()
    return difference


def test_gradients_that_ddp_averages_are_those_of_one_process() -> None:
    assert max(run_ranks(4, averaged_by_ddp)) < 1e-9
