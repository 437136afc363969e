"""What DCP saves and loads: its planners with our checks in their steps, so that every rank hears of every problem."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from namedmesh.errors import CheckpointError, listing, ranks_in_words
from namedmesh.layout import Layout
from namedmesh.tensor_parallel.gradients import fingerprint
from namedmesh.training.checkpoint_files import Writer, by_ranks
from namedmesh.training.checkpoint_state import Names, State, of_owner, owner, shown
from namedmesh.training.data import digest

_SAMPLE = 1024  # elements of a tensor that are compared
_TOLERANCE = 1e-3  # replicas may differ by what rounding adds up to over a run; different tensors by more
_ABSENT = {  # what is said of an entry that a checkpoint does not have, by its kind
    "model": "not in {}",
    "optimizer": "kept by the optimizer for the part of a rank, which no rank has now; load {} in its own layout, or without the optimizer",
    "data": "no place in the data for this rank in {}; load it without data=, and skip the samples that were seen",
}


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's, with a comparison of what several ranks have under one name.

    Parameters, and all that is a DTensor, have to be the same on all ranks that have the same part. Of anything else that
    differs (buffers, generators, the place in the data) a checkpoint has every copy, and ``about`` says which rank has which.
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
        told["marks"] = [_mark(state, item.index.fqn) for item in plan.items]
        return replace(plan, planner_data=told)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        """Compare, on the first rank, and let each rank save what only it has."""
        told = [plan.planner_data for plan in all_plans]
        extra, aliases = self._state.extra, self._aliases
        problems = []
        if others := [rank for rank, each in enumerate(told) if each["extra"] != told[0]["extra"]]:
            problems.append(
                f"the extra values ({listing(extra)}) are not on {ranks_in_words(others)} what they are on rank 0; give "
                "every rank the same, such as a list of what each of them has"
            )
        copies, contradictions = _compared(all_plans, aliases)
        problems += contradictions
        if problems:
            raise CheckpointError(*problems)
        own = [_own(plan, rank, copies, aliases) for rank, plan in enumerate(all_plans)]
        plans, metadata = super().create_global_plan(own)
        options = {name: each for one in told for name, each in one["options"].items()}
        self._writer.about |= {"extra": extra, "options": options, "aliases": aliases, "copies": copies}
        return plans, metadata

    def lookup_object(self, index: Any) -> Any:
        """Find a value, also of a name of its own."""
        return super().lookup_object(replace(index, fqn=shared_name(index.fqn)))


def _mark(state: State, name: str) -> list[float] | int:
    """Return what ranks compare of a value: numbers, where they have to agree, or a hash."""
    if state.mesh is None:
        return []  # there is nothing to compare with
    value = state.values[name]
    parameter = state.values.get(f"model.{owner(name)}") if name.startswith("optimizer.") else None
    if isinstance(value, Tensor) and parameter is not None and parameter.shape == value.shape:
        return []  # they agree as the parameters do
    agreed = isinstance(value, DTensor) or name in state.parameters
    return _numbers_of(value) if agreed else digest(value)


@torch.no_grad()
def _numbers_of(tensor: Tensor) -> list[float]:
    """Return two numbers of some of a tensor's elements on this rank, that differ between different tensors."""
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLE)].resolve_conj()
    some = torch.view_as_real(some) if some.is_complex() else some
    return fingerprint(some.double().nan_to_num(nan=1e100, posinf=2e100, neginf=-2e100))


def _same(one: list[float] | int, other: list[float] | int) -> bool:
    """Return whether the marks of two values are those of one, but for rounding."""
    if isinstance(one, int) or isinstance(other, int):
        return one == other
    limit = _TOLERANCE * max((abs(each) for each in (*one, *other)), default=0.0)
    return all(abs(a - b) <= limit for a, b in zip(one, other, strict=True))


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
    held: dict[Any, list[tuple[int, Any]]] = {}
    wrong: dict[str, dict[str, None]] = {}
    for rank, plan in enumerate(plans):
        for item, mark in zip(plan.items, plan.planner_data["marks"], strict=True):
            name = of_owner(item.index.fqn, aliases)
            held.setdefault(replace(item.index, fqn=name), []).append((rank, mark))
    copies: dict[str, dict[int, int]] = {}
    for index, marks in held.items():
        first, mark = marks[0]
        differ = [rank for rank, each in marks if not _same(each, mark)]
        if differ and isinstance(mark, list):
            wrong.setdefault(f"other values on rank {differ[0]} than on rank {first}", {})[index.fqn] = None
        elif differ:
            copies[index.fqn] = dict(marks)
    tail = (
        "and a checkpoint holds one tensor of a name; replicas have to be equal, a layer has its number in the whole model in its "
        "name (training.stage_layers), and plain shards are marked with tensor_model_parallel and partition_dim"
    )
    found = _in_words({f"{how}, {tail}": map(shown, names) for how, names in wrong.items()})
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


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's, which says all that does not fit before anything is read, and reads into memory of its own."""

    def __init__(
        self, state: State, aliases: Mapping[str, str], about: dict[str, Any], where: Path, *, cast: bool
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state, self._about, self._where = state, about, f"the checkpoint {where}"
        self._tied, self._aliases = aliases, {**aliases, **about["aliases"]}
        self._cast = cast
        self._prefix = "model." if about["data"] is None else ""  # which Hugging Face's names do not have
        self._wrong: dict[str, list[str]] = {}  # what does not fit, and the names of which it is said
        self._sources: dict[str, str] = {}  # by the name of an entry, the key under which it is read

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Find, for all that this rank has, what the checkpoint has for it."""
        self._saved = {self._prefix + name: each for name, each in metadata.state_dict_metadata.items()}
        wanted: dict[str, Any] = {}
        for name in self.state.values:
            if name.startswith(("model.", "data.", "random.")):
                self._find(name, wanted)
        for name in self._of_optimizers():  # the problems of the model come first
            self._find(name, wanted)
        for alias, whose in self._tied.items():  # what was two parameters is read twice, to be compared
            name = f"model.{alias}"
            if name in self._saved and (name in self.state.values or alias in self.state.aliases):
                self._find(name, wanted)
                self._find(f"model.{whose}", wanted, name)
        super().set_up_planner(wanted, metadata, is_coordinator)

    def _find(self, name: str, wanted: dict[str, Any], like: str = "") -> None:
        if source := self._source(name):
            key = self._sources[name] = source.removeprefix(self._prefix)
            wanted.setdefault(key, self._room(like or name, self._saved[source]))

    def _source(self, name: str) -> str | None:
        """Return the name of an entry in the checkpoint, of which there may be a copy for each rank that had one."""
        if name not in self._saved and name not in self._about["copies"]:
            name = of_owner(name, self._aliases)
        source = self._copy(name) if name in self._about["copies"] else name
        if source in self._saved:
            return source
        kind = name.partition(".")[0]
        if kind in _ABSENT and not (self._prefix and name.endswith("_extra_state")):
            self._note(name, _ABSENT[kind].format(self._where))
        return None

    def _note(self, name: str, wrong: str) -> None:
        self._wrong.setdefault(wrong, []).append(shown(name))

    def _copy(self, name: str) -> str:
        """Return the copy of the ranks that this one stands for: with its coordinates on the axes that have the same size now."""
        by_rank: dict[int, int] = self._about["copies"][name]
        stood_for, mesh = set(by_rank), self.state.mesh
        if mesh is not None and self._about["layout"] is not None:
            sizes, offset = self._about["layout"]
            before, now = Layout(rank_offset=offset, **sizes), dict(mesh.layout.items())
            same = {axis: mesh.coords[axis] for axis, size in before.items() if now.get(axis) == size}
            stood_for &= {rank - offset for rank in before.where(**same)}
        copies = list(dict.fromkeys(by_rank[rank] for rank in sorted(stood_for)))
        known = len(copies) == 1 or (name.startswith("model.") and copies)
        return f"copy.{copies[0]:x}.{name}" if known else ""

    def _room(self, name: str, saved: Any) -> Any:
        """Return new memory for an entry, of the same shard as the parameter's; or say what does not fit."""
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return None
        shape, dtype = tuple(saved.size), saved.properties.dtype
        of_optimizer = name.startswith("optimizer.")
        key = f"model.{owner(name)}" if of_optimizer else of_owner(name, self.state.aliases)
        here: Any = self.state.values.get(key)
        fits = isinstance(here, Tensor) and tuple(here.shape) == shape
        if name.startswith("model.") and not name.endswith("_extra_state"):
            if not fits:
                self._note(name, f"of shape {tuple(here.shape)} here, and {shape} in {self._where}")
            elif here.dtype != dtype and not self._cast:
                how = "make the model so, or pass cast=True, which rounds"
                self._note(name, f"{here.dtype} here, and {dtype} in {self._where}; {how}")
        if fits:
            return torch.empty_like(here, dtype=dtype).detach()
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _of_optimizers(self) -> list[str]:
        """Return what the checkpoint has for the optimizers' parameters, and note why they cannot go on from it."""
        keys: dict[str, dict[str, None]] = {}  # by parameter, what an optimizer kept for it
        for each in map(shared_name, self._saved):
            if each.startswith("optimizer."):
                keys.setdefault(owner(each), {})[each.partition(":")[2]] = None
        found = []
        groups: dict[int, Any] = {}
        for name, (kinds, _, group) in self.state.options.items():
            before = self.options_of(name)
            if before is None:
                self._note(f"model.{name}", f"not optimized in {self._where}; load it without the optimizer")
            elif kinds[0] not in before[0] and before[0][0] not in kinds:
                how = f"optimized by {before[0][0]} in {self._where}, and by {kinds[0]} here"
                self._note(f"model.{name}", f"{how}; make that one, or load without the optimizer")
            elif groups.setdefault(group, before[1]) != before[1]:
                how = f"in a group of the optimizer with others, that had other options in {self._where}"
                self._note(f"model.{name}", f"{how}; group them as they were")
            source = name if name in keys else self._aliases.get(name, name)
            found += [f"optimizer.{name}:{key}" for key in keys.get(source, ())]
        return found

    def options_of(self, name: str) -> Any:
        """Return the kinds and options that the optimizer of a parameter had; None where it had none."""
        saved = self._about["options"]
        return saved.get(name) or saved.get(self._aliases.get(name, name))

    def create_local_plan(self) -> dcp.LoadPlan:
        """Say what is wanted, and what does not fit."""
        plan = dcp.LoadPlan([]) if self._wrong else super().create_local_plan()
        here = [*self.state.values, *(f"model.{alias}" for alias in self.state.aliases)]
        return replace(plan, planner_data=(_in_words(self._wrong), here))

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Raise the problems of all ranks, on the first, and name what is for none of them."""
        here = {name for plan in global_plan for name in plan.planner_data[1]}
        problems = by_ranks({rank: plan.planner_data[0] for rank, plan in enumerate(global_plan)})
        names = sorted(set(map(shared_name, self._saved)) - here)
        unused = [shown(name) for name in names if name.startswith("model.")]
        problems += _in_words({f"in {self._where}, and on no rank in the model": unused} if unused else {})
        if problems:
            raise CheckpointError(*problems)
        return [replace(plan, planner_data=None) for plan in global_plan]

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read one value that is no tensor; no code that a file names is run."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True, map_location="cpu")

    def refuse_untied(self) -> None:
        """Refuse what is one weight now, and was two with other values."""
        problems = []
        for alias, whose in self._tied.items():
            names = [name for name in (f"model.{whose}", f"model.{alias}") if name in self._sources]
            marks = [_numbers_of(self.state_dict[self._sources[name]]) for name in names]
            if any(not _same(mark, marks[0]) for mark in marks):
                problems.append(
                    f"{whose!r} and {alias!r} are tied here, and are two weights with other values in {self._where}; untie them, or "
                    "load another checkpoint"
                )
        if problems:
            raise CheckpointError(*problems)

    def put(self) -> None:
        """Give what was read to the model and all others."""
        found: dict[str, Any] = {}
        taken: set[str] = set()
        for name, key in self._sources.items():
            value = self.state_dict[key]
            found[name] = value.clone() if key in taken and isinstance(value, Tensor) else value
            taken.add(key)
        self.state.put(found, {name: self.options_of(name) for name in self.state.options})


def _in_words(wrong: Mapping[str, Iterable[str]]) -> list[str]:
    return [f"{listing(names)}: {how}" for how, names in wrong.items()]
