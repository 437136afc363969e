"""Loading: DCP's planner finds and checks the entries for the current layout."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from namedmesh.errors import CheckpointError
from namedmesh.layout import Layout
from namedmesh.training.checkpoint_formats import Checkpoint
from namedmesh.training.checkpoint_names import (
    GRADIENT,
    GROUPS,
    MISSING,
    Options,
    format_entry,
    format_problems,
    get_kind,
    is_valid_in,
    name_copy,
)
from namedmesh.training.checkpoint_ranks import group_by_rank
from namedmesh.training.checkpoint_state import State


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's load planner, which raises the problems of all ranks before anything is read.

    The tensors of the model, and those that the optimizers have already, are filled in place.

    Args:
        state: this rank's collected state.
        aliases: the aliases of parameters here, on any rank, and the names they are saved under.
        checkpoint: the checkpoint.
        cast: whether tensors may have another dtype here.
        strict: whether missing and unexpected names are problems.
        select: which parameters and buffers to load, by name; None for all.

    Attributes:
        missing_keys: the names in the model that are not loaded, on any rank. Known once the plan
            is finished, as the next two.
        unexpected_keys: the names in the checkpoint that no rank's model has.
        unused_optimizer_keys: the parameters whose saved optimizer state no rank's optimizer takes.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    unused_optimizer_keys: list[str]

    def __init__(
        self,
        state: State,
        aliases: Mapping[str, str],
        checkpoint: Checkpoint,
        *,
        cast: bool,
        strict: bool = True,
        select: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state = state
        self._metadata: dcp.Metadata = checkpoint.metadata
        self._checkpoint = checkpoint
        self._label = f"the checkpoint {checkpoint.path}"
        self._aliases = {**aliases, **checkpoint.aliases}
        self._tied = aliases
        self._cast = cast
        self._strict = strict
        self._select: Callable[[str], bool] = select or (lambda _: True)
        # The problems, and the names of the entries that have them.
        self._names_by_problem: dict[str, list[str]] = {}
        # The names in the model that are not loaded.
        self._missing: dict[str, None] = {}
        # The entry of the checkpoint that is read for each entry here.
        self._sources: dict[str, str] = {}
        # The memory that each entry is read into.
        self._targets: dict[str, Any] = {}
        # The parameter and the key of the entries of optimizers, in the checkpoint and here.
        self._owners: dict[str, tuple[str, str]] = {**checkpoint.owners, **state.owners}
        # The saved options of the parameters that are loaded, and of the groups here.
        self._options = Options({}, {})
        # For each group here, the groups that had its parameters in the checkpoint.
        self._groups: dict[int, set[int]] = {}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Find the checkpoint's entry for each entry of this rank, and record all problems.

        DCP calls it on every rank. Does not communicate.
        """
        self._metadata = metadata
        self.state_dict = self._targets
        for name in self.state.values:
            kind = get_kind(name)
            if kind == "model":
                self._find_model_entry(name)
            elif kind in {"data", "random"}:
                self._find(name)
        if self.state.optimizers:
            self._find_optimizer_entries()  # after the model, so that its problems come first

    def _find_model_entry(self, name: str) -> None:
        """Find the entry for an entry of the model, unless ``select`` or ``strict`` skips it."""
        key = name.removeprefix("model.")
        if self._select(key) and (self._strict or self._find_source(name)):
            self._find(name)
        else:
            self._missing[key] = None

    def _find(self, name: str, source: str = "") -> None:
        """Find the checkpoint's entry for a name and its target, or record it as missing.

        Args:
            name: the name here.
            source: the name to look for in the checkpoint; ``name`` if empty.
        """
        found = self._find_source(source or name)
        message = MISSING.get(get_kind(name))
        if found:
            self._sources[name] = found
            self._targets[name] = self._find_target(name, found, source or name)
        elif message and not (self._checkpoint.is_pretrained and name.endswith("_extra_state")):
            # Hugging Face's checkpoints have no extra states.
            self._add_problem(name, message.format(self._label))

    def _find_source(self, name: str) -> str:
        """Return the name of the entry that this rank loads; empty if there is none."""
        if not is_valid_in(self.state.mesh, name, self._checkpoint.layout):
            return ""
        entries, copies = self._checkpoint.entries, self._checkpoint.copies
        key = name.removeprefix("model.")
        if name not in entries and name.startswith("model.") and key in self._aliases:
            name = f"model.{self._aliases[key]}"
        source = self._find_copy(name) if name in copies else name
        return entries.get(source, "")

    def _add_problem(self, name: str, problem: str) -> None:
        """Record a problem of an entry. All problems are raised together."""
        self._names_by_problem.setdefault(problem, []).append(format_entry(name, self._owners))

    def _find_copy(self, name: str) -> str:
        """Return the name of this rank's copy of an entry that differed between ranks.

        A copy matches if the rank that saved it had this rank's coordinates on all axes whose size
        has not changed.

        Returns:
            The name of the copy; empty if no copy matches, or if it is the state of an optimizer
            for another shard than this rank's. If several copies match and differ, the copy of the
            lowest rank for buffers, and an empty string for all other entries.
        """
        by_rank = self._checkpoint.copies[name]
        ranks = set(by_rank)
        mesh = self.state.mesh
        if mesh is not None and self._checkpoint.layout is not None:
            sizes, offset = self._checkpoint.layout
            current = dict(mesh.layout.items())
            same = {axis: mesh.coords[axis] for axis in sizes if current.get(axis) == sizes[axis]}
            ranks &= {rank - offset for rank in Layout(rank_offset=offset, **sizes).where(**same)}
        copies = list(dict.fromkeys(by_rank[rank] for rank in sorted(ranks)))
        is_unique = len(copies) == 1 or (name.startswith("model.") and copies)
        if not is_unique or not self._has_saved_shard(name):
            return ""
        return name_copy(name, copies[0])

    def _has_saved_shard(self, name: str) -> bool:
        """Return whether the parameter of an optimizer's entry was saved in the same shards.

        True if a rank has saved exactly this rank's shard, and for entries of no parameter.
        """
        if name not in self._owners:
            return True
        param_name = self._owners[name][0]
        parameter: Any = self.state.params.get(param_name)
        saved = self._metadata.state_dict_metadata.get(self._find_source(f"model.{param_name}"))
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return False
        if not isinstance(parameter, DTensor):
            return len(saved.chunks) == 1
        (here,) = parameter.__create_chunk_list__()
        return here in saved.chunks or prod(here.sizes) == 0

    def _find_target(self, name: str, source: str, saved_name: str) -> Any:
        """Return the tensor to read an entry into, and record a wrong shape or dtype.

        Args:
            name: the name here.
            source: the entry that is read.
            saved_name: the name that the entry had when it was saved.

        Returns:
            The current tensor of that name, or a new one; None if the entry is not a tensor.
        """
        saved = self._metadata.state_dict_metadata[source]
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return None
        shape = tuple(saved.size)
        dtype = saved.properties.dtype
        here: Any = self.state.values.get(name)
        if name in self._owners:
            target = self._find_optimizer_target(name, shape, dtype, saved_name in self._checkpoint.local)
            is_current = isinstance(here, Tensor) and (type(here), here.dtype) == (type(target), dtype)
            if is_current and here.shape == target.shape and not name.startswith(GRADIENT):
                same_placements = getattr(here, "placements", None) == getattr(target, "placements", None)
                return here if same_placements else target
            return target
        fits = isinstance(here, Tensor) and tuple(here.shape) == shape
        if name.startswith("model.") and not name.endswith("_extra_state"):
            if not fits:
                self._add_problem(name, f"of shape {tuple(here.shape)} here, and {shape} in {self._label}")
            elif here.dtype != dtype and not self._cast:
                remedy = "convert the model to it, or pass cast=True, which rounds"
                self._add_problem(name, f"{here.dtype} here, and {dtype} in {self._label}; {remedy}")
        return here if fits else torch.empty(shape, dtype=dtype, device="cpu")

    def _find_optimizer_target(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, is_local: bool
    ) -> Tensor:
        """Return an uninitialized tensor to read an optimizer's entry into.

        It is a DTensor if the parameter is one, except for a value that was a plain tensor of a
        sharded parameter when it was saved.

        Args:
            name: the name here.
            shape: the shape in the checkpoint.
            dtype: the dtype in the checkpoint.
            is_local: whether it was a plain tensor of a sharded parameter.
        """
        param_name = self._owners[name][0]
        parameter: Any = self.state.params[param_name]
        is_elementwise = tuple(parameter.shape) == shape
        if is_elementwise and not is_local:
            return torch.empty_like(parameter, dtype=dtype).detach()
        if is_local or not shape or not isinstance(parameter, DTensor):
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self.state.is_plain_shard(param_name):
            # Attributes say how a parameter is sharded, but not a tensor of another shape.
            self._add_problem(name, MISSING["optimizer"].format(self._label))
        # The value is, for example, one moment for each row. Any placements would be correct, and
        # these need the least memory.
        placements: list[Placement] = [Replicate()] * parameter.device_mesh.ndim
        for mesh_dim, placement in enumerate(parameter.placements):
            if type(placement) is not Shard or placement.dim >= len(shape):
                continue
            if shape[placement.dim] == parameter.shape[placement.dim]:
                placements[mesh_dim] = placement
        where: dict[str, Any] = {"device_mesh": parameter.device_mesh, "placements": placements}
        return torch.distributed.tensor.empty(shape, dtype=dtype, **where)

    def _find_optimizer_entries(self) -> None:
        """Find the entries for the optimizers, and record why one cannot resume from them."""
        if not self._checkpoint.options.params and not self._checkpoint.is_own:
            self._names_by_problem["has no optimizer that namedmesh saved; load it without the optimizer"] = [
                self._label
            ]
            return
        entries: dict[str, dict[str, str]] = {}
        for entry, (param, key) in self._checkpoint.owners.items():
            entries.setdefault(param, {})[key] = entry
        saved_params = self._checkpoint.options.params
        options_of_groups: dict[int, Any] = {}
        for name, (class_names, group, _) in self.state.options.params.items():
            if name in self._missing:
                continue
            source = name if name in saved_params else self._aliases.get(name, name)
            if source not in saved_params:
                problem = f"not optimized in {self._label}; load it without the optimizer"
                self._add_problem(f"model.{name}", problem)
                continue
            saved_classes, saved_group, options = saved_params[source]
            if class_names[0] not in saved_classes and saved_classes[0] not in class_names:
                problem = f"optimized by {saved_classes[0]} in {self._label}, and by"
                remedy = "create the saved class, or load without the optimizer"
                self._add_problem(f"model.{name}", f"{problem} {class_names[0]} here; {remedy}")
            elif options_of_groups.setdefault(group, options) != options:
                problem = "in one group of the optimizer with parameters that had other options in"
                self._add_problem(f"model.{name}", f"{problem} {self._label}; group them as they were")
            self._options.params[name] = saved_params[source]
            self._options.groups[group] = options
            self._groups.setdefault(group, set()).add(saved_group)
            # The other end of a tied weight has its entries under the name of the first.
            shared = entries.get(self._aliases.get(source, source), {})
            own = entries.get(source, {})
            found = {key: entry for key, entry in shared.items() if not entry.startswith(GRADIENT)}
            for key, entry in {**found, **own}.items():
                here = f"{GRADIENT}{name}" if entry.startswith(GRADIENT) else f"optimizer.state.{name}.{key}"
                self._owners[here] = (name, key)
                self._find(here, entry)
        for position in range(len(self.state.optimizers)):
            saved = {
                at // GROUPS
                for group, found in self._groups.items()
                if group // GROUPS == position
                for at in found
            }
            self._find_optimizer_extras(position, saved or {position})

    def _find_optimizer_extras(self, position: int, saved_positions: set[int]) -> None:
        """Find the entry with the part of an optimizer's state that belongs to no parameter.

        Args:
            position: the position of the optimizer here.
            saved_positions: the positions of the optimizers that had its parameters in the
                checkpoint.
        """
        name = f"namedmesh.optimizers.{position}"
        sources = [f"namedmesh.optimizers.{saved}" for saved in sorted(saved_positions)]
        found = [source for source in sources if source in self._checkpoint.entries]
        if found and len(sources) == 1:
            self._find(name, found[0])
        elif found or name in self.state.values:
            # The state of several optimizers cannot be merged.
            self._add_problem(name, MISSING["optimizers"].format(self._label))

    def create_local_plan(self) -> dcp.LoadPlan:
        """Return this rank's reads, and its problems and names, which DCP sends to rank 0."""
        items = []
        if not self._names_by_problem:
            saved = self._metadata.state_dict_metadata
            entries = {name: saved[source] for name, source in self._sources.items()}
            named = replace(self._metadata, state_dict_metadata=entries)
            for item in create_default_local_load_plan(self._targets, named).items:
                source = self._sources[item.storage_index.fqn]
                if source != item.storage_index.fqn:
                    item = replace(item, storage_index=replace(item.storage_index, fqn=source))  # noqa: PLW2901
                items.append(item)
        names = [name for name in self.state.values if name.startswith("model.")]
        names += [f"model.{alias}" for alias in self.state.names.aliases]
        problems = format_problems(self._names_by_problem)
        optimized = list(self.state.options.params) if self.state.optimizers else None
        return dcp.LoadPlan(items, planner_data=(problems, names, self._missing, optimized, self._groups))

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Merge the problems and the names of all ranks. DCP calls it on rank 0.

        Raises:
            CheckpointError: a rank has a problem, or the checkpoint has names that no rank has. DCP
                raises the error of rank 0 on every rank.
        """
        known: set[str] = set()
        missing: dict[str, None] = {}
        by_rank: dict[int, list[str]] = {}
        optimized: set[str] = set()
        groups: dict[int, set[int]] = {}
        for rank, plan in enumerate(global_plan):
            by_rank[rank], names, missing_here, optimized_here, groups_here = plan.planner_data
            known.update(names)
            missing |= missing_here
            optimized.update(optimized_here or ())
            for group, saved in groups_here.items():
                groups.setdefault(group, set()).update(saved)
        problems = group_by_rank(by_rank)
        unexpected = []
        for name in sorted(self._checkpoint.entries.keys() - known):
            key = name.removeprefix("model.")
            is_alias = key in self._checkpoint.aliases
            if name.startswith("model.") and not is_alias and self._select(key):
                unexpected.append(key)
        unused = self._find_unused(optimized, known, missing) if self.state.optimizers else []
        if self._strict and unexpected:
            problem = f"in {self._label}, and on no rank in the model"
            problems += format_problems({problem: map(repr, unexpected)})
        if self._strict and unused:
            problem = (
                f"optimized in {self._label}, and by no optimizer here; give the optimizers that "
                "were saved, or pass strict=False to leave their state out"
            )
            problems += format_problems({problem: map(repr, unused)})
        if problems:
            raise CheckpointError(*problems)
        merged = (list(missing), unexpected, unused, groups)
        return [replace(plan, planner_data=merged) for plan in global_plan]

    def _find_unused(self, optimized: set[str], known: set[str], missing: Mapping[str, None]) -> list[str]:
        """Return the parameters whose saved state no optimizer takes, although they are loaded."""
        taken = set(optimized)
        for alias, name in self._aliases.items():
            if alias in optimized or name in optimized:
                taken.update((alias, name))
        with_state = {param for param, _ in self._checkpoint.owners.values()}
        unused = []
        for name in self._checkpoint.options.params.keys() & with_state:
            is_loaded = f"model.{name}" in known or f"model.{name}" not in self._checkpoint.entries
            if is_loaded and name not in taken and name not in missing and self._select(name):
                unused.append(name)
        return sorted(unused)

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Take the results of all ranks from the plan, as rank 0 has merged them."""
        self.missing_keys, self.unexpected_keys, self.unused_optimizer_keys, groups = new_plan.planner_data
        saved = self._checkpoint.options.groups
        for group in self.state.options.groups:
            if group in self._options.groups:
                continue
            # A group without parameters on this rank has the options of the group that has its
            # parameters on other ranks, or of the group at its position in the same optimizer.
            found = groups.get(group)
            if not found:
                number = group // GROUPS
                found = {
                    at // GROUPS * GROUPS + group % GROUPS
                    for here, to in groups.items()
                    if here // GROUPS == number
                    for at in to
                }
            options = saved.get(min(found or {group}))
            if options is not None and self.state.optimizers:
                self._options.groups[group] = options
        return new_plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read an object that is not a tensor, without running code that a file names."""
        loaded = torch.load(value, weights_only=True, map_location="cpu")
        self.state_dict[read_item.dest_index.fqn] = loaded

    def find_tied_pairs(self) -> list[tuple[str, str, Any]]:
        """Return the pairs of saved weights that are one parameter here.

        Returns:
            For each pair, the two entries in the checkpoint, and the parameter.
        """
        pairs = []
        for alias, name in self._tied.items():
            first, second = (self._checkpoint.entries.get(f"model.{key}") for key in (name, alias))
            param = self.state.params.get(alias, self.state.params.get(name))
            is_one = self._checkpoint.aliases.get(alias) == name
            if param is not None and first and second and not is_one and self._select(alias):
                pairs.append((first, second, param))
        return pairs

    def apply(self) -> None:
        """Give values that were not read in place to their owners."""
        self.state.apply(self.state_dict, self._owners, self._options)
