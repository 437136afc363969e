"""Process groups: their store, requests for them, and a mode that sees collectives."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.nn import functional as differentiable_collectives
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from namedmesh._torch.execution import torch_is_at_least

# The types of the module's attributes differ between releases.
c10d: Any = distributed_c10d
T = TypeVar("T")

# These functions of torch have the default group of the moment of their import as the default of an
# argument. torch imports them at the first DTensor. The default group would then never be freed,
# and after destroy_process_group() its threads would still run: one that frees a tensor while the
# interpreter is being finalized ends the process with SIGABRT. None is the default group, too.
for _function in vars(differentiable_collectives).values():
    _defaults = getattr(_function, "__defaults__", None) or ()
    if any(isinstance(value, c10d.ProcessGroup) for value in _defaults):
        _function.__defaults__ = tuple(
            None if isinstance(value, c10d.ProcessGroup) else value for value in _defaults
        )


def get_default_store() -> dist.Store:
    """Return the store of the default group, which torch does not expose."""
    return c10d._get_default_store()  # type: ignore[no-any-return]


def add_default_group_finalizer(call: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Call a function after the default group is destroyed.

    torch has no hook for it. But it creates a store object for the default group, and drops both
    together.

    Args:
        call: the function, without arguments.

    Returns:
        The handle; its ``detach()`` cancels the call.
    """
    handle = weakref.finalize(get_default_store(), call)
    # At the exit of the interpreter, nobody uses the state that the function would update.
    handle.atexit = False
    return handle


def get_bound_device() -> torch.device | None:
    """Return the device to which the default group is bound; None if it is not bound.

    torch creates subgroups of a bound group by splitting its communicator.
    """
    return getattr(dist.group.WORLD, "bound_device_id", None)


def guesses_device(backend: str) -> bool:
    """Return whether torch guesses the device of the default group without ``device_id``.

    From torch 2.15 on, "nccl" connects when the group is created. The guess is the global rank
    modulo the number of visible GPUs, which is wrong if the job uses only some GPUs of a host. Up
    to 2.14, hangs were reported with ``device_id`` (pytorch#153960).

    Args:
        backend: the backend of the default group.
    """
    return "nccl" in backend.lower() and torch_is_at_least("2.15")


def get_backend_default_timeout() -> timedelta:
    """Return torch's timeout for a group that is created without one.

    The default group may have a different timeout.
    """
    return c10d._get_default_timeout(c10d.Backend(dist.get_backend()))  # type: ignore[no-any-return]


def get_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    """Return the timeout of a group.

    Args:
        group: the group; None for the default group.
    """
    found: Any = group or dist.group.WORLD
    for device in found._device_types:
        options = getattr(found._get_backend(device), "options", None)
        # The fake backend has no options.
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return get_backend_default_timeout()


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the timeout of a group.

    Args:
        timeout: the timeout of collectives that start from now on.
        group: the group; None for the default group.
    """
    if torch_is_at_least("2.14"):
        # It is public under this name, and the old name warns.
        c10d.set_timeout(timeout, group)
    else:
        c10d._set_pg_timeout(timeout, group)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether a group is in torch's registry, which drops destroyed groups.

    Args:
        group: a process group.
    """
    return group in c10d._world.pg_map


def get_group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with a name, such as functional collectives take.

    Args:
        name: the ``group_name`` of the group.
    """
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def all_gather_object(group: dist.ProcessGroup, value: T) -> list[T]:
    """Return the objects of all ranks of a group, in the order of their group ranks.

    It is torch's ``all_gather_object`` without NumPy, which that function needs.
    Collective: every rank of the group must call it.

    Args:
        group: the group.
        value: the object of this rank. It is pickled.
    """
    if group.size() == 1:
        return [value]
    device = c10d._get_object_coll_device(group)
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group)
    # all_gather needs tensors of the same size on every rank.
    longest = int(torch.cat(lengths).max())
    padded = torch.nn.functional.pad(data, (0, longest - len(data)))
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group)
    values = []
    for tensor, size in zip(gathered, lengths, strict=True):
        pickled = bytes(tensor[: int(size)].tolist())
        values.append(pickle.loads(pickled))  # noqa: S301  it comes from a rank of this job
    return values


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


class CollectiveMode(TorchDispatchMode):
    """Calls a function for each collective that torch dispatches, after it has run.

    torch's ``CommDebugMode`` counts collectives, but knows neither groups nor sizes.

    Args:
        record: gets the name of the operator, its group, and the bytes that this rank puts into it,
            or gets out of it if they are more.
    """

    def __init__(self, record: Callable[[str, dist.ProcessGroup, int], None]) -> None:
        from torch.distributed.tensor import DTensor

        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.dtensor = DTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.dtensor in types:
            return NotImplemented  # DTensor then calls operators on its local tensors
        result = func(*args, **(kwargs or {}))
        group = _find_group(func, (*args, *(kwargs or {}).values()))
        if group is not None:
            num_bytes = 0
            # Some operators return the output, others write into an argument.
            for value in (*args, result):
                leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                num_bytes = max(num_bytes, sum(leaf.nbytes for leaf in leaves))
            self.record(func.__name__, group, num_bytes)
        return result


def _find_group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the group of an operator, or None if it does not communicate.

    Functional collectives get the name of the group, ``torch.distributed`` passes a boxed group.
    """
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    for parameter, value in zip(schema.arguments if schema else (), args, strict=False):
        if parameter.name == "group_name" and value:
            return get_group_by_name(value)
        if parameter.name == "process_group":
            group: dist.ProcessGroup = dist.ProcessGroup.unbox(value)
            return group
    return None
