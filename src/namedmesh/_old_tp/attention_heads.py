"""Attention heads, as a model states them: no rank may get half of one, and kv heads go where their queries are."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from namedmesh.sizes import SharedHeads
from namedmesh.tensor_parallel.collectives import whole_parameter
from namedmesh.tensor_parallel.module_setup import sharded_dim
from namedmesh.tensor_parallel.styles import ColwiseParallel, shard_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.collectives import RankGroup
    from namedmesh.tensor_parallel.placements import Entry

Counts: TypeAlias = "tuple[int | None, int | None]"

# The attribute in which an attention module of transformers keeps how many queries share a kv head.
_GROUPS = "num_key_value_groups"
_QUERY_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


class KeyValueParallel(ColwiseParallel):
    """Give each rank the keys, or the values, of the heads that its queries attend to.

    Where the number of ranks divides the kv heads, it is ``ColwiseParallel``. Where it does not (one head for
    two ranks, six for four), every rank keeps the whole weight, computes the heads that its queries need, and
    the gradients are summed over the ranks that share a head. The attention then finds one kv head for each
    group of its queries: it takes the number of repetitions from the shapes, or from an attribute
    ``num_key_value_groups`` of the module that owns the linear, which is set; so is that of attention with the
    same counts that has no keys and values of its own, but those of another layer.

    ``parallelize`` finds the head counts on the attention module or on its configuration; where nothing
    states them, and none are given, the style is ``ColwiseParallel``.

    Args:
        input_layouts: as for :class:`ColwiseParallel`.
        query_heads: the number of query heads, if no module states it.
        kv_heads: the number of kv heads, if no module states it.

    Raises:
        PlanError: when applied to another kind of module, or to one that is already parallelized.

    Example:
        One kv head of 4 features; of 2 ranks each computes it whole:

        >>> import torch
        >>> from namedmesh.tensor_parallel import KeyValueParallel, plan_report
        >>> wk = torch.nn.Linear(16, 4, bias=False, device="meta")
        >>> plan_report(wk, 2, KeyValueParallel(query_heads=4, kv_heads=1)).rows[0].placement
        'Replicate()'
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        query_heads: int | None = None,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts)
        self.query_heads, self.kv_heads = query_heads, kv_heads
        self.shared: SharedHeads | None = None
        self.attentions: Sequence[nn.Module] = ()

    def __repr__(self) -> str:
        own = "" if self.kv_heads is None else f", query_heads={self.query_heads}, kv_heads={self.kv_heads}"
        return f"KeyValueParallel(input_layouts={self.input_layouts}{own})"

    def on_ranks(
        self, size: int, queries: int | None, heads: int | None, attentions: Sequence[nn.Module]
    ) -> KeyValueParallel:
        """Return the style for ``size`` ranks, with the counts that a model states unless it has its own.

        ``attentions`` are the modules that use the heads, of which each may keep the number of its groups.
        """
        queries, heads = self.query_heads or queries, self.kv_heads or heads
        bound = copy.copy(self)  # of its own class
        bound.query_heads, bound.kv_heads = queries, heads
        if queries and heads and heads % size and SharedHeads(queries, heads, size).possible:
            bound.shared, bound.attentions = SharedHeads(queries, heads, size), attentions
        return bound

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the placements: sharded where the ranks divide the heads, or else whole."""
        placement = Shard(0) if self.shared is None else Replicate()
        return {name: placement for name in ("weight", "bias") if getattr(module, name, None) is not None}

    def incompatibilities(self, module: nn.Module) -> list[str]:
        """Return a sentence for each reason why the module cannot have its heads shared."""
        if not isinstance(module, nn.Linear):
            return [f"KeyValueParallel fits nn.Linear, not {type(module).__name__}; leave it out of the plan"]
        reasons = []
        if self.kv_heads and module.out_features % self.kv_heads:
            reasons.append(f"{self.kv_heads} kv heads do not divide out_features {module.out_features}")
        if self.shared is not None and (type(module) is not nn.Linear or "forward" in vars(module)):
            reasons.append(
                f"KeyValueParallel needs the forward of nn.Linear where ranks share kv heads, but "
                f"{type(module).__name__} has its own"
            )
        return reasons

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        bound = self.on_ranks(device_mesh.size(), None, None, self.attentions)
        if bound.shared is None:
            return shard_module(bound, module, device_mesh)
        for attention in self.attentions:
            setattr(attention, _GROUPS, bound.shared.repeats)
        return shard_module(bound, module, device_mesh, partial(_rows_of, bound.shared))


def _rows_of(heads: SharedHeads, parameter: Tensor, group: RankGroup) -> Tensor:
    """Return the rows of the heads that this rank's queries attend to, of a parameter that every rank has whole.

    The gradient of the parameter is summed over the ranks, each of which makes the part of its own heads.
    """
    mine, whole = list(heads.of_rank(group.rank)), whole_parameter(parameter)
    width = whole.shape[0] // heads.heads
    first, last = mine[0], mine[-1]
    if mine == [*range(first, last + 1)]:
        return whole.narrow(0, first * width, (last + 1 - first) * width)
    index = torch.tensor(mine, device=whole.device)
    picked: Tensor = whole.unflatten(0, (heads.heads, width)).index_select(0, index).flatten(0, 1)
    return picked


# --- what a model states --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """The head counts that a module or its configuration states, each with the name of the attribute, and the width of one.

    Keys and values have as many heads as the queries if nothing else is stated.
    """

    queries: tuple[str, int] | None
    keys: tuple[str, int] | None
    head_dim: int | None

    @property
    def counts(self) -> Counts:
        """How many heads the queries have, and the keys and values."""
        return self.queries and self.queries[1], self.keys and self.keys[1]


def with_counts(model: nn.Module, entries: list[Entry], tp_size: int) -> list[Entry]:
    """Return the entries, those of keys and values with the head counts that the model states around them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # Attention that keeps how many queries share a kv head, with its own keys and values or those of another layer.
    attentions: dict[Counts, dict[int, nn.Module]] = defaultdict(dict)
    for entry in entries:
        nearest = next((each for each in _around(modules, entry.fqn) if hasattr(each, _GROUPS)), None)
        if nearest is not None:
            attentions[_counts_around(modules, entry.fqn)][id(nearest)] = nearest
    bound = []
    for entry in entries:
        style = entry.style
        if isinstance(style, KeyValueParallel) and isinstance(entry.module, nn.Linear):
            counts = _counts_around(modules, entry.fqn)
            style = style.on_ranks(tp_size, *counts, [*attentions[counts].values()])
        bound.append(replace(entry, style=style))
    return bound


def _owner(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _around(modules: Mapping[str, nn.Module], fqn: str) -> Iterator[nn.Module]:
    """Yield the modules around one, the nearest first."""
    while fqn:
        fqn = _owner(fqn)
        yield modules[fqn]


def _counts_around(modules: Mapping[str, nn.Module], fqn: str) -> Counts:
    for module in _around(modules, fqn):
        heads = _heads(module, module) or _heads(_own_config(module), module)
        if heads is not None:
            return heads.counts
    return None, None


def head_reasons(model: nn.Module, entries: list[Entry], tp_size: int) -> list[tuple[str, str]]:
    """Return the names of layers of whose heads the ranks would get parts, and why.

    A count concerns the layers directly inside the module that states it, whose features are so many heads. What
    only a configuration states counts where the plan names keys and values: other modules carry it too.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    with_keys = {_owner(entry.fqn): entry for entry in entries if isinstance(entry.style, KeyValueParallel)}
    reasons = []
    for entry in entries:
        owner, features = _owner(entry.fqn), sharded_features(entry)
        if not entry.fqn or features is None:
            continue
        reason = _cut(entry, features, _stated(modules[owner], with_keys.get(owner)), tp_size)
        if reason is not None:
            reasons.append((entry.fqn, reason))
    return reasons


def _stated(module: nn.Module, keys: Entry | None) -> Heads | None:
    """Return the heads of the layers directly inside a module, of which one may make its keys."""
    heads = _heads(module, module)
    if heads is None and keys is not None:
        heads = _heads(_own_config(module), module)
    if heads is not None and heads.head_dim is None and keys is not None:
        count, layer = heads.counts[1], keys.module
        if count and isinstance(layer, nn.Linear) and layer.out_features % count == 0:
            heads = replace(heads, head_dim=layer.out_features // count)
    return heads


def _cut(entry: Entry, features: int, heads: Heads | None, tp_size: int) -> str | None:
    """Return a sentence if the sharding of some features would cut heads."""
    if heads is None:
        return None
    style, blocks = entry.style, getattr(entry.style, "sizes", None)
    sizes = {features} if blocks is None else {*blocks(entry.module)}
    for stated in (heads.queries, heads.keys):
        if stated is None or stated[1] % tp_size == 0:
            continue
        name, count = stated
        remedy = f"choose a tp size that divides {count}"
        if isinstance(style, KeyValueParallel):
            is_cut = stated is heads.keys and not style.shared
        else:
            is_cut = heads.head_dim is not None and count * heads.head_dim in sizes
            queries = heads.queries if stated is heads.keys and blocks is None else None
            if queries is not None and SharedHeads(queries[1], count, tp_size).possible:
                remedy = f"give them KeyValueParallel(), or {remedy}"
        if is_cut:
            return (
                f"{name} {count} is not divisible by the tp size {tp_size}, and heads would be cut; {remedy}"
            )
    return None


def sharded_features(entry: Entry) -> int | None:
    """Return the number of features that an entry leaves each rank a shard of; None if it leaves none sharded."""
    style, module = entry.style, entry.module
    if not isinstance(module, nn.Linear) or not isinstance(style, TorchColwise | TorchRowwise):
        return None
    column = isinstance(style, TorchColwise)
    layout = (style.output_layouts if column else style.input_layouts)[0]
    # Of activations of three dims: batch, sequence, features.
    is_last = sharded_dim(layout, 3) == 2  # noqa: PLR2004  the last of three
    return (module.out_features if column else module.in_features) if is_last else None


def _own_config(module: nn.Module) -> object:
    """Return a module's configuration; that of its layer, where transformers' layers differ."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None or index is None else layers[index]


def _heads(source: object, module: nn.Module) -> Heads | None:
    """Return what a module or its configuration states; what the module says of itself counts more."""
    queries, keys = _first_count(source, *_QUERY_HEADS), _first_count(source, *_KV_HEADS)
    groups = _first_count(module, _GROUPS)
    if queries is not None and groups is not None and queries[1] % groups[1] == 0:
        own = queries[1] // groups[1]
        if keys is None or keys[1] != own:
            keys = (f"{queries[0]} // {_GROUPS}", own)
    if queries is None and keys is None:
        return None
    head_dim = _first_count(module, "head_dim") or _first_count(source, "head_dim")
    return Heads(queries, keys or queries, head_dim and head_dim[1])


def _first_count(source: object, *names: str) -> tuple[str, int] | None:
    """Return the first attribute that is a count; one that differs between layers is a RuntimeError in transformers."""
    for name in names:
        with suppress(RuntimeError):
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return name, value
    return None
