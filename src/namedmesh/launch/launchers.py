"""Read the environment variables with which launchers describe a job and its processes.

torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. SLURM,
Open MPI, MPICH and PALS give each process its rank in variables of their own, but no address at
which the ranks can connect. namedmesh uses the first host of the job, and a port that is computed
from the job's id. A process without any of these variables is a single-process run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from namedmesh._errors import LaunchError, format_items

_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The port that torch itself uses by default.
_DEFAULT_PORT = 29500
# SLURM counts the steps of a job from 0. It gives numbers from here on to the shell of salloc, to
# the script of sbatch and the like, which are not tasks of a parallel step.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Variables that differ between two jobs on the same host, the most specific one first.
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


class _Launcher(NamedTuple):
    """A launcher, and the variables that it sets in each process.

    If several variables have the same meaning, the first one that is set counts.

    Attributes:
        name: the name of the launcher, for messages.
        command: the command that starts a job.
        rank: the variables with the global rank.
        world_size: the variables with the number of processes of the job.
        local_rank: the variables with the rank among the processes of this host.
        local_world_size: the variables with the number of processes on this host.
        num_nodes: the variables with the number of hosts.
    """

    name: str
    command: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()

    def has_started(self, environment: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process.

        Args:
            environment: the environment of this process.
        """
        if self.name == "SLURM":
            # The shell of an allocation has the other variables of SLURM too.
            step = read_int(environment, "SLURM_STEP_ID")
            return step is not None and step < _FIRST_SPECIAL_STEP
        return any(name in environment for name in (*self.rank, *self.world_size))

    def read(self, environment: Mapping[str, str]) -> dict[str, int]:
        """Return the ints in the variables that are set, by the attribute that lists them.

        Args:
            environment: the environment of this process.
        """
        numbers = {}
        for field in ("rank", "world_size", "local_rank", "local_world_size", "num_nodes"):
            number = read_int(environment, *getattr(self, field))
            if number is not None:
                numbers[field] = number
        return numbers


# The innermost launcher comes first: mpirun starts its daemons with srun, so that its processes
# also have the variables that srun set for the daemons.
_LAUNCHERS = (
    _Launcher(
        name="Open MPI",
        command="mpirun",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        name="PALS",
        command="mpiexec",
        rank=("PALS_RANKID",),
        # PALS has no variable of its own for it, and sets MPICH's.
        world_size=(),
        local_rank=("PALS_LOCAL_RANKID",),
        local_world_size=("PALS_LOCAL_SIZE",),
    ),
    _Launcher(
        name="MPICH",
        command="mpiexec",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MPICH_LOCALRANKID"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MPICH_LOCALNRANKS"),
    ),
    _Launcher(
        name="SLURM",
        command="srun",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    ),
)


def was_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or another launcher has started this process.

    ``WORLD_SIZE=1`` without ``RANK`` is a single-process run, as some containers set it.

    Args:
        environment: the environment of this process.
    """
    return "RANK" in environment or read_int(environment, "WORLD_SIZE") not in {None, 1}


def find_launcher(environment: Mapping[str, str]) -> str:
    """Return the name of the launcher that started this process; empty without one.

    Args:
        environment: the environment of this process.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    for launcher in _LAUNCHERS:
        if launcher.has_started(environment):
            return launcher.name
    return "RANK and WORLD_SIZE" if was_launched(environment) else ""


def check_torchrun_variables(environment: Mapping[str, str]) -> None:
    """Check that torchrun's variables are complete and valid.

    Args:
        environment: the environment of this process.

    Raises:
        LaunchError: variables are missing or not valid; all problems at once.
    """
    missing = [name for name in _REQUIRED_VARIABLES if name not in environment]
    if missing:
        present = [name for name in _REQUIRED_VARIABLES if name in environment]
        verb = "is" if len(present) == 1 else "are"
        raise LaunchError(
            f"{format_items(present)} {verb} set, but not {format_items(missing)}; start the "
            "script with torchrun, or unset all of them for a single-process run"
        )
    rank = read_int(environment, "RANK") or 0
    world_size = read_int(environment, "WORLD_SIZE") or 0
    port = read_int(environment, "MASTER_PORT") or 0
    problems = []
    if not 0 <= rank < world_size:
        problems.append(
            f"RANK must be at least 0 and less than WORLD_SIZE, got RANK={rank} and WORLD_SIZE={world_size}"
        )
    address = environment["MASTER_ADDR"]
    # torch would look for such a host until the timeout.
    if not re.fullmatch(r"[^\s\[\]/]+", address):
        problems.append(
            "MASTER_ADDR must be the name or the address of a host, without spaces, brackets or "
            f"slashes, such as node0, 10.0.0.1 or ::1, got {address!r}"
        )
    if not 0 < port < 2**16:
        problems.append(f"MASTER_PORT must be at least 1 and less than 65536, got {port}")
    if problems:
        raise LaunchError(*problems)


def make_torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Convert the variables of another launcher to the ones that torchrun would have set.

    Variables of torchrun that are set take precedence and are not returned.

    Args:
        environment: the environment of this process.

    Returns:
        The missing variables. Empty if no launcher started the process, as in a shell of an
        allocation, or if it is the only process of its job.

    Raises:
        LaunchError: a launcher started several processes, but the rank of this process, their
            number or the host of rank 0 is not known; or the variables of torchrun contradict the
            launcher.

    Example:
        >>> mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
        >>> variables = make_torchrun_variables(mpich)
        >>> ", ".join(f"{name} {value}" for name, value in variables.items())
        'RANK 1, WORLD_SIZE 2, LOCAL_WORLD_SIZE 2, MASTER_ADDR 127.0.0.1, MASTER_PORT 29500'
        >>> make_torchrun_variables({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"})   # a shell of salloc
        {}
    """
    launchers = [launcher for launcher in _LAUNCHERS if launcher.has_started(environment)]
    if not launchers:
        return {}
    innermost = launchers[0]
    numbers = innermost.read(environment)
    hosts = ""
    for launcher in launchers:
        others = launcher.read(environment)
        world_size = others.get("world_size")
        is_same_job = world_size is None or numbers.get("world_size", world_size) == world_size
        if others.get("rank") != numbers.get("rank") or not is_same_job:
            # It started the daemons of the inner launcher, and not this process.
            continue
        # The inner launcher does not know everything: srun --mpi=pmi2 sets the variables of MPICH,
        # without a local rank.
        numbers = others | numbers
        if launcher.name == "SLURM":
            hosts = _find_first_set(environment, _SLURM_HOSTS)
    rank_given = read_int(environment, "RANK")
    world_size_given = read_int(environment, "WORLD_SIZE")
    is_given = rank_given is not None and world_size_given is not None
    if is_given and (rank_given, world_size_given) != (numbers.get("rank"), numbers.get("world_size")):
        # A process of the launcher has started this one in its turn: with torchrun, or as a test.
        return {}
    numbers.setdefault("world_size", world_size_given or 0)
    if numbers["world_size"] == 1 and world_size_given in {None, 1}:
        return {}
    _check_numbers(innermost, numbers, {"RANK": rank_given, "WORLD_SIZE": world_size_given})
    variables: dict[str, object] = {"RANK": numbers["rank"], "WORLD_SIZE": numbers["world_size"]}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name.lower() in numbers:
            variables[name] = numbers[name.lower()]
    if "MASTER_ADDR" not in environment:
        variables["MASTER_ADDR"] = _find_address(innermost, numbers, hosts, environment)
    variables["MASTER_PORT"] = _choose_port(innermost, environment)
    return {name: str(value) for name, value in variables.items() if name not in environment}


def _check_numbers(launcher: _Launcher, numbers: Mapping[str, int], given: Mapping[str, int | None]) -> None:
    """Check that a launcher's variables are complete and agree with torchrun's.

    Args:
        launcher: the launcher.
        numbers: the result of :meth:`_Launcher.read`.
        given: the values of torchrun's variables; None for a variable that is not set.

    Raises:
        LaunchError: they are not complete, or they differ.
    """
    for name, value in given.items():
        reported = numbers.get(name.lower(), value)
        if value is not None and value != reported:
            raise LaunchError(f"{name} is {value}, but {launcher.name} reports {reported}; unset {name}")
    rank = numbers.get("rank")
    world_size = numbers["world_size"] or None
    if rank is None or world_size is None or not 0 <= rank < world_size:
        world_size_names = " or ".join(launcher.world_size or ("WORLD_SIZE",))
        variables = f"{' or '.join(launcher.rank)}, {world_size_names}"
        raise LaunchError(
            f"{launcher.name} gives this process rank {rank} of {world_size} ({variables}); start "
            f"the script with {launcher.command}, or unset these variables for a single-process run"
        )


def _find_first_set(environment: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the value of the first variable that is set; empty if there is none."""
    for name in names:
        if name in environment:
            return environment[name]
    return ""


def _choose_port(launcher: _Launcher, environment: Mapping[str, str]) -> int:
    """Return a port that is the same in every process of a job, and differs between most jobs."""
    # The id of the inner launcher comes first: several runs of mpirun may share one step of SLURM.
    job = _find_first_set(environment, _JOB_IDS)
    if launcher.name == "SLURM":
        job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    if not job:
        return _DEFAULT_PORT
    # The system gives ports from 32768 on to connections of any program.
    return 15000 + crc32(job.encode()) % 15000


def _find_address(
    launcher: _Launcher, numbers: Mapping[str, int], hosts: str, environment: Mapping[str, str]
) -> str:
    """Return the host of rank 0.

    Args:
        launcher: the launcher of the process.
        numbers: the result of :meth:`_Launcher.read`.
        hosts: the hosts of the job in SLURM's format; empty if they are not known.
        environment: the environment of the process.

    Raises:
        LaunchError: the host of rank 0 is not known.
    """
    world_size = numbers["world_size"]
    if numbers.get("num_nodes") == 1 or numbers.get("local_world_size") == world_size:
        return "127.0.0.1"
    file = _find_first_set(environment, _HOST_FILES)
    if file and not hosts:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                # The host may be followed by a number of slots: "host:4" or "host slots=4".
                return line.split()[0].partition(":")[0]
    hosts = hosts or environment.get("SLURM_JOB_NODELIST", "")
    if not hosts:
        raise LaunchError(
            f"{launcher.name} started {world_size} processes, but the host of rank 0 is not known; "
            "set MASTER_ADDR to that host (127.0.0.1 if all processes are on one host)"
        )
    return find_first_host(hosts)


def find_first_host(hosts: str) -> str:
    """Return the first host of a list in SLURM's compressed format.

    Args:
        hosts: the hosts, such as SLURM lists them in ``SLURM_JOB_NODELIST``.

    Raises:
        LaunchError: the text is not such a list.

    Example:
        >>> find_first_host("node[003-005,7],gpu1"), find_first_host("r[1-2]n[04,06]")
        ('node003', 'r1n04')
    """
    # A host is made of plain characters and of ranges in brackets. A comma in brackets does not end
    # it.
    first = re.match(r"(?:[^,\[\]\s]|\[\w+(?:[-,]\w+)*\])+(?=,|$)", hosts.strip())
    if first is None:
        raise LaunchError(
            f"{hosts!r} is not a list of hosts such as 'node[003-005,7],gpu1'; set MASTER_ADDR to "
            "the host of rank 0"
        )
    # The first number of each range belongs to the first host.
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def read_int(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first variable that is set; None if there is none.

    Args:
        environment: the environment of a process.
        *names: the names of variables that hold an int.

    Raises:
        LaunchError: the value is not an int.
    """
    for name in names:
        if name in environment:
            try:
                return int(environment[name])
            except ValueError:
                raise LaunchError(
                    f"{name} must be an int, as torchrun or another launcher sets it, got "
                    f"{environment[name]!r}"
                ) from None
    return None
