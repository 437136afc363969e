"""The command ``namedmesh run``: a script, unchanged, with the dialects under the import paths of the originals."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from namedmesh.compat.install import is_installed, when_imported

__all__ = ["COMMANDS", "DIALECTS"]

DIALECTS = {
    "megatron": "megatron.core.parallel_state",
    "deepspeed": "deepspeed.runtime.pipe.topology",
    "fairscale": "fairscale.nn.model_parallel.initialize",
    "ezpz": "",
}
"""The dialects that can be installed, and the module whose import they wait for; ours always stands in for ezpz."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dialect",
        action="append",
        choices=DIALECTS,
        help="install only this one, once its original is imported; may be repeated (default: all)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help="the script, and its arguments"
    )
    # What the script raises is its own.
    parser.set_defaults(guarded=False)


def _run(arguments: argparse.Namespace) -> int:
    """Install the dialects and run the script, as ``python SCRIPT ARGS`` or ``python -m MODULE ARGS`` would."""
    words = arguments.script[arguments.script[:1] == ["--"] :]
    if not words or not (arguments.module or Path(words[0]).is_file()):
        arguments.parser.error(f"there is no script {words[0]!r}" if words else "name a script to run")
    for dialect in arguments.dialect or DIALECTS:
        when_imported(DIALECTS[dialect], partial(_install, dialect))
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


COMMANDS = {
    "run": (
        "run a script with the dialects in place of megatron.core, deepspeed, fairscale and ezpz",
        _configure,
        _run,
    )
}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
