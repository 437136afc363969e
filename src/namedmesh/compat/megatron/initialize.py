"""Let an ``initialize_model_parallel`` of Megatron's make its variables on the groups of a mesh.

Every release of megatron-core from 0.14 on makes all its groups by one function of the module, ``create_group``, and
takes all its ranks from one class, ``RankGenerator``. Replaced for one call, they let the original's own code fill its
variables from a mesh: what a release adds works without our knowing it. Our stand-in for the original has both, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial, update_wrapper
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from namedmesh import current
from namedmesh._torch import is_registered
from namedmesh.agreement import agreed
from namedmesh.compat.axis_map import USUAL_AXES, agreed_groups, check_axes, own_axes
from namedmesh.compat.errors import ContractError, ContractTypeError
from namedmesh.compat.megatron.stand_in import MEGATRON_WORDS
from namedmesh.compat.state import Bound, State, require_default_group, require_open
from namedmesh.init import make_mesh
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from namedmesh.mesh import NamedMesh

_CALL = "megatron.initialize_model_parallel"
_DENSE_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "gtp_remat_size": "gtp_remat",
}
_EXPERT_SIZES = {
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "tp",
    "expert_gtp_remat_size": "gtp_remat",
}
_OTHERS = ("order", "rank_offset", "local_world_size", "distributed_timeout_minutes")
_DETERMINED = (*_DENSE_SIZES, *_EXPERT_SIZES, *_OTHERS)  # by the mesh, or by the options of its groups
AxesOf: TypeAlias = "dict[tuple[int, ...], tuple[Layout, tuple[str, ...]]]"
"""Over which axes of which layout each set of ranks is."""


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
        require_open(mesh, "megatron.bind")
        determined = [name for name in options if name in _DETERMINED]
        if determined:
            raise ContractTypeError(
                f"bind() takes no {', '.join(determined)}: the mesh determines it; leave it out"
            )
        if self.state.is_bound(mesh, options):
            return self.state.bind(mesh)
        seam = _Seam(self.module, lambda: mesh, mesh.options_of)
        dense, expert = _ranks_of(mesh, seam.axes)
        sizes = {name: dense.size(word) for name, word in _DENSE_SIZES.items()}
        sizes |= {name: expert.size(word) for name, word in _EXPERT_SIZES.items()}
        known = {name: size for name, size in sizes.items() if size != 1 or name in self.accepted.parameters}
        mesh.before_close(seam.destroy_own)
        with agreed_groups(mesh, "megatron.bind", _texts(options, dense.get_ranks("pp"))):
            generators = iter((dense, expert))
            with self.state.blank() as values, seam.replacing(lambda *_, **__: next(generators)):
                self.initialize(**known, **options)
        return self.state.take(mesh, values, options)

    def make(self, *args: Any, **kwargs: Any) -> None:
        """Make Megatron's groups, and a mesh and a view of its experts' on them; communicates.

        An axis that an open mesh has over the same ranks, on groups that differ in the timeout alone, is on that mesh's
        groups: torch takes equal names over equal ranks for one.
        """
        require_default_group()
        bound = self.accepted.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        self.state.refuse_second()
        if given.get("rank_offset", 0) or given.get("local_world_size") not in {None, dist.get_world_size()}:
            self.initialize(*args, **kwargs)  # over a part of the world, for which it makes groups of its own
            return
        defaults = GroupOptions(timeout=timedelta(minutes=given["distributed_timeout_minutes"]))
        layouts: list[Layout] = []
        original = self.module.RankGenerator

        def generate(*args: Any, **kwargs: Any) -> MeshRanks:
            """Take note of both layouts, the experts' last."""
            layouts.append(_layout_of(original(*args, **kwargs), experts=bool(layouts)))
            return MeshRanks(layouts[-1], _EXPERT if len(layouts) == 2 else {}, seam.axes)  # noqa: PLR2004

        def make() -> NamedMesh:
            dense, expert = layouts
            request = _texts(given, dense.groups("pp"))
            mesh = seam.mesh = make_mesh(compare, dense, request, _options_of_open_meshes(dense), defaults)
            of_experts = _options_of_open_meshes(expert)
            mesh.take_view(
                "expert", expert, {(axis,): of_experts[axis] for axis in of_experts if axis != "pp"}
            )
            return mesh

        def options_of(axes: tuple[str, ...]) -> GroupOptions:
            return seam.found_mesh().options_of(axes) if len(axes) == 1 else GroupOptions()

        seam = _Seam(self.module, make, options_of)
        try:
            with agreed(_CALL) as compare, self.state.blank() as values, seam.replacing(generate):
                self.initialize(*args, **kwargs)
        except BaseException:
            seam.destroy_own()
            if seam.mesh is not None:
                seam.mesh.close(destroy_groups=True)
            raise
        mesh = seam.found_mesh()
        mesh.before_close(seam.destroy_own)
        self.state.take(mesh, values, owned=True)

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

    def __init__(
        self,
        module: ModuleType,
        make: Callable[[], NamedMesh],
        options_of: Callable[[tuple[str, ...]], GroupOptions],
    ) -> None:
        self.module, self.create_own = vars(module), module.create_group
        self.make, self.options_of = make, options_of
        self.mesh: NamedMesh | None = None
        self.axes: AxesOf = {}
        self.own: list[Any] = []
        self.known: dict[Any, Any] = {}

    @contextmanager
    def replacing(self, rank_generator: Callable[..., MeshRanks]) -> Iterator[None]:
        """Replace ``create_group`` and ``RankGenerator`` in the module for a while."""
        before = {name: self.module[name] for name in ("create_group", "RankGenerator")}
        self.module.update(create_group=self.create, RankGenerator=rank_generator)
        try:
            yield
        finally:
            self.module.update(before)

    def found_mesh(self) -> NamedMesh:
        """Return the mesh, which is made when the first group is asked for: by then the arguments were checked."""
        if self.mesh is None:
            self.mesh = self.make()
        return self.mesh

    def create(  # noqa: PLR0917  the original's signature
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None,
        use_local_synchronization: bool = False, group_desc: Any = None,
    ) -> Any:  # fmt: skip
        """Return the group over some ranks; what stands for none on the others."""
        mesh = self.found_mesh()
        second = str(group_desc).endswith("_AG")  # it is there to be a second one over the same ranks
        if second or pg_options is not None or backend not in {None, "gloo"}:
            return self._create_own(
                ranks, timeout, backend, pg_options, use_local_synchronization, group_desc
            )
        members = tuple(sorted(ranks))
        if len(members) == mesh.layout.world_size:
            self.axes[members] = mesh.layout, mesh.layout.axes
        over = self.axes.get(members)
        key = over or members, backend
        if key not in self.known:
            if len(members) == 1:
                self.known[key] = mesh.groups.alone()
            elif over is None:
                timeout = mesh.groups.defaults.timeout
                self.known[key] = self._create_own(members, timeout, backend, None, False, group_desc)
            else:
                options = self.options_of(over[1])
                if backend == "gloo":
                    options = mesh.groups.gloo_options(options)
                self.known[key] = mesh.groups.over(*over, options)
        if mesh.global_rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = self.known[key]
        listed = self.module.get("_global_process_group_list") or [None]  # None: the default group
        if group not in listed:
            self.module["_global_process_group_list"] = [*listed, group]
        return group

    def _create_own(self, ranks: Any, *arguments: Any) -> Any:
        """Create a group that this call alone has, by the original's function."""
        group = self.create_own(list(ranks), *arguments)
        if dist.get_rank() in ranks:
            self.own.append(group)
        return group

    def destroy_own(self) -> None:
        """Destroy the groups that were made for this call alone."""
        while self.own:
            group = self.own.pop()
            if is_registered(group):
                dist.destroy_process_group(group)


_EXPERT = {word: (own,) for own, word in MEGATRON_WORDS.items()}
_WITHOUT_VIEW = {"dp": ("dp", "cp", "gtp_remat"), "ep": (), "gtp_remat": ()}


class MeshRanks:
    """Takes the place of a ``RankGenerator``: the ranks are those of a mesh, in whatever order its axes are.

    ``words`` are the axes for those of Megatron's words that are no axes of the layout. Over which axes each set of ranks is
    goes into ``axes_of``.
    """

    def __init__(self, layout: Layout, words: Mapping[str, tuple[str, ...]], axes_of: AxesOf) -> None:
        self.layout, self.words, self.axes_of = layout, words, axes_of

    def own(self, *words: str) -> tuple[str, ...]:
        """Return the axes of the layout, of several ranks, for some of Megatron's words."""
        own = own_axes(self.layout, [axis for word in words for axis in self.words.get(word, (word,))])
        return tuple(axis for axis in own if self.layout[axis] > 1)

    def size(self, word: str) -> int:
        """Return the number of ranks over one of Megatron's axes."""
        own = self.own(word)
        return self.layout.size(*own) if own else 1

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return every group over the axes that a token such as ``"tp-dp"`` names."""
        own = self.own(*token.split("-"))
        if not own:
            return [[rank] for rank in self.layout.ranks]
        groups = self.layout.groups(*own)
        for ranks in groups:
            self.axes_of.setdefault(ranks, (self.layout, own))
        return [list(ranks) for ranks in groups]

    def get_gtp_ranks(self, _size: int) -> list[list[int]]:
        """Return the groups over ``gtp_remat``."""
        return self.get_ranks("gtp_remat")


def _ranks_of(mesh: NamedMesh, axes_of: AxesOf) -> tuple[MeshRanks, MeshRanks]:
    """Return the ranks of a mesh, and of its experts, which are laid out as everything else where they have no view."""
    check_axes(
        mesh.layout,
        "Megatron",
        (*USUAL_AXES, "sp", "gtp_remat"),
        experts=("ep", *MEGATRON_WORDS),
        instead="they factor the world another way; leave it out of the mesh and add a view for it: "
        "mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)",
    )
    expert = MeshRanks(mesh.layout, _WITHOUT_VIEW, axes_of)
    for view in reversed(mesh.views.values()):
        if not {"ep", *MEGATRON_WORDS}.isdisjoint(view):
            expert = MeshRanks(view, _EXPERT, axes_of)
    return MeshRanks(mesh.layout, {}, axes_of), expert


def _layout_of(generator: Any, *, experts: bool) -> Layout:
    """Return the layout of a RankGenerator: the axes of Megatron that have a size, in its order, as we call them."""
    axes = {}
    for word, size in zip(generator.order.split("-"), generator.ordered_size, strict=True):
        if size > 1 or word in {"pp", "dp", "tp", "ep" if experts else "cp"}:
            axes[_EXPERT[word][0] if experts and word in _EXPERT else word] = size
    return Layout.from_shape(list(axes)[::-1], list(axes.values())[::-1])


def _options_of_open_meshes(layout: Layout) -> dict[str, GroupOptions]:
    """Return the options of axes that an open mesh has over the same ranks, where only the timeout is another one."""
    options = {}
    for mesh in current.alive():
        for view in (mesh.layout, *mesh.views.values()):
            for axis in {*view} & {*layout}:
                theirs = mesh.groups.completed(mesh.options_of((axis,)))
                usual = replace(theirs, timeout=None) == GroupOptions()
                if usual and view.partition(axis) == layout.partition(axis):
                    options[axis] = theirs
    return options


def _texts(arguments: Mapping[str, Any], pipelines: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return arguments as they are compared between ranks; callbacks by an answer, and if they stay in each pipeline."""
    texts = {}
    for name, value in arguments.items():
        texts[name] = repr(value([*pipelines[0]]) if callable(value) else value)
        for pipeline in pipelines if callable(value) else ():
            ranks = value([*pipeline])
            if not {*ranks} <= {*pipeline}:
                raise ContractError(
                    f"{name} chose the ranks {[*ranks]} of the pipeline {[*pipeline]}; it chooses from those that it is given"
                )
    return texts
