"""Attention over a sequence that is spread over ranks: outputs and gradients of one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from messages import problems_of
from ranks import fake_world, run_ranks
from tensors import apart, numbers
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


def whole_tensors(length: int, kv_heads: int) -> list[Tensor]:
    heads = HEADS, kv_heads, kv_heads, HEADS
    return [numbers(2, each, length, 4, seed=length + number) for number, each in enumerate(heads)]


def check(mesh: DeviceMesh, length: int, *, attend: Any = training.context_attention, **how: Any) -> None:
    """Output and gradients are those of one process, on this rank's part."""
    kv_heads = HEADS if how.pop("same_heads") else HEADS // 2
    *whole, weights = whole_tensors(length, kv_heads)
    for each in whole:
        each.requires_grad_()
    causal, mask = how["is_causal"], how.get("attn_mask")
    q, k, v = whole
    expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=kv_heads != HEADS)
    (expected * weights).sum().backward()
    *parts, places = training.shard_sequence(*(each.detach() for each in whole), mesh=mesh, dim=2)
    q, k, v = (part.requires_grad_() for part in parts)
    got = attend(q, k, v, mesh, **how)
    (got * weights[:, :, places]).sum().backward()
    found: list[Any] = [(got, expected)]
    found += [(part.grad, each.grad) for part, each in zip(parts, whole, strict=True)]
    for one, all_ in found:
        assert apart(one, all_[:, :, places]) < 1e-13, (mesh, length, how)


def check_all() -> None:
    layouts: list[dict[str, Any]] = [{"cp": 4}, {"cp": 2, "tp": 2}]
    for sizes in layouts:
        mesh = namedmesh.init_mesh(**sizes, device="cpu")
        for causal, ulysses, same_heads, length in product(*[[True, False]] * 3, (16, 24)):
            how: dict[str, Any] = {"is_causal": causal, "ulysses": ulysses, "same_heads": same_heads}
            check(mesh["cp"], length, **how)
        if sizes == {"cp": 4}:
            for ulysses in (True, False):
                how = {"is_causal": False, "ulysses": ulysses, "same_heads": False}
                check(mesh["cp"], 16, attn_mask=within_documents(16), **how)
            check_dropout(mesh["cp"])
            check_what_is_left_of_gathered(mesh["cp"])
        mesh.close()


def check_modes() -> None:
    """Attention is that of one process in compiled code and under dispatch modes, and makes no mask for all queries."""
    mesh = namedmesh.init_mesh(cp=2, device="cpu")

    def attend_by_name(q: Tensor, k: Tensor, v: Tensor, _: DeviceMesh, **how: Any) -> Tensor:
        return training.context_attention(q, k, v, mesh["cp"], **how)

    def recompute(*args: Any, **how: Any) -> Any:
        policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return checkpoint(training.context_attention, *args, use_reentrant=False, context_fn=policy, **how)

    def count_operations(*args: Any, **how: Any) -> Tensor:
        with FlopCounterMode(display=False):
            return training.context_attention(*args, **how)

    for causal, ulysses in ((True, False), (False, True)):
        torch._dynamo.reset()
        compiled = torch.compile(attend_by_name, backend="aot_eager", fullgraph=True)
        how: dict[str, Any] = {"is_causal": causal, "ulysses": ulysses, "same_heads": False}
        for attend in (compiled, recompute, count_operations):
            check(mesh["cp"], 8, attend=attend, **how)
    length = 4096
    whole = [numbers(1, 1, length, 8, seed=number) for number in range(3)]
    *parts, places = training.shard_sequence(*whole, mesh=mesh["cp"], dim=2)
    q, k, v = parts
    with Largest() as made:  # type: ignore[no-untyped-call]  # torch's
        output = training.context_attention(q, k, v, mesh["cp"])
    q, k, v = whole
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert apart(output, expected[:, :, places]) < 1e-13
    assert made.numbers <= length * length / 8
    torch.distributed.barrier()
    mesh.close()


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_attention_in_compiled_code_and_under_dispatch_modes_is_that_of_one_process() -> None:
    run_ranks(2, check_modes)


def test_what_the_kernels_of_attention_return_is_kept() -> None:
    """Of which two are called directly where a causal mask is aligned to the last key."""
    aten = torch.ops.aten
    kernels = [
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._efficient_attention_forward,
        aten._flash_attention_forward,
    ]
    kept = [context._keep_attention(None, kernel.default) for kernel in kernels]
    assert kept == [CheckpointPolicy.MUST_SAVE] * 5
    assert context._keep_attention(None, aten.mm.default) == CheckpointPolicy.PREFER_RECOMPUTE


def test_the_kernels_of_an_accelerator_get_the_last_queries_under_a_dispatch_mode() -> None:
    q, k, v, _ = whole_tensors(10, HEADS // 2)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for queries in (6, 10):
        with FlopCounterMode(display=False):
            found = attend_lower_right(q[:, :, -queries:], k, v, None)
        assert apart(found, expected[:, :, -queries:]) < 1e-13


def within_documents(length: int) -> Tensor:
    document = torch.arange(length) // 5
    return (document[:, None] == document) & torch.ones(length, length, dtype=torch.bool).tril()


def check_dropout(mesh: DeviceMesh) -> None:
    q, k, v = (torch.ones(1, HEADS, 4, 4) for _ in range(3))
    assert training.context_attention(q, k, v, mesh, ulysses=True, dropout_p=0.9).eq(0).any()
    refused: dict[str, Any] = {"attn_mask": within_documents(16), "dropout_p": 0.5}
    for name, given in refused.items():
        with pytest.raises(ShapeError, match=name):
            training.context_attention(q, k, v, mesh, **{name: given})


def check_what_is_left_of_gathered(mesh: DeviceMesh) -> None:
    """Gathered keys and values are gone before the backward."""
    *parts, _, _ = training.shard_sequence(*whole_tensors(64, HEADS), mesh=mesh, dim=2)
    q, k, v = (each.requires_grad_() for each in parts)
    gathered: list[StorageWeakRef] = []
    real = context._in_order

    def remember(*args: Any, **how: Any) -> Tensor:
        whole = real(*args, **how)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    with mock.patch.object(context, "_in_order", remember):
        output = training.context_attention(q, k, v, mesh)
        assert [each.expired() for each in gathered] == [True, True]
        output.sum().backward()


def test_attention_is_that_of_one_process() -> None:
    run_ranks(4, check_all)


@pytest.mark.parametrize(
    ("rank", "parts"),
    [
        (0, [[0, 1, 6, 7], [1, 2, 7, 8], [0, 1, 6, 7]]),
        (1, [[2, 3, 4, 5], [3, 4, 5, 6], [2, 3, 4, 5]]),
    ],
)
def test_parts_of_a_sequence_and_what_is_refused(rank: int, parts: list[Any]) -> None:
    tokens = torch.arange(8)[None]
    query, key = torch.zeros(1, 3, 3, 4), torch.zeros(1, 1, 3, 4)
    with fake_world(2, rank):
        mesh = namedmesh.init_mesh(cp=2, device="cpu")
        found = training.shard_sequence(tokens, tokens + 1, mesh=mesh["cp"])
        assert [each.flatten().tolist() for each in found] == parts
        calls = (
            lambda: training.shard_sequence(tokens[:, :6], mesh=mesh["cp"]),
            lambda: training.shard_sequence(tokens, tokens[:, :4], mesh=mesh["cp"]),
            lambda: training.context_attention(query, key, key, mesh["cp"], ulysses=True),
        )
        told = list(map(problems_of, calls))
        mesh.close()
    lengths = "lengths along dim 1: {}; give one length, a multiple of 4"
    assert told == [
        [lengths.format([6])],
        [lengths.format([4, 8])],
        [
            "a part of 3 tokens is not two chunks; cut with shard_sequence",
            "3 heads and 1 of keys and values cannot be divided among 2 ranks; leave ulysses out",
        ],
    ]
