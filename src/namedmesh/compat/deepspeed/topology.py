"""Topologies and the pipeline grid, as in ``deepspeed.runtime.pipe.topology``.

A topology names axes over ranks; a :class:`namedmesh.Layout` computes its ranks. Ranks are
row-major, the last axis fastest. After ``install()`` this module is importable as upstream's, if
DeepSpeed is not installed.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist

from namedmesh._errors import AxisError, LayoutError
from namedmesh.compat.deepspeed.units import GRID_ROWS, GroupAccessors, add_accessors
from namedmesh.compat.errors import ContractError
from namedmesh.compat.state import check_default_group, check_open
from namedmesh.layout import Layout
from namedmesh.layout.sizes import format_sizes
from namedmesh.mesh.init import init_mesh
from namedmesh.mesh.mesh import NamedMesh

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid"]
__all__ += ["ProcessTopology"]

_MESH_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}
"""DeepSpeed's axes, and their usual names in a mesh."""


class ProcessTopology:
    """Named axes over the ranks 0, 1, 2, ...

    Mistakes raise the error types that upstream raises, with one exception: sizes below 1, and more
    sizes than names, which upstream accepts, raise a LayoutError.

    Args:
        axes: the names, slowest axis first.
        dims: the size of each axis.

    Attributes:
        layout: the equivalent :class:`namedmesh.Layout`, for
            ``namedmesh.init_mesh(topology.layout)``. The axes pipe, data and model are called pp,
            dp and tp there.

    Example:
        >>> topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
        >>> topology.get_coord(6), topology.get_rank(pipe=1, data=1, model=0)
        (ProcessCoord(pipe=1, data=1, model=0), 6)
        >>> topology.get_axis_comm_lists("pipe"), topology.filter_match(pipe=0, data=1)
        ([[0, 4], [1, 5], [2, 6], [3, 7]], [2, 3])
        >>> topology.layout
        Layout(pp=2, dp=2, tp=2)
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = axes
        self.dims = dims
        coord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]  # noqa: PYI024  dynamic names
        self.ProcessCoord = coord
        # Raises the errors of upstream, which makes a range of each size, if an axis has no integer
        # size.
        ranges = [range(dims[index]) for index in range(len(axes))]
        mesh_axes = [_MESH_AXES.get(axis, axis) for axis in axes]
        # A topology may have both names of an axis, such as pipe and pp; then all names stay.
        has_conflict = len(set(mesh_axes)) < len(mesh_axes)
        self.layout: Layout = Layout.from_shape(axes if has_conflict else mesh_axes, dims)
        self.mapping: dict[Any, int] = {}
        for rank, position in enumerate(product(*ranges)):
            self.mapping[coord(*position)] = rank

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate on every axis.

        Args:
            **coord_kwargs: the coordinate on each axis.

        Raises:
            LayoutError: an axis has no coordinate, or there is one too many.
            ContractError: a coordinate is outside of its axis.
        """
        if len(coord_kwargs) != len(self.axes):
            raise LayoutError(
                "get_rank() needs a coordinate for each axis of "
                f"{format_sizes(self.axes, self.dims)}, got {len(coord_kwargs)}; call "
                "filter_match() for the ranks at some coordinates"
            )
        coord = self.ProcessCoord(**coord_kwargs)
        if coord not in self.mapping:
            raise ContractError(
                f"{coord} is outside of {format_sizes(self.axes, self.dims)}; coordinates count from 0"
            )
        return self.mapping[coord]

    def get_axis_names(self) -> Sequence[str]:
        """Return the names of the axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the coordinates of a rank as text, such as ``a_01-b_01``.

        DeepSpeed uses it in the names of checkpoint files.

        Args:
            rank: the global rank.
            omit_axes: axes that do not appear in the text.
            inner_sep: the text between the name of an axis and its coordinate.
            outer_sep: the text between axes.
        """
        omitted = frozenset(omit_axes)
        # As upstream, accept any rank if there is nothing to show.
        shown = [axis for axis in self.axes if axis not in omitted]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(self.get_coord(rank), axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis, or 0 if the topology does not have it."""
        if axis not in self.axes:
            return 0
        return self.dims[self.axes.index(axis)]

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank as a named tuple.

        Raises:
            LayoutError: the rank is not in the topology.
        """
        # Upstream compares with ==, so 1.0 and True are rank 1.
        number = int(rank) if rank in self.layout.ranks else rank
        return self.ProcessCoord(*self.layout.coords(number).values())

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks of every group along an axis, ordered by first rank.

        The list is empty if the topology does not have the axis.
        """
        if axis not in self.axes:
            return []
        return [list(ranks) for ranks in self.layout.groups(self.layout.axes[self.axes.index(axis)])]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks at given coordinates, ascending.

        Args:
            **filter_kwargs: the coordinates on some of the axes.

        Raises:
            AttributeError: the topology does not have an axis.
        """
        coords = list(self.mapping)
        for axis, position in filter_kwargs.items():
            # As upstream, this raises for an unknown axis only if the filters before match any ranks.
            coords = [coord for coord in coords if getattr(coord, axis) == position]
        return [self.mapping[coord] for coord in coords]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one coordinate of an axis, ascending.

        Raises:
            ValueError: the topology does not have the axis.
        """
        self.axes.index(axis)  # raises for an unknown axis
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A topology with the axes pipe and data: the replicas of a stage are neighbors.

    Args:
        num_pp: the number of stages.
        num_dp: the number of replicas.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology with the axes pipe, data and model: the tensor-parallel ranks are neighbors.

    Args:
        num_pp: the number of stages.
        num_mp: the number of ranks across which a stage is sharded.
        num_dp: the number of replicas.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:  # noqa: N803  upstream's name
    """Return the prime factors of a number, ascending.

    Raises:
        LayoutError: the number is not positive.
    """
    if N <= 0:
        raise LayoutError(f"the number must be at least 1, got {N}")
    factors: list[int] = []
    rest = N
    candidate = 2
    while rest > 1:
        while rest % candidate == 0:
            factors.append(candidate)
            rest //= candidate
        candidate += 1
    return factors


class PipelineParallelGrid(GroupAccessors):
    """The stages, replicas and tensor-parallel groups that DeepSpeed's pipelines use.

    It has upstream's attributes and methods. Its groups are the groups of a mesh with the axes pp,
    dp and tp.

    Collective: every rank of the world must create it with the same topology.

    Args:
        topology: a topology with the axes pipe and data, and possibly model and others. By default,
            the prime factors of the world size go to pipe and data alternately.
        process_group: unused, as in upstream.

    Attributes:
        mesh: the mesh with the groups.

    Raises:
        ContractError: torch has no default group, or the topology does not have as many ranks as
            the world.
        AttributeError: the topology has no axis pipe or no axis data.
        AgreementError: the other ranks did not call this, or called it with a different topology.
    """

    def __init__(self, topology: Any = None, process_group: object = None) -> None:  # noqa: ARG002  upstream's
        check_default_group("deepspeed.init_distributed()")
        topology = topology or make_default_topology()
        try:
            mesh = init_mesh(read_sizes(topology))
        except LayoutError as error:
            # Upstream checks the number of ranks with an assertion.
            raise ContractError(*error.problems) from None
        try:
            self._set_attributes(topology, mesh)
        except AttributeError:
            mesh.close()
            raise

    @classmethod
    def from_mesh(cls, mesh: NamedMesh) -> PipelineParallelGrid:
        """Make a grid from an existing mesh with the axes pp and dp, and use its groups.

        Collective: every rank of the mesh must call it.

        Raises:
            MeshError: the argument is not an open mesh.
            AxisError: the mesh has no axis pp or no axis dp.
            AgreementError: the other ranks did not call this, or called it with a different mesh.
        """
        grid = cls.__new__(cls)
        deepspeed_axes = {mesh_axis: axis for axis, mesh_axis in _MESH_AXES.items()}
        check_open(mesh, "deepspeed.PipelineParallelGrid.from_mesh")
        missing = [axis for axis in ("pp", "dp") if axis not in mesh.layout]
        if missing:
            raise AxisError(
                f"{mesh.layout} has no axis {' and no axis '.join(missing)}; a grid needs pp and "
                "dp: make the mesh with both, if only of size 1"
            )
        axes = [deepspeed_axes.get(axis, axis) for axis in mesh.layout]
        grid._set_attributes(ProcessTopology(axes, mesh.layout.sizes), mesh)  # noqa: SLF001  an instance of this class
        return grid

    def _set_attributes(self, topology: Any, mesh: NamedMesh) -> None:
        """Set upstream's attributes: the groups, sizes and coordinates of this rank."""
        coord = topology.get_coord(mesh.global_rank)
        self.stage_id: int = coord.pipe  # raises an AttributeError without this axis, as upstream
        self.data_parallel_id: int = coord.data
        axis_of = dict(zip(topology.get_axis_names(), mesh.layout, strict=True))
        kinds = {
            "pipe": [axis_of["pipe"]],
            "data": [axis_of["data"]],
            # DeepSpeed's model-parallel ranks are the ranks of one replica of the model.
            "model": [mesh_axis for axis, mesh_axis in axis_of.items() if axis != "data"],
            "slice": [axis_of["model"]] if "model" in axis_of else [],
        }
        super().__init__(mesh, kinds)
        self._topo = topology
        self.global_rank: int = mesh.global_rank
        self.world_size: int = mesh.layout.world_size
        pipe, data, model, tensor = self._group_infos.values()
        self.pp_proc_group: dist.ProcessGroup = pipe.group
        self.pp_group: list[int] = pipe.group_ranks
        self.pipe_parallel_size: int = pipe.world_size
        self.dp_proc_group: dist.ProcessGroup = data.group
        self.dp_group: list[int] = data.group_ranks
        self.data_parallel_size: int = data.world_size
        self.ds_model_proc_group: dist.ProcessGroup = model.group
        self.ds_model_world_size: int = model.world_size
        self.ds_model_rank: int = model.rank
        self.slice_proc_group: dist.ProcessGroup = tensor.group
        self.slice_group: list[int] = tensor.group_ranks
        self.slice_parallel_size: int = tensor.world_size
        # Upstream's model_parallel_size is the size of the axis model, unlike its ds_model_world_size.
        self.model_parallel_size: int = self.slice_parallel_size
        self.is_first_stage: bool = self.stage_id == 0
        self.is_last_stage: bool = self.stage_id == self.pipe_parallel_size - 1

        self.dp_groups: list[list[int]] = topology.get_axis_comm_lists("data")
        self.pipe_groups: list[list[int]] = topology.get_axis_comm_lists("pipe")
        self.p2p_groups: list[list[int]] = []
        for ranks in self.pipe_groups:
            # The last stage is paired with the first one.
            self.p2p_groups += map(list, zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        self.p2p_groups.sort()
        if self.model_parallel_size > 1:
            # Upstream has these attributes in this case only, and never fills the second one.
            self.model_groups: list[list[int]] = topology.get_axis_comm_lists("model")
            self.mp_group: list[int] = []

    def _is_grid_valid(self) -> bool:
        """Return whether the product of the axis sizes is the world size."""
        return bool(self.world_size == dist.get_world_size())

    def topology(self) -> Any:
        """Return the topology that the grid was created with."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the global rank of another stage at the other coordinates of this rank.

        Args:
            stage_id: the stage.
            **kwargs: coordinates to use instead of this rank's own.
        """
        coord = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        rank: int = self._topo.get_rank(**coord._asdict())
        return rank

    def get_stage_id(self) -> int:
        """Return the stage of this rank."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Return the data-parallel index of this rank."""
        return self.data_parallel_id


add_accessors(PipelineParallelGrid, GRID_ROWS)


def make_default_topology() -> ProcessTopology:
    """Return the topology of a grid without one: the world's prime factors for pipe and data."""
    factors = _prime_factors(dist.get_world_size())
    return PipeDataParallelTopology(prod(factors[::2]), prod(factors[1::2]))


def read_sizes(topology: Any) -> dict[str, int]:
    """Return the sizes of a topology, ours or upstream's, by the axes of a mesh."""
    axes = topology.get_axis_names()
    layout = ProcessTopology(axes, [topology.get_dim(axis) for axis in axes]).layout
    return dict(layout.items())
