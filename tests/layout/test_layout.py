"""Layouts against an independent calculation (numpy's reshape and transpose) and against Megatron's own."""

from __future__ import annotations

import pickle
import sys
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from installing import interpreter
from messages import match_message
from packaging.version import Version

from namedmesh import AxisError, Layout, LayoutError
from namedmesh.layout.layout import make_partition_key

NAMES = ("pp", "dp", "cp", "ep", "tp")

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(shapes)
    axes = draw(st.permutations(NAMES))[: len(sizes)]
    return Layout.from_shape(axes, sizes, rank_offset=draw(st.sampled_from([0, 0, 3, 64])))


@st.composite
def layouts_and_axes(draw: st.DrawFn) -> tuple[Layout, list[str]]:
    layout = draw(layouts())
    axes = draw(st.lists(st.sampled_from(layout.axes), min_size=1, unique=True))
    return layout, axes


def make_rank_table(layout: Layout) -> Any:
    return np.arange(layout.world_size).reshape(layout.sizes) + layout.rank_offset


def list_groups_by_numpy(layout: Layout, axes: list[str]) -> list[tuple[int, ...]]:
    inside = [i for i, axis in enumerate(layout.axes) if axis in axes]
    outside = [i for i in range(len(layout)) if i not in inside]
    size = prod(layout.sizes[i] for i in inside)
    return [
        tuple(row) for row in make_rank_table(layout).transpose(outside + inside).reshape(-1, size).tolist()
    ]


@given(layouts_and_axes())
def test_groups_equal_slices_of_a_reshaped_range(case: tuple[Layout, list[str]]) -> None:
    layout, axes = case
    expected = list_groups_by_numpy(layout, axes)
    assert list(layout.groups(*axes)) == expected
    assert layout.count(*axes) == len(expected)
    assert layout.size(*axes) == len(expected[0])
    assert expected == sorted(expected)
    assert layout.groups(*reversed(axes)) == layout.groups(*axes)


@given(layouts_and_axes())
def test_group_returns_the_group_that_contains_the_rank(case: tuple[Layout, list[str]]) -> None:
    layout, axes = case
    for group in list_groups_by_numpy(layout, axes):
        for place, rank in enumerate(group):
            assert layout.group(rank, *axes) == group
            assert layout.group_rank(rank, *axes) == place


@given(layouts())
def test_ranks_and_coordinates_are_inverse(layout: Layout) -> None:
    ranks = make_rank_table(layout)
    for rank in layout.ranks:
        coords = layout.coords(rank)
        assert ranks[tuple(coords.values())] == rank
        assert list(coords) == list(layout.axes)
        assert layout.rank(**coords) == rank
        assert layout.where(**coords) == (rank,)


@given(layouts_and_axes(), st.randoms(use_true_random=False))
def test_where_selects_a_slice_of_the_table(case: tuple[Layout, list[str]], random: Any) -> None:
    layout, axes = case
    at = {axis: random.randrange(layout[axis]) for axis in axes}
    index = tuple(at.get(axis, slice(None)) for axis in layout.axes)
    assert list(layout.where(**at)) == np.atleast_1d(make_rank_table(layout)[index]).flatten().tolist()


@given(layouts_and_axes(), layouts_and_axes())
def test_partition_keys_are_equal_if_and_only_if_the_groups_are(
    one: tuple[Layout, list[str]], other: tuple[Layout, list[str]]
) -> None:
    same_key = make_partition_key(one[0], *one[1]) == make_partition_key(other[0], *other[1])
    assert same_key == (one[0].groups(*one[1]) == other[0].groups(*other[1]))


@given(layouts_and_axes(), st.data())
def test_partition_keys_do_not_depend_on_the_factorization(
    case: tuple[Layout, list[str]], data: st.DataObject
) -> None:
    """The same ranks over other axes: only the groups decide, not the names."""
    layout, axes = case
    divisors = [n for n in range(1, layout.world_size + 1) if layout.world_size % n == 0]
    split = data.draw(st.sampled_from(divisors))
    other = Layout.from_shape(("a", "b"), (layout.world_size // split, split), rank_offset=layout.rank_offset)
    for axis in other:
        same = layout.groups(*axes) == other.groups(axis)
        assert (make_partition_key(layout, *axes) == make_partition_key(other, axis)) == same


@given(layouts(), st.data())
def test_one_size_can_be_inferred(layout: Layout, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(layout.axes))
    sizes = {**dict(layout.items()), axis: -1}
    again = Layout(**sizes, world_size=layout.world_size, rank_offset=layout.rank_offset)
    assert again == layout
    assert hash(again) == hash(layout)


@given(layouts())
def test_an_order_string_has_the_axes_in_reverse(layout: Layout) -> None:
    again = Layout.from_order(
        "-".join(layout.axes[::-1]), rank_offset=layout.rank_offset, **dict(layout.items())
    )
    assert again == layout


@given(layouts())
def test_layouts_survive_pickling(layout: Layout) -> None:
    assert pickle.loads(pickle.dumps(layout)) == layout  # noqa: S301  our own bytes


def test_worked_example_of_sixteen_ranks() -> None:
    layout = Layout.from_order("tp-cp-ep-dp-pp", tp=2, pp=4, world_size=16)
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert layout.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert layout.groups("tp", "pp") == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))
    assert dict(layout.items()) == {"pp": 4, "dp": 2, "ep": 1, "cp": 1, "tp": 2}


def test_a_size_one_axis_need_not_be_in_the_order() -> None:
    assert Layout.from_order("tp-dp", tp=2, dp=2, cp=1).axes == ("dp", "tp")


@pytest.mark.oracle("megatron.core")
@given(
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
    sizes=st.fixed_dictionaries({axis: st.integers(1, 3) for axis in ("tp", "cp", "dp", "pp")}),
    tokens=st.lists(st.sampled_from(["tp", "cp", "dp", "pp"]), min_size=1, unique=True),
    offset=st.sampled_from([0, 7]),
)
def test_groups_equal_megatrons(
    order: list[str], sizes: dict[str, int], tokens: list[str], offset: int
) -> None:
    from megatron.core.parallel_state import RankGenerator

    text = "-".join(order)
    theirs = RankGenerator(**sizes, ep=1, order=text, rank_offset=offset)
    ours = Layout.from_order(text, **sizes, ep=1, rank_offset=offset)
    assert [list(group) for group in ours.groups(*tokens)] == theirs.get_ranks("-".join(tokens))


def test_the_cost_of_a_group_does_not_depend_on_the_world_size() -> None:
    """Counted, not timed: answering for one rank makes no more ints than its group has."""
    layout = Layout(pp=16, dp=1024, cp=8, tp=8)
    assert layout.world_size == 1 << 20
    assert layout.group(777_777, "tp") == tuple(range(777_776, 777_784))
    assert layout.group(777_777, "pp") == tuple(777_777 % 65_536 + 65_536 * stage for stage in range(16))
    tracer_lines = 0

    def count(*_: object) -> Any:
        nonlocal tracer_lines
        tracer_lines += 1
        return count

    sys.settrace(count)
    try:
        layout.group(777_777, "tp")
        layout.group_rank(777_777, "dp", "tp")
    finally:
        sys.settrace(None)
    assert tracer_lines < 200


SIZE = "size of axis {!r} must be an int of at least 1, or -1 for the remaining ranks, got {}"
OUTSIDE = "is outside the axis; its coordinates are the ints 0 to 1"
MESSAGES: list[tuple[Any, type[Exception], str]] = [
    (lambda: Layout(), LayoutError, "no axis is named; name at least one, such as dp=-1"),
    (lambda: Layout(tp=0), LayoutError, SIZE.format("tp", 0)),
    (
        lambda: Layout(dp=-1, tp=-1, world_size=8),
        LayoutError,
        "axes 'dp', 'tp' are all -1; only one axis can have the remaining ranks",
    ),
    (
        lambda: Layout(dp=-1),
        LayoutError,
        "axis 'dp' is -1, but the number of ranks is not known; give its size, or world_size",
    ),
    (
        lambda: Layout(dp=2, tp=3, world_size=8),
        LayoutError,
        "dp=2 x tp=3 needs 6 ranks, but the world has 8; change a size, or give one axis -1 for the remaining ranks",
    ),
    (
        lambda: Layout(dp=-1, tp=3, world_size=8),
        LayoutError,
        "tp=3 does not divide the world of 8 ranks; change a size, or the number of ranks to a multiple of 3",
    ),
    (
        lambda: Layout(**{"tensor-parallel": 2}),
        LayoutError,
        "axis name 'tensor-parallel' is not a Python identifier; use letters, digits and underscores, such as 'dp'",
    ),
    (lambda: Layout(**{"class": 2}), LayoutError, "axis name 'class' is a keyword ..."),
    (lambda: Layout(dp=2)["tp"], AxisError, "axis 'tp' is not one of ('dp',)"),
    (
        lambda: Layout(device=2),
        LayoutError,
        "axis name 'device' is taken by an argument; choose another name",
    ),
    (
        lambda: Layout.from_shape(("dp", "tp", "dp"), (2, 2, 2)),
        LayoutError,
        "axis 'dp' is named 2 times; ...",
    ),
    (
        lambda: Layout.from_shape(("dp", "tp"), (2,)),
        LayoutError,
        "2 axes ('dp', 'tp') but 1 sizes (2,); give one size for each axis",
    ),
    (
        lambda: Layout(dp=2.0, tp=True, rank_offset=-1),  # type: ignore[arg-type]
        LayoutError,
        f"3 problems:\n  - {SIZE.format('dp', 2.0)}\n  - {SIZE.format('tp', True)}\n"
        "  - rank_offset must be an int of at least 0, got -1",
    ),
    (
        lambda: Layout.from_order("tp-dp", tp=2, cp=2, world_size=8),
        LayoutError,
        "axis 'cp' has size 2 but is not in the order 'tp-dp'; did you mean 'tp'?",
    ),
    (
        lambda: Layout.from_order("tp-cp-pp", tp=2, world_size=8),
        LayoutError,
        "axes 'cp', 'pp' of the order 'tp-cp-pp' have no size, and none of them is 'dp'; give all of them but one",
    ),
    (
        lambda: Layout(pp=2, dp=2, tp=2)["tq"],
        AxisError,
        "axis 'tq' is not one of ('pp', 'dp', 'tp'); did you mean 'tp'?",
    ),
    (
        lambda: Layout(pp=2, tp=2).groups("tpy", "tp", "data"),
        AxisError,
        "2 problems:\n"
        "  - axis 'tpy' is not one of ('pp', 'tp'); did you mean 'tp'?\n"
        "  - axis 'data' is not one of ('pp', 'tp')",
    ),
    (lambda: Layout(pp=2, tp=2).groups(), AxisError, "no axis is named; name one or more of ('pp', 'tp')"),
    (
        lambda: Layout(pp=2, tp=2, rank_offset=4).coords(8),
        LayoutError,
        "rank 8 is outside pp=2 x tp=2 (4 ranks); its ranks are 4 to 7",
    ),
    (
        lambda: Layout(pp=2, dp=3, tp=2).rank(pp=1),
        LayoutError,
        "no coordinate for 'dp', 'tp' of pp=2 x dp=3 x tp=2 (12 ranks); give one for each axis, or ask where() "
        "for all ranks that share some",
    ),
    (
        lambda: Layout(pp=2, tp=2).where(pp=2, tp=-1),
        LayoutError,
        f"2 problems:\n  - coordinate pp=2 {OUTSIDE}\n  - coordinate tp=-1 {OUTSIDE}",
    ),
    (
        lambda: Layout(pp=2, dp=2).rank(pp=0.5, dp=True),  # type: ignore[arg-type]
        LayoutError,
        f"2 problems:\n  - coordinate pp=0.5 {OUTSIDE}\n  - coordinate dp=True {OUTSIDE}",
    ),
    (
        lambda: Layout(pp=2, dp=2).where(pp=1.0),  # type: ignore[arg-type]
        LayoutError,
        f"coordinate pp=1.0 {OUTSIDE}",
    ),
    (
        lambda: Layout(pp=2, dp=2).coords(1.5),  # type: ignore[arg-type]
        LayoutError,
        "rank 1.5 is not an int; give one of the ranks of pp=2 x dp=2 (4 ranks)",
    ),
    (
        lambda: Layout(pp=2, dp=2).group("1", "dp"),  # type: ignore[arg-type]
        LayoutError,
        "rank '1' is not an int; ...",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), MESSAGES)
def test_messages(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=match_message(text)):
        call()


def test_ranks_and_coordinates_may_be_ints_of_numpy() -> None:
    layout = Layout(pp=2, dp=2)
    assert layout.coords(np.int64(3)) == {"pp": 1, "dp": 1}  # type: ignore[arg-type]
    assert layout.rank(pp=np.int32(1), dp=0) == 2  # type: ignore[arg-type]


def test_an_axis_may_be_called_as_an_argument_is() -> None:
    for name in ("self", "cls", "axes", "order", "rank", "axis", "step", "sizes", "coords", "name"):
        layout = Layout(**{name: 2, "tp": 4})
        assert layout.rank(**{name: 1, "tp": 2}) == 6
        assert layout.where(**{name: 1}) == (4, 5, 6, 7)
        assert Layout.from_order(f"tp-{name}", **{name: 2, "tp": 4}) == layout


IN_A_GRAPH: dict[str, Any] = {
    "axes": lambda layout: len(layout.axes),
    "coords": lambda layout: layout.coords(13)["dp"],
    "count": lambda layout: layout.count("pp"),
    "from_order": lambda _: Layout.from_order("tp-dp", tp=2, dp=2).world_size,
    "from_shape": lambda _: Layout.from_shape(("dp", "tp"), (2, 3)).world_size,
    "group": lambda layout: layout.group(13, "pp", "tp")[1],
    "group_rank": lambda layout: layout.group_rank(13, "pp", "tp"),
    "groups": lambda layout: layout.groups("tp")[1][0],
    "items": lambda layout: dict(layout.items())["pp"],
    "partition key": lambda layout: make_partition_key(layout, "dp", "tp")[1],
    "rank": lambda layout: layout.rank(pp=1, dp=0, tp=1),
    "rank_offset": lambda layout: layout.rank_offset,
    "ranks": lambda layout: layout.ranks[-1],
    "size": lambda layout: layout.size("pp", "tp"),
    "sizes": lambda layout: layout.sizes[0],
    "strides": lambda layout: layout.strides[0],
    "where": lambda layout: layout.where(pp=1)[0],
    "world_size": lambda layout: layout.world_size,
    "[]": lambda layout: layout["tp"],
    "in": lambda layout: 1 if "tp" in layout else 2,
    "iter": lambda layout: len(list(layout)),
    "==": lambda layout: 1 if layout == Layout(pp=2, dp=2, tp=2) else 2,
    "hash": lambda layout: hash(layout) % 7,
    "str": lambda layout: len(str(layout) + repr(layout)),
}


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_every_method_compiles_to_one_graph(name: str) -> None:
    """Cold and warm, in one graph, with no second compilation."""
    import torch

    if name == "hash" and Version(torch.__version__).release < (2, 13):
        pytest.skip("this release's compiler does not know the hash of an object")
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    layout = Layout(pp=2, dp=2, tp=2, rank_offset=8)
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: torch.Tensor) -> torch.Tensor:
        factor: int = IN_A_GRAPH[name](layout)
        return x * factor + 1

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    x = torch.arange(3.0)
    assert [compiled(x).tolist() for _ in range(3)] == [step(x).tolist()] * 3
    assert counter.frame_count == 1


PUBLIC_NAMES = [
    "axes",
    "coords",
    "count",
    "from_order",
    "from_shape",
    "group",
    "group_rank",
    "groups",
    "items",
    "rank",
    "rank_offset",
    "ranks",
    "size",
    "sizes",
    "strides",
    "where",
    "world_size",
]


def test_a_layout_shows_its_public_interface_only() -> None:
    """In the tab completion of a notebook, for example."""
    assert [name for name in dir(Layout(tp=2)) if not name.startswith("_")] == PUBLIC_NAMES


def test_every_public_name_is_in_a_compiled_graph() -> None:
    assert set(PUBLIC_NAMES) <= set(IN_A_GRAPH)


def test_a_layout_is_frozen() -> None:
    layout = Layout(tp=2)
    with pytest.raises(AttributeError, match="sizes"):
        layout.sizes = (3,)  # type: ignore[misc]
    with pytest.raises(AttributeError, match="axes"):
        del layout.axes
    assert layout.sizes == (2,)


def test_a_layout_needs_no_torch() -> None:
    code = "import sys, namedmesh; namedmesh.Layout(dp=2).groups('dp'); sys.exit('torch' in sys.modules)"
    assert interpreter("-c", code).returncode == 0
