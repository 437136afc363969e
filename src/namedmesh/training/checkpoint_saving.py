"""Saving: the ranks compare their values, and DCP writes them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._checks.digests import digest
from namedmesh._checks.fingerprints import LENIENT, Entry, find_differences, fingerprint
from namedmesh._checks.replicas import compare_weights
from namedmesh._errors import CheckpointError, GradientError, format_items, format_ranks
from namedmesh._sharding import to_local
from namedmesh._torch.groups import all_gather_object
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.training.checkpoint_folders import Lock, prepare_folder, remove_leftovers
from namedmesh.training.checkpoint_names import (
    GRADIENT,
    Names,
    format_entry,
    make_path,
    name_copy,
    to_plain_data,
)
from namedmesh.training.checkpoint_ranks import CheckpointRanks, SaveFuture
from namedmesh.training.checkpoint_state import State
from namedmesh.training.checkpoint_storage import Progress, StorageWriter

# Relative tolerance for the plain state of optimizers. Replicas may differ by rounding.
_STATE_TOLERANCE = 1e-2
# Characters of an extra value that a message shows.
_SHORT_TEXT = 60


class Save:
    """One save of a model, its optimizers and data loaders, and extra values.

    Args:
        path: the folder.
        mesh: the mesh; None in a process without process groups.
        objects: the arguments of :class:`State` after the mesh: model, optimizers and data loaders.
        extra: the extra values of this rank.
        run: the run that the checkpoint belongs to.
        on_finish: called on rank 0 after the checkpoint is complete.
    """

    def __init__(
        self,
        path: Path,
        mesh: NamedMesh | None,
        objects: tuple[Any, ...],
        extra: Mapping[str, Any],
        *,
        run: str | None = None,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._mesh = mesh
        self._extra = dict(extra)
        self._on_finish = on_finish
        self._state = State(mesh, *objects)
        self._ranks = CheckpointRanks.from_mesh(mesh, "save")
        self._problem = f"the checkpoint {path} could not be written"
        layout = None if mesh is None else [dict(mesh.layout.items()), mesh.layout.rank_offset]
        # What rank 0 writes about the checkpoint: the table and the manifest of pack_metadata().
        self._table: dict[str, Any] = {}
        self._manifest: dict[str, Any] = {"layout": layout, "run": run}
        self._lock: Lock | None = None  # only rank 0 has one, until the end of the save
        self._future = SaveFuture()
        self._future.set_running_or_notify_cancel()  # it cannot be canceled from now on

    def start(self, *, async_: bool) -> SaveFuture:
        """Compare the values of all ranks, and write them.

        Collective: every rank of the mesh must call it, after :meth:`CheckpointRanks.begin`.

        Args:
            async_: whether to write in the background.
        """
        ranks = self._ranks
        # Without a mesh, every call has its own CheckpointRanks, and could not wait for this save.
        in_background = async_ and self._mesh is not None
        # Two calls: the second communicates, and all ranks must have collected without an error.
        aliases, copies = ranks.run_on_all_ranks(self._problem, self._collect, self._merge)
        ranks.run_on_all_ranks(self._problem, lambda: self._prepare(aliases, in_background=in_background))
        ranks.run_on_rank0(self._problem, self._prepare_folder)
        values = rename_values(self._state, aliases, copies, ranks.rank)
        if not in_background:
            self._write(values, None)
            self._future.result()
            return self._future
        # The current device of a new thread is device 0, on which it would allocate memory.
        device = None
        if self._mesh is not None and self._mesh.device.type != "cpu":
            device = torch.accelerator.current_device_index()
        ranks.saving = self._future
        threading.Thread(target=self._write, args=(values, device), name="namedmesh save").start()
        return self._future

    def _collect(self) -> tuple[Any, ...]:
        """Collect the state of this rank, and return the summaries that the ranks compare."""
        state = self._state
        state.collect()
        state.check_gradients()
        texts: dict[str, tuple[str, int]] = {}
        for key, value in self._extra.items():
            self._extra[key] = plain = to_plain_data(value, f"the extra value {key}")
            texts[key] = (f"{plain!r:.{_SHORT_TEXT}}", digest(plain))
        # A single process has nothing to compare with.
        return state.names, texts, {} if state.mesh is None else summarize_values(state)

    def _merge(self, reports: list[Any]) -> tuple[Any, ...]:
        """Fill the table on rank 0, and return the aliases and copies of all ranks."""
        names_by_rank, texts_by_rank, summaries = zip(*reports, strict=True)
        check_extra_equal(texts_by_rank)
        names = Names.merge(names_by_rank)
        copies = find_copies(summaries)
        self._table = {"names": tuple(names._replace(model={})), "copies": copies, "extra": self._extra}
        return names.aliases, copies

    def _prepare(self, aliases: Mapping[str, str], *, in_background: bool) -> None:
        """Compare the weights, and copy all values if training continues before they are written."""
        self._state.all_reduce_partial()
        if self._mesh is not None:
            check_replicas(self._state, self._mesh, aliases)
        if in_background:
            self._state.copy_to_cpu(self._ranks.pinned)

    def _prepare_folder(self) -> None:
        self._lock, self._manifest["order"] = prepare_folder(self._path)

    def _write(self, values: dict[str, Any], device: int | None) -> None:
        """Write the values of this rank, and finish the future.

        Args:
            values: the values.
            device: the device of this rank, if this is a thread.
        """
        progress = Progress(f"saving {self._path}", is_shown=self._ranks.rank == 0)
        writer = StorageWriter(self._path, self._table, self._manifest, self._finish)
        if self._ranks.saving is self._future:
            # Otherwise DCP copies ahead on a stream of an accelerator, which the CPU does not need.
            writer.per_thread_copy_ahead = 0
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            with self._ranks.reraise_on_all_ranks(self._problem):
                planner = SavePlanner(values, self._state.owners, progress)
                dcp.save({}, storage_writer=writer, planner=planner, **self._ranks.dcp_arguments)
        except BaseException as error:  # noqa: BLE001  also if it is interrupted
            # The checkpoint may be complete nevertheless: if a rank dies after _finish(), only the
            # last broadcast of DCP fails. remove_leftovers() keeps a complete checkpoint.
            self._lock = None
            if self._ranks.rank == 0:
                with suppress(OSError):  # the next save removes what cannot be removed now
                    remove_leftovers(self._path)
            self._future.set_exception(error)
        else:
            self._lock = None
            self._future.set_result(self._path)
        progress.end()

    def _finish(self) -> None:
        """Remove the files that the checkpoint replaces. DCP calls it on rank 0."""
        remove_leftovers(self._path)
        self._on_finish()


def check_extra_equal(texts_by_rank: Sequence[Mapping[str, tuple[str, int]]]) -> None:
    """Check that all ranks have given the same extra values.

    Args:
        texts_by_rank: for each rank, the text and the digest of each value.

    Raises:
        CheckpointError: the values of some ranks differ, or are not given on all ranks.
    """
    problems = []
    for key in dict.fromkeys(chain.from_iterable(texts_by_rank)):
        text_by_digest: dict[int, str] = {}
        ranks_by_digest: dict[int, list[int]] = {}
        for rank, texts in enumerate(texts_by_rank):
            text, at = texts.get(key, ("not given", 0))
            text_by_digest.setdefault(at, text)
            ranks_by_digest.setdefault(at, []).append(rank)
        if len(ranks_by_digest) > 1:
            values = [
                f"{text_by_digest[at]} on {format_ranks(ranks)}" for at, ranks in ranks_by_digest.items()
            ]
            problems.append(f"{key} is {format_items(values, 4)}")
    if problems:
        raise CheckpointError(
            f"the extra values differ between ranks: {format_items(problems, 4)}; give every rank "
            "the same, such as a list of the values of all ranks"
        )


def check_replicas(state: State, mesh: NamedMesh, aliases: Mapping[str, str]) -> None:
    """Check that parameters of one name are one weight, on replicas and on pipeline stages.

    Collective: every rank must call it.

    Args:
        state: this rank's collected state.
        mesh: the mesh.
        aliases: the aliases of parameters on any rank, and the names that they are saved under.

    Raises:
        CheckpointError: on every rank that compares them, they differ.
    """
    problems = []
    params = {aliases.get(name, name): param for name, param in state.params.items()}
    for name in _find_differences_along("pp", params, mesh):
        problems.append(
            f"{name!r} has other values on other stages, and a checkpoint has one tensor of each "
            "name. The name of a layer has its number in the full model (training.stage_layers), "
            "and tied weights are equal"
        )
    experts = {name: state.params[name] for name in state.plain_experts}
    for name in _find_differences_along("ep", experts, mesh):
        problems.append(
            f"{name!r} is another expert on other ranks of 'ep', and a checkpoint has one tensor of "
            "each name; give each expert its number in the full model, or shard one DTensor"
        )
    try:
        # It communicates, so no rank may raise an error before.
        compare_weights(list(chain.from_iterable(map(nn.Module.parameters, state.modules))), mesh)
    except GradientError as error:
        problems.extend(error.problems)
    if problems:
        raise CheckpointError(*problems)


def _find_differences_along(axis: str, params: Mapping[str, Tensor], mesh: NamedMesh) -> list[str]:
    """Return the names of parameters that several ranks along an axis have with other values.

    Collective over the axis: every rank of the mesh must call it.
    """
    if axis not in mesh or mesh.size(axis) == 1:
        return []
    group = mesh.group(axis)
    counts = Counter(chain.from_iterable(all_gather_object(group, list(params))))
    entries = []
    for name, param in params.items():
        if counts[name] > 1:
            entries.append(Entry("weights", name, param.detach(), to_local(param).numel(), LENIENT))
    return [name for _, name in find_differences(entries, group, mesh.device)]


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's save planner with the entries of a rank.

    DCP removes the entries that several ranks have under one name, and balances the writes.

    Args:
        values: this rank's entries.
        owners: the parameter and the key of the entries of optimizers.
        progress: counts the bytes.
    """

    def __init__(
        self, values: Mapping[str, Any], owners: Mapping[str, tuple[str, str]], progress: Progress
    ) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._entries = dict(values)
        self._owners = owners
        self._progress = progress

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Use these entries. DCP's ``save`` logs every value in the state dict that it is given."""
        self.state_dict: dict[str, Any] = self._entries
        self.is_coordinator = is_coordinator
        self.mappings = {name: make_path(name, self._owners) for name in self._entries}

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        """Make the plans of all ranks, on rank 0.

        Raises:
            CheckpointError: no rank has some shards of a tensor. DCP's error does not name it.
        """
        missing: Counter[str] = Counter()
        for item in chain.from_iterable(plan.items for plan in all_plans):
            if item.tensor_data is not None:
                missing.setdefault(item.index.fqn, prod(item.tensor_data.size))
                missing[item.index.fqn] -= prod(item.tensor_data.chunk.sizes)
        names = []
        for name, count in missing.items():
            if count > 0:
                names.append(format_entry(name, self._owners))
        if names:
            raise CheckpointError(
                f"{format_items(names, 4)}: some ranks do not have their shards, such as the state of "
                "experts without tokens; save after a step in which every rank has had gradients"
            )
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: Any) -> Any:
        """Return the data of an item, for DCP to write."""
        data = super().resolve_data(write_item)
        self._progress.add(data.nbytes if isinstance(data, Tensor) else len(data.getbuffer()))
        return data


def summarize_values(state: State) -> dict[str, list[float] | int]:
    """Return a summary of each entry whose value may differ between ranks.

    Parameters and DTensors may not. The summary is a hash. For a plain tensor of an optimizer that
    has its parameter's shape, it is a fingerprint, as replicas may differ by rounding.
    """
    summaries: dict[str, list[float] | int] = {}
    for name, value in state.values.items():
        if isinstance(value, DTensor) or name.removeprefix("model.") in state.params:
            continue
        param = state.params[state.owners[name][0]] if name in state.owners else None
        if isinstance(value, Tensor) and param is not None and value.shape == param.shape:
            summaries[name] = fingerprint([value], value.numel())[0].sum(0).tolist()
        else:
            summaries[name] = digest(value)
    return summaries


def find_copies(summaries_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    """Return the entries that differ between ranks, with the number of each rank's copy.

    The copy of the lowest rank has the number 0: it keeps the name of the entry.

    Args:
        summaries_by_rank: the result of :func:`summarize_values` on each rank.
    """
    by_name: dict[str, dict[int, Any]] = {}
    for rank, summaries in enumerate(summaries_by_rank):
        for name, summary in summaries.items():
            by_name.setdefault(name, {})[rank] = summary
    copies: dict[str, dict[int, int]] = {}
    for name, by_rank in by_name.items():
        first = next(iter(by_rank.values()))
        if not all(_match(first, summary) for summary in by_rank.values()):
            numbers = {rank: digest(summary) for rank, summary in by_rank.items()}
            copies[name] = {rank: 0 if at == digest(first) else at for rank, at in numbers.items()}
    return copies


def _match(one: Any, other: Any) -> bool:
    """Return whether the values of two summaries are equal, up to rounding."""
    if isinstance(one, int) or isinstance(other, int):
        return bool(one == other)
    limit = _STATE_TOLERANCE * max(map(abs, [*one, *other]))
    return all(abs(first - second) <= limit for first, second in zip(one, other, strict=True))


def rename_values(
    state: State, aliases: Mapping[str, str], copies: Mapping[str, Mapping[int, int]], rank: int
) -> dict[str, Any]:
    """Return this rank's entries, with the names of its copies, and without those of aliases.

    The two ends of a tied weight have gradients of their own until they are summed.

    Args:
        state: this rank's collected state.
        aliases: the aliases of parameters on any rank, and the names that they are saved under.
        copies: the result of :func:`find_copies`.
        rank: this rank.
    """
    values: dict[str, Any] = {}
    for name, value in state.values.items():
        param = state.owners[name][0] if name in state.owners else name.removeprefix("model.")
        if param not in aliases or name.startswith(GRADIENT):
            values[name_copy(name, copies.get(name, {}).get(rank, 0))] = value
    return values
