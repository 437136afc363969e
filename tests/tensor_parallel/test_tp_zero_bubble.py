"""A backward in two passes (zero-bubble schedules) computes and communicates nothing twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import tiny
import torch
from ranks import TORCH, run_ranks
from tensors import compute_difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.tensor import Replicate, Shard
from tp_compare import OperationRecorder, get_grad, make_tp_mesh, max_grad_difference
from tp_models import Block, Net

from namedmesh.compat import megatron
from namedmesh.compat.megatron import tensor_parallel as megatron_layers
from namedmesh.tensor_parallel import ColwiseParallel, NoParallel, RowwiseParallel, SharedInput, parallelize

pytestmark = pytest.mark.ci

COUNTED = {"mm", "addmm", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"}


def count_operations(recorder: OperationRecorder) -> Counter[str]:
    """Count matrix products, with or without a sum, and collectives."""
    return Counter("mm" if name == "addmm" else name for name in recorder.names if name in COUNTED)


def make_block_plan(sequence_parallel: bool, shared_input: bool) -> dict[str, Any]:
    """Make a plan for one block; all its layers take the fast path."""
    layout = Shard(1) if sequence_parallel else Replicate()
    # The local gradients of norms are compared, without an all-reduce.
    plan: dict[str, Any] = dict.fromkeys(("attention_norm", "ffn_norm"), NoParallel())
    for module, columns, row in (
        ("attention", ("wq", "wk", "wv"), "wo"),
        ("feed_forward", ("w1", "w3"), "w2"),
    ):
        column = ColwiseParallel(input_layouts=Replicate() if shared_input else layout)
        for name in columns:
            plan[f"{module}.{name}"] = column
        plan[f"{module}.{row}"] = RowwiseParallel(output_layouts=layout)
        if shared_input:
            plan[module] = SharedInput(input_layouts=layout)
    return plan


def pop_grads(model: nn.Module) -> list[torch.Tensor]:
    """Return the local gradients of a model, and remove them."""
    grads = []
    for param in model.parameters():
        grads.append(tiny.shard(get_grad(param)))
        param.grad = None
    return grads


def compare_passes(model: nn.Module, make_input: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Run a backward in one pass and in two; return operations and the difference of gradients."""
    x = make_input().requires_grad_()
    with OperationRecorder() as one_pass:
        output = model(x)
        output.square().sum().backward()
    expected = [x.grad, *pop_grads(model)]
    x = make_input().requires_grad_()
    with OperationRecorder() as input_pass:
        output = model(x)
        input_grads, groups = stage_backward_input([output.square().sum()], None, [x], model.parameters())
    with OperationRecorder() as weight_pass:
        stage_backward_weight(model.parameters(), groups)
    grads = [input_grads[0], *pop_grads(model)]
    return {
        "one pass": dict(count_operations(one_pass)),
        "two passes": dict(count_operations(input_pass) + count_operations(weight_pass)),
        "collectives for weights": {name for name in count_operations(weight_pass) if name != "mm"},
        "difference": max(compute_difference(*pair) for pair in zip(grads, expected, strict=True)),
    }


def make_block_input() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 8 * 32, dtype=torch.float64).view(2, 8, 32)


def compare_all_passes() -> dict[str, dict[str, Any]]:
    results = {}
    for sequence_parallel, shared_input in product((False, True), (False, True)):
        torch.manual_seed(0)
        plan = make_block_plan(sequence_parallel, shared_input)
        model = parallelize(Block(32, 8, 4, 48).double(), make_tp_mesh(), plan, check_gradients=False)
        results[f"{sequence_parallel=}, {shared_input=}"] = compare_passes(model, make_block_input)
    megatron.parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    up = megatron_layers.ColumnParallelLinear(8, 16, gather_output=False)
    down = megatron_layers.RowParallelLinear(16, 8, input_is_parallel=True, bias=False)
    # Megatron's layers return an output and a bias.
    model = Net(lambda m, x: m.down(m.up(x)[0])[0], up=up, down=down)
    results["megatron"] = compare_passes(model, lambda: torch.ones(4, 2, 8))
    return results


def test_two_passes_have_the_operations_and_gradients_of_one() -> None:
    for results in run_ranks(2, compare_all_passes):
        assert len(results) == 5
        for name, result in results.items():
            assert result["difference"] < 1e-12, (name, result)
            assert result["one pass"] == result["two passes"], (name, result)
            assert not result["collectives for weights"], (name, result)


SCHEDULES: dict[Any, Any] = {
    ScheduleInterleavedZeroBubble: ((0, 2), (1, 3)),
    ScheduleZBVZeroBubble: ((0, 3), (1, 2)),
}


def compare_schedule(schedule_class: Any) -> float:
    """Return the difference of gradients on (pp 2, tp 2) from the full model in one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    local_stages = SCHEDULES[schedule_class][mesh.get_local_rank("pp")]
    torch.manual_seed(0)
    reference = nn.Sequential(*(Block(16, 4, 2, 24).double() for _ in range(4)))
    plan = make_block_plan(sequence_parallel=False, shared_input=True)
    models = {}
    stages: list[Any] = []
    for index in local_stages:
        models[index] = parallelize(copy.deepcopy(reference[index]), mesh["tp"], plan)
        group = mesh.get_group("pp")
        stages.append(PipelineStage(models[index], index, 4, torch.device("cpu"), group=group))
    inputs = torch.randn(4, 6, 16, dtype=torch.float64)
    reference(inputs).square().sum().backward()
    schedule = schedule_class(
        stages, len(inputs), loss_fn=lambda output, _: output.square().sum(), scale_grads=False
    )
    # The first stage gets the inputs, the last one the targets.
    args = (inputs,) if 0 in local_stages else ()
    schedule.step(*args, target=inputs if 3 in local_stages else None)
    return max(max_grad_difference(model, reference[index]) for index, model in models.items())


@pytest.mark.skipif(
    TORCH.release < (2, 13),
    reason="up to torch 2.12 the pass for the weights does not support autograd functions in Python",
)
@pytest.mark.filterwarnings("default")  # torch's own, from its pipelines
@pytest.mark.parametrize("schedule_class", SCHEDULES)
def test_a_zero_bubble_schedule_equals_one_process(schedule_class: Any) -> None:
    assert max(run_ranks(4, compare_schedule, schedule_class)) < 1e-12
