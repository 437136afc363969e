"""What SLURM, Open MPI, MPICH and PALS set for a process, as the variables that torchrun sets.

Each of them gives a process its rank in variables of its own, but none gives the address at which the ranks
meet: that is the first host of the job, and a port that follows from the job's id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from namedmesh.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

# What torch itself uses where nothing else is known.
_DEFAULT_PORT = 29500
# The shells that SLURM starts for an allocation have step ids from here on: they are no tasks of a parallel step.
_FIRST_STEP_OF_A_SHELL = 0xFFFFFFF0
# What distinguishes two jobs that may share a machine, the narrowest first.
_JOB_IDS = (
    "PALS_APID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PBS_JOBID",
    "LSB_JOBID",
    "SLURM_JOB_ID",
)
_HOST_FILES = ("PALS_HOSTFILE", "HYDRA_HOST_FILE", "PBS_NODEFILE")


class _Launcher(NamedTuple):
    """The names of the variables of one launcher; of several for one thing, the first that is set counts."""

    name: str
    command: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    host_list: tuple[str, ...] = ()

    def started(self, environment: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process."""
        if self.name == "SLURM":  # the shell of an allocation has the other variables too
            step = int_variable(environment, "SLURM_STEP_ID")
            return step is not None and step < _FIRST_STEP_OF_A_SHELL
        return any(name in environment for name in self.rank + self.size)


# From the innermost: mpirun starts its daemons with srun, so its processes also carry what srun set for these.
_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "mpirun",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "PALS",
        "mpiexec",
        rank=("PALS_RANKID",),
        size=(),  # that is in PMI_SIZE
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE",),
    ),
    _Launcher(
        "MPICH",
        "mpiexec",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MPICH_LOCALRANKID"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MPICH_LOCALNRANKS"),
    ),
    _Launcher(
        "SLURM",
        "srun",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        host_list=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    ),
)


class _Place:
    """What a launcher says of one process; what it leaves open is None, or an empty text."""

    def __init__(self, launcher: _Launcher, environment: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.rank = _int_of(environment, launcher.rank)
        self.size = _int_of(environment, launcher.size)
        self.local_rank = _int_of(environment, launcher.local_rank)
        self.local_size = _int_of(environment, launcher.local_size)
        self.nodes = _int_of(environment, launcher.nodes)
        self.host_list = _first_set(environment, launcher.host_list)
        if launcher.name == "SLURM":
            self.job = ".".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        else:
            self.job = _first_set(environment, _JOB_IDS)

    def complete(self, other: _Place) -> None:
        """Take what the other place knows and this one does not, if it is about the same processes."""
        if self.rank != other.rank or (None not in (self.size, other.size) and self.size != other.size):
            return
        for name, value in vars(other).items():
            if getattr(self, name) in (None, ""):
                setattr(self, name, value)


def _first_set(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name] for name in names if name in environment), "")


def _int_of(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int_variable(environment, name) for name in names if name in environment), None)


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set for this process, as far as another launcher has it and it is not set yet.

    Variables of torchrun that are set take precedence. Nothing is returned for a process that no launcher
    started, such as a shell inside an allocation, or for one that it started alone.

    Args:
        environment: the variables of the process.

    Raises:
        LaunchError: a launcher started several processes, but does not say which of them this is, how many
            they are or where the first one runs; or the variables of torchrun contradict it.

    Example:
        >>> variables = torchrun_variables({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
        >>> for name, value in variables.items():
        ...     print(name, value)
        RANK 1
        WORLD_SIZE 2
        LOCAL_WORLD_SIZE 2
        MASTER_ADDR 127.0.0.1
        MASTER_PORT 29500
        >>> torchrun_variables({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"})   # a shell of salloc
        {}
    """
    places = [_Place(launcher, environment) for launcher in _LAUNCHERS if launcher.started(environment)]
    if not places:
        return {}
    place = places[0]
    for other in places[1:]:
        place.complete(other)
    given = {name: int_variable(environment, name) for name in ("RANK", "WORLD_SIZE")}
    from_launcher = {"RANK": place.rank, "WORLD_SIZE": place.size}
    if None not in given.values() and given != from_launcher:
        return {}  # started by something else within: torchrun, or a test
    size = place.size if place.size is not None else given["WORLD_SIZE"]
    if size == 1 and given["WORLD_SIZE"] in (None, 1):
        return {}
    _check(place, given, size, environment)
    found: dict[str, object] = {
        "RANK": place.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
    }
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = _address(place, size, environment)
    found["MASTER_PORT"] = 15000 + crc32(place.job.encode()) % 15000 if place.job else _DEFAULT_PORT
    return {
        name: str(value) for name, value in found.items() if value is not None and name not in environment
    }


def first_host(hosts: str) -> str:
    """Return the first host of a list in SLURM's short form.

    Raises:
        LaunchError: there is no host in it, or a bracket is not closed.

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
    """Return the value of a variable that holds an int; None if it is not set.

    Raises:
        LaunchError: it is set to something else.

    Example:
        >>> int_variable({"RANK": "3"}, "RANK")
        3
    """
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{name} is {text!r}; it is an int that the launcher sets, such as torchrun"
        ) from None


def _check(
    place: _Place, given: Mapping[str, int | None], size: int | None, environment: Mapping[str, str]
) -> None:
    """Check that a place is complete, and that what is set already fits it."""
    launcher, problems = place.launcher, []
    sizes = launcher.size or ("PMI_SIZE",)
    where = next((name for name in sizes if name in environment), sizes[0])
    for name, value in (("RANK", place.rank), ("WORLD_SIZE", place.size)):
        if None not in (given[name], value) and given[name] != value:
            problems.append(f"{name} is {given[name]}, but {launcher.name} says {value}; unset {name}")
    if place.rank is None:
        problems.append(
            f"{where} is {size}, but {launcher.rank[0]} is not set; start the script with {launcher.command}, or "
            f"unset {where} for a world of one"
        )
    elif size is None:
        problems.append(
            f"{launcher.rank[0]} is {place.rank}, but {where} is not set; set WORLD_SIZE to the number of ranks"
        )
    elif not 0 <= place.rank < size:
        problems.append(
            f"{launcher.name} gives this process rank {place.rank} of {size}; a rank is at least 0 and below the "
            "number of ranks"
        )
    if problems:
        raise LaunchError(*problems)


def _address(place: _Place, size: int | None, environment: Mapping[str, str]) -> str:
    """Return where rank 0 runs."""
    if place.nodes == 1 or place.local_size == size:
        return "127.0.0.1"
    if place.host_list:
        return first_host(place.host_list)
    for name in _HOST_FILES:
        if name in environment:
            return _first_line(name, environment[name])
    if "SLURM_JOB_NODELIST" in environment:
        return first_host(environment["SLURM_JOB_NODELIST"])
    raise LaunchError(
        f"{place.launcher.name} started {size} processes, but does not say on which host rank 0 is; set MASTER_ADDR "
        "to that host (127.0.0.1 if all are on one)"
    )


def _first_line(variable: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123  a str is as good as a Path here
            words = [line.split()[0] for line in file if line.strip() and not line.lstrip().startswith("#")]
    except OSError as error:
        raise LaunchError(
            f"{variable} is {path!r}, which cannot be read: {error.strerror}; set MASTER_ADDR to the host of rank 0"
        ) from None
    if not words:
        raise LaunchError(
            f"{variable} is {path!r}, which names no host; set MASTER_ADDR to the host of rank 0"
        )
    return words[0].partition(":")[0]  # a number of slots may follow
