"""Plans against brute force: groups, counts, communicators, nodes, and one rank's place."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import says

from namedmesh import Layout, LayoutError
from namedmesh.dialects import DIALECTS, GroupSpec
from namedmesh.plan import Groups, Members, Plan, make_plan, plan_rank
from namedmesh.plan.members import group_of
from namedmesh.plan.nodes import bandwidth_bound, better_order, crossing_groups, placements

small = st.integers(1, 4)


@st.composite
def layouts_and_axes(draw: st.DrawFn) -> tuple[Layout, list[str]]:
    sizes = draw(st.lists(small, min_size=1, max_size=5))
    axes = draw(st.permutations(("pp", "dp", "cp", "ep", "tp")))[: len(sizes)]
    layout = Layout.from_shape(axes, sizes)
    return layout, draw(st.lists(st.sampled_from(layout.axes), min_size=1, unique=True))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    name = draw(st.sampled_from([*DIALECTS, None]))
    axes = ("pp", "tp") if name is None else [axis for axis in DIALECTS[name].axes if axis != "dp"]
    sizes = {axis: draw(st.sampled_from([1, 2, 3])) for axis in axes if axis != "dp_shard"}
    expert = {"ep": 2, "etp": 1} if name in {None, "megatron", "torchtitan"} and draw(st.booleans()) else {}
    world = prod(sizes.values()) * draw(st.sampled_from([2, 4]))
    if (world // sizes["pp"] // sizes.get("dp_replicate", 1)) % 2:
        expert = {}
    given: dict[str, Any] = {**sizes, **expert}
    return make_plan(world_size=world, like=name, **given)


@given(layouts_and_axes())
def test_groups_that_are_described_are_those_that_are_listed(case: tuple[Layout, list[str]]) -> None:
    layout, axes = case
    listed = layout.groups(*axes)
    described = Groups(GroupSpec("", tuple(axes)), layout).first(layout.world_size)
    assert [tuple(group) for group in described] == list(listed)
    for rank in layout.ranks:
        mine = group_of(layout, rank, *axes)
        assert mine[:] == layout.group(rank, *axes)
        assert [other for other in layout.ranks if other in mine] == list(mine)
        assert mine[-1] == mine[len(mine) - 1] == max(mine)


def test_a_group_has_no_rank_beyond_its_end() -> None:
    with pytest.raises(IndexError):
        Members(0, ((2, 4),))[2]
    stranger: Any = "3"
    assert stranger not in Members(0, ((4, 1),))


@given(plans())
def test_every_rank_is_in_exactly_one_group_of_each_kind(plan: Plan) -> None:
    for found in plan.kinds:
        groups = found.first(found.count)
        assert len(groups) == found.count
        ranks = sorted(rank for group in groups for rank in group)
        assert len(ranks) == len(set(ranks))
        if found.kind.members == "all":
            assert ranks == list(plan.layout.ranks)
            assert found.size * found.count == plan.world_size
        assert {len(group) for group in groups} == {found.size}


@given(plans())
def test_communicators_are_the_distinct_sets_of_ranks(plan: Plan) -> None:
    asked, held = 0, set()
    for found in plan.kinds:
        mine = [tuple(group) for group in found.first(found.count) if 0 in group]
        for backend in range(found.kind.gloo_groups + 1):
            asked += len(mine)
            held |= {(group, backend) for group in mine if len(group) > 1}
    held.discard((tuple(plan.layout.ranks), 0))
    assert plan.asked == asked
    assert plan.communicators == len(held)
    assert plan.calls == sum(found.count * (1 + found.kind.gloo_groups) for found in plan.kinds)


@given(plans())
def test_a_kind_shares_with_the_first_that_has_the_same_groups(plan: Plan) -> None:
    groups = {found.name: [tuple(group) for group in found.first(found.count)] for found in plan.kinds}
    for found in plan.kinds:
        if found.communicator == "none":
            assert found.size == 1
        elif found.communicator == "world":
            assert groups[found.name] == [tuple(plan.layout.ranks)]
        else:
            same = next(name for name, theirs in groups.items() if theirs == groups[found.name])
            assert found.communicator == ("own" if same == found.name else same)


@given(plans(), st.data())
def test_one_rank_by_brute_force(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(plan.layout.ranks))
    one = plan_rank(plan, rank)
    here = plan.layout.coords(rank)
    batch = {axis: at for axis, at in here.items() if axis.startswith("dp")}
    assert one.batch[:] == plan.layout.where(**batch)
    assert one.copies[:] == plan.layout.where(
        **{axis: at for axis, at in here.items() if axis in plan.arrangement.dialect.shards}
    )
    if plan.expert is not None:
        there = plan.expert.coords(rank)
        held = plan.expert.where(**{axis: there[axis] for axis in ("pp", "ep", "etp") if axis in there})
        assert one.expert_copies[:] == held
        assert {place.axis: place.at for place in one.expert_slice}.items() <= there.items()
    assert one.share == plan.replicas.size == prod(place.size for place in one.slice)
    assert rank in one.copies
    assert {place.axis: place.at for place in one.axes if place.axis in here} == here
    at = here["pp"]
    last = plan.layout["pp"] - 1
    assert one.previous == (plan.layout.rank(**{**here, "pp": at - 1}) if at else None)
    assert one.next == (plan.layout.rank(**{**here, "pp": at + 1}) if at < last else None)
    assert one.data_size * len(one.batch) == plan.world_size


@given(layouts_and_axes(), st.integers(1, 12))
def test_crossing_groups_are_counted(case: tuple[Layout, list[str]], block: int) -> None:
    layout, axes = case
    strides = dict(zip(layout, layout.strides, strict=True))
    for axis in axes:
        expected = sum(len({rank // block for rank in group}) > 1 for group in layout.groups(axis))
        assert crossing_groups(layout[axis], strides[axis], layout.world_size, block) == expected


@given(plans(), st.sampled_from([1, 2, 3, 4, 8]))
def test_a_better_order_is_better(plan: Plan, block: int) -> None:
    far = bandwidth_bound(placements(plan.arrangement, block))
    order = better_order(plan.arrangement, block) if far else None
    if order is not None:
        sizes = dict(plan.layout.items()) | {
            axis: size for axis, size in (plan.expert or plan.layout).items() if axis not in plan.layout
        }
        like = "megatron" if plan.arrangement.dialect.name == "megatron" else None
        again = make_plan(world_size=plan.world_size, like=like, order=order, **sizes)
        assert dict(again.layout.items()) == dict(plan.layout.items())
        assert not bandwidth_bound(placements(again.arrangement, block))


def test_embedding_groups_are_the_ends_of_a_pipeline() -> None:
    layout = Layout(pp=4, dp=2)
    ends = GroupSpec("embedding", ("pp",), members="ends")
    first = GroupSpec("position", ("pp",), members="first")
    assert [group[:] for group in Groups(ends, layout).first(9)] == [(0, 6), (1, 7)]
    assert [group[:] for group in Groups(first, layout).first(9)] == [(0,), (1,)]
    assert Groups(ends, layout).of_rank(2) is None
    assert [group[:] for group in Groups(ends, Layout(pp=1, dp=2)).first(9)] == [(0,), (1,)]


def test_the_worked_example() -> None:
    plan = make_plan(world_size=16, tp=2, pp=4)
    assert {found.name: (found.size, found.count) for found in plan.kinds} == {
        "pp": (4, 4),
        "dp": (2, 8),
        "tp": (2, 8),
        "model": (8, 2),
    }
    replicas = [group[:] for group in plan.replicas.first(9)]
    assert replicas == [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]
    assert (plan.asked, plan.communicators, plan.calls) == (4, 4, 22)
    megatron = make_plan("megatron tp=2,pp=4", world_size=16)
    assert (megatron.asked, megatron.communicators, megatron.calls) == (20, 7, 137)


def test_a_million_ranks_are_described_not_listed() -> None:
    plan = make_plan(world_size=2**20, tp=8, pp=16, ep=8, etp=1, gpus_per_node=8)
    assert plan.groups("tp").count == 2**17
    one = plan_rank(plan, 2**20 - 1)
    assert len(one.copies) == 2**13
    assert one.copies[-1] == 2**20 - 1
    assert plan.warnings == ()


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (
            {"world_size": 64, "tp": 4, "pp": 4, "order": "pp-tp-dp", "gpus_per_node": 8},
            "tp=4 leaves a node of 8 GPUs; the order 'tp-pp-dp' (fastest first, as --order takes it) keeps it inside",
        ),
        (
            {"world_size": 64, "tp": 16, "gpus_per_node": 8},
            "tp=16 leaves a node of 8 GPUs, in any order; choose tp so that it divides 8",
        ),
        (
            {"world_size": 64, "tp": 16, "gpus_per_node": 8, "like": "fairscale"},
            "tp=16 leaves a node of 8 GPUs, in the order of fairscale; choose tp so that it divides 8",
        ),
        (
            {"world_size": 64, "tp": 4, "ep": 4, "gpus_per_node": 8},
            "ep=4 leaves a node of 8 GPUs, in any order; choose etp x ep so that it divides 8",
        ),
        ({"world_size": 12, "tp": 2, "gpus_per_node": 8}, "12 ranks do not fill nodes of 8: the last has 4"),
    ],
)
def test_warnings(arguments: dict[str, Any], warning: str) -> None:
    assert make_plan(**arguments).warnings == (warning,)


def test_an_nvlink_domain_larger_than_a_node_is_good_enough() -> None:
    plan = make_plan(world_size=64, tp=16, gpus_per_node=8, nvlink_domain=16)
    assert plan.warnings == ()
    assert [place.words for place in plan.placements] == [
        "crosses nodes, crosses NVLink domains",
        "crosses nodes, inside an NVLink domain",
    ]


def test_unusual_names_are_pointed_out() -> None:
    (warning,) = make_plan("dp=2,tpp=2").warnings
    assert re.search(says("axis 'tpp' ... usual names; did you mean 'tp'?"), warning)
    assert make_plan("dp=2,rows=2").warnings == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_plan(Layout(tp=2), order="tp-dp"), "a layout without a dialect has its order already"),
        (lambda: make_plan(tp=2, like="megatrn"), "'megatrn' is not one of megatron, deepspeed"),
        (lambda: make_plan("tp=2").groups("tpz"), "'tpz' is not one of ('tp',); did you mean 'tp'?"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises((LayoutError, KeyError)) as caught:
        call()
    assert str(caught.value).startswith(message)
