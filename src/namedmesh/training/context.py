"""Context parallelism: each rank of ``cp`` has a shard of every sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor

from namedmesh._errors import ShapeError
from namedmesh._torch.modules import attend_lower_right
from namedmesh._torch.tensors import RecomputedTensors
from namedmesh.mesh.internal import AxisMesh, get_axis_mesh
from namedmesh.tensor_parallel.collectives import Group, all_gather_to_tp_region, all_to_all_single
from namedmesh.tensor_parallel.layers import to_autocast_dtype

# On a CPU the causal mask of a block of this many queries is materialized, instead of the mask of all
# queries.
_QUERIES_PER_BLOCK = 512


def shard_sequence(*tensors: Tensor, mesh: AxisMesh, dim: int = 1) -> tuple[Tensor, ...]:
    """Return this rank's shards of replicated sequences, and the positions of its tokens.

    The sequence is split into two chunks per rank. Of ``n`` ranks, rank ``r`` gets chunk ``r`` and
    chunk ``2 * n - 1 - r``, so that causal attention is the same amount of work on each rank. Pass
    the positions to the model, for rotary or learned position embeddings. Does not communicate.

    Args:
        *tensors: full sequences of one length, identical on every rank of ``mesh``: tokens, targets
            (shifted by one token before they are sharded), masks.
        mesh: the NamedMesh, whose axis ``cp`` is used, or the DeviceMesh of one axis.
        dim: the dim of the sequence.

    Returns:
        The shard of each tensor, and as the last tensor the positions of its tokens in the full
        sequence.

    Raises:
        AxisError: the NamedMesh has no axis ``cp``.
        MeshError: ``mesh`` is a DeviceMesh of several axes, or something else.
        ShapeError: the lengths differ, or are no multiple of twice the number of ranks.

    Example:
        On rank 0 of ``cp=2``::

            tokens, targets, positions = shard_sequence(tokens, targets, mesh=mesh)
            positions  # [0, 1, 6, 7] if the sequence has 8 tokens
    """
    mesh = get_axis_mesh(mesh, "cp", "shard_sequence")
    num_chunks = 2 * mesh.size()
    lengths = sorted({tensor.shape[dim] for tensor in tensors})
    if len(lengths) != 1 or lengths[0] % num_chunks:
        raise ShapeError(
            f"the lengths along dim {dim} must be equal and a multiple of {num_chunks}, got "
            f"{lengths}; pad the sequences"
        )
    chunk_size = lengths[0] // num_chunks
    starts = [chunk * chunk_size for chunk in _chunks_of_rank(mesh.get_local_rank(), mesh.size())]
    chunk_positions = torch.arange(chunk_size, device=tensors[0].device)
    positions = torch.cat([chunk_positions + start for start in starts])
    shards: list[Tensor] = []
    for tensor in tensors:
        chunks = [tensor.narrow(dim, start, chunk_size) for start in starts]
        shards.append(torch.cat(chunks, dim))
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
    """Compute attention over full sequences whose shards :func:`shard_sequence` returned.

    Output and gradients equal ``scaled_dot_product_attention`` on the full sequence, on any device,
    together with tensor parallelism, under activation checkpointing and in compiled code. There are
    two algorithms:

    - By default keys and values are all-gathered. Forward: all-gather. Backward: all-gather again,
      as only local keys and values are saved (in compiled code the compiler decides), and
      reduce-scatter of their gradients.
    - With ``ulysses``, each rank computes some of the heads for the full sequence. Forward: an
      all-to-all of query, key and value, and one of the output. Backward: the reverse all-to-alls.

    On GPUs, causal attention needs no mask if the flash or the efficient kernel supports the
    inputs. On a CPU, a mask of 512 queries and all keys is materialized.

    On CUDA torch has ring attention,
    ``torch.distributed.tensor.experimental.context_parallel(mesh["cp"], buffers=...,
    buffer_seq_dims=...)``, in which no rank ever has all keys and values. Use it if they do not fit
    into memory, for causal attention without masks on the flash, efficient or cuDNN kernel. Use
    this function otherwise.

    Collective: every rank of ``mesh`` must call it.

    Args:
        query: ``(batch, heads, length / cp, head_dim)``, the shape of the result.
        key: ``(batch, kv_heads, length / cp, head_dim)``; ``kv_heads`` divides ``heads``.
        value: a tensor of the shape of ``key``.
        mesh: the NamedMesh, whose axis ``cp`` is used, or the DeviceMesh of one axis.
        is_causal: whether a token attends only to itself and to earlier tokens of the full
            sequence.
        ulysses: whether to exchange heads. The number of ranks must divide ``heads`` and
            ``kv_heads``.
        scale: the factor of the scores, as in torch's function.
        attn_mask: a mask in place of ``is_causal``, as in torch's function: of shape
            ``(..., length, length)`` for the full sequence in its original order,
            and the same for all heads.
        dropout_p: as in torch's function, with ``ulysses`` only. Each rank has different heads,
            and draws from its default generator.

    Raises:
        AxisError: the NamedMesh has no axis ``cp``.
        MeshError: ``mesh`` is a DeviceMesh of several axes, or something else.
        ShapeError: the shapes or options do not fit together. All problems are reported at once.
    """
    mesh = get_axis_mesh(mesh, "cp", "context_attention")
    ranks = mesh.size()
    heads = query.shape[1]
    kv_heads = key.shape[1]
    problems: list[str] = []
    if query.shape[2] % 2:
        problems.append(
            f"query must have two chunks of equal length, got {query.shape[2]} tokens; shard the "
            "sequence with shard_sequence"
        )
    if ulysses and (heads % ranks or kv_heads % ranks):
        problems.append(
            f"{heads} heads and {kv_heads} kv heads are not divisible by {ranks} ranks; pass ulysses=False"
        )
    if dropout_p and not ulysses:
        problems.append("dropout_p needs ulysses=True; pass it, or dropout_p=0")
    if attn_mask is not None and is_causal:
        problems.append(
            "attn_mask takes the place of is_causal=True; pass is_causal=False, and a causal "
            "mask if attention is causal"
        )
    if problems:
        raise ShapeError(*problems)
    group = Group.of(mesh)
    if ulysses:
        query, key, value = _exchange_for_heads([query, key, value], group)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal=is_causal,
            enable_gqa=heads != kv_heads,
            scale=scale,
        )
        return _exchange_for_tokens(output, group)
    if attn_mask is not None:
        # The rows of the mask belong to queries, which are sharded. Its columns belong to the keys.
        attn_mask = shard_sequence(attn_mask, mesh=mesh, dim=-2)[0]
    # Autocast would cast inside of the attention, which would then save other tensors.
    query = to_autocast_dtype(query)
    gather = partial(_gather_keys_and_values, group, query.dtype, is_causal=is_causal)
    gathered = gather(key, value)
    attend = partial(_attend_to_gathered, group, query, gathered, scale, attn_mask, is_causal=is_causal)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        # The compiler's partitioner decides which tensors are saved for the backward.
        return attend()
    with RecomputedTensors(gather, [key, value], gathered).replace_saved():
        return attend()


def _gather_keys_and_values(
    group: Group, dtype: torch.dtype, key: Tensor, value: Tensor, *, is_causal: bool
) -> list[Tensor]:
    """All-gather keys and values in one collective.

    Forward: all-gather. Backward: reduce-scatter, as each rank's queries contribute to the gradients
    of all keys and values.

    Args:
        group: the ranks.
        dtype: the dtype of the result.
        key: the local keys.
        value: the local values.
        is_causal: whether attention is causal.

    Returns:
        The keys and the values, in the order of the sequence. For causal attention on a CPU also the
        mask of a block of queries.
    """
    shards = torch.cat([key.flatten(), value.flatten()])
    gathered = all_gather_to_tp_region(shards, group, 0).view(group.size, -1)
    result: list[Tensor] = []
    for local, parts in zip((key, value), gathered.split([key.numel(), value.numel()], 1), strict=True):
        full = _join_chunks(parts.view(group.size, *local.shape))
        result.append(full.to(dtype))
    if is_causal and key.is_cpu:
        length = result[0].shape[2]
        rows = min(_QUERIES_PER_BLOCK, key.shape[2] // 2)
        result.append(key.new_full((rows, length), -torch.inf, dtype=dtype).triu(length - rows + 1))
    return result


def _attend_to_gathered(
    group: Group,
    query: Tensor,
    gathered: Sequence[Tensor],
    scale: float | None,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> Tensor:
    """Return the attention of the local queries to all keys.

    Args:
        group: the ranks.
        query: the local queries: two chunks of the sequence.
        gathered: the result of :func:`_gather_keys_and_values`.
        scale: the factor of the scores.
        mask: the rows of the mask that belong to the local queries, if attention is not causal.
        is_causal: whether attention is causal in the full sequence.
    """
    key, value, *block_mask = gathered
    if not is_causal:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=gqa, scale=scale)
    attend: Any = partial(_attend_by_blocks, *block_mask) if block_mask else attend_lower_right
    chunk_size = query.shape[2] // 2
    outputs: list[Tensor] = []
    # Each chunk attends to the keys up to its own end. Together, the two chunks of every rank have
    # the same number of keys.
    chunks = _chunks_of_rank(group.rank, group.size)
    for chunk, queries in zip(chunks, query.chunk(2, dim=2), strict=True):
        end = (chunk + 1) * chunk_size
        outputs.append(attend(queries, key[:, :, :end], value[:, :, :end], scale))
    return torch.cat(outputs, dim=2)


def _attend_by_blocks(mask: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: Any) -> Tensor:
    """Return causal attention of the last queries of a sequence to all of its keys, on a CPU.

    No CPU kernel has a causal mask that is aligned to the last key. A materialized mask for all
    queries at once would have as many elements as there are queries times keys. Queries are
    therefore processed in blocks.

    Args:
        mask: the mask of a block, for at least as many keys. The mask of each block is its lower
            right corner.
        query: the queries.
        key: the keys.
        value: the values.
        scale: the factor of the scores.
    """
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1], "scale": scale}
    length = query.shape[2]
    end = key.shape[2]
    if length == end:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    rows, columns = mask.shape
    outputs: list[Tensor] = []
    for start in range(0, length, rows):
        queries = query[:, :, start : start + rows]
        # The position after the block's last query, up to which it attends to keys.
        stop = end - length + start + queries.shape[2]
        block_mask = mask[rows - queries.shape[2] :, columns - stop :]
        keys = key[:, :, :stop]
        values = value[:, :, :stop]
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, block_mask, **options))
    return torch.cat(outputs, dim=2)


def _exchange_for_heads(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Exchange all heads of the local shards for some heads of the full sequence.

    Forward: one all-to-all for all tensors, from dim 2 (the sequence) to dim 1 (the heads).
    Backward: the reverse.
    """
    by_rank = [tensor.unflatten(1, (group.size, -1)).movedim(1, 0) for tensor in tensors]
    rows = torch.cat([tensor.flatten(1) for tensor in by_rank], dim=1)
    received = all_to_all_single(rows, group)
    sizes = [tensor[0].numel() for tensor in by_rank]
    result: list[Tensor] = []
    for tensor, part in zip(by_rank, received.split(sizes, 1), strict=True):
        result.append(_join_chunks(part.view(tensor.shape)))
    return result


def _exchange_for_tokens(tensor: Tensor, group: Group) -> Tensor:
    """Exchange some heads of the full sequence for all heads of the local shard.

    Forward: all-to-all from dim 1 (the heads) to dim 2 (the sequence). Backward: the reverse.
    """
    chunks = tensor.chunk(2 * group.size, dim=2)
    shards: list[Tensor] = []
    for rank in range(group.size):
        early, late = _chunks_of_rank(rank, group.size)
        shards.append(torch.cat([chunks[early], chunks[late]], dim=2))
    received = all_to_all_single(torch.stack(shards), group)
    return received.movedim(0, 1).flatten(1, 2)


def _chunks_of_rank(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of a rank's two chunks of the full sequence."""
    return rank, 2 * ranks - 1 - rank


def _join_chunks(shards: Tensor) -> Tensor:
    """Join the shards of all ranks along dim 2 to the sequence in its original order.

    Args:
        shards: ``(ranks, batch, heads, length / ranks, head_dim)``.
    """
    early, late = shards.chunk(2, dim=3)
    return torch.cat([*early.unbind(), *reversed(late.unbind())], dim=2)
