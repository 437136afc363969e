"""From a plan to the modules it means: strict and pure, with every problem found before anything changes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from namedmesh._torch import absent_children
from namedmesh.errors import PlanError, did_you_mean, listing
from namedmesh.tensor_parallel.adapters import with_adapters
from namedmesh.tensor_parallel.attention_heads import head_reasons, with_counts
from namedmesh.tensor_parallel.fused import fused_reasons
from namedmesh.tensor_parallel.module_setup import NAME
from namedmesh.tensor_parallel.placements import (
    Entry,
    accepts_sharded_module,
    incompatibilities,
    parameter_placements,
    placement_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.tensor.placement_types import Placement

Plan: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"

_SIZE_NAMES = {
    nn.Linear: ("out_features", "in_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
}


Holders: TypeAlias = "list[tuple[str, nn.Module, str]]"
"""The modules that hold one parameter: the name of each, the module, and the parameter's name there."""


def resolve(
    model: nn.Module, mesh_or_tp_size: DeviceMesh | int, plan: Plan, must_divide: Mapping[str, int] | None
) -> tuple[list[Entry], list[Holders]]:
    """Match a plan with a model, and check everything that can be checked without communication.

    Returns:
        What to apply, in order, and which parameters to tie again afterwards.

    Raises:
        PlanError: with every problem there is.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise PlanError(f"model is a {type(given).__name__}; give the module whose submodules the plan names")
    problems, tp_size = mesh_problems(mesh_or_tp_size)
    entries, matching_problems = _match(model, plan)
    problems += matching_problems
    entries, reasons = with_adapters(entries)
    entries = with_counts(model, entries, tp_size)
    fitting = []
    for entry in entries:
        against = incompatibilities(entry.style, entry.module)
        if NAME in vars(entry.module) and not accepts_sharded_module(entry.style):
            against = ["already parallelized; parallelize a model once"]
        reasons += [(entry.fqn, reason) for reason in against]
        if not against:
            fitting.append(entry)
    reasons += _size_reasons(fitting, tp_size)
    reasons += head_reasons(model, fitting, tp_size)
    reasons += fused_reasons(fitting, tp_size)
    places: dict[str, list[str]] = defaultdict(list)
    for fqn, reason in reasons:
        places[reason].append(fqn or "the model")
    problems += [f"{listing(fqns, 3)}: {reason}" for reason, fqns in places.items()]
    problems += [
        f"{name}: {value} is not divisible by the tp size {tp_size} (from must_divide); "
        f"choose a tp size that divides it"
        for name, value in (must_divide or {}).items()
        if value % tp_size
    ]
    ties, tie_problems = _find_ties(model, fitting)
    problems += tie_problems
    if problems:
        raise PlanError(*problems)
    return entries, ties


def mesh_problems(mesh_or_tp_size: object) -> tuple[list[str], int]:
    """Return what is wrong with a mesh, or with a number of ranks, and the number to go on checking with."""
    if isinstance(mesh_or_tp_size, DeviceMesh):
        mesh = mesh_or_tp_size
        if mesh.ndim == 1:
            return [], mesh.size()
        axes = mesh.mesh_dim_names
        named = f"axes {axes}" if axes else "unnamed axes"
        example = "tp" if axes is None or "tp" in axes else axes[-1]
        problem = (
            f"a plan is applied along one axis, but the mesh has {mesh.ndim} ({named}); "
            f"pass one of them, such as mesh[{example!r}]"
        )
        return [problem], 1
    if isinstance(mesh_or_tp_size, int) and not isinstance(mesh_or_tp_size, bool):
        if mesh_or_tp_size >= 1:
            return [], mesh_or_tp_size
        return [f"the tp size is {mesh_or_tp_size}, but it must be at least 1"], 1
    kind = type(mesh_or_tp_size).__name__
    return [f"a plan needs a one-dimensional torch DeviceMesh, not a {kind}; pass mesh['tp']"], 1


def _match(model: nn.Module, plan: object) -> tuple[list[Entry], list[str]]:
    """Return the modules that the plan names, and what it names wrongly."""
    if isinstance(plan, ParallelStyle):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        return [], [f"a plan is a dict of module names to parallel styles, not a {type(plan).__name__}"]
    names: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    entries, problems = [], []
    owners: dict[int, Entry] = {}
    clashes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            hint = "; plan_from_hf reads Hugging Face's names" if isinstance(style, str) else ""
            problems.append(f"{key!r}: {style!r} is not a parallel style, such as ColwiseParallel(){hint}")
        matched = [fqn for fqn in names if matches(key, fqn)]
        if not matched and not _is_absent(key, model, names):
            near = [re.sub(r"\b\d+\b", "*", fqn) if "*" in key else fqn for fqn in names]
            problems.append(f"{key!r} matches no module of the model{did_you_mean(key, near)}")
        for fqn in matched:
            owner = owners.get(id(names[fqn]))
            if owner is None:
                owner = owners[id(names[fqn])] = Entry(fqn, names[fqn], style, key)
                if isinstance(style, ParallelStyle):
                    entries.append(owner)
            elif owner.key != key:
                clashes[owner.key, key].append(fqn)
    problems += [
        f"{first!r} and {second!r} both match {listing(fqns, 3)}; one module takes one style"
        for (first, second), fqns in clashes.items()
    ]
    return entries, problems


def matches(key: str, fqn: str) -> bool:
    """Return whether a key names a module, token by token; only the empty key names the model itself."""
    if not key or not fqn:
        return key == fqn
    wanted, tokens = key.split("."), fqn.split(".")
    return len(wanted) == len(tokens) and all(map(fnmatchcase, tokens, wanted))


def _is_absent(key: str, model: nn.Module, names: Mapping[str, nn.Module]) -> bool:
    """Return whether a key names what this model could have, as another pipeline stage does, or something inside it.

    That is a submodule set to None, an empty container, or an attribute that was None from the start: no child, so that
    it may be anything, and the key has to spell its name, without wildcards.
    """
    tokens, absent = key.split("."), absent_children(model)
    for fqn, module in names.items():
        depth = fqn.count(".") + 1 if fqn else 0
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and not len(module):
            absent.append(fqn)
        elif depth < len(tokens) and vars(module).get(tokens[depth], module) is None:
            absent.append(f"{fqn}.{tokens[depth]}".lstrip("."))
    return any(matches(".".join(tokens[: fqn.count(".") + 1]), fqn) for fqn in absent)


def laid_out(entry: Entry) -> Iterator[tuple[str, nn.Parameter, Placement | None]]:
    """Yield the parameters that an entry's style touches, with their placements: None if only the style knows."""
    placements = parameter_placements(entry.style, entry.module)
    for name, parameter in entry.module.named_parameters():
        if placements is None or name in placements:
            yield name, parameter, None if placements is None else placements[name]


def _size_reasons(entries: list[Entry], tp_size: int) -> list[tuple[str, str]]:
    """Return the names of modules, and what of theirs does not divide."""
    reasons = []
    for entry in entries:
        for name, parameter, placement in laid_out(entry):
            if not isinstance(placement, Shard) or (name == "bias" and hasattr(entry.module, "out_features")):
                continue  # a bias is sharded as the output features are: say it once
            size, parts = parameter.shape[placement.dim], getattr(entry.style, "fused", {}).get(name, 1)
            unit = tp_size * parts
            if size % unit:
                reason = (
                    f"{_size_name(entry.module, name, placement.dim)} {size} is not divisible by "
                    f"{f'{parts} times ' if parts > 1 else ''}the tp size {tp_size}; pad it to {-(-size // unit) * unit}"
                )
                reasons.append((entry.fqn, reason))
    return reasons


def _size_name(module: nn.Module, parameter: str, dim: int) -> str:
    for kind, names in _SIZE_NAMES.items():
        if isinstance(module, kind):
            return names[dim]
    return f"dim {dim} of {parameter}"


def _find_ties(model: nn.Module, entries: list[Entry]) -> tuple[list[Holders], list[str]]:
    """Return the ties to restore after a plan is applied, and those that the plan would break."""
    layouts: dict[tuple[int, str], str] = {}
    for entry in entries:
        for name, _, placement in laid_out(entry):
            unknown = f"as {type(entry.style).__name__} decides"
            layouts[id(entry.module), name] = unknown if placement is None else placement_name(placement)
    ties, problems = [], []
    for names in _shared(model).values():
        named = [(fqn, layouts.get((id(module), name))) for fqn, module, name in names]
        distinct = {layout for _, layout in named}
        if distinct == {None}:
            continue
        if len(distinct) == 1:
            ties.append(names)
        else:
            fqns = listing((fqn for fqn, _ in named), 4)
            how = listing((f"{fqn}: {layout or 'not sharded'}" for fqn, layout in named), 4)
            problems.append(
                f"{fqns} are one parameter (tied), but the plan lays them out differently ({how}); give them the same "
                f"layout, such as RowwiseParallel for an embedding and ColwiseParallel for the output head, or untie "
                f"them first"
            )
    return ties, problems


def _shared(model: nn.Module) -> dict[int, Holders]:
    """Return the parameters that more than one module holds: every holder, with its fully qualified name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, dict[tuple[int, str], tuple[str, nn.Module, str]]] = defaultdict(dict)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, name = fqn.rpartition(".")
        module = modules[owner]
        # One module under two names is not a tie: it is sharded once.
        holders[id(parameter)].setdefault((id(module), name), (fqn, module, name))
    return {key: list(found.values()) for key, found in holders.items() if len(found) > 1}
