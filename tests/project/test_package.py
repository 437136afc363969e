"""The package: its exports, the cost of importing it, and the rules of its sources."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from installing import interpreter
from torch.utils._device import _device_constructors

import namedmesh
from namedmesh import NamedMeshError
from namedmesh.layout.sizes import RESERVED

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "namedmesh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A room is a module or a package of namedmesh. The table in CONTRIBUTING.md lists them from the top
# down.
TABLE = re.findall(
    r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)
ROOMS = ["_version", *re.findall(r"`(\w+)/?`", " ".join(TABLE))]


def test_dir_lists_exactly_the_exported_names() -> None:
    assert sorted(namedmesh.__all__) == dir(namedmesh)
    with pytest.raises(AttributeError, match="module 'namedmesh' has no attribute 'int_mesh'"):
        namedmesh.int_mesh  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_type_checker_sees_only_names_that_exist(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import namedmesh\nmesh = namedmesh.init_mesh(dp=2)\nmesh.size('dp')\n"
        "namedmesh.init_mehs()\nmesh.nonsense()\n",
        encoding="utf-8",
    )
    # torch's own types take minutes to read.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8")
    report = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", f"--cache-dir={tmp_path}", str(program)],
        env=os.environ | {"MYPYPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    errors = re.findall(rf"^{program}:(\d+): error: .*\[(.*)\]$", report, flags=re.MULTILINE)
    assert errors == [("4", "attr-defined"), ("5", "attr-defined")], report


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, namedmesh; namedmesh.Layout(dp=2); sys.exit('torch' in sys.modules)"
    assert interpreter("-c", code).returncode == 0


@pytest.mark.slow
def test_importing_training_does_not_import_torch_compile() -> None:
    code = "import sys, namedmesh.training; sys.exit('torch._dynamo' in sys.modules)"
    result = interpreter("-c", code)
    assert result.returncode == 0, result.stderr


def test_every_error_is_a_builtin_error_too() -> None:
    kinds = [kind for kind in NamedMeshError.__subclasses__() if kind.__module__ == "namedmesh._errors"]
    assert {kind.__name__ for kind in kinds} <= set(namedmesh.__all__)
    for kind in kinds:
        assert issubclass(kind, (ImportError, KeyError, RuntimeError, ValueError))
        assert str(kind("one thing")) == "one thing"
        assert str(kind("one", "two")) == "2 problems:\n  - one\n  - two"


def find_imported_rooms(path: Path) -> set[str]:
    """Return the rooms of namedmesh that a file imports at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # The imports under TYPE_CHECKING do not run.
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("namedmesh.")}


def test_rooms_import_only_from_rooms_above() -> None:
    files = {path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert sorted({*files.values()} - {"__init__"}) == sorted(ROOMS)
    for path, room in files.items():
        if room != "__init__":
            allowed = set(ROOMS[: ROOMS.index(room) + 1])
            assert find_imported_rooms(path) <= allowed, f"{path} imports from below"


def test_only_one_package_touches_private_torch() -> None:
    private = re.compile(r"torch(?:\.\w+)*\._[a-z]\w*|from torch\S* import [^\n]*\b_[a-z]\w*")
    guilty = [
        f"{path.name}: {match.group()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != SOURCE / "_torch"
        for match in private.finditer(path.read_text(encoding="utf-8"))
    ]
    assert guilty == []


def test_compat_uses_nothing_private_of_the_core() -> None:
    private = re.compile(
        r"namedmesh\._(?!errors\b|command_line\b)\w+|\bmesh\._[a-z]\w*|namedmesh\.launch\.(?:agreement|coordinator)\b"
        r"|namedmesh\.mesh\.(?:views|internal)\b"
    )
    for path in (SOURCE / "compat").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert private.findall(source) == [], path.name
        assert len(source.splitlines()) <= 450, path.name


def test_every_new_tensor_has_an_explicit_device() -> None:
    """A default device, as scripts for GPUs set, would move tensors that belong on the CPU."""
    constructors = {constructor.__name__ for constructor in _device_constructors()}
    guilty = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_constructor = ast.unparse(node.func.value) == "torch" and node.func.attr in constructors
            if is_constructor and "device" not in {keyword.arg for keyword in node.keywords}:
                guilty.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert guilty == []


def test_pre_commit_uses_the_versions_of_the_test_extra() -> None:
    extras = PROJECT["optional-dependencies"]["test"]
    pinned = dict(requirement.split("==") for requirement in extras if "==" in requirement)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    used = re.findall(r'"(ruff|mypy)==([\d.]+)"', hooks)
    assert set(used) == set(pinned.items())
    assert len(used) == 3


def test_the_only_dependencies_are_torch_and_packaging() -> None:
    names = [re.split(r"[<>=!~ ]", requirement)[0] for requirement in PROJECT["dependencies"]]
    assert names == ["torch", "packaging"]


def test_no_submodule_hides_a_name_of_its_package() -> None:
    """Once imported, a submodule is an attribute of its package. It would hide a lazily exported name."""
    for init in sorted(SOURCE.rglob("__init__.py")):
        name = ".".join(("namedmesh", *init.parent.relative_to(SOURCE).parts))
        package = importlib.import_module(name)
        modules = {module.name for module in pkgutil.iter_modules([str(init.parent)])}
        for exported in modules & set(getattr(package, "__all__", ())):
            assert inspect.ismodule(getattr(package, exported)), f"{name}.{exported}"


SITE = runpy.run_path(str(ROOT / ".docs" / "build.py"))


@pytest.mark.parametrize("module", SITE["MODULES"])
def test_public_names_have_a_signature_and_a_docstring(module: str) -> None:
    for name, value in SITE["public_names"](module).items():
        if callable(value):
            inspect.signature(value)
            inherited = [base.__doc__ for base in getattr(value, "__mro__", ())[1:]]
            assert value.__doc__, name
            assert value.__doc__ not in inherited, name
        elif inspect.ismodule(value):
            assert value.__doc__, name


def test_the_version_is_that_of_the_changelog() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", changes, flags=re.MULTILINE)
    assert sections[:2] == ["Unreleased", namedmesh.__version__]
    kinds = set(re.findall(r"^### (\w+)$", changes, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_arguments_of_init_mesh_and_layout_are_reserved_names() -> None:
    init_arguments = inspect.signature(namedmesh.init_mesh).parameters
    layout_arguments = inspect.signature(namedmesh.Layout).parameters
    assert {*RESERVED, "sizes"} == {*init_arguments, *layout_arguments}
