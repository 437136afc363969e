"""Processes with the variables of SLURM, Open MPI, MPICH and PALS connect, or report missing variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from messages import match_message
from ranks import free_port, run_ranks

from namedmesh import LaunchError, launch
from namedmesh.launch.launchers import find_first_host, make_torchrun_variables

if TYPE_CHECKING:
    from pathlib import Path

PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "PALS_", "MPI_", "PBS_")


def _init_and_reduce(environments: list[dict[str, str]]) -> tuple[int, int, float, dict[str, str | None]]:
    """Create the default group from a launcher's variables, by rank, and all-reduce over it."""
    variables = environments[int(os.environ["RANK"])]
    for name in [name for name in os.environ if name.startswith((*PREFIXES, "TORCHELASTIC_"))]:
        del os.environ[name]
    os.environ.update(variables)
    launch.init("cpu")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    result = (
        dist.get_rank(),
        dist.get_world_size(),
        total.item(),
        {name: os.environ.get(name) for name in names},
    )
    dist.barrier()
    dist.destroy_process_group()
    return result


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


@pytest.mark.parametrize("launcher", ["slurm", "open_mpi", "mpich", "pals"])
def test_processes_of_a_launcher_form_one_world(
    launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost\nx3001c0s1b0n0\n", encoding="utf-8")
    port = str(free_port())
    environments = []
    for rank in range(2):
        if launcher == "pals":
            variables = pals(rank, str(hosts))
        else:
            variables = {"slurm": slurm, "open_mpi": open_mpi, "mpich": mpich}[launcher](rank)
        environments.append(variables | {"MASTER_PORT": port})
    has_two_hosts = launcher in ("slurm", "pals")
    assert run_ranks(2, _init_and_reduce, environments, init=False) == [
        (
            rank,
            2,
            3.0,
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0" if has_two_hosts else str(rank),
                "MASTER_ADDR": "localhost" if has_two_hosts else "127.0.0.1",
            },
        )
        for rank in range(2)
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "variables",
    [
        slurm(0, 1),
        # A shell of salloc, the script of sbatch, and a shell that salloc starts in a separate step.
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-4]"},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        open_mpi(0, 1),
        mpich(0, 1),
        {},
    ],
)
def test_a_single_process_gets_no_variables(variables: dict[str, str]) -> None:
    assert make_torchrun_variables(variables) == {}


def test_a_shell_of_an_allocation_does_not_wait_for_other_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    shell = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    ((rank, size, total, _),) = run_ranks(1, _init_and_reduce, [shell], init=False)
    assert (rank, size, total) == (0, 1, 1.0)
    assert capfd.readouterr() == ("", "")


def test_the_variables_of_torchrun_take_precedence() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert make_torchrun_variables(slurm(1) | torchrun) == {}
    assert make_torchrun_variables(slurm(0, 1) | torchrun) == {}


def test_missing_variables_are_added_to_those_that_are_set() -> None:
    """Some scripts export an address, or only rank and world size, before srun."""
    address = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    variables = make_torchrun_variables(slurm(1) | address | {"WORLD_SIZE": "2"})
    assert variables == {"RANK": "1", "LOCAL_RANK": "0"}
    variables = make_torchrun_variables(slurm(1) | {"RANK": "1", "WORLD_SIZE": "2"})
    assert variables == {
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": variables["MASTER_PORT"],
    }


def test_mpirun_takes_precedence_over_the_srun_that_started_its_daemons() -> None:
    """mpirun starts a daemon on each node with srun; its processes inherit srun's variables for the daemon."""
    daemon = slurm(1, 2) | {"SLURM_JOB_NODELIST": "node[007-009]", "SLURM_STEP_NODELIST": "node[008-009]"}
    variables = make_torchrun_variables(
        daemon | mpich(5, 8) | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    )
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("5", "8")
    assert (variables["LOCAL_RANK"], variables["MASTER_ADDR"]) == ("1", "node007")


def test_variables_that_pmi_lacks_come_from_slurm() -> None:
    """srun --mpi=pmi2 sets the variables of both."""
    variables = make_torchrun_variables(slurm(1) | {"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["MASTER_ADDR"]) == ("1", "0", "localhost")


def test_jobs_get_different_ports() -> None:
    def port(**other: str) -> int:
        return int(make_torchrun_variables(slurm(0) | other)["MASTER_PORT"])

    ports = {port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(40) for step in range(4)}
    assert len(ports) > 150
    assert all(15000 <= port < 30000 for port in ports)  # below the ports that systems assign
    assert port() == int(make_torchrun_variables(slurm(1))["MASTER_PORT"])


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
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert find_first_host(hosts) == first


INVALID: list[tuple[dict[str, str], str]] = [
    (
        {"PMI_SIZE": "4"},
        "MPICH gives this process rank None of 4 (PMI_RANK, PMI_SIZE); start the script with mpiexec, or unset these "
        "variables for a single-process run",
    ),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "SLURM gives this process rank None of 4 ..."),
    ({"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "0"}, "PALS gives this process rank 3 of None ..."),
    (
        {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"},
        "Open MPI gives this process rank 4 of 4 ...",
    ),
    (
        open_mpi(1, 4) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "Open MPI started 4 processes, but the host of rank 0 is not known; set MASTER_ADDR to that host "
        "(127.0.0.1 if all processes are on one host)",
    ),
    (slurm(1) | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but SLURM reports 2; unset WORLD_SIZE"),
    (
        slurm(1) | {"SLURM_LOCALID": "first"},
        "SLURM_LOCALID must be an int, as torchrun or another launcher sets it, got 'first'",
    ),
    (
        slurm(1) | {"SLURM_STEP_NODELIST": "node[1-"},
        "'node[1-' is not a list of hosts such as 'node[003-005,7],gpu1'; set MASTER_ADDR to the host of rank 0",
    ),
]


@pytest.mark.parametrize(("variables", "text"), INVALID)
def test_invalid_variables_are_rejected(variables: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError, match=match_message(text)):
        make_torchrun_variables(variables)


def test_the_remedies_of_the_errors_work() -> None:
    assert make_torchrun_variables({}) == {}
    with_address = open_mpi(1, 4) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert make_torchrun_variables(with_address)["RANK"] == "1"
    with_world_size = make_torchrun_variables({"PALS_RANKID": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head"})
    assert with_world_size["RANK"] == "3"
