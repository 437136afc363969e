"""Fold the rows of equal layers, and draw which part of each weight a tensor-parallel rank has."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from namedmesh.plan.cells import shades
from namedmesh.plan.svg import svg_page, svg_text

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

_Details = TypeVar("_Details", bound="Hashable")
_LONGEST, _SHORTEST = 220, 14  # of the side of a weight, in pixels
_NUMBERED = 16  # shards that have room for the number of their rank


class Weight(NamedTuple):
    """A weight, and how it is sharded.

    Args:
        name: its name; of equal layers, that of all of them.
        shape: its shape.
        dim: the dim that is sharded; None if every rank has all of it.
        sizes: how much of that dim each rank has.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    sizes: tuple[int, ...] = ()


def fold(rows: Iterable[tuple[str, _Details]]) -> list[tuple[str, _Details]]:
    """Fold rows whose names differ in one number, and in nothing else, where the numbers follow each other.

    Args:
        rows: a dotted name each, and what has to be equal.

    Example:
        >>> fold([(f"layers.{i}.{name}", name) for i in range(3) for name in ("up", "down")] + [("head", "h")])
        [('layers.0-2.up', 'up'), ('layers.0-2.down', 'down'), ('head', 'h')]
        >>> fold([("layers.0.w", (8, 8)), ("layers.1.w", (8, 4)), ("layers.2.w", (8, 4))])
        [('layers.0.w', (8, 8)), ('layers.1-2.w', (8, 4))]
    """
    folded = list(rows)
    depth = max((name.count(".") for name, _ in folded), default=0)
    for place in range(depth, -1, -1):
        runs: dict[tuple[str, _Details], list[list[int]]] = {}
        result: list[tuple[str, _Details, list[int] | None]] = []
        for name, details in folded:
            parts = name.split(".")
            if place >= len(parts) or re.fullmatch(r"[0-9]+", parts[place]) is None:
                result.append((name, details, None))
                continue
            number = int(parts[place])
            pattern = ".".join([*parts[:place], "{}", *parts[place + 1 :]])
            known = runs.setdefault((pattern, details), [])
            if known and known[-1][1] == number - 1:
                known[-1][1] = number
            else:
                known.append([number, number])
                result.append((pattern, details, known[-1]))
        folded = [
            (
                name if run is None else name.replace("{}", str(run[0]) + f"-{run[1]}" * (run[1] > run[0])),
                details,
            )
            for name, details, run in result
        ]
    return folded


def draw_weights_svg(title: str, weights: Sequence[Weight]) -> str:
    """Draw each weight to scale, with the shard of each rank in the color of the rank.

    Example:
        >>> draw_weights_svg("one", [Weight("up", (8, 4), 0, (4, 4))]).count('class="shard"')
        2
    """
    parts: list[str] = []
    longest = max((side for weight in weights for side in weight.shape), default=1)
    texts = [text for weight in weights for text in (weight.name, _description(weight))]
    wide = max([20, *map(len, texts)]) * 8 + 32
    y = 72
    for weight in weights:
        height, width = (
            max(_SHORTEST, round(_LONGEST * side / longest)) for side in (*weight.shape, 1, 1)[:2]
        )
        parts.append(svg_text(24, y + 14, weight.name, 14))
        parts.append(svg_text(24, y + 30, _description(weight), 12, "soft"))
        parts += _shards(weight, wide, y, width, height)
        y += max(height, 30) + 14
    parts[:0] = [svg_text(24, 38, title, 18)]
    return svg_page(title, max(512, wide + _LONGEST + 48, len(title) * 11), y + 10, parts)


def draw_weights_html(title: str, weights: Sequence[Weight]) -> str:
    """Write the same as a page."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<style>:root { color-scheme: light dark; } svg { max-width: 100%; height: auto; }</style>\n</head>\n"
        f"<body>\n{draw_weights_svg(title, weights)}</body>\n</html>\n"
    )


def _description(weight: Weight) -> str:
    shape = " x ".join(map(str, weight.shape))
    return f"{shape}, " + ("whole on every rank" if weight.dim is None else f"dim {weight.dim} sharded")


def _shards(weight: Weight, x: int, y: int, width: int, height: int) -> list[str]:
    total = sum(weight.sizes)
    if weight.dim is None or not total:
        return [f'<rect class="node edge" x="{x}" y="{y}" width="{width}" height="{height}"/>']
    colors, start, parts = shades(len(weight.sizes)), 0, []
    for rank, size in enumerate(weight.sizes):
        shade = colors[rank * len(colors) // len(weight.sizes)]
        low, part = start / total, size / total
        box = (
            (x, y + low * height, width, part * height)
            if weight.dim == 0
            else (x + low * width, y, part * width, height)
        )
        left, top, wide, high = box
        parts.append(
            f'<rect class="shard" x="{left:g}" y="{top:g}" width="{wide:g}" height="{high:g}" fill="{shade.fill}">'
            f"<title>rank {rank}: {escape(weight.name)}[{', '.join([':'] * weight.dim + [f'{start}:{start + size}'])}]</title></rect>"
        )
        if len(weight.sizes) <= _NUMBERED and min(wide, high) >= _SHORTEST - 2:
            parts.append(
                svg_text(left + wide / 2, top + high / 2 + 4, str(rank), 11, fill=shade.text, anchor="middle")
            )
        start += size
    return [*parts, f'<rect class="edge" x="{x}" y="{y}" width="{width}" height="{height}" fill="none"/>']
