"""DeepSpeed's pipeline grid: this rank's coordinates in a topology, and its groups, over one NamedMesh."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.axis_map import compare_mesh
from namedmesh.compat.binding import require_default_group, require_open
from namedmesh.compat.deepspeed.model_parallel_unit import Getters, answers, axis_map
from namedmesh.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    ProcessTopology,
    _prime_factors,
    validate_topology,
)
from namedmesh.errors import LayoutError, listing
from namedmesh.groups import GroupPool, agreed
from namedmesh.init import make_mesh
from namedmesh.views import join_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.groups import GroupMaker
    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh

__all__ = ["PipelineParallelGrid"]

_CALL = "deepspeed.PipelineParallelGrid"


def topology_of(layout: Layout) -> tuple[ProcessTopology, dict[str, tuple[str, ...]]]:
    """Return a topology over the ranks of a layout, and the layout's axes for each of its own.

    Other axes keep their names. A grid needs pipe and data: one that the layout lacks has size 1.
    """
    kinds = axis_map(layout)
    del kinds["sequence"]
    names = {axis: kind for kind, own in kinds.items() for axis in own}
    axes = {kind: () for kind in ("pipe", "data") if not kinds[kind]} | {
        # Two axes of one kind have the position of the first.
        names.get(axis, axis): kinds.get(names.get(axis, ""), (axis,))
        for axis in layout.axes
    }
    topology = ProcessTopology(list(axes), [layout.size(*own) if own else 1 for own in axes.values()])
    mesh_axes = dict(zip(axes, topology.layout.axes, strict=True))
    if any(
        own and topology.layout.partition(mesh_axes[axis]) != layout.partition(*own)
        for axis, own in axes.items()
    ):
        raise LayoutError(
            f"axes {join_names(kinds['data'])} do not adjoin in {layout}, and a topology of DeepSpeed's has one data axis; put "
            "one right after the other"
        )
    return topology, axes


def _kinds(axes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the mesh's axes of each kind of group, from those of each axis of the topology."""
    replica = [own for axis, owns in axes.items() if axis != "data" for own in owns]
    return {
        "pipe": axes["pipe"],
        "data": axes["data"],
        "model": tuple(replica),
        "slice": axes.get("model", ()),
    }


class PipelineParallelGrid(Getters):
    """Stages, replicas and tensor-parallel ranks, as DeepSpeed's pipelines and models use them; communicates.

    Every rank of the world makes one, with the same topology. The groups are those of a :class:`namedmesh.NamedMesh`,
    whose axes are called pp, dp and tp: no two of them have the same ranks.

    Args:
        topology: axes pipe and data, and possibly model and others. By default the prime factors of the number of
            ranks go to pipe and data in turns.
        process_group: a group of all ranks, or None; accepted as the original accepts it.

    Attributes:
        mesh: the mesh with the groups; it leads to everything else that namedmesh does.
        global_rank: this rank.
        world_size: the number of ranks.
        data_parallel_size: the size of the axis data, and so on for ``pipe_parallel_size``,
            ``model_parallel_size`` and ``slice_parallel_size``, which are the same.
        stage_id: this rank's coordinate on pipe; ``is_first_stage`` and ``is_last_stage`` follow from it.
        data_parallel_id: its coordinate on data.
        ds_model_proc_group: the group of one replica of the model, the ranks with the same coordinate on data;
            ``ds_model_world_size`` is its size and ``ds_model_rank`` this rank's position in it.
        dp_group: the ranks along data, ``dp_proc_group`` their group, and ``dp_groups`` those of all such groups; so
            ``pp_group``, ``pp_proc_group`` and ``pipe_groups`` along pipe, and ``slice_group``, ``slice_proc_group`` and
            ``model_groups`` along model, the last one only if the model is sharded.
        p2p_groups: for each rank, it and the next in its pipeline; after the last stage comes the first.

    Raises:
        ContractError: ``torch.distributed`` has no default group, or the topology is not one of all its ranks.
        ContractAttributeError: the topology has no axis pipe, or no axis data.
        LayoutError: the process group has other ranks than the world, or the topology is not row-major.
        AgreementError: the other ranks did not call this, or not with the same topology.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> from namedmesh.compat.deepspeed import PipeDataParallelTopology
        >>> _ = namedmesh.launch.init("cpu")     # plain python: a world of one
        >>> grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=1, num_dp=1))
        >>> grid.stage_id, grid.p2p_groups, grid.mesh.layout
        (0, [[0, 0]], Layout(pp=1, dp=1))
        >>> grid.get_data_parallel_group() is grid.mesh.group("dp")
        True
        >>> grid.close()
        >>> dist.destroy_process_group()
    """

    def __init__(self, topology: Any = None, process_group: object = None) -> None:
        require_default_group("deepspeed.init_distributed()")
        world = dist.get_world_size()
        with agreed(GroupPool(), _CALL, range(world)) as maker:
            if isinstance(process_group, dist.ProcessGroup) and process_group.size() != world:
                raise LayoutError(
                    f"process_group has the ranks {listing(dist.get_process_group_ranks(process_group))}, but a grid is over "
                    f"the whole world of {world} ranks (DeepSpeed's is, too, whatever group it is given); leave it out"
                )
            factors = _prime_factors(world)
            given = topology or PipeDataParallelTopology(prod(factors[::2]), prod(factors[1::2]))
            ours = validate_topology(given, world, dist.get_rank())
            layout = ours.layout
            mesh = make_mesh(maker, layout, {"layout": repr(layout)}, {})
            axes = {axis: (own,) for axis, own in zip(ours.axes, layout.axes, strict=True)}
            self._fill(given, ours, mesh, maker, axes)
        self._owned = True

    @classmethod
    def from_mesh(cls, mesh: NamedMesh) -> PipelineParallelGrid:
        """Make a grid over a mesh that exists, whose groups it uses; communicates.

        Every rank of the mesh calls it. A group that is missing is made, and belongs to the mesh.

        Args:
            mesh: a mesh over the whole world. Its axes pp, dp (or dp_replicate and dp_shard, one right after the
                other) and tp are DeepSpeed's pipe, data and model; other axes keep their names.

        Raises:
            LayoutError: the mesh is over a part of the world, or its axes make no topology.
            MeshError: ``mesh`` is no open mesh.
            AgreementError: the other ranks did not call this.

        Example:
            >>> import namedmesh, torch.distributed as dist
            >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
            >>> grid = PipelineParallelGrid.from_mesh(mesh)
            >>> grid.topology(), grid.get_slice_parallel_group() is mesh.group("tp")
            (ProcessTopology(axes=['pipe', 'data', 'model'], dims=[1, 1, 1]), True)
            >>> mesh.close()
            >>> dist.destroy_process_group()
        """
        call = f"{_CALL}.from_mesh"
        require_open(mesh, call)
        ranks = mesh.layout.ranks
        grid = cls.__new__(cls)
        with mesh.agreed(call) as maker:
            if len(ranks) != dist.get_world_size():
                raise LayoutError(
                    f"{mesh.layout} on ranks {ranks.start} to {ranks.stop - 1} is a part of the world of "
                    f"{dist.get_world_size()} ranks, and a grid of DeepSpeed's is over all of them; make a mesh over the world"
                )
            topology, axes = topology_of(mesh.layout)
            compare_mesh(mesh, maker, _kinds(axes).values())
            grid._fill(topology, topology, mesh, maker, axes)
        grid._owned = False
        return grid

    def _fill(
        self,
        given: Any,
        ours: ProcessTopology,
        mesh: NamedMesh,
        maker: GroupMaker,
        axes: Mapping[str, tuple[str, ...]],
    ) -> None:
        """Set this rank's coordinates and groups, by the mesh's axes for each of the topology's."""
        self._topo, self._topology, self.mesh = given, ours, mesh
        self.world_size = mesh.layout.world_size
        self._answers = answers(mesh, maker, _kinds(axes))
        self.global_rank = mesh.global_rank
        pipe, data, model, part = self._answers.values()
        self.pp_proc_group, self.pp_group, self.pipe_parallel_size, self.stage_id, _ = pipe
        self.dp_proc_group, self.dp_group, self.data_parallel_size, self.data_parallel_id, _ = data
        self.ds_model_proc_group, _, self.ds_model_world_size, self.ds_model_rank, _ = model
        self.slice_proc_group, self.slice_group, self.slice_parallel_size, *_ = part
        self.model_parallel_size = self.slice_parallel_size
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups, self.pipe_groups = map(ours.get_axis_comm_lists, ("data", "pipe"))
        along_pipe = ours.mesh_axis("pipe")
        self.p2p_groups = [[rank, ours.layout.neighbor(rank, along_pipe)] for rank in ours.layout.ranks]
        if self.model_parallel_size > 1:  # the original has these only then, and never fills the second
            self.model_groups, self.mp_group = ours.get_axis_comm_lists("model"), list[int]()

    def close(self) -> None:
        """Destroy the groups that the grid made; those of a mesh that existed before stay."""
        if self._owned:
            self.mesh.close()

    def _is_grid_valid(self) -> bool:
        """Return whether the topology has as many ranks as the world."""
        return self._topology.world_size() == dist.get_world_size()

    def topology(self) -> Any:
        """Return the topology, as it was given."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage at this rank's other coordinates, or those that ``kwargs`` give in their place.

        Raises:
            ContractError: a coordinate outside of its axis.
            LayoutError: a name that is no axis.
        """
        at = self._topology.get_coord(self.global_rank)._asdict()
        del at["pipe"]
        return self._topology.get_rank(pipe=stage_id, **(at | kwargs))

    get_stage_id = Getters.get_pipe_parallel_rank
    get_data_parallel_id = Getters.get_data_parallel_rank
