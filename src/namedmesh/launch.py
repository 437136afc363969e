"""From the environment of a process to a device, a backend and the default process group.

Understands what torchrun sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), and
what srun, mpirun and mpiexec set; without any of it, a process is a world of one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from namedmesh._torch import bound_device, number_groups_anew
from namedmesh.agreement import Agreement, Agreements
from namedmesh.errors import LaunchError, count_of, listing
from namedmesh.launchers import int_variable, torchrun_variables
from namedmesh.options import GroupOptions, normalized_backend

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_environment", "default_group_device", "init", "local_device"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The store that this process hosts, after an attempt that failed.
_store_of_failure: list[dist.Store | None] = []
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
    call: str = "launch.init",
) -> torch.device:
    """Make the default process group from the environment, and select this process's device.

    The variables of torchrun come first. Without them, those of srun, mpirun or mpiexec are understood, and the
    variables that torchrun would have set are put into ``os.environ``, where other libraries look for them.

    Args:
        device: ``"cpu"``, a kind such as ``"cuda"`` (the index is this process's local rank), or one device
            such as ``"cuda:1"``. By default the accelerator that torch finds, else the CPU.
        backend: a backend as ``init_process_group`` takes it. By default torch's own for the device: NCCL on
            CUDA, gloo on the CPU.
        timeout: how long the ranks wait for each other here, and how long a collective of the default group may
            take. Groups of a mesh inherit it.
        bind_device: bind the default group to the device, which makes its communicator at once and lets torch
            split subgroups off it. With it, every rank of the world must take part whenever a group is made,
            so a mesh over a part of the world is not to be had.
        call: what messages say that the ranks called.

    Returns:
        The device of this process. It is made the current one.

    Raises:
        LaunchError: the environment is incomplete, or it points at a device that is not there; all problems
            at once. Nothing has been initialized then.
        LayoutError: the timeout is not a positive ``timedelta``, or torch does not know the backend.
        AgreementError: some ranks did not call this within ``timeout``, or one of them gave up; the same on
            every rank.

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
    os.environ.update(torchrun_variables(os.environ))
    rank, world_size = 0, 1
    if was_launched(os.environ):
        check_environment(os.environ)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wait = timeout if isinstance(timeout, timedelta) and timeout > timedelta(0) else default_pg_timeout
    known = Agreements(
        lambda within: open_store(os.environ, rank, within), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    )
    agreement = Agreement(
        call,
        of="job",
        ranks=range(world_size),
        rank=rank,
        known=known,
        timeout=wait,
        hosts_store=hosts_store(os.environ, rank),
    )
    try:
        with agreement:
            GroupOptions(timeout=timeout)
            chosen = local_device(device)
            backend = backend or dist.get_default_backend_for_device(chosen)
            uses_gloo = "gloo" in normalized_backend(backend).values()
            agreement.compare({}, may_restart=True, uses_gloo=uses_gloo)
            store = agreement.new_store()

            def create() -> None:
                select_device(chosen)
                number_groups_anew()
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                    device_id=chosen if bind_device and chosen.type != "cpu" else None,
                )

            agreement.run(create)
    except BaseException:
        # Ranks that call late, and the next try, use the store that this process hosts.
        if hosts_store(os.environ, rank):
            _store_of_failure[:] = [known.opened]
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    _store_of_failure.clear()
    select_device(chosen)
    return chosen


def hosts_store(environment: Mapping[str, str], rank: int) -> bool:
    """Return whether this rank hosts the store: rank 0 does, unless torchrun's agent has one already."""
    return rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(environment: Mapping[str, str], rank: int, timeout: timedelta) -> dist.Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        LaunchError: rank 0 cannot host it there, or another rank does not reach it within ``timeout``.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_host = hosts_store(environment, rank)
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,  # an agreement waits, and names the absent ones
            multi_tenant=True,
            use_libuv=environment.get("USE_LIBUV", "1") == "1",
        )
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        if is_host:
            raise LaunchError(
                f"rank 0 cannot host the store of the job at {host}:{port} ({reason}); set MASTER_ADDR to its host and "
                "MASTER_PORT to a port that is free there, the same on every rank"
            ) from None
        owner = "rank 0" if hosts_store(environment, 0) else "torchrun's agent"
        raise LaunchError(
            f"{owner}, which hosts the store of the job at {host}:{port}, did not answer within "
            f"{timeout.total_seconds():g} s; see its output for why, and check MASTER_ADDR and MASTER_PORT ({reason})"
        ) from None


def select_device(device: torch.device) -> None:
    """Make a device the current one of this thread."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def was_launched(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or another launcher has set these variables."""
    return "RANK" in environment or "WORLD_SIZE" in environment


def local_device(
    device: str | torch.device | None = None, environment: Mapping[str, str] | None = None
) -> torch.device:
    """Return the device that this process should use.

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
    requested = _wanted(device)
    if requested.type == "cpu":
        return torch.device("cpu")
    count = _device_count(requested.type)
    if ":" in str(requested):  # one device, by its number
        if requested.index >= count:
            raise LaunchError(
                f"device {requested} is not there: {_visible(requested.type, count)}; name one of those, or 'cpu'"
            )
        return requested
    local_rank = int_variable(environment, "LOCAL_RANK")
    if local_rank is None:
        local_rank = (int_variable(environment, "RANK") or 0) % max(count, 1)
    if local_rank < count:
        return torch.device(requested.type, local_rank)
    if count == 1:
        for name in _VISIBILITY.get(requested.type, ()):
            if environment.get(name) and "," not in environment[name]:
                return torch.device(requested.type, 0)  # the launcher gives each process one of its own
    raise LaunchError(
        f"local rank {local_rank} has no {requested.type} device: {_visible(requested.type, count)}; start one process "
        "for each device, make more devices visible, or use device='cpu'"
    )


def default_group_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device that goes with a default group which exists already.

    It is the one that the group is bound to, or else the current one. Where no device of its kind is in use
    yet, there is no current one: then it is the device of the local rank, which is made the current one.

    Args:
        device: the device that was asked for, if any.

    Raises:
        LaunchError: the device that was asked for is not there.
    """
    backend = dist.get_backend()
    if backend == "fake":  # stands for any hardware, also for one that is not here
        return torch.device("cpu" if device is None else device)
    bound = bound_device()
    if device is None and bound is None and backend in ("gloo", "mpi"):
        return torch.device("cpu")
    requested = bound if device is None and bound is not None else _wanted(device)
    one_is_asked_for = device is not None and ":" in str(requested)
    if requested.type == "cpu" or one_is_asked_for or not _device_count(requested.type):
        return local_device(requested)
    module = torch.get_device_module(requested.type)
    if bound is not None and bound.type == requested.type:
        chosen = bound
    elif module.is_initialized():
        return torch.device(requested.type, module.current_device())
    else:
        chosen = local_device(requested.type)
    if not module.is_initialized():
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
    return f"{count_of(count, f'{kind} device')} {'is' if count == 1 else 'are'} visible to this process"


def check_environment(environment: Mapping[str, str]) -> None:
    """Check that a launcher's variables are all set, and fit each other.

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
    else:
        rank, world, port = (
            int_variable(environment, name) or 0 for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        )
        if not 0 <= rank < world:
            problems.append(
                f"RANK is {rank} and WORLD_SIZE is {world}; a rank is at least 0 and below the world size"
            )
        if not 0 < port < 2**16:
            problems.append(f"MASTER_PORT is {port}; a port is at least 1 and below 65536")
    if problems:
        raise LaunchError(*problems)
