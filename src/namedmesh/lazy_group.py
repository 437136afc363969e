"""A process group that several meshes may share, created at once or on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh._torch import (
    connects_without_blocking,
    destroy_group,
    is_registered,
    new_group_among_members,
)
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    import torch.distributed as dist


class LazyGroup:
    """A process group over some ranks, reserved by all its members in one order, and the same on all of them.

    Args:
        ranks: its ranks, ascending.
        rank: this one.
        label: what it is for.
        token: names the call that reserved it, the same on every member.
        name: the name of the group.
        arguments: what :func:`namedmesh._torch.new_group_among_members` takes besides.
        lock: guards its creation.

    Attributes:
        users: how many meshes use it; the last one destroys it.
    """

    def __init__(  # noqa: PLR0917  one call
        self,
        ranks: tuple[int, ...],
        rank: int,
        label: str,
        token: str,
        name: str,
        arguments: Mapping[str, Any],
        lock: threading.RLock,
    ) -> None:
        self.ranks, self.label, self.token, self.name = ranks, label, token, name
        self.users = 0
        self._rank, self._arguments, self._lock = rank, arguments, lock
        self._group: dist.ProcessGroup | None = None
        self._ended = False

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's place among them."""
        return self.ranks.index(self._rank)

    @property
    def created(self) -> dist.ProcessGroup | None:
        """The group if it exists, and nobody destroyed it by hand."""
        group = self._group
        return group if group is not None and is_registered(group) else None

    @property
    def destroyed_by_hand(self) -> bool:
        """Whether the group was created, and somebody else destroyed it."""
        return self._group is not None and not is_registered(self._group)

    @property
    def connects_later(self) -> bool:
        """Whether the group may be created without blocking on its other members."""
        return connects_without_blocking(self._arguments["backend"])

    def get_or_create(self) -> dist.ProcessGroup:
        """Return the group, created now if it was not; does not block on other ranks.

        Raises:
            MeshError: the mesh was closed.
        """
        with self._lock:
            if self._ended:
                raise MeshError(
                    f"the group over ranks {list(self.ranks)} ({self.label}) belongs to a mesh that was closed; make "
                    "another mesh with init_mesh()"
                )
            return self._group or self.create(connect=False)

    def create(self, *, connect: bool = True) -> dist.ProcessGroup:
        """Create the group among its members; blocks until they connect unless ``connect`` is false."""
        self._group = new_group_among_members(
            self.ranks,
            name=self.name,
            store_prefix=f"namedmesh/groups/{self.token}",
            connect=connect,
            **self._arguments,
        )
        return self._group

    def create_with(self, create: Callable[[], dist.ProcessGroup]) -> None:
        """Take a group that another function creates, or that exists."""
        self._group = create()

    def destroy(self) -> bool:
        """Destroy the group if it was created; returns whether it was. Its name is free again."""
        group, self._ended = self.created, True
        self._group = None
        if group is None:
            return False
        destroy_group(group, f"namedmesh/groups/{self.token}")
        return True

    def end(self) -> None:
        """Drop the reference to the group, which torch destroys with the default group."""
        self._group, self._ended = None, True
