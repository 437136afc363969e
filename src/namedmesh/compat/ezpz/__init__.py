"""The ezpz dialect: ``ezpz.tp``, its accessors and its layers, over one NamedMesh.

- *Unchanged code*: :func:`install` puts the dialect under ``ezpz.tp``.
- *Code that imports the dialect*: ``from namedmesh.compat.ezpz import tp``.
- *Code with a mesh*: :func:`bind` lets accessors and layers answer from a mesh that exists, and
  :func:`current_mesh` leads from them back to the mesh; both have the same process groups.
"""

from __future__ import annotations

from namedmesh.compat.ezpz import tp
from namedmesh.compat.install import Original

__all__ = ["bind", "current_mesh", "install", "tp", "unbind", "uninstall"]


# The interface is not published as it is here, so there is no original to fill.
_ORIGINAL = Original(
    "ezpz.tp",
    None,
    {f"ezpz.{part}": f"{__name__}.{part}" for part in ("tp", "tp.layers", "tp.mappings", "tp.utils")},
)

bind, unbind, current_mesh = tp.DIALECT.bind, tp.DIALECT.unbind, tp.DIALECT.current_mesh


def install() -> None:
    """Put the dialect under ``ezpz.tp``, whether or not ezpz is installed; a second call does nothing.

    Where it is not, the package ``ezpz`` is an empty one. Call it before the first import of ezpz.

    Example, as the first lines of a program::

        from namedmesh.compat import ezpz
        ezpz.install()
        from ezpz.tp.layers import ColumnParallelLinear
    """
    _ORIGINAL.install()


uninstall = _ORIGINAL.uninstall
