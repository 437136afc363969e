"""Checkpoints that any layout reads, over torch.distributed.checkpoint: an interruption never costs the last one."""

from __future__ import annotations

import io
import json
from concurrent.futures import Future, wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from namedmesh.errors import CheckpointError, listing, ranks_in_words
from namedmesh.training.checkpoint_files import (
    Writer,
    beside,
    find,
    make_room,
    move,
    refuse_io,
    sees_room,
    without_warnings,
)
from namedmesh.training.checkpoint_random import random_states, restore_random_states, shared_states
from namedmesh.training.checkpoint_ranks import Ranks
from namedmesh.training.checkpoint_state import State, contradictions, fingerprint

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

    from namedmesh.mesh import NamedMesh
    from namedmesh.training.checkpoint_files import Shapes
    from namedmesh.training.checkpoint_state import Model

_under_way: set[Future[Path]] = set()


def save(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizer | None = None,
    *,
    async_: bool = False,
    keep: int | None = None,
    **extra: Any,
) -> Future[Path] | None:
    """Write a model, its optimizer, the random states and any values of yours; every rank of the mesh calls this.

    DCP writes the tensors, every rank what it holds, beside ``path``; a finished checkpoint is moved into its
    place. Killed at any moment, :func:`load` finds the last one that was finished.

    The silent mistakes it prevents: stages of a pipeline, or shards without marks, that overwrite each other
    under one name; an optimizer that never stepped and has counted a step after the checkpoint; replicas that
    have come apart; a directory that is half of this checkpoint and half of the last.

    Args:
        path: a directory of the checkpoint's own, on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        model: what this rank holds, or a list of it (several stages of a pipeline). Plain tensors that carry
            Megatron's marks are saved as the whole tensors that they are shards of, over ``tp`` (experts: ``etp``).
        optimizer: the optimizer of the model's parameters, stepped or not.
        async_: return once the tensors are copied, and write them in the background (DCP's ``async_save``).
            The next :func:`save` or :func:`load` waits for it; wait yourself before the mesh is closed. Without a
            mesh it is written at once.
        keep: once this one is in its place, remove older ones so that so many are left, this one included: those beside
            ``path`` whose names differ from its name in a lower number at the end only. None removes nothing.
        **extra: values that are the same on every rank, such as the number of the step; they are pickled.

    Returns:
        With ``async_`` a future; its ``result()`` is the path, once the checkpoint is in its place.

    Raises:
        CheckpointError: a name stands for different tensors, ranks give different extra values, or ``path`` is a
            directory that holds something else, or ``keep`` is below 1 or ``path`` has no number at the end for it; all
            problems at once, on every rank, before anything is written.
            Or it cannot be written, such as for want of permission or room: the checkpoint before is kept.

    Example:
        >>> import tempfile, torch
        >>> from namedmesh import training
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     training.save(f"{directory}/last", None, model, optimizer, step=3)
        ...     training.load(f"{directory}/last", None, model, optimizer)
        {'step': 3}
    """
    wait(_under_way)
    final, ranks = Path(path), Ranks(mesh)
    state = State(mesh, model, optimizer)
    # In two parts, whose names DCP joins with those in them: of many tensors side by side it looks at each for long.
    tensors: dict[str, dict[str, Tensor]] = {"model": state.model_tensors()}
    mine: dict[str, Any] = {
        "problems": state.problems,
        "prints": {name: fingerprint(tensors["model"][name]) for name in state.entries},
        "objects": state.objects,
        "random": random_states(mesh),
        "extra": _bytes(extra),
    }
    if optimizer is not None:
        mine["options"], mine["state"], tensors["optimizer"] = state.optimizer_options(), {}, {}
        for name, kept in state.optimizer_state().items():
            found = {key: each for key, each in kept.items() if isinstance(each, Tensor)}
            mine["state"][name] = list(found), {key: each for key, each in kept.items() if key not in found}
            tensors["optimizer"] |= {f"{name}.{key}": each for key, each in found.items()}
    about: dict[str, Any] = {}

    def prepare(by_rank: Sequence[dict[str, Any]]) -> str:
        problems = [f"rank {rank}: {each}" for rank, one in enumerate(by_rank) for each in one["problems"]]
        problems += contradictions([one["prints"] for one in by_rank])
        others = [rank for rank, one in enumerate(by_rank) if one["extra"] != by_rank[0]["extra"]]
        if others:
            problems.append(
                f"the extra values ({listing(extra)}) are not on ranks {listing(others)} what they are on rank 0; give "
                "every rank the same, such as a list of what each of them has"
            )
        if keep is not None and (keep < 1 or not final.name[-1:].isdigit()):
            problems.append(
                f"keep={keep} is for checkpoints of which this is one at least, with a number at the end of their paths, such "
                f"as step-200, and the path is {final}"
            )
        if problems:
            raise CheckpointError(*problems)
        about.update(_merged(mesh, by_rank))
        return make_room(final)

    def finish() -> Path:
        with refuse_io(final):
            ranks.on_first(lambda _: move(final, about, keep))
        return final

    with refuse_io(final):
        nonce = ranks.on_first(prepare, mine)
        ranks.on_first(partial(_refuse_unseen, final), sees_room(final, nonce))
    writer = Writer(beside(final, "unfinished"))
    tensors = {
        part: each for part, each in tensors.items() if each
    }  # DCP would write an empty one as an object
    if async_ and mesh is not None:
        return _followed(dcp.async_save(tensors, storage_writer=writer, **ranks.arguments), finish, final)
    with without_warnings(), refuse_io(final):
        dcp.save(tensors, storage_writer=writer, **ranks.arguments)
    written: Future[Path] = Future()
    written.set_result(finish())
    return written if async_ else None


def _refuse_unseen(path: Path, seen: Sequence[bool]) -> None:
    """Refuse a path that is another directory on other hosts than on that of the first rank."""
    absent = [rank for rank, one in enumerate(seen) if not one]
    if absent:
        raise CheckpointError(
            f"{path} on rank 0 is not the directory of {ranks_in_words(absent)}; give a path on a file system that all hosts "
            "share, such as NFS or Lustre"
        )


def _bytes(values: object) -> bytes:
    """Return the same bytes for equal values on every rank; pickle alone has others for each tensor."""
    written = io.BytesIO()
    torch.save(values, written)
    return written.getvalue()


def _followed(written: Any, finish: Callable[[], Path], final: Path) -> Future[Path]:
    """Return a future that is done when what follows the writing is."""
    moved: Future[Path] = Future()
    _under_way.add(moved)

    def follow(written: Future[Any]) -> None:
        try:
            with refuse_io(final):
                written.result()
            moved.set_result(finish())
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
            moved.set_exception(error)
        _under_way.discard(moved)

    written.add_done_callback(follow)
    return moved


def _merged(mesh: NamedMesh | None, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a checkpoint says about itself, from what every rank says; all but the tensors."""
    about: dict[str, Any] = {
        "layout": None if mesh is None else (dict(mesh.layout.items()), mesh.layout.rank_offset),
        "objects": {name: each for one in by_rank for name, each in one["objects"].items()},
        "random": shared_states([one["random"] for one in by_rank]),
        # As they are now: what is written in the background may change meanwhile.
        "extra": torch.load(io.BytesIO(by_rank[0]["extra"]), weights_only=False, map_location="cpu"),
    }
    if "options" in by_rank[0]:
        groups = [group for one in by_rank for group in one["options"]]
        about["options"] = {name: options for options, names in groups for name in names}
        about["state"] = {name: each for one in by_rank for name, each in one["state"].items()}
    return about


def load(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizer | None = None,
) -> dict[str, Any]:
    """Fill a model and its optimizer from a checkpoint of any layout; every rank of the mesh calls this.

    The silent mistakes it prevents: a part of the model that keeps its first weights because the checkpoint has
    no such name; an optimizer that starts again, or has counted a step that it never made.

    Args:
        path: a checkpoint that :func:`save` wrote, or a directory in the format of Hugging Face's
            ``save_pretrained`` (safetensors), which holds no optimizer. Values are unpickled: load what you trust.
        mesh: the mesh of now; None in a process without process groups.
        model: what this rank holds, or a list of it.
        optimizer: the optimizer of the model's parameters.

    Returns:
        The extra values. Random states are restored as far as the layouts allow: each stream on the ranks that
        have the coordinates, on the axes whose sizes are the same in both, at which all ranks had the same.

    Raises:
        CheckpointError: there is no checkpoint; a name is missing in it or in the model, or has another shape; or
            its optimizer does not fit. All problems at once, on every rank, before anything is changed.
    """
    wait(_under_way)
    ranks = Ranks(mesh)
    place, about, shapes = ranks.on_first(lambda _: find(Path(path)))
    state = State(mesh, model, optimizer)
    prefix = "" if about is None else "model."
    # A tied tensor is there under one of its names at least.
    selected = [
        name
        for name in state.entries
        if prefix + name in shapes or not any(prefix + other in shapes for other in state.aliases(name))
    ]
    of_model = state.model_tensors()
    tensors = {prefix + name: of_model[name] for name in selected}
    problems = state.problems + ([] if optimizer is None else _optimizer_problems(state, about, place))
    remembered: dict[str, dict[str, Any]] = {}
    if optimizer is not None and about is not None and not problems:
        remembered = state.room_for_optimizer(about["state"], shapes)
        for name, found in remembered.items():
            tensors |= {f"optimizer.{name}.{key}": each for key, each in found.items()}
    problems += _incompatibilities(tensors, shapes, place)

    def judge(by_rank: Sequence[tuple[list[str], list[str]]]) -> None:
        known = {prefix + name for names, _ in by_rank for name in names}
        found = [each for _, problems in by_rank for each in problems]
        found += [
            f"{key.removeprefix('model.')!r} is in the checkpoint {place}, and on no rank in the model"
            for key in shapes
            if key.startswith(prefix) and key not in known
        ]
        if found:
            raise CheckpointError(*dict.fromkeys(found))

    if not place.is_dir():
        problems.append(
            f"rank {0 if mesh is None else mesh.rank()} does not see {place}, which rank 0 does; put it where all hosts see it"
        )
    ranks.on_first(judge, (list(state.entries), problems))
    if about is None:
        _require_safetensors()
    reader = dcp.HuggingFaceStorageReader(str(place)) if about is None else dcp.FileSystemReader(place)
    with without_warnings():
        dcp.load(tensors, storage_reader=reader, **ranks.arguments)
    state.put_model({name: tensors[prefix + name] for name in selected})
    if about is None:
        return {}
    state.put_objects(about["objects"])
    if optimizer is not None:
        for name, found in remembered.items():
            found.update(about["state"][name][1])
        state.put_optimizer(optimizer, about["options"], remembered)
    restore_random_states(mesh, about["layout"], about["random"])
    extra: dict[str, Any] = about["extra"]
    return extra


def _incompatibilities(tensors: Mapping[str, Tensor], shapes: Shapes, place: Path) -> list[str]:
    """Return the tensors that a checkpoint does not have, or has with other shapes."""
    found = []
    for key, each in tensors.items():
        name = key.removeprefix("model.")
        if key not in shapes:
            found.append(f"{name!r} is not in the checkpoint {place}")
        elif tuple(each.shape) != shapes[key][0]:
            found.append(
                f"{name!r} has shape {tuple(each.shape)} here, and {shapes[key][0]} in the checkpoint {place}"
            )
    return found


def _optimizer_problems(state: State, about: Mapping[str, Any] | None, place: Path) -> list[str]:
    """Return why the optimizer cannot be filled from a checkpoint."""
    if about is None or "options" not in about:
        return [f"the checkpoint {place} was saved without an optimizer; load it without one"]
    options = about["options"]
    found = []
    for _, names in state.optimizer_options():
        found += [
            f"the optimizer of the checkpoint {place} did not have {name!r}"
            for name in names
            if name not in options
        ]
        kinds = {repr(options[name]): name for name in reversed(names) if name in options}
        if len(kinds) > 1:
            found.append(
                f"{listing(map(repr, reversed(kinds.values())))} are in one group of the optimizer, and were in groups with other "
                "options; group them as they were"
            )
    return found


def _require_safetensors() -> None:
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
    _require_safetensors()
    from safetensors.torch import save_file

    place, _, shapes = find(Path(path))
    files: list[dict[str, Tensor]] = []
    free = 0
    for key, (shape, dtype) in shapes.items():
        if key.startswith("model."):
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            if tensor.nbytes > free or not files:
                files, free = [*files, {}], shard_bytes
            files[-1][key] = tensor
            free -= tensor.nbytes
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        several = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
        tensors = {key: torch.empty_like(each, device="cpu") for key, each in file.items()}
        with without_warnings():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(place), no_dist=True)
        named = {key.removeprefix("model."): each for key, each in tensors.items()}
        save_file(named, target / f"model{several}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(named, f"model{several}.safetensors")
    if len(files) > 1:
        size = sum(each.nbytes for file in files for each in file.values())
        contents = {"metadata": {"total_size": size}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2), encoding="utf-8")
