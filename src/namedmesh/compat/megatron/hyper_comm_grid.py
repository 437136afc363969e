"""Megatron's ``HyperCommGrid``: any number of named dims, whose groups are made one call at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.errors import ContractAxisError, ContractKeyError, ContractRuntimeError
from namedmesh.errors import LayoutError
from namedmesh.groups import GroupPool
from namedmesh.layout import Layout
from namedmesh.making import agreed
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from namedmesh.mesh import NamedMesh

__all__ = ["HyperCommGrid"]

_BASE = "base"
_UNSET = -(2**31)  # what NCCL has for a setting without a value


class HyperCommGrid:
    """Named dims over the world or a part of it; a group over any of them is made by :meth:`create_pg`.

    Args:
        shape: the size of each dim, fastest first: the reverse of a NamedMesh's axes.
        dim_names: their names.
        rank_offset: the first rank of the grid.
        backend: the backend of the groups; by default that of the default group.

    Raises:
        LayoutError: names and sizes that do not fit each other, or a negative offset.
        ContractRuntimeError: more ranks than the world has, or a world of unknown size.

    Example:
        >>> import os
        >>> os.environ["WORLD_SIZE"] = "8"
        >>> grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
        >>> grid.get_rank_enum(["tp", "pp"])
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        >>> grid.register_view("expert", [4, 2], ["ep", "pp"], shared_dims=["pp"])
        >>> grid.get_rank_enum("ep", view="expert")
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> del os.environ["WORLD_SIZE"]
    """

    def __init__(
        self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        self.layout = Layout.from_shape(reversed(dim_names), reversed(shape), rank_offset=rank_offset)
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        self.size = self.layout.world_size
        world = _world_size()
        if self.layout.ranks.stop > world:
            raise ContractRuntimeError(
                f"{self.layout} from rank {rank_offset} needs {self.layout.ranks.stop} ranks, and the world has {world}; "
                "change a size or rank_offset"
            )
        # The layout of each view, and the dims that it has in common with the base view.
        self._views: dict[str, tuple[Layout, set[str]]] = {_BASE: (self.layout, set())}
        self._pool: GroupPool | None = None
        self._owns_pool = True
        self._groups: dict[tuple[str, str], dist.ProcessGroup] = {}

    @classmethod
    def from_mesh(cls, mesh: NamedMesh) -> HyperCommGrid:
        """Return a grid over a mesh that exists, with its axes as dims; groups are the mesh's own.

        Groups over one axis are there already; those over several that :meth:`create_pg` makes belong to the mesh.
        """
        layout = mesh.layout
        grid = cls(layout.sizes[::-1], layout.axes[::-1], layout.rank_offset)
        grid._pool, grid._owns_pool = mesh.pool, False
        grid._groups = {(_BASE, axis): mesh.group(axis) for axis in layout.axes}
        return grid

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Add another factoring of the same ranks; it does not communicate.

        Args:
            name: its name, for ``view=`` of the other methods.
            shape: the size of each dim, fastest first.
            dim_names: their names.
            shared_dims: dims that are the same ranks in the base view, whose groups are therefore the same.

        Raises:
            LayoutError: the name is in use, the sizes multiply to another number of ranks, or a shared dim has others.
        """
        if name in self._views:
            raise LayoutError(f"the grid has a view {name!r}; choose another name")
        layout = Layout.from_shape(reversed(dim_names), reversed(shape), rank_offset=self.rank_offset)
        if layout.world_size != self.size:
            raise LayoutError(
                f"view {name!r} has {layout.world_size} ranks, and the grid {self.size}; change a size"
            )
        shared = list(shared_dims or ())
        for dims in [[dim] for dim in shared] + [shared] * bool(shared):
            missing = [dim for dim in dims if dim not in layout or dim not in self.layout]
            if missing or layout.partition(*dims) != self.layout.partition(*dims):
                raise LayoutError(
                    f"{dims} of view {name!r} are not the same ranks in {layout} and in {self.layout}; share others"
                )
        self._views[name] = layout, set(shared)

    def create_pg(
        self,
        dims: str | list[str],
        *,
        view: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> dist.ProcessGroup | None:
        """Create the groups over some dims; every rank of the grid calls it, and it communicates.

        Args:
            dims: a name, or several in any order.
            view: the view that they are in; by default the base view.
            timeout: the timeout of the groups.
            pg_options: torch's NCCL options: their ``config`` and stream priority are taken over.
            group_desc: accepted for the original's sake; groups are described by their dims.

        Returns:
            This rank's group; None on a rank outside the grid.

        Raises:
            ContractKeyError: the groups over these dims exist, or there is no such view.
            ContractAxisError: there is no such dim.
            LayoutError: options of another kind than NCCL's.
        """
        del group_desc
        layout, axes, key = self._ordered(dims, view)
        if key in self._groups:
            raise ContractKeyError(
                f"the groups over {key[1]!r} exist, and may have other options; get them with get_pg(), or close() the "
                "grid first"
            )
        if not self.is_current_rank_in_grid():
            return None
        if self._pool is None:
            self._pool = GroupPool()
        options = GroupOptions(backend=self.backend, timeout=timeout, **_settings(pg_options))
        with agreed(self._pool, "HyperCommGrid.create_pg", layout.ranks) as maker:
            request = {"layout": repr(layout), "dims": key[1], "options": repr(options)}
            maker.compare(request, [(layout, axes, options)])
            group = maker.make(layout, axes, options)
        self._groups[key] = group
        return group

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> dist.ProcessGroup:
        """Return the group over some dims that :meth:`create_pg` created; raise ContractKeyError if it did not."""
        *_, key = self._ordered(dims, view)
        if key not in self._groups:
            raise ContractKeyError(
                f"there are no groups over {key[1]!r}; call create_pg first, on every rank"
            )
        return self._groups[key]

    def get_rank_enum(self, dims: str | list[str], *, view: str | None = None) -> list[list[int]]:
        """Return the ranks of every group over some dims."""
        layout, axes, _ = self._ordered(dims, view)
        return [list(ranks) for ranks in layout.groups(*axes)]

    def is_current_rank_in_grid(self) -> bool:
        """Return whether this rank is one of the grid's."""
        return dist.get_rank() in self.layout.ranks

    def destroy(self) -> None:
        """Destroy the groups that the grid created; those of a mesh stay."""
        if self._pool is not None and self._owns_pool:
            self._pool.close()
            self._pool = None
            self._groups.clear()

    close = destroy

    def _ordered(
        self, dims: str | list[str], view: str | None
    ) -> tuple[Layout, tuple[str, ...], tuple[str, str]]:
        """Return a layout, its axes for some dims, and the key of their group; shared dims are the base view's."""
        name = _BASE if view is None else view
        if name not in self._views:
            raise ContractKeyError(
                f"view {name!r} is none of the grid's, which are {', '.join(self._views)}; register it"
            )
        layout, shared = self._views[name]
        names = [dims] if isinstance(dims, str) else list(dims)
        unknown = [each for each in names if each not in layout]
        if unknown or not names:
            raise ContractAxisError(
                f"{unknown or names} of {dims!r} is not among the dims {list(layout.axes[::-1])}; name one or more of them"
            )
        if shared >= set(names):
            name, layout = _BASE, self.layout
        axes = tuple(axis for axis in layout.axes if axis in names)
        return layout, axes, (name, "-".join(axes))


def _world_size() -> int:
    """Return the size that the launcher set, or else that of the default group, as the original does."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        return dist.get_world_size()
    raise ContractRuntimeError(
        "the size of the world is not known: WORLD_SIZE is not set and there is no default group; start with torchrun, "
        "or call torch.distributed.init_process_group() first"
    )


def _settings(pg_options: Any) -> dict[str, Any]:
    """Return torch's NCCL options as keywords of :class:`GroupOptions`."""
    if pg_options is None:
        return {}
    config = getattr(pg_options, "config", None)
    if config is None:
        raise LayoutError(
            f"pg_options is a {type(pg_options).__name__}; the grid takes torch.distributed.ProcessGroupNCCL.Options"
        )
    nccl = {name: getattr(config, name) for name in ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")}
    given = {name: value for name, value in nccl.items() if value not in {None, "", _UNSET}}
    return {"nccl": given, "high_priority": bool(pg_options.is_high_priority_stream)}
