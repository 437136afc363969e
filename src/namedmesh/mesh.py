"""A layout bound to live process groups: sub-meshes, groups and this rank's place, by name."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from namedmesh import agreement, current
from namedmesh._torch import constant_under_compile, flattened, joined, without_modes
from namedmesh.adopt import layout_of_groups, layout_of_mesh
from namedmesh.errors import AxisError, LayoutError, MeshError, did_you_mean
from namedmesh.explain import explain_group, explain_mesh, explain_rank
from namedmesh.groups import Groups, destroy_unused
from namedmesh.launch import default_group_device
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions
from namedmesh.views import ROOT_VIEW, Views, join_names, merged, product_axes, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self

    from namedmesh.groups import Communicator

__all__ = ["NamedMesh"]


class Place(NamedTuple):
    """This rank's place on an axis or a product: among which ranks, the how manieth, on which group."""

    ranks: tuple[int, ...]
    rank: int
    group: Any


class NamedMesh:
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
        >>> mesh.size("dp"), mesh.rank("tp"), mesh.ranks("dp", "tp")
        (1, 0, (0,))
        >>> mesh["tp"].get_group() is mesh.group("tp")
        True
        >>> "tp" in mesh, list(mesh)
        (True, ['dp', 'tp'])
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        options: Mapping[str, GroupOptions],
        defaults: GroupOptions,
        root: DeviceMesh | None = None,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        """Make the groups of a layout, which every rank does; with ``groups``, take those that exist."""
        self.layout, self.device, self.closed = layout, device, False
        self.groups = Groups(defaults)
        self.global_rank = self.groups.rank
        # Options of the groups over one axis or several, by the axes in the order of their layout.
        self._options = {product_axes(name, layout.axes) or (name,): each for name, each in options.items()}
        self._views = Views(layout)
        self._roots: dict[object, DeviceMesh] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}  # slices, by the names that they are asked with
        self._places: dict[tuple[str, ...], Place] = {}
        self._axes: tuple[str, ...] = ()
        self._before_close: list[Callable[[], None]] = []
        for axis, group in (groups or {}).items():
            self.groups.borrow(self.groups.key(layout, (axis,), self.options_of((axis,))), axis, group)
        if groups is None:
            self._roots[ROOT_VIEW] = self._make_root(layout)
        else:
            self._roots[ROOT_VIEW] = root or self._root_over(layout, {axis: (axis,) for axis in layout})
        self._prepare()
        try:
            current.opened(self, {axis: self.group(axis) for axis in self})
        except MeshError:
            self.groups.release()
            raise

    # Adopting what exists.

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> NamedMesh:
        """Return a named mesh over a torch mesh that exists; its groups are used as they are and never destroyed.

        Args:
            mesh: a mesh with names, over the world or a part of it, whose ranks are a range in row-major order of its
                axes (in any order).

        Raises:
            LayoutError: the mesh has no names, or its ranks follow no such order.
        """
        layout = layout_of_mesh(mesh)
        groups = {axis: mesh.get_group(axis) for axis in layout}
        return cls(layout, default_group_device(mesh.device_type), {}, GroupOptions(), mesh, groups)

    @classmethod
    def from_groups(
        cls, groups: Mapping[str, dist.ProcessGroup], *, device: str | torch.device | None = None
    ) -> NamedMesh:
        """Return a named mesh over process groups that exist; they are never destroyed.

        Args:
            groups: this rank's group on each axis, by name, slowest axis first.
            device: the device of the mesh; by default the one that goes with the default group.

        Raises:
            LayoutError: the groups are not those of any layout with these axes in this order.
        """
        layout = layout_of_groups(groups, dist.get_rank())
        return cls(layout, default_group_device(device), {}, GroupOptions(), None, groups)

    def adopt_view(self, name: str, root: DeviceMesh) -> None:
        """Add another factoring of the same ranks that exists as a torch mesh; its groups are used as they are.

        Args:
            name: the name of the view.
            root: a mesh over the same ranks. Axes that this mesh has already must be the same ranks there.

        Raises:
            LayoutError: a name that is taken, an axis that is not the same ranks, or a mesh of other ranks.
        """
        self._check_open()
        layout = layout_of_mesh(root)
        if layout.ranks != self.layout.ranks:
            raise LayoutError(
                f"{layout} is not over the ranks of {self.layout}; adopt a mesh over the same ranks"
            )
        self._views.check(name, layout, self.global_rank)
        new = {axis: root.get_group(axis) for axis in layout if axis not in self}
        current.refuse_ambiguous(self, new)
        for axis, group in new.items():
            self.groups.borrow(self.groups.key(layout, (axis,), self.options_of((axis,))), axis, group)
        self._add_view(name, layout, root)

    # Accessors. Nothing here communicates.

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh over axes and flattened products, in the order of the layout; the same object each time.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            LayoutError: axes out of order.
            MeshError: the mesh is closed.
        """
        return self._slice((names,) if isinstance(names, str) else tuple(names), self._version)

    def __contains__(self, name: object) -> bool:
        """Return whether ``mesh[name]`` answers: for axes, those of views included, and flattened products by name."""
        return isinstance(name, str) and (name,) in self._places

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the axes, slowest first; those of a view come after the mesh's own."""
        return iter(self._axes)

    def __len__(self) -> int:
        """Return the number of axes."""
        return len(self._axes)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of this rank over one axis, or over several that were flattened.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            MeshError: the mesh is closed, or there is no group over these axes yet.
        """
        known = self._places.get(axes)
        group: dist.ProcessGroup = self._find_group(axes, self._version) if known is None else known.group
        return group

    def size(self, *axes: str) -> int:
        """Return the number of ranks in this rank's group over ``axes``; without axes, in the whole mesh."""
        known = self._places.get(axes)
        return len(self._find_ranks(axes, self._version) if known is None else known.ranks)

    def rank(self, *axes: str) -> int:
        """Return this rank's position in its group over ``axes``; without axes, in the whole mesh."""
        known = self._places.get(axes)
        return self._find_ranks(axes, self._version).index(self.global_rank) if known is None else known.rank

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks in this rank's group over ``axes``, ascending; without axes, of the whole mesh."""
        known = self._places.get(axes)
        return self._find_ranks(axes, self._version) if known is None else known.ranks

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis; those of a view come after the mesh's own."""
        self._check_open()
        return {axis: self.rank(axis) for axis in self}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch mesh over all axes of the layout."""
        self._check_open()
        return self._roots[ROOT_VIEW]

    @property
    def views(self) -> dict[str, Layout]:
        """The layouts of the views that were added, by name."""
        return {name: layout for name, layout in self._views.layouts.items() if name != ROOT_VIEW}

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The process groups that this rank holds through this mesh, in the order they came."""
        self._check_open()
        return tuple(self.groups.held.values())

    @property
    def outlived(self) -> bool:
        """Whether the default group that the mesh was made in was destroyed."""
        return dist.group.WORLD is not self.groups.world

    def is_first(self, axis: str) -> bool:
        """Return whether this rank is the first on an axis, or on a flattened product."""
        return self.rank(axis) == 0

    def is_last(self, axis: str) -> bool:
        """Return whether this rank is the last on an axis, or on a flattened product."""
        return self.rank(axis) == self.size(axis) - 1

    @overload
    def next(self, axis: str) -> int: ...
    @overload
    def next(self, axis: str, *, wrap: bool) -> int | None: ...
    def next(self, axis: str, *, wrap: bool = True) -> int | None:
        """Return the global rank after this one on an axis or a flattened product.

        After the last comes the first; with ``wrap=False`` nobody, and None is returned.
        """
        if not wrap and self.is_last(axis):
            return None
        return self.ranks(axis)[(self.rank(axis) + 1) % self.size(axis)]

    @overload
    def prev(self, axis: str) -> int: ...
    @overload
    def prev(self, axis: str, *, wrap: bool) -> int | None: ...
    def prev(self, axis: str, *, wrap: bool = True) -> int | None:
        """Return the global rank before this one on an axis or a flattened product.

        Before the first comes the last; with ``wrap=False`` nobody, and None is returned.
        """
        if not wrap and self.is_first(axis):
            return None
        return self.ranks(axis)[self.rank(axis) - 1]

    def gloo_group(self, *axes: str) -> dist.ProcessGroup:
        """Return the gloo group over the same ranks as :meth:`group`, for tensors on the CPU.

        Raises:
            MeshError: the axes have no gloo group; it is created where their options say ``gloo_twin``.
        """
        return self._find_gloo_group(axes, self._version)

    def options_of(self, axes: tuple[str, ...]) -> GroupOptions:
        """Return the options of a group over axes of one view, in its order: what was set for all together, or for each.

        Raises:
            LayoutError: the axes set options that contradict each other.
        """
        if axes in self._options:
            return self._options[axes]
        combined: GroupOptions | None = None
        for axis in axes:
            of_axis = self._options.get((axis,))
            if combined is None:
                combined = of_axis
            elif of_axis is not None:
                combined = combined.combined(of_axis, join_names(axes))
        return combined or _NO_OPTIONS

    def explain(self, group: dist.ProcessGroup | None = None, *, rank: int | None = None) -> str:
        """Describe a process group, the place of a rank, or, without either, the whole mesh."""
        layouts = self._views.layouts
        if group is not None:
            return explain_group(layouts, self.communicators, group)
        if rank is not None:
            return explain_rank(layouts, rank)
        return explain_mesh(layouts, self.communicators, self.global_rank, self.device)

    # What communicates: every rank calls these, in the same order.

    def flatten(self, *axes: str, name: str | None = None, options: GroupOptions | None = None) -> DeviceMesh:
        """Make a 1-D mesh over the product of some axes, on one group; communicates the first time.

        Args:
            *axes: two axes or more of the mesh or of one view, in any order; the ranks are in layout order.
            name: the name of the product; by default the names of the axes joined by ``_``.
            options: options of the group; by default those that the axes set.

        Returns:
            A torch mesh that goes together with the slices of this mesh: FSDP2 takes it for parameters that
            are tensor-parallel on ``mesh["tp"]``, and ``mesh["dp_cp", "tp"]`` has it beside an axis. The same object
            each time.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            LayoutError: the name is taken, or the axes set options that contradict each other.
            AgreementError: the other ranks did not call this, or not with the same arguments.
        """
        known = self._named(axes)
        if known is not None:
            return self._flattened_already(known, name, options)
        with self.agreed("mesh.flatten") as compare:
            view, ordered = self._views.find(axes)
            name = name or "_".join(ordered)
            self._views.check_product(name, ordered)
            options = options or self.options_of(ordered)
            compare({"axes": "-".join(ordered), "name": name, "options": options})
            self._options[ordered] = options
            group = self._make_group(self._views.layouts[view], ordered)
            current.refuse_ambiguous(self, {name: group})
            self._views.products[name] = ordered
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
            AgreementError: the other ranks did not call this, or not with the same arguments.
        """
        with self.agreed(f"mesh.add_view({name!r})") as compare:
            layout = Layout(**sizes, world_size=self.layout.world_size)
            self._check_options(name, layout, options or {})
            compare({"layout": repr(layout), "options": options or {}})
            return self.take_view(name, layout, options or {})

    def take_view(self, name: str, layout: Layout, options: Mapping[str, GroupOptions]) -> DeviceMesh:
        """Add a view that the ranks agree on; for the dialects too. Every rank calls it."""
        self._views.check(name, layout, self.global_rank)
        self._options |= {product_axes(key, layout.axes) or (key,): each for key, each in options.items()}
        root = self._make_root(layout)
        new = {axis: root.get_group(axis) for axis in layout if axis not in self}
        current.refuse_ambiguous(self, new)
        self._add_view(name, layout, root)
        return root

    def close(self, *, destroy_groups: bool = False) -> None:
        """End this mesh; a second call does nothing. Every rank of the mesh should call it.

        Its groups stay until the default group is destroyed, and serve the next mesh over the same ranks under the names
        that they have, which DTensor and compiled code remember.

        It waits for what uses the groups in the background, such as a checkpoint that is written, and raises its error.

        Args:
            destroy_groups: destroy every group that namedmesh made and no open mesh uses; every rank then does. It frees
                their memory, for a mesh that does not come back.
        """
        if self.closed:
            return
        try:
            for finish in self._before_close:
                finish()
        finally:
            self.closed, self._version = True, ""
            for answers in (self._places, self._meshes, self._roots, self._before_close):
                answers.clear()  # what a closed mesh is asked for, it has to look up, and finds that it is closed
            self.groups.release()
            current.closed(self)
            if destroy_groups:
                destroy_unused()

    def before_close(self, finish: Callable[[], None]) -> None:
        """Let :meth:`close` call a function first, while the groups are there.

        Example:
            >>> import namedmesh, torch.distributed as dist
            >>> mesh = namedmesh.init_mesh(dp=-1, device="cpu")
            >>> mesh.before_close(lambda: print("the groups are there still"))
            >>> mesh.close(); dist.destroy_process_group()
            the groups are there still
        """
        self._before_close.append(finish)

    @contextmanager
    def agreed(self, call: str) -> Iterator[Callable[..., None]]:
        """Do what every rank does; see :func:`namedmesh.agreement.agreed`.

        Raises:
            MeshError: the mesh is closed, or it is over a part of the world.
        """
        self._check_open()
        if self.layout.world_size != self.groups.world_size:
            raise MeshError(
                f"{self.layout} is a part of the world of {self.groups.world_size} ranks, and torch makes groups with "
                f"every rank; {call} needs a mesh over all of them, or groups that were made before the mesh was adopted"
            )
        with agreement.agreed(call, self.groups.defaults.timeout) as compare:
            yield compare

    # Selecting a mesh for code that names none.

    def __enter__(self) -> Self:
        """Make this the current mesh, for :func:`namedmesh.current_mesh` and the dialects, until the block is left.

        It is the process's: every thread sees it.
        """
        self._check_open()
        current.select(self)
        return self

    def __exit__(self, *_error: object) -> None:
        current.deselect(self)

    def __copy__(self) -> Self:
        """Return the same mesh: a copy of something that holds a mesh shares it."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the same mesh: a copy of something that holds a mesh shares it."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        raise MeshError(
            f"the mesh over {self.layout} cannot be pickled: its process groups live in this process only; send "
            "mesh.layout, mesh.coords or the numbers that the other process needs, which can be pickled"
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.global_rank} on {self.device}"
        return f"<NamedMesh {self.layout}, {state}>"

    # Behind the accessors.

    def _check_open(self) -> None:
        if self.closed or self.outlived:
            why = "was closed" if self.closed else "has no groups any more, since the default group was destroyed"
            raise MeshError(f"the mesh over {self.layout} {why}; make another with init_mesh()")

    def _prepare(self) -> None:
        """Work out what can be asked: accessors are called often, and compiled code must not look for a group."""
        self._version = str(next(_versions))  # no two meshes, and no two states of one, have the same
        self._axes = tuple(self._views.axes())
        for axis in self._axes:
            self._places[axis,] = self._place((axis,))
        for name, axes in self._views.products.items():
            self._places[name,] = self._places[axes] = self._place(axes)

    def _place(self, axes: tuple[str, ...]) -> Place:
        view, ordered = self._views.find(axes)
        layout = self._views.layouts[view]
        ranks = layout.group(self.global_rank, *ordered)
        group = self.groups.find(layout, ordered, self.options_of(ordered))
        return Place(ranks, ranks.index(self.global_rank), group)

    # The compiler keeps what these answer, for the version that it was asked with.

    @constant_under_compile
    def _find_ranks(self, names: tuple[str, ...], _version: str) -> tuple[int, ...]:
        self._check_open()
        view, ordered = self._views.find(names or self.layout.axes)
        return self._views.layouts[view].group(self.global_rank, *ordered)

    @constant_under_compile
    def _find_group(self, names: tuple[str, ...], _version: str) -> dist.ProcessGroup:
        self._check_open()
        _, ordered = self._views.find(names)
        group: dist.ProcessGroup | None = self._place(ordered).group
        if group is None:
            raise MeshError(
                f"there is no group over {join_names(ordered)} yet; call mesh.flatten({quoted(ordered)}) once, on every "
                "rank, before it is asked for"
            )
        return group

    @constant_under_compile
    def _find_gloo_group(self, axes: tuple[str, ...], _version: str) -> dist.ProcessGroup:
        self._check_open()
        view, ordered = self._views.find(axes)
        options = self.groups.gloo_options(self.options_of(ordered))
        group = self.groups.find(self._views.layouts[view], ordered, options)
        if group is None:
            raise MeshError(
                f"there is no gloo group over {join_names(ordered)}; ask for one when the group is made, with "
                "options=GroupOptions(gloo_twin=True)"
            )
        return group

    @constant_under_compile
    def _slice(self, names: tuple[str, ...], _version: str) -> DeviceMesh:
        known = self._meshes.get(names)
        if known is None:
            known = self._meshes[names] = self._new_slice(names)
        return known

    @without_modes
    def _new_slice(self, names: tuple[str, ...]) -> DeviceMesh:
        self._check_open()
        view, _ = self._views.find(names)
        root, layout = self._roots[view], self._views.layouts[view]
        self._views.check_order(names, root.mesh_dim_names or ())
        products = {name: axes for name, axes in self._views.products.items() if name in names}
        if not products:
            return root[names]
        together = merged(layout, products)
        if together is not None:
            key = tuple(together.items())
            if key not in self._roots:
                self._roots[key] = self._root_over(layout, together)
            return self._roots[key][names]
        parts = []
        for name in names:
            axes = products.get(name)
            parts.append(root[name] if axes is None else flattened(root, axes, name, self.group(name)))
        return parts[0] if len(parts) == 1 else joined(parts)

    # Behind what communicates.

    def _make_group(self, layout: Layout, axes: tuple[str, ...]) -> dist.ProcessGroup:
        options = self.options_of(axes)
        if options.gloo_twin:
            self.groups.over(layout, axes, self.groups.gloo_options(options))
        return self.groups.over(layout, axes, options)

    @without_modes
    def _make_root(self, layout: Layout) -> DeviceMesh:
        """Return the torch mesh over the axes of a layout, on groups that exist or are made now.

        ``init_device_mesh`` makes those of several axes at once where all of them are new; it would make one more for each
        axis of size 1, and for sets of ranks that have a group.
        """
        root: DeviceMesh | None = None
        large = {axis: size for axis, size in layout.items() if size > 1}
        keys = {axis: self.groups.key(layout, (axis,), self.options_of((axis,))) for axis in large}
        overrides = self.groups.overrides(keys)
        if len(large) > 1 and overrides is not None:
            root = init_device_mesh(
                self.device.type,
                tuple(large.values()),
                mesh_dim_names=tuple(large),
                backend_override=overrides or None,
            )
            for axis, key in keys.items():
                self.groups.take(key, axis, partial(root.get_group, axis))
        for axis in layout:
            self._make_group(layout, (axis,))
        if root is not None and len(large) == len(layout):
            return root
        return self._root_over(layout, {axis: (axis,) for axis in layout})

    @without_modes
    def _root_over(self, layout: Layout, axes: Mapping[str, tuple[str, ...]]) -> DeviceMesh:
        """Return a torch mesh of all ranks of a layout, over groups that exist."""
        groups: Any = [self.groups.find(layout, each, self.options_of(each)) for each in axes.values()]
        ranks = torch.arange(layout.ranks.start, layout.ranks.stop, dtype=torch.int, device="cpu")
        return DeviceMesh.from_group(
            groups,
            self.device.type,
            mesh=ranks.reshape([layout.size(*each) for each in axes.values()]),
            mesh_dim_names=tuple(axes),
        )

    def _add_view(self, name: str, layout: Layout, root: DeviceMesh) -> None:
        self._views.layouts[name], self._roots[name] = layout, root
        self._prepare()

    def _named(self, names: tuple[str, ...]) -> str | None:
        """Return the axis or the flattened product that some names are together, if there is one."""
        axes = set(self._views.expand(names))
        for name in (*self._axes, *self._views.products):
            if axes == set(self._views.expand((name,))):
                return name
        return None

    def _flattened_already(self, known: str, name: str | None, options: GroupOptions | None) -> DeviceMesh:
        """Return the mesh of a second call of flatten, or of one for a single axis; nothing else may be asked."""
        axes = self._views.expand((known,))
        problems = []
        if name is not None and name != known:
            problems.append(
                f"{join_names(axes)} already have the name {known!r}, and name is {name!r}; leave name out"
            )
        if options is not None and options != self.options_of(axes):
            problems.append(
                f"the group over {join_names(axes)} exists with {self.options_of(axes)!r}, and options is {options!r}; leave "
                "options out, or give them where the group is made first"
            )
        if problems:
            raise LayoutError(*problems)
        return self[known]

    def _check_options(self, name: str, layout: Layout, options: Mapping[str, GroupOptions]) -> None:
        """Refuse options of a view that are for no new axis of it."""
        new = [axis for axis in layout if axis not in self]
        problems = []
        for axis in options:
            if axis in self:
                problems.append(
                    f"options are given for {axis!r}, an axis that the mesh has already, with its group; give them to init_mesh"
                )
            elif axis not in layout and not product_axes(axis, layout.axes):
                problems.append(
                    f"options are given for {axis!r}, which is not one of the new axes {tuple(new)} of view {name!r}"
                    f"{did_you_mean(axis, new)}"
                )
        if problems:
            raise AxisError(*problems)


_NO_OPTIONS = GroupOptions()
_versions = count()  # used as texts: the compiler guards those, but makes numbers symbolic that changed
