"""The command line: ``python -m namedmesh COMMAND``, or ``namedmesh COMMAND``.

To add a command, add a row to :data:`COMMANDS` here and one to the ``COMMANDS`` of its module: the
summary, a function that declares the arguments, and a function that runs the command and returns
the exit status and the text to print. The module must not import torch before the command runs.

This is the only place that prints the output of a command and catches its errors. A command that
fails prints nothing on standard output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from namedmesh._command_line import CommandParser, shorten
from namedmesh._errors import NamedMeshError, did_you_mean
from namedmesh._version import __version__

COMMANDS: dict[str, str] = {
    "plan": "namedmesh.tools.plan.describe",
    "partitions": "namedmesh.tools.plan.partitions_command",
    "diff": "namedmesh.tools.plan.diff",
    "doctor": "namedmesh.tools.doctor",
    "migrate": "namedmesh.tools.migrate.command",
    "run": "namedmesh.compat.run",
    "verify": "namedmesh.tools.verify",
}
"""The module of each command."""

# What the arguments of a command can cause: our errors, and files that cannot be read or written. A
# command that runs the user's code catches less, so that errors of that code keep their traceback.
_CAUGHT = (NamedMeshError, OSError, MemoryError, RecursionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Errors are printed on standard error, without a traceback. The status is 2 if an argument is
    wrong, and 1 if the job failed for another reason, such as a rank that is missing.

    Args:
        argv: the arguments; by default the arguments of the process.

    Raises:
        SystemExit: with status 2 if the arguments cannot be parsed, with 0 after the help.

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
    status: int
    try:
        status, text = arguments.run(arguments)
    except arguments.caught as error:
        message = str(error) or type(error).__name__
        sys.stderr.write(f"namedmesh {argv[0]}: {shorten(message)}\n")
        # Our errors about a wrong value are ValueErrors or KeyErrors. The others are about a job or
        # the state of a process.
        is_wrong_argument = isinstance(error, (ValueError, KeyError, OSError))
        return 2 if is_wrong_argument else 1
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # The reader, such as head, has closed the pipe; or the disk is full. The interpreter must
        # not try to write the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"namedmesh {argv[0]}: cannot write the output: {error}\n")
        return 1
    return status


def _make_parser(names: Iterable[str]) -> CommandParser:
    parser = CommandParser(prog="namedmesh", description="Name your parallel axes once.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"namedmesh {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, prog="namedmesh")
    for name in names:
        summary, configure, run = import_module(COMMANDS[name]).COMMANDS[name]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(run=run, parser=command, caught=_CAUGHT)
        configure(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
