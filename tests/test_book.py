"""Every page of ``examples/README.md``: its script runs on as many ranks as it says, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


class Shown(NamedTuple):
    """A command that starts a script, and what the page says that it prints."""

    ranks: int
    script: str
    arguments: list[str]
    output: str


def shown() -> list[Shown]:
    found = []
    pattern = (
        r"^```console\n\$ (?:torchrun --nproc-per-node (\d+)|python) (examples/\w+\.py)([^\n]*)\n(.*?)^```$"
    )
    for ranks, script, arguments, output in re.findall(pattern, TEXT, flags=re.MULTILINE | re.DOTALL):
        found.append(Shown(int(ranks or 1), script, shlex.split(arguments), output))
    return found


def printed(page: Shown) -> str:
    out = io.StringIO()
    sys.argv = [page.script, *page.arguments]
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(ROOT / page.script), run_name="__main__")
    return out.getvalue()
