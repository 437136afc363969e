"""From a plan to the modules it means: strict and pure, with every problem found before anything changes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from namedmesh._torch import has_hooks
from namedmesh.errors import PlanError, did_you_mean, listing
from namedmesh.tensor_parallel.styles import layer_placements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.tensor.placement_types import Placement

Plan: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"

_SHARDING = (ColwiseParallel, RowwiseParallel)
_PREPARING = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
_SIZE_NAMES = {
    nn.Linear: ("out_features", "in_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
}
PARALLELIZED = "_namedmesh_style"
"""The attribute in which ``parallelize`` leaves the name of the style that it gave a module."""


@dataclass(frozen=True)
class Entry:
    """One module of the model, by its fully qualified name, and the style that the plan gives it under a key."""

    fqn: str
    module: nn.Module
    style: ParallelStyle
    key: str


Holders: TypeAlias = "list[tuple[str, nn.Module, str]]"
"""The modules that hold one parameter: the name of each, the module, and the parameter's name there."""


def resolve(
    model: nn.Module,
    mesh_or_tp_size: DeviceMesh | int,
    plan: Plan,
    must_divide: Mapping[str, int] | None = None,
    missing: str = "raise",
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
    if missing not in {"raise", "ignore"}:
        problems.append(f"missing is {missing!r}; it can be 'raise' or 'ignore'")
    entries, matching_problems = _match(model, plan, missing)
    problems += matching_problems
    places: dict[str, list[str]] = defaultdict(list)
    fitting = []
    for entry in entries:
        reasons = _incompatibilities(entry)
        if not reasons:
            fitting.append(entry)
            reasons = _size_problems(entry, tp_size)
        for reason in reasons:
            places[reason].append(entry.fqn or "the model")
    if tp_size > 1:
        for fqn, reason in _unmatched_rows(fitting):
            places[reason].append(fqn)
    problems += [f"{listing(fqns, 3)}: {reason}" for reason, fqns in places.items()]
    problems += [
        f"{name}: {value} is not divisible by the tp size {tp_size} (from must_divide); "
        f"choose a tp size that divides it"
        for name, value in (must_divide or {}).items()
        if value % tp_size
    ]
    ties, tie_problems = _find_ties(model, fitting, tp_size)
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
    if isinstance(mesh_or_tp_size, int) and not isinstance(mesh_or_tp_size, bool) and mesh_or_tp_size >= 1:
        return [], mesh_or_tp_size
    return [f"a plan needs a one-dimensional torch DeviceMesh, not {mesh_or_tp_size!r}; pass mesh['tp']"], 1


def _match(model: nn.Module, plan: object, missing: str) -> tuple[list[Entry], list[str]]:
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
        if not matched and missing == "raise":
            near = [re.sub(r"\b\d+\b", "*", fqn) if "*" in key else fqn for fqn in names]
            problems.append(
                f"{key!r} matches no module of the model{did_you_mean(key, near)}"
                f" (missing='ignore' for a pipeline stage, which has some of them)"
            )
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


# --- how parameters are laid out ----------------------------------------------------------------------------


def parameter_placements(style: Any, module: nn.Module, tp_size: int) -> dict[str, Placement] | None:
    """Return how a style lays out each parameter of a module that it fits; None if only the style itself knows.

    A style of somebody else's may answer with a method ``parameter_placements(module)``.
    """
    if hasattr(style, "size_placements"):
        found: dict[str, Placement] = style.size_placements(module, tp_size)
        return found
    own: Callable[[nn.Module], dict[str, Placement]] | None = getattr(style, "parameter_placements", None)
    if own is not None:
        return own(module)
    if isinstance(style, _SHARDING):
        return layer_placements(module, column=isinstance(style, ColwiseParallel))
    if isinstance(style, SequenceParallel):
        return {name: Replicate() for name, _ in module.named_parameters()}
    return {} if isinstance(style, _PREPARING) else None


def laid_out(entry: Entry, tp_size: int) -> Iterator[tuple[str, nn.Parameter, Placement | None]]:
    """Yield the parameters that an entry's style touches, with their placements: None if only the style knows."""
    placements = parameter_placements(entry.style, entry.module, tp_size)
    for name, parameter in entry.module.named_parameters():
        if placements is None or name in placements:
            yield name, parameter, None if placements is None else placements[name]


def placement_name(placement: Placement) -> str:
    """Return a placement in words that mean the same on every version of torch.

    Example:
        >>> placement_name(Shard(0)), placement_name(Replicate())
        ('Shard(0)', 'Replicate()')
    """
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else f"{type(placement).__name__}()"


# --- what does not fit --------------------------------------------------------------------------------------


def _incompatibilities(entry: Entry) -> list[str]:  # noqa: PLR0911  one question after the other
    """Return why a style cannot be applied to a module whatever the number of ranks: a sentence for each reason.

    A style of somebody else's may answer with a method ``incompatibilities(module)``.
    """
    style, module = entry.style, entry.module
    takes_distributed = getattr(style, "takes_distributed", False)  # another axis' style
    if PARALLELIZED in vars(module) and not takes_distributed:
        return ["already parallelized; parallelize a model once"]
    touched = parameter_placements(style, module, 1)
    named = [each for each in module.named_parameters() if touched is None or each[0] in touched]
    hooked = [name for name, parameter in named if has_hooks(parameter)]
    if hooked:
        names = " and ".join(hooked)
        return [f"{names} has a hook, which the DTensor in its place would not have; register it afterwards"]
    already = [name for name, parameter in named if isinstance(parameter, DTensor)]
    if already and not takes_distributed:
        reason = (
            f"{type(style).__name__} finds a module that is already distributed ({', '.join(already)} is a DTensor); "
            f"parallelize a model once, and before fully_shard"
        )
        return [reason]
    own: Callable[[nn.Module], list[str]] | None = getattr(style, "incompatibilities", None)
    if own is not None:
        return own(module)
    if isinstance(style, _SHARDING):
        return _sharding_problems(style, module)
    nested = next((name for name, _ in module.named_parameters() if "." in name), None)
    if nested is None or not isinstance(style, SequenceParallel):
        return []
    reason = (
        f"{type(style).__name__} takes a module that owns its parameters itself, such as a norm, but this one has "
        f"{nested!r}; name the inner modules in the plan"
    )
    return [reason]


def _sharding_problems(style: ParallelStyle, module: nn.Module) -> list[str]:
    name, reasons = type(style).__name__, []
    if not isinstance(module, nn.Linear | nn.Embedding):
        reason = (
            f"{name} fits nn.Linear and nn.Embedding, not {type(module).__name__}; use SequenceParallel for "
            f"a norm, name the linear inside (base_layer of an adapter), or leave this module out of the plan"
        )
        return [reason]
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        reasons.append(
            "nn.MultiheadAttention computes with its weight and does not call it; leave it out of the plan"
        )
    own_names = {each for each, _ in module.named_parameters(recurse=False)}
    reasons += [
        f"its {computed} is computed from other parameters at every forward; remove the parametrization (torch.nn.utils."
        "parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm), or leave the module out of the plan"
        for computed in sorted({*layer_placements(module, column=True)} - own_names)
    ]
    if isinstance(module, nn.Linear):
        return reasons
    if module.max_norm is not None:
        reasons.append(f"{name} cannot keep max_norm={module.max_norm} of an embedding; use max_norm=None")
    if module.sparse:
        reasons.append(f"{name} has no sparse gradients for an embedding; use sparse=False")
    if module.scale_grad_by_freq and isinstance(style, RowwiseParallel):
        reasons.append(
            f"{name} cannot scale an embedding's gradients by frequency; use ColwiseParallel, or "
            f"scale_grad_by_freq=False"
        )
    return reasons


def _size_problems(entry: Entry, tp_size: int) -> list[str]:
    """Return what of a module does not divide."""
    own: Callable[[nn.Module, int], list[str]] | None = getattr(entry.style, "size_problems", None)
    reasons = [] if own is None else own(entry.module, tp_size)
    for name, parameter, placement in laid_out(entry, tp_size):
        if not isinstance(placement, Shard) or (name == "bias" and hasattr(entry.module, "out_features")):
            continue  # a bias is sharded as the output features are: say it once
        size, parts = parameter.shape[placement.dim], getattr(entry.style, "fused", {}).get(name, 1)
        unit = tp_size * parts
        if size % unit:
            names = next((each for kind, each in _SIZE_NAMES.items() if isinstance(entry.module, kind)), None)
            what = f"dim {placement.dim} of {name}" if names is None else names[placement.dim]
            times = f"{parts} times " if parts > 1 else ""
            reasons.append(
                f"{what} {size} is not divisible by {times}the tp size {tp_size}; pad it to {-(-size // unit) * unit}"
            )
    return reasons


def _unmatched_rows(entries: list[Entry]) -> Iterator[tuple[str, str]]:
    """Yield the row layers whose input no column layer makes, though there are some in their block; and why.

    One of those is several layers in one, then. Rank after rank is right for it only where its features lie head by head:
    of q|k|v, or gate|up, the shapes fit what a forward does with a rank's rows, and the ranks agree on wrong gradients.
    """
    columns = [entry for entry in entries if _shards_features(entry, ColwiseParallel, "output_layouts")]
    for entry in entries:
        block = entry.fqn
        found: list[Entry] = []
        while block and not found and _shards_features(entry, RowwiseParallel, "input_layouts"):
            block = block.rpartition(".")[0]
            found = [each for each in columns if f".{each.fqn}".startswith(f".{block}." if block else ".")]
        features = getattr(entry.module, "in_features", 0)
        made = {each.fqn: each.module.out_features for each in found}
        told = any(getattr(each.style, "heads", None) for each in found)
        if made and not told and features not in made.values():
            makes = listing((f"{each.key} makes {made[each.fqn]}" for each in found), 4)
            reason = (
                f"takes {features} features, which no column layer of its block makes ({makes}): one of them is several layers "
                f"in one (q|k|v, gate|up); take it apart with split_linear before, or say that its features lie head by "
                f"head, or group by group, with ColwiseParallel(heads=...)"
            )
            yield entry.fqn, reason


def _shards_features(entry: Entry, kind: type, side: str) -> bool:
    if not isinstance(entry.style, kind) or not isinstance(entry.module, nn.Linear):
        return False
    layout = getattr(entry.style, side)[0]
    return isinstance(layout, Shard) and layout.dim in {-1, 2}


def _find_ties(model: nn.Module, entries: list[Entry], tp_size: int) -> tuple[list[Holders], list[str]]:
    """Return the ties to restore after a plan is applied, and those that the plan would break."""
    layouts: dict[tuple[int, str], str] = {}
    for entry in entries:
        for name, _, placement in laid_out(entry, tp_size):
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
