"""Shard the weight of a linear layer over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.plan.spec import size_problems
from namedmesh.plan.tables import Document, Table
from namedmesh.plan.weights import Weight

STYLES = ("column", "row")
_SHOWN = 32
_MOST = 10**6


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
    shown = cut.pieces if everything else cut.pieces[:_SHOWN]
    rows = tuple((piece.rank, _range(piece), str(piece.shape), str(piece.weight_shape)) for piece in shown)
    more = f"... and {len(cut.pieces) - len(shown)} more ranks" if len(shown) < len(cut.pieces) else ""
    table = Table(("tp rank", f"{features}", "A_i (in, out)", "torch weight (out, in)"), rows)
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


def _range(piece: Piece) -> str:
    return f"{piece.start} to {piece.stop - 1}" if piece.stop > piece.start else "nothing"
