"""Process groups and the store of the default group."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.nn import functional as differentiable_collectives

from namedmesh._torch.releases import torch_is_at_least

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
