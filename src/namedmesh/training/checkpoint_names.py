"""The names and values of a checkpoint's entries.

The names of entries are

- ``model.NAME``: a parameter, a buffer or an extra state;
- ``optimizer.state.PARAMETER.KEY``: the state of an optimizer for one parameter;
- ``namedmesh.gradient.PARAMETER``: a gradient that an optimizer has not cleared yet;
- ``namedmesh.optimizers.NUMBER``: the state of an optimizer that belongs to no parameter;
- ``namedmesh.data.NUMBER``: the state of a data loader;
- ``namedmesh.random.NAME``: the state of a random generator;
- ``namedmesh.copy.NUMBER.NAME``: a copy of an entry, if its values differ between ranks.

The first two are the names that torch gives to the state dicts of a model and its optimizers. None
of them depends on the layout.
"""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._torch import get_local_tensor
from namedmesh.errors import CheckpointError, format_items, get_first_line
from namedmesh.mesh import NamedMesh
from namedmesh.training import seeds

# The messages for entries that a checkpoint does not have for this rank, by the kind of the entry.
# Random states are not among them: without one, the generators keep their state.
MISSING = {
    "model": "not in {}",
    "optimizer": "kept by the optimizer for the shard of one rank, and no rank has this shard now; "
    "load {} in its original layout, or without the optimizer",
    "gradient": "a gradient of one rank, and no rank stands for it now; load {} in its original "
    "layout, or without the optimizer",
    "optimizers": "its state in addition to the state of its parameters is not in {}; create it from "
    "the same parameters, or load without it",
    "data": "no state of the data loader for this rank in {}, which was saved with other data ranks; "
    "load it without data=, and skip the samples that were seen (a position that counts the "
    "samples of all ranks can be an extra value)",
}

GROUPS = 10**6
"""A parameter group has the number ``GROUPS * optimizer + position``."""

GRADIENT = "namedmesh.gradient."


class Names(NamedTuple):
    """Parameter names of one rank.

    Attributes:
        aliases: every further name (alias) of a shared parameter, and the name that it is saved
            under.
        ties: the tie of ``tie_stages()``, and the end that this rank has, and the name of the
            parameter.
    """

    aliases: dict[str, str]
    ties: dict[tuple[str, str], str]


class Options(NamedTuple):
    """How parameters are optimized.

    Attributes:
        params: for each parameter, the classes of its optimizer, the number of its group, and the
            options of the group.
        groups: the options of each group, also of groups without parameters.
    """

    params: dict[str, tuple[list[str], int, dict[str, Any]]]
    groups: dict[int, dict[str, Any]]


def get_kind(name: str) -> str:
    """Return the kind of an entry: model, optimizer, gradient, optimizers, data or random."""
    return name.removeprefix("namedmesh.").partition(".")[0]


def name_copy(name: str, number: int) -> str:
    """Return the name of a copy of an entry."""
    return f"namedmesh.copy.{number:x}.{name}" if number else name


def format_problems(names_by_problem: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a message for each problem, with the names that have it."""
    return [f"{format_items(names)}: {problem}" for problem, names in names_by_problem.items()]


def merge_aliases(names_by_rank: Iterable[Names]) -> dict[str, str]:
    """Merge the aliases of all ranks into a dict from alias to the name it is saved under.

    Args:
        names_by_rank: the names of each rank: parameters with several names there, and parameters
            that tie_stages() has tied across two ranks.
    """
    aliases: dict[str, str] = {}
    ends: dict[tuple[str, str], str] = {}
    for names in names_by_rank:
        aliases |= names.aliases
        ends |= names.ties
    for (tie, end), name in ends.items():
        first = ends.get((tie, "first"), name)
        if end == "last" and name != first:
            aliases[name] = first
    return aliases


def merge_options(options_by_rank: Iterable[Options | None]) -> Options:
    """Merge the options of all ranks. A rank whose options another one has may give None."""
    merged = Options({}, {})
    for options in filter(None, options_by_rank):
        merged.params.update(options.params)
        merged.groups.update(options.groups)
    # A group may be empty on some ranks. The options of the others count.
    for _, group, group_options in merged.params.values():
        merged.groups[group] = group_options
    return merged


def find_owner(entry: str, params: Container[str]) -> tuple[str, str] | None:
    """Return the parameter and the key of an entry that belongs to an optimizer's parameter.

    Args:
        entry: the name of the entry.
        params: the names of all optimized parameters. They may contain any characters.
    """
    if entry.startswith(GRADIENT):
        return entry.removeprefix(GRADIENT), "gradient"
    if not entry.startswith("optimizer.state."):
        return None
    parts = entry.removeprefix("optimizer.state.").split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if name in params:
            return name, ".".join(parts[count:])
    return None


def format_entry(name: str, owners: Mapping[str, tuple[str, str]]) -> str:
    """Format the name of an entry for messages, without its prefix.

    Args:
        name: the name.
        owners: the parameter and the key of the entries of optimizers.
    """
    if name in owners:
        return repr(":".join(owners[name]))
    if name.startswith("model."):
        return repr(name.removeprefix("model."))
    kind, _, rest = name.removeprefix("namedmesh.").partition(".")
    return f"optimizer {rest}" if kind == "optimizers" else repr(rest)


def is_valid_in(mesh: NamedMesh | None, name: str, layout: tuple[dict[str, int], int] | None) -> bool:
    """Return whether a layout allows to load an RNG state or a data loader's state.

    Other entries can be loaded in any layout. These two cannot, even if all ranks had the same
    state: with more ranks, random values would repeat, and the position of a sampler counts the
    samples of one rank.

    Args:
        mesh: the current mesh.
        name: the name of the entry.
        layout: the sizes of the axes when it was saved, and the first rank; None without a mesh.
    """
    kind = get_kind(name)
    if kind not in {"random", "data"}:
        return True
    generator = "data" if kind == "data" else name.removeprefix("namedmesh.random.")
    equal = seeds.find_axes_with_equal_state(generator)
    before = _drop_axes({} if layout is None else layout[0], equal)
    now = _drop_axes({} if mesh is None else dict(mesh.layout.items()), equal)
    if kind == "data":  # samplers know the number of data ranks, not their axes
        return prod(before.values()) == prod(now.values())
    return before == now


def _drop_axes(sizes: Mapping[str, int], axes: Iterable[str]) -> dict[str, int]:
    """Return ``sizes`` without ``axes`` and without axes of size 1."""
    return {axis: size for axis, size in sizes.items() if size > 1 and axis not in axes}


def check_storable(tensor: Tensor, label: str) -> None:
    """Check that a tensor is a plain one, which every program can read back.

    Args:
        tensor: the tensor.
        label: its name, for messages.

    Raises:
        CheckpointError: it is sparse, nested or quantized, or of another class.
    """
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if type(local) not in {Tensor, nn.Parameter}:
        local = local.detach()  # a subclass of nn.Parameter may be an ordinary tensor
    is_plain = type(local) in {Tensor, nn.Parameter} and local.layout is torch.strided
    if not is_plain or local.is_quantized or local.is_nested:
        kind = (
            type(local).__name__ if type(local) is not Tensor else f"tensor of {local.dtype}, {local.layout}"
        )
        raise CheckpointError(
            f"{label}: a {kind} cannot be saved, because a load could not restore it; save it as "
            "plain tensors, or register it with persistent=False"
        )


def to_plain_data(value: object, name: str) -> Any:
    """Return a copy of an object as it is after a save and a load.

    Args:
        value: numbers, strings, tensors, and lists, tuples and dicts of them.
        name: the name of the object, for messages.

    Raises:
        CheckpointError: the object needs code to be read, which a checkpoint never runs.
    """
    # Writing and reading it once finds every value that the load would reject later.
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        return torch.load(written, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  each type has its own error
        remedy = "give numbers, strings, tensors, and lists, tuples and dicts of them"
        raise CheckpointError(f"{name} is not plain data ({get_first_line(error)}); {remedy}") from None
