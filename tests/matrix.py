"""The version matrix: the test suite against several torch releases, each in a virtual environment of its own.

    python tests/matrix.py                              # one release of every minor version that is supported
    python tests/matrix.py 2.12.0 2.15.0                # these releases
    python tests/matrix.py 2.12.0 -- tests/test_layout.py -k groups      # what follows -- is for pytest

An environment takes gigabytes, because releases for Linux bring CUDA along: it is removed once its tests have
run, unless ``--envs`` or ``--keep`` says otherwise. The exit status is 1 if any release failed.
"""

# ruff: noqa: T201  a script prints

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

RELEASES = ("2.12.0", "2.13.0", "2.14.1", "2.15.0")
ROOT = Path(__file__).parent.parent


class Result(NamedTuple):
    """What became of the suite on one release; counts are None where it did not come to an end."""

    release: str
    ok: bool
    passed: int | None
    failed: int | None
    skipped: int | None
    seconds: float
    remark: str = ""


def tried(release: str, where: Path, python: str, pytest_arguments: list[str]) -> Result:
    """Make the environment unless it exists, install what it lacks, and run the suite in it."""
    start = time.monotonic()
    interpreter = where / "bin" / "python"
    # A constraint would contradict the release, and PYTHONPATH would bring another's packages.
    environment = {
        name: value for name, value in os.environ.items() if name not in {"PIP_CONSTRAINT", "PYTHONPATH"}
    }
    try:
        if not interpreter.exists():
            subprocess.run([python, "-m", "venv", str(where)], check=True, env=environment)
        install = [str(interpreter), "-m", "pip", "install", "-q", f"torch=={release}", "-e", f"{ROOT}[test]"]
        subprocess.run(install, check=True, env=environment)
    except subprocess.CalledProcessError as error:
        remark = f"no environment: {error.cmd[1:4]} ended with {error.returncode}"
        return Result(release, ok=False, passed=None, failed=None, skipped=None, seconds=0, remark=remark)
    installed = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(interpreter), "-m", "pytest", "-q", f"--junitxml={report}", *pytest_arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        seconds = time.monotonic() - installed
        remark = f"installed in {installed - start:.0f} s"
        if not report.exists():
            remark += f"; pytest ended with {status} and left no report"
            return Result(
                release, ok=False, passed=None, failed=None, skipped=None, seconds=seconds, remark=remark
            )
        suite = ET.parse(report).getroot().find("testsuite")  # noqa: S314  pytest wrote it a moment ago
    counts = (
        {}
        if suite is None
        else {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    )
    failed = counts.get("failures", 0) + counts.get("errors", 0)
    skipped = counts.get("skipped", 0)
    passed = counts.get("tests", 0) - failed - skipped
    return Result(release, status == 0, passed, failed, skipped, seconds, remark)


def table(results: list[Result]) -> str:
    """One line for each release.

    Example:
        >>> print(table([Result("2.8.0", True, 12, 0, 3, 8.25)]))
        torch      passed failed skipped seconds
        2.8.0          12      0       3       8  ok
    """
    lines = [f"{'torch':10} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}"]
    for result in results:
        passed, failed, skipped = ("-" if n is None else n for n in result[2:5])
        line = f"{result.release:10} {passed:>6} {failed:>6} {skipped:>7} {result.seconds:7.0f}  "
        line += "ok" if result.ok else "FAILED"
        lines.append(f"{line} ({result.remark})" if result.remark else line)
    return "\n".join(lines)


def main() -> int:
    """Run the suite on every release asked for, print a table, and say whether all passed."""
    ours, pytest_arguments = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", default=RELEASES, help=f"by default {' '.join(RELEASES)}")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument(
        "--envs", type=Path, help="where environments are, or are made and kept, one folder by release"
    )
    parser.add_argument("--keep", action="store_true", help="do not remove the environments made here")
    arguments = parser.parse_args(ours)
    keep = arguments.keep or arguments.envs is not None
    folder = arguments.envs or Path(tempfile.mkdtemp(prefix="torch-matrix-"))
    results: list[Result] = []
    try:
        for release in arguments.releases:
            print(f"== torch {release}", flush=True)
            where = folder / release
            results.append(tried(release, where, arguments.python, pytest_arguments))
            if not keep:
                shutil.rmtree(where, ignore_errors=True)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        print(table(results))
        if keep:
            print(f"the environments are in {folder}")
    return 0 if all(result.ok for result in results) else 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What comes before the first ``--``, and what comes after it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
