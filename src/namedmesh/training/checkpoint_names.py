"""The names of a checkpoint's entries, and what ranks exchange about them.

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

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from namedmesh.errors import format_items

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
