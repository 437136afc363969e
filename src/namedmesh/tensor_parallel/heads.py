"""Attention heads: found on the modules around the sharded projections, so that no rank gets half a head."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from namedmesh.errors import listing
from namedmesh.tensor_parallel.setup import is_replicated, sharded_dim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from namedmesh.tensor_parallel.entry import Entry

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
        """The counts that a cut of ``features`` has to respect: queries, keys and values, or both."""
        width = self.head_dim
        if width and self.queries and features == self.queries[1] * width:
            yield self.queries
            return
        if width and self.keys and features == self.keys[1] * width:
            yield self.keys
            return
        for count in (self.queries, self.keys):
            if count is not None:
                yield count


def head_problems(model: nn.Module, entries: list[Entry], tp_size: int) -> list[str]:
    """Head counts that the ranks cannot share equally, once for all the layers that one key matches."""
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for entry in entries:
        features = _cut_features(entry)
        if features is None:
            continue
        for owner, heads in _stated(modules, entry.fqn):
            for name, count in heads.concerning(features):
                if count % tp_size:
                    place = f"{owner}.{name}" if owner else name
                    places[entry.key, name, count].append(place)
            break  # the nearest statement counts
    merged: dict[tuple[str, int], tuple[list[str], dict[str, None]]] = {}
    for (key, name, count), found in places.items():
        keys, where = merged.setdefault((name, count), ([], {}))
        keys.append(repr(key))
        where.update(dict.fromkeys(found))
    return [
        f"{listing(where, 3)}: {count} heads are not divisible by the tp size {tp_size}, and "
        f"{listing(keys, 4)} would cut them; choose a tp size that divides {count}, or leave those out"
        for (_, count), (keys, where) in merged.items()
    ]


def _cut_features(entry: Entry) -> int | None:
    """The features of a linear that each rank gets a piece of, and so of the heads; None if there are none."""
    if not isinstance(entry.module, nn.Linear):
        return None
    # Features are the last dim of any activation: its number does not matter.
    if isinstance(entry.style, ColwiseParallel):
        layout, features = entry.style.output_layouts[0], entry.module.out_features
    elif isinstance(entry.style, RowwiseParallel):
        layout, features = entry.style.input_layouts[0], entry.module.in_features
    else:
        return None
    return features if isinstance(layout, Shard) and not is_replicated(layout) and _last(layout) else None


def _last(layout: Shard) -> bool:
    """Whether a layout cuts the last dim of activations of three dims (batch, sequence, features)."""
    return sharded_dim(layout, 3) == 2  # noqa: PLR2004  the last of three


def _stated(modules: dict[str, nn.Module], fqn: str) -> Iterator[tuple[str, Heads]]:
    """What the modules around a linear say about heads, the nearest first.

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
        called = f"{own_name} {type(module).__name__}".lower()
        attention = attention or any(word in called for word in _ATTENTION)
        if attention or depth == len(tokens):
            direct = _heads(module)
            if direct is not None:
                yield owner, direct
        config = getattr(module, "config", None)
        if attention and config is not None:
            stated = _heads(config)
            if stated is not None:
                yield f"{owner}.config" if owner else "config", stated


def _heads(source: object) -> Heads | None:
    queries, keys = _first_count(source, _QUERY_HEADS), _first_count(source, _KV_HEADS)
    if queries is None and keys is None:
        return None
    width = getattr(source, "head_dim", None)
    if not isinstance(width, int) and queries is not None:
        whole = next(
            (
                value
                for name in ("hidden_size", "dim", "embed_dim", "d_model")
                if isinstance(value := getattr(source, name, None), int)
            ),
            None,
        )
        width = whole // queries[1] if whole else None
    return Heads(queries, keys, width if isinstance(width, int) else None)


def _first_count(source: object, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return name, value
    return None
