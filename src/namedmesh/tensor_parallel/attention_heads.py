"""Attention heads: found on the modules around the sharded projections, so that no rank gets half a head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from namedmesh.errors import listing
from namedmesh.tensor_parallel.kv_heads import GROUPS, KeyValueParallel, names_keys_or_values
from namedmesh.tensor_parallel.module_setup import sharded_dim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from namedmesh.tensor_parallel.plan_entry import Entry

_QUERY_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_ATTENTION = ("attention", "attn")


@dataclass(frozen=True)
class Heads:
    """The head counts that one module, or its configuration, states."""

    queries: tuple[str, int] | None
    keys: tuple[str, int] | None
    head_dim: int | None

    def concerning(self, features: int) -> Iterator[tuple[str, int]]:
        """Yield the counts that the sharding of ``features`` has to respect: queries, keys and values, or both."""
        width = self.head_dim
        if width and self.queries and features % (self.queries[1] * width) == 0:  # or queries and their gates
            yield self.queries
            return
        if width and self.keys and features == self.keys[1] * width:
            yield self.keys
            return
        if self.queries and features == self.queries[1]:  # a number for each head
            yield self.queries
            return
        for count in (self.queries, self.keys):
            if count is not None:
                yield count

    @property
    def fused_features(self) -> int | None:
        """The features of queries, keys and values together, where they are known."""
        if self.queries is None or self.head_dim is None:
            return None
        return (self.queries[1] + 2 * (self.keys or self.queries)[1]) * self.head_dim

    def can_share(self, tp_size: int) -> bool:
        """Return whether ranks that do not divide the kv heads can share them: each has its queries, each head too."""
        if self.queries is None or self.keys is None:
            return False
        return self.queries[1] % tp_size == 0 and self.queries[1] % self.keys[1] == 0


def with_counts(model: nn.Module, entries: list[Entry], tp_size: int) -> list[Entry]:
    """Return the entries, those of keys and values with the head counts that the model states around them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # Attention without keys and values of its own, which takes those of another layer.
    reusing = [
        (module, _counts_around(modules, f"{fqn}."))
        for fqn, module in modules.items()
        if hasattr(module, GROUPS)
        and not any(names_keys_or_values(name) for name, _ in module.named_modules())
    ]
    bound = []
    for entry in entries:
        if isinstance(entry.style, KeyValueParallel) and isinstance(entry.module, nn.Linear):
            counts = _counts_around(modules, entry.fqn)
            attentions = [module for module, others in reusing if others == counts]
            nearest = _grouping(modules, entry.fqn)
            attentions += [] if nearest is None else [nearest]
            bound.append(replace(entry, style=entry.style.on_ranks(tp_size, *counts, attentions)))
        else:
            bound.append(entry)
    return bound


def _counts_around(modules: dict[str, nn.Module], fqn: str) -> tuple[int | None, int | None]:
    for _, heads in _stated(modules, fqn):
        queries, keys = heads.queries, heads.keys or heads.queries
        return queries and queries[1], keys and keys[1]
    return None, None


def _grouping(modules: dict[str, nn.Module], fqn: str) -> nn.Module | None:
    """Return the nearest module around a linear that keeps how many queries share a kv head."""
    tokens = fqn.split(".")
    around = (modules.get(".".join(tokens[:depth])) for depth in range(len(tokens) - 1, -1, -1))
    return next((module for module in around if hasattr(module, GROUPS)), None)


def head_problems(model: nn.Module, entries: list[Entry], tp_size: int) -> list[str]:
    """Return the head counts that the ranks cannot share equally, once for all the layers that one key matches."""
    modules = dict(model.named_modules(remove_duplicate=False))
    merged: dict[tuple[str, int, str], tuple[dict[str, None], dict[str, None]]] = {}
    for entry in entries:
        for place, count, remedy in _counts_that_do_not_divide(modules, entry, tp_size):
            keys, where = merged.setdefault((place.rpartition(".")[2], count, remedy), ({}, {}))
            keys[repr(entry.key)] = None
            where[place] = None
    return [
        f"{listing(where, 3)}: {count} heads are not divisible by the tp size {tp_size}, and "
        f"{listing(keys, 4)} would cut them; {remedy}"
        for (_, count, remedy), (keys, where) in merged.items()
    ]


def _counts_that_do_not_divide(
    modules: dict[str, nn.Module], entry: Entry, tp_size: int
) -> Iterator[tuple[str, int, str]]:
    """Yield where a count is stated that the ranks do not divide, the count, and what helps."""
    features = sharded_features(entry)
    if features is None:
        return
    for owner, heads in _stated(modules, entry.fqn):
        concerned = list(heads.concerning(features))
        for name, count in concerned:
            if count % tp_size == 0 or (isinstance(entry.style, KeyValueParallel) and entry.style.shared):
                continue
            remedy = f"choose a tp size that divides {count}"
            column = isinstance(entry.style, ColwiseParallel)
            if column and concerned == [heads.keys] and heads.can_share(tp_size):
                remedy = f"give them KeyValueParallel(), or {remedy}"
            yield (f"{owner}.{name}" if owner else name), count, remedy
        return  # the nearest statement counts


def sharded_features(entry: Entry) -> int | None:
    """Return the features of a linear that each rank gets a shard of, and so of the heads; None if there are none."""
    if not isinstance(entry.module, nn.Linear):
        return None
    # Features are the last dim of any activation: its number does not matter.
    if isinstance(entry.style, ColwiseParallel):
        layout, features = entry.style.output_layouts[0], entry.module.out_features
    elif isinstance(entry.style, RowwiseParallel):
        layout, features = entry.style.input_layouts[0], entry.module.in_features
    else:
        return None
    return features if isinstance(layout, Shard) and _last(layout) else None


def _last(layout: Shard) -> bool:
    """Return whether a layout shards the last dim of activations of three dims (batch, sequence, features)."""
    return sharded_dim(layout, 3) == 2  # noqa: PLR2004  the last of three


def called_attention(fqn: str, module: nn.Module) -> bool:
    """Return whether a module's name, or that of its class, says that it is attention."""
    called = f"{fqn.rpartition('.')[2]} {type(module).__name__}".lower().replace("attentiondecoderlayer", "")
    return any(word in called for word in _ATTENTION)


def heads_around(modules: dict[str, nn.Module], fqn: str) -> Heads | None:
    """Return the heads that the nearest module around says it has; None if none does."""
    return next((heads for _, heads in _stated(modules, fqn)), None)


def _stated(modules: dict[str, nn.Module], fqn: str) -> Iterator[tuple[str, Heads]]:
    """Yield what the modules around a linear say about heads, the nearest first.

    A block or a whole model also states heads, and so does the configuration that a feed-forward carries:
    those count only for linears inside something that is called attention.
    """
    tokens = fqn.split(".")[:-1]
    attention = False
    for depth in range(len(tokens), -1, -1):
        owner = ".".join(tokens[:depth])
        if fqn == "" or owner not in modules:
            continue
        module = modules[owner]
        own_name = tokens[depth - 1] if depth else ""
        attention = attention or called_attention(own_name, module)
        if attention or depth == len(tokens):
            direct = _heads(module, module)
            if direct is not None:
                yield owner, direct
        config = _own_config(module)
        if attention and config is not None:
            stated = _heads(config, module)
            if stated is not None:
                yield f"{owner}.config" if owner else "config", stated


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
    return Heads(queries, keys, _head_dim(source, module, queries, keys))


def _head_dim(
    source: object, module: nn.Module, queries: tuple[str, int] | None, keys: tuple[str, int] | None
) -> int | None:
    """Return the features of one head: stated, or the width that fits the linears of the module."""
    for stated in (_stated_value(module, "head_dim"), _stated_value(source, "head_dim")):
        if _is_count(stated):
            return stated
    if queries is None:
        return None
    outputs = {linear.out_features for linear in module.modules() if isinstance(linear, nn.Linear)}
    wholes = [_stated_value(source, name) for name in ("hidden_size", "dim", "embed_dim", "d_model")]
    widths = [whole // queries[1] for whole in wholes if _is_count(whole)]
    widths += sorted({features // queries[1] for features in outputs if features % queries[1] == 0})
    count = (keys or queries)[1]
    fitting = (width for width in widths if {width * queries[1], width * count} <= outputs)
    return next(fitting, next(iter(widths), None))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _first_count(source: object, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = _stated_value(source, name)
        if _is_count(value):
            return name, value
    return None
