"""Jobs over two hosts, which are two network namespaces with a link between them that can be cut, or slow."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny
import torch.distributed as dist
import two_hosts
from messages import error_of
from ranks import TORCHRUN_VARIABLES, summed
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import namedmesh
from namedmesh import launch
from namedmesh.__main__ import main
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from two_hosts import Hosts

pytestmark = pytest.mark.ci

PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
SOON, MINUTE = timedelta(seconds=4), timedelta(minutes=1)  # a job that is waiting for the cut is not busy


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    yield from two_hosts.make(tmp_path_factory.mktemp("hosts"))


def ended() -> None:
    """Leave the default group when all ranks are done with it: one that ends early breaks the others' handshakes."""
    dist.barrier()
    dist.destroy_process_group()


# The network of the gloo groups.


def _trained() -> list[float]:
    """Losses with tensor parallelism on each host, and FSDP across them; and of a mesh the other way round."""
    told = []
    for axes in (("dp", "tp"), ("tp", "dp")):
        mesh = namedmesh.init_mesh(dict.fromkeys(axes, 2), device="cpu", timeout=MINUTE)
        net = parallelize(tiny.model(), mesh["tp"], PLAN)
        if axes == ("dp", "tp"):  # FSDP2 needs the data axis before tp
            fully_shard(net, mesh=mesh["dp"])
        told.append(tiny.losses(net, tiny.batch(4)))
        told.append([summed(mesh.flatten("dp", "tp").get_group())])
        mesh.close()
    ended()
    return [value for part in told for value in part]


def test_a_job_trains_over_the_interface_that_is_named(hosts: Hosts) -> None:
    """Each host's name resolves to a loopback address, as Debian sets it up."""
    losses = tiny.losses(tiny.model(), tiny.batch(4))
    expected = [*losses, 4.0, *losses, 4.0]
    for told in hosts.run(2, _trained, loopback_names=True):
        assert told == pytest.approx(expected, abs=1e-6)


def test_names_that_resolve_to_the_hosts_need_no_interface(hosts: Hosts) -> None:
    for told in hosts.run(2, _trained, interface=None):
        assert len(told) > 2


# A link that is cut.


class Cut:
    """Lets the worlds say that they are ready, and know when the link is cut."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def ready(self) -> None:
        (self.directory / f"ready-{os.getpid()}").touch()
        while not (self.directory / "cut").exists():
            time.sleep(0.02)

    def after(self, count: int, hosts: Hosts, results: Callable[[], Any]) -> Any:
        """Run worlds in a thread, and cut the link once so many ranks are ready."""
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(results)
            while len(list(self.directory.glob("ready-*"))) < count and not found.done():
                time.sleep(0.02)
            with hosts.cut():
                (self.directory / "cut").touch()
                return found.result()


class Phases:
    """What a job of two ranks may be doing when the link is cut: each returns the error that it ends in."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut

    def starting(self) -> str:
        self.cut.ready()
        return error_of(lambda: launch.init("cpu", timeout=SOON))

    def making(self) -> str:
        launch.init("cpu", timeout=SOON)
        self.cut.ready()
        return error_of(lambda: namedmesh.init_mesh(dp=2))

    def flattening(self) -> str:
        mesh = self._mesh()
        self.cut.ready()
        return error_of(lambda: mesh.flatten("dp", "tp", options=namedmesh.GroupOptions(share=False)))

    def stepping(self) -> str:
        """A collective: torch's own timeout ends it."""
        mesh = self._mesh()
        self.cut.ready()
        try:
            summed(mesh.group("tp"))
        except RuntimeError as error:
            return f"torch: {error}"
        return ""

    def closing(self) -> str:
        mesh = self._mesh()
        self.cut.ready()
        mesh.close()
        dist.destroy_process_group()
        return ""

    @staticmethod
    def _mesh() -> namedmesh.NamedMesh:
        mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu", timeout=SOON)
        summed(mesh.group("tp"))
        return mesh


@pytest.mark.slow
def test_a_cut_link_ends_both_sides_in_every_phase(hosts: Hosts, tmp_path: Path) -> None:
    cut = Cut(tmp_path)
    jobs = Phases(cut)
    phases = [jobs.starting, jobs.making, jobs.flattening, jobs.stepping, jobs.closing]
    results = cut.after(2 * len(phases), hosts, lambda: hosts.run_worlds(phases))
    told = {phase.__name__: result for phase, result in zip(phases, results, strict=True)}
    assert told.pop("closing") == ["", ""]
    assert all("imed out" in text or "timeout" in text for text in told.pop("stepping"))
    # The side of the store names the rank that does not come, and the other side the store that it has lost.
    assert told["starting"][0].startswith("AgreementError: rank 1 of 2 did not call launch.init within 4 s; ")
    assert told["making"][0].startswith("AgreementError: rank 1 of 2 did not call init_mesh within 4 s; ")
    assert told["flattening"][0].startswith(
        "AgreementError: rank 1 of 2 did not call mesh.flatten within 4 s; "
    )
    # torch itself notices it later than at the timeout.
    assert told["starting"][1].startswith(
        "LaunchError: 10.0.0.1, port 29500 (MASTER_ADDR and MASTER_PORT) did not "
    )
    for phase, call in (("making", "init_mesh"), ("flattening", "mesh.flatten")):
        assert told[phase][1].startswith(
            f"AgreementError: lost the connection to the store of the job during {call}: its host "
        )


# Launchers.


def _reduced() -> float:
    launch.init("cpu", timeout=MINUTE)
    total = summed(None, dist.get_rank() + 1.0)
    ended()
    return total


def test_what_launchers_set_is_understood_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("host-a:1\nhost-b:1\n", encoding="ascii")

    def started_with(**variables: str) -> Callable[[], float]:
        """Each process finds what one launcher sets for it; "R" stands for its rank."""

        def function() -> float:
            rank = os.environ["RANK"]
            for name in TORCHRUN_VARIABLES:
                del os.environ[name]
            os.environ.update({name: value.replace("R", rank) for name, value in variables.items()})
            return _reduced()

        return function

    slurm = {
        "SLURM_PROCID": "R",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "2",
    }
    open_mpi = {"OMPI_COMM_WORLD_RANK": "R", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    worlds = [
        started_with(SLURM_JOB_ID="1", SLURM_JOB_NODELIST="host-[a-b]", **slurm),
        started_with(
            MASTER_ADDR="host-a", OMPI_MCA_ess_base_jobid="2", OMPI_COMM_WORLD_LOCAL_SIZE="1", **open_mpi
        ),
        started_with(
            PMI_RANK="R", PMI_SIZE="2", MPI_LOCALNRANKS="1", HYDRA_HOST_FILE=str(names), PBS_JOBID="3"
        ),
        started_with(
            PALS_RANKID="R",
            PMI_RANK="R",
            PMI_SIZE="2",
            PALS_LOCAL_SIZE="1",
            PALS_HOSTFILE=str(names),
            PALS_APID="4",
        ),
        started_with(RANK="R", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="fd00::1", MASTER_PORT="29511"),
        started_with(RANK="R", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="host-a6", MASTER_PORT="29512"),
    ]
    assert hosts.run_worlds(worlds) == [[3.0, 3.0]] * len(worlds)


def _worker() -> float:
    """The sum over the ranks, in the job's second life: the second host's worker ends before the others meet it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own, not the agent's handler
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["GROUP_RANK"]) == ("0", "1"):
        sys.exit(3)
    return _reduced()


def _agent(rendezvous: str, port: int) -> dict[int, float]:
    """What torchrun does on one host of two, with a forked worker."""
    node = int(os.environ["RANK"])
    address = os.environ["MASTER_ADDR"]
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        del os.environ[name]
    settings = LaunchConfig(
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id=f"two-hosts-{rendezvous}",
        rdzv_backend=rendezvous,
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs={"rank": node, "timeout": 60} if rendezvous == "static" else {},
    )
    results: dict[int, float] = elastic_launch(settings, _worker)()
    return results


@pytest.mark.slow
def test_torchrun_restarts_a_job_over_two_hosts(hosts: Hosts) -> None:
    worlds = [lambda: _agent("static", 29521), lambda: _agent("c10d", 29522)]
    for first, second in hosts.run_worlds(worlds, timeout=90):
        assert {**first, **second} == {0: 3.0, 1: 3.0}


# Files.


def _unshared(place: str) -> list[str]:
    """Each host has a directory of its own under one name; and then one that both see."""
    from namedmesh import training
    from namedmesh.training import checkpoint_storage

    rank = int(os.environ["RANK"])
    own = Path(place, "own")
    with two_hosts.mounted(Path(place, f"of-host-{rank}"), own):
        mesh = namedmesh.init_mesh(dp=2, device="cpu")
        net = tiny.model()
        checkpoint_storage.VISIBILITY_TIMEOUT = 0.2  # the seconds for which a folder may be seen late
        run = training.CheckpointManager(own, mesh, keep=1)
        told = [error_of(lambda: run.save(1, net))]
        run.close()
        told.append(str(sorted(each.name for each in own.rglob("*"))))
    training.save(Path(place, "step-1"), mesh, net)
    told.append(error_of(lambda: training.load(Path(place, "step-1"), mesh, net)))
    mesh.close()
    ended()
    return told


def test_a_checkpoint_directory_that_not_all_hosts_see_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    for name in ("own", "of-host-0", "of-host-1"):
        (tmp_path / name).mkdir()
    for said, left, after in hosts.run(1, _unshared, str(tmp_path)):
        assert said.startswith(
            f"CheckpointError: rank 1: {tmp_path}/own/step-000001 is not the folder that rank 0 sees; "
        )
        assert left == "[]"
        assert after == ""


# The checks of every group.


def _examined() -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["doctor", "dp=2,tp=2", "--device", "cpu", "--megabytes", "0.25"])
    return status, out.getvalue()


def test_a_slow_link_between_hosts_shows_in_the_axis_that_crosses_it(hosts: Hosts) -> None:
    with hosts.slow(megabits=20):
        results = hosts.run(2, _examined)
    assert [status for status, _ in results] == [0] * 4
    report = results[0][1]
    assert "2 hosts\n" in report
    between = float(report.split("\ndp ")[1].split()[3])
    inside = float(report.split("\ntp ")[1].split()[3])
    # 20 megabits a second are 0.0025 GB/s; the loopback interface has a hundred times that, unless others use the cores.
    assert between < min(0.01, inside)
