"""``namedmesh run``: an unchanged script, with each compatibility layer installed once upstream is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from installing import run_python, without
from messages import capture_printed
from ranks import run_ranks

from namedmesh.__main__ import main

SHOW = "import sys\nfrom ezpz import tp\nprint(tp.__name__, __name__, neighbor.word, sys.argv[1:])\n"


def _run(folder: Path, *words: str) -> list[str]:
    """Run a command in a folder; return its output, its error messages, and its result or exception."""
    os.chdir(folder)

    def call() -> object:
        try:
            return main(["run", *words])
        except (OSError, SystemExit) as error:
            return error

    result, printed, errors = capture_printed(call)
    messages = [line for line in errors.splitlines() if ": error: " in line]
    return [*printed.splitlines(), *messages, repr(result)]


def test_a_script_and_a_module_run_unchanged(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, source in {
        "__init__": "from ezpz import tp\n",
        "neighbor": "word = 'next'\n",
        "script": f"import neighbor\n{SHOW}raise OSError('its own')\n",
        "job": f"from . import neighbor\n{SHOW}assert sys.modules['__main__'].neighbor is neighbor\n",
    }.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    expected = {
        (str(package / "script.py"), "--lr", "3"): ["next ['--lr', '3']", "OSError('its own')"],
        ("-m", "package.job", "-m", "--lr"): ["next ['-m', '--lr']", "0"],
        ("-m", "package.jobs"): ["module 'package.jobs' does not exist", "SystemExit(2)"],
        ("-m", "packages.job"): ["module 'packages.job' does not exist", "SystemExit(2)"],
        ("nowhere.py",): ["", "SystemExit(2)"],
    }
    for words, (text, expected_result) in expected.items():
        ((line, result),) = run_ranks(1, _run, tmp_path, *words, init=False)
        start = "namedmesh.compat.ezpz __main__ "
        if expected_result == "SystemExit(2)":
            start = "namedmesh run: error: "
        assert line.startswith(start + text)
        assert result == expected_result


UPSTREAM_IMPORTS = {
    "megatron": "from megatron.core.parallel_state import initialize_model_parallel as imported",
    "fairscale": "from fairscale.nn.model_parallel import initialize_model_parallel as imported",
    "deepspeed": "from deepspeed.runtime.pipe.topology import PipelineParallelGrid as imported",
}


def _run_in_new_program(script: Path, source: str, before: str = "") -> str:
    """Return the output of ``namedmesh run`` in a program that imports the script's packages for the first time."""
    script.write_text(source, encoding="utf-8")
    code = f"{before}\nfrom namedmesh.__main__ import main\nmain(['run', {str(script)!r}])"
    return run_python(code, action="ignore")


@pytest.mark.oracle("megatron.core", "fairscale", "deepspeed")
@pytest.mark.parametrize("layer", UPSTREAM_IMPORTS)
def test_a_layer_is_installed_once_its_upstream_is_imported(layer: str, tmp_path: Path) -> None:
    """No other upstream library is imported, nor is its layer installed."""
    source = (
        f"import sys\n{UPSTREAM_IMPORTS[layer]}\n"
        "others = {'megatron', 'fairscale', 'deepspeed'} & {*sys.modules}\n"
        "print('namedmesh' in sys.modules[imported.__module__].__name__ or hasattr(imported, '__wrapped__'), *sorted(others))\n"
    )
    assert _run_in_new_program(tmp_path / "script.py", source).splitlines()[-1] == f"True {layer}"


def test_the_fallback_is_imported_if_upstream_is_not_installed(tmp_path: Path) -> None:
    source = "from megatron.core import mpu\nprint(mpu.__name__)\n"
    printed = _run_in_new_program(tmp_path / "script.py", source, without("megatron"))
    assert printed == "namedmesh.compat.megatron.parallel_state\n"
