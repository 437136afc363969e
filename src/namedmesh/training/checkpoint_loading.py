"""The planner that loads: DCP's, with entries for the current layout, checked before reading."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from namedmesh.errors import CheckpointError
from namedmesh.fingerprints import fingerprint_sample
from namedmesh.layout import Layout
from namedmesh.training import seeds
from namedmesh.training.checkpoint_plans import Summary, format_problems, strip_copy_prefix
from namedmesh.training.checkpoint_ranks import group_by_rank
from namedmesh.training.checkpoint_state import (
    GROUPS,
    Options,
    State,
    canonical_name,
    display_name,
    group_by_parameter,
    make_entry_name,
    split_entry_name,
)

# The messages about entries that a checkpoint does not have for this rank, by the kind of the
# entry. Random states are not among them: without one, the generators stay as they are.
_ABSENT = {
    "model": "not in {}",
    "optimizer": "kept by the optimizer for the shard of one rank, and no rank has this shard now; "
    "load {} in its own layout, or without the optimizer",
    "optimizers": "what it keeps in addition to the state of its parameters is not in {}; make it "
    "from the same parameters, or load without it",
    "data": "no place in the data for this rank in {}, which has other data ranks; load it without "
    "data=, and skip the samples that were seen (a position that counts the samples of all ranks can "
    "be an extra value)",
}


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, which checks everything before it reads, into separate memory.

    Args:
        state: this rank's collected state.
        aliases: further names of parameters here, and the names that a checkpoint has them under.
        about: the manifest of the checkpoint.
        where: the path of the checkpoint, for messages.
        cast: whether tensors may have another dtype here.
        strict: whether missing and unexpected names of the model are problems.
        select: which parameters and buffers to load, by name; None for all.
    """

    missing_keys: list[str]
    """The names in the model that are not loaded, on any rank; known once the plan is finished."""
    unexpected_keys: list[str]
    """The names in the checkpoint that no rank's model has; known once the plan is finished."""

    def __init__(
        self,
        state: State,
        aliases: Mapping[str, str],
        about: dict[str, Any],
        where: Path,
        *,
        cast: bool,
        strict: bool = True,
        select: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state, self._about, self._where = state, about, f"the checkpoint {where}"
        self._tied, self._aliases = aliases, {**aliases, **about["aliases"]}
        self._cast, self._strict = cast, strict
        self._select: Callable[[str], bool] = select or (lambda _: True)
        # The names of Hugging Face's checkpoints do not have it.
        self._prefix = "model." if about["data"] is None else ""
        self._wrong: dict[str, list[str]] = {}  # problems, and the names that have them
        self._missing: dict[str, None] = {}  # names in the model that are not loaded
        # Names of entries here, and the entries of the checkpoint that are read for them.
        self._sources: dict[str, str] = {}
        self._rooms: dict[str, Any] = {}  # names of entries here, and the memory for them
        self._options: Options = {}  # those that were saved, of the loaded parameters

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Find the entries of the checkpoint for everything that this rank has."""
        saved = metadata.state_dict_metadata
        self._saved = {self._prefix + name: entry for name, entry in saved.items()}
        self._names = dict.fromkeys(map(strip_copy_prefix, self._saved))
        for name in self.state.values:
            if name.startswith("model."):
                self._find_in_model(name)
            elif name.startswith(("data.", "random.")):
                self._find(name)
        self._find_of_optimizers()  # after the model, so that its problems come first
        # One parameter here may be two in the checkpoint: both are read, and check_tied()
        # compares them.
        for alias, whose in self._tied.items():
            name = f"model.{alias}"
            is_here = name in self.state.values or alias in self.state.aliases
            is_saved = name in self._saved and self._source(f"model.{whose}")
            if is_here and is_saved and self._select(alias):
                self._find(name)
                self._find(f"model.{whose}", like=name)
        # Every name has separate memory, even if two are read from one entry: they may be sharded
        # differently.
        entries = {name: self._saved[source] for name, source in self._sources.items()}
        named = replace(metadata, state_dict_metadata=entries)
        super().set_up_planner(self._rooms, named, is_coordinator)

    def _find_in_model(self, name: str) -> None:
        key = name.removeprefix("model.")
        if self._select(key) and (self._strict or self._source(name)):
            self._find(name)
        else:
            self._missing[key] = None

    def _find(self, name: str, source: str = "", like: str = "") -> None:
        """Find the entry for a name, and make memory for it; note it if it is absent.

        Args:
            name: the name here.
            source: the name to look for in the checkpoint; the same if empty.
            like: the name here whose sharding the memory has; the same if empty.
        """
        found = self._source(source or name)
        absent = _ABSENT.get(name.partition(".")[0])
        if found:
            self._sources[name] = found
            self._rooms[name] = self._room(like or name, found)
        elif absent and not (self._prefix and name.endswith("_extra_state")):
            self._note(name, absent.format(self._where))

    def _source(self, name: str) -> str:
        """Return the name of the entry that is valid for this rank; empty if there is none."""
        if not self._is_valid_here(name):
            return ""
        if name not in self._saved and name not in self._about["copies"]:
            name = canonical_name(name, self._aliases)
        source = self._copy(name) if name in self._about["copies"] else name
        return source if source in self._saved else ""

    def _note(self, name: str, wrong: str) -> None:
        self._wrong.setdefault(wrong, []).append(display_name(name))

    def _is_valid_here(self, name: str) -> bool:
        """Return whether a random state, or a place in the data, is valid in the current layout.

        An entry that all ranks shared is not valid for all ranks of any other layout. With more
        ranks, random numbers would repeat. A sampler's position counts the samples of one rank.
        """
        kind, _, generator = name.partition(".")
        if kind not in {"random", "data"}:
            return True
        equal = seeds.axes_with_equal_state("data" if kind == "data" else generator)
        layout, mesh = self._about["layout"], self.state.mesh
        before = _without({} if layout is None else layout[0], equal)
        now = _without({} if mesh is None else dict(mesh.layout.items()), equal)
        if kind == "data":  # samplers know the number of data ranks, not their axes
            return prod(before.values()) == prod(now.values())
        return before == now

    def _copy(self, name: str) -> str:
        """Return the name of this rank's copy of an entry that ranks had different values of.

        It is the copy of the ranks that had this rank's coordinates on all axes whose size has not
        changed. If they had several, a buffer is that of the lowest rank, and others have none
        (empty). Neither has an optimizer's entry if it belongs to another shard than this rank's.
        """
        by_rank: dict[int, int] = self._about["copies"][name]
        ranks = set(by_rank)
        mesh = self.state.mesh
        if mesh is not None and self._about["layout"] is not None:
            sizes, offset = self._about["layout"]
            now = dict(mesh.layout.items())
            same = {axis: mesh.coords[axis] for axis in sizes if now.get(axis) == sizes[axis]}
            ranks &= {rank - offset for rank in Layout(rank_offset=offset, **sizes).where(**same)}
        copies = list(dict.fromkeys(by_rank[rank] for rank in sorted(ranks)))
        is_known = len(copies) == 1 or (name.startswith("model.") and copies)
        if not is_known or not self._has_saved_shard(name):
            return ""
        return f"copy.{copies[0]:x}.{name}"

    def _has_saved_shard(self, name: str) -> bool:
        """Return whether a rank had this shard of the parameter of an optimizer's entry.

        True for all other entries.
        """
        parameter = self.state.parameter_of(name)
        if parameter is None:
            return True
        saved = self._saved.get(self._source(f"model.{split_entry_name(name)[0]}"))
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return False
        if not isinstance(parameter, DTensor):
            return len(saved.chunks) == 1
        (here,) = parameter.__create_chunk_list__()
        return here in saved.chunks or prod(here.sizes) == 0

    def _room(self, name: str, source: str) -> Any:
        """Return uninitialized memory for an entry, sharded as it is here, and note problems."""
        saved = self._saved[source]
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return None
        shape, dtype = tuple(saved.size), saved.properties.dtype
        if name.startswith("optimizer."):
            return self._room_of_optimizer(name, strip_copy_prefix(source), shape, dtype)
        here: Any = self.state.values.get(canonical_name(name, self.state.aliases))
        fits = isinstance(here, Tensor) and tuple(here.shape) == shape
        if name.startswith("model.") and not name.endswith("_extra_state"):
            if not fits:
                self._note(name, f"of shape {tuple(here.shape)} here, and {shape} in {self._where}")
            elif here.dtype != dtype and not self._cast:
                how = "make the model so, or pass cast=True, which rounds"
                self._note(name, f"{here.dtype} here, and {dtype} in {self._where}; {how}")
        if not fits:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.empty_like(here, dtype=dtype).detach()

    def _room_of_optimizer(
        self,
        name: str,
        saved: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return uninitialized memory for an optimizer's entry.

        It is a DTensor if the parameter is one, unless it was a plain tensor of a sharded parameter
        before.
        """
        parameter: Any = self.state.parameter_of(name)
        is_elementwise = tuple(parameter.shape) == shape
        known = self._about.get("local")  # older checkpoints do not have it
        is_local = not is_elementwise if known is None else saved in known
        if is_elementwise and not is_local:
            return torch.empty_like(parameter, dtype=dtype).detach()
        if is_local or not shape or not isinstance(parameter, DTensor):
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self.state.is_plain_shard(name):  # which part of it belongs to a plain shard is unknown
            self._note(name, _ABSENT["optimizer"].format(self._where))
        # This is, for example, one moment for each row. All placements of a DTensor are right.
        placements: list[Placement] = [Replicate()] * parameter.device_mesh.ndim
        for mesh_dim, place in enumerate(parameter.placements):
            if type(place) is Shard and shape[place.dim :][:1] == parameter.shape[place.dim :][:1]:
                placements[mesh_dim] = place
        where: dict[str, Any] = {"device_mesh": parameter.device_mesh, "placements": placements}
        return torch.distributed.tensor.empty(shape, dtype=dtype, **where)

    def _find_of_optimizers(self) -> None:
        """Find the entries for the optimizers, and note why one cannot resume from them."""
        entries = group_by_parameter(self._names)
        options_of_groups: dict[int, Any] = {}
        positions: dict[int, set[int]] = {}  # of optimizers here, and of those that had their parameters
        for name, (kinds, _, group, _) in self.state.options.items():
            if name in self._missing:
                continue
            saved = self._about["options"]
            before = saved.get(name) or saved.get(self._aliases.get(name, name))
            if before is None:
                how = f"not optimized in {self._where}; load it without the optimizer"
                self._note(f"model.{name}", how)
                continue
            kinds_before, options, group_before = before[:3]
            if kinds[0] not in kinds_before and kinds_before[0] not in kinds:
                how = f"optimized by {kinds_before[0]} in {self._where}, and by {kinds[0]} here"
                self._note(f"model.{name}", f"{how}; make that one, or load without the optimizer")
            elif options_of_groups.setdefault(group, options) != options:
                how = "in a group of the optimizer with others, that had other options in"
                self._note(f"model.{name}", f"{how} {self._where}; group them as they were")
            # Older checkpoints do not have the options of all groups.
            self._options[name] = (*before, [])[:4]
            positions.setdefault(group // GROUPS, set()).add(group_before // GROUPS)
            source = name if name in entries else self._aliases.get(name, name)
            for key, entry in entries.get(source, {}).items():
                self._find(make_entry_name(name, key), entry)
        for position in range(len(self.state.optimizers)):
            self._find_own(position, positions.get(position, {position}))

    def _find_own(self, position: int, before: set[int]) -> None:
        """Find what an optimizer keeps in addition to the state of its parameters.

        Args:
            position: that of the optimizer here.
            before: the positions of the optimizers that had its parameters in the checkpoint.
        """
        name = f"optimizers.{position}"
        sources = [f"optimizers.{position}" for position in sorted(before)]
        found = [source for source in sources if source in self._names]
        if found and len(sources) == 1:
            self._find(name, found[0])
        elif found or name in self.state.values:
            self._note(name, _ABSENT["optimizers"].format(self._where))

    def create_local_plan(self) -> dcp.LoadPlan:
        """Return this rank's reads, its problems and the names in its model."""
        items = []
        if not self._wrong:
            for item in super().create_local_plan().items:
                source = self._sources[item.storage_index.fqn].removeprefix(self._prefix)
                items.append(replace(item, storage_index=replace(item.storage_index, fqn=source)))
        here = [*self.state.values, *(f"model.{alias}" for alias in self.state.aliases)]
        return dcp.LoadPlan(items, planner_data=(format_problems(self._wrong), here, self._missing))

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Raise the problems of all ranks: DCP calls it on the first, and all raise its error."""
        here: set[str] = set()
        missing: dict[str, None] = {}
        by_rank: dict[int, list[str]] = {}
        for rank, plan in enumerate(global_plan):
            by_rank[rank], names, missing_here = plan.planner_data
            here.update(names)
            missing |= missing_here
        problems = group_by_rank(by_rank)
        unexpected = []
        for name in sorted(self._names.keys() - here):
            key = name.removeprefix("model.")
            if name.startswith("model.") and self._select(key):
                unexpected.append(key)
        if unexpected and self._strict:
            how = f"in {self._where}, and on no rank in the model"
            problems += format_problems({how: map(repr, unexpected)})
        if problems:
            raise CheckpointError(*problems)
        return [replace(plan, planner_data=(list(missing), unexpected)) for plan in global_plan]

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Take the names that are not loaded from the first rank."""
        self.missing_keys, self.unexpected_keys = new_plan.planner_data
        return new_plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read one value that is not a tensor, without running code that a file names."""
        loaded = torch.load(value, weights_only=True, map_location="cpu")
        self.state_dict[read_item.dest_index.fqn] = loaded

    def check_tied(self) -> None:
        """Reject a checkpoint that has two different tensors for one tied parameter."""
        problems = []
        for alias, whose in self._tied.items():
            names = [name for name in (f"model.{whose}", f"model.{alias}") if name in self._sources]
            summaries = [Summary(fingerprint_sample(self.state_dict[name])) for name in names]
            if not all(summary.matches(summaries[0]) for summary in summaries):
                problems.append(
                    f"{whose!r} and {alias!r} are tied here, and are two weights with other values in "
                    f"{self._where}; untie them, or load another checkpoint"
                )
        if problems:
            raise CheckpointError(*problems)

    def apply(self) -> None:
        """Load the values into the model, the optimizers, the data loaders and the generators."""
        self.state.apply(self.state_dict, self._options)


def _without(sizes: Mapping[str, int], axes: Iterable[str]) -> dict[str, int]:
    """Return the sizes of axes with more than one rank, except for some axes."""
    return {axis: size for axis, size in sizes.items() if size > 1 and axis not in axes}
