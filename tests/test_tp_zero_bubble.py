"""Backward in two passes, as zero-bubble schedules do it: nothing is computed or communicated twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from ranks import TORCH, run_ranks
from tensors import apart
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

COUNTED = {"mm", "addmm", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"}


def counted(recorded: OperationRecorder) -> Counter[str]:
    """Matrix products, an added one as one, and collectives."""
    return Counter("mm" if name == "addmm" else name for name in recorded.names if name in COUNTED)


def block_plan(sequence: bool, shared: bool) -> dict[str, Any]:
    """A plan for one block, of our fast styles."""
    layout = Shard(1) if sequence else Replicate()
    # Each rank for itself is compared, without the sum of the norms' gradients.
    plan: dict[str, Any] = dict.fromkeys(("attention_norm", "ffn_norm"), NoParallel())
    for part, columns, row in (("attention", ("wq", "wk", "wv"), "wo"), ("feed_forward", ("w1", "w3"), "w2")):
        column = ColwiseParallel(input_layouts=Replicate() if shared else layout)
        plan |= {f"{part}.{name}": column for name in columns}
        plan[f"{part}.{row}"] = RowwiseParallel(output_layouts=layout)
        if shared:
            plan[part] = SharedInput(input_layouts=layout)
    return plan


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradients that one backward leaves, taken away."""
    found = []
    for parameter in model.parameters():
        found.append(tiny.shard(get_grad(parameter)))
        parameter.grad = None
    return found


def two_passes(model: nn.Module, make_input: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Counts of a backward in one pass and in two, and how far their gradients are apart."""
    value = make_input().requires_grad_()
    with OperationRecorder() as once:
        out = model(value)
        out.square().sum().backward()
    wanted = [value.grad, *gradients(model)]
    other = make_input().requires_grad_()
    with OperationRecorder() as for_input:
        out = model(other)
        inputs, groups = stage_backward_input([out.square().sum()], None, [other], model.parameters())
    with OperationRecorder() as for_weights:
        stage_backward_weight(model.parameters(), groups)
    found = [inputs[0], *gradients(model)]
    return {
        "once": dict(counted(once)),
        "twice": dict(counted(for_input) + counted(for_weights)),
        "in the second": {name for name in counted(for_weights) if name != "mm"},
        "apart": max(apart(*pair) for pair in zip(found, wanted, strict=True)),
    }


def all_passes() -> dict[str, dict[str, Any]]:
    found = {}
    for sequence in (False, True):
        for shared in (False, True):
            torch.manual_seed(0)
            plan = block_plan(sequence, shared)
            model = parallelize(Block(32, 8, 4, 48).double(), make_tp_mesh(), plan, check_gradients=False)
            found[f"{sequence=}, {shared=}"] = two_passes(
                model, lambda: torch.linspace(-1, 1, 2 * 8 * 32, dtype=torch.float64).view(2, 8, 32)
            )
    megatron.parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    layers = megatron_layers
    torch.manual_seed(0)
    up = layers.ColumnParallelLinear(8, 16, gather_output=False)
    down = layers.RowParallelLinear(16, 8, input_is_parallel=True, bias=False)
    model = Net(lambda m, x: m.down(m.up(x)[0])[0], up=up, down=down)  # of the output and a bias
    found["megatron"] = two_passes(model, lambda: torch.ones(4, 2, 8))
    return found


def test_two_passes_do_what_one_does() -> None:
    for found in run_ranks(2, all_passes):
        assert len(found) == 5
        for name, result in found.items():
            assert result["apart"] < 1e-12, (name, result)
            assert result["once"] == result["twice"], (name, result)
            assert not result["in the second"], (name, result)


SCHEDULES: dict[Any, Any] = {
    ScheduleInterleavedZeroBubble: ((0, 2), (1, 3)),
    ScheduleZBVZeroBubble: ((0, 3), (1, 2)),
}


def scheduled(kind: Any) -> float:
    """How far the gradients of a step on (pp 2, tp 2) are from those of the whole model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    mine = SCHEDULES[kind][mesh.get_local_rank("pp")]
    torch.manual_seed(0)
    reference = nn.Sequential(*(Block(16, 4, 2, 24).double() for _ in range(4)))
    models = [parallelize(copy.deepcopy(reference[i]), mesh["tp"], block_plan(False, True)) for i in mine]
    inputs = torch.randn(4, 6, 16, dtype=torch.float64)
    reference(inputs).square().sum().backward()
    stages: Any = [
        PipelineStage(model, i, 4, torch.device("cpu"), group=mesh.get_group("pp"))
        for model, i in zip(models, mine, strict=True)
    ]
    schedule = kind(stages, len(inputs), loss_fn=lambda out, _: out.square().sum(), scale_grads=False)
    schedule.step(*((inputs,) if 0 in mine else ()), target=inputs if 3 in mine else None)
    return max(max_grad_difference(model, reference[i]) for model, i in zip(models, mine, strict=True))


@pytest.mark.skipif(
    TORCH.release < (2, 13),
    reason="up to torch 2.12 the pass for the weights refuses an autograd function that is written in Python",
)
@pytest.mark.filterwarnings("default")  # torch's own, from its pipelines
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_two_passes_has_the_gradients_of_one_process(kind: Any) -> None:
    assert max(run_ranks(4, scheduled, kind)) < 1e-12
