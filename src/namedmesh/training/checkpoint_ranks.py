"""The ranks that write or read a checkpoint together, on a group of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh.mesh import NamedMesh

T = TypeVar("T")


class Ranks:
    """All ranks of a mesh, on a gloo group that nothing else uses: a background thread communicates on it.

    Args:
        mesh: the mesh, which owns the group; None for a process without process groups.
    """

    _groups: ClassVar[WeakKeyDictionary[NamedMesh, dist.ProcessGroup]] = WeakKeyDictionary()

    def __init__(self, mesh: NamedMesh | None) -> None:
        self.group: dist.ProcessGroup | None = None
        if mesh is not None:
            if mesh not in self._groups:
                alone = GroupOptions(backend="gloo", share=False)
                with mesh.agreed("training, for its checkpoints") as maker:
                    maker.compare({})
                    self._groups[mesh] = maker.make(mesh.layout, mesh.layout.axes, alone)
            self.group = self._groups[mesh]

    @property
    def arguments(self) -> dict[str, Any]:
        """The ranks, as DCP takes them; its ``async_save`` of torch 2.8 does not know ``no_dist``."""
        if self.group is not None:
            return {"process_group": self.group}
        return {"no_dist": True} if dist.is_initialized() else {}

    def on_first(self, function: Callable[[list[Any]], T], mine: object = None) -> T:
        """Call ``function`` on the first rank, with a value of each rank; all get its result, or its error."""
        if self.group is None:
            return function([mine])
        first = self.group.rank() == 0
        values: list[Any] = [None] * self.group.size()
        dist.gather_object(mine, values if first else None, group=self.group, group_dst=0)
        answer: list[Any] = [None, None]
        if first:
            try:
                answer[0] = function(values)
            except Exception as error:  # noqa: BLE001  every rank raises it
                answer[1] = error
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result
