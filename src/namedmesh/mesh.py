"""A layout bound to live process groups: sub-meshes, groups and this rank's place, by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from namedmesh import current
from namedmesh._torch import flattened, forget
from namedmesh.adopt import layout_of_groups, layout_of_mesh
from namedmesh.agreement import agree, telling
from namedmesh.errors import AxisError, LayoutError, MeshError
from namedmesh.explain import explain_group, explain_mesh, explain_rank
from namedmesh.groups import Communicator, GroupPool
from namedmesh.launch import default_group_device
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions
from namedmesh.views import DENSE, View, Views, named, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["NamedMesh"]


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
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        layout: Layout,
        root: DeviceMesh,
        pool: GroupPool,
        device: torch.device,
        options: Mapping[str, GroupOptions] | None = None,
    ) -> None:
        """Bind a layout to a torch mesh over the same ranks; :func:`namedmesh.init_mesh` is the usual way."""
        self.layout = layout
        self.pool = pool
        self.device = device
        self.global_rank = pool.rank
        self.closed = False
        self._options = dict(options or {})
        self._all_views = Views(View(layout, root))
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
        # Answers already given, by the names they were asked with: an accessor is a look-up.
        self._meshes: dict[str | tuple[str, ...], DeviceMesh] = {}
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._sizes: dict[tuple[str, ...], int] = {}
        self._ranks: dict[tuple[str, ...], int] = {}
        current.register(self)

    # Adopting what exists.

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> NamedMesh:
        """A named mesh over a torch mesh that exists; its groups are used as they are and never destroyed.

        Args:
            mesh: a mesh with names, whose ranks are a range in row-major order of its axes (in any order).

        Raises:
            LayoutError: the mesh has no names, or its ranks follow no such order.
        """
        layout = layout_of_mesh(mesh)
        pool = GroupPool()
        for axis in layout.axes:
            pool.borrow(layout.group(pool.rank, axis), mesh.get_group(axis), axis)
        return cls(layout, mesh, pool, default_group_device(mesh.device_type))

    @classmethod
    def from_groups(
        cls,
        groups: Mapping[str, dist.ProcessGroup],
        *,
        device: str | torch.device | None = None,
        rank_offset: int = 0,
    ) -> NamedMesh:
        """A named mesh over process groups that exist; they are never destroyed.

        Args:
            groups: this rank's group on each axis, by name, slowest axis first.
            device: the device of the mesh; by default the one that goes with the default group.
            rank_offset: the first rank of the mesh, for one over a part of the world.

        Raises:
            LayoutError: the groups are not those of any layout with these axes in this order.
        """
        pool = GroupPool()
        layout = layout_of_groups(groups, pool.rank, rank_offset)
        for axis, group in groups.items():
            pool.borrow(layout.group(pool.rank, axis), group, axis)
        chosen = default_group_device(device)
        ranks = (
            torch.arange(layout.world_size, dtype=torch.int, device="cpu").reshape(layout.sizes) + rank_offset
        )
        root = DeviceMesh.from_group(
            list(groups.values()), chosen.type, mesh=ranks, mesh_dim_names=layout.axes
        )
        return cls(layout, root, pool, chosen)

    # Accessors. Nothing here communicates.

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh over one axis or several, in the order of the layout; the same object each time.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            LayoutError: axes out of order.
            MeshError: the mesh is closed.
        """
        try:
            return self._meshes[axes]
        except (KeyError, TypeError):
            return self._slice((axes,) if isinstance(axes, str) else tuple(axes))

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group of this rank over one axis, or over several that were flattened.

        Raises:
            AxisError: a name that is no axis, or axes of two views at once.
            MeshError: the mesh is closed, or there is no group over these axes yet.
        """
        try:
            return self._groups[axes]
        except KeyError:
            return self._learn_group(axes)

    def size(self, *axes: str) -> int:
        """The number of ranks in this rank's group over ``axes``; without axes, in the whole mesh."""
        try:
            return self._sizes[axes]
        except KeyError:
            view, chosen = self._place(axes)
            size = self._sizes[axes] = view.layout.size(*chosen)
            return size

    def rank(self, *axes: str) -> int:
        """This rank's position in its group over ``axes``; without axes, in the whole mesh."""
        try:
            return self._ranks[axes]
        except KeyError:
            view, chosen = self._place(axes)
            rank = self._ranks[axes] = view.layout.group_rank(self.global_rank, *chosen)
            return rank

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """The global ranks in this rank's group over ``axes``, ascending; without axes, of the whole mesh."""
        view, chosen = self._place(axes)
        return view.layout.group(self.global_rank, *chosen)

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis; those of a view come after the mesh's own."""
        coords: dict[str, int] = {}
        for view in self._views:
            coords |= {
                axis: at for axis, at in view.layout.coords(self.global_rank).items() if axis not in coords
            }
        return coords

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch mesh over all axes of the layout."""
        return self._views.first.root

    @property
    def views(self) -> dict[str, Layout]:
        """The layouts of the views that were added, by name."""
        return {name: layout for name, layout in self._views.layouts().items() if name != DENSE}

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The process groups that this rank holds through this mesh, in the order they came."""
        self._check_open()
        return tuple(self.pool.communicators)

    def is_first(self, axis: str) -> bool:
        """Whether this rank is the first on an axis."""
        return self.rank(axis) == 0

    def is_last(self, axis: str) -> bool:
        """Whether this rank is the last on an axis."""
        return self.rank(axis) == self.size(axis) - 1

    def next(self, axis: str) -> int:
        """The global rank after this one on an axis; after the last comes the first."""
        return self._views.of((axis,)).layout.neighbour(self.global_rank, axis, 1)

    def prev(self, axis: str) -> int:
        """The global rank before this one on an axis; before the first comes the last."""
        return self._views.of((axis,)).layout.neighbour(self.global_rank, axis, -1)

    def gloo_group(self, *axes: str) -> dist.ProcessGroup:
        """The gloo group over the same ranks as :meth:`group`, for tensors on the CPU.

        Raises:
            MeshError: the axes have no gloo group; it is made where their options say ``gloo_twin``.
        """
        view, ordered = self._place(axes)
        twin = self.pool.find_twin(view.layout, ordered, self.options_of(ordered))
        if twin is None:
            raise MeshError(
                f"there is no gloo group over {named(axes)}; ask for one when the group is made, with "
                "options=GroupOptions(gloo_twin=True)"
            )
        return twin

    def options_of(self, ordered: tuple[str, ...]) -> GroupOptions:
        """The options of a group over axes of one view: what was said of all together, or of each.

        Args:
            ordered: the axes, in the order of their layout.

        Raises:
            LayoutError: the axes set options that contradict each other.
        """
        said = self._options.get("_".join(ordered))
        if said is not None:
            return said
        combined = GroupOptions()
        for axis in ordered:
            combined = combined.combined(self._options.get(axis, GroupOptions()), named(ordered))
        return combined

    def explain(self, group: dist.ProcessGroup | None = None, *, rank: int | None = None) -> str:
        """In words: what a process group is, where a rank stands, or, without either, the whole mesh."""
        layouts = self._views.layouts()
        if group is not None:
            return explain_group(layouts, self.communicators, group)
        if rank is not None:
            return explain_rank(layouts, rank)
        return explain_mesh(layouts, self.communicators, self.global_rank, self.device)

    # What communicates: every rank of the mesh calls these, in the same order.

    def flatten(self, *axes: str, name: str | None = None, options: GroupOptions | None = None) -> DeviceMesh:
        """A 1-D mesh over the product of some axes, on one group; communicates the first time.

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
        with self._telling("mesh.flatten"):
            view = self._views.of(self._views.expand(axes))
            ordered = view.ordered(self._views.expand(axes))
            if len(ordered) == 1:
                return self[ordered[0]]
            if ordered in self._flat:
                return self._flat[ordered]
            name = name or "_".join(ordered)
            self._views.check_product(name, ordered)
            options = options or self.options_of(ordered)
        self._agree("mesh.flatten", {"axes": "-".join(ordered), "name": name, "options": repr(options)})
        group = self.pool.make(view.layout, ordered, options)
        if options.gloo_twin:
            self.pool.make_twin(view.layout, ordered, options)
        self._options["_".join(ordered)] = options
        mesh = self._flat[ordered] = flattened(view.root, ordered, name, group)
        self._views.add_product(name, ordered)
        self._meshes[name] = mesh
        return mesh

    def add_view(
        self, name: str, /, *, options: Mapping[str, GroupOptions] | None = None, **sizes: int
    ) -> DeviceMesh:
        """Another factoring of the same ranks, such as the expert view; communicates.

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
        call = f"mesh.add_view({name!r})"
        with self._telling(call):
            layout = Layout(**sizes, world_size=self.layout.world_size, rank_offset=self.layout.rank_offset)
            self._views.check(name, layout, self.global_rank)
            said = {**self._options, **(options or {})}
        self._agree(call, {"layout": repr(layout), "options": repr(options or {})})
        root = self.pool.over(layout, self.device.type, said)
        for axis in layout.axes:
            if axis in said and said[axis].gloo_twin:
                self.pool.make_twin(layout, (axis,), said[axis])
        self._options = said
        self._views.add(name, View(layout, root))
        return root

    def close(self) -> None:
        """Destroy the groups that this mesh made, the last first; a second call does nothing.

        The default group stays, and so do groups that were adopted. Every rank of the mesh should call it.
        """
        if self.closed:
            return
        self.closed = True
        for view in self._all_views:
            forget(view.root)
        for answers in (self._meshes, self._groups, self._sizes, self._ranks, self._flat):
            answers.clear()  # what a closed mesh is asked for, it has to look up, and finds that it is closed
        self.pool.close()
        current.unregister(self)

    # Selecting a mesh for code that names none.

    def __enter__(self) -> Self:
        """Make this the current mesh, for :func:`namedmesh.current_mesh` and the dialects."""
        self._check_open()
        current.select(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.deselect(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.global_rank} on {self.device}"
        return f"<NamedMesh {self.layout}, {state}>"

    # Behind the accessors.

    def _check_open(self) -> None:
        if self.closed:
            raise MeshError(f"the mesh over {self.layout} was closed; make another with init_mesh()")

    @property
    def _views(self) -> Views:
        """The views of an open mesh: every answer that is not known yet goes through here."""
        self._check_open()
        return self._all_views

    def _place(self, axes: Sequence[str]) -> tuple[View, tuple[str, ...]]:
        """The view that has the axes, and the axes in its order; without axes, the whole mesh."""
        chosen = self._views.expand(axes) or self.layout.axes
        view = self._views.of(chosen)
        return view, view.ordered(chosen)

    def _slice(self, axes: tuple[str, ...]) -> DeviceMesh:
        view = self._views.of(axes)
        if len(set(axes)) != len(axes) or not axes:
            raise AxisError(f"axes {axes} are not a selection of {view.layout.axes}; name each axis once")
        in_order = tuple(axis for axis in view.root.mesh_dim_names or () if axis in axes)
        if axes != in_order:
            raise LayoutError(
                f"mesh[{quoted(axes)}] is out of order; torch slices in the order of the mesh: "
                f"mesh[{quoted(in_order)}]"
            )
        mesh = self._meshes[axes] = self._meshes.get(axes) or view.root[axes]
        if len(axes) == 1:
            self._meshes[axes[0]] = mesh
        return mesh

    def _learn_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        view = self._views.of(self._views.expand(axes))
        ordered = view.ordered(self._views.expand(axes))
        if len(ordered) == 1:
            group: dist.ProcessGroup | None = view.root.get_group(ordered[0])
        else:
            group = self.pool.find(view.layout, ordered, self.options_of(ordered))
        if group is None:
            raise MeshError(
                f"there is no group over {named(ordered)} yet; call mesh.flatten({quoted(ordered)}) once, on every "
                "rank, before it is asked for"
            )
        self._groups[axes] = group
        return group

    def _telling(self, call: str) -> AbstractContextManager[None]:
        if self.closed:
            return nullcontext()
        return telling(call, self.layout.ranks, self.pool.defaults.timeout)

    def _agree(self, call: str, request: Mapping[str, str]) -> None:
        agree(
            call, request, ranks=self.layout.ranks, rank=self.global_rank, timeout=self.pool.defaults.timeout
        )
