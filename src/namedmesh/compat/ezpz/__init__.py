"""The ezpz dialect: ``ezpz.tp``, its accessors and its layers, over one NamedMesh.

- *Unchanged code*: :func:`install` puts the dialect under ``ezpz.tp``, or lets the one that is installed answer from our meshes.
- *Code that imports the dialect*: ``from namedmesh.compat.ezpz import tp``.
- *Code with a mesh*: :func:`bind` lets accessors and layers answer from a mesh that exists, and
  :func:`current_mesh` leads from them back to the mesh; both have the same process groups.
"""

from __future__ import annotations

from typing import Any

from namedmesh.compat.ezpz import tp
from namedmesh.compat.ezpz.dialect import DIALECT
from namedmesh.compat.install import Original

__all__ = ["bind", "current_mesh", "install", "tp", "unbind", "uninstall"]


def _replace(module: Any) -> dict[tuple[str, str], object]:
    """Return what takes the place of the original's functions.

    Its own first rank is right only where neighbors share a layer; a mesh that is bound may have another order.
    """
    names = ("initialize_tensor_parallel", "destroy_tensor_parallel", "get_tensor_parallel_src_rank")
    return {(module.__name__, name): getattr(tp, name) for name in names}


_ORIGINAL = Original(
    "ezpz.tp",
    DIALECT.binding,
    _replace,
    {f"ezpz.{part}": f"{__name__}.{part}" for part in ("tp", "tp.layers", "tp.mappings", "tp.utils")},
)

bind = DIALECT.bind
unbind = DIALECT.unbind
current_mesh = DIALECT.current_mesh


def install() -> None:
    """Let ``ezpz.tp`` answer from our meshes; a second call does nothing.

    Where ezpz has no such module, or is not installed, ``ezpz.tp`` is this dialect's module.

    Example, as the first lines of a program::

        from namedmesh.compat import ezpz
        ezpz.install()
        from ezpz.tp.layers import ColumnParallelLinear
    """
    _ORIGINAL.install()


uninstall = _ORIGINAL.uninstall
