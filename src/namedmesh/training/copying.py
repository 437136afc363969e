"""Copy the weights of a model into the same model in another layout.

Each rank describes its local tensors to all ranks. From these descriptions follows what each rank
sends to which other rank, so that one all-to-all moves a bucket of tensors. torch has no call for
it: ``DTensor.redistribute`` stays on one mesh.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from namedmesh._errors import TrainingError
from namedmesh._sharding import find_placements, is_tp_shard, to_local
from namedmesh._torch.groups import all_gather_object
from namedmesh._torch.modules import iter_params_hidden_by_ddp
from namedmesh._torch.tensors import find_local_box
from namedmesh.training.tying import get_tie

# A box in a full tensor: the first index and the index after the last one, along each dim.
Box: TypeAlias = tuple[tuple[int, int], ...]

# By rank, the slices of a local tensor that are sent to it, or received from it.
Pieces: TypeAlias = dict[int, tuple[slice, ...]]


class _Entry(NamedTuple):
    """A parameter or buffer, as its rank describes it to the other ranks.

    Attributes:
        shape: the full shape.
        dtype: the dtype.
        box: the box of the local tensor in the full tensor; None on a rank outside of its mesh.
        tied_to: the first name in the model that has the same memory, usually its own name.
        tie: the identifier of the tie with a parameter of another pipeline stage, if it has one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box | None
    tied_to: str
    tie: str | None = None


# By name, the parameters and buffers that one rank has.
Entries: TypeAlias = Mapping[str, _Entry]


@torch.inference_mode(False)
@torch.no_grad()
def copy_weights(
    source: nn.Module,
    target: nn.Module,
    *,
    cast: bool = False,
    group: ProcessGroup | None = None,
    bucket_bytes: int = 2**28,
) -> None:
    """Copy the weights of a model into the same model in another layout.

    For example, from a policy that is trained in one layout to a copy that generates in another.
    The models can be on different meshes over the same ranks: parallelized, sharded by FSDP2 (also
    HSDP), replicated, or plain. Their pipeline stages can differ, if layers keep their names. The
    values are those that gathering the state dict of the source and distributing it gives, bit for
    bit. But no rank has a full copy: each rank gets the elements of its own shards, each of them
    once, and from itself if it has them.

    All parameters and the persistent buffers are copied. Weights that are tied in the source may
    be separate in the target. Wrappers (DDP, compiled and recomputed modules) do not change names.

    Collective: every rank of ``group`` must call it. It needs one all-gather of names and
    placements, and one all-to-all for each bucket of tensors.

    Args:
        source: the model to copy from.
        target: the model to copy into, in place.
        cast: whether to convert to the dtypes of the target, if they differ. Converted values are
            sent.
        group: the ranks that have the two models; by default all.
        bucket_bytes: how many bytes a rank receives at once. The buffers are as large as the
            largest shard, if that is larger. Every rank must pass the same number.

    Raises:
        TrainingError: on every rank, before any weight is written: a name is missing in one of the
            models, shapes or dtypes differ, weights are tied in the target only, or a tensor cannot
            be copied (partial, on the meta device, or a shard that is no DTensor). The error lists
            all problems.

    Example:
        >>> policy, rollout = nn.Linear(4, 2), nn.Linear(4, 2)
        >>> copy_weights(policy, rollout)
        >>> torch.equal(policy.weight, rollout.weight)
        True
    """
    problems: list[str] = []
    source_tensors, source_entries = _collect(source, "the source", problems)
    target_tensors, target_entries = _collect(target, "the target", problems)
    tensors = (*source_tensors.values(), *target_tensors.values())
    own = (source_entries, target_entries, problems, {tensor.device.type for tensor in tensors})
    by_rank: list[Any] = [own]
    rank = 0
    if dist.is_initialized():
        members: Any = group or dist.group.WORLD
        rank = dist.get_rank(members)
        by_rank = all_gather_object(members, own)
    sources, targets, problems_by_rank, device_types = zip(*by_rank, strict=True)
    problems = list(chain(*problems_by_rank))
    merged_source = _merge(sources, "the source", problems)
    merged_target = _merge(targets, "the target", problems)
    problems += _compare(merged_source, merged_target, cast=cast)
    if problems:
        raise TrainingError(*dict.fromkeys(problems))
    # A rank may have no tensor of its own, and takes part in the exchange of the others.
    device = torch.device(max({"cpu"}.union(*device_types), key=lambda kind: kind != "cpu"))
    # The tensors of a model have few different layouts, so their pieces are found once for each.
    find_pieces = cache(_find_pieces)
    for names in _make_buckets(merged_target, targets, bucket_bytes):
        sent: list[list[Tensor]] = [[] for _ in by_rank]
        received: list[list[Tensor]] = [[] for _ in by_rank]
        for name in names:
            sends, receives = find_pieces(rank, _list_boxes(sources, name), _list_boxes(targets, name))
            for peer, slices in sends.items():
                sent[peer].append(source_tensors[name][slices])
            for peer, slices in receives.items():
                received[peer].append(target_tensors[name][slices])
        _exchange(sent, received, merged_target[names[0]].dtype, device, group)


def _collect(model: nn.Module, role: str, problems: list[str]) -> tuple[dict[str, Tensor], dict[str, _Entry]]:
    """Return the local tensors of a model and their descriptions, by name.

    Does not communicate.

    Args:
        model: the model.
        role: which model it is, for messages.
        problems: gets the reasons why tensors cannot be copied.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    tensors: dict[str, Tensor] = {}
    entries: dict[str, _Entry] = {}
    first_names: dict[object, str] = {}
    # torch's function reshards FSDP2's parameters, and removes the names of wrappers. Without
    # strict, a model may be empty on this rank.
    state_dict = get_model_state_dict(model, options=StateDictOptions(strict=False))
    owned, ties = _find_memory(model)
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            continue  # the extra state of a module
        tensors[name] = local = to_local(value)
        box: Box | None = tuple((0, length) for length in local.shape)
        if value.is_meta:
            problems.append(f"{name} of {role} is on the meta device; call to_empty() on the model first")
        if isinstance(value, DTensor):
            box = find_local_box(value)
            if any(placement.is_partial() for placement in value.placements):
                problems.append(f"{name} of {role} is partial, {value.placements}; all-reduce it first")
        tied_to = name
        if local.data_ptr():  # neither empty nor on the meta device
            tied_to = first_names.setdefault((local.data_ptr(), box), name)
        tie = ties.get(local.data_ptr())
        entries[name] = _Entry(tuple(value.shape), value.dtype, box, tied_to, tie)
        if role == "the target" and local.untyped_storage().data_ptr() not in owned:
            problems.append(
                f"{name} of {role} is a tensor that its state_dict() makes, and not in its memory; "
                "give the module the full state dict with set_model_state_dict"
            )
    problems.extend(_find_plain_shards(model, role))
    return tensors, entries


def _find_plain_shards(model: nn.Module, role: str) -> Iterator[str]:
    """Yield a problem for each parameter that is a shard, and whose place is not known."""
    if list(iter_params_hidden_by_ddp(model)):
        yield (
            f"{role} is under DDP over tensor parallelism, whose forward hides the sharded parameters "
            "from state_dict(); use fully_shard, with a replicated axis (HSDP)"
        )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            continue
        if is_tp_shard(param) or find_placements(param) is not None:
            yield f"{name} of {role} is a shard in a plain tensor; make it a DTensor"


def _find_memory(model: nn.Module) -> tuple[set[int], dict[int, str]]:
    """Return the addresses of a model's storages, and by address the ties of parameters."""
    owned: set[int] = set()
    ties: dict[int, str] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        local = to_local(tensor)
        owned.add(local.untyped_storage().data_ptr())
        tie = get_tie(tensor)
        if tie is not None:
            ties[local.data_ptr()] = tie[0]
    return owned, ties


def _merge(entries_by_rank: Sequence[Entries], role: str, problems: list[str]) -> dict[str, _Entry]:
    """Return the entries of all ranks by name; pipeline stages have different ones.

    Args:
        entries_by_rank: the entries of each rank.
        role: which model it is, for messages.
        problems: gets the names of tensors that differ between ranks.
    """
    merged: dict[str, _Entry] = {}
    for name, entry in chain(*(entries.items() for entries in entries_by_rank)):
        known = merged.setdefault(name, entry)
        if (known.shape, known.dtype) != (entry.shape, entry.dtype):
            both = f"{known.dtype} {known.shape} and {entry.dtype} {entry.shape}"
            problems.append(f"{name} of {role} differs between ranks: {both}")
        if entry.tied_to != name:  # a rank with an empty shard cannot know
            merged[name] = entry
    return merged


def _compare(source: Entries, target: Entries, *, cast: bool) -> Iterator[str]:
    """Yield the differences between two models that make a copy impossible."""
    for name in source:
        if name not in target:
            yield f"{name} is not in the target"
    for name, entry in target.items():
        if name not in source:
            yield f"{name} is not in the source"
            continue
        known = source[name]
        if known.shape != entry.shape:
            yield f"{name} has shape {known.shape} in the source, and {entry.shape} in the target"
        if known.dtype != entry.dtype and not cast:
            dtypes = f"{known.dtype} in the source, and {entry.dtype} in the target"
            yield f"{name} has dtype {dtypes}; pass cast=True to convert it"
        tie = entry.tied_to
        if tie not in source or (known.tie is not None and known.tie == source[tie].tie):
            continue
        if source[tie].tied_to != known.tied_to:
            yield f"{name} and {tie} are one tensor in the target, and two in the source; untie them"


def _make_buckets(
    merged: Entries, entries_by_rank: Sequence[Entries], most_bytes: int
) -> Iterator[list[str]]:
    """Yield the names in buckets of one dtype, which have a limited size on every rank.

    A tensor that is larger is a bucket by itself.
    """
    bucket: list[str] = []
    size = 0
    for name in sorted(merged, key=lambda name: str(merged[name].dtype)):  # stable
        dtype = merged[name].dtype
        received = 0
        for box in filter(None, _list_boxes(entries_by_rank, name)):
            received = max(received, math.prod(end - start for start, end in box) * dtype.itemsize)
        if bucket and (size + received > most_bytes or merged[bucket[0]].dtype != dtype):
            yield bucket
            bucket = []
            size = 0
        bucket.append(name)
        size += received
    if bucket:
        yield bucket


def _list_boxes(entries_by_rank: Sequence[Entries], name: str) -> tuple[Box | None, ...]:
    """Return the box that each rank has of a tensor; None if it is of another pipeline stage."""
    boxes: list[Box | None] = []
    for entries in entries_by_rank:
        boxes.append(entries[name].box if name in entries else None)
    return tuple(boxes)


def _find_pieces(
    rank: int, sources: Sequence[Box | None], targets: Sequence[Box | None]
) -> tuple[Pieces, Pieces]:
    """Return the pieces of a tensor that a rank sends, and those that it receives.

    Args:
        rank: this rank.
        sources: the box of each rank in the source.
        targets: the box of each rank in the target.
    """
    holders: dict[Box, list[int]] = {}
    for holder, box in enumerate(sources):
        if box is not None:
            holders.setdefault(box, []).append(holder)
    sends: Pieces = {}
    receives: Pieces = {}
    for box, ranks in holders.items():
        for receiver, wanted in enumerate(targets):
            # Replicas share the work: the receiver itself, or the holder with the next lower rank.
            sender = ranks[bisect(ranks, receiver) - 1]
            if wanted is None or rank not in {sender, receiver}:
                continue
            piece = []
            is_empty = False
            for (start, end), (wanted_start, wanted_end) in zip(box, wanted, strict=True):
                piece.append((max(start, wanted_start), min(end, wanted_end)))
                is_empty |= piece[-1][0] >= piece[-1][1]
            if is_empty:
                continue
            if sender == rank:
                sends[receiver] = _to_slices(piece, box)
            if receiver == rank:
                receives[sender] = _to_slices(piece, wanted)
    return sends, receives


def _to_slices(piece: Sequence[tuple[int, int]], box: Box) -> tuple[slice, ...]:
    """Return the place of a piece in the local tensor that has a box."""
    slices = []
    for (start, end), (first, _) in zip(piece, box, strict=True):
        slices.append(slice(start - first, end - first))
    return tuple(slices)


def _exchange(
    sent: list[list[Tensor]],
    received: list[list[Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None,
) -> None:
    """Copy pieces of tensors to other ranks. Collective: one all-to-all.

    Args:
        sent: the pieces to send to each rank.
        received: the pieces to fill with the values from each rank, in the order of its ``sent``.
        dtype: the dtype in which the values are sent.
        device: the device of the buffers.
        group: the ranks.
    """
    send_sizes = list(map(_count_elements, sent))
    receive_sizes = list(map(_count_elements, received))
    send_buffer = torch.empty(sum(send_sizes), dtype=dtype, device=device)
    receive_buffer = torch.empty(sum(receive_sizes), dtype=dtype, device=device)
    for piece, part in _pair_with_parts(sent, send_buffer):
        part.copy_(piece)
    if dist.is_initialized():
        # Not every backend has every dtype, but all of them have bytes.
        dist.all_to_all_single(
            receive_buffer.view(torch.uint8),
            send_buffer.view(torch.uint8),
            [size * dtype.itemsize for size in receive_sizes],
            [size * dtype.itemsize for size in send_sizes],
            group=group,
        )
    else:
        receive_buffer = send_buffer
    for piece, part in _pair_with_parts(received, receive_buffer):
        piece.copy_(part)


def _count_elements(pieces: list[Tensor]) -> int:
    return sum(piece.numel() for piece in pieces)


def _pair_with_parts(pieces: list[list[Tensor]], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each piece with its part of a buffer, in the shape of the piece."""
    start = 0
    for piece in chain(*pieces):
        part = buffer[start : start + piece.numel()]
        yield piece, part.view(piece.shape)
        start += piece.numel()
