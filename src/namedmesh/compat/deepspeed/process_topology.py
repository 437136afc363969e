"""DeepSpeed's topologies: named axes over ranks, computed by a :class:`namedmesh.Layout`.

Ranks are row-major, the last axis the fastest. Nothing here needs a process group, or torch: a topology of a
million ranks costs what one of eight costs, until its whole :attr:`ProcessTopology.mapping` is read.
"""

from __future__ import annotations

import itertools
import operator
from collections import namedtuple
from functools import cached_property
from keyword import iskeyword
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

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

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "ProcessTopology",
    "Topology",
    "default_topology",
    "validate_topology",
]

_CANONICAL = {"pipe": "pp", "data": "dp", "model": "tp"}


class ProcessTopology:
    """Named axes over the ranks 0, 1, 2 and so on.

    Args:
        axes: the names, slowest axis first.
        dims: the size of each axis.

    Attributes:
        axes: the names, as they were given.
        dims: the sizes, as they were given.
        layout: the same as a :class:`namedmesh.Layout`, for ``namedmesh.init_mesh(topology.layout)``. There the
            axes pipe, data and model have the names pp, dp and tp.
        ProcessCoord: the named tuple that coordinates come in.

    Raises:
        LayoutError: a name that no field of a named tuple can have, a size below 1, or more sizes than names; all
            problems at once.
        ContractIndexError: fewer sizes than names.
        ContractTypeError: names in one string, or a size that is no int.

    Example:
        >>> topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
        >>> topology.get_coord(6), topology.get_rank(pipe=1, data=1, model=0)
        (ProcessCoord(pipe=1, data=1, model=0), 6)
        >>> topology.get_axis_comm_lists("pipe"), topology.get_axis_comm_lists("expert")
        ([[0, 4], [1, 5], [2, 6], [3, 7]], [])
        >>> topology.filter_match(pipe=0, data=1), topology.get_axis_list("model", 0)
        ([2, 3], [0, 2, 4, 6])
        >>> topology.get_rank_repr(3), topology.get_rank_repr(3, omit_axes=["data"], outer_sep=".")
        ('model_01', 'pipe_00.model_01')
        >>> topology.get_dim("data"), topology.get_dim("expert"), topology.world_size()
        (2, 0, 8)
        >>> topology.layout, topology.mesh_axis("pipe")
        (Layout(pp=2, dp=2, tp=2), 'pp')
        >>> ProcessTopology(["x", "y"], [1, 2]).mapping
        {ProcessCoord(x=0, y=0): 0, ProcessCoord(x=0, y=1): 1}
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = axes
        self.dims = dims
        self.layout = _layout_of(axes, dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", tuple(axes))  # type: ignore[misc]  # noqa: PYI024  a name per axis
        self._names = dict(zip(axes, self.layout.axes, strict=True))

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at some coordinates.

        Args:
            **coord_kwargs: one coordinate for each axis.

        Raises:
            LayoutError: too few coordinates, or too many.
            ContractTypeError: as many coordinates as there are axes, but other names.
            ContractError: a coordinate outside of its axis.
        """
        if len(coord_kwargs) != len(self._names):
            given = listing(f"{axis}={at!r}" for axis, at in coord_kwargs.items()) or "none"
            raise LayoutError(
                f"get_rank() got {len(coord_kwargs)} coordinates, {given}, for {self._words}; give one for "
                "each axis, or ask filter_match() for all ranks that share some"
            )
        unknown = [self._unknown(axis) for axis in coord_kwargs if axis not in self._names]
        if unknown:
            raise ContractTypeError(*unknown)
        coords, outside = {}, []
        for axis, at in coord_kwargs.items():
            name = self._names[axis]
            coord = _coordinate(at, self.layout[name])
            if coord is None:
                outside.append(
                    f"coordinate {axis}={at!r} is outside of its axis; the coordinates of {axis!r} are 0 to "
                    f"{self.layout[name] - 1}"
                )
            else:
                coords[name] = coord
        if outside:
            raise ContractError(*outside)
        return self.layout.rank(**coords)

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
        """Return the coordinates of a rank, as a named tuple.

        Raises:
            LayoutError: the rank is not in the topology.
        """
        index = _coordinate(rank, self.layout.world_size)
        if index is None:
            raise LayoutError(
                f"rank {rank!r} is not in the topology of {self._words}; its ranks are 0 to {self.layout.world_size - 1}"
            )
        return self.ProcessCoord(*self.layout.coords(index).values())

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks of every group along an axis; none if the topology does not have it.

        Returns:
            Groups by their first rank, ranks inside a group ascending.
        """
        if axis not in self.axes:
            return []
        return [list(ranks) for ranks in self.layout.groups(self._names[axis])]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return every rank at some coordinates, ascending; none where a coordinate is outside of its axis.

        Args:
            **filter_kwargs: a coordinate for some of the axes.

        Raises:
            ContractAttributeError: a name that is no axis.
        """
        coords = {}
        for axis, at in filter_kwargs.items():
            # In the order given, as the original: names after a filter that no rank matches are not checked.
            if axis not in self._names:
                raise ContractAttributeError(self._unknown(axis))
            name = self._names[axis]
            coord = _coordinate(at, self.layout[name])
            if coord is None:
                return []
            coords[name] = coord
        return list(self.layout.where(**coords))

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return every rank at one coordinate of an axis, ascending; none where it is outside of the axis.

        Raises:
            LayoutError: the topology does not have the axis.
        """
        name = self.mesh_axis(axis)
        coord = _coordinate(idx, self.layout[name])
        return [] if coord is None else list(self.layout.where(**{name: coord}))

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @cached_property
    def mapping(self) -> dict[Any, int]:
        """Every coordinate with its rank, in the order of the ranks; computed on first use."""
        coords = itertools.product(*map(range, self.layout.sizes))
        return {self.ProcessCoord(*at): rank for rank, at in enumerate(coords)}

    def mesh_axis(self, axis: str) -> str:
        """Return the name that an axis has in :attr:`layout`, and so on a mesh made from it.

        Raises:
            LayoutError: the topology does not have the axis.
        """
        if axis not in self._names:
            raise LayoutError(self._unknown(axis))
        return self._names[axis]

    def __str__(self) -> str:
        return str(self.mapping)

    def __repr__(self) -> str:
        """Show what it was made from, whatever its size."""
        return f"{type(self).__name__}(axes={self.axes!r}, dims={self.dims!r})"

    @property
    def _words(self) -> str:
        return product(self._names, self.layout.sizes)

    def _unknown(self, axis: object) -> str:
        return f"axis {axis!r} is not one of {tuple(self._names)}{did_you_mean(axis, self._names)}"


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines and their replicas: the axes pipe and data.

    Neighboring ranks are replicas of one stage, so the sums of gradients, which are large, stay where the
    links are fast.

    Args:
        num_pp: how many stages a pipeline has.
        num_dp: how many pipelines there are.

    Example:
        >>> PipeDataParallelTopology(num_pp=2, num_dp=2).get_axis_comm_lists("data")
        [[0, 1], [2, 3]]
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines whose stages are sharded over neighboring ranks, and their replicas: the axes pipe, data and model.

    Args:
        num_pp: how many stages a pipeline has.
        num_mp: over how many ranks the layers of a stage are sharded.
        num_dp: how many replicas there are.

    Example:
        >>> PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=2).get_axis_comm_lists("data")
        [[0, 2], [1, 3]]
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:  # noqa: N803  the original's name
    """Return the prime factors of a number, ascending.

    Raises:
        LayoutError: the number is not positive.

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


def _layout_of(axes: Sequence[str], dims: Sequence[int]) -> Layout:
    """Return the layout of a topology, under names that a NamedMesh can have.

    Example:
        >>> _layout_of(["pipe", "data"], [2, 4])
        Layout(pp=2, dp=4)
    """
    if isinstance(axes, str):
        raise ContractTypeError(f"axes is the string {axes!r}; give a list with one name for each axis")
    names, sizes = list(axes), list(dims)
    problems = [] if names else ["no axis is named; name at least one"]
    for name in dict.fromkeys(names):
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name.startswith("_"):
            problems.append(
                f"axis name {name!r} cannot be a field of a coordinate; use letters, digits and underscores, the first a "
                "letter"
            )
        if names.count(name) > 1:
            problems.append(
                f"axis {name!r} is named {names.count(name)} times; each axis needs a name of its own"
            )
    mismatch = f"{len(names)} axes {names} but {len(sizes)} dims {sizes}; give one size for each axis"
    if len(sizes) > len(names):
        problems.append(mismatch)
    if problems:
        raise LayoutError(*problems)
    if len(sizes) < len(names):
        raise ContractIndexError(mismatch)
    no_size = {
        name: f"axis {name!r} has size {size!r}; a size is an int of at least 1"
        for name, size in zip(names, sizes, strict=True)
    }
    mistyped = [
        no_size[name] for name, size in zip(names, sizes, strict=True) if not hasattr(size, "__index__")
    ]
    if mistyped:
        raise ContractTypeError(*mistyped)
    integers = [operator.index(size) for size in sizes]
    empty = [no_size[name] for name, size in zip(names, integers, strict=True) if size < 1]
    if empty:
        raise LayoutError(*empty)
    return Layout.from_shape(_mesh_names(names), integers)


def _mesh_names(axes: Sequence[str]) -> list[str]:
    """Return the names that a mesh has for the axes of a topology: the canonical ones, unless they are in use.

    Example:
        >>> _mesh_names(["pipe", "data", "expert"]), _mesh_names(["pipe", "pp", "device"])
        (['pp', 'dp', 'expert'], ['pipe', 'pp', 'device_axis'])
    """
    mesh_axes: list[str] = []
    for axis in axes:
        name = _CANONICAL.get(axis, axis)
        name = axis if name != axis and name in axes else name
        while name in {*RESERVED, "self"} or name in mesh_axes or (name != axis and name in axes):
            name += "_axis"
        mesh_axes.append(name)
    return mesh_axes


def _coordinate(value: object, size: int) -> int | None:
    """Return a coordinate or rank as an int, if it equals one below ``size``: the original compares by equality.

    Example:
        >>> _coordinate(2, 3), _coordinate(2.0, 3), _coordinate(3, 3), _coordinate(-1, 3), _coordinate("2", 3)
        (2, 2, None, None, None)
    """
    try:
        at = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return range(size).index(value) if value in range(size) else None  # type: ignore[arg-type]
    return at if 0 <= at < size else None


class Topology(Protocol):
    """What a grid needs of a topology, DeepSpeed's own or one of ours."""

    def get_axis_names(self) -> Sequence[str]:
        """Return the names, slowest axis first."""

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis."""

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank."""


def default_topology(world: int) -> PipeDataParallelTopology:
    """Return the default topology of a world: its prime factors, to pipe and data in turns.

    Example:
        >>> default_topology(12)
        PipeDataParallelTopology(axes=['pipe', 'data'], dims=[6, 2])
    """
    factors = _prime_factors(world)
    return PipeDataParallelTopology(num_pp=prod(factors[::2]), num_dp=prod(factors[1::2]))


def validate_topology(topology: Topology, world: int, rank: int) -> ProcessTopology:
    """Check a topology for a grid, and return it as one of ours.

    Args:
        topology: ours, DeepSpeed's, or one like them.
        world: how many ranks there are.
        rank: this one.

    Raises:
        ContractError: it has another number of ranks.
        ContractAttributeError: it has no axis pipe, or no axis data.
        LayoutError: it is not row-major: this rank has other coordinates there.
    """
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
    missing = [axis for axis in ("pipe", "data") if axis not in ours.axes]
    if missing:
        raise ContractAttributeError(
            *(
                f"the topology {sizes} has no axis {axis!r}; give it one, of size 1 if need be"
                for axis in missing
            )
        )
    theirs, expected = tuple(topology.get_coord(rank=rank)), tuple(ours.layout.coords(rank).values())
    if theirs != expected:
        raise LayoutError(
            f"the topology {sizes} has rank {rank} at {theirs}, and row-major order at {expected}; the last axis has to be "
            "the fastest"
        )
    return ours
