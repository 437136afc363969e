"""Partitions, cuts and comparisons against independent calculations; what memory and steps cost is in test_plan_estimates."""

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
    Job,
    Model,
    best_partitions,
    compare,
    cut_weight,
    estimate_memory,
    list_partitions,
    load_hardware,
    make_plan,
    nearest_misses,
)
from namedmesh.plan.partitions import explain, find_partition, misses_text, remedies

LLAMA_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LLAMA_405B = Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256)


@given(st.integers(1, 48))
def test_partitions_are_all_factorings(world: int) -> None:
    expected = [sizes for sizes in product(range(1, world + 1), repeat=3) if world % prod(sizes) == 0]
    found = list_partitions(world)
    assert [(one.tp, one.cp, one.pp) for one in found] == sorted(expected)
    assert all(one.tp * one.cp * one.pp * one.dp == world for one in found)
    assert all(one.fits for one in found)


def test_experts_add_every_size_inside_the_rest() -> None:
    found = list_partitions(4, Job(Model(experts=6)))
    eps = [(one.ep, one.reasons) for one in found if (one.tp, one.cp, one.pp) == (1, 1, 1)]
    assert eps == [(1, ()), (2, ()), (4, ("6 experts do not divide by ep=4",))]
    inside = [(one.ep, one.etp) for one in found if (one.tp, one.cp, one.pp) == (2, 1, 1)]
    assert inside == [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]


def test_the_best_partitions_by_what_their_steps_take() -> None:
    partitions = list_partitions(16, Job(LLAMA_8B, seq=8192, global_batch=64))
    best = best_partitions(partitions, 3)
    speeds = [one.tokens_per_second for one in partitions if one.fits]
    assert [one.tokens_per_second for one in best] == sorted(speeds, reverse=True)[:3]
    for one in best:
        assert one.step is not None
        assert one.tokens_per_second == pytest.approx(64 * 8192 / sum(one.step.seconds.values()))
    text = "2 problems:\n  - the number of partitions is 0; ...\n  - a ranking needs hidden, heads, global_batch; give them too"
    with pytest.raises(LayoutError, match=says(text)):
        best_partitions(list_partitions(8, Job(Model(layers=8), seq=4)), 0)


def test_all_partitions_work_on_one_global_batch() -> None:
    partitions = list_partitions(16, Job(LLAMA_8B, seq=8192, global_batch=24, micro_batch=2))
    for one in partitions:
        if 24 % (2 * one.dp):
            assert f"a global batch of 24 does not divide by dp={one.dp} x micro-batches of 2" in one.reasons
            assert one.micro_batches is None
        else:
            assert (one.micro_batches, one.dp * 2 * (one.micro_batches or 0)) == (24 // 2 // one.dp, 24)
    assert {one.dp for one in partitions if one.fits} <= {1, 2, 4}


def test_layouts_that_were_run_are_not_struck() -> None:
    found = {(one.tp, one.pp): one.reasons for one in list_partitions(128, Job(LLAMA_405B), memory=1e15)}
    # 126 layers on 16 stages; 16 ranks share 8 kv heads
    assert found[8, 16] == found[16, 8] == found[1, 64] == ()
    assert found[1, 128] == ("126 layers cannot fill pp=128",)
    deepseek = Model(layers=61, heads=128, hidden=7168)
    assert next(one.reasons for one in list_partitions(16, Job(deepseek)) if one.pp == 16) == ()
    odd = Model(heads=12, kv_heads=9, hidden=48)
    reasons = {one.tp: one.reasons for one in list_partitions(4, Job(odd)) if one.cp == one.pp == 1}
    assert reasons[4] == ("9 key and value heads can neither be divided nor shared by tp=4",)


def test_the_memory_of_the_hardware_is_a_limit() -> None:
    for name in ("a100", "h200"):
        job = Job(LLAMA_405B, load_hardware(name), seq=8192, global_batch=64)
        for one in list_partitions(64, job):
            if not any("divide" in reason or "fill" in reason for reason in one.reasons):
                assert one.memory is not None
                assert one.fits == (one.memory.total <= job.hardware.memory)


def test_what_does_not_fit_is_told_what_it_lacks() -> None:
    partitions = list_partitions(8, Job(LLAMA_8B, seq=8192, global_batch=8), memory=24e9)
    assert not any(one.fits for one in partitions)
    misses = nearest_misses(partitions, 2)
    needs = sorted(
        one.memory.total for one in partitions if one.reasons[0].startswith("needs") and one.memory
    )
    assert [one.memory.total for one in misses if one.memory] == needs[:2]
    lines = misses_text(misses).splitlines()
    assert f"{misses[0].words} lacks {needs[0] / 1e9 - 24:.3g} GB" in lines[1]
    assert "--checkpointing full" in lines[1]
    for one in misses:
        job, sizes = one.job, one.sizes
        fitting = [
            policy
            for policy in ("op", "full")
            if estimate_memory(replace(job, checkpointing=policy), sizes).total <= 24e9
        ]
        assert [words for words in remedies(one) if "checkpointing" in words] == [
            f"--checkpointing {policy}" for policy in fitting
        ]
    assert remedies(next(one for one in partitions if one.dp == 8)) == []


def test_an_explanation_names_the_seconds_and_the_gigabytes() -> None:
    partitions = list_partitions(16, Job(LLAMA_8B, seq=8192, global_batch=64))
    plain, piped = (find_partition(partitions, sizes) for sizes in ({"dp": 16}, {"pp": 16}))
    assert plain.step is not None
    assert piped.step is not None
    lines = explain(piped, plain).splitlines()
    assert lines[0].startswith("dp=16 is faster than pp=16: ")
    assert f"  bubble: 0 s against {piped.step.seconds['bubble']:.3g} s" in lines
    assert any(line.startswith("it needs ") and line.endswith(" GB") for line in lines)
    assert find_partition(partitions, {"tp": 4, "cp": 2}).sizes["dp"] == 2
    with pytest.raises(LayoutError, match=r"tp=3 is no partition of 16 ranks"):
        find_partition(partitions, {"tp": 3})


@given(
    st.integers(1, 64), st.integers(1, 16), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans()
)
def test_what_crosses_nodes_is_what_the_plan_says(
    world: int, node: int, ep: int, etp: int, moe: bool
) -> None:
    job = Job(Model(experts=8 if moe else None), load_hardware("h100").with_node(node))
    partitions = list_partitions(world, job)
    some = [one for one in partitions if (one.ep, one.etp) == (ep, etp)][:4]
    for one in some:
        sizes: dict[str, Any] = (
            one.sizes if moe else {axis: one.sizes[axis] for axis in ("tp", "cp", "pp", "dp")}
        )
        plan = make_plan(**sizes, gpus_per_node=node)
        assert set(one.crossing) == {place.axis for place in plan.placements if place.across_nodes}


def test_what_a_model_rules_out() -> None:
    model = Model(layers=3, heads=32, kv_heads=8, hidden=4096, vocab=50257)
    found = {(one.tp, one.cp, one.pp): one.reasons for one in list_partitions(64, Job(model, seq=1020))}
    assert found[1, 1, 2] == ()
    assert found[16, 1, 1] == ("50257 vocabulary entries do not divide by tp=16",)
    assert found[1, 4, 4] == (
        "3 layers cannot fill pp=4",
        "a sequence of 1020 does not divide by 2 x cp=4",
    )


def test_memory_rules_out_what_does_not_fit() -> None:
    found = list_partitions(8, Job(Model(params=7_000_000_000), stage=1), memory=20_000_000_000)
    by_sizes = {(one.tp, one.pp, one.dp): one.reasons for one in found if one.cp == 1}
    assert by_sizes[1, 1, 8] == ("needs 38.5 GB of 20.0 at stage 1",)
    assert by_sizes[8, 1, 1] == ()


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
    with pytest.raises(
        LayoutError, match=says("style 'colum' is not one of ('column', 'row'); did you mean 'column'?")
    ):
        cut_weight(4, 4, tp=2, style="colum")


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


MUCH = Model(experts=8, top_k=20, params=5, expert_params=6)
MIXED = Job(recompute=("mla", "mla_up_proj", "moe_act"), checkpointing="full", context_attention="tourch")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(Model(heads=0), stage=4), "heads is 0; ...\n  - stage 4 is not one of (0, 1, 2, 3)"),
        (
            Job(MUCH, checkpointing="ful"),
            "a token goes to 20 of 8 experts; top_k is 8 at most\n"
            "  - the experts have 6 parameters of 5 in all; give expert_params, or other sizes\n"
            "  - checkpointing 'ful' is not one of ('none', 'selective', 'op', 'full'); did you mean 'full'?",
        ),
        (
            MIXED,
            "recompute 'mla' is not one of ('layernorm', 'mla_up_proj', 'moe_act')\n"
            "  - context_attention 'tourch' is not one of ('gathered', 'torch', 'ring'); did you mean 'torch'?\n"
            "  - recompute has mla_up_proj, but attention is not latent; ...\n"
            "  - recompute has moe_act, but there are no experts; ...\n"
            "  - recompute goes with selective checkpointing, not with full; leave one out",
        ),
    ],
)
def test_what_does_not_go_together_in_a_job_is_named(job: Job, message: str) -> None:
    count = message.count("\n") + 1
    text = message if count == 1 else f"{count} problems:\n  - {message}"
    with pytest.raises(LayoutError, match=says(text)):
        list_partitions(8, job)
