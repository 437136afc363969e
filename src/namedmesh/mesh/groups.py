"""The cache of process groups: one for each partition of the world and set of options.

Every rank of the world creates every group, in the same order. The cache of groups therefore has
the same content on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from namedmesh._errors import MeshError
from namedmesh._torch.execution import constant_under_compile
from namedmesh._torch.groups import (
    get_backend_default_timeout,
    get_bound_device,
    get_timeout,
    is_registered,
    own_group_requests,
    set_group_timeout,
)
from namedmesh.layout.layout import Layout, make_partition_key
from namedmesh.layout.sizes import format_axes
from namedmesh.mesh.options import (
    GroupOptions,
    make_backend_override,
    make_group_arguments,
    merge_options,
)


class GroupKey(NamedTuple):
    """The key of a process group in the cache: equal keys mean the same communicator.

    Attributes:
        partition: the ranks of all groups over the same axes, as
            :func:`namedmesh.layout.layout.make_partition_key` returns them.
        options: the normalized options; None for the group of one rank, which has none.
        use: the purpose of a group that is not shared; empty for a shared group. If it is a str,
            only the members have created the group.
    """

    partition: Hashable
    options: GroupOptions | None
    use: str | tuple[str | int, ...] = ()


@dataclass(eq=False)
class Communicator:
    """A process group that meshes use.

    Attributes:
        label: the names of the axes for which the group was created.
        ranks: the global ranks of its members.
        reference: a weak reference to the group. Only torch's registry keeps the group alive, so
            that ``destroy_process_group()`` ends it together with its threads. A gloo thread that
            outlives the interpreter aborts the process.
        owned: whether namedmesh created it. The default group and adopted groups are not owned.
        users: the number of open meshes that use it.
    """

    label: str
    ranks: tuple[int, ...]
    reference: ref[dist.ProcessGroup]
    owned: bool = True
    users: int = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            MeshError: the group was destroyed.
        """
        group = self.reference()
        if group is None:
            raise MeshError(f"the process group over {self.label} was destroyed; make another mesh")
        return group

    def exists(self) -> bool:
        """Return whether the group is still registered in torch."""
        group = self.reference()
        return group is not None and is_registered(group)


_NO_OPTIONS = GroupOptions()

# The key of the group that has this rank only. All axes of size 1 share it.
_SELF_KEY = GroupKey("self", None)
# The key of the default group.
_WORLD_KEY = GroupKey("world", None)

# The groups over the ranks of the current default group, in the order of their creation. They are
# kept when a mesh is closed: torch gives each new group a new name, while the caches of DTensor
# (one for each thread) and compiled code refer to groups by name.
_group_cache: dict[GroupKey, Communicator] = {}


def describe_group_cache() -> str:
    """List the labels of the cached groups that every rank of the world has created.

    Ranks compare the text before they create groups: it must be the same on every rank.
    """
    labels = []
    for key, cached in _group_cache.items():
        if cached.exists() and not isinstance(key.use, str):
            labels.append(cached.label)
    return ", ".join(labels) or "none"


class Groups:
    """The process groups of one mesh, taken from the cache of the process.

    Args:
        defaults: the options of every group for which an axis sets no other.
        options_by_axes: the options that were set for the group over an axis, or over several axes
            in the order of their layout.

    Attributes:
        rank: the global rank of this process.
        world_size: the number of ranks in the default group.
        defaults: the argument.
        options_by_axes: a copy of the argument, to which views and flattened axes add theirs.
        acquired: the groups that the mesh uses.
    """

    def __init__(
        self, defaults: GroupOptions, options_by_axes: Mapping[tuple[str, ...], GroupOptions]
    ) -> None:
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self.defaults = defaults
        self.options_by_axes: dict[tuple[str, ...], GroupOptions] = dict(options_by_axes)
        self.acquired: dict[GroupKey, Communicator] = {}
        self._world: Any = ref(dist.group.WORLD)
        self._world_options = GroupOptions(timeout=get_timeout())
        self._normalized: dict[GroupOptions, GroupOptions] = {}
        # The default group may have been destroyed, and with it every group. There is a new one now.
        for key in list(_group_cache):
            if not _group_cache[key].exists():
                del _group_cache[key]

    @property
    def world(self) -> Any:
        """The default group in which the mesh was made; None after it was destroyed."""
        return self._world()

    @constant_under_compile
    def are_stale(self) -> bool:
        """Return whether the default group in which the mesh was made has been destroyed."""
        world = self.world
        return world is None or dist.group.WORLD is not world

    def get_options(self, axes: tuple[str, ...]) -> GroupOptions:
        """Return the options of the group over some axes.

        They are the options that were set for the group over all the axes. If none were set, the
        options of the single axes are merged.

        Args:
            axes: axes of one view, in the order of its layout.

        Raises:
            OptionError: the axes set an option to different values.
        """
        if axes in self.options_by_axes:
            return self.options_by_axes[axes]
        merged: GroupOptions | None = None
        for axis in axes:
            axis_options = self.options_by_axes.get((axis,))
            if merged is None:
                merged = axis_options
            elif axis_options is not None:
                merged = merge_options(merged, axis_options, format_axes(axes))
        return merged or _NO_OPTIONS

    def make_key(self, layout: Layout, axes: Sequence[str], options: GroupOptions | None = None) -> GroupKey:
        """Return the cache key of the groups over some axes. It is the same on every rank.

        Args:
            layout: the layout.
            axes: axes of the layout, in its order.
            options: the options of the groups; by default those of the axes.
        """
        size = layout.size(*axes)
        if size == 1:
            return _SELF_KEY
        options = self.get_options(tuple(axes)) if options is None else options
        normalized = self.normalize(options)
        if size == self.world_size and normalized == self._world_options:
            return _WORLD_KEY
        key = GroupKey(make_partition_key(layout, *axes), normalized, ())
        # With share=False the key has a number: the first one that this mesh has, or that no open
        # mesh uses. The group of a closed mesh is thus reused, as every other group is.
        number = 0
        while not options.share:
            numbered = key._replace(use=(*axes, number))
            cached = _group_cache.get(numbered)
            if numbered in self.acquired or cached is None or cached.users == 0:
                return numbered
            number += 1
        return key

    def normalize(self, options: GroupOptions) -> GroupOptions:
        """Return options with defaults filled in and the backend normalized, for a cache key.

        Args:
            options: the options of a group.
        """
        if options not in self._normalized:
            backend: str | None = (options.backend or self.defaults.backend or "").lower()
            if backend in ("", dist.get_backend()):
                backend = None
            timeout = options.timeout or self.defaults.timeout or self._world_options.timeout
            # The additional gloo group has its own key.
            self._normalized[options] = replace(
                options, backend=backend, timeout=timeout, create_gloo_group=False
            )
        return self._normalized[options]

    def find_backend_overrides(self, keys: Mapping[str, GroupKey]) -> dict[int | str, Any] | None:
        """Return the ``backend_override`` of ``init_device_mesh`` for new groups over some axes.

        Args:
            keys: the key of each axis.

        Returns:
            By axis, the backend and its options; torch's defaults apply to the axes that are
            omitted. None if ``init_device_mesh`` cannot create the groups: one of them exists, or
            torch cannot express its options there.
        """
        overrides: dict[int | str, Any] = {}
        for axis, key in keys.items():
            if key in self.acquired or key in _group_cache or key.options is None:
                return None
            if key.options == GroupOptions(timeout=get_backend_default_timeout()):
                continue  # torch's own defaults need no override
            override = make_backend_override(key.options)
            if override is None:
                return None
            overrides[axis] = override
        return overrides

    def get_existing(self, key: GroupKey) -> dist.ProcessGroup | None:
        """Return the mesh's group with a key; None if the mesh has none. Does not communicate.

        Args:
            key: the cache key.
        """
        if key in self.acquired:
            return self.acquired[key].group
        # Every mesh can use the default group, without acquiring it.
        return self.world if key == _WORLD_KEY else None

    def get_or_create(
        self, layout: Layout, axes: Sequence[str], options: GroupOptions | None = None
    ) -> dist.ProcessGroup:
        """Return this rank's group over some axes of a layout of the world.

        Each rank creates all groups over the axes, and not only its own.
        Collective: every rank of the world must call it.

        Args:
            layout: the layout, over all ranks of the world.
            axes: axes of the layout, in its order.
            options: the options of the groups; by default those of the axes. Only these may ask for
                an additional gloo group.
        """
        if options is None:
            options = self.get_options(tuple(axes))
            if options.create_gloo_group:
                # It comes first on every rank: ranks must create groups in the same order.
                self.get_or_create(layout, axes, self.make_gloo_options(options))
        key = self.make_key(layout, axes, options)
        if key == _SELF_KEY:
            return self.get_self_group()
        label = "_".join(axes)
        if key == _WORLD_KEY:
            return self.acquire(key, label, lambda: self.world, owned=False)
        return self.acquire(key, label, lambda: _create_groups(layout.groups(*axes), label, key.options))

    def get_self_group(self) -> dist.ProcessGroup:
        """Return the group of this rank alone, which all axes of size 1 share.

        Collective: every rank of the world must call it.
        """

        def create() -> Any:
            if self.world_size == 1:
                return self.world
            if get_bound_device() is not None:
                members = [(rank,) for rank in range(self.world_size)]
                return _create_groups(members, "self", self._world_options)
            # Every rank creates its own group only. torch would otherwise create a group for each
            # rank of the world on every rank.
            timeout = self._world_options.timeout
            description = "namedmesh:self"
            return dist.new_group(
                [self.rank], timeout, use_local_synchronization=True, group_desc=description
            )

        return self.acquire(_SELF_KEY, "self", create, owned=self.world_size > 1)

    def acquire(
        self, key: GroupKey, label: str, create: Callable[[], Any], *, owned: bool = True
    ) -> dist.ProcessGroup:
        """Return the group of a key, and count this mesh as a user of it.

        The group comes from this mesh or from the cache. If neither has it, it is created. That is
        collective if ``create`` is; all ranks create the same groups, as their caches are equal.

        Args:
            key: the cache key.
            label: the label of a new group.
            create: a function that creates the groups of the key and returns this rank's.
            owned: whether namedmesh owns the new group and may destroy it.
        """
        if key not in self.acquired:
            if key not in _group_cache:
                # Also inside of share_groups() torch makes this group.
                with own_group_requests():
                    group = create()
                ranks = tuple(dist.get_process_group_ranks(group))
                _group_cache[key] = Communicator(label, ranks, ref(group), owned)
            _group_cache[key].users += 1
            self.acquired[key] = _group_cache[key]
        return self.acquired[key].group

    def register_external(self, key: GroupKey, label: str, group: dist.ProcessGroup) -> None:
        """Use a group that other code owns. It is not cached, so other meshes do not reuse it.

        Args:
            key: the key by which this mesh finds the group.
            label: the label of the group.
            group: the group.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        # Several axes may have the same key, such as axes of size 1. The first one names the group.
        self.acquired.setdefault(key, Communicator(label, ranks, ref(group), owned=False))

    def get_gloo_group(
        self, ranks: Sequence[int], use: str, shortest_timeout: timedelta = timedelta(0)
    ) -> dist.ProcessGroup:
        """Return a gloo group for one purpose, over ranks of the mesh; create it if needed.

        No other code uses the group: it may communicate at the same time as the training step.
        Collective: every rank of the group must call it.

        Args:
            ranks: the global ranks.
            use: the purpose, which is also the label of the group.
            shortest_timeout: the timeout of the group, if the mesh has a shorter one.
        """
        timeout = max(shortest_timeout, self.normalize(_NO_OPTIONS).timeout or shortest_timeout)
        key = GroupKey(tuple(ranks), self.normalize(GroupOptions(backend="gloo", timeout=timeout)), use)
        # Ranks outside of the mesh, or of the pipeline, do not call.
        create = partial(
            dist.new_group,
            ranks,
            timeout,
            "gloo",
            use_local_synchronization=True,
            group_desc=f"namedmesh:{use}",
        )
        return self.acquire(key, use, create)

    def release(self) -> None:
        """Release all groups of the mesh. They stay in the cache for the next mesh."""
        for communicator in self.acquired.values():
            communicator.users -= 1
        self.acquired.clear()

    def make_gloo_options(self, options: GroupOptions) -> GroupOptions:
        """Return the options of the additional gloo group of a group with the given options.

        Args:
            options: the options of the group next to which the gloo group is created.
        """
        if dist.get_backend() == "fake":
            # Fake groups serve every device, so the group itself is returned as the gloo group.
            return options
        return GroupOptions(backend="gloo", timeout=options.timeout, share=options.share)


def get_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return a group's backend by device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``.

    Args:
        group: a process group.
    """
    backends = {}
    for pair in dist.get_backend_config(group).split(","):
        device, _, backend = pair.partition(":")
        backends[device] = backend
    return backends


def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Change the timeout of the collectives of a group that start from now on.

    Args:
        group: the group; None for the default group.
        timeout: the timeout.
    """
    set_group_timeout(timeout, group)


def _create_groups(groups: Sequence[Sequence[int]], label: str, options: GroupOptions | None) -> Any:
    """Create groups that cover the world without overlap, and return the group of this rank.

    Collective: every rank of the world must call it.
    """
    arguments = make_group_arguments(options or GroupOptions())
    lists = [list(ranks) for ranks in groups]
    description = f"namedmesh:{label}"
    if get_bound_device() is not None and "backend" not in arguments:
        # With a bound device, torch splits the communicator of the default group instead of
        # creating one.
        return dist.split_group(split_ranks=lists, group_desc=description, **arguments)
    return dist.new_subgroups_by_enumeration(lists, group_desc=description, **arguments)[0]
