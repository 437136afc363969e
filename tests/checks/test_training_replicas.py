"""Weights and gradients that must be equal on several ranks are compared when gradients are clipped."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import tiny
import torch
from as_cuda import NoReads
from messages import error_of, list_problems, match_message
from ranks import run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from namedmesh import NamedMesh

CAUSES = (
    "They must be equal there. The two commonest causes: the gradients are not averaged over this axis, because fully_shard was "
    "called on a mesh without it, or not at all (fully_shard(model, mesh=training.fsdp_mesh(mesh)) covers dp and cp); or the "
    "weights were never made equal (use one seed on every rank, or training.init_parameters). A plain tensor that is a shard "
    "needs the attribute tensor_model_parallel. If the ranks are meant to differ, pass check=False"
)


def make_trained_model(mesh: NamedMesh, over: Any, *, seed: int = 0) -> nn.Module:
    """Return a model after a backward on different rows of each rank, with FSDP2 over a mesh, if any."""
    model = tiny.model(seed)
    if over is not None:
        fully_shard(model, mesh=over)
    model(tiny.batch(4, seed=mesh.global_rank)).pow(2).mean().backward()
    return model


def clip(model: nn.Module, mesh: NamedMesh, **how: Any) -> Tensor:
    return training.clip_grad_norm_(model.parameters(), 1.0, mesh, **how)


def collect_errors_of_wrong_data_axes() -> list[list[str]]:
    """Return the errors on the ranks of dp=2, cp=2, on the first call with each mesh."""
    found = []
    jobs: list[tuple[Callable[[NamedMesh], nn.Module], dict[str, Any]]] = [
        (lambda mesh: make_trained_model(mesh, training.fsdp_mesh(mesh)), {}),
        (lambda mesh: make_trained_model(mesh, mesh["dp"]), {}),
        (lambda mesh: make_trained_model(mesh, None), {}),
        (lambda mesh: make_trained_model(mesh, None), {"check": False}),
        (lambda mesh: make_trained_model(mesh, mesh["dp"], seed=mesh.rank("cp")), {}),
    ]
    for make, how in jobs:
        mesh = namedmesh.init_mesh(dp=2, cp=2)
        model = make(mesh)
        before = [tiny.shard(param.grad).clone() for param in model.parameters() if param.grad is not None]
        problems = list_problems(partial(clip, model, mesh, **how))
        found.append(problems)
        if problems:  # and nothing was scaled
            for grad, param in zip(before, model.parameters(), strict=True):
                assert param.grad is not None
                assert torch.equal(tiny.shard(param.grad), grad)
        torch.distributed.barrier()
        mesh.close()
    return found


def test_gradients_that_are_not_averaged_and_weights_of_two_seeds_are_reported() -> None:
    first, *others = run_ranks(4, collect_errors_of_wrong_data_axes)
    assert all(report == first for report in others)
    right, without_cp, without_fsdp, unchecked, seeds = first
    assert right == unchecked == []
    assert len(without_cp) == len(seeds) == 1
    start = "The gradients of parameters 0 (32, 16), 1 (32,), 2 (16, 32), 3 (16,), 4 (32, 16), 5 (32,), 6 (16, 32), 7 (16,)"
    with pytest.raises(
        namedmesh.GradientError,
        match=match_message(f"{start} differ between the ranks of cp. {CAUSES}"),
    ):
        raise namedmesh.GradientError(*without_cp)
    axes = [text.partition("the ranks of ")[2].partition(".")[0] for text in without_fsdp]
    assert axes == ["cp", "dp"]
    assert seeds[0].startswith("The weights of parameters 0 (32, 16), ")


def make_plain_param(value: Tensor, grad: Tensor, **marks: Any) -> nn.Parameter:
    param = nn.Parameter(value.clone())
    param.grad = grad.clone()
    for name, mark in marks.items():
        setattr(param, name, mark)
    return param


def layouts() -> list[list[str]]:
    """Return the errors on a mesh with experts and two stages, for values that may or must not differ."""
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    view = mesh.add_view("expert", pp=2, edp=2, ep=2)
    stage, dp, tp = (mesh.rank(axis) for axis in ("pp", "dp", "tp"))
    edp, ep = mesh.rank("edp"), mesh.rank("ep")

    def report(*params: nn.Parameter) -> list[str]:
        # For its first call each, a mesh of the same groups.
        adopted = namedmesh.NamedMesh.from_device_mesh(mesh.device_mesh)
        adopted.adopt_view("expert", view)
        problems = list_problems(lambda: training.clip_grad_norm_(params, 1.0, adopted))
        adopted.close()
        return problems

    def of(*coords: int) -> Tensor:
        """Return values that depend on the stage and on some coordinates."""
        seed = stage
        for coord in coords:
            seed = 2 * seed + coord
        return random_tensor(4, seed=seed)

    def sharded(value: Tensor, grad: Tensor, axes: tuple[str, ...], *placements: Any) -> nn.Parameter:
        param = nn.Parameter(DTensor.from_local(value, mesh[axes], placements))
        param.grad = DTensor.from_local(grad, mesh[axes], placements)
        return param

    marked, expert = {"tensor_model_parallel": True}, {"allreduce": False}
    right = report(
        make_plain_param(of(), of()),
        make_plain_param(of(tp), of(tp), **marked),
        make_plain_param(of(ep), of(ep), **expert),
        sharded(of(tp), of(tp), ("tp",), Shard(0)),
        sharded(of(dp, tp), of(dp, tp), ("dp", "tp"), Shard(0), Shard(0)),
        sharded(of(dp), of(dp), ("dp", "tp"), Shard(0), Replicate()),
        sharded(of(ep), of(ep), ("edp", "ep"), Replicate(), Shard(0)),
        sharded(of(edp, ep), of(edp, ep), ("edp", "ep"), Shard(0), Shard(0)),
        make_plain_param(of(), of() * torch.nan),
        make_plain_param(of(), of() * torch.inf),
    )
    wrong = [
        right,
        report(make_plain_param(of(), of(tp))),
        report(make_plain_param(of(tp), of(dp, tp), **marked)),
        report(make_plain_param(of(edp, ep), of(ep), **expert)),
        report(sharded(of(tp), of(dp, tp), ("tp",), Shard(0))),
        report(sharded(of(dp), of(dp), ("dp", "tp"), Replicate(), Shard(0))),
        report(sharded(of(edp, ep), of(ep), ("ep",), Shard(0))),
        # On one stage only, and NaN on one rank only: all ranks raise.
        report(make_plain_param(of(), of(tp if stage else 0))),
        report(make_plain_param(of(), of() / (0 if dp and stage else 1))),
    ]
    mesh.close()
    return wrong


@pytest.mark.ci
def test_placements_and_attributes_decide_which_ranks_are_compared() -> None:
    first, *others = run_ranks(8, layouts)
    assert all(report == first for report in others)

    def shorten(text: str) -> str:
        kind, _, rest = text.partition(" of parameters ")
        stage = rest.partition("of stage ")[2][:1]
        return f"{kind.removeprefix('The ')} {stage} {rest.partition('the ranks of ')[2].partition('.')[0]}"

    assert [sorted(map(shorten, report)) for report in first] == [
        [],
        ["gradients 0 tp", "gradients 1 tp"],
        ["gradients 0 dp", "gradients 1 dp"],
        ["weights 0 edp", "weights 1 edp"],
        ["gradients 0 dp", "gradients 1 dp"],
        ["weights 0 dp", "weights 1 dp"],
        ["weights 0 edp", "weights 1 edp"],
        ["gradients 1 tp"],
        ["gradients 1 dp"],
    ]


def under_ddp() -> tuple[list[float], str]:
    """The norms of DDP over tensor parallelism and of one process, and the error for the model's parameters.

    Plain local shards stand for DTensors there until the first forward.
    """
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    alone, model = tiny.model(), parallelize(tiny.model(), mesh["tp"], plan)
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    params = list(model.parameters())  # a forward takes them away
    model(tiny.batch(4).chunk(2)[mesh.rank("dp")]).pow(2).mean().backward()
    alone(tiny.batch(4)).pow(2).mean().backward()
    grads = [param.grad for param in alone.parameters() if param.grad is not None]
    missing = error_of(lambda: training.clip_grad_norm_(model.parameters(), 1.0, mesh))
    norm = training.clip_grad_norm_(params, 1.0, mesh)
    mesh.close()
    return [norm.item(), nn.utils.get_total_norm(grads).item()], missing


def test_local_shards_under_ddp_are_not_replicas() -> None:
    for (norm, expected), missing in run_ranks(4, under_ddp):
        assert norm == pytest.approx(expected, rel=1e-9)
        assert missing.startswith("TrainingError: 8 sharded parameters are missing: ")


def find_calls_that_compare() -> list[bool]:
    """Return whether different gradients are an error on each of some find_calls_that_compare with a mesh."""
    mesh = namedmesh.init_mesh(dp=2)
    found = []
    for call in range(1, 10):
        param = make_plain_param(random_tensor(3, seed=0), random_tensor(3, seed=mesh.rank("dp")))
        if call in {1, 2, 4, 8}:
            clipped = partial(training.clip_grad_norm_, param, 1.0, mesh)
            found.append(error_of(clipped) != "")
        else:
            with NoReads():
                training.clip_grad_norm_(param, 1.0, mesh)
    mesh.close()
    mesh = namedmesh.init_mesh(dp=2)
    with NoReads(), mock.patch("namedmesh._checks.replicas.is_capturing", return_value=True):
        training.clip_grad_norm_(param, 1.0, mesh)  # the first call
    mesh.close()
    return found


def clip_while_unsharded(path: str) -> str:
    """Clip after an evaluation: an error, and the right norm once the weights are sharded again."""
    mesh = namedmesh.init_mesh(dp=2)
    model = make_trained_model(mesh, mesh["dp"])
    expected = clip(model, mesh)
    with torch.no_grad():
        model(tiny.batch(2))
    report = error_of(lambda: clip(model, mesh))
    optimizer = torch.optim.SGD(model.parameters())  # of parameters that are replaced
    optimized = [param for group in optimizer.param_groups for param in group["params"]]
    assert error_of(lambda: training.clip_grad_norm_(optimized, 1.0, mesh)) == report
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert compute_difference(clip(model, mesh), expected.clamp(max=1.0)) < 1e-5
    assert "create it from the current parameters of the model" in error_of(
        partial(training.save, path, mesh, model, optimizer)
    )
    mesh.close()
    return report


def on_two_ranks(path: str) -> tuple[list[bool], str]:
    return find_calls_that_compare(), clip_while_unsharded(path)


def test_ranks_compare_on_few_calls_and_report_unsharded_parameters(tmp_path: Path) -> None:
    for found, report in run_ranks(2, on_two_ranks, str(tmp_path / "saved")):
        assert found == [True] * 4
        assert report == (
            "TrainingError: Parameters 0 (32, 16), 1 (32,), 2 (16, 32), 3 (16,), 4 (32, 16), 5 (32,), 6 (16, 32), 7 (16,) are "
            "unsharded by FSDP2, as after a forward without a backward. Their gradients belong to the sharded parameters, and an "
            "optimizer made from these trains nothing. Clip before the next forward, or first call reshard() on every FSDPModule "
            "of the model"
        )


def collect_errors_of_ties() -> list[list[str]]:
    """Return the errors on (pp 2, dp 2): gradients not summed, summed, and weights filled after the tie."""
    found = []
    for case in ("forgotten", "summed", "filled later"):
        mesh = namedmesh.init_mesh(pp=2, dp=2, device="cpu")
        stage = nn.Linear(2, 4, bias=False)
        nn.init.ones_(stage.weight)
        fully_shard(stage, mesh=training.fsdp_mesh(mesh))
        ends = [stage.weight if at_end else None for at_end in (mesh.is_first("pp"), mesh.is_last("pp"))]
        sum_gradients = training.tie_stages(ends[0], ends[1], mesh)
        if case == "filled later":
            nn.init.constant_(stage.weight, 1.0 + mesh.rank("pp"))
        stage(torch.ones(1, 2)).sum().mul(1 + mesh.rank("pp")).backward()
        if case != "forgotten":
            sum_gradients()
        problems = list_problems(partial(training.clip_grad_norm_, stage.parameters(), math.inf, mesh))
        if case == "summed":
            # Each stage's gradient is 1 or 2 for all 8 elements.
            assert stage.weight.grad is not None
            assert full_tensor(stage.weight.grad).tolist() == [[3.0, 3.0]] * 4
        found.append(problems)
        torch.distributed.barrier()
        mesh.close()
    return found


def test_two_ends_of_a_tie_that_differ_are_reported() -> None:
    fix = (
        "Call the function that tie_stages returned after the last backward of each step, before clipping, and tie after the "
        "weights have their first values. If the ranks are meant to differ, pass check=False"
    )
    expected: list[list[str]] = []
    for kind in ("gradients", "", "weights"):
        which = f"The {kind} of parameters 0 (4, 2)"
        ends = [
            f"{which} of stage {stage} differ from the other end of their tie. {fix}" for stage in range(2)
        ]
        expected.append(ends if kind else [])
    assert run_ranks(4, collect_errors_of_ties) == [expected] * 4


def clip_ends_on_one_rank() -> tuple[list[str], Tensor]:
    """Return the problems before the gradients are summed, and the norm after."""
    mesh = namedmesh.init_mesh(pp=1, device="cpu")
    first, last = (nn.Parameter(torch.ones(2)) for _ in range(2))
    sum_gradients = training.tie_stages(first, last, mesh)
    first.grad, last.grad = torch.ones(2), torch.zeros(2)
    call = partial(training.clip_grad_norm_, [first, last], 1.0, mesh)
    problems = list_problems(call)
    sum_gradients()
    norm = call()
    mesh.close()
    return problems, norm


def test_ends_on_one_rank_are_compared() -> None:
    ((problems, norm),) = run_ranks(1, clip_ends_on_one_rank)
    which = "The gradients of parameters 0 (2,), 1 (2,) of stage 0 differ "
    assert [problem.startswith(which) for problem in problems] == [True]
    assert compute_difference(norm, torch.tensor(2.0).sqrt()) < 1e-6
