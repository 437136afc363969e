"""The rank tables of the dialects against published packages, and against the worked examples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from namedmesh import AxisError, Layout, LayoutError
from namedmesh.dialects import DENSE, DIALECTS, PLAIN, groups_of, layouts_for

TENSOR = [(i, i + 1) for i in range(0, 16, 2)]
DATA = [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
PIPELINE = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]


@pytest.mark.parametrize("dialect", [DIALECTS["megatron"], DIALECTS["deepspeed"], PLAIN])
def test_the_worked_example_of_sixteen_ranks(dialect: Any) -> None:
    dense = layouts_for(dialect, {"tp": 2, "pp": 4}, world_size=16).dense
    assert list(dense.groups("tp")) == TENSOR
    assert list(dense.groups("dp")) == DATA
    assert list(dense.groups("pp")) == PIPELINE
    assert dense.groups("pp", "tp") == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))


@pytest.mark.parametrize("name", ["fairscale", "ezpz"])
def test_the_worked_example_with_data_outside(name: str) -> None:
    dense = layouts_for(DIALECTS[name], {"tp": 2, "pp": 2, "cp": 2}, world_size=16).dense
    assert dense.groups("tp")[:2] == ((0, 1), (2, 3))
    assert dense.groups("cp")[:3] == ((0, 2), (1, 3), (4, 6))
    assert dense.groups("pp")[:5] == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12))
    assert dense.groups("dp")[:2] == ((0, 8), (1, 9))


def test_the_worked_example_of_three_overlapping_groups() -> None:
    dense = layouts_for(DIALECTS["process_groups"], {"tp": 2, "pp": 2}, world_size=8).dense
    assert dense.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert dense.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert dense.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_torchtitan_puts_the_pipeline_outside_and_leaves_the_rest_to_dp_shard() -> None:
    made = layouts_for(DIALECTS["torchtitan"], {"pp": 2, "tp": 2, "dp_replicate": 2, "ep": 4}, world_size=32)
    assert made.dense == Layout(pp=2, dp_replicate=2, dp_shard=4, cp=1, tp=2)
    assert made.expert == Layout(pp=2, dp_replicate=2, edp=2, ep=4, etp=1)


def test_experts_follow_the_tensor_parallel_size_of_megatron() -> None:
    made = layouts_for(DIALECTS["megatron"], {"tp": 2, "pp": 2, "ep": 2, "cp": 2}, world_size=32)
    assert made.dense == Layout(pp=2, dp=4, cp=2, tp=2)
    assert made.expert == Layout(pp=2, edp=4, ep=2, etp=2)
    other = layouts_for(
        DIALECTS["megatron"], {"tp": 2, "ep": 4, "etp": 1}, world_size=8, order="tp-ep-dp-pp-cp"
    )
    assert other.expert == Layout(pp=1, edp=2, ep=4, etp=1)
    stages_last = layouts_for(PLAIN, {"tp": 2, "pp": 2, "ep": 2}, world_size=16, order="tp-ep-dp-pp")
    assert stages_last.expert == Layout(pp=2, edp=2, ep=2, etp=2)
    last = layouts_for(PLAIN, {"tp": 2, "ep": -1, "edp": 2, "etp": 1}, world_size=16)
    assert last.expert == Layout(pp=1, edp=2, ep=8, etp=1)


@pytest.mark.oracle("megatron.core")
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.permutations(["tp", "cp", "dp", "pp"]),
)
def test_megatron_groups_are_megatrons(tp: int, cp: int, pp: int, dp: int, order: list[str]) -> None:
    from megatron.core.parallel_state import RankGenerator

    order_string = "-".join(order)
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order_string)
    sizes = {"tp": tp, "cp": cp, "pp": pp}
    try:
        ours = layouts_for(
            DIALECTS["megatron"], sizes, world_size=tp * cp * pp * dp, order=order_string
        ).dense
    except LayoutError:  # Megatron refuses it too: the experts, who know no cp, would have other pipelines
        assert order[-1] != "pp"
        assert cp > 1
        assert pp > 1
        return
    for kind in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp"):
        found = sorted(tuple(group) for group in theirs.get_ranks(kind))
        assert found == list(ours.groups(*kind.split("-")))


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(16, {"tp": 2, "pp": 4}), (64, {"tp": 2, "pp": 4, "cp": 2, "ep": 2}), (8, {"tp": 8}), (4, {})],
)
def test_kinds_and_counts_are_what_megatron_makes(
    world: int, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core.parallel_state as theirs
    from ranks import fake_world

    calls: Counter[str] = Counter()

    def counted(*_: object, group_desc: str = "", **__: object) -> None:
        calls[group_desc.lower().removesuffix("_gloo").replace("_group", "").replace("_with_cp", " cp")] += 1

    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    monkeypatch.setattr(theirs, "create_group", counted)
    with fake_world(world):
        theirs.initialize_model_parallel(**{names[axis]: size for axis, size in sizes.items()})
        theirs.destroy_model_parallel()
    made = layouts_for(DIALECTS["megatron"], sizes, world_size=world)
    ours: Counter[str] = Counter()
    for kind in groups_of(made):
        name = kind.name.replace(" with_context_parallel", " cp")
        ours[name] += made.layout(kind.view).count(*kind.axes) * (1 + kind.gloo_groups)
    assert ours == calls


@pytest.mark.oracle("deepspeed")
@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 2, 2), (4, 2, 2), (1, 3, 2), (3, 1, 5)])
def test_deepspeed_groups_are_deepspeeds(pp: int, dp: int, tp: int) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    theirs = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    made = layouts_for(DIALECTS["deepspeed"], {"pp": pp, "tp": tp}, world_size=pp * dp * tp)
    for axis, word in made.dialect.words.items():
        found = [tuple(group) for group in theirs.get_axis_comm_lists(word)]
        if made.dense[axis] > 1:
            assert sorted(found) == list(made.dense.groups(axis))
        assert made.dense[axis] == theirs.get_dim(word)


def test_a_size_larger_than_the_world_is_cut_down_where_the_library_does() -> None:
    made = layouts_for(DIALECTS["fairscale"], {"tp": 8}, world_size=4)
    assert made.dense["tp"] == 4
    assert made.notes == ("fairscale reduces tp=8 to the world of 4 ranks without an error",)


@pytest.mark.parametrize(
    ("name", "sizes", "order", "kind"),
    [
        ("fairscale", {"tp": 2, "ep": 2}, None, AxisError),
        ("ezpz", {"tp": 2}, "tp-dp", LayoutError),
        ("mesh", {"tp": 2, "cp": 2}, "tpp-tp-tp", AxisError),
        ("mesh", {"dp": 2, "dp_shard": 2}, None, AxisError),
        ("mesh", {"tp": 2, "pp": 2, "cp": 2, "ep": 2}, "tp-cp-pp-ep-dp", LayoutError),
    ],
)
def test_mistakes_are_refused(
    name: str, sizes: dict[str, int], order: str | None, kind: type[Exception]
) -> None:
    """What they say stands in test_plan.py and in the dialects."""
    with pytest.raises(kind):
        layouts_for(DIALECTS.get(name, PLAIN), sizes, world_size=32, order=order)


def test_every_kind_names_axes_of_its_layout() -> None:
    for dialect in DIALECTS.values():
        made = layouts_for(dialect, {"tp": 2}, world_size=4)
        assert made.layout(DENSE) is made.dense
        for kind in groups_of(made):
            assert set(kind.axes) <= set(made.layout(kind.view).axes)
