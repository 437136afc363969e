"""Pipelines on all schedules, and runs that resume in other layouts, equal training in one process."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import train
import training_checks as checks
from messages import error_of, list_problems
from parallel import IGNORED
from ranks import fake_world, run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from training_checks import alone, loaded_alone, train_through

import namedmesh
from namedmesh import training
from namedmesh._checks.digests import digest
from namedmesh.training import seeds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, LAYERS = 4, 4
TENSOR_PARALLEL: checks.Job = ({"pp": 1, "dp": 1, "tp": 2}, "GPipe", 3, {})
# The settings of each run, and by world size the layouts through which it resumes.
RUNS: dict[str, tuple[train.Settings, dict[int, list[checks.Job]]]] = {
    "dense": (replace(checks.SETTINGS, dim=32), {2: [TENSOR_PARALLEL, *checks.ON_TWO]}),
    "dense, every layout": (checks.SETTINGS, {4: checks.ON_FOUR, 8: checks.ON_EIGHT}),
    "experts, every layout": (checks.WITH_EXPERTS, {4: checks.EXPERTS_ON_FOUR, 8: checks.EXPERTS_ON_EIGHT}),
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


def make_linears() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)]


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def check_schedule(schedule: str, stages_per_rank: int) -> None:
    """Losses, outputs and gradients equal one process, for batches of several sizes."""
    mesh = namedmesh.init_mesh(pp=2, dp=1, device="cpu")
    num_stages = 2 * stages_per_rank
    stages: list[Stage] = []
    indices = training.stage_indices(mesh, schedule, stages_per_rank)
    for index in indices:
        stage = Stage(training.stage_layers(make_linears(), None, stage=index, stages=num_stages))
        for layer in stage.layers.values():
            # FSDP2 would reshard it after its forward, if the pipeline did not keep its weights.
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
        stages.append(stage)
    pipe = training.Pipeline(stages, mesh, schedule, n_microbatches=6, loss_fn=mean_squared_error)
    reference = Stage(training.stage_layers(make_linears(), None, stage=0, stages=1))
    for shape in ((8,), (5,), (12,), (2,), (8, 3)):
        inputs = random_tensor(*shape, WIDTH, seed=shape[0])
        targets = random_tensor(*shape, WIDTH, seed=0)
        for module in (*stages, reference):
            module.zero_grad()
        expected_output = reference(inputs)
        expected_loss = mean_squared_error(expected_output, targets)
        expected_loss.backward()
        mean_squared_error(reference(inputs[:1]), targets[:1]).backward()
        step_loss = pipe.step(inputs, target=targets)
        output = pipe.eval(inputs)
        # Gradients accumulate, here of a batch that has fewer rows than there are micro-batches.
        pipe.step(inputs[:1], target=targets[:1])
        eval_loss = pipe.eval(inputs, target=targets)
        assert eval_loss is not None
        for loss in (step_loss, eval_loss):
            assert compute_difference(training.mean_loss(loss, mesh), expected_loss) < 1e-12, schedule
        assert (output is not None) == (num_stages - 1 in indices)
        if output is not None:
            assert compute_difference(output, expected_output) < 1e-12, schedule
        reference_params = dict(reference.named_parameters())
        for stage in stages:
            for name, param in stage.named_parameters():
                assert compute_difference(param.grad, reference_params[name].grad) < 1e-12, (schedule, name)
    dist.barrier()
    mesh.close()


def usual_schedules_equal_one_process() -> None:
    check_schedule("1F1B", 1)
    check_schedule("Interleaved1F1B", 2)
    check_schedule("ZBV", 2)


def other_schedules_equal_one_process() -> None:
    check_schedule("gpipe", 1)
    for schedule in ("LoopedBFS", "InterleavedZeroBubble", "DualPipeV"):
        check_schedule(schedule, 2)


def test_invalid_schedules_stages_and_batches_are_errors() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        stage = nn.Linear(2, 2)
        make = partial(training.Pipeline, mesh=mesh, n_microbatches=2, loss_fn=mean_squared_error)
        pipe = make(stage)
        calls: tuple[Callable[[], object], ...] = (
            partial(make, stage, schedule="2F2B"),
            partial(make, [stage, stage]),
            partial(make, stage, schedule="ZBV"),
            partial(training.stage_layers, 3, mesh, stages=4),
            partial(training.stage_layers, 3, None),
            lambda: pipe.step(torch.zeros(2, 2), target=torch.zeros(3, 2)),
        )
        unknown_schedule, *errors = map(error_of, calls)
        mesh.close()
    assert unknown_schedule.startswith(
        "OptionError: Unknown schedule name '2F2B'. The valid options are ['1F1B', "
    )
    assert errors == [
        "LayoutError: the number of stages per rank must be 1 for 1F1B, got 2",
        "LayoutError: the number of stages per rank must be 2 for ZBV, got 1",
        "LayoutError: cannot split 3 layers into 4 stages; each stage needs at least one layer",
        "LayoutError: without a mesh the stage is not known; pass the mesh, or stage and stages",
        "ShapeError: the batch sizes of the inputs and the target are [2, 3]; pass at least one "
        "positional input, and tensors of one batch size of at least 1; name keyword arguments "
        "without a batch dim in Pipeline(..., replicate_kwargs=...)",
    ]


class RandomStage(nn.Module):
    """A stage with all state that a run for the shapes between stages could change."""

    def __init__(self, tied_value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.tied = nn.Parameter(torch.full((WIDTH,), tied_value, dtype=torch.float64))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x = nn.functional.dropout(self.linear(x) * self.tied)
        with training.rng_stream("tensor"):
            return nn.functional.dropout(x) + shift


def nested_target_loss(output: Tensor, target: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    first, second = target["both"]
    return (output - first).square().mean() + (output * second).mean()


def shape_inference_changes_nothing() -> None:
    """The first step of a new pipeline gives the same values as later steps."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    stage = RandomStage(tied_value=2.0 if mesh.is_last("pp") else 1.0)
    if mesh.is_first("pp"):
        sum_gradients = training.tie_stages(stage.tied, None, mesh)
    else:
        sum_gradients = training.tie_stages(None, stage.tied, mesh)
    x, y, z = (random_tensor(6, WIDTH, seed=seed) for seed in range(3))
    shift = torch.ones(2, WIDTH, dtype=torch.float64)

    def run_step(pipe: training.Pipeline) -> list[Tensor]:
        stage.zero_grad()
        training.seed_all(3, mesh)
        loss = pipe.step(x, target={"both": (y, z)}, shift=shift[:1])
        sum_gradients()
        values = [loss, torch.tensor(digest(seeds.collect_rng_states()))]
        for param in stage.parameters():
            assert param.grad is not None
            values.append(param.grad.clone())
        return values

    make = partial(
        training.Pipeline,
        stage,
        mesh,
        n_microbatches=3,
        loss_fn=nested_target_loss,
        replicate_kwargs=("shift",),
    )
    pipe = make()
    first = run_step(pipe)
    second = run_step(pipe)
    first_of_another = run_step(make())
    dist.barrier()
    mesh.close()
    for values in (second, first_of_another):
        assert all(map(torch.equal, first, values))


class WideOutput(nn.Module):
    """Makes large outputs of small inputs, and counts how many of them exist at once."""

    outputs: ClassVar[list[weakref.ref[Tensor]]] = []
    peak = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        output = (x * self.weight).expand(x.shape[0], 1000).clone()
        WideOutput.outputs.append(weakref.ref(output))
        num_alive = sum(reference() is not None for reference in WideOutput.outputs)
        WideOutput.peak = max(WideOutput.peak, num_alive)
        return output


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_outputs_of_earlier_micro_batches_are_freed(schedule: str, stages: int) -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        model: list[nn.Module] = [nn.Identity()] * (stages - 1) + [WideOutput()]
        pipe = training.Pipeline(model, mesh, schedule, n_microbatches=16, loss_fn=mean_squared_error)
        inputs, targets = torch.ones(16, 1), torch.zeros(16, 1000)
        peaks: list[int] = []
        for run in (pipe.step, pipe.eval):
            run(inputs, target=targets)
            gc.collect()
            WideOutput.peak = 0
            assert run(inputs, target=targets) == 1
            peaks.append(WideOutput.peak)
        output = pipe.eval(inputs)
        assert output is not None
        assert output.shape == (16, 1000)
        mesh.close()
    step_peak, eval_peak = peaks
    assert eval_peak <= 2
    # On one rank, an interleaved schedule runs all forward passes before the first backward.
    assert step_peak <= (2 if schedule == "1F1B" else 17)


def reshard_after_forward_true_is_an_error_for_zbv() -> None:
    mesh = namedmesh.init_mesh(pp=1, dp=2, device="cpu")
    stages: Any = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for stage in stages:
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=True)
    make = partial(training.Pipeline, mesh=mesh, n_microbatches=4, loss_fn=mean_squared_error)
    error_of_1f1b = error_of(partial(make, stages[:1], schedule="1F1B"))
    error_of_zbv = error_of(partial(make, stages, schedule="ZBV"))
    dist.barrier()
    mesh.close()
    assert not error_of_1f1b
    assert (
        error_of_zbv == "TrainingError: ZBV needs weights that reshard_after_forward=True frees; pass False"
    )


def tied_parameters_may_be_on_one_rank_or_on_two() -> None:
    """With ZBV, the first rank has the first and the last stage."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")

    def make_end(value: float, rank: int, dtype: torch.dtype = torch.float32) -> nn.Parameter | None:
        return nn.Parameter(torch.full((2,), value, dtype=dtype)) if mesh.rank("pp") == rank else None

    for last_rank in (0, 1):
        first, last = make_end(1.0, 0), make_end(2.0, last_rank)
        sum_gradients = training.tie_stages(first, last, mesh)
        ends = [param for param in (first, last) if param is not None]
        for param in ends:
            assert param.tolist() == [1.0, 1.0]
            param.grad = torch.full((2,), 2.0 if param is last else 1.0)
        sum_gradients()
        for param in ends:
            assert full_tensor(param.grad).tolist() == [3.0, 3.0]
    text = error_of(lambda: training.tie_stages(make_end(1.0, 0, torch.float64), make_end(1.0, 1), mesh))
    dist.barrier()
    mesh.close()
    assert text.startswith("ShapeError: the ranks [0] and [1] of pp tie ")
    assert "torch.float64" in text


def test_layers_of_a_dict_keep_their_names() -> None:
    layers = nn.ModuleDict({f"block{number}": nn.Identity() for number in range(4)})
    assert list(training.stage_layers(layers, None, stage=1, stages=2)) == ["block2", "block3"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "compiled" or "every layout" in name else ())
        for name in RUNS
    ],
)
def test_a_run_resumed_in_other_layouts_equals_one_process(name: str, tmp_path: Path) -> None:
    settings, layouts_of_worlds = RUNS[name]
    num_steps = sum(map(len, layouts_of_worlds.values()))
    paths = [str(tmp_path / str(number)) for number in range(num_steps + 1)]
    ((expected, state),) = run_ranks(1, alone, settings, paths[0], num_steps, init=False)
    for before, after, *_ in expected:
        assert after < before - 1e-3
    found: list[list[float]] = []
    for world_size, layouts in layouts_of_worlds.items():
        args = settings, layouts, paths[len(found) : len(found) + len(layouts) + 1], name == "compiled"
        first, *others = run_ranks(world_size, train_through, *args, timeout=200.0)
        assert others == [first] * (world_size - 1)
        found += first
    assert found == [pytest.approx(step, abs=1e-9) for step in expected]
    (loaded,) = run_ranks(1, loaded_alone, settings, paths[-1], init=False)
    assert loaded == [pytest.approx(value, abs=1e-9) for value in state]


def gradients_averaged_by_ddp_equal_one_process() -> None:
    """DDP averages over dp and cp, whose ranks have unequal numbers of tokens."""
    mesh = namedmesh.init_mesh(dp=2, cp=2)
    reference, model = (train.new_model(checks.SETTINGS) for _ in range(2))
    tokens, targets = checks.batch(0)
    checks.mean_loss(reference, tokens, targets).backward()
    for layer in model.layers.values():
        attention: Any = layer.attention
        attention.attend = partial(training.context_attention, mesh=mesh["cp"])
    tokens, targets, positions = training.shard_sequence(tokens, targets, mesh=mesh["cp"])
    tokens, targets = (tensor.chunk(2)[mesh.rank("dp")] for tensor in (tokens, targets))
    group = training.fsdp_mesh(mesh).get_group()
    net = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    num_tokens = training.count_tokens(int((targets != IGNORED).sum()), mesh)
    logits = net(tokens, positions).flatten(0, 1)
    loss_sum = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    training.normalize_loss(loss_sum, num_tokens, mesh).backward()
    reference_params = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert compute_difference(param.grad, reference_params[name].grad) < 1e-9, name
    dist.barrier()
    mesh.close()


def normalize_loss_takes_a_sum_of_losses() -> None:
    mesh = namedmesh.init_mesh(dp=2)
    num_tokens = torch.tensor(8)
    assert training.normalize_loss(torch.zeros(()), torch.tensor(0), mesh) == 0
    # loss_parallel returns a DTensor.
    partial_sum = DTensor.from_local(torch.full((), 2.0), mesh["dp"], [Partial()])
    assert training.normalize_loss(partial_sum, num_tokens, mesh) == 1
    errors = [
        list_problems(lambda: training.normalize_loss(torch.ones(2, 3), num_tokens, mesh)),
        list_problems(lambda: training.normalize_loss(2.0, 3, mesh)),  # type: ignore[arg-type]
    ]
    dist.barrier()
    mesh.close()
    assert errors == [
        ['loss_sum must be a tensor without dims, got shape (2, 3); pass reduction="sum" to the loss'],
        [
            "loss_sum must be a tensor, got float; pass the summed loss itself, without float() or item()",
            "num_tokens must be a tensor, got int; pass the result of count_tokens",
        ],
    ]


@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        (2, usual_schedules_equal_one_process),
        pytest.param(2, other_schedules_equal_one_process, marks=pytest.mark.slow),
        (2, shape_inference_changes_nothing),
        (2, reshard_after_forward_true_is_an_error_for_zbv),
        (2, tied_parameters_may_be_on_one_rank_or_on_two),
        (4, gradients_averaged_by_ddp_equal_one_process),
        (2, normalize_loss_takes_a_sum_of_losses),
    ],
)
def test_on_ranks(ranks: int, check: Callable[[], None]) -> None:
    run_ranks(ranks, check)
