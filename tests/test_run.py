"""``namedmesh run``: a script, unchanged, with each dialect in place once its original is imported."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING

import pytest
from installing import run_python, without
from ranks import run_ranks

from namedmesh.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


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

    out = "namedmesh.compat.ezpz __main__ beside ['--lr', '3']\n"
    assert run_ranks(1, run, init=False) == [(out, "its own")]
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

    out = "namedmesh.compat.ezpz __main__ beside ['-m', '--lr'] True\n"
    err = "namedmesh run: error: there is no module 'package.jobs'\nnamedmesh run: error: there is no module 'packages.job'\n"
    assert run_ranks(1, run, init=False) == [(out, err)]


ORIGINALS = {
    "megatron": "from megatron.core.parallel_state import initialize_model_parallel as found",
    "fairscale": "from fairscale.nn.model_parallel import initialize_model_parallel as found",
    "deepspeed": "from deepspeed.runtime.pipe.topology import ProcessTopology as found",
}


@pytest.mark.oracle("megatron.core", "fairscale", "deepspeed")
@pytest.mark.parametrize("dialect", ORIGINALS)
def test_a_dialect_is_installed_once_its_original_is_imported(dialect: str, tmp_path: Path) -> None:
    """And no other original is imported, nor its dialect installed."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\n{ORIGINALS[dialect]}\n"
        "others = {'megatron', 'fairscale', 'deepspeed'} & {*sys.modules}\n"
        "source = getattr(found, '__wrapped__', found).__module__\n"
        "print('namedmesh' in sys.modules[found.__module__].__name__ or hasattr(found, '__wrapped__'), *sorted(others))\n",
        encoding="utf-8",
    )
    code = f"from namedmesh.__main__ import main\nmain(['run', {str(script)!r}])"
    printed = run_python(code, action="ignore").splitlines()
    assert printed[-1] == f"True {dialect}"


def test_where_no_original_is_installed_ours_are_found_under_its_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from megatron.core import mpu\nprint(mpu.__name__)\n", encoding="utf-8")
    code = without("megatron") + f"from namedmesh.__main__ import main\nmain(['run', {str(script)!r}])"
    assert run_python(code, action="ignore") == "namedmesh.compat.megatron.parallel_state\n"
