"""Code bases and what ``migrate`` reports of them, kept in ``migrate_cases.txt``: ``python tests/migrate_cases.py`` writes it anew."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

from namedmesh.__main__ import main

FILE = Path(__file__).with_suffix(".txt")


def cases() -> dict[str, str]:
    """The cases of the file by name: files, each after a line with its name, then a command and its report."""
    parts = re.split(r"^## (.*)\n", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def write_files(case: str, folder: Path) -> None:
    """Write the files of a case."""
    _, *parts = re.split(r"^-- (.*)\n", case.partition("$ namedmesh")[0], flags=re.MULTILINE)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def reported(case: str) -> str:
    """A case with what its command reports now."""
    files, sign, rest = case.partition("$ namedmesh")
    command, out, here = rest.partition("\n")[0], io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        write_files(case, Path(folder))
        os.chdir(folder)
        try:
            main(shlex.split(command))
        finally:
            os.chdir(here)
    return f"{files}{sign}{command}\n{out.getvalue()}\n"


if __name__ == "__main__":
    FILE.write_text(
        "".join(f"## {name}\n{reported(case)}" for name, case in cases().items()), encoding="utf-8"
    )
