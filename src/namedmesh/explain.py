"""A mesh in words: where a rank stands, what a process group is, who shares what with whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh._torch import is_registered
from namedmesh.errors import MeshError, count_of, listing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from namedmesh.groups import Communicator
    from namedmesh.layout import Layout


def explain_rank(layouts: Mapping[str, Layout], rank: int) -> str:
    """Return where a rank stands on each axis, and with whom.

    Example:
        >>> from namedmesh import Layout
        >>> print(explain_rank({"mesh": Layout(pp=2, dp=2, tp=2)}, 5))
        rank 5 of pp=2 x dp=2 x tp=2 (8 ranks)
          pp: 1 of 2, with ranks 1, 5
          dp: 0 of 2, with ranks 5, 7
          tp: 1 of 2, with ranks 4, 5
    """
    lines: list[str] = []
    explained: set[str] = set()
    for name, layout in layouts.items():
        lines.append(f"rank {rank} of {layout}" if name == "mesh" else f"in view {name!r}, {layout}")
        for axis, at in layout.coords(rank).items():
            if axis not in explained:
                lines.append(_on_axis(layout, rank, axis, at))
        explained.update(layout)
    return "\n".join(lines)


def _on_axis(layout: Layout, rank: int, axis: str, at: int) -> str:
    if layout[axis] == 1:
        return f"  {axis}: 0 of 1, alone"
    return f"  {axis}: {at} of {layout[axis]}, with ranks {listing(layout.group(rank, axis))}"


def explain_group(
    layouts: Mapping[str, Layout], communicators: Sequence[Communicator], group: dist.ProcessGroup
) -> str:
    """Return what a process group is: its axes, its ranks, its backend, and who else uses it.

    Raises:
        MeshError: the group is not one of this mesh.
    """
    if not isinstance(group, dist.ProcessGroup) or not is_registered(group):
        what = "was destroyed" if isinstance(group, dist.ProcessGroup) else f"is a {type(group).__name__}"
        raise MeshError(f"explain() got a group that {what}; give a process group that this rank is in")
    made = [communicator for communicator in communicators if communicator.group is group]
    if not made:
        raise MeshError(
            f"the group {group.group_name!r} ({group.group_desc}) of ranks "
            f"{listing(dist.get_process_group_ranks(group))} is not one of this mesh's"
        )
    ranks = made[0].ranks
    uses = [
        f"{axis} of {name!r}" if name != "mesh" else axis
        for name, layout in layouts.items()
        for axis in layout
        if layout.group(dist.get_rank(), axis) == ranks
    ]
    uses += [communicator.label for communicator in made if communicator.label not in uses]
    owner = "made by this mesh" if made[0].owned else "not owned by this mesh"
    return (
        f"group {'/'.join(dict.fromkeys(uses))}: ranks {listing(ranks, limit=16)} ({len(ranks)}), "
        f"{dist.get_backend(group)}, {owner}, torch name {group.group_name}"
    )


def explain_mesh(
    layouts: Mapping[str, Layout],
    communicators: Sequence[Communicator],
    rank: int,
    device: torch.device,
) -> str:
    """Return the axes, this rank's place, and the communicators that it holds."""
    owned = [
        communicator for communicator in communicators if communicator.owned and len(communicator.ranks) > 1
    ]
    held = ", ".join(f"{communicator.label} ({len(communicator.ranks)} ranks)" for communicator in owned)
    count = count_of(len(owned), "communicator")
    return f"{explain_rank(layouts, rank)}\n  on {device}, with {count} beside the world's{': ' + held if held else ''}"
