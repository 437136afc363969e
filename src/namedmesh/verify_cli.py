"""The command ``namedmesh verify``: a model of the user's under its plan, against one process."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namedmesh.errors import PlanError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

_DIFFERENT = 3  # beside 1, a plan that does not fit, and 2, arguments that are wrong


def _configure(parser: ArgumentParser) -> None:
    text = "a function without arguments that returns the model, its plan and a tuple of inputs, or a dict by name"
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=text)
    text = "the difference that is none (default: %(default)s)"
    parser.add_argument("--tolerance", type=float, default=1e-5, help=text)
    parser.epilog = "Run it under torchrun: torchrun --nproc-per-node 2 -m namedmesh verify MODULE:FUNCTION"


def _run(arguments: Namespace) -> int:
    """Compare on all ranks of the job; the first one prints the report."""
    model, plan, inputs = _call(arguments)
    args, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    import torch.distributed as dist

    import namedmesh
    from namedmesh.tensor_parallel import verify

    with namedmesh.init_mesh(tp=-1) as mesh:
        report = verify(model, mesh["tp"], plan, *args, tolerance=arguments.tolerance, **named)
    if mesh.rank("tp") == 0:
        sys.stdout.write(f"{report}\n")
    mesh.close()
    dist.destroy_process_group()
    return 0 if report.right else _DIFFERENT


def _call(arguments: Namespace) -> tuple[Any, Any, Any]:
    """Return the model, the plan and the inputs that the named function returns."""
    module, separator, name = arguments.function.partition(":")
    if not separator:
        arguments.parser.error(f"{arguments.function!r} is not of the form MODULE:FUNCTION")
    sys.path.insert(0, str(Path.cwd()))
    found = getattr(import_module(module), name)()
    if isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], tuple | dict):  # noqa: PLR2004
        return found
    raise PlanError(
        f"{arguments.function} returned a {type(found).__name__}; return three things: the model, its plan and a tuple "
        f"of inputs, or a dict of them by name"
    )


COMMANDS = {
    "verify": ("compare a model under a tensor-parallel plan with one process", _configure, _run),
}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
