"""The fairscale dialect: ``fairscale.nn.model_parallel``, its accessors and its layers, over one NamedMesh.

- *Unchanged code*: :func:`install` lets ``fairscale.nn.model_parallel`` answer from our meshes, or where fairscale is
  not installed puts the dialect under its import path.
- *Code that imports the dialect*: ``from namedmesh.compat.fairscale import initialize_model_parallel, layers``.
- *Code with a mesh*: :func:`bind` lets accessors and layers answer from a mesh that exists, and
  :func:`current_mesh` leads from them back to the mesh; both have the same process groups.
"""

from __future__ import annotations

from typing import Any

from namedmesh.compat.fairscale import cross_entropy, initialize, layers, mappings, utils
from namedmesh.compat.fairscale.cross_entropy import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from namedmesh.compat.fairscale.initialize import *
from namedmesh.compat.fairscale.layers import *
from namedmesh.compat.fairscale.mappings import *
from namedmesh.compat.install import Original

__all__ = ["cross_entropy", "initialize", "install", "layers", "mappings", "uninstall", "utils"]
__all__ += [*initialize.__all__, *layers.__all__, *mappings.__all__, "vocab_parallel_cross_entropy"]  # noqa: PLE0604  names

_PLACE = "fairscale.nn.model_parallel"
_PARTS = ("", ".cross_entropy", ".initialize", ".layers", ".mappings", ".utils")


def _replace(module: Any) -> dict[str, object]:
    """Return what makes and destroys groups, and the first rank: the original's is right for neighboring ranks only."""
    initialize.DIALECT.answer_from(module)
    names = ("initialize_model_parallel", "destroy_model_parallel", "get_model_parallel_src_rank")
    return {name: getattr(initialize, name) for name in names}


def _restore() -> None:
    initialize.DIALECT.answer_from(None)


_ORIGINAL = Original(
    f"{_PLACE}.initialize", _replace, {_PLACE + part: __name__ + part for part in _PARTS}, _restore
)


def install() -> None:
    """Let fairscale answer from our meshes; a second call does nothing.

    Where fairscale is installed, the variables of ``fairscale.nn.model_parallel.initialize`` are filled from the mesh
    that the dialect is bound to, and its own accessors and layers work on our groups; the functions that make and
    destroy groups are ours, also where they were imported before. Where it is not, ``fairscale.nn.model_parallel`` and
    its parts are this dialect's modules. Bind meshes afterwards: from then on the dialect knows only what is filled there.

    Example, as the first lines of a program::

        from namedmesh.compat import fairscale
        fairscale.install()
        from fairscale.nn.model_parallel.layers import ColumnParallelLinear
    """
    _ORIGINAL.install()


uninstall = _ORIGINAL.uninstall
