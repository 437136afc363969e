"""The command line: ``python -m namedmesh COMMAND``, or ``namedmesh COMMAND``.

A command is a module with a ``SUMMARY``, ``configure(parser)`` and ``run(arguments)``, which returns the exit
status; a new one is a line in ``COMMANDS``. These modules do not import torch unless they are run.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, str] = {
    "plan": "namedmesh.plan.command",
    "partitions": "namedmesh.plan.partitions_command",
    "shard": "namedmesh.plan.shard_command",
    "diff": "namedmesh.plan.diff_command",
    "doctor": "namedmesh.plan.doctor.command",
    "migrate": "namedmesh.migrate.cli",
}
"""The commands, and the module of each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit status of the command.

    Raises:
        SystemExit: with status 2 for arguments that do not fit, after a message on standard error; with 0
            after the help.

    Example:
        >>> main(["migrate", __file__])
        No use of megatron.core.parallel_state in 1 file.
        0
    """
    argv = sys.argv[1:] if argv is None else argv
    # The modules of the other commands are loaded for the general help only.
    wanted = {argv[0]: COMMANDS[argv[0]]} if argv and argv[0] in COMMANDS else COMMANDS
    arguments = _parser(wanted).parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser(wanted: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="namedmesh", description="Name your parallel axes once.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, prog="namedmesh")
    for name, module_name in wanted.items():
        module = import_module(module_name)
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False
        )
        module.configure(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
