"""Random values: the ranks that draw the same ones, RNG streams, and initial weights of any layout."""

from __future__ import annotations

import copy
import random
import threading
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from messages import error_of
from ranks import fake_world
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training_checks import ON_EIGHT, ON_FOUR

import namedmesh
from namedmesh import training
from namedmesh._torch.execution import torch_is_at_least
from namedmesh.training import seeds

if TYPE_CHECKING:
    from collections.abc import Iterator


def draw(stream: str | None = None) -> float:
    with nullcontext() if stream is None else training.rng_stream(stream):
        return torch.rand(()).item()


def draw_from_all_generators() -> list[float]:
    from_numpy = float(np.random.rand())  # noqa: NPY002  seed_all seeds the global generator
    return [random.random(), from_numpy, *map(draw, (None, "tensor", "expert", "data", "data"))]


def draw_on_all_ranks(sizes: dict[str, Any], **expert_view: Any) -> list[list[float]]:
    """Return the values of all ranks from torch, Python, and the streams "tensor" and "expert"."""
    by_rank: list[list[float]] = []
    world_size = prod(sizes.values())
    for rank in range(world_size):
        with fake_world(world_size, rank):
            mesh = namedmesh.init_mesh(**sizes, device="cpu")
            if expert_view:
                mesh.add_view("expert", **expert_view)
            training.seed_all(7, mesh)
            by_rank.append([draw(), random.random(), draw("tensor"), draw("expert")])
            mesh.close()
    return [list(values) for values in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("sizes", [sizes for sizes, *_ in ON_FOUR + ON_EIGHT], ids=str)
def test_default_values_are_equal_in_a_tp_group_only(sizes: dict[str, Any]) -> None:
    from_torch, from_python, from_tensor_stream, _ = draw_on_all_ranks(sizes)
    ranks = range(len(from_torch))
    first_of_group = [rank - rank % sizes["tp"] for rank in ranks]  # tp is the last axis in all layouts
    for values in (from_torch, from_python):
        assert [values.index(value) for value in values] == first_of_group
    num_different = len({*first_of_group}) + len(ranks)
    assert len({*from_torch, *from_tensor_stream}) == num_different


@pytest.mark.parametrize(("ep", "etp", "num_different"), [(2, 2, 8), (2, 1, 8), (1, 1, 4)])
def test_the_expert_stream_differs_along_ep_and_etp(ep: int, etp: int, num_different: int) -> None:
    *_, from_expert_stream = draw_on_all_ranks({"dp": 4, "tp": 2}, edp=-1, ep=ep, etp=etp)
    assert len({*from_expert_stream}) == num_different


def test_a_stream_draws_one_default_number_and_states_can_be_restored() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        training.seed_all(3, mesh)
        with training.rng_stream("tensor"), training.rng_stream("expert"):
            torch.rand(100)
        with training.rng_stream("data"):
            torch.rand(100)
        expected = torch.rand(3)
        training.seed_all(3, mesh)
        with training.rng_stream("tensor"), suppress(ZeroDivisionError), training.rng_stream("expert"):
            raise ZeroDivisionError
        # The outer block has drawn one default number, also this time.
        assert torch.equal(torch.rand(3), expected)
        state = copy.deepcopy(seeds.collect_rng_states())
        assert sorted(state) == ["cpu", "data", "numpy", "python"]
        values = draw_from_all_generators()
        assert len(set(values)) == len(values)
        seeds.restore_rng_states(state)
        assert draw_from_all_generators() == values
        text = error_of(training.rng_stream("tenor").__enter__)
        mesh.close()
    assert text == "TrainingError: stream 'tenor' does not exist; seed_all() creates tensor, expert and data"


@pytest.mark.parametrize("inside_stream", [False, True])
def test_recomputation_draws_the_same_values_from_streams(inside_stream: bool) -> None:
    def layer(x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin())
        with training.rng_stream("tensor"):
            return nn.functional.dropout(x * x)

    def compute_gradient(recompute: bool) -> Tensor:
        training.seed_all(0, mesh)
        x = torch.ones(64, requires_grad=True)
        with training.rng_stream("expert") if inside_stream else nullcontext():
            output = x
            for _ in range(2):
                output = checkpoint(layer, output, use_reentrant=False) if recompute else layer(output)
        (grad,) = torch.autograd.grad(output.sum(), x)
        with training.rng_stream("tensor"):
            return torch.cat([grad, torch.rand(1)])

    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        expected = compute_gradient(recompute=False)
        recomputed = compute_gradient(recompute=True)
        mesh.close()
    assert 0 < (expected == 0).sum() < 64
    assert torch.equal(recomputed, expected)


def test_the_data_stream_repeats_no_values_and_no_order_of_samples() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        training.seed_all(3, mesh)
        orders: list[Tensor] = []
        values: list[float] = []
        for _ in range(2):
            with training.rng_stream("data"):
                # Only the generator that seeds the stream is used inside of the block.
                orders += [torch.randperm(50, generator=training.data_generator()) for _ in range(2)]
        for _ in range(2):
            with training.rng_stream("data"):
                values += [draw(), draw("data"), draw()]
        mesh.close()
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert len({*values}) == 6


class FakeAccelerator:
    """A device module with four devices, and a current device per thread, like ``torch.cuda``."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(5) for _ in range(4)]
        self.thread = threading.local()

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.thread.current = device.index
        yield
        self.thread.current = 0

    def manual_seed(self, seed: int) -> None:
        self.generators[getattr(self.thread, "current", 0)].manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        state: Tensor = self.generators[device.index].get_state()
        return state

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.generators[device.index].set_state(state)

    def is_available(self) -> bool:
        return True


@pytest.mark.skipif(not torch_is_at_least("2.13"), reason="torch 2.12 reads RNG states of a real device")
def test_streams_seed_an_accelerator_in_every_thread_but_not_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda *_: fake)
    monkeypatch.setattr(torch.distributed.tensor._random, "_get_device_handle", lambda _: fake)
    monkeypatch.setattr(torch.distributed.tensor._random, "_rng_tracker", None)
    device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.distributed.tensor._random, "_resolve_device", lambda *_, **__: device)
    values: list[float] = []

    def draw_on_device_3() -> None:
        for name in ("tensor", "expert"):
            with training.rng_stream(name):
                values.append(torch.rand((), generator=fake.generators[3]).item())

    with fake_world(2), monkeypatch.context() as patch:
        mesh = namedmesh.init_mesh(tp=2, device="cpu")
        mesh.device = device
        broadcast = mock.Mock(side_effect=AssertionError("the generator of rank 0 is broadcast"))
        patch.setattr(torch.distributed, "broadcast", broadcast)
        training.seed_all(3, mesh)
        # If there were no tracker, torch would create one that broadcasts.
        assert torch.distributed.tensor._random._rng_tracker is not None
        thread = threading.Thread(target=draw_on_device_3)
        thread.start()
        thread.join()
        draw_on_device_3()
        assert len({*values}) == 4
        fresh_state = torch.Generator().manual_seed(5).get_state()
        for generator in fake.generators:
            assert torch.equal(generator.get_state(), fresh_state)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        text = error_of(training.rng_stream("tensor").__enter__)
        mesh.device = torch.device("cpu")
        training.seed_all(3, mesh)
        mesh.close()
    assert text == (
        "TrainingError: rng_stream('tensor') was entered while a CUDA graph is captured, which cannot seed "
        "generators and would replay the same numbers; capture only code without rng_stream, or do not "
        "capture this step"
    )


def test_the_default_device_and_dtype_have_no_effect() -> None:
    layer = nn.Linear(20, 300)
    training.init_parameters(layer, 4)
    expected = layer.weight.clone()
    with fake_world(1):
        mesh = namedmesh.init_mesh(dp=1, device="cpu")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        try:
            training.seed_all(0, mesh)
            training.init_parameters(layer, 4)
            with training.rng_stream("tensor"), training.rng_stream("data"):
                pass
            seeds.restore_rng_states(seeds.collect_rng_states())
            assert training.count_tokens(3, mesh).item() == 3
            assert training.mean_loss(torch.ones((), device="cpu"), mesh).item() == 1
            training.check_same_batch([1], mesh)
        finally:
            torch.set_default_device("cpu")
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        mesh.close()
    assert torch.equal(layer.weight, expected)


class FusedLinear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.scale = nn.Parameter(torch.empty(()))


def init_with_test_distribution(module: nn.Module) -> None:
    training.init_parameters(module, 1, distribution=lambda *_: (0.5, 2.0))


def test_plain_shards_of_megatron_are_shards_of_the_full_weights() -> None:
    full = FusedLinear(8, 6)
    init_with_test_distribution(full)
    assert len(full.weight.unique()) == 48
    for rank in range(2):
        with fake_world(2, rank):
            mesh = namedmesh.init_mesh(tp=2, device="cpu")
            mesh.add_view("expert", ep=2, etp=1)
            rows, columns, expert = FusedLinear(4, 6), FusedLinear(8, 3), FusedLinear(8, 6)
            for module, dim, stride in ((rows, 0, 2), (columns, 1, 1), (expert, 0, 1)):
                weight: Any = module.weight
                weight.tensor_model_parallel = True
                weight.partition_dim = dim
                weight.partition_stride = stride
                weight.allreduce = module is not expert
                init_with_test_distribution(module)
                assert torch.equal(module.scale, full.scale)
            blocks = full.weight.unflatten(0, (2, 2, 2))[:, rank].flatten(0, 1)
            assert torch.equal(rows.weight, blocks)
            assert torch.equal(columns.weight, full.weight.chunk(2, 1)[rank])
            assert torch.equal(expert.weight, full.weight)  # sharded over etp, which has size 1
            mesh.close()


class RandomNumberCounter(TorchDispatchMode):
    """Counts the normal random numbers that are drawn."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


# The global shape, the placements over dp and tp, and the number of tiles that a rank may draw.
SHARDED: list[tuple[tuple[int, ...], list[Any], int]] = [
    ((512, 2048), [Shard(0), Shard(1)], 32),
    ((70, 603), [Shard(1), Replicate()], 6),
    ((70, 603), [Replicate(), Shard(0)], 6),
    ((70, 603), [Shard(1), Shard(1)], 6),
    ((70, 30), [_StridedShard(0, split_factor=2), Shard(0)], 2),
    ((5, 40, 300), [Shard(0), Shard(2)], 12),
    ((40, 64, 3, 3), [Shard(1), Shard(0)], 2),
    ((20_000,), [Shard(0), Shard(0)], 2),
    ((3,), [Shard(0), Shard(0)], 1),
    ((), [Replicate(), Replicate()], 1),
]


def test_initial_weights_are_shards_of_one_process_and_no_rank_draws_all() -> None:
    for shape, placements, max_tiles in SHARDED:
        full = nn.ParameterDict({"w": nn.Parameter(torch.empty(shape))})
        init_with_test_distribution(full)
        assert len(full["w"].unique()) > full["w"].numel() * 0.97
        for rank in range(4):
            with fake_world(4, rank):
                # DTensor caches layouts by mesh, and the mesh of another rank is equal to this one.
                _clear_sharding_prop_cache()
                mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
                expected, empty = (
                    distribute_tensor(tensor, mesh["dp", "tp"], placements, src_data_rank=None)
                    for tensor in (full["w"].detach(), torch.zeros(shape))
                )
                sharded = nn.ParameterDict({"w": nn.Parameter(empty)})
                with RandomNumberCounter() as counter:  # type: ignore[no-untyped-call]  # torch's
                    init_with_test_distribution(sharded)
                assert torch.equal(sharded["w"].to_local(), expected.to_local()), (shape, placements)
                assert counter.count <= max_tiles * 8192, (shape, placements)
                mesh.close()


def test_rows_that_pad_a_vocabulary_do_not_change_the_others() -> None:
    short, long = nn.Embedding(100, 300), nn.Embedding(128, 300)
    for embedding in (short, long):
        training.init_parameters(embedding, 0)
    assert torch.equal(short.weight, long.weight[:100])


def test_initial_weights_depend_on_the_seed_and_the_name_only() -> None:
    layer: Any = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100))
    training.init_parameters(layer, 0)
    assert layer[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer[0].bias.tolist() + layer[1].bias.tolist() == [0] * 200
    assert layer[1].weight.tolist() == [1] * 100
    weight = layer[0].weight.clone()
    compiled: Any = torch.compile(layer, backend="eager")
    training.init_parameters(compiled, 0)
    assert torch.equal(layer[0].weight, weight)
    training.init_parameters(layer.double(), 0)
    assert torch.equal(layer[0].weight.float(), weight)
    training.init_parameters(layer, 1)
    assert not torch.equal(layer[0].weight.float(), weight)


def test_a_wrong_seed_and_the_meta_device_are_errors() -> None:
    with torch.device("meta"):
        on_meta = nn.Linear(2, 2)
    seed: Any = object()
    assert error_of(lambda: training.init_parameters(nn.Linear(1, 1), seed)) == (
        "TrainingError: seed of init_parameters must be an int, got object; "
        "call init_parameters(model, seed=0)"
    )
    assert error_of(lambda: training.init_parameters(on_meta, 0)) == (
        "TrainingError: weight, bias: on the meta device; call model.to_empty(device=...) first"
    )


# --- complex parameters, and models on the meta device ------------------------------------------


def test_complex_parameters_get_random_imaginary_parts_of_any_layout() -> None:
    def make(rank: int, world_size: int) -> Tensor:
        _clear_sharding_prop_cache()  # a rank of another fake world has filled it
        with fake_world(world_size, rank):
            mesh = namedmesh.init_mesh(tp=world_size, device="cpu")
            model: Any = nn.Module()
            full = torch.empty(256, 8, dtype=torch.complex64)
            placement = Shard(1) if world_size > 1 else Replicate()
            model.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [placement], src_data_rank=None))
            training.init_parameters(model, seed=0, distribution=lambda *_: (1.0, 0.5))
            local: Tensor = model.weight.to_local().detach()
            mesh.close()
        return local

    full = make(0, 1)
    assert torch.equal(torch.cat([make(0, 2), make(1, 2)], dim=1), full)
    # As torch's normal_: half of the variance is in each part, and the mean is real.
    torch.testing.assert_close(full.mean(), torch.tensor(1 + 0j), atol=0.05, rtol=0)
    for part in (full.real, full.imag):
        torch.testing.assert_close(part.var(), torch.tensor(0.125), atol=0.02, rtol=0)


class Rotary(nn.Module):
    """A module with a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.ones(4), persistent=False)
        self.register_buffer("saved", torch.ones(4))


def test_a_model_on_meta_names_the_buffers_to_compute_again() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"rotary": Rotary()})
    error = error_of(lambda: training.init_parameters(model, seed=0))
    assert error == (
        "TrainingError: rotary.linear.weight, rotary.linear.bias: on the meta device; call "
        "model.to_empty(device=...) first, and then compute rotary.frequencies again: non-persistent buffers are in "
        "no checkpoint, and to_empty() leaves them uninitialized"
    )
    assert seeds.format_meta_problem(model.to_empty(device="cpu")) == ""
