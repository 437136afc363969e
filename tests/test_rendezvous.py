"""Ranks that come late, never, with a mistake or for a second time, before there is a default group."""

from __future__ import annotations

import os
import signal
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from agents import end_at_first, run_agent
from messages import error_of
from ranks import free_port, limits_begin_with, run_ranks

from namedmesh import AgreementError, LaunchError, launch
from namedmesh.agreement import Agreement, Agreements
from namedmesh.store import LimitedStore

if TYPE_CHECKING:
    from pathlib import Path

SOON, MINUTE = timedelta(seconds=1), timedelta(seconds=60)
ABSENT = (
    "rank {} of 0 to {} did not call {} within {:g} s; every rank of the job must call it, so look at what those ranks "
    "did instead"
)


def refused(**arguments: Any) -> str:
    """The error that launch.init ends in."""
    said = error_of(lambda: launch.init("cpu", **arguments))
    assert not dist.is_initialized()
    return said


def reduced() -> float:
    """A sum over the ranks of the default group, which ends with it."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return total.item()


def _one_stays_away(absent: int, port: int | None, call: str = "launch.init") -> str | None:
    if port is not None:
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    return None if int(os.environ["RANK"]) == absent else refused(timeout=SOON, call=call)


@pytest.mark.parametrize("port", [None, "own"], ids=["of an agent", "of rank 0"])
def test_who_does_not_come_is_named_on_every_rank(port: str | None) -> None:
    with limits_begin_with(3):
        told = run_ranks(4, _one_stays_away, 3, free_port() if port else None, "init_mesh", init=False)
    assert told == ["AgreementError: " + ABSENT.format(3, 3, "init_mesh", 1)] * 3 + [None]


def test_without_rank_0_nobody_can_say_more_than_that() -> None:
    port = free_port()
    told = run_ranks(2, _one_stays_away, 0, port, init=False)
    assert told[1] == (
        f"LaunchError: rank 0, which hosts the store of the job at 127.0.0.1:{port}, did not answer within 1 s; see its "
        "output for why, and check MASTER_ADDR and MASTER_PORT (The client socket has timed out after 1000ms while "
        f"trying to connect to (127.0.0.1, {port}).)"
    )


def _late(port: int | None) -> tuple[str, float]:
    """Rank 2 comes when the others have given up; then all try again."""
    if port is not None:
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    store = dist.FileStore(os.environ["TOLD"], 3)
    if int(os.environ["RANK"]) == 2:
        store.wait(["gave up"], timedelta(seconds=60))
    said = refused(timeout=SOON)
    store.set("gave up", "")
    launch.init("cpu", timeout=MINUTE)
    return said, reduced()


@pytest.mark.parametrize("port", [None, "own"], ids=["of an agent", "of rank 0"])
def test_a_latecomer_is_refused_and_the_next_try_works(
    port: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    with limits_begin_with(2):
        told = run_ranks(3, _late, free_port() if port else None, init=False)
    assert told == [("AgreementError: " + ABSENT.format(2, 2, "launch.init", 1), 6.0)] * 3


def _mistaken(port: int | None, who: int) -> tuple[str, float]:
    if port is not None:
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    wrong: Any = 30
    said = refused(timeout=wrong if int(os.environ["RANK"]) == who else timedelta(seconds=60))
    launch.init("cpu", timeout=MINUTE)
    return said, reduced()


@pytest.mark.parametrize("port", [None, "own"], ids=["of an agent", "of rank 0"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_mistake_on_one_rank_is_reported_to_the_others(port: str | None, who: int) -> None:
    told = run_ranks(2, _mistaken, free_port() if port else None, who, init=False)
    assert [total for _, total in told] == [3.0, 3.0]
    assert told[who][0].startswith("LayoutError: timeout is 30; ")
    assert told[1 - who][0].startswith(f"AgreementError: rank {who} gave up on launch.init: timeout is 30; ")


def _give_up(port: int, inside: bool) -> tuple[str, bool, float]:
    """All ranks give up before they compare, or rank 1 does afterwards; also whether all that they waited for came."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    came: list[bool] = []
    appears = LimitedStore.appears

    def recorded(self: LimitedStore, key: str, timeout: timedelta) -> bool:
        came.append(appears(self, key, timeout))
        return came[-1]

    def fails(_: torch.device) -> None:
        raise LaunchError("it has no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LimitedStore, "appears", recorded)
        if inside and os.environ["RANK"] == "1":
            patch.setattr(launch, "select_device", fails)
        said = refused(timeout=MINUTE, backend=None if inside else "nonsense")
    launch.init("cpu", timeout=MINUTE)
    return said, all(came), reduced()


@pytest.mark.parametrize("inside", [False, True])
def test_the_host_of_the_store_does_not_wait_for_ranks_that_gave_up(inside: bool) -> None:
    told = run_ranks(3, _give_up, free_port(), inside, init=False)
    assert [(came, total) for _, came, total in told] == [(True, 6.0)] * 3
    gave_up = "AgreementError: rank 1 gave up on launch.init: it has no memory"
    said = [gave_up, "LaunchError: it has no memory", gave_up]
    assert not inside or [text for text, _, _ in told] == said


def _again_and_again() -> list[float]:
    sums = []
    for _ in range(5):
        launch.init("cpu")
        sums.append(reduced())
    return sums


def test_a_default_group_can_be_made_again() -> None:
    assert run_ranks(4, _again_and_again, init=False) == [[10.0] * 5] * 4


def _restarted(path: str, present: list[int], size: int) -> list[float] | None:
    """Two lives over one store: in the first only some came and were killed while they waited."""
    rank = int(os.environ["RANK"])
    if rank in present:
        child = os.fork()
        if child == 0:
            launch.init("cpu")
            os._exit(0)
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        store.wait([f"namedmesh/agreements/0-4/rank/{rank}"], timedelta(seconds=60))
        if len(present) < 4:  # they look for each other once they wait
            store.wait(["namedmesh/agreements/scopes"], timedelta(seconds=60))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    life = dist.FileStore(path, 4)
    life.set(f"dead/{rank}", "")
    life.wait([f"dead/{other}" for other in range(4)], timedelta(seconds=60))
    os.environ.update(TORCHELASTIC_RESTART_COUNT="1", WORLD_SIZE=str(size))
    if rank in present and len(present) < 4:  # the worst order: who was never there comes first
        life.wait(["first"], timedelta(seconds=60))
    else:
        life.set("first", "")
    if rank >= size:
        return None
    launch.init("cpu", timeout=MINUTE)
    return [reduced()]


@pytest.mark.parametrize(
    ("present", "size"), [([0, 1, 2], 4), ([3], 4), ([0, 1, 2, 3], 4), ([0], 3), ([0, 2, 3], 3)]
)
def test_a_restart_over_the_same_store(present: list[int], size: int, tmp_path: Path) -> None:
    told = run_ranks(4, _restarted, str(tmp_path / "life"), present, size, init=False)
    assert told == [[size * (size + 1) / 2] if rank < size else None for rank in range(4)]


def _given_up_and_restarted(path: str) -> tuple[str | None, float]:
    """Rank 3 comes first when the job is restarted because it did not come."""
    rank, said = int(os.environ["RANK"]), None
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    life = dist.FileStore(path, 4)
    if rank != 3:
        said = refused(timeout=SOON)
        life.set(f"dead/{rank}", "")
        life.wait(["first"], timedelta(seconds=60))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    life.wait([f"dead/{other}" for other in range(3)], timedelta(seconds=60))
    life.set("first", "")
    launch.init("cpu", timeout=MINUTE)
    return said, reduced()


def test_a_restart_does_not_fail_for_what_failed_before(tmp_path: Path) -> None:
    with limits_begin_with(3):
        told = run_ranks(4, _given_up_and_restarted, str(tmp_path / "life"), init=False)
    text = "AgreementError: " + ABSENT.format(3, 3, "launch.init", 1)
    assert told == [(text, 10.0)] * 3 + [(None, 10.0)]


def _meet_in_a_file(path: str, absent: int | None) -> str | float | None:
    rank = int(os.environ["RANK"])
    if rank == absent:
        return None
    agreement = Agreement(
        "training",
        of="job",
        ranks=range(3),
        rank=rank,
        known=Agreements(lambda _: dist.FileStore(path, 3)),
        timeout=SOON if absent else timedelta(seconds=60),
    )
    try:
        with agreement:
            agreement.compare({}, may_restart=True)
            store = agreement.new_store()
            agreement.run(lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=3))
    except AgreementError as error:
        return str(error)
    return reduced()


def test_a_file_is_as_good_as_a_server(tmp_path: Path) -> None:
    assert run_ranks(3, _meet_in_a_file, str(tmp_path / "a"), None, init=False) == [6.0] * 3
    with limits_begin_with(2):
        told = run_ranks(3, _meet_in_a_file, str(tmp_path / "b"), 1, init=False)
    text = ABSENT.format(1, 2, "training", 1)
    assert told == [text, None, text]


def _port_is_taken() -> str:
    taken = socket.socket()
    taken.bind(("", 0))
    taken.listen()
    port = taken.getsockname()[1]
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False", WORLD_SIZE="2")
    said = refused().replace(str(port), "PORT")
    return said[: said.index(" (")] + said[said.index(")") + 1 :]


def test_a_port_that_is_taken() -> None:
    (told,) = run_ranks(1, _port_is_taken, init=False)
    assert told == (
        "LaunchError: rank 0 cannot host the store of the job at 127.0.0.1:PORT; set MASTER_ADDR to its host and "
        "MASTER_PORT to a port that is free there, the same on every rank"
    )


def _as_rank_1() -> str:
    os.environ.update(RANK="1", WORLD_SIZE="3")
    return refused(timeout=MINUTE)


def test_two_processes_that_say_they_are_the_same_rank() -> None:
    assert (
        run_ranks(2, _as_rank_1, init=False)
        == [
            "AgreementError: two processes call launch.init as rank 1; give each its own RANK, and each job on a machine its "
            "own MASTER_PORT"
        ]
        * 2
    )


def _absent_at_first() -> float:
    end_at_first("RANK")
    launch.init("cpu")
    return reduced()


def _launched() -> dict[int, float]:
    return run_agent(
        _absent_at_first,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="restarted",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )


def test_torchrun_restarts_a_job_in_which_one_rank_never_came() -> None:
    assert run_ranks(1, _launched, init=False) == [{0: 3.0, 1: 3.0}]


def test_a_rank_that_is_interrupted_while_it_enters_an_attempt_gives_up_that_one() -> None:
    """What tells the others asks in a thread of its own, while the one that enters may still be under way."""

    class Store(dist.HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if key.endswith("/rank/0") and telling.ident is None:
                telling.start()
                telling.join(0.2)  # it enters here, unless it waits for the other thread
            found: bytes = super().compare_set(key, expected, desired)
            return found

    store = LimitedStore(Store(), 60)
    known = Agreements(lambda _: dist.HashStore(), "")
    agreement = Agreement("call", ranks=range(2), rank=0, known=known, timeout=SOON)
    telling = threading.Thread(target=agreement._enter, args=(store, -1))
    agreement._enter(store, -1)
    telling.join()
    assert (agreement._attempt, known.places[range(2)]) == ("0-2/0", f"0 {known.process} arrived")
