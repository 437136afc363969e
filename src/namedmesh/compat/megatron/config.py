"""The arguments of ``initialize_model_parallel`` and ``bind``, and every check of them before a group is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from namedmesh.compat.axis_map import AxisMap
from namedmesh.compat.errors import ContractError, ContractFileNotFoundError, ContractRuntimeError
from namedmesh.compat.megatron.rank_generator import (
    default_embedding_ranks,
    default_position_embedding_ranks,
    insert_gtp_remat,
    ordered_tokens,
)
from namedmesh.dialects import DENSE, DIALECTS, EXPERT
from namedmesh.errors import NamedMeshError
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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

_EXPERT = {"tp": "etp", "dp": "edp", "gtp_remat": "egtp_remat"}


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

    # What follows from the arguments.

    def ranks(self, world_size: int) -> range:
        """Return the ranks of the mesh, in a world of some size."""
        local = self.local_world_size
        return range(world_size) if local is None else range(self.rank_offset, self.rank_offset + local)

    @property
    def sharp_group(self) -> str | None:
        """Which groups use SHARP: ``"dp"``, ``"dp_replica"``, or None."""
        return (self.sharp_enabled_group or "dp") if self.use_sharp else None

    @property
    def levels(self) -> tuple[int, ...]:
        """The sizes of the levels of cp, innermost first."""
        return tuple(self.hierarchical_context_parallel_sizes or ())

    @property
    def stages_with_embeddings(self) -> dict[str, Callable[[list[int]], list[int]]]:
        """The callbacks that choose the stages that hold embeddings, by the name of their group."""
        return {
            "embedding": self.get_embedding_ranks or default_embedding_ranks,
            "position_embedding": self.get_position_embedding_ranks or default_position_embedding_ranks,
        }

    @property
    def beside_sizes(self) -> tuple[object, ...]:
        """What the groups of a mesh depend on beside its axes; a mesh that is bound with the same needs no new ones."""
        bindable = [getattr(self, name) for name in BINDABLE if name != "hierarchical_context_parallel_sizes"]
        backend = self.pipeline_model_parallel_comm_backend
        return (*bindable, self.levels, backend, self.sharp_group, self.options)

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

    def fields_to_compare(self, axis_map: AxisMap) -> dict[str, str]:
        """Return every argument as text, for the comparison between ranks; a callback as its answer for one pipeline."""
        layout, axes = axis_map.locate(("pp",))
        pipeline = list(layout.group(layout.rank_offset, *axes))
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"options": self.options}
        return {
            name: repr(value(list(pipeline)) if callable(value) else value) for name, value in values.items()
        }

    # The checks, in the order of the original's. An error carries all problems of its step; its type is what the
    # original raises for the first.

    def validate(self, world_size: int) -> tuple[Layout, Layout]:
        """Check every argument in a world of some size, and return the layouts of the mesh and of its expert view."""
        world = world_size if self.local_world_size is None else self.local_world_size
        _raise_all([*self._sharp_problems(), *self._size_problems(world, world_size)])
        _ = self.options
        dense, expert = self._layout(world, DENSE), self._layout(world, EXPERT)
        pp_inside = not self.order.endswith("pp") and dense["pp"] > 1 and expert["edp"] != dense["dp"]
        if pp_inside or dense.partition("pp") != expert.partition("pp"):
            raise ContractError(
                f"the pipelines of {dense} and of the experts' {expert} do not fit together in the order "
                f"{self.order!r}; put pp last in the order, or choose expert sizes that leave edp = dp"
            )
        _raise_all(self._group_problems(AxisMap.from_layout(dense, "Megatron", {"expert": expert})))
        return dense, expert

    def validate_for_mesh(self, axis_map: AxisMap) -> None:
        """Check what ``bind`` takes against the axes of a mesh."""
        _raise_all([*self._group_problems(axis_map), *self._virtual_problems(axis_map.size("pp"))])

    def _sizes(self, view: str) -> dict[str, int]:
        """Return the sizes that the world of a view is divided by, by the tokens of the order; dp is what is left."""
        tp, etp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        pp, gtp = self.pipeline_model_parallel_size, self.gtp_remat_size
        sizes = {"tp": tp, "pp": pp, "cp": self.context_parallel_size}
        if view == EXPERT:
            sizes = {"tp": tp if etp is None else etp, "ep": self.expert_model_parallel_size, "pp": pp}
            gtp = self.expert_gtp_remat_size
        return sizes if gtp == 1 else sizes | {"gtp_remat": gtp}

    def _layout(self, world: int, view: str) -> Layout:
        """Return the layout of a view, whose axes are the tokens of the order under other names."""
        sizes = self._sizes(view)
        sizes["dp"] = world // prod(sizes.values())
        tokens = [token for token in reversed(self._tokens(view, sizes)) if token in sizes]
        names = [_EXPERT.get(token, token) if view == EXPERT else token for token in tokens]
        return Layout.from_shape(names, [sizes[token] for token in tokens], rank_offset=self.rank_offset)

    def _tokens(self, view: str, sizes: Mapping[str, int]) -> list[str]:
        """Return the tokens of the order, fastest first; gtp_remat is after tp, and after ep for the experts."""
        order, names = self.order, ["tp", "pp", "dp", "ep", "cp"]
        if "gtp_remat" in sizes or "gtp_remat" in order:  # in lower case only, as the original
            order = insert_gtp_remat(order, "tp" if view == DENSE else "ep")
            names.append("gtp_remat")
        return ordered_tokens(order, {name: sizes.get(name, 1) for name in names})

    def _sharp_problems(self) -> Iterator[NamedMeshError]:
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

    def _size_problems(self, world: int, world_size: int) -> Iterator[NamedMeshError]:
        names = [field.name for field in fields(self) if field.name.endswith("_size")]
        names = [name for name in names if "virtual" not in name] + ["num_distributed_optimizer_instances"]
        wrong = [
            ContractRuntimeError(f"{name} is {size!r}; a size is a whole number from 1")
            for name in names
            if (size := getattr(self, name)) is not None
            and (not isinstance(size, int) or isinstance(size, bool) or size < 1)
        ]
        if wrong:
            yield from wrong
            return
        gtp = {name: getattr(self, name) for name in ("gtp_remat_size", "expert_gtp_remat_size")}
        if max(gtp.values()) > 1 and self.num_distributed_optimizer_instances > 1:
            yield ContractError(
                f"num_distributed_optimizer_instances is {self.num_distributed_optimizer_instances} and "
                f"{' and '.join(f'{name} is {size}' for name, size in gtp.items() if size > 1)}; weights that are gathered "
                "for each use go with one optimizer instance only"
            )
        dense, experts = self._sizes(DENSE), self._sizes(EXPERT)
        if world % prod(dense.values()):
            yield ContractRuntimeError(
                f"the world of {world} ranks cannot be divided by {_product(dense)}; change a size, or start another "
                "number of ranks"
            )
        yield from self._virtual_problems(self.pipeline_model_parallel_size)
        try:
            self._tokens(DENSE, {**dense, "dp": world // prod(dense.values())})
        except NamedMeshError as error:
            yield error
        if world % prod(experts.values()):
            named = {_EXPERT.get(axis, axis): size for axis, size in experts.items()}
            yield ContractRuntimeError(
                f"the world of {world} ranks cannot be divided by the experts' {_product(named)}; change a size"
            )
        if not 0 <= self.rank_offset <= self.rank_offset + world <= world_size:
            yield ContractRuntimeError(
                f"rank_offset is {self.rank_offset} and local_world_size is {self.local_world_size}, which are not ranks "
                f"of the world of {world_size}; change one of them"
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

    def _virtual_problems(self, pp: int) -> Iterator[NamedMeshError]:
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is not None and pp == 1:
            yield ContractRuntimeError(
                f"virtual_pipeline_model_parallel_size is {virtual}, but pipeline_model_parallel_size is 1; virtual "
                "stages interleave the stages of a pipeline, which needs 2 or more"
            )

    def _group_problems(self, axis_map: AxisMap) -> Iterator[NamedMeshError]:
        instances, levels = self.num_distributed_optimizer_instances, self.levels
        dp_cp, cp = axis_map.size("dp", "cp"), axis_map.size("cp")
        for name, size in (("dp x cp", dp_cp), ("edp", axis_map.size("edp"))):
            if instances < 1 or size % instances:
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


def check_net_names(net_names: Mapping[str, object]) -> None:
    """Refuse networks that the original does not let the NCCL settings of a group name: all but IB and socket."""
    problems = [
        f"net_name of {group!r} is {net_name!r}; it is 'IB' or 'socket'"
        for group, net_name in net_names.items()
        if net_name is not None and str(net_name).lower() not in {"ib", "socket"}
    ]
    if problems:
        raise ContractRuntimeError(*problems)


def _product(sizes: Mapping[str, int]) -> str:
    return f"{' x '.join(f'{axis}={size}' for axis, size in sizes.items())} = {prod(sizes.values())}"


def _raise_all(problems: Iterable[NamedMeshError]) -> None:
    """Raise one error with every problem, of the type of the first."""
    errors = list(problems)
    if errors:
        raise type(errors[0])(*(problem for error in errors for problem in error.problems))
