"""``init_mesh``: from names and sizes to a mesh over live process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh._version import __version__
from namedmesh.agreement import agree_on
from namedmesh.errors import LayoutError
from namedmesh.groups import GroupOptions, kept_groups
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh, close_all
from namedmesh.views import options_by_axes

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
    replace: bool = False,
    **sizes: int,
) -> NamedMesh:
    """Return a mesh over this job's ranks; communicates.

    Every rank calls it with the same arguments. Where there is no default process group yet, it is made from
    the environment: that of torchrun, or a world of one under plain python. For a mesh over some of the ranks make
    torch's own ``DeviceMesh``, and adopt it with :meth:`NamedMesh.from_device_mesh`.

    Args:
        layout: the layout, or a mapping of axes to sizes, instead of ``sizes``.
        device: the device of the mesh, as for :func:`namedmesh.launch.init`.
        backend: the backend of every group that sets no other; by default that of the default group.
        timeout: the timeout of every group that sets no other, and the time that ranks wait for each other
            here; by default that of the default group.
        options: :class:`GroupOptions` by the name of an axis, or of several joined by ``_``.
        replace: close every open mesh of this process first, such as that of a notebook cell that is run again.
        **sizes: one keyword for each axis, slowest first; one size may be -1, for whatever is left.

    Raises:
        LayoutError: names or sizes that do not fit; all problems at once.
        AxisError: options for an axis that is not there.
        AgreementError: the ranks were given different arguments, run different versions, or some did not call.
        LaunchError: the environment is incomplete, or the device is not there.

    Example:
        >>> import torch.distributed as dist
        >>> mesh = init_mesh(dp=-1, tp=1, device="cpu")
        >>> mesh
        <NamedMesh dp=1 x tp=1 (1 rank), rank 0 on cpu>
        >>> mesh.close(); dist.destroy_process_group()
    """
    if replace:
        close_all()
    launched = not dist.is_initialized()
    if launched:
        device = launch.init(device, backend=backend, timeout=timeout)
    try:
        # A timeout of another kind is reported to the other ranks, too.
        with agree_on("init_mesh", timeout if isinstance(timeout, timedelta) else None) as compare:
            fitted, defaults = _layout(layout, sizes), GroupOptions(backend=backend, timeout=timeout)
            return make_mesh(compare, fitted, {}, {} if options is None else options, defaults, device=device)
    except BaseException as error:
        if not launched:
            raise
        dist.destroy_process_group()
        if isinstance(error, LayoutError) and not launch.was_launched():
            raise LayoutError(*(f"{problem}. {_NOT_LAUNCHED_HINT}" for problem in error.problems)) from None
        raise


def make_mesh(
    compare: Callable[..., None],
    layout: Layout,
    request: Mapping[str, object],
    options: Mapping[str, GroupOptions],
    defaults: GroupOptions,
    *,
    device: str | torch.device | None = None,
) -> NamedMesh:
    """Compare a request with the other ranks, and make the mesh; for the dialects too. Communicates.

    Args:
        compare: what :func:`namedmesh.agreement.agree_on` yields.
        layout: the layout of the mesh.
        request: what else must be the same on every rank, field by field.
        options: the options of the mesh's groups, by axis.
        defaults: those of every group, where an axis sets nothing else.
        device: the device of the mesh; by default the one that goes with the default group.
    """
    by_axes = options_by_axes(options, layout.axes)
    chosen = launch.default_group_device(device)
    compare(
        {
            "layout": repr(layout),
            "options": dict(sorted(options.items())),
            "defaults": defaults,
            "device": chosen.type,
            **request,
            "torch": torch.__version__,
            "namedmesh": __version__,
            "groups that exist": kept_groups(),
        }
    )
    return NamedMesh(layout, chosen, by_axes, defaults)


def _layout(layout: Layout | Mapping[str, int] | None, sizes: Mapping[str, int]) -> Layout:
    """Return the layout that was asked for, over the world."""
    world = dist.get_world_size()
    if layout is not None and sizes:
        given = ", ".join(f"{axis}={size!r}" for axis, size in sizes.items())
        raise LayoutError(f"both {layout!r} and {given} were given; give one of them")
    if layout is None:
        return Layout(**sizes, world_size=world)
    if not isinstance(layout, Layout):
        mapping: object = layout
        if not isinstance(mapping, Mapping):
            raise LayoutError(
                f"layout must be a Layout or a mapping of axis names to sizes, got {mapping!r}; name the axes instead: "
                "init_mesh(dp=2, tp=2)"
            )
        return Layout.from_shape(layout, layout.values(), world_size=world)
    if layout.ranks != range(world):
        raise LayoutError(
            f"{layout} on ranks {layout.ranks.start} to {layout.ranks.stop - 1} is not the world of {world} ranks; change a "
            "size, or give one axis -1 for whatever is left"
        )
    return layout
