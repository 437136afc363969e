"""The fairscale dialect: ``fairscale.nn.model_parallel``, its accessors and its layers, over one NamedMesh.

- *Unchanged code*: :func:`install` puts the dialect under ``fairscale.nn.model_parallel``.
- *Code that imports the dialect*: ``from namedmesh.compat.fairscale import initialize_model_parallel, layers``.
- *Code with a mesh*: :func:`bind` lets accessors and layers answer from a mesh that exists, and
  :func:`current_mesh` leads from them back to the mesh; both have the same process groups.
"""

from __future__ import annotations

from namedmesh.compat.fairscale import cross_entropy, initialize, layers, mappings, utils
from namedmesh.compat.fairscale.cross_entropy import vocab_parallel_cross_entropy
from namedmesh.compat.fairscale.initialize import *
from namedmesh.compat.fairscale.initialize import __all__ as _initialize
from namedmesh.compat.fairscale.layers import *
from namedmesh.compat.fairscale.layers import __all__ as _layers
from namedmesh.compat.fairscale.mappings import *
from namedmesh.compat.fairscale.mappings import __all__ as _mappings
from namedmesh.compat.install import Replacement

__all__ = [  # noqa: PLE0604  lists of names, which ruff does not look into
    *_initialize,
    *_layers,
    *_mappings,
    "cross_entropy",
    "initialize",
    "install",
    "layers",
    "mappings",
    "uninstall",
    "utils",
    "vocab_parallel_cross_entropy",
]

_ORIGINAL = "fairscale.nn.model_parallel"
_REPLACEMENT = Replacement(
    _ORIGINAL,
    {
        f"{_ORIGINAL}.{part}": f"{__name__}.{part}"
        for part in ("cross_entropy", "initialize", "layers", "mappings", "utils")
    },
    without={_ORIGINAL: __name__},
)


def install() -> None:
    """Put the dialect under ``fairscale.nn.model_parallel``, whether or not fairscale is installed.

    Where it is, its modules ``cross_entropy``, ``initialize``, ``layers``, ``mappings`` and ``utils`` are replaced,
    and the rest of fairscale works on our groups. Where it is not, the packages around them are empty ones. Call it
    before the first import of fairscale; a second call does nothing.

    Warns:
        UserWarning: modules of fairscale were imported before, and keep the original; it names them.

    Example, as the first lines of a program::

        from namedmesh.compat import fairscale
        fairscale.install()
        from fairscale.nn.model_parallel.layers import ColumnParallelLinear     # ours
    """
    _REPLACEMENT.install()


uninstall = _REPLACEMENT.uninstall
