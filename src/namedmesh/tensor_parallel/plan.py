"""Plans: every problem is found before anything changes, torch's ``parallelize_module`` applies them, a report says what it would do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import is_lazy

from namedmesh._torch import accept_mixed_lists, has_hooks
from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.errors import PlanError, did_you_mean, format_items
from namedmesh.tensor_parallel.buffers import watch_buffers
from namedmesh.tensor_parallel.collectives import check_divides
from namedmesh.tensor_parallel.gradients import install_optimizer_step_hook, register_gradient_check
from namedmesh.tensor_parallel.styles import layer_placements

Plan: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"

_FEATURES = (torch_styles.ColwiseParallel, torch_styles.RowwiseParallel)


class Entry(NamedTuple):
    """One module of the model, by its fully qualified name, and the style that the plan gives it under a key."""

    fqn: str
    module: nn.Module
    style: ParallelStyle
    key: str


Place: TypeAlias = "tuple[nn.Module, str]"
"""Where a parameter is: in a module, under a name."""


def parallelize(
    model: nn.Module,
    mesh: AxisMesh,
    plan: Plan,
    *,
    src_data_rank: int | None = 0,
    must_divide: Mapping[str, int] | None = None,
    strict: bool = True,
    check_gradients: bool = True,
) -> nn.Module:
    """Apply tensor parallelism to a model, strictly: a plan that does not fit changes nothing.

    All the ranks of ``mesh`` call it with the same plan, once for a model, and before ``fully_shard``. Sharded parameters become
    DTensors; tied ones stay tied. What a forward does with the parameters that the plan leaves out, or with what the sharded
    layers make, is not guessed: the ranks compare gradients (:func:`register_gradient_check`), :func:`verify` compares with the whole model.

    Parameters outside of the plan stay plain tensors. From the first call on, the operators over lists that torch's optimizers,
    clipping and gradient scaler use take plain tensors and DTensors together.

    Args:
        model: the model; changed in place, and returned. It may be on the meta device.
        mesh: the NamedMesh, of which ``tp`` is taken, or one axis of it, such as ``mesh["ep"]``.
        plan: a parallel style for the model itself, or a dict of module names to parallel styles. In a name
            every token may be a pattern (``"layers.*.attention.wq"``); ``""`` is the model.
        src_data_rank: the group rank whose values everybody gets a part of; None to let each rank take its
            own copy, without communication.
        must_divide: further sizes that the number of ranks has to divide, such as ``{"heads": 32}``.
        strict: whether a name in the plan that matches no module is a PlanError. Pass False for a
            stage of a pipeline, which has some of the modules.
        check_gradients: compare gradients. False is for a model whose gradients the caller sums over the axis after the backward.

    Raises:
        PlanError: with every problem there is.
        GradientError: in the first backward, or before a step, on every rank: something that is whole on every rank differs.
    """
    mesh = one_axis(mesh, "tp", "parallelize")
    entries, ties = resolve(model, mesh.size(), plan, must_divide, strict=strict)
    for entry in entries:
        fast_path_class = getattr(entry.style, "fast_path_class", None)
        if isinstance(entry.style, _FEATURES) and not (fast_path_class and fast_path_class(entry.module)):
            hook = partial(_refuse_uneven, entry.style.output_layouts[0], mesh.size())
            entry.module.register_forward_hook(hook)
        # One style at a time: with a dict, torch drops src_data_rank at the name "".
        frozen = [name for name, each in entry.module.named_parameters() if not each.requires_grad]
        applied = parallelize_module(entry.module, mesh, entry.style, src_data_rank=src_data_rank)
        for name in frozen:  # which some of torch's styles forget
            applied.get_parameter(name).requires_grad_(False)
        if entry.module is model:
            model = applied
    for (first, own_name), *others in ties:
        for module, name in others:
            module.register_parameter(name, first.get_parameter(own_name))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            _turn_off_fast_path(module)
    # Ranks that have data of their own have other gradients of everything.
    if check_gradients and not any(hasattr(entry.style, "ranks_have_own_data") for entry in entries):
        register_gradient_check(model, mesh)
    install_optimizer_step_hook()
    accept_mixed_lists()
    watch_buffers(model)
    return model


def _turn_off_fast_path(module: nn.Module) -> None:
    """Let an encoder of torch call its layers in evaluation, too: its fused kernel reads their whole weights instead."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        else:
            # torch does not take the fused kernel if a module has a hook.
            module.register_forward_pre_hook(_do_nothing)


def _do_nothing(_module: nn.Module, _args: Any) -> None: ...


def _refuse_uneven(layout: Placement, tp_size: int, _module: nn.Module, _args: Any, output: Any) -> None:
    """Check what torch's arithmetic makes, a DTensor until its own hook: the next gather of unequal shards ends the process."""
    if isinstance(layout, Shard) and output.placements[0] not in {layout, Shard(layout.dim % output.ndim)}:
        check_divides(output.shape, layout.dim, tp_size)


def resolve(
    model: nn.Module,
    tp_size: int,
    plan: Plan,
    must_divide: Mapping[str, int] | None = None,
    strict: bool = True,
) -> tuple[list[Entry], list[list[Place]]]:
    """Return what to apply of a plan, in order, and which parameters to tie again afterwards.

    Raises:
        PlanError: with every problem that can be found without communication.
    """
    problems: list[str] = []
    entries = _match(model, plan, strict, problems)
    places: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        for reason in _misfits(entry, tp_size):
            places[reason].append(entry.fqn or "the model")
    for fqn, reason in _unmatched_features(model, entries) if tp_size > 1 else ():
        places[reason].append(fqn)
    for name, value in (must_divide or {}).items():
        if value % tp_size:
            places[f"{value} is not divisible by the tp size {tp_size} (from must_divide)"].append(name)
    problems += [f"{format_items(fqns, 3)}: {reason}" for reason, fqns in places.items()]
    ties = _ties_of(model)
    problems += _broken_ties(model, entries, ties, tp_size)
    if problems:
        raise PlanError(*problems)
    return entries, ties


def _match(model: nn.Module, plan: Any, strict: bool, problems: list[str]) -> list[Entry]:
    """Return the modules that the plan names; note what it names wrongly."""
    names = dict(model.named_modules(remove_duplicate=False))
    children: dict[str, dict[str, str]] = defaultdict(dict)
    for fqn in names:
        parent, _, token = fqn.rpartition(".")
        if fqn:
            children[parent][token] = fqn
    owners: dict[nn.Module, Entry] = {}
    clashes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, style in ({"": plan} if isinstance(plan, ParallelStyle) else plan).items():
        if not isinstance(style, ParallelStyle):
            problems.append(f"{key!r}: {style!r} is not a parallel style, such as ColwiseParallel()")
            continue
        matched = _find(children, key)
        if not matched and strict:
            near = [re.sub(r"\b\d+\b", "*", fqn) if "*" in key else fqn for fqn in names]
            remedy = "strict=False for a pipeline stage, which has some of them"
            problems.append(f"{key!r} matches no module of the model{did_you_mean(key, near)} ({remedy})")
        for fqn in matched:
            owner = owners.setdefault(names[fqn], Entry(fqn, names[fqn], style, key))
            if owner.key != key:
                clashes[owner.key, key].append(fqn)
    for (first, second), fqns in clashes.items():
        problems.append(
            f"{first!r} and {second!r} both match {format_items(fqns, 3)}; one module takes one style"
        )
    return [*owners.values()]


def _find(children: Mapping[str, Mapping[str, str]], key: str) -> list[str]:
    """Return the names of the modules that a key names, from the children of each module: a step down for each token."""
    found = [""]
    for wanted in key.split(".") if key else ():
        nodes = [children.get(fqn, {}) for fqn in found]
        found = []
        for node in nodes:
            if any(character in wanted for character in "*?["):
                found += [fqn for token, fqn in node.items() if fnmatchcase(token, wanted)]
            elif wanted in node:
                found.append(node[wanted])
    return found


def matches(key: str, fqn: str) -> bool:
    """Return whether a key names a module, token by token; only the empty key names the model itself."""
    if not key or not fqn:
        return key == fqn
    wanted, tokens = key.split("."), fqn.split(".")
    return len(wanted) == len(tokens) and all(map(fnmatchcase, tokens, wanted))


def laid_out(entry: Entry, tp_size: int) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Yield the parameters that an entry's style touches, with their placements, if they are known."""
    placements = _layout(entry, tp_size)
    for name, parameter in entry.module.named_parameters(remove_duplicate=False):
        if name in placements:
            yield name, parameter, placements[name]


def _layout(entry: Entry, tp_size: int) -> dict[str, Placement]:
    """Return the placements that an entry's style gives to parameters, by name; empty if they are not known."""
    style, module = entry.style, entry.module
    if hasattr(style, "layout"):
        layout: dict[str, Placement] = style.layout(module, tp_size)
        return layout
    if isinstance(style, _FEATURES):
        return layer_placements(style, module)
    if isinstance(style, torch_styles.SequenceParallel):
        return dict.fromkeys(dict(module.named_parameters(remove_duplicate=False)), Replicate())
    return {}


# --- what does not fit --------------------------------------------------------------------------------------


def _misfits(entry: Entry, tp_size: int) -> list[str]:
    """Return why a style cannot be applied to a module, a sentence each."""
    style, module, kind = entry.style, entry.module, type(entry.module).__name__
    if isinstance(style, _FEATURES) and not isinstance(module, nn.Linear | nn.Embedding):
        remedy = "use SequenceParallel for a norm, or name the linear inside (base_layer of an adapter)"
        return [f"{type(style).__name__} fits nn.Linear and nn.Embedding, not {kind}; {remedy}"]
    reasons: list[str] = style.problems(module, tp_size) if hasattr(style, "problems") else []
    reasons += _misplaced(entry, tp_size)
    if reasons:
        return reasons
    for name, parameter, placement in laid_out(entry, tp_size):
        if isinstance(parameter, DTensor) and not hasattr(style, "takes_distributed"):
            remedy = "parallelize a model once, and before fully_shard"
            return [f"already parallelized ({name} is a DTensor); {remedy}"]
        if has_hooks(parameter):
            reasons.append(f"{name} has a hook, which the DTensor would not have; register it afterwards")
        if not isinstance(placement, Shard) or (name == "bias" and hasattr(module, "out_features")):
            continue  # a bias is sharded as the output features are: say it once
        size, parts = parameter.shape[placement.dim], getattr(style, "fused", {}).get(name, 1)
        unit = tp_size * parts
        if size % unit:
            times = f"{parts} times " if parts > 1 else ""
            got = f"dim {placement.dim} of {name} {size} is not divisible by {times}the tp size {tp_size}"
            reasons.append(f"{got}; pad it to {-(-size // unit) * unit}")
    return reasons


def _misplaced(entry: Entry, tp_size: int) -> Iterator[str]:
    """Yield why a style's layout cannot be that of a module's parameters."""
    own = dict(entry.module.named_parameters(remove_duplicate=False))
    for name, placement in _layout(entry, tp_size).items():
        if name not in own:
            got = f"{type(entry.style).__name__} names {name!r}, but {type(entry.module).__name__} owns {tuple(own)}"
            yield f"{got}; name what it owns, and remove a parametrization such as weight_norm first"
        elif is_lazy(own[name]):
            yield f"{name} has no shape yet; run a forward first, which turns a lazy module into an ordinary one"
        elif isinstance(placement, Shard):
            ndim = own[name].ndim
            if not -ndim <= placement.dim < ndim:
                yield f"Shard({placement.dim}) is not a layout of {name}, which has {ndim} dims; name one of them"
        elif not isinstance(placement, Replicate):
            yield f"{placement!r} is not a layout of a parameter ({name}); use Shard(dim) or Replicate()"


class _Block(NamedTuple):
    """A module inside which column layers feed row layers."""

    columns: list[Entry]
    rows: list[Entry]
    made: set[int]
    """The numbers of features that column layers in it make; 0 for one whose style states heads."""


def _unmatched_features(model: nn.Module, entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """Yield the column and row layers of one block whose numbers of features do not fit each other, and why.

    A column layer that makes more than the row layers take is several layers in one (q|k|v, gate|up). The shapes fit a
    rank's rows all the same, and the ranks agree on wrong gradients, unless the features are interleaved per head.
    """
    order = {module: position for position, module in enumerate(model.modules())}
    for block in _find_blocks(entries):
        taken = {_features(row, "in_features") for row in block.rows}
        last = max(order[row.module] for row in block.rows)
        fused = False
        for column in block.columns:
            features = _features(column, "out_features")
            # Keys and values may have fewer heads. The features of a column layer behind all row layers, such as an
            # output head, go elsewhere.
            fits = any(size % features == 0 for size in taken)
            if not fits and not _states_heads(column) and order[column.module] < last:
                fused = True
                got = f"makes {features} features, but the row layers of its block take {format_items(sorted(taken), 4)}"
                why = "it is several layers in one (q|k|v, gate|up)"
                remedy = "split it with split_linear, or use ColwiseParallel(heads=...) if it is interleaved per head"
                yield column.fqn, f"{got}: {why}; {remedy}"
        for row in () if fused else block.rows:
            features = _features(row, "in_features")
            if not block.made & {0, features}:
                got = f"takes {features} features, which no column layer of its block makes"
                yield row.fqn, f"{got}; name the layer that makes them"


def _find_blocks(entries: Sequence[Entry]) -> Iterable[_Block]:
    """Return the innermost modules that have both column and row layers inside, each with those of no inner one."""
    columns = [entry for entry in entries if _shards_features(entry, torch_styles.ColwiseParallel)]
    rows = [entry for entry in entries if _shards_features(entry, torch_styles.RowwiseParallel)]
    made: dict[str, set[int]] = defaultdict(set)
    for column in columns:
        for name in _blocks_around(column.fqn):
            made[name].add(0 if _states_heads(column) else _features(column, "out_features"))
    with_rows = {name for row in rows for name in _blocks_around(row.fqn)}
    blocks: dict[str, _Block] = {}
    for row in rows:
        for name in _blocks_around(row.fqn):
            if name in made:
                blocks.setdefault(name, _Block([], [], made[name])).rows.append(row)
                break
    for column in columns:
        for name in _blocks_around(column.fqn):
            if name in with_rows:
                if name in blocks:
                    blocks[name].columns.append(column)
                break
    return blocks.values()


def _blocks_around(fqn: str) -> Iterator[str]:
    """Yield the names of the modules around a module, from the innermost to the model."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def _features(entry: Entry, name: str) -> int:
    number: int = getattr(entry.module, name)
    return number


def _states_heads(entry: Entry) -> bool:
    """Return whether the style of a column layer says how its features are arranged."""
    return bool(getattr(entry.style, "heads", None) or getattr(entry.style, "kv_heads", None))


def _shards_features(entry: Entry, kind: Any) -> bool:
    """Return whether a style of a kind leaves each rank some of the features between a column layer and a row layer."""
    style: Any = entry.style
    if not isinstance(style, kind) or not isinstance(entry.module, nn.Linear):
        return False
    (layout,) = style.output_layouts if kind is torch_styles.ColwiseParallel else style.input_layouts
    return isinstance(layout, Shard) and layout.dim in {-1, 2}


def _broken_ties(
    model: nn.Module, entries: Sequence[Entry], ties: Iterable[Sequence[Place]], tp_size: int
) -> Iterator[str]:
    """Yield a sentence for each parameter in several places that a plan lays out differently."""
    layouts: dict[Place, Placement] = {}
    for entry in entries:
        layouts.update({(entry.module, name): each for name, _, each in laid_out(entry, tp_size)})
    modules = {module: f"{fqn}." if fqn else "" for fqn, module in model.named_modules()}
    for places in ties:
        if len({layouts.get(place) for place in places}) > 1:
            how = [f"{modules[place[0]]}{place[1]}: {_words(layouts.get(place))}" for place in places]
            yield (
                f"one parameter (tied) is laid out differently ({format_items(how, 4)}); give all the same layout, such as "
                f"RowwiseParallel for an embedding and ColwiseParallel for the output head, or untie them first"
            )


def _ties_of(model: nn.Module) -> list[list[Place]]:
    """Return the places of each parameter that has several; one module under two names is no tie: it is sharded once."""
    places: dict[nn.Parameter, list[Place]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[parameter].append((module, name))
    return [each for each in places.values() if len(each) > 1]


# --- the dry run --------------------------------------------------------------------------------------------


def plan_report(
    model: nn.Module,
    mesh_or_tp_size: AxisMesh | int,
    plan: Plan,
    *,
    must_divide: Mapping[str, int] | None = None,
    strict: bool = True,
) -> str:
    """Return a table of what ``parallelize`` would do, without doing it: no communication, and a meta model will do.

    ``mesh_or_tp_size``: the mesh that ``parallelize`` would get, or just the number of its ranks.

    Raises:
        PlanError: the one that ``parallelize`` would raise.
    """
    tp_size = mesh_or_tp_size
    if not isinstance(tp_size, int):
        tp_size = one_axis(tp_size, "tp", "plan_report").size()
    entries, _ = resolve(model, tp_size, plan, must_divide, strict=strict)
    rows = [("module", "style", "parameter", "placement", "global", "local")]
    held: dict[nn.Parameter, int] = {}
    for entry in entries:
        module, style = entry.fqn or "(model)", type(entry.style).__name__
        touched = [*laid_out(entry, tp_size)]
        for name, parameter, placement in touched:
            local = list(parameter.shape)
            if isinstance(placement, Shard):
                local[placement.dim] //= tp_size
            held[parameter] = prod(local)
            rows.append((module, style, name, _words(placement), _shape(parameter.shape), _shape(local)))
        if not touched:
            rows.append((module, style, "", "", "", ""))
    total = per_rank = 0
    for fqn, parameter in model.named_parameters():
        total += parameter.numel()
        per_rank += held.get(parameter, parameter.numel())
        if parameter not in held:
            shape = _shape(parameter.shape)
            rows.append((fqn, "-", "", "not in the plan", shape, shape))
    text = f"{per_rank:,} of {total:,} parameters on each of {tp_size} ranks"
    if tp_size > 1:
        text += f", {(per_rank * tp_size - total) // (tp_size - 1):,} of them whole"
    return "\n".join([*_table(rows), text])


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table, those of modules that differ in the number of their layer only as one."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, *cells in rows:
        alike[(re.sub(r"\b\d+\b", "*", name), *cells)].append(name)
    folded = [row if len(names) > 1 else (names[0], *row[1:]) for row, names in alike.items()]
    widths = [max(map(len, column)) for column in zip(*folded, strict=True)]
    for row in folded:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _words(placement: Placement | None) -> str:
    if placement is None:
        return "not sharded"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
