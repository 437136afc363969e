"""The command ``namedmesh doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.plan.arguments import add_format, add_layout, layout_arguments, reported

if TYPE_CHECKING:
    import argparse

__all__ = ["SUMMARY", "configure", "run"]

SUMMARY = "under torchrun: check every group of a layout with a collective, and measure each axis"
"""What the command does, for the help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_layout(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for a rank, or for a collective (default: 60)",
    )
    parser.add_argument("--device", help="cpu, cuda, or one device (default: what torch finds)")
    parser.add_argument("--backend", help="backend of the groups (default: torch's for the device)")
    parser.add_argument(
        "--megabytes", type=float, metavar="M", help="size of the large all-reduce (default: 4, on a GPU 64)"
    )
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """Examine, and print.

    Returns:
        0; 1 if anything is wrong, or a rank is missing; 2 if the arguments are.
    """

    def work() -> int:
        from namedmesh.plan.doctor.examination import Settings, examination

        spec, keywords = layout_arguments(arguments)
        settings = Settings(
            arguments.timeout, arguments.device, arguments.backend, arguments.megabytes, arguments.format
        )
        return examination(spec, keywords, settings)

    return reported("doctor", work)
