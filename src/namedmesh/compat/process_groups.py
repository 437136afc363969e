"""Three overlapping process groups in one object, ``ProcessGroups(tp, pp, dp)``."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from namedmesh.mesh.init import init_mesh

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """The tensor-, pipeline- and data-parallel groups of this rank, over one NamedMesh.

    The axes are (dp, pp, tp), tp fastest. With 8 ranks and sizes of 2, the tensor-parallel groups
    are (0, 1), (2, 3), ..., the pipeline-parallel groups (0, 2), (1, 3), ..., and the data-parallel
    groups (0, 4), (1, 5), ...

    Collective: every rank must create it with the same sizes.

    Args:
        tp: the number of tensor-parallel ranks.
        pp: the number of pipeline stages.
        dp: the number of data-parallel ranks.

    Attributes:
        mesh: the mesh with these groups.
        tp_size, pp_size, dp_size: the sizes of the groups.
        tp_group, pp_group, dp_group: the groups.
        tp_rank, pp_rank, dp_rank: the group ranks.
        is_first_stage, is_last_stage: whether this rank belongs to the first or the last stage.

    Raises:
        LayoutError: the product of the sizes is not the world size.
        AgreementError: the other ranks did not create it, or with different sizes.
    """

    def __init__(self, tp: int, pp: int, dp: int) -> None:
        mesh = init_mesh(dp=dp, pp=pp, tp=tp)
        self.mesh = mesh
        self.tp_size: int = mesh.size("tp")
        self.pp_size: int = mesh.size("pp")
        self.dp_size: int = mesh.size("dp")
        self.tp_group: ProcessGroup = mesh.group("tp")
        self.pp_group: ProcessGroup = mesh.group("pp")
        self.dp_group: ProcessGroup = mesh.group("dp")
        self.tp_rank: int = mesh.rank("tp")
        self.pp_rank: int = mesh.rank("pp")
        self.dp_rank: int = mesh.rank("dp")
        self.is_first_stage: bool = mesh.is_first("pp")
        self.is_last_stage: bool = mesh.is_last("pp")

    def log(self, rank: int) -> None:
        """Print the sizes if ``rank``, the global rank of the caller, is 0."""
        if rank == 0:
            sizes = f"tp={self.tp_size}, pp={self.pp_size}, dp={self.dp_size}"
            print(f"world size {self.mesh.layout.world_size}: {sizes}")  # noqa: T201  it is meant to print
