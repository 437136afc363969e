"""The process groups of this process, and their options: one for each way to cut the world and set of options.

Every rank of the world makes every group, in the same order, so the table of what exists is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from namedmesh._torch import bound_device, default_timeout, forget_operations, is_registered, usual_timeout
from namedmesh.errors import LayoutError, MeshError
from namedmesh.layout import Layout


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of the process groups over an axis, and of every group derived from that axis.

    Args:
        backend: the backend, as ``new_group`` takes it; by default that of the default group.
        timeout: how long a collective may take; by default that of the default group.
        nccl: settings of the NCCL communicator by name, such as ``{"max_ctas": 32}``; for NCCL only.
        high_priority: run NCCL's kernels on a stream of high priority.
        gloo_twin: also make a gloo group over the same ranks, for tensors on the CPU.
        share: whether the group may be the same object as another one over the same ranks with the same
            options. Turn it off for code that overlaps two collectives over the same ranks.

    Raises:
        LayoutError: a timeout that is not positive, or a backend that is no string.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    nccl: Mapping[str, int | str] | tuple[tuple[str, int | str], ...] = ()
    high_priority: bool = False
    gloo_twin: bool = False
    share: bool = True

    def __post_init__(self) -> None:
        problems = []
        backend: object = self.backend
        if backend is not None and not isinstance(backend, str):
            problems.append(f"backend is {backend!r}; it is a name such as 'gloo'")
        timeout: object = self.timeout
        if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
            problems.append(f"timeout is {timeout!r}; it is a datetime.timedelta longer than nothing")
        settings: dict[str, int | str] = {}
        try:
            settings = dict(self.nccl)
        except (TypeError, ValueError):
            problems.append(f"nccl must be a mapping of names to values, got {self.nccl!r}")
        if problems:
            raise LayoutError(*problems)
        object.__setattr__(self, "nccl", tuple(sorted(settings.items())))

    def combined(self, other: GroupOptions, axes: str) -> GroupOptions:
        """Return what either sets, for a group over two ``axes``; LayoutError where they contradict."""
        problems = []
        changes: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if theirs in (mine, field.default):
                continue
            if mine != field.default:
                problems.append(
                    f"{field.name} of axes {axes} is both {mine!r} and {theirs!r}; say which one the group over both "
                    "should have with options="
                )
            changes[field.name] = theirs
        if problems:
            raise LayoutError(*problems)
        return replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        """Return the keywords with which torch makes groups of these options."""
        arguments: dict[str, Any] = {"timeout": self.timeout}
        if self.backend is not None:
            arguments["backend"] = self.backend
        settings = self._nccl_settings()
        if settings is not None:
            arguments["pg_options"] = settings
        return arguments

    def _nccl_settings(self) -> object:
        """Return the settings of NCCL that were asked for, or None; LayoutError if no backend of the groups takes them."""
        if not self.nccl and not self.high_priority:
            return None
        # The name of a default group's backend may be "undefined": torch then chose one for each device.
        backend = (self.backend or dist.get_backend_config()).lower()
        if "nccl" in backend:
            return nccl_options(self)
        if "fake" in backend:  # stands for any backend
            return None
        raise LayoutError(
            f"nccl={dict(self.nccl)} and high_priority={self.high_priority} are settings of NCCL, but the groups that they "
            f"are for have the backend {backend!r}; leave them out, or choose a backend with NCCL, such as backend='nccl'"
        )

    def override(self) -> tuple[str, Any] | None:
        """Return what ``init_device_mesh`` takes for an axis as ``backend_override``; None where it has no words for it."""
        self._nccl_settings()
        backend = self.backend or dist.get_backend()
        if backend == "nccl":
            return backend, nccl_options(self)
        if backend == "gloo":
            options: Any = dist.ProcessGroupGloo.Options
            return backend, options(backend, self.timeout)
        return None

    def __repr__(self) -> str:
        """Return only what was set: the text is compared between ranks and shown in messages."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        given = [f"{name}={getattr(self, name)!r}" for name in changed]
        return f"GroupOptions({', '.join(given)})"


def nccl_options(options: GroupOptions) -> object:
    """Return what ``new_group`` takes as ``pg_options`` for NCCL; LayoutError for a setting that it does not have."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise MeshError(
            "this torch was built without NCCL, so there are no NCCL options; use another backend"
        )
    made: Any = nccl.Options(is_high_priority_stream=options.high_priority)
    if options.timeout is not None:
        made._timeout = options.timeout  # noqa: SLF001  torch's own spelling, also in its documentation
    for name, value in dict(options.nccl).items():
        if not hasattr(made.config, name):
            raise LayoutError(f"NCCL has no setting {name!r}; see torch's ProcessGroupNCCL.NCCLConfig")
        setattr(made.config, name, value)
    return made


class Key(NamedTuple):
    """What two groups share exactly if they are one: how the world is cut, the options, and whose it is if not shared."""

    partition: Hashable
    options: GroupOptions | None
    use: object = ""


@dataclass(eq=False)
class Communicator:
    """A process group that meshes use."""

    label: str
    """What it was made for: the names of its axes."""
    ranks: tuple[int, ...]
    reference: ref[dist.ProcessGroup]
    """A weak reference to the group. Only torch's registry keeps a group alive, so that
    ``destroy_process_group()`` ends it with its threads. A gloo thread that outlives the interpreter
    aborts the process."""
    owned: bool = True
    """Whether it was made here: it is not the default group, and not one that was adopted."""
    users: int = 0
    """How many open meshes use it."""
    of_world: bool = True
    """Whether every rank of the world made it or another one like it."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; MeshError once it was destroyed."""
        group = self.reference()
        if group is None:
            raise MeshError(f"The process group over {self.label} was destroyed. Make another mesh.")
        return group

    def exists(self) -> bool:
        """Return whether torch still knows the group."""
        group = self.reference()
        return group is not None and is_registered(group)


_ALONE = Key("alone", None)
_kept: dict[Key, Communicator] = {}
"""Those of the default group of this moment, in the order they were made. They stay when meshes are closed: torch names
each new group anew, while DTensor's caches, one for each thread, and compiled code hold groups by name."""


def kept_groups() -> str:
    """Return what exists, in words: it must be the same on every rank."""
    return ", ".join(known.label for known in _kept.values() if known.of_world) or "none"


class Groups:
    """One mesh's share in the process groups; ``defaults`` are their options, where an axis sets nothing else."""

    def __init__(self, defaults: GroupOptions) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.defaults = defaults
        self._world: Any = ref(dist.group.WORLD)
        self.of_world = GroupOptions(timeout=default_timeout())
        self._complete: dict[GroupOptions, GroupOptions] = {}
        self.held: dict[Key, Communicator] = {}
        if not all(known.exists() for known in _kept.values()):
            _kept.clear()  # they were another default group's

    @property
    def world(self) -> Any:
        """The default group in which the mesh was made; None once it was destroyed."""
        return self._world()

    def key(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> Key:
        """Return the key of the groups over some axes, the same on every rank."""
        if layout.size(*axes) == 1:
            return _ALONE
        key = Key(layout.partition(*axes), self.completed(options))
        if options.share:
            return key
        # A group that this mesh shares with no other: the first that no open mesh uses.
        candidates = (key._replace(use=("_".join(axes), number)) for number in count())
        return next(own for own in candidates if own in self.held or own not in _kept or not _kept[own].users)

    def completed(self, options: GroupOptions) -> GroupOptions:
        """Return what tells groups apart: everything filled in, and in one spelling."""
        if options not in self._complete:
            backend = (options.backend or self.defaults.backend or "").lower()
            self._complete[options] = replace(
                options,
                backend=None if backend in ("", dist.get_backend()) else backend,
                timeout=options.timeout or self.defaults.timeout or self.of_world.timeout,
                gloo_twin=False,
            )
        return self._complete[options]

    def overrides(self, keys: Mapping[str, Key]) -> dict[int | str, Any] | None:
        """Return the ``backend_override`` of new groups for some axes; None where one exists, or torch has no words for it."""
        found: dict[int | str, Any] = {}
        for axis, key in keys.items():
            if key in self.held or key in _kept or key.options is None:
                return None
            if key.options == GroupOptions(timeout=usual_timeout()):
                continue  # what it makes when it is asked for nothing
            found[axis] = key.options.override()
            if found[axis] is None:
                return None
        return found

    def find(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup | None:
        """Return this mesh's group over some axes, if it has one; the default group serves every mesh."""
        key = self.key(layout, axes, options)
        known = self.held.get(key)
        if known is None and self._is_world(layout, axes, key):
            world: dist.ProcessGroup | None = self.world
            return world
        return known.group if known else None

    def _is_world(self, layout: Layout, axes: Sequence[str], key: Key) -> bool:
        return layout.size(*axes) == self.world_size and key.options == self.of_world

    def over(self, layout: Layout, axes: Sequence[str], options: GroupOptions) -> dist.ProcessGroup:
        """Return this rank's group over some axes of a layout of the world; every rank makes all of them."""
        key = self.key(layout, axes, options)
        if key == _ALONE:
            return self.alone()
        label = "_".join(axes)
        if self._is_world(layout, axes, key):
            return self.take(key, label, lambda: self.world, owned=False)
        return self.take(key, label, lambda: _new_groups(layout.groups(*axes), label, key.options))

    def alone(self) -> dist.ProcessGroup:
        """Return the group of this rank alone, which all axes of size 1 share."""

        def make() -> Any:
            if self.world_size == 1:
                return self.world
            each = [(rank,) for rank in range(self.world_size)]
            return _new_groups(each, "self", self.of_world)

        return self.take(_ALONE, "self", make, owned=self.world_size > 1)

    def take(self, key: Key, label: str, make: Callable[[], Any], *, owned: bool = True) -> dist.ProcessGroup:
        """Return the group of a key that this mesh has, that another mesh has made, or that is made now."""
        if key not in self.held:
            if key not in _kept:
                group = make()
                _kept[key] = Communicator(
                    label, tuple(dist.get_process_group_ranks(group)), ref(group), owned
                )
            _kept[key].users += 1
            self.held[key] = _kept[key]
        return self.held[key].group

    def borrow(self, key: Key, label: str, group: dist.ProcessGroup) -> None:
        """Take note of a group that somebody else owns."""
        ranks = tuple(dist.get_process_group_ranks(group))
        self.held.setdefault(key, Communicator(label, ranks, ref(group), owned=False))

    def for_checkpoints(self, layout: Layout) -> dist.ProcessGroup:
        """Return the gloo group over all ranks of a layout that only checkpoints use.

        A save in the background communicates at the same time as the training step.
        Collective: every rank of the layout must call it.
        """
        ranks = tuple(layout.ranks)
        options = self.completed(GroupOptions(backend="gloo"))
        key, label = Key(ranks, options, "checkpoints"), "checkpoints"
        # The other ranks of the world do not save the model of a mesh over a part of it.
        part = len(ranks) < self.world_size

        def make() -> Any:
            return dist.new_group(
                ranks,
                options.timeout,
                "gloo",
                use_local_synchronization=part,
                group_desc=f"namedmesh:{label}",
            )

        group = self.take(key, label, make)
        self.held[key].of_world = not part
        return group

    def release(self) -> None:
        """Let all groups go; they stay for the next mesh."""
        for known in self.held.values():
            known.users -= 1
        self.held.clear()

    def gloo_options(self, options: GroupOptions) -> GroupOptions:
        """Return the options of the gloo group beside a group with the given options."""
        if dist.get_backend() == "fake":
            return options
        return GroupOptions(backend="gloo", timeout=options.timeout, share=options.share)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of a group for each type of device that it serves."""
    backends = {}
    for pair in dist.get_backend_config(group).split(","):
        device, _, backend = pair.partition(":")
        backends[device] = backend
    return backends


def destroy_unused() -> None:
    """Destroy the groups that were made here and that no open mesh uses, the one that was made last first."""
    unused = [key for key, known in _kept.items() if known.users < 1]
    for key in reversed(unused):
        known = _kept.pop(key)
        if known.owned and known.exists():
            dist.destroy_process_group(known.group)
    if unused:
        forget_operations()


def _new_groups(groups: Sequence[Sequence[int]], label: str, options: GroupOptions | None) -> Any:
    """Make groups that do not overlap and cover the world, and return this rank's."""
    arguments = (options or GroupOptions()).arguments()
    lists = [list(ranks) for ranks in groups]
    description = f"namedmesh:{label}"
    if bound_device() is not None and "backend" not in arguments:
        return dist.split_group(split_ranks=lists, group_desc=description, **arguments)
    return dist.new_subgroups_by_enumeration(lists, group_desc=description, **arguments)[0]
