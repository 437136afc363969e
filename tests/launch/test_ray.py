"""The page's job under Ray Train, with the real package: its default group is that of the mesh."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pages import find_blocks
from ranks import TORCHRUN_VARIABLES, run_ranks

import namedmesh

# One machine with two cores, and none of the services that a short job does not need.
START = "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise: on a busy machine it would wait for all other tests
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
PR_SET_CHILD_SUBREAPER = 36


def _run_job(source: str) -> tuple[int | None, str, str, list[int]]:
    """Run a job in an interpreter; return its status, its output, its errors, and the processes that outlive it."""
    # Ray's processes become children of this one when their parents end.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    variables = {
        name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES
    } | SETTINGS
    variables["PYTHONPATH"] = str(Path(namedmesh.__file__).parents[1])
    # A short path, since those of Ray's sockets may have about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        script, out, err = (Path(folder, name) for name in ("job.py", "out", "err"))
        script.write_text(START + source, encoding="utf-8")
        variables |= {"HOME": folder, "RAY_TMPDIR": folder}
        # Files, because Ray's processes inherit them: a pipe would be open until all have ended.
        with out.open("w") as stdout, err.open("w") as stderr:
            job = subprocess.Popen([sys.executable, str(script)], stdout=stdout, stderr=stderr, env=variables)
        try:
            with suppress(subprocess.TimeoutExpired):
                job.wait(timeout=200)
            left = _wait_for_children(timeout=20)
            status = job.returncode
        finally:
            while children := _children():  # those of a process come to this one when it has ended
                os.kill(children[0], signal.SIGKILL)
                os.waitpid(children[0], 0)
        return status, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"), left


def _wait_for_children(timeout: float) -> list[int]:
    """Wait until no child is left, and return those that are after some time."""
    deadline = time.monotonic() + timeout
    while (left := _children()) and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    return left


def _children() -> list[int]:
    own = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii").split()]


@pytest.mark.oracle("ray")
def test_a_mesh_uses_the_default_group_of_ray_train() -> None:
    (source,) = find_blocks("python", "run: ray")
    ((status, printed, errors, left),) = run_ranks(1, _run_job, source, init=False, timeout=260)
    assert status == 0, errors
    assert printed == "dp=1 x tp=2 (2 ranks), 2 ranks in the tp group\n"
    assert left == []
