"""Weights and their shards: rows of equal layers are folded, and every shard is drawn where it is."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from namedmesh.plan.weights import Weight, draw_weights_html, draw_weights_svg, fold

SVG = "{http://www.w3.org/2000/svg}"


def unfolded(name: str) -> list[str]:
    """The names that a folded one stands for."""
    for place, part in enumerate(parts := name.split(".")):
        low, dash, high = part.partition("-")
        if dash:
            return [
                each
                for number in range(int(low), int(high) + 1)
                for each in unfolded(".".join([*parts[:place], str(number), *parts[place + 1 :]]))
            ]
    return [name]


@given(
    st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(["up", "down"]), st.booleans()))
)
def test_folding_loses_no_row(rows: set[tuple[int, int, str, bool]]) -> None:
    names = [(f"layers.{a}.experts.{b}.{name}", kind) for a, b, name, kind in sorted(rows)]
    folded = fold(names)
    assert sorted((each, kind) for name, kind in folded for each in unfolded(name)) == sorted(names)


def test_a_whole_model_folds_to_a_row_for_each_weight() -> None:
    names = [f"layers.{a}.experts.{b}.{name}" for a in range(32) for b in range(8) for name in ("up", "down")]
    assert [name for name, _ in fold([("embedding", 0), *((name, 1) for name in names)])] == [
        "embedding",
        "layers.0-31.experts.0-7.up",
        "layers.0-31.experts.0-7.down",
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_the_shards_fill_the_weight(dim: int) -> None:
    weight = Weight("up<", (8, 6), dim, (3, 3, 2) if dim == 0 else (4, 1, 1))
    root = ET.fromstring(draw_weights_svg("title", [weight, Weight("norm", (6,))]))  # noqa: S314  our own text
    boxes = [box.attrib for box in root.iter(f"{SVG}rect")]
    shards = [box for box in boxes if box.get("class") == "shard"]
    frame, whole = (box for box in boxes if "edge" in box.get("class", ""))
    side, start = ("height", "y") if dim == 0 else ("width", "x")
    total = sum(weight.sizes)
    assert [float(box[side]) / float(frame[side]) * total for box in shards] == pytest.approx(
        weight.sizes, rel=1e-3
    )
    assert float(shards[0][start]) == float(frame[start])
    assert whole["class"] == "node edge"
    tips = [tip.text for tip in root.iter(f"{SVG}title")]
    assert tips[2] == ("rank 1: up<[3:6]" if dim == 0 else "rank 1: up<[:, 4:5]")
    assert "<svg" in draw_weights_html("a", [weight])
