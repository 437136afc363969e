"""Random numbers: which ranks draw the same, blocks beside the default ones, and first weights."""

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
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training_checks import ON_EIGHT, ON_FOUR

import namedmesh
from namedmesh import training
from namedmesh._torch import clear_dtensor_op_cache
from namedmesh.training import seeds

if TYPE_CHECKING:
    from collections.abc import Iterator


def draw(name: str | None = None) -> float:
    with nullcontext() if name is None else training.rng_stream(name):
        return torch.rand(()).item()


def numbers_of_all() -> list[float]:
    numpys = float(np.random.rand())  # noqa: NPY002  the state that a job has
    return [random.random(), numpys, *map(draw, (None, "tensor", "expert", "data", "data"))]


def drawn(sizes: dict[str, Any], **view: Any) -> list[list[float]]:
    """What all ranks draw: by default, in Python, and from the streams of tensors and of experts."""
    found = []
    ranks = prod(sizes.values())
    for rank in range(ranks):
        with fake_world(ranks, rank):
            mesh = namedmesh.init_mesh(**sizes, device="cpu")
            if view:
                mesh.add_view("expert", **view)
            training.seed_all(7, mesh)
            found.append([draw(), random.random(), draw("tensor"), draw("expert")])
            mesh.close()
    return [list(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("sizes", [sizes for sizes, *_ in ON_FOUR + ON_EIGHT], ids=str)
def test_the_ranks_of_a_tensor_parallel_group_draw_the_same_by_default(sizes: dict[str, Any]) -> None:
    default, python, tensor, _ = drawn(sizes)
    ranks = range(len(default))
    first_of_group = [rank - rank % sizes["tp"] for rank in ranks]  # tp is the last axis everywhere
    for numbers in (default, python):
        assert [numbers.index(each) for each in numbers] == first_of_group
    assert len({*default, *tensor}) == len({*first_of_group}) + len(ranks)


@pytest.mark.parametrize(("ep", "etp", "different"), [(2, 2, 8), (2, 1, 8), (1, 1, 4)])
def test_ranks_of_one_tp_group_draw_by_their_experts(ep: int, etp: int, different: int) -> None:
    *_, experts = drawn({"dp": 4, "tp": 2}, edp=-1, ep=ep, etp=etp)
    assert len({*experts}) == different


def test_a_block_leaves_the_default_numbers_and_the_state_brings_all_back() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        training.seed_all(3, mesh)
        with training.rng_stream("tensor"), training.rng_stream("expert"):
            torch.rand(100)
        with training.rng_stream("data"):
            torch.rand(100)
        after = torch.rand(3)
        training.seed_all(3, mesh)
        with training.rng_stream("tensor"), suppress(ZeroDivisionError), training.rng_stream("expert"):
            raise ZeroDivisionError
        assert torch.equal(torch.rand(3), after)  # outside: one number was drawn for the outer block
        state = copy.deepcopy(seeds.random_state())
        assert sorted(state) == ["cpu", "data", "numpy", "python"]
        numbers = numbers_of_all()
        assert len(set(numbers)) == len(numbers)
        seeds.set_random_state(state)
        assert numbers_of_all() == numbers
        said = error_of(training.rng_stream("tenor").__enter__)
        mesh.close()
    assert said == "TrainingError: there is no stream 'tenor'; seed_all() makes tensor, expert and data"


@pytest.mark.parametrize("inside", [False, True])
def test_a_recomputation_draws_from_streams_as_the_forward_did(inside: bool) -> None:
    def layer(x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin())
        with training.rng_stream("tensor"):
            return nn.functional.dropout(x * x)

    def gradient(recompute: bool) -> Tensor:
        training.seed_all(0, mesh)
        x = torch.ones(64, requires_grad=True)
        with training.rng_stream("expert") if inside else nullcontext():
            out = x
            for _ in range(2):
                out = checkpoint(layer, out, use_reentrant=False) if recompute else layer(out)
        (grad,) = torch.autograd.grad(out.sum(), x)
        with training.rng_stream("tensor"):
            return torch.cat([grad, torch.rand(1)])

    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        expected, found = gradient(recompute=False), gradient(recompute=True)
        mesh.close()
    assert 0 < (expected == 0).sum() < 64
    assert torch.equal(found, expected)


def test_blocks_for_data_repeat_no_numbers_and_leave_the_order_of_samples_alone() -> None:
    with fake_world(1):
        mesh = namedmesh.init_mesh(tp=1, device="cpu")
        training.seed_all(3, mesh)
        orders, numbers = [], []
        for _ in range(2):
            with training.rng_stream("data"):  # no number of the block's own is drawn
                orders += [torch.randperm(50, generator=training.data_generator()) for _ in range(2)]
        for _ in range(2):
            with training.rng_stream("data"):
                numbers += [draw(), draw("data"), draw()]
        mesh.close()
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert len({*numbers}) == 6


class Accelerator:
    """Devices with generators, and a current device for each thread, as ``torch.cuda``."""

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


def test_an_accelerator_in_a_thread_in_a_capture_and_with_random_operations_on_dtensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda *_: fake)
    monkeypatch.setattr(torch.distributed.tensor._random, "_get_device_handle", lambda _: fake)
    monkeypatch.setattr(torch.distributed.tensor._random, "_rng_tracker", None)
    resolved = torch.device("cuda", 3)
    monkeypatch.setattr(torch.distributed.tensor._random, "_resolve_device", lambda *_, **__: resolved)
    found: list[float] = []

    def draw_on_device_3() -> None:
        for name in ("tensor", "expert"):
            with training.rng_stream(name):
                found.append(torch.rand((), generator=fake.generators[3]).item())

    with fake_world(2), monkeypatch.context() as patch:
        mesh = namedmesh.init_mesh(tp=2, device="cpu")
        mesh.device = torch.device("cuda", 3)
        broadcast = mock.Mock(side_effect=AssertionError("of rank 0's generator"))
        patch.setattr(torch.distributed, "broadcast", broadcast)
        training.seed_all(3, mesh)
        # What makes a tracker that broadcasts is that there is none.
        assert torch.distributed.tensor._random._rng_tracker is not None
        thread = threading.Thread(target=draw_on_device_3)
        thread.start()
        thread.join()
        draw_on_device_3()
        assert len({*found}) == 4
        fresh = torch.Generator().manual_seed(5).get_state()
        assert all(torch.equal(generator.get_state(), fresh) for generator in fake.generators)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        said = error_of(training.rng_stream("tensor").__enter__)
        mesh.device = torch.device("cpu")
        training.seed_all(3, mesh)
        mesh.close()
    assert said == (
        "TrainingError: rng_stream('tensor') was entered while a CUDA graph is captured, which cannot seed generators and would "
        "replay the same numbers; capture only code without rng_stream, or do not capture this step"
    )


def test_nothing_follows_the_default_device_or_type() -> None:
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
            seeds.set_random_state(seeds.random_state())
            assert training.count_tokens(3, mesh).item() == 3
            assert training.mean_loss(torch.ones((), device="cpu"), mesh).item() == 1
            training.check_same_batch([1], mesh)
        finally:
            torch.set_default_device("cpu")
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        mesh.close()
    assert torch.equal(layer.weight, expected)


class Fused(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.scale = nn.Parameter(torch.empty(()))


def test_megatrons_shards_are_shards_of_the_same_weights() -> None:
    whole = Fused(8, 6)
    training.init_parameters(whole, 1, distribution=lambda *_: (0.5, 2.0))
    assert len(whole.weight.unique()) == 48
    for rank in range(2):
        with fake_world(2, rank):
            mesh = namedmesh.init_mesh(tp=2, device="cpu")
            mesh.add_view("expert", ep=2, etp=1)
            rows, columns, expert = Fused(4, 6), Fused(8, 3), Fused(8, 6)
            for module, dim, stride in ((rows, 0, 2), (columns, 1, 1), (expert, 0, 1)):
                marks: dict[str, Any] = {"tensor_model_parallel": True, "allreduce": module is not expert}
                marks |= {"partition_dim": dim, "partition_stride": stride}
                for name, value in marks.items():
                    setattr(module.weight, name, value)
                training.init_parameters(module, 1, distribution=lambda *_: (0.5, 2.0))
                assert torch.equal(module.scale, whole.scale)
            blocks = whole.weight.unflatten(0, (2, 2, 2))[:, rank].flatten(0, 1)
            assert torch.equal(rows.weight, blocks)
            assert torch.equal(columns.weight, whole.weight.chunk(2, 1)[rank])
            assert torch.equal(expert.weight, whole.weight)  # cut over etp, which is 1
            mesh.close()


class Drawn(TorchDispatchMode):
    """Counts the random numbers that are drawn."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


# The shape, the placements over dp and tp, and the number of tiles that a rank may draw.
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


def test_first_weights_are_shards_of_those_of_one_process_and_no_rank_draws_all() -> None:
    for shape, placements, tiles in SHARDED:
        whole = nn.ParameterDict({"w": nn.Parameter(torch.empty(shape))})
        training.init_parameters(whole, 1, distribution=lambda *_: (0.5, 2.0))
        assert len(whole["w"].unique()) > whole["w"].numel() * 0.97
        for rank in range(4):
            with fake_world(4, rank):
                clear_dtensor_op_cache()  # those of another rank, on an equal mesh
                mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
                expected, empty = (
                    distribute_tensor(full, mesh["dp", "tp"], placements, src_data_rank=None)
                    for full in (whole["w"].detach(), torch.zeros(shape))
                )
                sharded = nn.ParameterDict({"w": nn.Parameter(empty)})
                with Drawn() as drawn:  # type: ignore[no-untyped-call]  # torch's
                    training.init_parameters(sharded, 1, distribution=lambda *_: (0.5, 2.0))
                assert torch.equal(sharded["w"].to_local(), expected.to_local()), (shape, placements)
                assert drawn.count <= tiles * 8192, (shape, placements)
                mesh.close()


def test_rows_that_pad_a_vocabulary_leave_the_others_as_they_are() -> None:
    short, long = nn.Embedding(100, 300), nn.Embedding(128, 300)
    for embedding in (short, long):
        training.init_parameters(embedding, 0)
    assert torch.equal(short.weight, long.weight[:100])


def test_first_weights_have_the_distribution_and_the_name_of_the_parameter() -> None:
    layer: Any = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100))
    training.init_parameters(layer, 0)
    assert layer[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer[0].bias.tolist() + layer[1].bias.tolist() == [0] * 200
    assert layer[1].weight.tolist() == [1] * 100
    first = layer[0].weight.clone()
    compiled: Any = torch.compile(layer, backend="eager")
    training.init_parameters(compiled, 0)
    assert torch.equal(layer[0].weight, first)
    training.init_parameters(layer.double(), 0)
    assert torch.equal(layer[0].weight.float(), first)
    training.init_parameters(layer, 1)
    assert not torch.equal(layer[0].weight.float(), first)
    with torch.device("meta"):
        nothing = nn.Linear(2, 2)
    wrong: Any = object()
    said = error_of(lambda: training.init_parameters(nn.Linear(1, 1), wrong))
    assert said == (
        "TrainingError: seed of init_parameters must be an int, got object; "
        "call init_parameters(model, seed=0)"
    )
    assert error_of(lambda: training.init_parameters(nothing, 0)) == (
        "TrainingError: weight, bias: on the meta device; call model.to_empty(device=...) first"
    )
