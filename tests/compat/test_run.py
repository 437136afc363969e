"""``namedmesh run``: an unchanged script, with each compatibility layer installed once upstream is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from installing import run_python, without
from messages import capture_printed
from ranks import run_ranks

from namedmesh.__main__ import main
from namedmesh.launch.tested_releases import TESTED_RELEASES

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
    messages = [line for line in errors.splitlines() if line.startswith("namedmesh run: ")]
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
        ("-m", "package.jobs"): [
            "module 'package.jobs' does not exist, or is a package without __main__.py; see namedmesh run --help",
            "SystemExit(2)",
        ],
        ("-m", "packages.job"): ["module 'packages.job' does not exist", "SystemExit(2)"],
        ("-m", "package"): ["module 'package' does not exist, or is a package without", "SystemExit(2)"],
        # A module that is written in C has no code.
        ("-m", "sys"): ["module 'sys' does not exist, or", "SystemExit(2)"],
        ("nowhere.py",): ["", "SystemExit(2)"],
    }
    for words, (text, expected_result) in expected.items():
        ((line, result),) = run_ranks(1, _run, tmp_path, *words, init=False)
        start = "namedmesh.compat.ezpz __main__ "
        if expected_result == "SystemExit(2)":
            start = "namedmesh run: "
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


def _make_package(folder: Path, name: str, **sources: str) -> None:
    """Write a package with a parallel state, as a program has it next to its script."""
    package = folder / Path(*name.split("."))
    package.mkdir(parents=True)
    for path in (package, *package.parents):
        if folder in path.parents:
            (path / "__init__.py").touch()
    for module, source in sources.items():
        (package / f"{module}.py").write_text(source, encoding="utf-8")


# A package whose version is known only after its modules were imported, as in megatron-core.
NEWER = "from . import parallel_state\n__version__ = '9.9'\n"
STATE = "_DATA_PARALLEL_GROUP = None\ndef initialize_model_parallel():\n    pass\n"
USE_STATE = "from megatron.core import parallel_state as ps\nprint(ps.__file__, hasattr(ps.initialize_model_parallel, '__wrapped__'))\n"


def test_a_vendored_package_next_to_the_script_is_used_and_its_release_is_checked(tmp_path: Path) -> None:
    """The script is not in the current folder."""
    _make_package(tmp_path, "megatron.core", __init__=NEWER, parallel_state=STATE)
    show = "import warnings\nwarnings.simplefilter('always')\nwarnings.showwarning = lambda text, *_: print(text)\n"
    printed = _run_in_new_program(tmp_path / "script.py", show + USE_STATE).splitlines()
    assert printed[-1] == f"{tmp_path}/megatron/core/parallel_state.py True"
    tested = TESTED_RELEASES["megatron.core"]
    assert printed[0].startswith(f"namedmesh is tested with {tested}, and 9.9 is installed")


@pytest.mark.parametrize("state", ["x = 1\n", "import sys\ninitialize_model_parallel = sys.exit\n"])
def test_a_package_that_cannot_be_served_is_left_as_it_is(state: str, tmp_path: Path) -> None:
    _make_package(tmp_path, "megatron.core", parallel_state=state)
    source = "from megatron.core import parallel_state\nprint(parallel_state.__name__)\n"
    show = "import warnings\nwarnings.showwarning = lambda text, *_: print(text)\n"
    printed = _run_in_new_program(tmp_path / "script.py", source, f"{show}warnings.simplefilter('always')")
    warning, name = printed.splitlines()[-2:]
    assert warning.startswith("namedmesh run leaves megatron.core.parallel_state as it is: ")
    assert name == "megatron.core.parallel_state"


def test_an_import_still_tells_whether_deepspeed_is_installed(tmp_path: Path) -> None:
    """And code that looks at the specification of a package that our fallback has made finds one."""
    source = "try:\n    import deepspeed\nexcept ModuleNotFoundError as error:\n"
    source += "    from importlib.util import find_spec\n    print(error.name, find_spec('megatron').name)\n"
    hidden = without("megatron") + without("deepspeed")
    assert _run_in_new_program(tmp_path / "script.py", source, hidden) == "deepspeed megatron\n"
