"""Three overlapping process groups in one object, ``ProcessGroups(tp, pp, dp)``, over one NamedMesh."""

from __future__ import annotations

from namedmesh.init import init_mesh

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """A rank's tensor-, pipeline- and data-parallel groups, and its index in each; making it communicates.

    Ranks are laid out as (dp, pp, tp), tp fastest: of 8 ranks with sizes 2, 2 and 2 the tensor groups are (0, 1), (2, 3) ...,
    the pipeline groups (0, 2), (1, 3) ... and the data groups (0, 4), (1, 5) ... Every rank of the world makes it with the
    same sizes; :func:`namedmesh.init_mesh` says what it refuses. ``mesh`` is the mesh behind it.
    """

    def __init__(self, tp: int, pp: int, dp: int) -> None:
        mesh = self.mesh = init_mesh(dp=dp, pp=pp, tp=tp)
        self.tp_size, self.pp_size, self.dp_size = map(mesh.size, ("tp", "pp", "dp"))
        self.tp_group, self.pp_group, self.dp_group = map(mesh.group, ("tp", "pp", "dp"))
        self.tp_rank, self.pp_rank, self.dp_rank = map(mesh.rank, ("tp", "pp", "dp"))
        self.is_first_stage, self.is_last_stage = mesh.is_first("pp"), mesh.is_last("pp")

    def log(self, rank: int) -> None:
        """Print the sizes, on the rank 0: ``rank`` is this rank."""
        if rank == 0:
            sizes = f"tp={self.tp_size}, pp={self.pp_size}, dp={self.dp_size}"
            print(f"world size {self.mesh.layout.world_size}: {sizes}")  # noqa: T201  its contract
