"""Which entries of a checkpoint are the same on all ranks that have them: reductions along the axes of the mesh.

Each rank's work grows with its own entries, and not with the number of ranks. Along an axis whose ranks have the same
names it is one maximum of a matrix; where they have others, as pipeline stages do, the rows are gathered over this axis.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh.errors import listing
from namedmesh.tensor_parallel.collectives import local_shard
from namedmesh.training.contents import digest
from namedmesh.training.reduction import all_reduced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.tensor import DTensor

    from namedmesh.mesh import NamedMesh

_SAMPLE = 1024  # elements of a tensor that are compared between ranks, at least
_TOLERANCE = (
    1e-3  # replicas may differ by what rounding adds up to over a run; different tensors differ by more
)
_NO_NUMBER = 1e300


class Compared(NamedTuple):
    """What ranks compare of an entry.

    Attributes:
        value: what this rank has.
        shape: the shape of the whole, which has to be the same everywhere; None where it may differ.
        shard: which part of the whole this rank has; empty for all of it.
        exact: whether every bit counts.
    """

    value: object
    shape: tuple[int, ...] | None
    shard: tuple[object, ...]
    exact: bool


def shard_of_dtensor(tensor: DTensor) -> tuple[object, ...]:
    """Return which part of a DTensor this rank has."""
    where: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    placed = zip(tensor.placements, tensor.device_mesh.shape, where, strict=False)
    return tuple((str(each), size, place) for each, size, place in placed if not each.is_replicate())


@torch.no_grad()
def differing(mesh: NamedMesh | None, entries: Mapping[str, Compared]) -> set[str]:
    """Return the names of the entries that are not the same on all ranks that have them; communicates."""
    names = sorted(entries)
    sums = _sums([entries[name] for name in names])
    if mesh is None:
        return set()
    whole, numbers = _table(names, [entries[name] for name in names]), torch.cat([sums, -sums], 1)
    ids = whole[:, 0]
    for axis in _axes(mesh):
        whole, numbers = _reduced(mesh, axis, ids, whole, numbers)
    same = (whole[:, 1] == ~whole[:, 2]) & (whole[:, 5] == ~whole[:, 6])
    high, low = numbers[:, : sums.shape[1]], -numbers[:, sums.shape[1] :]
    limit = _TOLERANCE * torch.maximum(high.abs(), low.abs()).amax(1)
    same &= (high - low).amax(1) <= limit
    return {name for name, each in zip(names, same.tolist(), strict=True) if not each}


def _axes(mesh: NamedMesh) -> list[str]:
    axes = dict.fromkeys(axis for layout in (mesh.layout, *mesh.views.values()) for axis in layout)
    return [axis for axis in axes if mesh.size(axis) > 1]


def _table(names: Sequence[str], entries: Sequence[Compared]) -> Tensor:
    """Return for each entry: its name, and with their inverses its shape, its shard, and all of its bits."""
    rows = []
    for name, each in zip(names, entries, strict=True):
        parts = [_hash(each.shape), _hash(each.shard), digest(each.value) if each.exact else 0]
        rows.append([_hash(name), *(number for part in parts for number in (part, ~part))])
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)


@lru_cache(2**16)
def _hash(value: object) -> int:
    return digest(str(value))


def _reduced(
    mesh: NamedMesh, axis: str, ids: Tensor, whole: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the largest rows over the ranks along an axis, for entries of which they have the same part."""
    mine = digest(ids)
    bounds = torch.tensor([mine, ~mine, len(ids)], device=mesh.device)
    high, low, _ = all_reduced(bounds, mesh, (axis,), "max").tolist()
    if high == ~low:
        largest = all_reduced(whole.to(mesh.device), mesh, (axis,), "max").cpu()
        largest_numbers = all_reduced(numbers.to(mesh.device), mesh, (axis,), "max").cpu()
    else:
        largest, largest_numbers = _gathered(mesh, axis, ids, whole, numbers)
    other_part = (largest[:, 3] != ~largest[:, 4])[:, None]
    kept = largest.clone()
    kept[:, 3:] = whole[:, 3:]
    return torch.where(other_part, kept, largest), torch.where(other_part, numbers, largest_numbers)


def _gathered(
    mesh: NamedMesh, axis: str, ids: Tensor, whole: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return this rank's rows, as large as those of the same names on any rank along the axis."""
    group = mesh.group(axis)
    found: list[tuple[Tensor, Tensor]] = [(whole, numbers)] * mesh.size(axis)
    dist.all_gather_object(found, (whole, numbers), group=group)
    rows = torch.cat([each for each, _ in found])
    names, place = rows[:, 0].unique(return_inverse=True)
    mine = torch.searchsorted(names, ids.contiguous())
    results = []
    for all_rows in (rows, torch.cat([each for _, each in found])):
        largest = all_rows.new_empty(len(names), all_rows.shape[1])
        index = place[:, None].expand_as(all_rows)
        largest.scatter_reduce_(0, index, all_rows, "amax", include_self=False)
        results.append(largest[mine])
    return results[0], results[1]


def _sums(entries: Sequence[Compared]) -> Tensor:
    """Return two numbers of each entry's elements, or some of them, that differ between different tensors."""
    samples = [_sample(each) for each in entries]
    lengths = torch.tensor([len(each) for each in samples], dtype=torch.int64)
    sums = torch.zeros(len(samples), 2, dtype=torch.float64)
    if not lengths.sum():
        return sums
    values = torch.cat([each for each in samples if len(each)])
    lengths = lengths.to(values.device)
    place = torch.repeat_interleave(torch.arange(len(samples), device=values.device), lengths)
    first = lengths.cumsum(0) - lengths
    angles = torch.arange(int(lengths.max()), device=values.device, dtype=torch.float64).cos()
    weights = angles[torch.arange(len(values), device=values.device) - first[place]]
    both = torch.stack([values * values, values * weights], 1)
    sums = sums.to(values.device).index_add_(0, place, both).cpu()
    sums[:, 0] = sums[:, 0].sqrt()
    return sums.nan_to_num(nan=_NO_NUMBER, posinf=2 * _NO_NUMBER, neginf=-2 * _NO_NUMBER)


def _sample(entry: Compared) -> Tensor:
    if entry.exact or not isinstance(entry.value, Tensor):
        return torch.empty(0, dtype=torch.float64)
    local = local_shard(entry.value)
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.reshape(-1)[:: max(1, local.numel() // _SAMPLE)].double()


Detail = tuple["tuple[int, ...] | None", "tuple[object, ...]", "tuple[float, ...]"]


@torch.no_grad()
def details(entries: Mapping[str, Compared]) -> dict[str, Detail]:
    """Return what tells :func:`contradictions` how entries differ."""
    sums = _sums(list(entries.values())).tolist()
    return {
        name: (each.shape, each.shard, tuple(numbers))
        for (name, each), numbers in zip(entries.items(), sums, strict=True)
    }


def contradictions(by_rank: Sequence[Mapping[str, Detail]]) -> list[str]:
    """Return how names stand for different tensors on different ranks, one sentence for each way."""
    shapes: dict[str, tuple[object, int]] = {}
    seen: dict[object, tuple[tuple[float, ...], int]] = {}
    found: dict[str, str] = {}
    for rank, entries in enumerate(by_rank):
        for name, (shape, shard, numbers) in entries.items():
            first_shape, first = shapes.setdefault(name, (shape, rank))
            if shape != first_shape:
                found.setdefault(name, f"shape {first_shape} on rank {first} and {shape} on rank {rank}")
            first_numbers, first = seen.setdefault((name, shard), (numbers, rank))
            pairs = list(zip(numbers, first_numbers, strict=True))
            if max(abs(a - b) for a, b in pairs) > _TOLERANCE * max(abs(number) for number in pairs[0]):
                found.setdefault(name, f"other values on rank {rank} than on rank {first}")
    by_cause: dict[str, list[str]] = {}
    for name, what in found.items():
        by_cause.setdefault(what, []).append(repr(name))
    return [
        f"{listing(names)}: {what}, and a checkpoint holds one tensor of a name; replicas have to be equal, a layer "
        "has its number in the whole model in its name (training.stage_layers), and plain shards are marked with "
        "tensor_model_parallel and partition_dim"
        for what, names in by_cause.items()
    ]
