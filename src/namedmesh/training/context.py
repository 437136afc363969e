"""Context parallelism: each rank of ``cp`` has a shard of every sequence."""

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
    mesh = one_axis(mesh, "cp", "shard_sequence")
    num_chunks = 2 * mesh.size()
    lengths = sorted({tensor.shape[dim] for tensor in tensors})
    if len(lengths) != 1 or lengths[0] % num_chunks:
        raise ShapeError(
            f"the lengths along dim {dim} must be equal and a multiple of {num_chunks}, got {lengths}; "
            "pad the sequences"
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
    mesh = one_axis(mesh, "cp", "context_attention")
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
            "attn_mask takes the place of is_causal=True; pass is_causal=False, and a causal mask if "
            "attention is causal"
        )
    if problems:
        raise ShapeError(*problems)
    if ulysses:
        query, key, value = (_exchange_for_heads(tensor, mesh) for tensor in (query, key, value))
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
        return _exchange_for_tokens(output, mesh)
    if attn_mask is not None:
        # The rows of the mask belong to queries, which are sharded. Its columns belong to the keys.
        attn_mask = shard_sequence(attn_mask, mesh=mesh, dim=-2)[0]
    attend = partial(_attend_to_gathered, mesh, scale, is_causal, attn_mask)
    if torch.compiler.is_compiling():
        # The compiler's partitioner decides which tensors are saved for the backward.
        return attend(query, key, value)
    result = checkpoint(
        attend,
        query,
        key,
        value,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, _save_attention_outputs),
    )
    return cast("Tensor", result)


def _save_attention_outputs(_: object, operation: Any, *__: object, **___: object) -> CheckpointPolicy:
    """Save outputs of attention kernels for the backward, and recompute the all-gathers."""
    # Each kernel is an operator of its own. All of them have this word in their name.
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
    """Return the attention of the local queries to all keys, which are all-gathered.

    Args:
        mesh: the mesh of the cp axis.
        scale: the factor of the scores.
        is_causal: whether attention is causal in the full sequence.
        mask: the rows of the mask that belong to the local queries, if attention is not causal.
        query: the local queries: two chunks of the sequence.
        key: the local keys.
        value: the local values.
    """
    ranks = mesh.size()
    key = _all_gather_sequence(key, mesh)
    value = _all_gather_sequence(value, mesh)
    if not is_causal:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=gqa, scale=scale)
    chunk_size = query.shape[2] // 2
    attend = _attend_by_blocks if query.is_cpu else attend_lower_right
    outputs: list[Tensor] = []
    # Each chunk attends to the keys up to its own end. Together, the two chunks of every rank have
    # the same number of keys.
    chunks = _chunks_of_rank(mesh.get_local_rank(), ranks)
    for chunk, queries in zip(chunks, query.chunk(2, dim=2), strict=True):
        end = (chunk + 1) * chunk_size
        outputs.append(attend(queries, key[:, :, :end], value[:, :, :end], scale))
    return torch.cat(outputs, dim=2)


def _attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention of the last queries of a sequence to all of its keys, on a CPU.

    No CPU kernel has a causal mask that is aligned to the last key, so a mask is materialized. For
    all queries at once it would have as many elements as there are queries times keys. Queries are
    therefore processed in blocks.
    """
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1], "scale": scale}
    length = query.shape[2]
    end = key.shape[2]
    if length == end:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    rows = min(_QUERIES_PER_BLOCK, length)
    # The mask of each block is a view of this one: its lower right corner.
    mask = query.new_full((rows, end), -torch.inf).triu(end - rows + 1)
    outputs: list[Tensor] = []
    for start in range(0, length, rows):
        queries = query[:, :, start : start + rows]
        # The position after the block's last query, up to which it attends to keys.
        stop = end - length + start + queries.shape[2]
        block_mask = mask[rows - queries.shape[2] :, end - stop :]
        keys = key[:, :, :stop]
        values = value[:, :, :stop]
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, block_mask, **options))
    return torch.cat(outputs, dim=2)


def _all_gather_sequence(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-gather the shards of a sequence, in the original order of its tokens.

    Forward: all-gather along dim 2. Backward: reduce-scatter, as each rank's queries contribute to
    the gradients of all keys and values.
    """
    sharded = DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False)
    gathered = sharded.redistribute(placements=[Replicate()])
    return _to_sequence_order(gathered.to_local(grad_placements=[Partial()]), mesh.size())


def _exchange_for_heads(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Exchange all heads of the local shard for some heads of the full sequence.

    Forward: all-to-all from dim 2 (the sequence) to dim 1 (the heads). Backward: the reverse.
    """
    sharded_sequence = DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False)
    sharded_heads = sharded_sequence.redistribute(placements=[Shard(1)])
    return _to_sequence_order(sharded_heads.to_local(), mesh.size())


def _exchange_for_tokens(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Exchange some heads of the full sequence for all heads of the local shard.

    Forward: all-to-all from dim 1 (the heads) to dim 2 (the sequence). Backward: the reverse.
    """
    rank_order = _to_rank_order(tensor, mesh.size())
    sharded_heads = DTensor.from_local(rank_order, mesh, [Shard(1)], run_check=False)
    return sharded_heads.redistribute(placements=[Shard(2)]).to_local()


def _chunks_of_rank(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of a rank's two chunks of the full sequence."""
    return rank, 2 * ranks - 1 - rank


def _chunks_of_all_ranks(ranks: int) -> list[int]:
    """Return the indices of all chunks, in the order of the concatenated shards of all ranks."""
    order: list[int] = []
    for rank in range(ranks):
        order.extend(_chunks_of_rank(rank, ranks))
    return order


def _to_sequence_order(tensor: Tensor, ranks: int) -> Tensor:
    """Reorder the concatenated shards of all ranks along dim 2 to the original sequence."""
    order = _chunks_of_all_ranks(ranks)
    chunks = tensor.chunk(len(order), dim=2)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(len(order))], dim=2)


def _to_rank_order(tensor: Tensor, ranks: int) -> Tensor:
    """Reorder a sequence along dim 2 to the concatenated shards of all ranks."""
    order = _chunks_of_all_ranks(ranks)
    chunks = tensor.chunk(len(order), dim=2)
    return torch.cat([chunks[chunk] for chunk in order], dim=2)
