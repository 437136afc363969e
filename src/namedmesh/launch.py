"""From the environment of a process to a device, a backend and the default process group.

Understands what torchrun sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``);
without any of it, a process is a world of one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from namedmesh.errors import LaunchError, listing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

__all__ = ["check_environment", "default_group_device", "init", "local_device"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What narrows the devices that a process sees, per kind of device.
_VISIBILITY = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def init(
    device: str | torch.device | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    bind_device: bool = False,
) -> torch.device:
    """Make the default process group from the environment, and select this process's device.

    Args:
        device: ``"cpu"``, a kind such as ``"cuda"`` (the index is this process's local rank), or one device
            such as ``"cuda:1"``. By default the accelerator that torch finds, else the CPU.
        backend: a backend as ``init_process_group`` takes it. By default torch's own for the device: NCCL on
            CUDA, gloo on the CPU.
        timeout: how long a collective of the default group may take. Groups of a mesh inherit it.
        bind_device: bind the default group to the device, which makes its communicator at once and lets torch
            split subgroups off it. With it, every rank of the world must take part whenever a group is made,
            so a mesh over a part of the world is not to be had.

    Returns:
        The device of this process. It is made the current one.

    Raises:
        LaunchError: the environment is incomplete, or it points at a device that is not there; all problems
            at once. Nothing has been initialised then.

    Example:
        >>> import os, torch.distributed as dist
        >>> "RANK" in os.environ        # plain python, not torchrun
        False
        >>> init("cpu")
        device(type='cpu')
        >>> dist.get_world_size(), dist.get_backend()
        (1, 'gloo')
        >>> dist.destroy_process_group()
    """
    if dist.is_initialized():
        raise LaunchError(
            f"the default process group exists already (backend {dist.get_backend()}, {dist.get_world_size()} "
            "ranks); call launch.init() once, or leave it to init_mesh()"
        )
    environment = os.environ
    chosen = local_device(device, environment)
    if chosen.type != "cpu":
        torch.get_device_module(chosen).set_device(chosen)
    backend = backend or dist.get_default_backend_for_device(chosen)
    bound = chosen if bind_device and chosen.type != "cpu" else None
    if not any(name in environment for name in ("RANK", "WORLD_SIZE")):
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=bound
        )
        return chosen
    check_environment(environment)
    dist.init_process_group(backend, timeout=timeout, device_id=bound)
    return chosen


def local_device(
    device: str | torch.device | None = None, environment: Mapping[str, str] | None = None
) -> torch.device:
    """The device that this process should use.

    Args:
        device: as for :func:`init`.
        environment: the variables to look at; by default those of this process.

    Raises:
        LaunchError: the device is not there.

    Example:
        >>> local_device("cpu", {"LOCAL_RANK": "3"})
        device(type='cpu')
    """
    environment = os.environ if environment is None else environment
    wanted = _wanted(device)
    if wanted.type == "cpu":
        return torch.device("cpu")
    count = _device_count(wanted.type)
    if ":" in str(wanted):  # one device, by its number
        if wanted.index >= count:
            raise LaunchError(
                f"device {wanted} is not there: {_visible(wanted.type, count)}; name one of those, or 'cpu'"
            )
        return wanted
    local_rank = _int_variable(
        environment, "LOCAL_RANK", _int_variable(environment, "RANK", 0) % max(count, 1)
    )
    if local_rank < count:
        return torch.device(wanted.type, local_rank)
    if count == 1 and _sees_one_of_its_own(wanted.type, environment):
        return torch.device(wanted.type, 0)
    raise LaunchError(
        f"local rank {local_rank} has no {wanted.type} device: {_visible(wanted.type, count)}; start at most "
        f"{count} processes on this machine, make more devices visible, or use device='cpu'"
    )


def default_group_device(device: str | torch.device | None = None) -> torch.device:
    """The device that goes with a default group which exists already.

    Args:
        device: the device that was asked for, if any.

    Raises:
        LaunchError: the device that was asked for is not there.
    """
    backend = dist.get_backend()
    if backend == "fake":  # stands for any hardware, also for one that is not here
        return torch.device(device or "cpu")
    if device is None and backend in ("gloo", "mpi"):
        return torch.device("cpu")
    if device is not None and torch.device(device).index is None:
        kind = torch.device(device).type
    elif device is not None:
        return local_device(device)
    else:
        kind = _wanted(None).type
    if kind == "cpu" or not _device_count(kind):
        return local_device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _wanted(device: str | torch.device | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except RuntimeError:
            raise LaunchError(
                f"device {device!r} is none that torch knows; use 'cpu', 'cuda', or one device such as 'cuda:0'"
            ) from None
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return torch.device(found.type)
    return torch.device("cpu")


def _device_count(kind: str) -> int:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return module.device_count() if module.is_available() else 0


def _visible(kind: str, count: int) -> str:
    return f"{count} {kind} device{'s are' if count != 1 else ' is'} visible to this process"


def _sees_one_of_its_own(kind: str, environment: Mapping[str, str]) -> bool:
    """Whether a launcher seems to have given each process one device of its own, which is number 0 for it."""
    return any(environment.get(name) and "," not in environment[name] for name in _VISIBILITY.get(kind, ()))


def _int_variable(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{name} is {text!r}; it is an int that the launcher sets, such as torchrun"
        ) from None


def check_environment(environment: Mapping[str, str]) -> None:
    """See that a launcher's variables are all there, and fit each other.

    Raises:
        LaunchError: some are missing, or the rank is outside the world.

    Example:
        >>> check_environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    """
    problems = []
    missing = [name for name in _VARIABLES if name not in environment]
    if missing:
        present = [name for name in _VARIABLES if name in environment]
        problems.append(
            f"{listing(present)} {'is' if len(present) == 1 else 'are'} set, but not {listing(missing)}; start the "
            "script with torchrun, or unset all of them for a world of one"
        )
    elif (
        not 0
        <= (rank := _int_variable(environment, "RANK", 0))
        < (world := _int_variable(environment, "WORLD_SIZE", 1))
    ):
        problems.append(
            f"RANK is {rank} and WORLD_SIZE is {world}; a rank is at least 0 and below the world size"
        )
    if problems:
        raise LaunchError(*problems)
