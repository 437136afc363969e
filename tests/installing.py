"""For tests of ``install()``: a fresh interpreter, and packages that are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import namedmesh

NOT_INSTALLED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{package}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def without(package: str) -> str:
    """Code after which a package cannot be imported."""
    return NOT_INSTALLED.format(package=package)


def run_python(code: str, *, warnings: str = "error") -> str:
    """What a fresh interpreter prints; its errors and warnings fail the test."""
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(namedmesh.__file__).parents[1])},  # what is tested here
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
