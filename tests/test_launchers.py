"""Processes with the variables of SLURM, Open MPI, MPICH and PALS find each other, or say what is missing."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from messages import says
from ranks import free_port, run_ranks

from namedmesh import LaunchError, launch
from namedmesh.launch import first_host, torchrun_variables

if TYPE_CHECKING:
    from pathlib import Path

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "PALS_", "MPI_", "PBS_")


def _reduced(worlds: list[dict[str, str]]) -> tuple[int, int, float, dict[str, str | None]]:
    """A sum over the world that these variables of a launcher make, one dict for each process."""
    variables = worlds[int(os.environ["RANK"])]
    for name in [name for name in os.environ if name.startswith((*OF_LAUNCHERS, "TORCHELASTIC_"))]:
        del os.environ[name]
    os.environ.update(variables)
    launch.init("cpu")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    found = (
        dist.get_rank(),
        dist.get_world_size(),
        total.item(),
        {name: os.environ.get(name) for name in names},
    )
    dist.barrier()
    dist.destroy_process_group()
    return found


def slurm(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(size),
        "SLURM_STEP_NODELIST": "localhost,node[003-005]",
        "SLURM_JOB_NODELIST": "node[001-005],localhost",
    }


def open_mpi(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
    }


def mpich(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
    }


def pals(rank: int, hosts: str) -> dict[str, str]:
    return {
        "PALS_RANKID": str(rank),
        "PALS_LOCAL_RANKID": "0",
        "PALS_LOCAL_SIZE": "1",
        "PALS_APID": "6dd1b0a3",
        "PMI_SIZE": "2",
        "PMI_RANK": str(rank),
        "PBS_NODEFILE": hosts,
        "PBS_JOBID": "815.server",
    }


def printed(capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What went to stdout and to stderr, without what gloo says of its connections up to torch 2.10."""
    out, err = capfd.readouterr()
    if "[Gloo] Rank" in out:  # of several ranks at once, which write each part of the sentence by itself
        parts = r"\[Gloo\] Rank|is connected to|Expected number of connected|peer ranks\.?|is :|\d|\s"
        out = re.sub(parts, "", out)
    return out, err


@pytest.mark.parametrize("launcher", ["slurm", "open_mpi", "mpich", "pals"])
def test_processes_of_a_launcher_are_one_world(
    launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost\nx3001c0s1b0n0\n", encoding="utf-8")
    port = str(free_port())
    worlds = []
    for rank in range(2):
        ours = {"slurm": slurm, "open_mpi": open_mpi, "mpich": mpich}.get(launcher)
        variables = ours(rank) if ours else pals(rank, str(hosts))
        worlds.append(variables | {"MASTER_PORT": port})
    spread = launcher in ("slurm", "pals")  # one process on each of two nodes
    assert run_ranks(2, _reduced, worlds, init=False) == [
        (
            rank,
            2,
            3.0,
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0" if spread else str(rank),
                "MASTER_ADDR": "localhost" if spread else "127.0.0.1",
            },
        )
        for rank in range(2)
    ]
    assert printed(capfd) == ("", "")


@pytest.mark.parametrize(
    "variables",
    [
        slurm(0, 1),
        # a shell of salloc, the script of sbatch, and a shell that salloc starts in a step of its own
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-4]"},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        open_mpi(0, 1),
        mpich(0, 1),
        {},
    ],
)
def test_a_process_alone_is_a_world_of_one(variables: dict[str, str]) -> None:
    assert torchrun_variables(variables) == {}


def test_a_shell_of_an_allocation_does_not_wait(capfd: pytest.CaptureFixture[str]) -> None:
    shell = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    ((rank, size, total, _),) = run_ranks(1, _reduced, [shell], init=False)
    assert (rank, size, total) == (0, 1, 1.0)
    assert printed(capfd) == ("", "")


def test_torchrun_comes_first() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert torchrun_variables(slurm(1) | torchrun) == {}
    assert torchrun_variables(slurm(0, 1) | torchrun) == {}


def test_what_is_set_already_is_completed() -> None:
    """Scripts that export an address, or rank and size alone, before srun."""
    address = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    found = torchrun_variables(slurm(1) | address | {"WORLD_SIZE": "2"})
    assert found == {"RANK": "1", "LOCAL_RANK": "0"}
    found = torchrun_variables(slurm(1) | {"RANK": "1", "WORLD_SIZE": "2"})
    assert found == {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": found["MASTER_PORT"]}


def test_mpirun_inside_slurm() -> None:
    """mpirun starts a daemon on each node with srun; its processes see what srun told the daemon."""
    daemon = slurm(1, 2) | {"SLURM_JOB_NODELIST": "node[007-009]", "SLURM_STEP_NODELIST": "node[008-009]"}
    found = torchrun_variables(daemon | mpich(5, 8) | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"})
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "8")
    assert (found["LOCAL_RANK"], found["MASTER_ADDR"]) == ("1", "node007")


def test_srun_with_pmi() -> None:
    """srun --mpi=pmi2 sets both; what PMI does not tell, SLURM does."""
    found = torchrun_variables(slurm(1) | {"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (found["RANK"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == ("1", "0", "localhost")


def test_ports_tell_jobs_apart() -> None:
    def port(**other: str) -> int:
        return int(torchrun_variables(slurm(0) | other)["MASTER_PORT"])

    ports = {port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(40) for step in range(4)}
    assert len(ports) > 150
    assert all(15000 <= port < 30000 for port in ports)  # below those that systems hand out
    assert port() == int(torchrun_variables(slurm(1))["MASTER_PORT"])


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[003-005,7],gpu1", "node003"),
        ("gpu1,node[003-005]", "gpu1"),
        ("rack[1-2]node[03,05]-ib", "rack1node03-ib"),
        ("x1000c0s0b0n0", "x1000c0s0b0n0"),
        ("nid[000012]", "nid000012"),
        ("a.cluster.org,b", "a.cluster.org"),
    ],
)
def test_first_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


REFUSED: list[tuple[dict[str, str], str]] = [
    (
        {"PMI_SIZE": "4"},
        "MPICH gives this process rank None of 4 (PMI_RANK, PMI_SIZE); start the script with mpiexec, or unset these "
        "variables for a world of one",
    ),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "SLURM gives this process rank None of 4 ..."),
    ({"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "0"}, "PALS gives this process rank 3 of None ..."),
    (
        {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"},
        "Open MPI gives this process rank 4 of 4 ...",
    ),
    (
        open_mpi(1, 4) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "Open MPI started 4 processes, but does not say on which host rank 0 is; set MASTER_ADDR to that host "
        "(127.0.0.1 if all are on one)",
    ),
    (slurm(1) | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but SLURM says 2; unset WORLD_SIZE"),
    (
        slurm(1) | {"SLURM_LOCALID": "first"},
        "SLURM_LOCALID is 'first'; it is an int that the launcher sets, such as torchrun",
    ),
    (
        slurm(1) | {"SLURM_STEP_NODELIST": "node[1-"},
        "'node[1-' is not a list of hosts such as 'node[003-005,7],gpu1'; set MASTER_ADDR to the host of rank 0",
    ),
]


@pytest.mark.parametrize(("variables", "text"), REFUSED)
def test_what_is_not_whole_is_refused(variables: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError, match=says(text)):
        torchrun_variables(variables)


def test_the_remedies_work() -> None:
    assert torchrun_variables({}) == {}
    alone = open_mpi(1, 4) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert torchrun_variables(alone)["RANK"] == "1"
    sized = torchrun_variables({"PALS_RANKID": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head"})
    assert sized["RANK"] == "3"
