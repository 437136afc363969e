"""Let an ``initialize_model_parallel`` of Megatron's make its variables on the groups of a mesh.

Every release of megatron-core from 0.14 on makes all its groups by one function of the module, ``create_group``, and
takes all its ranks from one class, ``RankGenerator``. Replaced for one call, they let the original's own code fill its
variables from a mesh: what a release adds works without our knowing it. Our stand-in for the original has both, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh._torch import is_registered
from namedmesh.agreement import agreed
from namedmesh.compat.axis_map import agreed_groups
from namedmesh.compat.errors import ContractError, ContractTypeError
from namedmesh.compat.megatron.mesh_ranks import MeshRanks, layout_of, sets_like
from namedmesh.compat.megatron.stand_in import groups_over
from namedmesh.compat.state import Bound, State, require_default_group, require_open
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.init import make_mesh
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh

__all__ = ["Megatron"]

_CALL = "megatron.initialize_model_parallel"
_DETERMINED = (  # by the mesh, or by the options of its groups
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "gtp_remat_size", "expert_gtp_remat_size", "order", "rank_offset", "local_world_size",
    "distributed_timeout_minutes",
)  # fmt: skip


class Megatron:
    """A ``parallel_state``, megatron-core's or ours in its place, whose variables follow our meshes.

    Args:
        module: the module.
        at_import: the module as it is when it is imported; by default as it is at this moment.
    """

    def __init__(self, module: ModuleType, at_import: ModuleType | None = None) -> None:
        self.module = module
        self.state = State("Megatron's parallel state", "initialize_model_parallel", module, at_import)
        self.initialize, self.destroy = module.initialize_model_parallel, module.destroy_model_parallel
        self.accepted = signature(self.initialize)

        @wraps(self.initialize)
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            self.make(*args, **kwargs)

        @wraps(self.destroy)
        def destroy_model_parallel() -> None:
            self.end()

        self.ours = {each.__name__: each for each in (initialize_model_parallel, destroy_model_parallel)}

    def bind(self, mesh: NamedMesh, **options: Any) -> Bound:
        """Answer from a mesh that exists; communicates the first time. See :func:`namedmesh.compat.megatron.bind`."""
        require_open(mesh, "megatron.bind")
        self._check_options(options)
        if self.state.is_bound(mesh, options):
            return self.state.bind(mesh)
        ranks = MeshRanks.of_mesh(mesh)
        sizes = self._sizes(mesh, *ranks)
        seam = _Seam(self.module, lambda: mesh)
        seam.follow(*ranks)
        with agreed_groups(mesh, "megatron.bind", _texts(options, ranks[0].get_ranks("pp")[0])):
            generators = iter(ranks)
            with self.state.blank() as values, seam.replacing(lambda *_, **__: next(generators)):
                self.initialize(**sizes, **options)
        mesh.before_close(seam.destroy_own)
        return self.state.take(mesh, values, options)

    def make(self, *args: Any, **kwargs: Any) -> None:
        """Make Megatron's groups, and a mesh and a view of its experts' on them; communicates."""
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
            layouts.append(layout_of(original(*args, **kwargs), experts=bool(layouts)))
            ranks = MeshRanks.of_layouts(layouts[0], layouts[-1])[len(layouts) - 1]
            seam.follow(ranks)
            return ranks

        def make() -> NamedMesh:
            dense, expert = layouts
            seam.mesh = make_mesh(compare, dense, _texts(given, dense.groups("pp")[0]), {}, defaults)
            seam.mesh.take_view("expert", expert, {})
            return seam.mesh

        seam = _Seam(self.module, make)
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

    def _check_options(self, options: Mapping[str, Any]) -> None:
        allowed = [name for name in self.accepted.parameters if name not in _DETERMINED]
        other = [f"{name!r}{did_you_mean(name, allowed)}" for name in options if name not in allowed]
        if other:
            raise ContractTypeError(f"bind() takes no {', '.join(other)}; it takes {', '.join(allowed)}")

    def _sizes(self, mesh: NamedMesh, dense: MeshRanks, expert: MeshRanks) -> dict[str, int]:
        sizes = {
            "tensor_model_parallel_size": dense.size("tp"),
            "pipeline_model_parallel_size": dense.size("pp"),
            "context_parallel_size": dense.size("cp"),
            "gtp_remat_size": dense.size("gtp_remat"),
            "expert_model_parallel_size": expert.size("ep"),
            "expert_tensor_parallel_size": expert.size("tp"),
            "expert_gtp_remat_size": expert.size("gtp_remat"),
        }
        unknown = [name for name, size in sizes.items() if name not in self.accepted.parameters and size != 1]
        if unknown:
            raise LayoutError(
                f"this release of megatron-core has no {', '.join(unknown)}, which {mesh.layout} needs; install a later one"
            )
        return {name: size for name, size in sizes.items() if name in self.accepted.parameters}


class _Seam:
    """Takes the place of ``create_group`` for one call: one communicator for each set of ranks, those of a mesh first.

    As in the original, every rank asks for the groups of all ranks, in the same order. The first of one kind makes all.
    """

    def __init__(self, module: ModuleType, make: Callable[[], NamedMesh]) -> None:
        self.module, self.create_own, self.make = module, module.create_group, make
        self.mesh: NamedMesh | None = None
        self.own: list[Any] = []
        self.known: dict[Any, Any] = {}
        self.layout: Layout | None = None
        self.axes: tuple[str, ...] = ()

    @contextmanager
    def replacing(self, rank_generator: Callable[..., MeshRanks]) -> Iterator[None]:
        """Replace ``create_group`` and ``RankGenerator`` in the module for a while."""
        module = vars(self.module)
        before = {name: module[name] for name in ("create_group", "RankGenerator")}
        module.update(create_group=self.create, RankGenerator=rank_generator)
        try:
            yield
        finally:
            module.update(before)

    def follow(self, *generators: MeshRanks) -> None:
        """Know over which axes groups were asked for last."""
        for generator in generators:
            generator.note = self._note

    def _note(self, layout: Layout, axes: tuple[str, ...]) -> None:
        self.layout, self.axes = layout, axes

    def found_mesh(self) -> NamedMesh:
        """Return the mesh, which is made when the first group is asked for: by then the arguments were checked."""
        if self.mesh is None:
            self.mesh = self.make()
            for layout in (self.mesh.layout, *self.mesh.views.values()):
                for axis in layout:
                    self._know(layout.groups(axis), None, self.mesh.group(axis))
        return self.mesh

    def _know(
        self, sets: Sequence[Sequence[int]], backend: str | None, group: Any, second: bool = False
    ) -> None:
        for members in sets:
            self.known[tuple(members), backend, second] = group

    def create(  # noqa: PLR0917  the original's signature
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None,
        use_local_synchronization: bool = False, group_desc: Any = None,
    ) -> Any:  # fmt: skip
        """Return the group over some ranks; what stands for none on the others."""
        mesh = self.found_mesh()
        if pg_options is not None or backend not in {None, "gloo"}:  # a group with settings of its own
            group = self.create_own(
                ranks, timeout, backend, pg_options, use_local_synchronization, group_desc
            )
            if mesh.global_rank in ranks:
                self.own.append(group)
            return group
        second = str(group_desc).endswith("_AG")  # it is there to be a second one over the same ranks
        key = tuple(sorted(ranks)), backend, second
        if key not in self.known:
            sets, group = self._make(mesh, key[0], group_desc, backend, second=second)
            self._know(sets, backend, group, second)
        if mesh.global_rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = self.known[key]
        listed = vars(self.module).get("_global_process_group_list") or [None]  # None: the default group
        if group not in listed:
            vars(self.module)["_global_process_group_list"] = [*listed, group]
        return group

    def _make(
        self, mesh: NamedMesh, ranks: tuple[int, ...], label: str, backend: str | None, *, second: bool
    ) -> tuple[Sequence[Sequence[int]], Any]:
        """Make the groups of one kind, of which one is over some ranks: return the ranks of all, and this rank's."""
        layout, axes = self.layout or mesh.layout, self.axes
        groups: Sequence[Sequence[int]] = groups_over(layout, axes)
        if len(ranks) == layout.world_size:
            groups, axes = [tuple(layout.ranks)], layout.axes
        whole = ranks in groups
        options = mesh.options_of(axes) if whole else GroupOptions()
        if backend == "gloo":
            options = mesh.groups.gloo_options(options)
        if second:
            options = replace(options, share=False)
        if whole:
            return groups, mesh.groups.over(layout, axes, options) if axes else mesh.groups.alone()
        sets = sets_like(ranks, groups)
        if list(ranks) not in sets:
            raise ContractError(
                f"the group {label} is over ranks {list(ranks)}, which are no part of {list(groups[0])} or another of these; "
                "a callback for embeddings chooses from the ranks of the pipeline that it is given"
            )
        return sets, mesh.groups.sets(sets, label, options)

    def destroy_own(self) -> None:
        """Destroy the groups with settings of their own; they were made for this call alone."""
        while self.own:
            group = self.own.pop()
            if is_registered(group):
                dist.destroy_process_group(group)


def _texts(arguments: Mapping[str, Any], pipeline: Any) -> dict[str, str]:
    """Return arguments as they are compared between ranks; a callback by its answer for one pipeline."""
    pipeline = list(pipeline)
    return {name: repr(value(pipeline) if callable(value) else value) for name, value in arguments.items()}
