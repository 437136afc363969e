"""Estimate the time of a training step; each formula names its source."""

from __future__ import annotations

from dataclasses import replace

from namedmesh.tools.plan.hardware import Hardware
from namedmesh.tools.plan.memory import (
    BF16_BYTES,
    FSDP_STAGE,
    REDUCED_BYTES,
    StageShare,
    count_kv_heads,
    count_layer_elements,
    count_loss_bytes_per_token,
    list_stage_shares,
)
from namedmesh.tools.plan.model import Axes, Job

# How often an elementwise kernel moves a tensor that the backward pass reads. Forward it is written
# and read. Backward it is read, and its gradient is written and read. Recomputation writes and
# reads it once more.
_FORWARD_MOVES = 2
_BACKWARD_MOVES = 3
_RECOMPUTED_MOVES = 2
# The backward pass of fused attention has five products, the forward pass two (Dao,
# FlashAttention-2, 2023, section 3.1).
_ATTENTION_BACKWARD = 2.5
# Bytes that a cast to fp8 moves for each element. torchao reads a tensor twice, first for its
# largest element. Transformer Engine takes the scale from earlier steps.
_FP8_CAST_BYTES = {"torch": 5, "megatron": 3, "bridge": 3}
# Bytes that the accumulation of a gradient moves: it is read in bf16, the sum is read and written
# in float32.
_ACCUMULATION_BYTES = 2 + 4 + 4
# Bytes that the optimizer moves for each parameter, in float32: Adam reads weight, gradient, mean
# and variance, and writes all except the gradient.
_ADAM_BYTES = 28
# Clipping reads the gradient for its norm, and reads and writes it to scale it.
_CLIPPING_BYTES = 12
# A collective takes this fraction of the GPU from computation that runs at the same time: 20 of 132
# multiprocessors (DeepSeek-V3, 2024, section 3.2.2); 0.15 in Calculon's systems/*.json (Isaev et
# al., SC 2023).
_OVERLAP_COST = 0.15
# Seconds of one hop of a ring over NVLink, and of a hop of a tree over the network: NCCL
# src/graph/tuning.cc.
_DOMAIN_HOP_SECONDS = 3.4e-6
_NETWORK_HOP_SECONDS = 9.6e-6


def estimate_collective(hardware: Hardware, size_bytes: float, size: int, stride: int) -> float:
    """Estimate the seconds of a ring all-gather or reduce-scatter.

    Args:
        hardware: the links.
        size_bytes: the size of the full tensor.
        size: the number of ranks in the group.
        stride: the distance between neighboring ranks of the group.
    """
    if size == 1:
        return 0.0
    domains = -(-size // hardware.members(size, stride))
    network_hops = domains - 1
    domain_hops = size - 1 - network_hops
    latency = domain_hops * _DOMAIN_HOP_SECONDS + network_hops * _NETWORK_HOP_SECONDS
    return size_bytes * (size - 1) / size / hardware.bandwidth(size, stride) + latency


def estimate_step(job: Job, axes: Axes) -> dict[str, float]:
    """Estimate the seconds of a step on the pipeline rank that takes longest.

    - Matrix products: 2 operations for each parameter and token forward, twice that backward, at
      the rate of large products. Attention: 4 s q operations for each token and layer, of which a
      causal mask leaves half (Narayanan et al., SC 2021, appendix).
    - Elementwise kernels (norms, gates, residuals, loss, casts to fp8) write and read the tensors
      of :func:`~namedmesh.tools.plan.memory.count_layer_elements`. FSDP2 copies each gathered weight once
      more, and each gradient before it is reduced.
    - Pipeline bubble: (p-1) / v micro-batches (Narayanan et al., section 2.2).
    - Communication over each axis, at the bandwidth of its groups. The computation waits for tp and
      ep, and for pp unless it is interleaved. In Megatron's ring, cp overlaps with attention;
      all-gathered keys and values do not overlap. FSDP all-gathers overlap with the forward pass
      and reduce-scatters with the backward pass, except in one layer.

    Args:
        job: the model, and how it is trained; its sizes have to be known.
        axes: the sizes of the axes.

    Returns:
        The seconds by part of the step, the largest first, without the parts that take no time.
    """
    job = replace(job, hardware=job.hardware.fit_domain(axes.world))
    shares = list_stage_shares(job.model, axes.pp, job.stages_per_rank)
    estimates = [_estimate_stage(job, axes, share) for share in shares]
    return max(estimates, key=lambda seconds: sum(seconds.values()))


def _estimate_stage(job: Job, axes: Axes, share: StageShare) -> dict[str, float]:
    """Estimate the seconds of a step on one pipeline rank, by part, the largest first."""
    micro_batches = job.micro_batches(axes.dp) or 1
    tokens = (job.micro_batch or 1) * job.seq / axes.cp
    shared, routed = share.parameters(job.model, axes)
    memory_rate = job.hardware.memory_rate
    # FSDP2 gathers weights and reduces gradients for each micro-batch; torch's pipeline schedules
    # do so once a step.
    is_fsdp = job.stage == FSDP_STAGE
    reduces_each = is_fsdp and axes.pp == 1

    forward, backward = _estimate_computation(job, axes, share, tokens)
    if micro_batches > 1 and not reduces_each:
        backward["elementwise"] += _ACCUMULATION_BYTES * (shared + routed) / memory_rate
    computation = (sum(forward.values()), sum(backward.values()))
    seconds = {part: time + backward[part] for part, time in forward.items()}
    communication = _estimate_communication(job, axes, share, tokens)
    if not job.is_torch:
        communication["cp"] = _compute_exposed_seconds(communication["cp"], seconds["attention"])
    if job.stages_per_rank > 1:
        communication["pp"] = _compute_exposed_seconds(communication["pp"], sum(seconds.values()))
    seconds |= communication

    # All of the above is for one micro-batch. While the pipeline fills and drains, ranks wait for
    # pp - 1 of them.
    bubble = (axes.pp - 1) / job.stages_per_rank * sum(seconds.values())
    for part in seconds:
        seconds[part] *= micro_batches
    rounds = 1
    gathers = 1
    if reduces_each:
        rounds = micro_batches
        gathers = 2  # forward, and again backward, as reshard_after_forward frees the weights in between
    if job.is_torch and is_fsdp:
        # Weights are copied out of the gathered buffer, and gradients into the buffer to reduce,
        # while nothing is computed (split_with_sizes_copy and chunk_cat in torch's
        # _fsdp_collectives.py).
        sharded = shared * (axes.shards > 1) + routed * (axes.expert_shards > 1)
        copied_bytes = (2 * gathers + 1) * BF16_BYTES + REDUCED_BYTES
        seconds["elementwise"] += rounds * copied_bytes * sharded / memory_rate
    # From stage 1 on, a rank updates its shard only.
    updated = shared / axes.shards + routed / axes.expert_shards if job.stage else shared + routed
    seconds["bubble"] = bubble
    seconds["optimizer"] = (_ADAM_BYTES + _CLIPPING_BYTES + BF16_BYTES) * updated / memory_rate
    seconds["dp"] = rounds * _estimate_data_parallel(job, axes, share, computation, gathers)
    largest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return {part: time for part, time in largest_first if time}


def _compute_exposed_seconds(communication: float, computation: float, edge: float = 0.0) -> float:
    """Return the seconds that communication adds to a computation that it overlaps with.

    Args:
        communication: the seconds of the communication by itself.
        computation: the seconds of the computation.
        edge: the fraction of the communication that cannot overlap.
    """
    exposed = max(communication * edge, communication - computation)
    return exposed + _OVERLAP_COST * (communication - exposed)


def _estimate_computation(
    job: Job, axes: Axes, share: StageShare, tokens: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate the seconds of one micro-batch on a rank, forward and backward, by part."""
    model = job.model
    hardware = job.hardware
    is_full = job.checkpointing == "full"
    is_selective = job.checkpointing == "selective"
    rates = {precision: hardware.peak[precision] * hardware.matmul[precision] for precision in hardware.peak}

    dense, expert, routed = model.layer
    active_expert = expert + routed * model.top_k / (model.experts or 1)
    active = dense * share.dense_layers + active_expert * share.expert_layers
    products = 2 * tokens * active / axes.tp / rates[job.precision]
    # A product of few tokens takes as long as it takes to read its weights, or to write their
    # gradients.
    weight_bytes = BF16_BYTES * sum(share.parameters(model, axes))
    products = max(products, weight_bytes / hardware.memory_rate)
    recomputed = 0.0  # the fraction of the products that the backward pass repeats
    if is_full:
        recomputed = 1.0
    elif is_selective and job.is_torch:
        recomputed = 0.5
    head = 0.0
    loss_bytes = 0.0
    if share.is_last:
        head = 2 * tokens * model.embedding / axes.tp / rates["bf16"]
        loss_bytes = count_loss_bytes_per_token(job, axes)

    # Two products of all pairs of tokens. The causal mask leaves half of the pairs.
    scores = tokens * job.seq * model.heads * sum(model.features) / axes.tp * share.layers
    attention = scores / (hardware.peak["bf16"] * hardware.attention)
    # Megatron's selective checkpointing recomputes the attention scores, torch's everything except
    # attention.
    attention_backward = _ATTENTION_BACKWARD
    if is_full or (is_selective and not job.is_torch):
        attention_backward += 1

    forward_bytes = loss_bytes
    backward_bytes = loss_bytes
    for layers, has_experts in ((share.dense_layers, False), (share.expert_layers, True)):
        layer = count_layer_elements(job, axes, has_experts=has_experts)
        backward_moves = _BACKWARD_MOVES * layer.read + _RECOMPUTED_MOVES * (layer.read - layer.kept)
        forward_bytes += layers * _FORWARD_MOVES * BF16_BYTES * layer.read
        backward_bytes += layers * BF16_BYTES * backward_moves
        if job.precision == "fp8":
            cast_bytes = layers * _FP8_CAST_BYTES[job.trainer]
            forward_bytes += cast_bytes * layer.inputs
            backward_bytes += cast_bytes * ((1 + recomputed) * layer.inputs + layer.outputs)
    forward = {
        "matmul": products + head,
        "attention": attention,
        "elementwise": tokens * forward_bytes / hardware.memory_rate,
    }
    backward = {
        "matmul": products * (2 + recomputed) + 2 * head,
        "attention": attention * attention_backward,
        "elementwise": tokens * backward_bytes / hardware.memory_rate,
    }
    return forward, backward


def _estimate_data_parallel(
    job: Job, axes: Axes, share: StageShare, seconds: tuple[float, float], gathers: int
) -> float:
    """Estimate the seconds of weight all-gathers and gradient reductions that do not overlap.

    At stage 0, gradients are all-reduced. From stage 1 on, gradients are reduce-scattered and
    weights all-gathered (the ZeRO paper, section 7): over dp_shard and cp, and over edp for the
    routed experts. The sharded gradients are then all-reduced over dp_replicate.

    Args:
        job: the model, and how it is trained.
        axes: the sizes of the axes.
        share: the layers of the pipeline rank.
        seconds: the time of the forward and of the backward pass of one micro-batch, with which the
            communication overlaps.
        gathers: how often weights are gathered for a micro-batch.
    """
    hardware = job.hardware
    shared, routed = share.parameters(job.model, axes)
    # FSDP2 keeps the gathered weights of its root, the embedding and the head, until the backward.
    kept = job.model.embedding * share.ends / axes.tp
    all_gather = 0.0
    gather_again = 0.0
    reduction = 0.0
    for parameters, resharded, size, stride in (
        (shared, shared - kept, axes.shards, axes.tp),
        (routed, routed, axes.expert_shards, axes.etp * axes.ep),
    ):
        once_more = estimate_collective(hardware, BF16_BYTES * resharded, size, stride)
        gather_again += (gathers - 1) * once_more
        reduce_scatter = estimate_collective(hardware, REDUCED_BYTES * parameters, size, stride)
        if job.stage:
            all_gather += estimate_collective(hardware, BF16_BYTES * parameters, size, stride)
        else:
            all_gather += reduce_scatter  # the second half of an all-reduce of gradients
        shard_bytes = REDUCED_BYTES * parameters / size
        replica_reduce = estimate_collective(hardware, shard_bytes, axes.dp_replicate, size * stride)
        reduction += reduce_scatter + 2 * replica_reduce  # an all-reduce is both halves
    # The first layer's weights and the last layer's gradients have no computation to overlap with.
    edge = 1 / max(1, share.layers)
    exposed_forward = _compute_exposed_seconds(all_gather, seconds[0], edge)
    exposed_backward = _compute_exposed_seconds(reduction + gather_again, seconds[1], edge)
    return exposed_forward + exposed_backward


def _estimate_communication(job: Job, axes: Axes, share: StageShare, tokens: float) -> dict[str, float]:
    """Estimate the communication of one micro-batch over each axis except dp, without overlap.

    Full checkpointing repeats the communication of the forward pass.

    - tp: both halves of a layer all-gather and reduce-scatter the residual stream (Korthikanti et
      al., section 4.2.2).
    - etp: likewise, for the tokens of the rank's experts.
    - cp: keys and values, and their gradients, are all-gathered or passed round a ring (Liu et al.,
      Ring Attention, 2023).
    - ep: all-to-all dispatch and combine (Lepikhin et al., GShard, 2020, section 3). Tokens that
      leave the domain use the rank's own NIC, once for each group of experts if the number of
      groups is limited (DeepSeek-V3, section 3.2.2).
    - pp: activations go to the next stage, and gradients back. Each tp rank sends a shard; the
      receivers all-gather it unless it is sharded over the sequence (Narayanan et al., SC 2021,
      section 4.1).
    """
    model = job.model
    hardware = job.hardware
    passes = 3 if job.checkpointing == "full" else 2
    # A layer of routed experts only has a tp region in attention, not in its feed-forward half.
    expert_halves = 2 if model.shared_experts else 1
    tp_regions = 2 * share.dense_layers + expert_halves * share.expert_layers
    residual_bytes = tokens * model.hidden * BF16_BYTES
    routed_bytes = residual_bytes / axes.tp * model.top_k * axes.etp
    kv_bytes = tokens * count_kv_heads(model, axes.tp) * sum(model.features) * BF16_BYTES * axes.cp
    tp_seconds = estimate_collective(hardware, residual_bytes, axes.tp, 1)
    etp_seconds = estimate_collective(hardware, routed_bytes, axes.etp, 1)
    cp_seconds = estimate_collective(hardware, kv_bytes, axes.cp, axes.tp)
    # The embedding, and the head with the loss, have half a region each, which is not recomputed.
    ends = int(share.rank == 0) + int(share.is_last)
    seconds = {
        "tp": 2 * (passes * tp_regions + ends) * tp_seconds,
        "etp": 2 * passes * share.expert_layers * etp_seconds,
        "cp": (passes + 1) * share.layers * cp_seconds,
        "ep": 0.0,
        "pp": 0.0,
    }
    if axes.ep > 1:
        members = hardware.members(axes.ep, axes.etp)
        groups = model.expert_groups or model.top_k
        network = (axes.ep - members) / axes.ep * min(model.top_k, groups) / hardware.nic_rate
        domain = (members - 1) / axes.ep * model.top_k / hardware.domain_rate
        seconds["ep"] = 2 * passes * share.expert_layers * residual_bytes / axes.tp * max(network, domain)
    if axes.pp > 1:
        pp_stride = axes.world // axes.pp
        send = residual_bytes / axes.tp / hardware.bandwidth(axes.pp, pp_stride)
        if not job.sequence_parallel:
            send += estimate_collective(hardware, residual_bytes, axes.tp, 1)
        seconds["pp"] = send * (2 * job.stages_per_rank)
    return seconds
