"""A layout bound to live process groups: sub-meshes, groups and this rank's place, by name."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from namedmesh import current
from namedmesh._torch import constant_under_compile, make_flat_mesh
from namedmesh.adopt import layout_of_groups, layout_of_mesh, meshes_of_transformers
from namedmesh.errors import AxisError, LayoutError, MeshError, did_you_mean
from namedmesh.explain import explain_group, explain_mesh, explain_rank
from namedmesh.groups import Communicator, GroupPool, agreed
from namedmesh.launch import default_group_device
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions
from namedmesh.views import ROOT_VIEW, View, Views, join_names, product_axes, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from namedmesh.groups import GroupMaker

__all__ = ["NamedMesh"]


class Place(NamedTuple):
    """This rank's place on an axis or a product: among which ranks, the how manieth, on which group."""

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup


class NamedMesh:
    """Named axes over live process groups. Made by :func:`namedmesh.init_mesh`, or by adopting what exists.

    Every answer is this rank's own. Accessors never communicate; what does, says so in its first line.

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
        view: View,
        pool: GroupPool,
        device: torch.device,
        options: Mapping[str, GroupOptions] | None = None,
    ) -> None:
        """Bind a layout to process groups over the same ranks; :func:`namedmesh.init_mesh` is the usual way."""
        self.layout = layout = view.layout
        self.pool = pool
        self.device = device
        self.global_rank = pool.rank
        self.closed = False
        # Options of the groups over one axis or several, by the axes in the order of their layout.
        self._options = {_option_axes(name, layout): option for name, option in (options or {}).items()}
        self._all_views = Views(view)
        # Slices over some axes, and the meshes of products, by the names that they are asked with.
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        # Of each axis and product, under the version and the names that it is asked with; and what nobody foresaw.
        self._places: dict[tuple[str, tuple[str, ...]], Place] = {}
        self._answers: dict[tuple[object, ...], object] = {}
        self._before_close: list[Callable[[], None]] = []
        self._lock = pool.registry.agreements.lock
        self._prepare_answers()
        current.register(self)
        pool.end_mesh = self._end

    # Adopting what exists.

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> NamedMesh:
        """Return a named mesh over a torch mesh that exists; its groups are used as they are and never destroyed.

        Args:
            mesh: a mesh with names, whose ranks are a range in row-major order of its axes (in any order).

        Raises:
            LayoutError: the mesh has no names, or its ranks follow no such order.
        """
        layout = layout_of_mesh(mesh)
        pool = GroupPool()
        view = View(layout, mesh.device_type, {axis: mesh.get_group(axis) for axis in layout.axes}, mesh)
        _borrow(pool, view)
        return cls(view, pool, default_group_device(mesh.device_type))

    @classmethod
    def from_transformers(cls, model: object) -> NamedMesh:
        """Return a named mesh over those that Hugging Face's transformers made for a model; nothing is created.

        Args:
            model: what ``from_pretrained(..., distributed_config=DistributedConfig(...))`` returned.

        Returns:
            A mesh of axes ``pp``, ``dp_replicate``, ``fsdp`` and ``tp``, with the view ``expert`` of ``pp``,
            ``dp_replicate``, ``efsdp`` and ``ep``. Slices of it go together with the model's parameters.

        Raises:
            LayoutError: transformers did not distribute the model.
        """
        dense, expert = meshes_of_transformers(model)
        mesh = cls.from_device_mesh(dense)
        mesh.adopt_view("expert", expert)
        return mesh

    @classmethod
    def from_groups(
        cls,
        groups: Mapping[str, dist.ProcessGroup],
        *,
        device: str | torch.device | None = None,
        rank_offset: int = 0,
    ) -> NamedMesh:
        """Return a named mesh over process groups that exist; they are never destroyed.

        Args:
            groups: this rank's group on each axis, by name, slowest axis first.
            device: the device of the mesh; by default the one that goes with the default group.
            rank_offset: the first rank of the mesh, for one over a part of the world.

        Raises:
            LayoutError: the groups are not those of any layout with these axes in this order.
        """
        pool = GroupPool()
        layout = layout_of_groups(groups, pool.rank, rank_offset)
        chosen = default_group_device(device)
        view = View(layout, chosen.type, dict(groups))
        _borrow(pool, view)
        return cls(view, pool, chosen)

    def adopt_view(self, name: str, root: DeviceMesh) -> None:
        """Add another factoring of the same ranks that exists as a torch mesh; its groups are used as they are.

        Args:
            name: the name of the view.
            root: a mesh over the same ranks. Axes that this mesh has already must be the same ranks there.

        Raises:
            LayoutError: a name that is taken, an axis that is not the same ranks, or a mesh of other ranks.
        """
        layout = layout_of_mesh(root)
        if layout.ranks != self.layout.ranks:
            raise LayoutError(
                f"{layout} is not over the ranks of {self.layout}; adopt a mesh over the same ranks"
            )
        self._views.check(name, layout, self.global_rank)
        groups = {axis: root.get_group(axis) for axis in layout}
        new = {axis: group for axis, group in groups.items() if axis not in self}
        current.refuse_ambiguous_mesh(layout, root.device_type, new)
        for axis, group in new.items():
            if self.pool.find(layout, (axis,), self.pool.defaults) is None:
                self.pool.borrow(layout.group(self.global_rank, axis), group, axis)
        self._views[name] = View(layout, root.device_type, groups, root)
        self._prepare_answers()

    # Accessors. Nothing here communicates.

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh over one axis or several, in the order of the layout; the same object each time.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            LayoutError: axes out of order.
            MeshError: the mesh is closed.
        """
        return self._slice((axes,) if isinstance(axes, str) else tuple(axes), self._version)

    def __contains__(self, axis: object) -> bool:
        """Return whether ``mesh[axis]`` answers: for axes, those of views included, and flattened products by name."""
        return isinstance(axis, str) and (self._version, (axis,)) in self._places

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
        try:  # compiled code guards the version, and not the group
            return self._places[self._version, axes].group
        except KeyError:
            return self._find_group(axes, self._version)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in this rank's group over ``axes``; without axes, in the whole mesh."""
        try:
            return len(self._places[self._version, axes].ranks)
        except KeyError:
            return len(self._find_ranks(axes, self._version))

    def rank(self, *axes: str) -> int:
        """Return this rank's position in its group over ``axes``; without axes, in the whole mesh."""
        try:
            return self._places[self._version, axes].rank
        except KeyError:
            return self._find_ranks(axes, self._version).index(self.global_rank)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks in this rank's group over ``axes``, ascending; without axes, of the whole mesh."""
        try:
            return self._places[self._version, axes].ranks
        except KeyError:
            return self._find_ranks(axes, self._version)

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis; those of a view come after the mesh's own."""
        self._check_open()
        return {axis: self.rank(axis) for axis in self._axes}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch mesh over all axes of the layout."""
        return self._root(self._version)

    @property
    def views(self) -> dict[str, Layout]:
        """The layouts of the views that were added, by name."""
        return {name: layout for name, layout in self._views.layouts().items() if name != ROOT_VIEW}

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The process groups that this rank holds through this mesh, in the order they came."""
        self._check_open()
        return tuple(each for each in self.pool.groups.values() if each.exists)

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

    def options_of(self, ordered: tuple[str, ...]) -> GroupOptions:
        """Return the options of a group over axes of one view: what was set for all together, or for each.

        Args:
            ordered: the axes, in the order of their layout.

        Raises:
            LayoutError: the axes set options that contradict each other.
        """
        combined = self._options.get(ordered)
        if combined is not None:
            return combined
        for axis in ordered:
            of_axis = self._options.get((axis,))
            if combined is None:
                combined = of_axis
            elif of_axis is not None:
                combined = combined.combined(of_axis, join_names(ordered))
        return combined or _NO_OPTIONS

    def explain(self, group: dist.ProcessGroup | None = None, *, rank: int | None = None) -> str:
        """Describe a process group, the place of a rank, or, without either, the whole mesh."""
        layouts = self._views.layouts()
        if group is not None:
            return explain_group(layouts, self.communicators, group)
        if rank is not None:
            return explain_rank(layouts, rank)
        return explain_mesh(layouts, self.communicators, self.global_rank, self.device)

    # What communicates: every rank of the mesh calls these, in the same order.

    def flatten(self, *axes: str, name: str | None = None, options: GroupOptions | None = None) -> DeviceMesh:
        """Make a 1-D mesh over the product of some axes, on one group; communicates the first time.

        Args:
            *axes: two axes or more of the mesh or of one view, in any order; the ranks are in layout order.
            name: the name of the product; by default the names of the axes joined by ``_``.
            options: options of the group; by default those that the axes set.

        Returns:
            A torch mesh that goes together with the slices of this mesh: FSDP2 takes it for parameters that
            are tensor-parallel on ``mesh["tp"]``. The same object each time. With torch up to 2.9 that needs
            axes that adjoin in the layout (others of size 1 between them do not matter).

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            LayoutError: the name is taken, or the axes set options that contradict each other.
            AgreementError: the other ranks did not call this, or not with the same arguments.
        """
        if options is not None and not isinstance(options, GroupOptions):
            raise LayoutError(f"options are {options!r}; give GroupOptions(...)")
        with self._lock:  # a thread that asks for the same as another one finds it made
            with self.agreed("mesh.flatten") as maker:
                expanded = self._views.expand(axes)
                view = self._views.of(expanded)
                ordered = view.ordered(expanded)
                if (self._version, ordered) in self._places:
                    return self._flattened_already(ordered, name, options)
                name = name or "_".join(ordered)
                self._views.check_product(name, ordered)
                options = options or self.options_of(ordered)
                request = {"axes": "-".join(ordered), "name": name, "options": repr(options)}
                maker.compare(request, [(view.layout, ordered, options)])
                group = maker.make(view.layout, ordered, options)
                if options.gloo_twin:
                    maker.make(view.layout, ordered, self.pool.gloo_options(options))
                current.refuse_ambiguous_mesh(view.layout, self.device.type, {name: group}, ordered)
            self._options[ordered] = options
            self._meshes[name,] = make_flat_mesh(view.root, ordered, name, group)
            self._views.products[name] = ordered
            self._prepare_answers()
            return self._meshes[name,]

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
            AgreementError: the other ranks did not call this, or not with the same arguments.
        """
        options = options or {}
        with self._lock:  # a thread that asks for the same as another one finds it made
            with self.agreed(f"mesh.add_view({name!r})") as maker:
                layout = self._checked_view(name, options, sizes)
                request = {"layout": repr(layout), "options": repr(dict(options))}
                maker.compare(
                    request, [(layout, (axis,), self._axis_options(axis, options)) for axis in layout]
                )
                view = self.create_view(layout, maker, options)
                current.refuse_ambiguous_mesh(layout, self.device.type, view.groups)
            self.take_view(name, view, options)
            return view.root

    def create_view(self, layout: Layout, maker: GroupMaker, options: Mapping[str, GroupOptions]) -> View:
        """Return a view that the ranks agree on, with its groups; for the dialects too."""
        by_axis = {axis: self._axis_options(axis, options) for axis in layout}
        return maker.create_view(layout, self.device.type, by_axis)

    def take_view(self, name: str, view: View, options: Mapping[str, GroupOptions]) -> None:
        """Add a view whose groups exist."""
        self._options |= {_option_axes(key, view.layout): option for key, option in options.items()}
        self._views[name] = view
        self._prepare_answers()

    def close(self) -> None:
        """Release the groups of this mesh; the last mesh that uses a group destroys it. A second call does nothing.

        The default group stays, and so do groups that were adopted. Every rank of the mesh should call it. It waits for
        what uses the groups in the background, such as a checkpoint that is written, and raises its error.
        """
        if self.closed:
            return
        try:
            for finish in self._before_close:
                finish()
        finally:
            self._before_close.clear()
            self.pool.close()

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

    def _end(self, reason: str) -> None:
        """Drop every reference to groups: the pool is being closed, or torch destroys the default group."""
        self.closed, self._end_reason = True, reason
        self._version = str(next(_versions))
        for view in self._all_views.values():
            view.forget()
        self._all_views = Views(View(self.layout, self.device.type, {}))
        for answers in (self._places, self._meshes, self._answers):
            answers.clear()  # what a closed mesh is asked for, it has to look up, and finds that it is closed
        # A mesh whose default group is gone is not selected any more.
        current.unregister(self, deselect=self.pool.registry.ended)

    # Selecting a mesh for code that names none.

    def __enter__(self) -> Self:
        """Make this the current mesh, for :func:`namedmesh.current_mesh` and the dialects, until the block is left.

        A plain generator that yields inside the block leaves it selected for its caller too, until the generator goes
        on and leaves the block: take the ``with`` out of the generator, or give what it calls the mesh as an argument.
        """
        self._check_open()
        current.select(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def group_named(self, name: str) -> dist.ProcessGroup | None:
        """Return the group of this rank over an axis or a flattened product of this name, if there is one."""
        place = self._places.get((self._version, (name,)))
        return None if place is None else place.group

    # For the dialects, which create groups of this mesh.

    def agreed(self, call: str) -> AbstractContextManager[GroupMaker]:
        """Return the context in which the ranks of the mesh agree on a call, and create groups for it.

        Args:
            call: what is being called, for messages.

        Raises:
            MeshError: the mesh is closed.
        """
        self._check_open()
        return agreed(self.pool, call, self.layout.ranks)

    # Behind the accessors.

    def _check_open(self) -> None:
        if self.closed:
            raise MeshError(f"the mesh over {self.layout} {self._end_reason}; make another with init_mesh()")

    @property
    def _views(self) -> Views:
        """The views of an open mesh: every answer that is not known yet goes through here."""
        self._check_open()
        return self._all_views

    def _prepare_answers(self) -> None:
        """Work out the answers for each axis and product: under ``torch.compile`` an accessor must not learn."""
        # Guards the constants of compiled code: no two meshes, and no two states of one, have the same.
        version = str(next(_versions))
        places: dict[tuple[str, tuple[str, ...]], Place] = {}
        for view in self._all_views.values():
            for axis in view.layout.axes:
                if (version, (axis,)) not in places:
                    places[version, (axis,)] = self._place(view.layout, (axis,), view.groups[axis])
        self._axes = tuple([axis for _, (axis,) in places])
        for name, ordered in self._all_views.products.items():
            place = self._place(self._all_views.of(ordered).layout, ordered, self._meshes[name,].get_group())
            places[version, (name,)] = places[version, ordered] = place
        self._places, self._version = places, version

    def _place(self, layout: Layout, axes: tuple[str, ...], group: dist.ProcessGroup) -> Place:
        ranks = layout.group(self.global_rank, *axes)
        return Place(ranks, ranks.index(self.global_rank), group)

    def _in_view(self, axes: Sequence[str]) -> tuple[View, tuple[str, ...]]:
        """Return the view that has the axes, and the axes in its order; without axes, the whole mesh."""
        expanded = self._views.expand(axes) or self.layout.axes
        view = self._views.of(expanded)
        return view, view.ordered(expanded)

    @constant_under_compile
    def _constant(self, function: Callable[..., Any], version: str, *args: Any) -> Any:
        key = (function, version, *args)
        if key not in self._answers:
            self._answers[key] = function(self, *args)
        return self._answers[key]

    @constant_under_compile
    def _find_ranks(self, axes: tuple[str, ...], _version: str) -> tuple[int, ...]:
        """Return the ranks over axes that no answer stands ready for."""
        view, ordered = self._in_view(axes)
        return view.layout.group(self.global_rank, *ordered)

    @constant_under_compile
    def _root(self, _version: str) -> DeviceMesh:
        return self._views[ROOT_VIEW].root

    @constant_under_compile
    def _slice(self, axes: tuple[str, ...], _version: str) -> DeviceMesh:
        known = self._meshes.get(axes)
        if known is not None:
            return known
        view = self._views.of(axes)
        if len(set(axes)) != len(axes) or not axes:
            raise AxisError(f"axes {axes} are not a selection of {view.layout.axes}; name each axis once")
        in_order = tuple(axis for axis in view.root.mesh_dim_names or () if axis in axes)
        if axes != in_order:
            raise LayoutError(
                f"mesh[{quoted(axes)}] is out of order; torch slices in the order of the mesh: "
                f"mesh[{quoted(in_order)}]"
            )
        return self._meshes.setdefault(axes, view.slice(axes))

    @constant_under_compile
    def _find_group(self, axes: tuple[str, ...], _version: str) -> dist.ProcessGroup:
        if not axes:
            raise AxisError(f"no axis is named; name one or more of {self.layout.axes}")
        view, ordered = self._in_view(axes)
        known = self._places.get((self._version, ordered))
        if known is not None:
            return known.group
        group = self.pool.find(view.layout, ordered, self.options_of(ordered))
        if group is None:
            raise MeshError(
                f"there is no group over {join_names(ordered)} yet; call mesh.flatten({quoted(ordered)}) once, on every "
                "rank, before it is asked for"
            )
        return group

    @constant_under_compile
    def _find_gloo_group(self, axes: tuple[str, ...], _version: str) -> dist.ProcessGroup:
        view, ordered = self._in_view(axes)
        group = self.pool.find(view.layout, ordered, self.pool.gloo_options(self.options_of(ordered)))
        if group is None:
            raise MeshError(
                f"there is no gloo group over {join_names(ordered)}; ask for one when the group is made, with "
                "options=GroupOptions(gloo_twin=True)"
            )
        return group

    # Behind what communicates.

    def _flattened_already(
        self, ordered: tuple[str, ...], name: str | None, options: GroupOptions | None
    ) -> DeviceMesh:
        """Return the mesh of a second call of flatten, or of one for a single axis; nothing else may be asked."""
        known = self._views.name_of(ordered)
        group_options, problems = self.options_of(ordered), []
        if name is not None and name != known:
            problems.append(
                f"{join_names(ordered)} already have the name {known!r}, and name is {name!r}; leave name out"
            )
        if options is not None and options != group_options:
            problems.append(
                f"the group over {join_names(ordered)} exists with {group_options!r}, and options is {options!r}; leave "
                "options out, or give them where the group is made first"
            )
        if problems:
            raise LayoutError(*problems)
        return self[known]

    def _checked_view(
        self, name: str, options: Mapping[str, GroupOptions], sizes: Mapping[str, int]
    ) -> Layout:
        """Return the layout of a view that may be added, with its options.

        Raises:
            LayoutError: it does not fit the mesh.
            AxisError: options for an axis that is not new in the view.
        """
        layout = Layout(**sizes, world_size=self.layout.world_size, rank_offset=self.layout.rank_offset)
        self._views.check(name, layout, self.global_rank)
        new = [axis for axis in layout if axis not in self._axes]
        problems = []
        given: Mapping[str, object] = options
        for axis, option in given.items():
            if not isinstance(option, GroupOptions):
                problems.append(f"options of {axis!r} are a {type(option).__name__}; give GroupOptions(...)")
            if axis in self._axes:
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
        return layout

    def _axis_options(self, axis: str, options: Mapping[str, GroupOptions]) -> GroupOptions:
        """Return the options of an axis of a new view."""
        return options.get(axis) or self._options.get((axis,)) or self.pool.defaults


def _borrow(pool: GroupPool, view: View) -> None:
    """Take note of groups that somebody else owns."""
    current.refuse_ambiguous_mesh(view.layout, view.device_type, view.groups)
    for axis, group in view.groups.items():
        pool.borrow(view.layout.group(pool.rank, axis), group, axis)


_NO_OPTIONS = GroupOptions()
_versions = count()  # used as texts: the compiler guards those, but makes numbers symbolic that changed


def _option_axes(name: str, layout: Layout) -> tuple[str, ...]:
    """Return the axes of an option: one of the layout, several joined by ``_``, or one of a later view."""
    return (name,) if name in layout else product_axes(name, layout.axes) or (name,)
