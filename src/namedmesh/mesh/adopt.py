"""Infer the layout of meshes and groups that other code has made."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._errors import LayoutError, format_items
from namedmesh._torch.groups import is_registered
from namedmesh.layout.layout import Layout
from namedmesh.layout.sizes import format_axes


def infer_layout_from_mesh(mesh: DeviceMesh) -> Layout:
    """Return the layout of a torch mesh. Its axes are ordered by stride, the slowest first.

    Args:
        mesh: a mesh with names. Its dims may be in any order.

    Raises:
        LayoutError: the mesh has no names, does not contain this rank, or its ranks are not a range
            in row-major order.
    """
    argument: object = mesh
    if not isinstance(argument, DeviceMesh):
        raise LayoutError(
            f"mesh must be torch's DeviceMesh, got {argument!r}; a NamedMesh has one: mesh.device_mesh"
        )
    ranks = mesh.mesh
    # torch creates a mesh over some ranks of the world on every rank. The others have no
    # coordinates.
    if mesh.get_coordinate() is None:
        raise LayoutError(
            f"rank {dist.get_rank()} is not in the DeviceMesh over ranks "
            f"{format_items(ranks.flatten().tolist())}; adopt it on those ranks only"
        )
    names = mesh.mesh_dim_names
    if not names:
        raise LayoutError(
            f"the DeviceMesh of shape {tuple(mesh.shape)} has no names; make it with "
            "mesh_dim_names=, one for each axis"
        )
    # torch accepts the dims in any order, such as (tp, dp) over transposed ranks. A Layout is
    # row-major.
    order = sorted(range(ranks.ndim), key=lambda dim: -_find_stride(ranks, dim))
    axes = tuple(names[dim] for dim in order)
    flat = ranks.permute(order).flatten().tolist()
    first = min(flat)
    for index, rank in enumerate(flat):
        if rank != first + index:
            raise LayoutError(
                "the ranks of the DeviceMesh are not a contiguous range in row-major order of "
                f"{axes}: expected rank {first + index} at position {index}, got rank {rank}; "
                "adopt the full mesh instead of a slice, or make the mesh with init_mesh"
            )
    return Layout.from_shape(axes, [ranks.size(dim) for dim in order], rank_offset=first)


def _find_stride(ranks: torch.Tensor, dim: int) -> int:
    """Return the difference between the ranks of neighbors along a dim of a mesh.

    A dim of size 1 has no neighbors. It gets the stride of the next dim that has some, so that
    sorting by stride does not move it.
    """
    for candidate in range(dim, ranks.ndim):
        if ranks.size(candidate) > 1:
            origin = [0] * ranks.ndim
            neighbor = origin.copy()
            neighbor[candidate] = 1
            return int(ranks[tuple(neighbor)] - ranks[tuple(origin)])
    return 0


def infer_layout_from_groups(
    groups: Mapping[str, dist.ProcessGroup] | Mapping[str | tuple[str, ...], dist.ProcessGroup], rank: int
) -> tuple[Layout, dict[tuple[str, ...], dist.ProcessGroup]]:
    """Return the layout that process groups form, and the groups by their axes in its order.

    Args:
        groups: this rank's group on each axis, the slowest axis first, and on flattened axes by a
            tuple of their axes.
        rank: the global rank of this process.

    Raises:
        LayoutError: the groups form no layout; all problems at once.
        AxisError: a flattened axis has an unknown axis.
    """
    by_axes = {(axes,) if isinstance(axes, str) else tuple(axes): group for axes, group in groups.items()}
    _check_groups(by_axes, rank)
    single = {axes[0]: group for axes, group in by_axes.items() if len(axes) == 1}
    sizes = [group.size() for group in single.values()]
    layout = Layout.from_shape(single, sizes)
    # The group ranks are the coordinates of this rank. They give its index in the layout, and so
    # the first rank.
    index = 0
    for group, stride in zip(single.values(), layout.strides, strict=True):
        index += group.rank() * stride
    if rank < index:
        raise LayoutError(
            f"the groups do not form the row-major layout {layout}: rank {rank} would have index "
            f"{index} in it; give the axes from the slowest to the fastest"
        )
    layout = Layout.from_shape(single, sizes, rank_offset=rank - index)
    ordered_groups = {}
    problems = []
    for axes, group in by_axes.items():
        actual = tuple(dist.get_process_group_ranks(group))
        expected = layout.group(rank, *axes)
        if actual != expected:
            remedy = "give the axes from the slowest to the fastest"
            if len(axes) > 1:
                remedy = "omit it, or name its axes"
            problems.append(
                f"the group of {_describe(axes)} has ranks {format_items(actual)}, but {layout} "
                f"has {format_items(expected)} for rank {rank}; {remedy}"
            )
        ordered_groups[tuple(axis for axis in layout if axis in axes)] = group
    if problems:
        raise LayoutError(*problems)
    return layout, ordered_groups


def _check_groups(arguments: Mapping[tuple[str, ...], object], rank: int) -> None:
    """Raise a LayoutError for arguments whose ranks torch does not know, by their axes."""
    problems = []
    for axes, argument in arguments.items():
        # torch returns an int, GroupMember.NON_GROUP_MEMBER, on ranks that are not in a group.
        if not isinstance(argument, dist.ProcessGroup):
            problems.append(
                f"the group of {_describe(axes)} is one that rank {rank} is not in; give this "
                "rank's own ProcessGroup on each axis"
            )
        elif not is_registered(argument):
            # torchft's managed groups, for one, are ProcessGroups that torch.distributed does not
            # know.
            problems.append(
                f"the group of {_describe(axes)} is a {type(argument).__name__} that is not "
                "registered in torch.distributed, so its ranks are not known; omit the axis"
            )
    if problems:
        raise LayoutError(*problems)


def _describe(axes: tuple[str, ...]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {format_axes(axes)}"
