"""The process groups of this process: at most one communicator for each set of ranks and options.

The groups belong to the default group and are shared by all meshes of the process: a :class:`GroupRegistry` counts
their users, and the last one destroys. A :class:`GroupPool` is one mesh's share in them. Nothing here creates a group;
:class:`namedmesh.making.GroupMaker` does, under an agreement of the ranks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from namedmesh._torch import (
    default_store,
    default_timeout,
    forget_group_caches,
    is_registered,
    new_connection,
    state_of_default_group,
)
from namedmesh.agreement import Agreements
from namedmesh.errors import MeshError
from namedmesh.options import GroupOptions, normalized_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from namedmesh.layout import Layout

__all__ = ["Communicator", "GroupKey", "GroupPool", "GroupRegistry", "new_group_by_everyone"]


class GroupKey(NamedTuple):
    """What distinguishes process groups: two requests with the same key get the same group.

    Args:
        ranks: the members, ascending. For a group of one rank that is all: it has no options of its own.
        backends: the backend of each type of device.
        timeout: the timeout; None where nothing waits.
        nccl: settings of the NCCL communicator.
        high_priority: whether NCCL's kernels run on a stream of high priority.
        use: what it is for, where groups are not shared.
    """

    ranks: tuple[int, ...]
    backends: tuple[tuple[str, str], ...] = ()
    timeout: timedelta | None = None
    nccl: object = ()
    high_priority: bool = False
    use: str = ""


@dataclass(eq=False)
class Communicator:
    """A process group that meshes of this process use.

    Attributes:
        label: what it is for.
        ranks: its ranks, ascending.
        group: the group.
        owned: whether meshes created it. Somebody else's is never destroyed.
        token: the agreement under which it was created.
        users: how many meshes use it; the last one destroys it.
    """

    label: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    owned: bool
    token: str = ""
    users: int = 0

    @property
    def exists(self) -> bool:
        """Whether nobody destroyed a group of ours by hand."""
        return not self.owned or is_registered(self.group)


class GroupRegistry:
    """The process groups that the meshes of this process share; one for each default group, and ends with it.

    Attributes:
        lock: guards every table of groups.
        agreements: what this process knows of the agreements of the default group; its lock is held during one.
        groups: the groups in the order they were created, by key; one that is not shared also by its agreement.
        pools: those that are open.
        ended: whether the default group was destroyed.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_backend = dist.get_backend()
        self.default_timeout = default_timeout()
        self.lock = threading.RLock()
        self.agreements = Agreements(lambda _: new_connection(default_store()))
        self.groups: dict[GroupKey, Communicator] = {}
        self.pools: list[GroupPool] = []
        self.ended = False

    def release(self, groups: Iterable[Communicator]) -> None:
        """Release groups; those without users are destroyed, the one that was created last first.

        One that cannot be destroyed does not keep the others; its error is raised in the end.
        """
        errors: list[Exception] = []
        with self.lock:
            for group in groups:
                group.users -= 1
            unused = [key for key, group in self.groups.items() if group.users < 1]
            ended = [self.groups.pop(key) for key in reversed(unused)]
            for group in ended:
                try:
                    if group.exists:
                        dist.destroy_process_group(group.group)
                except Exception as error:  # noqa: BLE001, PERF203  raised below
                    errors.append(error)
        if ended:
            forget_group_caches()
        if errors:
            raise errors[0]

    def end(self) -> None:
        """Drop every reference to groups: torch is destroying the default group, and all others with it."""
        self.ended = True
        for pool in list(self.pools):
            pool.end("ended with the default process group, which was destroyed")
        self.groups.clear()
        self.agreements.end()
        forget_group_caches()


class GroupPool:
    """One mesh's share in the process groups of the process.

    Args:
        defaults: options of every group, where an axis sets nothing else.
        share: whether groups over the same ranks with the same options are one object.

    Attributes:
        end_mesh: ends the mesh, for a reason in words; it ends with its pool.

    Raises:
        MeshError: there is no default process group yet.
    """

    def __init__(self, *, defaults: GroupOptions | None = None, share: bool = True) -> None:
        if not dist.is_initialized():
            raise MeshError("there is no default process group; call namedmesh.launch.init() first")
        self.registry = state_of_default_group(GroupRegistry)
        self.rank = self.registry.rank
        self.share = share
        self.defaults = defaults or GroupOptions()
        self.closed = False
        self.end_mesh: Callable[[str], None] | None = None
        self._keys: dict[tuple[Layout, tuple[str, ...], GroupOptions], GroupKey] = {}
        # Those of this mesh and those that it borrows, in the order they came.
        self.groups: dict[GroupKey, Communicator] = {}
        # What every rank knows to exist, also where it is no member: whole partitions, and irregular sets. They are
        # needed where the default group is bound to a device.
        self.partitions: list[tuple[Layout, tuple[str, ...], GroupKey]] = []
        self.sets_created: set[GroupKey] = set()
        self.borrow(tuple(range(self.registry.world_size)), dist.group.WORLD, "world")
        self.registry.pools.append(self)

    def key(self, ranks: tuple[int, ...], options: GroupOptions, label: str) -> GroupKey:
        """Return the key of a group over some ranks; its label is part of it where the group is not shared."""
        if len(ranks) == 1:
            return GroupKey(ranks)
        timeout = options.timeout or self.defaults.timeout or self.registry.default_timeout
        if self.registry.default_backend == "fake":
            timeout = None  # nothing waits there, and its groups have none
        use = "" if self.share and options.share else label
        backends = by_device(self.backend(options))
        return GroupKey(ranks, backends, timeout, options.nccl, options.high_priority, use)

    def key_over(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> GroupKey:
        """Return the key of this rank's group over some axes; it is worked out once."""
        which = layout, tuple(axes), options
        key = self._keys.get(which)
        if key is None:
            key = self._keys[which] = self.key(layout.group(self.rank, *axes), options, "_".join(axes))
        return key

    def backend(self, options: GroupOptions) -> str:
        """Return the backend of a group with these options, as torch takes it."""
        return (options.backend or self.defaults.backend or self.registry.default_backend).lower()

    def gloo_options(self, options: GroupOptions) -> GroupOptions:
        """Return the options of the gloo group beside a group with the given options; the same where that is gloo."""
        if self.registry.default_backend == "fake":
            return options  # there is nobody to connect to, and nothing to send
        return GroupOptions(
            backend="gloo", timeout=options.timeout, gloo_twin=options.gloo_twin, share=options.share
        )

    def find(
        self, layout: Layout, axes: Sequence[str], options: GroupOptions, *, in_process: bool = False
    ) -> dist.ProcessGroup | None:
        """Return this mesh's group over ``axes``; with ``in_process``, or that of another mesh, which would be shared."""
        key = self.key_over(layout, axes, options)
        known = self.groups.get(key)
        if in_process and (known is None or not known.exists):
            known = self.registry.groups.get(key)
        return known.group if known is not None and known.exists else None

    def borrow(self, ranks: tuple[int, ...], group: Any, label: str) -> None:
        """Take note of a group that somebody else owns; it is used in this mesh, and never destroyed."""
        key = GroupKey(ranks)
        if len(ranks) > 1:
            key = GroupKey(ranks, by_device(dist.get_backend(group)), self.registry.default_timeout)
        self.groups[key] = Communicator(label, ranks, group, owned=False)

    def close(self) -> None:
        """Release every group: the last mesh that uses one destroys it, in the reverse order of creation."""
        if self.closed:
            return
        owned = [group for group in self.groups.values() if group.owned]
        self.end("was closed")
        self.registry.release(owned)

    def end(self, reason: str) -> None:
        """Drop every reference to groups, of the mesh too. Without :meth:`close`, they are destroyed already."""
        self.closed = True
        self.registry.pools.remove(self)
        if self.end_mesh is not None:
            self.end_mesh(reason)
        self.groups.clear()
        self.partitions.clear()
        self.sets_created.clear()


@cache
def by_device(backend: str) -> tuple[tuple[str, str], ...]:
    """Return the backend of each type of device: the same for every spelling."""
    return tuple(normalized_backend(backend).items())


def new_group_by_everyone(ranks: Sequence[int] | None, **options: Any) -> Any:
    """Return a group that belongs to who asks for it; every rank of the world calls this, with the same ranks.

    Only for dialects whose contract it is; a mesh creates its groups through its pool.
    """
    return dist.new_group(None if ranks is None else list(ranks), **options)
