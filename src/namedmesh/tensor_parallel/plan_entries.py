"""Find the modules that a plan names, and the placements of their parameters.

Nothing here changes the model or communicates.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from namedmesh._errors import did_you_mean, format_items
from namedmesh.tensor_parallel.base_styles import Style, TorchStyle

Plan: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"
"""A style for the model itself, or a style for each name, or pattern of names, of modules."""


class PlanEntry(NamedTuple):
    """A module that a plan names, and the style that the plan gives it.

    Attributes:
        fqn: the fully qualified name of the module; empty for the model itself.
        module: the module.
        style: the parallel style.
        key: the name or pattern in the plan that matches ``fqn``.
    """

    fqn: str
    module: nn.Module
    style: Style
    key: str

    def iter_placements(self, tp_size: int) -> Iterator[tuple[str, nn.Parameter, Placement]]:
        """Yield the name, parameter and placement of each parameter that the style replaces.

        Args:
            tp_size: the number of ranks.
        """
        placements = self.style.layout(self.module, tp_size)
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if name in placements:
                yield name, param, placements[name]


def match_plan(model: nn.Module, plan: Any, *, strict: bool) -> tuple[list[PlanEntry], list[str]]:
    """Find the modules that a plan names.

    Args:
        model: the model.
        plan: the plan. Its values are checked, because users write them.
        strict: whether a key that matches no module is a problem.

    Returns:
        One entry for each module, in the order of the plan, and a message for each problem.
    """
    if isinstance(plan, ParallelStyle):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        got = f"plan must be a parallel style or a dict of module names to parallel styles, got {plan!r}"
        return [], [f"{got} ({type(plan).__name__}); write {{'layers.*.up': ColwiseParallel()}}"]
    # A module that is registered under several names can be matched by each of them.
    modules = dict(model.named_modules(remove_duplicate=False))
    problems: list[str] = []
    entries: dict[nn.Module, PlanEntry] = {}
    clashes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, style in plan.items():
        if not isinstance(key, str):
            problems.append(f"{key!r} ({type(key).__name__}) is not the name of a module, which is a str")
            continue
        # Strings, as in the plans of Hugging Face, are a usual mistake.
        if not isinstance(style, ParallelStyle):
            problems.append(f"{key!r}: {style!r} is not a parallel style, such as ColwiseParallel()")
            continue
        fqns = _find_modules(modules, key)
        if not fqns and strict:
            problems.append(_format_unmatched_key(key, modules))
        for fqn in fqns:
            module = modules[fqn]
            known_style = style if isinstance(style, Style) else TorchStyle(style)
            entry = entries.setdefault(module, PlanEntry(fqn, module, known_style, key))
            # The same key may match a module under two names.
            if entry.key != key:
                clashes[entry.key, key].append(fqn)
    for (first, second), fqns in clashes.items():
        problems.append(
            f"{first!r} and {second!r} both match {format_items(fqns, 3)}; one module takes one style"
        )
    return list(entries.values()), problems


def _find_modules(modules: Mapping[str, nn.Module], key: str) -> list[str]:
    """Return the names of the modules that a key matches."""
    # Only a pattern is compared with all names: a large model may have a key for each of its layers.
    if not any(character in key for character in "*?["):
        return [key] if key in modules else []
    return [fqn for fqn in modules if key_matches(key, fqn)]


def _format_unmatched_key(key: str, modules: Mapping[str, nn.Module]) -> str:
    candidates = list(modules)
    if "*" in key:
        # The names of all layers are then the same, and near to a key with a pattern.
        candidates = [re.sub(r"\b\d+\b", "*", fqn) for fqn in candidates]
    remedy = "pass strict=False for a pipeline stage, which has only some of the modules"
    return f"{key!r} matches no module of the model{did_you_mean(key, candidates)} ({remedy})"


def key_matches(key: str, fqn: str) -> bool:
    """Return whether a key matches a name, token by token.

    Args:
        key: a name in which every token may be a pattern, such as ``"layers.*.up"``. The empty key
            matches the model itself only.
        fqn: the fully qualified name of a module or a parameter.
    """
    if not key or not fqn:
        return key == fqn
    patterns = key.split(".")
    tokens = fqn.split(".")
    return len(patterns) == len(tokens) and all(map(fnmatchcase, tokens, patterns))


def format_placement(placement: Placement | None) -> str:
    """Format the placement of a parameter for a message or a table.

    Args:
        placement: ``Shard(dim)`` or ``Replicate()``; None if no style places the parameter.
    """
    if placement is None:
        return "not in the plan"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"
