"""Pipelines, tied stages and loss scaling where they were silently wrong, against one process."""

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
from tensors import apart, numbers, whole
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


def linears(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(count)]


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def register_gradient_check(found: nn.Module, expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    for name, param in found.named_parameters():
        assert apart(param.grad, wanted[name].grad) < 1e-12, name


class Masked(nn.Module):
    """A stage with nested arguments, and one that is not cut; the last one has two outputs."""

    def __init__(self, layers: nn.ModuleDict, last: bool) -> None:
        super().__init__()
        self.layers, self.last = layers, last

    def forward(self, x: Tensor, masks: dict[str, Any], scale: list[Tensor]) -> Any:
        full, (other,) = masks["full"], masks["other"]
        for layer in self.layers.values():
            x = layer(x) * full * scale[0] + other
        return (x, x.cos()) if self.last else x


def two_outputs(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mean(output[0], target) + (output[1] * target).mean()


def nested_arguments_and_several_outputs_are_cut_by_rows() -> None:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    stage = Masked(training.stage_layers(linears(4), mesh), mesh.is_last("pp"))
    alone = Masked(training.stage_layers(linears(4), None, stage=0, stages=1), last=True)
    pipe = training.Pipeline(stage, mesh, n_microbatches=4, loss_fn=two_outputs, replicate_kwargs=("scale",))
    for rows in (6, 8):
        x, full, other, y = (numbers(rows, WIDTH, seed=seed) for seed in range(4))
        masks = {"full": full, "other": (other,)}
        given: dict[str, Any] = {"masks": masks, "scale": [torch.tensor(0.5)]}
        stage.zero_grad()
        alone.zero_grad()
        outputs = alone(x, **given)
        expected = two_outputs(outputs, y)
        expected.backward()
        assert apart(training.mean_loss(pipe.step(x, target=y, **given), mesh), expected) < 1e-12
        register_gradient_check(stage, alone)
        evaluated = pipe.eval(x, target=y, **given)
        assert evaluated is not None
        assert apart(training.mean_loss(evaluated, mesh), expected) < 1e-12
        found = pipe.eval(x, **given)
        assert (found is None) == mesh.is_first("pp")
        if found is not None:
            assert len(found) == 2
            for output, wanted in zip(found, outputs, strict=True):
                assert apart(output, wanted) < 1e-12
    dist.barrier()
    mesh.close()


class Returning(nn.Module):
    """A stage whose output is what a function makes of it; the first one passes its input on."""

    def __init__(self, returns: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.layer = linears(1)[0]
        self.returns = returns

    def forward(self, x: Tensor, mask: object = None) -> Any:
        assert mask is None
        x = self.layer(x)
        return x if self.returns is None else self.returns(x)


def what_cannot_be_cut_is_rejected_on_every_rank() -> None:
    # torch finds out the shapes with uninitialized memory, which this fills with NaN.
    torch.use_deterministic_algorithms(True)
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    x, y = numbers(6, WIDTH, seed=0), numbers(6, WIDTH, seed=1)
    blocks = create_block_mask(lambda _b, _h, q, k: q >= k, 6, None, 128, 128, device="cpu")

    def new(loss: Callable[..., Tensor], returns: Callable[[Tensor], Any] | None = None) -> Any:
        stage = Returning(returns if mesh.is_last("pp") else None)
        return training.Pipeline(stage, mesh, n_microbatches=4, loss_fn=loss)

    def with_auxiliary(x: Tensor) -> Any:
        return x, x.mean()

    def first(output: Any, target: Tensor) -> Tensor:
        return mean(output[0], target)

    def of_rows(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean(1)

    def token_loss(output: Tensor, target: Tensor) -> Tensor:
        return training.normalize_loss((output - target).square().sum(), torch.tensor(24), mesh)

    returns_dict = new(mean, lambda x: {"logits": x})
    auxiliary = new(first, with_auxiliary)
    told = [
        error_of(lambda: new(mean).step(x, target=y, mask=blocks)),
        # Only one rank has another target.
        error_of(lambda: new(mean).step(x, target=y[: 6 - mesh.rank("pp")])),
        error_of(lambda: returns_dict.step(x, target=y)),
        error_of(lambda: returns_dict.eval(x)),
        error_of(lambda: new(of_rows).step(x, target=y)),
        error_of(lambda: new(of_rows).eval(x, target=y)),
        error_of(lambda: auxiliary.step(x, target=y)),
        error_of(lambda: auxiliary.eval(x)),
        error_of(lambda: auxiliary.eval(x[:4], target=y[:4])),  # which fill the micro-batches
        error_of(lambda: auxiliary.eval(x[:3], target=y[:3])),
        error_of(lambda: new(token_loss).step(x, target=y)),
    ]
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, told)
    mesh.close()
    assert by_rank[0] == by_rank[1]
    mask, target, *others = told
    assert mask.startswith(
        "ShapeError: the argument mask is a BlockMask, which cannot be cut into micro-batches; "
    )
    assert target.startswith("ShapeError: the batch has [5, 6] rows; ")
    returned = "TrainingError: the last stage must return a tensor, or a tuple of tensors, got "
    loss = "TrainingError: loss_fn must return a tensor of one number, got ("
    rowless = "ShapeError: the last stage returns a tensor without the rows of its micro-batch, "
    reduction = "TrainingError: the loss of a row that is given twice is 2 times its loss, as of a "
    starts = [returned, returned, loss, loss, rowless, rowless, "", rowless, reduction]
    for text, start in zip(others, starts, strict=True):
        assert text.startswith(start), text
        assert bool(text) == bool(start), text


def a_schedule_is_made_anew_when_what_it_depends_on_changes() -> None:
    """Autocast, and which parameters train: of the other rank, too."""
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    x, y = numbers(8, WIDTH, seed=0).float(), numbers(8, WIDTH, seed=1).float()
    layers = linears(2)
    alone = nn.Sequential(*layers).float()
    stage = linears(2)[mesh.rank("pp")].float()

    def compare(pipe: training.pipelines.Pipeline, enabled: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            evaluated = pipe.eval(x, target=y)
            expected = mean(alone(x), y)
        assert evaluated is not None
        # Micro-batches and the whole batch round alike.
        assert apart(training.mean_loss(evaluated, mesh).float(), expected.float()) < 1e-6, enabled

    for order in ((False, True), (True, False)):
        pipe = training.Pipeline(stage, mesh, n_microbatches=4, loss_fn=mean)
        for enabled in order:
            compare(pipe, enabled)
    for frozen in (0, None, 0, 1):  # the stage, one after the other
        for number, layer in enumerate(alone):
            layer.requires_grad_(number != frozen)
        stage.requires_grad_(mesh.rank("pp") != frozen)
        alone.zero_grad()
        stage.zero_grad()
        mean(alone(x), y).backward()
        pipe.step(x, target=y)
        wanted = layers[mesh.rank("pp")].weight.grad
        assert (stage.weight.grad is None) == (wanted is None)
        assert apart(stage.weight.grad, wanted) < 1e-6
    dist.barrier()
    mesh.close()


def frozen_first_stages_are_right_or_rejected() -> None:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    x, y = numbers(8, WIDTH, seed=0), numbers(8, WIDTH, seed=1)
    told: list[str] = []
    for schedule in ("InterleavedZeroBubble", "ZBV", "DualPipeV", "Interleaved1F1B"):
        layers = linears(4)
        alone = nn.Sequential(*layers)
        alone[:2].requires_grad_(False)
        mean(alone(x), y).backward()
        indices = training.stage_indices(mesh, schedule, 2)
        stages = [layers[index] for index in indices]
        wanted = [copy.deepcopy(stage.weight.grad) for stage in stages]
        alone.zero_grad()
        pipe = training.Pipeline(stages, mesh, schedule, n_microbatches=4, loss_fn=mean)
        told.append(error_of(partial(pipe.step, x, target=y)).partition(",")[0])
        if not told[-1]:
            for stage, expected in zip(stages, wanted, strict=True):
                assert apart(stage.weight.grad, expected) < 1e-12
    dist.barrier()
    mesh.close()
    assert told == ["TrainingError: stage 2 is the first that trains"] * 3 + [""]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linears(1)[0]
        self.fails = False

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        if self.fails:
            raise ValueError("as it was told")
        output: Tensor = self.layer(x)
        return output if scale is None else output * scale


def test_a_pipeline_leaves_nothing_in_its_stages() -> None:
    x, y, scale = numbers(4, WIDTH, seed=0), numbers(4, WIDTH, seed=1), torch.tensor(3.0)
    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")
        stage = Scaled()
        expected = mean(stage(x, scale=scale), y)
        new = partial(
            training.Pipeline, stage, mesh, n_microbatches=2, loss_fn=mean, replicate_kwargs=("scale",)
        )
        for pipe in (new(), new()):
            assert apart(pipe.step(x, target=y, scale=scale), expected) < 1e-12
        pickled = pickle.loads(pickle.dumps(stage))  # noqa: S301  of this test
        copies = [copy.deepcopy(stage), AveragedModel(stage).module, pickled]
        stage.fails = True
        with pytest.raises(RuntimeError, match="failed to run forward"):
            pipe.step(x, target=y, scale=scale)
        stage.fails = False
        for module in (stage, *copies):
            assert apart(module(x), module.layer(x)) == 0
        assert apart(pipe.step(x, target=y), mean(stage(x), y)) < 1e-12
        mesh.close()


@pytest.mark.parametrize("rows", [4, 3])
def test_a_loss_that_is_reduced_otherwise_than_said_is_rejected(rows: int) -> None:
    x, y = numbers(rows, WIDTH, seed=0), numbers(rows, WIDTH, seed=1)
    with fake_world(1):
        mesh = namedmesh.init_mesh(pp=1, device="cpu")

        def summed(output: Tensor, target: Tensor) -> Tensor:
            total = (output - target).square().sum()
            return training.normalize_loss(total, torch.tensor(rows * WIDTH), mesh)

        new = partial(training.Pipeline, linears(1)[0], mesh, n_microbatches=4)

        def said(loss: Callable[..., Tensor], reduction: Any) -> str:
            pipe = new(loss_fn=loss, reduction=reduction)
            return error_of(lambda: pipe.step(x, target=y)).partition("; ")[2]

        assert said(mean, "mean") == said(summed, "sum") == ""
        assert said(summed, "mean") == 'pass reduction="sum"'
        how = 'return the mean of the rows, undivided, and pass reduction="mean"'
        assert said(mean, "sum") == how
        text = error_of(lambda: new(loss_fn=mean, reduction="average"))  # type: ignore[arg-type]
        assert text == 'TrainingError: reduction must be "mean" or "sum", got \'average\''
        mesh.close()


@pytest.mark.parametrize(("stage", "stages"), [(5, 2), (2, 2), (-1, 2), (0, 0)])
def test_stages_that_do_not_exist_have_no_layers(stage: int, stages: int) -> None:
    text = error_of(lambda: training.stage_layers(8, None, stage=stage, stages=stages))
    wrong = f"stage must be at least 0 and less than stages={stages}, got {stage}"
    assert text == f"LayoutError: {wrong}"


class End(nn.Module):
    """The weight of one end, of which dp may have shards."""

    def __init__(self, mesh: namedmesh.NamedMesh, *, sharded: bool) -> None:
        super().__init__()
        weight = torch.ones(2, 2)
        if sharded:
            weight = distribute_tensor(weight, mesh["dp"], [Shard(0)])
        self.register_parameter("embed" if mesh.is_first("pp") else "head", nn.Parameter(weight))


def marks_of_ties_stay_with_converted_and_copied_weights(root: Path) -> None:
    mesh = namedmesh.init_mesh(pp=2, dp=1, device="cpu")

    def check(module: nn.Module, path: Path) -> None:
        """The weight counts once in the norm, and one process finds it once in the checkpoint."""
        for param in module.parameters():
            param.grad = torch.full_like(param, 3.0)
        norm = training.clip_grad_norm_(module.parameters(), math.inf, mesh)
        assert apart(norm, torch.tensor(6.0, dtype=torch.float64)) < 1e-12
        training.save(path, mesh, module)
        alone = nn.ParameterDict({"embed": torch.zeros(2, 2, dtype=torch.float64)})
        training.load(path, None, alone)
        assert alone["embed"].sum() == 4

    for sharded in (False, True):
        stage = End(mesh, sharded=sharded)
        (weight,) = stage.parameters()
        ends = (weight, None) if mesh.is_first("pp") else (None, weight)
        sum_tied = training.tie_stages(ends[0], ends[1], mesh)
        check(stage.to(torch.float64), root / f"converted{sharded}")
        sum_tied()
        (weight,) = stage.parameters()
        assert apart(weight.grad, torch.full((2, 2), 6.0, dtype=torch.float64)) == 0
        check(copy.deepcopy(stage), root / f"copied{sharded}")
        # Frozen, it has no gradient, and an optimizer leaves it alone.
        for param in stage.parameters():
            param.grad = None
            param.requires_grad_(False)
        sum_tied()
        assert [param.grad for param in stage.parameters()] == [None]
    weight = nn.Parameter(torch.ones(2), requires_grad=mesh.is_first("pp"))
    ends = (weight, None) if mesh.is_first("pp") else (None, weight)
    text = error_of(lambda: training.tie_stages(ends[0], ends[1], mesh))
    dist.barrier()
    mesh.close()
    assert text.startswith("ShapeError: the ranks [0] and [1] of pp tie ")


def ranks_skip_the_same_steps(axis: str) -> None:
    """A gradient of one rank is infinite once. torch looks at the first one's placements only."""
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
    told: list[tuple[float, float]] = []
    for step in range(3):
        for param in params:
            param.grad = torch.ones_like(param) * scaler.scale(torch.ones(()))
        if step == 1 and mesh.rank(axis) == 1:
            whole_or_local: Any = params[1].grad
            getattr(whole_or_local, "_local_tensor", whole_or_local).fill_(math.inf)
        if step == 2 and axis == "pp" and mesh.rank(axis) == 1:
            optimizer.zero_grad()  # a stage that gets no gradient
        scaler.unscale_(optimizer)
        training.sync_found_inf(scaler, optimizer, mesh)
        scaler.step(optimizer)
        scaler.update()
        told.append((scaler.get_scale(), whole(params[0]).mean().item()))
    training.sync_found_inf(torch.amp.GradScaler("cpu", enabled=False), optimizer, mesh)
    dist.barrier()
    mesh.close()
    assert text.startswith("TrainingError: the gradients are still scaled; ")
    last = 0.0 if axis == "pp" and dist.get_rank() == 1 else -1.0
    assert told == [(32.0, 0.0), (16.0, 0.0), (32.0, last)]


@pytest.mark.parametrize(
    "check",
    [
        nested_arguments_and_several_outputs_are_cut_by_rows,
        what_cannot_be_cut_is_rejected_on_every_rank,
        a_schedule_is_made_anew_when_what_it_depends_on_changes,
        frozen_first_stages_are_right_or_rejected,
        partial(ranks_skip_the_same_steps, "pp"),
        partial(ranks_skip_the_same_steps, "tp"),
    ],
)
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(2, check, timeout=40.0)


def test_marks_of_ties(tmp_path: Path) -> None:
    run_ranks(2, marks_of_ties_stay_with_converted_and_copied_weights, tmp_path, timeout=40.0)
