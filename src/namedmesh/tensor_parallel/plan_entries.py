"""Find the modules that a plan names, and the placements of their parameters.

Nothing here changes the model or communicates.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from namedmesh.errors import did_you_mean, format_items
from namedmesh.tensor_parallel.styles import layer_placements

Plan: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"
"""A style for the model itself, or a style for each name, or pattern of names, of modules."""

LAYER_STYLES = (torch_styles.ColwiseParallel, torch_styles.RowwiseParallel)
"""The styles for linears and embeddings: torch's own, and the subclasses of namedmesh."""


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
    style: ParallelStyle
    key: str


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
    children = _index_children(modules)
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
        fqns = _find_modules(children, key)
        if not fqns and strict:
            problems.append(_format_unmatched_key(key, modules))
        for fqn in fqns:
            module = modules[fqn]
            entry = entries.setdefault(module, PlanEntry(fqn, module, style, key))
            # The same key may match a module under two names.
            if entry.key != key:
                clashes[entry.key, key].append(fqn)
    for (first, second), fqns in clashes.items():
        problems.append(
            f"{first!r} and {second!r} both match {format_items(fqns, 3)}; one module takes one style"
        )
    return list(entries.values()), problems


def _index_children(fqns: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of the children of each module, by the last token of the name."""
    children: dict[str, dict[str, str]] = defaultdict(dict)
    for fqn in fqns:
        if fqn:
            parent, _, token = fqn.rpartition(".")
            children[parent][token] = fqn
    return children


def _find_modules(children: Mapping[str, Mapping[str, str]], key: str) -> list[str]:
    """Return the names of the modules that a key matches.

    It goes down one level of the model for each token of the key. To compare every key with every
    name would take time that is quadratic in the number of layers.
    """
    if not key:
        return [""]
    fqns = [""]
    for pattern in key.split("."):
        is_wildcard = any(character in pattern for character in "*?[")
        matched: list[str] = []
        for fqn in fqns:
            names = children.get(fqn, {})
            if not is_wildcard:
                if pattern in names:
                    matched.append(names[pattern])
                continue
            for token, child in names.items():
                if fnmatchcase(token, pattern):
                    matched.append(child)
        fqns = matched
    return fqns


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


def compute_placements(entry: PlanEntry, tp_size: int) -> dict[str, Placement]:
    """Return the placements that a style gives to the parameters of its module, by name.

    They may name parameters that do not exist. The result is empty for a style of torch's, or of a
    third party, that does not state its placements before it is applied.

    Args:
        entry: the module and its style.
        tp_size: the number of ranks.
    """
    style = entry.style
    # The styles of namedmesh have this method. torch's base class does not.
    if hasattr(style, "layout"):
        placements: dict[str, Placement] = style.layout(entry.module, tp_size)
        return placements
    if isinstance(style, LAYER_STYLES):
        return layer_placements(style, entry.module)
    if isinstance(style, torch_styles.SequenceParallel):
        return dict.fromkeys(dict(entry.module.named_parameters(remove_duplicate=False)), Replicate())
    return {}


def iter_placements(entry: PlanEntry, tp_size: int) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Yield the parameters that a style replaces with DTensors.

    Args:
        entry: the module and its style.
        tp_size: the number of ranks.

    Yields:
        The name, the parameter and its placement.
    """
    placements = compute_placements(entry, tp_size)
    for name, param in entry.module.named_parameters(remove_duplicate=False):
        if name in placements:
            yield name, param, placements[name]


def format_placement(placement: Placement | None) -> str:
    """Format the placement of a parameter for a message or a table.

    Args:
        placement: ``Shard(dim)`` or ``Replicate()``; None if no style places the parameter.
    """
    if placement is None:
        return "not in the plan"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return "Replicate()"
