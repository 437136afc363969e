"""The one place that creates process groups: for one mesh, while its ranks agree on it."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from namedmesh._torch import (
    bound_device,
    connects_without_blocking,
    default_store,
    default_timeout_is_torchs,
    group_name,
    new_connection,
    new_group_among_members,
)
from namedmesh.agreement import Agreement
from namedmesh.errors import LayoutError, MeshError, listing, ranks_in_words
from namedmesh.groups import SharedGroup, by_device, label_of, member_of
from namedmesh.launch import hosts_store
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from namedmesh.groups import GroupKey, GroupPool
    from namedmesh.layout import Layout

__all__ = ["GroupMaker", "agreed", "group_of_one"]

_EXISTING = "_existing groups"


class GroupMaker:
    """Creates groups for one mesh; every rank that takes part in the agreement calls the same methods in one order.

    Args:
        pool: the mesh's share in the groups of the process.
        agreement: of the ranks, before which nothing is created.
    """

    def __init__(self, pool: GroupPool, agreement: Agreement) -> None:
        self.pool, self.agreement = pool, agreement
        self._addresses = agreement.exchange = _Addresses()
        self._before = set(pool.groups), len(pool.partitions), set(pool.sets_created)

    def compare(
        self,
        request: Mapping[str, str],
        groups: Iterable[tuple[Layout, Sequence[str], GroupOptions]] = (),
    ) -> None:
        """Compare a request with the other ranks, before the first group is created; communicates.

        Args:
            request: what was asked for, field by field.
            groups: the groups over whole axes that will be made.

        Raises:
            AgreementError: the ranks do not agree.
        """
        self.pool.check_open()
        wanted = list(groups)
        existing = [self._token_of(*group) for group in wanted]
        backends = {part for _, _, options in wanted for _, part in by_device(self.pool.resolved(options)[0])}
        absent = sorted(name for name in backends if not dist.is_backend_available(name))
        if absent:
            raise LayoutError(
                f"this torch was built without {', '.join(absent)}; choose a backend that it has, or another torch"
            )
        connected = dict(by_device(self.pool.registry.default_backend)).values()
        self.agreement.compare(
            {"call": self.agreement.call, **request, _EXISTING: json.dumps(existing)},
            lambda requests: _existing_on_some_only(
                self.agreement.call, wanted, requests, self.agreement.ranks
            ),
            uses_gloo="gloo" in backends and "gloo" not in connected,
        )

    def discard(self) -> None:
        """Release what was created here: it did not come to an end on every rank."""
        pool = self.pool
        keys, partitions, sets_created = self._before
        created = [pool.groups.pop(key) for key in set(pool.groups) - keys]
        del pool.partitions[partitions:]
        pool.sets_created &= sets_created
        pool.registry.release(created)

    def create_root_mesh(
        self, layout: Layout, device_type: str, options: Mapping[str, GroupOptions]
    ) -> DeviceMesh:
        """Return the mesh over all axes of a layout.

        With a bound device torch's ``init_device_mesh`` creates the groups, one split for each axis, wherever it
        can express the request: for a layout over the whole world, without options, whose groups do not exist.
        Otherwise only the members of a group create it: ``init_device_mesh`` has every rank create every group.
        Axes of size 1 are left out: it would create a group of one for each rank of each of them.
        """
        pool = self.pool
        large = tuple(axis for axis, size in layout.items() if size > 1)
        plain = (
            bound_device() is not None
            and layout.world_size == pool.registry.world_size
            and pool.share
            and not any(axis in options for axis in layout)
            and pool.defaults == GroupOptions()
            and default_timeout_is_torchs()
            and not any(self._token_of(layout, (axis,), pool.defaults) for axis in large)
        )
        if plain and large:
            sizes = tuple(layout[axis] for axis in large)
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=large)
            for axis in large:
                group = mesh.get_group(axis)
                if group is not dist.group.WORLD:
                    pool.partitions.append((layout, (axis,), pool.defaults))
                    self._share(layout.group(pool.rank, axis), axis, pool.defaults, partial(_given, group))
            if len(large) == len(layout):
                return mesh
        return self.mesh_from_groups(layout, device_type, options)

    def mesh_from_groups(
        self, layout: Layout, device_type: str, options: Mapping[str, GroupOptions]
    ) -> DeviceMesh:
        """Return a mesh over all axes of a layout, on groups that exist or are created now."""
        groups = [self.make(layout, (axis,), options.get(axis, self.pool.defaults)) for axis in layout.axes]
        with torch.device("cpu"):
            ranks = (
                torch.arange(layout.world_size, dtype=torch.int).reshape(layout.sizes) + layout.rank_offset
            )
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=layout.axes)

    def make(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup:
        """Return this rank's group over ``axes``, created unless it exists."""
        pool = self.pool
        pool.check_open()
        ranks, label = layout.group(pool.rank, *axes), label_of(axes)
        borrowed = pool.find_borrowed(ranks, options)
        if borrowed is not None:
            return borrowed
        if len(ranks) == 1:
            return self.alone()
        pool.partitions.append((layout, tuple(axes), options))
        if bound_device() is None:
            return self._make_among_members(ranks, label, options)
        arguments = pool.arguments(options, label)
        return self._share(ranks, label, options, lambda _: self._split(layout, axes, arguments))

    def make_sets(
        self, sets: Iterable[Sequence[int]], label: str, options: GroupOptions | None = None
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return groups over irregular sets of ranks, such as the first and the last stage of each pipeline.

        Every rank of the mesh calls this with the same sets in the same order, also those in none of them (of
        the *world*, where the default group is bound to a device). The sets of this rank are returned. A set of
        one rank costs no communicator.
        """
        pool = self.pool
        pool.check_open()
        options = options or pool.defaults
        requested = list(dict.fromkeys(tuple(sorted(members)) for members in sets))
        if bound_device() is not None:
            return self._make_sets_together(requested, label, options)
        # The members of a set know the same groups over it, so they agree on whether it has to be created.
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in requested:
            if pool.rank not in ranks:
                continue
            if len(ranks) == 1:
                mine[ranks] = self.alone()
            else:
                borrowed = pool.find_borrowed(ranks, options)
                mine[ranks] = borrowed or self._make_among_members(ranks, label, options)
        return mine

    def alone(self) -> dist.ProcessGroup:
        """Return the group of this rank alone, one for all axes of size 1."""
        pool, ranks = self.pool, (self.pool.rank,)
        if bound_device() is None:
            return pool.find_borrowed(ranks, pool.defaults) or self._make_among_members(
                ranks, "self", pool.defaults
            )
        everyone = [[rank] for rank in range(pool.registry.world_size)]
        return self._share(
            ranks,
            "self",
            pool.defaults,
            lambda _: dist.split_group(split_ranks=everyone, group_desc="namedmesh:self"),
        )

    # How a group comes about.

    def _share(
        self,
        ranks: tuple[int, ...],
        label: str,
        options: GroupOptions,
        create: Callable[[object], object],
    ) -> dist.ProcessGroup:
        """Return the group of this mesh over some ranks, that of another mesh where it has one, or a new one.

        ``create`` is called with what the group is known by, for a new one.
        """
        pool, registry = self.pool, self.pool.registry
        key = pool.key(ranks, options, label)
        known = pool.groups.get(key)
        if known is None or not known.exists:
            identity = pool.key(ranks, options, f"{label} {self.agreement.token}")
            with registry.lock:
                shared = registry.groups.get(identity)
                if shared is None or not shared.exists:
                    group = member_of(create(identity), pool.rank)
                    shared = SharedGroup(label, ranks, self.agreement.token, group)
                    registry.groups[identity] = shared
                shared.users += 1
            known = pool.groups[key] = shared
        return known.group

    def _make_among_members(
        self, ranks: tuple[int, ...], label: str, options: GroupOptions
    ) -> dist.ProcessGroup:
        """Return a group that only its members create. Members that have it know it under the same agreement.

        gloo connects at the first collective, as NCCL does: a member that closes its mesh at once would break one
        that is still connecting.
        """
        arguments, token = self.pool.arguments(options, label), self.agreement.token
        if not token:
            raise MeshError(f"a group over {ranks_in_words(ranks)} is needed before the ranks agreed on it")

        def create(identity: object) -> dist.ProcessGroup:
            name = group_name(ranks, identity, by_device(arguments["backend"]))
            later = connects_without_blocking(arguments["backend"])
            return new_group_among_members(
                ranks,
                name=name,
                store_prefix=f"namedmesh/groups/{token}",
                addresses=self._addresses.store_for(name, ranks, self.pool.rank) if later else None,
                **arguments,
            )

        return self._share(ranks, label, options, create)

    def _make_sets_together(
        self, requested: Sequence[tuple[int, ...]], label: str, options: GroupOptions
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Create every set on every rank of the world, as a bound default group needs it."""
        pool = self.pool
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if any(len(ranks) == 1 for ranks in requested):
            alone = self.alone()
            mine = {ranks: alone for ranks in requested if ranks == (pool.rank,)}
        for ranks in requested:
            if len(ranks) == 1:
                continue
            if len(ranks) == pool.registry.world_size and (borrowed := pool.find_borrowed(ranks, options)):
                mine[ranks] = borrowed
                continue
            key = pool.shared_key(ranks, options)
            if self._exists_for_all(key, options):
                if pool.rank in ranks:
                    mine[ranks] = pool.groups[key].group
                continue
            group = dist.new_group(list(ranks), **pool.arguments(options, label))
            if pool.shares(options):
                pool.sets_created.add(key)
            if pool.rank in ranks:
                mine[ranks] = self._share(ranks, label, options, partial(_given, group))
        return mine

    def _exists_for_all(self, key: GroupKey, options: GroupOptions) -> bool:
        """Return whether the members of a set have a group of this mesh; the same answer on every rank."""
        pool, ranks = self.pool, key[0]
        if not pool.shares(options):
            return False
        if key in pool.sets_created:
            return True
        return any(
            layout.group(ranks[0], *axes) == ranks and pool.shared_key(ranks, theirs) == key
            for layout, axes, theirs in pool.partitions
            if ranks[0] in layout.ranks
        )

    def _split(self, layout: Layout, axes: Sequence[str], arguments: dict[str, Any]) -> object:
        """Create the whole partition in one call: with a bound device a communicator is split off the default one."""
        pool = self.pool
        world = pool.registry.world_size
        if layout.world_size != world:
            raise MeshError(
                f"{layout} is a part of the world of {world} ranks, and the default group is bound "
                f"to {bound_device()}: every rank would have to take part; start without bind_device (or device_id)"
            )
        backend = arguments.pop("backend")
        if by_device(backend) != by_device(pool.registry.default_backend):
            # Only the default backend can be split; any other is created by everyone, group by group.
            groups = layout.groups(*axes)
            made = [dist.new_group(list(ranks), backend=backend, **arguments) for ranks in groups]
            return made[groups.index(layout.group(pool.rank, *axes))]
        split_ranks = [list(ranks) for ranks in layout.groups(*axes)]
        return dist.split_group(split_ranks=split_ranks, **arguments)

    def _token_of(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> str:
        """Return the agreement under which the group over ``axes`` was created that would be shared; empty if none."""
        ranks = layout.group(self.pool.rank, *axes)
        shared = self.pool.find_shared(ranks, options) if len(ranks) > 1 else None
        return "" if shared is None else shared.token


class _Addresses:
    """The addresses of new gloo groups, which their members tell each other when all have created them.

    gloo connects at the first collective, and would ask the store of the job then, without a limit.
    """

    def __init__(self) -> None:
        self._new: list[tuple[str, tuple[int, ...], int, Any]] = []

    def store_for(self, name: str, ranks: tuple[int, ...], rank: int) -> dist.Store:
        """Return where a new group of this name keeps the addresses of its members, by network interface and rank."""
        store = dist.HashStore()
        self._new.append((name, ranks, ranks.index(rank), store))
        return store

    def texts(self) -> dict[str, str]:
        """Return this rank's addresses, by group: one for each network interface."""
        return {
            _address_key(name, place): " ".join(
                store.get(f"{card}/{place}").hex() for card in range(store.num_keys())
            )
            for name, _, place, store in self._new
        }

    def keys(self) -> list[str]:
        """Return the keys of the other members' addresses."""
        return [
            _address_key(name, other)
            for name, ranks, place, _ in self._new
            for other in range(len(ranks))
            if other != place
        ]

    def take(self, texts: Mapping[str, str]) -> None:
        """Let gloo find the addresses of the other members."""
        for name, ranks, place, store in self._new:
            for other in range(len(ranks)):
                if other != place:
                    for card, address in enumerate(texts[_address_key(name, other)].split()):
                        store.set(f"{card}/{other}", bytes.fromhex(address))


def _address_key(name: str, place: int) -> str:
    return f"address/{name}/{place}"


@contextmanager
def agreed(
    pool: GroupPool, call: str, ranks: range, *, timeout: timedelta | None = None
) -> Iterator[GroupMaker]:
    """Create groups: a context in which all ranks compare what they were asked for, and then create the same.

    What leaves it with an exception on one rank fails on all of them, and no group is left over.

    Args:
        pool: the mesh's share in the groups of the process.
        call: what is being called, for messages.
        ranks: the ranks that take part: every one of them calls this.
        timeout: how long to wait for the others; by default as long as a collective of the pool's groups may take.

    Raises:
        AgreementError: the ranks do not agree, some did not come in time, or one failed.
    """
    registry, known = pool.registry, pool.agreements
    shared = default_store()

    def connect(_: timedelta) -> dist.Store:
        if known.store is None:
            known.store = new_connection(shared)
        return known.store

    # What is no time is refused under the agreement.
    own = timeout if isinstance(timeout, timedelta) and timeout > timedelta(0) else None
    agreement = Agreement(
        call,
        ranks=ranks,
        rank=pool.rank,
        store=known.store or connect,
        known=known,
        timeout=own or pool.defaults.timeout or registry.default_timeout or timedelta(minutes=30),
        hosts_store=hosts_store(os.environ, pool.rank),
        alone=registry.default_backend == "fake",
    )
    maker = GroupMaker(pool, agreement)
    try:
        with agreement:
            yield maker
    except BaseException:
        maker.discard()
        raise


def group_of_one(pool: GroupPool) -> dist.ProcessGroup:
    """Return the group of this rank alone; where the default group is bound to a device, every rank calls this."""
    with agreed(pool, "a group of one rank", range(pool.rank, pool.rank + 1)) as maker:
        maker.compare({})
        return maker.alone()


def _given(group: object, _: object) -> object:
    """Return a group that exists."""
    return group


def _existing_on_some_only(
    call: str,
    wanted: Sequence[tuple[Layout, Sequence[str], GroupOptions]],
    requests: Sequence[Mapping[str, str]],
    ranks: range,
) -> list[str]:
    """Return one sentence for each group that only some of its members have already, with the same request."""
    tokens = [json.loads(request[_EXISTING]) for request in requests]
    problems = []
    for place, (layout, axes, _) in enumerate(wanted):
        for members in layout.groups(*axes):
            held = {rank: tokens[rank - ranks.start][place] for rank in members}
            if len(set(held.values())) > 1:
                holders = [rank for rank, token in held.items() if token]
                problems.append(
                    f"{call} needs the group over {' x '.join(axes)} of ranks {listing(members)}, and it still belongs to "
                    f"an earlier mesh on {ranks_in_words(holders)} only; close() that mesh on every rank"
                )
    return problems[:8]
