"""From the environment of a process to a device, a backend and the default process group.

torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. SLURM, Open MPI, MPICH and PALS
give a process its rank in variables of their own, but none gives the address at which the ranks meet: that is the first
host of the job, and a port that follows from the job's id. Without any of it, a process is a world of one.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from namedmesh._torch import bound_device, guesses_device
from namedmesh.agreement import Distinct, StoreCoordinator, agree_on, set_default_coordinator
from namedmesh.errors import LaunchError, format_count, format_items
from namedmesh.options import GroupOptions

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
            such as ``"cuda:1"``. By default the accelerator that torch finds, if torch has a backend that serves it, else
            the CPU: none serves Apple's.
        backend: a backend as ``init_process_group`` takes it; by default torch's own for the device.
        timeout: how long the ranks wait for each other here, and how long a collective of the default group may
            take. Groups of a mesh inherit it.
        bind_device: bind the default group to the device, which makes its communicator at once and lets torch
            split subgroups off it. From torch 2.15 on this is always done with NCCL, which would guess the device.

    Returns:
        The device of this process. It is made the current one.

    Raises:
        LaunchError: the environment is incomplete, or the device is not there.
        DistNetworkError: torch's, where rank 0 cannot host the store of the job, or does not answer.
        OptionError: the timeout is not a positive ``timedelta``.
        AgreementError: the ranks were given different arguments, some did not call this within ``timeout``, one of
            them gave up, or several would use one GPU with NCCL.

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

    if was_launched():
        _check_environment(os.environ)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: dist.Store = open_store(os.environ, rank, timeout or default_pg_timeout)
    else:
        rank, world_size, store = 0, 1, dist.HashStore()
    coordinator = StoreCoordinator(store, rank, world_size)
    with agree_on("launch.init", timeout or default_pg_timeout, coordinator) as compare:
        chosen = local_device(device)
        found = backend or dist.get_default_backend_for_device(chosen)
        binds = bind_device or guesses_device(found)
        compare(
            {
                "backend": found,
                "device": chosen.type,
                "bind_device": bind_device,
                "GPU": Distinct(_gpu(chosen) if "nccl" in found.lower() else "", _GPU_REMEDY),
            }
        )
        # torch.mps has one device, and nothing to select it with.
        if chosen.type != "cpu" and hasattr(torch.get_device_module(chosen), "set_device"):
            torch.get_device_module(chosen).set_device(chosen)
        dist.init_process_group(
            found,
            store=coordinator.run_store("launch.init", timeout or default_pg_timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=chosen if binds and chosen.type != "cpu" else None,
        )
    set_default_coordinator(coordinator)
    return chosen


_GPU_REMEDY = (
    "NCCL needs one for each rank: start one process for each GPU, and let the launcher set LOCAL_RANK, or show each "
    "process its own GPU, or use backend='gloo'"
)


def _gpu(device: torch.device) -> str:
    """Return the UUID and the host of this process's GPU; nothing if it has none, or does not tell."""
    try:
        uuid = torch.get_device_module(device).get_device_properties(device).uuid
    except (AssertionError, AttributeError):  # torch was built without this device, or the device has no UUID
        return ""
    # The index is left out: it counts what is visible, which may differ between processes that share a GPU.
    return f"{uuid} of host {socket.gethostname()}"


def was_launched() -> bool:
    """Return whether torchrun or another launcher started this process; ``WORLD_SIZE=1`` alone is a world of one."""
    return "RANK" in os.environ or int_variable(os.environ, "WORLD_SIZE") not in {None, 1}


def open_store(environment: Mapping[str, str], rank: int, timeout: timedelta) -> dist.Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``, as torch's ``env://`` does, without waiting for all ranks."""
    of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=rank == 0 and not of_agent,
        timeout=timeout,
        wait_for_workers=False,  # the agreement waits, and names the missing ones
        multi_tenant=True,
        use_libuv=environment.get("USE_LIBUV", "1") == "1",
    )


def local_device(
    device: str | torch.device | None = None, environment: Mapping[str, str] = os.environ
) -> torch.device:
    """Return the device that this process should use, as for :func:`init`; LaunchError if it is not there."""
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
        visible = f"{format_count(count, f'{wanted.type} device')} {'is' if count == 1 else 'are'} visible to this process"
        raise LaunchError(
            f"device {wanted.type}:{index} is not there: {visible}; start one process for each device, make more devices "
            "visible, or use device='cpu'"
        )
    return torch.device(wanted.type, index)


def default_group_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device that goes with a default group which exists already.

    It is the one that was asked for, the one that the group is bound to, or the current one, in this order.
    """
    backend, bound = dist.get_backend(), bound_device()
    if backend == "fake":  # stands for any hardware, also for one that is not here
        return torch.device("cpu" if device is None else device)
    if device is None and bound is None and backend in ("gloo", "mpi"):
        return torch.device("cpu")
    wanted = _wanted(device or bound)
    if wanted.type == "cpu" or ":" in str(wanted):  # one device, by its number
        return local_device(wanted)
    if bound is not None and bound.type == wanted.type:
        return bound
    module = torch.get_device_module(wanted.type)
    if module.is_available() and module.is_initialized():
        return torch.device(wanted.type, module.current_device())
    chosen = local_device(wanted)
    module.set_device(chosen)
    return chosen


def _wanted(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    backend = dist.Backend.default_device_backend_map.get(found.type, "")
    # torch names gloo for Apple's devices, and gloo does not take their tensors.
    served = dist.Backend.backend_capability.get(backend, ())
    return torch.device(found.type if found.type in served else "cpu")


def _check_environment(environment: Mapping[str, str]) -> None:
    missing = [name for name in _VARIABLES if name not in environment]
    if missing:
        present = [name for name in _VARIABLES if name in environment]
        raise LaunchError(
            f"{format_items(present)} {'is' if len(present) == 1 else 'are'} set, but not {format_items(missing)}; start the "
            "script with torchrun, or unset all of them for a world of one"
        )
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    rank, world, port = (int_variable(environment, name) or 0 for name in names)
    problems = []
    if not 0 <= rank < world:
        problems.append(
            f"RANK is {rank} and WORLD_SIZE is {world}; a rank is at least 0 and below the world size"
        )
    if not 0 < port < 2**16:
        problems.append(f"MASTER_PORT is {port}; a port is at least 1 and below 65536")
    if problems:
        raise LaunchError(*problems)


# What other launchers set.

_DEFAULT_PORT = 29500  # what torch itself uses where nothing else is known
# Shells that SLURM starts for an allocation are no tasks of a parallel step.
_FIRST_STEP_OF_A_SHELL = 0xFFFFFFF0
# What tells two jobs apart that may share a machine, the narrowest first.
_JOB_IDS = (
    "PALS_APID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PBS_JOBID",
    "LSB_JOBID",
    "SLURM_JOB_ID",
)
_HOST_FILES = ("PALS_HOSTFILE", "HYDRA_HOST_FILE", "PBS_NODEFILE")
_SLURM_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_LOCAL = {"LOCAL_RANK": "local_rank", "LOCAL_WORLD_SIZE": "local_size"}


class _Launcher(NamedTuple):
    """One launcher, and its variables; of several for one thing, the first that is set counts."""

    name: str
    command: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    nodes: str = ""

    def started(self, environment: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process."""
        if self.name == "SLURM":  # the shell of an allocation has the other variables too
            step = int_variable(environment, "SLURM_STEP_ID")
            return step is not None and step < _FIRST_STEP_OF_A_SHELL
        return any(name in environment for name in (self.rank, self.size))

    def place(self, environment: Mapping[str, str]) -> dict[str, int]:
        """Return what it says of this process: rank, size, local rank and size, nodes, as far as it does."""
        place: dict[str, int] = {}
        for what in ("rank", "size", "local_rank", "local_size", "nodes"):
            for name in getattr(self, what).split():
                number = int_variable(environment, name)
                if number is not None:
                    place.setdefault(what, number)
        return place


# From the innermost: mpirun starts its daemons with srun, so its processes also carry what srun set for these.
_LAUNCHERS = (
    _Launcher(
        name="Open MPI",
        command="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        name="PALS",
        command="mpiexec",
        rank="PALS_RANKID",
        size="",  # MPICH's variable, which PALS sets too
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
    ),
    _Launcher(
        name="MPICH",
        command="mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID PMI_LOCAL_RANK MPICH_LOCALRANKID",
        local_size="MPI_LOCALNRANKS PMI_LOCAL_SIZE MPICH_LOCALNRANKS",
    ),
    _Launcher(
        name="SLURM",
        command="srun",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        nodes="SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES",
    ),
)


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set for this process, as far as another launcher has it and it is not set yet.

    Variables of torchrun that are set take precedence. Nothing is returned for a process that no launcher
    started, such as a shell inside an allocation, or for one that it started alone.

    Raises:
        LaunchError: a launcher started several processes, but does not say which of them this is, how many
            they are or where the first one runs; or the variables of torchrun contradict it.

    Example:
        >>> variables = torchrun_variables({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
        >>> ", ".join(f"{name} {value}" for name, value in variables.items())
        'RANK 1, WORLD_SIZE 2, LOCAL_WORLD_SIZE 2, MASTER_ADDR 127.0.0.1, MASTER_PORT 29500'
        >>> torchrun_variables({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"})   # a shell of salloc
        {}
    """
    launchers = [launcher for launcher in _LAUNCHERS if launcher.started(environment)]
    if not launchers:
        return {}
    launcher, hosts = launchers[0], ""
    place = launcher.place(environment)
    for each in launchers:
        other = each.place(environment)
        sizes = {one["size"] for one in (place, other) if "size" in one}
        if place.get("rank") != other.get("rank") or len(sizes) > 1:
            continue  # it started other processes: daemons of the inner one
        place = other | place
        if each.name == "SLURM":
            hosts = _first_set(environment, _SLURM_HOSTS)
    # Of the inner one: the daemons of mpirun are a step of SLURM's, and what mpirun starts beside them is none.
    job = _first_set(environment, _JOB_IDS)
    if launcher.name == "SLURM":
        job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    given = {"rank": int_variable(environment, "RANK"), "size": int_variable(environment, "WORLD_SIZE")}
    if None not in given.values() and given != {what: place.get(what) for what in given}:
        return {}  # started by something else within: torchrun, or a test
    size = place.get("size", given["size"])
    if size == 1 and given["size"] in (None, 1):
        return {}
    _check_place(launcher, place, given, size)
    found: dict[str, object] = {"RANK": place["rank"], "WORLD_SIZE": size}
    found |= {name: place[what] for name, what in _LOCAL.items() if what in place}
    if "MASTER_ADDR" not in environment:
        alone = place.get("nodes") == 1 or place.get("local_size") == size
        found["MASTER_ADDR"] = "127.0.0.1" if alone else _address(launcher, size, hosts, environment)
    found["MASTER_PORT"] = 15000 + crc32(job.encode()) % 15000 if job else _DEFAULT_PORT
    return {name: str(value) for name, value in found.items() if name not in environment}


def _check_place(
    launcher: _Launcher, place: Mapping[str, int], given: Mapping[str, int | None], size: int | None
) -> None:
    """Refuse a place that is not whole, or does not fit what is set already."""
    for name, what in (("RANK", "rank"), ("WORLD_SIZE", "size")):
        if given[what] is not None and given[what] != place.get(what, given[what]):
            raise LaunchError(
                f"{name} is {given[what]}, but {launcher.name} says {place[what]}; unset {name}"
            )
    rank, sizes = place.get("rank"), launcher.size.split() or ["WORLD_SIZE"]
    if rank is None or size is None or not 0 <= rank < size:
        raise LaunchError(
            f"{launcher.name} gives this process rank {rank} of {size} ({launcher.rank}, {' or '.join(sizes)}); start the "
            f"script with {launcher.command}, or unset these variables for a world of one"
        )


def _first_set(environment: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environment[name] for name in names if name in environment), "")


def _address(launcher: _Launcher, size: object, hosts: str, environment: Mapping[str, str]) -> str:
    """Return where rank 0 runs: the first of some hosts, of the launcher's file, or of the allocation."""
    file = _first_set(environment, _HOST_FILES)
    if file and not hosts:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        named = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return named[0].partition(":")[0]  # a number of slots may follow
    hosts = hosts or environment.get("SLURM_JOB_NODELIST", "")
    if not hosts:
        raise LaunchError(
            f"{launcher.name} started {size} processes, but does not say on which host rank 0 is; set MASTER_ADDR to that "
            "host (127.0.0.1 if all are on one)"
        )
    return first_host(hosts)


def first_host(hosts: str) -> str:
    """Return the first host of a list in SLURM's short form; LaunchError where there is none.

    Example:
        >>> first_host("node[003-005,7],gpu1"), first_host("gpu1,node[1-2]"), first_host("r[1-2]n[04,06]")
        ('node003', 'gpu1', 'r1n04')
    """
    first = re.match(r"(?:[^,\[\]\s]|\[\w+(?:[-,]\w+)*\])+(?=,|$)", hosts.strip())
    if first is None:
        raise LaunchError(
            f"{hosts!r} is not a list of hosts such as 'node[003-005,7],gpu1'; set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def int_variable(environment: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable that holds an int; None if it is not set, LaunchError if it is something else."""
    text = environment.get(name)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise LaunchError(
            f"{name} is {text!r}; it is an int that the launcher sets, such as torchrun"
        ) from None
