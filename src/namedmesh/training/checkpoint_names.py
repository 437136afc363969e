"""The names of a checkpoint's entries, and the values that can be entries.

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
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from namedmesh._errors import CheckpointError, format_items, get_first_line
from namedmesh._sharding import to_local
from namedmesh._torch.tensors import count_writes, get_local_tensor

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
    """The names and the optimizer options of one rank, or of all ranks together.

    Attributes:
        model: the parameters, buffers and extra states of the model, as the keys of a dict.
        aliases: every further name (alias) of a shared parameter, and the name that it is saved
            under.
        ties: the tie of ``tie_stages()``, and the end that this rank has, and the name of the
            parameter.
        params: for each optimized parameter, the number of its group.
        groups: for each group, the classes of its optimizer, and its options.
        local: the entries of optimizers that are plain tensors (and therefore differ by rank)
            although their parameter is a DTensor, as the keys of a dict.
    """

    model: dict[str, None]
    aliases: dict[str, str]
    ties: dict[tuple[str, str], str]
    params: dict[str, int]
    groups: dict[int, tuple[list[str], dict[str, Any]]]
    local: dict[str, None]

    @classmethod
    def merge(cls, names_by_rank: Sequence[Names]) -> Names:
        """Return the names of all ranks.

        Args:
            names_by_rank: the names of each rank; none for no names.
        """
        merged = cls({}, {}, {}, {}, {}, {})
        for names in names_by_rank:
            for own, all_values in zip(names, merged, strict=True):
                all_values.update(own)  # type: ignore[attr-defined]
        # A group may be empty on some ranks. The options of the others count.
        for names in names_by_rank:
            for group in names.params.values():
                merged.groups[group] = names.groups[group]
        for (tie, end), name in merged.ties.items():
            first = merged.ties.get((tie, "first"), name)
            if end == "last" and name != first:
                merged.aliases[name] = first
        return merged


def get_kind(name: str) -> str:
    """Return the kind of an entry: model, optimizer, gradient, optimizers, data or random."""
    return name.removeprefix("namedmesh.").partition(".")[0]


def name_copy(name: str, number: int) -> str:
    """Return the name of a copy of an entry."""
    return f"namedmesh.copy.{number:x}.{name}" if number else name


def format_problems(names_by_problem: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a message for each problem, with the names that have it."""
    return [f"{format_items(names)}: {problem}" for problem, names in names_by_problem.items()]


def make_path(entry: str, owners: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Return the keys of the nested dict that DCP makes of an entry.

    Args:
        entry: the name of the entry.
        owners: the parameter and the key of the entries of optimizers.
    """
    if entry in owners and not entry.startswith(GRADIENT):
        return "optimizer", "state", *owners[entry]
    return tuple(entry.split(".", 1))


def find_owner(entry: str, path: Sequence[str]) -> tuple[str, str] | None:
    """Return the parameter and the key of an entry that belongs to an optimizer's parameter.

    Args:
        entry: the name of the entry.
        path: the result of :func:`make_path`.
    """
    if entry.startswith(GRADIENT):
        return entry.removeprefix(GRADIENT), "gradient"
    return (path[2], path[3]) if path[0] == "optimizer" else None


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
        # torch's text names the type, between lines of advice to run code that a checkpoint has.
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it has {found[1]}" if found else get_first_line(error)
        remedy = "give numbers, strings, tensors, and lists, tuples and dicts of them"
        raise CheckpointError(f"{name} is not plain data ({reason}); {remedy}") from None


# --- gradients ---

# The first gradient of the last step of each optimizer, and the number of changes of the gradient
# until then. After the step, the gradient has no more effect, but most loops keep it for a while.
_used_gradients: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Tensor], int]] = (
    weakref.WeakKeyDictionary()
)
# The number of changes of the state that was loaded into an optimizer.
_loaded_states: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _note_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Remember the first gradient of an optimizer: a hook after each step."""
    if torch.compiler.is_compiling():
        return
    grad = _find_first_gradient(optimizer)
    if grad is not None:
        _used_gradients[optimizer] = weakref.ref(grad), count_writes(to_local(grad))


def note_load(optimizer: Optimizer) -> None:
    """Remember that the state of an optimizer was loaded, and does not come from a step.

    Args:
        optimizer: the optimizer, after its state was loaded.
    """
    _used_gradients.pop(optimizer, None)
    _loaded_states[optimizer] = _count_state_writes(optimizer)


def _count_state_writes(optimizer: Optimizer) -> int:
    """Return how often the tensors of an optimizer's state were written in place."""
    writes = 0
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                writes += count_writes(to_local(value))
    return writes


register_optimizer_step_post_hook(_note_step)


def _find_first_gradient(optimizer: Optimizer) -> Tensor | None:
    """Return the first gradient of an optimizer; None if it has none."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return param.grad  # type: ignore[no-any-return]
    return None


def has_used_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has stepped since the last backward.

    If no step was seen, as in compiled code, its state shows whether there was one: it is not
    empty, and not as it was loaded.

    Args:
        optimizer: the optimizer.
    """
    if optimizer not in _used_gradients:
        return bool(optimizer.state) and _loaded_states.get(optimizer) != _count_state_writes(optimizer)
    used, writes = _used_gradients[optimizer]
    grad = _find_first_gradient(optimizer)
    return grad is not None and grad is used() and count_writes(to_local(grad)) == writes
