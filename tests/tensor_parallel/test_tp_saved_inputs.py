"""Layers without gradients, and inputs that the backward gathers again, equal the same layers without these short cuts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import fake_world, run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from tp_compare import OperationRecorder, assert_no_difference, make_tp_mesh, parallelize_copy
from tp_models import UP_DOWN, Llama, Mlp, Net, make_llama_plan

from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, SharedInput, parallelize, styles
from namedmesh.tensor_parallel.collectives import Group, reduce_from_tp_region

IDS = torch.arange(16).view(2, 8)
SHARED = ("layers.*.attention", "layers.*.feed_forward")


def make_llamas() -> tuple[Any, Any]:
    """Return a model whose inputs are saved as they are gathered, and one that gathers them again."""
    torch.manual_seed(0)
    reference = Llama(dim=16, n_heads=4, n_kv_heads=2, hidden=12, layers=1).double()
    plan = make_llama_plan(4, 2, sequence_parallel=True)
    again = dict.fromkeys(SHARED, SharedInput(input_layouts=Shard(1), reshard_after_forward=True))
    return parallelize_copy(reference, plan), parallelize_copy(reference, plan | again)


@contextmanager
def record_inputs() -> Iterator[list[StorageWeakRef]]:
    """Record the storages of the gathered inputs."""
    storages: list[StorageWeakRef] = []
    gather = vars(styles)["enter_tp_region"]

    def record(*args: Any) -> Tensor:
        gathered: Tensor = gather(*args)
        storages.append(StorageWeakRef(gathered.untyped_storage()))
        return gathered

    with mock.patch.object(styles, "enter_tp_region", record):
        yield storages


def count_gathers(recorder: OperationRecorder) -> int:
    return recorder.names.count("all_gather_into_tensor")


def compare_gathered_inputs() -> list[float]:
    saving, gathering = make_llamas()
    gathers = []
    for model in (saving, gathering):
        with record_inputs() as storages, OperationRecorder() as forward:
            loss = full_tensor(model(IDS)).square().sum()
        is_saved = model is saving
        assert [storage.expired() for storage in storages] == [not is_saved] * 2
        with OperationRecorder() as backward:
            # A graph may be used twice.
            loss.backward(retain_graph=True)
        loss.backward()
        assert all(storage.expired() for storage in storages) or is_saved
        gathers.append((count_gathers(forward), count_gathers(backward)))
    # One more for the attention, and one for the feed-forward, not one for each linear.
    assert gathers[1] == (gathers[0][0], gathers[0][1] + 2)
    return compare_grads(gathering, saving)


def compare_grads(model: nn.Module, other: nn.Module) -> list[float]:
    differences = []
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        differences.append(compute_difference(param.grad, expected.grad))
    return differences


def test_a_gathered_input_is_gathered_again_in_the_backward() -> None:
    assert_no_difference(run_ranks(2, compare_gathered_inputs), 1e-300)


def compare_recomputed_blocks() -> list[float]:
    """Under activation checkpointing, the shard of the input is freed, too."""
    saving, gathering = make_llamas()
    for model in (saving, gathering):
        block = model.layers[0]
        shards: list[StorageWeakRef] = []

        def note_shard(_: Any, __: Any, output: Tensor, shards: list[StorageWeakRef] = shards) -> None:
            shards.append(StorageWeakRef(output.untyped_storage()))

        block.ffn_norm.register_forward_hook(note_shard)
        x = random_tensor(2, 4, 16, seed=0).requires_grad_()
        output = checkpoint(block, x, use_reentrant=False)
        assert shards[0].expired()
        output.square().sum().backward()
        assert len(shards) == 2
    return compare_grads(gathering.layers[0], saving.layers[0])


def test_a_recomputed_block_keeps_no_shard() -> None:
    assert_no_difference(run_ranks(2, compare_recomputed_blocks), 1e-300)


def compare_second_derivatives() -> list[float]:
    torch.manual_seed(0)
    reference = Mlp().double()
    plan = {
        "": SharedInput(input_layouts=Shard(1), reshard_after_forward=True),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_copy(reference, plan)
    full = random_tensor(2, 4, 8, seed=0)
    rank = torch.distributed.get_rank()
    results = []
    for trained, x in ((reference, full), (model, full.chunk(2, 1)[rank].clone())):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(trained(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append((x.grad, trained.up.weight.grad))
    (expected_x, expected_weight), (x_grad, weight_grad) = results
    assert expected_x is not None
    return [
        compute_difference(x_grad, expected_x.chunk(2, 1)[rank]),
        compute_difference(weight_grad, expected_weight),
    ]


def test_second_derivatives_of_an_input_that_is_gathered_again() -> None:
    assert_no_difference(run_ranks(2, compare_second_derivatives), 1e-10)


def compare_dtensor_inputs() -> list[float]:
    """torch's SequenceParallel returns DTensors; shards of different sizes are gathered by DTensor."""
    torch.manual_seed(0)
    reference: Any = Net(lambda m, x: m.mlp(m.norm(x)), norm=nn.LayerNorm(8), mlp=Mlp()).double()
    differences = []
    for length in (4, 5):
        plan = {
            "norm": SequenceParallel(),
            "mlp": SharedInput(input_layouts=Shard(1), reshard_after_forward=True),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        model = parallelize_copy(reference, plan)
        x = random_tensor(2, length, 8, seed=0)
        sharded = torch.distributed.tensor.distribute_tensor(x, make_tp_mesh(), [Shard(1)])
        output, expected = model(sharded), reference(x)
        for loss in (output.square().sum(), expected.square().sum()):
            loss.backward()
        differences.append(compute_difference(output, expected))
        differences += [
            compute_difference(param.grad, other.grad)
            for param, other in zip(model.parameters(), reference.parameters(), strict=True)
        ]
        reference.zero_grad()
    return differences


def test_inputs_that_are_dtensors_equal_one_process() -> None:
    assert_no_difference(run_ranks(2, compare_dtensor_inputs), 1e-11)


# --- without gradients --------------------------------------------------------------------------


def count_autograd_functions(call: Callable[[], Any]) -> int:
    """Return how often a call applies an autograd function of Python."""
    count = 0

    def profile(_frame: Any, event: str, function: Any) -> None:
        nonlocal count
        # The method of the base class in C, which up to torch 2.13 a method in Python calls.
        count += event == "c_call" and function.__name__ == "apply"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def compare_without_gradients() -> None:
    seen: list[type] = []
    for sequence in (False, True):
        torch.manual_seed(0)
        model: Any = parallelize(
            Llama(dim=16, n_heads=4, n_kv_heads=2, hidden=12, layers=1),
            make_tp_mesh(),
            make_llama_plan(4, 2, sequence_parallel=sequence),
            check_gradients=False,
        )
        feed_forward = model.layers[0].feed_forward
        feed_forward.w1.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
        assert count_autograd_functions(partial(model, IDS)) > 0
        expected = model(IDS).detach()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert count_autograd_functions(partial(model, IDS)) == 0
                output = model(IDS)
            assert torch.equal(output, expected)
            assert not output.requires_grad
    # A module that reads its DTensor input works in training and in inference.
    assert set(seen) == {DTensor}


def test_no_autograd_function_runs_without_gradients() -> None:
    run_ranks(2, compare_without_gradients)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning"
)  # torch's own
def test_forward_mode_without_gradients_is_no_zero_tangent() -> None:
    with fake_world(2):
        group = Group.of(make_tp_mesh())
        x = torch.ones(2)
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="functorch transforms"):
                torch.func.jvp(partial(reduce_from_tp_region, group=group), (x,), (x,))
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp function"):
                reduce_from_tp_region(forward_ad.make_dual(x, x), group)


@pytest.mark.slow
def test_compiled_inference_equals_eager() -> None:
    run_ranks(2, compare_compiled_inference)


def compare_compiled_inference() -> None:
    torch.manual_seed(0)
    model = parallelize(Mlp(), make_tp_mesh(), {"": SharedInput(), **UP_DOWN}, check_gradients=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
