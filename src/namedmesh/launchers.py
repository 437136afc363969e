"""What SLURM, Open MPI, MPICH and PALS set for a process, as the variables that torchrun sets.

Each of them gives a process its rank in variables of its own, but none gives the address at which the ranks
meet: that is the first host of the job, and a port that follows from the job's id.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from namedmesh.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEFAULT_PORT = 29500  # what torch itself uses where nothing else is known
_FIRST_STEP_OF_A_SHELL = (
    0xFFFFFFF0  # shells that SLURM starts for an allocation are no tasks of a parallel step
)
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


class _Launcher(NamedTuple):
    """The variables of one launcher; of several for one thing, the first that is set counts."""

    name: str
    command: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    nodes: str = ""
    hosts: str = ""

    def started(self, environment: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process."""
        if self.name == "SLURM":  # the shell of an allocation has the other variables too
            step = int_variable(environment, "SLURM_STEP_ID")
            return step is not None and step < _FIRST_STEP_OF_A_SHELL
        return any(name in environment for name in (self.rank, self.size))

    def place(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return what it says of this process; None for what it leaves open."""
        place: dict[str, Any] = {}
        for what in ("rank", "size", "local_rank", "local_size", "nodes"):
            names = [name for name in getattr(self, what).split() if name in environment]
            place[what] = int_variable(environment, names[0]) if names else None
        place["hosts"] = _first_set(environment, self.hosts.split())
        place["job"] = _first_set(environment, _JOB_IDS)
        if self.name == "SLURM":
            place["job"] = ".".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
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
        hosts="SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_NODELIST",
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
    place, *others = [launcher.place(environment) for launcher in launchers]
    for other in others:  # what the outer one knows besides, if it is about the same processes
        if place["rank"] == other["rank"] and (
            None in (place["size"], other["size"]) or place["size"] == other["size"]
        ):
            place = other | {what: value for what, value in place.items() if value not in (None, "")}
    given = {"rank": int_variable(environment, "RANK"), "size": int_variable(environment, "WORLD_SIZE")}
    if None not in given.values() and given != {what: place[what] for what in given}:
        return {}  # started by something else within: torchrun, or a test
    size = given["size"] if place["size"] is None else place["size"]
    if size == 1 and given["size"] in (None, 1):
        return {}
    _check(launchers[0], place, given, size)
    found = {
        "RANK": place["rank"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": place["local_rank"],
        "LOCAL_WORLD_SIZE": place["local_size"],
    }
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = _address(launchers[0], place, size, environment)
    found["MASTER_PORT"] = 15000 + crc32(place["job"].encode()) % 15000 if place["job"] else _DEFAULT_PORT
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
    """
    text = environment.get(name)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise LaunchError(
            f"{name} is {text!r}; it is an int that the launcher sets, such as torchrun"
        ) from None


def _first_set(environment: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environment[name] for name in names if name in environment), "")


def _check(
    launcher: _Launcher, place: Mapping[str, Any], given: Mapping[str, int | None], size: int | None
) -> None:
    """Refuse a place that is not whole, or does not fit what is set already."""
    for name, what in (("RANK", "rank"), ("WORLD_SIZE", "size")):
        if None not in (given[what], place[what]) and given[what] != place[what]:
            raise LaunchError(
                f"{name} is {given[what]}, but {launcher.name} says {place[what]}; unset {name}"
            )
    rank, sizes = place["rank"], launcher.size.split() or ["WORLD_SIZE"]
    if rank is None or size is None or not 0 <= rank < size:
        raise LaunchError(
            f"{launcher.name} gives this process rank {rank} of {size} ({launcher.rank}, {' or '.join(sizes)}); start the "
            f"script with {launcher.command}, or unset these variables for a world of one"
        )


def _address(
    launcher: _Launcher, place: Mapping[str, Any], size: object, environment: Mapping[str, str]
) -> str:
    """Return where rank 0 runs."""
    if place["nodes"] == 1 or place["local_size"] == size:
        return "127.0.0.1"
    if place["hosts"]:
        return first_host(place["hosts"])
    for name in _HOST_FILES:
        if name in environment:
            lines = Path(environment[name]).read_text(encoding="utf-8").splitlines()
            hosts = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
            return hosts[0].partition(":")[0]  # a number of slots may follow
    if "SLURM_JOB_NODELIST" in environment:
        return first_host(environment["SLURM_JOB_NODELIST"])
    raise LaunchError(
        f"{launcher.name} started {size} processes, but does not say on which host rank 0 is; set MASTER_ADDR to that host "
        "(127.0.0.1 if all are on one)"
    )
