"""Let Megatron's ``parallel_state`` return the groups of meshes, whichever release it is.

Upstream's own ``initialize_model_parallel`` makes all groups, inside of
:func:`namedmesh.share_groups`. Our fallback has the same function, so one class serves both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh._errors import LayoutError
from namedmesh.compat.binding import Binding, Library, MeshRequest
from namedmesh.compat.errors import ContractTypeError
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.state import BindingContext, check_axes, read_variables
from namedmesh.layout import Layout
from namedmesh.layout.axes import DENSE_AXES, DENSE_COUNTERPARTS, LEGACY_AXES
from namedmesh.layout.orders import order_dense_sizes, order_expert_sizes, split_order
from namedmesh.mesh.mesh import NamedMesh

_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "gtp_remat_size": "gtp_remat",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "expert_gtp_remat_size": "egtp_remat",
}
"""The size arguments of ``initialize_model_parallel``, and their axes in a mesh."""

_COUNTERPARTS = DENSE_COUNTERPARTS | {"egtp_remat": "gtp_remat"}
"""Megatron's names of the experts' axes, which dense axes have too."""

_SET_BY_MESH = (*_SIZES, "order", "rank_offset", "local_world_size", "distributed_timeout_minutes")
"""Arguments of ``initialize_model_parallel`` that a mesh or its options determine."""

_DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class ParallelStateLibrary(Library):
    """Binds meshes to ``parallel_state``: upstream's, of any release, and ours."""

    name = "megatron"
    title = "Megatron's parallel state"
    initializer = "initialize_model_parallel"
    destroyer = "destroy_model_parallel"

    def find_variables(self, module: ModuleType) -> Mapping[str, Any]:
        """Return the value of each variable of a module at its import, by name."""
        return parallel_state.VARIABLES if module is parallel_state else read_variables(module)

    def activate(self, binding: Binding) -> None:
        """Use the variables of a module, and let this package have its names."""
        super().activate(binding)
        vars(sys.modules[_OUR_PACKAGE]).update(parallel_state=binding.module, mpu=binding.module)
        sys.modules[f"{_OUR_PACKAGE}.parallel_state"] = binding.module

    def read_request(self, arguments: Mapping[str, Any]) -> MeshRequest:
        """Return the mesh for the arguments of ``initialize_model_parallel``."""
        # Some releases have names such as tensor_model_parallel_size_.
        given = {name.rstrip("_"): value for name, value in arguments.items() if value is not None}
        world_size = dist.get_world_size()
        if given.get("rank_offset", 0) or given.get("local_world_size", world_size) != world_size:
            raise LayoutError("a mesh has all ranks of the world; omit rank_offset and local_world_size")
        # Some forks have one model-parallel axis only.
        sizes = {"dp": -1, "tp": int(given.get("model_parallel_size", 1))}
        for name, axis in _SIZES.items():
            if name in given:
                sizes[axis] = int(given[name])
        default = _DEFAULT_ORDER.split("-")
        tokens = split_order(str(given.get("order", _DEFAULT_ORDER)).lower(), default)
        unknown = [token for token in tokens if token not in default]
        if unknown:
            raise LayoutError(
                f"Megatron has no axis {', '.join(unknown)}; use {_DEFAULT_ORDER} in another order"
            )
        for axis, neighbor in (("gtp_remat", "tp"), ("egtp_remat", "ep")):
            if sizes.get(axis, 1) > 1:
                tokens.insert(tokens.index(neighbor) + 1, axis)
        # Releases without expert parallelism make no such groups.
        experts = order_expert_sizes(tokens, sizes) if "ep" in sizes else {}
        timeout = None
        if "distributed_timeout_minutes" in given:
            timeout = timedelta(minutes=given["distributed_timeout_minutes"])
        return MeshRequest(order_dense_sizes(tokens, sizes), experts, timeout)

    def make_filler(
        self, binding: Binding, mesh: NamedMesh, options: Mapping[str, Any]
    ) -> Callable[[], object]:
        """Return a call of ``initialize_model_parallel`` with arguments that describe a mesh.

        Raises:
            ContractTypeError: the mesh determines one of the options.
            LayoutError: Megatron has no group for an axis.
        """
        problems = [name for name in options if name in _SET_BY_MESH]
        if problems:
            raise ContractTypeError(
                f"bind() takes no {', '.join(problems)}, because the mesh determines it; omit it"
            )
        instead = "their layout is another factorization of the world; omit it from the mesh and add a "
        instead += "view for it: mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)"
        check_axes(mesh.layout, "Megatron", (*DENSE_AXES, "sp", "gtp_remat"), instead)
        dense = _merge_axes(mesh.layout)
        experts: dict[str, int] = {}
        sizes = dense
        for view in mesh.views.values():
            # The first view that has an axis of the experts is theirs.
            if sizes is dense and not {"ep", *_COUNTERPARTS}.isdisjoint(view):
                experts = _merge_axes(view)
                sizes = {"ep": 1, "etp": 1, **experts, **dense}
        known = binding.signature.parameters
        arguments: dict[str, Any] = {}
        for name, axis in _SIZES.items():
            parameter = f"{name}_" if f"{name}_" in known else name
            # Without a view, Megatron lays experts out as the dense layers. A fork may lack the sizes that
            # are 1.
            if axis in sizes and (parameter in known or sizes[axis] != 1):
                arguments[parameter] = sizes[axis]
        if "order" in known:
            arguments["order"] = _find_order(dense, experts)
        return partial(binding.initialize, **arguments, **options)


def _merge_axes(layout: Layout) -> dict[str, int]:
    """Return the sizes of a layout by coarser names, slowest first, without axes of size 1.

    Raises:
        LayoutError: axes with one name in Megatron are not neighbors.
    """
    sizes: dict[str, int] = {}
    for axis, size in layout.items():
        name = LEGACY_AXES.get(axis, axis)
        if size > 1 and name in sizes and name != list(sizes)[-1]:
            raise LayoutError(
                f"{axis!r} is {name!r} in Megatron, as an axis of {layout} that is not next to "
                "it; put both next to each other"
            )
        if size > 1:
            sizes[name] = sizes.get(name, 1) * size
    return sizes


def _find_order(dense: dict[str, int], experts: dict[str, int]) -> str:
    """Return Megatron's order string for the axes of the dense layers and of the experts."""
    # Megatron adds the axes of gtp_remat itself.
    tokens = [axis for axis in reversed(dense) if axis != "gtp_remat"]
    position = 0
    for axis in reversed(experts):
        name = _COUNTERPARTS.get(axis, axis)
        if name in tokens:
            position = tokens.index(name) + 1
        elif name != "gtp_remat":
            tokens.insert(position, name)
            position += 1
    # Axes of size 1 change no group. In the end they would have to be pp.
    omitted = [name for name in _DEFAULT_ORDER.split("-") if name not in tokens]
    return "-".join(omitted + tokens)


# --- the active parallel state: our fallback, or upstream's after install() -----------------------

_OUR_PACKAGE = "namedmesh.compat.megatron"


_FALLBACKS = {f"megatron.core.{name}": f"{_OUR_PACKAGE}.parallel_state" for name in ("parallel_state", "mpu")}
for _part in ("", ".cross_entropy", ".layers", ".mappings", ".utils"):
    # Our tensor_parallel has the names of upstream's submodules too.
    _FALLBACKS[f"megatron.core.tensor_parallel{_part}"] = f"{_OUR_PACKAGE}.tensor_parallel"
LIBRARY = ParallelStateLibrary(parallel_state, _FALLBACKS)
# The fallback's own functions know no mesh, so the replacements are the ones that its users call.
vars(parallel_state).update(LIBRARY.make_replacements(LIBRARY.ours))
unbind: Callable[[], None] = LIBRARY.unbind
current_mesh: Callable[[], NamedMesh] = LIBRARY.current_mesh
install = LIBRARY.install
uninstall: Callable[[], None] = LIBRARY.uninstall


def bind(mesh: NamedMesh, **options: Any) -> BindingContext:
    """Let Megatron's accessors return the groups of an existing mesh.

    The accessors of a megatron-core that can be imported return them too, with or without
    :func:`install`.

    Collective: every rank of the mesh must call it. A second call with the same options does not
    communicate.

    Args:
        mesh: a mesh with the axes ``pp``, ``dp`` (or ``dp_replicate`` and ``dp_shard``), ``cp`` and
            ``tp``, in any order. An axis that it lacks has size 1. Experts with a layout of their
            own need a view: ``mesh.add_view("expert", pp=..., edp=-1, ep=..., etp=...)``.
        **options: arguments of ``initialize_model_parallel`` that the mesh does not determine, such
            as ``virtual_pipeline_model_parallel_size`` or ``get_embedding_ranks``.

    Returns:
        A context manager. The mesh is selected inside its block, and the previous mesh is bound
        again afterwards. Without a ``with`` block, the mesh stays bound until another mesh is
        bound, until :func:`unbind`, or until the mesh is closed. A mesh that is selected with
        ``with mesh:`` takes precedence over the bound one.

    Raises:
        LayoutError: the mesh has an axis for which Megatron has no group.
        ContractError: as ``initialize_model_parallel``, for options that do not fit the mesh.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> from namedmesh.compat import megatron
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> with megatron.bind(mesh):
        ...     print(megatron.parallel_state.get_tensor_model_parallel_group() is mesh.group("tp"))
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    return LIBRARY.bind(mesh, **options)
