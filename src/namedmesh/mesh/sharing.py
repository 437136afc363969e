"""``share_groups``: give code that makes its own groups the groups of a mesh.

Megatron, DeepSpeed, fairscale, ezpz, trainers, and copies of them, make every group with one
function, ``torch.distributed.new_group``, on every rank and in the same order. While
:func:`share_groups` is active, that function returns the group of the mesh over the same ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from threading import Lock

import torch.distributed as dist

from namedmesh._errors import MeshError, OptionError, format_items
from namedmesh._torch.groups import GroupRequest, intercept_group_requests
from namedmesh.layout.layout import Layout, make_partition_key
from namedmesh.layout.sizes import format_axes
from namedmesh.mesh import current
from namedmesh.mesh.groups import describe_group_cache
from namedmesh.mesh.internal import agree_on_call, get_groups
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.mesh.options import GroupOptions

# More axes have too many orders to try all of them for a message.
_MAX_AXES_TO_REORDER = 6


@contextmanager
def share_groups(mesh: NamedMesh, *, keep_timeouts: bool = False) -> Iterator[None]:
    """Context manager in which ``torch.distributed.new_group`` returns the groups of a mesh.

    It holds for every way to torch's function: ``new_subgroups`` and its variants, ``split_group``
    of the default group, ``init_device_mesh``, and names that other code has imported before. It
    holds in every thread of the process, and ends with the block. Inside of another block, the
    inner mesh answers first.

    A request gets the group of the mesh if its ranks are those of a group over any axes of the mesh
    or of one of its views. The group is created if it does not exist yet. Ranks of other groups get
    ``NON_GROUP_MEMBER``, as always. torch makes all other groups:

    - over other ranks, such as the first and the last stage of a pipeline;
    - with ``pg_options``, another ``backend`` or ``timeout`` than the group of the mesh, another
      order of ranks, or ``use_local_synchronization``. A gloo group next to NCCL is the
      :meth:`NamedMesh.gloo_group` of the mesh;
    - whose description ends with ``_AG``: Megatron's second communicators for all-gathers.

    The request and the mesh decide alone, so all ranks decide in the same way. The groups belong to
    the mesh: code that destroys its groups destroys those of the mesh.

    Collective: every rank must enter the block, and make the same requests in the same order, as
    torch demands anyway.

    Args:
        mesh: a mesh over all ranks of the world.
        keep_timeouts: return the groups of the mesh whatever ``timeout`` a request has. Megatron
            gives one in every request.

    Raises:
        MeshError: the mesh is closed, or it is over some ranks of the world only.
        AgreementError: the other ranks did not enter the block, or with another mesh.

    Warns:
        UserWarning: at the end of the block, on rank 0, if another order of the axes would share
            more groups, or if only their timeouts kept groups from being shared.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> with namedmesh.share_groups(mesh):
        ...     group = dist.new_group([0])  # in the code of a library
        >>> group is mesh.group("tp")
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    argument: object = mesh
    if not isinstance(argument, NamedMesh):
        raise MeshError(
            f"share_groups got a {type(argument).__name__}; give it a NamedMesh, such as "
            "NamedMesh.from_device_mesh(...)"
        )
    with agree_on_call(mesh, "share_groups") as compare:
        compare(
            {
                "layout": repr(mesh.layout),
                "views": repr(mesh.views),
                "keep_timeouts": keep_timeouts,
                "groups that exist": describe_group_cache(),
            }
        )
    door = _Door(mesh, keep_timeouts)
    _open(door)
    try:
        yield
    finally:
        _close(door)
        door.warn_about_unshared_groups()


def find_shared_options(layout: Layout) -> dict[str, GroupOptions]:
    """Return the options with which a new mesh uses the groups of open meshes.

    Args:
        layout: the layout of the new mesh, or of a view of it.

    Returns:
        By axis, the options of the group that an open mesh has over the same ranks; nothing for
        axes that no open mesh has.
    """
    options = {}
    for mesh in current.open_meshes():
        groups = get_groups(mesh)
        for view in (mesh.layout, *mesh.views.values()):
            for axis in {*view} & {*layout}:
                if make_partition_key(view, axis) == make_partition_key(layout, axis):
                    options[axis] = groups.normalize(groups.get_options((axis,)))
    return options


class _Door:
    """The groups of one mesh, as :func:`share_groups` returns them.

    Attributes:
        mesh: the mesh.
        keep_timeouts: whether the timeout of a request has no effect.
        requested: the ranks of the groups of this rank that were asked for, and whether the axes of
            the mesh have them; without groups of its views.
        other_timeout: a message about a request that differs from a group of the mesh in its timeout
            only; None without one.
    """

    def __init__(self, mesh: NamedMesh, keep_timeouts: bool) -> None:
        self.mesh = mesh
        self.keep_timeouts = keep_timeouts
        self.requested: dict[tuple[int, ...], bool] = {}
        self.other_timeout: str | None = None

    def find_group(self, request: GroupRequest) -> dist.ProcessGroup | None:
        """Return this rank's group for a request; None if another mesh or torch has to make it.

        Collective: every rank must make the request.
        """
        groups = get_groups(self.mesh)
        is_second = request.description.upper().endswith("_AG")
        if not request.is_plain or is_second or self.mesh.closed or groups.are_stale():
            return None
        found = self._find_axes(request.rank_sets)
        for ranks in request.rank_sets:
            if self.mesh.global_rank in ranks and (found is None or found[0] is self.mesh.layout):
                self.requested[ranks] = found is not None
        if found is None:
            return None
        layout, axes = found
        if not axes:
            # A group of one rank cannot time out.
            is_default = request.backend in {"", dist.get_backend()}
            return groups.get_self_group() if is_default else None
        options = self._find_options(request, axes)
        if options is None:
            return None
        return groups.get_or_create(layout, axes, options)

    def _find_axes(self, rank_sets: Sequence[tuple[int, ...]]) -> tuple[Layout, tuple[str, ...]] | None:
        """Return the first layout that has every set of ranks as a group over the same axes."""
        for layout in (self.mesh.layout, *self.mesh.views.values()):
            found = {_find_layout_axes(layout, ranks) for ranks in rank_sets}
            axes = found.pop()
            if not found and axes is not None:
                return layout, axes
        return None

    def _find_options(self, request: GroupRequest, axes: tuple[str, ...]) -> GroupOptions | None:
        """Return the options of the mesh's group over some axes; None if the request has others."""
        groups = get_groups(self.mesh)
        try:
            options = groups.get_options(axes)
        except OptionError:
            return None  # the axes contradict each other, and nobody has set the options of the group
        backend = request.backend
        if backend == "gloo":
            options = groups.make_gloo_options(options)
            backend = ""
        asked = replace(options, backend=backend or options.backend)
        if groups.normalize(asked) != groups.normalize(options):
            return None
        if request.timeout is None or self.keep_timeouts:
            return options
        timeout = groups.normalize(options).timeout
        if request.timeout != timeout:
            self.other_timeout = (
                f"a group over {format_axes(axes)} with a timeout of {request.timeout} was made "
                f"in addition to the group of the mesh, whose timeout is {timeout}; "
                "share_groups(mesh, keep_timeouts=True) shares it, or init_mesh(timeout=...)"
            )
            return None
        return options

    def warn_about_unshared_groups(self) -> None:
        """Warn on rank 0 about groups that another mesh would have shared."""
        if self.mesh.global_rank != 0:
            return  # one warning for the job
        problems = []
        if self.other_timeout is not None:
            problems.append(self.other_timeout)
        order = _find_better_order(self.mesh.layout, list(self.requested))
        if order is not None:
            unshared = [ranks for ranks, is_shared in self.requested.items() if not is_shared]
            count = sum(_find_layout_axes(order, ranks) is not None for ranks in unshared)
            problems.append(
                f"{len(unshared)} of {len(self.requested)} groups that were asked for are over "
                f"other ranks than the axes of {self.mesh.layout}, such as "
                f"{format_items(unshared[0])}; the order {order} would share {count} of them"
            )
        for problem in problems:
            # The frames of the context manager and of contextlib are between this one and the block.
            warnings.warn(f"share_groups: {problem}", stacklevel=4)


def _find_layout_axes(layout: Layout, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the axes along which the ranks of a group differ; None if the ranks are no group.

    Args:
        layout: the layout.
        ranks: the ranks of the group, ascending. The axes of a single rank are empty.
    """
    if not ranks or ranks[0] not in layout.ranks or ranks[-1] not in layout.ranks:
        return None
    if len(ranks) == 1:
        return ()
    # The first rank has coordinate 0 on the axes of the group, and the last rank the last one.
    first_coords = layout.coords(ranks[0])
    last_coords = layout.coords(ranks[-1])
    axes = tuple([axis for axis in layout if first_coords[axis] != last_coords[axis]])
    if layout.size(*axes) != len(ranks) or layout.group(ranks[0], *axes) != ranks:
        return None
    return axes


def _find_better_order(layout: Layout, rank_sets: Sequence[tuple[int, ...]]) -> Layout | None:
    """Return the layout with the axes in another order that has the most of some groups.

    Returns:
        None if no order has more of them than the layout itself.
    """
    sizes = {axis: size for axis, size in layout.items() if size > 1}
    if not 1 < len(sizes) <= _MAX_AXES_TO_REORDER:
        return None

    def count_groups(candidate: Layout) -> int:
        return sum(_find_layout_axes(candidate, ranks) is not None for ranks in rank_sets)

    best = None
    best_count = count_groups(layout)
    for axes in permutations(sizes):
        candidate = Layout.from_shape(axes, [sizes[axis] for axis in axes])
        count = count_groups(candidate)
        if count > best_count:
            best = candidate
            best_count = count
    return best


# The doors that are open, in the order in which they were opened. They belong to the process and not
# to a thread: a library may make groups in a thread of its own.
_doors: list[_Door] = []
_lock = Lock()
_stop_interception: Callable[[], object]


def _open(door: _Door) -> None:
    """Let a door answer requests."""
    global _stop_interception  # noqa: PLW0603  the interception belongs to the process
    with _lock:
        if not _doors:
            _stop_interception = intercept_group_requests(_find_group)
        _doors.append(door)


def _close(door: _Door) -> None:
    """Let a door answer no more requests. Without any door, torch is as it was before."""
    with _lock:
        _doors.remove(door)
        if not _doors:
            _stop_interception()


def _find_group(request: GroupRequest) -> dist.ProcessGroup | None:
    """Return the group of the innermost door that has one for a request."""
    for door in reversed(_doors):
        group = door.find_group(request)
        if group is not None:
            return group
    return None
