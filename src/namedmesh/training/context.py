"""Context parallelism: each rank of ``cp`` has a part of every sequence, and attention sees all of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from namedmesh._torch import has_attention_with_lse
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import RankGroup, gather_parts
from namedmesh.tensor_parallel.regions import exchange
from namedmesh.training.context_pieces import attend_in_pieces, chunks_of, rank_order, whole_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh


def shard_sequence(
    *tensors: Tensor,
    mesh: DeviceMesh,
    dim: int = 1,
    balanced: bool = True,
    pad: Sequence[float] | None = None,
) -> tuple[Tensor, ...]:
    """Return this rank's part of sequences, and the positions of its tokens.

    In balanced order a sequence is split into two chunks for each rank, of which rank r has the r-th and the r-th
    from the end: causal attention is as much work on each. Otherwise rank r has the r-th of as many chunks as ranks.

    The silent mistakes it prevents: rotary or learned positions that start from 0 on every rank; and targets
    shifted after the cut instead of before it, so that the last token of each chunk gets the wrong next one.
    Shift first: the ``targets`` of ``tokens`` are tokens from one further on, and are sharded like these.

    Args:
        *tensors: whole sequences of one length, the same on every rank of ``mesh``: tokens, targets, masks.
        mesh: ``mesh["cp"]``.
        dim: the dim of the sequence.
        balanced: the order; pass the same to :func:`context_attention`.
        pad: what to append to each tensor until its length divides, such as ``(0, -100)`` for tokens and targets.

    Returns:
        The parts, in the order of the tensors, and the positions in the whole sequence: ``(length / cp,)``.

    Raises:
        ShapeError: the length is not the same, or cannot be divided evenly and there is no ``pad``; all problems
            at once.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(cp=1, device="cpu")
        >>> tokens, positions = shard_sequence(torch.tensor([[5, 6, 7]]), mesh=mesh["cp"], pad=(0,))
        >>> tokens, positions
        (tensor([[5, 6, 7, 0]]), tensor([0, 1, 2, 3]))
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    parts = mesh.size() * (2 if balanced else 1)
    lengths = {each.shape[dim] for each in tensors}
    problems = []
    if len(lengths) != 1:
        problems.append(
            f"the lengths along dim {dim} are {sorted(lengths)}; give at least one tensor, all of one length"
        )
    if pad is not None and len(pad) != len(tensors):
        problems.append(f"pad has {len(pad)} values for {len(tensors)} tensors; give one for each")
    over = [length for length in sorted(lengths) if length % parts]
    if over and pad is None:
        problems.append(
            f"a sequence of {over[0]} cannot be split into {parts} equal chunks for {mesh.size()} ranks; give pad, a value "
            f"for each tensor, or sequences whose length is a multiple of {parts}"
        )
    if problems:
        raise ShapeError(*problems)
    (length,) = lengths
    size = -(-length // parts)
    mine = chunks_of(mesh.get_local_rank(), mesh.size(), balanced=balanced)
    filled = [
        each if length == size * parts else _padded(each, dim, size * parts, pad[index] if pad else 0)
        for index, each in enumerate(tensors)
    ]
    shards = [torch.cat([each.narrow(dim, part * size, size) for part in mine], dim) for each in filled]
    device = tensors[0].device
    positions = torch.cat([torch.arange(part * size, (part + 1) * size, device=device) for part in mine])
    return *shards, positions


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh,
    *,
    is_causal: bool = True,
    balanced: bool = True,
    ulysses: bool = False,
    length: int | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention over whole sequences of which each rank has a part, as :func:`shard_sequence` gives it.

    Each rank keeps its queries. The other ranks send it keys and values, and once more in the backward, so that it keeps its own
    only (in compiled code the compiler decides, but for causal attention on the CPU). With ``ulysses`` an all-to-all gives each
    rank whole sequences of some heads instead, and another one takes the result back. Both are exact, have exact gradients, and
    go together with tensor parallelism: the heads are then those of this ``tp`` rank. Where the device has it, torch's ring
    attention can do instead:
    ``with torch.distributed.tensor.experimental.context_parallel(mesh["cp"], buffers=..., buffer_seq_dims=...)``.

    The silent mistakes it prevents: attention within each rank's part only, which trains without complaint; and
    keys and values whose gradients leave out what the other ranks' queries add.

    Args:
        query: ``(batch, heads, length / cp, head_dim)``.
        key: ``(batch, kv_heads, length / cp, head_dim)``; ``kv_heads`` divides ``heads``.
        value: the same.
        mesh: ``mesh["cp"]``.
        is_causal: whether a token sees only what is before it, in the whole sequence.
        balanced: the order of :func:`shard_sequence`.
        ulysses: exchange heads; the ranks divide the heads and the key and value heads.
        length: the length of the sequence before it was padded; needed where not ``is_causal``, since padding
            would be seen.
        scale: as for ``torch.nn.functional.scaled_dot_product_attention``.
        attn_mask: which keys a query sees, such as those of its document or of a window before it, in place of ``is_causal``:
            of the whole sequence in its own order, ``(length, length)`` or more dims in front, and the same for all heads.
        dropout_p: as for torch's function, with ``ulysses``: each rank has other heads, and draws from its default generator.

    Returns:
        ``(batch, heads, length / cp, head_dim)``, this rank's part of what one process computes.

    Raises:
        ShapeError: the parts cannot be those of one sequence, or the heads do not divide, or there is dropout
            without ``ulysses``, or a mask beside ``is_causal``; all problems at once.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(cp=1, device="cpu")
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8)
        >>> whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(context_attention(q, k, v, mesh["cp"]), whole, atol=1e-6)
        True
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    ranks = RankGroup(mesh)
    problems = _shape_problems(query, key, value, ranks, balanced=balanced, ulysses=ulysses)
    problems += _way_problems(attn_mask, dropout_p, is_causal=is_causal, ulysses=ulysses)
    if problems:
        raise ShapeError(*problems)
    if attn_mask is not None:
        padding = query.shape[2] * ranks.size - attn_mask.shape[-2]
        attn_mask = F.pad(attn_mask, (0, 0, 0, padding), value=1)
    if ulysses:
        gqa = query.shape[1] != key.shape[1]
        query, key, value = (
            whole_order(_exchanged(each, ranks, 1, 2), ranks.size, balanced=balanced)
            for each in (query, key, value)
        )
        if not is_causal:
            key, value = key[:, :, :length], value[:, :, :length]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=gqa, scale=scale
        )
        return _exchanged(rank_order(mixed, ranks.size, balanced=balanced), ranks, 2, 1)
    if is_causal and has_attention_with_lse(query, value):
        return attend_in_pieces(query, key, value, ranks, balanced=balanced, scale=scale)
    if is_causal:
        seen = _causal(query.shape[2], ranks, balanced=balanced)
    elif attn_mask is None:
        seen = [(length, None)]
    else:
        seen = [(length, shard_sequence(attn_mask, mesh=mesh, dim=-2, balanced=balanced)[0])]
    attend = partial(_attend_to_gathered, ranks=ranks, balanced=balanced, scale=scale, seen=seen)
    if torch.compiler.is_compiling():  # whose partitioner decides what is kept
        return attend(query, key, value)
    result: Tensor = checkpoint(
        attend,
        *(query, key, value),
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, _keep_attention),
    )
    return result


def _causal(length: int, ranks: RankGroup, *, balanced: bool) -> list[tuple[int | None, Any]]:
    """Return how many keys, the first of the sequence, each chunk of this rank's queries sees, and the mask of these."""
    parts = chunks_of(ranks.rank, ranks.size, balanced=balanced)
    size = length // len(parts)
    ends = [(part + 1) * size for part in parts]
    return [(end, causal_lower_right(size, end)) for end in ends]  # which kernels take, and no matrix


def _keep_attention(_: object, operation: Any, *__: object, **___: object) -> CheckpointPolicy:
    """Keep what the kernels of attention return; the gathered keys and values are gathered again."""
    is_attention = "scaled_dot_product" in str(operation)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def _attend_to_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ranks: RankGroup,
    balanced: bool,
    scale: float | None,
    seen: list[tuple[int | None, Any]],
) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks, with any kernel; ``seen`` is by chunk."""
    key, value = (
        whole_order(gather_parts(each, ranks, 2), ranks.size, balanced=balanced) for each in (key, value)
    )
    gqa = query.shape[1] != key.shape[1]
    results = []
    for chunk, (end, mask) in zip(query.chunk(len(seen), dim=2), seen, strict=True):
        keys, values = key[:, :, :end], value[:, :, :end]
        results.append(F.scaled_dot_product_attention(chunk, keys, values, mask, enable_gqa=gqa, scale=scale))
    return results[0] if len(results) == 1 else torch.cat(results, dim=2)


def _shape_problems(
    query: Tensor, key: Tensor, value: Tensor, ranks: RankGroup, *, balanced: bool, ulysses: bool
) -> list[str]:
    problems = []
    shapes = [tuple(each.shape) for each in (query, key, value)]
    if key.shape != value.shape or query.shape[2] != key.shape[2]:
        problems.append(
            f"query, key and value have shapes {shapes}; their parts of the sequence have one length"
        )
    if balanced and query.shape[2] % 2:
        problems.append(
            f"a part of {query.shape[2]} tokens is not two chunks of a balanced order; cut with shard_sequence, and "
            "give both the same balanced="
        )
    counts = query.shape[1], key.shape[1]
    if counts[0] % counts[1]:
        problems.append(f"{counts[0]} heads cannot share {counts[1]} heads of keys and values evenly")
    if ulysses and (counts[0] % ranks.size or counts[1] % ranks.size):
        problems.append(
            f"{counts[0]} heads and {counts[1]} heads of keys and values cannot be divided among {ranks.size} ranks; "
            "leave ulysses out"
        )
    return problems


def _way_problems(attn_mask: Tensor | None, dropout_p: float, *, is_causal: bool, ulysses: bool) -> list[str]:
    problems = []
    if dropout_p and not ulysses:
        problems.append("dropout_p: give ulysses=True")
    if attn_mask is not None and is_causal:
        problems.append("attn_mask: give is_causal=False, and a mask that is causal where that is meant")
    return problems


def _exchanged(tensor: Tensor, ranks: RankGroup, cut: int, joined: int) -> Tensor:
    """Give each rank its part of one dim, and get all parts of another."""
    sent = torch.cat(tensor.chunk(ranks.size, dim=cut), dim=0)
    return torch.cat(exchange(sent, ranks).chunk(ranks.size, dim=0), dim=joined)


def _padded(tensor: Tensor, dim: int, length: int, value: float) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)
