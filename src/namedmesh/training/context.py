"""Context parallelism: each rank of ``cp`` has a part of every sequence, and attention sees all of it.

Causal attention on the CPU is computed in pieces that need no mask: the part itself, and what its queries see of the parts of
others, which alone is sent. Each is one call of the kernel; they are merged by their log-sum-exp. Elsewhere torch's public
function gets all keys and values.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from namedmesh._torch import attention_backward, attention_with_lse, has_attention_with_lse
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import Group, all_to_all, enter, exchange

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
        >>> mesh.close(); dist.destroy_process_group()
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
    mine = _chunks_of(mesh.get_local_rank(), mesh.size(), balanced=balanced)
    if over:
        tensors = tuple(map(partial(_padded, dim, size * parts), tensors, pad or ()))
    everywhere = torch.arange(size * parts, device=tensors[0].device)
    positions = torch.cat([everywhere[part * size : (part + 1) * size] for part in mine])
    shards = [torch.cat([each.narrow(dim, part * size, size) for part in mine], dim) for each in tensors]
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
        >>> mesh.close(); dist.destroy_process_group()
    """
    ranks = Group.of(mesh)
    problems = _problems(
        query, key, value, ranks, balanced=balanced, ulysses=ulysses, dropout=bool(dropout_p)
    )
    if attn_mask is not None and is_causal:
        problems.append("attn_mask: give is_causal=False, and a mask that is causal where that is meant")
    if problems:
        raise ShapeError(*problems)
    if attn_mask is not None:
        padding = query.shape[2] * ranks.size - attn_mask.shape[-2]
        attn_mask = F.pad(attn_mask, (0, 0, 0, padding), value=1)
    if ulysses:
        gqa = query.shape[1] != key.shape[1]
        query, key, value = (
            _reordered(_exchanged(each, ranks, 1, 2), ranks.size, balanced=balanced)
            for each in (query, key, value)
        )
        if not is_causal:
            key, value = key[:, :, :length], value[:, :, :length]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=gqa, scale=scale
        )
        return _exchanged(_reordered(mixed, ranks.size, balanced=balanced, by_rank=True), ranks, 2, 1)
    if is_causal and has_attention_with_lse(query, value):
        pieces = _pieces(query.shape[2], ranks, balanced=balanced)
        return cast("Tensor", _InPieces.apply(query, key, value, ranks, pieces, scale))  # type: ignore[no-untyped-call]
    if is_causal:
        seen = _causal(query.shape[2], ranks, balanced=balanced)
    elif attn_mask is None:
        seen = [(length, None)]
    else:
        seen = [(length, shard_sequence(attn_mask, mesh=mesh, dim=-2, balanced=balanced)[0])]
    attend = partial(_attend_to_gathered, ranks=ranks, balanced=balanced, scale=scale, seen=seen)
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


def _causal(length: int, ranks: Group, *, balanced: bool) -> list[tuple[int | None, Any]]:
    """Return how many keys, the first of the sequence, each chunk of this rank's queries sees, and the mask of these."""
    parts = _chunks_of(ranks.rank, ranks.size, balanced=balanced)
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
    ranks: Group,
    balanced: bool,
    scale: float | None,
    seen: list[tuple[int | None, Any]],
) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks, with any kernel; ``seen`` is by chunk."""
    key, value = (_reordered(enter(each, ranks, 2), ranks.size, balanced=balanced) for each in (key, value))
    gqa = query.shape[1] != key.shape[1]
    results = []
    for chunk, (end, mask) in zip(query.chunk(len(seen), dim=2), seen, strict=True):
        keys, values = key[:, :, :end], value[:, :, :end]
        results.append(F.scaled_dot_product_attention(chunk, keys, values, mask, enable_gqa=gqa, scale=scale))
    return results[0] if len(results) == 1 else torch.cat(results, dim=2)


def _problems(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: Group,
    *,
    balanced: bool,
    ulysses: bool,
    dropout: bool,
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
    if dropout and not ulysses:
        problems.append("dropout_p: give ulysses=True")
    return problems


def _exchanged(tensor: Tensor, ranks: Group, cut: int, joined: int) -> Tensor:
    """Give each rank its part of one dim, and get all parts of another."""
    sent = torch.cat(tensor.chunk(ranks.size, dim=cut), dim=0)
    return torch.cat(exchange(sent, ranks).chunk(ranks.size, dim=0), dim=joined)


def _padded(dim: int, length: int, tensor: Tensor, value: float) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


def _chunks_of(rank: int, size: int, *, balanced: bool) -> tuple[int, ...]:
    """Return which chunks of the whole sequence a rank has."""
    return (rank, 2 * size - 1 - rank) if balanced else (rank,)


def _reordered(tensor: Tensor, size: int, *, balanced: bool, by_rank: bool = False) -> Tensor:
    """Return the sequence in its own order, from the parts of all ranks one after the other; or the inverse, ``by_rank``."""
    order = [part for rank in range(size) for part in _chunks_of(rank, size, balanced=balanced)]
    if not by_rank:
        order = [order.index(part) for part in range(len(order))]
    if order == sorted(order):
        return tensor
    chunks = tensor.chunk(len(order), dim=2)
    return torch.cat([chunks[number] for number in order], dim=2)


class _Pieces(NamedTuple):
    """What ranks see of each other: the first keys of each part. So many come from each rank, and so many go to each.

    ``seen``: from which of this rank's queries on which of the keys that come are seen.
    """

    received: list[int]
    sent: list[int]
    seen: list[tuple[int, slice]]


def _pieces(length: int, ranks: Group, *, balanced: bool) -> _Pieces:
    """In balanced order all queries see the first chunk of each rank before, and the second half both of each rank after."""
    before, after = (length // 2, length) if balanced else (length, 0)
    count_after = ranks.size - ranks.rank - 1
    received = [before] * ranks.rank + [0] + [after] * count_after
    sent = [after] * ranks.rank + [0] + [before] * count_after
    middle, end = before * ranks.rank, sum(received)
    seen = [(0, slice(0, middle)), (before, slice(middle, end))]
    return _Pieces(received, sent, [each for each in seen if each[1].start < each[1].stop])


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  torch passes them by position
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ranks: Group,
        pieces: _Pieces,
        scale: float | None,
    ) -> Tensor:
        output, sums = _attend(query, key, value, True, scale)
        both = _received(key, value, ranks, pieces)
        for first, keys in pieces.seen:
            chunk, *merged = (each[:, :, first:] for each in (query, output, sums))
            _merge(merged, _attend(chunk, *_keys_and_values(both[keys]), False, scale))
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.ranks, ctx.pieces, ctx.scale = ranks, pieces, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        pieces, known = ctx.pieces, (gradient, query, output, sums)
        of_query, *of_own = _attend_backward(known, key, value, True, ctx.scale)
        both = _received(key, value, ctx.ranks, pieces)
        for first, keys in pieces.seen:
            chunk = [each[:, :, first:] for each in known]
            keys_and_values = _keys_and_values(both[keys])
            more, *found = _attend_backward(chunk, *keys_and_values, False, ctx.scale)
            of_query[:, :, first:].add_(more)
            # Gradients take the place of what they are of: the second exchange waits for the first, also where it sends nothing.
            for whole, some in zip(keys_and_values, found, strict=True):
                whole.copy_(some)
        of_own = [each.to(sums.dtype) for each in of_own]
        for part in all_to_all(both, ctx.ranks, (pieces.received, pieces.sent)).split(pieces.sent):
            for own, some in zip(of_own, _keys_and_values(part), strict=True):
                own[:, :, : part.shape[0]].add_(some)
        of_key, of_value = (each.to(key.dtype) for each in of_own)
        return of_query, of_key, of_value, None, None, None


def _received(key: Tensor, value: Tensor, ranks: Group, pieces: _Pieces) -> Tensor:
    """Return what a rank sees of the keys and values: the sequence, which of the two, batch, heads, width."""
    both = torch.stack([each.permute(2, 0, 1, 3) for each in (key, value)], 1)
    outgoing = torch.cat([both[:count] for count in pieces.sent])
    return all_to_all(outgoing, ranks, (pieces.sent, pieces.received))


def _keys_and_values(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of keys and values in the form that attention takes."""
    key, value = both.permute(1, 2, 3, 0, 4)
    return key, value


def _merge(merged: Sequence[Tensor], more: tuple[Tensor, Tensor]) -> None:
    """Add attention to further keys to a result and its log-sum-exp, in the type of the latter."""
    (result, sums), (other, other_sums) = merged, more
    weight = torch.sigmoid(other_sums - sums)[..., None]
    result.copy_(torch.lerp(result.to(sums.dtype), other.to(sums.dtype), weight))
    sums.copy_(torch.logaddexp(sums, other_sums))


def _for_each_head(key: Tensor, query: Tensor) -> Tensor:
    """Return keys or values, of which several heads of queries share one, for each of them."""
    heads = query.shape[1] // key.shape[1]
    return key if heads == 1 else key.repeat_interleave(heads, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    key, value = (_for_each_head(each, query) for each in (key, value))
    return attention_with_lse(query, key, value, causal, scale)


def _attend_backward(
    known: Sequence[Tensor], key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, output, sums = known
    whole = (_for_each_head(each, query) for each in (key, value))
    of_query, *others = attention_backward((gradient, query, *whole, output, sums), causal, scale)
    if key.shape[1] != query.shape[1]:
        others = [each.unflatten(1, (key.shape[1], -1)).sum(2) for each in others]
    of_key, of_value = others
    return of_query, of_key, of_value
