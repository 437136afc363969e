"""Layouts described, drawn and compared, against brute force over ``Layout``; and the commands that print it."""

from __future__ import annotations

import runpy
import shlex
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from installing import interpreter
from messages import match_message

import namedmesh
from namedmesh import Layout, LayoutError, NamedMeshError
from namedmesh.__main__ import COMMANDS, main
from namedmesh._errors import UsageError
from namedmesh.layout.axes import SHARDING_AXES
from namedmesh.layout.orders import LEGACY_APIS
from namedmesh.tools.plan import compare, draw_svg, make_plan
from namedmesh.tools.plan.describe import LayoutPlan, format_rank
from namedmesh.tools.plan.spec import parse_spec

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def plans(draw: st.DrawFn) -> LayoutPlan:
    name = draw(st.sampled_from(["", *LEGACY_APIS]))
    axes = (
        [axis for axis in LEGACY_APIS[name].axes if axis not in {"dp", "dp_shard"}] if name else ["pp", "tp"]
    )
    sizes: dict[str, Any] = {axis: draw(st.sampled_from([1, 2, 3])) for axis in axes}
    world = prod(sizes.values()) * draw(st.sampled_from([2, 4]))
    even = world // sizes["pp"] // sizes.get("dp_replicate", 1) % 2 == 0
    if name in {"", "megatron"} and even and draw(st.booleans()):
        sizes |= {"ep": 2, "etp": 1}
    return make_plan(name, world_size=world, gpus_per_node=draw(st.sampled_from([1, 3, 4, 8])), **sizes)


@given(plans())
def test_kinds_groups_and_communicators_by_brute_force(plan: LayoutPlan) -> None:
    asked, held, in_world, first = 0, set(), 0, dict[Any, str]()
    for kind in plan.kinds:
        row = next(
            row for row in namedmesh.layout.orders.list_groups(plan.arrangement) if row.name == kind.name
        )
        groups = list(kind.layout.groups(*kind.axes))
        if kind.members != "all":
            last = -1 if kind.members == "ends" else 0
            groups = [tuple(sorted({group[0], group[last]})) for group in groups]
        assert kind.groups() == groups
        assert (kind.count, {kind.size}) == (len(groups), {len(group) for group in groups})
        asked, in_world = asked + 1 + bool(row.gloo), in_world + len(groups) * (1 + bool(row.gloo))
        own = next(group for group in groups if 0 in group)
        held |= {(own, backend) for backend in range(1 + bool(row.gloo)) if len(own) > 1}
        owner = first.setdefault(tuple(groups), kind.name)
        served = "its own" if owner == kind.name else f"that of {owner}"
        if len(own) in {1, plan.layout.world_size}:
            served = "none, one rank" if len(own) == 1 else "the world's"
        assert kind.communicator == served
    held.discard((tuple(plan.layout.ranks), 0))
    assert (plan.groups_per_rank, plan.communicators_per_rank, plan.groups_in_world) == (
        asked,
        len(held),
        in_world,
    )


@given(plans(), st.data())
def test_nodes_and_one_rank_by_brute_force(plan: LayoutPlan, data: st.DataObject) -> None:
    node, rank = plan.gpus_per_node or 0, data.draw(st.sampled_from(plan.layout.ranks))
    for axis, count in (plan.across_nodes or {}).items():
        layout = plan.layout if axis in plan.layout else plan.arrangement.get_layout("expert")
        assert count == sum(len({each // node for each in group}) > 1 for group in layout.groups(axis))
    lines = dict(line.strip().partition(" ")[::2] for line in format_rank(plan, rank).splitlines())
    here = plan.layout.coords(rank)
    for axis, at in here.items():
        peers = [each for each in plan.layout.ranks if {**plan.layout.coords(each), axis: at} == here]
        if len(peers) <= 16:
            words = f"{at} of 0 to {plan.layout[axis] - 1}, with ranks"
            assert lines[axis] == f"{words} {', '.join(map(str, peers))}"
    shards = {axis: at for axis, at in here.items() if axis in SHARDING_AXES}
    copies = plan.layout.where(**shards)
    if len(copies) <= 16:
        assert lines["parameters:"].endswith(f"the same on ranks {', '.join(map(str, copies))}")
    if plan.layout["pp"] > 1:
        stages = plan.layout.group(rank, "pp")
        following = stages[(stages.index(rank) + 1) % len(stages)]
        assert lines["pipeline:"].endswith("last stage" if following < rank else f"sends to rank {following}")


@pytest.mark.parametrize(
    ("spec", "node", "warnings"),
    [
        ("dp=4,pp=4,tp=4", 8, []),
        ("dp=4,tp=16", 8, ["tp=16 leaves a node of 8 GPUs, with what it sends in every layer; put it first in --order, or ..."]),
        ("megatron tp=4,ep=4,dp=16", 8, ["ep=4 leaves a node of 8 GPUs, ..."]),
        ("dp=6,tp=2", 8, ["12 ranks do not fill nodes of 8: the last has 4"]),
        ("fairscale tp=8", None, ["fairscale reduces tp=8 to the world of 4 ranks without an error"]),
    ],
)  # fmt: skip
def test_warnings(spec: str, node: int | None, warnings: list[str]) -> None:
    found = make_plan(spec, world_size=None if node else 4, gpus_per_node=node).warnings
    assert len(found) == len(warnings)
    for warning, words in zip(found, warnings, strict=True):
        assert warning.startswith(words.removesuffix("..."))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: make_plan(Layout(dp=2), world_size=16), LayoutError, "dp=2 needs 2 ranks, but the world has 16; ..."),
        (lambda: make_plan("tp=2", pp=2), UsageError, "both 'tp=2' and sizes for pp were given; give one of them"),
        (lambda: make_plan("tp=2", order="tp-pp"), UsageError, "'tp=2' has its order already; ..."),
        (make_plan, LayoutError, "no axis is named; name at least one, such as dp=-1"),
        (
            lambda: parse_spec("megatrn tp=a,pp=2,pp=2,dp"),
            UsageError,
            "4 problems:\n  - layout 'megatrn tp=a,pp=2,pp=2,dp': 'megatrn' is no size, such as tp=2 or dp=-1, and none of ...; "
            "did you mean 'megatron'?\n  - ... 'tp=a' is no size, ...\n  - ... axis 'pp' has a size "
            "already; give each axis one\n  - ... 'dp' is no size, ...",
        ),
        (lambda: draw_svg(Layout(tp=2), color_by="tpz"), NamedMeshError, "axis 'tpz' is not one of ('tp',); ..."),
        (lambda: compare("tp=2", "tp=4"), LayoutError, "tp=2 (2 ranks) and tp=4 (4 ranks) are not over the same ranks; ..."),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=match_message(message)):
        call()


def elements(plan: LayoutPlan, name: str, **more: Any) -> list[dict[str, str]]:
    root = ET.fromstring(draw_svg(plan.layout, gpus_per_node=plan.gpus_per_node, **more))  # noqa: S314  our own text
    return [dict(each.attrib) for each in root.iter(f"{SVG}{name}")]


@given(plans())
def test_every_rank_has_a_cell_inside_its_node_and_the_color_of_its_coordinate(plan: LayoutPlan) -> None:
    axis = plan.layout.axes[-1]
    ranks = [each for each in elements(plan, "g", color_by=axis) if each.get("class") == "rank"]
    assert [int(each["data-rank"]) for each in ranks] == list(plan.layout.ranks)
    boxes = elements(plan, "rect", color_by=axis)
    nodes = [each for each in boxes if each.get("class") == "node edge"]
    colors = dict[str, int]()
    for rank, cell in enumerate(each for each in boxes if each.get("rx") == "5"):
        at = plan.layout.coords(rank)[axis]
        assert colors.setdefault(cell["fill"], at) == at
        node = nodes[rank // (plan.gpus_per_node or 8)]
        for start, length in (("x", "width"), ("y", "height")):
            assert float(node[start]) < float(cell[start])
            assert float(cell[start]) + float(cell[length]) < float(node[start]) + float(node[length])
    assert len(colors) == plan.layout[axis]


def test_pictures_of_large_worlds_and_of_groups_that_leave_their_node() -> None:
    text = draw_svg(Layout(dp=-1, tp=8, world_size=2**20))
    assert text.count('class="rank"') == 512
    assert "ranks 512 to 1048575 are not drawn" in text
    crossing = elements(make_plan("dp=2,tp=4", gpus_per_node=2), "rect")
    assert [each.get("class") for each in crossing].count("group crosses") == 4
    cases = ((Layout(dp=2, tp=4), 2), (Layout(dp=2, tp=4), 4), (Layout(dp=2, tp=16), None))
    dashed = ["dashed where they leave" in draw_svg(layout, gpus_per_node=node) for layout, node in cases]
    assert dashed == [True, False, False]


@given(*[st.sampled_from(list(LEGACY_APIS))] * 2, *[st.sampled_from([1, 2, 4])] * 2, st.integers(1, 3))
def test_compare_by_brute_force(a: str, b: str, tp: int, pp: int, data: int) -> None:
    found = compare(f"{a} tp={tp},pp={pp}", f"{b} tp={tp},pp={pp}", world_size=tp * pp * data)
    for axes, different in found.kinds.items():
        sides = []
        for arrangement in (found.first, found.second):
            made = arrangement.get_layout("expert" if {*axes} & {"edp", "ep", "etp"} else "dense")
            here = [axis for axis in axes if axis in made]
            if "dp" in axes:
                here = [axis for axis in made if axis.startswith("dp")]
            sides.append(made.groups(*here) if here else tuple((rank,) for rank in made.ranks))
        assert different == (None if sides[0] == sides[1] else ([*sides[0][:4]], [*sides[1][:4]]))


def test_compare_covers_expert_axes_and_merges_split_dp() -> None:
    kinds = compare("megatron tp=2,ep=2", "megatron tp=2,ep=4", world_size=8).kinds
    assert ["-".join(axes) for axes in kinds] == ["pp", "dp", "cp", "tp", "pp-tp", "edp", "ep", "etp"]
    kinds = compare("megatron tp=2", "dp_replicate=2,dp_shard=2,tp=2", world_size=8).kinds
    assert {"-".join(axes): groups for axes, groups in kinds.items()} == dict.fromkeys(
        ["pp", "dp", "cp", "tp", "pp-tp"]
    )


def test_the_example_terminal_is_current() -> None:
    made = runpy.run_path(str(ROOT / "examples" / "plan" / "make.py"))["files"]()
    for name, text in made.items():
        kept = (ROOT / "examples" / "plan" / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: run examples/plan/make.py, and read what changed"


JOB = "--layers 1 --hidden 64 --heads 4 --vocab 99999 --seq 4096 --global-batch 4"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("plan tp=2 --rank 9", 2, "namedmesh plan: rank 9 is outside"),
        (
            "plan tp=2 --gpus-per-node 0",
            2,
            "argument --gpus-per-node: must be an int from 1 to 1048576, got '0'; see namedmesh plan --help\n",
        ),
        ("partitions --world-size 8 --config /nowhere", 2, "/nowhere/config.json cannot be read: "),
        ("partitions --world-size 8 --explain dp=8", 2, "--explain was given ['dp=8']; give two layouts"),
        ("partitions --world-size 8 --explain", 2, "a ranking needs layers"),
        (f"partitions --world-size 1 {JOB} --memory 1 --explain", 3, "nothing fits; the nearest"),
        (f"partitions --world-size 1 {JOB} --explain", 0, "The fastest, with"),
        (f"partitions --world-size 1 {JOB}", 0, "The numbers are for torch's layers, with FSDP2, "),
        ("diff --a tp=2 --b tp=2", 0, ""),
        ("plan --word-size 8", 2, "unrecognized arguments: --word-size; did you mean '--world-size'?; see"),
        ("shard --in 8", 2, "invalid choice: 'shard'"),
        *(("--help", 0, f"\n    {name}") for name in COMMANDS),
    ],
)
def test_exit_statuses(command: str, status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = main(shlex.split(command))
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status
    assert message in "".join(capsys.readouterr())


@pytest.mark.ci
def test_torch_is_not_imported_and_a_million_ranks_are_described(tmp_path: Path) -> None:
    large = "--layers 80 --hidden 8192 --heads 64 --kv-heads 8 --ffn 28672 --vocab 128256 --seq 8192 --global-batch 1048576"
    commands = (
        "plan megatron tp=8,pp=8,ep=8 --world-size 1048576 --gpus-per-node 8 --svg a.svg",
        "plan --world-size 1048576 --tp 8 --rank 9",
        f"partitions --world-size 1048576 {large} --best 5",
        "diff --a tp=2,dp=1 --b dp=2",
        "--help",
        "doctor --help",
    )
    code = (
        "import contextlib, shlex, sys\nfrom namedmesh.__main__ import main\n"
        "for command in sys.argv[1:]:\n    with contextlib.suppress(SystemExit):\n        main(shlex.split(command))\n"
        "    assert not {'torch', 'numpy'} & {*sys.modules}, command\n"
    )
    done = interpreter("-c", code, *commands, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
