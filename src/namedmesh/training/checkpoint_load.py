"""What a checkpoint has for this rank, and whether it fits: everything is known before anything is changed; and Hugging Face's format."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from namedmesh.errors import CheckpointError, listing
from namedmesh.training import checkpoint_files as files
from namedmesh.training.checkpoint_state import State, groups_of, local, whole
from namedmesh.training.comparison import shown
from namedmesh.training.seeds import streams

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

    from namedmesh.training.checkpoint_files import Shapes
    from namedmesh.training.checkpoint_ranks import CheckpointGroup

_MODEL = "model."


def opened(path: Path, ranks: CheckpointGroup) -> dict[str, Any]:
    """Return what a sound checkpoint says about itself, of which each rank reads some files, or refuse it."""
    with files.refuse_io(path, "read"):
        about = ranks.on_first(lambda _: files.find(path))

    def check() -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not seen here, but on rank 0; put it where all hosts see it")
        if about["id"] is None:
            require_safetensors()
        files.refuse_damaged(path, about, sorted(about["files"])[ranks.rank :: ranks.size])

    ranks.on_all(check)
    return about


def load_into(
    collect: Callable[[], State], path: Path, about: dict[str, Any], ranks: CheckpointGroup, *, cast: bool
) -> None:
    """Fill what ``collect`` returns from a checkpoint."""
    state = ranks.on_all(collect)
    with files.refuse_io(path, "read"):
        if about["id"] is None:
            reader: Any = dcp.HuggingFaceStorageReader(str(path))
        else:
            reader = files.Reader(files.data_of(path, about))
        shapes = ranks.on_first(lambda _: files.shapes_in(reader))
        loading = ranks.on_all(partial(_Loading, state, path, reader, shapes, about, cast=cast))
        ranks.on_all(partial(loading.refuse_what_does_not_fit, ranks))
    loading.fill(ranks)
    found = loading.found()
    ranks.on_all(partial(loading.put, found))


class _Loading:
    """What is read from a checkpoint for a state, and what does not fit."""

    def __init__(
        self, state: State, path: Path, reader: Any, shapes: Shapes, about: dict[str, Any], *, cast: bool
    ) -> None:
        self.state, self.cast = state, cast
        self._path, self._reader, self._where = path, reader, f"the checkpoint {path}"
        self._pretrained = about["id"] is None
        self._prefix = _MODEL if self._pretrained else ""
        self._shapes = {self._prefix + name: each for name, each in shapes.items()}
        self._per_rank: dict[str, dict[int, int]] = about["per_rank"]
        self._before = files.layout_of(about)
        once = {name for name in self._shapes if not name.startswith("rank.")}
        self._names = sorted(self._per_rank.keys() | once)
        self._values: dict[str, Any] = {}  # by their names in the checkpoint
        self._in_place: list[str] = []  # which of them are the memory of the model
        self._problems: list[str] = []
        # Of each entry, where a checkpoint has it for this rank, and the parameter whose part it is.
        self._wanted: dict[str, tuple[list[str], Tensor | None]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        for name in state.entries:
            if name.startswith(_MODEL):
                self._want_of_model(name)
        if state.optimizers:
            self._want_optimizers()
        for number in range(len(state.loaders)):
            self._want_data(f"data.{number}")
        for name in self._names_of("random."):
            copies = self._copies(name)
            if len(copies) == 1:
                self._want(name, copies)

    def _names_of(self, prefix: str) -> list[str]:
        return [name for name in self._names if name.startswith(prefix)]

    def _copies(self, name: str) -> list[str]:
        """Return where a checkpoint has an entry for this rank: once, if all ranks that it stands for had the same."""
        if name not in self._per_rank:
            return [name] if name in self._shapes else []
        by_rank, stood_for = self._per_rank[name], set(self._per_rank[name])
        mesh, before = self.state.mesh, self._before
        if mesh is not None and before is not None:
            now = dict(mesh.layout.items())
            same = {axis: mesh.coords[axis] for axis, size in before.items() if now.get(axis) == size}
            stood_for &= {rank - before.rank_offset for rank in before.where(**same)}
        once = {by_rank[rank]: f"rank.{rank}.{name}" for rank in sorted(stood_for, reverse=True)}
        return sorted(once.values())

    def refuse_what_does_not_fit(self, ranks: CheckpointGroup) -> None:
        """Raise all problems, also of tensors of a model that no rank has; communicates."""
        names = self._names_of(_MODEL)
        known = torch.tensor([name in self.state.entries for name in names], dtype=torch.uint8)
        if ranks.group is not None and names:
            dist.all_reduce(known, dist.ReduceOp.MAX, group=ranks.group)
        self._problems += [
            f"{shown(name)} is in {self._where}, and on no rank in the model"
            for name, each in zip(names, known.tolist(), strict=True)
            if not each
        ]
        if self._problems:
            raise CheckpointError(*self._problems)

    def fill(self, ranks: CheckpointGroup) -> None:
        """Read all that is wanted; where that fails on the way, say what of the model has changed."""
        wanted = {name.removeprefix(self._prefix): each for name, each in self._values.items()}
        filled: set[str] = set()
        try:
            with files.refuse_io(self._path, "read"):
                files.read(self._reader, wanted, filled, **ranks.arguments)
        except CheckpointError as error:
            changed = [shown(name) for name in self._in_place if name.removeprefix(self._prefix) in filled]
            if not changed:
                raise
            raise CheckpointError(
                *error.problems,
                f"{listing(changed)} of the model were read before, so it has some of {self._where} and some of what it had; load "
                "again, or another checkpoint, before it is used",
            ) from None
        self._values = {self._prefix + name: each for name, each in wanted.items()}

    def _want(
        self, name: str, copies: list[str], room: Tensor | None = None, parameter: Tensor | None = None
    ) -> None:
        self._wanted[name] = copies, parameter
        for copy in copies:
            known = self._shapes[copy]
            if room is None and known is not None:
                self._values[copy] = torch.empty(known[0], dtype=known[1])
            else:
                self._values[copy] = room

    def _want_of_model(self, name: str) -> None:
        entry = self.state.entries[name]
        extra_state = name.endswith("_extra_state")
        copies = self._copies(name)
        if not copies:
            aliases = [other for other, each in self.state.entries.items() if each.value is entry.value]
            elsewhere = any(self._copies(other) for other in aliases)
            # Hugging Face's format has no extra states; a tied tensor is there under one of its names at least.
            if not elsewhere and not (extra_state and self._pretrained):
                self._problems.append(f"{shown(name)} is not in {self._where}")
        elif extra_state or not isinstance(entry.value, Tensor):
            self._want(name, copies[:1])
        else:
            room = whole(entry.value, entry.parameter, self.state.mesh, exchange=False)  # its own memory
            for copy in copies:
                self._check(name, room, self._shapes[copy])
            if entry.may_be_averaged and len(copies) > 1:
                self._want(name, copies)
            else:
                self._want(name, copies[:1], room, entry.parameter)
                self._in_place += copies[:1]

    def _check(self, name: str, target: Tensor, known: tuple[tuple[int, ...], torch.dtype] | None) -> None:
        shape, dtype = known or (None, None)
        if tuple(target.shape) != shape:
            self._problems.append(
                f"{shown(name)} has shape {tuple(target.shape)} here, and {shape} in {self._where}"
            )
        elif target.dtype != dtype and not self.cast:
            self._problems.append(
                f"{shown(name)} is {target.dtype} here, and {dtype} in {self._where}; make the model in that type, or "
                "pass cast=True to load(), which rounds"
            )

    def _want_optimizers(self) -> None:
        groups: dict[str, Any] = dict.fromkeys(self._names_of("group."))
        if groups:
            files.read(self._reader, groups, no_dist=True)  # this rank alone
        by_name = {name: group for group in groups.values() for name in group["names"]}
        if not by_name:
            self._problems.append(f"{self._where} was saved without an optimizer; load it without one")
            return
        self._options = {name: group["options"] for name, group in by_name.items()}
        kept: dict[str, list[str]] = {}
        for name in self._names_of("optimizer."):
            kept.setdefault(name.removeprefix("optimizer.").partition(":")[0], []).append(name)
        for optimizer in self.state.optimizers:
            parameters = self.state.parameters(optimizer)
            self._problems += _other_options(optimizer, parameters, by_name, self._where)
            for name, parameter in parameters:
                for full in kept.get(name, ()):
                    self._want_of_optimizer(full, name, parameter)

    def _want_of_optimizer(self, name: str, owner: str, parameter: Tensor) -> None:
        copies = self._copies(name)
        known = self._shapes[copies[0]] if copies else None
        has_mean = known is not None and known[0] == tuple(parameter.shape) and known[1].is_floating_point
        if copies == [name] and known is not None:
            room = None
            if known[0] and known[0] == self.state.entries[_MODEL + owner].shape:
                empty = torch.zeros_like(parameter.detach(), dtype=known[1])
                room = whole(empty, parameter, self.state.mesh, exchange=False)
            self._want(name, copies, room, parameter)
        elif len(copies) == 1 or (has_mean and not isinstance(parameter, DTensor)):
            self._want(name, copies)
        else:
            self._problems.append(
                f"the optimizer keeps {shown(name)} for the part that a rank had, and no rank has this part now; load it on the "
                "layout that it was saved from, or without the optimizer"
            )

    def _want_data(self, name: str) -> None:
        copies = self._copies(name)
        if len(copies) != 1:
            known = "no place in the data"
            if copies:
                known = "another place in the data for each rank that this one stands for"
            self._problems.append(
                f"{self._where} has {known}; load it without data=, and skip the samples that were seen"
            )
        self._want(name, copies)

    def found(self) -> dict[str, Any]:
        """Return what was read for each entry; may communicate."""
        result = {}
        for name, (copies, parameter) in self._wanted.items():
            values = [self._values[copy] for copy in copies]
            joined = values[0] if len(values) == 1 else torch.stack(values).mean(0)
            result[name] = local(joined, parameter, self.state.mesh)
        return result

    def put(self, found: Mapping[str, Any]) -> None:
        """Give what was read to the model, the optimizers, the loaders and the generators."""
        state = self.state
        state.put_model(found)
        kept: dict[str, dict[str, Any]] = {}
        for name, value in found.items():
            if name.startswith("optimizer."):
                parameter, _, key = name.removeprefix("optimizer.").partition(":")
                kept.setdefault(parameter, {})[key] = value
        for optimizer in state.optimizers:
            state.put_optimizer(optimizer, self._options, kept)
        for number, loader in enumerate(state.loaders):
            loader.load_state_dict(found[f"data.{number}"])
        random = [name for name in found if name.startswith("random.")]
        streams.load_state_dict({name.removeprefix("random."): found[name] for name in random})


def _other_options(
    optimizer: Optimizer, parameters: Sequence[tuple[str, Tensor]], saved: Mapping[str, Any], where: str
) -> list[str]:
    """Return why an optimizer cannot go on from the options in a checkpoint."""
    found = []
    for group in groups_of(optimizer, parameters):
        names, kinds = group["names"], group["kinds"]
        found += [f"the optimizer of {where} did not have {name!r}" for name in names if name not in saved]
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
                    f"the optimizer of {listing(map(repr, known), 4)} was {kind[0]} in {where}, and is {kinds[0]} "
                    "here; make the one that was saved, or load without the optimizer"
                )
    return found


def require_safetensors() -> None:
    """Refuse to go on without the package that reads and writes the format."""
    if find_spec("safetensors") is None:
        raise CheckpointError(
            "Hugging Face's format needs the package safetensors, which is not installed; pip install safetensors"
        )


def to_pretrained(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *, shard_bytes: int = 5 * 2**30
) -> None:
    """Write the model of a checkpoint as Hugging Face's ``save_pretrained`` does; one process calls this.

    ``from_pretrained`` reads the result once ``model.config.save_pretrained(directory)`` was called, too, and
    :func:`load` reads such a directory into any layout. The names are those of your model: they fit if it is one
    of Hugging Face's. It takes the memory of one file.

    Args:
        path: the checkpoint.
        directory: where to write ``model.safetensors``, or several such files and their index.
        shard_bytes: the largest size of a file (or one tensor, if that is larger).

    Raises:
        CheckpointError: there is no checkpoint, or the package safetensors is not installed.
    """
    require_safetensors()
    from safetensors.torch import save_file

    source = Path(path)
    about = files.find(source)
    if about["id"] is None:
        raise CheckpointError(f"{source} is in the format of save_pretrained already")
    files.refuse_damaged(source, about, about["files"])
    reader = files.Reader(files.data_of(source, about))
    parts: list[dict[str, Tensor]] = []
    free = 0
    for key, known in files.shapes_in(reader).items():
        if key.startswith(_MODEL) and known is not None:
            tensor = torch.empty(known[0], dtype=known[1], device="meta")
            if tensor.nbytes > free or not parts:
                parts, free = [*parts, {}], shard_bytes
            parts[-1][key] = tensor
            free -= tensor.nbytes
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        several = f"-{number:05}-of-{len(parts):05}" if len(parts) > 1 else ""
        tensors = {key: torch.empty_like(each, device="cpu") for key, each in part.items()}
        files.read(reader, tensors, no_dist=True)
        named = {key.removeprefix(_MODEL): each for key, each in tensors.items()}
        save_file(named, target / f"model{several}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(named, f"model{several}.safetensors")
    if len(parts) > 1:
        size = sum(each.nbytes for part in parts for each in part.values())
        contents = {"metadata": {"total_size": size}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2), encoding="utf-8")
