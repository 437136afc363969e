"""The runner of ``benchmarks/gpu_check.py``: a line for each section, the cause of a failure, and no rank left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = """
import os, sys, threading
from pathlib import Path
if "RANK" in os.environ and "stuck" in sys.argv:
    Path(f"{{os.environ['RANK']}}.pid").write_text(str(os.getpid()))
sys.path.insert(0, {folder!r})
import gpu_check
import torch
import torch.distributed as dist

def hang():
    threading.Event().wait()

def fail_on_rank_1():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise AssertionError("the true reason\\nin two lines")
    dist.all_reduce(torch.ones(1))

gpu_check.SCRIPT = Path(__file__)
gpu_check._PATIENCE = 1
gpu_check.SECTIONS = {{
    "good": gpu_check.Section(lambda: {{"figure": 1}}, 1, 60),
    "cause": gpu_check.Section(fail_on_rank_1, 2, 60),
    "stuck": gpu_check.Section(hang, 2, 3),
}}
sys.exit(gpu_check.main())
"""


@pytest.mark.slow
def test_sections_are_reported_in_a_line_each_and_leave_no_process(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(SECTIONS.format(folder=str(ROOT / "benchmarks")), encoding="utf-8")
    command = [sys.executable, str(script), "--output", str(tmp_path / "summary.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1, done.stderr
    good, cause, stuck, summary = done.stdout.splitlines()
    assert good.startswith("PASS good")
    assert cause.startswith("FAIL cause")
    assert "rank 1: AssertionError: the true reason in two lines" in cause
    assert stuck.startswith("FAIL stuck")
    assert "no result within 3 s" in stuck
    assert summary == "1 PASS, 0 SKIP, 2 FAIL"
    for rank in (0, 1):
        pid = int((tmp_path / f"{rank}.pid").read_text(encoding="utf-8"))
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_section_passes_or_needs_a_gpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_check.py"),
        "--output",
        str(tmp_path / "gpu.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(", 0 FAIL")
