"""The ezpz dialect: ``ezpz.tp``, its accessors and its layers, over one NamedMesh.

- *Unchanged code*: :func:`install` puts the dialect under ``ezpz.tp``.
- *Code that imports the dialect*: ``from namedmesh.compat.ezpz import tp``.
- *Code with a mesh*: :func:`bind` lets accessors and layers answer from a mesh that exists, and
  :func:`current_mesh` leads from them back to the mesh; both have the same process groups.
"""

from __future__ import annotations

from namedmesh.compat.ezpz import tp
from namedmesh.compat.ezpz.dialect import DIALECT
from namedmesh.compat.install import Replacement

__all__ = ["bind", "current_mesh", "install", "tp", "unbind", "uninstall"]

_REPLACEMENT = Replacement(
    "ezpz",
    {f"ezpz.{part}": f"{__name__}.{part}" for part in ("tp", "tp.layers", "tp.mappings", "tp.utils")},
)


bind = DIALECT.bind
unbind = DIALECT.unbind
current_mesh = DIALECT.current_mesh


def install() -> None:
    """Put the dialect under ``ezpz.tp``, whether or not ezpz is installed; a second call does nothing.

    Where it is not, the package ``ezpz`` is an empty one. Call it before the first import of ezpz.

    Warns:
        UserWarning: modules of ezpz were imported before, and keep the original; it names them.

    Example, as the first lines of a program::

        from namedmesh.compat import ezpz
        ezpz.install()
        from ezpz.tp.layers import ColumnParallelLinear     # ours
    """
    _REPLACEMENT.install()


uninstall = _REPLACEMENT.uninstall
