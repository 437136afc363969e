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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import namedmesh
from namedmesh import training
from namedmesh._torch import attend_lower_right
from namedmesh.errors import ShapeError
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


def test_compiled_code_and_dispatch_modes_equal_one_process() -> None:
    run_ranks(2, check_compiled_code_and_dispatch_modes)


def test_outputs_of_attention_kernels_are_saved() -> None:
    """Two of the kernels are called directly, with a causal mask that is aligned to the last key."""
    aten = torch.ops.aten
    kernels = [
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._efficient_attention_forward,
        aten._flash_attention_forward,
    ]
    policies = [context._save_attention_outputs(None, kernel.default) for kernel in kernels]
    assert policies == [CheckpointPolicy.MUST_SAVE] * 5
    assert context._save_attention_outputs(None, aten.mm.default) == CheckpointPolicy.PREFER_RECOMPUTE


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
    """All-gathered keys and values do not live until the backward."""
    q, k, v, _, _ = training.shard_sequence(*make_full_tensors(64, HEADS), mesh=mesh, dim=2)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    storages: list[StorageWeakRef] = []
    all_gather = context._all_gather_sequence

    def record_storage(*args: Any) -> Tensor:
        gathered = all_gather(*args)
        storages.append(StorageWeakRef(gathered.untyped_storage()))
        return gathered

    with mock.patch.object(context, "_all_gather_sequence", record_storage):
        output = training.context_attention(q, k, v, mesh)
        assert [storage.expired() for storage in storages] == [True, True]
        output.sum().backward()


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
