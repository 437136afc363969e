"""Let Megatron's ``parallel_state`` return the groups of meshes, whichever release it is.

Upstream's own ``initialize_model_parallel`` makes all groups, inside of
:func:`namedmesh.share_groups`. Our fallback has the same function, so one class serves both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh.axes import DENSE_AXES, DENSE_COUNTERPARTS, LEGACY_AXES
from namedmesh.compat.binding import Api, Binding, MeshRequest
from namedmesh.compat.errors import ContractTypeError
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.state import Bound, check_axes, read_variables
from namedmesh.errors import LayoutError
from namedmesh.layout import Layout
from namedmesh.legacy import parse_order
from namedmesh.mesh import NamedMesh

_DENSE_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "gtp_remat_size": "gtp_remat",
    # Forks that have one model-parallel axis only.
    "model_parallel_size": "tp",
}
_EXPERT_SIZES = {
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "tp",
    "expert_gtp_remat_size": "gtp_remat",
}
"""The size arguments of ``initialize_model_parallel``, with Megatron's names of the axes."""

_EXPERT_AXES = {name: axis for axis, name in DENSE_COUNTERPARTS.items()} | {"gtp_remat": "egtp_remat"}
"""The experts' axes in a mesh, by Megatron's names, which dense axes have too."""

_SET_BY_MESH = (*_DENSE_SIZES, *_EXPERT_SIZES, "order", "rank_offset", "local_world_size")
_SET_BY_MESH += ("distributed_timeout_minutes",)
"""Arguments of ``initialize_model_parallel`` that a mesh or its options determine."""

_DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class ParallelStateBinding(Binding):
    """Binds meshes to one ``parallel_state``: upstream's, of any release, or ours.

    Args:
        module: the module.
        empty: the value of each variable at import; by default they are read from its source.
    """

    def __init__(self, module: ModuleType, empty: Mapping[str, Any] | None = None) -> None:
        if empty is None:
            empty = read_variables(module)
        names = ("initialize_model_parallel", "destroy_model_parallel")
        super().__init__("megatron", "Megatron's parallel state", module, *names, empty)

    def read_request(self, arguments: Mapping[str, Any]) -> MeshRequest:
        """Return the mesh for the arguments of ``initialize_model_parallel``."""
        # Some releases have names such as tensor_model_parallel_size_.
        given = {name.rstrip("_"): value for name, value in arguments.items() if value is not None}
        world_size = dist.get_world_size()
        if given.get("rank_offset", 0) or given.get("local_world_size", world_size) != world_size:
            raise LayoutError("a mesh has all ranks of the world; omit rank_offset and local_world_size")
        sizes = _read_layouts(given)
        timeout = None
        if "distributed_timeout_minutes" in given:
            timeout = timedelta(minutes=given["distributed_timeout_minutes"])
        # Releases without expert parallelism make no such groups.
        has_experts = "expert_model_parallel_size" in given
        return MeshRequest(sizes[0], sizes[1] if has_experts else {}, timeout)

    def bind(self, mesh: NamedMesh, **options: Any) -> Bound:
        """Bind an existing mesh. See :func:`namedmesh.compat.megatron.bind`."""
        problems = [name for name in options if name in _SET_BY_MESH]
        if problems:
            raise ContractTypeError(
                f"bind() takes no {', '.join(problems)}, because the mesh determines it; omit it"
            )
        # The groups of the same options exist already, so nothing has to be agreed on.
        if self.state.has_values(mesh, options):
            return self.state.bind(mesh)
        arguments = self._describe(mesh)
        values = self.state.fill(mesh, partial(self.upstream_initialize, **arguments, **options))
        return self.state.bind_with_values(mesh, values, options)

    def _describe(self, mesh: NamedMesh) -> dict[str, Any]:
        """Return the arguments of ``initialize_model_parallel`` that describe a mesh.

        Raises:
            LayoutError: Megatron has no group for an axis, or cannot express the order of the axes.
        """
        check_axes(
            mesh.layout,
            "Megatron",
            (*DENSE_AXES, "sp", "gtp_remat"),
            experts=("ep", "edp", "etp", "egtp_remat"),
            instead="their layout is another factorization of the world; omit it from the mesh "
            "and add a view for it: mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)",
        )
        dense = _merge_axes(mesh.layout, LEGACY_AXES)
        expert: dict[str, int] | None = None
        expert_names = {axis: name for name, axis in _EXPERT_AXES.items()}
        for view in mesh.views.values():
            # The first view that has an axis of the experts is theirs.
            if expert is None and not {"ep", *expert_names}.isdisjoint(view):
                expert = _merge_axes(view, expert_names)

        known = self.signature.parameters
        arguments: dict[str, Any] = {}
        for names, sizes in ((_DENSE_SIZES, dense), (_EXPERT_SIZES, expert)):
            for name, axis in names.items():
                size = sizes.get(axis, 1) if sizes is not None else None
                parameter = f"{name}_" if f"{name}_" in known else name
                # Without a view, Megatron lays experts out as the dense layers.
                if size is not None and (parameter in known or size != 1) and name != "model_parallel_size":
                    arguments[parameter] = size
        order = _find_order(dense, expert or {})
        if "order" in known:
            arguments["order"] = order
        given = {name.rstrip("_"): value for name, value in arguments.items()}
        for wanted, sizes in zip((dense, expert), _read_layouts(given), strict=True):
            made = Layout.from_shape(list(sizes), list(sizes.values()), world_size=mesh.layout.world_size)
            if wanted is not None and _merge_axes(made, expert_names) != wanted:
                raise LayoutError(
                    f"{self.state.api} cannot express the order of the axes of {mesh.layout} and "
                    f"its views {mesh.views}: it would make {made}; use this order"
                )
        return arguments


def _merge_axes(layout: Layout, names: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes of a layout by Megatron's names, slowest first, without axes of size 1.

    Args:
        layout: the layout.
        names: Megatron's names of axes that have another name in the layout.

    Raises:
        LayoutError: axes with one name in Megatron are not neighbors.
    """
    sizes: dict[str, int] = {}
    for axis, size in layout.items():
        if size == 1:
            continue
        name = names.get(axis, axis)
        if name in sizes and name != list(sizes)[-1]:
            raise LayoutError(
                f"{axis!r} is {name!r} in Megatron, as an axis of {layout} that is not next to "
                "it; put both next to each other"
            )
        sizes[name] = sizes.get(name, 1) * size
    return sizes


def _find_order(dense: dict[str, int], expert: dict[str, int]) -> str:
    """Return Megatron's order string for the axes of the dense layers and of the experts."""
    # Megatron adds gtp_remat itself.
    tokens = [name for name in reversed(dense) if name != "gtp_remat"]
    position = 0
    for name in reversed(expert):
        if name == "gtp_remat":
            continue
        if name in tokens:
            position = tokens.index(name) + 1
        else:
            tokens.insert(position, name)
            position += 1
    # Axes of size 1 change no group. In the end they would have to be pp.
    omitted = [name for name in _DEFAULT_ORDER.split("-") if name not in tokens]
    return "-".join(omitted + tokens)


def _read_layouts(arguments: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the dense layers' and of the experts' axes, slowest first.

    Args:
        arguments: the arguments of ``initialize_model_parallel`` that are not None.

    Raises:
        LayoutError: the order names an axis that Megatron does not have.
    """
    dense = {"dp": -1, "tp": 1, "cp": 1, "pp": 1}
    for name, axis in _DENSE_SIZES.items():
        if name in arguments:
            dense[axis] = int(arguments[name])
    expert = {"dp": -1, "tp": dense["tp"], "ep": 1, "pp": dense["pp"]}
    for name, axis in _EXPERT_SIZES.items():
        if name in arguments:
            expert[axis] = int(arguments[name])
    default = _DEFAULT_ORDER.split("-")
    tokens = parse_order(str(arguments.get("order", _DEFAULT_ORDER)).lower(), default).tokens
    unknown = [token for token in tokens if token not in default]
    if unknown:
        raise LayoutError(f"Megatron has no axis {', '.join(unknown)}; use {_DEFAULT_ORDER} in another order")
    layouts = []
    for sizes, neighbor, axes in ((dense, "tp", {}), (expert, "ep", _EXPERT_AXES)):
        names = list(tokens)
        if sizes.get("gtp_remat", 1) > 1:
            names.insert(names.index(neighbor) + 1, "gtp_remat")
        layouts.append({axes.get(name, name): sizes[name] for name in reversed(names) if name in sizes})
    return layouts[0], layouts[1]


# --- the active parallel state: our fallback, or upstream's after install() -----------------------

_OUR_PACKAGE = "namedmesh.compat.megatron"
_UPSTREAM_PACKAGE = "megatron.core"


def _use_module(module: ModuleType) -> None:
    """Let this package have the names of the active parallel state."""
    package = sys.modules[_OUR_PACKAGE]
    vars(package).update(parallel_state=module, mpu=module)
    sys.modules[f"{_OUR_PACKAGE}.parallel_state"] = module


def _list_fallback_names() -> dict[str, str]:
    """Return the name of our module for each of upstream's, if megatron-core is missing."""
    modules = {}
    for name in ("parallel_state", "mpu"):
        modules[f"{_UPSTREAM_PACKAGE}.{name}"] = f"{_OUR_PACKAGE}.parallel_state"
    # Our tensor_parallel has the names of upstream's submodules too.
    for submodule in ("", ".cross_entropy", ".layers", ".mappings", ".utils"):
        modules[f"{_UPSTREAM_PACKAGE}.tensor_parallel{submodule}"] = f"{_OUR_PACKAGE}.tensor_parallel"
    return modules


_fallback = ParallelStateBinding(parallel_state, parallel_state.VARIABLES)
# The fallback's own functions know no mesh, so the replacements are the ones that its users call.
vars(parallel_state).update(_fallback.replacements)
API = Api("megatron", ParallelStateBinding, _fallback, _list_fallback_names(), _use_module)
unbind = API.unbind
current_mesh = API.current_mesh
install = API.patch.install
uninstall = API.patch.uninstall


def bind(mesh: NamedMesh, **options: Any) -> Bound:
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
    return API.bind(mesh, **options)
