"""The command doctor on real ranks: a healthy job, an absent rank, a wrong group, a collective that hangs."""

from __future__ import annotations

import contextlib
import io
import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, limits_begin_with, run_ranks, summed

from namedmesh.__main__ import main
from namedmesh.init import init_mesh
from namedmesh.plan import group_checks
from namedmesh.plan.tables import show

if TYPE_CHECKING:
    from namedmesh.mesh import NamedMesh


def doctor(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["doctor", "--device", "cpu", "--megabytes", "0.1", *words])
    return status, out.getvalue(), err.getvalue()


def test_a_healthy_job() -> None:
    results = run_ranks(4, lambda: doctor("pp=2,tp=2", "--format", "json"), init=False)
    assert [status for status, _, _ in results] == [0, 0, 0, 0]
    assert [(out, err) for _, out, err in results[1:]] == [("", "")] * 3
    data = json.loads(results[0][1])
    assert data["problems"] == []
    assert [(axis["axis"], axis["size"], axis["groups"]) for axis in data["axes"]] == [
        ("pp", 2, 2),
        ("tp", 2, 2),
        ("world", 4, 1),
    ]
    assert all(axis["latency us"] > 0 for axis in data["axes"])
    assert data["slowest_rank"] in range(4)


def test_experts_are_checked_too() -> None:
    results = run_ranks(4, lambda: doctor("--tp", "2", "--ep", "4", "--etp", "1"), init=False)
    assert [status for status, _, _ in results] == [0] * 4
    lines = results[0][1].splitlines()
    assert lines[0] == "dp=2 x tp=2 (4 ranks), gloo on cpu, 1 host"
    assert [line.split()[0] for line in lines[2:7]] == ["axis", "dp", "tp", "ep", "world"]
    assert "every group has the right ranks and gives the right sum" in lines


def absent(*missing: int) -> tuple[int, str, str]:
    return (9, "", "") if int(os.environ["RANK"]) in missing else doctor("--tp", "2", "--timeout", "1")


@pytest.mark.parametrize(
    ("missing", "words"),
    [((2,), "rank 2 of 0 to 3 did not"), ((0, 3), "ranks 0, 3 of 0 to 3 did not")],
)
def test_a_rank_that_does_not_show_up_is_named(missing: tuple[int, ...], words: str) -> None:
    with limits_begin_with(4 - len(missing)):
        results = run_ranks(4, absent, *missing, init=False)
    there = [results[rank] for rank in range(4) if rank not in missing]
    assert [status for status, _, _ in there] == [1] * len(there)
    for _, out, err in there:
        assert out == ""
        assert err.startswith(f"namedmesh doctor: {words} call namedmesh doctor within 1 s; ")
        assert err.endswith(", or wait longer with --timeout\n")


def late() -> tuple[int, str, str]:
    """Rank 2 comes when the others have given up on it."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    others = dist.PrefixStore("others", store)
    if os.environ["RANK"] == "2":
        others.wait(["ended"], timedelta(seconds=60))
    results = doctor("--tp", "2", "--timeout", "1")
    others.set("ended", "")
    return results


def test_a_rank_that_comes_too_late_is_absent_to_itself_too() -> None:
    with limits_begin_with(3):
        results = run_ranks(4, late, init=False)
    assert [status for status, _, _ in results] == [1, 1, 1, 1]
    absent = "namedmesh doctor: rank 2 of 0 to 3 did not call namedmesh doctor within 1 s"
    assert [err.startswith(absent) for _, _, err in results] == [True] * 4


def with_wrong_groups(*ranks: int) -> tuple[int, str, str]:
    """On some ranks the group of tp is that of pp."""
    real = init_mesh

    def wrong(*arguments: Any, **keywords: Any) -> NamedMesh:
        mesh = real(*arguments, **keywords)
        summed(mesh.group("tp"))  # connects its members, of which some do not call it any more
        if mesh.global_rank in ranks:
            key = mesh._version, ("tp",)
            mesh._places[key] = mesh._places[key]._replace(group=mesh.group("pp"))
        return mesh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_checks, "init_mesh", wrong)
        return doctor("pp=2,tp=2", "--timeout", "3")


def test_a_wrong_group_is_named_with_its_axis_and_ranks() -> None:
    with limits_begin_with(4):
        results = run_ranks(4, with_wrong_groups, 0, 1, 2, 3, init=False)
    assert [status for status, _, _ in results] == [1, 1, 1, 1]
    assert results[0][1] == (
        "pp=2 x tp=2 (4 ranks), gloo on cpu\n\n"
        "wrong: axis tp, rank 0: its group has ranks 0, 2 instead of 0, 1\n"
        "wrong: axis tp, rank 1: its group has ranks 1, 3 instead of 0, 1\n"
        "wrong: axis tp, rank 2: its group has ranks 0, 2 instead of 2, 3\n"
        "wrong: axis tp, rank 3: its group has ranks 1, 3 instead of 2, 3\n"
    )
    sentence = results[0][1].partition("\n\n")[2].replace("wrong:", "  -")
    assert [err for _, _, err in results] == [f"namedmesh doctor: 4 problems:\n{sentence}"] * 4


def test_a_collective_that_hangs_ends_with_the_axis_and_the_ranks() -> None:
    with limits_begin_with(4):
        results = run_ranks(4, with_wrong_groups, 3, init=False)
    assert [status for status, _, _ in results] == [1, 1, 1, 1]
    wrong = [line for line in results[0][1].splitlines() if line.startswith("wrong: axis tp")]
    assert wrong
    assert all(any(str(rank) in line.split(":")[1] for line in wrong) for rank in (2, 3))


def without_a_peer() -> tuple[int, str, str]:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer\nand much more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_checks, "init_mesh", fail)
        return doctor("tp=2")


def test_groups_that_cannot_be_made_are_reported_by_each_rank() -> None:
    assert run_ranks(2, without_a_peer, init=False) == [
        (1, "", f"namedmesh doctor: rank {rank} could not make its groups: Connection closed by peer\n")
        for rank in range(2)
    ]


def test_every_rank_says_why_a_layout_does_not_fit() -> None:
    results = run_ranks(4, lambda: doctor("pp=2,tp=3"), init=False)
    assert [status for status, _, _ in results] == [1, 1, 1, 1]
    assert {err.partition(",")[0] for _, _, err in results} == {"namedmesh doctor: pp=2 x tp=3 needs 6 ranks"}
    results = run_ranks(2, lambda: doctor("pp=x"), init=False)
    assert [status for status, _, _ in results] == [2, 2]


def test_settings_that_cannot_be_are_named_at_once() -> None:
    status, out, err = doctor("pp=x", "--timeout", "nan", "--megabytes", "-1", "--backend", "cpu:glo")
    assert (status, out) == (2, "")
    text = "it is a number above 0 and below 1e+09"
    assert err.startswith(
        f"namedmesh doctor: 4 problems:\n  - timeout is nan; {text}\n  - megabytes is -1; {text}\n"
        "  - backend 'cpu:glo' names 'glo', "
    )
    assert "\n  - 'pp=x': 'x' is no size; " in err


def alone() -> tuple[int, str, str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    return doctor()


def test_plain_python_is_a_world_of_one() -> None:
    [(status, out, _)] = run_ranks(1, alone, init=False)
    assert status == 0
    assert out.startswith("dp=1 (1 rank), gloo on cpu, 1 host\n")


def hosted(port: int, world: int) -> tuple[int, str, str]:
    os.environ.update(MASTER_PORT=str(port), WORLD_SIZE=str(world))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    return doctor("--tp", "2", "--timeout", "60" if world == 2 else "1")


def test_rank_zero_hosts_the_store_where_no_launcher_does() -> None:
    assert [status for status, _, _ in run_ranks(2, hosted, free_port(), 2, init=False)] == [0, 0]
    with limits_begin_with(2):
        results = run_ranks(2, hosted, free_port(), 3, init=False)
    assert [status for status, _, _ in results] == [1, 1]
    assert "rank 2 of 0 to 2 did not call namedmesh doctor" in results[0][2]


def test_an_absent_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, _, err = doctor("--timeout", "1")
    assert status == 1
    assert err.startswith("namedmesh doctor: rank 0, which hosts the store")
    assert f" at 127.0.0.1:{port}, " in err
    assert " within 1 s; " in err


def test_the_slowest_group_and_rank_are_named() -> None:
    reports = []
    for rank in range(4):
        pair = rank - rank % 2, rank - rank % 2 + 1
        axes = {"tp": group_checks.Speed(pair, 0.001, (10.0 - rank) * 1e9)}
        reports.append(group_checks.RankReport("node", "", "", 2.0 if rank == 3 else 1.0, axes))
    again = [group_checks.RankReport.from_data(json.loads(json.dumps(one))) for one in reports]
    assert again == reports
    data = group_checks.doctor_document("a job", again).data()
    assert (data["slowest_rank"], data["slowest_factor"], data["problems"]) == (3, 2.0, [])
    [axis] = data["axes"]
    assert axis == {
        "axis": "tp", "size": 2, "groups": 2, "latency us": 1000.0, "GB/s": 8.5, "slowest group": "2, 3", "its GB/s": 7.5
    }  # fmt: skip


def test_a_problem_of_several_ranks_is_named_once() -> None:
    found = {0: ("tp", "no end"), 1: ("", ""), 2: ("tp", "no end"), 3: ("pp", "no end")}
    assert group_checks.problems_of(found) == ["axis tp, ranks 0, 2: no end", "axis pp, rank 3: no end"]


def with_a_failing_measurement() -> tuple[int, str, str]:
    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer\nand much more")

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(group_checks, "measure_group", fail)
        return doctor("tp=2", "--timeout", "3")


def test_a_measurement_that_fails_is_named_with_its_axis() -> None:
    with limits_begin_with(2):
        (status, out, _), (other, _, err) = run_ranks(2, with_a_failing_measurement, init=False)
    assert (status, other) == (1, 1)
    assert err == "namedmesh doctor: axis tp, rank 1: Connection closed by peer\n"
    assert "wrong: " in out


def that_ends(rank: int) -> tuple[int, str, str]:
    """One rank ends during the checks."""
    real = group_checks.check_groups

    def ended(*arguments: Any) -> Any:
        if int(os.environ["RANK"]) == rank:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_checks, "check_groups", ended)
        with contextlib.suppress(KeyboardInterrupt):
            return doctor("tp=2", "--timeout", "1")
    return 9, "", ""


def test_a_rank_that_ends_during_the_checks_is_named() -> None:
    with limits_begin_with(1):
        results = run_ranks(2, that_ends, 1, init=False)
    assert [status for status, _, _ in results] == [1, 9]
    assert "rank 1 of 0 to 1 did not call the checks of namedmesh doctor within 2 s" in results[0][2]


def test_a_sum_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(tensor: torch.Tensor, **_: object) -> Any:
        tensor += 1
        return Done()

    class Done:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            pass

    def gather(into: list[torch.Tensor], mine: torch.Tensor, **_: object) -> Done:
        into[0].copy_(mine)
        return Done()

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 1)
    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", off_by_one)
    probe = group_checks.Group("tp", (0,), None)
    assert (
        group_checks._problem(probe, 0, torch.device("cpu"), timedelta(seconds=1))
        == "an all-reduce gave 2 instead of 1"
    )


@pytest.mark.parametrize("count", range(2, 9))
def test_every_pair_of_hosts_meets_once_and_no_rank_twice_in_a_round(count: int) -> None:
    hosts = [f"host-{rank // 2}" for rank in range(2 * count)]
    inside, *rounds = group_checks.pairs_to_measure(hosts)
    assert inside == [(2 * host, 2 * host + 1) for host in range(count)]
    met = [frozenset(hosts[rank] for rank in pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_a_slow_pair_of_hosts_is_named() -> None:
    speeds = {(0, 1): 10e9, (0, 2): 1e9, (1, 2): 12e9, (0, 3): 50e9}
    reports = [group_checks.RankReport(host, host, "eth0", 1.0, {}) for host in "abca"]
    found = [group_checks.Speed(pair, 1e-5, speed) for pair, speed in speeds.items()]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show(group_checks.doctor_document("a job", reports, found), "text")
    lines = text.getvalue().splitlines()
    assert "slow: a - c, 0.10 of the median of 3 pairs of hosts" in lines
    assert "network of the gloo groups: a eth0, b eth0, c eth0" in lines
    between = next(line for line in lines if line.startswith("between hosts"))
    assert between.split()[2:5] == ["3", "10", "10"]
    twice = [group_checks.RankReport("same", place, place, 1.0, {}) for place in "ab"]
    assert group_checks.doctor_document("a job", twice).data()["cards"] == {"same (0)": "a", "same (1)": "b"}
