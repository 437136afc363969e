"""What DCP saves and loads: its planners with our checks in their steps, so that every rank hears of every problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh.errors import CheckpointError, format_items, format_ranks
from namedmesh.fingerprints import digest, fingerprint_sample
from namedmesh.sharding import to_local
from namedmesh.training.checkpoint_files import Writer
from namedmesh.training.checkpoint_state import Names, State, of_owner, shown

_TOLERANCE = 1e-3  # replicas may differ by what rounding adds up to over a run; different tensors by more
_STATE_TOLERANCE = 1e-2  # gradients in half precision differ by more than the parameters
_REMEDY = (
    "and a checkpoint holds one tensor of a name; replicas have to be equal, a layer has its number in "
    "the whole model in its name (training.stage_layers), plain shards are marked with "
    "tensor_model_parallel and partition_dim, and what an optimizer keeps for each rank is no DTensor"
)


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner, which compares the values that several ranks have under one name.

    Parameters and all DTensors have to be the same on all ranks that have the same shard. Of other
    values that differ (buffers, generators, the place in the data, plain tensors of optimizers), a
    checkpoint has every copy, and the manifest ``about`` says which rank has which.
    """

    def __init__(self, state: State, aliases: Mapping[str, str], writer: Writer) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state, self._aliases, self._writer = state, aliases, writer

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Take what this rank has; DCP writes two entries of a log for each value that is given to its ``save``."""
        super().set_up_planner(self._state.values, storage_meta, is_coordinator)

    def create_local_plan(self) -> dcp.SavePlan:
        """Say what this rank has."""
        plan, state = super().create_local_plan(), self._state
        told: dict[str, Any] = {"extra": digest(state.extra), "options": state.options}
        told["local"] = state.local
        told["marks"] = [_mark(state, item.index.fqn) for item in plan.items]
        return replace(plan, planner_data=told)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        """Compare, on the first rank, and let each rank save what only it has."""
        told = [plan.planner_data for plan in all_plans]
        extra, aliases = self._state.extra, self._aliases
        problems = []
        if others := [rank for rank, each in enumerate(told) if each["extra"] != told[0]["extra"]]:
            problems.append(
                f"the extra values ({format_items(extra)}) are not on {format_ranks(others)} what they are on rank 0; give "
                "every rank the same, such as a list of what each of them has"
            )
        copies, contradictions = _compared(all_plans, aliases)
        problems += contradictions
        if problems:
            raise CheckpointError(*problems)
        own = [_own(plan, rank, copies, aliases) for rank, plan in enumerate(all_plans)]
        plans, metadata = super().create_global_plan(own)
        options: dict[str, Any] = {}
        local: set[str] = set()
        for report in told:
            options |= report["options"]
            local |= report["local"]
        about = {"options": options, "local": sorted(local), "extra": extra}
        self._writer.about |= about | {"aliases": aliases, "copies": copies}
        return plans, metadata

    def lookup_object(self, index: Any) -> Any:
        """Find a value, also of a name of its own."""
        return super().lookup_object(replace(index, fqn=shared_name(index.fqn)))


class Mark(NamedTuple):
    """A summary of a value, which ranks compare."""

    numbers: list[float] | int  # floats may differ by rounding; an int is a hash
    copy: int = 0  # identifies this rank's copy of the value; 0 if the ranks have to agree
    tolerance: float = _TOLERANCE

    def is_same(self, other: Mark) -> bool:
        """Return whether two values are the same, up to rounding."""
        one, two = self.numbers, other.numbers
        if isinstance(one, int) or isinstance(two, int):
            return one == two
        limit = self.tolerance * max((abs(number) for number in (*one, *two)), default=0.0)
        return all(abs(a - b) <= limit for a, b in zip(one, two, strict=True))


def _mark(state: State, name: str) -> Mark:
    """Return the summary of a value that ranks compare.

    Parameters and DTensors have to agree, up to rounding. A plain tensor of an optimizer that has
    its parameter's shape either agrees in the same way, or each rank keeps its own. All other
    values are equal, or each rank keeps its own.
    """
    if state.mesh is None:
        return Mark([])  # one process has nothing to compare with
    value, parameter = state.values[name], state.parameter_of(name)
    is_sharded = isinstance(value, DTensor)
    if name in state.parameters or (is_sharded and parameter is None):
        return Mark(fingerprint_sample(value))
    if is_sharded or (isinstance(value, Tensor) and value.shape == getattr(parameter, "shape", None)):
        local = to_local(value)
        if type(local) not in {Tensor, nn.Parameter}:
            return Mark([])  # quantized tensors support few operations
        numbers = fingerprint_sample(local)
        return Mark(numbers, 0 if is_sharded else digest(numbers), _STATE_TOLERANCE)
    hashed = digest(value)
    return Mark(hashed, hashed)


def joined_aliases(by_rank: Iterable[Names]) -> dict[str, str]:
    """Return all further names of parameters, of one rank or tied over two, and whose they are."""
    aliases: dict[str, str] = {}
    ends: dict[tuple[str, str], str] = {}
    for own, ties in by_rank:
        aliases |= own
        ends |= ties
    for (tie, end), name in ends.items():
        first = ends.get((tie, "first"), name)
        if end == "last" and name != first:
            aliases[name] = first
    return aliases


def _compared(
    plans: Sequence[dcp.SavePlan], aliases: Mapping[str, str]
) -> tuple[dict[str, dict[int, int]], list[str]]:
    """Return of what each rank has its own, and what contradicts itself."""
    held: dict[Any, list[tuple[int, Mark]]] = {}
    wrong: dict[str, dict[str, None]] = {}
    for rank, plan in enumerate(plans):
        for item, mark in zip(plan.items, plan.planner_data["marks"], strict=True):
            name = of_owner(item.index.fqn, aliases)
            held.setdefault(replace(item.index, fqn=name), []).append((rank, mark))
    copies: dict[str, dict[int, int]] = {}
    for index, marks in held.items():
        first, mark = marks[0]
        differ = [rank for rank, other in marks if not mark.is_same(other)]
        if differ and not mark.copy:
            how = f"other values on rank {differ[0]} than on rank {first}"
            wrong.setdefault(f"{how}, {_REMEDY}", {})[index.fqn] = None
        elif differ:
            copies[index.fqn] = {rank: other.copy for rank, other in marks}
    found = in_words({how: map(shown, names) for how, names in wrong.items()})
    return copies, found


def _own(
    plan: dcp.SavePlan, rank: int, copies: dict[str, dict[int, int]], aliases: Mapping[str, str]
) -> dcp.SavePlan:
    """Give a name of its own to each different copy, and leave out what another name's entry has; equal ones DCP saves once."""
    items = []
    for item in plan.items:
        name = item.index.fqn
        if of_owner(name, aliases) == name:
            own = f"copy.{copies[name][rank]:x}.{name}" if name in copies else name
            items.append(replace(item, index=replace(item.index, fqn=own)))
    return replace(plan, items=items, planner_data=None)


def shared_name(name: str) -> str:
    """Return the name of what a rank has a copy of its own of."""
    return name.split(".", 2)[2] if name.startswith("copy.") else name


def in_words(wrong: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a message for each thing that is wrong, with the names that it is wrong of."""
    return [f"{format_items(names)}: {how}" for how, names in wrong.items()]
