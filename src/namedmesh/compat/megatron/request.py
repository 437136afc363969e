"""What ``initialize_model_parallel`` was asked for: every check before anything is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError, ContractFileNotFoundError, ContractRuntimeError
from namedmesh.compat.megatron.ranks import (
    default_embedding_ranks,
    default_position_embedding_ranks,
    ordered_layout,
    ordered_tokens,
)
from namedmesh.compat.megatron.shape import Shape
from namedmesh.compat.megatron.wish import Wish
from namedmesh.errors import NamedMeshError
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Request"]

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "instances": "num_distributed_optimizer_instances",
}
NET_NAMES = ("ib", "socket")
"""The networks that the original lets a file of NCCL settings name."""
_DENSE_AXES = {axis: axis for axis in ("tp", "cp", "dp", "pp")}
_EXPERT_AXES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of ``initialize_model_parallel``, by the original's names."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    pipeline_model_parallel_comm_backend: str | None
    use_sharp: bool
    context_parallel_size: int
    hierarchical_context_parallel_sizes: Sequence[int] | None
    hybrid_context_parallel: bool
    expert_model_parallel_size: int
    num_distributed_optimizer_instances: int
    expert_tensor_parallel_size: int | None
    nccl_communicator_config_path: str | None
    distributed_timeout_minutes: float
    order: str
    get_embedding_ranks: Callable[[list[int]], list[int]] | None
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None
    create_gloo_process_groups: bool
    high_priority_stream_groups: Sequence[str] | None
    sharp_enabled_group: str | None
    create_all_gather_group: bool | None

    def words(self) -> dict[str, str]:
        """Every argument in words, for the comparison between ranks; functions have none that compare."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: repr(value) for name, value in values.items() if not callable(value)}

    def resolved(self, world: int) -> tuple[Shape, Wish]:
        """The layouts and the wishes beside them.

        Args:
            world: how many ranks there are.

        Raises:
            ContractError: what the original asserts.
            ContractRuntimeError: sizes or orders that it refuses so.
            ContractFileNotFoundError: there is no file of NCCL settings at the path.
            ContractKeyError: the order names something unknown.

        An error carries all problems of its stage; its type is what the original raises for the first.
        """
        _raise_all([*self._sharp_problems(), *self._size_problems(), *self._size_conflicts(world)])
        options = self._options()
        shape = self._shape(world)
        _raise_all(self._layout_problems(shape))
        wish = Wish(
            gloo=self.create_gloo_process_groups,
            instances=self.num_distributed_optimizer_instances,
            levels=tuple(self.hierarchical_context_parallel_sizes or ()),
            hybrid=self.hybrid_context_parallel,
            gather_group=bool(self.create_all_gather_group),
            virtual_size=self.virtual_pipeline_model_parallel_size,
            embedding_ranks=self.get_embedding_ranks or default_embedding_ranks,
            position_embedding_ranks=self.get_position_embedding_ranks or default_position_embedding_ranks,
            options=options,
            pp_backend=self.pipeline_model_parallel_comm_backend,
            sharp=(self.sharp_enabled_group or "dp") if self.use_sharp else None,
        )
        wish.check(shape)
        return shape, wish

    # The checks, in the order of the original's.

    def _sharp_problems(self) -> Iterator[NamedMeshError]:
        group = self.sharp_enabled_group
        if not self.use_sharp and group is not None:
            yield ContractError(
                f"sharp_enabled_group is {group!r}, but use_sharp is off; say use_sharp=True, or leave the group out"
            )
        if self.use_sharp and group not in {None, "dp", "dp_replica"}:
            yield ContractError(f"sharp_enabled_group is {group!r}; it is 'dp' or 'dp_replica'")
        if self.use_sharp and group == "dp_replica" and self.num_distributed_optimizer_instances == 1:
            yield ContractError(
                "sharp_enabled_group is 'dp_replica', which only several optimizer instances have; "
                "set num_distributed_optimizer_instances, or use 'dp'"
            )

    def _size_problems(self) -> Iterator[NamedMeshError]:
        for name in _SIZES.values():
            size = getattr(self, name)
            if name == "expert_tensor_parallel_size" and size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                yield ContractRuntimeError(f"{name} is {size!r}; a size is a whole number from 1")

    def _size_conflicts(self, world: int) -> Iterator[NamedMeshError]:
        if any(True for _ in self._size_problems()):
            return
        dense = self._dense_size()
        if world % dense:
            yield ContractRuntimeError(
                f"the world of {world} ranks cannot be divided by tp={self.tensor_model_parallel_size} x "
                f"pp={self.pipeline_model_parallel_size} x cp={self.context_parallel_size} = {dense}; "
                "change a size, or start another number of ranks"
            )
        virtual, pp = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_size
        if virtual is not None and pp == 1:
            yield ContractRuntimeError(
                f"virtual_pipeline_model_parallel_size is {virtual}, but pipeline_model_parallel_size is 1; virtual "
                "stages interleave the stages of a pipeline, which needs 2 or more"
            )
        try:
            ordered_tokens(
                self.order, {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "cp": 1} | self._ordered_sizes(world)
            )
        except NamedMeshError as error:
            yield error
        expert = self._expert_size()
        if world % expert:
            yield ContractRuntimeError(
                f"the world of {world} ranks cannot be divided by the experts' etp={self._etp()} x "
                f"ep={self.expert_model_parallel_size} x pp={pp} = {expert}; change a size"
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

    def _layout_problems(self, shape: Shape) -> Iterator[NamedMeshError]:
        dp, edp = shape.dense["dp"], shape.expert["edp"]
        pp_inside = not self.order.endswith("pp") and shape.dense["pp"] > 1 and edp != dp
        if pp_inside or shape.dense.partition("pp") != shape.expert.partition("pp"):
            yield ContractError(
                f"the pipelines of {shape.dense} and of the experts' {shape.expert} do not fit together in the order "
                f"{self.order!r}; put pp last in the order, or choose expert sizes that leave edp = dp"
            )

    # What follows from the arguments.

    def _etp(self) -> int:
        etp = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if etp is None else etp

    def _dense_size(self) -> int:
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    def _expert_size(self) -> int:
        return self._etp() * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    def _ordered_sizes(self, world: int) -> dict[str, int]:
        return {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "dp": world // self._dense_size(),
            "ep": 1,
            "cp": self.context_parallel_size,
        }

    def _shape(self, world: int) -> Shape:
        expert_sizes = {
            "tp": self._etp(),
            "pp": self.pipeline_model_parallel_size,
            "dp": world // self._expert_size(),
            "ep": self.expert_model_parallel_size,
            "cp": 1,
        }
        return Shape(
            ordered_layout(self.order, self._ordered_sizes(world), _DENSE_AXES),
            ordered_layout(self.order, expert_sizes, _EXPERT_AXES),
            {axis: (axis,) for axis in (*_DENSE_AXES.values(), *_EXPERT_AXES.values())},
        )

    def _options(self) -> dict[str, GroupOptions]:
        """Options by Megatron's name of the group, from the file and the list of urgent groups."""
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
            _raise_all(_net_problems(options))
        for name in self.high_priority_stream_groups or ():
            said = options.get(name, GroupOptions())
            options[name] = GroupOptions(nccl=said.nccl, high_priority=True)
        return options


def _raise_all(problems: Sequence[NamedMeshError] | Iterator[NamedMeshError]) -> None:
    """One error with every problem, of the type of the first."""
    found = list(problems)
    if found:
        raise type(found[0])(*(problem for error in found for problem in error.problems))


def _net_problems(options: Mapping[str, GroupOptions]) -> Iterator[NamedMeshError]:
    for name, said in options.items():
        net = dict(said.nccl).get("net_name")
        if net is not None and str(net).lower() not in NET_NAMES:
            yield ContractRuntimeError(f"net_name of {name!r} is {net!r}; it is 'IB' or 'socket'")
