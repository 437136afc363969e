"""Create the default process group from the environment, and select the device."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from namedmesh._errors import LaunchError, OptionError, format_count
from namedmesh._torch.groups import get_bound_device, guesses_device
from namedmesh.launch.agreement import agree_on, call_in_thread
from namedmesh.launch.coordinator import StoreCoordinator, set_default_coordinator
from namedmesh.launch.launchers import (
    check_torchrun_variables,
    make_torchrun_variables,
    read_int,
    was_launched,
)

# Time for torch's own error, which comes at the timeout.
_CONNECTION_GRACE_PERIOD = timedelta(seconds=2)


def init(
    device: str | torch.device | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    bind_device: bool = False,
) -> torch.device:
    """Create the default process group from the environment, and select this process's device.

    The variables of torchrun are used if they are set. If not, the variables of srun, mpirun or
    mpiexec are read, and the variables of torchrun are added to ``os.environ``, as other libraries
    read them. Without any of these variables it is a single-process run.

    Collective: every rank must call it with the same arguments.

    Args:
        device: ``"cpu"``, a device type such as ``"cuda"`` (the index is the local rank of this
            process), or one device such as ``"cuda:1"``. By default the accelerator that torch
            finds, if torch has a backend for it, else the CPU. torch has none for Apple's GPUs.
        backend: a backend as ``init_process_group`` takes it; by default torch's own for the
            device.
        timeout: how long this call waits for the other ranks, and the timeout of collectives of the
            default group. Groups of a mesh inherit it.
        bind_device: bind the default group to the device. Its communicator is then created at once,
            and torch creates subgroups by splitting it. From torch 2.15 on this is always done with
            NCCL, for which torch would guess the device.

    Returns:
        The device of this process. It is made the current one.

    Raises:
        LaunchError: the environment is incomplete, the device does not exist, or no store of a job
            answers at ``MASTER_ADDR`` and ``MASTER_PORT``.
        DistNetworkError: torch's, on rank 0, if it cannot host the store of the job.
        OptionError: the timeout is not a positive ``timedelta``, or torch does not know the device.
        AgreementError: the arguments differ between ranks, some ranks did not call within
            ``timeout``, or one of them failed.

    Example:
        >>> import torch.distributed as dist
        >>> init("cpu"), dist.get_world_size(), dist.get_backend()        # plain python, not torchrun
        (device(type='cpu'), 1, 'gloo')
        >>> dist.destroy_process_group()
    """
    if dist.is_initialized():
        raise LaunchError(
            f"the default process group exists already (backend {dist.get_backend()}, "
            f"{format_count(dist.get_world_size(), 'rank')}); call launch.init() once, or leave "
            "it to init_mesh()"
        )
    problems = check_timeout(timeout)
    if problems:
        raise OptionError(*problems)
    os.environ.update(make_torchrun_variables(os.environ))
    patience = timeout or default_pg_timeout
    rank = 0
    world_size = 1
    store: dist.Store = dist.HashStore()
    if was_launched():
        check_torchrun_variables(os.environ)
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        store = open_store(os.environ, rank, patience)
    coordinator = StoreCoordinator(store, rank, world_size)
    with agree_on("launch.init", patience, coordinator) as compare:
        chosen_device = choose_local_device(device)
        chosen_backend = backend or dist.get_default_backend_for_device(chosen_device)
        compare(
            {
                "backend": chosen_backend,
                "device": chosen_device.type,
                "bind_device": bind_device,
            }
        )
        device_id = None
        if chosen_device.type != "cpu":
            if bind_device or guesses_device(chosen_backend):
                device_id = chosen_device
            # torch.mps has one device, and no function to select it.
            module = torch.get_device_module(chosen_device)
            if hasattr(module, "set_device"):
                module.set_device(chosen_device)
        dist.init_process_group(
            chosen_backend,
            store=coordinator.run_store("launch.init", patience),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device_id,
        )
    set_default_coordinator(coordinator)
    return chosen_device


def check_timeout(timeout: object) -> list[str]:
    """Return a message if an argument is not a timeout or None (an empty list if it is).

    Args:
        timeout: the argument.
    """
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        return []
    return [f"timeout must be a positive datetime.timedelta, got {timeout!r}"]


def open_store(environment: Mapping[str, str], rank: int, timeout: timedelta) -> dist.Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``, without waiting for all ranks.

    Args:
        environment: the variables of torchrun.
        rank: the global rank of this process. Rank 0 hosts the store, unless torchrun's agent does.
        timeout: the timeout of the store.

    Raises:
        DistNetworkError: torch's, if this rank cannot host the store.
        LaunchError: no store answers at this address and port.
    """
    is_host = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])
    # torch's env:// rendezvous passes the same arguments, except for wait_for_workers: agree_on waits
    # instead, as it can name the missing ranks.
    connect = partial(
        dist.TCPStore,
        address,
        port,
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        use_libuv=environment.get("USE_LIBUV", "1") == "1",
    )
    if is_host:
        return connect()
    problem = _wait_for_listener(address, port, timeout)
    if problem is None:
        # A program that accepts the connection, but is not a store, never answers, and torch waits.
        outcome = call_in_thread(connect, timeout + _CONNECTION_GRACE_PERIOD)
        if outcome is not None:
            store: dist.Store = outcome()
            return store
    raise LaunchError(
        f"{address}, port {port} (MASTER_ADDR and MASTER_PORT) did not answer as the store of a job "
        f"within {timeout.total_seconds():g} s: rank 0 does not run, or another program uses this "
        "port; start all ranks, choose another MASTER_PORT, and check MASTER_ADDR"
    ) from problem


def _wait_for_listener(address: str, port: int, timeout: timedelta) -> OSError | None:
    """Wait until a program listens at a port; return the last error if none does in time.

    torch waits longer than its timeout, and a thread that is still inside of it may abort the
    process when it exits.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    delay = 0.05
    while True:
        remaining = max(deadline - time.monotonic(), delay)
        try:
            socket.create_connection((address, port), remaining).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                return error
            time.sleep(min(delay, max(0.0, deadline - time.monotonic())))
            # Thousands of ranks may wait for a host that is late.
            delay = min(2 * delay, 2.0)
        else:
            return None


def choose_local_device(
    device: str | torch.device | None = None, environment: Mapping[str, str] = os.environ
) -> torch.device:
    """Return the device that this process should use.

    Args:
        device: the device as for :func:`init`.
        environment: the environment with the local rank of this process.

    Raises:
        LaunchError: the device does not exist.
    """
    requested = _choose_device(device)
    if requested.type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(requested.type)
    count = module.device_count() if module.is_available() else 0
    index: int | None = requested.index
    if index is None:
        index = read_int(environment, "LOCAL_RANK") or 0
        if count == 1:
            # The launcher makes a different device visible to each process.
            index = 0
    if index >= count:
        verb = "is" if count == 1 else "are"
        visible = f"{format_count(count, f'{requested.type} device')} {verb} visible"
        raise LaunchError(
            f"device {requested.type}:{index} does not exist: {visible} to this process; start one "
            "process for each device, make more devices visible, or use device='cpu'"
        )
    return torch.device(requested.type, index)


def default_group_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device for meshes over a default group that exists.

    It is the requested device, the device to which the group is bound, or the current device, in
    this order.

    Args:
        device: the device as for :func:`init`.

    Raises:
        LaunchError: the device does not exist.
    """
    backend = dist.get_backend()
    bound = get_bound_device()
    if backend == "fake":
        # The fake backend simulates any hardware, also hardware that this host does not have.
        return torch.device("cpu" if device is None else device)
    if device is None and bound is None and backend in ("gloo", "mpi"):
        return torch.device("cpu")
    requested = _choose_device(device or bound)
    # torch's annotation of the index is an int, but a device such as "cuda" has none.
    index: int | None = requested.index
    if requested.type == "cpu" or index is not None:
        return choose_local_device(requested)
    if bound is not None and bound.type == requested.type:
        return bound
    module = torch.get_device_module(requested.type)
    if module.is_available() and module.is_initialized():
        return torch.device(requested.type, module.current_device())
    selected = choose_local_device(requested)
    module.set_device(selected)
    return selected


def _choose_device(device: str | torch.device | None) -> torch.device:
    """Return a device that was requested, or the default of :func:`init`."""
    if device is not None:
        try:
            requested = torch.device(device)
            torch.get_device_module(requested.type)
        except RuntimeError:
            raise OptionError(
                f"device must be 'cpu', 'cuda', 'cuda:0' or another device on which this torch can "
                f"compute, got {device!r}"
            ) from None
        return requested
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    backend = dist.Backend.default_device_backend_map.get(accelerator.type, "")
    # torch names gloo as the backend for Apple's GPUs, but gloo does not accept their tensors.
    if accelerator.type in dist.Backend.backend_capability.get(backend, ()):
        return torch.device(accelerator.type)
    return torch.device("cpu")
