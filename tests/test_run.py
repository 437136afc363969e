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


SHOW = "import sys\nfrom ezpz import tp\nprint(tp.__name__, __name__, near.word, sys.argv[1:])\n"


def _run(folder: Path, *words: str) -> list[str]:
    """What ``namedmesh run`` prints in a folder, and what it ends with."""
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    end: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            end = main(["run", *words])
        except (OSError, SystemExit) as error:
            end = error
    errors = [line for line in err.getvalue().splitlines() if ": error: " in line]
    return [*out.getvalue().splitlines(), *errors, repr(end)]


def test_a_script_and_a_module_run_unchanged(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from ezpz import tp\n", encoding="utf-8")
    (package / "near.py").write_text("word = 'beside'\n", encoding="utf-8")
    (package / "script.py").write_text(f"import near\n{SHOW}raise OSError('its own')\n", encoding="utf-8")
    module = f"from . import near\n{SHOW}assert sys.modules['__main__'].near is near\n"
    (package / "job.py").write_text(module, encoding="utf-8")
    told = {
        (str(package / "script.py"), "--lr", "3"): ["beside ['--lr', '3']", "OSError('its own')"],
        ("-m", "package.job", "-m", "--lr"): ["beside ['-m', '--lr']", "0"],
        ("-m", "package.jobs"): ["there is no module 'package.jobs'", "SystemExit(2)"],
        ("-m", "packages.job"): ["there is no module 'packages.job'", "SystemExit(2)"],
        ("nowhere.py",): ["", "SystemExit(2)"],
    }
    for words, (text, end) in told.items():
        ((*shown, ended),) = run_ranks(1, _run, tmp_path, *words, init=False)
        known = "namedmesh run: error: " if end == "SystemExit(2)" else "namedmesh.compat.ezpz __main__ "
        assert len(shown) == 1
        assert shown[0].startswith(known + text)
        assert ended == end


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
