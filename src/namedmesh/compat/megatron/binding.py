"""Let Megatron's ``parallel_state`` return the groups of meshes.

Since release 0.14, megatron-core makes all groups with one function of the module,
``create_group``, and takes all ranks from one class, ``RankGenerator``.
:class:`ParallelStateBinding` replaces both while ``initialize_model_parallel`` runs. Upstream's own
code then fills its variables from a mesh, including variables that a later release adds. Our
fallback has the same two names, so one class serves both.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, update_wrapper
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh import current
from namedmesh._internal import add_agreed_view, get_groups
from namedmesh.agreement import agree_on
from namedmesh.axes import DENSE_AXES
from namedmesh.compat import ContractError, ContractRuntimeError, ContractTypeError
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.megatron.group_factory import GroupFactory
from namedmesh.compat.megatron.ranks import EXPERT_AXES_BY_NAME, MEGATRON_NAMES, AxesByRanks, MeshRanks
from namedmesh.compat.patching import Patch, is_installed, reload_fresh
from namedmesh.compat.state import (
    Bound,
    State,
    agree_before_creation,
    check_axes,
    check_default_group,
    check_open,
)
from namedmesh.init import make_mesh
from namedmesh.layout import Layout, make_partition_key
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions

_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "gtp_remat_size": "gtp_remat",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "tp",
    "expert_gtp_remat_size": "gtp_remat",
}
"""The size arguments of ``initialize_model_parallel``, with Megatron's names of the axes."""

_SET_BY_MESH = (*_SIZES, "order", "rank_offset", "local_world_size", "distributed_timeout_minutes")
"""Arguments of ``initialize_model_parallel`` that a mesh or its options determine."""


class ParallelStateBinding:
    """Binds meshes to one ``parallel_state`` module: megatron-core's, or our fallback.

    Make one binding for each module: a second one would mistake the values that the first one has
    set for the values at import.

    Args:
        module: the module.
        at_import: a copy of the module with its variables right after import; by default the
            module.

    Attributes:
        module: the module.
        state: the variables of the module, with separate values for each mesh.
        replacements: the functions that the module gets in place of its own, by name.
    """

    def __init__(self, module: ModuleType, at_import: ModuleType | None = None) -> None:
        self.module = module
        self.state = State("Megatron's parallel state", "initialize_model_parallel", module, at_import)
        self.upstream_initialize = module.initialize_model_parallel
        self.upstream_destroy = module.destroy_model_parallel
        self.signature = signature(self.upstream_initialize)
        # Partial objects, because update_wrapper cannot set the attributes of a bound method.
        self.replacements = {
            "initialize_model_parallel": update_wrapper(partial(self.initialize), self.upstream_initialize),
            "destroy_model_parallel": update_wrapper(partial(self.destroy), self.upstream_destroy),
        }

    def bind(self, mesh: NamedMesh, **options: Any) -> Bound:
        """Bind an existing mesh. See :func:`namedmesh.compat.megatron.bind`."""
        check_open(mesh, "megatron.bind")
        problems = [name for name in options if name in _SET_BY_MESH]
        if problems:
            raise ContractTypeError(
                f"bind() takes no {', '.join(problems)}, because the mesh determines it; omit it"
            )
        # The groups of the same options exist already, so nothing has to be agreed on.
        if self.state.has_values(mesh, options):
            return self.state.bind(mesh)
        factory = GroupFactory(self.module)
        dense, expert = _make_mesh_ranks(mesh, factory.axes_by_ranks)
        # Upstream makes two generators, first for the dense layers, then for the experts.
        generators = iter((dense, expert))
        sizes = {}
        for argument, axis_name in _SIZES.items():
            ranks = expert if argument.startswith("expert") else dense
            size = ranks.size(axis_name)
            # Older releases lack some of the arguments: those are passed only if they are not 1.
            if size != 1 or argument in self.signature.parameters:
                sizes[argument] = size
        request = _format_options(options, dense.get_ranks("pp"))
        with agree_before_creation(mesh, "megatron.bind", request):
            factory.use(mesh)
            values = self.state.run_initializer(
                partial(self.upstream_initialize, **sizes, **options),
                create_group=factory.create_group,
                RankGenerator=lambda *_, **__: next(generators),
            )
        return self.state.bind_with_values(mesh, values, options)

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Make Megatron's groups and a mesh on them, with a view for the experts, and bind it.

        If an open mesh has an axis over the same ranks, both use its groups: torch does not
        distinguish two meshes of the same names over the same ranks.

        Collective: every rank must call it, with the same arguments.
        """
        check_default_group()
        bound_arguments = self.signature.bind(*args, **kwargs)
        bound_arguments.apply_defaults()
        arguments = bound_arguments.arguments
        initialize = partial(self.upstream_initialize, *args, **kwargs)
        if self.state.find_blocking_mesh() is not None:
            # Upstream checks its arguments before it finds out that it is initialized.
            self.state.run_initializer(
                initialize, create_group=lambda *_, **__: self.state.check_uninitialized()
            )
        on_all_ranks = arguments.get("local_world_size") in {None, dist.get_world_size()}
        if arguments.get("rank_offset", 0) or not on_all_ranks:
            # A mesh has all ranks, so over some of them upstream makes groups of its own.
            initialize()
            return
        factory = GroupFactory(self.module)
        try:
            with agree_on("megatron.initialize_model_parallel") as compare:
                values = self._run_and_make_mesh(factory, compare, initialize, arguments)
        except BaseException:
            # The mesh is known to this call alone: close it, with the groups that exist so far.
            if factory.mesh is not None:
                factory.mesh.close(destroy_groups=True)
            raise
        self.state.bind_with_values(factory.mesh, values, owned=True)

    def _run_and_make_mesh(
        self,
        factory: GroupFactory,
        compare: Callable[..., None],
        initialize: Callable[[], object],
        arguments: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Run upstream's initialization on the groups of a new mesh, and return its variables.

        Collective: every rank must call it.

        Args:
            factory: returns the groups; the mesh is set in it.
            compare: raises an AgreementError if its arguments differ between ranks. Collective.
            initialize: upstream's function with its arguments.
            arguments: the same arguments, by name.
        """
        generators: list[MeshRanks] = []
        upstream_generator = self.module.RankGenerator

        def make_generator(*args: Any, **kwargs: Any) -> MeshRanks:
            # The first generator is for the dense layers.
            ranks = MeshRanks.from_generator(
                upstream_generator(*args, **kwargs), factory.axes_by_ranks, experts=bool(generators)
            )
            generators.append(ranks)
            return ranks

        def create_group(*args: Any, **kwargs: Any) -> Any:
            if factory.mesh is None:
                # Only now has upstream checked its arguments: a wrong one makes no mesh.
                dense, expert = generators
                mesh = make_mesh(
                    compare,
                    dense.layout,
                    _format_options(arguments, dense.get_ranks("pp")),
                    _find_shared_options(dense.layout),
                    GroupOptions(timeout=timedelta(minutes=arguments["distributed_timeout_minutes"])),
                )
                factory.use(mesh, default_options=True)
                options = _find_shared_options(expert.layout)
                add_agreed_view(mesh, "expert", expert.layout, {(axis,): options[axis] for axis in options})
            return factory.create_group(*args, **kwargs)

        return self.state.run_initializer(initialize, create_group=create_group, RankGenerator=make_generator)

    def destroy(self) -> None:
        """End all bindings, and destroy the groups that :meth:`initialize` made."""
        if self.state.shown is not None:
            # Upstream destroys the gloo groups in its variables, but other meshes may use them too.
            for name in self.state.names:
                if name.endswith("_GLOO"):
                    setattr(self.module, name, None)
        # Upstream also ends its buffers and the contexts of experts, which need the groups.
        self.upstream_destroy()
        self.state.destroy()


_AXES_WITHOUT_VIEW = {"dp": ("dp", "cp", "gtp_remat"), "ep": (), "gtp_remat": ()}
"""The axes for Megatron's names of the experts' axes, if a mesh has no view for experts."""


def _make_mesh_ranks(mesh: NamedMesh, axes_by_ranks: AxesByRanks) -> tuple[MeshRanks, MeshRanks]:
    """Return the generators of ranks for a mesh: for the dense layers and for the experts.

    If the mesh has no view for the experts, both have the layout of the mesh.
    """
    check_axes(
        mesh.layout,
        "Megatron",
        (*DENSE_AXES, "sp", "gtp_remat"),
        experts=("ep", *MEGATRON_NAMES),
        instead="their layout is another factorization of the world; omit it from the mesh "
        "and add a view for it: mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)",
    )
    dense = MeshRanks(mesh.layout, axes_by_ranks)
    # The first view that has an axis of the experts is theirs.
    for view in mesh.views.values():
        if not {"ep", *MEGATRON_NAMES}.isdisjoint(view):
            return dense, MeshRanks(view, axes_by_ranks, EXPERT_AXES_BY_NAME)
    return dense, MeshRanks(mesh.layout, axes_by_ranks, _AXES_WITHOUT_VIEW)


def _find_shared_options(layout: Layout) -> dict[str, GroupOptions]:
    """Return group options by axis, for axes that an open mesh has over the same ranks."""
    options = {}
    for mesh in current.open_meshes():
        groups = get_groups(mesh)
        for view in (mesh.layout, *mesh.views.values()):
            for axis in {*view} & {*layout}:
                if make_partition_key(view, axis) == make_partition_key(layout, axis):
                    options[axis] = groups.normalize(groups.get_options((axis,)))
    return options


def _format_options(options: Mapping[str, Any], pipelines: Sequence[Sequence[int]]) -> dict[str, str]:
    """Format the arguments of an initialization as texts that ranks can compare.

    The text of a callback is the ranks that it chooses in the first pipeline.

    Args:
        options: the arguments of ``initialize_model_parallel``. A callback chooses ranks of a
            pipeline.
        pipelines: the ranks of every pipeline.

    Raises:
        ContractError: a callback chose ranks outside of the pipeline.
    """
    texts = {}
    for name, option in options.items():
        if not callable(option):
            texts[name] = repr(option)
            continue
        answers = [option(list(pipeline)) for pipeline in pipelines]
        texts[name] = repr(answers[0])
        for pipeline, chosen in zip(pipelines, answers, strict=True):
            if not set(chosen) <= set(pipeline):
                raise ContractError(
                    f"{name} returned the ranks {list(chosen)} for the pipeline {list(pipeline)}; "
                    "return ranks of the pipeline"
                )
    return texts


# --- the active parallel state: our fallback, or megatron-core's after install() -------------------

_OUR_PACKAGE = "namedmesh.compat.megatron"
_UPSTREAM_PACKAGE = "megatron.core"

# The fallback's own functions know no mesh, so the replacements are the ones that its users call.
_fallback = ParallelStateBinding(parallel_state)
vars(parallel_state).update(_fallback.replacements)
_active = _fallback
# One for each imported megatron-core. Tests import several releases.
_upstream_bindings: dict[ModuleType, ParallelStateBinding] = {}


def bind(mesh: NamedMesh, **options: Any) -> Bound:
    """Let Megatron's accessors return the groups of an existing mesh.

    The accessors of an installed megatron-core (0.14 or later) return them too, with or without
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
    if _active is _fallback and is_installed(_UPSTREAM_PACKAGE):
        module: Any = None
        # If upstream cannot be imported here, no code asks it for groups.
        with warnings.catch_warnings(), suppress(ImportError):
            warnings.simplefilter("ignore")
            module = import_module(f"{_UPSTREAM_PACKAGE}.parallel_state")
        if hasattr(module, "create_group"):
            _bind_upstream(module).bind(mesh, **options)
    return _active.bind(mesh, **options)


def unbind() -> None:
    """End the binding of the mesh that is bound. The mesh stays open, with its groups."""
    for binding in (_fallback, *_upstream_bindings.values()):
        binding.state.unbind()


def current_mesh() -> NamedMesh:
    """Return the mesh whose groups the accessors return now; raise a MeshError without one."""
    return _active.state.current_mesh()


def _bind_upstream(module: ModuleType) -> ParallelStateBinding:
    """Return the binding of an imported megatron-core; raise if its release is not supported."""
    if not hasattr(module, "create_group"):
        raise ContractRuntimeError(
            "this release of megatron-core has no create_group(), which 0.14 to 0.19 have; "
            "install one of these, or import namedmesh.compat.megatron instead of megatron.core, "
            "without install()"
        )
    if module not in _upstream_bindings:
        _upstream_bindings[module] = ParallelStateBinding(module, reload_fresh(module))
    return _upstream_bindings[module]


def _activate_upstream(module: ModuleType) -> Mapping[str, object]:
    """Make an imported megatron-core the active parallel state.

    Returns:
        The replacements of its functions, by name.
    """
    _activate(_bind_upstream(module))
    return _active.replacements


def _activate_fallback() -> None:
    """Make our fallback the active parallel state, after upstream's groups were destroyed."""
    if _active is not _fallback:
        _active.destroy()
        _activate(_fallback)


def _activate(binding: ParallelStateBinding) -> None:
    """Make a module the active parallel state, also under its names in this package."""
    global _active  # noqa: PLW0603  the active state is process-global, as in Megatron
    _active = binding
    package = sys.modules[_OUR_PACKAGE]
    vars(package).update(parallel_state=binding.module, mpu=binding.module)
    sys.modules[f"{_OUR_PACKAGE}.parallel_state"] = binding.module


def _list_fallback_modules() -> dict[str, str]:
    """Return the name of our module for each of upstream's, if megatron-core is missing."""
    modules = {}
    for name in ("parallel_state", "mpu"):
        modules[f"{_UPSTREAM_PACKAGE}.{name}"] = f"{_OUR_PACKAGE}.parallel_state"
    # Our tensor_parallel has the names of upstream's submodules too.
    for submodule in ("", ".cross_entropy", ".layers", ".mappings", ".utils"):
        modules[f"{_UPSTREAM_PACKAGE}.tensor_parallel{submodule}"] = f"{_OUR_PACKAGE}.tensor_parallel"
    return modules


PATCH = Patch(
    f"{_UPSTREAM_PACKAGE}.parallel_state", _activate_upstream, _list_fallback_modules(), _activate_fallback
)
install = PATCH.install
uninstall = PATCH.uninstall
