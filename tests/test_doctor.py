"""``namedmesh doctor`` on real ranks: a healthy job, an absent rank, a wrong group, a collective that hangs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import printed_by, says
from ranks import run_ranks

from namedmesh import doctor as doctors
from namedmesh.__main__ import main
from namedmesh.doctor import Group, Measured, check_groups, host_pairs, problems_of, report_text


def doctor(*words: str) -> tuple[int, str]:
    words = ("doctor", "--device", "cpu", "--megabytes", "0.1", *words)
    status, out, err = printed_by(lambda: main(words))
    return status, out + err


def test_a_healthy_job_with_experts() -> None:
    results = run_ranks(4, lambda: doctor("--pp", "1", "--tp", "2", "--ep", "4", "--etp", "1"), init=False)
    assert results[1:] == [(0, "")] * 3
    head, table, right, slowest = results[0][1].split("\n\n")
    assert head == "pp=1 x dp=2 x tp=2 (4 ranks), gloo on cpu, 1 host"
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [" ".join(row[:3]) for row in rows] == ["dp 2 2", "tp 2 2", "ep 4 1", "world 4 1"]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    assert right == "every group has the right ranks and gives the right sum"
    assert re.match(r"slowest rank: [0-3], \d", slowest)


def alone() -> tuple[int, str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    return doctor()


def test_plain_python_is_a_world_of_one() -> None:
    [(status, out)] = run_ranks(1, alone, init=False)
    assert status == 0
    assert out.startswith("dp=1 (1 rank), gloo on cpu, 1 host\n")


def checked_with_wrong_groups(*wrong: int) -> Any:
    """On some ranks the group that is checked as tp is that of pp."""
    pp, tp = (dist.new_subgroups_by_enumeration(each)[0] for each in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]))
    rank = dist.get_rank()
    groups = [Group("tp", (rank - rank % 2, rank - rank % 2 + 1), pp if rank in wrong else tp)]
    return check_groups(groups, torch.device("cpu"), timedelta(seconds=3))


def test_a_wrong_group_is_named_with_its_axis_and_ranks() -> None:
    found = run_ranks(4, checked_with_wrong_groups, 0, 1, 2, 3)
    assert problems_of(found) == [
        "axis tp, rank 0: its group has ranks 0, 2 instead of 0, 1",
        "axis tp, rank 1: its group has ranks 1, 3 instead of 0, 1",
        "axis tp, rank 2: its group has ranks 0, 2 instead of 2, 3",
        "axis tp, rank 3: its group has ranks 1, 3 instead of 2, 3",
    ]


def test_a_collective_that_hangs_ends_with_the_axis_and_the_ranks() -> None:
    found = run_ranks(4, checked_with_wrong_groups, 3)
    assert found[:2] == [None, None]
    assert all(problem and problem[0] == "tp" for problem in found[2:])


def without_the_last() -> tuple[int, str] | None:
    return None if os.environ["RANK"] == "3" else doctor("--tp", "2", "--timeout", "8")


def with_a_problem_on_the_last() -> tuple[int, str]:
    """Groups end when the problem is printed already, as one of them may be stuck; their own timeout is a longer one."""
    real, problem = doctors.check_groups, ("tp", "an all-reduce gave 2 instead of 3")
    printed: list[str] = []

    def check(groups: list[Group], device: torch.device, timeout: timedelta) -> doctors.Problem | None:
        for group in groups:
            backend: Any = group.group
            assert backend._get_backend(device).options._timeout > timeout
        return real(groups, device, timeout) or (problem if os.environ["RANK"] == "1" else None)

    def destroy(*_: object) -> None:
        err: Any = sys.stderr
        printed.append(err.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctors, "check_groups", check)
        patch.setattr(dist, "destroy_process_group", destroy)
        status, out = doctor("tp=2")
    assert all(printed)
    return status, out


@pytest.mark.parametrize(
    ("ranks", "job", "text"),
    [
        (4, without_the_last, "... rank 3 of 4 did not ..."),
        (2, with_a_problem_on_the_last, "axis tp, rank 1: an all-reduce gave 2 instead of 3"),
        (2, lambda: doctor("pp=2,tp=3"), "... pp=2 x tp=3 needs 6 ranks ..."),
    ],
)
def test_every_rank_that_is_there_says_what_is_wrong(ranks: int, job: Callable[[], Any], text: str) -> None:
    results = [told for told in run_ranks(ranks, job, init=False) if told]
    assert len(results) == (ranks if ranks == 2 else 3)
    for status, out in results:
        assert status == 1
        assert re.match(says(f"namedmesh doctor: {text}"), out)


def test_a_layout_that_cannot_be_read_is_named_before_the_ranks_meet() -> None:
    assert doctor("pp=x")[0] == 2


def test_the_slowest_group_rank_and_hosts_are_named() -> None:
    fast, slow = ((0, 1), 0.001, 10e9), ((2, 3), 0.001, 8e9)
    each = [Measured(local, {"tp": one}, {}) for local, one in ((1, fast), (1, fast), (1, slow), (2, slow))]
    each[0].links.update({"a - b": 1e9, "c - a": 5e8})
    table, _, links_shown, slowest = report_text(each).split("\n\n")
    assert table.splitlines()[1].split() == ["tp", "2", "2", "1000.0", "9.0", "2,", "3", "8.0"]
    assert links_shown == "2 pairs of hosts, the slowest first:\n  c - a: 0.5 GB/s\n  a - b: 1 GB/s"
    assert slowest == "slowest rank: 3, 2.00 times the median for work of its own"


@pytest.mark.parametrize("count", range(1, 9))
def test_every_host_is_in_the_one_round_of_pairs(count: int) -> None:
    hosts = [f"host-{rank // 2}" for rank in range(2 * count)]
    pairs = host_pairs(hosts)
    assert {hosts[rank] for pair in pairs for rank in pair} == (set(hosts) if count > 1 else set())
    assert len(pairs) == (count + 1) // 2 * (count > 1)
    assert all(rank % 2 == 0 for pair in pairs for rank in pair)
