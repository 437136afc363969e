"""``init_mesh``: from names and sizes to a mesh over live process groups."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh._version import __version__
from namedmesh.current import close_all, refuse_ambiguous_mesh
from namedmesh.errors import AxisError, LayoutError, did_you_mean
from namedmesh.groups import GroupPool, agreed
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions
from namedmesh.sizes import USUAL_AXES
from namedmesh.views import product_axes

if TYPE_CHECKING:
    from datetime import timedelta

    from namedmesh.groups import GroupMaker

_NOT_LAUNCHED_HINT = (
    "No launcher has started this process, so it is a world of its own; start 8 of them with: "
    "torchrun --nproc-per-node 8 SCRIPT"
)


def init_mesh(
    layout: Layout | Mapping[str, int] | None = None,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    options: Mapping[str, GroupOptions] | None = None,
    share_groups: bool = True,
    world_size: int | None = None,
    rank_offset: int = 0,
    part: bool = False,
    replace: bool = False,
    **sizes: int,
) -> NamedMesh:
    """Return a mesh over this job's ranks; communicates.

    Every rank calls it with the same arguments. Where there is no default process group yet, it is made from
    the environment: that of torchrun, or a world of one under plain python.

    Args:
        layout: the layout, or a mapping of axes to sizes, instead of ``sizes``.
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
        replace: close every open mesh of this process first, such as that of a notebook cell that is run again.
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
    if replace:
        close_all()
    launched = not dist.is_initialized()
    if launched:
        device = launch.init(device, backend=backend, timeout=timeout, call="init_mesh")
    if not sizes and isinstance(layout, Mapping) and all(isinstance(axis, str) for axis in layout):
        sizes, layout = dict(layout), None
    request = _Request(layout, sizes, world_size, rank_offset, part)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        ranks = request.ranks(world)
        if rank not in ranks:
            request.resolve(world, rank)
        pool, options = GroupPool(), {} if options is None else options
        with agreed(pool, "init_mesh", ranks, timeout=timeout) as maker:
            pool.defaults, pool.share = GroupOptions(backend=backend, timeout=timeout), share_groups
            chosen = launch.default_group_device(device)
            fitted = request.resolve(world, rank)
            _check_options(options, share_groups, fitted)
            fields = {
                "layout": repr(fitted),
                "options": repr(dict(sorted(options.items(), key=lambda item: str(item[0])))),
                "defaults": repr(pool.defaults),
                "share_groups": repr(share_groups),
                "device": chosen.type,
            }
            mesh = make_mesh(maker, fitted, fields, options, device=chosen)
            refuse_ambiguous_mesh(fitted, chosen.type, {axis: mesh.group(axis) for axis in fitted.axes})
            return mesh
    except BaseException as error:
        if not launched:
            raise
        dist.destroy_process_group()
        if isinstance(error, LayoutError) and not launch.was_launched(os.environ):
            raise LayoutError(*(f"{problem}. {_NOT_LAUNCHED_HINT}" for problem in error.problems)) from None
        raise


class _Request(NamedTuple):
    """The layout that was asked for, as it was asked for."""

    layout: Layout | Mapping[str, int] | None
    sizes: Mapping[str, int]
    world_size: int | None
    rank_offset: int
    part: bool

    def ranks(self, world: int) -> range:
        """Return the ranks that call, as far as a wrong request determines them: only they can be told."""
        if not self.part:
            return range(world)
        start, layout = self.rank_offset, self.layout
        if isinstance(layout, Layout):
            return layout.ranks if layout.ranks.stop <= world else range(0)
        size = self.world_size
        if size is None:
            size = prod(size for size in self.sizes.values() if isinstance(size, int) and size > 0)
        if not isinstance(start, int) or not isinstance(size, int) or not 0 <= start < start + size <= world:
            return range(0)
        return range(start, start + size)

    def resolve(self, world: int, rank: int) -> Layout:
        """Return the layout, which holds the rank.

        Raises:
            LayoutError: there is no such layout.
        """
        layout = self.layout
        if layout is None:
            size = world if self.world_size is None and not self.part else self.world_size
            layout = Layout(**self.sizes, world_size=size, rank_offset=self.rank_offset)
        elif self.sizes or self.world_size is not None or self.rank_offset:
            raise LayoutError(
                f"both {layout!r} and {', '.join(self._words())} were given; give a layout, which says all of this itself, "
                "or sizes by name"
            )
        if not isinstance(layout, Layout):
            raise LayoutError(
                f"{layout!r} is no layout; give a Layout, or sizes by name as in init_mesh(dp=2, tp=2) or init_mesh({{'dp': 2}})"
            )
        ranks = layout.ranks
        if not self.part and ranks != range(world):
            raise LayoutError(
                f"{layout} on ranks {ranks.start} to {ranks.stop - 1} is not the world of {world} ranks; change a size, give one "
                "axis -1 for whatever is left, or say part=True for a mesh over a part"
            )
        if ranks.stop > world or rank not in ranks:
            raise LayoutError(
                f"{layout} on ranks {ranks.start} to {ranks.stop - 1} does not hold rank {rank} of the world of {world} ranks; "
                "only the ranks of the part may call init_mesh(part=True)"
            )
        return layout

    def _words(self) -> list[str]:
        """Return the sizes and the place that were asked for, as they are written in code."""
        words = [f"{axis}={size!r}" for axis, size in self.sizes.items()]
        if self.world_size is not None:
            words.append(f"world_size={self.world_size!r}")
        if self.rank_offset != 0:
            words.append(f"rank_offset={self.rank_offset!r}")
        return words


def make_mesh(
    maker: GroupMaker,
    layout: Layout,
    request: Mapping[str, str],
    options: Mapping[str, GroupOptions],
    *,
    groups: Iterable[tuple[Layout, Sequence[str], GroupOptions]] = (),
    device: torch.device | None = None,
) -> NamedMesh:
    """Compare a request with the other ranks, and make the mesh; for the dialects too. Communicates.

    Args:
        maker: makes the groups.
        layout: the layout of the mesh.
        request: what was asked for, field by field.
        options: the options of the mesh's groups, by axis.
        groups: further groups over whole axes that will be made under the same agreement.
        device: the device of the mesh; by default the one that goes with the default group.
    """
    pool, device = maker.pool, device or launch.default_group_device()
    wanted = [(layout, (axis,), options.get(axis, pool.defaults)) for axis in layout.axes]
    versions = {"torch": str(torch.__version__), "namedmesh": __version__}
    maker.compare({**request, **versions}, [*wanted, *groups])
    return NamedMesh(maker.create_view(layout, device.type, options), pool, device, options)


def _check_options(options: object, share: object, layout: Layout) -> None:
    problems = []
    if not isinstance(options, Mapping):
        problems.append(
            f"options are a {type(options).__name__}; give a mapping of axes to GroupOptions, such as {{'tp': GroupOptions(...)}}"
        )
    if not isinstance(share, bool):
        problems.append(f"share_groups is {share!r}; it is True or False")
    if problems or not isinstance(options, Mapping):
        raise LayoutError(*problems)
    allowed = dict.fromkeys((*layout.axes, *USUAL_AXES))
    for name, option in options.items():
        if name not in allowed and not (isinstance(name, str) and product_axes(name, layout.axes)):
            problems.append(
                f"options are given for axis {name!r}, which is not one of {layout.axes}{did_you_mean(name, allowed)}"
            )
        if not isinstance(option, GroupOptions):
            problems.append(f"options of {name!r} are a {type(option).__name__}; give GroupOptions(...)")
    if problems:
        raise AxisError(*problems)
