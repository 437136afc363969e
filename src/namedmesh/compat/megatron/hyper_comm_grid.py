"""Megatron's ``HyperCommGrid``: any number of named dims, whose groups are made one call at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.errors import ContractKeyError, ContractRuntimeError
from namedmesh.errors import LayoutError
from namedmesh.groups import GroupPool
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from namedmesh.mesh import NamedMesh

__all__ = ["HyperCommGrid"]

_NCCL_SETTINGS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
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
        >>> HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]).get_rank_enum(["tp", "pp"])
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        >>> del os.environ["WORLD_SIZE"]
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
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
        self._pool: GroupPool | None = None
        self._owns_pool = True
        self._groups: dict[str, dist.ProcessGroup] = {}

    @classmethod
    def from_mesh(cls, mesh: NamedMesh) -> HyperCommGrid:
        """A grid over a mesh that exists, with its axes as dims; groups are the mesh's own.

        Groups over one axis are there already; those over several that :meth:`create_pg` makes belong to the mesh.
        """
        layout = mesh.layout
        grid = cls(layout.sizes[::-1], layout.axes[::-1], layout.rank_offset)
        grid._pool, grid._owns_pool = mesh.pool, False
        grid._groups = {axis: mesh.group(axis) for axis in layout.axes}
        return grid

    def create_pg(
        self,
        dims: str | list[str],
        *,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> dist.ProcessGroup | None:
        """Make the groups over some dims; every rank of the grid calls it, and it communicates.

        Args:
            dims: a name, or several in any order.
            timeout: the timeout of the groups.
            pg_options: torch's NCCL options: their ``config`` and stream priority are taken over.
            group_desc: accepted for the original's sake; groups are described by their dims.

        Returns:
            This rank's group; None on a rank outside the grid.

        Raises:
            ContractKeyError: the groups over these dims exist, or a name is unknown.
            LayoutError: options of another kind than NCCL's.
        """
        del group_desc
        axes, key = self._ordered(dims)
        if key in self._groups:
            raise ContractKeyError(
                f"the groups over {key!r} exist, and may have other options; get them with get_pg(), or close() the grid first"
            )
        if dist.get_rank() not in self.layout.ranks:
            return None
        if self._pool is None:
            self._pool = GroupPool()
        options = GroupOptions(backend=self.backend, timeout=timeout, **_settings(pg_options))
        self._pool.check_consistency(
            "HyperCommGrid.create_pg",
            {"layout": repr(self.layout), "dims": key, "options": repr(options)},
            ranks=self.layout.ranks,
            wanted=[(self.layout, axes, options)],
        )
        group = self._groups[key] = self._pool.make(self.layout, axes, options)
        return group

    def get_pg(self, dims: str | list[str]) -> dist.ProcessGroup:
        """The group over some dims that :meth:`create_pg` made.

        Raises:
            ContractKeyError: it was not made, or a name is unknown.
        """
        _, key = self._ordered(dims)
        if key not in self._groups:
            raise ContractKeyError(f"there are no groups over {key!r}; call create_pg first, on every rank")
        return self._groups[key]

    def get_rank_enum(self, dims: str | list[str]) -> list[list[int]]:
        """The ranks of every group over some dims.

        Raises:
            ContractKeyError: a name is unknown.
        """
        axes, _ = self._ordered(dims)
        return [list(ranks) for ranks in self.layout.groups(*axes)]

    def close(self) -> None:
        """Destroy the groups that the grid made; those of a mesh stay."""
        if self._pool is not None and self._owns_pool:
            self._pool.close()
            self._pool = None
            self._groups.clear()

    def _ordered(self, dims: str | list[str]) -> tuple[tuple[str, ...], str]:
        names = [dims] if isinstance(dims, str) else list(dims)
        unknown = [name for name in names if name not in self.layout]
        if unknown or not names:
            raise ContractKeyError(
                f"{unknown or names} of {dims!r} is not among the dims {self.dim_names}; name one or more of them"
            )
        axes = tuple(axis for axis in self.layout.axes if axis in names)
        return axes, "-".join(axes)


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
    settings = {name: getattr(config, name) for name in _NCCL_SETTINGS}
    nccl = {name: value for name, value in settings.items() if value not in {None, "", _UNSET}}
    return {"nccl": nccl, "high_priority": bool(pg_options.is_high_priority_stream)}
