"""A rank that is killed, stopped or fails: the others name it, in one sentence, and one of them first."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import namedmesh
from namedmesh import training
from namedmesh.training import lost_ranks

if TYPE_CHECKING:
    from pathlib import Path

LOST = 2
PLACE = "rank 2 (dp 1, tp 0)"
GROUPS = (
    "lost with it: dp (ranks 0, 2), tp (ranks 2, 3); end the job, and start it again from its last checkpoint"
)


class Clock:
    """The time of a rank that asks the others; their limit is over once all but the lost one have answered."""

    def __init__(self, mesh: namedmesh.NamedMesh) -> None:
        self.sleep, self.store = time.sleep, lost_ranks._connection(mesh)
        self.awaited = [
            f"answer/{rank}" for rank in mesh.layout.ranks if rank not in {LOST, mesh.global_rank}
        ]
        self.now = 0.0

    def monotonic(self) -> float:
        now = self.now
        if self.store.check(self.awaited):  # after which it looks once more for each answer
            self.now += 1e9
        return now


def lose_a_rank(how: str, told: Path) -> None:
    """Lose rank 2; the others write what they were told."""
    pids: list[int] = [0] * 4
    dist.all_gather_object(pids, os.getpid())
    # Ranks that do not end keep their connections: only the limit of the collectives ends those that wait for them.
    mesh = namedmesh.init_mesh(dp=2, tp=2, timeout=timedelta(seconds=3))
    with training.report_lost_ranks(mesh):  # nothing happens, and it may be entered again
        dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
    try:
        with mock.patch.object(lost_ranks, "time", Clock(mesh)), training.report_lost_ranks(mesh):
            for axis in ("dp", "tp"):
                dist.all_reduce(torch.ones(1), group=mesh.group(axis))
            if mesh.global_rank == LOST:
                if how == "RuntimeError":  # its own: all others answer
                    raise RuntimeError("no more data\nsecond line")
                os.kill(os.getpid(), getattr(signal, how))
            for axis in ("tp", "dp"):
                dist.all_reduce(torch.ones(1), group=mesh.group(axis))
    except namedmesh.LostRanksError as error:
        (told / str(mesh.global_rank)).write_text(json.dumps([str(error), error.ranks, error.first]))
        if error.first and how == "SIGSTOP":
            os.kill(pids[LOST], signal.SIGKILL)


SILENT = "does not answer: it was killed, was stopped, or is cut off"


@pytest.mark.parametrize(
    ("how", "what"),
    [("SIGKILL", SILENT), ("SIGSTOP", SILENT), ("RuntimeError", "ended with RuntimeError: no more data")],
)
def test_the_others_name_a_lost_rank(how: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^1 of 4 ranks failed\n--- rank 2") as story:
        run_ranks(4, lose_a_rank, how, tmp_path)
    assert ("RuntimeError: no more data\nsecond line" in str(story.value)) == (how == "RuntimeError")
    told = {int(path.name): json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(told) == [0, 1, 3]
    assert {(text, *ranks) for text, ranks, _ in told.values()} == {(f"{PLACE} {what}; {GROUPS}", LOST)}
    assert sorted(first for _, _, first in told.values()) == [False, False, True]
