"""DCP's save planner, which compares the ranks' values of each entry."""

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
from namedmesh.training.checkpoint_state import Names, State, format_entry_name, replace_alias
from namedmesh.training.checkpoint_storage import StorageWriter

# Relative tolerance for parameters: rounding adds up over a run. Different tensors differ by more.
_TOLERANCE = 1e-3
# Relative tolerance for the state of optimizers: gradients in half precision differ by more.
_STATE_TOLERANCE = 1e-2
_REMEDY = (
    "and a checkpoint has one tensor of each name. Replicas must be equal; the name of a layer has its "
    "number in the full model (training.stage_layers); plain shards have the attributes tensor_model_parallel "
    "and partition_dim; optimizer state that differs between ranks must not be a DTensor"
)


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's save planner, which compares replicas and saves values that differ by rank.

    Parameters and all DTensors must be equal on all ranks that have the same shard. If other values
    differ (buffers, random states, data loaders, plain tensors of optimizers), the checkpoint has
    every distinct copy, and the manifest says which rank has which.

    Args:
        state: this rank's collected state.
        aliases: the aliases of parameters on any rank, and the names that they are saved under.
        writer: the storage writer, whose manifest is completed on rank 0.
    """

    def __init__(self, state: State, aliases: Mapping[str, str], writer: StorageWriter) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state
        self._aliases = aliases
        self._writer = writer

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Use the entries of ``state`` instead of the state dict that was given to DCP.

        DCP's ``save`` logs every value that it is given.
        """
        super().set_up_planner(self._state.values, storage_meta, is_coordinator)

    def create_local_plan(self) -> dcp.SavePlan:
        """Return this rank's writes and the summaries of its entries, for rank 0."""
        plan = super().create_local_plan()
        state = self._state
        report: dict[str, Any] = {
            "extra": digest(state.extra),
            "options": state.options,
            "local": state.local,
        }
        report["summaries"] = [_summarize(state, item.index.fqn) for item in plan.items]
        return replace(plan, planner_data=report)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        """Compare the summaries of all ranks, and complete the manifest. DCP calls it on rank 0.

        Raises:
            CheckpointError: values that must be equal differ between ranks. DCP raises the error of
                rank 0 on every rank.
        """
        reports = [plan.planner_data for plan in all_plans]
        problems = []
        first = reports[0]["extra"]
        if different := [rank for rank, report in enumerate(reports) if report["extra"] != first]:
            extra = format_items(self._state.extra)
            remedy = "give every rank the same, such as a list of the values of all ranks"
            where = f"differ on {format_ranks(different)} from those on rank 0"
            problems.append(f"the extra values ({extra}) {where}; {remedy}")
        copies, mismatches = _compare_ranks(all_plans, self._aliases)
        problems += mismatches
        if problems:
            raise CheckpointError(*problems)
        renamed = [_rename_items(plan, rank, copies, self._aliases) for rank, plan in enumerate(all_plans)]
        # DCP removes items that several ranks have, and balances the writes.
        plans, metadata = super().create_global_plan(renamed)
        options: dict[str, Any] = {}
        local: set[str] = set()
        for report in reports:
            options |= report["options"]
            local |= report["local"]
        # The writer has the manifest on rank 0, where this runs, and writes it at the end.
        about_names = {"local": sorted(local), "aliases": self._aliases, "copies": copies}
        self._writer.manifest |= {"options": options, "extra": self._state.extra} | about_names
        return plans, metadata

    def lookup_object(self, index: Any) -> Any:
        """Return this rank's value of an entry or of its copy, for DCP to write."""
        return super().lookup_object(replace(index, fqn=strip_copy_prefix(index.fqn)))


class Summary(NamedTuple):
    """A few numbers about the value of an entry, by which ranks compare it.

    Attributes:
        numbers: floats that may differ by rounding, or the hash of the value.
        copy: identifies this rank's copy of the value; 0 if the ranks must agree.
        tolerance: the relative tolerance for floats.
    """

    numbers: list[float] | int
    copy: int = 0
    tolerance: float = _TOLERANCE

    def matches(self, other: Summary) -> bool:
        """Return whether the values of two summaries are equal, up to rounding."""
        if isinstance(self.numbers, int) or isinstance(other.numbers, int):
            return self.numbers == other.numbers
        limit = self.tolerance * max(map(abs, [*self.numbers, *other.numbers]), default=0.0)
        pairs = zip(self.numbers, other.numbers, strict=True)
        return all(abs(own - others) <= limit for own, others in pairs)


def _summarize(state: State, name: str) -> Summary:
    """Return the summary of this rank's value of an entry. Does not communicate.

    Parameters and DTensors must agree, up to rounding. A plain tensor of an optimizer that has its
    parameter's shape either agrees in the same way, or is saved for each rank. All other values
    are equal, or are saved for each rank.
    """
    if state.mesh is None:
        return Summary([])  # a single process has nothing to compare with
    value = state.values[name]
    parameter = state.find_parameter(name)
    is_sharded = isinstance(value, DTensor)
    if name in state.parameters or (is_sharded and parameter is None):
        return Summary(fingerprint_sample(value))
    if is_sharded or (isinstance(value, Tensor) and value.shape == getattr(parameter, "shape", None)):
        local = to_local(value)
        if type(local) not in {Tensor, nn.Parameter}:
            return Summary([])  # quantized tensors support few operations
        # Some optimizers keep DTensors, others plain tensors that replicas may or may not share.
        numbers = fingerprint_sample(local)
        return Summary(numbers, 0 if is_sharded else digest(numbers), _STATE_TOLERANCE)
    hashed = digest(value)
    return Summary(hashed, hashed)


def merge_aliases(names_by_rank: Iterable[Names]) -> dict[str, str]:
    """Merge the aliases of all ranks into a dict from alias to the name it is saved under.

    Args:
        names_by_rank: the names of each rank: parameters with several names there, and parameters
            that tie_stages() has tied across two ranks.
    """
    aliases: dict[str, str] = {}
    ends: dict[tuple[str, str], str] = {}
    for aliases_of_rank, ties in names_by_rank:
        aliases |= aliases_of_rank
        ends |= ties
    for (tie, end), name in ends.items():
        first = ends.get((tie, "first"), name)
        if end == "last" and name != first:
            aliases[name] = first
    return aliases


def _compare_ranks(
    plans: Sequence[dcp.SavePlan], aliases: Mapping[str, str]
) -> tuple[dict[str, dict[int, int]], list[str]]:
    """Compare the summaries of all ranks, on rank 0.

    Returns:
        By the names of entries that differ and may differ, the number of each rank's copy; and a
            message for each mismatch of values that must be equal.
    """
    summaries: dict[Any, list[tuple[int, Summary]]] = {}
    for rank, plan in enumerate(plans):
        for item, summary in zip(plan.items, plan.planner_data["summaries"], strict=True):
            # The index also has the offsets of a shard, so only equal shards are compared.
            index = replace(item.index, fqn=replace_alias(item.index.fqn, aliases))
            summaries.setdefault(index, []).append((rank, summary))
    copies: dict[str, dict[int, int]] = {}
    names_by_problem: dict[str, dict[str, None]] = {}
    for index, by_rank in summaries.items():
        first_rank, first = by_rank[0]
        different = [rank for rank, summary in by_rank if not first.matches(summary)]
        if different and not first.copy:
            problem = f"other values on rank {different[0]} than on rank {first_rank}, {_REMEDY}"
            names_by_problem.setdefault(problem, {})[format_entry_name(index.fqn)] = None
        elif different:
            copies[index.fqn] = {rank: summary.copy for rank, summary in by_rank}
    return copies, format_problems(names_by_problem)


def _rename_items(
    plan: dcp.SavePlan, rank: int, copies: dict[str, dict[int, int]], aliases: Mapping[str, str]
) -> dcp.SavePlan:
    """Return a rank's plan with aliases replaced, and a separate name for each distinct copy.

    Copies that are equal have the same name, so DCP saves them once.
    """
    items = []
    for item in plan.items:
        name = item.index.fqn
        if replace_alias(name, aliases) != name:
            continue  # another rank, or another entry of this one, saves it
        if name in copies:
            name = f"copy.{copies[name][rank]:x}.{name}"
        items.append(replace(item, index=replace(item.index, fqn=name)))
    return replace(plan, items=items, planner_data=None)


def strip_copy_prefix(name: str) -> str:
    """Return the name of an entry without the ``copy.NUMBER.`` of a rank's copy."""
    return name.split(".", 2)[2] if name.startswith("copy.") else name


def format_problems(names_by_problem: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a message for each problem, with the names that have it."""
    return [f"{format_items(names)}: {problem}" for problem, names in names_by_problem.items()]
