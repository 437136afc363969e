"""Optimizers, clipping, gradient scaling and moving averages with parameters of every kind."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tp_compare import assert_no_difference
from tp_models import UP_DOWN, Mlp, OfHeads

from namedmesh.tensor_parallel import LocalParameters, parallelize, reduce_gradients

# An optimizer, its options, and the clipping before it: the order of the norm, and foreach.
OPTIMIZERS: list[tuple[str, dict[str, Any], tuple[float, bool | None]]] = [
    ("AdamW", {}, (2.0, None)),
    ("AdamW", {"foreach": True, "amsgrad": True}, (2.0, False)),
    ("AdamW", {"fused": True, "eps": 1e-3}, (2.0, True)),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, (torch.inf, None)),
    ("SGD", {"momentum": 0.9, "fused": True}, (1.0, False)),
    ("Adagrad", {}, (2.0, None)),
    ("RMSprop", {"centered": True, "eps": 1e-3}, (2.0, None)),
    ("NAdam", {}, (2.0, None)),
    ("RAdam", {"foreach": True}, (2.0, None)),
    ("Adam", {"fused": True, "eps": 1e-3}, (2.0, None)),
    ("Adamax", {}, (2.0, None)),
    ("Adadelta", {"foreach": True}, (2.0, None)),
    ("ASGD", {}, (2.0, None)),
]


class Model(nn.Module):
    """Parameters that are plain, sharded, or replicated with partial gradients, on two meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = Mlp()
        self.second = Mlp()
        between = OfHeads(nn.LayerNorm(4))
        self.first.add_module("down", nn.Sequential(between, self.first.down))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.norm(x)))
        return out


def make_models(meshes: list[Any]) -> tuple[nn.Module, nn.Module]:
    """Return a parallelized model, and the unsharded one."""
    torch.manual_seed(0)
    reference = Model().double()
    model = copy.deepcopy(reference)
    up = UP_DOWN["up"]
    down = UP_DOWN["down"]
    first = {"first.up": up, "first.down.0.inner": LocalParameters(), "first.down.1": down}
    parallelize(model, meshes[0], first)
    parallelize(model, meshes[1], {"second.up": up, "second.down": down})
    return model, reference


def max_difference(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of parameters."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(compute_difference(param, expected) for param, expected in pairs)


def compare_optimizer(
    meshes: list[Any], name: str, options: dict[str, Any], clip: tuple[float, bool | None]
) -> float:
    """Train three steps; return the largest difference of parameters and of gradient norms."""
    norm_type, foreach = clip
    models = make_models(meshes)
    norms: list[list[float]] = []
    for model in models:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        norms.append([])
        for step in range(3):
            model.zero_grad(set_to_none=step > 1)
            model(random_tensor(4, 8, seed=step)).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
            norms[-1].append(norm.item())
            optimizer.step()
        # The state of a plain parameter is plain.
        for param, state in optimizer.state.items():
            has_dtensors = any(isinstance(value, DTensor) for value in state.values())
            assert isinstance(param, DTensor) or not has_dtensors
    return max(max_difference(*models), compute_difference(*map(torch.tensor, norms)))


def compare_scaling(meshes: list[Any]) -> dict[str, float]:
    """Train three steps with a gradient scaler; in the second one, the shard of a rank overflows."""
    models = make_models(meshes)
    averages: list[Any] = []
    scales = []
    for model in models:
        averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for step in range(3):
            model.zero_grad()
            scaler.scale(model(random_tensor(4, 8, seed=step)).square().sum()).backward()
            grad: Any = model.second.up.weight.grad  # type: ignore[union-attr]
            if step == 1 and not isinstance(grad, DTensor):
                grad.fill_(torch.inf)
            elif step == 1 and torch.distributed.get_rank() == 1:
                grad.to_local().fill_(torch.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            averages[-1].update_parameters(model)
    return {
        "steps": max_difference(*models),
        "scales": compute_difference(torch.tensor(scales[:3]), torch.tensor(scales[3:])),
        "moving average": max_difference(*averages),
    }


def scale_without_a_gradient() -> float:
    """Return the scale after a step in which one rank lacks a gradient, and the other overflows."""
    group = torch.distributed.new_group()  # a second mesh over the world would use the same group
    meshes = [
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("etp",)),
    ]
    params = []
    for mesh in (meshes[0], meshes[1], meshes[0]):
        params.append(nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])))
        params[-1].grad = torch.ones_like(params[-1])
    if torch.distributed.get_rank() == 0:
        params[0].grad = None
    else:
        local: Any = params[1].grad
        local.to_local().fill_(torch.inf)
    parallelize(Mlp(), meshes[0], UP_DOWN)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(params))
    scaler.update()
    scale: float = scaler.get_scale()
    return scale


def test_a_rank_without_a_gradient_has_the_same_scale() -> None:
    assert run_ranks(2, scale_without_a_gradient, timeout=30) == [4.0] * 2


def mix_lists() -> list[bool]:
    """Return whether torch rejects lists of a full plain tensor and a shard, or a replica."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(Mlp(), mesh, UP_DOWN)
    shard = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)])
    replicated = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()])
    full = torch.zeros(2, 3)
    results = []
    for dtensor in (shard, replicated):
        try:
            torch._foreach_lerp_([full, full], [dtensor, full], 0.5)
            results.append(False)
        except RuntimeError:
            results.append(True)
    return results


def test_lists_of_a_full_tensor_and_a_shard_raise() -> None:
    assert run_ranks(2, mix_lists) == [[True, False]] * 2


def compare_all() -> dict[str, float]:
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "etp")]
    differences = compare_scaling(meshes)
    for name, options, clip in OPTIMIZERS:
        differences[f"{name} {options}"] = compare_optimizer(meshes, name, options, clip)
    return differences


@pytest.mark.ci
@pytest.mark.usefixtures("as_on_cuda")
def test_optimizers_clipping_scaling_and_averages_equal_one_process() -> None:
    assert_no_difference(run_ranks(2, compare_all), cases=len(OPTIMIZERS) + 3)


def step_in_two_threads() -> tuple[list[int], float]:
    """Step two optimizers in a thread each; return the steps, and the difference from one thread."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    models = []
    for _ in range(3):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double()
        torch.manual_seed(0)
        nn.init.normal_(model[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
        models.append(parallelize(model, mesh, {"0": UP_DOWN["up"]}, check_gradients=False))
    steps = [0, 0, 0]

    def train(number: int) -> None:
        params = list(models[number].parameters())
        optimizer = torch.optim.AdamW(params, foreach=True)
        for _ in range(100):
            for param in params:
                param.grad = torch.ones_like(param)
            nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            optimizer.step()
            steps[number] += 1

    train(2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    return steps, max(max_difference(models[number], models[2]) for number in range(2))


def test_two_threads_step_two_optimizers() -> None:
    ((steps, difference),) = run_ranks(1, step_in_two_threads)
    assert steps == [100] * 3
    assert difference == 0.0


def reduce_in_half_precision() -> list[float]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    zeros = torch.zeros(4, dtype=torch.bfloat16)
    param = nn.Parameter(DTensor.from_local(zeros, mesh, [Replicate()]))
    local_grad = torch.full_like(zeros, 1 if mesh.get_local_rank() else 256)
    param.grad = DTensor.from_local(local_grad, mesh, [Partial()])
    reduce_gradients([param])
    total: list[float] = full_tensor(param.grad).tolist()
    return total


def test_partial_gradients_in_half_precision_are_reduced_in_float32() -> None:
    expected = torch.tensor(256.0 + 1 + 1 + 1).bfloat16().item()
    assert run_ranks(4, reduce_in_half_precision) == [[expected] * 4] * 4


def compare_compiled_steps() -> float:
    """Return the largest difference of parameters after three steps of a compiled optimizer."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    reference = Mlp().double()
    model = parallelize(copy.deepcopy(reference), mesh, UP_DOWN)
    for trained in (reference, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9, foreach=False)
        step: Any = optimizer.step
        if trained is model:
            step = torch.compile(step, backend="aot_eager")
        for _ in range(3):
            trained(random_tensor(4, 8, seed=1)).square().sum().backward()
            step()
            optimizer.zero_grad()
    return max_difference(model, reference)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_a_compiled_optimizer_step_equals_one_process() -> None:
    assert max(run_ranks(2, compare_compiled_steps)) < 1e-12
