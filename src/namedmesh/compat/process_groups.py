"""Three overlapping process groups in one object, ``ProcessGroups(tp, pp, dp)``, over one NamedMesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.axis_map import agreed_groups, check_axes, group_over
from namedmesh.compat.state import require_open
from namedmesh.init import init_mesh

if TYPE_CHECKING:
    from typing_extensions import Self

    from namedmesh.mesh import NamedMesh

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """A rank's tensor-, pipeline- and data-parallel groups, and its index in each; making it communicates.

    Ranks are laid out as (dp, pp, tp), tp fastest: of 8 ranks with sizes 2, 2 and 2 the tensor groups are (0, 1), (2, 3) ...,
    the pipeline groups (0, 2), (1, 3) ... and the data groups (0, 4), (1, 5) ... Every rank of the world makes it with the
    same sizes; :func:`namedmesh.init_mesh` says what it refuses. ``mesh`` is the mesh behind it.
    """

    def __init__(self, tp: int, pp: int, dp: int) -> None:
        self._fill(init_mesh(dp=dp, pp=pp, tp=tp))

    @classmethod
    def bind(cls, mesh: NamedMesh) -> Self:
        """Return the groups of a mesh that exists, with axes tp, pp, and dp or dp_replicate and dp_shard; communicates."""
        require_open(mesh, "ProcessGroups.bind")
        bound = cls.__new__(cls)
        bound._fill(mesh)
        return bound

    def _fill(self, mesh: NamedMesh) -> None:
        self.mesh = mesh
        with agreed_groups(mesh, "ProcessGroups"):
            check_axes(mesh.layout, "ProcessGroups", ("pp", "dp", "tp", "dp_replicate", "dp_shard"))
            groups = [group_over(mesh, (axis,))[0] for axis in ("tp", "pp", "dp")]
        self.tp_group, self.pp_group, self.dp_group = groups
        self.tp_size, self.pp_size, self.dp_size = (group.size() for group in groups)
        self.tp_rank, self.pp_rank, self.dp_rank = (group.rank() for group in groups)
        self.is_first_stage, self.is_last_stage = self.pp_rank == 0, self.pp_rank == self.pp_size - 1

    def log(self, rank: int) -> None:
        """Print the sizes, on the rank 0: ``rank`` is this rank."""
        if rank == 0:
            sizes = f"tp={self.tp_size}, pp={self.pp_size}, dp={self.dp_size}"
            print(f"world size {self.mesh.layout.world_size}: {sizes}")  # noqa: T201  its contract

    def close(self) -> None:
        """Close the mesh."""
        self.mesh.close()
