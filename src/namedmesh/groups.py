"""The one place that makes process groups: at most one communicator for each set of ranks and options.

A pool belongs to one mesh. It makes groups a whole partition of the mesh at a time, in the order it is asked,
which is the same on every rank; it remembers what it made, hands the same object out for the same ranks, and
destroys exactly that when it is closed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from namedmesh._torch import (
    bound_device,
    default_timeout,
    default_timeout_is_torchs,
    new_group_among_members,
    reserved_name,
    waits_for_nobody,
)
from namedmesh.errors import MeshError
from namedmesh.options import GroupOptions, nccl_options
from namedmesh.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import timedelta

    from namedmesh.layout import Layout

__all__ = ["Communicator", "GroupPool", "new_group_by_everyone"]

_Key = tuple[tuple[int, ...], str, "timedelta | None", object, bool]


@dataclass(frozen=True)
class Communicator:
    """A process group of a pool: what it is for, who is in it, and whether the pool made it."""

    label: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    owned: bool


class GroupPool:
    """The process groups of one mesh.

    Args:
        defaults: options of every group, where an axis sets nothing else.
        share: whether groups over the same ranks with the same options are one object.

    Raises:
        MeshError: there is no default process group yet.
    """

    def __init__(self, *, defaults: GroupOptions | None = None, share: bool = True) -> None:
        if not dist.is_initialized():
            raise MeshError("there is no default process group; call namedmesh.launch.init() first")
        self.rank = dist.get_rank()
        self.share = share
        self.defaults = defaults or GroupOptions()
        self._world_ranks = tuple(range(dist.get_world_size()))
        self._default_backend = dist.get_backend()
        self._default_timeout = default_timeout()
        self._known: dict[_Key, dist.ProcessGroup] = {}
        self._unshared: dict[tuple[str, _Key], dist.ProcessGroup] = {}
        # Names that are reserved for groups that nobody has asked for yet.
        self._promised: dict[_Key, Promise] = {}
        # What every rank knows to exist, also where it is no member: whole partitions, and irregular sets.
        self._partitions: list[tuple[Layout, tuple[str, ...], GroupOptions]] = []
        self._sets_made: set[_Key] = set()
        self._singleton: dist.ProcessGroup | None = None
        self.communicators: list[Communicator] = []
        self.borrow(self._world_ranks, self._member(dist.group.WORLD), "world")

    # Finding: nothing here communicates.

    def find(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup | None:
        """This rank's group over ``axes``, if there is one."""
        ranks = layout.group(self.rank, *axes)
        if len(ranks) == 1:
            return self._singleton
        key = self._key(ranks, options)
        if not self._shares(options):
            return self._unshared.get((_label(axes), key))
        promise = self._promised.get(key)
        return self._known.get(key) if promise is None else promise.group()

    # Making: every rank of the layout calls these, in the same order.

    def primary(self, layout: Layout, device_type: str, options: Mapping[str, GroupOptions]) -> DeviceMesh:
        """The mesh over all axes of a layout; communicates.

        torch's ``init_device_mesh`` makes the groups wherever it can say what is wanted: for a layout over
        the whole world without options. Axes of size 1 are left out of it, because it would make a group of
        one for each rank of each of them; they share one group.
        """
        plain = (
            layout.world_size == len(self._world_ranks)
            and self.share
            and not any(axis in options for axis in layout)
            and self._plain(self.defaults)
        )
        large = tuple(axis for axis, size in layout.items() if size > 1)
        if plain and large:
            made = init_device_mesh(device_type, tuple(layout[axis] for axis in large), mesh_dim_names=large)
            for axis in large:
                self._adopt_made(layout, axis, made.get_group(axis))
            if len(large) == len(layout):
                return made
        return self.over(layout, device_type, options)

    def over(self, layout: Layout, device_type: str, options: Mapping[str, GroupOptions]) -> DeviceMesh:
        """A mesh over all axes of a layout, on groups that exist or are made now; communicates."""
        groups = [self.make(layout, (axis,), options.get(axis, self.defaults)) for axis in layout.axes]
        with torch.device("cpu"):
            ranks = (
                torch.arange(layout.world_size, dtype=torch.int).reshape(layout.sizes) + layout.rank_offset
            )
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=layout.axes)

    def make(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup:
        """This rank's group over ``axes``, made unless it exists; communicates."""
        found = self.find(layout, axes, options)
        if found is not None:
            return found
        ranks = layout.group(self.rank, *axes)
        if len(ranks) == 1:
            return self._make_singleton()
        label = _label(axes)
        group = self._new(layout, axes, ranks, label, options)
        if self._shares(options):
            self._known[self._key(ranks, options)] = group
            self._partitions.append((layout, tuple(axes), options))
        else:
            self._unshared[label, self._key(ranks, options)] = group
        return group

    def promise(
        self, layout: Layout, axes: Sequence[str], options: GroupOptions
    ) -> dist.ProcessGroup | Promise:
        """This rank's group over ``axes``, or the promise of one that can be made without the other ranks.

        Communicates where there is no such way: with a bound default group, or backends that connect at once.
        """
        ranks = layout.group(self.rank, *axes)
        if self._has_to_make_now(ranks, options):
            return self.make(layout, axes, options)
        promise = self._promise(ranks, _label(axes), options)
        self._partitions.append((layout, tuple(axes), options))
        return promise

    def promise_set(
        self, sets: Sequence[Sequence[int]], label: str, options: GroupOptions
    ) -> dist.ProcessGroup | Promise | None:
        """As :meth:`make_sets`, for sets of which each rank is in one at most: its group, or the promise of it."""
        mine = next((tuple(sorted(members)) for members in sets if self.rank in members), None)
        # Whether it has to be made now is the same on all members, and with a bound group on all ranks.
        if bound_device() is not None or (mine is not None and self._has_to_make_now(mine, options)):
            return self.make_sets(sets, label, options).get(mine or ())
        return None if mine is None else self._promise(mine, label, options)

    def _has_to_make_now(self, ranks: tuple[int, ...], options: GroupOptions) -> bool:
        return (
            len(ranks) == 1
            or bound_device() is not None
            or not self._shares(options)
            or self._key(ranks, options) in self._known
            or not waits_for_nobody(self._resolved(options)[0])
        )

    def _promise(self, ranks: tuple[int, ...], label: str, options: GroupOptions) -> Promise:
        key = self._key(ranks, options)
        if key not in self._promised:
            name = reserved_name(ranks)
            self._promised[key] = Promise(ranks, self.rank, lambda: self._keep(key, name, label, options))
        return self._promised[key]

    def _keep(self, key: _Key, name: str, label: str, options: GroupOptions) -> dist.ProcessGroup:
        """Keep a promise."""
        if key not in self._known:
            group = new_group_among_members(key[0], name=name, **self._arguments(options, label))
            self._note_set(key, group, label, options)
        return self._known[key]

    def make_twin(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup:
        """This rank's gloo group over ``axes``; it is the group itself where that is gloo; communicates."""
        return self.make(layout, axes, self.twin_options(options))

    def find_twin(
        self, layout: Layout, axes: Sequence[str], options: GroupOptions
    ) -> dist.ProcessGroup | None:
        """The gloo group over ``axes``, if there is one."""
        return self.find(layout, axes, self.twin_options(options))

    def twin_options(self, options: GroupOptions) -> GroupOptions:
        """The options of the gloo group beside one with the given options."""
        if self._default_backend == "fake":
            return options  # there is nobody to connect to, and nothing to send
        return replace(options, backend="gloo", nccl=(), high_priority=False)

    def make_sets(
        self, sets: Iterable[Sequence[int]], label: str, options: GroupOptions | None = None
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Groups over irregular sets of ranks, such as the first and the last stage of each pipeline.

        Every rank of the mesh calls this with the same sets in the same order, also those in none of them (of
        the *world*, where the default group is bound to a device); communicates. The sets of this rank are
        returned. A set of one rank costs no communicator.
        """
        options = options or self.defaults
        wanted = list(dict.fromkeys(tuple(sorted(members)) for members in sets))
        if bound_device() is not None:
            return self._make_sets_together(wanted, label, options)
        # The members of a set know the same groups over it, so they agree on whether it has to be made.
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in wanted:
            if self.rank not in ranks:
                continue
            key = self._key(ranks, options)
            if len(ranks) == 1:
                mine[ranks] = self._make_singleton()
            elif self._shares(options) and (key in self._known or key in self._promised):
                mine[ranks] = self._known.get(key) or self._promised[key].group()
            else:
                mine[ranks] = new_group_among_members(ranks, **self._arguments(options, label))
                self._note_set(key, mine[ranks], label, options)
        return mine

    def _make_sets_together(
        self, wanted: Sequence[tuple[int, ...]], label: str, options: GroupOptions
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Every rank of the world makes every set, as a bound default group needs it."""
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if any(len(ranks) == 1 for ranks in wanted):
            alone = self._make_singleton()
            mine = {ranks: alone for ranks in wanted if ranks == (self.rank,)}
        for ranks in wanted:
            key = self._key(ranks, options)
            if len(ranks) == 1:
                continue
            if self._exists_for_all(key, options):
                if self.rank in ranks:
                    mine[ranks] = self._known[key]
                continue
            group = dist.new_group(list(ranks), **self._arguments(options, label))
            if self._shares(options):
                self._sets_made.add(key)
            if self.rank in ranks:
                mine[ranks] = self._member(group)
                self._note_set(key, mine[ranks], label, options)
        return mine

    def _exists_for_all(self, key: _Key, options: GroupOptions) -> bool:
        """Whether the members of a set have a group already; every rank comes to the same answer."""
        if not self._shares(options):
            return False
        ranks = key[0]
        if ranks == self._world_ranks:  # every rank is a member, and knows its own
            return key in self._known
        return key in self._sets_made or any(
            layout.group(ranks[0], *axes) == ranks and self._key(ranks, theirs) == key
            for layout, axes, theirs in self._partitions
            if ranks[0] in layout.ranks
        )

    def _note_set(self, key: _Key, group: dist.ProcessGroup, label: str, options: GroupOptions) -> None:
        self._record(label, key[0], group, owned=True)
        if self._shares(options):
            self._known[key] = group

    def borrow(self, ranks: tuple[int, ...], group: dist.ProcessGroup, label: str) -> None:
        """Take note of a group that somebody else owns; it is shared like any other, and never destroyed."""
        backend = dist.get_backend(group)
        timeout = self._default_timeout
        self._known.setdefault((ranks, backend, timeout, (), False), group)
        if len(ranks) == 1 and self._singleton is None:
            self._singleton = group
        self._record(label, ranks, group, owned=False)

    def close(self) -> None:
        """Destroy what this pool made, the last first; never the default group, never a borrowed one."""
        if dist.is_initialized():
            for made in reversed(self.communicators):
                if made.owned:
                    dist.destroy_process_group(made.group)
        self.communicators.clear()
        self._known.clear()
        self._unshared.clear()
        self._promised.clear()
        self._partitions.clear()
        self._sets_made.clear()
        self._singleton = None

    # How a group comes about.

    def _new(
        self, layout: Layout, axes: Sequence[str], ranks: tuple[int, ...], label: str, options: GroupOptions
    ) -> dist.ProcessGroup:
        arguments = self._arguments(options, label)
        if bound_device() is None:
            group = new_group_among_members(ranks, **arguments)
        else:
            group = self._split(layout, axes, arguments)
        self._record(label, ranks, group, owned=True)
        return group

    def _split(self, layout: Layout, axes: Sequence[str], arguments: dict[str, Any]) -> dist.ProcessGroup:
        """One call for the whole partition: with a bound device a communicator is split off the default one."""
        if layout.world_size != len(self._world_ranks):
            raise MeshError(
                f"{layout} is a part of the world of {len(self._world_ranks)} ranks, and the default group is bound "
                f"to {bound_device()}: every rank would have to take part; start without bind_device (or device_id)"
            )
        backend = arguments.pop("backend")
        if backend != self._default_backend:
            # Only the default backend can be split; any other is made by everyone, group by group.
            groups = layout.groups(*axes)
            made = [dist.new_group(list(ranks), backend=backend, **arguments) for ranks in groups]
            return self._member(made[groups.index(layout.group(self.rank, *axes))])
        split_ranks = [list(ranks) for ranks in layout.groups(*axes)]
        return self._member(dist.split_group(split_ranks=split_ranks, **arguments))

    def _make_singleton(self) -> dist.ProcessGroup:
        """The group of this rank alone, one for all axes of size 1."""
        if self._singleton is not None:
            return self._singleton
        if bound_device() is None:
            group = new_group_among_members((self.rank,), group_desc="namedmesh:self")
        else:
            alone = [[rank] for rank in self._world_ranks]
            group = self._member(dist.split_group(split_ranks=alone, group_desc="namedmesh:self"))
        self._record("self", (self.rank,), group, owned=True)
        self._singleton = group
        return group

    def _member(self, group: object) -> dist.ProcessGroup:
        """A group that this rank is in, of a function of torch that may return something else to others."""
        if not isinstance(group, dist.ProcessGroup):
            raise MeshError(f"torch made no group for rank {self.rank}, which is one of its ranks")
        return group

    def _arguments(self, options: GroupOptions, label: str) -> dict[str, Any]:
        backend, timeout = self._resolved(options)
        arguments: dict[str, Any] = {
            "backend": backend,
            "timeout": timeout,
            "group_desc": f"namedmesh:{label}",
        }
        if "nccl" in backend and (options.nccl or options.high_priority):
            arguments["pg_options"] = nccl_options(options, timeout)
        return arguments

    def _resolved(self, options: GroupOptions) -> tuple[str, timedelta | None]:
        backend = options.backend or self.defaults.backend or self._default_backend
        timeout = options.timeout or self.defaults.timeout or self._default_timeout
        if self._default_backend == "fake":
            timeout = None  # nothing waits there, and its groups do not tell one
        return backend, timeout

    def _plain(self, options: GroupOptions) -> bool:
        """Whether ``init_device_mesh``, which knows no options, would make the groups that are wanted."""
        return options == GroupOptions() and default_timeout_is_torchs()

    def _shares(self, options: GroupOptions) -> bool:
        return self.share and options.share

    def _key(self, ranks: tuple[int, ...], options: GroupOptions) -> _Key:
        return (ranks, *self._resolved(options), options.nccl, options.high_priority)

    def _adopt_made(self, layout: Layout, axis: str, group: dist.ProcessGroup) -> None:
        """Take over a group that ``init_device_mesh`` made for this pool."""
        ranks = layout.group(self.rank, axis)
        self._partitions.append((layout, (axis,), self.defaults))
        if group is not dist.group.WORLD:
            self._known[self._key(ranks, self.defaults)] = group
            self._record(axis, ranks, group, owned=True)

    def _record(self, label: str, ranks: tuple[int, ...], group: dist.ProcessGroup, *, owned: bool) -> None:
        self.communicators.append(Communicator(label, ranks, group, owned))


def _label(axes: Sequence[str]) -> str:
    return "_".join(axes)


def new_group_by_everyone(ranks: Sequence[int] | None, **options: Any) -> Any:
    """A group that belongs to who asks for it; every rank of the world calls this, with the same ranks.

    Only for dialects whose contract it is; a mesh makes its groups through its pool.
    """
    return dist.new_group(None if ranks is None else list(ranks), **options)
