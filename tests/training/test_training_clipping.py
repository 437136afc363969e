"""Gradient clipping of parameters in every layout, compared with one process; and compiled steps."""

from __future__ import annotations

import logging
import math
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import tiny
import torch
from messages import error_of
from parallel import IGNORED
from ranks import fake_world, run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from namedmesh import NamedMesh


# The global shape, the dim that each axis shards, the axes of the DTensor (none for a plain tensor), and the
# attributes of the parameter.
Case = tuple[tuple[int, ...], dict[str, int], tuple[str, ...], dict[str, Any]]
ORDERS = (1.0, 2.0, math.inf)
TP_SHARD = {"tensor_model_parallel": True}
EXPERT = {"allreduce": False}
DENSE_CASES: list[Case] = [
    ((5,), {}, (), {}),
    ((4, 3), {"tp": 0}, (), TP_SHARD | {"partition_dim": 0, "partition_stride": 1}),
    ((4,), {"tp": 0}, (), {"model_parallel": True}),
    ((2,), {}, (), {"tensor_model_parallel": False, "allreduce": True, "shared": False}),
    ((4, 3), {"tp": 0}, ("tp",), {}),
    ((4, 3), {"tp": 0}, ("tp",), TP_SHARD),
    ((3,), {}, ("tp",), {}),
    ((4, 3), {"dp": 0}, ("dp",), {}),
    ((4, 4), {"dp": 0, "tp": 1}, ("dp", "tp"), {}),
    ((4, 4), {"dp": 0}, ("dp", "tp"), {}),
    ((4,), {"dp": 0}, ("dp",), {"tensor_model_parallel": False}),
    ((4, 4), {"dp": 0, "tp": 1}, ("dp",), TP_SHARD),
]
EXPERT_CASES: list[Case] = [
    ((4, 3), {"ep": 0}, ("ep",), {}),
    ((4, 4), {"edp": 1, "ep": 0}, ("edp", "ep"), {}),
    ((4, 4), {"edp": 1, "ep": 0}, ("edp",), EXPERT),
    ((4, 4, 4), {"edp": 1, "ep": 0, "etp": 2}, ("edp", "ep", "etp"), EXPERT),
    ((4, 4), {"ep": 0, "etp": 1}, (), EXPERT | TP_SHARD),
    ((4, 2), {"ep": 0}, (), EXPERT | {"tensor_model_parallel": False}),
    ((4, 4), {"ep": 0, "etp": 1}, ("ep",), EXPERT | TP_SHARD),
]


def make_param(
    local_grad: Tensor, mesh: Any, placements: list[Any], attributes: dict[str, Any]
) -> nn.Parameter:
    """Return a parameter with this local gradient: a DTensor if there is a mesh."""
    grad = local_grad.clone()
    value = torch.zeros_like(local_grad)
    if mesh is not None:
        grad = DTensor.from_local(grad, mesh, placements)
        param_placements = [
            Replicate() if isinstance(placement, Partial) else placement for placement in placements
        ]
        value = DTensor.from_local(value, mesh, param_placements)
    param = nn.Parameter(value)
    param.grad = grad
    for name, attribute in attributes.items():
        setattr(param, name, attribute)
    return param


def make_stage(mesh: NamedMesh, stage: int) -> tuple[list[Tensor], list[tuple[nn.Parameter, Tensor]]]:
    """Return the full gradients of a stage, and this rank's parameters with their local gradients.

    The local gradient of a partial one is the reduced gradient.
    """
    full_grads: list[Tensor] = []
    params: list[tuple[nn.Parameter, Tensor]] = []
    cases = DENSE_CASES + (EXPERT_CASES if "expert" in mesh.views else [])
    for shape, dims, axes, attributes in cases:
        full = random_tensor(*shape, seed=100 * stage + len(params))
        full_grads.append(full)
        local = full
        for axis, dim in dims.items():
            local = local.chunk(mesh.size(axis), dim)[mesh.rank(axis)]
        placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in axes]
        params.append((make_param(local, mesh[axes] if axes else None, placements, attributes), local))
    full = random_tensor(3, seed=99)
    full_grads.append(full)
    params.append((make_param(full / mesh.size("tp"), mesh["tp"], [Partial()], {}), full))
    if mesh.size("pp") > 1:
        shared = random_tensor(3, 2, seed=98)  # identical on all stages
        if stage == 0:
            full_grads.append(shared)
            params.append((make_param(shared, None, [], {}), shared))
        if stage == mesh.size("pp") - 1:
            attributes = {"ds_pipe_replicated": True}
            params.extend(
                [
                    (make_param(shared, None, [], {"shared": True}), shared),
                    (make_param(shared, mesh["tp"], [Replicate()], attributes), shared),
                ]
            )
    return full_grads, params


def check_norms(mesh: NamedMesh) -> list[float]:
    """Norms and scaled gradients equal the full model. Return the number of collectives and the norms."""
    full_grads: list[Tensor] = []
    for stage in range(mesh.size("pp")):
        grads, params_of_stage = make_stage(mesh, stage)
        full_grads.extend(grads)
        if stage == mesh.rank("pp"):
            local_params = params_of_stage
    params = [param for param, _ in local_params] + [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    norms: list[float] = []
    for order in (0.5, 1.0, 2.0, 3.0, math.inf):
        expected = torch.nn.utils.get_total_norm(full_grads, order)
        with CommDebugMode() as comms:
            norm = training.clip_grad_norm_(iter(params), math.inf, mesh, order)
        assert type(norm) is Tensor
        assert ((norm - expected) / expected).abs() < 1e-9
        norms.append(norm.item())
    factor = 0.7 / (torch.nn.utils.get_total_norm(full_grads) + 1e-6)
    training.clip_grad_norm_(params, 0.7, mesh, foreach=False)
    for param, local_grad in local_params:
        assert param.grad is not None
        assert compute_difference(tiny.shard(param.grad), local_grad * factor) < 1e-9
    return [comms.get_total_counts(), *norms]


def check_nonfinite_norms(mesh: NamedMesh) -> None:
    """A value on one rank that is not finite is an error on every rank, and nothing is scaled."""
    for value, order in product((math.nan, math.inf), (2.0, math.inf)):
        weight: Any = nn.Parameter(torch.zeros(2))
        weight.tensor_model_parallel = True
        weight.grad = torch.tensor([3.0, value if mesh.is_last("tp") else 4.0])
        with pytest.raises(RuntimeError) as raised:
            training.clip_grad_norm_(weight, 1.0, mesh, order, error_if_nonfinite=True)
        assert isinstance(raised.value, namedmesh.TrainingError)
        assert str(raised.value) == (
            f"the gradient norm of order {order} is {value}; skip this step, or pass error_if_nonfinite=False"
        )
        assert weight.grad[0] == 3
        norm = training.clip_grad_norm_(weight, 1.0, mesh, order)
        assert norm.isnan() if math.isnan(value) else norm.isinf()
        assert norm.dtype == torch.float32
    text = error_of(lambda: training.clip_grad_norm_(weight, 1.0, mesh, 0))
    assert text == "TrainingError: norm_type must be greater than 0, or math.inf, got 0"


def make_pipeline_mesh() -> Iterator[NamedMesh]:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    mesh.add_view("expert", pp=2, edp=2, ep=2, etp=1)
    yield mesh


def make_other_meshes() -> Iterator[NamedMesh]:
    mesh = namedmesh.init_mesh(pp=1, dp=4, tp=2)
    mesh.add_view("expert", edp=2, ep=2, etp=2)
    yield mesh
    yield namedmesh.init_mesh(namedmesh.Layout.from_order("tp-pp-dp", tp=2, pp=2, dp=2))
    # Two meshes, each on half of the ranks. torch creates both on all ranks.
    ranks = torch.arange(8).reshape(2, 1, 2, 2)
    halves = [DeviceMesh("cpu", half, mesh_dim_names=("pp", "dp", "tp")) for half in ranks]
    yield namedmesh.NamedMesh.from_device_mesh(halves[torch.distributed.get_rank() // 4])


def check_meshes(make_meshes: Any) -> list[list[float]]:
    results: list[list[float]] = []
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    with mock.patch.object(logger, "handle") as handle:
        for mesh in make_meshes():
            results.append(check_norms(mesh))
            check_nonfinite_norms(mesh)
            mesh.close()
    # torch warns if it redistributes over several axes in sequence.
    handle.assert_not_called()
    return results


@pytest.mark.ci
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("make_meshes", "expected"),
    [(make_pipeline_mesh, [3]), pytest.param(make_other_meshes, [4, 3, 2], marks=pytest.mark.slow)],
)
def test_every_element_of_the_gradient_counts_once(make_meshes: Any, expected: list[int]) -> None:
    first, *others = run_ranks(8, check_meshes, make_meshes)
    assert others == [first] * 7
    # One for each axis of several ranks that parameters are sharded over. The partial gradient is
    # reduced in the first call, whose collectives are not counted.
    assert [num_collectives for num_collectives, *_ in first] == expected


def find_norms_with_missing_gradients() -> list[list[float]]:
    """Return norms and sums of gradients, if the last rank has no gradients and an empty shard."""
    mesh = namedmesh.init_mesh(dp=1, ep=2)
    results: list[list[float]] = []
    for order in ORDERS:
        experts = make_param(torch.ones(2, 3), mesh["ep"], [Shard(0)], {})
        expert = make_param(torch.full((2,), 2.0), None, [], EXPERT)
        # One row over two ranks.
        one_row = nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh["ep"], [Shard(0)]))
        one_row.grad = distribute_tensor(torch.full((1, 2), 3.0), mesh["ep"], [Shard(0)])
        if mesh.is_last("ep"):
            experts.grad = expert.grad = None
        params = [experts, expert]
        if order != ORDERS[0]:
            params.append(one_row)
        norm = training.clip_grad_norm_(params, 0.5, mesh, order)
        sums = [tiny.shard(param.grad).sum().item() for param in params if param.grad is not None]
        results.append([norm.item(), *sums])
    mesh.close()
    return results


def test_a_rank_without_gradients_or_with_an_empty_shard_takes_part() -> None:
    first, last = run_ranks(2, find_norms_with_missing_gradients)
    for order, result_of_first, result_of_last in zip(ORDERS, first, last, strict=True):
        grads = [torch.ones(6), torch.full((2,), 2.0), torch.full((2,), 3.0)]
        if order == ORDERS[0]:
            del grads[-1]
        norm = torch.nn.utils.get_total_norm(grads, order).item()
        sums = [grad.sum().item() * 0.5 / norm for grad in grads]
        assert result_of_first == pytest.approx([norm, *sums], rel=1e-5)
        assert result_of_last == pytest.approx([norm, *[0.0] * (len(grads) - 2)], rel=1e-5)


class OperationCounter(TorchDispatchMode):
    """Counts operations, each of which is at least one kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_the_number_of_gradients() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(dp=1, device="cpu")
        for dtype in (torch.float32, torch.bfloat16):
            counts: list[int] = []
            for num_params in (2, 50):
                params = [nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(num_params)]
                for param in params:
                    param.grad = random_tensor(4, seed=num_params).to(dtype)
                with OperationCounter() as counter:  # type: ignore[no-untyped-call]
                    training.clip_grad_norm_(params, 1.0, mesh)
                counts.append(counter.count)
            assert counts[0] == counts[1] <= 12
        mesh.close()


def test_norms_of_half_precision_gradients_do_not_overflow() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(dp=1, device="cpu")
        for dtype in (torch.float16, torch.bfloat16):
            weight = nn.Parameter(torch.zeros(100, dtype=dtype))
            weight.grad = torch.full_like(weight, 15808)
            norm = training.clip_grad_norm_([weight], 1.0, mesh)
            assert norm.dtype == torch.float32
            assert norm.item() == pytest.approx(158080, rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
            assert weight.grad.double().norm().item() == pytest.approx(1, rel=1e-2)
        mesh.close()


def check_compiled_loss() -> None:
    mesh = namedmesh.init_mesh(dp=2, cp=2)
    counter = CompileCounterWithBackend("eager")
    logits = random_tensor(4, 8, seed=0).requires_grad_()
    targets = torch.tensor([1, 2, IGNORED, 3])
    num_tokens = training.count_tokens(targets != IGNORED, mesh)

    def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
        loss_sum = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return training.normalize_loss(loss_sum, num_tokens, mesh)

    compiled = torch.compile(compute_loss, backend=counter, fullgraph=True)
    for batch in (targets, targets.flip(0)):
        loss, expected = compiled(logits, batch), compute_loss(logits, batch)
        (grad,) = torch.autograd.grad(loss, logits)
        (expected_grad,) = torch.autograd.grad(expected, logits)
        assert compute_difference(loss, expected) < 1e-9
        assert compute_difference(grad, expected_grad) < 1e-9
    assert counter.frame_count == 1
    torch.distributed.barrier()
    mesh.close()


def check_compiled_clipping() -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    params = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["tp"], [Shard(0)])),
        nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["dp", "tp"], [Shard(0), Shard(0)])),
    ]

    def fill_gradients() -> None:
        for param in params:
            param.grad = torch.full_like(param, 3.0)

    def clip() -> Tensor:
        return training.clip_grad_norm_(params, 1.0, mesh)

    fill_gradients()
    expected_norm = clip()
    expected_grads = [full_tensor(param.grad).clone() for param in params]
    fill_gradients()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    norm = torch.compile(clip, backend=counter, fullgraph=True)()
    assert compute_difference(norm, expected_norm) < 1e-9
    for param, expected_grad in zip(params, expected_grads, strict=True):
        assert compute_difference(param.grad, expected_grad) < 1e-9
    assert counter.frame_count == 1
    torch.distributed.barrier()
    mesh.close()


def check_compiled_steps() -> None:
    check_compiled_loss()
    check_compiled_clipping()


@pytest.mark.slow
def test_loss_and_clipping_compile_to_one_graph_each() -> None:
    run_ranks(4, check_compiled_steps)
