"""What memory and steps cost, against published totals and formulas, and against calculations by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from namedmesh import LayoutError
from namedmesh.plan import (
    Hardware,
    Job,
    Memory,
    Model,
    UsageError,
    estimate_memory,
    estimate_step,
    load_hardware,
)
from namedmesh.plan.hardware import hardware_names
from namedmesh.plan.job import Axes, axes_of, bubble, in_flight, share_of
from namedmesh.plan.memory import saved
from namedmesh.plan.step import collective, context_parallel, layer_bytes
from namedmesh.sizes import stage_range

LLAMA_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
DEEPSEEK = Model(
    layers=61, hidden=7168, heads=128, head_dim=128, rope_dim=64, value_dim=128, q_rank=1536, kv_rank=512, ffn=18432,
    vocab=129280, experts=256, top_k=8, expert_ffn=2048, shared_experts=1, dense_layers=3,
)  # fmt: skip
GPT = Model(layers=5, heads=4, hidden=16, vocab=32)
PLAIN = Hardware("plain", {"bf16": 1e12}, {"bf16": 0.5}, 0.25, 80e9, 1e11, 0.5, 4, 4, 1e9, 1.0, 4, 1e8, 1.0)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (LLAMA_8B, 8_030_261_248),
        (Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256), 70_553_706_496),
        (Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256), 405_853_388_800),
        (  # Mixtral 8x7B
            Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=8, top_k=2),
            46_702_792_704,
        ),
    ],
)
def test_the_sizes_amount_to_the_published_parameters(model: Model, published: int) -> None:
    assert model.total == published
    dense, expert, routed = model.layer
    layers = (dense + routed if not model.experts else expert + routed) * (model.layers or 0)
    assert layers + model.ends == pytest.approx(published, rel=1e-9)


def test_latent_attention_shared_experts_and_dense_layers() -> None:
    model = DEEPSEEK
    # DeepSeek-V3's weights, without a second prediction
    assert model.total == pytest.approx(671_026_419_200, rel=1e-6)
    dense, expert, routed = model.layer
    active = dense * 3 + (expert + routed * 8 / 256) * 58 + model.ends
    assert active / 1e9 == pytest.approx(37, abs=1)  # "37B activated for each token"
    assert model.of_experts == 58 * 256 * 3 * 7168 * 2048


def test_parameters_that_were_given_are_spread_over_the_layers() -> None:
    model = replace(LLAMA_8B, params=9_000_000_000)
    assert model.layer[0] * 32 + 2 * 4096 * 128256 == pytest.approx(9e9)
    job = Job(replace(model, layers=None, hidden=None, vocab=None), stage=0)
    assert estimate_memory(job, {"tp": 2, "pp": 2}).weights == 2 * 9e9 / 4


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, 16 * 7), (1, 4 * 7 + 12 * 7 / 8), (2, 2 * 7 + 14 * 7 / 8), (3, 16 * 7 / 8)]
)
def test_states_by_stage(stage: int, expected: float) -> None:
    job = Job(Model(params=28_000_000_000), stage=stage)
    assert estimate_memory(job, {"tp": 2, "pp": 2, "dp": 8}).states / 1e9 == pytest.approx(expected)
    megatron = replace(job, trainer="megatron")
    more = 2 * 7 / (8 if stage >= 2 else 1)  # gradients in float32
    assert estimate_memory(megatron, {"tp": 2, "pp": 2, "dp": 8}).states / 1e9 == pytest.approx(
        expected + more
    )


def test_states_in_float32() -> None:
    found = estimate_memory(Job(Model(params=1_000), stage=1, precision="fp32"), {"dp": 4})
    assert (found.weights, found.gradients, found.optimizer) == (4 * 1_000, 4 * 1_000, 8 * 250)


def test_experts_are_spread_over_ep_and_etp() -> None:
    model = Model(params=10_000, experts=8, expert_params=8_000)
    for ep, etp in ((1, 1), (2, 1), (4, 2), (8, 2)):
        for stage in (0, 3):
            shared = 2_000 / 2 / (8 if stage else 1)
            own = 8_000 / (ep * etp) / (16 // (ep * etp) if stage else 1)
            found = estimate_memory(Job(model, stage=stage), {"tp": 2, "dp": 8, "ep": ep, "etp": etp})
            assert found.weights == pytest.approx(2 * (shared + own))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("parallel", [False, True])
def test_activations_by_korthikantis_table_2(policy: str, parallel: bool) -> None:
    t, h, a, s = 2, 16, 4, 8
    expected = {
        ("none", False): 10 + 24 / t + 5 * a * s / (h * t),
        ("none", True): (34 + 5 * a * s / h) / t,
        ("selective", False): 10 + 24 / t,
        ("selective", True): 34 / t,
        ("full", False): 2.0,
        ("full", True): 2 / t,  # the paper gathers the input; Megatron keeps a part
    }[policy, parallel]
    job = Job(
        GPT, seq=s, micro_batch=3, global_batch=3, trainer="megatron", checkpointing=policy, sequence_parallel=parallel,
        fused_attention=False, dropout=True,
    )  # fmt: skip
    assert estimate_memory(job, {"tp": t}).activations == pytest.approx(5 * 3 * s * h * expected)


def test_torch_keeps_what_it_gathers_and_copies() -> None:
    """By hand, in numbers of two bytes: h=16, q=16, k=v=8, f=24, over two ranks with sequence parallelism."""
    model = Model(layers=1, heads=4, kv_heads=2, hidden=16, ffn=24, vocab=32)
    job = Job(model, seq=8, global_batch=1)
    stream, gathered = 2 * 16 / 2, 2 * 16
    attention = (16 + 8 + 8 + 16 + 16) / 2
    assert saved(job, Axes(tp=2, etp=2), experts=False).kept == 2 * (
        stream + gathered + attention + 4 * 24 / 2
    )
    megatron = saved(replace(job, trainer="megatron"), Axes(tp=2, etp=2), experts=False)
    assert megatron.kept == 2 * (2 * stream + (16 + 8 + 8 + 16) / 2 + 3 * 24 / 2)
    op = saved(replace(job, checkpointing="op"), Axes(), experts=False)
    # Input, queries, values, attention; gate and last product
    assert op.kept == 2 * (16 + 16 + 8 + 16 + 24 + 16)
    shared = saved(replace(job, model=replace(model, kv_heads=1)), Axes(tp=2, etp=2), experts=False)
    # Each rank has the head
    assert shared.kept == 2 * (stream + gathered + (16 + 8 + 8 + 16 + 16) / 2 + 4 * 24 / 2)


def test_experts_keep_their_inputs_and_outputs() -> None:
    model = Model(
        layers=1, heads=4, hidden=16, ffn=24, vocab=32, experts=8, top_k=2, expert_ffn=12, shared_experts=1
    )
    found = saved(Job(model, seq=8), Axes(), experts=True).kept
    attention = 4 * 16 + 5 * 16
    assert found == 2 * (attention + 2 * 2 * 16 + 3 * 4 * 12 + 2 * 8)
    # Over two ranks: each has half of the tokens for whole experts, or all of them for halves.
    halves = 2 * 16 / 2 + 2 * 16 + 5 * 16 / 2 + 3 * 4 * 12 / 2 + 2 * 8
    for etp in (1, 2):
        found = saved(Job(model, seq=8), Axes(tp=2, etp=etp), experts=True).kept
        assert found == 2 * (halves + 2 * 2 * 16 * etp / 2)


def test_what_fsdp_gathers() -> None:
    job = Job(replace(LLAMA_8B, layers=4), seq=128, global_batch=8)
    layer, ends = LLAMA_8B.layer[0], 2 * 4096 * 128256
    one = estimate_memory(job, {"dp": 2})
    assert one.gathered == pytest.approx(2 * ends)
    activations = saved(job, Axes(), experts=False)
    again = 128 * (activations.all - activations.kept + activations.gradients)
    assert one.backward == pytest.approx(again + (3 * 2 + 4) * layer + 2 * ends, rel=1e-4)
    # The last of two stages: two layers and the head, gathered for the whole step, and gradients that accumulate.
    last = estimate_memory(job, {"dp": 2, "pp": 2})
    assert last.rank == 1
    assert last.gathered == pytest.approx((2 + 4) * (2 * layer + ends / 2), rel=1e-4)
    assert estimate_memory(replace(job, stage=1), {"dp": 2}).gathered == 0


def test_the_loss_and_its_copies_of_the_logits() -> None:
    job = Job(LLAMA_8B, seq=128, global_batch=1)
    logits, hidden = 128 * 128256, 2 * 128 * 4096 * 2
    assert estimate_memory(job, {}).loss == 14 * logits + hidden
    assert estimate_memory(replace(job, fused_loss=True), {}).loss == 4 * logits + hidden
    assert estimate_memory(replace(job, precision="fp32"), {}).loss == 16 * logits + 2 * hidden
    assert estimate_memory(job, {"tp": 2}).loss == 18 * logits / 2 + hidden
    assert estimate_memory(replace(job, trainer="megatron"), {"tp": 2}).loss == 10 * logits / 2 + hidden


def test_an_allocator_reserves_more_than_is_allocated_at_a_time() -> None:
    memory = Memory(
        weights=1, gradients=2, optimizer=3, gathered=4, activations=5, loss=6, backward=7, merged=8
    )
    assert (memory.allocated, memory.total) == (1 + 2 + 3 + 4 + 5 + 7, 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)


def test_micro_batches_in_flight() -> None:
    job = Job(Model(layers=32))
    assert [in_flight(job, 4, rank, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(job, 4, rank, 2) for rank in range(4)] == [2, 2, 2, 1]
    interleaved = replace(job, stages_per_rank=3)
    p, m = 8, 3
    # Korthikanti, section 4.2.3
    assert in_flight(interleaved, p, 0, 64) == pytest.approx(p * (1 + (p - 1) / (p * m)))
    assert in_flight(replace(job, schedule="gpipe"), 4, 3, 16) == 16
    assert (bubble(job, 8), bubble(replace(job, stages_per_rank=2), 8)) == (7, 3.5)
    assert bubble(replace(job, schedule="zero-bubble"), 7) == 2  # (p-1)(F+B-2W) of F+B=3


def test_stages_are_those_of_the_training() -> None:
    job = Job(Model(layers=61, dense_layers=3, experts=4, hidden=8, heads=1))
    found = [share_of(job, 16, rank) for rank in range(16)]
    assert [share.layers for share in found] == [len(stage_range(61, rank, 16)) for rank in range(16)]
    assert (sum(share.dense for share in found), sum(share.expert for share in found)) == (3, 58)
    assert [rank for rank in range(16) if found[rank].first] == [0]
    assert [rank for rank in range(16) if found[rank].last] == [15]


def test_dualpipe_has_two_stages_on_a_rank() -> None:
    job = Job(Model(layers=10), schedule="dualpipe")
    first = share_of(job, 4, 0)  # stages 0 and 3, of 2 and 3 layers
    assert (first.layers, first.first, first.last) == (5, True, True)
    assert in_flight(job, 4, 0, 64) == 5 / 2


def test_the_bandwidth_of_a_group_follows_from_its_members_in_a_node() -> None:
    hardware = PLAIN  # nodes of 4, links of 1 GB/s, a NIC of 0.1 GB/s for each
    assert hardware.bandwidth(4, 1) == 1e9
    assert hardware.bandwidth(16, 1) == 4e8  # four members: four NICs
    assert hardware.bandwidth(16, 2) == 2e8
    assert hardware.bandwidth(4, 4) == 1e8
    hops = 12 * 3.4e-6 + 3 * 9.6e-6  # of a ring over four nodes of four
    assert collective(hardware, 8e8, 16, 1).seconds == pytest.approx(7.5e8 / 4e8 + hops, rel=1e-9)
    assert hardware.bandwidth(3, 1) == 1e8  # the second group has a rank in one node and two in the next
    assert hardware.bandwidth(6, 1) == 2e8
    nvl72 = load_hardware("gb200-nvl72").filled(1024)  # 64 of the 72
    assert nvl72.bandwidth(64, 1) == nvl72.bandwidth(4, 1) == 0.80 * 900e9
    assert nvl72.bandwidth(16, 32) == 2 * 45e9  # two members in a rack


def test_a_step_by_hand() -> None:
    model = Model(layers=2, hidden=64, heads=4, vocab=100)
    job = Job(model, PLAIN, seq=32, global_batch=4, stage=0, trainer="megatron", sequence_parallel=False)
    step = estimate_step(job, {"tp": 2, "pp": 2})
    tokens, layer = 32, model.layer[0]
    # The last stage: a layer and the head, over two ranks; 2 operations forward, 4 backward, at half of the peak.
    products = 6 * tokens * (layer + 64 * 100) / 2 / 5e11
    assert step.seconds["matmul"] == pytest.approx(4 * products)
    # Half of s x s scores, two products, forward, again, and two and a half times backward, at a quarter of the peak.
    assert step.seconds["attention"] == pytest.approx(4 * 4.5 * 2 * 32 * 32 * 64 / 2 / 2.5e11)
    # Four all-reduces of 32 x 64 numbers of two bytes: each is sent to one other rank twice, half at a time.
    sent = 4 * 4 * 2 * (tokens * 64 * 2 / 2)
    assert step.sent["tp"] == sent
    assert step.seconds["tp"] == pytest.approx(sent / 1e9 + 4 * 4 * 2 * 3.4e-6)
    # Each of the two ranks sends half to its peer in the next stage, and gathers the other half there.
    assert step.sent["pp"] == 4 * 2 * 2 * (tokens * 64 * 2 / 2)
    one = sum(step.seconds[part] for part in ("matmul", "attention", "elementwise", "tp", "pp")) / 4
    assert step.seconds["bubble"] == pytest.approx(one)  # (p-1) micro-batches
    assert "dp" not in step.sent
    full = estimate_step(replace(job, checkpointing="full"), {"tp": 2, "pp": 2})
    assert full.sent["tp"] == sent * 3 / 2  # and once more, where the layer is computed again


def more_bytes(job: Job, other: Job, axes: Axes) -> tuple[float, float]:
    """What a layer of one job reads and writes beyond that of another, forward and backward."""
    one, two = (layer_bytes(each, axes, experts=False) for each in (job, other))
    return one.forward - two.forward, one.backward - two.backward


def test_eager_kernels_write_what_compiled_ones_keep() -> None:
    """By hand, in numbers of two bytes: h=16, q=16, k=8, f=24."""
    llama = Job(Model(layers=1, heads=4, kv_heads=2, hidden=16, ffn=24, vocab=32), seq=8)
    eager = replace(llama, compiled=False)
    residuals, rotary, silu, norms = 2 * 2 * 16, 16 * (16 + 8), 4 * 24, 2 * 32 * 16
    backward = 2 * 4 * 16 + 16 * (16 + 8) + 8 * 24 + 3 * 4 * 16
    assert layer_bytes(llama, Axes(), experts=False).forward == 2 * saved(llama, Axes(), experts=False).all
    assert more_bytes(eager, llama, Axes()) == (residuals + rotary + silu, backward)
    plain, unfused = (replace(job, fused_norms=False, checkpointing="op") for job in (llama, eager))
    forward = residuals + rotary + silu + norms
    assert more_bytes(unfused, plain, Axes()) == (forward, backward + 2 * 66 * 16 + forward)
    over_two = more_bytes(eager, llama, Axes(tp=2, etp=2))  # inputs of products are whole on each
    assert over_two == ((residuals + rotary + silu) / 2, (backward + 3 * 4 * 16) / 2)
    gpt = Job(GPT, seq=8)
    assert more_bytes(replace(gpt, compiled=False), gpt, Axes()) == (2 * 2 * 16, 2 * 4 * 16)
    megatron = replace(llama, trainer="megatron")
    assert more_bytes(replace(megatron, compiled=False), megatron, Axes()) == (0, 0)


@pytest.mark.parametrize(("trainer", "cast"), [("torch", 5), ("megatron", 3)])
def test_operands_are_cast_to_fp8(trainer: str, cast: int) -> None:
    model = Model(layers=1, heads=4, kv_heads=2, hidden=16, ffn=24, vocab=32)
    job = Job(model, seq=8, trainer=trainer, checkpointing="none")
    inputs, outputs = 16 + 16 + 16 + 24, (16 + 8 + 8) + 16 + 2 * 24 + 16
    fp8 = more_bytes(replace(job, precision="fp8"), job, Axes())
    assert fp8 == pytest.approx((cast * inputs, cast * (inputs + outputs)))
    full = replace(job, checkpointing="full")
    again = more_bytes(replace(full, precision="fp8"), full, Axes())
    assert again == pytest.approx((cast * inputs, cast * (2 * inputs + outputs)))


@pytest.mark.parametrize(
    ("how", "heads", "hops", "bytes_of_gradient"),
    [("gathered", 2, 3, 2), ("ring", 2, 3, 2), ("torch", 8, 4, 4)],
)
def test_keys_and_values_travel_over_cp(how: str, heads: int, hops: int, bytes_of_gradient: int) -> None:
    model = Model(layers=3, hidden=64, heads=8, kv_heads=2, ffn=32)
    slow = replace(PLAIN, domain_bandwidth=1e5)  # links that hide only what is beside attention
    job = Job(model, slow, seq=32, global_batch=1, stage=1, context_attention=how)
    tokens, axes = 8, Axes(cp=4)
    part = tokens * heads * 8 * 2  # numbers of keys and values, of all heads where torch's are repeated
    keys, gradients = context_parallel(job, axes, share_of(job, 1, 0), tokens)
    assert (keys.sent, gradients.sent) == (2 * 3 * part * 2 * 3, hops * part * bytes_of_gradient * 3)
    eager, compiled = (estimate_step(replace(job, compiled=each), {"cp": 4}) for each in (False, True))
    attention = eager.seconds["attention"]
    hidden = {"gathered": 0, "ring": attention, "torch": attention / 4 + attention}[how]
    assert eager.seconds["cp"] == pytest.approx(keys.seconds + gradients.seconds - 0.85 * hidden)
    if how == "torch":  # compiled code waits where it gathers
        hidden = 0
    assert compiled.seconds["cp"] == pytest.approx(keys.seconds + gradients.seconds - 0.85 * hidden)
    # Numbers of keys and values, of one rank and of all; and of two chunks that are joined.
    own, whole, chunks = 2 * 16, 4 * 2 * 16, 2 * 64
    for each, copied, summed in ((compiled, 2, 4), (eager, 4, 15)):
        gathered = 2 * (copied * whole + chunks) + 2 * (summed * whole + 3 * own + chunks)
        more = {"gathered": gathered, "ring": 0, "torch": 3 * (40 + 59) * 64}[how] * 3 * tokens / 5e10
        alone = estimate_step(replace(job, seq=8, compiled=each is compiled), {}).seconds["elementwise"]
        assert each.seconds["elementwise"] - alone == pytest.approx(more)


def test_each_trainer_has_its_attention_over_cp() -> None:
    assert (Job().keys_over_cp, Job(trainer="megatron").keys_over_cp) == ("gathered", "ring")


def test_what_deepseek_keeps_of_a_token() -> None:
    """By hand, by the sections 3.2.3 and 3.3.3 of its report; experts weighted within, as Megatron does."""
    job = Job(DEEPSEEK, seq=4096, stage=1, trainer="megatron")
    kept = saved(job, Axes(), experts=True).kept
    stream, latent, out, router = 2 * 7168 * 2, (1536 + 512 + 64) * 2, 128 * 128, 256 * 4
    norms, queries, keys_values = 2 * 7168 * 2, 128 * 192 * 2, 128 * (192 + 128) * 2
    inputs, gate = 8 * 7168, 9 * 2048
    whole = stream + norms + latent + queries + keys_values + 2 * out + 2 * inputs + 6 * gate + router
    assert kept == whole
    parts = {"layernorm": norms, "mla_up_proj": queries + keys_values, "moe_act": 2 * gate}
    for part, size in parts.items():
        assert saved(replace(job, recompute=(part,)), Axes(), experts=True).kept == whole - size
    all_of_it = replace(job, recompute=tuple(parts), fp8_inputs=True)
    left = saved(all_of_it, Axes(), experts=True).kept
    assert left == stream + latent + 1.5 * out + inputs + 2 * gate + router
    products = [
        estimate_step(replace(each, global_batch=1), {}).seconds["matmul"] for each in (job, all_of_it)
    ]
    ups = 128 * (1536 * 192 + 512 * (128 + 128))
    assert products[1] - products[0] == pytest.approx(2 * 4096 * ups * 61 / job.hardware.matmul_rate("bf16"))


def test_moments_in_bf16_take_four_bytes_less() -> None:
    job = Job(DEEPSEEK, stage=1)
    optimizer = [estimate_memory(replace(job, optimizer_bytes=each), {"dp": 4}).optimizer for each in (12, 8)]
    assert optimizer == [DEEPSEEK.total * each / 4 for each in (12, 8)]


def test_the_optimizer_reads_and_writes_its_state() -> None:
    job = Job(Model(layers=2, hidden=64, heads=4), PLAIN, seq=4, global_batch=1)
    state = 2 * job.model.layer[0]
    assert estimate_step(job, {}).seconds["optimizer"] == pytest.approx((28 + 12 + 2) * state / 5e10)
    for changed, count in (({"compiled": False}, 84), ({"optimizer_bytes": 8}, 20)):
        seconds = estimate_step(replace(job, **changed), {}).seconds["optimizer"]
        assert seconds == pytest.approx((count + 12 + 2) * state / 5e10)


def test_a_world_inside_a_node_does_not_leave_it() -> None:
    job = Job(Model(layers=3, hidden=66, heads=3), PLAIN, seq=4, global_batch=1)
    sent = estimate_step(job, {"tp": 3})
    assert sent.seconds["tp"] == pytest.approx(sent.sent["tp"] / 1e9 + 3 * 2 * 4 * 2 * 3.4e-6)
    with pytest.raises(LayoutError, match="plain has no fp8; it has bf16"):
        estimate_step(replace(job, precision="fp8"), {"tp": 3})


def test_few_tokens_wait_for_the_weights_and_micro_batches_for_the_sums() -> None:
    model = Model(layers=2, hidden=64, heads=4)
    job = Job(model, PLAIN, seq=4, global_batch=1)
    layers = 2 * model.layer[0]
    # 4 tokens: 2 x 4 operations a weight at 5e11 take less than its 2 bytes at 5e10.
    one = estimate_step(job, {}).seconds
    assert one["matmul"] == pytest.approx(3 * 2 * layers / 5e10)
    many = estimate_step(replace(job, global_batch=3, stage=1), {}).seconds
    assert many["elementwise"] - 3 * one["elementwise"] == pytest.approx(3 * 10 * layers / 5e10)


def test_fsdp_copies_what_it_gathers_and_reduces() -> None:
    job = Job(Model(layers=2, hidden=64, heads=4), PLAIN, seq=4, global_batch=6)
    copied = 2 * job.model.layer[0] / 5e10

    def more(trainer: str, sizes: dict[str, int], count: int) -> float:
        one = replace(job, trainer=trainer, global_batch=count)
        many = replace(one, global_batch=2 * count)
        both = estimate_step(many, sizes | {"dp": 2}).seconds, estimate_step(one, sizes).seconds
        return both[0]["elementwise"] - both[1]["elementwise"]

    # Two gathers of two bytes, and a gradient from two bytes to four, for each micro-batch; once in a pipeline.
    assert more("torch", {}, 3) == pytest.approx(3 * (2 * (2 + 2) + 2 + 4) * copied)
    assert more("torch", {"pp": 2}, 3) == pytest.approx((2 + 2 + 2 + 4) * copied / 2)
    assert more("megatron", {}, 3) == pytest.approx(0)


def test_data_parallel_traffic_hides_behind_the_computation() -> None:
    job = Job(LLAMA_8B, seq=8192, global_batch=128)
    step = estimate_step(job, {"dp": 128})
    assert step.sent["dp"] == pytest.approx((2 * 2 + 4) * 127 / 128 * LLAMA_8B.total, rel=1e-4)
    assert step.seconds["dp"] < 0.05 * step.total
    exposed = estimate_step(replace(job, overlap=False), {"dp": 128}).seconds["dp"]
    assert exposed > 5 * step.seconds["dp"]
    per_gpu = [
        128 / n * 8192 / estimate_step(replace(job, global_batch=n), {"dp": n}).total for n in (8, 128)
    ]
    # torchtitan publishes 2.7 % less at 128 GPUs than at 8.
    assert 128 * 8192 / step.total / 128 == pytest.approx(per_gpu[0] * 8 / 128, rel=0.05)


def test_operations_are_those_of_the_published_formula() -> None:
    """Narayanan et al., SC 2021, appendix: 96 B s l h^2 (1 + s/6h + V/16lh), with the layers computed again."""
    model = Model(layers=24, hidden=2304, heads=24, vocab=51200, tied=True)
    hardware = replace(PLAIN, matmul={"bf16": 1.0})
    job = Job(
        model,
        hardware,
        seq=2048,
        global_batch=4,
        trainer="megatron",
        checkpointing="full",
        fused_attention=False,
    )
    step = estimate_step(job, {})
    operations = (step.seconds["matmul"] + step.seconds["attention"]) * 1e12
    s, layers, h = 2048, 24, 2304
    published = 96 * 4 * s * layers * h**2 * (1 + s / (6 * h) + 51200 / (16 * layers * h))
    assert operations == pytest.approx(published, rel=0.01)


def test_the_experts_of_a_token_travel_by_the_nic() -> None:
    model = Model(layers=2, hidden=64, heads=4, vocab=100, ffn=32, experts=16, top_k=2)
    job = Job(model, PLAIN, seq=32, global_batch=16)
    step = estimate_step(job, {"dp": 16, "ep": 8})
    # Bytes of a micro-batch; half of the experts are in another node, 1/8 on the rank itself
    one = 32 * 64 * 2
    assert step.sent["ep"] == pytest.approx(2 * 4 * one * 2 * 7 / 8)
    assert step.seconds["ep"] == pytest.approx(2 * 4 * (one * 2 * 4 / 8) / 1e8)
    limited = replace(job, model=replace(model, expert_groups=1))
    assert estimate_step(limited, {"dp": 16, "ep": 8}).seconds["ep"] == pytest.approx(step.seconds["ep"] / 2)


def test_axes_without_experts_divide_them_over_tp() -> None:
    assert axes_of({"tp": 4, "dp": 2}).etp == 4
    assert axes_of({"tp": 4, "dp": 2, "ep": 2}).etp == 1
    axes = axes_of({"tp": 4, "dp": 4, "ep": 2, "etp": 2})
    assert axes.edp == 4 == prod((4, 4)) // (2 * 2)


def test_shipped_hardware_is_whole_and_names_its_sources() -> None:
    assert hardware_names() == ["a100", "b200", "gb200-nvl72", "h100", "h200", "mi300x"]
    for name in hardware_names():
        one = load_hardware(name)
        named = {field.strip() for fields in one.sources for field in fields.split(",")}
        assert named >= set(vars(one)) - {"name", "sources", "gpus_per_node", "domain"}
        assert 0 < one.matmul_rate("bf16") < one.peak["bf16"]


def test_jobs_on_the_same_hardware_are_equal() -> None:
    assert Job(LLAMA_8B, seq=8) == Job(LLAMA_8B, seq=8)


def test_hardware_from_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.json")
    data = {name: value for name, value in vars(load_hardware("h100")).items() if name != "sources"}

    def load(**changed: object) -> Hardware:
        Path(path).write_text(json.dumps({**data, **changed}), encoding="utf-8")
        return load_hardware(path)

    assert load(memory=96e9).memory == 96e9
    with pytest.raises(UsageError, match="'memori' is not a field; did you mean 'memory'"):
        load(memori=1)
    with pytest.raises(UsageError, match="'attention' is 2; it is a fraction"):
        load(attention=2)
    with pytest.raises(UsageError, match=r"'nic_bandwidth' is '50GB'; it is a number above 0"):
        load(nic_bandwidth="50GB")
    with pytest.raises(UsageError, match="cannot be read"):
        load_hardware("/nowhere.json")
