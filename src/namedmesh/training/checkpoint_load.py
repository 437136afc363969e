"""What a checkpoint has for this rank, and whether it fits: everything is known before anything is changed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from namedmesh.errors import CheckpointError, listing
from namedmesh.training.checkpoint_files import (
    Reader,
    find,
    layout_of,
    refuse_damaged,
    refuse_io,
    shapes_in,
    without_warnings,
)
from namedmesh.training.checkpoint_pretrained import require_safetensors
from namedmesh.training.checkpoint_state import State, groups_of, local
from namedmesh.training.contents import decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from namedmesh.mesh import NamedMesh
    from namedmesh.training.checkpoint_files import Shapes
    from namedmesh.training.checkpoint_ranks import CheckpointGroup

_MODEL = "model."


About = dict[str, Any] | None
"""What a checkpoint says about itself; None for one of Hugging Face."""


def opened(path: Path, ranks: CheckpointGroup) -> tuple[Path, About]:
    """Return where the checkpoint of a path is, and what it says; each rank reads some of its files, to see that they are sound.

    Raises:
        CheckpointError: there is none, a rank does not see it, or files are missing or damaged.
    """
    with refuse_io(path, "read"):
        place, about = ranks.on_first(lambda _: find(path))

    def check() -> None:
        if not place.is_dir():
            raise CheckpointError(f"{place} is not seen here, but on rank 0; put it where all hosts see it")
        if about is None:
            require_safetensors()
        else:
            refuse_damaged(place, dict(sorted(about["files"].items())[ranks.rank :: ranks.size]))

    ranks.on_all(check)
    return place, about


def load_into(
    collect: Callable[[], State], place: Path, about: About, ranks: CheckpointGroup, *, cast: bool
) -> None:
    """Fill what ``collect`` returns from a checkpoint."""
    state = ranks.on_all(collect)
    with refuse_io(place, "read"):
        source = Source(place, about, ranks)
        loading = ranks.on_all(partial(_Loading, state, source, cast=cast))
        problems = loading.problems + source.unknown(state, ranks)
        ranks.on_all(partial(_refuse, problems))
        source.read(loading.tensors, ranks)
    found = loading.found()
    ranks.on_all(partial(loading.put, found))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError(*problems)


class Source:
    """A checkpoint, and which copies in it are for this rank.

    Attributes:
        shapes: the shape and type of each tensor, by its name in the checkpoint.
    """

    def __init__(self, place: Path, about: About, ranks: CheckpointGroup) -> None:
        self.place, self.about = place, about
        self._prefix = "" if about is not None else _MODEL
        found = ranks.on_first(lambda _: shapes_in(self._reader()))
        self.shapes: Shapes = {self._prefix + name: each for name, each in found.items()}
        self._own: dict[str, dict[int, int]] = {} if about is None else about["per_rank"]
        self._before = None if about is None else layout_of(about)

    def _reader(self) -> Any:
        return dcp.HuggingFaceStorageReader(str(self.place)) if self.about is None else Reader(self.place)

    def names(self) -> list[str]:
        """Return the names of all entries, without the numbers of ranks."""
        return sorted(self._own.keys() | {name for name in self.shapes if not name.startswith("rank.")})

    def copies(self, name: str, mesh: NamedMesh | None) -> list[str]:
        """Return where a checkpoint has an entry for this rank: once, if all ranks that it stands for had the same."""
        if name not in self._own:
            return [name] if name in self.shapes else []
        by_rank, stood_for = self._own[name], set(self._own[name])
        if mesh is not None and self._before is not None:
            now = dict(mesh.layout.items())
            same = {axis: mesh.coords[axis] for axis, size in self._before.items() if now.get(axis) == size}
            stood_for &= {rank - self._before.rank_offset for rank in self._before.where(**same)}
        once = {by_rank[rank]: f"rank.{rank}.{name}" for rank in sorted(stood_for, reverse=True)}
        return sorted(once.values())

    def unknown(self, state: State, ranks: CheckpointGroup) -> list[str]:
        """Return the tensors of a model that no rank has; communicates."""
        names = [name for name in self.names() if name.startswith(_MODEL)]
        known = torch.tensor([name in state.entries for name in names], dtype=torch.uint8)
        if ranks.group is not None and names:
            dist.all_reduce(known, dist.ReduceOp.MAX, group=ranks.group)
        return [
            f"{_shown(name)!r} is in the checkpoint {self.place}, and on no rank in the model"
            for name, each in zip(names, known.tolist(), strict=True)
            if not each
        ]

    def read(self, tensors: Mapping[str, Tensor], ranks: CheckpointGroup | None) -> None:
        """Fill tensors; with ``ranks`` all of them together."""
        wanted = {name.removeprefix(self._prefix): each for name, each in tensors.items()}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        arguments: dict[str, Any] = {"no_dist": True} if ranks is None else ranks.arguments
        with without_warnings():
            dcp.load(wanted, storage_reader=self._reader(), planner=planner, **arguments)

    def room(self, name: str) -> Tensor:
        """Return a tensor to read an entry into."""
        shape, dtype = self.shapes[name]
        return torch.empty(shape, dtype=dtype)

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters that optimizers had; this rank reads them alone."""
        rooms = {name: self.room(name) for name in self.names() if name.startswith("group.")}
        if rooms:
            self.read(rooms, None)
        return [decoded(each) for each in rooms.values()]


def _shown(name: str) -> str:
    return name.removeprefix(_MODEL).removesuffix("#")


class _Loading:
    """The tensors that are read for a state, and what does not fit.

    Attributes:
        tensors: what to read, by its name in the checkpoint.
        problems: what does not fit.
    """

    def __init__(self, state: State, source: Source, *, cast: bool) -> None:
        self.state, self.source, self.cast = state, source, cast
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        # Of each entry, where a checkpoint has it for this rank, and the parameter whose part it is.
        self._wanted: dict[str, tuple[list[str], Tensor | None]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        for name in state.entries:
            if name.startswith(_MODEL):
                self._want_of_model(name)
        if state.optimizers:
            self._want_optimizers()
        for number in range(len(state.loaders)):
            self._want_data(f"data.{number}#")
        for name in source.names():
            if name.startswith("random."):
                copies = source.copies(name, state.mesh)
                if len(copies) == 1:
                    self._want(name, copies)

    def _want(
        self, name: str, copies: list[str], room: Tensor | None = None, parameter: Tensor | None = None
    ) -> None:
        self._wanted[name] = copies, parameter
        for copy in copies:
            self.tensors[copy] = self.source.room(copy) if room is None else room

    def _want_of_model(self, name: str) -> None:
        source, entry = self.source, self.state.entries[name]
        extra_state = name.removesuffix("#").endswith("_extra_state")
        copies = source.copies(name, self.state.mesh)
        if not copies:
            elsewhere = any(source.copies(other, self.state.mesh) for other in self.state.aliases(name))
            # Hugging Face's format has no extra states; a tied tensor is there under one of its names at least.
            if not elsewhere and not (extra_state and source.about is None):
                self.problems.append(f"{_shown(name)!r} is not in the checkpoint {source.place}")
        elif extra_state or not isinstance(entry.value, Tensor):
            self._want(name, copies[:1])
        else:
            room = self.state.room(name)
            for copy in copies:
                self._check(name, room, *source.shapes[copy])
            if entry.may_be_averaged and len(copies) > 1:
                self._want(name, copies)
            else:
                self._want(name, copies[:1], room, entry.parameter)

    def _check(self, name: str, target: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        place = self.source.place
        if tuple(target.shape) != shape:
            self.problems.append(
                f"{_shown(name)!r} has shape {tuple(target.shape)} here, and {shape} in the checkpoint {place}"
            )
        elif target.dtype != dtype and not self.cast:
            self.problems.append(
                f"{_shown(name)!r} is {target.dtype} here, and {dtype} in the checkpoint {place}; make the model in that type, or "
                "pass cast=True to load(), which rounds"
            )

    def _want_optimizers(self) -> None:
        source, kept = self.source, dict[str, list[str]]()
        by_name = {name: group for group in source.groups() for name in group["names"]}
        if not by_name:
            self.problems.append(
                f"the checkpoint {source.place} was saved without an optimizer; load it without one"
            )
            return
        self._options = {name: group["options"] for name, group in by_name.items()}
        for name in source.names():
            if name.startswith("optimizer."):
                kept.setdefault(name.removeprefix("optimizer.").partition(":")[0], []).append(name)
        for optimizer in self.state.optimizers:
            parameters = self.state.parameters(optimizer)
            self.problems += _other_options(optimizer, parameters, by_name, source.place)
            for name, parameter in parameters:
                for full in kept.get(name, ()):
                    self._want_of_optimizer(full, parameter)

    def _want_of_optimizer(self, name: str, parameter: Tensor) -> None:
        source = self.source
        copies = source.copies(name, self.state.mesh)
        shape, dtype = source.shapes[copies[0]] if copies else ((), torch.uint8)
        alike = (
            shape == tuple(parameter.shape) and dtype.is_floating_point and not isinstance(parameter, DTensor)
        )
        if copies == [name] and not name.endswith("#"):
            self._want(name, copies, self.state.room_in_optimizer(parameter, shape, dtype), parameter)
        elif len(copies) == 1 or (copies and alike):
            self._want(name, copies)
        else:
            what, _, key = name.removeprefix("optimizer.").removesuffix("#").partition(":")
            self.problems.append(
                f"the optimizer keeps {key!r} of {what!r} for the part that a rank had, and no rank has this part now; load it on "
                "the layout that it was saved from, or without the optimizer"
            )

    def _want_data(self, name: str) -> None:
        copies = self.source.copies(name, self.state.mesh)
        if len(copies) != 1:
            known = "no place in the data"
            if copies:
                known = "another place in the data for each rank that this one stands for"
            self.problems.append(
                f"the checkpoint {self.source.place} has {known}; load it without data=, and skip the samples that were seen"
            )
        self._want(name, copies)

    def found(self) -> dict[str, Tensor]:
        """Return what was read for each entry; may communicate."""
        result = {}
        for name, (copies, parameter) in self._wanted.items():
            tensors = [self.tensors[copy] for copy in copies]
            joined = tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)
            result[name] = local(joined, parameter, self.state.mesh)
        return result

    def put(self, found: Mapping[str, Tensor]) -> None:
        """Give what was read to the model, the optimizers, the loaders and the generators."""
        state = self.state
        state.put_model(found)
        kept: dict[str, dict[str, Any]] = {}
        for name, value in found.items():
            if name.startswith("optimizer."):
                parameter, _, key = name.removeprefix("optimizer.").partition(":")
                of_parameter = kept.setdefault(parameter, {})
                of_parameter[key.removesuffix("#")] = decoded(value) if key.endswith("#") else value
        for optimizer in state.optimizers:
            state.put_optimizer(optimizer, self._options, kept)
        for number, loader in enumerate(state.loaders):
            loader.load_state_dict(decoded(found[f"data.{number}#"]))
        prefix = "random."
        state.put_random(
            {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
        )


def _other_options(
    optimizer: Optimizer, parameters: Sequence[tuple[str, Tensor]], saved: Mapping[str, Any], place: Path
) -> list[str]:
    """Return why an optimizer cannot go on from the options in a checkpoint."""
    found = []
    for group in groups_of(optimizer, parameters):
        names, kinds = group["names"], group["kinds"]
        found += [
            f"the optimizer of the checkpoint {place} did not have {name!r}"
            for name in names
            if name not in saved
        ]
        known = [name for name in names if name in saved]
        options = {repr(saved[name]["options"]): name for name in reversed(known)}
        if len(options) > 1:
            found.append(
                f"{listing(map(repr, reversed(options.values())))} are in one group of the optimizer, and were in groups with other "
                "options; group them as they were"
            )
        for kind in dict.fromkeys(tuple(saved[name]["kinds"]) for name in known):
            if kind[0] not in kinds and kinds[0] not in kind:
                found.append(
                    f"the optimizer of {listing(map(repr, known), 4)} was {kind[0]} in the checkpoint {place}, and is {kinds[0]} "
                    "here; make the one that was saved, or load without the optimizer"
                )
    return found
