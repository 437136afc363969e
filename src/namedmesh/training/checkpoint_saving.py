"""Saving: the ranks compare their values, and DCP's planner gets the entries to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._checks import LENIENT, Entry, compare_weights, digest, find_differences, fingerprint
from namedmesh._torch import all_gather_object
from namedmesh.errors import CheckpointError, GradientError, format_items, format_ranks
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import to_local
from namedmesh.training.checkpoint_names import GRADIENT, Names, make_path, name_copy, to_plain_data
from namedmesh.training.checkpoint_ranks import CheckpointRanks
from namedmesh.training.checkpoint_state import State
from namedmesh.training.checkpoint_storage import Progress

# Relative tolerance for the plain state of optimizers. Replicas may differ by rounding.
_STATE_TOLERANCE = 1e-2
# Characters of an extra value that a message shows, and that ranks compare if it has no more.
_SHORT_TEXT = 60


def agree_on_values(
    state: State, ranks: CheckpointRanks, extra: Mapping[str, Any], problem: str, *, in_background: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collect the state of this rank, and compare it with the other ranks.

    Collective: every rank must call it.

    Args:
        state: the state, which is filled.
        ranks: the ranks.
        extra: the extra values of this rank.
        problem: the start of the message for unexpected errors.
        in_background: whether the values are written while training continues.

    Returns:
        The entries that this rank writes, and the table of the checkpoint. Only that of rank 0 is
        complete.
    """
    table: dict[str, Any] = {}
    plain: dict[str, Any] = {}

    def collect() -> tuple[Any, ...]:
        state.collect()
        state.check_gradients()
        leaves: dict[str, str] = {}
        for key, value in extra.items():
            plain[key] = to_plain_data(value, f"the extra value {key}")
            leaves |= _list_leaves(key, plain[key])
        # A single process has nothing to compare with.
        return state.names, leaves, {} if state.mesh is None else summarize_values(state)

    def merge(reports: list[Any]) -> tuple[Any, ...]:
        names_by_rank, leaves, summaries = zip(*reports, strict=True)
        _check_extra_equal(leaves)
        names = Names.merge(names_by_rank)
        copies = find_copies(summaries)
        table.update(names=tuple(names._replace(model={})), copies=copies, extra=plain)
        return names.aliases, copies

    # Two calls: prepare() communicates, and all ranks must have collected without an error.
    aliases, copies = ranks.run_on_all_ranks(problem, collect, merge)

    def prepare() -> None:
        state.all_reduce_partial()
        if state.mesh is not None:
            _check_replicas(state, state.mesh, aliases)
        if in_background:
            state.copy_to_cpu(ranks.pinned)

    ranks.run_on_all_ranks(problem, prepare)
    return rename_values(state, aliases, copies, ranks.rank), table


def _check_extra_equal(leaves_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have given the same extra values.

    Args:
        leaves_by_rank: the result of :func:`_list_leaves` for the extra values of each rank.

    Raises:
        CheckpointError: on every rank, with the values that differ.
    """
    problems = []
    for leaf in dict.fromkeys(chain.from_iterable(leaves_by_rank)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, leaves in enumerate(leaves_by_rank):
            ranks_by_value.setdefault(leaves.get(leaf, "not given"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{text} on {format_ranks(ranks)}" for text, ranks in ranks_by_value.items()]
            problems.append(f"{leaf} is {format_items(values, 4)}")
    if problems:
        raise CheckpointError(
            f"the extra values differ between ranks: {format_items(problems, 4)}; give every rank "
            "the same, such as a list of the values of all ranks"
        )


def _list_leaves(path: str, value: Any) -> dict[str, str]:
    """Return the values in nested dicts and lists by their paths, as short texts that differ."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    leaves: dict[str, str] = {}
    for key, item in items:
        leaves |= _list_leaves(f"{path}[{key!r}]", item)
    text = repr(value)
    if not isinstance(value, str | int | float | None) or len(text) > _SHORT_TEXT:
        text = f"{text[:_SHORT_TEXT]} ({digest(value):x})"
    return leaves or {path: text}


def _check_replicas(state: State, mesh: NamedMesh, aliases: Mapping[str, str]) -> None:
    """Check that parameters of one name are one weight. Collective: every rank must call it.

    Raises:
        CheckpointError: on every rank that compares them, they differ.
    """
    problems = _find_unequal_stages(state, mesh, aliases)
    try:
        # It communicates, so no rank may raise an error before.
        compare_weights(list(chain.from_iterable(map(nn.Module.parameters, state.modules))), mesh)
    except GradientError as error:
        problems.extend(error.problems)
    if problems:
        raise CheckpointError(*problems)


def _find_unequal_stages(state: State, mesh: NamedMesh, aliases: Mapping[str, str]) -> list[str]:
    """Return a message for each parameter that has other values on another pipeline stage.

    Collective: every rank of the mesh must call it.
    """
    if "pp" not in mesh.layout or mesh.size("pp") == 1:
        return []
    group = mesh.group("pp")
    params = {aliases.get(name, name): param for name, param in state.params.items()}
    counts = Counter(chain.from_iterable(all_gather_object(group, list(params))))
    entries = []
    for name, param in params.items():
        if counts[name] > 1:
            entries.append(Entry("weights", name, param.detach(), to_local(param).numel(), LENIENT))
    problems = []
    for _, name in find_differences(entries, group, mesh.device):
        problems.append(
            f"{name!r} has other values on other stages, and a checkpoint has one tensor of each "
            "name. The name of a layer has its number in the full model (training.stage_layers), "
            "and tied weights are equal"
        )
    return problems


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
        self.state_dict = self._entries
        self.is_coordinator = is_coordinator
        self.mappings = {name: make_path(name, self._owners) for name in self._entries}

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
