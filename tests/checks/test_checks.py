"""Checks compare values between ranks before a step, and change no number in any mode."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from as_cuda import NoReads
from messages import error_of
from ranks import run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from tp_compare import OperationRecorder, assert_no_difference, make_tp_mesh
from tp_models import UP_DOWN, Mlp, make_stacked_experts

import namedmesh
from namedmesh._errors import GradientError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    ExpertParallel,
    KeyValueParallel,
    LocalParameters,
    RowwiseParallel,
    parallelize,
    reduce_gradients,
)
from namedmesh.training import clip_grad_norm_

aten = torch.ops.aten


class GatedMlp(nn.Module):
    """A block with a norm, products, a gathered output and a scale: one operator of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden)) * 2.0
        return out + torch.cos(self.mix(out))


GATED_PLAN: dict[str, Any] = {
    "*.gate": ColwiseParallel(),
    "*.up": ColwiseParallel(),
    "*.down": RowwiseParallel(),
    "*.mix": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE_PLAN: dict[str, Any] = {
    "*.norm": LocalParameters(),
    "*.gate": ColwiseParallel(input_layouts=Shard(1)),
    "*.up": ColwiseParallel(input_layouts=Shard(1)),
    "*.down": RowwiseParallel(output_layouts=Shard(1)),
    "*.mix": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)),
}
X = random_tensor(2, 4, 8, seed=3)
SAVED_OPERATORS = [
    *(aten.mul.Tensor, aten.silu.default, aten._to_copy.default, aten.dot.default, aten.add.Tensor),
    *(aten.view.default, aten.t.default, aten.cos.default, aten.mm.default, aten.cat.default),
]

Forward = Callable[[Any, Tensor], Tensor]


class Blocks(nn.Sequential):
    """Two blocks, which ``run_block`` calls."""

    run_block: Any = staticmethod(lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = self.run_block(block, x)
        return x


def run_blocks(model: Any, x: Tensor, run_block: Callable[[Any, Tensor], Tensor]) -> Tensor:
    model.run_block = run_block
    out: Tensor = model(x)
    return out


def run_selectively(operators: list[Any], model: Any, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, operators)
    run = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    return run_blocks(model, x, run)


def run_with_computed_weights(model: Any, x: Tensor) -> Tensor:
    weights = {name: param * 1.0 for name, param in model.named_parameters()}
    out: Tensor = functional_call(model, weights, (x,))
    return out


def run_twice_differentiable(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out: Tensor = model(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out + grad


def run_in_bfloat16(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = model(x.float())
    return out.double()


def run_in_thread(model: Any, x: Tensor) -> Tensor:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(model(x)))
    thread.start()
    thread.join()
    return results[0]


FORWARDS: dict[str, Forward] = {
    "plain": lambda model, x: model(x),
    "checkpoint": lambda model, x: run_blocks(model, x, partial(checkpoint, use_reentrant=False)),
    "reentrant": lambda model, x: run_blocks(
        model, x.clone().requires_grad_(), partial(checkpoint, use_reentrant=True)
    ),
    "double backward": run_twice_differentiable,
    "functional_call": run_with_computed_weights,
    "bfloat16": run_in_bfloat16,
    "a thread": run_in_thread,
}
FORWARDS |= {f"saves {operator}": partial(run_selectively, [operator]) for operator in SAVED_OPERATORS}


@contextmanager
def as_while_capturing() -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


def compile_blocks(model: Any) -> Any:
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def train(
    forward: Forward,
    plan: Any,
    dtype: torch.dtype,
    *,
    check: bool,
    prepare: Callable[[Any], Any] = lambda m: m,
) -> tuple[list[Tensor], list[list[str]]]:
    """Return the parameters after three steps, and the operators of each.

    Args:
        forward: runs the model.
        plan: the plan.
        dtype: the dtype of the model.
        check: whether the ranks compare.
        prepare: changes the parallelized model.
    """
    torch.manual_seed(0)
    model: Any = parallelize(
        Blocks(GatedMlp(), GatedMlp()).to(dtype), make_tp_mesh(), plan, check_gradients=check
    )
    model = prepare(model)
    x = X.to(dtype)
    if plan is SEQUENCE_PLAN:
        x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    operators = []
    for _ in range(3):
        optimizer.zero_grad()
        # torch.compile does not run under a dispatch mode.
        recorder = OperationRecorder()
        with recorder if prepare is not compile_blocks else nullcontext():
            forward(model, x).square().mean().backward()
            optimizer.step()
        operators.append(recorder.names)
    return [full_tensor(param.detach()) for param in model.parameters()], operators


def compare_with_unchecked(**options: Any) -> bool:
    """Return whether a checked run and an unchecked one have equal parameters and operators."""
    train(check=False, **options)  # DTensor finds placements of an operator once, with further operators
    checked, checked_operators = train(check=True, **options)
    unchecked, unchecked_operators = train(check=False, **options)
    pairs = zip(checked, unchecked, strict=True)
    return checked_operators == unchecked_operators and all(
        torch.equal(first, second) for first, second in pairs
    )


def compare_modes(names: list[str], plan: Any) -> dict[str, bool]:
    results = {}
    for name in names:
        dtype = torch.float32 if name == "bfloat16" else torch.float64
        results[name] = compare_with_unchecked(forward=FORWARDS[name], plan=plan, dtype=dtype)
    return results


def compare_copies() -> dict[str, bool]:
    plain: dict[str, Any] = {"forward": FORWARDS["plain"], "plan": GATED_PLAN, "dtype": torch.float64}
    results = {"a copy": compare_with_unchecked(prepare=copy.deepcopy, **plain)}
    with as_while_capturing():
        results["while capturing"] = compare_with_unchecked(**plain)
    return results


MODES = [name for name in FORWARDS if not name.startswith("saves ")]
# One operator of each kind: a product of matrices, an element-wise one, a view, a reduction.
SOME_OPERATORS = [
    "saves aten.mm.default",
    "saves aten.mul.Tensor",
    "saves aten.view.default",
    "saves aten.dot.default",
]


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(GATED_PLAN, id="replicated"),
        pytest.param(SEQUENCE_PLAN, id="sequence", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(MODES, id="modes"),
        pytest.param(SOME_OPERATORS, id="selective"),
        pytest.param(
            [name for name in FORWARDS if name not in MODES + SOME_OPERATORS],
            id="selective, the other operators",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_checks_change_no_bit_and_no_operator(names: list[str], plan: Any) -> None:
    for results in run_ranks(2, compare_modes, names, plan):
        assert all(results.values()), results


def compare_compiled() -> bool:
    return compare_with_unchecked(
        forward=FORWARDS["plain"], plan=GATED_PLAN, dtype=torch.float64, prepare=compile_blocks
    )


@pytest.mark.ci
def test_checks_of_a_copy_and_while_capturing_change_no_bit() -> None:
    for results in run_ranks(2, compare_copies):
        assert all(results.values()), results


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_checks_of_compiled_code_change_no_bit() -> None:
    assert run_ranks(2, compare_compiled) == [True] * 2


def compare_with_one_process(forward: Forward) -> dict[str, float]:
    """Return the differences of gradients from one process, in four steps."""
    torch.manual_seed(0)
    reference = Blocks(GatedMlp(), GatedMlp()).double()
    model: Any = parallelize(copy.deepcopy(reference), make_tp_mesh(), GATED_PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    differences = {}
    for step in range(4):
        for trained in (reference, model):
            trained.zero_grad()
        reference(X).square().sum().backward()
        forward(model, X).square().sum().backward()
        optimizer.step()
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            differences[f"{step} {name}"] = compute_difference(param.grad, expected.grad)
    return differences


@pytest.mark.parametrize("operator", [aten.mul.Tensor, aten.view.default, aten.cos.default])
def test_selective_recomputation_equals_one_process(operator: Any) -> None:
    forward = partial(run_selectively, [operator])
    assert_no_difference(run_ranks(2, compare_with_one_process, forward), 1e-10)


def train_sharded_root() -> dict[str, float]:
    """Train a model that is itself a sharded layer, and one whose layers have a call each."""
    differences = {}
    for as_root in (True, False):
        torch.manual_seed(0)
        reference: Any = nn.Linear(8, 16).double() if as_root else Mlp().double()
        model = copy.deepcopy(reference)
        if as_root:
            parallelize(model, make_tp_mesh(), ColwiseParallel(output_layouts=Replicate()))
        else:
            for name, style in UP_DOWN.items():
                parallelize(model.get_submodule(name), make_tp_mesh(), style)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference)]
        for step in range(4):
            for trained, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                trained(X).square().sum().backward()
                optimizer.step()
            for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
                differences[f"{as_root} {step} {name}"] = compute_difference(param, expected)
    return differences


def test_a_model_that_is_a_sharded_layer_equals_one_process() -> None:
    assert_no_difference(run_ranks(2, train_sharded_root), 1e-10)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = make_stacked_experts()
        nn.init.normal_(self.experts.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.experts(self.first(x), torch.tensor([2, 1, 3, 2]))
        return out


def recompute_experts() -> dict[str, float]:
    """Return the differences of experts inside a checkpoint from one process, on tokens of all ranks."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    mesh.add_view("expert", edp=1, ep=2)
    torch.manual_seed(0)
    reference = Mixture().double()
    differences = {}
    for reentrant in (False, True):
        model = copy.deepcopy(reference)
        parallelize(model.experts, mesh["ep"], ExpertParallel(mesh))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rows = [random_tensor(8, 4, seed=seed) for seed in range(2)]
        reference.zero_grad()
        for row in rows:
            (reference(row).square().sum() / 2).backward()
        for step in range(3):
            model.zero_grad()
            x = rows[mesh.rank("dp")].clone().requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
            optimizer.step()
            grads = [mixture.get_parameter("experts.weight").grad for mixture in (model, reference)]
            differences[f"{reentrant} {step}"] = compute_difference(*grads)
    mesh.close()
    return differences


def test_experts_inside_a_checkpoint_equal_one_process() -> None:
    assert_no_difference(run_ranks(2, recompute_experts), 1e-10)


class LatentAttention(nn.Module):
    """Attention whose heads share a rotary key, from the last rows of a replicated projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv_a = nn.Linear(16, 32, bias=False), nn.Linear(16, 8 + 2, bias=False)
        self.kv_b, self.o = nn.Linear(8, 48, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        latent, rotary = self.kv_a(x).split([8, 2], -1)
        k, v = self.kv_b(latent).unflatten(-1, (-1, 12)).transpose(1, 2).split([6, 6], -1)
        k = torch.cat([k, rotary.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


LATENT_PLAN = {"q": ColwiseParallel(heads=4), "kv_b": ColwiseParallel(heads=4), "o": RowwiseParallel()}


def step_latent_attention(dtype: torch.dtype, fsdp: bool, scale: float) -> str:
    """Return the error of a step in which only the rotary rows have partial gradients.

    Args:
        dtype: the dtype of the model.
        fsdp: whether FSDP2 shards the model, too.
        scale: the size of the rotary rows' part of the gradient.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LatentAttention()
    with torch.no_grad():
        model.kv_a.weight[8:] *= scale
        model.q.weight.unflatten(0, (4, 8))[:, 6:] *= scale
    model = parallelize(model.to(dtype), mesh["tp"], LATENT_PLAN)  # type: ignore[assignment]
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    model(random_tensor(2, 5, 16, seed=0).to(dtype)).square().sum().backward()
    return error_of(torch.optim.SGD(model.parameters(), lr=0.0).step)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float64, 1.0), (torch.float64, 1e-3), (torch.float32, 0.1), (torch.bfloat16, 1.0)],
)
@pytest.mark.parametrize("fsdp", [False, True])
def test_partial_rows_of_a_replicated_projection_are_reported(
    dtype: torch.dtype, scale: float, fsdp: bool
) -> None:
    for message in run_ranks(2, step_latent_attention, dtype, fsdp, scale):
        assert message.startswith(
            "GradientError: kv_a.weight: replicated on the 2 ranks of tp, but the gradients"
        )


class GroupedAttention(nn.Module):
    """Attention with one head of keys and values for all queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(16, 16),
            nn.Linear(16, 4),
            nn.Linear(16, 4),
            nn.Linear(16, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


def step_grouped_attention(*, right: bool, clip: bool) -> tuple[str, float]:
    """Return the error of a step, and the difference of the gradients from one process.

    Args:
        right: whether the plan is right; otherwise each rank uses its queries with gathered keys.
        clip: whether gradients are clipped before the step.
    """
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    torch.manual_seed(0)
    reference = nn.Sequential(nn.LayerNorm(16), GroupedAttention()).double()
    model = copy.deepcopy(reference)
    keys: Any = KeyValueParallel(4, 1) if right else ColwiseParallel(output_layouts=Replicate())
    plan = {"1.q": ColwiseParallel(), "1.[kv]": keys, "1.o": RowwiseParallel()}
    parallelize(model, mesh, plan)
    for trained in (reference, model):
        trained(random_tensor(2, 5, 16, seed=0)).square().sum().backward()
    if clip:
        message = error_of(lambda: clip_grad_norm_(model.parameters(), 1e9, mesh))
    else:
        message = error_of(torch.optim.SGD(model.parameters(), lr=0.0).step)
    reduce_gradients(model)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    difference = max(compute_difference(param.grad, expected.grad) for param, expected in pairs)
    mesh.close()
    return message, difference


@pytest.mark.parametrize("clip", [False, True])
def test_a_gathered_output_that_each_rank_uses_in_part_is_reported(clip: bool) -> None:
    for message, difference in run_ranks(2, partial(step_grouped_attention, right=False, clip=clip)):
        assert message.startswith(
            "GradientError: 1.k, 1.v: the output is all-gathered over the 2 ranks of tp"
        )
        assert "KeyValueParallel" in message
        assert difference > 0.01
    for message, difference in run_ranks(2, partial(step_grouped_attention, right=True, clip=clip)):
        assert message == ""
        assert difference < 1e-12


def compare_perturbed() -> dict[str, bool]:
    """Return whether gradients that differ in one block raise, and rounding does not, by dtype."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    results = {}
    # What an element may differ by, and what it may not.
    changes = {
        torch.float64: (1e-12, 1e-6),
        torch.complex128: (1e-12, 1e-6),
        torch.float32: (1e-7, 1e-2),
        torch.complex64: (1e-7, 1e-2),
        torch.bfloat16: (1e-2, 10.0),
    }
    for dtype, (rounding, difference) in changes.items():
        for shape in ((), (3,), (5, 7), (512, 512), (1, 4096), (700, 3)):
            grad = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
            for position in range(0, max(1, grad.numel()), max(1, grad.numel() // 5)):
                for change in (rounding, difference):
                    param = nn.Parameter(torch.ones(shape, dtype=dtype))
                    param.grad = grad.clone()
                    if mesh.rank("dp"):
                        param.grad.view(-1)[position] += change
                    adopted = namedmesh.NamedMesh.from_device_mesh(mesh.device_mesh)  # for its first call
                    message = error_of(partial(clip_grad_norm_, [param], 1e9, adopted))
                    has_raised = message.startswith("GradientError: The gradients of parameters 0")
                    results[f"{dtype} {shape} {position} {change}"] = has_raised == (change == difference)
                    adopted.close()
    mesh.close()
    return results


@pytest.mark.ci
def test_every_element_of_a_gradient_is_compared_in_every_dtype() -> None:
    for results in run_ranks(2, compare_perturbed):
        assert all(results.values()), [name for name, is_right in results.items() if not is_right]


def count_host_reads() -> list[int]:
    """Return the reads by the host in the first clipping, with few and many parameters and axes."""
    counts = []
    for number, axes in ((2, ("dp",)), (200, ("dp",)), (20, ("cp", "dp", "tp"))):
        sizes: dict[str, Any] = {axis: 2 if axis == "dp" else 1 for axis in axes}
        mesh = namedmesh.init_mesh(**sizes, device="cpu")
        params = [nn.Parameter(torch.ones(4, size)) for size in range(1, number)]
        for param in params:
            param.grad = torch.ones_like(param)
        adopted = namedmesh.NamedMesh.from_device_mesh(mesh.device_mesh)
        reader = NoReads(limit=100)
        with reader:
            clip_grad_norm_(params, 1.0, adopted)
        counts.append(reader.reads)
        adopted.close()
        mesh.close()
    return counts


def test_a_compared_call_reads_two_values_whatever_the_number_of_parameters_and_axes() -> None:
    # One about names, one about values.
    assert run_ranks(2, count_host_reads) == [[2, 2, 2]] * 2


def print_uncaught_error() -> str:
    """Return the text that the interpreter prints for the uncaught error of a step."""
    torch.manual_seed(0)
    model = parallelize(LatentAttention().double(), make_tp_mesh(), LATENT_PLAN)
    model(random_tensor(2, 5, 16, seed=0)).square().sum().backward()
    printed = io.StringIO()
    try:
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    except GradientError as error:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    return printed.getvalue()


def test_one_rank_prints_the_whole_error() -> None:
    first, second = run_ranks(2, print_uncaught_error)
    assert "Traceback" in first
    assert "LocalParameters(), which all-reduces its gradients" in first
    assert second.startswith("GradientError on rank 1: kv_a.weight: replicated on the 2 ranks of tp")
    assert second.endswith("(rank 0 prints all of it)\n")
    assert second.count("\n") == 1
