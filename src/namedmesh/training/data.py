"""Which ranks get which samples, and the mesh over which their gradients are averaged."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from namedmesh._torch import constant_of_mesh, joined
from namedmesh.errors import AgreementError, AxisError, listing
from namedmesh.training.reduction import all_reduced

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from namedmesh.mesh import NamedMesh

_DATA = ("dp", "dp_replicate", "dp_shard")
_SAME_SAMPLES = ("pp", "cp", "tp")


@constant_of_mesh
def data_axes(mesh: NamedMesh) -> tuple[str, ...]:
    """Return the axes along which samples differ: ``dp``, or those of ``dp_replicate`` and ``dp_shard`` that exist.

    Prevents: ranks that draw samples by their global rank, so that the ranks of one tensor-parallel group work
    on different samples and sum what does not belong together.

    Raises:
        AxisError: the mesh has an axis of another name, with more than one rank: whether samples differ along
            it is not known.

    Example:
        >>> import torch.distributed as dist
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(pp=1, dp_replicate=1, dp_shard=-1, tp=1, device="cpu")
        >>> training.data_axes(mesh)
        ('dp_replicate', 'dp_shard')
        >>> mesh.close(); dist.destroy_process_group()
    """
    unknown = [
        axis
        for axis, size in mesh.layout.items()
        if size > 1 and axis not in _DATA and axis not in _SAME_SAMPLES
    ]
    if unknown:
        raise AxisError(
            *(
                f"axis {axis!r} is none of {(*_DATA, *_SAME_SAMPLES)}, so it is not known whether samples differ "
                "along it; make the mesh with these names, and add what has others with mesh.add_view(...)"
                for axis in unknown
            )
        )
    return tuple(axis for axis in mesh.layout if axis in _DATA)


@constant_of_mesh
def token_axes(mesh: NamedMesh) -> tuple[str, ...]:
    """Return the axes along which ranks have different tokens: those along which samples differ, and cp."""
    return data_axes(mesh) + (("cp",) if "cp" in mesh.layout else ())


class SamplerKwargs(TypedDict):
    """What torch's samplers want to know of the mesh."""

    num_replicas: int
    rank: int


def sampler_kwargs(mesh: NamedMesh) -> SamplerKwargs:
    """Return the arguments ``num_replicas`` and ``rank`` of torch's samplers, on this rank.

    Prevents: a sampler left to its defaults, which are those of the default group: every rank gets other
    samples, also those of one tensor-parallel, context-parallel or pipeline group.

    A ``StatefulDataLoader`` takes such a sampler as any loader does.

    Raises:
        AxisError: as for :func:`data_axes`.

    Example:
        On a mesh of ``dp=2, tp=2`` the ranks 0 and 1 get rank 0 of 2, the ranks 2 and 3 rank 1 of 2:

        >>> import torch.distributed as dist
        >>> from torch.utils.data import DistributedSampler
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> training.sampler_kwargs(mesh)
        {'num_replicas': 1, 'rank': 0}
        >>> list(DistributedSampler(range(3), shuffle=False, **training.sampler_kwargs(mesh)))
        [0, 1, 2]
        >>> mesh.close(); dist.destroy_process_group()
    """
    axes = data_axes(mesh)
    return {
        "num_replicas": mesh.size(*axes) if axes else 1,
        "rank": mesh.rank(*axes) if axes else 0,
    }


def check_same_batch(batch: object, mesh: NamedMesh) -> None:
    """Refuse a batch that differs between ranks that must have the same samples; communicates.

    Prevents: loaders that shuffle with another seed on each rank, or drop samples on some. The ranks of a
    tensor-parallel group then sum activations of different samples, and the loss goes down all the same.

    Every rank of the mesh calls it, on the batch as it is loaded (before the sequence is sharded over cp). It
    copies the batch to the CPU and hashes it: for the first steps, or every thousandth.

    Args:
        batch: tensors, in dicts, lists and tuples; anything else counts by its ``repr``. None on a rank that
            loads nothing, such as a stage in the middle of a pipeline, which is then not compared.
        mesh: the mesh.

    Raises:
        AgreementError: on every rank, naming the ranks whose batches differ.
        AxisError: as for :func:`data_axes`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> training.check_same_batch({"tokens": torch.arange(3), "id": "a"}, mesh)
        >>> mesh.close(); dist.destroy_process_group()
    """
    axes = data_axes(mesh)
    mine = torch.zeros(mesh.size(), dtype=torch.int64)
    mine[mesh.rank()] = 0 if batch is None else _digest(batch)
    digests = all_reduced(mine.to(mesh.device), mesh, mesh.layout.axes).tolist()
    shares: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, digest in zip(mesh.layout.ranks, digests, strict=True):
        if digest:
            coords = mesh.layout.coords(rank)
            shares.setdefault(tuple(coords[axis] for axis in axes), {}).setdefault(digest, []).append(rank)
    problems = [
        f"{' and '.join(f'ranks {listing(ranks)}' for ranks in found.values())} loaded different samples, and must "
        "load the same; give their samplers sampler_kwargs(mesh) and one seed, and call this before the sequence "
        "is sharded"
        for found in shares.values()
        if len(found) > 1
    ]
    if problems:
        raise AgreementError(*problems)


def _digest(batch: object) -> int:
    """Return a hash of the contents, equal for others with a chance of 2 to the -62; never 0."""
    digest = hashlib.sha256()
    for text in _contents(batch):
        digest.update(text)
    return int.from_bytes(digest.digest()[:8], "little") >> 1 | 1


def _contents(value: Any) -> list[bytes]:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        return [repr((value.dtype, value.shape)).encode(), ctypes.string_at(flat.data_ptr(), flat.nbytes)]
    if isinstance(value, Mapping):
        value = sorted(
            value.items(), key=lambda item: repr(item[0])
        )  # ranks may fill theirs in different orders
    if isinstance(value, list | tuple):
        return [b"(", *(text for each in value for text in _contents(each)), b")"]
    return [repr(value).encode()]


def fsdp_mesh(mesh: NamedMesh) -> DeviceMesh:
    """Return the mesh that ``fully_shard(mesh=...)`` wants; communicates the first time, where cp is beside dp.

    Prevents: parameters averaged over ``mesh["dp"]`` in a mesh that has ``cp`` too. The ranks along cp see other
    tokens of the same samples and hold the same parameters; without them in the mean their weights drift apart.

    Without ``dp_replicate`` it is 1-D, over dp (or dp_shard) times cp; with it 2-D, for HSDP. Axes of one rank
    are left out. Parallelize over ``mesh["tp"]`` first, then call ``fully_shard``.

    Where the parameters are DTensors over the whole mesh already, replicated over its data axes, torch 2.13 has
    the better way, which needs no product of axes: ``fully_shard(model, mesh=mesh.device_mesh,
    dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))``, with ``replicate="dp_replicate"`` for HSDP.

    Raises:
        AxisError: there is no axis to shard over; or as for :func:`data_axes`.

    Example:
        On a mesh of ``dp=2, cp=2, tp=2`` the ranks 0, 2, 4 and 6 share parameters:

        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, cp=1, tp=1, device="cpu")
        >>> training.fsdp_mesh(mesh) is mesh["dp"]
        True
        >>> layer = fully_shard(torch.nn.Linear(2, 2), mesh=training.fsdp_mesh(mesh))
        >>> mesh.close(); dist.destroy_process_group()
    """
    data_axes(mesh)
    shard = [axis for axis in mesh.layout if axis in {"dp", "dp_shard", "cp"}]
    if not shard:
        raise AxisError(
            f"{mesh.layout} has no axis to shard parameters over; make it with one of ('dp', 'dp_shard', 'cp'), if "
            "only of size 1, as in init_mesh(dp_shard=1, ...)"
        )
    sharded = mesh.flatten(*([axis for axis in shard if mesh.size(axis) > 1] or shard[:1]))
    if "dp_replicate" not in mesh.layout or mesh.size("dp_replicate") == 1:
        return sharded
    return joined([mesh["dp_replicate"], sharded])
