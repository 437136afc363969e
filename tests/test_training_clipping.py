"""One gradient norm over parameters of every kind, and one mean of the loss: in one process, on ranks, and compiled."""

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
from tensors import apart, numbers, whole
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


# The whole shape, the dim that each axis shards, the axes of the DTensor (none for a plain tensor), and marks.
Case = tuple[tuple[int, ...], dict[str, int], tuple[str, ...], dict[str, Any]]
ORDERS = (1.0, 2.0, math.inf)
MARKED = {"tensor_model_parallel": True}
EXPERT = {"allreduce": False}
OF_DENSE: list[Case] = [
    ((5,), {}, (), {}),
    ((4, 3), {"tp": 0}, (), MARKED | {"partition_dim": 0, "partition_stride": 1}),
    ((4,), {"tp": 0}, (), {"model_parallel": True}),
    ((2,), {}, (), {"tensor_model_parallel": False, "allreduce": True, "shared": False}),
    ((4, 3), {"tp": 0}, ("tp",), {}),
    ((4, 3), {"tp": 0}, ("tp",), MARKED),
    ((3,), {}, ("tp",), {}),
    ((4, 3), {"dp": 0}, ("dp",), {}),
    ((4, 4), {"dp": 0, "tp": 1}, ("dp", "tp"), {}),
    ((4, 4), {"dp": 0}, ("dp", "tp"), {}),
    ((4,), {"dp": 0}, ("dp",), {"tensor_model_parallel": False}),
    ((4, 4), {"dp": 0, "tp": 1}, ("dp",), MARKED),
]
OF_EXPERTS: list[Case] = [
    ((4, 3), {"ep": 0}, ("ep",), {}),
    ((4, 4), {"edp": 1, "ep": 0}, ("edp", "ep"), {}),
    ((4, 4), {"edp": 1, "ep": 0}, ("edp",), EXPERT),
    ((4, 4, 4), {"edp": 1, "ep": 0, "etp": 2}, ("edp", "ep", "etp"), EXPERT),
    ((4, 4), {"ep": 0, "etp": 1}, (), EXPERT | MARKED),
    ((4, 2), {"ep": 0}, (), EXPERT | {"tensor_model_parallel": False}),
    ((4, 4), {"ep": 0, "etp": 1}, ("ep",), EXPERT | MARKED),
]


def parameter(mine: Tensor, mesh: Any, placements: list[Any], marks: dict[str, Any]) -> nn.Parameter:
    """One with a gradient of this rank's numbers; a DTensor where there is a mesh, whose dims divide."""
    grad, value = mine.clone(), torch.zeros_like(mine)
    if mesh is not None:
        grad = DTensor.from_local(grad, mesh, placements)
        replicated = [Replicate() if isinstance(each, Partial) else each for each in placements]
        value = DTensor.from_local(value, mesh, replicated)
    made = nn.Parameter(value)
    made.grad = grad
    for name, mark in marks.items():
        setattr(made, name, mark)
    return made


def gradients(mesh: NamedMesh, stage: int) -> tuple[list[Tensor], list[tuple[nn.Parameter, Tensor]]]:
    """The whole gradients of a stage, and this rank's parameters with their parts of them."""
    whole: list[Tensor] = []
    mine: list[tuple[nn.Parameter, Tensor]] = []
    for shape, cut, axes, marks in OF_DENSE + (OF_EXPERTS if "expert" in mesh.views else []):
        whole.append(numbers(*shape, seed=100 * stage + len(mine)))
        part = whole[-1]
        for axis, dim in cut.items():
            part = part.chunk(mesh.size(axis), dim)[mesh.rank(axis)]
        placements = [Shard(cut[axis]) if axis in cut else Replicate() for axis in axes]
        mine.append((parameter(part, mesh[axes] if axes else None, placements, marks), part))
    whole.append(numbers(3, seed=99))
    part = whole[-1] / mesh.size("tp")
    mine.append((parameter(part, mesh["tp"], [Partial()], {}), whole[-1]))
    if mesh.size("pp") > 1:
        first = numbers(3, 2, seed=98)  # the same on all stages
        if stage == 0:
            whole.append(first)
            mine.append((parameter(first, None, [], {}), first))
        if stage == mesh.size("pp") - 1:
            mine.append((parameter(first, None, [], {"shared": True}), first))
            mine.append((parameter(first, mesh["tp"], [Replicate()], {"ds_pipe_replicated": True}), first))
    return whole, mine


def check(mesh: NamedMesh) -> list[float]:
    """The number of collectives, and the norms; these and the scaled gradients are those of the whole model."""
    stages = [gradients(mesh, stage) for stage in range(mesh.size("pp"))]
    whole = [tensor for each, _ in stages for tensor in each]
    _, mine = stages[mesh.rank("pp")]
    parameters = [parameter for parameter, _ in mine] + [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    told = []
    for order in (0.5, 1.0, 2.0, 3.0, math.inf):
        expected = torch.nn.utils.get_total_norm(whole, order)
        with CommDebugMode() as seen:
            norm = training.clip_grad_norm_(iter(parameters), math.inf, mesh, order)
        assert type(norm) is Tensor
        assert ((norm - expected) / expected).abs() < 1e-9
        told.append(norm.item())
    factor = 0.7 / (torch.nn.utils.get_total_norm(whole) + 1e-6)
    training.clip_grad_norm_(parameters, 0.7, mesh, foreach=False)
    for parameter, tensor in mine:
        assert parameter.grad is not None
        assert apart(tiny.shard(parameter.grad), tensor * factor) < 1e-9
    return [seen.get_total_counts(), *told]


def check_not_finite(mesh: NamedMesh) -> None:
    """A number that is not one on a single rank: every rank is told, and nothing is scaled."""
    for value, order in product((math.nan, math.inf), (2.0, math.inf)):
        weight: Any = nn.Parameter(torch.zeros(2))
        weight.tensor_model_parallel = True
        weight.grad = torch.tensor([3.0, value if mesh.is_last("tp") else 4.0])
        with pytest.raises(RuntimeError) as raised:
            training.clip_grad_norm_(weight, 1.0, mesh, order, error_if_nonfinite=True)
        assert isinstance(raised.value, namedmesh.TrainingError)
        assert str(raised.value) == (
            f"the norm of order {order} of all gradients is {value}; skip this step, or pass error_if_nonfinite=False"
        )
        assert weight.grad[0] == 3
        norm = training.clip_grad_norm_(weight, 1.0, mesh, order)
        assert norm.isnan() if math.isnan(value) else norm.isinf()
        assert norm.dtype == torch.float32
    said = error_of(lambda: training.clip_grad_norm_(weight, 1.0, mesh, 0))
    assert said == "TrainingError: norm_type is 0; it must be greater than 0, or math.inf"


def meshes() -> Iterator[NamedMesh]:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    mesh.add_view("expert", pp=2, edp=2, ep=2, etp=1)
    yield mesh
    mesh = namedmesh.init_mesh(pp=1, dp=4, tp=2)
    mesh.add_view("expert", edp=2, ep=2, etp=2)
    yield mesh
    yield namedmesh.init_mesh(namedmesh.Layout.from_order("tp-pp-dp", tp=2, pp=2, dp=2))
    # Two halves of the world, each with a mesh of its own, which torch makes on all ranks.
    ranks = torch.arange(8).reshape(2, 1, 2, 2)
    halves = [DeviceMesh("cpu", half, mesh_dim_names=("pp", "dp", "tp")) for half in ranks]
    yield namedmesh.NamedMesh.from_device_mesh(halves[torch.distributed.get_rank() // 4])


def check_all() -> list[list[float]]:
    told = []
    with mock.patch.object(logging.getLogger("torch.distributed.tensor._redistribute"), "handle") as warned:
        for mesh in meshes():
            told.append(check(mesh))
            check_not_finite(mesh)
            mesh.close()
    warned.assert_not_called()  # of collectives one after the other
    return told


@pytest.mark.usefixtures("as_on_cuda")
def test_every_number_of_the_models_gradient_counts_once() -> None:
    first, *others = run_ranks(8, check_all)
    assert all(told == first for told in others)
    # One for each axis of several ranks that parameters are sharded over; the first call sums the gradient that is Partial.
    assert [collectives for collectives, *_ in first] == [3, 4, 3, 2]


def check_missing() -> list[list[float]]:
    """Norms where one rank has no gradient at all, or an empty shard: of a shard, of a marked one, and of copies."""
    mesh = namedmesh.init_mesh(dp=1, ep=2)
    axis, found = mesh["ep"], []
    for order in ORDERS:
        experts = parameter(torch.ones(2, 3), axis, [Shard(0)], {})
        expert = parameter(torch.full((2,), 2.0), None, [], EXPERT)
        # One row over two ranks.
        empty = nn.Parameter(distribute_tensor(torch.ones(1, 2), axis, [Shard(0)]))
        empty.grad = distribute_tensor(torch.full((1, 2), 3.0), axis, [Shard(0)])
        if mesh.is_last("ep"):
            experts.grad = expert.grad = None
        weights = [experts, expert] if order == ORDERS[0] else [experts, expert, empty]
        norm = training.clip_grad_norm_(weights, 0.5, mesh, order)
        grads = [each.grad for each in weights if each.grad is not None]
        found.append([norm.item(), *(tiny.shard(grad).sum().item() for grad in grads)])
    mesh.close()
    return found


def test_a_rank_without_gradients_or_with_an_empty_shard_takes_part() -> None:
    first, last = run_ranks(2, check_missing)
    for order, of_first, of_last in zip(ORDERS, first, last, strict=True):
        grads = [torch.ones(6), torch.full((2,), 2.0), torch.full((2,), 3.0)]
        if order == ORDERS[0]:
            del grads[-1]
        norm = torch.nn.utils.get_total_norm(grads, order).item()
        sums = [grad.sum().item() * 0.5 / norm for grad in grads]
        assert of_first == pytest.approx([norm, *sums], rel=1e-5)
        assert of_last == pytest.approx([norm, *[0.0] * (len(grads) - 2)], rel=1e-5)


class Operations(TorchDispatchMode):
    """Count the operations, each of which is a kernel or more on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_clipping_takes_as_many_operations_for_many_gradients_as_for_few() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(dp=1, device="cpu")
        for dtype in (torch.float32, torch.bfloat16):
            counts = []
            for number in (2, 50):
                weights = [nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(number)]
                for weight in weights:
                    weight.grad = numbers(4, seed=number).to(dtype)
                with Operations() as seen:  # type: ignore[no-untyped-call]
                    training.clip_grad_norm_(weights, 1.0, mesh)
                counts.append(seen.count)
            assert counts[0] == counts[1] <= 12
        mesh.close()


def test_norms_of_short_types_are_computed_in_float32() -> None:
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


def compiled_step() -> None:
    mesh = namedmesh.init_mesh(dp=2, cp=2)
    counter = CompileCounterWithBackend("eager")
    logits = numbers(4, 8, seed=0).requires_grad_()
    targets = torch.tensor([1, 2, IGNORED, 3])

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return training.normalize_loss(total, tokens, mesh)

    tokens = training.count_tokens(targets != IGNORED, mesh)
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for some in (targets, targets.flip(0)):
        found, expected = compiled(logits, some), loss(logits, some)
        (one,), (other,) = (torch.autograd.grad(each, logits) for each in (found, expected))
        assert max(apart(found, expected), apart(one, other)) < 1e-9
    assert counter.frame_count == 1
    torch.distributed.barrier()
    mesh.close()

    mesh = namedmesh.init_mesh(dp=2, tp=2)
    plain = nn.Parameter(torch.zeros(3))
    sharded = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["tp"], [Shard(0)]))
    both = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["dp", "tp"], [Shard(0), Shard(0)]))

    def fill() -> None:
        for parameter in (plain, sharded, both):
            parameter.grad = torch.full_like(parameter, 3.0)

    def clip() -> Tensor:
        return training.clip_grad_norm_([plain, sharded, both], 1.0, mesh)

    fill()
    expected = clip()
    scaled = [whole(parameter.grad).clone() for parameter in (plain, sharded, both)]
    fill()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    found = torch.compile(clip, backend=counter, fullgraph=True)()
    assert apart(found, expected) < 1e-9
    for parameter, other in zip((plain, sharded, both), scaled, strict=True):
        assert apart(parameter.grad, other) < 1e-9
    assert counter.frame_count == 1
    torch.distributed.barrier()
    mesh.close()


def test_loss_and_clipping_are_one_graph_each() -> None:
    run_ranks(4, compiled_step)
