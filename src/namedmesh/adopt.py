"""Reading a layout off meshes and groups that somebody else made."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._torch import is_registered
from namedmesh.errors import LayoutError, format_items
from namedmesh.layout import Layout


def layout_of_mesh(mesh: DeviceMesh) -> Layout:
    """Return the layout that a torch mesh has, its axes ordered by stride, the slowest first; LayoutError if it has none."""
    given: object = mesh
    if not isinstance(given, DeviceMesh):
        raise LayoutError(
            f"mesh must be torch's DeviceMesh, got {given!r}; a NamedMesh has one: mesh.device_mesh"
        )
    if mesh.get_coordinate() is None:
        raise LayoutError(
            f"rank {dist.get_rank()} is not in the DeviceMesh over ranks {format_items(mesh.mesh.flatten().tolist())}; adopt it "
            "on those ranks only"
        )
    names = mesh.mesh_dim_names
    if not names:
        raise LayoutError(
            f"the DeviceMesh of shape {tuple(mesh.shape)} has no names; make it with mesh_dim_names=, one for each axis"
        )
    ranks = mesh.mesh
    order = sorted(range(ranks.ndim), key=lambda dim: -_stride(ranks, dim))
    flat = ranks.permute(order).flatten().tolist()
    expected = list(range(min(flat), min(flat) + len(flat)))
    if flat != expected:
        place = next(i for i, (got, want) in enumerate(zip(flat, expected, strict=True)) if got != want)
        raise LayoutError(
            f"the ranks of the DeviceMesh are not a range cut along its axes: rank {flat[place]} stands where a "
            f"row-major order of {tuple(names[dim] for dim in order)} has rank {expected[place]}; adopt the whole "
            "mesh rather than a slice of it, or make the mesh with init_mesh"
        )
    return Layout.from_shape(
        [names[dim] for dim in order], [ranks.size(dim) for dim in order], rank_offset=flat[0]
    )


def _stride(ranks: torch.Tensor, dim: int) -> int:
    """Return the distance between neighbors on a dim; a dim of size 1 keeps its place among its neighbors."""
    if ranks.size(dim) > 1:
        corner = [0] * ranks.ndim
        corner[dim] = 1
        return int(ranks[tuple(corner)] - ranks[(0,) * ranks.ndim])
    return next((_stride(ranks, after) for after in range(dim + 1, ranks.ndim) if ranks.size(after) > 1), 0)


def layout_of_groups(groups: Mapping[str, dist.ProcessGroup], rank: int) -> Layout:
    """Return the layout that process groups by axis have, slowest axis first; LayoutError if they have none."""
    problems = [
        f"the group of axis {axis!r} is one that rank {rank} is not in; give this rank's own ProcessGroup on each axis"
        for axis, group in groups.items()
        if not isinstance(group, dist.ProcessGroup)  # torch gives a number to ranks that are not in a group
    ]
    if problems:
        raise LayoutError(*problems)
    sizes = [group.size() for group in groups.values()]
    layout = Layout.from_shape(list(groups), sizes)
    # The first rank of the mesh: this rank, less its distance from there on each axis.
    distance = sum(
        group.rank() * stride for group, stride in zip(groups.values(), layout.strides, strict=True)
    )
    if rank < distance:
        raise LayoutError(
            f"rank {rank} cannot be number {distance} of {layout}, which it is by its place in these groups; give the axes "
            "from the slowest to the fastest"
        )
    layout = Layout.from_shape(list(groups), sizes, rank_offset=rank - distance)
    for axis, group in groups.items():
        if not is_registered(group):
            problems.append(
                f"the group of axis {axis!r} is a {type(group).__name__} that torch.distributed does not know, so that its "
                "ranks cannot be told; leave the axis out of the mesh"
            )
            continue
        got, expected = tuple(dist.get_process_group_ranks(group)), layout.group(rank, axis)
        if got != expected:
            problems.append(
                f"the group of axis {axis!r} has ranks {format_items(got)}, but {layout} has {format_items(expected)} for rank "
                f"{rank}; give the axes from the slowest to the fastest"
            )
    if problems:
        raise LayoutError(*problems)
    return layout
