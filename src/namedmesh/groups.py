"""The one place that creates process groups: at most one communicator for each set of ranks and options.

The groups belong to the default group and are shared by all meshes of the process: a :class:`GroupRegistry` counts
their users, and the last one destroys. A :class:`GroupPool` is one mesh's share in them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from namedmesh._torch import (
    bound_device,
    connects_without_blocking,
    default_timeout,
    default_timeout_is_torchs,
    forget_group_caches,
    group_name,
    state_of_default_group,
)
from namedmesh.consistency import Held, check_consistency
from namedmesh.errors import MeshError
from namedmesh.lazy_group import LazyGroup
from namedmesh.options import GroupOptions, nccl_options, normalized_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from namedmesh.layout import Layout

__all__ = ["Communicator", "GroupPool", "GroupRegistry", "new_group_by_everyone"]

_Key = tuple[tuple[int, ...], object, "timedelta | None", object, bool]


@dataclass(frozen=True)
class Communicator:
    """A process group of a pool: what it is for, who is in it, and whether the pool's meshes created it."""

    label: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    owned: bool


class GroupRegistry:
    """The process groups that the meshes of this process share; one for each default group, and ends with it.

    Attributes:
        lock: guards every table of groups.
        calls: held by a call that communicates, so that calls of several threads follow one another.
        groups: the groups by ranks and options, in the order they were reserved.
        users: what to end with the default group: meshes and pools.
        ended: whether the default group was destroyed.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_backend = dist.get_backend()
        self.default_timeout = default_timeout()
        self.lock = threading.RLock()
        self.calls = threading.RLock()
        self.groups: dict[object, LazyGroup] = {}
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

    def release(self, groups: Iterable[LazyGroup]) -> None:
        """Release groups; those without users are destroyed, the one that was reserved last first.

        One that cannot be destroyed does not keep the others; its error is raised in the end.
        """
        errors: list[Exception] = []
        with self.lock:
            for group in groups:
                group.users -= 1
            unused = [key for key, group in self.groups.items() if group.users < 1]
            destroyed = False
            for key in reversed(unused):
                try:
                    destroyed |= self.groups.pop(key).destroy()
                except Exception as error:  # noqa: BLE001, PERF203  raised below
                    errors.append(error)
        if destroyed:
            forget_group_caches()
        if errors:
            raise errors[0]

    def end(self) -> None:
        """Drop every reference to groups: torch is destroying the default group, and all others with it."""
        self.ended = True
        for end in list(self.users.values()):
            end()
        self.users.clear()
        for group in self.groups.values():
            group.end()
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
        self.token = ""
        self.closed = False
        # This mesh's groups, by ranks and options and, where they are not shared, by label.
        self._groups: dict[object, LazyGroup] = {}
        # Groups that somebody else owns, by their ranks; the default group, or one as large, by None.
        self._borrowed: dict[tuple[int, ...] | None, tuple[str, dist.ProcessGroup]] = {}
        # What every rank knows to exist, also where it is no member: whole partitions, and irregular sets.
        self._partitions: list[tuple[Layout, tuple[str, ...], GroupOptions]] = []
        self._sets_created: set[_Key] = set()
        self._borrowed[self._borrowed_key(None)] = "world", self._member(dist.group.WORLD)
        self.registry.users[id(self)] = self.end

    @property
    def communicators(self) -> list[Communicator]:
        """The process groups that this rank holds through this pool."""
        created = [(lazy, lazy.created) for lazy in self._groups.values()]
        return [
            *(
                Communicator(label, tuple(dist.get_process_group_ranks(group)), group, owned=False)
                for label, group in self._borrowed.values()
            ),
            *(Communicator(lazy.label, lazy.ranks, group, owned=True) for lazy, group in created if group),
        ]

    def check_consistency(
        self,
        call: str,
        request: Mapping[str, str],
        *,
        ranks: range,
        requested: Iterable[tuple[Layout, Sequence[str], GroupOptions]] = (),
    ) -> None:
        """Compare a request with the other ranks before groups are created for it; communicates.

        Args:
            call: what is being called.
            request: what was asked for, field by field.
            ranks: the ranks that take part.
            requested: the layout, axes and options of the groups that the call will ask for.

        Raises:
            AgreementError: the ranks do not agree.
        """
        held = [self._held(*group) for group in requested]
        self.token = check_consistency(
            call, request, ranks=ranks, rank=self.rank, timeout=self.defaults.timeout, held=held
        )

    # Finding: nothing here communicates.

    def find(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup | None:
        """Return this rank's group over ``axes``, if this mesh has one."""
        ranks = layout.group(self.rank, *axes)
        borrowed = self._find_borrowed(ranks, options)
        if borrowed is not None:
            return borrowed
        lazy = self._groups.get(self._key(ranks, options, _label(axes)))
        return None if lazy is None else lazy.get_or_create()

    def existing(
        self, layout: Layout, axes: Sequence[str], options: GroupOptions
    ) -> dist.ProcessGroup | None:
        """Return the group that :meth:`make` would return, of this mesh or another; None where it would create one."""
        ranks = layout.group(self.rank, *axes)
        borrowed = self._find_borrowed(ranks, options)
        lazy = self.registry.groups.get(self._key(ranks, options, f"{_label(axes)} {self.token}"))
        return borrowed or (None if lazy is None else lazy.created)

    # Creating: every rank of the layout calls these, in the same order.

    def primary(self, layout: Layout, device_type: str, options: Mapping[str, GroupOptions]) -> DeviceMesh:
        """Return the mesh over all axes of a layout; communicates.

        With a bound device torch's ``init_device_mesh`` creates the groups, one split for each axis, wherever it
        can express the request: for a layout over the whole world, without options, whose groups do not exist.
        Otherwise only the members of a group create it: ``init_device_mesh`` has every rank create every group.
        Axes of size 1 are left out: it would create a group of one for each rank of each of them.
        """
        large = tuple(axis for axis, size in layout.items() if size > 1)
        plain = (
            bound_device() is not None
            and layout.world_size == self.registry.world_size
            and self.share
            and not any(axis in options for axis in layout)
            and self.defaults == GroupOptions()
            and default_timeout_is_torchs()
            and not any(self._held(layout, (axis,), self.defaults).token for axis in large)
        )
        if plain and large:
            mesh = init_device_mesh(device_type, tuple(layout[axis] for axis in large), mesh_dim_names=large)
            for axis in large:
                group = mesh.get_group(axis)
                if group is not dist.group.WORLD:
                    self._partitions.append((layout, (axis,), self.defaults))
                    lazy = self._reserve(layout.group(self.rank, axis), axis, self.defaults)
                    lazy.create_with(lambda group=group: group)  # type: ignore[misc]
            if len(large) == len(layout):
                return mesh
        return self.over(layout, device_type, options)

    def over(self, layout: Layout, device_type: str, options: Mapping[str, GroupOptions]) -> DeviceMesh:
        """Return a mesh over all axes of a layout, on groups that exist or are created now; communicates."""
        groups = [self.make(layout, (axis,), options.get(axis, self.defaults)) for axis in layout.axes]
        with torch.device("cpu"):
            ranks = (
                torch.arange(layout.world_size, dtype=torch.int).reshape(layout.sizes) + layout.rank_offset
            )
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=layout.axes)

    def make(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup:
        """Return this rank's group over ``axes``, created unless it exists; communicates."""
        self._check_open()
        ranks = layout.group(self.rank, *axes)
        borrowed = self._find_borrowed(ranks, options)
        if borrowed is not None:
            return borrowed
        if len(ranks) == 1:
            return self._make_alone()
        self._partitions.append((layout, tuple(axes), options))
        lazy = self._reserve(ranks, _label(axes), options)
        if lazy.created is None and bound_device() is not None:
            lazy.create_with(lambda: self._split(layout, axes, self._arguments(options, _label(axes))))
        return self._created(lazy)

    def reserve(
        self, layout: Layout, axes: Sequence[str], options: GroupOptions
    ) -> dist.ProcessGroup | LazyGroup:
        """Return this rank's group over ``axes``, to be created on first use where that does not block on other ranks.

        Communicates where it does: with a bound default group, or backends that connect at once.
        """
        ranks = layout.group(self.rank, *axes)
        if len(ranks) == 1 or self._find_borrowed(ranks, options) or self._has_to_create_now(options):
            return self.make(layout, axes, options)
        self._partitions.append((layout, tuple(axes), options))
        lazy = self._reserve(ranks, _label(axes), options)
        return lazy.created or lazy

    def reserve_set(
        self, sets: Sequence[Sequence[int]], label: str, options: GroupOptions
    ) -> dist.ProcessGroup | LazyGroup | None:
        """Reserve a group for sets as :meth:`make_sets` takes them, of which each rank is in one at most; or create it."""
        mine = next((tuple(sorted(members)) for members in sets if self.rank in members), None)
        # Whether it has to be created now is the same on all members, and with a bound group on all ranks.
        if bound_device() is not None or (
            mine is not None and (len(mine) == 1 or self._has_to_create_now(options))
        ):
            return self.make_sets(sets, label, options).get(mine or ())
        if mine is None:
            return None
        borrowed = self._find_borrowed(mine, options)
        if borrowed is not None:
            return borrowed
        lazy = self._reserve(mine, label, options)
        return lazy.created or lazy

    def gloo_options(self, options: GroupOptions) -> GroupOptions:
        """Return the options of the gloo group beside a group with the given options; the same where that is gloo."""
        if self.registry.default_backend == "fake":
            return options  # there is nobody to connect to, and nothing to send
        return replace(options, backend="gloo", nccl=(), high_priority=False)

    def make_sets(
        self, sets: Iterable[Sequence[int]], label: str, options: GroupOptions | None = None
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return groups over irregular sets of ranks, such as the first and the last stage of each pipeline.

        Every rank of the mesh calls this with the same sets in the same order, also those in none of them (of
        the *world*, where the default group is bound to a device); communicates. The sets of this rank are
        returned. A set of one rank costs no communicator.
        """
        self._check_open()
        options = options or self.defaults
        requested = list(dict.fromkeys(tuple(sorted(members)) for members in sets))
        if bound_device() is not None:
            return self._make_sets_together(requested, label, options)
        # The members of a set know the same groups over it, so they agree on whether it has to be created.
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in requested:
            if self.rank not in ranks:
                continue
            if len(ranks) == 1:
                mine[ranks] = self._make_alone()
            else:
                borrowed = self._find_borrowed(ranks, options)
                mine[ranks] = borrowed or self._created(self._reserve(ranks, label, options))
        return mine

    def _make_sets_together(
        self, requested: Sequence[tuple[int, ...]], label: str, options: GroupOptions
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Create every set on every rank of the world, as a bound default group needs it."""
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if any(len(ranks) == 1 for ranks in requested):
            alone = self._make_alone()
            mine = {ranks: alone for ranks in requested if ranks == (self.rank,)}
        for ranks in requested:
            if len(ranks) == 1:
                continue
            member = self.rank in ranks
            if len(ranks) == self.registry.world_size and (borrowed := self._find_borrowed(ranks, options)):
                mine[ranks] = borrowed
                continue
            key = self._shared_key(ranks, options)
            if self._exists_for_all(key, options):
                if member:
                    mine[ranks] = self._groups[key].get_or_create()
                continue
            group = dist.new_group(list(ranks), **self._arguments(options, label))
            if self._shares(options):
                self._sets_created.add(key)
            if member:
                lazy = self._reserve(ranks, label, replace(options, share=False))
                lazy.create_with(lambda group=group: self._member(group))  # type: ignore[misc]
                self._groups[key] = lazy
                mine[ranks] = self._created(lazy)
        return mine

    def _exists_for_all(self, key: _Key, options: GroupOptions) -> bool:
        """Return whether the members of a set have a group of this mesh; the same answer on every rank."""
        ranks = key[0]
        return self._shares(options) and (
            key in self._sets_created
            or any(
                layout.group(ranks[0], *axes) == ranks and self._shared_key(ranks, theirs) == key
                for layout, axes, theirs in self._partitions
                if ranks[0] in layout.ranks
            )
        )

    def borrow(self, ranks: tuple[int, ...], group: dist.ProcessGroup, label: str) -> None:
        """Take note of a group that somebody else owns; it is used in this mesh, and never destroyed."""
        self._borrowed[self._borrowed_key(ranks)] = label, group

    def close(self) -> None:
        """Release every group: the last mesh that uses one destroys it, in the reverse order of reservation."""
        if self.closed:
            return
        self.closed = True
        used = {id(lazy): lazy for lazy in self._groups.values()}
        self.end()
        self.registry.users.pop(id(self), None)
        self.registry.release(used.values())

    def end(self) -> None:
        """Drop every reference to groups. Without :meth:`close`, they are destroyed already."""
        self._groups.clear()
        self._borrowed.clear()
        self._partitions.clear()
        self._sets_created.clear()

    # How a group comes about.

    def _check_open(self) -> None:
        if self.closed or self.registry.ended:
            raise MeshError("the mesh was closed; make another with init_mesh()")

    def _reserve(self, ranks: tuple[int, ...], label: str, options: GroupOptions) -> LazyGroup:
        """Return the group of this mesh over some ranks, that of another mesh where it has one, or a new one."""
        self._check_open()
        key = self._key(ranks, options, label)
        if key not in self._groups:
            shared = self._key(ranks, options, f"{label} {self.token}")
            with self.registry.lock:
                lazy = self.registry.groups.get(shared)
                if lazy is None or lazy.destroyed_by_hand:
                    lazy = self.registry.groups[shared] = self._lazy(ranks, shared, label, options)
                lazy.users += 1
            self._groups[key] = lazy
        return self._groups[key]

    def _lazy(self, ranks: tuple[int, ...], identity: object, label: str, options: GroupOptions) -> LazyGroup:
        arguments = self._arguments(options, label)
        name = group_name(ranks, identity, _by_device(arguments["backend"]))
        return LazyGroup(ranks, self.rank, label, self.token, name, arguments, self.registry.lock)

    def _created(self, lazy: LazyGroup) -> dist.ProcessGroup:
        """Return a group that has been reserved, created now; blocks until its members connect, if it has to.

        gloo connects at the first collective, as NCCL does: a member that closes its mesh at once would break one
        that is still connecting.
        """
        return lazy.created or lazy.create(connect=not lazy.connects_later)

    def _split(self, layout: Layout, axes: Sequence[str], arguments: dict[str, Any]) -> dist.ProcessGroup:
        """Create the whole partition in one call: with a bound device a communicator is split off the default one."""
        world = self.registry.world_size
        if layout.world_size != world:
            raise MeshError(
                f"{layout} is a part of the world of {world} ranks, and the default group is bound "
                f"to {bound_device()}: every rank would have to take part; start without bind_device (or device_id)"
            )
        backend = arguments.pop("backend")
        if _by_device(backend) != _by_device(self.registry.default_backend):
            # Only the default backend can be split; any other is created by everyone, group by group.
            groups = layout.groups(*axes)
            made = [dist.new_group(list(ranks), backend=backend, **arguments) for ranks in groups]
            return self._member(made[groups.index(layout.group(self.rank, *axes))])
        split_ranks = [list(ranks) for ranks in layout.groups(*axes)]
        return self._member(dist.split_group(split_ranks=split_ranks, **arguments))

    def _make_alone(self) -> dist.ProcessGroup:
        """Return the group of this rank alone, one for all axes of size 1."""
        lazy = self._reserve((self.rank,), "self", self.defaults)
        if lazy.created is None and bound_device() is not None:
            alone = [[rank] for rank in range(self.registry.world_size)]
            lazy.create_with(
                lambda: self._member(dist.split_group(split_ranks=alone, group_desc="namedmesh:self"))
            )
        return self._created(lazy)

    def _member(self, group: object) -> dist.ProcessGroup:
        """Return a group that this rank is in, of a function of torch that may return something else to others."""
        if not isinstance(group, dist.ProcessGroup):
            raise MeshError(f"torch made no group for rank {self.rank}, which is one of its ranks")
        return group

    # What a group is known by.

    def _borrowed_key(self, ranks: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the ranks, or None for the whole world."""
        if self.registry.world_size == 1:
            return (self.rank,)
        return None if ranks is None or len(ranks) == self.registry.world_size else ranks

    def _find_borrowed(self, ranks: tuple[int, ...], options: GroupOptions) -> dist.ProcessGroup | None:
        """Return the group of somebody else that has these ranks and options, if groups are shared."""
        _, group = self._borrowed.get(self._borrowed_key(ranks), ("", None))
        if group is None or len(ranks) == 1:
            return group
        backend, timeout = self._resolved(options)
        fits = (
            self._shares(options)
            and _by_device(backend) == _by_device(dist.get_backend(group))
            and timeout in (None, self.registry.default_timeout)
            and not options.nccl
            and not options.high_priority
        )
        return group if fits else None

    def _held(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> Held:
        """Return which group over ``axes`` this rank holds already, through whichever mesh."""
        ranks = layout.group(self.rank, *axes)
        lazy = self.registry.groups.get(self._key(ranks, options, ""))
        shared = len(ranks) > 1 and self._shares(options)
        token = lazy.token if shared and lazy is not None and not lazy.destroyed_by_hand else ""
        return Held(" x ".join(axes), token, lambda: layout.groups(*axes))

    def _arguments(self, options: GroupOptions, label: str) -> dict[str, Any]:
        backend, timeout = self._resolved(options)
        arguments: dict[str, Any] = {
            "backend": backend,
            "timeout": timeout,
            "group_desc": f"namedmesh:{label}",
        }
        if "nccl" in dict(_by_device(backend)).values() and (options.nccl or options.high_priority):
            arguments["pg_options"] = nccl_options(options, timeout)
        return arguments

    def _has_to_create_now(self, options: GroupOptions) -> bool:
        return (
            bound_device() is not None
            or not self._shares(options)
            or not connects_without_blocking(self._resolved(options)[0])
        )

    def _resolved(self, options: GroupOptions) -> tuple[str, timedelta | None]:
        registry = self.registry
        backend = (options.backend or self.defaults.backend or registry.default_backend).lower()
        timeout = options.timeout or self.defaults.timeout or registry.default_timeout
        if registry.default_backend == "fake":
            timeout = None  # nothing waits there, and its groups have none
        return backend, timeout

    def _shares(self, options: GroupOptions) -> bool:
        return self.share and options.share

    def _key(self, ranks: tuple[int, ...], options: GroupOptions, label: str) -> object:
        """Return the key of a group: its ranks and options, and its label where it is not shared."""
        if len(ranks) == 1:
            return ranks
        key = self._shared_key(ranks, options)
        return key if self._shares(options) else (label, key)

    def _shared_key(self, ranks: tuple[int, ...], options: GroupOptions) -> _Key:
        backend, timeout = self._resolved(options)
        return (ranks, _by_device(backend), timeout, options.nccl, options.high_priority)


def _label(axes: Sequence[str]) -> str:
    return "_".join(axes)


@cache
def _by_device(backend: str) -> tuple[tuple[str, str], ...]:
    """Return the backend of each type of device: the same for every spelling."""
    return tuple(sorted(normalized_backend(backend).items()))


def new_group_by_everyone(ranks: Sequence[int] | None, **options: Any) -> Any:
    """Return a group that belongs to who asks for it; every rank of the world calls this, with the same ranks.

    Only for dialects whose contract it is; a mesh creates its groups through its pool.
    """
    return dist.new_group(None if ranks is None else list(ranks), **options)
