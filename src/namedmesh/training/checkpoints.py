"""Checkpoints that any layout can load, over torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from namedmesh.arguments import checkpoint_place
from namedmesh.mesh import NamedMesh
from namedmesh.training.checkpoint_folders import Lock, prepare_folder, remove_leftovers
from namedmesh.training.checkpoint_formats import read_checkpoint
from namedmesh.training.checkpoint_loading import Matching
from namedmesh.training.checkpoint_names import Names
from namedmesh.training.checkpoint_ranks import CheckpointRanks, SaveFuture
from namedmesh.training.checkpoint_saving import SavePlanner, agree_on_values
from namedmesh.training.checkpoint_state import Model, Optimizers, State
from namedmesh.training.checkpoint_storage import Progress, StorageWriter


def save(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizers = None,
    *,
    data: object = None,
    async_: bool = False,
    **extra: Any,
) -> SaveFuture:
    """Write a model, its optimizers, the random states and extra values to a checkpoint.

    Collective: every rank of the mesh must call it.

    The result is a plain checkpoint of torch.distributed.checkpoint (DCP), which torch can load
    without namedmesh. DCP writes the local shards of each rank, and replaces ``.metadata`` last:
    the checkpoint is complete or absent.

    Parameters, and all DTensors of optimizers, must be equal on all ranks that have the same shard.
    The parameters are compared, all elements of them. Buffers, plain tensors of optimizers, random
    states and the state of data loaders may differ between ranks. If they do, they are saved for
    each rank. Gradients that the optimizers have not used yet are saved: those
    of a backward since the last step. A parameter with two names, or tied by :func:`tie_stages`, is
    saved once.

    Args:
        path: the directory of this checkpoint, on a file system that all hosts share.
        mesh: the mesh; None in a process without process groups.
        model: the model of this rank, or a list, such as several pipeline stages. Plain tensors
            with Megatron-LM's attributes are saved as full tensors, which they shard over ``tp``
            (experts: ``etp``).
        optimizer: the optimizer of the model, or a list.
        data: the data loader or sampler, or a list: anything with ``state_dict()`` and
            ``load_state_dict()``.
        async_: whether to write in the background, once the tensors are copied to the CPU. Copies
            from an accelerator go to pinned memory, which is kept for the next save. The next save
            or load waits for it, and raises its error on every rank, unless ``result()`` has. Get
            the ``result()`` before ``destroy_process_group()``.
        **extra: values that are equal on every rank, such as the number of the step or
            ``scheduler.state_dict()``: numbers, strings, tensors, and lists, tuples and dicts of
            them.

    Returns:
        A future with the path, which is done already unless ``async_`` is set.

    Raises:
        CheckpointError: on every rank, with all problems at once. An earlier checkpoint at ``path``
            is kept.
        AgreementError: some ranks did not call it within the timeout of the mesh, or with another
            path.
    """
    path, mesh = checkpoint_place(path, mesh, "save")
    CheckpointRanks.from_mesh(mesh, "save").begin("save", path)
    return save_objects(path, mesh, (model, optimizer, data), extra, async_=async_)


def save_objects(
    path: Path,
    mesh: NamedMesh | None,
    objects: tuple[Any, ...],
    extra: dict[str, Any],
    *,
    async_: bool,
    run: str | None = None,
    on_finish: Callable[[], None] = lambda: None,
) -> SaveFuture:
    """Save a model, its optimizers and data loaders (``objects``) and extra values.

    Collective: every rank of the mesh must call it, after :meth:`CheckpointRanks.begin`.

    Args:
        path: as for :func:`save`.
        mesh: as for :func:`save`.
        objects: the arguments of :class:`State` after the mesh: model, optimizers and data loaders.
        extra: as for :func:`save`.
        async_: as for :func:`save`.
        run: the run that the checkpoint belongs to.
        on_finish: called on rank 0 after the checkpoint is complete.
    """
    ranks = CheckpointRanks.from_mesh(mesh, "save")
    # Without a mesh, every call has its own CheckpointRanks, and could not wait for this save.
    in_background = async_ and mesh is not None
    state = State(mesh, *objects)
    problem = f"the checkpoint {path} could not be written"
    values, table = agree_on_values(state, ranks, extra, problem, in_background=in_background)
    layout = None if mesh is None else [dict(mesh.layout.items()), mesh.layout.rank_offset]
    manifest: dict[str, Any] = {"layout": layout, "run": run}
    locks: list[Lock] = []  # only rank 0 has one, until the end of the save

    def prepare() -> None:
        lock, manifest["order"] = prepare_folder(path)
        locks.append(lock)

    def finish() -> None:
        remove_leftovers(path)
        on_finish()

    ranks.run_on_rank0(problem, prepare)
    writer = StorageWriter(path, table, manifest, finish)
    if in_background:
        # Otherwise DCP copies ahead on a stream of an accelerator, which the CPU does not need.
        writer.per_thread_copy_ahead = 0
    # The current device of a new thread is device 0, on which it would allocate memory.
    device = None
    if mesh is not None and mesh.device.type != "cpu" and in_background:
        device = torch.accelerator.current_device_index()
    future = SaveFuture()
    future.set_running_or_notify_cancel()  # a save that has started cannot be canceled

    def write() -> None:
        progress = Progress(f"saving {path}", is_shown=ranks.rank == 0)
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            with ranks.reraise_on_all_ranks(problem):
                planner = SavePlanner(values, state.owners, progress)
                dcp.save({}, storage_writer=writer, planner=planner, **ranks.dcp_arguments)
        except BaseException as error:  # noqa: BLE001  also if it is interrupted
            # The checkpoint may be complete nevertheless: if a rank dies after finish(), only the
            # last broadcast of DCP fails. remove_leftovers() keeps a complete checkpoint.
            locks.clear()
            if ranks.rank == 0:
                remove_leftovers(path)
            future.set_exception(error)
        else:
            locks.clear()
            future.set_result(path)
        progress.end()

    if in_background:
        ranks.saving = future
        threading.Thread(target=write, name="namedmesh save").start()
    else:
        write()
        future.result()
    return future


class Loaded(dict[str, Any]):
    """The extra values of a checkpoint, and the names that were not loaded.

    Attributes:
        missing_keys: parameters and buffers of the model, on any rank, that keep their values.
        unexpected_keys: parameters and buffers that only the checkpoint has.
        unused_optimizer_keys: parameters whose saved optimizer state no optimizer took.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    unused_optimizer_keys: list[str]


def load(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizers = None,
    *,
    data: object = None,
    cast: bool = False,
    strict: bool = True,
    select: Callable[[str], bool] | None = None,
) -> Loaded:
    """Fill a model and its optimizers from a checkpoint of any layout.

    Collective: every rank of the mesh must call it.

    Per-rank values are matched by coordinates, on the axes whose size has not changed. If several
    saved ranks match and their values differ, buffers take the value of the lowest rank.

    - Random states are restored if the axes that they depend on have the same sizes as when they
      were saved. Otherwise the generators stay as :func:`seed_all` has seeded them.
    - The state of data loaders is restored if the number of data ranks is the same. Otherwise it
      raises CheckpointError, because a sampler counts the samples of one rank. A position that
      counts the samples of all ranks can be an extra value.
    - A tensor that an optimizer keeps for the shard of one rank is restored if a rank has that
      shard now. Otherwise it raises CheckpointError.

    A rank first checks all of every saved shard that overlaps with its own. In another layout,
    these may be several times the bytes that it keeps. Then it reads into the tensors of the model,
    one saved shard at a time.

    Args:
        path: a checkpoint of :func:`save`; for the weights alone, a folder that another program
            wrote with torch.distributed.checkpoint, such as torchtitan or Fabric, or one in the
            format of Hugging Face's ``save_pretrained`` (safetensors). These have no checksums. No
            code that a file names is run.
        mesh: the current mesh.
        model: as for :func:`save`. It must not be on the meta device: call
            ``model.to_empty(device=...)`` first.
        optimizer: as for :func:`save`, of the classes that were saved.
        data: as for :func:`save`.
        cast: whether tensors may have another dtype in the model than in the checkpoint.
        strict: whether the model and the checkpoint must have the same names, and the optimizers
            the same parameters. If it is False, a new layer keeps its values, and the checkpoint
            may have layers and optimizer state that are not used. A tensor of another shape is
            still an error.
        select: which parameters and buffers to load: a function of the name, the same on every
            rank, such as ``lambda name: not name.startswith("head.")``. Everything else keeps its
            values, and may have other shapes, or be in the model or the checkpoint only.

    Returns:
        The extra values, as a dict with more attributes, as from ``load_state_dict()``:
        ``missing_keys`` (names in the model that were not loaded), ``unexpected_keys`` (names that
        only the checkpoint has) and ``unused_optimizer_keys``. The optimizer keeps the state of
        parameters that were not loaded. Gradients stay as they are, unless the checkpoint has them.

    Raises:
        CheckpointError: on every rank, with all problems at once, before anything is changed: a
            file is missing or corrupted, or an entry does not fit.
        AgreementError: some ranks did not call it within the timeout of the mesh.

    Example:
        A pretrained backbone under a new head::

            backbone = lambda name: not name.startswith("head.")
            loaded = training.load("pretrained", mesh, model, select=backbone)
            print(loaded.missing_keys)  # ["head.weight", "head.bias"]
    """
    path, mesh = checkpoint_place(path, mesh, "load")
    CheckpointRanks.from_mesh(mesh, "load").begin("load", path)
    objects = (model, optimizer, data)
    return load_objects(path, mesh, objects, cast=cast, strict=strict, select=select)[0]


def load_objects(
    path: Path, mesh: NamedMesh | None, objects: tuple[Any, ...], **options: Any
) -> tuple[Loaded, str | None]:
    """Load a checkpoint, and return its extra values and its run.

    Collective: every rank of the mesh must call it, after :meth:`CheckpointRanks.begin`.

    Args:
        path: as for :func:`load`.
        mesh: as for :func:`load`.
        objects: the arguments of :class:`State` after the mesh: model, optimizers and data loaders.
        **options: the options of :class:`Matching`.
    """
    ranks = CheckpointRanks.from_mesh(mesh, "load")
    problem = f"the checkpoint {path} could not be read"
    state = State(mesh, *objects)
    here: Names = ranks.run_on_all_ranks(problem, state.collect, Names.merge)
    checkpoint = ranks.run_on_rank0(problem, lambda: read_checkpoint(path, here.model.keys()))
    matching = Matching(state, here, checkpoint, **options)
    progress = Progress(f"loading {path}", is_shown=ranks.rank == 0)
    ranks.run_on_all_ranks(problem, matching.find_problems, matching.raise_problems)
    plan = checkpoint.plan_reads(matching.targets, matching.sources)
    ranks.run_on_all_ranks(problem, partial(checkpoint.check, plan, progress))
    ranks.run_on_all_ranks(problem, matching.check_tied_equal)

    def read() -> None:
        # Nothing has changed until here. An error after it may leave some values loaded.
        checkpoint.read(plan, matching.targets)
        progress.end()

    ranks.run_on_all_ranks(problem, read)
    ranks.run_on_all_ranks(problem, matching.apply)
    loaded = Loaded(checkpoint.extra)
    loaded.missing_keys = matching.missing_keys
    loaded.unexpected_keys = matching.unexpected_keys
    loaded.unused_optimizer_keys = matching.unused_optimizer_keys
    return loaded, checkpoint.run
