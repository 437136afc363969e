"""Which ranks get which samples, the mean over their tokens, and the mesh over which gradients are averaged."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from namedmesh._torch import concatenate_meshes
from namedmesh.errors import AgreementError, AxisError, ShapeError, listing
from namedmesh.mesh import NamedMesh

_DATA = ("dp", "dp_replicate", "dp_shard")
_SAME_SAMPLES = ("pp", "cp", "tp")


def _data_axes(mesh: NamedMesh) -> list[str]:
    """Return the axes along which samples differ; refuse those of which it is not known."""
    known = (*_DATA, *_SAME_SAMPLES)
    problems = [
        f"axis {axis!r} is none of {known}, so it is not known whether samples differ along it; make the mesh with these "
        "names, and add what has others with mesh.add_view(...)"
        for axis, size in mesh.layout.items()
        if size > 1 and axis not in known
    ]
    if problems:
        raise AxisError(*problems)
    return [axis for axis in mesh.layout if axis in _DATA]


def sampler_kwargs(mesh: NamedMesh) -> dict[str, Any]:
    """Return the arguments ``num_replicas`` and ``rank`` of torch's samplers, on this rank.

    On a mesh of ``dp=2, tp=2`` the ranks 0 and 1 get rank 0 of 2, the ranks 2 and 3 rank 1 of 2.
    """
    axes = _data_axes(mesh)
    if not axes:
        return {"num_replicas": 1, "rank": 0}
    return {"num_replicas": mesh.size(*axes), "rank": mesh.rank(*axes)}


def check_same_batch(batch: object, mesh: NamedMesh) -> None:
    """Refuse a batch that differs between ranks that must have the same samples, or is another data rank's; communicates.

    It copies the batch, as it is loaded, to the CPU and hashes it: for the first steps, or every thousandth.

    Args:
        batch: tensors, NumPy arrays and anything else, in dicts, lists, tuples, dataclasses and other objects. None on a rank
            that loads nothing, such as a stage in the middle of a pipeline, which is then not compared.
        mesh: the mesh; every rank of it calls this.

    Raises:
        AgreementError: on every rank, naming the ranks whose batches differ.
    """
    axes = _data_axes(mesh)
    found = torch.zeros(mesh.size(), dtype=torch.int64, device=mesh.device)
    found[mesh.rank()] = 0 if batch is None else digest(batch)
    by_rank = zip(mesh.ranks(), _summed(found, mesh, [*mesh.layout]).tolist(), strict=True)
    loaded = {rank: each for rank, each in by_rank if each}
    share = {rank: tuple(mesh.layout.coords(rank)[axis] for axis in axes) for rank in loaded}
    remedy = "give their samplers sampler_kwargs(mesh)"
    problems = _conflicts(share, loaded, f"different samples, and must load the same; {remedy} and one seed")
    problems += _conflicts(loaded, share, f"the same samples, and must load different ones; {remedy}")
    if problems:
        raise AgreementError(*problems)


def _conflicts(one: Mapping[int, object], several: Mapping[int, object], what: str) -> list[str]:
    """Return a sentence for each set of ranks that have one thing in common, and several of another."""
    found: dict[object, dict[object, list[int]]] = {}
    for rank, each in one.items():
        found.setdefault(each, {}).setdefault(several[rank], []).append(rank)
    groups = [[f"ranks {listing(ranks)}" for ranks in each.values()] for each in found.values()]
    return [f"{' and '.join(each)} loaded {what}" for each in groups if len(each) > 1]


def digest(value: object) -> int:
    """Return a hash of what a value holds, never 0; dicts in any order, and NumPy's numbers and arrays are as torch's.

    Example:
        >>> digest({"a": [1], "b": torch.ones(2)}) == digest({"b": torch.ones(2), "a": [1]}) != digest({"a": [1]})
        True
    """
    found = hashlib.sha256()
    _add(found, value)
    return int.from_bytes(found.digest()[:8], "little") >> 1 | 1


def _add(found: Any, value: Any) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        plain = value.ndim == 0 or value.dtype.hasobject
        value = value.tolist() if plain else torch.from_numpy(value)
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        flat = local.detach().resolve_conj().resolve_neg().cpu().contiguous()
        found.update(repr((flat.dtype, tuple(flat.shape))).encode())
        found.update(ctypes.string_at(flat.data_ptr(), flat.nbytes))
    elif isinstance(value, Mapping):
        _add(found, [(key, value[key]) for key in sorted(value, key=repr)])  # which ranks fill in any order
    elif isinstance(value, list | tuple):
        found.update(b"(%d" % len(value))
        for each in value:
            _add(found, each)
    elif isinstance(value, AbstractSet):
        _add(found, sorted(map(digest, value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _add(found, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif hasattr(value, "__dict__") and repr(value) == object.__repr__(value):  # where it lies in memory
        _add(found, vars(value))
    else:
        found.update(b"\0" + repr(value).encode())


def fsdp_mesh(mesh: NamedMesh) -> DeviceMesh:
    """Return the mesh that ``fully_shard(mesh=...)`` wants; communicates the first time, where cp is beside dp.

    It is 1-D, over dp (or dp_shard) times cp, whose ranks see other tokens of the same samples; with ``dp_replicate`` 2-D, for HSDP.
    Axes of one rank are left out. Call ``fully_shard`` after tensor parallelism.
    """
    _data_axes(mesh)
    shard = [axis for axis in mesh.layout if axis in {"dp", "dp_shard", "cp"}]
    if not shard:
        raise AxisError(
            f"{mesh.layout} has no axis to shard parameters over; add dp, dp_shard or cp, if of size 1"
        )
    sharded = mesh.flatten(*([axis for axis in shard if mesh.size(axis) > 1] or shard[:1]))
    if "dp_replicate" not in mesh.layout or mesh.size("dp_replicate") == 1:
        return sharded
    return concatenate_meshes([mesh["dp_replicate"], sharded])


def _token_axes(mesh: NamedMesh) -> list[str]:
    """Return the axes along which ranks have different tokens: those of samples, and cp."""
    return [axis for axis in mesh.layout if axis in _DATA or axis == "cp"]


def _token_ranks(mesh: NamedMesh) -> int:
    ranks = 1
    for axis in _token_axes(mesh):  # which the compiler follows
        ranks *= mesh.size(axis)
    return ranks


def count_tokens(counted: Tensor | int, mesh: NamedMesh) -> Tensor:
    """Return how many tokens count in a step, over the whole global batch; communicates, once a step, before its micro-batches.

    Args:
        counted: which of this rank's targets count, of all micro-batches of the step, such as ``targets != -100``; or how many.
        mesh: the mesh; every rank along its dp and cp axes calls this.
    """
    _data_axes(mesh)
    return _summed(torch.as_tensor(counted, device=mesh.device).sum(), mesh, _token_axes(mesh))


def token_mean(total: Tensor, tokens: Tensor, mesh: NamedMesh) -> Tensor:
    """Return what a sum of losses adds to the mean over all tokens of a step, to call ``backward()`` on; nothing is sent.

    The gradients, after FSDP2 or DDP averaged them over the ranks of :func:`fsdp_mesh`, are those of one process with all the
    tokens, however many of them each rank has: a mean of the ranks' means is not. Micro-batches add up.

    Args:
        total: the sum of the losses of some of this rank's tokens, of no dims; from ``loss_parallel`` the DTensor that it is.
        tokens: what :func:`count_tokens` returned for the step.
        mesh: the mesh.
    """
    if total.ndim:
        raise ShapeError(f'a loss of shape {tuple(total.shape)} is no sum; give it reduction="sum"')
    if isinstance(total, DTensor):
        total = total.full_tensor()
    return (total.double() * (_token_ranks(mesh) / tokens.double())).to(total.dtype)


def mean_loss(losses: Tensor | Iterable[Tensor], mesh: NamedMesh) -> Tensor:
    """Return the mean loss of a step, the same on every rank of the mesh: what to print, and to compare between runs; communicates.

    Args:
        losses: what this rank called ``backward()`` on in the step, one for each micro-batch, or their sum; or what ``pipe.step``
            or ``pipe.eval`` returned. Parts of a mean, as of :func:`token_mean`, or means divided by the number of micro-batches.
        mesh: the mesh; every rank of it calls this, pipeline stages without a loss too, with zeros or nothing.
    """
    total = sum_of([losses] if isinstance(losses, Tensor) else losses, mesh)
    axes = [*_token_axes(mesh), *(["pp"] if "pp" in mesh.layout else [])]
    return _summed(total, mesh, axes) / _token_ranks(mesh)


def sum_of(losses: Iterable[Tensor], mesh: NamedMesh) -> Tensor:
    """Return the sum of losses on this rank, in float64 and without a graph."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for each in losses:
        local = each.full_tensor() if isinstance(each, DTensor) else each
        total = total + local.detach().to(total).sum()
    return total


def _summed(tensor: Tensor, mesh: NamedMesh, axes: Sequence[str]) -> Tensor:
    """Return a tensor's sum over the ranks along some axes, with one collective for each."""
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=mesh.group(axis))
    return tensor
