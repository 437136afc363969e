"""Attention over sequences that are sharded over ranks, compared with one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from messages import list_problems
from ranks import fake_world, run_ranks
from tensors import compute_difference, random_tensor
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from tp_compare import OperationRecorder

import namedmesh
from namedmesh import training
from namedmesh._errors import ShapeError
from namedmesh._torch.modules import attend_lower_right
from namedmesh.training import context

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HEADS = 8


def make_full_tensors(length: int, kv_heads: int) -> list[Tensor]:
    """Return query, key, value, and the weights of the output in a loss."""
    shapes = [(2, heads, length, 4) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [random_tensor(*shape, seed=length + number) for number, shape in enumerate(shapes)]


def check(
    mesh: DeviceMesh,
    length: int,
    *,
    kv_heads: int = HEADS // 2,
    attend: Any = training.context_attention,
    **options: Any,
) -> None:
    """Output and gradients of this rank's shard equal one process."""
    *full_inputs, weights = make_full_tensors(length, kv_heads)
    for tensor in full_inputs:
        tensor.requires_grad_()
    q, k, v = full_inputs
    expected = F.scaled_dot_product_attention(
        q,
        k,
        v,
        options.get("attn_mask"),
        is_causal=options["is_causal"],
        enable_gqa=kv_heads != HEADS,
    )
    (expected * weights).sum().backward()
    detached = [tensor.detach() for tensor in full_inputs]
    *shards, positions = training.shard_sequence(*detached, mesh=mesh, dim=2)
    q, k, v = (shard.requires_grad_() for shard in shards)
    output = attend(q, k, v, mesh, **options)
    (output * weights[:, :, positions]).sum().backward()
    pairs: list[Any] = [(output, expected)]
    for shard, full in zip(shards, full_inputs, strict=True):
        pairs.append((shard.grad, full.grad))
    for local, full in pairs:
        assert compute_difference(local, full[:, :, positions]) < 1e-13, (mesh, length, options)


def check_layouts_and_options() -> None:
    layouts: list[dict[str, Any]] = [{"cp": 4}, {"cp": 2, "tp": 2}]
    for sizes in layouts:
        mesh = namedmesh.init_mesh(**sizes, device="cpu")
        flags = (True, False)
        for causal, ulysses, kv_heads, length in product(flags, flags, (HEADS, HEADS // 2), (16, 24)):
            check(mesh["cp"], length, kv_heads=kv_heads, is_causal=causal, ulysses=ulysses)
        if sizes == {"cp": 4}:
            for ulysses in flags:
                mask = make_document_mask(16)
                check(mesh["cp"], 16, is_causal=False, ulysses=ulysses, attn_mask=mask)
            check_dropout(mesh["cp"])
            check_gathered_tensors_are_freed(mesh["cp"])
        mesh.close()


def check_compiled_code_and_dispatch_modes() -> None:
    """Results equal one process, and no mask for all queries is materialized."""
    mesh = namedmesh.init_mesh(cp=2, device="cpu")

    def attend_on_global_mesh(q: Tensor, k: Tensor, v: Tensor, _: DeviceMesh, **options: Any) -> Tensor:
        return training.context_attention(q, k, v, mesh["cp"], **options)

    def attend_with_recomputation(*args: Any, **options: Any) -> Any:
        policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return checkpoint(
            training.context_attention, *args, use_reentrant=False, context_fn=policy, **options
        )

    def attend_and_count_flops(*args: Any, **options: Any) -> Tensor:
        with FlopCounterMode(display=False):
            return training.context_attention(*args, **options)

    for causal, ulysses in ((True, False), (False, True)):
        torch._dynamo.reset()
        compiled = torch.compile(attend_on_global_mesh, backend="aot_eager", fullgraph=True)
        for attend in (compiled, attend_with_recomputation, attend_and_count_flops):
            check(mesh["cp"], 8, attend=attend, is_causal=causal, ulysses=ulysses)
    length = 4096
    full_inputs = [random_tensor(1, 1, length, 8, seed=seed) for seed in range(3)]
    q, k, v, positions = training.shard_sequence(*full_inputs, mesh=mesh["cp"], dim=2)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]  # torch's
        output = training.context_attention(q, k, v, mesh["cp"])
    q, k, v = full_inputs
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert compute_difference(output, expected[:, :, positions]) < 1e-13
    assert largest.numel <= length * length / 8
    torch.distributed.barrier()
    mesh.close()


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
def test_compiled_code_and_dispatch_modes_equal_one_process() -> None:
    run_ranks(2, check_compiled_code_and_dispatch_modes)


def test_lower_right_attention_runs_under_a_dispatch_mode() -> None:
    q, k, v, _ = make_full_tensors(10, HEADS // 2)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for num_queries in (6, 10):
        with FlopCounterMode(display=False):
            output = attend_lower_right(q[:, :, -num_queries:], k, v, None)
        assert compute_difference(output, expected[:, :, -num_queries:]) < 1e-13


def make_document_mask(length: int) -> Tensor:
    """Return a causal mask within documents of five tokens."""
    document = torch.arange(length) // 5
    return (document[:, None] == document) & torch.ones(length, length, dtype=torch.bool).tril()


def check_dropout(mesh: DeviceMesh) -> None:
    q, k, v = (torch.ones(1, HEADS, 4, 4) for _ in range(3))
    output = training.context_attention(q, k, v, mesh, ulysses=True, dropout_p=0.9)
    assert output.eq(0).any()
    # Neither is supported with the other options' default values.
    invalid: dict[str, Any] = {"attn_mask": make_document_mask(16), "dropout_p": 0.5}
    for name, value in invalid.items():
        with pytest.raises(ShapeError, match=name):
            training.context_attention(q, k, v, mesh, **{name: value})


def check_gathered_tensors_are_freed(mesh: DeviceMesh) -> None:
    """All-gathered keys and values, and masks, do not live until the backward."""
    q, k, v, _, _ = training.shard_sequence(*make_full_tensors(64, HEADS), mesh=mesh, dim=2)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    storages: list[StorageWeakRef] = []
    gather = context._gather_keys_and_values

    def record_storages(*args: Any, **options: Any) -> list[Tensor]:
        gathered = gather(*args, **options)
        storages.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in gathered)
        return gathered

    with mock.patch.object(context, "_gather_keys_and_values", record_storages):
        output = training.context_attention(q, k, v, mesh)
        assert [storage.expired() for storage in storages] == [True, True, True]
        output.sum().backward()
        assert [storage.expired() for storage in storages] == [True] * 6


def record_collectives() -> list[list[str]]:
    """Return the collectives of a forward, of its backward, and of a forward without gradients."""
    mesh = namedmesh.init_mesh(cp=2, device="cpu")["cp"]
    shards = training.shard_sequence(*make_full_tensors(16, HEADS)[:3], mesh=mesh, dim=2)[:3]
    q, k, v = (shard.requires_grad_() for shard in shards)
    recorded: list[list[str]] = []
    for ulysses in (False, True):
        with OperationRecorder() as forward:
            output = training.context_attention(q, k, v, mesh, ulysses=ulysses)
        with OperationRecorder() as backward:
            output.sum().backward()
        with (
            OperationRecorder() as inference,
            torch.no_grad(),
            mock.patch.object(context, "RecomputedTensors", None),
        ):
            training.context_attention(q, k, v, mesh, ulysses=ulysses)
        for recorder in (forward, backward, inference):
            names = [name for name in recorder.names if name.startswith(("all_", "reduce_", "_allgather"))]
            recorded.append([name for name in names if name != "all_to_all"])
    torch.distributed.barrier()
    return recorded


def test_one_collective_carries_keys_and_values() -> None:
    gather, exchange = ["all_gather_into_tensor"], ["all_to_all_single"]
    backward = [*gather, "reduce_scatter_tensor"]
    for recorded in run_ranks(2, record_collectives):
        assert [[name.removesuffix("_out") for name in names] for names in recorded] == [
            gather,
            backward,
            gather,
            exchange * 2,
            exchange * 2,
            exchange * 2,
        ]


def check_recomputation_around_attention() -> None:
    """A checkpoint around the attention frees the query and the output of the kernel, too."""
    mesh = namedmesh.init_mesh(cp=2, device="cpu")["cp"]
    *full, weights = make_full_tensors(16, HEADS)
    *shards, positions = training.shard_sequence(*full, mesh=mesh, dim=2)
    results = []
    for recomputes in (False, True):
        q, k, v = (shard.clone().requires_grad_() for shard in shards)
        kept: list[StorageWeakRef] = []

        def block(q: Tensor, k: Tensor, v: Tensor, kept: list[StorageWeakRef] = kept) -> Tensor:
            query = q * 2
            output = training.context_attention(query, k * 2, v * 2, mesh)
            kept.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (query, output))
            return output * output

        if recomputes:
            output = checkpoint(block, q, k, v, use_reentrant=False)
            assert [storage.expired() for storage in kept] == [True, True]
        else:
            output = block(q, k, v)
        (output * weights[:, :, positions]).sum().backward()
        results.append([q.grad, k.grad, v.grad])
    for plain, recomputed in zip(*results, strict=True):
        assert plain is not None
        assert torch.equal(plain, recomputed)
    torch.distributed.barrier()


def test_a_checkpoint_around_attention_keeps_nothing_of_it() -> None:
    run_ranks(2, check_recomputation_around_attention)


def check_autocast() -> list[float]:
    """Keys and values of other dtypes than the query have the result of one process."""
    mesh = namedmesh.init_mesh(cp=2, device="cpu")["cp"]
    full = [tensor.float() for tensor in make_full_tensors(16, HEADS)[:3]]
    full[2] = full[2].bfloat16()
    q, k, v, positions = training.shard_sequence(*full, mesh=mesh, dim=2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(full[0], full[1], full[2], is_causal=True)
        output = training.context_attention(q, k, v, mesh)
    torch.distributed.barrier()
    return [compute_difference(output, expected[:, :, positions])]


def test_autocast_casts_as_in_one_process() -> None:
    for differences in run_ranks(2, check_autocast):
        assert max(differences) < 2e-2


def test_attention_equals_one_process() -> None:
    run_ranks(4, check_layouts_and_options)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [[0, 1, 6, 7], [1, 2, 7, 8], [0, 1, 6, 7]]),
        (1, [[2, 3, 4, 5], [3, 4, 5, 6], [2, 3, 4, 5]]),
    ],
)
def test_each_rank_gets_an_early_and_a_late_chunk(rank: int, expected: list[list[int]]) -> None:
    tokens = torch.arange(8)[None]
    with fake_world(2, rank):
        mesh = namedmesh.init_mesh(cp=2, device="cpu")
        shards = training.shard_sequence(tokens, tokens + 1, mesh=mesh["cp"])
        assert [shard.flatten().tolist() for shard in shards] == expected
        mesh.close()


def test_lengths_and_heads_that_cannot_be_sharded_are_errors() -> None:
    tokens = torch.arange(8)[None]
    query, key = torch.zeros(1, 3, 3, 4), torch.zeros(1, 1, 3, 4)
    with fake_world(2):
        mesh = namedmesh.init_mesh(cp=2, device="cpu")
        calls = (
            lambda: training.shard_sequence(tokens[:, :6], mesh=mesh["cp"]),
            lambda: training.shard_sequence(tokens, tokens[:, :4], mesh=mesh["cp"]),
            lambda: training.context_attention(query, key, key, mesh["cp"], ulysses=True),
        )
        problems = list(map(list_problems, calls))
        mesh.close()
    lengths = "the lengths along dim 1 must be equal and a multiple of 4, got {}; pad the sequences"
    assert problems == [
        [lengths.format([6])],
        [lengths.format([4, 8])],
        [
            "query must have two chunks of equal length, got 3 tokens; shard the sequence with shard_sequence",
            "3 heads and 1 kv heads are not divisible by 2 ranks; pass ulysses=False",
        ],
    ]
