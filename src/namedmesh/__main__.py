"""The command line: ``python -m namedmesh COMMAND``, or ``namedmesh COMMAND``.

A new command is a row in the ``COMMANDS`` of a module ``cli``, with its summary, a function that declares its
arguments and one that runs it and returns the exit status, and a row in :data:`COMMANDS` here. Such a module does not
import torch until a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from namedmesh.errors import NamedMeshError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, str] = {
    **dict.fromkeys(("plan", "partitions", "shard", "diff", "doctor"), "namedmesh.plan.cli"),
    "migrate": "namedmesh.migrate.cli",
}
"""The commands, and the module of each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake in its arguments or in the layout becomes a message on standard error.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit status of the command; 1 if the layout is wrong, 2 if the arguments are.

    Raises:
        SystemExit: with status 2 for arguments that do not exist, after a message on standard error; with 0
            after the help.

    Example:
        >>> main(["migrate", __file__])
        No use of megatron.core.parallel_state in 1 file.
        0
    """
    argv = sys.argv[1:] if argv is None else argv
    # The modules of the other commands are loaded for the general help only.
    parser = _parser(argv[:1] if argv and argv[0] in COMMANDS else COMMANDS)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except NamedMeshError as error:
        from namedmesh.plan.spec import UsageError

        sys.stderr.write(f"namedmesh {argv[0]}: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    return status


def _parser(names: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="namedmesh", description="Name your parallel axes once.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, prog="namedmesh")
    for name in names:
        summary, configure, run = import_module(COMMANDS[name]).COMMANDS[name]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        configure(command)
        command.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
