"""``namedmesh run``: a script, unchanged, with each dialect in place once its original is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from installing import run_python, without
from messages import printed_by
from ranks import run_ranks

from namedmesh.__main__ import main

SHOW = "import sys\nfrom ezpz import tp\nprint(tp.__name__, __name__, near.word, sys.argv[1:])\n"


def _run(folder: Path, *words: str) -> list[str]:
    """What ``namedmesh run`` prints in a folder, and what it ends with."""
    os.chdir(folder)

    def call() -> object:
        try:
            return main(["run", *words])
        except (OSError, SystemExit) as error:
            return error

    end, out, err = printed_by(call)
    return [*out.splitlines(), *(line for line in err.splitlines() if ": error: " in line), repr(end)]


def test_a_script_and_a_module_run_unchanged(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, source in {
        "__init__": "from ezpz import tp\n",
        "near": "word = 'beside'\n",
        "script": f"import near\n{SHOW}raise OSError('its own')\n",
        "job": f"from . import near\n{SHOW}assert sys.modules['__main__'].near is near\n",
    }.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    told = {
        (str(package / "script.py"), "--lr", "3"): ["beside ['--lr', '3']", "OSError('its own')"],
        ("-m", "package.job", "-m", "--lr"): ["beside ['-m', '--lr']", "0"],
        ("-m", "package.jobs"): ["module 'package.jobs' does not exist", "SystemExit(2)"],
        ("-m", "packages.job"): ["module 'packages.job' does not exist", "SystemExit(2)"],
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


def output_of(script: Path, source: str, before: str = "") -> str:
    """What ``namedmesh run`` prints of a script, in a program that imports the script's packages for the first time."""
    script.write_text(source, encoding="utf-8")
    code = f"{before}\nfrom namedmesh.__main__ import main\nmain(['run', {str(script)!r}])"
    return run_python(code, action="ignore")


@pytest.mark.oracle("megatron.core", "fairscale", "deepspeed")
@pytest.mark.parametrize("dialect", ORIGINALS)
def test_a_dialect_is_installed_once_its_original_is_imported(dialect: str, tmp_path: Path) -> None:
    """And no other original is imported, nor its dialect installed."""
    source = (
        f"import sys\n{ORIGINALS[dialect]}\n"
        "others = {'megatron', 'fairscale', 'deepspeed'} & {*sys.modules}\n"
        "print('namedmesh' in sys.modules[found.__module__].__name__ or hasattr(found, '__wrapped__'), *sorted(others))\n"
    )
    assert output_of(tmp_path / "script.py", source).splitlines()[-1] == f"True {dialect}"


def test_where_no_original_is_installed_ours_are_found_under_its_names(tmp_path: Path) -> None:
    source = "from megatron.core import mpu\nprint(mpu.__name__)\n"
    printed = output_of(tmp_path / "script.py", source, without("megatron"))
    assert printed == "namedmesh.compat.megatron.parallel_state\n"
