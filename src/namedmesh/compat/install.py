"""``install()`` of a dialect, and ``namedmesh run``: unchanged code finds our meshes under the names of the originals.

Where an original is installed it answers from our meshes; where it is not, our module is found in its place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

DIALECTS = {
    "megatron": "megatron.core.parallel_state",
    "deepspeed": "deepspeed.runtime.pipe.topology",
    "fairscale": "fairscale.nn.model_parallel.initialize",
    "ezpz": "",
}
"""The dialects that can be installed, and the module whose import they wait for; ours always stands in for ezpz."""


@dataclass
class Original:
    """The original of a dialect, which is installed on this machine or not.

    Args:
        module: its module with the variables, such as ``"megatron.core.parallel_state"``.
        replace: is given the imported module, and returns what takes the place of its functions and classes, by name.
            None where ours always stands in.
        stand_ins: where it is not installed: the module of ours that is found under each of its names.
        restore: what to call when everything is put back, before.
    """

    module: str
    replace: Callable[[ModuleType], Mapping[str, object]] | None
    stand_ins: Mapping[str, str]
    restore: Callable[[], None] = lambda: None
    installed: bool = field(default=False, init=False)
    _undo: ExitStack = field(default_factory=ExitStack, init=False)

    def install(self) -> None:
        """Let the original answer from our meshes; a second call does nothing. Call it first of all, and bind meshes afterwards.

        Where it is installed it is imported, and ours take the place of what makes its groups, also in modules that
        imported it before. Where it is not, our modules are found under its names.
        """
        if self.installed:
            return
        if self.replace is not None and is_installed(self.module):
            module = import_module(self.module)
            self._take_over(module, self.replace(module))
        else:
            for name, ours in self.stand_ins.items():
                self.put(sys.modules, name, import_module(ours))
            for name in self.stand_ins:  # after all are there: the packages around them may import them
                self._put_into_package(name)
        self._undo.callback(self.restore)
        self.installed = True

    def uninstall(self) -> None:
        """Put everything back."""
        self.installed = False
        self._undo.close()

    def _take_over(self, module: ModuleType, replaced: Mapping[str, object]) -> None:
        ours = {id(getattr(module, name)): value for name, value in replaced.items()}
        for holder in list(sys.modules.values()):
            for known, value in list(getattr(holder, "__dict__", {}).items()):
                if id(value) in ours:
                    self.put(vars(holder), known, ours[id(value)])

    def _put_into_package(self, name: str) -> None:
        """Let a module be found in its package, which is an empty one where none is installed."""
        package, _, child = name.rpartition(".")
        if not package:
            return
        if is_installed(package):
            import_module(package)
        else:
            empty = ModuleType(package, f"Stands in for {package}, which is not installed.")
            empty.__path__ = []
            self.put(sys.modules, package, empty)
            self._put_into_package(package)
        self.put(vars(sys.modules[package]), child, sys.modules[name])

    def put(self, names: dict[str, Any], name: str, value: object) -> None:
        """Put a value under a name, until everything is put back."""
        if name in names:
            self._undo.callback(names.__setitem__, name, names[name])
        else:
            self._undo.callback(names.pop, name, None)
        names[name] = value


def is_installed(name: str) -> bool:
    """Return whether a module can be imported; the packages around it are, to find out."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # neither it nor a package around it is missing
            raise
        return False


def as_imported(module: ModuleType) -> ModuleType:
    """Return a module as it is right after its import, whatever was assigned in it since: its code is executed again."""
    spec: Any = spec_from_file_location(module.__name__, module.__file__)
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Call a function once a module was imported; at once where it was, or where its package is not installed."""
    if not name or name in sys.modules or not is_installed(name.partition(".")[0]):
        call()
        return

    def find_and_call(found: str, *_: object) -> ModuleSpec | None:
        """Find the module as the other finders do, and let its loader call the function afterwards."""
        if found != name:
            return None
        sys.meta_path.remove(finder)
        spec = find_spec(name)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module
            loader.exec_module = lambda module: (execute(module), call())
        return spec

    finder: Any = SimpleNamespace(find_spec=find_and_call)
    sys.meta_path.insert(0, finder)


# The command.


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    text = "the script, and its arguments"
    parser.add_argument("script", nargs="...", metavar="SCRIPT [ARGS]", help=text)
    parser.set_defaults(guarded=False)  # what the script raises is its own


def _run(arguments: argparse.Namespace) -> int:
    """Install the dialects and run the script, as ``python SCRIPT ARGS`` or ``python -m MODULE ARGS`` would."""
    words = arguments.script[arguments.script[:1] == ["--"] :]
    if not words or not (arguments.module or Path(words[0]).is_file()):
        arguments.parser.error(f"there is no script {words[0]!r}" if words else "name a script to run")
    for dialect, original in DIALECTS.items():
        when_imported(original, partial(_install, dialect))
    import runpy

    sys.path[0] = str(Path.cwd() if arguments.module else Path(words[0]).resolve().parent)
    sys.argv[:] = words
    if not arguments.module:
        runpy.run_path(words[0], run_name="__main__")
    elif is_installed(words[0]):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        arguments.parser.error(f"there is no module {words[0]!r}")
    return 0


def _install(dialect: str) -> None:
    import_module(f"namedmesh.compat.{dialect}").install()


_SUMMARY = "run a script with the dialects in place of megatron.core, deepspeed, fairscale and ezpz"
COMMANDS = {"run": (_SUMMARY, _configure, _run)}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
