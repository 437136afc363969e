"""The Megatron dialect: ``parallel_state``, its accessors and its layers, over one NamedMesh.

Three ways in: ``install()`` for unchanged code; ``from namedmesh.compat.megatron import parallel_state`` for code that
imports the dialect; :func:`bind` for code with a mesh, to which :func:`current_mesh` leads back from the accessors.

There are two parallel states: that of an installed megatron-core, of which only ``initialize_model_parallel`` and
``destroy_model_parallel`` are replaced, so that its own accessors, layers and process group collections work on our groups;
and a stand-in. After ``install()`` there is one, the original's, which is ``namedmesh.compat.megatron.parallel_state``,
too. Where megatron-core is not installed, ``parallel_state``, ``mpu`` and ``tensor_parallel`` of it are this dialect's.

Every release of megatron-core from 0.14 on makes all its groups by one function of the module, ``create_group``, and
takes all its ranks from one class, ``RankGenerator``. Replaced for one call of ``initialize_model_parallel``, they let the
original's own code fill its variables from a mesh: what a release adds works without our knowing it. The stand-in has both.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, update_wrapper
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh import current
from namedmesh._torch import is_registered
from namedmesh.agreement import agreed
from namedmesh.axes import DENSE_AXES
from namedmesh.compat import ContractError, ContractRuntimeError, ContractTypeError
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.megatron.stand_in import EXPERT, WORDS, AxesOf, MeshRanks
from namedmesh.compat.patching import Patch, is_installed, reload_fresh
from namedmesh.compat.state import (
    Bound,
    State,
    agreed_groups,
    check_axes,
    check_default_group,
    check_open,
)
from namedmesh.groups import GroupOptions
from namedmesh.init import make_mesh
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh

__all__ = [
    "Bound",
    "bind",
    "current_mesh",
    "install",
    "parallel_state",
    "tensor_parallel",
    "unbind",
    "uninstall",
]


_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "gtp_remat_size": "gtp_remat",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "tp",
    "expert_gtp_remat_size": "gtp_remat",
}
# By the mesh, or by the options of its groups.
_DETERMINED = (*_SIZES, "order", "rank_offset", "local_world_size", "distributed_timeout_minutes")


class Megatron:
    """A ``parallel_state``, megatron-core's or ours in its place, whose variables follow our meshes."""

    def __init__(self, module: ModuleType, at_import: ModuleType | None = None) -> None:
        self.module = module
        self.state = State("Megatron's parallel state", "initialize_model_parallel", module, at_import)
        self.initialize, self.destroy = module.initialize_model_parallel, module.destroy_model_parallel
        self.accepted = signature(self.initialize)
        self.ours = {
            "initialize_model_parallel": update_wrapper(partial(self.make), self.initialize),
            "destroy_model_parallel": update_wrapper(partial(self.end), self.destroy),
        }

    def bind(self, mesh: NamedMesh, **options: Any) -> Bound:
        """Answer from a mesh that exists; communicates the first time. See :func:`namedmesh.compat.megatron.bind`."""
        check_open(mesh, "megatron.bind")
        determined = [name for name in options if name in _DETERMINED]
        if determined:
            raise ContractTypeError(
                f"bind() takes no {', '.join(determined)}: the mesh determines it; leave it out"
            )
        if self.state.has_values(mesh, options):
            return self.state.bind(mesh)
        seam = _Seam(self.module)
        dense, expert = ranks = _ranks_of(mesh, seam.axes_of)
        generators = iter(ranks)
        sizes = {}
        for name, word in _SIZES.items():
            size = (expert if name.startswith("expert") else dense).size(word)
            if size != 1 or name in self.accepted.parameters:
                sizes[name] = size
        with agreed_groups(mesh, "megatron.bind", _texts(options, dense.get_ranks("pp"))):
            seam.use(mesh)
            values = self.state.run_initializer(
                partial(self.initialize, **sizes, **options),
                create_group=seam.create,
                RankGenerator=lambda *_, **__: next(generators),
            )
        return self.state.bind_with_values(mesh, values, options)

    def make(self, *args: Any, **kwargs: Any) -> None:
        """Make Megatron's groups, and a mesh and a view of its experts' on them; communicates.

        An axis that an open mesh has over the same ranks is on its groups: torch takes equal names over equal ranks for one.
        """
        check_default_group()
        bound = self.accepted.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if self.state.mesh_in_use() is not None:
            # Upstream checks its arguments before it finds out that it is initialized.
            self.state.run_initializer(
                partial(self.initialize, *args, **kwargs),
                create_group=lambda *_, **__: self.state.check_uninitialized(),
            )
        if given.get("rank_offset", 0) or given.get("local_world_size") not in {None, dist.get_world_size()}:
            self.initialize(*args, **kwargs)  # over a part of the world, for which it makes groups of its own
            return
        seam, ranks, original = _Seam(self.module), list[MeshRanks](), self.module.RankGenerator

        def generate(*args: Any, **kwargs: Any) -> MeshRanks:
            ranks.append(MeshRanks.of(original(*args, **kwargs), seam.axes_of, experts=bool(ranks)))
            return ranks[-1]

        def create_group(*args: Any, **kwargs: Any) -> Any:
            if seam.mesh is None:  # the original has checked its arguments
                dense, expert = ranks
                request, options = _texts(given, dense.get_ranks("pp")), _options_of_open_meshes(dense.layout)
                defaults = GroupOptions(timeout=timedelta(minutes=given["distributed_timeout_minutes"]))
                mesh = make_mesh(compare, dense.layout, request, options, defaults)
                seam.use(mesh, usual=True)
                options = _options_of_open_meshes(expert.layout)
                mesh.take_view("expert", expert.layout, {(axis,): options[axis] for axis in options})
            return seam.create(*args, **kwargs)

        try:
            with agreed("megatron.initialize_model_parallel") as compare:
                values = self.state.run_initializer(
                    partial(self.initialize, *args, **kwargs),
                    create_group=create_group,
                    RankGenerator=generate,
                )
        except BaseException:
            if seam.mesh is not None:
                seam.mesh.close(destroy_groups=True)
            raise
        self.state.bind_with_values(seam.mesh, values, owned=True)

    def end(self) -> None:
        """Forget every answer and assignment; the groups that :meth:`make` made are destroyed."""
        if self.state.shown is not None:  # the original destroys groups of gloo, which others share
            vars(self.module).update({name: None for name in self.state.names if name.endswith("_GLOO")})
        self.destroy()
        self.state.destroy()


class _Seam:
    """Takes the place of ``create_group`` for one call: one communicator for each set of ranks, those of a mesh first.

    As in the original, every rank asks for the groups of all ranks, in the same order. The first over some axes makes all.
    Those that no axes make (of embeddings), that are second ones, or have settings of their own are the original's own.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module, self.create_own = vars(module), module.create_group
        self.axes_of: AxesOf = {}
        self.known: dict[Any, Any] = {}
        self.mesh: Any = None
        self.usual = False

    def use(self, mesh: NamedMesh, *, usual: bool = False) -> None:
        """Take the groups of a mesh; ``usual``: those over several axes have no options that their axes set."""
        self.mesh, self.usual = mesh, usual
        self.axes_of.setdefault(tuple(mesh.layout.ranks), (mesh.layout, mesh.layout.axes))

    def create(  # noqa: PLR0917  the original's signature
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None,
        use_local_synchronization: bool = False, group_desc: Any = None,
    ) -> Any:  # fmt: skip
        """Return the group over some ranks; what stands for none on the others."""
        second = str(group_desc).endswith("_AG")  # it is there to be a second one over the same ranks
        if second or pg_options is not None or backend not in {None, "gloo"}:
            return self._create_own(
                ranks, timeout, backend, pg_options, use_local_synchronization, group_desc
            )
        members = tuple(sorted(ranks))
        over = self.axes_of.get(members)
        key = over or members, backend
        if key not in self.known:
            self.known[key] = self._make(members, over, backend, group_desc)
        if self.mesh.global_rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = self.known[key]
        listed = self.module.get("_global_process_group_list") or [None]  # None: the default group
        if group not in listed:
            self.module["_global_process_group_list"] = [*listed, group]
        return group

    def _make(self, members: tuple[int, ...], over: Any, backend: str | None, group_desc: Any) -> Any:
        groups = self.mesh.groups
        if len(members) == 1:
            return groups.alone()
        if over is None:
            return self._create_own(members, groups.defaults.timeout, backend, None, False, group_desc)
        layout, axes = over
        options = GroupOptions() if self.usual and len(axes) > 1 else self.mesh.options_of(axes)
        if backend == "gloo":
            options = groups.gloo_options(options)
        return groups.over(layout, axes, options)

    def _create_own(self, ranks: Any, *arguments: Any) -> Any:
        """Create a group for this call alone, by the original's function; it ends with the mesh."""
        group = self.create_own(list(ranks), *arguments)
        if dist.get_rank() in ranks:
            self.mesh.before_close(partial(_destroy, group))
        return group


def _destroy(group: dist.ProcessGroup) -> None:
    if is_registered(group):
        dist.destroy_process_group(group)


_WITHOUT_VIEW = {"dp": ("dp", "cp", "gtp_remat"), "ep": (), "gtp_remat": ()}


def _ranks_of(mesh: NamedMesh, axes_of: AxesOf) -> tuple[MeshRanks, MeshRanks]:
    """Return the ranks of a mesh, and of its experts, which are laid out as everything else where they have no view."""
    check_axes(
        mesh.layout,
        "Megatron",
        (*DENSE_AXES, "sp", "gtp_remat"),
        experts=("ep", *WORDS),
        instead="they factor the world another way; leave it out of the mesh and add a view for it: "
        "mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)",
    )
    dense = MeshRanks(mesh.layout, axes_of)
    for view in mesh.views.values():
        if not {"ep", *WORDS}.isdisjoint(view):
            return dense, MeshRanks(view, axes_of, EXPERT)
    return dense, MeshRanks(mesh.layout, axes_of, _WITHOUT_VIEW)


def _options_of_open_meshes(layout: Layout) -> dict[str, GroupOptions]:
    """Return the options of the axes that an open mesh has over the same ranks."""
    options = {}
    for mesh in current.alive():
        for view in (mesh.layout, *mesh.views.values()):
            for axis in {*view} & {*layout}:
                if view.partition(axis) == layout.partition(axis):
                    options[axis] = mesh.groups.completed(mesh.options_of((axis,)))
    return options


def _texts(arguments: Mapping[str, Any], pipelines: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return arguments as they are compared between ranks; callbacks by an answer, and if they stay in each pipeline."""
    texts = {}
    for name, value in arguments.items():
        if not callable(value):
            texts[name] = repr(value)
            continue
        answers = [value([*pipeline]) for pipeline in pipelines]
        texts[name] = repr(answers[0])
        for pipeline, ranks in zip(pipelines, answers, strict=True):
            if not {*ranks} <= {*pipeline}:
                raise ContractError(
                    f"{name} chose the ranks {[*ranks]} of the pipeline {[*pipeline]}; it chooses from those that it is given"
                )
    return texts


# The two parallel states, and which of them answers.

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


def _original(module: ModuleType) -> Megatron:
    """Return the dialect of megatron-core's own parallel state."""
    if not hasattr(module, "create_group"):
        raise ContractRuntimeError(
            "this release of megatron-core makes its groups in another way than 0.14 to 0.19; install one of those, or "
            "import the dialect as namedmesh.compat.megatron, without install()"
        )
    if module not in _originals:
        _originals[module] = Megatron(module, reload_fresh(module))
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


_PARTS = ("", ".cross_entropy", ".layers", ".mappings", ".utils")
_STAND_INS = dict.fromkeys(("parallel_state", "mpu"), "parallel_state")
_STAND_INS |= dict.fromkeys([f"tensor_parallel{part}" for part in _PARTS], "tensor_parallel")
PATCH = Patch(
    f"{_PLACE}.parallel_state",
    _replace,
    {f"{_PLACE}.{name}": f"{_OURS}.{ours}" for name, ours in _STAND_INS.items()},
    _restore,
)
install, uninstall = PATCH.install, PATCH.uninstall
