"""``trace`` reports exactly the collectives of a step, by an independent calculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import capture_printed
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from tp_models import Mlp

import namedmesh
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

DIM, HIDDEN, ROWS = 8, 16, 3


def train(model: nn.Module) -> list[torch.Tensor]:
    """Return the output, the gradients of the input and of the local parameters of one step."""
    x = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM).requires_grad_()
    out = model(x)
    out.square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    return [out, x.grad, *(getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads)]


def trace_step(axis: str) -> Any:
    """Return the calls of a step, what is printed, and whether the values are those without a trace."""
    sizes: Any = {axis: 2, "pp": 1}
    mesh = namedmesh.init_mesh(**sizes, device="cpu")
    torch.manual_seed(0)
    model: Any = Mlp(DIM, HIDDEN)
    if axis == "tp":
        parallelize(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    train(model)  # the first step of a model compares its weights
    model.zero_grad()
    expected = [value.clone() for value in train(model)]
    model.zero_grad()

    def run() -> tuple[list[torch.Tensor], Any]:
        with namedmesh.trace(mesh) as report:
            values = train(model)
        return values, report.calls

    (values, calls), printed, _ = capture_printed(run)
    equal = all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))
    return [tuple(call) for call in calls], printed, equal


def test_a_step_of_tensor_parallelism_sums_the_output_and_the_gradient_of_the_input() -> None:
    activation = 4 * ROWS * DIM
    expected = [
        ("tp", "forward", "all-reduce", "Mlp.down", activation),
        ("tp", "backward", "all-reduce", "Mlp.up", activation),
    ]
    (calls, printed, equal), (other_calls, nothing, other_equal) = run_ranks(2, trace_step, "tp")
    assert calls == other_calls == expected
    assert equal
    assert other_equal
    assert nothing == ""
    assert printed == (
        "axes       phase     collective      calls          bytes  most of them from\n"
        "tp         forward   all-reduce          1             96  Mlp.down 96\n"
        "tp         backward  all-reduce          1             96  Mlp.up 96\n"
    )


def test_a_step_of_fsdp_gathers_parameters_twice_and_scatters_gradients() -> None:
    up, down = 4 * (HIDDEN * DIM + HIDDEN), 4 * (DIM * HIDDEN + DIM)
    for calls, _, equal in run_ranks(2, trace_step, "dp"):
        assert equal
        counted = sorted((call[0], call[1], call[2], call[4]) for call in calls)
        assert counted == sorted(
            [
                ("dp", "forward", "all-gather", up),
                ("dp", "forward", "all-gather", down),
                ("dp", "backward", "all-gather", up),
                ("dp", "backward", "all-gather", down),
                ("dp", "backward", "reduce-scatter", up),
                ("dp", "backward", "reduce-scatter", down),
            ]
        )


def trace_other_groups() -> list[Any]:
    """Call collectives over an axis, over all axes, and over ranks that no axes have."""
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    pair = pairs[dist.get_rank() in {1, 2}]
    x = torch.ones(6, dtype=torch.float64)

    def run() -> Any:
        with namedmesh.trace(mesh) as report:
            dist.all_reduce(x, group=pair)
            dist.broadcast(x, 0)
            dist.all_to_all_single(torch.empty_like(x), x, group=mesh.group("dp"))
            dist.all_gather([torch.empty_like(x)] * 2, x, group=mesh.group("tp"))
            if mesh.global_rank < 2:
                dist.send(x, mesh.next("dp"), group=mesh.group("dp"))
            else:
                dist.recv(x, mesh.prev("dp"), group=mesh.group("dp"))
            nn.Linear(2, 2)(torch.ones(2))
        assert {call[1:4:2] for call in report.calls} == {("other", "no module")}
        return [(call.axes, call.collective, call.num_bytes) for call in report.calls]

    calls: list[Any] = capture_printed(run)[0]
    return calls


def test_what_is_sent_over_no_axis_is_named() -> None:
    for rank, calls in enumerate(run_ranks(4, trace_other_groups)):
        assert calls == [
            ("no axis", "all-reduce", 48),
            ("dp, tp", "broadcast", 48),
            ("dp", "all-to-all", 48),
            ("tp", "all-gather", 96),
            ("dp", "send" if rank < 2 else "receive", 48),
        ]


def trace_compiled_block() -> list[tuple[str, int]]:
    """Return axes and bytes of the calls of a step whose block was compiled before."""
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    model: Any = nn.Sequential(Mlp(DIM, HIDDEN))
    parallelize(model, mesh["tp"], {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
    model[0].forward = torch.compile(model[0].forward, backend="aot_eager")
    train(model)
    with namedmesh.trace(mesh) as report:
        train(model)
    return [(call.axes, call.num_bytes) for call in report.calls]


@pytest.mark.ci
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_compiled_blocks_run_eagerly_in_a_trace() -> None:
    assert run_ranks(2, trace_compiled_block) == [[("tp", 4 * ROWS * DIM)] * 2] * 2
