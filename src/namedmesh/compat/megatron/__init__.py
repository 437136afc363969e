"""The Megatron dialect: ``parallel_state``, its accessors and its layers, over one NamedMesh.

Three ways in: ``install()`` for unchanged code; ``from namedmesh.compat.megatron import parallel_state`` for code that
imports the dialect; :func:`bind` for code with a mesh, to which :func:`current_mesh` leads back from the accessors.

There are two parallel states: that of an installed megatron-core, of which only ``initialize_model_parallel`` and
``destroy_model_parallel`` are replaced, so that its own accessors, layers and process group collections work on our groups;
and a stand-in. After ``install()`` there is one, the original's, which is ``namedmesh.compat.megatron.parallel_state``,
too. Where megatron-core is not installed, ``parallel_state``, ``mpu`` and ``tensor_parallel`` of it are this dialect's.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh.compat import ContractRuntimeError
from namedmesh.compat.install import Original, as_imported, is_installed
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.megatron.initialize import Megatron
from namedmesh.compat.state import Bound

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from namedmesh.mesh import NamedMesh

__all__ = [
    "Bound",
    "bind",
    "current_mesh",
    "destroy_model_parallel",
    "initialize_model_parallel",
    "install",
    "parallel_state",
    "tensor_parallel",
    "unbind",
    "uninstall",
]

_PLACE, _OURS = "megatron.core", __name__
_stand_in = _answers = Megatron(parallel_state)
vars(parallel_state).update(_stand_in.ours)
# One for each module: a second would overwrite what the first has filled.
_originals: dict[ModuleType, Megatron] = {}
mpu = parallel_state
"""The short name that much code imports it by."""

from namedmesh.compat.megatron import tensor_parallel  # noqa: E402  its layers ask this package for groups


def bind(mesh: NamedMesh, **options: Any) -> Bound:
    """Answer from a mesh that exists; communicates the first time, when every rank of the mesh calls it.

    An installed megatron-core (0.14 or later) answers from the mesh, too, whether ``install()`` was called or not.

    Args:
        mesh: a mesh of axes ``pp``, ``dp`` (or ``dp_replicate`` and ``dp_shard``), ``cp`` and ``tp``, in any order; one
            that it lacks is of size 1. Experts that are not laid out as everything else have a view:
            ``mesh.add_view("expert", pp=..., edp=-1, ep=..., etp=...)``.
        **options: arguments of ``initialize_model_parallel`` that no mesh determines, such as
            ``virtual_pipeline_model_parallel_size`` or ``get_embedding_ranks``.

    Returns:
        What ``with`` takes: in the block the mesh is selected, afterwards the one before is bound again. Otherwise it stays
        bound until another one is, until :func:`unbind`, or until it is closed. A mesh selected with ``with mesh:``
        answers before the bound one.

    Raises:
        LayoutError: the mesh has an axis that Megatron has no group for.
        ContractError: what ``initialize_model_parallel`` raises for options that do not fit.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> from namedmesh.compat import megatron
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> with megatron.bind(mesh):
        ...     print(megatron.parallel_state.get_tensor_model_parallel_group() is mesh.group("tp"))
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    if _answers is _stand_in and is_installed(_PLACE):
        module: Any = None
        with warnings.catch_warnings(), suppress(ImportError):  # what cannot be imported needs no groups
            warnings.simplefilter("ignore")
            module = import_module(f"{_PLACE}.parallel_state")
        if hasattr(module, "create_group"):
            _original(module).bind(mesh, **options)
    return _answers.bind(mesh, **options)


def unbind() -> None:
    """Forget the mesh that is bound; it stays as it is, with its groups."""
    for each in (_stand_in, *_originals.values()):
        each.state.unbind()


def current_mesh() -> NamedMesh:
    """Return the mesh that the accessors answer from at this moment; a MeshError where they answer from none."""
    return _answers.state.current_mesh()


def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
    """Make a mesh of Megatron's sizes, and answer from it; the arguments are those of the release. Communicates."""
    _answers.make(*args, **kwargs)


def destroy_model_parallel() -> None:
    """Forget every answer and assignment; the groups that ``initialize_model_parallel`` made are destroyed."""
    _answers.end()


def _original(module: ModuleType) -> Megatron:
    """Return the dialect of megatron-core's own parallel state."""
    if not hasattr(module, "create_group"):
        raise ContractRuntimeError(
            "this release of megatron-core makes its groups in another way than 0.14 to 0.19; install one of those, or "
            "import the dialect as namedmesh.compat.megatron, without install()"
        )
    if module not in _originals:
        _originals[module] = Megatron(module, as_imported(module))
    return _originals[module]


def _replace(module: ModuleType) -> Mapping[str, object]:
    _answer_from(_original(module))
    return _answers.ours


def _restore() -> None:
    if _answers is not _stand_in:
        _answers.end()
        _answer_from(_stand_in)


def _answer_from(megatron: Megatron) -> None:
    global _answers, parallel_state, mpu  # noqa: PLW0603  there is one truth
    _answers = megatron
    mpu = parallel_state = megatron.module
    sys.modules[f"{_OURS}.parallel_state"] = megatron.module


_STAND_INS = {
    "parallel_state": "parallel_state",
    "mpu": "parallel_state",
    "tensor_parallel": "tensor_parallel",
    "tensor_parallel.cross_entropy": "tensor_parallel.mappings",
    "tensor_parallel.layers": "tensor_parallel.layers",
    "tensor_parallel.mappings": "tensor_parallel.mappings",
    "tensor_parallel.utils": "tensor_parallel.mappings",
}
ORIGINAL = Original(
    f"{_PLACE}.parallel_state",
    _replace,
    {f"{_PLACE}.{name}": f"{_OURS}.{ours}" for name, ours in _STAND_INS.items()},
    _restore,
)
install, uninstall = ORIGINAL.install, ORIGINAL.uninstall
