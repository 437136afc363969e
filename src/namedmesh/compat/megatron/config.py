"""The arguments of ``initialize_model_parallel`` and ``bind``, their checks, and the layouts that they ask for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.compat.axis_map import USUAL_AXES, check_axes, own_axes
from namedmesh.compat.errors import (
    ContractError,
    ContractFileNotFoundError,
    ContractKeyError,
    ContractRuntimeError,
)
from namedmesh.dialects import DENSE, DIALECTS, EXPERT, parse_order
from namedmesh.errors import LayoutError, NamedMeshError, did_you_mean
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from namedmesh.mesh import NamedMesh

BINDABLE = (
    "virtual_pipeline_model_parallel_size",
    "hierarchical_context_parallel_sizes",
    "hybrid_context_parallel",
    "num_distributed_optimizer_instances",
    "get_embedding_ranks",
    "get_position_embedding_ranks",
    "create_gloo_process_groups",
    "create_all_gather_group",
)
"""The arguments that the axes of a mesh do not determine, which ``bind`` takes."""
bindable = attrgetter(*BINDABLE)
"""What a configuration has of these: a mesh that is bound with the same needs no new groups."""

_EXPERT_AXES = frozenset(("edp", "ep", "etp", "egtp_remat"))
_EXPERT = {"tp": "etp", "dp": "edp", "gtp_remat": "egtp_remat"}
_WITHOUT_VIEW = {"etp": ("tp",), "edp": ("dp", "cp", "gtp_remat")}


class Factorings(NamedTuple):
    """The layout of a mesh, and that of its experts; without one they are laid out as everything else.

    Example:
        >>> factorings = Factorings(Layout(pp=2, dp=4, tp=2), None)
        >>> factorings.locate(("ep", "etp")), factorings.locate(("edp",))
        ((Layout(pp=2, dp=4, tp=2), ('tp',)), (Layout(pp=2, dp=4, tp=2), ('dp',)))
        >>> factorings.size("cp"), factorings.groups("ep")[:2]
        (1, ((0,), (1,)))
    """

    dense: Layout
    expert: Layout | None

    @classmethod
    def of_mesh(cls, mesh: NamedMesh) -> Factorings:
        """Return those of a mesh; LayoutError where it has axes that Megatron does not know."""
        check_axes(
            mesh.layout,
            "Megatron",
            (*USUAL_AXES, "sp", "gtp_remat"),
            experts=_EXPERT_AXES,
            instead="they factor the world another way; leave it out of the mesh and add a view for it: "
            "mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)",
        )
        views = [view for view in mesh.views.values() if not _EXPERT_AXES.isdisjoint(view)]
        return cls(mesh.layout, views[0] if views else None)

    def locate(self, axes: Collection[str]) -> tuple[Layout, tuple[str, ...]]:
        """Return the layout that some of Megatron's axes are in, and its own axes for them; those of size 1 may be absent."""
        if _EXPERT_AXES.isdisjoint(axes):
            return self.dense, own_axes(self.dense, axes)
        if self.expert is not None:
            return self.expert, own_axes(self.expert, axes)
        return self.dense, own_axes(
            self.dense, [own for axis in axes for own in _WITHOUT_VIEW.get(axis, (axis,))]
        )

    def size(self, *axes: str) -> int:
        """Return the number of ranks over some of Megatron's axes."""
        layout, own = self.locate(axes)
        return layout.size(*own) if own else 1

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every group over some of Megatron's axes."""
        layout, own = self.locate(axes)
        return layout.groups(*own) if own else tuple((rank,) for rank in layout.ranks)


@dataclass(frozen=True)
class ParallelConfig:
    """The arguments of ``initialize_model_parallel``, which describes them; ``bind`` takes :data:`BINDABLE`."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_comm_backend: str | None = None
    use_sharp: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    hybrid_context_parallel: bool = False
    expert_model_parallel_size: int = 1
    gtp_remat_size: int = 1
    expert_gtp_remat_size: int = 1
    num_distributed_optimizer_instances: int = 1
    expert_tensor_parallel_size: int | None = None
    nccl_communicator_config_path: str | None = None
    distributed_timeout_minutes: int = 30
    order: str = DIALECTS["megatron"].order
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None
    create_gloo_process_groups: bool = True
    high_priority_stream_groups: Sequence[str] | None = None
    sharp_enabled_group: str | None = None
    rank_offset: int = 0
    local_world_size: int | None = None
    create_all_gather_group: bool | None = field(default=False, kw_only=True)

    @cached_property
    def options(self) -> dict[str, GroupOptions]:
        """Options by Megatron's name of the group, from the file of NCCL settings and the high-priority groups."""
        path = self.nccl_communicator_config_path
        options: dict[str, GroupOptions] = {}
        if path is not None:
            if not os.path.exists(path):  # noqa: PTH110  a str is as good as a Path here
                raise ContractFileNotFoundError(
                    f"nccl_communicator_config_path is {path!r}, and there is no such file; give the path of a YAML file "
                    "such as 'tp: {max_ctas: 32}', or leave it out"
                )
            try:
                options = GroupOptions.from_yaml(path)
            except NamedMeshError as error:
                raise ContractRuntimeError(*error.problems) from None
            check_net_names({name: dict(of_group.nccl).get("net_name") for name, of_group in options.items()})
        for name in self.high_priority_stream_groups or ():
            of_group = options.get(name, GroupOptions())
            options[name] = GroupOptions(nccl=of_group.nccl, high_priority=True)
        return options

    def fields_to_compare(self, factorings: Factorings) -> dict[str, str]:
        """Return every argument as text, for the comparison between ranks; a callback as its answer for one pipeline."""
        pipeline = list(factorings.groups("pp")[0])
        values = {}
        for name, value in vars(self).items():
            values[name] = repr(value(pipeline) if callable(value) else value)
        return values | {"options": repr(self.options)}

    # The checks, in the order of the original's. An error carries all problems of its step; its type is what the
    # original raises for the first.

    def validate(self, world_size: int) -> tuple[Layout, Layout]:
        """Check every argument in a world of some size, and return the layouts of the mesh and of its experts' view."""
        world = world_size if self.local_world_size is None else self.local_world_size
        errors = [*self._argument_errors(self.pipeline_model_parallel_size)]
        layouts = []
        for view in (DENSE, EXPERT):
            try:
                layouts.append(self._layout(world, view))
            except LayoutError as error:  # noqa: PERF203  both layouts are reported
                errors.append(ContractRuntimeError(*error.problems))
            except NamedMeshError as error:
                errors.append(error)
        if not 0 <= self.rank_offset <= self.rank_offset + world <= world_size:
            errors.append(
                ContractRuntimeError(
                    f"rank_offset is {self.rank_offset} and local_world_size is {self.local_world_size}, which are not "
                    f"ranks of the world of {world_size}; change one of them"
                )
            )
        _raise_all(errors)
        _ = self.options
        dense, expert = layouts
        pp_inside = not self.order.endswith("pp") and dense["pp"] > 1 and expert["edp"] != dense["dp"]
        if pp_inside or dense.partition("pp") != expert.partition("pp"):
            raise ContractError(
                f"the pipelines of {dense} and of the experts' {expert} do not fit together in the order "
                f"{self.order!r}; put pp last in the order, or choose expert sizes that leave edp = dp"
            )
        _raise_all([*self._group_errors(Factorings(dense, expert))])
        return dense, expert

    def validate_for_mesh(self, factorings: Factorings) -> None:
        """Check what ``bind`` takes against the axes of a mesh."""
        _raise_all([*self._group_errors(factorings), *self._argument_errors(factorings.size("pp"))])

    def _layout(self, world: int, view: str) -> Layout:
        """Return the layout of a view, whose axes are the tokens of the order under other names; dp is what is left."""
        tp, etp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        sizes = {"tp": tp, "pp": self.pipeline_model_parallel_size, "cp": self.context_parallel_size}
        names: Mapping[str, str] = {}
        gtp = self.gtp_remat_size
        if view == EXPERT:
            sizes = {
                "tp": tp if etp is None else etp,
                "ep": self.expert_model_parallel_size,
                "pp": sizes["pp"],
            }
            gtp, names = self.expert_gtp_remat_size, _EXPERT
        if gtp != 1:
            sizes["gtp_remat"] = gtp
        sizes["dp"] = -1
        by_axis = {names.get(token, token): size for token, size in sizes.items()}
        by_axis = dict(Layout(**by_axis, world_size=world).items())
        sizes["dp"] = by_axis[names.get("dp", "dp")]
        order, known = self.order, ["tp", "pp", "dp", "ep", "cp"]
        if "gtp_remat" in sizes or "gtp_remat" in order:  # in lower case only, as the original
            order = insert_gtp_remat(order, "tp" if view == DENSE else "ep")
            known.append("gtp_remat")
        tokens = ordered_tokens(order, {token: sizes.get(token, 1) for token in known})
        axes = [names.get(token, token) for token in reversed(tokens) if token in sizes]
        return Layout.from_shape(axes, [by_axis[axis] for axis in axes], rank_offset=self.rank_offset)

    def _argument_errors(self, pp: int) -> Iterator[NamedMeshError]:
        group, instances = self.sharp_enabled_group, self.num_distributed_optimizer_instances
        if not self.use_sharp and group is not None:
            yield ContractError(
                f"sharp_enabled_group is {group!r}, but use_sharp is off; say use_sharp=True, or leave the group out"
            )
        if self.use_sharp and group not in {None, "dp", "dp_replica"}:
            yield ContractError(f"sharp_enabled_group is {group!r}; it is 'dp' or 'dp_replica'")
        if self.use_sharp and group == "dp_replica" and instances == 1:
            yield ContractError(
                "sharp_enabled_group is 'dp_replica', which only several optimizer instances have; "
                "set num_distributed_optimizer_instances, or use 'dp'"
            )
        for name in ("gtp_remat_size", "expert_gtp_remat_size"):
            if getattr(self, name) != 1 and instances != 1:
                yield ContractError(
                    f"num_distributed_optimizer_instances is {instances} and {name} is {getattr(self, name)}; weights that "
                    "are gathered for each use go with one optimizer instance only"
                )
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is not None and pp == 1:
            yield ContractRuntimeError(
                f"virtual_pipeline_model_parallel_size is {virtual}, but pipeline_model_parallel_size is 1; virtual "
                "stages interleave the stages of a pipeline, which needs 2 or more"
            )
        backend = self.pipeline_model_parallel_comm_backend
        if backend not in {None, "nccl", "ucc"}:
            yield ContractError(
                f"pipeline_model_parallel_comm_backend is {backend!r}; it is None (the default backend), 'nccl' or 'ucc'"
            )
        if backend == "ucc" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            yield ContractError(
                "the 'ucc' backend needs CUDA_DEVICE_MAX_CONNECTIONS above 1, and the environment says 1"
            )

    def _group_errors(self, factorings: Factorings) -> Iterator[NamedMeshError]:
        instances = self.num_distributed_optimizer_instances
        levels = self.hierarchical_context_parallel_sizes or ()
        dp_cp, cp = factorings.size("dp", "cp"), factorings.size("cp")
        for name, size in (("dp x cp", dp_cp), ("edp", factorings.size("edp"))):
            if not isinstance(instances, int) or instances < 1 or size % instances:
                yield ContractError(
                    f"num_distributed_optimizer_instances is {instances}, which does not divide {name} = {size}"
                )
        if self.hybrid_context_parallel and dp_cp % 2:
            yield ContractError(f"hybrid_context_parallel needs an even dp x cp, and it is {dp_cp}")
        if levels and prod(levels) != cp:
            yield ContractError(
                f"hierarchical_context_parallel_sizes are {list(levels)}, which multiply to {prod(levels)}; "
                f"they have to multiply to the context-parallel size, which is {cp}"
            )


def ordered_tokens(order: str, sizes: Mapping[str, int]) -> list[str]:
    """Return the tokens of an order string, fastest first, with those that it omits at the end.

    The sizes are by token, in the order in which omitted ones are added. A token of a size other than 1 has to have a
    place in the order (ContractRuntimeError), which names nothing else (ContractKeyError).
    """
    order = order.lower()
    parsed = parse_order(order, tuple(sizes))
    # "tp-dpp" has a mistake rather than no place for dp: the original searches the string, too.
    problems = [
        f"the size of {token} is {sizes[token]}, but the order {order!r} has no place for it; add {token!r}"
        for token in parsed.omitted
        if token not in order and sizes[token] != 1
    ]
    if problems:
        raise ContractRuntimeError(*problems)
    if parsed.unknown:
        raise ContractKeyError(
            *(
                f"{token!r} in the order {order!r} is not one of {', '.join(sizes)}{did_you_mean(token, sizes)}"
                for token in parsed.unknown
            )
        )
    return parsed.tokens


def insert_gtp_remat(order: str, after: str) -> str:
    """Return an order string with the axis ``gtp_remat`` after another one, or after tp; it stays where it is named.

    Example:
        >>> insert_gtp_remat("tp-cp-ep-dp-pp", "ep"), insert_gtp_remat("tp-dp", "ep"), insert_gtp_remat("dp-pp", "tp")
        ('tp-cp-ep-gtp_remat-dp-pp', 'tp-gtp_remat-dp', 'gtp_remat-dp-pp')
    """
    tokens = order.split("-")
    if "gtp_remat" not in tokens:
        before = after if after in tokens else "tp"
        tokens.insert(tokens.index(before) + 1 if before in tokens else 0, "gtp_remat")
    return "-".join(tokens)


def check_net_names(net_names: Mapping[str, object]) -> None:
    """Refuse networks that the original does not let the NCCL settings of a group name: all but IB and socket."""
    problems = [
        f"net_name of {group!r} is {net_name!r}; it is 'IB' or 'socket'"
        for group, net_name in net_names.items()
        if net_name is not None and str(net_name).lower() not in {"ib", "socket"}
    ]
    if problems:
        raise ContractRuntimeError(*problems)


def _raise_all(errors: Sequence[NamedMeshError]) -> None:
    """Raise one error with every problem, each once, of the type of the first."""
    if errors:
        raise type(errors[0])(*dict.fromkeys(problem for error in errors for problem in error.problems))
