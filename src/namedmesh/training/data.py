"""Load the right samples on each rank, and check that the ranks have done so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh._checks.digests import digest
from namedmesh._errors import AgreementError, AxisError, format_ranks
from namedmesh.layout import Layout
from namedmesh.layout.axes import DATA_AXES, SAME_SAMPLE_AXES
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh


def find_data_axes(mesh: NamedMesh) -> list[str]:
    """Return the data-parallel axes of the mesh: along them, ranks load different samples.

    Raises:
        AxisError: an axis has an unknown name, so it is not known whether samples differ along it.
    """
    known_axes = (*DATA_AXES, *SAME_SAMPLE_AXES)
    problems: list[str] = []
    for axis in mesh.layout:
        # An axis of one rank has no effect on samples, whatever its meaning is.
        is_known = axis in known_axes or mesh.size(axis) == 1
        if not is_known:
            problems.append(
                f"axis {axis!r} is none of {known_axes}, so it is not known whether samples "
                "differ along it; make the mesh with these names, and add an axis of another "
                "name with mesh.add_view(...)"
            )
    if problems:
        raise AxisError(*problems)
    return [axis for axis in mesh.layout if axis in DATA_AXES]


def sampler_kwargs(mesh: NamedMesh) -> dict[str, Any]:
    """Return ``num_replicas`` and ``rank`` for a sampler such as ``DistributedSampler``.

    They are the number of ranks over all data-parallel axes and the position of this rank among
    them. With ``dp=2, tp=2``, ranks 0 and 1 get rank 0 of 2, and ranks 2 and 3 get rank 1 of 2.

    Args:
        mesh: the mesh.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        AxisError: the mesh has an axis of unknown meaning.
    """
    mesh = require_named_mesh(mesh, "sampler_kwargs")
    axes = find_data_axes(mesh)
    if not axes:
        return {"num_replicas": 1, "rank": 0}
    return {"num_replicas": mesh.size(*axes), "rank": mesh.rank(*axes)}


def find_ranks_with_same_samples(layout: Layout, mesh: NamedMesh) -> set[int]:
    """Return the ranks of another layout that have this rank's position among all data ranks.

    Samplers know this position, and not the axes. The number of data ranks is equal in both. Of the
    ranks that load the same samples, they are those with this rank's coordinates, as far as the
    sizes of these axes are equal.

    Args:
        layout: the other layout.
        mesh: the mesh of this rank.
    """
    same = {}
    for axis in SAME_SAMPLE_AXES:
        if axis in layout and axis in mesh.layout and layout[axis] == mesh.layout[axis]:
            same[axis] = mesh.coords[axis]
    position = _find_position(mesh.layout, mesh.global_rank)
    return {rank for rank in layout.where(**same) if _find_position(layout, rank) == position}


def _find_position(layout: Layout, rank: int) -> int:
    """Return the position of a rank among those that load different samples."""
    axes = []
    for axis in layout:
        if axis not in SAME_SAMPLE_AXES:
            axes.append(axis)
    return layout.group_rank(rank, *axes) if axes else 0


def check_same_batch(batch: object, mesh: NamedMesh) -> None:
    """Check that ranks load the same samples exactly if they differ along pp, cp and tp only.

    Call it with the batch as it was loaded, before it is sharded or moved to a device. It copies
    the batch to the CPU and hashes it, so call it in the first steps only, or in every thousandth.

    Collective: every rank of the mesh must call it. One all-reduce for each axis.

    Args:
        batch: tensors, NumPy arrays and any objects, in dicts, lists and tuples. Objects are
            compared by their pickled state, functions and classes by name, and objects without a
            comparable state, such as iterators and open files, by type only. A rank that loads
            nothing, such as the rank of a middle pipeline stage, passes None and is not compared.
        mesh: the mesh.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        AxisError: the mesh has an axis of unknown meaning.
        AgreementError: on every rank, with the ranks that have different batches, or equal ones.
    """
    mesh = require_named_mesh(mesh, "check_same_batch")
    axes = find_data_axes(mesh)
    # Each rank fills its own entry, so the sum over all axes gathers the digests. Loss masks and
    # other data may be on the CPU, but the all-reduce needs a tensor on the mesh's device.
    digests = torch.zeros(mesh.size(), dtype=torch.int64, device=mesh.device)
    if batch is not None:
        digests[mesh.rank()] = digest(batch)  # never 0
    all_reduce_over_axes(digests, mesh, [*mesh.layout])
    batch_by_rank: dict[int, object] = {}
    share_by_rank: dict[int, object] = {}
    for rank, batch_digest in zip(mesh.ranks(), digests.tolist(), strict=True):
        if batch_digest != 0:
            coords = mesh.layout.coords(rank)
            batch_by_rank[rank] = batch_digest
            share_by_rank[rank] = tuple([coords[axis] for axis in axes])
    remedy = "give their samplers sampler_kwargs(mesh)"
    wrong = f"different samples, and must load the same; {remedy} and one seed"
    problems = _find_conflicts(share_by_rank, batch_by_rank, wrong)
    wrong = f"the same samples, and must load different ones; {remedy}"
    problems += _find_conflicts(batch_by_rank, share_by_rank, wrong)
    if problems:
        raise AgreementError(*problems)


def _find_conflicts(keys: Mapping[int, object], values: Mapping[int, object], wrong: str) -> list[str]:
    """Find ranks that have the same key and different values.

    Args:
        keys: the key of each rank.
        values: the value of each rank.
        wrong: the description of such ranks, for the messages.

    Returns:
        A message for each key with several values. It groups the ranks by value.
    """
    ranks_by_key: dict[object, dict[object, list[int]]] = {}
    for rank, key in keys.items():
        ranks_by_value = ranks_by_key.setdefault(key, {})
        ranks_by_value.setdefault(values[rank], []).append(rank)
    problems: list[str] = []
    for ranks_by_value in ranks_by_key.values():
        if len(ranks_by_value) > 1:
            groups = " and ".join(map(format_ranks, ranks_by_value.values()))
            problems.append(f"{groups} loaded {wrong}")
    return problems


def all_reduce_over_axes(tensor: Tensor, mesh: NamedMesh, axes: Sequence[str]) -> Tensor:
    """Sum a tensor in place over the ranks along several axes.

    Collective: every rank along these axes must call it. One all-reduce for each axis, so that no
    group over several axes has to be created.

    Args:
        tensor: the tensor, on the mesh's device.
        mesh: the mesh.
        axes: the axes.

    Returns:
        The tensor itself.
    """
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=mesh.group(axis))
    return tensor
