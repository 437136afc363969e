"""Context parallelism: each rank of ``cp`` has a part of every sequence, and attention sees all of it."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from namedmesh._torch import attend_lower_right
from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.errors import ShapeError

_BLOCK = 512
"""Queries that attend at once on a CPU, where the mask of a block is materialized."""


def shard_sequence(*tensors: Tensor, mesh: AxisMesh, dim: int = 1) -> tuple[Tensor, ...]:
    """Return this rank's part of sequences, and the positions of its tokens.

    A sequence is split into two chunks for each rank, of which rank r has the r-th and the r-th from the end: causal attention is
    as much work on each.

    Args:
        *tensors: whole sequences of one length, the same on every rank of ``mesh``: tokens, targets (shifted before), masks.
        mesh: the NamedMesh, of which ``cp`` is taken, or one axis of it.
        dim: the dim of the sequence.
    """
    mesh = one_axis(mesh, "cp", "shard_sequence")
    parts = 2 * mesh.size()
    lengths = sorted({each.shape[dim] for each in tensors})
    if len(lengths) != 1 or lengths[0] % parts:
        raise ShapeError(f"lengths along dim {dim}: {lengths}; give one length, a multiple of {parts}")
    size, here = lengths[0] // parts, _chunks_of(mesh.get_local_rank(), mesh.size())
    positions = torch.cat([torch.arange(size, device=tensors[0].device) + part * size for part in here])
    shards = [torch.cat([each.narrow(dim, part * size, size) for part in here], dim) for each in tensors]
    return *shards, positions


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: AxisMesh,
    *,
    is_causal: bool = True,
    ulysses: bool = False,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention over whole sequences that :func:`shard_sequence` has sharded.

    Each rank keeps its queries, and all-gathers keys and values, once more in the backward, so that
    it keeps only its own (in compiled code the compiler decides). With ``ulysses`` an all-to-all
    gives each rank whole sequences of some heads instead. Both are torch's
    ``scaled_dot_product_attention`` between ``redistribute`` calls, with exact gradients, on any
    device, next to tensor parallelism, under activation checkpointing and in compiled code. On GPUs
    causal attention needs no mask if the flash or the efficient kernel fits. On a CPU a mask of 512
    queries and all keys is materialized. Collective: every rank of ``mesh`` must call it.

    On CUDA torch has ring attention, ``torch.distributed.tensor.experimental.context_parallel(mesh["cp"], buffers=...,
    buffer_seq_dims=...)``, with which no rank ever has all keys and values. Take it where those do not fit, for causal attention
    without masks on flash, efficient or cuDNN kernels; take this for all else.

    Args:
        query: ``(batch, heads, length / cp, head_dim)``, as what is returned.
        key: ``(batch, kv_heads, length / cp, head_dim)``; ``kv_heads`` divides ``heads``.
        value: the same.
        mesh: the NamedMesh, of which ``cp`` is taken, or one axis of it.
        is_causal: whether a token sees only what is before it, in the whole sequence.
        ulysses: exchange heads; the ranks divide the heads and the key and value heads.
        scale: as for torch's function.
        attn_mask: which keys a query sees, in place of ``is_causal``: of the whole sequence in its own order, ``(length, length)``
            or more dims in front, and the same for all heads.
        dropout_p: as for torch's function, with ``ulysses``: each rank has other heads, and draws from its default generator.

    Raises:
        ShapeError: with all problems at once.
    """
    mesh = one_axis(mesh, "cp", "context_attention")
    ranks, heads = mesh.size(), (query.shape[1], key.shape[1])
    problems = []
    if query.shape[2] % 2:
        problems.append(f"a part of {query.shape[2]} tokens is not two chunks; cut with shard_sequence")
    if ulysses and (heads[0] % ranks or heads[1] % ranks):
        problems.append(
            f"{heads[0]} heads and {heads[1]} of keys and values cannot be divided among {ranks} ranks; leave ulysses out"
        )
    if dropout_p and not ulysses:
        problems.append("dropout_p: give ulysses=True")
    if attn_mask is not None and is_causal:
        problems.append("attn_mask: give is_causal=False, and a mask that is causal where that is meant")
    if problems:
        raise ShapeError(*problems)
    if ulysses:
        query, key, value = (_in_order(_exchanged(each, mesh, 2, 1), ranks) for each in (query, key, value))
        how: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": heads[0] != heads[1], "scale": scale}
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **how)
        return _exchanged(_in_order(mixed, ranks, back=True), mesh, 1, 2)
    if attn_mask is not None:
        attn_mask = shard_sequence(attn_mask, mesh=mesh, dim=-2)[0]
    attend = partial(_attend_to_gathered, mesh, scale, is_causal, attn_mask)
    if torch.compiler.is_compiling():  # whose partitioner decides what is kept
        return attend(query, key, value)
    result = checkpoint(
        attend,
        *(query, key, value),
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, _keep_attention),
    )
    return cast("Tensor", result)


def _keep_attention(_: object, operation: Any, *__: object, **___: object) -> CheckpointPolicy:
    """Keep what the kernels of attention return; the gathered keys and values are gathered again."""
    is_attention = "attention" in str(operation)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def _attend_to_gathered(  # noqa: PLR0917  checkpoint passes the tensors by position
    mesh: DeviceMesh,
    scale: float | None,
    is_causal: bool,
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Return the attention of this rank's queries, with their rows of the mask, to all keys."""
    ranks = mesh.size()
    key, value = _gathered(key, mesh), _gathered(value, mesh)
    if not is_causal:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=gqa, scale=scale)
    size = query.shape[2] // 2
    results = []
    attend = _attend_by_blocks if query.is_cpu else attend_lower_right
    chunks = _chunks_of(mesh.get_local_rank(), ranks)
    for chunk, queries in zip(chunks, query.chunk(2, dim=2), strict=True):
        end = (chunk + 1) * size
        results.append(attend(queries, key[:, :, :end], value[:, :, :end], scale))
    return torch.cat(results, dim=2)


def _attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention of the last queries of a sequence to all of its keys.

    On a CPU no kernel has a causal mask that is aligned to the last key, so a mask is materialized.
    For all queries at once it would have as many numbers as there are queries times keys, so
    queries are taken in blocks.
    """
    how: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1], "scale": scale}
    length = query.shape[2]
    end = key.shape[2]
    if length == end:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **how)
    rows = min(_BLOCK, length)
    # The mask of each block is the lower right corner of this one: a view of it.
    mask = query.new_full((rows, end), -torch.inf).triu(end - rows + 1)
    blocks = []
    for start in range(0, length, rows):
        block = query[:, :, start : start + rows]
        stop = end - length + start + block.shape[2]
        corner = mask[rows - block.shape[2] :, end - stop :]
        seen = key[:, :, :stop], value[:, :, :stop]
        blocks.append(F.scaled_dot_product_attention(block, *seen, corner, **how))
    return torch.cat(blocks, dim=2)


def _gathered(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole sequence in its own order; each rank's queries add to its gradient."""
    whole = DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False).redistribute(
        placements=[Replicate()]
    )
    return _in_order(whole.to_local(grad_placements=[Partial()]), mesh.size())


def _exchanged(tensor: Tensor, mesh: DeviceMesh, joined: int, cut: int) -> Tensor:
    """Get all parts of one dim, and give each rank its part of another."""
    whole = DTensor.from_local(tensor, mesh, [Shard(joined)], run_check=False)
    return whole.redistribute(placements=[Shard(cut)]).to_local()


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return which chunks of the whole sequence a rank has."""
    return rank, 2 * size - 1 - rank


def _in_order(tensor: Tensor, size: int, *, back: bool = False) -> Tensor:
    """Return the sequence in its own order, from the parts of all ranks one after the other; or the inverse, ``back``."""
    order = [part for rank in range(size) for part in _chunks_of(rank, size)]
    if not back:
        order = [order.index(part) for part in range(len(order))]
    chunks = tensor.chunk(len(order), dim=2)
    return torch.cat([chunks[number] for number in order], dim=2)
