"""Pipelines on every schedule of torch, and a run that goes on in every layout through checkpoints, as one process."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import train
import training_checks as checks
from messages import error_of
from parallel import IGNORED
from ranks import fake_world, run_ranks
from tensors import apart, numbers, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from training_checks import alone, loaded_alone, train_through

import namedmesh
from namedmesh import training
from namedmesh.fingerprints import digest
from namedmesh.training import seeds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, LAYERS = 4, 4
# What trains, and through which layouts, by the number of ranks.
RUNS: dict[str, tuple[train.Settings, dict[int, list[checks.Job]]]] = {
    "dense": (checks.SETTINGS, {4: checks.ON_FOUR, 8: checks.ON_EIGHT}),
    "experts": (checks.WITH_EXPERTS, {4: checks.EXPERTS_ON_FOUR, 8: checks.EXPERTS_ON_EIGHT}),
    "compiled": (checks.SETTINGS, {2: [({"pp": 1, "dp": 1, "cp": 2, "tp": 1}, "1F1B", 3, {})]}),
}


class Stage(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def linears() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)]


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def check_schedule(schedule: str, per_rank: int) -> None:
    """Losses, outputs and gradients of batches of several sizes are those of one process."""
    mesh = namedmesh.init_mesh(pp=2, dp=1, device="cpu")
    stages: list[Stage] = []
    indices = training.stage_indices(mesh, schedule, per_rank)
    for index in indices:
        stage = Stage(training.stage_layers(linears(), None, stage=index, stages=2 * per_rank))
        for layer in stage.layers.values():
            fully_shard(layer, mesh=mesh["dp"])  # away after its forward, were it not for the pipeline
        fully_shard(stage, mesh=mesh["dp"])
        stages.append(stage)
    pipe = training.Pipeline(stages, mesh, schedule, n_microbatches=4, loss_fn=mean)
    alone = Stage(training.stage_layers(linears(), None, stage=0, stages=1))
    for shape in ((8,), (5,), (12,), (2,), (8, 3)):
        x, y = (numbers(*shape, WIDTH, seed=seed) for seed in (shape[0], 0))
        for module in (*stages, alone):
            module.zero_grad()
        expected = alone(x)
        mean(expected, y).backward()
        mean(alone(x[:1]), y[:1]).backward()
        losses = [pipe.step(x, target=y)]
        output = pipe.eval(x)
        # More gradients, of a batch that is smaller than the number of microbatches.
        pipe.step(x[:1], target=y[:1])
        losses += [each for each in [pipe.eval(x, target=y)] if each is not None]
        assert len(losses) == 2
        for each in losses:
            assert apart(training.mean_loss(each, mesh), mean(expected, y)) < 1e-12, schedule
        assert (output is not None) == (2 * per_rank - 1 in indices)
        if output is not None:
            assert apart(output, expected) < 1e-12, schedule
        wanted = dict(alone.named_parameters())
        for stage in stages:
            for name, parameter in stage.named_parameters():
                assert apart(parameter.grad, wanted[name].grad) < 1e-12, (schedule, name)
    dist.barrier()
    mesh.close()


def every_schedule_trains_and_evaluates_as_one_process() -> None:
    single = dict.fromkeys(("1F1B", "gpipe"), 1)
    several = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "DualPipeV"]
    for schedule, count in (single | dict.fromkeys(several, 2)).items():
        check_schedule(schedule, count)


def test_what_a_pipeline_refuses() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        pipe = training.Pipeline(nn.Linear(2, 2), mesh, n_microbatches=2, loss_fn=mean)
        calls = (
            lambda: training.Pipeline(nn.Linear(2, 2), mesh, "2F2B", n_microbatches=2, loss_fn=mean),
            lambda: training.Pipeline([nn.Linear(2, 2)] * 2, mesh, n_microbatches=2, loss_fn=mean),
            lambda: training.Pipeline(nn.Linear(2, 2), mesh, "ZBV", n_microbatches=2, loss_fn=mean),
            lambda: training.stage_layers(3, mesh, stages=4),
            lambda: training.stage_layers(3, None),
            lambda: pipe.step(torch.zeros(2, 2), target=torch.zeros(3, 2)),
        )
        first, *told = map(error_of, calls)
        mesh.close()
    assert first.startswith("LayoutError: Unknown schedule name '2F2B'. The valid options are ['1F1B', ")
    stages = "LayoutError: {} takes {} of the stages on each rank, not {}; give as many"
    assert told == [
        stages.format("1F1B", 1, 2),
        stages.format("ZBV", 2, 1),
        "LayoutError: 3 layers cannot fill 4 stages; give every stage one at least",
        "LayoutError: there is no mesh to say which stage this is; give the mesh, or stage and stages",
        "ShapeError: the batch has [2, 3] rows; give all as many, one at least; name keyword arguments without rows in "
        "Pipeline(..., replicate_kwargs=...)",
    ]


class Noisy(nn.Module):
    """A stage with all that the run in which torch finds out the shapes could change."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.tied = nn.Parameter(torch.full((WIDTH,), 1.0 + tied, dtype=torch.float64))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x = nn.functional.dropout(self.linear(x) * self.tied)
        with training.rng_stream("tensor"):
            return nn.functional.dropout(x) + shift


def both(output: Tensor, target: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    first, second = target["both"]
    return (output - first).square().mean() + (output * second).mean()


def finding_out_the_shapes_changes_nothing() -> None:
    """A step of a new pipeline is that of one which has seen the shape, in every number that there is."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    stage = Noisy(tied=mesh.is_last("pp"))
    ends = (stage.tied, None) if mesh.is_first("pp") else (None, stage.tied)
    sum_gradients = training.tie_stages(ends[0], ends[1], mesh)
    x, y, z = (numbers(6, WIDTH, seed=seed) for seed in range(3))
    shift = torch.ones(2, WIDTH, dtype=torch.float64)

    def after(pipe: training.pipelines.Pipeline) -> list[Tensor]:
        stage.zero_grad()
        training.seed_all(3, mesh)
        loss = pipe.step(x, target={"both": (y, z)}, shift=shift[:1])
        sum_gradients()
        found = [each.grad.clone() for each in stage.parameters() if each.grad is not None]
        return [*found, loss, torch.tensor(digest(seeds.random_state()))]

    make = partial(
        training.Pipeline, stage, mesh, n_microbatches=3, loss_fn=both, replicate_kwargs=("shift",)
    )
    first = make()
    expected, *others = [after(first), after(first), after(make())]
    dist.barrier()
    mesh.close()
    assert len(expected) == 5
    for found in others:
        assert all(map(torch.equal, expected, found))


class Wide(nn.Module):
    """What makes large outputs of small inputs, and tells how many of them are alive."""

    alive: ClassVar[list[weakref.ref[Tensor]]] = []
    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        wide = (x * self.weight).expand(x.shape[0], 1000).clone()
        Wide.alive.append(weakref.ref(wide))
        Wide.most = max(Wide.most, sum(each() is not None for each in Wide.alive))
        return wide


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_outputs_are_kept_for_one_micro_batch_unless_they_are_asked_for(schedule: str, stages: int) -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        model: list[nn.Module] = [nn.Identity()] * (stages - 1) + [Wide()]
        pipe = training.Pipeline(model, mesh, schedule, n_microbatches=16, loss_fn=mean)
        x, y = torch.ones(16, 1), torch.zeros(16, 1000)
        told = []
        for run in (pipe.step, pipe.eval):
            run(x, target=y)  # torch finds out the shapes
            gc.collect()
            Wide.most = 0
            assert run(x, target=y) == 1
            told.append(Wide.most)
        output = pipe.eval(x)
        assert output is not None
        assert output.shape == (16, 1000)
        mesh.close()
    assert told[1] <= 2
    assert told[0] <= (2 if schedule == "1F1B" else 17)  # which one rank runs forward as a whole first


def weights_that_a_schedule_needs_are_not_put_away() -> None:
    mesh = namedmesh.init_mesh(pp=1, dp=2, device="cpu")
    stages: Any = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for each in stages:
        fully_shard(each, mesh=mesh["dp"], reshard_after_forward=True)
    make = partial(training.Pipeline, mesh=mesh, n_microbatches=4, loss_fn=mean)
    told = [
        error_of(partial(make, stages[:1], schedule="1F1B")),
        error_of(partial(make, stages, schedule="ZBV")),
    ]
    dist.barrier()
    mesh.close()
    assert told == ["", "TrainingError: ZBV needs weights that reshard_after_forward=True frees; pass False"]


def ends_are_tied_on_one_rank_and_on_two() -> None:
    """ZBV: the first rank has both ends."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")

    def end(number: float, rank: int, dtype: torch.dtype = torch.float32) -> nn.Parameter | None:
        return nn.Parameter(torch.full((2,), number, dtype=dtype)) if mesh.rank("pp") == rank else None

    for last in (0, 1):
        ends = [end(1.0, 0), end(2.0, last)]
        sum_gradients = training.tie_stages(ends[0], ends[1], mesh)
        here = [each for each in ends if each is not None]
        for each in here:
            assert each.tolist() == [1.0, 1.0]
            each.grad = torch.full((2,), 1.0 + (each is ends[1]))
        sum_gradients()
        assert [whole(each.grad).tolist() for each in here] == [[3.0, 3.0]] * len(here)
    said = error_of(lambda: training.tie_stages(end(1.0, 0, torch.float64), end(1.0, 1), mesh))
    dist.barrier()
    mesh.close()
    assert said.startswith("ShapeError: the ranks [0] and [1] of pp tie ")
    assert "torch.float64" in said


def test_layers_of_a_dict_keep_their_names() -> None:
    layers = nn.ModuleDict({f"block{number}": nn.Identity() for number in range(4)})
    assert list(training.stage_layers(layers, None, stage=1, stages=2)) == ["block2", "block3"]


@pytest.mark.parametrize("name", RUNS)
def test_every_layout_continues_the_run_of_one_process(name: str, tmp_path: Path) -> None:
    settings, layouts_of_worlds = RUNS[name]
    steps = sum(map(len, layouts_of_worlds.values()))
    paths = [str(tmp_path / str(number)) for number in range(steps + 1)]
    ((expected, state),) = run_ranks(1, alone, settings, paths[0], steps, init=False)
    assert all(after < before - 1e-3 for before, after, *_ in expected)
    told: list[list[float]] = []
    for ranks, layouts in layouts_of_worlds.items():
        args = settings, layouts, paths[len(told) : len(told) + len(layouts) + 1], name == "compiled"
        first, *others = run_ranks(ranks, train_through, *args, timeout=200.0)
        assert all(each == first for each in others)
        told += first
    assert told == [pytest.approx(each, abs=1e-9) for each in expected]
    (loaded,) = run_ranks(1, loaded_alone, settings, paths[-1], init=False)
    assert loaded == [pytest.approx(each, abs=1e-9) for each in state]


def gradients_that_ddp_averages_over_dp_and_cp_are_those_of_one_process() -> None:
    mesh = namedmesh.init_mesh(dp=2, cp=2)
    expected, model = (train.new_model(checks.SETTINGS) for _ in range(2))
    tokens, targets = checks.batch(0)
    checks.mean_loss(expected, tokens, targets).backward()
    for layer in model.layers.values():
        attention: Any = layer.attention
        attention.attend = partial(training.context_attention, mesh=mesh["cp"])
    tokens, targets, positions = training.shard_sequence(tokens, targets, mesh=mesh["cp"])
    tokens, targets = (each.chunk(2)[mesh.rank("dp")] for each in (tokens, targets))
    group = training.fsdp_mesh(mesh).get_group()
    net = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    count = training.count_tokens(int((targets != IGNORED).sum()), mesh)
    logits = net(tokens, positions).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    training.normalize_loss(total, count, mesh).backward()
    wanted = dict(expected.named_parameters())
    for name, each in model.named_parameters():
        assert apart(each.grad, wanted[name].grad) < 1e-9, name
    said = error_of(lambda: training.normalize_loss(torch.ones(2, 3), count, mesh))
    assert said == 'ShapeError: a loss of shape (2, 3) is no sum; give it reduction="sum"'
    assert training.normalize_loss(torch.zeros(()), torch.tensor(0), mesh) == 0
    parts = DTensor.from_local(torch.ones(()), mesh["dp"], [Partial()])  # as loss_parallel returns them
    assert training.normalize_loss(parts, torch.tensor(8), mesh) == 1
    dist.barrier()
    mesh.close()


@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        (2, every_schedule_trains_and_evaluates_as_one_process),
        (2, finding_out_the_shapes_changes_nothing),
        (2, weights_that_a_schedule_needs_are_not_put_away),
        (2, ends_are_tied_on_one_rank_and_on_two),
        (4, gradients_that_ddp_averages_over_dp_and_cp_are_those_of_one_process),
    ],
)
def test_what_ranks_promise(ranks: int, check: Callable[[], None]) -> None:
    run_ranks(ranks, check)
