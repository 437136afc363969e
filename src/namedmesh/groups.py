"""The process groups of this process: at most one communicator for each set of ranks and options.

The groups belong to the default group and are shared by all meshes of the process: a :class:`GroupRegistry` counts
their users, and the last one destroys. A :class:`GroupPool` is one mesh's share in them. A :class:`GroupMaker`, the one
place that creates groups, does so for one mesh while its ranks agree on it.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from namedmesh._torch import (
    bound_device,
    connects_without_blocking,
    default_store,
    default_timeout,
    default_timeout_is_torchs,
    forget_group_caches,
    group_name,
    is_registered,
    new_connection,
    new_group_among_members,
    state_of_default_group,
)
from namedmesh.agreement import Agreement, Agreements
from namedmesh.errors import LayoutError, MeshError, listing, ranks_in_words
from namedmesh.launch import hosts_store
from namedmesh.options import GroupOptions, nccl_options, normalized_backend
from namedmesh.views import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from namedmesh.layout import Layout

__all__ = [
    "Communicator",
    "GroupKey",
    "GroupMaker",
    "GroupPool",
    "GroupRegistry",
    "agreed",
    "group_of_one",
    "new_group_by_everyone",
]

_EXISTING = "_existing groups"


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
        """Return the key of this rank's group over some axes."""
        return self.key(layout.group(self.rank, *axes), options, "_".join(axes))

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

    def find(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup | None:
        """Return this mesh's group over ``axes``, if it has one."""
        known = self.groups.get(self.key_over(layout, axes, options))
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


class GroupMaker:
    """Creates groups for one mesh; every rank that takes part in the agreement calls the same methods in one order.

    Args:
        pool: the mesh's share in the groups of the process.
        agreement: of the ranks, before which nothing is created.
    """

    def __init__(self, pool: GroupPool, agreement: Agreement) -> None:
        self.pool, self.agreement = pool, agreement
        # Keys, not groups: an error's traceback, which may be kept for long, must keep none of them.
        self._taken: set[GroupKey] = set()
        self._partitions_before, self._sets_before = len(pool.partitions), set(pool.sets_created)

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
        pool, agreement = self.pool, self.agreement
        if pool.closed or pool.registry.ended:
            raise MeshError("the mesh was closed; make another with init_mesh()")
        wanted = list(groups)
        backends: set[str] = set()
        tokens: list[str] = []
        for layout, axes, options in wanted:
            backends.update(dict(by_device(pool.backend(options))).values())
            key = pool.key_over(layout, axes, options)
            known = pool.registry.groups.get(key) if len(key.ranks) > 1 else None
            tokens.append(known.token if known is not None and known.exists else "")
        absent = [name for name in sorted(backends) if not dist.is_backend_available(name)]
        if absent:
            raise LayoutError(
                f"this torch was built without {', '.join(absent)}; choose a backend that it has, or another torch"
            )
        connected = dict(by_device(pool.registry.default_backend)).values()
        agreement.compare(
            {"call": agreement.call, **request, _EXISTING: json.dumps(tokens)},
            lambda requests: _existing_on_some_only(agreement.call, wanted, requests, agreement.ranks),
            uses_gloo="gloo" in backends and "gloo" not in connected,
        )

    def discard(self) -> None:
        """Release what was created here: it did not come to an end on every rank."""
        pool = self.pool
        del pool.partitions[self._partitions_before :]
        pool.sets_created &= self._sets_before
        pool.registry.release([pool.groups.pop(key) for key in self._taken])

    def create_view(self, layout: Layout, device_type: str, options: Mapping[str, GroupOptions]) -> View:
        """Return a layout with groups over all its axes that exist or are created now, and gloo groups beside."""
        pool, mesh = self.pool, None
        if bound_device() is not None and self._is_torchs(layout, options):
            mesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=layout.axes)
        groups: dict[str, dist.ProcessGroup] = {}
        for axis in layout.axes:
            of_axis = options.get(axis, pool.defaults)
            create = None if mesh is None else partial(mesh.get_group, axis)
            groups[axis] = self.make(layout, (axis,), of_axis, create)
            if of_axis.gloo_twin:
                self.make(layout, (axis,), pool.gloo_options(of_axis))
        return View(layout, device_type, groups, mesh)

    def _is_torchs(self, layout: Layout, options: Mapping[str, GroupOptions]) -> bool:
        """Return whether torch's ``init_device_mesh`` makes what is asked for, and nothing more.

        With a bound device it splits one communicator off for each axis. It makes groups of one rank, takes no timeout, and
        nothing that exists.
        """
        pool = self.pool
        if layout.world_size != pool.registry.world_size:
            return False
        if not pool.share or options or pool.defaults != GroupOptions() or not default_timeout_is_torchs():
            return False
        keys = [pool.key_over(layout, (axis,), pool.defaults) for axis in layout.axes]
        return all(len(key.ranks) > 1 and key not in pool.registry.groups for key in keys)

    def make(
        self,
        layout: Layout,
        axes: Sequence[str],
        options: GroupOptions,
        create: Callable[[], Any] | None = None,
    ) -> dist.ProcessGroup:
        """Return this rank's group over ``axes``; unless it exists, it is what ``create`` returns, or created here."""
        key = self.pool.key_over(layout, axes, options)
        if len(key.ranks) == 1:
            return self.alone()
        if bound_device() is not None:
            self.pool.partitions.append((layout, tuple(axes), key))
            create = create or partial(self._split, layout, axes, key, options)
        return self._get_or_create(key, "_".join(axes), options, create)

    def make_sets(
        self, sets: Iterable[Sequence[int]], label: str, options: GroupOptions | None = None
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return groups over irregular sets of ranks, such as the first and the last stage of each pipeline.

        Every rank of the mesh calls this with the same sets in the same order, also those in none of them (of
        the *world*, where the default group is bound to a device). The sets of this rank are returned. A set of
        one rank costs no communicator.
        """
        pool = self.pool
        options = options or pool.defaults
        requested = dict.fromkeys(tuple(sorted(members)) for members in sets)
        bound = bound_device() is not None
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if bound and any(len(ranks) == 1 for ranks in requested):
            self.alone()  # everyone takes part
        for ranks in requested:
            if len(ranks) > 1 and bound:
                group = self._make_set_with_everyone(ranks, label, options)
            elif pool.rank not in ranks:
                continue
            elif len(ranks) == 1:
                group = self.alone()
            else:  # the members of a set know the same groups over it, so they agree on whether it has to be created
                group = self._get_or_create(pool.key(ranks, options, label), label, options)
            if group is not None:
                mine[ranks] = group
        return mine

    def alone(self) -> dist.ProcessGroup:
        """Return the group of this rank alone, one for all axes of size 1."""
        pool = self.pool
        create: Callable[[], Any] | None = None
        if bound_device() is not None:
            everyone = [[rank] for rank in range(pool.registry.world_size)]
            create = partial(dist.split_group, split_ranks=everyone, group_desc="namedmesh:self")
        return self._get_or_create(GroupKey((pool.rank,)), "self", pool.defaults, create)

    # How a group comes about.

    def _get_or_create(
        self, key: GroupKey, label: str, options: GroupOptions, create: Callable[[], Any] | None = None
    ) -> dist.ProcessGroup:
        """Return the group of this mesh that has a key, that of another mesh where it has one, or a new one.

        A new one is what ``create`` returns; without it only the members create it.
        """
        pool, registry, token = self.pool, self.pool.registry, self.agreement.token
        known = pool.groups.get(key)
        if known is None or not known.exists:
            if not token:
                raise MeshError(
                    f"a group over {ranks_in_words(key.ranks)} is needed before the ranks agreed on it"
                )
            with registry.lock:
                # One that is not shared is another one under each agreement.
                identity = key._replace(use=f"{key.use} {token}") if key.use else key
                known = registry.groups.get(identity)
                if known is None or not known.exists:
                    group = create() if create is not None else self._create(identity, label, options)
                    known = Communicator(label, key.ranks, group, owned=True, token=token)
                    registry.groups[identity] = known
                known.users += 1
            pool.groups[key] = known
            self._taken.add(key)
        return known.group

    def _create(self, key: GroupKey, label: str, options: GroupOptions) -> dist.ProcessGroup:
        """Create a group that only its members create.

        gloo connects at the first collective, as NCCL does: a member that closes its mesh at once would break one
        that is still connecting. The members tell each other its addresses when all have created the group: gloo would
        ask the store of the job, without a limit.
        """
        arguments, name, ranks = self._arguments(key, label, options), group_name(key), key.ranks
        store: Any = dist.HashStore() if connects_without_blocking(arguments["backend"]) else None
        group = new_group_among_members(
            ranks,
            name=name,
            store_prefix=f"namedmesh/groups/{self.agreement.token}",
            addresses=store,
            **arguments,
        )

        def take(rank: int, text: str) -> None:
            for card, address in enumerate(text.split()):
                store.set(f"{card}/{ranks.index(rank)}", bytes.fromhex(address))

        if store is not None:
            place = ranks.index(self.pool.rank)
            cards = [store.get(f"{card}/{place}").hex() for card in range(store.num_keys())]
            self.agreement.exchange(name, " ".join(cards), ranks, take)
        return group

    def _arguments(self, key: GroupKey, label: str, options: GroupOptions) -> dict[str, Any]:
        """Return the keywords with which torch creates a group."""
        backend = self.pool.backend(options)
        arguments: dict[str, Any] = {
            "backend": backend,
            "timeout": key.timeout,
            "group_desc": f"namedmesh:{label}",
        }
        if "nccl" in dict(by_device(backend)).values() and (options.nccl or options.high_priority):
            arguments["pg_options"] = nccl_options(options, key.timeout)
        return arguments

    def _make_set_with_everyone(
        self, ranks: tuple[int, ...], label: str, options: GroupOptions
    ) -> dist.ProcessGroup | None:
        """Return the group over a set of ranks that every rank of the world creates, as a bound default group needs it."""
        pool = self.pool
        key = pool.key(ranks, options, label)
        exists = key in pool.groups if len(ranks) == pool.registry.world_size else self._exists_for_all(key)
        group: Any = None
        if not exists:
            group = dist.new_group(list(ranks), **self._arguments(key, label, options))
            pool.sets_created.add(key)
        return self._get_or_create(key, label, options, lambda: group) if pool.rank in ranks else None

    def _exists_for_all(self, key: GroupKey) -> bool:
        """Return whether the members of a set have a group of this mesh; the same answer on every rank."""
        first = key.ranks[0]
        for layout, axes, theirs in self.pool.partitions:
            if first in layout.ranks and key == theirs._replace(ranks=layout.group(first, *axes)):
                return True
        return key in self.pool.sets_created

    def _split(self, layout: Layout, axes: Sequence[str], key: GroupKey, options: GroupOptions) -> object:
        """Create the whole partition in one call: with a bound device a communicator is split off the default one."""
        registry = self.pool.registry
        if layout.world_size != registry.world_size:
            raise MeshError(
                f"{layout} is a part of the world of {registry.world_size} ranks, and the default group is bound "
                f"to {bound_device()}: every rank would have to take part; start without bind_device (or device_id)"
            )
        groups = layout.groups(*axes)
        arguments = self._arguments(key, "_".join(axes), options)
        if key.backends == by_device(registry.default_backend):
            del arguments["backend"]
            return dist.split_group(split_ranks=[list(ranks) for ranks in groups], **arguments)
        # Only the default backend can be split; any other is created by everyone, group by group.
        made = [dist.new_group(list(ranks), **arguments) for ranks in groups]
        return made[groups.index(key.ranks)]


@contextmanager
def agreed(
    pool: GroupPool, call: str, ranks: range, *, timeout: timedelta | None = None
) -> Iterator[GroupMaker]:
    """Create groups: a context in which all ranks compare what they were asked for, and then create the same.

    What leaves it with an exception on one rank fails on all of them, and no group is left over; nor is a mesh that
    was made inside.

    Args:
        pool: the mesh's share in the groups of the process.
        call: what is being called, for messages.
        ranks: the ranks that take part: every one of them calls this.
        timeout: how long to wait for the others; by default as long as a collective of the pool's groups may take.

    Raises:
        AgreementError: the ranks do not agree, some did not come in time, or one failed.
    """
    registry = pool.registry
    # What is no time is refused under the agreement.
    own = timeout if isinstance(timeout, timedelta) and timeout > timedelta(0) else None
    agreement = Agreement(
        call,
        ranks=ranks,
        rank=pool.rank,
        known=registry.agreements,
        timeout=own or pool.defaults.timeout or registry.default_timeout or timedelta(minutes=30),
        hosts_store=hosts_store(os.environ, pool.rank),
        alone=registry.default_backend == "fake",
    )
    maker, has_mesh = GroupMaker(pool, agreement), pool.end_mesh is not None
    try:
        with agreement:
            yield maker
    except BaseException:
        if has_mesh:
            maker.discard()
        else:
            pool.close()
        raise


def group_of_one(pool: GroupPool) -> dist.ProcessGroup:
    """Return the group of this rank alone; where the default group is bound to a device, every rank calls this."""
    with agreed(pool, "a group of one rank", range(pool.rank, pool.rank + 1)) as maker:
        maker.compare({})
        return maker.alone()


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


def new_group_by_everyone(ranks: Sequence[int] | None, **options: Any) -> Any:
    """Return a group that belongs to who asks for it; every rank of the world calls this, with the same ranks.

    Only for dialects whose contract it is; a mesh creates its groups through its pool.
    """
    return dist.new_group(None if ranks is None else list(ranks), **options)
