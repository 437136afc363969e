"""The texts of ``mesh.explain()`` about a rank, a process group or a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from namedmesh._errors import MeshError, format_count, format_items
from namedmesh.layout import Layout
from namedmesh.mesh.accessors import MeshAccessors


def explain_mesh(mesh: MeshAccessors) -> str:
    """Describe a mesh: the coordinates, the device and the communicators of this rank.

    Args:
        mesh: the mesh.
    """
    # A group of one rank has no communicator, and the default group is not the mesh's own.
    owned = [found for found in mesh.communicators if found.owned and len(found.ranks) > 1]
    summary = f"{format_count(len(owned), 'communicator')} in addition to the default group"
    if owned:
        labels = [f"{communicator.label} ({len(communicator.ranks)} ranks)" for communicator in owned]
        summary += f": {', '.join(labels)}"
    return f"{explain_rank(list_layouts(mesh), mesh.global_rank)}\n  on {mesh.device}, with {summary}"


def list_layouts(mesh: MeshAccessors) -> list[tuple[str, Layout]]:
    """Return the layout of a mesh, with the name "", and the layouts of its views with theirs.

    Args:
        mesh: the mesh.
    """
    return [("", mesh.layout), *mesh.views.items()]


def explain_rank(layouts: Sequence[tuple[str, Layout]], rank: int) -> str:
    """Describe a rank: its coordinate on each axis, and the ranks of its group there.

    Args:
        layouts: layouts of the same ranks, with the name of the view of each; "" is no view. An
            axis is described in the first layout that has it.
        rank: a global rank.

    Raises:
        LayoutError: the rank is outside the layouts.

    Example:
        >>> from namedmesh import Layout
        >>> print(explain_rank([("", Layout(pp=2, dp=2, tp=2))], 5))
        rank 5 of pp=2 x dp=2 x tp=2 (8 ranks)
          pp: 1 of 2, with ranks 1, 5
          dp: 0 of 2, with ranks 5, 7
          tp: 1 of 2, with ranks 4, 5
    """
    lines: list[str] = []
    described: set[str] = set()
    for view, layout in layouts:
        lines.append(f"in view {view!r}, {layout}" if view else f"rank {rank} of {layout}")
        for axis, coord in layout.coords(rank).items():
            if axis in described:
                continue
            described.add(axis)
            ranks = layout.group(rank, axis)
            members = f"with ranks {format_items(ranks)}" if len(ranks) > 1 else "alone"
            lines.append(f"  {axis}: {coord} of {len(ranks)}, {members}")
    return "\n".join(lines)


def explain_group(mesh: MeshAccessors, group: object) -> str:
    """Describe a process group of a mesh: its axes, ranks, backend and owner.

    Args:
        mesh: the mesh.
        group: a process group that this rank has through the mesh.

    Raises:
        MeshError: it is not a process group, or not one of the mesh.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise MeshError(
            f'group must be a process group, got {group!r}; write mesh.explain(mesh.group("dp")), or rank=...'
        )
    # The default group can be in use under several labels.
    found = [communicator for communicator in mesh.communicators if communicator.group is group]
    if not found:
        raise MeshError(f"the group {group.group_name!r} ({group.group_desc}) is not one of this mesh's")
    ranks = found[0].ranks
    uses = []
    for view, layout in list_layouts(mesh):
        for axis in layout:
            if layout.group(mesh.global_rank, axis) != ranks:
                continue
            use = f"{axis} of {view!r}" if view else axis
            uses.append(use)
    for communicator in found:
        if communicator.label not in uses:
            uses.append(communicator.label)
    owner = "made by this mesh" if found[0].owned else "not owned by this mesh"
    return (
        f"group {'/'.join(uses)}: ranks {format_items(ranks, limit=16)} ({len(ranks)}), "
        f"{dist.get_backend(group)}, {owner}, torch name {group.group_name}"
    )
