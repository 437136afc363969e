"""The command ``namedmesh doctor``; torch is imported when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.plan.cli import add_format, add_layout, layout_arguments

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _configure(parser: ArgumentParser) -> None:
    add_layout(parser)
    text = "seconds to wait for a rank, or for a collective (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help=text)
    parser.add_argument("--device", help="cpu, cuda, or one device (default: what torch finds)")
    parser.add_argument("--backend", help="backend of the groups (default: torch's for the device)")
    text = "size of the large all-reduce (default: 4, on a GPU 64)"
    parser.add_argument("--megabytes", type=float, metavar="M", help=text)
    add_format(parser)


def _run(arguments: Namespace) -> int:
    from namedmesh.doctor import run_doctor

    return run_doctor(*layout_arguments(arguments), arguments)


_SUMMARY = "under torchrun: check every group of a layout with a collective, and measure each axis"
COMMANDS = {"doctor": (_SUMMARY, _configure, _run)}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
