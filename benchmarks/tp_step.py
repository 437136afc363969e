"""A training step of 8 MLP blocks under tensor parallelism of 2: explicit layers, torch's styles, ours, and by hand.

Then one of a sequence-parallel Llama, against torch's styles: time, bytes sent, and activations kept.

    python benchmarks/tp_step.py [--rounds FACTOR] [--size 0|1|2]

Four models with the same weights live in the same two processes (gloo, one thread each). Every round takes
one step of each, in an order that rotates, so that all of them meet the same disturbances; a ratio is the
median over the rounds of the quotient of the two steps of one round. The explicit layers are fairscale's
ColumnParallelLinear and RowParallelLinear, as published; without fairscale they are left out. By hand: two autograd
functions on plain tensors that know nothing but this step, which is as fast as it gets.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel import parallelize_module

import namedmesh.tensor_parallel as ours

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from ranks import run_ranks
from test_tp_collectives import CASES
from test_tp_collectives import step as counted_step
from tp_models import Llama

TP_SIZE = 2
BLOCKS = 8
# hidden, feed-forward, batch, sequence, rounds
SIZES = ((64, 256, 1, 16, 300), (256, 1024, 2, 64, 120), (1024, 4096, 4, 128, 16))


class Block(nn.Module):
    """A feed-forward network with a residual connection."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return the shape (batch, sequence, hidden), in and out."""
        out: torch.Tensor = x + self.second(nn.functional.gelu(self.first(x)))
        return out


def reference(hidden: int, wide: int) -> nn.Sequential:
    """Return the unsharded model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(hidden, wide), nn.Linear(wide, hidden)) for _ in range(BLOCKS)))


def explicit(hidden: int, wide: int) -> nn.Module:
    """Return Fairscale's layers, filled with the reference's weights."""
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    model = nn.Sequential(
        *(
            Block(
                ColumnParallelLinear(hidden, wide, gather_output=False),
                RowParallelLinear(wide, hidden, input_is_parallel=True),
            )
            for _ in range(BLOCKS)
        )
    )
    rank = dist.get_rank()
    with torch.no_grad():
        for mine, whole in zip(model.parameters(), reference(hidden, wide).parameters(), strict=True):
            shard = whole.detach()
            for dim in range(mine.ndim):
                if mine.shape[dim] != whole.shape[dim]:
                    shard = shard.chunk(TP_SIZE, dim)[rank]
            mine.copy_(shard)
    return model


class _Column(torch.autograd.Function):
    """This rank's output features; the gradient of the input is summed while that of the weight is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_input = rows @ weight
        work = dist.all_reduce(of_input, async_op=True)
        of_weight, of_bias = rows.t() @ x.flatten(0, -2), rows.sum(0)
        work.wait()
        return of_input.view_as(x), of_weight, of_bias


class _Row(torch.autograd.Function):
    """The sum of all ranks' products."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        output = nn.functional.linear(x, weight)
        dist.all_reduce(output)
        return output.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return (rows @ weight).view_as(x), rows.t() @ x.flatten(0, -2), rows.sum(0)


class ByHand(nn.Module):
    """A layer of one of the two functions, with this rank's shard of a whole layer's parameters."""

    def __init__(self, function: Any, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        out: torch.Tensor = self.function.apply(x, self.weight, self.bias)
        return out


def by_hand(hidden: int, wide: int) -> nn.Module:
    """Return blocks of the two functions, filled with the reference's weights."""
    rank, blocks = dist.get_rank(), []
    for block in reference(hidden, wide):
        first: Any = block.first
        second: Any = block.second
        mine = ByHand(_Column, first.weight.chunk(TP_SIZE, 0)[rank], first.bias.chunk(TP_SIZE)[rank])
        blocks.append(Block(mine, ByHand(_Row, second.weight.chunk(TP_SIZE, 1)[rank], second.bias)))
    return nn.Sequential(*blocks)


def contestants(hidden: int, wide: int, mesh: Any) -> dict[str, nn.Module]:
    """Return the models by name; ours last."""
    models: dict[str, nn.Module] = {"hand": by_hand(hidden, wide)}
    if has_fairscale():
        models["explicit"] = explicit(hidden, wide)
    models["stock"] = parallelize_module(
        reference(hidden, wide), mesh, {"*.first": TorchColwise(), "*.second": TorchRowwise()}
    )
    models["ours"] = ours.parallelize(
        reference(hidden, wide), mesh, {"*.first": ours.ColwiseParallel(), "*.second": ours.RowwiseParallel()}
    )
    return models


def has_fairscale() -> bool:
    """Return whether fairscale can be imported."""
    try:
        import fairscale.nn.model_parallel  # noqa: F401
    except ImportError:
        return False
    return True


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Run forward and backward; return the gradient of the input."""
    for parameter in model.parameters():
        parameter.grad = None
    batch.grad = None
    model(batch).square().mean().backward()
    gradient: torch.Tensor | None = batch.grad
    assert gradient is not None
    return gradient


def measure(sizes: tuple[tuple[int, int, int, int, int], ...]) -> list[dict[str, list[float]]]:
    """Return one rank's seconds of every step, by contestant, for each size."""
    mesh = init_device_mesh("cpu", (TP_SIZE,), mesh_dim_names=("tp",))
    if has_fairscale():
        from fairscale.nn.model_parallel import initialize_model_parallel

        initialize_model_parallel(TP_SIZE)
    return [_measure_size(mesh, size) for size in sizes]


def _measure_size(mesh: Any, size: tuple[int, int, int, int, int]) -> dict[str, list[float]]:
    hidden, wide, batch, sequence, rounds = size
    models = contestants(hidden, wide, mesh)
    torch.manual_seed(1)
    inputs = torch.randn(batch, sequence, hidden, requires_grad=True)
    _check_agreement(models, inputs)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for name in names * 3:
        step(models[name], inputs)
    for turn in range(rounds):
        shift = turn % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn // len(names) % 2 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            step(models[name], inputs)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _check_agreement(models: dict[str, nn.Module], inputs: torch.Tensor) -> None:
    """Check that the contestants do the same work, or the figures mean nothing."""
    results = {name: step(model, inputs).clone() for name, model in models.items()}
    weights = {name: _local_gradients(model) for name, model in models.items()}
    for name in models:
        torch.testing.assert_close(results[name], results["ours"], rtol=1e-4, atol=1e-7)
        for one, other in zip(weights[name], weights["ours"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def _local_gradients(model: nn.Module) -> list[torch.Tensor]:
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return gradients


def _milliseconds(seconds: list[float] | None, width: int) -> str:
    return "-".rjust(width) if seconds is None else f"{statistics.median(seconds) * 1e3:{width}.2f}"


def _ratio(seconds: dict[str, list[float]], name: str, width: int, of: str = "ours") -> str:
    if name not in seconds:
        return "-".rjust(width)
    pairs = zip(seconds[of], seconds[name], strict=True)
    return f"{statistics.median(mine / theirs for mine, theirs in pairs):{width}.2f}"


# hidden, feed-forward, heads, kv heads, batch, sequence, rounds
LLAMAS = (
    (64, 192, 8, 4, 1, 32, 120),
    (256, 768, 8, 4, 2, 64, 60),
    (768, 2048, 12, 4, 2, 256, 8),
)


def measure_llamas(rounds: float) -> list[tuple[dict[str, list[float]], float, float]]:
    """Return one rank's seconds of every step, and our bytes sent and kept over torch's, for each size."""
    mesh = init_device_mesh("cpu", (TP_SIZE,), mesh_dim_names=("tp",))
    found = []
    for dim, wide, heads, kv_heads, batch, sequence, turns in LLAMAS:
        torch.manual_seed(0)
        model = Llama(vocab=256, dim=dim, n_heads=heads, n_kv_heads=kv_heads, hidden=wide)
        case = CASES["sequence"]
        models = {
            "stock": parallelize_module(copy.deepcopy(model), mesh, case.torchs),
            "ours": ours.parallelize(copy.deepcopy(model), mesh, case.ours),
        }
        ids = torch.randint(0, 256, (batch, sequence))
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(3 + max(3, int(turns * rounds))):
            for name in models if turn % 2 else reversed(models):
                dist.barrier()
                start = time.perf_counter()
                models[name].zero_grad()
                models[name](ids).square().mean().backward()
                seconds[name].append(time.perf_counter() - start)
        counts = {name: counted_step(one, ids, case) for name, one in models.items()}
        sent, kept = (
            getattr(counts["ours"], what) / getattr(counts["stock"], what) for what in ("sent", "kept")
        )
        found.append(({name: times[3:] for name, times in seconds.items()}, sent, kept))
    return found


def print_llamas(rounds: float) -> None:
    """Print one line for each size of the Llama."""
    print(f"\na Llama of 2 layers, sequence parallel, {TP_SIZE} ranks: ours to torch's styles with one")
    print("PrepareModuleInput for each of attention and feed-forward")
    print(f"{'size':>10} {'stock ms':>9} {'ours ms':>9} {'time':>6} {'sent':>6} {'kept':>6}")
    for size, first, second in zip(
        LLAMAS, *run_ranks(TP_SIZE, measure_llamas, rounds, timeout=1800), strict=True
    ):
        seconds = {name: list(map(max, first[0][name], second[0][name])) for name in first[0]}
        cells = [f"{size[0]}x{size[1]}".rjust(10)]
        cells += [_milliseconds(seconds[name], 9) for name in ("stock", "ours")]
        cells += [_ratio(seconds, "stock", 6), f"{first[1]:6.3f}", f"{first[2]:6.3f}"]
        print(" ".join(cells))


def main() -> None:
    """Print one line for each size."""
    parser = argparse.ArgumentParser(description="A training step under tensor parallelism of 2, on gloo.")
    parser.add_argument("--rounds", type=float, default=1.0, help="multiply the number of rounds")
    parser.add_argument("--size", type=int, choices=range(len(SIZES)), help="only this size, counted from 0")
    arguments = parser.parse_args()
    chosen = SIZES if arguments.size is None else (SIZES[arguments.size],)
    sizes = tuple((*size[:4], max(3, int(size[4] * arguments.rounds))) for size in chosen)
    work: Callable[..., list[dict[str, list[float]]]] = measure
    results = run_ranks(TP_SIZE, work, sizes, timeout=1800)
    print(f"torch {torch.__version__}, {TP_SIZE} ranks, gloo, one thread each, {BLOCKS} blocks")
    print("median milliseconds of a step, and median ratio of ours to the others within a round")
    print(
        f"{'size':>10} {'rounds':>6} {'hand':>9} {'explicit':>9} {'stock':>9} {'ours':>9} {'/hand':>6} {'/explicit':>9} {'/stock':>7} {'hand/explicit':>14}"
    )
    for size, first, second in zip(sizes, *results, strict=True):
        # A step is over when both ranks are done with it.
        seconds = {name: list(map(max, first[name], second[name])) for name in first}
        cells = [f"{size[0]}x{size[1]}".rjust(10), f"{size[4]:6d}"]
        cells += [_milliseconds(seconds.get(name), 9) for name in ("hand", "explicit", "stock", "ours")]
        cells += [
            _ratio(seconds, name, width) for name, width in (("hand", 6), ("explicit", 9), ("stock", 7))
        ]
        cells.append(_ratio(seconds, "explicit", 14, of="hand"))
        print(" ".join(cells))
    if arguments.size is None:
        print_llamas(arguments.rounds)


if __name__ == "__main__":
    main()
