"""``init_mesh``: from names and sizes of axes to a mesh over live process groups."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from namedmesh._errors import LayoutError
from namedmesh._version import __version__
from namedmesh.launch import default_group
from namedmesh.launch.agreement import agree_on
from namedmesh.launch.launchers import was_launched
from namedmesh.launch.tested_releases import warn_if_untested
from namedmesh.layout import Layout
from namedmesh.mesh.groups import describe_group_cache
from namedmesh.mesh.mesh import NamedMesh, close_all
from namedmesh.mesh.options import GroupOptions, find_options_by_axes

_NOT_LAUNCHED_HINT = (
    "No launcher has started this process, so it is a single-process run; start 8 processes with: "
    "torchrun --nproc-per-node 8 SCRIPT"
)


def init_mesh(
    layout: Layout | Mapping[str, int] | None = None,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    options: Mapping[str, GroupOptions] | None = None,
    close_existing: bool = False,
    **sizes: int,
) -> NamedMesh:
    """Create a mesh over all ranks of the job.

    If there is no default process group yet, it is created from the environment: the variables of
    torchrun or another launcher, or a single-process run under plain python. For a mesh over some
    of the ranks, make torch's own ``DeviceMesh`` and adopt it with
    :meth:`NamedMesh.from_device_mesh`.

    It warns once if torch is older than the oldest tested release.

    Collective: every rank must call it with the same arguments.

    Args:
        layout: the layout, or a mapping of axes to sizes, instead of ``sizes``.
        device: the device of the mesh, as for :func:`namedmesh.launch.init`.
        backend: the backend of every group that sets no other; by default the backend of the
            default group.
        timeout: the timeout of every group that sets no other, and how long this call waits for the
            other ranks; by default the timeout of the default group.
        options: :class:`GroupOptions` by the name of an axis, or by a flattened name such as
            ``dp_cp``.
        close_existing: close every open mesh of this process first, e.g. when the cell of a
            notebook runs again.
        **sizes: the size of each axis by keyword, slowest first. One may be -1, for the remaining
            ranks.

    Returns:
        The mesh.

    Raises:
        LayoutError: names or sizes that do not form a layout of the world; all problems at once.
        OptionError: a timeout, a backend or options that are not valid.
        AxisError: options for an axis that does not exist.
        AgreementError: the arguments or the versions differ between ranks, or some ranks did not
            call.
        LaunchError: the environment is incomplete, or the device does not exist.

    Example:
        >>> import torch.distributed as dist
        >>> mesh = init_mesh(dp=-1, tp=1, device="cpu")
        >>> mesh
        <NamedMesh dp=1 x tp=1 (1 rank), rank 0 on cpu>
        >>> mesh.close(); dist.destroy_process_group()
    """
    warn_if_untested("torch", accept_newer=True)
    if close_existing:
        close_all()
    launched = not dist.is_initialized()
    if launched:
        device = default_group.init(device, backend=backend, timeout=timeout)
    try:
        # An invalid timeout raises inside the block, so that the other ranks get the error too.
        with agree_on("init_mesh", timeout if isinstance(timeout, timedelta) else None) as compare:
            full_layout = _complete_layout(layout, sizes)
            defaults = GroupOptions(backend=backend, timeout=timeout)
            # An empty list is a mistake, which is reported like any other wrong type.
            group_options = {} if options is None else options
            # Both calls may raise on one rank only. The others then get the error instead of a
            # comparison.
            by_axes = find_options_by_axes(group_options, full_layout.axes)
            mesh_device = default_group.default_group_device(device)
            compare(
                {
                    "layout": repr(full_layout),
                    "options": dict(sorted(group_options.items())),
                    "defaults": defaults,
                    "device": mesh_device.type,
                    # Different releases may create groups in a different order.
                    "torch": torch.__version__,
                    "namedmesh": __version__,
                    # A rank that reuses a cached group would not create it together with the others.
                    "groups that exist": describe_group_cache(),
                }
            )
            return NamedMesh(full_layout, mesh_device, by_axes, defaults)
    except BaseException as error:
        if not launched:
            raise
        # The default group was made for this mesh. Without it, the caller can correct the arguments
        # and call again, also in this process.
        dist.destroy_process_group()
        if isinstance(error, LayoutError) and not was_launched():
            raise LayoutError(*(f"{problem}. {_NOT_LAUNCHED_HINT}" for problem in error.problems)) from None
        raise


def _complete_layout(layout: Layout | Mapping[str, int] | None, sizes: Mapping[str, int]) -> Layout:
    """Return the layout over the world that the arguments of :func:`init_mesh` describe."""
    world_size = dist.get_world_size()
    if layout is not None and sizes:
        arguments = ", ".join(f"{axis}={size!r}" for axis, size in sizes.items())
        raise LayoutError(f"both {layout!r} and {arguments} were given; give one of them")
    if layout is None:
        return Layout(**sizes, world_size=world_size)
    if not isinstance(layout, Layout):
        mapping: object = layout
        if not isinstance(mapping, Mapping):
            raise LayoutError(
                f"layout must be a Layout or a mapping of axis names to sizes, got {mapping!r}; "
                "name the axes instead: init_mesh(dp=2, tp=2)"
            )
        return Layout.from_shape(layout, layout.values(), world_size=world_size)
    # Layout.world_size is the size of the layout, which may also start at another rank than 0.
    if layout.ranks != range(world_size):
        raise LayoutError(
            f"{layout} covers ranks {layout.ranks.start} to {layout.ranks.stop - 1}, but the world "
            f"has ranks 0 to {world_size - 1}; change a size, or give one axis -1 for the "
            "remaining ranks"
        )
    return layout
