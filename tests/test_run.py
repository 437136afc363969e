"""``namedmesh run``: a script or a module, unchanged, with the dialects in place."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
from ranks import run_ranks

from namedmesh.__main__ import main
from namedmesh.compat.cli import DIALECTS

SOURCE = str(Path(__file__).parents[1] / "src")


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("word = 'beside'\n", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, near\nfrom ezpz import tp\nprint(tp.__name__, __name__, near.word, sys.argv[1:])\n"
        "raise OSError('its own')\n",
        encoding="utf-8",
    )

    def run() -> tuple[str, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(OSError, match="its own") as caught:
            main(["run", "--dialect", "ezpz", str(script), "--lr", "3"])
        return out.getvalue(), str(caught.value)

    out = "namedmesh.compat.ezpz.tp __main__ beside ['--lr', '3']\n"
    assert run_ranks(1, run, init=False) == [(out, "its own")]
    assert set(DIALECTS) <= {path.stem for path in (Path(SOURCE) / "namedmesh" / "compat").iterdir()}
    with pytest.raises(SystemExit) as caught:
        main(["run", "nowhere.py"])
    assert caught.value.code == 2


def test_a_module_runs_unchanged(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from ezpz import tp\n", encoding="utf-8")
    (package / "near.py").write_text("word = 'beside'\n", encoding="utf-8")
    (package / "job.py").write_text(
        "import sys\nfrom . import near, tp\n"
        "print(tp.__name__, __name__, near.word, sys.argv[1:], sys.modules['__main__'].near is near)\n",
        encoding="utf-8",
    )

    def run() -> tuple[str, str]:
        os.chdir(tmp_path)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert main(["run", "--dialect", "ezpz", "-m", "package.job", "-m", "--lr"]) == 0
            for missing in ("package.jobs", "packages.job"):
                with pytest.raises(SystemExit):
                    main(["run", "--dialect", "ezpz", "-m", missing])
        errors = [line for line in err.getvalue().splitlines(keepends=True) if ": error: " in line]
        return out.getvalue(), "".join(errors)

    out = "namedmesh.compat.ezpz.tp __main__ beside ['-m', '--lr'] True\n"
    err = "namedmesh run: error: there is no module 'package.jobs'\nnamedmesh run: error: there is no module 'packages.job'\n"
    assert run_ranks(1, run, init=False) == [(out, err)]
