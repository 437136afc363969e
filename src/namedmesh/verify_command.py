"""``namedmesh verify``: compare a model under a plan with one process, under torchrun."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from namedmesh.errors import PlanError
from namedmesh.plan.spec import EXIT_MISMATCH


def _configure(parser: ArgumentParser) -> None:
    text = (
        "a function without arguments that returns the model, its plan and a tuple of inputs, or a "
        "dict of inputs by name"
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=text)
    text = "the largest relative difference that passes (default: %(default)s)"
    parser.add_argument("--tolerance", type=float, default=1e-5, help=text)
    parser.epilog = "Run it under torchrun: torchrun --nproc-per-node 2 -m namedmesh verify MODULE:FUNCTION"


def _run(arguments: Namespace) -> int:
    """Run ``verify`` on all ranks, print the report on rank 0, and return the exit status."""
    model, plan, inputs = _call_function(arguments)
    positional_inputs: tuple[Any, ...] = ()
    named_inputs: dict[str, Any] = {}
    if isinstance(inputs, dict):
        named_inputs = inputs
    else:
        positional_inputs = inputs
    # The imports take seconds, so a wrong argument is reported before them.
    import torch.distributed as dist

    import namedmesh
    from namedmesh.tensor_parallel import verify

    with namedmesh.init_mesh(tp=-1) as mesh:
        report = verify(
            model, mesh["tp"], plan, *positional_inputs, tolerance=arguments.tolerance, **named_inputs
        )
    # The report is the same on every rank.
    if mesh.rank("tp") == 0:
        sys.stdout.write(f"{report}\n")
    dist.destroy_process_group()
    return 0 if report.passed else EXIT_MISMATCH


def _call_function(arguments: Namespace) -> tuple[Any, Any, Any]:
    """Return the model, the plan and the inputs from the function that the user has named.

    Raises:
        PlanError: the function returned something else.
    """
    module, separator, name = arguments.function.partition(":")
    if not separator:
        arguments.parser.error(f"{arguments.function!r} is not of the form MODULE:FUNCTION")
    # Under ``python -m namedmesh`` this is the first entry already, but not under ``namedmesh``.
    sys.path.insert(0, str(Path.cwd()))
    returned = getattr(import_module(module), name)()
    if isinstance(returned, tuple) and len(returned) == 3:  # noqa: PLR2004
        model, plan, inputs = returned
        if isinstance(inputs, tuple | dict):
            return model, plan, inputs
    raise PlanError(
        f"{arguments.function} returned a {type(returned).__name__}; return three values: the model, "
        "its plan and a tuple of inputs, or a dict of inputs by name"
    )


_SUMMARY = "under torchrun: compare a model under a tensor-parallel plan with one process"
COMMANDS = {"verify": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
