"""After a step of a pipeline everything is as if only the micro-batches had run, one after the other."""

from __future__ import annotations

import copy
import io
import random
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from as_cuda import NoReads
from messages import error_of
from ranks import fake_world, run_ranks
from tensors import compute_difference, random_tensor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import namedmesh
from namedmesh import training
from namedmesh.training import pipelines

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.ci

WIDTH = 4
N_MICROBATCHES = 4
ONE_STAGE = ["GPipe", "1F1B"]
TWO_STAGES = ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"]
STAGES_OF_SCHEDULES = {**dict.fromkeys(ONE_STAGE, 1), **dict.fromkeys(TWO_STAGES, 2)}

mean_squared_error = nn.functional.mse_loss


class RecordingStage(nn.Module):
    """A stage with every kind of state that a run of it changes, and with checks of its input."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.drawn: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows += x.shape[0]
        self.drawn += [random.random(), float(np.random.random()), torch.rand(()).item()]  # noqa: NPY002
        print(x.shape[0])  # noqa: T201
        if not x.isfinite().all() or not ((x >= 0) & (x <= 1)).all():
            raise ValueError("the input is no output of a stage")
        output: Tensor = self.norm(self.linear(x)).sigmoid()
        return output


class Reference:
    """All stages in one process, which run the micro-batches one after the other."""

    def __init__(self, stages: list[Any], loss_fn: Callable[..., Tensor]) -> None:
        self.stages = stages
        self.loss_fn = loss_fn

    def run(self, x: Any, y: Tensor, *, backward: bool = True) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        count = min(N_MICROBATCHES, len(y))
        with torch.set_grad_enabled(backward):
            for rows, targets in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
                output: Any = (rows,)
                for stage in self.stages:
                    output = stage(*output)
                    output = output if isinstance(output, tuple) else (output,)
                loss += self.loss_fn(*output, targets) * (len(rows) / len(x))
            if backward:
                loss.backward()
        return loss.detach()


def make_pipeline(
    schedule: str, make_stage: Callable[[int], Any], loss_fn: Callable[..., Tensor]
) -> tuple[Any, dict[int, Any], Reference, Any]:
    """Return a mesh of two ranks, this rank's stages by number, all stages in one process, and a pipeline."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    per_rank = STAGES_OF_SCHEDULES[schedule]
    torch.manual_seed(0)
    stages = [make_stage(number) for number in range(2 * per_rank)]
    reference = Reference(copy.deepcopy(stages), loss_fn)
    own: dict[int, Any] = {
        number: stages[number] for number in training.stage_indices(mesh, schedule, per_rank)
    }
    pipe = training.Pipeline([*own.values()], mesh, schedule, n_microbatches=N_MICROBATCHES, loss_fn=loss_fn)
    return mesh, own, reference, pipe


def assert_gradients_equal(own: dict[int, Any], reference: Reference, case: object) -> None:
    for number, stage in own.items():
        expected = dict(reference.stages[number].named_parameters())
        for name, param in stage.named_parameters():
            assert (param.grad is None) == (expected[name].grad is None), (case, number, name)
            assert compute_difference(param.grad, expected[name].grad) < 1e-12, (case, number, name)


def seed_generators() -> None:
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    torch.manual_seed(7)


def collect_generators() -> list[object]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()]


def draw_as(num_runs: int, num_losses: int) -> list[object]:
    """Return the states of the generators after runs of a stage, and after losses."""
    seed_generators()
    for _ in range(num_runs):
        np.random.random()  # noqa: NPY002
        torch.rand(())
    for _ in range(num_runs + num_losses):
        random.random()
    return collect_generators()


def assert_states_equal(own: dict[int, Any], reference: Reference, case: str) -> None:
    for number, stage in own.items():
        expected: dict[str, Tensor] = reference.stages[number].state_dict()
        for name, value in stage.state_dict().items():
            assert compute_difference(value.double(), expected[name].double()) < 1e-12, (case, number, name)
        assert stage.calls == reference.stages[number].calls, (case, number)
        assert len(stage.drawn) == len(reference.stages[number].drawn), (case, number)


def nothing_runs_but_the_micro_batches(schedule: str) -> None:
    """In the first batch, a larger and a smaller one, after a change of what trains, and in evaluation."""
    losses: list[float] = []
    hooked: list[str] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        losses.append(random.random())
        return nn.functional.binary_cross_entropy(output, target)

    mesh, own, reference, pipe = make_pipeline(schedule, lambda _: RecordingStage(), loss_fn)
    for stage in own.values():
        stage.register_forward_pre_hook(lambda *_: hooked.append("pre"))
        stage.register_forward_hook(lambda *_: hooked.append("forward"))
        stage.norm.register_full_backward_hook(lambda *_: hooked.append("backward"))
    num_runs = N_MICROBATCHES * len(own)
    num_losses = N_MICROBATCHES if 2 * len(own) - 1 in own else 0
    cases = [("first", 12), ("again", 12), ("eval", 12), ("larger", 18), ("smaller", 9), ("frozen", 12)]
    for case, size in cases:
        x, y = (random_tensor(size, WIDTH, seed=seed).sigmoid() for seed in (0, 1))
        for module in (*own.values(), *reference.stages):
            module.zero_grad()
        num_backwards = 0 if case == "eval" else num_runs
        if case == "frozen":
            reference.stages[0].requires_grad_(False)
            if 0 in own:
                own[0].requires_grad_(False)
                num_backwards -= N_MICROBATCHES
        losses.clear()
        hooked.clear()
        seed_generators()
        printed = io.StringIO()
        with redirect_stdout(printed):
            loss = training.mean_loss((pipe.eval if case == "eval" else pipe.step)(x, target=y), mesh)
        assert collect_generators() == draw_as(num_runs, num_losses), case
        assert len(losses) == num_losses, case
        assert [hooked.count(name) for name in ("pre", "forward", "backward")] == [
            num_runs,
            num_runs,
            num_backwards,
        ], case
        sizes = [len(rows) for rows in x.tensor_split(N_MICROBATCHES)]
        assert sorted(map(int, printed.getvalue().split())) == sorted(sizes * len(own)), case
        with redirect_stdout(io.StringIO()):
            expected_loss = reference.run(x, y, backward=case != "eval")
        assert compute_difference(loss, expected_loss) < 1e-12, case
        assert_gradients_equal(own, reference, (schedule, case))
        assert_states_equal(own, reference, case)
    dist.barrier()
    mesh.close()


class IndexingStage(nn.Module):
    """The first stage sends integers and a mask, which the others use as indices."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.embedding = nn.Embedding(5, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, ids: Any = None, mask: Any = None, count: Any = None) -> Any:
        if self.number == 0:
            ids = (x[:, 0] * 3).abs().long() % 5
            mask = x[:, 1] > 0
            count = mask.sum()
        else:
            assert 0 <= int(count) <= len(mask)  # a branch on a value
        one_hot = nn.functional.one_hot(ids, 5).to(x)
        x = torch.tanh(self.linear(x)) * mask[:, None] + self.embedding(ids) + one_hot.sum(1, keepdim=True)
        x = x + x.gather(1, ids[:, None] % WIDTH)
        return (x, ids, mask, count) if self.number == 0 else x


def integers_are_indices_of_a_later_stage(schedule: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory, integers with the largest
    mesh, own, reference, pipe = make_pipeline(schedule, IndexingStage, mean_squared_error)
    for size in (8, 6, 3):
        x, y = random_tensor(size, WIDTH, seed=size), random_tensor(size, WIDTH, seed=1)
        for module in (*own.values(), *reference.stages):
            module.zero_grad()
        loss = training.mean_loss(pipe.step(x, target=y), mesh)
        assert compute_difference(loss, reference.run(x, y)) < 1e-12, size
        assert_gradients_equal(own, reference, (schedule, size))
    dist.barrier()
    mesh.close()


class HookedStage(nn.Module):
    """A stage with hooks on its two inputs. It returns two outputs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.calls = 0
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        if z is None:
            z = x * 2
        elif x.requires_grad:
            for tensor in (x, z):
                tensor.register_hook(self.double_gradient)
                tensor.retain_grad()
                self.inputs.append(tensor)
        return self.first(x).tanh() + z, (self.second(z) * x).cos()

    def double_gradient(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return 2 * grad


def loss_of_two(output: Any, *rest: Tensor) -> Tensor:
    first, second, target = (*output, *rest) if isinstance(output, tuple) else (output, *rest)
    loss: Tensor = (first * second - target).square().mean()
    return loss


def hooks_on_inputs_belong_to_one_micro_batch(schedule: str) -> None:
    mesh, own, reference, pipe = make_pipeline(schedule, HookedStage, loss_of_two)
    x, y = random_tensor(8, WIDTH, seed=0), random_tensor(8, WIDTH, seed=1)
    backward_calls: list[int] = []
    hooked = [number for number in own if number > 0]  # torch warns if no input requires a gradient
    if schedule in TWO_STAGES[1:]:
        hooked = []  # torch cannot detach the output of a module with such a hook
    for number in hooked:
        own[number].register_full_backward_hook(lambda *_: backward_calls.append(1))
    for step in range(3):
        for module in (*own.values(), *reference.stages):
            module.zero_grad()
            module.calls = 0
            module.inputs.clear()
        backward_calls.clear()
        loss = training.mean_loss(pipe.step(x, target=y), mesh)
        assert compute_difference(loss, reference.run(x, y)) < 1e-12, step
        assert_gradients_equal(own, reference, (schedule, step))
        assert len(backward_calls) == N_MICROBATCHES * len(hooked)
        for number, stage in own.items():
            expected = reference.stages[number]
            assert stage.calls == (2 * N_MICROBATCHES if number else 0)
            for tensor, other in zip(stage.inputs, expected.inputs, strict=True):
                assert compute_difference(tensor.grad, other.grad) < 1e-12
    dist.barrier()
    mesh.close()


class ViewingStage(nn.Module):
    """A stage that returns views, with gaps, transposed and without rows, and transposes its inputs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(random_tensor(WIDTH, 2 * WIDTH, seed=number))

    def forward(self, x: Tensor, other: Tensor | None = None, total: Tensor | None = None) -> Any:
        if other is not None and total is not None:
            x = x.transpose(1, 2).contiguous().transpose(1, 2) + other.transpose(1, 2) + total
        x, other = torch.tanh(x @ self.weight).chunk(2, dim=-1)
        return x, other.contiguous().transpose(1, 2), other.mean()


def loss_of_views(output: Any, *rest: Tensor) -> Tensor:
    first, second, total, target = (*output, *rest) if isinstance(output, tuple) else (output, *rest)
    loss: Tensor = (first - target).square().mean() + second.mean() + total
    return loss


def views_and_outputs_without_rows_arrive_as_they_are(schedule: str) -> None:
    mesh, own, reference, pipe = make_pipeline(schedule, ViewingStage, loss_of_views)
    # Another length in each batch, so that torch's receive buffers would not fit.
    for size, length in ((8, 3), (6, 5), (8, 2), (2, 7)):
        x, y = (random_tensor(size, length, WIDTH, seed=seed) for seed in (0, 1))
        for module in (*own.values(), *reference.stages):
            module.zero_grad()
        loss = training.mean_loss(pipe.step(x, target=y), mesh)
        assert compute_difference(loss, reference.run(x, y)) < 1e-12, size
        assert_gradients_equal(own, reference, (schedule, size))
        loss = training.mean_loss(pipe.eval(x, target=y), mesh)
        assert compute_difference(loss, reference.run(x, y, backward=False)) < 1e-12, size
    dist.barrier()
    mesh.close()


def a_batch_reads_no_value_of_the_device() -> None:
    """Shapes go over a group for the CPU, also next to a group that has none, as NCCL's."""
    with mock.patch.object(pipelines, "get_backends", return_value={"cuda": "nccl"}):
        mesh, own, reference, pipe = make_pipeline("1F1B", HookedStage, loss_of_two)
        x, y = random_tensor(8, WIDTH, seed=0), random_tensor(8, WIDTH, seed=1)
        for _ in range(2):
            pipe.step(x, target=y)
            pipe.eval(x, target=y)
    for module in own.values():
        module.zero_grad()
    with NoReads():
        loss = pipe.step(x, target=y)
        evaluated = pipe.eval(x, target=y)
    expected = reference.run(x, y)
    assert_gradients_equal(own, reference, "no reads")
    for found in (loss, evaluated):
        assert compute_difference(training.mean_loss(found, mesh), expected) < 1e-12
    dist.barrier()
    mesh.close()


def ddp_averages_gradients_or_is_an_error() -> None:
    mesh = namedmesh.init_mesh(pp=2, dp=2, device="cpu")
    for schedule in ("1F1B", "GPipe", "Interleaved1F1B"):
        per_rank = STAGES_OF_SCHEDULES[schedule]
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * per_rank)]
        reference = nn.Sequential(*copy.deepcopy(layers))
        numbers = training.stage_indices(mesh, schedule, per_rank)
        stages = [DistributedDataParallel(layers[i], process_group=mesh.group("dp")) for i in numbers]
        pipe = training.Pipeline(stages, mesh, schedule, n_microbatches=4, loss_fn=mean_squared_error)
        for step in range(3):
            x = random_tensor(2, 8, WIDTH, seed=step)
            for module in (*stages, reference):
                module.zero_grad()
            pipe.step(x[mesh.rank("dp")], target=x[mesh.rank("dp")])
            mean_squared_error(reference(x), x).backward()
            for number, stage in zip(numbers, stages, strict=True):
                (weight, _), (expected, _) = stage.parameters(), reference[number].parameters()
                assert compute_difference(weight.grad, expected.grad) < 1e-12, (schedule, step)
    make = partial(training.Pipeline, stages, mesh, n_microbatches=4, loss_fn=mean_squared_error)
    errors = [error_of(partial(make, schedule=schedule)) for schedule in TWO_STAGES]
    dist.barrier()
    mesh.close()
    assert errors[0] == ""
    for schedule, error in zip(TWO_STAGES[1:], errors[1:], strict=True):
        assert error.startswith(f"TrainingError: {schedule} computes gradients of weights without the "), (
            error
        )
        assert "use fully_shard(stage, mesh=training.fsdp_mesh(mesh)) with the axes dp_replicate" in error


@pytest.mark.parametrize("stage_number", [0, 1])
def test_values_that_are_no_tensors_are_errors(stage_number: int) -> None:
    x = random_tensor(8, WIDTH, seed=0)

    class DictStage(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x)}

    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        stages: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
        stages[stage_number] = DictStage(WIDTH, WIDTH, dtype=torch.float64)
        pipe = training.Pipeline(
            stages, mesh, "Interleaved1F1B", n_microbatches=2, loss_fn=mean_squared_error
        )
        with pytest.raises(namedmesh.TrainingError) as raised:
            pipe.step(x, target=x)
        mesh.close()
    assert str(raised.value) == (
        f"stage {stage_number} must return a tensor, or a tuple of tensors, got dict; return only the tensors in it"
    )


def test_a_later_micro_batch_with_larger_tensors_is_an_error() -> None:
    class GrowingStage(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x).repeat(1, self.calls)

    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        stages = [GrowingStage(2, 2), nn.LazyLinear(2)]
        pipe = training.Pipeline(
            stages, mesh, "Interleaved1F1B", n_microbatches=2, loss_fn=mean_squared_error
        )
        text = error_of(lambda: pipe.step(torch.ones(4, 2), target=torch.ones(4, 2)))
        mesh.close()
    assert text == (
        "TrainingError: stage 0 returned torch.float32 of shape (2, 4) for a later micro-batch, after "
        "torch.float32 of shape (2, 2) for the first; return tensors of one dtype, the largest first"
    )


@pytest.mark.parametrize(
    "check",
    [
        *(
            partial(nothing_runs_but_the_micro_batches, name)
            for name in (*ONE_STAGE, "Interleaved1F1B", "ZBV")
        ),
        *(partial(integers_are_indices_of_a_later_stage, name) for name in ONE_STAGE),
        *(partial(hooks_on_inputs_belong_to_one_micro_batch, name) for name in STAGES_OF_SCHEDULES),
        *(
            partial(views_and_outputs_without_rows_arrive_as_they_are, name)
            for name in ("1F1B", "Interleaved1F1B")
        ),
        a_batch_reads_no_value_of_the_device,
    ],
)
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(2, check)


def test_on_four_ranks() -> None:
    run_ranks(4, ddp_averages_gradients_or_is_an_error)
