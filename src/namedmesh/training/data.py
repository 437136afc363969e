"""Which ranks load which samples, and a check that they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh.arguments import named_mesh
from namedmesh.axes import DATA_AXES, SAME_SAMPLE_AXES
from namedmesh.errors import AgreementError, AxisError, format_items
from namedmesh.fingerprints import digest
from namedmesh.mesh import NamedMesh


def data_axes(mesh: NamedMesh) -> list[str]:
    """Return the axes of the mesh along which samples differ.

    Raises:
        AxisError: the mesh has an axis with another meaning, so it is not known whether samples
            differ along it.
    """
    known = (*DATA_AXES, *SAME_SAMPLE_AXES)
    unknown = [axis for axis in mesh.layout if mesh.size(axis) > 1 and axis not in known]
    if unknown:
        so = f"is none of {known}, so it is not known whether samples differ along it"
        remedy = "make the mesh with these names, and add what has others with mesh.add_view(...)"
        raise AxisError(*[f"axis {axis!r} {so}; {remedy}" for axis in unknown])
    return [axis for axis in mesh.layout if axis in DATA_AXES]


def sampler_kwargs(mesh: NamedMesh) -> dict[str, Any]:
    """Return the arguments ``num_replicas`` and ``rank`` of torch's samplers, on this rank.

    On a mesh of ``dp=2, tp=2`` the ranks 0 and 1 get rank 0 of 2, the ranks 2 and 3 rank 1 of 2.
    """
    mesh = named_mesh(mesh, "sampler_kwargs")
    axes = data_axes(mesh)
    if not axes:
        return {"num_replicas": 1, "rank": 0}
    return {"num_replicas": mesh.size(*axes), "rank": mesh.rank(*axes)}


def check_same_batch(batch: object, mesh: NamedMesh) -> None:
    """Check that the ranks which must load the same samples do, and that others do not.

    It copies the batch, as it is loaded, to the CPU and hashes it: for the first steps, or every
    thousandth. Collective: every rank of the mesh must call it.

    Args:
        batch: tensors, NumPy arrays, and any objects in dicts, lists and tuples. Objects are
            compared by what pickle would write, functions and classes by name, and objects without
            a state to compare, such as iterators and open files, by type alone. None on a rank
            that loads nothing, such as a stage in the middle of a pipeline: such a rank is not
            compared.
        mesh: the mesh.

    Raises:
        AgreementError: on every rank, naming the ranks whose batches differ.
    """
    mesh = named_mesh(mesh, "check_same_batch")
    axes = data_axes(mesh)
    found = torch.zeros(mesh.size(), dtype=torch.int64, device=mesh.device)
    found[mesh.rank()] = 0 if batch is None else digest(batch)
    by_rank = zip(mesh.ranks(), sum_over_axes(found, mesh, [*mesh.layout]).tolist(), strict=True)
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
    groups = [[f"ranks {format_items(ranks)}" for ranks in each.values()] for each in found.values()]
    return [f"{' and '.join(each)} loaded {what}" for each in groups if len(each) > 1]


def sum_over_axes(tensor: Tensor, mesh: NamedMesh, axes: Sequence[str]) -> Tensor:
    """Sum a tensor in place over the ranks along some axes, with one all-reduce for each axis."""
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=mesh.group(axis))
    return tensor
