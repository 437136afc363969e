"""Whether values are the same: by a hash of all that they hold, and the entries of a checkpoint on all ranks that have them.

Each rank's work grows with its own entries, and not with the number of ranks. Along an axis whose ranks have the same
names it is one maximum of a matrix; where they have others, as pipeline stages do, the rows are gathered over this axis.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from namedmesh.errors import listing
from namedmesh.tensor_parallel.collectives import local_shard
from namedmesh.training.reduction import all_reduced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from namedmesh.mesh import NamedMesh

Detail = tuple["tuple[int, ...]", "tuple[object, ...]", "list[float]"]
"""The shape of the whole, the part of it, and the numbers of an entry that differs."""

_SAMPLE = 1024  # elements of a tensor that are compared between ranks, at least
# Replicas may differ by what rounding adds up to over a run; different tensors differ by more.
_TOLERANCE = 1e-3
_NO_NUMBER = 1e300
_SHAPE, _SHARD, _NUMBERS = 0, 1, slice(3, 5)  # columns of a table; between them all bits


class Entry(NamedTuple):
    """One thing that a rank has to save, and what ranks compare of it.

    ``parameter`` is the one whose part it is, or which it is; copies that ``may_be_averaged`` have a mean, for a layout in
    which nobody is the rank that had one of them. ``shape`` is that of the whole, which has to be the same everywhere, or
    None where it may differ; ``shard`` says which part of the whole this rank has, and is empty for all of it. Where it is
    ``exact`` every bit counts.
    """

    value: Any
    parameter: Tensor | None
    may_be_averaged: bool
    shape: tuple[int, ...] | None
    shard: tuple[object, ...]
    exact: bool


def digest(value: object) -> int:
    """Return a hash of what a value holds, equal for others with a chance of 2 to the -62; never 0.

    Values that are equal have the same: dicts in any order, and NumPy's numbers and arrays as well as torch's.

    Example:
        >>> digest({"a": [1], "b": torch.ones(2)}) == digest({"b": torch.ones(2), "a": [1]}) != digest({"a": [1]})
        True
    """
    found = hashlib.sha256()
    for part in _parts(value, ()):
        found.update(part)
    return int.from_bytes(found.digest()[:8], "little") >> 1 | 1


def _parts(value: Any, around: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the bytes of a value; ``around`` are the identities of what it is in."""
    if id(value) in around:
        yield b"around"
        return
    inside = (*around, id(value))
    if isinstance(value, torch.Tensor):
        flat = local_shard(value).detach().cpu().contiguous()
        yield repr((flat.dtype, tuple(flat.shape))).encode()
        yield ctypes.string_at(flat.data_ptr(), flat.nbytes)
    elif isinstance(value, Mapping):
        yield b"{"
        # Ranks may fill theirs in different orders.
        for key, each in sorted(value.items(), key=lambda item: repr(item[0])):
            yield from _parts(key, inside)
            yield from _parts(each, inside)
        yield b"}"
    elif isinstance(value, list | tuple):
        yield b"("
        for each in value:
            yield from _parts(each, inside)
        yield b")"
    elif isinstance(value, AbstractSet):
        yield repr(sorted(map(digest, value))).encode()
    else:
        yield from _parts_of_object(value, inside)


def _parts_of_object(value: Any, inside: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the bytes of what is no collection of Python's: NumPy's, or by its fields, or by its text."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        if value.ndim == 0 or value.dtype.hasobject:
            yield from _parts(value.tolist(), inside)
        else:
            yield repr((value.dtype.str, value.shape)).encode()
            yield value.tobytes()
        return
    yield type(value).__name__.encode()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        yield from _parts(fields, inside)
    elif getattr(type(value), "__repr__", None) is object.__repr__ and hasattr(value, "__dict__"):
        yield from _parts(vars(value), inside)
    else:
        yield b"\0" + repr(value).encode()


@torch.no_grad()
def table_of(entries: Mapping[str, Entry]) -> Tensor:
    """Return a row for each entry: hashes of its shape, its shard and all of its bits, and two numbers of its elements."""
    rows = [
        [_hash(each.shape), _hash(each.shard), _exactly(digest(each.value)) if each.exact else 0.0]
        for each in entries.values()
    ]
    return torch.cat([torch.tensor(rows, dtype=torch.float64).reshape(-1, 3), _numbers(entries)], 1)


def _exactly(number: int) -> float:
    """Return the bits of a digest that a float has room for."""
    return float(number >> 11)


@lru_cache(2**16)
def _hash(value: object) -> float:
    return _exactly(digest(str(value)))


def differing(
    mesh: NamedMesh | None, entries: Mapping[str, Entry], table: Tensor
) -> tuple[dict[str, Detail], dict[str, int]]:
    """Return the entries that contradict those of another rank, and hashes of those that are per rank; communicates."""
    wrong: dict[str, Detail] = {}
    own: dict[str, int] = {}
    if mesh is None:
        return wrong, own
    ids = torch.tensor([_hash(name) for name in entries], dtype=torch.float64)
    bounds = torch.stack([table, -table], 1)
    axes = dict.fromkeys(axis for layout in (mesh.layout, *mesh.views.values()) for axis in layout)
    for axis in axes:
        if mesh.size(axis) > 1:
            bounds = _reduced(mesh, axis, ids, bounds)
    high, low = bounds[:, 0], -bounds[:, 1]
    limits = torch.zeros_like(high)
    limits[:, _NUMBERS] = _TOLERANCE * torch.maximum(high.abs(), low.abs())[:, _NUMBERS].amax(1, keepdim=True)
    same = (high - low <= limits).all(1)
    rows = zip(entries.items(), table[:, _NUMBERS].tolist(), same.tolist(), strict=True)
    for (name, entry), numbers, alike in rows:
        if not alike and entry.shape is not None:
            wrong[name] = entry.shape, entry.shard, numbers
        elif not alike:
            own[name] = digest(entry.value)
    return wrong, own


def _reduced(mesh: NamedMesh, axis: str, ids: Tensor, bounds: Tensor) -> Tensor:
    """Return the largest rows over the ranks along an axis, for entries of which they have the same part."""
    mine = digest(ids)
    high, low = all_reduced(torch.tensor([mine, -mine], device=mesh.device), mesh, (axis,), "max").tolist()
    if high == -low:
        largest = all_reduced(bounds.to(mesh.device), mesh, (axis,), "max").cpu()
    else:
        largest = _gathered(mesh, axis, ids, bounds)
    other_part = largest[:, 0, _SHARD] != -largest[:, 1, _SHARD]
    other_part = other_part[:, None, None] & (torch.arange(largest.shape[2]) != _SHAPE)
    return torch.where(other_part, bounds, largest)  # of other parts only the shape of the whole is compared


def _gathered(mesh: NamedMesh, axis: str, ids: Tensor, bounds: Tensor) -> Tensor:
    """Return this rank's rows, as large as those of the same names on any rank along the axis."""
    found: list[tuple[Tensor, Tensor]] = [(ids, bounds)] * mesh.size(axis)
    dist.all_gather_object(found, (ids, bounds), group=mesh.group(axis))
    known, place = torch.cat([each for each, _ in found]).unique(return_inverse=True)
    rows = torch.cat([each for _, each in found])
    largest = rows.new_empty(len(known), *rows.shape[1:])
    largest.scatter_reduce_(0, place[:, None, None].expand_as(rows), rows, "amax", include_self=False)
    return largest[torch.searchsorted(known, ids)]


def _numbers(entries: Mapping[str, Entry]) -> Tensor:
    """Return two numbers of each entry's elements, or some of them, that differ between different tensors."""
    samples = [_sample(each) for each in entries.values()]
    device = max(samples, key=len).device
    rows = pad_sequence([each.to(device) for each in samples], batch_first=True)
    weights = torch.arange(rows.shape[1], device=device, dtype=torch.float64).cos()
    result = torch.stack([rows.norm(dim=1), rows @ weights], 1).cpu()
    return result.nan_to_num(nan=_NO_NUMBER, posinf=2 * _NO_NUMBER, neginf=-2 * _NO_NUMBER)


def _sample(entry: Entry) -> Tensor:
    if entry.exact or not isinstance(entry.value, Tensor):
        return torch.empty(0, dtype=torch.float64)
    local = local_shard(entry.value)
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.reshape(-1)[:: max(1, local.numel() // _SAMPLE)].double()


def shown(name: str) -> str:
    """Return the name of an entry as messages have it."""
    return repr(name.partition(".")[2])


def contradictions(by_rank: Sequence[Mapping[str, Detail]]) -> list[str]:
    """Return how names stand for different tensors on different ranks, one sentence for each way."""
    ranks_of: dict[str, dict[int, Detail]] = {}
    for rank, entries in enumerate(by_rank):
        for name, entry in entries.items():
            ranks_of.setdefault(name, {})[rank] = entry
    by_cause: dict[str, list[str]] = {}
    for name, details in ranks_of.items():
        by_cause.setdefault(_how_it_differs(details), []).append(shown(name))
    return [
        f"{listing(names)}: {what}, and a checkpoint holds one tensor of a name; replicas have to be equal, a layer "
        "has its number in the whole model in its name (training.stage_layers), and plain shards are marked with "
        "tensor_model_parallel and partition_dim"
        for what, names in by_cause.items()
    ]


def _how_it_differs(entries: Mapping[int, Detail]) -> str:
    first, (shape, shard, numbers) = next(iter(entries.items()))
    for rank, (other, _, _) in entries.items():
        if other != shape:
            return f"shape {shape} on rank {first} and {other} on rank {rank}"
    distance = {
        rank: max(abs(one - other) for one, other in zip(numbers, others, strict=True))
        for rank, (_, part, others) in entries.items()
        if part == shard
    }
    farthest = max(distance, key=distance.__getitem__)
    return f"other values on rank {farthest} than on rank {first}"
