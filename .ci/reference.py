"""Write the reference, a page for each public module: ``pip install '.[docs]' && python .ci/reference.py FOLDER``.

A warning, such as a name that does not resolve, ends it.
"""

from __future__ import annotations

import builtins
import sys
import warnings
from collections import abc
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "namedmesh",
    "namedmesh.launch",
    "namedmesh.tools.plan",
    "namedmesh.tensor_parallel",
    "namedmesh.training",
    "namedmesh.compat.deepspeed",
    "namedmesh.compat.ezpz",
    "namedmesh.compat.fairscale",
    "namedmesh.compat.megatron",
    "namedmesh.compat.megatron.tensor_parallel",
    "namedmesh.compat.process_groups",
)


def public_names(module: str) -> dict[str, object]:
    """Return what a module exports; names that are loaded when they are first used are loaded."""
    loaded = import_module(module)
    found = {name: getattr(loaded, name) for name in loaded.__all__}
    vars(loaded).update(found)  # pdoc looks there
    return found


def main(folder: str) -> None:
    """Write the pages into a folder."""
    import pdoc
    import torch
    from pdoc import render
    from torch.distributed.tensor.parallel import ParallelStyle

    # pdoc reads the text of a type alias where the alias is used, which may not know the names in it.
    vars(builtins).update(Callable=abc.Callable, Mapping=abc.Mapping, ParallelStyle=ParallelStyle)
    vars(builtins).update(
        Any=Any, ProcessGroup=torch.distributed.ProcessGroup, Tensor=torch.Tensor, nn=torch.nn
    )
    for module in MODULES:
        for value in public_names(module).values():
            if isinstance(value, type) and issubclass(value, tuple):  # nor where a named tuple is declared
                names = vars(import_module(value.__module__)).items()
                vars(builtins).update({name: each for name, each in names if not hasattr(builtins, name)})
    render.configure(docformat="google", show_source=False)
    exported = {f"{module}.{name}" for module in MODULES for name in public_names(module)}
    warnings.simplefilter("error", UserWarning)
    pdoc.pdoc(*(module for module in MODULES if module not in exported), output_directory=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
