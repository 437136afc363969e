"""Check a tensor-parallel plan against a model, and report all problems at once.

The checks read names, shapes and layouts. They need no process groups, and the model may be on the
meta device. A plan that fails them has changed nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from namedmesh._errors import PlanError, format_items
from namedmesh._sharding import is_tp_shard
from namedmesh._torch.modules import has_hooks
from namedmesh.tensor_parallel.base_styles import TorchStyle
from namedmesh.tensor_parallel.plan_entries import Plan, PlanEntry, format_placement, match_plan
from namedmesh.tensor_parallel.styles import KeyValueParallel

ParamSlot: TypeAlias = "tuple[nn.Module, str]"
"""A module, and a name under which it registers a parameter."""


def resolve_plan(
    model: nn.Module,
    tp_size: int,
    plan: Plan,
    must_divide: Mapping[str, int] | None = None,
    *,
    strict: bool = True,
) -> tuple[list[PlanEntry], list[list[ParamSlot]]]:
    """Check a plan, and return its entries and the tied parameters of the model.

    Args:
        model: the model.
        tp_size: the number of ranks.
        plan: the plan.
        must_divide: further sizes that the number of ranks has to divide, by name.
        strict: whether a key that matches no module is a problem.

    Returns:
        The entries, in the order in which they are applied. For each tied parameter the slots in
        which it is registered: styles replace each of them separately, so they must be tied again.

    Raises:
        PlanError: with every problem that can be found without communication.
    """
    entries, problems = match_plan(model, plan, strict=strict)
    # The same problem in many layers is one message that lists them.
    names_by_problem: dict[str, list[str]] = defaultdict(list)
    placements: dict[ParamSlot, Placement] = {}
    for entry in entries:
        for problem in _check_entry(entry, tp_size):
            names_by_problem[problem].append(entry.fqn or "the model")
        for name, _, placement in entry.iter_placements(tp_size):
            child, _, own_name = name.rpartition(".")
            placements[entry.module.get_submodule(child), own_name] = placement
    if tp_size > 1:
        problems.extend(_check_summed_modules(entries, placements))
        for fqn, problem in _check_blocks(model, entries, placements):
            names_by_problem[problem].append(fqn)
    for name, value in (must_divide or {}).items():
        if value % tp_size:
            problem = f"{value} is not divisible by the tp size {tp_size} (from must_divide)"
            names_by_problem[problem].append(name)
    for problem, names in names_by_problem.items():
        problems.append(f"{format_items(names, 3)}: {problem}")
    ties = _find_ties(model)
    problems.extend(_check_ties(model, placements, ties))
    if problems:
        raise PlanError(*problems)
    return entries, ties


# --- one module and its style -------------------------------------------------------------------


def _check_entry(entry: PlanEntry, tp_size: int) -> list[str]:
    """Return the reasons why a style cannot be applied to its module (empty if it can)."""
    placements = entry.style.layout(entry.module, tp_size)
    if placements and isinstance(entry.module, NonDynamicallyQuantizableLinear):
        remedy = "leave it out, or write the attention with linears of its own"
        return [f"nn.MultiheadAttention reads the weight of its out_proj without calling it; {remedy}"]
    # Each check presumes the ones before it: sizes can be checked if the placements are valid.
    return (
        entry.style.problems(entry.module, tp_size)
        or list(_check_placements(entry, placements))
        or _check_params(entry, tp_size)
    )


def _check_placements(entry: PlanEntry, placements: Mapping[str, Placement]) -> Iterator[str]:
    """Yield the reasons why a style's placements are not valid, whatever the parameter sizes."""
    params = dict(entry.module.named_parameters(remove_duplicate=False))
    for name, placement in placements.items():
        if name not in params:
            got = f"{entry.style.name} names {name!r}, but {type(entry.module).__name__} owns {tuple(params)}"
            yield f"{got}; name its own parameters, and remove a parametrization such as weight_norm first"
        elif is_lazy(params[name]):
            yield f"{name} has no shape yet; run a forward first, which initializes a lazy module"
        elif isinstance(placement, Shard):
            ndim = params[name].ndim
            if not -ndim <= placement.dim < ndim:
                got = f"Shard({placement.dim}) is not a placement of {name}, which has {ndim} dims"
                yield f"{got}; name one of them"
        elif not isinstance(placement, Replicate):
            got = f"{placement!r} is not a placement of a parameter ({name})"
            yield f"{got}; use Shard(dim) or Replicate()"


def _check_params(entry: PlanEntry, tp_size: int) -> list[str]:
    """Return the reasons why parameters cannot be sharded over the ranks (empty if they can)."""
    problems = []
    for name, param, placement in entry.iter_placements(tp_size):
        if isinstance(param, DTensor) and not entry.style.takes_distributed:
            remedy = "parallelize a model once, and before fully_shard"
            return [f"already parallelized ({name} is a DTensor); {remedy}"]
        if has_hooks(param):
            problems.append(f"{name} has a hook, which the DTensor would not have; register it afterwards")
        # The bias of a linear has the size of the output features, like the weight, which is
        # reported already.
        is_linear_bias = name == "bias" and hasattr(entry.module, "out_features")
        if not isinstance(placement, Shard) or is_linear_bias:
            continue
        size = param.shape[placement.dim]
        # Each rank gets a shard of every block of a fused parameter.
        blocks = entry.style.fused.get(name, 1)
        unit = tp_size * blocks
        if size % unit:
            divisor = f"the tp size {tp_size}" if blocks == 1 else f"{blocks} times the tp size {tp_size}"
            got = f"dim {placement.dim} of {name} {size} is not divisible by {divisor}"
            problems.append(f"{got}; pad it to {-(-size // unit) * unit}")
    return problems


# --- column and row layers that must fit each other ---------------------------------------------


def _check_blocks(
    model: nn.Module, entries: Sequence[PlanEntry], placements: Mapping[ParamSlot, Placement]
) -> Iterator[tuple[str, str]]:
    """Yield the layers whose numbers of features do not fit the layers of the same block.

    A block is the innermost module that contains a row layer together with column layers. Its
    column layers feed its row layers. A column layer with more output features than the row layers
    take is a fused linear (q|k|v, gate|up). The shapes of its local shards fit nevertheless, and
    all ranks agree on the wrong gradients. Only a fused linear that is interleaved per head can be
    sharded as it is.

    Yields:
        The name of the layer, and the problem.
    """
    columns_inside = _find_linears_inside(entries, is_column=True)
    rows_inside = _find_linears_inside(entries, is_column=False)
    blocks: dict[str, list[PlanEntry]] = defaultdict(list)
    for row in rows_inside.get("", ()):
        parent = _find_parent(row.fqn, columns_inside)
        if parent is not None:
            blocks[parent].append(row)
    fused: set[str] = set()
    order = {module: position for position, module in enumerate(model.modules())}
    for column in columns_inside.get("", ()):
        parent = _find_parent(column.fqn, rows_inside)
        if parent is None or parent not in blocks:
            continue  # The rows inside of the parent are all in inner blocks.
        rows = blocks[parent]
        inputs = {_count_features(row, "in_features") for row in rows}
        features = _count_features(column, "out_features")
        # Keys and values may have fewer heads than queries. The output of a column layer behind all
        # row layers, such as an output head, does not go into a row layer.
        feeds_rows = any(order[row.module] > order[column.module] for row in rows)
        if feeds_rows and column.style.heads is None and all(size % features for size in inputs):
            fused.add(parent)
            got = f"has {features} output features, but the row layers of its block take"
            remedy = (
                "it is a fused linear (q|k|v, gate|up); split it with split_linear, or use "
                "ColwiseParallel(heads=...) if it is interleaved per head"
            )
            yield column.fqn, f"{got} {format_items(sorted(inputs), 4)}: {remedy}"
    for block, rows in blocks.items():
        columns = columns_inside[block]
        yield from _find_sharded_norms(block, model.get_submodule(block), columns, placements)
        # The row layers would be reported for the same reason as a fused layer. If heads are kept
        # together, the outputs may be arranged in any way.
        if block in fused or any(column.style.heads for column in columns):
            continue
        outputs = {_count_features(column, "out_features") for column in columns}
        for row in rows:
            features = _count_features(row, "in_features")
            if features not in outputs:
                got = f"takes {features} features, which no column layer of its block computes"
                yield row.fqn, f"{got}; name the layer that computes them"


def _find_sharded_norms(
    block: str,
    parent: nn.Module,
    columns: Sequence[PlanEntry],
    placements: Mapping[ParamSlot, Placement],
) -> Iterator[tuple[str, str]]:
    """Yield the norms of a block that would normalize a shard of a column layer's features.

    Only the features tell which tensor a norm gets. If a column layer also takes as many, it may be
    a norm in front of that layer. With one kv head, it may be the norm of each head.
    """
    sharded = set()
    for column in columns:
        if not isinstance(column.style, KeyValueParallel):
            sharded.add(_count_features(column, "out_features"))
    sharded -= {_count_features(column, "in_features") for column in columns}
    # A norm within another module, such as an indexer of keys, gets a tensor of that module.
    for name, norm in parent.named_children():
        if isinstance(norm, nn.GroupNorm):
            features = norm.num_channels
        elif isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            features = norm.normalized_shape[-1]
        else:
            continue
        if features in sharded and not isinstance(placements.get((norm, "weight")), Shard):
            got = f"normalizes over {features} features of a column layer, of which each rank has a shard"
            remedy = "norm each head, shard a GroupNorm with LocalParameters, or gather the features first"
            yield f"{block}.{name}".removeprefix("."), f"{got}; {remedy}"


def _find_linears_inside(entries: Sequence[PlanEntry], *, is_column: bool) -> dict[str, list[PlanEntry]]:
    """Return the linears inside of each module that compute, or take, sharded features."""
    inside: dict[str, list[PlanEntry]] = defaultdict(list)
    for entry in entries:
        style = entry.style.style if isinstance(entry.style, TorchStyle) else entry.style
        if is_column and isinstance(style, torch_styles.ColwiseParallel):
            layout = style.output_layouts[0]
        elif not is_column and isinstance(style, torch_styles.RowwiseParallel):
            layout = style.input_layouts[0]
        else:
            continue
        # Activations usually have the dims batch, sequence and features.
        shards_features = isinstance(layout, Shard) and layout.dim in {-1, 2}
        if isinstance(entry.module, nn.Linear) and shards_features:
            for parent in _iter_parents(entry.fqn):
                inside[parent].append(entry)
    return inside


def _find_parent(fqn: str, candidates: Mapping[str, object]) -> str | None:
    """Return the innermost module around ``fqn`` that is a candidate; None if none is."""
    return next((parent for parent in _iter_parents(fqn) if parent in candidates), None)


def _iter_parents(fqn: str) -> Iterator[str]:
    """Yield the names of the modules around a module, from the innermost to the model."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def _count_features(entry: PlanEntry, attribute: str) -> int:
    """Return ``in_features`` or ``out_features`` of a linear."""
    number: int = getattr(entry.module, attribute)
    return number


# --- outputs that are summed over the ranks -----------------------------------------------------


def _check_summed_modules(
    entries: Sequence[PlanEntry], placements: Mapping[ParamSlot, Placement]
) -> Iterator[str]:
    """Yield a problem for each all-reduced output that contains a replicated parameter."""
    for entry in entries:
        if not entry.style.sums_ranks:
            continue
        replicated = []
        for fqn, module in entry.module.named_modules(prefix=entry.fqn):
            for name, param in module.named_parameters(recurse=False):
                # It may have been sharded before: over another axis, or by hand.
                own = (*getattr(param, "placements", ()), placements.get((module, name)))
                if not is_tp_shard(param) and not any(isinstance(p, Shard) for p in own):
                    replicated.append(f"{fqn}.{name}".removeprefix("."))
        if replicated:
            yield (
                f"{entry.fqn or 'the model'}: {entry.style.name} sums the output over "
                f"the ranks, where {format_items(replicated, 4)} would count once per rank; shard "
                "them, or move them out of the module"
            )


# --- tied parameters ----------------------------------------------------------------------------


def _find_ties(model: nn.Module) -> list[list[ParamSlot]]:
    """Return the slots of each parameter that is registered in several of them.

    A module under two names is no tie: it is sharded once.
    """
    slots_by_param: dict[nn.Parameter, list[ParamSlot]] = defaultdict(list)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            slots_by_param[param].append((module, name))
    return [slots for slots in slots_by_param.values() if len(slots) > 1]


def _check_ties(
    model: nn.Module, placements: Mapping[ParamSlot, Placement], ties: Sequence[Sequence[ParamSlot]]
) -> Iterator[str]:
    """Yield a problem for each tied parameter that has several placements in the plan."""
    fqns = {module: fqn for fqn, module in model.named_modules()}
    for slots in ties:
        # A slot outside of the plan stays a plain tensor, which differs from every placement.
        if len({placements.get(slot) for slot in slots}) == 1:
            continue
        formatted = []
        for module, name in slots:
            fqn = f"{fqns[module]}.{name}".removeprefix(".")
            formatted.append(f"{fqn}: {format_placement(placements.get((module, name)))}")
        yield (
            f"one parameter (tied) has several placements ({format_items(formatted, 4)}); give "
            "all the same, such as RowwiseParallel for an embedding and ColwiseParallel for the "
            "output head, or untie them first"
        )
