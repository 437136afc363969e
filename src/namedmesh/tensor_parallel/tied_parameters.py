"""Tied parameters: one tensor under two names, which a plan has to shard the same way under both."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.errors import listing
from namedmesh.tensor_parallel.placements import parameter_placements, placement_name

if TYPE_CHECKING:
    from torch import nn

    from namedmesh.tensor_parallel.placements import Entry


@dataclass(frozen=True)
class Tie:
    """The modules that hold one parameter, each with the name it has there."""

    holders: tuple[tuple[nn.Module, str], ...]

    def restore(self) -> None:
        """Set the first holder's parameter on every other one."""
        module, name = self.holders[0]
        shared = module.get_parameter(name)
        for other, other_name in self.holders[1:]:
            other.register_parameter(other_name, shared)


def find_ties(model: nn.Module, entries: list[Entry]) -> tuple[list[Tie], list[str]]:
    """Return the ties to restore after a plan is applied, and those that the plan would break."""
    layouts: dict[tuple[int, str], str] = {}
    for entry in entries:
        placements = parameter_placements(entry.style, entry.module)
        for name, _ in entry.module.named_parameters():
            if placements is None:
                layouts[id(entry.module), name] = f"as {type(entry.style).__name__} decides"
            elif name in placements:
                layouts[id(entry.module), name] = placement_name(placements[name])
    ties, problems = [], []
    for names in _shared(model).values():
        named = [(fqn, layouts.get((id(module), name))) for fqn, module, name in names]
        distinct = {layout for _, layout in named}
        if distinct == {None}:
            continue
        if len(distinct) == 1:
            ties.append(Tie(tuple((module, name) for _, module, name in names)))
        else:
            problems.append(_broken(named))
    return ties, problems


def _shared(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Return the parameters that more than one module holds: every holder, with its fully qualified name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, dict[tuple[int, str], tuple[str, nn.Module, str]]] = defaultdict(dict)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, name = fqn.rpartition(".")
        module = modules[owner]
        # One module under two names is not a tie: it is sharded once.
        holders[id(parameter)].setdefault((id(module), name), (fqn, module, name))
    return {key: list(found.values()) for key, found in holders.items() if len(found) > 1}


def _broken(named: list[tuple[str, str | None]]) -> str:
    names = listing((fqn for fqn, _ in named), 4)
    layouts = listing((f"{fqn}: {layout or 'not sharded'}" for fqn, layout in named), 4)
    return (
        f"{names} are one parameter (tied), but the plan lays them out differently ({layouts}); give them "
        f"the same layout, such as RowwiseParallel for an embedding and ColwiseParallel for the output head, "
        f"or untie them first"
    )
