"""Which ranks get which samples, the mean over their tokens, and the mesh over which gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from namedmesh._torch import concatenate_meshes
from namedmesh.errors import AgreementError, AxisError, ShapeError, listing
from namedmesh.training.comparison import digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from namedmesh.mesh import NamedMesh

_DATA = ("dp", "dp_replicate", "dp_shard")
_SAME_SAMPLES = ("pp", "cp", "tp")
_UNREAD = -1  # in place of the hash of a batch


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


class SamplerKwargs(TypedDict):
    """What torch's samplers want to know of the mesh."""

    num_replicas: int
    rank: int


def sampler_kwargs(mesh: NamedMesh) -> SamplerKwargs:
    """Return the arguments ``num_replicas`` and ``rank`` of torch's samplers, on this rank.

    On a mesh of ``dp=2, tp=2`` the ranks 0 and 1 get rank 0 of 2, the ranks 2 and 3 rank 1 of 2.

    Raises:
        AxisError: an axis of a name of yours has more than one rank: whether samples differ along it is not known.
    """
    place, ranks = 0, 1
    for axis in _data_axes(mesh):
        place, ranks = place * mesh.size(axis) + mesh.rank(axis), ranks * mesh.size(axis)
    return {"num_replicas": ranks, "rank": place}


def check_same_batch(batch: object, mesh: NamedMesh, *, distinct: bool = True) -> None:
    """Refuse a batch that differs between ranks that must have the same samples, or is another data rank's; communicates.

    It copies the batch, as it is loaded, to the CPU and hashes it: for the first steps, or every thousandth.

    Args:
        batch: tensors, NumPy arrays and anything else, in dicts, lists, tuples, dataclasses and other objects. None on a rank
            that loads nothing, such as a stage in the middle of a pipeline, which is then not compared.
        mesh: the mesh; every rank of it calls this.
        distinct: whether ranks with other coordinates on the data axes must have other batches.

    Raises:
        AgreementError: on every rank, naming the ranks whose batches differ, or cannot be read.
        AxisError: as for :func:`sampler_kwargs`.
    """
    axes, unread = _data_axes(mesh), None
    try:
        own = 0 if batch is None else digest(batch)
    except Exception as error:  # noqa: BLE001  the others wait
        own, unread = _UNREAD, error
    found = torch.tensor(own, device=mesh.device)
    for axis in [*mesh.layout][::-1]:  # in the end by all coordinates, in the order of the axes
        parts = [torch.empty_like(found) for _ in range(mesh.size(axis))]
        dist.all_gather(parts, found, group=mesh.group(axis))
        found = torch.stack(parts)
    by_rank = dict(zip(mesh.layout.ranks, found.flatten().tolist(), strict=True))
    if problems := _differences(by_rank, mesh, axes, distinct=distinct):
        raise AgreementError(*problems) from unread


def _differences(
    by_rank: dict[int, int], mesh: NamedMesh, axes: Sequence[str], *, distinct: bool
) -> list[str]:
    """Return one sentence for each set of ranks whose batches are not what they must be."""
    if unread := [rank for rank, each in by_rank.items() if each == _UNREAD]:
        return [f"ranks {listing(unread)} cannot read their batch; see the cause there"]
    shares: dict[tuple[int, ...], dict[int, list[int]]] = {}
    loaded: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for rank, each in by_rank.items():
        if each:
            coords = mesh.layout.coords(rank)
            share = tuple(coords[axis] for axis in axes)
            shares.setdefault(share, {}).setdefault(each, []).append(rank)
            loaded.setdefault(each, {}).setdefault(share, []).append(rank)
    problems = _groups_in_words(
        shares.values(),
        "different samples, and must load the same; give their samplers sampler_kwargs(mesh) and one seed, and call this before "
        "the sequence is sharded",
    )
    if distinct:
        problems += _groups_in_words(
            loaded.values(),
            "the same samples, and must load different ones; give their samplers sampler_kwargs(mesh), or pass distinct=False where "
            "this is meant",
        )
    return problems


def _groups_in_words(found: Iterable[Mapping[Any, Sequence[int]]], what: str) -> list[str]:
    groups = [[f"ranks {listing(ranks)}" for ranks in each.values()] for each in found if len(each) > 1]
    return [f"{' and '.join(each)} loaded {what}" for each in groups]


def fsdp_mesh(mesh: NamedMesh) -> DeviceMesh:
    """Return the mesh that ``fully_shard(mesh=...)`` wants; communicates the first time, where cp is beside dp.

    It is 1-D, over dp (or dp_shard) times cp, whose ranks see other tokens of the same samples; with ``dp_replicate`` 2-D, for HSDP.
    Axes of one rank are left out. Call ``fully_shard`` after tensor parallelism.

    Raises:
        AxisError: there is no axis to shard over; or as for :func:`sampler_kwargs`.
    """
    _data_axes(mesh)
    shard = [axis for axis in mesh.layout if axis in {"dp", "dp_shard", "cp"}]
    if not shard:
        raise AxisError(
            f"{mesh.layout} has no axis to shard parameters over; make it with one of ('dp', 'dp_shard', 'cp'), if "
            "only of size 1, as in init_mesh(dp_shard=1, ...)"
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

    Returns:
        The number, a tensor of no dims, for :func:`token_mean`.

    Raises:
        AxisError: as for :func:`sampler_kwargs`.
    """
    _data_axes(mesh)
    return _summed(torch.as_tensor(counted, device=mesh.device).sum(), mesh, _token_axes(mesh))


def token_mean(total: Tensor, tokens: Tensor, mesh: NamedMesh) -> Tensor:
    """Return what a sum of losses adds to the mean over all tokens of a step, to call ``backward()`` on; nothing is sent.

    The gradients, after FSDP2 or DDP averaged them over the ranks of :func:`fsdp_mesh`, are those of one process with all the
    tokens, however many of them each rank has: a mean of the ranks' means is not. Micro-batches add up: pass the sum of each, with
    the same ``tokens``, also in the loss of a :func:`pipeline` (``reduction="sum"``). The mean to print is :func:`mean_loss`.

    Args:
        total: the sum of the losses of some of this rank's tokens, of no dims; from ``loss_parallel`` the DTensor that it is.
        tokens: what :func:`count_tokens` returned for the step.
        mesh: the mesh.

    Returns:
        A tensor of no dims; not a number where no token of the whole batch counts, as ``cross_entropy`` has it.

    Raises:
        ShapeError: ``total`` has dims, so it is no sum.
    """
    if total.ndim:
        raise ShapeError(
            f"the loss has shape {tuple(total.shape)}, and must be one number: the sum over this rank's tokens, as "
            'cross_entropy(..., reduction="sum") returns it'
        )
    if isinstance(total, DTensor):
        total = total.full_tensor()
    return (total.double() * (_token_ranks(mesh) / tokens.double())).to(total.dtype)


def mean_loss(losses: Tensor | Iterable[Tensor], mesh: NamedMesh) -> Tensor:
    """Return the mean loss of a step, the same on every rank of the mesh: what to print, and to compare between runs; communicates.

    Args:
        losses: what this rank called ``backward()`` on in the step, one for each micro-batch, or their sum; or what ``pipe.step``
            or ``pipe.eval`` returned. Parts of a mean, as of :func:`token_mean`, or means divided by the number of micro-batches.
        mesh: the mesh; every rank of it calls this, pipeline stages without a loss too, with zeros or nothing.

    Returns:
        The sum over micro-batches and stages, averaged over the ranks along dp and cp: of no dims, in float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for each in [losses] if isinstance(losses, Tensor) else losses:
        local = each.full_tensor() if isinstance(each, DTensor) else each
        total = total + local.detach().to(total).sum()
    axes = [*_token_axes(mesh), *(["pp"] if "pp" in mesh.layout else [])]
    return _summed(total, mesh, axes) / _token_ranks(mesh)


def _summed(tensor: Tensor, mesh: NamedMesh, axes: Sequence[str]) -> Tensor:
    """Return a tensor's sum over the ranks along some axes: a number takes one collective for each axis."""
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=mesh.group(axis))
    return tensor
