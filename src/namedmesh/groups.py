"""The process groups of this process: at most one communicator for each set of ranks and options.

The groups belong to the default group and are shared by all meshes of the process: a :class:`GroupRegistry` counts
their users, and the last one destroys. A :class:`GroupPool` is one mesh's share in them. Nothing here creates a group but
the one of this rank alone; :class:`namedmesh.making.GroupMaker` does, under an agreement of the ranks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh._torch import (
    default_timeout,
    destroy_group,
    forget_group_caches,
    is_registered,
    state_of_default_group,
)
from namedmesh.attempts import Agreements
from namedmesh.errors import MeshError
from namedmesh.options import GroupOptions, nccl_options, normalized_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from namedmesh.layout import Layout

__all__ = ["Communicator", "GroupPool", "GroupRegistry", "new_group_by_everyone"]

GroupKey = tuple[tuple[int, ...], object, "timedelta | None", object, bool]
"""What distinguishes the groups that may be shared: ranks, backends, timeout, NCCL settings, priority."""


@dataclass(frozen=True)
class Communicator:
    """A process group of a pool: what it is for, who is in it, and whether the pool's meshes created it."""

    label: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    owned: bool


@dataclass(eq=False)
class SharedGroup:
    """A process group that meshes of this process share.

    Attributes:
        label: what it is for.
        ranks: its ranks, ascending.
        token: the agreement under which it was created.
        group: the group.
        users: how many meshes use it; the last one destroys it.
    """

    label: str
    ranks: tuple[int, ...]
    token: str
    group: dist.ProcessGroup
    users: int = 0

    @property
    def exists(self) -> bool:
        """Whether torch still has the group, and nobody destroyed it by hand."""
        return is_registered(self.group)


class GroupRegistry:
    """The process groups that the meshes of this process share; one for each default group, and ends with it.

    Attributes:
        lock: guards every table of groups.
        groups: the groups by ranks and options, in the order they were created.
        users: what to end with the default group: meshes and pools.
        ended: whether the default group was destroyed.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_backend = dist.get_backend()
        self.default_timeout = default_timeout()
        self.lock = threading.RLock()
        self.groups: dict[object, SharedGroup] = {}
        self.users: dict[int, Callable[[], None]] = {}
        self.ended = False

    @classmethod
    def current(cls) -> GroupRegistry:
        """Return the registry of the default group.

        Raises:
            MeshError: there is no default process group.
        """
        if not dist.is_initialized():
            raise MeshError("there is no default process group; call namedmesh.launch.init() first")
        return state_of_default_group(cls)

    def release(self, groups: Iterable[SharedGroup]) -> None:
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
                    destroy_group(group.group)
                except Exception as error:  # noqa: BLE001, PERF203  raised below
                    errors.append(error)
        if ended:
            forget_group_caches()
        if errors:
            raise errors[0]

    def end(self) -> None:
        """Drop every reference to groups: torch is destroying the default group, and all others with it."""
        self.ended = True
        for end in list(self.users.values()):
            end()
        self.users.clear()
        self.groups.clear()
        forget_group_caches()


class GroupPool:
    """One mesh's share in the process groups of the process.

    Args:
        defaults: options of every group, where an axis sets nothing else.
        share: whether groups over the same ranks with the same options are one object.

    Raises:
        MeshError: there is no default process group yet.
    """

    def __init__(self, *, defaults: GroupOptions | None = None, share: bool = True) -> None:
        self.registry = GroupRegistry.current()
        self.rank = self.registry.rank
        self.share = share
        self.defaults = defaults or GroupOptions()
        self.closed = False
        # This mesh's groups, by ranks and options and, where they are not shared, by label.
        self.groups: dict[object, SharedGroup] = {}
        # Groups that somebody else owns, by their ranks; the default group, or one as large, by None.
        self._borrowed: dict[tuple[int, ...] | None, tuple[str, dist.ProcessGroup]] = {}
        # What every rank knows to exist, also where it is no member: whole partitions, and irregular sets.
        self.partitions: list[tuple[Layout, tuple[str, ...], GroupOptions]] = []
        self.sets_created: set[GroupKey] = set()
        self.borrow(tuple(range(self.registry.world_size)), member_of(dist.group.WORLD, self.rank), "world")
        self.registry.users[id(self)] = self.end

    @property
    def agreements(self) -> Agreements:
        """What this process knows of the agreements of the default group; its lock is held during one."""
        return state_of_default_group(Agreements)

    @property
    def communicators(self) -> list[Communicator]:
        """The process groups that this rank holds through this pool."""
        borrowed = [
            Communicator(label, tuple(dist.get_process_group_ranks(group)), group, owned=False)
            for label, group in self._borrowed.values()
        ]
        own = [group for group in self.groups.values() if group.exists]
        return [*borrowed, *(Communicator(each.label, each.ranks, each.group, owned=True) for each in own)]

    # Finding: nothing here communicates.

    def find(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup | None:
        """Return this rank's group over ``axes``, if this mesh has one."""
        ranks = layout.group(self.rank, *axes)
        borrowed = self.find_borrowed(ranks, options)
        if borrowed is not None:
            return borrowed
        known = self.groups.get(self.key(ranks, options, label_of(axes)))
        return None if known is None else known.group

    def find_in_process(
        self, layout: Layout, axes: Sequence[str], options: GroupOptions
    ) -> dist.ProcessGroup | None:
        """Return the group over ``axes`` that would be shared, of this mesh or another; None where it would be created."""
        ranks = layout.group(self.rank, *axes)
        borrowed = self.find_borrowed(ranks, options)
        shared = self.find_shared(ranks, options)
        return borrowed or (None if shared is None else shared.group)

    def find_shared(self, ranks: tuple[int, ...], options: GroupOptions) -> SharedGroup | None:
        """Return the group over some ranks that the meshes of this process share, if there is one."""
        if not self.shares(options):
            return None
        known = self.registry.groups.get(self.shared_key(ranks, options))
        return known if known is not None and known.exists else None

    def find_borrowed(self, ranks: tuple[int, ...], options: GroupOptions) -> dist.ProcessGroup | None:
        """Return the group of somebody else that has these ranks and options, if groups are shared."""
        _, group = self._borrowed.get(self._borrowed_key(ranks), ("", None))
        if group is None or len(ranks) == 1:
            return group
        backend, timeout = self.resolved(options)
        fits = (
            self.shares(options)
            and by_device(backend) == by_device(dist.get_backend(group))
            and timeout in (None, self.registry.default_timeout)
            and not options.nccl
            and not options.high_priority
        )
        return group if fits else None

    def borrow(self, ranks: tuple[int, ...], group: dist.ProcessGroup, label: str) -> None:
        """Take note of a group that somebody else owns; it is used in this mesh, and never destroyed."""
        self._borrowed[self._borrowed_key(ranks)] = label, group

    def check_open(self) -> None:
        """Raise a MeshError where the pool was closed, or the default group destroyed."""
        if self.closed or self.registry.ended:
            raise MeshError("the mesh was closed; make another with init_mesh()")

    def close(self) -> None:
        """Release every group: the last mesh that uses one destroys it, in the reverse order of creation."""
        if self.closed:
            return
        self.closed = True
        used = {id(group): group for group in self.groups.values()}
        self.end()
        self.registry.users.pop(id(self), None)
        self.registry.release(used.values())

    def end(self) -> None:
        """Drop every reference to groups. Without :meth:`close`, they are destroyed already."""
        self.groups.clear()
        self._borrowed.clear()
        self.partitions.clear()
        self.sets_created.clear()

    # What a group is known by, and made with.

    def gloo_options(self, options: GroupOptions) -> GroupOptions:
        """Return the options of the gloo group beside a group with the given options; the same where that is gloo."""
        if self.registry.default_backend == "fake":
            return options  # there is nobody to connect to, and nothing to send
        return GroupOptions(
            backend="gloo", timeout=options.timeout, gloo_twin=options.gloo_twin, share=options.share
        )

    def arguments(self, options: GroupOptions, label: str) -> dict[str, Any]:
        """Return the keywords with which torch creates a group of these options."""
        backend, timeout = self.resolved(options)
        arguments: dict[str, Any] = {
            "backend": backend,
            "timeout": timeout,
            "group_desc": f"namedmesh:{label}",
        }
        if "nccl" in dict(by_device(backend)).values() and (options.nccl or options.high_priority):
            arguments["pg_options"] = nccl_options(options, timeout)
        return arguments

    def resolved(self, options: GroupOptions) -> tuple[str, timedelta | None]:
        """Return the backend and the timeout of a group with these options."""
        registry = self.registry
        backend = (options.backend or self.defaults.backend or registry.default_backend).lower()
        timeout = options.timeout or self.defaults.timeout or registry.default_timeout
        if registry.default_backend == "fake":
            timeout = None  # nothing waits there, and its groups have none
        return backend, timeout

    def shares(self, options: GroupOptions) -> bool:
        """Return whether a group with these options may be shared."""
        return self.share and options.share

    def key(self, ranks: tuple[int, ...], options: GroupOptions, label: str) -> object:
        """Return the key of a group: its ranks and options, and its label where it is not shared."""
        if len(ranks) == 1:
            return ranks
        key = self.shared_key(ranks, options)
        return key if self.shares(options) else (label, key)

    def shared_key(self, ranks: tuple[int, ...], options: GroupOptions) -> GroupKey:
        """Return the ranks and options of a group."""
        backend, timeout = self.resolved(options)
        return (ranks, by_device(backend), timeout, options.nccl, options.high_priority)

    def _borrowed_key(self, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the ranks, or None for the whole world."""
        if self.registry.world_size == 1:
            return (self.rank,)
        return None if len(ranks) == self.registry.world_size else ranks


def label_of(axes: Sequence[str]) -> str:
    """Return the label of a group over some axes."""
    return "_".join(axes)


def member_of(group: object, rank: int) -> dist.ProcessGroup:
    """Return a group that this rank is in, of a function of torch that may return something else to others."""
    if not isinstance(group, dist.ProcessGroup):
        raise MeshError(f"torch made no group for rank {rank}, which is one of its ranks")
    return group


@cache
def by_device(backend: str) -> tuple[tuple[str, str], ...]:
    """Return the backend of each type of device: the same for every spelling."""
    return tuple(sorted(normalized_backend(backend).items()))


def new_group_by_everyone(ranks: Sequence[int] | None, **options: Any) -> Any:
    """Return a group that belongs to who asks for it; every rank of the world calls this, with the same ranks.

    Only for dialects whose contract it is; a mesh creates its groups through its pool.
    """
    return dist.new_group(None if ranks is None else list(ranks), **options)
