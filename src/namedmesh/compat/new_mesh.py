"""How the ``initialize`` of a dialect makes a mesh: its ranks agree on it, and what fails leaves nothing behind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from namedmesh.groups import GroupPool
from namedmesh.init import version_fields
from namedmesh.launch import default_group_device
from namedmesh.making import agreed
from namedmesh.mesh import NamedMesh

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from namedmesh.layout import Layout
    from namedmesh.making import GroupMaker
    from namedmesh.options import GroupOptions

__all__ = ["MeshMaker", "new_mesh"]


class MeshMaker:
    """Makes the mesh of a dialect, once its request is known to be the same on all ranks.

    Args:
        groups: makes its groups, and further ones of the dialect.
    """

    def __init__(self, groups: GroupMaker) -> None:
        self.groups = groups
        self.mesh: NamedMesh | None = None

    def make(
        self,
        layout: Layout,
        request: Mapping[str, str],
        groups: Iterable[tuple[Layout, Sequence[str], GroupOptions]],
        options: Mapping[str, GroupOptions],
    ) -> NamedMesh:
        """Compare the request with the other ranks, and make the mesh; communicates.

        Args:
            layout: the layout of the mesh.
            request: what was asked for, field by field.
            groups: the groups over whole axes that will be made.
            options: the options of the mesh's groups, by axis.
        """
        self.groups.compare({**request, **version_fields()}, groups)
        device = default_group_device()
        root = self.groups.create_mesh(layout, device.type, options)
        self.mesh = NamedMesh(layout, root, self.groups.pool, device, options)
        return self.mesh


@contextmanager
def new_mesh(call: str, ranks: range, defaults: GroupOptions | None = None) -> Iterator[MeshMaker]:
    """Let ranks agree on a mesh and make it; after an error there is no mesh, and no group is left over.

    Args:
        call: what is being called, for messages.
        ranks: the ranks that take part: every one of them calls this.
        defaults: options of every group that sets no other.

    Raises:
        AgreementError: the ranks do not agree, some did not come in time, or one failed.
    """
    pool = GroupPool(defaults=defaults)
    maker: MeshMaker | None = None
    try:
        with agreed(pool, call, ranks) as groups:
            maker = MeshMaker(groups)
            yield maker
    except BaseException:
        if maker is not None and maker.mesh is not None:
            maker.mesh.close()
        pool.close()
        raise
