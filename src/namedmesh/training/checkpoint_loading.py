"""Loading: which entry of a checkpoint goes where on this rank, in the current layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._errors import CheckpointError
from namedmesh._sharding import to_local
from namedmesh.layout import Layout
from namedmesh.training import seeds
from namedmesh.training.checkpoint_formats import Checkpoint
from namedmesh.training.checkpoint_names import (
    GRADIENT,
    GROUPS,
    MISSING,
    Names,
    format_entry,
    format_problems,
    get_kind,
    name_copy,
)
from namedmesh.training.checkpoint_ranks import group_by_rank
from namedmesh.training.checkpoint_state import State
from namedmesh.training.checkpoint_storage import Progress
from namedmesh.training.data import find_ranks_with_same_samples


class LoadResult(dict[str, Any]):
    """The extra values of a checkpoint, and the names that were not loaded.

    Attributes:
        missing_keys: parameters and buffers of the model, on any rank, that keep their values.
        unexpected_keys: parameters and buffers that only the checkpoint has.
        unused_optimizer_keys: parameters whose saved optimizer state no optimizer took.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    unused_optimizer_keys: list[str]


class Matching:
    """The entry of a checkpoint for each entry of this rank, and all problems with them.

    The tensors of the model, and those that the optimizers have already, are filled in place.

    Args:
        state: this rank's collected state.
        here: the names of all ranks.
        checkpoint: the checkpoint.
        cast: whether tensors may have another dtype here.
        strict: whether missing and unexpected names are problems.
        select: which parameters and buffers to load, by name; None for all.

    Attributes:
        loaded: the extra values of the checkpoint, and the names that are not loaded on any rank.
    """

    def __init__(
        self,
        state: State,
        here: Names,
        checkpoint: Checkpoint,
        *,
        cast: bool,
        strict: bool = True,
        select: Callable[[str], bool] | None = None,
    ) -> None:
        self.loaded: LoadResult = LoadResult(checkpoint.extra)
        # For each entry here, the entry of the checkpoint, and the tensor that it is read into.
        self._sources: dict[str, str] = {}
        self._targets: dict[str, Any] = {}
        self._plan = dcp.LoadPlan([])
        self._state = state
        self._here = here
        self._checkpoint = checkpoint
        self._saved = checkpoint.names
        self._label = f"the checkpoint {checkpoint.path}"
        self._cast = cast
        self._strict = strict
        self._select: Callable[[str], bool] = select or (lambda _: True)
        # The parameter and the key of the entries of optimizers, in the checkpoint and here.
        self._owners: dict[str, tuple[str, str]] = {**checkpoint.owners, **state.owners}
        # The problems, and the names of the entries that have them.
        self._names_by_problem: dict[str, list[str]] = {}
        # The entries of the model, and the optimizer's entries of each parameter by key.
        self._entries = dict(checkpoint.entries)
        self._entries_of: dict[str, dict[str, str]] = {}
        for entry, (param, key) in checkpoint.owners.items():
            self._entries_of.setdefault(param, {})[key] = entry
        # The saved groups of each group that has parameters on any rank, and the options to load.
        self._groups: dict[int, list[int]] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._missing: dict[str, None] = {}  # the names in the model that are not loaded

    def _compare_names(self) -> None:
        """Find the names that only the model or only the checkpoint has, and the groups."""
        here = self._here
        unused = self._share_entries(self._saved.params.keys() & self._entries_of.keys())
        for key in here.model:
            if not (self._select(key) and (self._strict or f"model.{key}" in self._entries)):
                self._missing[key] = None
        known = here.model.keys() | here.aliases.keys() | self._saved.aliases.keys()
        self.loaded.missing_keys = list(self._missing)
        self.loaded.unexpected_keys = []
        for name in sorted(self._checkpoint.entries):
            key = name.removeprefix("model.")
            if key != name and key not in known and self._select(key):
                self.loaded.unexpected_keys.append(key)
        unused -= {*self._missing, *self.loaded.unexpected_keys}
        self.loaded.unused_optimizer_keys = []
        if self._state.optimizers:
            self.loaded.unused_optimizer_keys = sorted(filter(self._select, unused))
        for name, group in here.params.items():
            if name in self._saved.params and name not in self._missing:
                self._groups.setdefault(group, []).append(self._saved.params[name])

    def _share_entries(self, with_state: set[str]) -> set[str]:
        """Let all names of a parameter, here or in the checkpoint, have the same entries.

        Args:
            with_state: the parameters that have optimizer state in the checkpoint.

        Returns:
            Those that no optimizer here has under any name.
        """
        unused = with_state - self._here.params.keys()
        params = self._saved.params
        for pair in {**self._here.aliases, **self._saved.aliases}.items():
            if not self._here.params.keys().isdisjoint(pair):
                unused.difference_update(pair)
            for name, other in (pair, pair[::-1]):
                if f"model.{other}" in self._entries:
                    self._entries.setdefault(f"model.{name}", self._entries[f"model.{other}"])
                if other in params:
                    params.setdefault(name, params[other])
                for key, entry in self._entries_of.get(other, {}).items():
                    # Each end of a tied weight has a gradient of its own until they are summed.
                    if key != "gradient":
                        self._entries_of.setdefault(name, {}).setdefault(key, entry)
        return unused

    def find_problems(self) -> list[str]:
        """Match the entries of this rank, and return the problems. Does not communicate."""
        self._compare_names()
        for name in self._state.values:
            is_missing = name.removeprefix("model.") in self._missing
            if get_kind(name) in {"model", "data", "random"} and not is_missing:
                self._find(name, name)
        if self._state.optimizers:
            self._find_optimizer_entries()
        return format_problems(self._names_by_problem)

    def raise_problems(self, problems_by_rank: Sequence[Iterable[str]]) -> None:
        """Raise the problems of all ranks. Called on rank 0, whose error all ranks raise.

        Args:
            problems_by_rank: the result of :meth:`find_problems` on each rank.

        Raises:
            CheckpointError: there are any.
        """
        problems = group_by_rank(dict(enumerate(problems_by_rank)))
        names_by_problem = {
            f"in {self._label}, and on no rank in the model": self.loaded.unexpected_keys,
            f"optimized in {self._label}, and by no optimizer here; give the optimizers that were "
            "saved, or pass strict=False to leave their state out": self.loaded.unused_optimizer_keys,
        }
        for problem, names in names_by_problem.items():
            if self._strict and names:
                problems += format_problems({problem: map(repr, names)})
        if problems:
            raise CheckpointError(*problems)

    # --- the model, data loaders and random states ---

    def _find(self, name: str, saved_name: str) -> None:
        """Find the entry for a name and its target, or record it as missing.

        Args:
            name: the name here.
            saved_name: the name to look for in the checkpoint.
        """
        source = self._entries.get(self._find_copy(saved_name)) if self._is_valid(saved_name) else None
        message = MISSING.get(get_kind(name))
        if source is not None:
            self._sources[name] = source
            self._targets[name] = self._find_target(name, saved_name)
        elif message and not (self._checkpoint.is_pretrained and name.endswith("_extra_state")):
            # Hugging Face's checkpoints have no extra states.
            self._add_problem(name, message.format(self._label))

    def _add_problem(self, name: str, problem: str) -> None:
        """Record a problem of an entry. All problems are raised together."""
        self._names_by_problem.setdefault(problem, []).append(format_entry(name, self._owners))

    def _find_copy(self, name: str) -> str:
        """Return the name of this rank's copy of an entry, if it differed between ranks.

        A copy matches if the rank that saved it had this rank's coordinates on all axes whose size
        has not changed.

        Returns:
            The name of the copy; empty if no copy matches, or if it is the state of an optimizer
            for another shard than this rank's. If several copies match and differ, the copy of the
            lowest rank for buffers, and an empty string for all other entries.
        """
        by_rank = self._checkpoint.copies.get(name)
        if by_rank is None:
            return name
        ranks = set(by_rank)
        mesh = self._state.mesh
        if mesh is not None and self._checkpoint.layout is not None:
            sizes, offset = self._checkpoint.layout
            current = dict(mesh.layout.items())
            saved = Layout(rank_offset=offset, **sizes)
            same = {axis: mesh.coords[axis] for axis in sizes if current.get(axis) == sizes[axis]}
            matching = {*saved.where(**same)}
            if get_kind(name) == "data":  # _is_valid() has compared the numbers of data ranks
                matching = find_ranks_with_same_samples(saved, mesh)
            ranks &= {rank - offset for rank in matching}
        copies = list(dict.fromkeys(by_rank[rank] for rank in sorted(ranks)))
        is_clear = len(copies) == 1 or (name.startswith("model.") and copies)
        return name_copy(name, copies[0]) if is_clear and self._has_saved_shard(name) else ""

    def _has_saved_shard(self, name: str) -> bool:
        """Return whether the parameter of an optimizer's entry was saved in the same shards.

        True if a rank has saved exactly this rank's shard, and for entries of no parameter.
        """
        if name not in self._owners:
            return True
        param_name = self._owners[name][0]
        saved = self._checkpoint.metadata.state_dict_metadata.get(
            self._entries.get(f"model.{param_name}", "")
        )
        param: Any = self._state.params.get(param_name)
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return False
        if not isinstance(param, DTensor):
            return len(saved.chunks) == 1
        (chunk,) = param.__create_chunk_list__()
        return chunk in saved.chunks or prod(chunk.sizes) == 0

    def _is_valid(self, name: str) -> bool:
        """Return whether the layouts allow to load an RNG state or a data loader's state.

        Other entries can be loaded in any layout. These two cannot, even if all ranks had the same
        state: with more ranks, random values would repeat, and the position of a sampler counts the
        samples of one rank.

        Args:
            name: the name of the entry.
        """
        kind = get_kind(name)
        if kind not in {"random", "data"}:
            return True
        generator = "data" if kind == "data" else name.removeprefix("namedmesh.random.")
        equal = seeds.find_axes_with_equal_state(generator)
        mesh, layout = self._state.mesh, self._checkpoint.layout
        before: Mapping[str, int] = {} if layout is None else layout[0]
        now: Mapping[str, int] = {} if mesh is None else dict(mesh.layout.items())
        sizes = [(before.get(axis, 1), now.get(axis, 1)) for axis in {*before, *now} - set(equal)]
        if kind == "data":  # samplers know the number of data ranks, not their axes
            return prod(size for size, _ in sizes) == prod(size for _, size in sizes)
        return all(size == current for size, current in sizes)

    # --- the tensors to read into ---

    def _find_target(self, name: str, saved_name: str) -> Any:
        """Return the tensor to read an entry into, and record a wrong shape or dtype.

        Args:
            name: the name here.
            saved_name: the name that the entry had when it was saved.

        Returns:
            The current tensor of that name, or a new one; None if the entry is not a tensor.
        """
        saved = self._checkpoint.metadata.state_dict_metadata[self._sources[name]]
        if not isinstance(saved, dcp.TensorStorageMetadata):
            return None
        shape, dtype = tuple(saved.size), saved.properties.dtype
        here: Any = self._state.values.get(name)
        if name in self._owners:
            param_name, key = self._owners[name]
            saved_param: Any = self._checkpoint.metadata.state_dict_metadata.get(
                self._entries.get(f"model.{param_name}", "")
            )
            if key != "step" and saved_param is not None and saved_param.properties.dtype == dtype:
                # torch keeps this state in the dtype of the parameter, which may be cast.
                dtype = self._state.params[param_name].dtype
            target = self._make_optimizer_target(name, shape, dtype, saved_name in self._saved.local)
            is_current = isinstance(here, Tensor) and not name.startswith(GRADIENT)
            return here if is_current and _describe(here) == _describe(target) else target
        fits = isinstance(here, Tensor) and tuple(here.shape) == shape
        if name.startswith("model.") and not name.endswith("_extra_state"):
            if not fits:
                self._add_problem(name, f"of shape {tuple(here.shape)} here, and {shape} in {self._label}")
            elif here.dtype != dtype and not self._cast:
                remedy = "convert the model to it, or pass cast=True, which rounds"
                self._add_problem(name, f"{here.dtype} here, and {dtype} in {self._label}; {remedy}")
        return here if fits else torch.empty(shape, dtype=dtype, device="cpu")

    def _make_optimizer_target(
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
        param: Any = self._state.params[param_name]
        if tuple(param.shape) == shape and not is_local:
            return torch.empty_like(param, dtype=dtype).detach()
        if is_local or not shape or not isinstance(param, DTensor):
            return torch.empty(shape, dtype=dtype, device="cpu")
        if param_name in self._state.plain_shards:
            # Attributes say how a parameter is sharded, but not a tensor of another shape.
            self._add_problem(name, MISSING["optimizer"].format(self._label))
        # The value is, for example, one moment for each row. Any placements would be correct.
        placements = [Replicate()] * param.device_mesh.ndim
        return torch.distributed.tensor.empty(
            shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements
        )

    # --- optimizers ---

    def _find_optimizer_entries(self) -> None:
        """Find the entries for the optimizers, and record why one cannot resume from them."""
        if not self._saved.params:
            problem = "has no optimizer that namedmesh saved; load it without the optimizer"
            self._names_by_problem[problem] = [self._label]
            return
        for name, group in self._state.names.params.items():
            if name in self._missing:
                continue
            if name not in self._saved.params:
                if self._strict:
                    remedy = "load it without the optimizer, or pass strict=False to keep its state"
                    self._add_problem(f"model.{name}", f"not optimized in {self._label}; {remedy}")
                continue
            self._check_options(name, group)
            for key, entry in self._entries_of.get(name, {}).items():
                here = f"{GRADIENT}{name}" if entry.startswith(GRADIENT) else f"optimizer.state.{name}.{key}"
                self._owners[here] = (name, key)
                self._find(here, entry)
        for number in range(len(self._state.optimizers)):
            self._find_optimizer(number)

    def _check_options(self, name: str, group: int) -> None:
        """Record if a parameter had an optimizer of another class, or other options."""
        classes, options = self._saved.groups[self._saved.params[name]]
        own_classes, _ = self._state.names.groups[group]
        if own_classes[0] not in classes and classes[0] not in own_classes:
            problem = f"optimized by {classes[0]} in {self._label}, and by {own_classes[0]} here"
            remedy = "create the saved class, or load without the optimizer"
            self._add_problem(f"model.{name}", f"{problem}; {remedy}")
        elif self._saved.groups[self._groups[group][0]][1] != options:
            problem = "in one group of the optimizer with parameters that had other options in"
            self._add_problem(f"model.{name}", f"{problem} {self._label}; group them as they were")

    def _find_optimizer(self, number: int) -> None:
        """Find the options of an optimizer, and its state that belongs to no parameter.

        Args:
            number: the position of the optimizer here.
        """
        saved_numbers: set[int] = set()
        for group, saved_groups in self._groups.items():
            if group // GROUPS == number:
                saved_numbers.update(saved // GROUPS for saved in saved_groups)
        numbers = sorted(saved_numbers or {number})
        for group in self._state.names.groups:
            if group // GROUPS == number:
                # A group without parameters has the options of the group at its position.
                saved_group = self._groups.get(group, [numbers[0] * GROUPS + group % GROUPS])[0]
                _, self._options[group] = self._saved.groups.get(saved_group, ([], {}))
        name = f"namedmesh.optimizers.{number}"
        sources = [f"namedmesh.optimizers.{saved}" for saved in numbers]
        if len(sources) == 1 and sources[0] in self._entries:
            self._find(name, sources[0])
        elif name in self._state.values or not self._entries.keys().isdisjoint(sources):
            # The state of several optimizers cannot be merged.
            self._add_problem(name, MISSING["optimizers"].format(self._label))

    def check(self, progress: Progress) -> None:
        """Check all bytes that this rank will read, and that tied weights are equal.

        Args:
            progress: counts the bytes.

        Raises:
            CorruptedError: a file is missing, or failed its checksum.
            CheckpointError: two weights that are tied here differ, or an object is not plain data.
        """
        self._plan = self._checkpoint.plan_reads(self._targets, self._sources)
        self._checkpoint.check(self._plan, progress)
        # Objects that cannot be read stop the load here, before a tensor of the model is changed.
        objects = [item for item in self._plan.items if item.type == LoadItemType.BYTE_IO]
        self._checkpoint.read(dcp.LoadPlan(objects), self._targets)
        problems = []
        entries = self._checkpoint.entries
        for alias, name in self._here.aliases.items():
            param = self._state.params.get(alias, self._state.params.get(name))
            sources = {key: entries.get(f"model.{key}", "") for key in (name, alias)}
            is_one = self._saved.aliases.get(alias) == name
            if param is None or is_one or not all(sources.values()) or not self._select(alias):
                continue
            saved: Any = self._checkpoint.metadata.state_dict_metadata[sources[name]]
            both = {key: torch.empty_like(param, dtype=saved.properties.dtype) for key in sources}
            plan = self._checkpoint.plan_reads(both, sources)
            self._checkpoint.check(plan, progress)
            self._checkpoint.read(plan, both)
            if not torch.equal(to_local(both[name]), to_local(both[alias])):
                problems.append(
                    f"{name!r} and {alias!r} are tied here, and are two different weights in "
                    f"{self._label}; untie them, or load another checkpoint"
                )
        if problems:
            raise CheckpointError(*problems)

    def fill(self) -> None:
        """Read the entries, and give those that are not read in place to their owners. Local."""
        self._checkpoint.read(self._plan, self._targets)
        params = self._saved.params.keys() - self._missing.keys()
        self._state.apply(self._targets, self._owners, params, self._options)


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties in which a tensor must be equal to be filled instead of another."""
    return type(tensor), tensor.dtype, tensor.shape, getattr(tensor, "placements", None)
