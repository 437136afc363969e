"""``deepspeed.runtime.pipe.topology``: named axes over ranks computed by a :class:`namedmesh.Layout`, and its pipeline grid.

``install()`` puts this module in place of the original's. Ranks are row-major, the last axis the fastest.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch.distributed as dist

from namedmesh.agreement import agreed
from namedmesh.compat import ContractError
from namedmesh.compat.state import agreed_groups, check_default_group, group_over
from namedmesh.errors import LayoutError
from namedmesh.groups import GroupOptions
from namedmesh.init import make_mesh
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh
from namedmesh.sizes import product

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
]

_CANONICAL = {"pipe": "pp", "data": "dp", "model": "tp"}
_check_axes = attrgetter("pipe", "data")  # a grid needs both; an AttributeError without one


class ProcessTopology:
    """Named axes over the ranks 0, 1, 2 and so on, of ``axes``, slowest axis first, and ``dims``, the size of each.

    ``layout`` is the same as a :class:`namedmesh.Layout`, for ``namedmesh.init_mesh(topology.layout)``; there the axes pipe,
    data and model have the names pp, dp and tp. What is wrong is the original's kind of error; a size below 1 or more
    sizes than names, which it takes, a LayoutError.

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
        self.axes, self.dims = axes, dims
        coord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]  # noqa: PYI024  a name per axis
        coord(*[range(dims[place]) for place in range(len(axes))])  # one whole size for each
        self.ProcessCoord = coord
        names = [_CANONICAL.get(axis, axis) for axis in axes]
        self.layout = Layout.from_shape(names if len({*names}) == len(names) else axes, dims)
        self._names = dict(zip(axes, self.layout.axes, strict=True))

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at some coordinates, one for each axis; a ContractError for one outside of its axis."""
        if len(coord_kwargs) != len(self._names):
            raise LayoutError(
                f"get_rank() got {len(coord_kwargs)} coordinates for {product(self.axes, self.dims)}; give one for each axis, or "
                "ask filter_match() for all ranks that share some"
            )
        at = self.ProcessCoord(**coord_kwargs)
        ranks = self.filter_match(**coord_kwargs)
        if not ranks:
            raise ContractError(f"{at} is outside of {product(self.axes, self.dims)}; places count from 0")
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
        """Return the coordinates of a rank on all axes but some, such as ``a_01-b_01``: the names of checkpoint files."""
        omitted = frozenset(omit_axes)
        shown = [axis for axis in self.axes if axis not in omitted]
        at = self.get_coord(rank)._asdict() if shown else {}
        return outer_sep.join(f"{axis}{inner_sep}{at[axis]:02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if the topology does not have it."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank, as a named tuple; LayoutError for a rank that is not in the topology."""
        number = int(rank) if rank in self.layout.ranks else rank  # by equality, as the original
        return self.ProcessCoord(*self.layout.coords(number).values())

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks of every group along an axis, by their first rank; none if the topology does not have it."""
        return [list(ranks) for ranks in self.layout.groups(self._names[axis])] if axis in self.axes else []

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return every rank at coordinates on some axes, ascending; AttributeError for a name that is no axis."""
        coords = {}
        for axis, at in filter_kwargs.items():
            # Refused in the order given, as the original: names after a filter that no rank matches are not.
            getattr(self.ProcessCoord, axis)
            if at not in range(self.get_dim(axis)):
                return []
            coords[self._names[axis]] = int(at)
        return list(self.layout.where(**coords))

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return every rank at one coordinate of an axis, ascending; a ValueError for an axis that is not there."""
        self.axes.index(axis)  # refuses a name that is none
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @cached_property
    def mapping(self) -> dict[Any, int]:
        """Every coordinate with its rank, in the order of the ranks; computed on first use."""
        return {self.get_coord(rank): rank for rank in self.layout.ranks}

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """``num_dp`` pipelines of ``num_pp`` stages, replicas on neighboring ranks: the axes pipe and data."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same, with stages that are sharded over ``num_mp`` neighboring ranks: the axes pipe, data and model."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:  # noqa: N803  the original's name
    """Return the prime factors of a number, ascending; LayoutError for one that is not positive."""
    if N <= 0:
        raise LayoutError(f"{N} has no prime factors; give a number of at least 1")
    factors, rest, candidate = list[int](), N, 2
    while rest > 1:
        while rest % candidate == 0:
            factors.append(candidate)
            rest //= candidate
        candidate += 1
    return factors


class Answers(NamedTuple):
    """What the getters answer for one kind of parallelism: this rank's group, and what follows from its ranks."""

    group: dist.ProcessGroup
    ranks: list[int]
    size: int
    rank: int
    first_rank: int


def getter(kind: str, answer: str) -> Any:
    """Make a method that returns one answer for a kind of parallelism."""

    def getter(self: Getters) -> Any:
        return getattr(self._answers[kind], answer)

    getter.__doc__ = f"Return this rank's {kind}-parallel {answer.replace('_', ' ')}."
    return getter


class Getters:
    """The getters that a model-parallel unit and a pipeline grid have in common. None of them communicates.

    Making them makes the groups over the axes of each kind of parallelism that are not there yet; every rank does.
    """

    def __init__(self, mesh: NamedMesh, kinds: Mapping[str, Sequence[str]]) -> None:
        self.mesh = mesh
        self._answers = dict[str, Answers]()
        for kind, axes in kinds.items():
            group, ranks = group_over(mesh, axes)
            self._answers[kind] = Answers(group, ranks, len(ranks), ranks.index(mesh.global_rank), ranks[0])

    def get_global_rank(self) -> int:
        """Return this rank."""
        return self.mesh.global_rank

    get_model_parallel_group = getter("model", "group")
    get_model_parallel_world_size = getter("model", "size")
    get_model_parallel_rank = getter("model", "rank")
    get_data_parallel_group = getter("data", "group")
    get_data_parallel_group_ranks = getter("data", "ranks")
    get_data_parallel_world_size = getter("data", "size")
    get_data_parallel_rank = getter("data", "rank")
    get_slice_parallel_group = getter("slice", "group")
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = getter("slice", "size")
    get_slice_parallel_rank = get_tensor_model_parallel_rank = getter("slice", "rank")
    get_pipe_parallel_group = getter("pipe", "group")
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size = getter("pipe", "size")
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = getter("pipe", "rank")


class PipelineParallelGrid(Getters):
    """Stages, replicas and tensor-parallel ranks, as DeepSpeed's pipelines and models use them; communicates.

    Every rank of the world makes one, with the same topology: axes pipe and data, and possibly model and others. By default
    the prime factors of the number of ranks go to pipe and data in turns. ``process_group`` is not used, as in the original,
    whose attributes it has. The groups are those of a :class:`namedmesh.NamedMesh`, ``mesh``, of axes pp, dp and tp.

    Raises:
        ContractError: ``torch.distributed`` has no default group, or the topology is not one of all its ranks.
        AttributeError: the topology has no axis pipe, or no axis data.
        AgreementError: the other ranks did not call this, or not with the same topology.
    """

    def __init__(self, topology: Any = None, process_group: object = None) -> None:  # noqa: ARG002  the original's signature
        check_default_group("deepspeed.init_distributed()")
        factors = _prime_factors(dist.get_world_size())
        topology = topology or PipeDataParallelTopology(prod(factors[::2]), prod(factors[1::2]))
        names = topology.get_axis_names()
        with agreed("deepspeed.PipelineParallelGrid") as compare:
            layout = ProcessTopology(names, [topology.get_dim(axis) for axis in names]).layout
            if layout.world_size != dist.get_world_size():
                raise ContractError(
                    f"the topology is {layout}, but the world has {dist.get_world_size()} ranks; change one of them"
                )
            _check_axes(topology.get_coord(0))
            self._fill(topology, make_mesh(compare, layout, {}, {}, GroupOptions()))

    @classmethod
    def from_mesh(cls, mesh: NamedMesh) -> PipelineParallelGrid:
        """Make a grid over a mesh that exists, with axes pp and dp, whose groups it uses; every rank calls it; communicates."""
        grid = cls.__new__(cls)
        words = {name: kind for kind, name in _CANONICAL.items()}
        with agreed_groups(mesh, "deepspeed.PipelineParallelGrid.from_mesh"):
            topology = ProcessTopology([words.get(axis, axis) for axis in mesh.layout], mesh.layout.sizes)
            _check_axes(topology.get_coord(0))
            grid._fill(topology, mesh)  # noqa: SLF001  its own
        return grid

    def _fill(self, topology: Any, mesh: NamedMesh) -> None:
        """Set this rank's coordinates and groups."""
        axes = dict(zip(topology.get_axis_names(), mesh.layout, strict=True))
        replica = [own for axis, own in axes.items() if axis != "data"]
        part = [axes["model"]] if "model" in axes else []
        kinds = {"pipe": [axes["pipe"]], "data": [axes["data"]], "model": replica, "slice": part}
        super().__init__(mesh, kinds)
        self._topo, self.global_rank, self.world_size = topology, mesh.global_rank, mesh.layout.world_size
        pipe, data, model, sliced = self._answers.values()
        self.pp_proc_group, self.pp_group, self.pipe_parallel_size, self.stage_id, _ = pipe
        self.dp_proc_group, self.dp_group, self.data_parallel_size, self.data_parallel_id, _ = data
        self.ds_model_proc_group, _, self.ds_model_world_size, self.ds_model_rank, _ = model
        self.slice_proc_group, self.slice_group, self.slice_parallel_size, *_ = sliced
        self.model_parallel_size = self.slice_parallel_size
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups, self.pipe_groups = map(topology.get_axis_comm_lists, ("data", "pipe"))
        self.p2p_groups: list[list[int]] = []
        for ranks in self.pipe_groups:
            self.p2p_groups += [[rank, ranks[place - len(ranks) + 1]] for place, rank in enumerate(ranks)]
        self.p2p_groups.sort()
        if self.model_parallel_size > 1:  # the original has these only then, and never fills the second
            self.model_groups, self.mp_group = topology.get_axis_comm_lists("model"), list[int]()

    def _is_grid_valid(self) -> bool:
        """Return whether the topology has as many ranks as the world."""
        return bool(self.world_size == dist.get_world_size())

    def topology(self) -> Any:
        """Return the topology, as it was given."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage at this rank's other coordinates, or those that ``kwargs`` give in their place."""
        at = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        rank: int = self._topo.get_rank(**at._asdict())
        return rank

    get_stage_id = Getters.get_pipe_parallel_rank
    get_data_parallel_id = Getters.get_data_parallel_rank
