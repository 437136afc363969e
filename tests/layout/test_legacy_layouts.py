"""Layouts and groups of legacy APIs, compared with upstream and with examples by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from namedmesh import AxisError, Layout, LayoutError
from namedmesh.layout.orders import LEGACY_APIS, NAMEDMESH_API, compute_layouts, list_groups

Sizes = dict[str, int]
TENSOR = [(i, i + 1) for i in range(0, 16, 2)]
DATA = [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
PIPELINE = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
MODEL = [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]
SIXTEEN = {"tp": TENSOR, "dp": DATA, "pp": PIPELINE, "pp tp": MODEL}
DATA_OUTSIDE_PIPELINE = {
    "tp": TENSOR,
    "cp": DATA,
    "pp": [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12)],
    "dp": [(0, 8), (1, 9)],
}


@pytest.mark.parametrize(
    ("name", "world", "sizes", "expected"),
    [
        ("megatron", 16, {"tp": 2, "pp": 4}, SIXTEEN),
        ("deepspeed", 16, {"tp": 2, "pp": 4}, SIXTEEN),
        ("mesh", 16, {"tp": 2, "pp": 4}, SIXTEEN),
        ("mesh", 16, {"tp": -1, "pp": 8}, {"tp": TENSOR}),
        ("fairscale", 16, {"tp": 2, "pp": 2, "cp": 2}, DATA_OUTSIDE_PIPELINE),
        ("ezpz", 16, {"tp": 2, "pp": 2, "cp": 2}, DATA_OUTSIDE_PIPELINE),
        ("fairscale", 4, {"tp": 8}, {"tp": [(0, 1, 2, 3)]}),  # tp is reduced to the world size
    ],
)
def test_groups_equal_those_of_examples_written_by_hand(
    name: str, world: int, sizes: Sizes, expected: dict[str, Any]
) -> None:
    dense = compute_layouts(LEGACY_APIS.get(name, NAMEDMESH_API), sizes, world_size=world).dense
    for axes, groups in expected.items():
        assert [*dense.groups(*axes.split())][: len(groups)] == groups


MEGATRON = LEGACY_APIS["megatron"]


@pytest.mark.parametrize(
    ("api", "world", "sizes", "order", "expert"),
    [
        (MEGATRON, 32, {"tp": 2, "pp": 2, "ep": 2, "cp": 2}, None, Layout(pp=2, edp=4, ep=2, etp=2)),
        (MEGATRON, 8, {"tp": 2, "ep": 4, "etp": 1}, "tp-ep-dp-pp-cp", Layout(pp=1, edp=2, ep=4, etp=1)),
        (NAMEDMESH_API, 16, {"tp": 2, "pp": 2, "ep": 2}, "tp-ep-dp-pp", Layout(pp=2, edp=2, ep=2, etp=2)),
        (NAMEDMESH_API, 16, {"tp": 2, "ep": -1, "edp": 2, "etp": 1}, None, Layout(pp=1, edp=2, ep=8, etp=1)),
    ],
)  # fmt: skip
def test_layout_of_experts_follows_sizes_and_order(
    api: Any, world: int, sizes: Sizes, order: str | None, expert: Layout
) -> None:
    assert compute_layouts(api, sizes, world_size=world, order=order).expert == expert


@pytest.mark.oracle("megatron.core")
@given(
    *map(st.sampled_from, ([1, 2, 4], [1, 2], [1, 2, 3], [1, 2, 4])),
    st.permutations(["tp", "cp", "dp", "pp"]),
)
def test_dense_groups_equal_those_of_megatron_s_rank_generator(
    tp: int, cp: int, pp: int, dp: int, order: list[str]
) -> None:
    from megatron.core.parallel_state import RankGenerator

    order_string = "-".join(order)
    sizes = {"tp": tp, "cp": cp, "pp": pp}
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order_string)
    try:
        ours = compute_layouts(MEGATRON, sizes, world_size=tp * cp * pp * dp, order=order_string).dense
    except LayoutError:
        # Megatron rejects it, too: the experts would have other pipelines.
        assert order[-1] != "pp"
        assert min(cp, pp) > 1
        return
    for kind in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp"):
        found = sorted(tuple(group) for group in theirs.get_ranks(kind))
        assert found == list(ours.groups(*kind.split("-")))


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(16, {"tp": 2, "pp": 4}), (64, {"tp": 2, "pp": 4, "cp": 2, "ep": 2}), (8, {"tp": 8}), (4, {})],
)
def test_megatron_makes_as_many_groups_of_each_kind(
    world: int, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core.parallel_state as theirs
    from ranks import fake_world

    calls: Counter[str] = Counter()

    def count_group(*_: object, group_desc: str = "", **__: object) -> None:
        calls[group_desc.lower().removesuffix("_gloo").replace("_group", "").replace("_with_cp", " cp")] += 1

    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    monkeypatch.setattr(theirs, "create_group", count_group)
    with fake_world(world):
        theirs.initialize_model_parallel(
            **{f"{names[axis]}_parallel_size": size for axis, size in sizes.items()}
        )
        theirs.destroy_model_parallel()
    job = compute_layouts(MEGATRON, sizes, world_size=world)
    ours: Counter[str] = Counter()
    for group in list_groups(job):
        name = group.name.replace(" with_context_parallel", " cp")
        backends = 2 if group.gloo else 1
        ours[name] += job.get_layout(group.view).count(*group.axes) * backends
    assert ours == calls


@pytest.mark.parametrize(
    ("name", "sizes", "order", "error_class"),
    [
        ("fairscale", {"tp": 2, "ep": 2}, None, AxisError),
        ("ezpz", {"tp": 2}, "tp-dp", LayoutError),
        (
            "mesh",
            {"tp": 2, "dp_shard": 2},
            None,
            LayoutError,
        ),  # ambiguous: dp_replicate, or a larger dp_shard
        ("mesh", {"tp": 2, "cp": 2}, "tpp-tp-cp", AxisError),
        ("mesh", {"tp": 2, "cp": 2}, "tp-tp", AxisError),
        ("mesh", {"tp": 2, "cp": 2}, "tp-tp-cp", LayoutError),
        ("mesh", {"tp": 2, "pp": 2, "cp": 2, "ep": 2}, "tp-cp-pp-ep-dp", LayoutError),
    ],
)
def test_wrong_sizes_and_orders_raise(
    name: str, sizes: Sizes, order: str | None, error_class: type[Exception]
) -> None:
    """The messages are pinned in test_plan.py and in the tests of the compatibility layers."""
    with pytest.raises(error_class):
        compute_layouts(LEGACY_APIS.get(name, NAMEDMESH_API), sizes, world_size=32, order=order)
