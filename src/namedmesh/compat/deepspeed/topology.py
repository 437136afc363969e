"""DeepSpeed's topologies: named axes over ranks, computed by a :class:`namedmesh.Layout`.

``install()`` puts this module in place of the original's. Ranks are row-major, the last axis the fastest. Nothing here
needs a process group, or torch. A topology of a million ranks costs what one of eight does, until all are asked for.
"""

from __future__ import annotations

import itertools
import operator
from collections import namedtuple
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh.compat.errors import (
    ContractAttributeError,
    ContractError,
    ContractIndexError,
    ContractTypeError,
)
from namedmesh.errors import LayoutError, did_you_mean, listing
from namedmesh.layout import Layout
from namedmesh.sizes import RESERVED, product

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from namedmesh.compat.deepspeed.grid import PipelineParallelGrid

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "_prime_factors",
]

_CANONICAL = {"pipe": "pp", "data": "dp", "model": "tp"}


class ProcessTopology:
    """Named axes over the ranks 0, 1, 2 and so on.

    Args:
        axes: the names, slowest axis first.
        dims: the size of each axis.

    Attributes:
        axes, dims: the names and the sizes, as they were given.
        layout: the same as a :class:`namedmesh.Layout`, for ``namedmesh.init_mesh(topology.layout)``. There the
            axes pipe, data and model have the names pp, dp and tp.
        ProcessCoord: the named tuple that coordinates come in.

    Raises:
        LayoutError: a name that no field of a named tuple can have, a size below 1, or more sizes than names.
        ContractIndexError: fewer sizes than names.
        ContractTypeError: names in one string, or a size that is no int.

    Example:
        >>> topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
        >>> topology.get_coord(6), topology.get_rank(pipe=1, data=1, model=0)
        (ProcessCoord(pipe=1, data=1, model=0), 6)
        >>> topology.get_axis_comm_lists("pipe"), topology.filter_match(pipe=0, data=1)
        ([[0, 4], [1, 5], [2, 6], [3, 7]], [2, 3])
        >>> topology.get_rank_repr(3, omit_axes=["data"], outer_sep=".")
        'pipe_00.model_01'
        >>> topology.layout, topology.mesh_axis("pipe")
        (Layout(pp=2, dp=2, tp=2), 'pp')
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if isinstance(axes, str):
            raise ContractTypeError(f"axes is the string {axes!r}; give a list with one name for each axis")
        try:
            self.ProcessCoord: Any = namedtuple("ProcessCoord", tuple(axes))  # type: ignore[misc]  # noqa: PYI024  a name per axis
        except ValueError as error:
            raise LayoutError(
                f"axes {list(axes)} cannot be the fields of a coordinate: {error}; rename one"
            ) from None
        if len(dims) < len(axes):
            raise ContractIndexError(
                f"{len(axes)} axes {list(axes)} but {len(dims)} dims {list(dims)}; give one size for each axis"
            )
        for size in dims:
            if not hasattr(size, "__index__"):
                raise ContractTypeError(f"the dims {list(dims)} have {size!r}; a size is an int")
        self.axes, self.dims = axes, dims
        self.layout = Layout.from_shape(_mesh_names(axes), map(operator.index, dims))
        self._names = dict(zip(axes, self.layout.axes, strict=True))

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at some coordinates, one for each axis.

        Raises:
            LayoutError: too few coordinates, or too many.
            ContractTypeError: as many coordinates as there are axes, but other names.
            ContractError: a coordinate outside of its axis.
        """
        given = listing(f"{axis}={at!r}" for axis, at in coord_kwargs.items()) or "none"
        words = product(self.axes, self.dims)
        if len(coord_kwargs) != len(self._names):
            raise LayoutError(
                f"get_rank() got {len(coord_kwargs)} coordinates, {given}, for {words}; give one for each axis, or ask "
                "filter_match() for all ranks that share some"
            )
        unknown = [self._unknown(axis) for axis in coord_kwargs if axis not in self._names]
        if unknown:
            raise ContractTypeError(*unknown)
        ranks = self.filter_match(**coord_kwargs)
        if not ranks:
            raise ContractError(
                f"the coordinates {given} are outside of {words}; those of an axis are 0 to its size - 1"
            )
        return ranks[0]

    def get_axis_names(self) -> Sequence[str]:
        """Return the names, slowest axis first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the coordinates of a rank, as the names of checkpoint files have them.

        Args:
            rank: the rank.
            omit_axes: axes to leave out.
            inner_sep: what stands between an axis and the coordinate on it.
            outer_sep: what stands between axes.

        Raises:
            LayoutError: the rank is not in the topology.
        """
        omitted = frozenset(omit_axes)
        shown = [axis for axis in self.axes if axis not in omitted]
        if not shown:
            return ""
        at = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{at[axis]:02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if the topology does not have it."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank, as a named tuple; LayoutError for a rank that is not in the topology."""
        if rank not in self.layout.ranks:  # by equality, as the original
            raise LayoutError(
                f"rank {rank!r} is not in the topology of {product(self.axes, self.dims)}; its ranks are 0 to "
                f"{self.layout.world_size - 1}"
            )
        return self.ProcessCoord(*self.layout.coords(int(rank)).values())

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks of every group along an axis, by their first rank; none if the topology does not have it."""
        if axis not in self.axes:
            return []
        return [list(ranks) for ranks in self.layout.groups(self._names[axis])]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return every rank at coordinates on some axes, ascending; ContractAttributeError for a name that is no axis."""
        coords = {}
        for axis, at in filter_kwargs.items():
            # In the order given, as the original: names after a filter that no rank matches are not checked.
            if axis not in self._names:
                raise ContractAttributeError(self._unknown(axis))
            if at not in range(self.get_dim(axis)):
                return []
            coords[self._names[axis]] = int(at)
        return list(self.layout.where(**coords))

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return every rank at one coordinate of an axis, ascending; LayoutError for an axis that is not there."""
        name = self.mesh_axis(axis)
        return list(self.layout.where(**{name: int(idx)})) if idx in range(self.layout[name]) else []

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @cached_property
    def mapping(self) -> dict[Any, int]:
        """Every coordinate with its rank, in the order of the ranks; computed on first use."""
        coords = itertools.product(*map(range, self.layout.sizes))
        return {self.ProcessCoord(*at): rank for rank, at in enumerate(coords)}

    def mesh_axis(self, axis: str) -> str:
        """Return the name that an axis has in :attr:`layout`; LayoutError for an axis that is not there."""
        if axis not in self._names:
            raise LayoutError(self._unknown(axis))
        return self._names[axis]

    def __str__(self) -> str:
        return str(self.mapping)

    def __repr__(self) -> str:
        """Show what it was made from, whatever its size."""
        return f"{type(self).__name__}(axes={self.axes!r}, dims={self.dims!r})"

    def _unknown(self, axis: object) -> str:
        return f"axis {axis!r} is not one of {tuple(self._names)}{did_you_mean(axis, self._names)}"


class PipeDataParallelTopology(ProcessTopology):
    """``num_dp`` pipelines of ``num_pp`` stages, replicas on neighboring ranks: the axes pipe and data.

    Example:
        >>> PipeDataParallelTopology(num_pp=2, num_dp=2).get_axis_comm_lists("data")
        [[0, 1], [2, 3]]
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same, with stages that are sharded over ``num_mp`` neighboring ranks: the axes pipe, data and model.

    Example:
        >>> PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=2).get_axis_comm_lists("data")
        [[0, 2], [1, 3]]
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:  # noqa: N803  the original's name
    """Return the prime factors of a number, ascending; LayoutError for one that is not positive.

    Example:
        >>> _prime_factors(60), _prime_factors(1)
        ([2, 2, 3, 5], [])
    """
    if N <= 0:
        raise LayoutError(f"{N} has no prime factors; give a number of at least 1")
    factors, rest, candidate = [], N, 2
    while candidate * candidate <= rest:
        while rest % candidate == 0:
            factors.append(candidate)
            rest //= candidate
        candidate += 1
    return [*factors, rest] if rest > 1 else factors


def _mesh_names(axes: Sequence[str]) -> list[str]:
    """Return the names that a mesh has for the axes of a topology: the canonical ones, unless one is in use.

    Example:
        >>> _mesh_names(["pipe", "data", "expert"]), _mesh_names(["pipe", "pp", "device"])
        (['pp', 'dp', 'expert'], ['pipe', 'pp', 'device_axis'])
    """
    names = [_CANONICAL.get(axis, axis) for axis in axes]
    if len({*names}) < len(names):
        names = [*axes]
    for place, name in enumerate(names):
        if name in {*RESERVED, "self"}:
            names[place] += "_axis"
    return names


def validate_topology(topology: Any, world: int, rank: int) -> ProcessTopology:
    """Return a topology for a grid, ours or DeepSpeed's, as one of ours; refuse one that no grid can have."""
    ours = topology
    if not isinstance(ours, ProcessTopology):
        axes = topology.get_axis_names()
        ours = ProcessTopology(axes, [topology.get_dim(axis) for axis in axes])
    sizes = product(ours.axes, ours.dims)
    if ours.world_size() != world:
        raise ContractError(
            f"the topology {sizes} has {ours.world_size()} ranks, but the world has {world}; change a size, or start "
            "another number of ranks"
        )
    for axis in ("pipe", "data"):
        if axis not in ours.axes:
            raise ContractAttributeError(
                f"the topology {sizes} has no axis {axis!r}; give it one, of size 1 if need be"
            )
    theirs, expected = tuple(topology.get_coord(rank=rank)), tuple(ours.layout.coords(rank).values())
    if theirs != expected:
        raise LayoutError(
            f"the topology {sizes} has rank {rank} at {theirs}, and row-major order at {expected}; the last axis has to be "
            "the fastest"
        )
    return ours


def __getattr__(name: str) -> Any:
    # The grid needs torch, which a topology can do without.
    if name == "PipelineParallelGrid":
        return import_module("namedmesh.compat.deepspeed.grid").PipelineParallelGrid
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
