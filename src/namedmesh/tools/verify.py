"""``namedmesh verify``: compare a model under a plan with one process, under torchrun."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from importlib import import_module
from pathlib import Path

from namedmesh._command_line import dotted_name, float_between
from namedmesh._errors import NamedMeshError, PlanError, UsageError, did_you_mean
from namedmesh.tools.plan.spec import EXIT_MISMATCH


def _configure(parser: ArgumentParser) -> None:
    text = (
        "a function without arguments that returns the model, its plan and a tuple of inputs, or a "
        "dict of inputs by name"
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", type=_split_name, help=text)
    text = "the largest relative difference that passes (default: %(default)s)"
    parser.add_argument("--tolerance", type=float_between(0, 1), default=1e-5, help=text)
    parser.add_argument("--all", action="store_true", help="print every difference, and not only the first")
    parser.epilog = "Run it under torchrun: torchrun --nproc-per-node 2 -m namedmesh verify MODULE:FUNCTION"
    # Errors of the user's function keep their traceback.
    parser.set_defaults(caught=NamedMeshError)


def _split_name(text: str) -> tuple[str, str]:
    """Convert ``MODULE:FUNCTION`` to both names."""
    module, _, function = text.partition(":")
    if not function.isidentifier():
        raise ArgumentTypeError(f"must have the form MODULE:FUNCTION, got {text!r}")
    return dotted_name(module), function


def _run(arguments: Namespace) -> tuple[int, str]:
    """Run ``verify`` on all ranks; return the exit status, and on rank 0 the report.

    Raises:
        UsageError: the module or the function does not exist.
        PlanError: the function returned something else.
    """
    module_name, name = arguments.function
    # Under ``python -m namedmesh`` this is the first entry already, but not under ``namedmesh``.
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # An import in the user's module that fails is a fault of that module.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"module {module_name!r} does not exist here; give its full name") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"module {module_name!r} has no function {name!r}{did_you_mean(name, vars(module))}")
    returned = function()
    is_triple = isinstance(returned, tuple) and len(returned) == 3  # noqa: PLR2004
    if not is_triple or not isinstance(returned[2], tuple | dict):
        raise PlanError(
            f"{module_name}:{name} returned a {type(returned).__name__}; return three values: the "
            "model, its plan and a tuple of inputs, or a dict of inputs by name"
        )
    model, plan, inputs = returned
    named = inputs if isinstance(inputs, dict) else {}
    positional = () if named else inputs
    # The imports take seconds, so a wrong argument is reported before them.
    import torch.distributed as dist

    import namedmesh
    from namedmesh.tensor_parallel import verify

    with namedmesh.init_mesh(tp=-1) as mesh:
        report = verify(model, mesh["tp"], plan, *positional, tolerance=arguments.tolerance, **named)
    # The report is the same on every rank.
    text = ""
    if dist.get_rank() == 0:
        text = f"{report.format() if arguments.all else report}\n"
    dist.destroy_process_group()
    return 0 if report.passed else EXIT_MISMATCH, text


_SUMMARY = "under torchrun: compare a model under a tensor-parallel plan with one process"
COMMANDS = {"verify": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
