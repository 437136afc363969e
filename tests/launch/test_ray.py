"""The page's job under Ray Train, with the real package: its default group is that of the mesh."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from installing import interpreter
from pages import find_blocks
from ranks import run_ranks

# One machine with two cores, and none of the services that a short job does not need.
START = "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
PR_SET_CHILD_SUBREAPER = 36


def _run_job(source: str) -> tuple[int, str, str, list[int]]:
    """Run a job in an interpreter; return its status, what it prints, and processes that outlive it by 20 seconds."""
    # Ray's processes become children of this one when their parents end.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    # A short path, since those of Ray's sockets may have about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        variables = {"HOME": folder, "RAY_TMPDIR": folder} | SETTINGS
        script = Path(folder, "job.py")
        script.write_text(START + source, encoding="utf-8")
        job = interpreter(str(script), env=os.environ | variables)
        deadline = time.monotonic() + 20
        with suppress(ChildProcessError):  # none is left
            while time.monotonic() < deadline:
                os.waitpid(-1, os.WNOHANG)
                time.sleep(0.05)
        left = _children()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    return job.returncode, job.stdout, job.stderr, left


def _children() -> list[int]:
    own = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii").split()]


@pytest.mark.oracle("ray")
def test_a_mesh_uses_the_default_group_of_ray_train() -> None:
    (source,) = find_blocks("python", "run: ray")
    ((status, printed, errors, left),) = run_ranks(1, _run_job, source, init=False, timeout=150)
    assert status == 0, errors
    assert printed == "dp=1 x tp=2 (2 ranks), 2 ranks in the tp group\n"
    assert left == []
