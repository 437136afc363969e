"""Three overlapping process groups in one object, ``ProcessGroups(tp, pp, dp)``, over one NamedMesh.

Ranks are laid out as (dp, pp, tp), tp fastest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.axis_map import check_axes, compare_mesh, group_over
from namedmesh.compat.binding import require_open
from namedmesh.errors import LayoutError
from namedmesh.init import init_mesh

if TYPE_CHECKING:
    from typing_extensions import Self

    from namedmesh.mesh import NamedMesh

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """A rank's tensor-, pipeline- and data-parallel groups, and its index in each; making it communicates.

    Every rank of the world makes it with the same sizes. Of 8 ranks with sizes 2, 2 and 2 the tensor groups are
    (0, 1), (2, 3), (4, 5), (6, 7), the pipeline groups (0, 2), (1, 3), (4, 6), (5, 7) and the data groups (0, 4),
    (1, 5), (2, 6), (3, 7). Where there is no default group yet, it is made, as :func:`namedmesh.init_mesh` does.

    Args:
        tp: how many ranks share each layer.
        pp: how many stages the layers are in.
        dp: how many replicas of the model there are.

    Attributes:
        mesh: the mesh behind it, whose groups these are.
        tp_size, pp_size, dp_size: how many ranks each group has.
        tp_group, pp_group, dp_group: this rank's groups.
        tp_rank, pp_rank, dp_rank: the index of this rank in each.
        is_first_stage, is_last_stage: whether its stage is the first, or the last, of the pipeline.

    Raises:
        LayoutError: tp x pp x dp is not the size of the world, or a size is less than 1.
        AgreementError: the other ranks did not call this, or not with the same sizes.

    Example:
        >>> import torch.distributed as dist
        >>> groups = ProcessGroups(tp=1, pp=1, dp=1)       # plain python: a world of one
        >>> groups.tp_rank, groups.is_first_stage, groups.is_last_stage
        (0, True, True)
        >>> groups.log(rank=0)
        world size 1: tp=1, pp=1, dp=1
        >>> groups.close()
        >>> dist.destroy_process_group()
    """

    def __init__(self, tp: int, pp: int, dp: int) -> None:
        self._fill(init_mesh(dp=dp, pp=pp, tp=tp))

    @classmethod
    def bind(cls, mesh: NamedMesh) -> Self:
        """Return the groups of a mesh that exists; communicates.

        Every rank of the mesh calls it.

        Args:
            mesh: a mesh of axes ``tp``, ``dp`` (or ``dp_replicate`` and ``dp_shard``) and ``pp``, in any order; one
                that it lacks is of size 1.

        Raises:
            LayoutError: the mesh has other axes.
            MeshError: ``mesh`` is no open mesh.
        """
        require_open(mesh, "ProcessGroups.bind")
        bound = cls.__new__(cls)
        bound._fill(mesh)
        return bound

    def _fill(self, mesh: NamedMesh) -> None:
        if "cp" in mesh.layout and mesh.size("cp") > 1:
            raise LayoutError(
                f"axis 'cp' of {mesh.layout} has no place in ProcessGroups, which are over tp, pp and dp; use the mesh itself"
            )
        self.mesh = mesh
        with mesh.agreed("ProcessGroups") as maker:
            check_axes(mesh.layout, "ProcessGroups")
            compare_mesh(mesh, maker, [("tp",), ("pp",), ("dp",)])
            groups = [group_over(mesh, maker, (axis,))[0] for axis in ("tp", "pp", "dp")]
        self.tp_group, self.pp_group, self.dp_group = groups
        self.tp_size, self.pp_size, self.dp_size = (group.size() for group in groups)
        self.tp_rank, self.pp_rank, self.dp_rank = (group.rank() for group in groups)
        self.is_first_stage, self.is_last_stage = self.pp_rank == 0, self.pp_rank == self.pp_size - 1

    def log(self, rank: int) -> None:
        """Print the sizes, on the rank 0.

        Args:
            rank: this rank.
        """
        if rank == 0:
            sizes = f"tp={self.tp_size}, pp={self.pp_size}, dp={self.dp_size}"
            print(f"world size {self.mesh.layout.world_size}: {sizes}")  # noqa: T201  its contract

    def close(self) -> None:
        """Destroy the groups with the mesh; groups that the mesh does not own stay."""
        self.mesh.close()
