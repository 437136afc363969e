"""``NamedMesh``: a layout with live process groups, found by name."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh._errors import LayoutError, MeshError, OptionError
from namedmesh._torch.groups import add_default_group_finalizer
from namedmesh._torch.meshes import release_groups_with_default_group
from namedmesh._torch.tensors import hide_redistribution_warnings
from namedmesh.launch.agreement import agree_on
from namedmesh.launch.default_group import default_group_device
from namedmesh.layout import Layout
from namedmesh.mesh import current
from namedmesh.mesh.accessors import MeshAccessors
from namedmesh.mesh.adopt import infer_layout_from_groups, infer_layout_from_mesh
from namedmesh.mesh.explain import explain_group, explain_mesh, explain_rank, list_layouts
from namedmesh.mesh.groups import Groups
from namedmesh.mesh.options import GroupOptions, check_options, find_options_by_axes
from namedmesh.mesh.views import ROOT_VIEW


class NamedMesh(MeshAccessors):
    """Named axes over live process groups.

    Users get one from :func:`namedmesh.init_mesh`, or adopt existing groups with
    :meth:`from_device_mesh` or :meth:`from_groups`.

    Results are those of the calling rank. Methods that communicate are marked "Collective"; all
    others are local.

    Args:
        layout: the layout.
        device: the device of this rank.
        options: the options of groups, by their axes in the order of the layout.
        defaults: the options of every group for which an axis sets no other.
        root: an existing torch mesh over the layout; by default one is created.
        groups: existing groups by axis; by default they are created. Collective without them: every
            rank of the world must make the mesh.

    Attributes:
        layout: the axes, their sizes and their order.
        device: the device of this rank.
        global_rank: this rank in the job.
        closed: whether :meth:`close` was called.

    Raises:
        MeshError: a group has no backend for the device, or DTensor would confuse it with a group
            of another open mesh.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")  # plain python: a single process
        >>> mesh.size("dp"), mesh.rank("tp"), mesh.ranks("dp", "tp"), list(mesh)
        (1, 0, (0,), ['dp', 'tp'])
        >>> mesh["tp"].get_group() is mesh.group("tp")
        True
        >>> mesh.close(); dist.destroy_process_group()
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        options: Mapping[tuple[str, ...], GroupOptions],
        defaults: GroupOptions,
        *,
        root: DeviceMesh | None = None,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__(layout, device, Groups(defaults, options))
        if self.global_rank != 0:
            hide_redistribution_warnings()
        if groups is None:
            root = self._create_mesh(layout)
        else:
            self._register_external_groups(layout, groups)
        self._add_root(ROOT_VIEW, root or self._build_mesh(layout))
        self._cache_memberships()
        try:
            current.register(self, self._groups)
        except MeshError:
            # The caller gets no mesh to close.
            self._groups.release()
            raise
        self._finalizer = add_default_group_finalizer(self._forget_groups)

    # Adopting existing groups.

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> NamedMesh:
        """Return a named mesh over an existing torch mesh, with its groups.

        The groups are not destroyed when the named mesh is closed. Does not communicate.

        Args:
            mesh: a mesh with names. It may be over some ranks of the world only, and its dims may
                be in any order. Its ranks must be a contiguous range, in row-major order of the
                axes sorted by stride.

        Raises:
            LayoutError: the mesh has no names, does not contain this rank, or has other ranks.
            MeshError: as for the class.
        """
        layout = infer_layout_from_mesh(mesh)
        groups = {axis: mesh.get_group(axis) for axis in layout}
        device = default_group_device(mesh.device_type)
        return cls(layout, device, {}, GroupOptions(), root=mesh, groups=groups)

    @classmethod
    def from_groups(
        cls,
        groups: Mapping[str, dist.ProcessGroup] | Mapping[str | tuple[str, ...], dist.ProcessGroup],
        *,
        device: str | torch.device | None = None,
    ) -> NamedMesh:
        """Return a named mesh over existing process groups.

        The groups are not destroyed when the mesh is closed. Does not communicate.

        Args:
            groups: the group of this rank on each axis, slowest axis first; and on flattened axes,
                by a tuple of their axes, such as ``{"dp": ..., "cp": ..., ("dp", "cp"): ...}``.
            device: the device of the mesh; by default the device of the default group.

        Raises:
            LayoutError: the groups do not form a layout; all problems at once.
            MeshError: as for the class.
        """
        layout, by_axes = infer_layout_from_groups(groups, dist.get_rank())
        by_axis = {axes[0]: group for axes, group in by_axes.items() if len(axes) == 1}
        # torch has no mesh over these groups yet, so the constructor builds one.
        mesh = cls(layout, default_group_device(device), {}, GroupOptions(), groups=by_axis)
        for axes, group in by_axes.items():
            if len(axes) > 1:
                mesh._adopt_flattened_group(axes, group)
        return mesh

    def adopt_view(self, name: str, root: DeviceMesh) -> None:
        """Add a view over an existing torch mesh, with its groups. Does not communicate.

        Args:
            name: the name of the view.
            root: a torch mesh over the ranks of this mesh: another factorization of them. Axes that
                this mesh has already must have the same ranks there.

        Raises:
            LayoutError: the torch mesh has other ranks, or contradicts the other views.
            MeshError: as for the class.
        """
        self._check_open()
        layout = infer_layout_from_mesh(root)
        if layout.ranks != self.layout.ranks:
            raise LayoutError(
                f"{layout} is not over the ranks of {self.layout}; adopt a mesh over the same ranks"
            )
        self._check_view(name, layout)
        self._add_view(name, layout, root, external=True)

    # Collective methods: every rank calls them, in the same order.

    def flatten(self, *axes: str, name: str | None = None, options: GroupOptions | None = None) -> DeviceMesh:
        """Create one group over several axes, and a torch mesh of one dim over it.

        FSDP2 takes the result for parameters that are sharded on ``mesh["tp"]``, and
        ``mesh["dp_cp", "tp"]`` is a mesh over both.

        Collective: every rank must call it with the same arguments, the first time. Later calls do
        not communicate.

        Args:
            *axes: two or more axes of the mesh or of one view, in any order. The ranks are in the
                order of the layout.
            name: the name of the flattened axis; by default the names of the axes joined by ``_``.
            options: the options of the group; by default the merged options of the axes.

        Returns:
            The torch mesh; the same object each time.

        Raises:
            AxisError: an unknown axis, or axes that are not in one view.
            LayoutError: the name is taken, or the axes were flattened with another name or options.
            OptionError: the options are not valid, or the axes set an option to different values.
            AgreementError: the other ranks did not call it, or with other arguments.
        """
        # The mesh has the group already if an axis consists of these axes, or if they were flattened
        # before. Every rank then answers by itself.
        existing = self._find_flattened_name(axes)
        if existing is not None:
            existing_options = self._groups.get_options(self._expand((existing,)))
            if name not in (None, existing) or options not in (None, existing_options):
                raise LayoutError(
                    f"{existing!r} exists already, with {existing_options!r}; omit name= and "
                    "options=, or give them in the first call"
                )
            return self[existing]
        with self._agree_on("mesh.flatten") as compare:
            view, ordered = self._find_view(axes)
            name = name or "_".join(ordered)
            self._check_flattened_name(name, ordered)
            options = self._groups.get_options(ordered) if options is None else options
            problems = check_options(options, "options")
            if problems:
                raise OptionError(*problems)
            compare({"axes": "-".join(ordered), "name": name, "options": options})
            # The request is the same on every rank from here on, so groups can be created.
            self._groups.options_by_axes[ordered] = options
            group = self._create_flattened_mesh(view, ordered, name)
            current.check_groups(self, {name: group})
            self._flattened_axes[name] = ordered
            self._cache_memberships()
        return self[name]

    def add_view(
        self, name: str, /, *, options: Mapping[str, GroupOptions] | None = None, **sizes: int
    ) -> DeviceMesh:
        """Add a view: another factorization of the same ranks, e.g. for experts.

        Afterwards every accessor knows the axes of the view.
        Collective: every rank must call it with the same arguments.

        Args:
            name: the name of the view.
            options: the options of the new axes, by name.
            **sizes: the size of each axis of the view, slowest first. One may be -1. An axis that
                the mesh has already must have the same ranks there, and shares its group.

        Returns:
            The torch mesh over all axes of the view.

        Raises:
            LayoutError: the sizes do not fit, the name is taken, or a shared axis has other ranks.
            AxisError: options for an axis that is not new.
            OptionError: options that are not valid.
            AgreementError: the other ranks did not call it, or with other arguments.
        """
        with self._agree_on(f"mesh.add_view({name!r})") as compare:
            layout = Layout(**sizes, world_size=self.layout.world_size)
            new_axes = [axis for axis in layout if axis not in self]
            by_axes = find_options_by_axes(options or {}, new_axes)
            compare({"layout": repr(layout), "options": options or {}})
            self._check_view(name, layout)
            self._groups.options_by_axes |= by_axes
            root = self._create_mesh(layout)
            self._add_view(name, layout, root)
            return root

    def close(self) -> None:
        """Close this mesh. A second call does nothing.

        The groups are kept until the default group is destroyed. The next mesh over the same ranks
        reuses them: DTensor and compiled code refer to groups by name.

        Every rank of the mesh should call it. It does not communicate.
        """
        if self.closed:
            return
        self.closed = True
        self._finalizer.detach()
        self._clear_cache()
        self._groups.release()
        current.unregister(self)

    # Other methods.

    def explain(self, group: dist.ProcessGroup | None = None, *, rank: int | None = None) -> str:
        """Describe the mesh, one of its process groups, or the coordinates of a rank.

        Args:
            group: a process group of this rank.
            rank: a global rank.

        Returns:
            A text for people. Without arguments it describes this rank and its communicators.

        Raises:
            MeshError: ``group`` is not a process group of the mesh.
            LayoutError: ``rank`` is outside the mesh.
        """
        if group is not None:
            return explain_group(self, group)
        if rank is not None:
            return explain_rank(list_layouts(self), rank)
        return explain_mesh(self)

    def __enter__(self) -> NamedMesh:
        """Select the mesh for :func:`current_mesh` and the compatibility layers."""
        self._check_open()
        current.select(self)
        return self

    def __exit__(self, *_error: object) -> None:
        """Select the mesh that was selected before."""
        current.deselect(self)

    # Process groups cannot be copied. A copy of an object that refers to a mesh, such as a module,
    # refers to the same mesh.

    def __deepcopy__(self, memo: dict[int, object]) -> NamedMesh:
        """Return the mesh itself."""
        return self

    def __copy__(self) -> NamedMesh:
        """Return the mesh itself."""
        return self

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.global_rank} on {self.device}"
        return f"<NamedMesh {self.layout}, {state}>"

    def _register_external_groups(self, layout: Layout, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Use existing groups, by axis, which namedmesh will not destroy."""
        for axis, group in groups.items():
            key = self._groups.make_key(layout, (axis,))
            self._groups.register_external(key, axis, group)

    def _forget_groups(self) -> None:
        """Drop all references to the groups, after the default group was destroyed."""
        # The cached answers would hide that the groups do not exist any more.
        self._clear_cache()
        current.notify(self)

    def _adopt_flattened_group(self, axes: tuple[str, ...], group: dist.ProcessGroup) -> None:
        """Use an existing group over several axes, in layout order, as their flattened axis."""
        name = "_".join(axes)
        key = self._groups.make_key(self.layout, axes)
        self._groups.register_external(key, name, group)
        # The group exists, so this does not communicate.
        self._create_flattened_mesh(ROOT_VIEW, axes, name)
        self._flattened_axes[name] = axes
        self._cache_memberships()

    @contextmanager
    def _agree_on(self, call: str) -> Iterator[Callable[..., None]]:
        """Let the ranks agree on a call; see :func:`namedmesh.mesh.internal.agree_on_call`."""
        self._check_open()
        groups = self._groups
        if self.layout.world_size != groups.world_size:
            # Every rank of the world must take part in the creation of a group, but some do not have
            # this mesh.
            raise MeshError(
                f"{self.layout} is a part of the world of {groups.world_size} ranks, and torch "
                f"makes groups with every rank; {call} needs a mesh over all of them, or groups "
                "that were made before the mesh was adopted"
            )
        with agree_on(call, groups.defaults.timeout) as compare:
            yield compare

    def _add_root(self, view: str, root: DeviceMesh) -> None:
        """Store the torch mesh of a view, and let its groups be freed with the default group."""
        self._roots[view] = root
        release_groups_with_default_group(root)

    def _add_view(self, name: str, layout: Layout, root: DeviceMesh, *, external: bool = False) -> None:
        """Add a view whose groups exist. Does not communicate.

        Args:
            name: the name of the view.
            layout: its layout.
            root: the torch mesh over the layout.
            external: whether the groups belong to other code, which destroys them.
        """
        # Axes that the mesh has already keep their groups, which have the same ranks.
        new_groups = {axis: root.get_group(axis) for axis in layout if axis not in self}
        current.check_groups(self, new_groups)
        if external:
            self._register_external_groups(layout, new_groups)
        self._layouts[name] = layout
        self._add_root(name, root)
        self._cache_memberships()

    def _find_flattened_name(self, names: tuple[str, ...]) -> str | None:
        """Return the axis or flattened axis over exactly the given axes; None if there is none."""
        axes = set(self._expand(names))
        for name in (*self._axes, *self._flattened_axes):
            if axes == set(self._expand((name,))):
                return name
        return None


def current_mesh() -> NamedMesh:
    """Return the mesh of the innermost ``with mesh:``, or else the only open mesh.

    It is the same in every thread. Does not communicate.

    Raises:
        MeshError: no mesh is open, several are open and none is selected, or the selected one is
            closed.
    """
    mesh = cast("NamedMesh | None", current.selected_mesh())
    if mesh is not None:
        if mesh.closed:
            raise MeshError(
                f"the mesh over {mesh.layout}, selected with 'with mesh:', was closed; leave the block first"
            )
        return mesh
    meshes = cast("list[NamedMesh]", current.open_meshes())
    if not meshes:
        raise MeshError("no mesh is open in this process; call namedmesh.init_mesh(...) first")
    if len(meshes) == 1:
        return meshes[0]
    layouts = sorted(str(mesh.layout) for mesh in meshes)
    raise MeshError(
        f"{len(meshes)} meshes are open in this process and none is selected: "
        f"{', '.join(layouts)}; select one with 'with mesh:', or make the last one with "
        "init_mesh(close_existing=True), which closes the others"
    )


@atexit.register
def close_all() -> None:
    """Close every open mesh of this process, the newest first."""
    for mesh in reversed(cast("list[NamedMesh]", current.all_meshes())):
        mesh.close()
