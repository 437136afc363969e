"""DCP's load planner: finds and checks the saved entries for the current layout."""

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
    format_entry_name,
    group_by_parameter,
    make_entry_name,
    replace_alias,
    split_entry_name,
)

# The messages for entries that a checkpoint does not have for this rank, by the kind of the entry.
# Random states are not among them: without one, the generators keep their state.
_MISSING = {
    "model": "not in {}",
    "optimizer": "kept by the optimizer for the shard of one rank, and no rank has this shard now; load {} in its "
    "original layout, or without the optimizer",
    "optimizers": "its state in addition to the state of its parameters is not in {}; create it from the same "
    "parameters, or load without it",
    "data": "no state of the data loader for this rank in {}, which was saved with other data ranks; load it "
    "without data=, and skip the samples that were seen (a position that counts the samples of all ranks can be "
    "an extra value)",
}


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's load planner, which raises the problems of all ranks before anything is read.

    Tensors are read into separate memory, and :meth:`apply` copies them into the model afterwards.

    Args:
        state: this rank's collected state.
        aliases: the aliases of parameters here, on any rank, and the names they are saved under.
        manifest: the manifest of the checkpoint.
        path: the path of the checkpoint, for messages.
        cast: whether tensors may have another dtype here.
        strict: whether missing and unexpected names of the model are problems.
        select: which parameters and buffers to load, by name; None for all.

    Attributes:
        missing_keys: the names in the model that are not loaded, on any rank. Known once the plan
            is finished, as ``unexpected_keys``.
        unexpected_keys: the names in the checkpoint that no rank's model has.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]

    def __init__(
        self,
        state: State,
        aliases: Mapping[str, str],
        manifest: dict[str, Any],
        path: Path,
        *,
        cast: bool,
        strict: bool = True,
        select: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state = state
        self._manifest = manifest
        self._checkpoint = f"the checkpoint {path}"
        self._tied = aliases
        self._aliases = {**aliases, **manifest["aliases"]}
        self._cast = cast
        self._strict = strict
        self._select: Callable[[str], bool] = select or (lambda _: True)
        # Names in Hugging Face's checkpoints do not have this prefix.
        self._prefix = "model." if manifest["data"] is None else ""
        # The problems, and the names of the entries that have them.
        self._names_by_problem: dict[str, list[str]] = {}
        # The names in the model that are not loaded.
        self._missing: dict[str, None] = {}
        # The entry of the checkpoint that is read for each entry here.
        self._sources: dict[str, str] = {}
        # The memory that each entry is read into.
        self._targets: dict[str, Any] = {}
        # The saved options of the parameters that are loaded.
        self._options: Options = {}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Find the checkpoint's entry for each entry of this rank, and record all problems.

        DCP calls it on every rank. Does not communicate.
        """
        saved = metadata.state_dict_metadata
        self._saved = {self._prefix + name: entry for name, entry in saved.items()}
        self._names = dict.fromkeys(map(strip_copy_prefix, self._saved))
        for name in self.state.values:
            if name.startswith("model."):
                self._find_model_entry(name)
            elif name.startswith(("data.", "random.")):
                self._find(name)
        self._find_optimizer_entries()  # after the model, so that its problems come first
        # One parameter here may be two in the checkpoint: both are read, and check_tied_equal()
        # compares them.
        for alias, tied_to in self._tied.items():
            name = f"model.{alias}"
            is_here = name in self.state.values or alias in self.state.aliases
            is_saved = name in self._saved and self._find_source(f"model.{tied_to}")
            if is_here and is_saved and self._select(alias):
                self._find(name)
                self._find(f"model.{tied_to}", like=name)
        # Every name has separate memory, even if two are read from one entry: they may be sharded
        # differently.
        entries = {name: self._saved[source] for name, source in self._sources.items()}
        named = replace(metadata, state_dict_metadata=entries)
        super().set_up_planner(self._targets, named, is_coordinator)

    def _find_model_entry(self, name: str) -> None:
        """Find the entry for an entry of the model, unless ``select`` or ``strict`` skips it."""
        key = name.removeprefix("model.")
        if self._select(key) and (self._strict or self._find_source(name)):
            self._find(name)
        else:
            self._missing[key] = None

    def _find(self, name: str, source: str = "", like: str = "") -> None:
        """Find the checkpoint's entry for a name and allocate its target, or record it as missing.

        Args:
            name: the name here.
            source: the name to look for in the checkpoint; ``name`` if empty.
            like: the name here whose sharding the memory has; ``name`` if empty.
        """
        found = self._find_source(source or name)
        message = _MISSING.get(name.partition(".")[0])
        if found:
            self._sources[name] = found
            self._targets[name] = self._allocate(like or name, found)
        elif message and not (self._prefix and name.endswith("_extra_state")):
            # Hugging Face's checkpoints have no extra states.
            self._add_problem(name, message.format(self._checkpoint))

    def _find_source(self, name: str) -> str:
        """Return the name of the entry that this rank loads; empty if there is none."""
        if not self._is_valid_here(name):
            return ""
        if name not in self._saved and name not in self._manifest["copies"]:
            name = replace_alias(name, self._aliases)
        source = self._find_copy(name) if name in self._manifest["copies"] else name
        return source if source in self._saved else ""

    def _add_problem(self, name: str, problem: str) -> None:
        """Record a problem of an entry. All problems are raised together."""
        self._names_by_problem.setdefault(problem, []).append(format_entry_name(name))

    def _is_valid_here(self, name: str) -> bool:
        """Return whether the layout allows to load an RNG state or a data loader's state.

        Other entries can be loaded in any layout. These two cannot, even if all ranks had the same
        state: with more ranks, random values would repeat, and the position of a sampler counts the
        samples of one rank.
        """
        kind, _, generator = name.partition(".")
        if kind not in {"random", "data"}:
            return True
        equal = seeds.find_axes_with_equal_state("data" if kind == "data" else generator)
        layout = self._manifest["layout"]
        mesh = self.state.mesh
        before = _drop_axes({} if layout is None else layout[0], equal)
        now = _drop_axes({} if mesh is None else dict(mesh.layout.items()), equal)
        if kind == "data":  # samplers know the number of data ranks, not their axes
            return prod(before.values()) == prod(now.values())
        return before == now

    def _find_copy(self, name: str) -> str:
        """Return the name of this rank's copy of an entry that differed between ranks.

        A copy matches if the rank that saved it had this rank's coordinates on all axes whose size
        has not changed.

        Returns:
            The name of the copy; empty if no copy matches, or if it is the state of an optimizer
            for another shard than this rank's. If several copies match and differ, the copy of the
            lowest rank for buffers, and an empty string for all other entries.
        """
        by_rank: dict[int, int] = self._manifest["copies"][name]
        ranks = set(by_rank)
        mesh = self.state.mesh
        if mesh is not None and self._manifest["layout"] is not None:
            sizes, offset = self._manifest["layout"]
            current = dict(mesh.layout.items())
            same = {axis: mesh.coords[axis] for axis in sizes if current.get(axis) == sizes[axis]}
            ranks &= {rank - offset for rank in Layout(rank_offset=offset, **sizes).where(**same)}
        copies = list(dict.fromkeys(by_rank[rank] for rank in sorted(ranks)))
        is_unique = len(copies) == 1 or (name.startswith("model.") and copies)
        if not is_unique or not self._has_saved_shard(name):
            return ""
        return f"copy.{copies[0]:x}.{name}"

    def _has_saved_shard(self, name: str) -> bool:
        """Return whether the parameter of an optimizer's entry was saved in the same shards.

        True if a rank has saved exactly this rank's shard, and for entries of no parameter.
        """
        parameter = self.state.find_parameter(name)
        if parameter is None:
            return True
        saved = self._saved.get(self._find_source(f"model.{split_entry_name(name)[0]}"))
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return False
        if not isinstance(parameter, DTensor):
            return len(saved.chunks) == 1
        (here,) = parameter.__create_chunk_list__()
        return here in saved.chunks or prod(here.sizes) == 0

    def _allocate(self, name: str, source: str) -> Any:
        """Return an uninitialized tensor to read an entry into, and record a wrong shape or dtype.

        It is sharded as the current tensor of that name; None if the entry is not a tensor.

        Args:
            name: the name here.
            source: the entry of the checkpoint.
        """
        saved = self._saved[source]
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return None
        shape = tuple(saved.size)
        dtype = saved.properties.dtype
        if name.startswith("optimizer."):
            return self._allocate_for_optimizer(name, strip_copy_prefix(source), shape, dtype)
        here: Any = self.state.values.get(replace_alias(name, self.state.aliases))
        fits = isinstance(here, Tensor) and tuple(here.shape) == shape
        if name.startswith("model.") and not name.endswith("_extra_state"):
            if not fits:
                self._add_problem(
                    name, f"of shape {tuple(here.shape)} here, and {shape} in {self._checkpoint}"
                )
            elif here.dtype != dtype and not self._cast:
                remedy = "convert the model to it, or pass cast=True, which rounds"
                self._add_problem(name, f"{here.dtype} here, and {dtype} in {self._checkpoint}; {remedy}")
        if not fits:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.empty_like(here, dtype=dtype).detach()

    def _allocate_for_optimizer(
        self, name: str, saved: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return an uninitialized tensor to read an optimizer's entry into.

        It is a DTensor if the parameter is one, except for a value that was a plain tensor of a
        sharded parameter when it was saved.

        Args:
            name: the name here.
            saved: the name in the checkpoint, without the prefix of a copy.
            shape: the shape in the checkpoint.
            dtype: the dtype in the checkpoint.
        """
        parameter: Any = self.state.find_parameter(name)
        is_elementwise = tuple(parameter.shape) == shape
        known = self._manifest.get("local")  # older checkpoints do not have it
        is_local = not is_elementwise if known is None else saved in known
        if is_elementwise and not is_local:
            return torch.empty_like(parameter, dtype=dtype).detach()
        if is_local or not shape or not isinstance(parameter, DTensor):
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self.state.is_plain_shard(name):
            # Attributes say how a parameter is sharded, but not a tensor of another shape.
            self._add_problem(name, _MISSING["optimizer"].format(self._checkpoint))
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
        entries = group_by_parameter(self._names)
        saved = self._manifest["options"]
        options_of_groups: dict[int, Any] = {}
        # For each optimizer here, the positions of the optimizers that had its parameters.
        positions: dict[int, set[int]] = {}
        for name, (class_names, _, group, _) in self.state.options.items():
            if name in self._missing:
                continue
            before = saved.get(name) or saved.get(self._aliases.get(name, name))
            if before is None:
                problem = f"not optimized in {self._checkpoint}; load it without the optimizer"
                self._add_problem(f"model.{name}", problem)
                continue
            saved_classes, options, saved_group = before[:3]
            if class_names[0] not in saved_classes and saved_classes[0] not in class_names:
                problem = f"optimized by {saved_classes[0]} in {self._checkpoint}, and by"
                remedy = "create the saved class, or load without the optimizer"
                self._add_problem(f"model.{name}", f"{problem} {class_names[0]} here; {remedy}")
            elif options_of_groups.setdefault(group, options) != options:
                problem = "in one group of the optimizer with parameters that had other options in"
                self._add_problem(f"model.{name}", f"{problem} {self._checkpoint}; group them as they were")
            # Older checkpoints do not have the options of all groups.
            self._options[name] = (*before, [])[:4]
            positions.setdefault(group // GROUPS, set()).add(saved_group // GROUPS)
            source = name if name in entries else self._aliases.get(name, name)
            for key, entry in entries.get(source, {}).items():
                self._find(make_entry_name(name, key), entry)
        for position in range(len(self.state.optimizers)):
            self._find_optimizer_extras(position, positions.get(position, {position}))

    def _find_optimizer_extras(self, position: int, saved_positions: set[int]) -> None:
        """Find the entry with the part of an optimizer's state that belongs to no parameter.

        Args:
            position: the position of the optimizer here.
            saved_positions: the positions of the optimizers that had its parameters in the
                checkpoint.
        """
        name = f"optimizers.{position}"
        sources = [f"optimizers.{saved}" for saved in sorted(saved_positions)]
        found = [source for source in sources if source in self._names]
        if found and len(sources) == 1:
            self._find(name, found[0])
        elif found or name in self.state.values:
            # The state of several optimizers cannot be merged.
            self._add_problem(name, _MISSING["optimizers"].format(self._checkpoint))

    def create_local_plan(self) -> dcp.LoadPlan:
        """Return this rank's reads, and its problems and names, which DCP sends to rank 0."""
        items = []
        if not self._names_by_problem:
            for item in super().create_local_plan().items:
                source = self._sources[item.storage_index.fqn].removeprefix(self._prefix)
                items.append(replace(item, storage_index=replace(item.storage_index, fqn=source)))
        names = [*self.state.values, *(f"model.{alias}" for alias in self.state.aliases)]
        problems = format_problems(self._names_by_problem)
        return dcp.LoadPlan(items, planner_data=(problems, names, self._missing))

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Merge the problems and the names of all ranks. DCP calls it on rank 0.

        Raises:
            CheckpointError: a rank has a problem, or the checkpoint has names that no rank has. DCP
                raises the error of rank 0 on every rank.
        """
        known: set[str] = set()
        missing: dict[str, None] = {}
        by_rank: dict[int, list[str]] = {}
        for rank, plan in enumerate(global_plan):
            by_rank[rank], names, missing_here = plan.planner_data
            known.update(names)
            missing |= missing_here
        problems = group_by_rank(by_rank)
        unexpected = []
        for name in sorted(self._names.keys() - known):
            key = name.removeprefix("model.")
            if name.startswith("model.") and self._select(key):
                unexpected.append(key)
        if unexpected and self._strict:
            problem = f"in {self._checkpoint}, and on no rank in the model"
            problems += format_problems({problem: map(repr, unexpected)})
        if problems:
            raise CheckpointError(*problems)
        return [replace(plan, planner_data=(list(missing), unexpected)) for plan in global_plan]

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Set ``missing_keys`` and ``unexpected_keys`` from the plan, as rank 0 has merged them."""
        self.missing_keys, self.unexpected_keys = new_plan.planner_data
        return new_plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read an object that is not a tensor, without running code that a file names."""
        loaded = torch.load(value, weights_only=True, map_location="cpu")
        self.state_dict[read_item.dest_index.fqn] = loaded

    def check_tied_equal(self) -> None:
        """Check that the two saved tensors of a parameter that is tied now are equal. Local.

        Raises:
            CheckpointError: the two tensors differ.
        """
        problems = []
        for alias, tied_to in self._tied.items():
            first, second = f"model.{tied_to}", f"model.{alias}"
            if first not in self._sources or second not in self._sources:
                continue  # the checkpoint has one entry for both, or they are not loaded
            summary = Summary(fingerprint_sample(self.state_dict[first]))
            if not summary.matches(Summary(fingerprint_sample(self.state_dict[second]))):
                problem = f"{tied_to!r} and {alias!r} are tied here, and are two different weights in"
                problems.append(f"{problem} {self._checkpoint}; untie them, or load another checkpoint")
        if problems:
            raise CheckpointError(*problems)

    def apply(self) -> None:
        """Copy the read entries into the model, optimizers, data loaders and generators. Local."""
        self.state.apply(self.state_dict, self._options)


def _drop_axes(sizes: Mapping[str, int], axes: Iterable[str]) -> dict[str, int]:
    """Return ``sizes`` without ``axes`` and without axes of size 1."""
    return {axis: size for axis, size in sizes.items() if size > 1 and axis not in axes}
