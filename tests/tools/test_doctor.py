"""``namedmesh doctor`` on real ranks: a healthy job, a missing rank, a wrong group, a collective that hangs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import metadata
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from messages import capture_printed, match_message
from ranks import run_ranks

import namedmesh
from namedmesh.__main__ import main
from namedmesh.tools import doctor
from namedmesh.tools.doctor import (
    AxisSpeed,
    CheckedGroup,
    Measurements,
    Problem,
    check_groups,
    format_measurements,
    format_problems,
)


def run_doctor(*words: str) -> tuple[int, str]:
    words = ("doctor", "--device", "cpu", "--megabytes", "0.1", *words)
    status, out, err = capture_printed(lambda: main(words))
    return status, out + err


def test_a_healthy_job_with_experts_is_measured() -> None:
    results = run_ranks(
        4, lambda: run_doctor("--pp", "1", "--tp", "2", "--ep", "4", "--etp", "1"), init=False
    )
    assert results[1:] == [(0, "")] * 3
    head, table, summary, slowest = results[0][1].split("\n\n")
    assert head == "pp=1 x dp=2 x tp=2 (4 ranks), gloo on cpu, 1 host"
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [" ".join(row[:3]) for row in rows] == ["dp 2 2", "tp 2 2", "ep 4 1", "world 4 1"]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    assert summary == "every group has the right ranks and gives the right sum"
    assert re.match(r"slowest rank: [0-3], \d", slowest)


def _run_without_launcher() -> tuple[int, str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    return run_doctor()


def test_plain_python_is_a_single_process_run() -> None:
    [(status, out)] = run_ranks(1, _run_without_launcher, init=False)
    assert status == 0
    assert out.startswith("dp=1 (1 rank), gloo on cpu, 1 host\n")


def _check_with_wrong_groups(*wrong_ranks: int) -> Problem | None:
    """Check tp with the group over pp on some ranks."""
    pp_group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    tp_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    rank = dist.get_rank()
    first = rank - rank % 2
    groups = [CheckedGroup("tp", (first, first + 1), pp_group if rank in wrong_ranks else tp_group)]
    return check_groups(groups, torch.device("cpu"), timedelta(seconds=3))


def test_a_wrong_group_is_reported_with_its_axis_and_ranks() -> None:
    problems = run_ranks(4, _check_with_wrong_groups, 0, 1, 2, 3)
    assert format_problems(problems) == [
        "axis tp, rank 0: its group has ranks 0, 2 instead of 0, 1",
        "axis tp, rank 1: its group has ranks 1, 3 instead of 0, 1",
        "axis tp, rank 2: its group has ranks 0, 2 instead of 2, 3",
        "axis tp, rank 3: its group has ranks 1, 3 instead of 2, 3",
    ]


def test_a_collective_that_hangs_is_reported_with_its_axis() -> None:
    problems = run_ranks(4, _check_with_wrong_groups, 3)
    assert problems[:2] == [None, None]
    assert [problem and problem.axis for problem in problems[2:]] == ["tp", "tp"]


def _run_without_the_last_rank() -> tuple[int, str] | None:
    return None if os.environ["RANK"] == "3" else run_doctor("--tp", "2", "--timeout", "8")


def _run_with_a_problem_on_the_last_rank() -> tuple[int, str]:
    """Check that the timeout of the groups is longer than the doctor's."""
    check_real_groups = doctor.check_groups
    problem = Problem("tp", "an all-reduce gave 2 instead of 3")

    def check(groups: list[CheckedGroup], device: torch.device, timeout: timedelta) -> Problem | None:
        for group in groups:
            backend: Any = group.group
            assert backend._get_backend(device).options._timeout > timeout
        return check_real_groups(groups, device, timeout) or (problem if os.environ["RANK"] == "1" else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "check_groups", check)
        return run_doctor("tp=2")


def _run_with_a_communicator_that_is_never_created() -> tuple[int, str]:
    """Block in the call of the first collective over tp, where NCCL creates a communicator."""
    real_all_gather = dist.all_gather

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            Event().wait()
        return real_all_gather(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", all_gather)
        return run_doctor("tp=2", "--timeout", "2")


@pytest.mark.parametrize(
    ("ranks", "job", "text"),
    [
        (4, _run_without_the_last_rank, "... rank 3 of 4 did not ..."),
        (2, _run_with_a_problem_on_the_last_rank, "axis tp, rank 1: an all-reduce gave 2 instead of 3"),
        (
            2,
            _run_with_a_communicator_that_is_never_created,
            "... axis tp, rank 0: the creation of its communicator did not end within 2 s; ... NCCL_DEBUG=INFO ... "
            "NCCL_SOCKET_IFNAME ... axis tp, rank 1: its first all-gather did not end within 2 s; ...",
        ),
    ],
)
def test_every_running_rank_reports_the_problem(ranks: int, job: Callable[[], Any], text: str) -> None:
    results = [result for result in run_ranks(ranks, job, init=False) if result]
    assert len(results) == (ranks if ranks == 2 else 3)
    for status, out in results:
        assert status == 1
        assert re.match(match_message(f"namedmesh doctor: {text}"), out)


def test_a_layout_that_cannot_be_parsed_is_reported_without_a_job() -> None:
    assert run_doctor("pp=x")[0] == 2


def test_a_layout_that_does_not_fit_the_job_is_a_wrong_argument() -> None:
    for status, out in run_ranks(2, lambda: run_doctor("pp=2,tp=3"), init=False):
        assert status == 2
        assert "pp=2 x tp=3 needs 6 ranks" in out


def test_the_slowest_group_and_rank_are_reported() -> None:
    fast = {"tp": AxisSpeed((0, 1), latency=0.001, bandwidth=10e9)}
    slow = {"tp": AxisSpeed((2, 3), latency=0.001, bandwidth=8e9)}
    by_rank = [Measurements(rank, 1 + (rank == 3), fast if rank < 2 else slow) for rank in range(4)]
    table, _, slowest = format_measurements(by_rank).split("\n\n")
    assert table.splitlines()[1].split() == ["tp", "2", "2", "1000.0", "9.0", "2,", "3", "8.0"]
    assert slowest == "slowest rank: 3, 2.00 times the median for work of its own"


def _report(*words: str) -> tuple[int, str]:
    """Print the report of a job that Slurm started, without starting it, in a build for CUDA without a device."""

    def name_without_device(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    os.environ.update(SLURM_STEP_ID="0", NCCL_DEBUG="INFO", NCCL_IB_HCA="mlx5", WANDB_API_KEY="secret")
    with mock.patch.object(torch.accelerator, "current_accelerator", name_without_device):
        return run_doctor("--report", *words)


def test_the_report_for_an_issue_waits_for_nobody_and_has_no_secrets() -> None:
    results = run_ranks(4, partial(_report, "pp=2,dp=-1,tp=2"), init=False)
    assert results[1:] == [(0, "")] * 3
    status, text = results[0]
    assert status == 0
    lines = text.splitlines()
    for line in (f"namedmesh {namedmesh.__version__}", f"torch {metadata.version('torch')}", "launcher: SLURM", "RANK=0",
                 "WORLD_SIZE=4", "NCCL_DEBUG=INFO", "NCCL_IB_HCA=mlx5", "mesh: pp=2 x dp=1 x tp=2 (4 ranks), the last axis fastest",
                 "tp: (0, 1) (2, 3)"):  # fmt: skip
        assert line in lines, line
    assert "secret" not in text
    assert run_doctor("--report", "dp=2,tp=2")[1].count("launcher: none") == 1
    assert run_doctor("--report", "tp=x")[0] == 2
