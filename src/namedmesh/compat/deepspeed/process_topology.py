"""DeepSpeed's topologies: named axes over ranks, answered from a :class:`namedmesh.Layout`.

Ranks are row-major, the last axis the fastest. Nothing here needs a process group, or torch: a topology of a
million ranks costs what one of eight costs, until its whole :attr:`ProcessTopology.mapping` is read.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cached_property
from itertools import product, starmap
from typing import TYPE_CHECKING, Any

from namedmesh.compat.deepspeed.axes import layout_of, place_of
from namedmesh.compat.errors import (
    ContractAttributeError,
    ContractError,
    ContractTypeError,
)
from namedmesh.errors import LayoutError, did_you_mean, listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "ProcessTopology",
]


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
        >>> topology.get_coord(6)
        ProcessCoord(pipe=1, data=1, model=0)
        >>> topology.get_axis_comm_lists("pipe")
        [[0, 4], [1, 5], [2, 6], [3, 7]]
        >>> topology.layout
        Layout(pp=2, dp=2, tp=2)
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = axes
        self.dims = dims
        self.layout = layout_of(axes, dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", tuple(axes))  # type: ignore[misc]  # noqa: PYI024  a name per axis
        self._names = dict(zip(axes, self.layout.axes, strict=True))

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at some coordinates.

        Args:
            **coord_kwargs: one coordinate for each axis.

        Raises:
            LayoutError: too few coordinates, or too many.
            ContractTypeError: as many coordinates as there are axes, but other names.
            ContractError: a coordinate outside of its axis.

        Example:
            >>> ProcessTopology(["x", "y"], [2, 3]).get_rank(x=1, y=0)
            3
        """
        if len(coord_kwargs) != len(self._names):
            raise LayoutError(
                f"get_rank() got {len(coord_kwargs)} coordinates, {_said(coord_kwargs)}, for {self._words}; give one for "
                "each axis, or ask filter_match() for all ranks that share some"
            )
        unknown = [self._unknown(axis) for axis in coord_kwargs if axis not in self._names]
        if unknown:
            raise ContractTypeError(*unknown)
        places = {axis: place_of(at, self.layout[self._names[axis]]) for axis, at in coord_kwargs.items()}
        outside = [
            f"coordinate {axis}={coord_kwargs[axis]!r} is outside of its axis; the coordinates of {axis!r} are 0 to "
            f"{self.layout[self._names[axis]] - 1}"
            for axis, place in places.items()
            if place is None
        ]
        if outside:
            raise ContractError(*outside)
        return self.layout.rank(**{self._names[axis]: at for axis, at in places.items() if at is not None})

    def get_axis_names(self) -> Sequence[str]:
        """The names, slowest axis first.

        Example:
            >>> ProcessTopology(["x", "y"], [2, 3]).get_axis_names()
            ['x', 'y']
        """
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Where a rank stands, as the names of checkpoint files say it.

        Args:
            rank: the rank.
            omit_axes: axes to leave out.
            inner_sep: what stands between an axis and the coordinate on it.
            outer_sep: what stands between axes.

        Raises:
            LayoutError: the rank is not in the topology.

        Example:
            >>> topology = ProcessTopology(["pipe", "expert", "model"], [2, 2, 2])
            >>> topology.get_rank_repr(3), topology.get_rank_repr(3, omit_axes=[], outer_sep=".")
            ('expert_01-model_01', 'pipe_00.expert_01.model_01')
        """
        omitted = frozenset(omit_axes)
        shown = [axis for axis in self.axes if axis not in omitted]
        if not shown:
            return ""
        at = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{at[axis]:02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 if the topology does not have it.

        Example:
            >>> topology = ProcessTopology(["x", "y"], [2, 3])
            >>> topology.get_dim("y"), topology.get_dim("z")
            (3, 0)
        """
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, as a named tuple.

        Raises:
            LayoutError: the rank is not in the topology.

        Example:
            >>> coord = ProcessTopology(["x", "y"], [2, 3]).get_coord(4)
            >>> coord, coord.y
            (ProcessCoord(x=1, y=1), 1)
        """
        found = place_of(rank, self.layout.world_size)
        if found is None:
            raise LayoutError(
                f"rank {rank!r} is not in the topology of {self._words}; its ranks are 0 to {self.layout.world_size - 1}"
            )
        return self.ProcessCoord(*self.layout.coords(found).values())

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks of every group along an axis; none if the topology does not have it.

        Returns:
            Groups by their first rank, ranks inside a group ascending.

        Example:
            >>> topology = ProcessTopology(["x", "y"], [2, 3])
            >>> topology.get_axis_comm_lists("x"), topology.get_axis_comm_lists("z")
            ([[0, 3], [1, 4], [2, 5]], [])
        """
        if axis not in self.axes:
            return []
        return [list(ranks) for ranks in self.layout.groups(self._names[axis])]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Every rank at some coordinates, ascending; none where a coordinate is outside of its axis.

        Args:
            **filter_kwargs: a coordinate for some of the axes.

        Raises:
            ContractAttributeError: a name that is no axis.

        Example:
            >>> ProcessTopology(["pipe", "data", "model"], [2, 2, 2]).filter_match(pipe=0, data=1)
            [2, 3]
        """
        places = {}
        for axis, at in filter_kwargs.items():
            # In the order given, as the original: what comes after a filter that nothing passes is not looked at.
            if axis not in self._names:
                raise ContractAttributeError(self._unknown(axis))
            place = place_of(at, self.layout[self._names[axis]])
            if place is None:
                return []
            places[self._names[axis]] = place
        return list(self.layout.where(**places))

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Every rank at one coordinate of an axis, ascending; none where it is outside of the axis.

        Raises:
            LayoutError: the topology does not have the axis.

        Example:
            >>> ProcessTopology(["x", "y"], [2, 3]).get_axis_list("y", 0)
            [0, 3]
        """
        name = self.mesh_axis(axis)
        place = place_of(idx, self.layout[name])
        return [] if place is None else list(self.layout.where(**{name: place}))

    def world_size(self) -> int:
        """The number of ranks.

        Example:
            >>> ProcessTopology(["x", "y"], [2, 3]).world_size()
            6
        """
        return self.layout.world_size

    @cached_property
    def mapping(self) -> dict[Any, int]:
        """Every coordinate with its rank, in the order of the ranks; made when it is first read.

        Example:
            >>> ProcessTopology(["x", "y"], [1, 2]).mapping
            {ProcessCoord(x=0, y=0): 0, ProcessCoord(x=0, y=1): 1}
        """
        coords = starmap(self.ProcessCoord, product(*map(range, self.layout.sizes)))
        return dict(zip(coords, self.layout.ranks, strict=True))

    def mesh_axis(self, axis: str) -> str:
        """The name that an axis has in :attr:`layout`, and so on a mesh made from it.

        Raises:
            LayoutError: the topology does not have the axis.

        Example:
            >>> ProcessTopology(["pipe", "expert"], [2, 2]).mesh_axis("pipe")
            'pp'
        """
        if axis not in self._names:
            raise LayoutError(self._unknown(axis))
        return self._names[axis]

    def __str__(self) -> str:
        return str(self.mapping)

    def __repr__(self) -> str:
        """What it was made from, whatever its size.

        Example:
            >>> PipeDataParallelTopology(num_pp=2, num_dp=4)
            PipeDataParallelTopology(axes=['pipe', 'data'], dims=[2, 4])
        """
        return f"{type(self).__name__}(axes={self.axes!r}, dims={self.dims!r})"

    @property
    def _words(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in zip(self._names, self.layout.sizes, strict=True))

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
    """Pipelines whose stages are cut over neighboring ranks, and their replicas: the axes pipe, data and model.

    Args:
        num_pp: how many stages a pipeline has.
        num_mp: over how many ranks the layers of a stage are cut.
        num_dp: how many replicas there are.

    Example:
        >>> PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=2).get_axis_comm_lists("data")
        [[0, 2], [1, 3]]
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _said(coords: dict[str, int]) -> str:
    return listing(f"{axis}={at!r}" for axis, at in coords.items()) or "none"


def _prime_factors(N: int) -> list[int]:  # noqa: N803  the original's name
    """The prime factors of a number, ascending.

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
