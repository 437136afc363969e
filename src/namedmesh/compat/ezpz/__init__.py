"""The ezpz dialect: ``ezpz.tp``, its accessors and its layers, over one NamedMesh.

- *Unchanged code*: :func:`install` puts the dialect under ``ezpz.tp``.
- *Code that imports the dialect*: ``from namedmesh.compat.ezpz import tp``.
- *Code with a mesh*: :func:`bind` lets accessors and layers answer from a mesh that exists, and
  :func:`current_mesh` leads from them back to the mesh; both have the same process groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.ezpz import tp
from namedmesh.compat.ezpz.dialect import DIALECT
from namedmesh.compat.modules import Replacement

if TYPE_CHECKING:
    from namedmesh.compat.binding import Bound
    from namedmesh.mesh import NamedMesh

__all__ = ["bind", "current_mesh", "install", "tp", "unbind", "uninstall"]

_REPLACEMENT = Replacement(
    "ezpz",
    {f"ezpz.{part}": f"{__name__}.{part}" for part in ("tp", "tp.layers", "tp.mappings", "tp.utils")},
)


def bind(mesh: NamedMesh) -> Bound:
    """Let the accessors and layers answer from a mesh that exists; communicates the first time.

    Every rank of the mesh calls it.

    Args:
        mesh: a mesh of axes ``tp``, ``cp``, ``dp`` (or ``dp_replicate`` and ``dp_shard``) and ``pp``, in any order;
            one that it lacks is of size 1.

    Returns:
        A handle: in ``with bind(mesh):`` the binding ends with the block. Otherwise it lasts until the next
        one, :func:`unbind`, or the mesh's end.

    Raises:
        LayoutError: the mesh has axes that ezpz has no group for.
        MeshError: what was given is no open mesh.
        AgreementError: the other ranks did not call this, or not with the same mesh.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> with bind(mesh):
        ...     tp.get_tensor_parallel_group() is mesh.group("tp")
        True
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    return DIALECT.bind(mesh)


def unbind() -> None:
    """Let go of the mesh that is bound; it stays as it is, with its groups."""
    DIALECT.bindings.unbind()


def current_mesh() -> NamedMesh:
    """The mesh that the accessors answer from at this moment.

    Raises:
        MeshError: they answer from none.
    """
    return DIALECT.current_mesh()


def install() -> None:
    """Put the dialect under ``ezpz.tp``, whether or not ezpz is installed; a second call does nothing.

    Where it is, ``ezpz.tp`` and its modules are replaced; where it is not, a package ``ezpz`` is made up. Call
    it before the first import of ezpz.

    Warns:
        UserWarning: modules of ezpz were imported before, and keep the original; it names them.

    Example, as the first lines of a program::

        from namedmesh.compat import ezpz
        ezpz.install()
        from ezpz.tp.layers import ColumnParallelLinear     # ours
    """
    _REPLACEMENT.install()


def uninstall() -> None:
    """Undo :func:`install`; modules that were imported in between are forgotten, and imported anew on demand."""
    _REPLACEMENT.uninstall()
