"""Run every test on one release of each supported minor version of torch, each in a separate environment.

    python tests/support/matrix.py [RELEASE ...] [-- ARGUMENTS OF PYTEST]

An environment takes gigabytes, as releases for Linux include CUDA. It is removed after its tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

RELEASES = ("2.12.0", "2.13.0", "2.14.1", "2.15.0")
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run the suite on each release; the exit status is 1 if it failed on one."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    # A constraint of pip would contradict the release, and PYTHONPATH may have packages of another environment.
    environment = dict(os.environ)
    for name in ("PIP_CONSTRAINT", "PYTHONPATH"):
        environment.pop(name, None)
    failed = []
    for release in words[:at] or RELEASES:
        with tempfile.TemporaryDirectory() as folder:
            python = f"{folder}/bin/python"
            install = ["-m", "pip", "install", "-q", f"torch=={release}", "-e", f"{ROOT}[test]"]
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, env=environment)
            subprocess.run([python, *install], check=True, env=environment)
            suite = [python, "-m", "pytest", "-q", "-m", "", *words[at + 1 :]]
            if subprocess.run(suite, cwd=ROOT, env=environment, check=False).returncode:
                failed.append(release)
    print("failed on torch:", *failed or ["none"])  # noqa: T201  a script prints
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
