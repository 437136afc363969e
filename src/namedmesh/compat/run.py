"""``namedmesh run``: run a script whose upstream libraries use the groups of our meshes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from namedmesh.compat.patching import UPSTREAM, is_installed


def call_after_import(name: str, call: Callable[[], object]) -> None:
    """Call a function once a module has been imported.

    It is called at once if the module is imported already or its package is not installed.

    Args:
        name: the name of the module; empty for a call at once.
        call: the function, without arguments.
    """
    if not name or name in sys.modules or not is_installed(name.partition(".")[0]):
        call()
        return

    def find_and_call(found: str, *_: object) -> ModuleSpec | None:
        """Find the module with the other finders, and let its loader call the function afterwards."""
        if found != name:
            return None
        # This finder is needed once. Without it, find_spec uses the other finders.
        sys.meta_path.remove(finder)
        spec = find_spec(name)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module
            # The module has its functions only after its own code has run.
            loader.exec_module = lambda module: (execute(module), call())
        return spec

    finder: Any = SimpleNamespace(find_spec=find_and_call)
    sys.meta_path.insert(0, finder)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    text = "the script, and its arguments"
    parser.add_argument("script", nargs="...", metavar="SCRIPT [ARGS]", help=text)
    # An exception of the script is not an error of this command.
    parser.set_defaults(guarded=False)


def _run(arguments: argparse.Namespace) -> int:
    """Install the layers, and run the script like ``python SCRIPT`` or ``python -m MODULE``."""
    words = arguments.script[arguments.script[:1] == ["--"] :]
    if not words:
        arguments.parser.error("name a script to run")
    if not arguments.module and not Path(words[0]).is_file():
        arguments.parser.error(f"script {words[0]!r} does not exist")
    for layer, upstream in UPSTREAM.items():
        call_after_import(upstream, partial(_install, layer))
    import runpy

    # As the interpreter does for a script and for a module.
    sys.path[0] = str(Path.cwd() if arguments.module else Path(words[0]).resolve().parent)
    sys.argv[:] = words
    if not arguments.module:
        runpy.run_path(words[0], run_name="__main__")
    elif is_installed(words[0]):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        arguments.parser.error(f"module {words[0]!r} does not exist")
    return 0


def _install(layer: str) -> None:
    import_module(f"namedmesh.compat.{layer}").install()


_SUMMARY = "run a script whose megatron.core, deepspeed, fairscale and ezpz use groups of our meshes"
COMMANDS = {"run": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
