"""Attention heads, as a model states them: no rank may get half of one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from namedmesh.errors import listing
from namedmesh.sizes import SharedHeads
from namedmesh.tensor_parallel.kv_heads import GROUPS, KeyValueParallel
from namedmesh.tensor_parallel.module_setup import sharded_dim

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from namedmesh.tensor_parallel.placements import Entry

Counts: TypeAlias = "tuple[int | None, int | None]"

_QUERY_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


@dataclass(frozen=True)
class Heads:
    """The head counts that a module or its configuration states, each with the name of the attribute.

    Args:
        queries: how many heads the queries have.
        keys: how many the keys and values have, if they have a number of their own.
        head_dim: the features of one head, if stated.
    """

    queries: tuple[str, int] | None
    keys: tuple[str, int] | None
    head_dim: int | None

    @property
    def counts(self) -> Counts:
        """How many heads the queries have, and the keys and values."""
        keys = self.keys or self.queries
        return self.queries and self.queries[1], keys and keys[1]


def with_counts(model: nn.Module, entries: list[Entry], tp_size: int) -> list[Entry]:
    """Return the entries, those of keys and values with the head counts that the model states around them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # Attention that keeps how many queries share a kv head, with its own keys and values or those of another layer.
    attentions: dict[Counts, dict[int, nn.Module]] = defaultdict(dict)
    for entry in entries:
        nearest = next((each for each in _around(modules, entry.fqn) if hasattr(each, GROUPS)), None)
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
        if fqn in modules:
            yield modules[fqn]


def _counts_around(modules: Mapping[str, nn.Module], fqn: str) -> Counts:
    for module in _around(modules, fqn):
        heads = _heads(module, module) or _heads(_own_config(module), module)
        if heads is not None:
            return heads.counts
    return None, None


def head_problems(model: nn.Module, entries: list[Entry], tp_size: int) -> list[str]:
    """Return the head counts that the ranks cannot share equally, once for all the layers that one key matches.

    A count concerns the layers directly inside the module that states it, whose features are so many heads. What
    only a configuration states counts where the plan names keys and values: other modules carry it too.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    with_keys = {_owner(entry.fqn): entry for entry in entries if isinstance(entry.style, KeyValueParallel)}
    merged: dict[tuple[str, int, str], tuple[dict[str, None], dict[str, None]]] = {}
    for entry in entries:
        owner = _owner(entry.fqn)
        features = sharded_features(entry)
        if not entry.fqn or features is None or owner not in modules:
            continue
        place, heads = _stated(modules, owner, with_keys.get(owner))
        if heads is None:
            continue
        cut = _cut(entry, features, heads, tp_size)
        if cut is not None:
            keys, where = merged.setdefault(cut, ({}, {}))
            keys[repr(entry.key)] = None
            where[f"{place}.{cut[0]}".lstrip(".")] = None
    return [
        f"{listing(where, 3)}: {count} heads are not divisible by the tp size {tp_size}, and "
        f"{listing(keys, 4)} would cut them; {remedy}"
        for (_, count, remedy), (keys, where) in merged.items()
    ]


def _stated(modules: Mapping[str, nn.Module], owner: str, keys: Entry | None) -> tuple[str, Heads | None]:
    """Return where the heads of the layers directly inside a module are stated, and the heads."""
    module = modules[owner]
    place, heads = owner, _heads(module, module)
    if heads is None and keys is not None:
        place, heads = f"{owner}.config".lstrip("."), _heads(_own_config(module), module)
    if heads is not None and heads.head_dim is None and keys is not None:
        count, layer = heads.counts[1], keys.module
        if count and isinstance(layer, nn.Linear) and layer.out_features % count == 0:
            heads = replace(heads, head_dim=layer.out_features // count)
    return place, heads


def _cut(entry: Entry, features: int, heads: Heads, tp_size: int) -> tuple[str, int, str] | None:
    """Return the heads that the sharding of some features would cut: the attribute, the count, and what helps."""
    style, blocks = entry.style, getattr(entry.style, "sizes", None)
    sizes = {features} if blocks is None else {*blocks(entry.module)}
    for stated in (heads.queries, heads.keys):
        if stated is None or stated[1] % tp_size == 0:
            continue
        name, count = stated
        if isinstance(style, KeyValueParallel):
            if stated is (heads.keys or heads.queries) and not style.shared:
                return name, count, f"choose a tp size that divides {count}"
        elif heads.head_dim is not None and count * heads.head_dim in sizes:
            queries = heads.queries if stated is heads.keys and blocks is None else None
            share = queries is not None and SharedHeads(queries[1], count, tp_size).possible
            remedy = "give them KeyValueParallel(), or " if share else ""
            return name, count, f"{remedy}choose a tp size that divides {count}"
    return None


def sharded_features(entry: Entry) -> int | None:
    """Return the number of features that an entry leaves each rank a shard of; None if it leaves none sharded."""
    style, module = entry.style, entry.module
    if not isinstance(module, nn.Linear) or not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    column = isinstance(style, ColwiseParallel)
    layout = (style.output_layouts if column else style.input_layouts)[0]
    # Of activations of three dims: batch, sequence, features.
    is_last = sharded_dim(layout, 3) == 2  # noqa: PLR2004  the last of three
    return (module.out_features if column else module.in_features) if is_last else None


def _own_config(module: nn.Module) -> object:
    """Return a module's configuration; that of its layer, where transformers' layers differ."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None or index is None else layers[index]


def _stated_value(source: object, name: str) -> object:
    """Return an attribute; None where it is missing, or differs between layers (a RuntimeError in transformers)."""
    try:
        return getattr(source, name, None)
    except RuntimeError:
        return None


def _heads(source: object, module: nn.Module) -> Heads | None:
    """Return what a module or its configuration states; what the module says of itself counts more."""
    queries, keys = _first_count(source, _QUERY_HEADS), _first_count(source, _KV_HEADS)
    groups = _stated_value(module, GROUPS)
    if queries is not None and _is_count(groups) and queries[1] % groups == 0:
        own = queries[1] // groups
        if keys is None or keys[1] != own:
            keys = (f"{queries[0]} // {GROUPS}", own)
    if queries is None and keys is None:
        return None
    head_dims = (_stated_value(module, "head_dim"), _stated_value(source, "head_dim"))
    return Heads(queries, keys, next(filter(_is_count, head_dims), None))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _first_count(source: object, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = _stated_value(source, name)
        if _is_count(value):
            return name, value
    return None
