"""torch's optimizers, clipping, gradient scaler and moving averages over parameters of every kind, as they are on CUDA."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tensors import apart, numbers, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tp_compare import assert_no_difference
from tp_models import UP_DOWN, Mlp, OfHeads

from namedmesh.tensor_parallel import LocalParameters, parallelize, reduce_gradients

# Each with the clipping before it: the order of the norm, and whether torch may use foreach there.
OPTIMIZERS: list[tuple[str, dict[str, Any], tuple[float, bool | None]]] = [
    ("AdamW", {}, (2.0, None)),
    ("AdamW", {"foreach": True, "amsgrad": True}, (2.0, False)),
    ("AdamW", {"fused": True, "eps": 1e-3}, (2.0, True)),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, (torch.inf, None)),
    ("SGD", {"momentum": 0.9, "fused": True}, (1.0, False)),
    ("Adagrad", {}, (2.0, None)),
    ("RMSprop", {"centered": True, "eps": 1e-3}, (2.0, None)),
    ("NAdam", {}, (2.0, None)),
]


class Model(nn.Module):
    """Parameters of which each rank has all, a shard, and all with a partial gradient; and those of another mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), Mlp(), Mlp()
        between = OfHeads(nn.LayerNorm(4))
        self.first.add_module("down", nn.Sequential(between, self.first.down))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.norm(x)))
        return out


def _models(meshes: list[Any]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = Model().double()
    model = copy.deepcopy(reference)
    up, down = UP_DOWN["up"], UP_DOWN["down"]
    first = {"first.up": up, "first.down.0.inner": LocalParameters(), "first.down.1": down}
    parallelize(model, meshes[0], first)
    parallelize(model, meshes[1], {"second.up": up, "second.down": down})
    return model, reference


def _backward(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=step > 1)
    model(numbers(4, 8, seed=step)).square().sum().backward()


def _difference(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(apart(mine, theirs) for mine, theirs in pairs)


def _train(meshes: list[Any], name: str, options: dict[str, Any], clip: tuple[float, bool | None]) -> float:
    models = _models(meshes)
    norms: list[list[float]] = []
    for model in models:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        norms.append([])
        for step in range(3):
            _backward(model, step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, clip[0], foreach=clip[1])
            norms[-1].append(norm.item())
            optimizer.step()
        for param, state in optimizer.state.items():
            assert isinstance(param, DTensor) or not any(
                isinstance(value, DTensor) for value in state.values()
            )
    return max(_difference(*models), apart(*map(torch.tensor, norms)))


def _scale(meshes: list[Any]) -> dict[str, float]:
    """Three steps with a gradient scaler; in the second one a shard of the last rank overflows."""
    models = _models(meshes)
    averages: list[Any] = []
    scales = []
    for model in models:
        averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for step in range(3):
            model.zero_grad()
            scaler.scale(model(numbers(4, 8, seed=step)).square().sum()).backward()
            gradient: Any = model.second.up.weight.grad  # type: ignore[union-attr]
            if step == 1:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                if local is gradient or torch.distributed.get_rank() == 1:
                    local.fill_(torch.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            averages[-1].update_parameters(model)
    return {
        "steps": _difference(*models),
        "scales": apart(torch.tensor(scales[:3]), torch.tensor(scales[3:])),
        "moving average": _difference(*averages),
    }


def _scale_without_some_gradients() -> float:
    """The scale after a step in which one rank lacks the gradients of the first mesh's first parameter."""
    group = torch.distributed.new_group()  # a mesh of the world would have its group twice
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


def test_a_rank_that_lacks_gradients_scales_like_the_others() -> None:
    assert run_ranks(2, _scale_without_some_gradients, timeout=30) == [4.0] * 2


def _shard_and_plain() -> list[bool]:
    """Whether lists are rejected in which a plain tensor of the full shape meets a shard of one row."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(Mlp(), mesh, UP_DOWN)
    shard = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)])
    copies = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()])
    full = torch.zeros(2, 3)
    found = []
    for distributed in (shard, copies):
        try:
            torch._foreach_lerp_([full, full], [distributed, full], 0.5)
            found.append(False)
        except RuntimeError:
            found.append(True)
    return found


def test_a_plain_tensor_beside_a_shard_is_rejected_as_in_torch() -> None:
    assert run_ranks(2, _shard_and_plain) == [[True, False]] * 2


def _all() -> dict[str, float]:
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "etp")]
    found = {f"{name} {options}": _train(meshes, name, options, clip) for name, options, clip in OPTIMIZERS}
    return found | _scale(meshes)


@pytest.mark.usefixtures("as_on_cuda")
def test_optimizers_clipping_scaling_and_averages_over_parameters_of_every_kind() -> None:
    assert_no_difference(run_ranks(2, _all), cases=len(OPTIMIZERS) + 3)


def _sum_of_partial_gradients() -> list[float]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    zeros = torch.zeros(4, dtype=torch.bfloat16)
    param = nn.Parameter(DTensor.from_local(zeros, mesh, [Replicate()]))
    gradient = torch.full_like(zeros, 1 if mesh.get_local_rank() else 256)
    param.grad = DTensor.from_local(gradient, mesh, [Partial()])
    reduce_gradients([param])
    total: list[float] = whole(param.grad).tolist()
    return total


def test_partial_gradients_in_half_precision_are_summed_in_float32() -> None:
    right = torch.tensor(256.0 + 1 + 1 + 1).bfloat16().item()
    assert run_ranks(4, _sum_of_partial_gradients) == [[right] * 4] * 4


def compiled_steps() -> float:
    """How far the parameters are from one process after three steps of a compiled optimizer."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    reference = Mlp().double()
    model = parallelize(copy.deepcopy(reference), mesh, UP_DOWN)
    for one in (reference, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=False)
        step: Any = optimizer.step if one is reference else torch.compile(optimizer.step, backend="aot_eager")
        for _ in range(3):
            one(numbers(4, 8, seed=1)).square().sum().backward()
            step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(apart(whole(param), wanted) for param, wanted in pairs)


@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_an_optimizer_step_can_be_compiled() -> None:
    assert max(run_ranks(2, compiled_steps)) < 1e-12
