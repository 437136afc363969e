"""Run Python programs in separate processes, and hide installed packages."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

from ranks import run_ranks

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
    """Return code after which a package cannot be imported."""
    return NOT_INSTALLED.format(package=package)


UPSTREAM_PACKAGES = {"deepspeed", "ezpz", "fairscale", "megatron"}


def run_python(code: str, *, action: Literal["error", "ignore"] = "error") -> str:
    """Run a program that imports upstream packages for the first time, and return its output.

    Its errors and warnings fail the test. It runs in a forked process, which has imported torch already.
    """
    return run_ranks(1, _program, textwrap.dedent(code), action, init=False, timeout=120)[0]


def interpreter(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter, which imports this checkout instead of an installed namedmesh."""
    paths = [str(Path(namedmesh.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    options = {"env": os.environ} | options
    options["env"] = {**options["env"], "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=120, **options
    )


def _program(code: str, action: Literal["error", "ignore"]) -> str:
    for name in [name for name in sys.modules if name.partition(".")[0] in UPSTREAM_PACKAGES]:
        del sys.modules[name]
    warnings.resetwarnings()
    warnings.simplefilter(action)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  the program
    return printed.getvalue()
