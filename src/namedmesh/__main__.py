"""The command line: ``python -m namedmesh COMMAND``, or ``namedmesh COMMAND``.

To add a command, add a row to :data:`COMMANDS` here and one to the ``COMMANDS`` of its module: the
summary, a function that declares the arguments, and a function that runs the command and returns
the exit status. The module must not import torch before the command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from namedmesh._version import __version__
from namedmesh.errors import NamedMeshError, UsageError, did_you_mean

COMMANDS: dict[str, str] = {
    "plan": "namedmesh.plan.describe",
    "partitions": "namedmesh.plan.partitions_command",
    "diff": "namedmesh.plan.diff",
    "doctor": "namedmesh.doctor",
    "migrate": "namedmesh.migrate.command",
    "run": "namedmesh.compat.run",
    "verify": "namedmesh.verify_command",
}
"""The module of each command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Errors are printed on standard error: a wrong layout is status 1, and a wrong argument status 2.

    Args:
        argv: the arguments; by default the arguments of the process.

    Raises:
        SystemExit: with status 2 if argparse rejects the arguments, with 0 after the help.

    Example:
        >>> main(["migrate", __file__])
        No use of megatron.core.parallel_state in 1 file.
        0
    """
    argv = sys.argv[1:] if argv is None else argv
    # The modules of the other commands are loaded for the general help only.
    parser = _make_parser(argv[:1] if argv and argv[0] in COMMANDS else COMMANDS)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = arguments.parser._option_string_actions  # noqa: SLF001  argparse lists its flags nowhere else
        near = did_you_mean(unknown[0].partition("=")[0], flags)
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    # `run` executes the user's program, whose errors keep their traceback and their status.
    if not arguments.guarded:
        return int(arguments.run(arguments))
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except NamedMeshError as error:
        sys.stderr.write(f"namedmesh {argv[0]}: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    return status


def _make_parser(names: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="namedmesh", description="Name your parallel axes once.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"namedmesh {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, prog="namedmesh")
    for name in names:
        summary, configure, run = import_module(COMMANDS[name]).COMMANDS[name]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(run=run, parser=command, guarded=True)
        configure(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
