"""From the environment of a process to a device, a backend and the default process group.

Understands what torchrun sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), and
what srun, mpirun and mpiexec set; without any of it, a process is a world of one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from namedmesh._torch import bound_device
from namedmesh.agreement import Meetings, agreed, meet_on
from namedmesh.errors import LaunchError, count_of, listing
from namedmesh.launchers import int_variable, torchrun_variables
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

__all__ = ["init"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init(
    device: str | torch.device | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    bind_device: bool = False,
) -> torch.device:
    """Make the default process group from the environment, and select this process's device.

    The variables of torchrun come first. Without them, those of srun, mpirun or mpiexec are understood, and what
    torchrun would have set is put into ``os.environ``, where other libraries look for it.

    Args:
        device: ``"cpu"``, a kind such as ``"cuda"`` (the index is this process's local rank), or one device
            such as ``"cuda:1"``. By default the accelerator that torch finds, else the CPU.
        backend: a backend as ``init_process_group`` takes it; by default torch's own for the device.
        timeout: how long the ranks wait for each other here, and how long a collective of the default group may
            take. Groups of a mesh inherit it.
        bind_device: bind the default group to the device, which makes its communicator at once and lets torch
            split subgroups off it.

    Returns:
        The device of this process. It is made the current one.

    Raises:
        LaunchError: the environment is incomplete, or the device is not there.
        DistNetworkError: torch's, where rank 0 cannot host the store of the job, or does not answer.
        LayoutError: the timeout is not a positive ``timedelta``.
        AgreementError: the ranks were given different arguments, some did not call this within ``timeout``, or one of
            them gave up.

    Example:
        >>> import torch.distributed as dist
        >>> init("cpu"), dist.get_world_size(), dist.get_backend()        # plain python, not torchrun
        (device(type='cpu'), 1, 'gloo')
        >>> dist.destroy_process_group()
    """
    if dist.is_initialized():
        raise LaunchError(
            f"the default process group exists already (backend {dist.get_backend()}, {dist.get_world_size()} "
            "ranks); call launch.init() once, or leave it to init_mesh()"
        )
    GroupOptions(timeout=timeout)
    os.environ.update(torchrun_variables(os.environ))

    def make(store: dist.Store, rank: int, world_size: int) -> None:
        if chosen.type != "cpu":
            torch.get_device_module(chosen).set_device(chosen)
        dist.init_process_group(
            found,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=chosen if bind_device and chosen.type != "cpu" else None,
        )

    if not was_launched():
        chosen = local_device(device)
        found = backend or dist.get_default_backend_for_device(chosen)
        make(dist.HashStore(), 0, 1)
        return chosen
    _check_environment(os.environ)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wait = timeout or default_pg_timeout
    meetings = Meetings(open_store(os.environ, rank, wait), rank, world_size)
    with agreed("launch.init", wait, meetings) as compare:
        chosen = local_device(device)
        found = backend or dist.get_default_backend_for_device(chosen)
        compare({"backend": found, "device": chosen.type, "bind_device": bind_device})
        make(meetings.part("launch.init", wait), rank, world_size)
    meet_on(meetings)
    return chosen


def was_launched() -> bool:
    """Return whether torchrun or another launcher started this process."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def open_store(environment: Mapping[str, str], rank: int, timeout: timedelta) -> dist.Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``, as torch's ``env://`` does, without waiting for all ranks."""
    of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=rank == 0 and not of_agent,
        timeout=timeout,
        wait_for_workers=False,  # the agreement waits, and names the absent ones
        multi_tenant=True,
        use_libuv=environment.get("USE_LIBUV", "1") == "1",
    )


def local_device(
    device: str | torch.device | None = None, environment: Mapping[str, str] | None = None
) -> torch.device:
    """Return the device that this process should use, as for :func:`init`; LaunchError if it is not there."""
    environment = os.environ if environment is None else environment
    wanted = _wanted(device)
    if wanted.type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(wanted.type)
    count = module.device_count() if module.is_available() else 0
    index: int | None = wanted.index
    if index is None:
        index = int_variable(environment, "LOCAL_RANK") or 0
        index = 0 if count == 1 else index  # the launcher shows each process one of its own
    if index >= count:
        visible = f"{count_of(count, f'{wanted.type} device')} {'is' if count == 1 else 'are'} visible to this process"
        raise LaunchError(
            f"device {wanted.type}:{index} is not there: {visible}; start one process for each device, make more devices "
            "visible, or use device='cpu'"
        )
    return torch.device(wanted.type, index)


def default_group_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device that goes with a default group which exists already.

    It is the one that was asked for, the one that the group is bound to, or the current one, in this order.
    """
    backend = dist.get_backend()
    if backend == "fake":  # stands for any hardware, also for one that is not here
        return torch.device("cpu" if device is None else device)
    bound = bound_device()
    if device is None and bound is None and backend in ("gloo", "mpi"):
        return torch.device("cpu")
    wanted = bound if device is None and bound is not None else _wanted(device)
    if wanted.type == "cpu" or (device is not None and ":" in str(wanted)):  # one device, by its number
        return local_device(wanted)
    if bound is not None and bound.type == wanted.type:
        wanted = bound
    module = torch.get_device_module(wanted.type)
    in_use = module.is_available() and module.is_initialized()
    if in_use and ":" not in str(wanted):
        return torch.device(wanted.type, module.current_device())
    chosen = local_device(wanted)
    if not in_use:
        module.set_device(chosen)
    return chosen


def _wanted(device: str | torch.device | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except RuntimeError:
            raise LaunchError(
                f"device {device!r} is none that torch knows; use 'cpu', 'cuda', or one device such as 'cuda:0'"
            ) from None
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(found.type if found is not None else "cpu")


def _check_environment(environment: Mapping[str, str]) -> None:
    missing = [name for name in _VARIABLES if name not in environment]
    if missing:
        present = [name for name in _VARIABLES if name in environment]
        raise LaunchError(
            f"{listing(present)} {'is' if len(present) == 1 else 'are'} set, but not {listing(missing)}; start the "
            "script with torchrun, or unset all of them for a world of one"
        )
    rank, world, port = (
        int_variable(environment, name) or 0 for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    problems = []
    if not 0 <= rank < world:
        problems.append(
            f"RANK is {rank} and WORLD_SIZE is {world}; a rank is at least 0 and below the world size"
        )
    if not 0 < port < 2**16:
        problems.append(f"MASTER_PORT is {port}; a port is at least 1 and below 65536")
    if problems:
        raise LaunchError(*problems)
