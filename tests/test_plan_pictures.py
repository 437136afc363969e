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

from namedmesh import LayoutError
from namedmesh.plan import draw_html, draw_svg, make_plan
from namedmesh.plan.cells import Cell, Grid, Outline, shades

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
        assert next(text.text for text in cell.iter(f"{SVG}text")) in {str(rank), f"rank {rank}"}
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
    paths = [path.attrib for path in root.iter(f"{SVG}path")]
    assert [(path["class"], path["d"][-1]) for path in paths] == [("group", "Z")] * 4
    grid = Grid(make_plan(world_size=32, tp=16, gpus_per_node=8))
    assert [grid.outlines(box.rows[0]) for box in grid.boxes[:2]] == [
        [Outline(0, 7, starts=True, ends=False, crosses=True)],
        [Outline(0, 7, starts=False, ends=True, crosses=True)],
    ]
    grid = Grid(make_plan(world_size=16, tp=2, order="dp-tp"))
    assert grid.outlined == "dp"


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


# Which text is drawn on which ground.
ON_PAGE = [
    ("ink", "paper"),
    ("soft", "paper"),
    ("ink", "node"),
    ("soft", "node"),
    ("alarm", "paper"),
    ("paper", "ring"),
]
ON_SVG = [*ON_PAGE[:4], ("slow", "paper"), ("middle", "outer"), ("middle", "paper"), ("fast", "paper")]


def contrast(one: str, other: str) -> float:
    """The contrast of two colors as the Web Content Accessibility Guidelines define it."""

    def luminance(fill: str) -> float:
        parts = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("size", [2, 8, 9, 16, 64, 8192])
def test_neighboring_colors_differ_and_their_text_can_be_read(size: int) -> None:
    made = shades(size)
    assert len({shade.fill for shade in made}) == len(made) == min(size, 64)
    assert all(contrast(shade.fill, shade.text) >= 4.5 for shade in made)
    for one, other in pairwise(made):
        assert sum(abs(int(one.fill[i : i + 2], 16) - int(other.fill[i : i + 2], 16)) for i in (1, 3, 5)) > 60


def test_text_can_be_read_light_and_dark() -> None:
    light, dark = draw_html(make_plan("tp=2")).split("@media")
    for text in (light, dark):
        colors = dict(re.findall(r"--(\w+): (#\w{6})", text))
        assert [pair for pair in ON_PAGE if contrast(*(colors[name] for name in pair)) < 4.5] == []
    text = draw_svg(make_plan("pp=2,dp=2,tp=2"))
    light, dark = text.split("@media")
    for part in (light, dark):
        colors = dict(re.findall(r"\.(\w+) \{ \w+: (#\w{6})", part))
        assert [pair for pair in ON_SVG if contrast(*(colors[name] for name in pair)) < 4.5] == []
        assert {name for names in re.findall(r'<text[^>]*class="(\w+)"', text) for name in names.split()} <= {
            ink for ink, _ in ON_SVG
        }


def test_a_group_that_leaves_its_node_is_open_and_dashed() -> None:
    plan = make_plan(world_size=72, tp=8, pp=3, gpus_per_node=4, nvlink_domain=72)
    root = ET.fromstring(draw_svg(plan))  # noqa: S314  our own text
    paths = [path.attrib for path in root.iter(f"{SVG}path")]
    assert len(paths) == 18
    assert {path["class"] for path in paths} == {"group crosses"}
    assert not any(path["d"].endswith("Z") for path in paths)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "outlined: groups of tp, dashed and open where they leave a node" in texts
    assert texts.count("NVLink domain 0") == 1
    assert [box.around for box in Grid(plan).boxes] == ["NVLink domain 0"] * 18
    assert [draw_html(plan).count(f'class="{name}"') for name in ("domain", "node")] == [1, 18]


@pytest.mark.parametrize(
    ("node", "domain", "labels"),
    [
        (8, 4, [("NVLink domain 0", "node 0"), ("NVLink domain 1", "node 0"), ("NVLink domain 2", "node 1")]),
        (4, 4, [("node 0, NVLink domain 0", ""), ("node 1, NVLink domain 1", "")]),
        (4, 6, [("node 0, NVLink domain 0", ""), ("node 1, NVLink domains 0\N{EN DASH}1", "")]),
        (None, 4, [("NVLink domain 0", ""), ("NVLink domain 1", "")]),
        (None, None, [("ranks 0\N{EN DASH}7", ""), ("ranks 8\N{EN DASH}15", "")]),
    ],
)
def test_nodes_and_domains_are_named(
    node: int | None, domain: int | None, labels: list[tuple[str, str]]
) -> None:
    grid = Grid(make_plan(world_size=24, tp=2, gpus_per_node=node, nvlink_domain=domain))
    assert [(box.label, box.around) for box in grid.boxes[: len(labels)]] == labels


def test_a_small_world_is_boxes_in_boxes() -> None:
    root = ET.fromstring(draw_svg(make_plan("pp=2,dp=3,tp=4")))  # noqa: S314  our own text
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [texts.count(text) for text in ("pp = 1", "dp 2", "tp = 3", "rank 23")] == [1, 2, 2, 1]

    def boxes(name: str) -> list[tuple[float, ...]]:
        found = [box.attrib for box in root.iter(f"{SVG}rect") if box.get("class") == name]
        return [tuple(float(box[side]) for side in ("x", "y", "width", "height")) for box in found]

    blocks, groups, ranks = boxes("outer rim"), boxes("inner line"), boxes("paper edge")
    assert (len(blocks), len(groups), len(ranks)) == (2, 6, 24)
    for outer, inner, each in ((blocks, groups, 3), (groups, ranks, 4)):
        for number, (x, y, width, height) in enumerate(inner):
            left, top, wide, high = outer[number // each]
            assert left < x < x + width < left + wide
            assert top < y < y + height < top + high


def test_long_names_stay_on_the_screen() -> None:
    name = "an_axis_with_a_name_that_is_far_too_long_for_any_picture"
    for spec in (f"{name}=2,{name}_too=4,{name}_as_well=2,tp=4", f"{name}=4,{name}_too=4"):
        root = ET.fromstring(draw_svg(make_plan(spec)))  # noqa: S314  our own text
        width = float(root.attrib["width"])
        assert width <= 1400
        for text in root.iter(f"{SVG}text"):
            half = len(text.text or "") * float(text.attrib["font-size"]) * 0.6
            start = float(text.attrib["x"]) - (half / 2 if text.get("text-anchor") else 0)
            assert start >= -8
            assert start + half <= width + 8


def test_a_large_world_is_summed_up() -> None:
    plan = make_plan(world_size=2**20, tp=8, pp=16, gpus_per_node=8)
    grid = Grid(plan)
    assert grid.block == 2048
    cells = grid.cells
    assert [cell.first for cell in cells] == list(range(0, 2**20, 2048))
    assert [grid.coordinates(cell, "pp") for cell in cells] == [[i // 32] for i in range(512)]
    assert all(len(grid.coordinates(cell, "tp")) > 1 for cell in cells)
    assert grid.coordinates(cells[1], "tp") == list(range(8))
    assert grid.coordinates(cells[1], "dp") == [256 + 16 * i for i in range(16)]
    assert grid.note == "each cell is 256 nodes, 2048 ranks; stripes where they differ"
    assert Grid(make_plan(world_size=4096, tp=8, gpus_per_node=8)).note.startswith(
        "each cell is a node of 8 ranks"
    )
    assert cells[1].label == "2048\N{EN DASH}4095"
    text = draw_svg(plan, color_by="dp")
    assert text.count('height="6"') == 512 * 16
    uneven = Grid(make_plan(world_size=1000, gpus_per_node=8))
    last = uneven.boxes[-1].rows[-1][-1]
    assert (last.first + last.ranks, uneven.block) == (1000, 8)
    assert Grid(make_plan("tp=2")).coordinates(Cell(1, 1), "tp") == [1]


def test_the_page_carries_the_layout_for_its_script() -> None:
    plan = make_plan(world_size=32, tp=2, pp=2, ep=4, etp=1)
    page = Page(draw_html(plan, rank=5))
    data = json.loads(page.texts["layout"])
    assert (data["world"], data["block"]) == (32, 1)
    assert {axis["name"]: axis["runs"] for axis in data["axes"]} == {
        "pp": [[2, 16]],
        "dp": [[8, 2]],
        "tp": [[2, 1]],
        "edp": [[4, 4]],
        "ep": [[4, 1]],
        "etp": [[1, 1]],
        "model replica": [[8, 2]],
    }
    assert data["axes"][-1]["peers"] == [[2, 16], [2, 1]]
    assert page.cells[5]["aria-label"] == "rank 5: pp 0, dp 2, tp 1, edp 1, ep 1, etp 0"
    assert "prefers-color-scheme: dark" in page.texts["style"]
    text = draw_html(make_plan(world_size=16, tp=8, gpus_per_node=4))
    assert "tp=8 leaves a node of 4 GPUs, in any order" in text
    assert "2 model replicas, each over tp." in text
    assert '"where": "crosses nodes"' in text
    with pytest.raises(LayoutError, match="rank 32 is outside pp=2 x dp=8 x tp=2"):
        draw_html(plan, rank=32)


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
    asked = set(re.findall(r'(?:getElementById|get)\("(\w+)"\)', text))
    assert len(asked) > 5
    assert asked <= set(re.findall(r' id="(\w+)"', text))
