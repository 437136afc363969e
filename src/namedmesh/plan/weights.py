"""Shard the weight of a linear layer over tensor-parallel ranks, draw which part of a weight each has, fold equal layers."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.plan.cells import shades
from namedmesh.plan.spec import size_problems
from namedmesh.plan.svg import Drawing, Rect
from namedmesh.plan.tables import Document, Table

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

STYLES = ("column", "row")
_LISTED = 32
_MOST = 10**6
_Details = TypeVar("_Details", bound="Hashable")
_LONGEST, _SHORTEST = 220, 14  # of the side of a weight, in pixels
_NUMBERED = 16  # shards that have room for the number of their rank


class Weight(NamedTuple):
    """A weight: of equal layers the name of all, its shape, the dim that is sharded if one is, and how much of it each rank has."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    sizes: tuple[int, ...] = ()


def fold(rows: Iterable[tuple[str, _Details]]) -> list[tuple[str, _Details]]:
    """Fold rows whose names differ in one number, and in nothing else, where the numbers follow each other."""
    folded = list(rows)
    depth = max((name.count(".") for name, _ in folded), default=0)
    for place in range(depth, -1, -1):
        runs: dict[tuple[str, _Details], list[int]] = {}
        result: list[tuple[str, _Details, list[int]]] = []
        for name, details in folded:
            parts = name.split(".")
            if place >= len(parts) or re.fullmatch(r"[0-9]+", parts[place]) is None:
                result.append((name, details, []))
                continue
            number = int(parts[place])
            pattern = ".".join([*parts[:place], "{}", *parts[place + 1 :]])
            run = runs.get((pattern, details), [])
            if not run or run[-1] != number - 1:
                run = runs[pattern, details] = []
                result.append((pattern, details, run))
            run.append(number)
        folded = [
            (name.replace("{}", "-".join(map(str, dict.fromkeys((*run[:1], *run[-1:]))))), details)
            for name, details, run in result
        ]
    return folded


def draw_weights_svg(title: str, weights: Sequence[Weight]) -> str:
    """Draw each weight to scale, with the shard of each rank in the color of the rank."""
    longest = max((side for weight in weights for side in weight.shape), default=1)
    texts = [text for weight in weights for text in (weight.name, _description(weight))]
    wide = max([20, *map(len, texts)]) * 8 + 32
    drawing = Drawing(max(512, wide + _LONGEST + 48, len(title) * 11))
    drawing.text(24, 38, title, 18)
    y = 72
    for weight in weights:
        sides = (*weight.shape, 1, 1)[:2]
        height, width = (max(_SHORTEST, round(_LONGEST * side / longest)) for side in sides)
        drawing.text(24, y + 14, weight.name, 14)
        drawing.text(24, y + 30, _description(weight), 12, "soft")
        _draw_shards(drawing, weight, (wide, y, width, height))
        y += max(height, 30) + 14
    return drawing.page(title, y + 10)


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


def _draw_shards(drawing: Drawing, weight: Weight, box: Rect) -> None:
    total = sum(weight.sizes)
    if weight.dim is None or not total:
        drawing.rect(box, "node edge")
        return
    colors, start = shades(len(weight.sizes)), 0
    for rank, size in enumerate(weight.sizes):
        shade = colors[rank * len(colors) // len(weight.sizes)]
        x, y, width, height = box
        if weight.dim == 0:
            y, height = y + start / total * height, size / total * height
        else:
            x, width = x + start / total * width, size / total * width
        indices = ", ".join([":"] * weight.dim + [f"{start}:{start + size}"])
        title = f"rank {rank}: {weight.name}[{indices}]"
        drawing.rect((x, y, width, height), "shard", fill=shade.fill, title=title)
        if len(weight.sizes) <= _NUMBERED and min(width, height) >= _SHORTEST - 2:
            drawing.text(x + width / 2, y + height / 2 + 4, str(rank), 11, fill=shade.text, anchor="middle")
        start += size
    drawing.rect(box, "edge", fill="none")


@dataclass(frozen=True)
class Piece:
    """The shard of a weight that one rank has.

    Args:
        rank: its position among the tensor-parallel ranks.
        start: its first index, on the dim that is sharded.
        stop: the index after its last; equal to ``start`` for an empty shard.
        shape: its shape as (inputs, outputs), the A_i of y = x A.
    """

    rank: int
    start: int
    stop: int
    shape: tuple[int, int]

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape of the ``weight`` of torch's ``Linear``, which is (outputs, inputs)."""
        return self.shape[1], self.shape[0]


@dataclass(frozen=True)
class Cut:
    """The shards of a weight.

    Args:
        inputs: the number of input features.
        outputs: the number of output features.
        style: ``"column"`` shards the outputs, ``"row"`` the inputs.
        pieces: one shard for each rank.
    """

    inputs: int
    outputs: int
    style: str
    pieces: tuple[Piece, ...]

    @property
    def even(self) -> bool:
        """Whether all shards have the same shape."""
        return len({piece.shape for piece in self.pieces}) == 1


def cut_weight(inputs: int, outputs: int, *, tp: int, style: Literal["column", "row"] | str) -> Cut:  # noqa: PYI051  the two are shown to the reader
    """Shard a weight as torch does: in chunks of the rounded-up size, the last ones smaller or empty.

    Args:
        inputs: the number of input features.
        outputs: the number of output features.
        tp: how many ranks share it.
        style: ``"column"`` shards the outputs, ``"row"`` the inputs.

    Raises:
        LayoutError: a size below 1, or another style; all problems at once.

    Example:
        >>> cut_weight(1024, 512, tp=16, style="column").pieces[1]
        Piece(rank=1, start=32, stop=64, shape=(1024, 32))
        >>> cut_weight(1024, 512, tp=16, style="row").pieces[1].shape
        (64, 512)
        >>> [piece.stop - piece.start for piece in cut_weight(10, 4, tp=4, style="row").pieces]
        [3, 3, 3, 1]
    """
    problems = size_problems({"the number of inputs": inputs, "the number of outputs": outputs, "tp": tp})
    if tp > _MOST:
        problems.append(f"tp is {tp}; it may be {_MOST} at most")
    if style not in STYLES:
        problems.append(f"style {style!r} is not one of {STYLES}{did_you_mean(style, STYLES)}")
    if problems:
        raise LayoutError(*problems)
    total = outputs if style == "column" else inputs
    chunk = -(-total // tp)
    pieces = []
    for rank in range(tp):
        start, stop = min(rank * chunk, total), min((rank + 1) * chunk, total)
        shape = (inputs, stop - start) if style == "column" else (stop - start, outputs)
        pieces.append(Piece(rank, start, stop, shape))
    return Cut(inputs, outputs, style, tuple(pieces))


def shard_document(cut: Cut, *, everything: bool = False) -> Document:
    """Write the shards of a weight as text and as a table."""
    features, layer = (
        ("outputs", "ColumnParallelLinear") if cut.style == "column" else ("inputs", "RowParallelLinear")
    )
    sizes = sorted({piece.stop - piece.start for piece in cut.pieces}, reverse=True)
    headline = f"{layer} {cut.inputs} -> {cut.outputs} over {len(cut.pieces)} ranks: "
    if cut.even:
        headline += f"{sizes[0]} {features} on each, A_i of shape {cut.pieces[0].shape}"
    else:
        headline += f"uneven, {' or '.join(map(str, sizes))} {features} on each; torch's chunks are like this, Megatron-style layers refuse it"
    shown = cut.pieces if everything else cut.pieces[:_LISTED]
    rows = []
    for piece in shown:
        part = f"{piece.start} to {piece.stop - 1}" if piece.stop > piece.start else "nothing"
        rows.append((piece.rank, part, str(piece.shape), str(piece.weight_shape)))
    more = f"... and {len(cut.pieces) - len(shown)} more ranks" if len(shown) < len(cut.pieces) else ""
    table = Table(("tp rank", features, "A_i (in, out)", "torch weight (out, in)"), tuple(rows))
    flat = Table(
        ("rank", "start", "stop", "in", "out"),
        tuple((piece.rank, piece.start, piece.stop, *piece.shape) for piece in cut.pieces),
    )
    data = {
        "in": cut.inputs,
        "out": cut.outputs,
        "style": cut.style,
        "tp": len(cut.pieces),
        "even": cut.even,
        "pieces": [asdict(piece) for piece in cut.pieces],
    }
    return Document((headline, table, more), lambda: data, lambda: flat)


def drawn_weight(cut: Cut) -> tuple[str, list[Weight]]:
    """Return a title and the weight, as :func:`namedmesh.plan.weights.draw_weights_svg` takes them; torch's order of dims."""
    sizes = tuple(piece.stop - piece.start for piece in cut.pieces)
    weight = Weight("weight", (cut.outputs, cut.inputs), 0 if cut.style == "column" else 1, sizes)
    return f"{cut.style}: {cut.inputs} -> {cut.outputs} over {len(sizes)} ranks", [weight]
