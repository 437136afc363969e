"""``init_mesh``: from names and sizes to a mesh over live process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh._version import __version__
from namedmesh.agreement import agree
from namedmesh.errors import AxisError, LayoutError, NamedMeshError, did_you_mean
from namedmesh.groups import GroupPool
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

__all__ = ["CANONICAL_AXES", "init_mesh"]

# The names that the field uses. Any identifier will do; options may be given for these before they exist.
CANONICAL_AXES = ("pp", "dp_replicate", "dp_shard", "dp", "cp", "tp", "ep", "etp", "edp")


def init_mesh(
    layout: Layout | None = None,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    options: Mapping[str, GroupOptions] | None = None,
    share_groups: bool = True,
    world_size: int | None = None,
    rank_offset: int = 0,
    part: bool = False,
    **sizes: int,
) -> NamedMesh:
    """A mesh over this job's ranks; communicates.

    Every rank calls it with the same arguments. Where there is no default process group yet, it is made from
    the environment: that of torchrun, or a world of one under plain python.

    Args:
        layout: the layout, instead of ``sizes``.
        device: the device of the mesh, as for :func:`namedmesh.launch.init`.
        backend: the backend of every group that sets no other; by default that of the default group.
        timeout: the timeout of every group that sets no other, and the time that ranks wait for each other
            here; by default that of the default group.
        options: :class:`GroupOptions` by the name of an axis, or of several joined by ``_``. Groups derived
            from an axis inherit them.
        share_groups: whether groups over the same ranks with the same options are one object.
        world_size: how many ranks the mesh covers; by default the whole world.
        rank_offset: the first rank of the mesh.
        part: whether the mesh covers a part of the world only. Then only its ranks call this.
        **sizes: one keyword for each axis, slowest first; one size may be -1, for whatever is left.

    Returns:
        The mesh, the same layout on every rank; on each rank its accessors answer for that rank.

    Raises:
        LayoutError: names or sizes that do not fit; all problems at once.
        AxisError: options for an axis that is not there.
        AgreementError: the ranks were given different arguments, run different versions, or some did not
            call; on every rank, naming the ranks and the field.
        LaunchError: the environment is incomplete, or the device is not there.

    Example:
        >>> mesh = init_mesh(pp=1, dp=-1, tp=1, device="cpu")
        >>> mesh.layout
        Layout(pp=1, dp=1, tp=1)
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    if dist.is_initialized():
        chosen = launch.default_group_device(device)
    else:
        chosen = launch.init(device, backend=backend, timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    defaults = GroupOptions(backend=backend, timeout=timeout)
    request = {
        "layout": _asked_layout(layout, sizes, world_size, rank_offset),
        "options": repr(dict(sorted((options or {}).items()))),
        "defaults": repr(defaults),
        "share_groups": repr(share_groups),
        "device": chosen.type,
        "torch": str(torch.__version__),
        "namedmesh": __version__,
    }
    try:
        resolved = _resolve(layout, sizes, world_size, rank_offset, part=part, world=world, rank=rank)
        _check_options(options or {}, resolved)
    except NamedMeshError:
        # The other ranks may be fine and waiting: let them know before this one gives up. Of a part there is
        # nobody to tell, because which ranks it has is what is wrong.
        if not part:
            _agree(request, range(world), rank, timeout)
        raise
    _agree({**request, "layout": repr(resolved)}, resolved.ranks, rank, timeout)
    pool = GroupPool(defaults=defaults, share=share_groups)
    root = pool.primary(resolved, chosen.type, options or {})
    for axis, said in (options or {}).items():
        if said.gloo_twin and axis in resolved:
            pool.make_twin(resolved, (axis,), said)
    return NamedMesh(resolved, root, pool, chosen, options)


def _agree(request: Mapping[str, str], ranks: range, rank: int, timeout: timedelta | None) -> None:
    agree("init_mesh", request, ranks=ranks, rank=rank, timeout=timeout)


def _asked_layout(
    layout: Layout | None, sizes: Mapping[str, int], world_size: int | None, rank_offset: int
) -> str:
    """What was asked for in words, for a layout that cannot be made."""
    if layout is not None:
        return repr(layout)
    said = [f"{axis}={size!r}" for axis, size in sizes.items()]
    said += [f"world_size={world_size!r}"] * (world_size is not None)
    said += [f"rank_offset={rank_offset!r}"] * (rank_offset != 0)
    return f"Layout({', '.join(said)})"


def _resolve(
    layout: Layout | None,
    sizes: Mapping[str, int],
    world_size: int | None,
    rank_offset: int,
    *,
    part: bool,
    world: int,
    rank: int,
) -> Layout:
    if layout is not None and sizes:
        raise LayoutError(
            f"both {layout!r} and sizes for {', '.join(sizes)} were given; give a layout, or sizes by name"
        )
    if layout is None:
        layout = Layout(
            **sizes,
            world_size=world_size if part or world_size is not None else world,
            rank_offset=rank_offset,
        )
    if not part and layout.ranks != range(world):
        raise LayoutError(
            f"{layout} on ranks {layout.ranks.start} to {layout.ranks.stop - 1} is not the world of {world} ranks; "
            "change a size, give one axis -1 for whatever is left, or say part=True for a mesh over a part"
        )
    if layout.ranks.stop > world or rank not in layout.ranks:
        raise LayoutError(
            f"{layout} on ranks {layout.ranks.start} to {layout.ranks.stop - 1} does not hold rank {rank} of the world "
            f"of {world} ranks; only the ranks of the part may call init_mesh(part=True)"
        )
    return layout


def _check_options(options: Mapping[str, GroupOptions], layout: Layout) -> None:
    allowed = dict.fromkeys((*layout.axes, *CANONICAL_AXES))
    problems = [
        f"options are given for axis {name!r}, which is not one of {layout.axes}{did_you_mean(name, allowed)}"
        for name in options
        if name not in allowed and not _is_product(name, layout)
    ]
    if problems:
        raise AxisError(*problems)


def _is_product(name: str, layout: Layout) -> bool:
    """Whether a name is what some axes of the layout, joined in its order, are called."""
    rest = name
    for axis in layout.axes:
        if rest == axis:
            return True
        rest = rest.removeprefix(f"{axis}_")
    return False
