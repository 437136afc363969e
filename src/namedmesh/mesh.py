"""A layout bound to live process groups: sub-meshes, groups and this rank's place, by name."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh import current
from namedmesh._internal import agree_on_call
from namedmesh._torch import add_default_group_finalizer
from namedmesh.accessors import Accessors, Place
from namedmesh.adopt import infer_layout_from_groups, infer_layout_from_mesh
from namedmesh.errors import LayoutError, MeshError, OptionError
from namedmesh.groups import Groups, destroy_unused_groups
from namedmesh.launch import default_group_device
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions, check_options, find_options_by_axes
from namedmesh.views import ROOT_VIEW, Views


class NamedMesh(Accessors):
    """Named axes over live process groups. Made by :func:`namedmesh.init_mesh`, or by adopting what exists.

    Every answer is this rank's own. Accessors never communicate; what does, says so in its first line.

    Attributes:
        layout: the axes, their sizes and their order.
        device: the device of this rank.
        global_rank: this rank.
        closed: whether :meth:`close` was called.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")      # plain python: a world of one
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
        """Make the groups of a layout, which every rank does; with ``groups``, take those that exist."""
        self.layout, self.device, self.closed = layout, device, False
        self._groups = Groups(defaults, options)
        self.global_rank = self._groups.rank
        self._views = Views(layout, self._groups, device.type)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}  # slices, by the names that they are asked with
        self._slices: dict[str, DeviceMesh] = {}  # those over one name
        self._places: dict[tuple[str, ...], Place] = {}
        self._close_hooks: list[Callable[[], None]] = []
        if groups is None:
            root = self._views.create_mesh(layout)
        else:
            self._borrow(layout, groups)
        self._views.add_root(ROOT_VIEW, root or self._views.build_mesh(layout))
        self._prepare()
        try:
            current.register(self, {axis: self.group(axis) for axis in self})
        except MeshError:
            self._groups.release()
            raise
        # The answers are worked out already, so that accessors cost next to nothing. They end with the default group.
        self._ending = add_default_group_finalizer(self._forget_answers)

    def _borrow(self, layout: Layout, groups: Mapping[str, dist.ProcessGroup]) -> None:
        for axis, group in groups.items():
            self._groups.register_external(
                self._groups.make_key(layout, (axis,), self._groups.get_options((axis,))), axis, group
            )

    # Adopting what exists.

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> NamedMesh:
        """Return a named mesh over a torch mesh that exists; its groups are used as they are and never destroyed.

        It has names, is over the world or a part of it, and its ranks are a range in row-major order of its axes (in any
        order); else it is a LayoutError.
        """
        layout = infer_layout_from_mesh(mesh)
        groups = {axis: mesh.get_group(axis) for axis in layout}
        chosen = default_group_device(mesh.device_type)
        return cls(layout, chosen, {}, GroupOptions(), root=mesh, groups=groups)

    @classmethod
    def from_groups(
        cls, groups: Mapping[str, dist.ProcessGroup], *, device: str | torch.device | None = None
    ) -> NamedMesh:
        """Return a named mesh over process groups that exist; they are never destroyed.

        Args:
            groups: this rank's group on each axis, by name, slowest axis first; a LayoutError if they fit no layout.
            device: the device of the mesh; by default the one that goes with the default group.
        """
        layout = infer_layout_from_groups(groups, dist.get_rank())
        return cls(layout, default_group_device(device), {}, GroupOptions(), groups=groups)

    def adopt_view(self, name: str, root: DeviceMesh) -> None:
        """Add another factoring of the same ranks that exists as a torch mesh; its groups are used as they are.

        Axes that this mesh has already must be the same ranks there; else it is a LayoutError.
        """
        self._check_open()
        layout = infer_layout_from_mesh(root)
        if layout.ranks != self.layout.ranks:
            raise LayoutError(
                f"{layout} is not over the ranks of {self.layout}; adopt a mesh over the same ranks"
            )
        self._views.check_view(name, layout, self.global_rank)
        self._add_view(name, layout, root, borrowed=True)

    # What communicates: every rank calls these, in the same order.

    def flatten(self, *axes: str, name: str | None = None, options: GroupOptions | None = None) -> DeviceMesh:
        """Make a 1-D mesh over the product of some axes, on one group; communicates the first time.

        Args:
            *axes: two axes or more of the mesh or of one view, in any order; the ranks are in layout order.
            name: the name of the product; by default the names of the axes joined by ``_``.
            options: options of the group; by default those that the axes set.

        Returns:
            A torch mesh that goes together with the slices of this one: FSDP2 takes it for parameters that are
            tensor-parallel on ``mesh["tp"]``, and ``mesh["dp_cp", "tp"]`` has it. The same object each time.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            LayoutError: the name is taken.
            OptionError: the options are not valid, or the axes set options that contradict each other.
            AgreementError: the other ranks did not call this, or not with the same arguments.
        """
        known = self._named(axes)
        if known is not None:
            of_known = self._groups.get_options(self._views.expand((known,)))
            if name not in (None, known) or options not in (None, of_known):
                raise LayoutError(
                    f"{known!r} exists, with {of_known!r}; leave name and options out, or give them where it is made first"
                )
            return self[known]
        with agree_on_call(self, "mesh.flatten") as compare:
            view, ordered = self._views.find_view(axes)
            name = name or "_".join(ordered)
            self._views.check_flattened_name(name, ordered)
            options = self._groups.get_options(ordered) if options is None else options
            problems = check_options(options, "options")
            if problems:
                raise OptionError(*problems)
            compare({"axes": "-".join(ordered), "name": name, "options": options})
            self._groups.options_by_axes[ordered] = options
            group = self._views.flatten(view, ordered, name)
            current.check_groups(self, {name: group})
            self._views.flattened_axes[name] = ordered
            self._prepare()
        return self[name]

    def add_view(
        self, name: str, /, *, options: Mapping[str, GroupOptions] | None = None, **sizes: int
    ) -> DeviceMesh:
        """Add another factoring of the same ranks, such as the expert view; communicates.

        Args:
            name: the name of the view.
            options: options by axis, for the axes that are new.
            **sizes: the axes of the view, slowest first. An axis that the mesh has already must be the same
                ranks there and is shared; the others are new. One size may be -1.

        Returns:
            The torch mesh over all axes of the view. Afterwards every accessor knows the new axes.

        Raises:
            LayoutError: sizes that do not fit, a name that is taken, or an axis that is not the same ranks.
            AxisError: options for an axis that is not new in the view.
            OptionError: options that are not valid.
            AgreementError: the other ranks did not call this, or not with the same arguments.
        """
        with agree_on_call(self, f"mesh.add_view({name!r})") as compare:
            layout = Layout(**sizes, world_size=self.layout.world_size)
            by_axes = find_options_by_axes(options or {}, [axis for axis in layout if axis not in self])
            compare({"layout": repr(layout), "options": options or {}})
            return self._add_agreed_view(name, layout, by_axes)

    def close(self, *, destroy_groups: bool = False) -> None:
        """End this mesh; a second call does nothing. Every rank of the mesh should call it.

        Its groups stay until the default group is destroyed, and serve the next mesh over the same ranks under the names
        that they have, which DTensor and compiled code remember.

        Args:
            destroy_groups: destroy every group that namedmesh made and no open mesh uses; every rank then does. It frees
                their memory, for a mesh that does not come back.
        """
        if self.closed:
            return
        try:
            for hook in self._close_hooks:
                hook()
        finally:
            self.closed = True
            self._ending.detach()
            self._close_hooks.clear()
            self._forget_answers()
            self._groups.release()
            current.unregister(self)
            if destroy_groups:
                destroy_unused_groups()

    # Selecting a mesh for code that names none.

    def __enter__(self) -> NamedMesh:
        """Make this the current mesh of the process, for :func:`current_mesh` and the dialects, until the block is left."""
        self._check_open()
        current.select(self)
        return self

    def __exit__(self, *_error: object) -> None:
        current.deselect(self)

    def __deepcopy__(self, memo: dict[int, object]) -> NamedMesh:
        """Return the same mesh: a copy of something that holds a mesh shares it."""
        return self

    def __copy__(self) -> NamedMesh:
        return self

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.global_rank} on {self.device}"
        return f"<NamedMesh {self.layout}, {state}>"

    # Behind what communicates.

    def _add_agreed_view(
        self, name: str, layout: Layout, options: Mapping[tuple[str, ...], GroupOptions]
    ) -> DeviceMesh:
        self._views.check_view(name, layout, self.global_rank)
        self._groups.options_by_axes |= options
        root = self._views.create_mesh(layout)
        self._add_view(name, layout, root)
        return root

    def _add_view(self, name: str, layout: Layout, root: DeviceMesh, *, borrowed: bool = False) -> None:
        new = {axis: root.get_group(axis) for axis in layout if axis not in self}
        current.check_groups(self, new)
        if borrowed:
            self._borrow(layout, new)
        self._views.layouts[name] = layout
        self._views.add_root(name, root)
        self._prepare()

    def _forget_answers(self) -> None:
        """Forget what was worked out: what the mesh is asked for then, it looks up, and finds that it has ended."""
        self._version = ""
        # torch's meshes hold groups, which destroy_process_group() has to end.
        views = self._views
        for answers in (self._places, self._meshes, self._slices, views.roots, views.flattened_meshes):
            answers.clear()

    def _named(self, names: tuple[str, ...]) -> str | None:
        """Return the axis or the flattened product that some names are together, if there is one."""
        axes = set(self._views.expand(names))
        for name in (*self._axes, *self._views.flattened_axes):
            if axes == set(self._views.expand((name,))):
                return name
        return None


def current_mesh() -> NamedMesh:
    """Return the innermost mesh entered with ``with mesh:``, in whatever thread; outside of any, the only one that is open.

    Raises:
        MeshError: there is no mesh, or there are several and none was selected, or the selected one is closed.
    """
    mesh: NamedMesh | None = current.selected_mesh()
    if mesh is not None:
        if mesh.closed:
            raise MeshError(
                f"the mesh over {mesh.layout}, selected with 'with mesh:', was closed; leave the block first"
            )
        return mesh
    meshes: list[NamedMesh] = current.open_meshes()
    if not meshes:
        raise MeshError("no mesh is alive in this process; call namedmesh.init_mesh(...) first")
    if len(meshes) == 1:
        return meshes[0]
    raise MeshError(
        f"{len(meshes)} meshes are alive in this process and none is selected: "
        f"{', '.join(sorted(str(mesh.layout) for mesh in meshes))}; select one with 'with mesh:', or make the last one "
        "with init_mesh(close_existing=True), which closes the others"
    )


@atexit.register
def close_all() -> None:
    """Close every mesh that is open in this process, the newest first."""
    for mesh in reversed(current.all_meshes()):
        mesh.close()
