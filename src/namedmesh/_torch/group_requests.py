"""Requests for process groups, and the functions of torch through which all of them pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed import device_mesh

from namedmesh._torch.groups import c10d, get_bound_device

# Every public function that makes a group calls one of these, by its name in distributed_c10d: also
# a new_group that other code has imported earlier. So nothing that users can import is replaced.
_NEW_GROUP_FUNCTIONS = ("_new_group_with_tag", "_new_group_via_split_group")
# torch's split_group makes its group itself. These modules have its name.
_SPLIT_GROUP_MODULES: tuple[Any, ...] = (c10d, dist, device_mesh)


class GroupRequest(NamedTuple):
    """A request for process groups, as ``new_group`` or ``split_group`` gets it.

    Attributes:
        rank_sets: the global ranks of each group, ascending.
        timeout: the timeout; None for torch's default.
        backend: the backend in lower case; empty for the backend of the default group.
        description: the description of the group; empty without one.
        is_plain: whether the request has no other options. It does have some with ``pg_options``, an
            order of ranks, another device, or if only the members make it.
    """

    rank_sets: tuple[tuple[int, ...], ...]
    timeout: Any
    backend: str
    description: str
    is_plain: bool


FindGroup: TypeAlias = "Callable[[GroupRequest], dist.ProcessGroup | None]"
"""Returns this rank's group for a request, or None if torch has to make it."""

_own = threading.local()


@contextmanager
def own_group_requests() -> Iterator[None]:
    """Context manager in which torch makes every group that this thread asks for.

    namedmesh makes its own groups in it, also while :func:`intercept_group_requests` is active.
    """
    before = getattr(_own, "active", False)
    _own.active = True
    try:
        yield
    finally:
        _own.active = before


def intercept_group_requests(find_group: FindGroup) -> Callable[[], object]:
    """Let a function find the group for each request of this process, in every thread.

    There is no hook for it. To replace ``torch.distributed.new_group`` would miss code that has
    imported the function before, and stay in modules that import it meanwhile.

    Args:
        find_group: the function. Without a group for a request, torch makes one.

    Returns:
        The function that ends it.
    """
    undo = ExitStack()

    def replace(module: Any, name: str, replacement: Any) -> None:
        undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, replacement)

    for name in _NEW_GROUP_FUNCTIONS:
        # Up to torch 2.12 there is only the first one.
        if hasattr(c10d, name):
            replace(c10d, name, _wrap_new_group(getattr(c10d, name), find_group))
    split_group = _wrap_split_group(c10d.split_group, find_group)
    for module in _SPLIT_GROUP_MODULES:
        if hasattr(module, "split_group"):
            replace(module, "split_group", split_group)
    return undo.close


def _wrap_new_group(make_group: Any, find_group: FindGroup) -> Any:
    """Return a function that asks ``find_group`` first, and ``make_group`` without a result."""
    parameters = signature(make_group)

    @wraps(make_group)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        group = None
        if dist.is_initialized() and not getattr(_own, "active", False):
            request = _read_request(arguments)
            group = find_group(request)
        if group is None:
            return make_group(*args, **kwargs)
        if dist.get_rank() not in request.rank_sets[0]:
            return dist.GroupMember.NON_GROUP_MEMBER
        return group

    return new_group


def _read_request(arguments: dict[str, Any]) -> GroupRequest:
    """Return the request that the arguments of a ``new_group`` function make."""
    given = arguments["ranks"]
    ranks = range(dist.get_world_size()) if given is None else [int(rank) for rank in given]
    members = tuple(sorted(ranks))
    has_options = (arguments.get("pg_options"), arguments.get("backend_options"), arguments.get("pg_tag"))
    device = arguments.get("device_id")
    is_plain = (
        not any(has_options)
        and not arguments["use_local_synchronization"]
        and device in {None, get_bound_device()}
        and (arguments.get("sort_ranks", True) or tuple(ranks) == members)
    )
    return GroupRequest(
        (members,),
        arguments["timeout"],
        str(arguments["backend"] or "").lower(),
        str(arguments["group_desc"] or ""),
        is_plain,
    )


def _wrap_split_group(make_groups: Any, find_group: FindGroup) -> Any:
    """Return a ``split_group`` that asks ``find_group`` first, and torch without a result."""

    @wraps(make_groups)
    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        **more: Any,
    ) -> Any:
        is_world = dist.is_initialized() and parent_pg in {None, dist.group.WORLD}
        # The ranks of another parent than the world are not global ones, and the others do not call.
        if is_world and split_ranks and not getattr(_own, "active", False):
            rank_sets = tuple([tuple(sorted(map(int, ranks))) for ranks in split_ranks])
            backend = str(more.get("backend") or "").lower()
            description = str(more.get("group_desc") or "")
            group = find_group(GroupRequest(rank_sets, timeout, backend, description, pg_options is None))
            if group is not None:
                is_member = any(dist.get_rank() in ranks for ranks in rank_sets)
                return group if is_member else None
        return make_groups(parent_pg, split_ranks, timeout, pg_options, **more)

    return split_group
