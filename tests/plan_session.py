"""What the planner's commands print, kept in ``plan_session.txt``: ``python tests/plan_session.py`` writes it anew."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from namedmesh.__main__ import main

FILE = Path(__file__).with_suffix(".txt")


def run(command: str) -> tuple[int, str, str]:
    """The exit status of a command, its output and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(shlex.split(command))
    return status, out.getvalue(), err.getvalue()


def session(text: str) -> str:
    """The same commands as in a text, with what they print now."""
    blocks = []
    for command in re.findall(r"^\$ namedmesh (.*)$", text, re.MULTILINE):
        status, out, err = run(command)
        blocks.append(f"$ namedmesh {command}\n{out}{err}exit status {status}\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    FILE.write_text(session(FILE.read_text(encoding="utf-8")), encoding="utf-8")
