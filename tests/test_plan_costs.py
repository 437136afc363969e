"""Partitions, estimates, cuts and comparisons against independent calculations."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import says

from namedmesh import LayoutError
from namedmesh.dialects import DIALECTS
from namedmesh.plan import (
    Model,
    UsageError,
    best_partitions,
    compare,
    cut_weight,
    estimate_activations,
    estimate_memory,
    estimate_model_memory,
    estimate_traffic,
    list_partitions,
    make_plan,
)
from namedmesh.plan.costs import parse_bytes, parse_count


@given(st.integers(1, 48))
def test_partitions_are_all_factorings(world: int) -> None:
    expected = [sizes for sizes in product(range(1, world + 1), repeat=3) if world % prod(sizes) == 0]
    found = list_partitions(world)
    assert [(one.tp, one.cp, one.pp) for one in found] == sorted(expected)
    assert all(one.tp * one.cp * one.pp * one.dp == world for one in found)
    assert all(one.fits for one in found)


def test_experts_add_every_size_inside_the_rest() -> None:
    found = list_partitions(4, model=Model(experts=6))
    eps = [(one.ep, one.reasons) for one in found if (one.tp, one.cp, one.pp) == (1, 1, 1)]
    assert eps == [(1, ()), (2, ()), (4, ("6 experts do not divide by ep=4",))]
    inside = [(one.ep, one.etp) for one in found if (one.tp, one.cp, one.pp) == (2, 1, 1)]
    assert inside == [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]


def test_experts_are_spread_over_ep_and_etp() -> None:
    model = Model(params=10_000, experts=8, expert_params=8_000)
    for one in list_partitions(16, model=model):
        spread = one.ep * one.etp * one.pp
        for stage, memory in enumerate(one.memory):
            shared = estimate_memory(2_000, tp=one.tp, pp=one.pp, data=one.dp * one.cp, stage=stage)
            own = estimate_memory(8_000, tp=spread, data=16 // spread, stage=stage)
            assert memory.total == pytest.approx(shared.total + own.total)
        sent = dict(one.traffic)
        replicas = 16 // spread
        assert sent.get("edp", 0) == pytest.approx(3 * (replicas - 1) / replicas * 2 * 8_000 / spread)
    gated = Model(layers=2, hidden=4, ffn=8, experts=3, params=1_000)
    assert (gated.of_experts, gated.shared) == (2 * 3 * (3 * 4 * 8), 424)


def test_activations_by_the_formula_of_the_paper() -> None:
    sizes: dict[str, Any] = {"layers": 5, "heads": 4, "hidden": 16, "seq": 8, "micro_batch": 3, "batch": 3}
    tokens, t = 3 * 8 * 16, 2
    expected = {
        ("none", False): 10 + 24 / t + 5 * 4 * 8 / (16 * t),
        ("none", True): 30 / t + 4 + 5 * 4 * 8 / (16 * t),
        ("selective", False): 10 + 24 / t,
        ("selective", True): 30 / t + 4,
        ("full", False): 2,
    }
    for (checkpointing, sequence), bytes_each in expected.items():
        model = Model(**sizes, checkpointing=checkpointing, sequence_parallel=sequence)
        assert estimate_activations(model, {"tp": t, "pp": 5}) == pytest.approx(5 * tokens * bytes_each)
    wide = Model(**sizes, ffn=128, experts=4, top_k=2)
    assert estimate_activations(wide, {"pp": 5}) == pytest.approx(5 * tokens * (18 + 2 * 64))
    with_logits = estimate_activations(Model(**sizes, vocab=32), {"tp": t})
    assert with_logits == pytest.approx(5 * tokens * (10 + 24 / t) + 4 * tokens * (1 + 32 / 16) / t)
    unfused = Model(**sizes, sequence_parallel=True, fused_norms=False)
    assert estimate_activations(unfused, {"tp": t, "pp": 5}) == pytest.approx(5 * tokens * (34 / t + 4))


def test_a_layer_is_gathered_at_stage_3() -> None:
    model = Model(params=10_000, layers=4, experts=8, expert_params=8_000)
    sizes = {"tp": 2, "dp": 8, "ep": 4}
    shards = [estimate_model_memory(replace(model, layers=None), sizes, stage=stage) for stage in (2, 3)]
    found = [estimate_model_memory(model, sizes, stage=stage) for stage in (2, 3)]
    assert found[0] == shards[0]
    layer = 2 * (2_000 / 2 + 8_000 / 4) / 4
    assert (found[1].weights, found[1].gradients) == (shards[1].weights + layer, shards[1].gradients + layer)


def test_the_best_partitions_by_what_their_steps_take() -> None:
    model = Model(layers=8, heads=8, hidden=64, seq=128, params=10_000_000, batch=4)
    partitions = list_partitions(8, model=model, gpus_per_node=4, memory=10**9)
    best = best_partitions(partitions, 3)
    speeds = [one.tokens_per_second for one in partitions if one.fits]
    assert [one.tokens_per_second for one in best] == sorted(speeds, reverse=True)[:3]
    one = next(one for one in partitions if (one.tp, one.cp, one.pp, one.dp) == (2, 1, 2, 2))
    assert one.crossing == ("pp",)
    compute = (6 * 10_000_000 + 12 * 8 * 64 * 128) * 4 * 128 / 4 / 989e12
    sent = dict(one.traffic)
    assert one.step == pytest.approx(
        {
            "compute": compute,
            "bubble": compute / 4,
            "tp": sent["tp"] / 450e9,
            "dp": sent["dp"] / 450e9,
            "pp": sent["pp"] / 50e9,
        }
    )
    assert one.tokens_per_second == pytest.approx(2 * 4 * 128 / sum(one.step.values()))
    text = "2 problems:\n  - the number of partitions is 0; ...\n  - a ranking needs params, hidden; give them too"
    with pytest.raises(LayoutError, match=says(text)):
        best_partitions(list_partitions(8, model=Model(seq=4, layers=8)), 0)


@given(
    st.integers(1, 64), st.integers(1, 16), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans()
)
def test_what_crosses_nodes_is_what_the_plan_says(
    world: int, node: int, ep: int, etp: int, moe: bool
) -> None:
    partitions = list_partitions(world, model=Model(experts=8) if moe else None, gpus_per_node=node)
    some = [one for one in partitions if (one.ep, one.etp) == (ep, etp)][:4]
    for one in some:
        sizes: dict[str, Any] = (
            one.sizes if moe else {axis: one.sizes[axis] for axis in ("tp", "cp", "pp", "dp")}
        )
        plan = make_plan(**sizes, gpus_per_node=node)
        assert set(one.crossing) == {place.axis for place in plan.placements if place.across_nodes}


def test_what_a_model_rules_out() -> None:
    model = Model(layers=10, heads=32, kv_heads=8, hidden=4096, vocab=50257, seq=1020)
    found = {(one.tp, one.cp, one.pp): one.reasons for one in list_partitions(64, model=model)}
    assert found[1, 1, 2] == ()
    assert found[16, 1, 1] == (
        "8 key and value heads do not divide by tp=16",
        "50257 vocabulary entries do not divide by tp=16",
    )
    assert found[1, 4, 4] == (
        "10 layers do not divide by pp=4",
        "a sequence of 1020 does not divide by 2 x cp=4",
    )


def test_memory_rules_out_what_does_not_fit() -> None:
    found = list_partitions(8, model=Model(params=7_000_000_000), memory=20_000_000_000, stage=1)
    by_sizes = {(one.tp, one.pp, one.dp): one.reasons for one in found if one.cp == 1}
    assert by_sizes[1, 1, 8] == ("needs 38.5 GB of 20.0 at stage 1",)
    assert by_sizes[8, 1, 1] == ()


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, 16 * 7), (1, 4 * 7 + 12 * 7 / 8), (2, 2 * 7 + 14 * 7 / 8), (3, 16 * 7 / 8)]
)
def test_memory_by_stage(stage: int, expected: float) -> None:
    estimate = estimate_memory(28_000_000_000, tp=2, pp=2, data=8, stage=stage)
    assert estimate.total / 1e9 == pytest.approx(expected)


def test_traffic_by_axis() -> None:
    model = Model(layers=8, heads=8, kv_heads=2, hidden=16, seq=32, params=1000, top_k=2, batch=3)
    sizes = {"tp": 2, "cp": 4, "pp": 2, "dp": 3, "ep": 4}
    tokens = 3 * 32 / 4
    activations = 2 * tokens * 16
    found = estimate_traffic(model, sizes, stage=3)
    assert found == pytest.approx(
        {
            "tp": 4 * 4 * activations,  # 4 layers, 4 all-reduces, 2 (t-1)/t = 1
            "pp": 2 * activations,
            "cp": 4 * 3 * 3 * (2 * tokens * 2 * 16 * 2 / 8 / 2),  # 4 layers, 3 passes, 3 steps
            "ep": 4 * 4 * 2 * 3 / 4 * activations / 2,
            "dp": 3 * 11 / 12 * 2 * 250,
        }
    )
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert estimate_traffic(Model(), sizes) == {}


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 20), st.sampled_from(["column", "row"]))
def test_a_weight_is_cut_as_torch_chunks_it(inputs: int, outputs: int, tp: int, style: str) -> None:
    weight = torch.arange(inputs * outputs).reshape(inputs, outputs)
    dim = 1 if style == "column" else 0
    chunks = torch.chunk(weight, tp, dim=dim)
    cut = cut_weight(inputs, outputs, tp=tp, style=style)
    assert len(cut.pieces) == tp
    for piece, chunk in zip(cut.pieces, chunks, strict=False):
        assert piece.shape == tuple(chunk.shape)
        assert piece.weight_shape == tuple(chunk.T.shape)
        assert torch.equal(weight.narrow(dim, piece.start, piece.stop - piece.start), chunk)
    assert all(piece.start == piece.stop for piece in cut.pieces[len(chunks) :])
    assert cut.even == ((outputs if style == "column" else inputs) % tp == 0)


def test_the_worked_cuts() -> None:
    column = cut_weight(1024, 512, tp=16, style="column")
    assert {piece.shape for piece in column.pieces} == {(1024, 32)}
    row = cut_weight(1024, 512, tp=16, style="row")
    assert {piece.shape for piece in row.pieces} == {(64, 512)}


@given(
    st.sampled_from(list(DIALECTS)),
    st.sampled_from(list(DIALECTS)),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
)
def test_a_comparison_by_brute_force(a: str, b: str, tp: int, pp: int, data: int) -> None:
    found = compare(f"{a} tp={tp},pp={pp}", f"{b} tp={tp},pp={pp}", world_size=tp * pp * data)
    for kind in found.kinds:
        sides = []
        for made in (found.first.dense, found.second.dense):
            here = [axis for axis in kind.axes if axis in made]
            if "dp" in kind.axes:
                here = [axis for axis in made if axis.startswith("dp")]
            sides.append(set(made.groups(*here)) if here else {(rank,) for rank in made.ranks})
        assert kind.same == (sides[0] == sides[1])
        # All groups are the same, or none is, unless each is a single rank.
        assert kind.same or not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: parse_count("many"), UsageError, "'many' is not a number of parameters, such as 7B or 350M"),
        (lambda: parse_count("1e400"), UsageError, "'1e400' is not a number ..."),
        (
            lambda: cut_weight(4, 4, tp=10**27, style="row"),
            LayoutError,
            f"tp is {10**27}; it may be 1000000 at most",
        ),
        (
            lambda: compare(f"dp={10**27}", "tp=2"),
            LayoutError,
            f"the world has {10**27} ranks; it may have {2**63 - 1} at most",
        ),
        (lambda: parse_bytes("0GB"), UsageError, "'0GB' is not an amount of memory, such as 80GB or 80GiB"),
        (
            lambda: list_partitions(0, model=Model(heads=0), stage=4),
            LayoutError,
            "3 problems:\n  - world_size is 0; ...\n  - heads is 0; ...\n"
            "  - stage 4 is not one of ZeRO's (0, 1, 2, 3)",
        ),
        (
            lambda: list_partitions(
                8, model=Model(experts=8, top_k=20, checkpointing="ful", params=5, expert_params=6)
            ),
            LayoutError,
            "3 problems:\n"
            "  - checkpointing 'ful' is not one of ('none', 'selective', 'full')\n"
            "  - a token goes to 20 of 8 experts; top_k is 8 at most\n"
            "  - the experts have 6 parameters of 5 in all; give expert_params, or other sizes",
        ),
        (
            lambda: list_partitions(10**27),
            LayoutError,
            "world_size is 1000000000000000000000000000; partitions are listed for 10000000 ranks at most",
        ),
        (
            lambda: list_partitions(8, model=Model(batch=6, micro_batch=4)),
            LayoutError,
            "a batch of 6 does not divide into micro-batches of 4",
        ),
        (
            lambda: cut_weight(4, 4, tp=2, style="colum"),
            LayoutError,
            "style 'colum' is not one of ('column', 'row'); did you mean 'column'?",
        ),
    ],
)
def test_mistakes_are_named(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=says(message)):
        call()
