"""Pipelines, tied stages and loss scaling compared with one process, in cases that were once wrong."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from messages import error_of
from ranks import fake_world, run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.optim.swa_utils import AveragedModel

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 4


def make_linears(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(count)]


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def assert_gradients_equal(module: nn.Module, reference: nn.Module) -> None:
    reference_params = dict(reference.named_parameters())
    for name, param in module.named_parameters():
        assert compute_difference(param.grad, reference_params[name].grad) < 1e-12, name


class NestedInputs(nn.Module):
    """A stage with nested arguments and one that is not split. The last stage has two outputs."""

    def __init__(self, layers: nn.ModuleDict, is_last: bool) -> None:
        super().__init__()
        self.layers = layers
        self.is_last = is_last

    def forward(self, x: Tensor, masks: dict[str, Any], scale: list[Tensor]) -> Any:
        full, (other,) = masks["full"], masks["other"]
        for layer in self.layers.values():
            x = layer(x) * full * scale[0] + other
        return (x, x.cos()) if self.is_last else x


def two_output_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mean_squared_error(output[0], target) + (output[1] * target).mean()


def nested_inputs_and_several_outputs_equal_one_process() -> None:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    stage = NestedInputs(training.stage_layers(make_linears(4), mesh), mesh.is_last("pp"))
    all_layers = training.stage_layers(make_linears(4), None, stage=0, stages=1)
    reference = NestedInputs(all_layers, is_last=True)
    pipe = training.Pipeline(
        stage, mesh, n_microbatches=4, loss_fn=two_output_loss, replicate_kwargs=("scale",)
    )
    for batch_size in (6, 8):
        x, full, other, y = (random_tensor(batch_size, WIDTH, seed=seed) for seed in range(4))
        masks = {"full": full, "other": (other,)}
        kwargs: dict[str, Any] = {"masks": masks, "scale": [torch.tensor(0.5)]}
        stage.zero_grad()
        reference.zero_grad()
        expected_outputs = reference(x, **kwargs)
        expected_loss = two_output_loss(expected_outputs, y)
        expected_loss.backward()
        assert (
            compute_difference(training.mean_loss(pipe.step(x, target=y, **kwargs), mesh), expected_loss)
            < 1e-12
        )
        assert_gradients_equal(stage, reference)
        assert (
            compute_difference(training.mean_loss(pipe.eval(x, target=y, **kwargs), mesh), expected_loss)
            < 1e-12
        )
        outputs = pipe.eval(x, **kwargs)
        assert (outputs is None) == mesh.is_first("pp")
        if outputs is not None:
            assert len(outputs) == 2
            for output, expected in zip(outputs, expected_outputs, strict=True):
                assert compute_difference(output, expected) < 1e-12
    dist.barrier()
    mesh.close()


class LinearStage(nn.Module):
    """A linear layer, whose output a function changes."""

    def __init__(self, change_output: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.layer = make_linears(1)[0]
        self.change_output = change_output

    def forward(self, x: Tensor, mask: object = None) -> Any:
        assert mask is None
        output = self.layer(x)
        return output if self.change_output is None else self.change_output(output)


def test_values_that_cannot_be_split_are_errors() -> None:
    x, y = random_tensor(6, WIDTH, seed=0), random_tensor(6, WIDTH, seed=1)
    block_mask = create_block_mask(lambda _b, _h, q, k: q >= k, 6, None, 128, 128, device="cpu")

    def loss_per_row(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean(1)

    def make_pipe(
        loss_fn: Callable[..., Tensor], change_output: Callable[[Tensor], Any] | None = None
    ) -> Any:
        return training.Pipeline(LinearStage(change_output), mesh, n_microbatches=4, loss_fn=loss_fn)

    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        with_dict = make_pipe(mean_squared_error, lambda output: {"logits": output})
        errors = [
            error_of(lambda: make_pipe(mean_squared_error).step(x, target=y, mask=block_mask)),
            error_of(lambda: make_pipe(mean_squared_error).step(x, target=y[:5])),
            error_of(lambda: with_dict.step(x, target=y)),
            error_of(lambda: with_dict.eval(x)),
            error_of(lambda: make_pipe(loss_per_row).step(x, target=y)),
            error_of(lambda: make_pipe(loss_per_row).eval(x, target=y)),
        ]
        wrong: Any = "average"
        make = partial(training.Pipeline, LinearStage(None), mesh, n_microbatches=4)
        text = error_of(lambda: make(loss_fn=mean_squared_error, reduction=wrong))
        mesh.close()
    assert text == 'TrainingError: reduction must be "mean" or "sum", got \'average\''
    not_tensors = "TrainingError: stage 0 must return a tensor, or a tuple of tensors, got dict; "
    not_scalar = "TrainingError: loss_fn must return a tensor with one element, got ("
    starts = [
        "ShapeError: the argument mask is a BlockMask, which cannot be split into micro-batches; ",
        "ShapeError: the batch sizes of the inputs and the target are [5, 6]; ",
        not_tensors,
        not_tensors,
        not_scalar,
        not_scalar,
    ]
    for text, start in zip(errors, starts, strict=True):
        assert text.startswith(start), text


def autocast_and_frozen_parameters_may_change() -> None:
    """Also if only parameters of the other rank are frozen."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    x, y = random_tensor(8, WIDTH, seed=0).float(), random_tensor(8, WIDTH, seed=1).float()
    layers = make_linears(2)
    reference = nn.Sequential(*layers).float()
    stage = make_linears(2)[mesh.rank("pp")].float()

    def compare_losses(pipe: training.Pipeline, autocast: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = pipe.eval(x, target=y)
            expected = mean_squared_error(reference(x), y)
        # Micro-batches and the full batch are rounded in the same way.
        assert compute_difference(training.mean_loss(loss, mesh).float(), expected.float()) < 1e-6, autocast

    for order in ((False, True), (True, False)):
        pipe = training.Pipeline(stage, mesh, n_microbatches=4, loss_fn=mean_squared_error)
        for autocast in order:
            compare_losses(pipe, autocast)
    for frozen_stage in (0, None, 0, 1):
        for index, layer in enumerate(reference):
            layer.requires_grad_(index != frozen_stage)
        stage.requires_grad_(mesh.rank("pp") != frozen_stage)
        reference.zero_grad()
        stage.zero_grad()
        mean_squared_error(reference(x), y).backward()
        pipe.step(x, target=y)
        expected_grad = layers[mesh.rank("pp")].weight.grad
        assert (stage.weight.grad is None) == (expected_grad is None)
        assert compute_difference(stage.weight.grad, expected_grad) < 1e-6
    dist.barrier()
    mesh.close()


def stages_behind_frozen_ones_train() -> None:
    """Also with schedules that split backward passes, and after all stages were trained."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    x, y = random_tensor(8, WIDTH, seed=0), random_tensor(8, WIDTH, seed=1)
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"):
        layers = make_linears(4)
        reference = nn.Sequential(*copy.deepcopy(layers))
        numbers = training.stage_indices(mesh, schedule, 2)
        stages = [layers[number] for number in numbers]
        pipe = training.Pipeline(stages, mesh, schedule, n_microbatches=4, loss_fn=mean_squared_error)
        for frozen in (0, 2, 1):
            for number, (layer, expected) in enumerate(zip(layers, reference, strict=True)):
                for module in (layer, expected):
                    module.zero_grad()
                    module.requires_grad_(number >= frozen)
            mean_squared_error(reference(x), y).backward()
            pipe.step(x, target=y)
            for number, stage in zip(numbers, stages, strict=True):
                expected_layer: Any = reference[number]
                expected_grad = expected_layer.weight.grad
                assert (stage.weight.grad is None) == (expected_grad is None), (schedule, frozen)
                assert compute_difference(stage.weight.grad, expected_grad) < 1e-12, (schedule, frozen)
    dist.barrier()
    mesh.close()


class ScaledStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = make_linears(1)[0]
        self.fails = False

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        if self.fails:
            raise ValueError("the test makes this stage fail")
        output: Tensor = self.layer(x)
        return output if scale is None else output * scale


def test_a_pipeline_leaves_no_state_in_its_stages() -> None:
    x, y, scale = random_tensor(4, WIDTH, seed=0), random_tensor(4, WIDTH, seed=1), torch.tensor(3.0)
    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        stage = ScaledStage()
        expected = mean_squared_error(stage(x, scale=scale), y)
        make_pipe = partial(
            training.Pipeline,
            stage,
            mesh,
            n_microbatches=2,
            loss_fn=mean_squared_error,
            replicate_kwargs=("scale",),
        )
        for pipe in (make_pipe(), make_pipe()):
            assert compute_difference(pipe.step(x, target=y, scale=scale), expected) < 1e-12
        pickled = pickle.loads(pickle.dumps(stage))  # noqa: S301  of this test
        copies = [copy.deepcopy(stage), AveragedModel(stage).module, pickled]
        stage.fails = True
        with pytest.raises(RuntimeError, match="failed to run forward"):
            pipe.step(x, target=y, scale=scale)
        stage.fails = False
        for module in (stage, *copies):
            assert compute_difference(module(x), module.layer(x)) == 0
        assert compute_difference(pipe.step(x, target=y), mean_squared_error(stage(x), y)) < 1e-12
        mesh.close()


@pytest.mark.parametrize(("stage", "stages"), [(5, 2), (2, 2), (-1, 2), (0, 0)])
def test_a_stage_that_does_not_exist_is_an_error(stage: int, stages: int) -> None:
    text = error_of(lambda: training.stage_layers(8, None, stage=stage, stages=stages))
    wrong = f"stage must be at least 0 and less than stages={stages}, got {stage}"
    assert text == f"LayoutError: {wrong}"


class TiedStage(nn.Module):
    """One of two tied weights, optionally sharded over dp."""

    def __init__(self, mesh: namedmesh.NamedMesh, *, sharded: bool) -> None:
        super().__init__()
        weight = torch.ones(2, 2)
        if sharded:
            weight = distribute_tensor(weight, mesh["dp"], [Shard(0)])
        self.register_parameter("embed" if mesh.is_first("pp") else "head", nn.Parameter(weight))


def converted_and_copied_weights_stay_tied(root: Path) -> None:
    mesh = namedmesh.init_mesh(pp=2, dp=1, device="cpu")

    def tie(weight: Tensor) -> Callable[[], None]:
        if mesh.is_first("pp"):
            return training.tie_stages(weight, None, mesh)
        return training.tie_stages(None, weight, mesh)

    def check_norm_and_checkpoint(module: nn.Module, path: Path) -> None:
        """The norm counts the weight once, and one process finds it once in the checkpoint."""
        for param in module.parameters():
            param.grad = torch.full_like(param, 3.0)
        norm = training.clip_grad_norm_(module.parameters(), math.inf, mesh)
        assert compute_difference(norm, torch.tensor(6.0, dtype=torch.float64)) < 1e-12
        training.save(path, mesh, module)
        loaded = nn.ParameterDict({"embed": torch.zeros(2, 2, dtype=torch.float64)})
        training.load(path, None, loaded)
        assert loaded["embed"].sum() == 4

    for sharded in (False, True):
        stage = TiedStage(mesh, sharded=sharded)
        (weight,) = stage.parameters()
        sum_gradients = tie(weight)
        check_norm_and_checkpoint(stage.to(torch.float64), root / f"converted{sharded}")
        sum_gradients()
        (weight,) = stage.parameters()
        assert compute_difference(weight.grad, torch.full((2, 2), 6.0, dtype=torch.float64)) == 0
        check_norm_and_checkpoint(copy.deepcopy(stage), root / f"copied{sharded}")
        # A frozen weight gets no gradient, so that an optimizer does not change it.
        for param in stage.parameters():
            param.grad = None
            param.requires_grad_(False)
        sum_gradients()
        assert [param.grad for param in stage.parameters()] == [None]
    frozen_on_one_rank = nn.Parameter(torch.ones(2), requires_grad=mesh.is_first("pp"))
    text = error_of(lambda: tie(frozen_on_one_rank))
    dist.barrier()
    mesh.close()
    assert text.startswith("ShapeError: the ranks [0] and [1] of pp tie ")


def ranks_skip_the_same_steps(axis: str) -> None:
    """A gradient is infinite on one rank in one step.

    torch's GradScaler looks at the placements of the first gradient only, so the second one is
    infinite.
    """
    mesh = namedmesh.init_mesh({axis: 2}, device="cpu")
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    if axis == "tp":
        placements: list[Placement] = [Replicate(), Shard(0)]
        params = [
            nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [placement]))
            for param, placement in zip(params, placements, strict=True)
        ]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    text = error_of(lambda: training.sync_found_inf(scaler, optimizer, mesh))
    scales_and_weights: list[tuple[float, float]] = []
    for step in range(3):
        for param in params:
            param.grad = torch.ones_like(param) * scaler.scale(torch.ones(()))
        if step == 1 and mesh.rank(axis) == 1:
            grad: Any = params[1].grad
            getattr(grad, "_local_tensor", grad).fill_(math.inf)
        if step == 2 and axis == "pp" and mesh.rank(axis) == 1:
            optimizer.zero_grad()  # this stage gets no gradient in this step
        scaler.unscale_(optimizer)
        training.sync_found_inf(scaler, optimizer, mesh)
        scaler.step(optimizer)
        scaler.update()
        scales_and_weights.append((scaler.get_scale(), full_tensor(params[0]).mean().item()))
    training.sync_found_inf(torch.amp.GradScaler("cpu", enabled=False), optimizer, mesh)
    dist.barrier()
    mesh.close()
    assert text.startswith("TrainingError: the gradients are still scaled; ")
    last_weight = 0.0 if axis == "pp" and dist.get_rank() == 1 else -1.0
    assert scales_and_weights == [(32.0, 0.0), (16.0, 0.0), (32.0, last_weight)]


@pytest.mark.parametrize(
    "check",
    [
        nested_inputs_and_several_outputs_equal_one_process,
        autocast_and_frozen_parameters_may_change,
        stages_behind_frozen_ones_train,
        partial(ranks_skip_the_same_steps, "pp"),
        partial(ranks_skip_the_same_steps, "tp"),
    ],
)
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(2, check, timeout=40.0)


def test_tied_weights_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(2, converted_and_copied_weights_stay_tied, tmp_path, timeout=40.0)
