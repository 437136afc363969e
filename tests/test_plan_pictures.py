"""Pictures: well-formed, every rank in them, the right color on each; and the examples are up to date."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from namedmesh import AxisError, LayoutError
from namedmesh.plan import draw_html, draw_svg, make_plan
from namedmesh.plan.cells import Cell, Grid, shades

EXAMPLES = Path(__file__).parents[1] / "examples" / "plan"
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "input", "link", "br"}


class Page(HTMLParser):
    """A page in which every element is closed in its turn; collects cells and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: dict[int, dict[str, str | None]] = {}
        self.texts: dict[str, str] = {}
        self.mark = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        for name in ("src", "href"):
            assert name not in named  # nothing comes from elsewhere
        if named.get("class") == "rank":
            self.cells[int(named["data-rank"] or "")] = named
        if tag not in VOID:
            self.open.append(tag)
        self.mark = named.get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[self.mark] = self.texts.get(self.mark, "") + data


def svg_cells(text: str) -> dict[int, Any]:
    root = ET.fromstring(text)  # noqa: S314  our own text
    return {int(cell.attrib["data-rank"]): cell for cell in root.iter(f"{SVG}g")}


@pytest.mark.parametrize("world", [1, 2, 8, 12, 64, 512])
@pytest.mark.parametrize("node", [None, 8])
def test_every_rank_is_in_the_picture(world: int, node: int | None) -> None:
    plan = make_plan(world_size=world, gpus_per_node=node, tp=2 if world % 2 == 0 else 1)
    cells = svg_cells(draw_svg(plan))
    assert sorted(cells) == list(range(world))
    for rank, cell in cells.items():
        assert next(text.text for text in cell.iter(f"{SVG}text")) == str(rank)
    assert sorted(Page(draw_html(plan)).cells) == list(range(world))


def test_no_two_cells_overlap_and_all_are_inside() -> None:
    for world in (8, 64, 512, 4096):
        root = ET.fromstring(draw_svg(make_plan(world_size=world, tp=4, pp=2, gpus_per_node=8)))  # noqa: S314
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        assert width <= 1400
        assert world not in {64, 512} or 0.6 < width / height < 3
        seen = []
        for cell in root.iter(f"{SVG}g"):
            box = cell.find(f"{SVG}rect")
            assert box is not None
            x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x + w <= width
            assert y + h <= height
            seen.append((x, y, w, h))
        assert len(set(seen)) == len(seen)
        assert len({(w, h) for _, _, w, h in seen}) == 1
        step = min(x for x, _, _, _ in seen if x > seen[0][0]) - seen[0][0]
        assert step > seen[0][2]


def test_outlines_hold_the_groups_of_the_fastest_axis() -> None:
    root = ET.fromstring(draw_svg(make_plan(world_size=16, tp=4, pp=2, gpus_per_node=8)))  # noqa: S314
    assert len([box for box in root.iter(f"{SVG}rect") if box.get("class") == "group"]) == 4
    grid = Grid(make_plan(world_size=32, tp=16, gpus_per_node=8))
    assert grid.outlines(grid.boxes[0].rows[0]) == [(0, 7)]
    grid = Grid(make_plan(world_size=16, tp=2, order="dp-tp"))
    assert grid.outlined_axis() == "dp"


@pytest.mark.parametrize("axis", ["pp", "dp", "tp", "ep"])
def test_colors_follow_the_axis(axis: str) -> None:
    plan = make_plan(world_size=32, tp=2, pp=2, ep=4, etp=1)
    layout = plan.expert if axis == "ep" else plan.layout
    assert layout is not None
    expected = {rank: shades(layout[axis])[layout.coords(rank)[axis]].fill for rank in range(32)}
    fills = {}
    for rank, cell in svg_cells(draw_svg(plan, color_by=axis)).items():
        box = cell.find(f"{SVG}rect")
        assert box is not None
        fills[rank] = box.attrib["fill"]
    assert fills == expected
    page = Page(draw_html(plan, color_by=axis))
    for rank, cell in page.cells.items():
        assert (cell["style"] or "").startswith(f"background:{expected[rank]};color:#")


@pytest.mark.parametrize("size", [2, 8, 9, 16, 64, 8192])
def test_neighboring_colors_differ_and_their_text_can_be_read(size: int) -> None:
    def linear(fill: str) -> list[float]:
        parts = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]

    def luminance(fill: str) -> float:
        red, green, blue = linear(fill)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    made = shades(size)
    assert len({shade.fill for shade in made}) == len(made) == min(size, 64)
    for shade in made:
        high, low = sorted((luminance(shade.fill), luminance(shade.text)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5
    for one, other in pairwise(made):
        assert sum(abs(int(one.fill[i : i + 2], 16) - int(other.fill[i : i + 2], 16)) for i in (1, 3, 5)) > 60


def test_a_large_world_is_summed_up() -> None:
    plan = make_plan(world_size=2**20, tp=8, pp=16, gpus_per_node=8)
    grid = Grid(plan)
    assert grid.block == 2048
    cells = [cell for box in grid.boxes for row in box.rows for cell in row]
    assert [cell.first for cell in cells] == list(range(0, 2**20, 2048))
    assert [grid.coordinate(cell, "pp") for cell in cells] == [i // 32 for i in range(512)]
    assert {grid.coordinate(cell, "tp") for cell in cells} == {None}
    assert cells[1].label == "2048\N{EN DASH}4095"
    text = draw_svg(plan, color_by="dp")
    assert text.count('fill="url(#hatch)"') == 512
    uneven = Grid(make_plan(world_size=1000, gpus_per_node=8))
    last = uneven.boxes[-1].rows[-1][-1]
    assert (last.first + last.count, uneven.block) == (1000, 8)
    assert Grid(make_plan("tp=2")).coordinate(Cell(1, 1), "tp") == 1


def test_the_page_carries_the_layout_for_its_script() -> None:
    plan = make_plan(world_size=32, tp=2, pp=2, ep=4, etp=1)
    page = Page(draw_html(plan, rank=5))
    data = json.loads(page.texts["layout"])
    assert (data["world"], data["block"]) == (32, 1)
    assert {axis["name"]: (axis["size"], axis["stride"]) for axis in data["axes"]} == {
        "pp": (2, 16),
        "dp": (8, 2),
        "tp": (2, 1),
        "edp": (4, 4),
        "ep": (4, 1),
        "etp": (1, 1),
    }
    assert "prefers-color-scheme: dark" in page.texts["style"]


def test_mistakes_are_named() -> None:
    plan = make_plan("dp=2,tp=2")
    with pytest.raises(AxisError) as caught:
        draw_svg(plan, color_by="tpp")
    assert str(caught.value) == "axis 'tpp' is not one of ('dp', 'tp'); did you mean 'tp'?"
    with pytest.raises(LayoutError) as wrong:
        draw_html(plan, rank=4)
    assert str(wrong.value) == "rank 4 is outside dp=2 x tp=2 (4 ranks); its ranks are 0 to 3"


def test_the_examples_are_up_to_date() -> None:
    found = spec_from_file_location("plan_make", EXAMPLES / "make.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    for name, text in module.files().items():
        assert (EXAMPLES / name).read_text(encoding="utf-8") == text, f"{name}: run examples/plan/make.py"


def test_the_script_of_the_page_knows_its_elements() -> None:
    """Every element that the script asks for is there."""
    text = draw_html(make_plan("dp=2,tp=2"))
    asked = set(re.findall(r'getElementById\("(\w+)"\)', text))
    assert len(asked) > 5
    assert asked <= set(re.findall(r' id="(\w+)"', text))
