"""What a job costs over some axes: the bytes that a rank needs, the seconds of a training step; every formula with its source."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from namedmesh.plan.model import Axes, Hardware, Job, Model
from namedmesh.sizes import stage_range

_FSDP = 3  # the stage of ZeRO that shards the weights
_NUMBER = 2  # bytes of an activation and of a weight that computes, in bf16
_MASTER = 12  # of Adam's state: the weight and two moments in float32 (Rajbhandari et al., ZeRO, SC 2020, section 3.1)
_REDUCED = 4  # of a gradient that is accumulated or sent: torchtitan's reduce_dtype is float32, as Megatron's
# Of a gradient that is kept: Megatron adds them up in float32 (``accumulate_allreduce_grads_in_fp32``, on with bf16), NVIDIA's recipes
# for it, of NeMo and Megatron Bridge, in bf16 (``grad_reduce_in_fp32 = False`` in scripts/performance).
_GRADIENT = {"torch": 2, "megatron": 4, "bridge": 2}
# Bytes that the loss needs for each logit. Eager, in float32: the log-softmax, its gradient and that of the logits, and the logits
# in bf16. Under tensor parallelism torch's loss_parallel was measured: 9 times the logits; a vocabulary-parallel cross entropy,
# as Megatron's: 5 times. Compiled: the logits and their gradient.
_EAGER, _EAGER_PARALLEL, _MEGATRON, _COMPILED = 14, 18, 10, 4
# A tensor that the backward pass reads is written and read forward; backward it is read, and its gradient written and read.
_FORWARD, _BACKWARD, _AGAIN = 2, 3, 2
# Forwards: five products for two, if it is fused (Dao, FlashAttention-2, 2023, section 3.1).
_ATTENTION_BACKWARD = 2.5
# Bytes to cast a number to fp8: torchao finds the largest first, and reads twice; Transformer Engine knows that of earlier steps.
_CAST = {"torch": 5, "megatron": 3, "bridge": 3}
# Bytes of a parameter where micro-batches accumulate: the gradient is read in bf16, the sum read and written in float32.
_ACCUMULATED = 2 + 4 + 4
# Bytes of a parameter in float32: Adam reads weight, gradient, mean and variance, and writes all but the gradient; clipping
# reads the gradient for its norm, and reads and writes it.
_ADAM, _CLIPPED = 28, 12
# While a collective runs beside the computation it takes its processors: 20 of 132 multiprocessors (DeepSeek-V3, 2024,
# section 3.2.2); 0.15 in Calculon's systems/*.json (Isaev et al., SC 2023).
_TAKEN = 0.15
# Seconds of one hop of a ring over NVLink, and of a hop of a tree over the network: NCCL src/graph/tuning.cc.
_HOP_INSIDE, _HOP_ACROSS = 3.4e-6, 9.6e-6


class Share(NamedTuple):
    """What a pipeline rank has of a model: layers without and with experts, and how many of the matrices at both ends."""

    rank: int
    dense: int
    expert: int
    ends: int
    last: bool

    def parameters(self, model: Model, axes: Axes) -> tuple[float, float]:
        """Return the parameters on a rank before ZeRO divides them: those shared over dp and cp, and the routed experts."""
        dense, expert, routed = model.layer
        shared = dense * self.dense + expert * self.expert + model.embedding * self.ends
        if model.kv % axes.tp and not model.kv_rank:  # then a rank keeps the weights of all keys and values
            keys_and_values = model.hidden * model.kv * sum(model.features)
            shared += (self.dense + self.expert) * keys_and_values * (axes.tp - 1)
        return shared / axes.tp, routed * self.expert / (axes.ep * axes.etp)


@cache
def shares(model: Model, pp: int, turns: int) -> tuple[Share, ...]:
    """Return the pipeline ranks that may need the most memory or time: the first, the first of the longest, the last."""
    each = list[Share]()
    for rank in range(min(pp, model.layers)):
        stages = range(rank, pp * turns, pp)
        own = [layer for stage in stages for layer in stage_range(model.layers, stage, pp * turns)]
        dense = sum(layer < model.layers - model.expert_layers for layer in own)
        ends = 1 if pp == 1 and model.tied else (rank == 0) + (rank == pp - 1)
        each.append(Share(rank, dense, len(own) - dense, ends, rank == pp - 1))
    longest = max(each, key=lambda share: (share.dense + share.expert, share.expert))
    return tuple(dict.fromkeys((each[0], longest, each[-1])))


def in_flight(job: Job, pp: int, rank: int) -> float:
    """Return how many micro-batches a pipeline rank keeps the activations of, of all its layers.

    1F1B keeps one for each rank from here to the end; interleaved with v stages a rank, (2 (p-r-1) + (v-1) p + 1) / v
    (Megatron-LM, ``schedules.py``; for the first rank that is Korthikanti et al., MLSys 2023, section 4.2.3).
    """
    turns = job.stages_per_rank
    return pp - rank if turns == 1 or pp == 1 else (2 * (pp - rank - 1) + (turns - 1) * pp + 1) / turns


class Layer(NamedTuple):
    """Numbers for each token of one layer on a rank."""

    read: float  # by its backward pass
    kept: float  # of these until then
    gradients: float  # in flight in its backward pass
    inputs: float  # of its products
    outputs: float


def layer_of(job: Job, axes: Axes, *, experts: bool) -> Layer:
    """Return the numbers for each token of a layer, tensor by tensor, for width h and, on a rank, q features of queries.

    Korthikanti et al., MLSys 2023, table 2, taken apart: the residual stream before each half, 2 h; the norms' outputs, 2 h (torch
    gathers the sequence for them and keeps that, Megatron gathers again); queries, keys, values and attention's output (torch
    keeps a copy in another order too), with latent attention the latent vectors; of a network of width f 2 f, gated 4 f
    (Megatron's fused gate: 3 f); for each expert of a token its input, and in torch its output, which is weighted afterwards
    (Megatron weights within, ``moe/experts.py``). What is outside of attention and network is divided by tp with sequence
    parallelism only. "Selective" with torch keeps queries, values, and every second product; sums over tp are kept.
    """
    model, tp, hidden = job.model, axes.tp, job.model.hidden
    heads, (query, value) = model.heads / tp, model.features
    stream = hidden / tp if job.sequence_parallel else hidden
    kv = _key_value_heads(model, tp)
    latent = model.q_rank + model.kv_rank + model.rope_dim if model.kv_rank else 0
    copies, gates = (4 if job.is_torch else 3, 2) if model.ffn or experts else (2, 1)
    width, moved, router = model.inner / tp, 0.0, 0
    if experts:
        # A rank routes its part of the sequence, 1/tp of it, together with the other etp ranks of its experts.
        width = (model.top_k + model.shared_experts) * (model.expert_ffn or model.inner) / tp
        moved = (2 if job.is_torch else 1) * model.top_k * hidden * axes.etp / tp
        router = 2 * model.experts
    normed = 2 * hidden if job.is_torch else 2 * stream
    projected, out = heads * query + kv * (query + value), heads * value
    read = 2 * stream + normed + latent + projected + (2 if job.is_torch else 1) * out
    read += copies * width + moved + router
    kept = read
    if job.checkpointing == "full":
        kept = stream
    elif job.checkpointing == "selective" and job.is_torch:
        second = width + (moved if experts else hidden * (gates - 1))
        kept = stream + heads * query + kv * value + out + second + (2 * stream if tp > 1 else 0)
    outputs = 2 * hidden + projected + gates * width
    return Layer(read, kept, gates * width + hidden, 2 * hidden + out + width, outputs)


def _key_value_heads(model: Model, tp: int) -> float:
    return model.heads / tp if model.kv_rank else max(1.0, model.kv / tp)


def _loss_bytes(job: Job, axes: Axes) -> float:
    """Return the bytes that the loss needs for each token."""
    each = _EAGER if axes.tp == 1 else _EAGER_PARALLEL
    if not job.is_torch:
        each = _MEGATRON
    elif job.fused_loss:
        each = _COMPILED
    return job.model.vocab / axes.tp * each


class Memory(NamedTuple):
    """Bytes that one rank needs."""

    weights: float  # that it keeps
    gradients: float
    optimizer: float  # Adam's state, with the weights in float32
    gathered: float  # what FSDP holds whole for the whole step: embedding and head; in a pipeline, its stages and their gradients
    activations: float  # of all micro-batches in flight, for the backward pass
    loss: float  # copies of the logits of one micro-batch
    backward: float  # what one layer needs on top: what is computed again, gradients, and the gathered weights of two layers

    @property
    def total(self) -> float:
        """All together: what an allocator reserves, as blocks of one phase seldom serve another."""
        return sum(self)


def estimate_memory(job: Job, axes: Axes) -> Memory:
    """Estimate the memory of the pipeline rank that needs the most; ``layers``, ``hidden`` and ``heads`` of the model are known.

    States as ZeRO divides them (Rajbhandari et al., SC 2020, section 5): weights at stage 3, gradients at 2, the optimizer at 1.
    What FSDP2 gathers, accumulates and prefetches is read from torch's code.
    """
    each = [_memory(job, axes, share) for share in shares(job.model, axes.pp, job.stages_per_rank)]
    return max(each, key=lambda memory: memory.total)


def _memory(job: Job, axes: Axes, share: Share) -> Memory:
    shared, routed = share.parameters(job.model, axes)
    states = []  # of weights, gradients, optimizer
    for each, stage in ((_NUMBER, 3), (_GRADIENT[job.trainer], 2), (_MASTER, 1)):
        divided = (job.stage or 0) >= stage
        ranks, expert_ranks = (axes.shards, axes.expert_shards) if divided else (1, 1)
        states.append(each * (shared / ranks + routed / expert_ranks))
    tokens, micro_batches = (job.micro_batch or 1) * job.seq / axes.cp, job.micro_batches(axes.dp)
    dense = layer_of(job, axes, experts=False)
    worst = layer_of(job, axes, experts=True) if share.expert else dense
    most = in_flight(job, axes.pp, share.rank)
    kept = min(most, micro_batches or most)
    activations = kept * tokens * _NUMBER * (dense.kept * share.dense + worst.kept * share.expert)
    backward = tokens * _NUMBER * (worst.read - worst.kept + worst.gradients)
    gathered = 0.0
    if job.stage == _FSDP:
        one = share._replace(dense=int(not share.expert), expert=int(share.expert > 0), ends=0)
        layer = sum(one.parameters(job.model, axes))
        if axes.pp == 1:
            gathered = _NUMBER * job.model.embedding * share.ends / axes.tp
            # Three layers, two of them fetched before they are needed.
            backward += (3 * _NUMBER + _REDUCED) * layer + gathered
        else:
            # In a pipeline weights stay gathered, and gradients are reduced after the last micro-batch.
            accumulated = _REDUCED if not micro_batches or micro_batches > kept else 0
            gathered = (_NUMBER + accumulated) * (shared + routed)
            backward += (_NUMBER + _REDUCED) * layer
    loss = tokens * (_loss_bytes(job, axes) + 2 * _NUMBER * job.model.hidden) if share.last else 0.0
    weights, gradients, optimizer = states
    return Memory(weights, gradients, optimizer, gathered, activations, loss, backward)


def collective(hardware: Hardware, whole: float, size: int, stride: int) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of ``whole`` bytes round a ring of ranks, ``stride`` apart."""
    if size == 1:
        return 0.0
    across = -(-size // hardware.members(size, stride)) - 1
    latency = (size - 1 - across) * _HOP_INSIDE + across * _HOP_ACROSS
    return whole * (size - 1) / size / hardware.bandwidth(size, stride) + latency


def estimate_step(job: Job, axes: Axes) -> dict[str, float]:
    """Estimate the seconds of a step on the pipeline rank that takes longest, by what they go to, the most first.

    - Products: 2 operations for each parameter that a token meets, twice that backward, at the rate of large ones. Attention:
      4 s q operations a token and layer, of which a causal mask leaves half. (Narayanan et al., SC 2021, appendix.)
    - Elementwise kernels (norms, gates, residuals, loss, casts to fp8) write and read the tensors of :func:`layer_of`.
      With FSDP2 each gathered weight is copied once more, and each gradient before it is reduced.
    - The bubble: (p-1) / v micro-batches (Narayanan et al., section 2.2).
    - Each axis, at the bandwidth of its groups. tp and ep stop the computation, and so does pp unless it is interleaved; cp hides
      behind attention in Megatron's ring, and not at all where keys and values are gathered; weights are gathered behind a
      forward pass and gradients reduced behind a backward pass, but for those of one layer.
    """
    job = replace(job, hardware=job.hardware.filled(axes.world))
    each = [_step(job, axes, share) for share in shares(job.model, axes.pp, job.stages_per_rank)]
    return max(each, key=lambda seconds: sum(seconds.values()))


def _step(job: Job, axes: Axes, share: Share) -> dict[str, float]:
    count, tokens = job.micro_batches(axes.dp) or 1, (job.micro_batch or 1) * job.seq / axes.cp
    (shared, routed), rate = share.parameters(job.model, axes), job.hardware.memory_rate
    work = _computation(job, axes, share, tokens)
    # FSDP2 gathers and reduces for each micro-batch, outside of pipelines.
    reduces_each = job.stage == _FSDP and axes.pp == 1
    if count > 1 and not reduces_each:
        work["elementwise"][1] += _ACCUMULATED * (shared + routed) / rate
    waits = _traffic(job, axes, share, tokens)
    seconds = {part: sum(both) for part, both in work.items()}
    if not job.is_torch:
        waits["cp"] = _exposed(waits["cp"], seconds["attention"])
    if job.stages_per_rank > 1:
        waits["pp"] = _exposed(waits["pp"], sum(seconds.values()))
    seconds |= waits
    idle = (axes.pp - 1) / job.stages_per_rank * sum(seconds.values())
    seconds = {part: one * count for part, one in seconds.items()}
    rounds, gathers = (count, 2) if reduces_each else (1, 1)
    if job.is_torch and job.stage == _FSDP:
        # Weights are copied out of the tensor that is gathered, and gradients into one to reduce, while nothing computes
        # (torch's _fsdp_collectives.py: split_with_sizes_copy and chunk_cat).
        sharded = shared * (axes.shards > 1) + routed * (axes.expert_shards > 1)
        seconds["elementwise"] += rounds * ((2 * gathers + 1) * _NUMBER + _REDUCED) * sharded / rate
    own = shared / axes.shards + routed / axes.expert_shards if job.stage else shared + routed
    seconds |= {"bubble": idle, "optimizer": (_ADAM + _CLIPPED + _NUMBER) * own / rate}
    seconds["dp"] = rounds * _data_parallel(job, axes, share, work, gathers)
    return {part: time for part, time in sorted(seconds.items(), key=lambda each: -each[1]) if time}


def _exposed(seconds: float, behind: float, edge: float = 0.0) -> float:
    """Return what communication adds to a computation beside it, of which ``edge`` has nothing to hide behind."""
    alone = max(seconds * edge, seconds - behind)
    return alone + _TAKEN * (seconds - alone)


def _computation(job: Job, axes: Axes, share: Share, tokens: float) -> dict[str, list[float]]:
    """Return the seconds of one micro-batch through the layers of a rank and the head, forward and backward, by part.

    Products of few tokens take as long as their weights take to read, or gradients of weights to write.
    """
    model, hardware = job.model, job.hardware
    full, selective = job.checkpointing == "full", job.checkpointing == "selective"
    dense, expert, routed = model.layer
    rate = {precision: hardware.peak[precision] * hardware.matmul[precision] for precision in hardware.peak}
    met = dense * share.dense + (expert + routed * model.top_k / (model.experts or 1)) * share.expert
    products = 2 * tokens * met / axes.tp / rate[job.precision]
    products = max(products, _NUMBER * sum(share.parameters(model, axes)) / hardware.memory_rate)
    again = 1.0 if full else 0.0  # the part of the products that is repeated
    if selective and job.is_torch:
        again = 0.5
    head = 2 * tokens * model.embedding / axes.tp / rate["bf16"] if share.last else 0.0
    scores = tokens * job.seq * model.heads * sum(model.features) / axes.tp * (share.dense + share.expert)
    attended = scores / (hardware.peak["bf16"] * hardware.attention)
    attended_again = full or (selective and not job.is_torch)
    forward = backward = _loss_bytes(job, axes) if share.last else 0.0
    for layers, experts in ((share.dense, False), (share.expert, True)):
        one = layer_of(job, axes, experts=experts)
        forward += layers * _FORWARD * _NUMBER * one.read
        backward += layers * _NUMBER * (_BACKWARD * one.read + _AGAIN * (one.read - one.kept))
        if job.precision == "fp8":
            forward += layers * _CAST[job.trainer] * one.inputs
            backward += layers * _CAST[job.trainer] * ((1 + again) * one.inputs + one.outputs)
    return {
        "matmul": [products + head, products * (2 + again) + 2 * head],
        "attention": [attended, attended * (_ATTENTION_BACKWARD + attended_again)],
        "elementwise": [tokens * forward / hardware.memory_rate, tokens * backward / hardware.memory_rate],
    }


def _data_parallel(job: Job, axes: Axes, share: Share, work: dict[str, list[float]], gathers: int) -> float:
    """Return the seconds of gathers of weights and reductions of gradients that do not hide.

    At stage 0 gradients are all-reduced. From stage 1 on they are reduced and weights gathered (the ZeRO paper, section 7), over
    dp_shard with cp, and for routed experts edp; what each rank has of the gradients is all-reduced over dp_replicate.
    """
    gathered = reduced = 0.0
    shared, routed = share.parameters(job.model, axes)
    groups = ((shared, axes.shards, axes.tp), (routed, axes.expert_shards, axes.etp * axes.ep))
    for count, size, stride in groups:
        once = collective(job.hardware, _REDUCED * count, size, stride)
        gathered += collective(job.hardware, _NUMBER * count, size, stride) if job.stage else once
        copies = collective(job.hardware, _REDUCED * count / size, axes.dp_replicate, size * stride)
        reduced += once + 2 * copies
    forward, backward = (sum(each) for each in zip(*work.values(), strict=True))
    # The first layer's weights, and the last layer's gradients, have nothing to hide behind.
    edge = 1 / max(1, share.dense + share.expert)
    return _exposed(gathered, forward, edge) + _exposed(reduced + gathered * (gathers - 1), backward, edge)


def _traffic(job: Job, axes: Axes, share: Share, tokens: float) -> dict[str, float]:
    """Return the seconds of a micro-batch's traffic over each axis but dp, alone; what is computed again is sent again.

    - tp: each half of a layer gathers or reduces the residual stream at both ends (Korthikanti et al., section 4.2.2).
    - etp: likewise, with the tokens of the rank's experts.
    - cp: keys and values, and their gradients, gathered or round a ring (Liu et al., Ring Attention, 2023).
    - ep: tokens go to their experts and back (Lepikhin et al., GShard, 2020, section 3). What leaves the domain goes through the
      rank's own NIC, once for each group of experts where their number is limited (DeepSeek-V3, section 3.2.2).
    - pp: activations go to the next stage, and their gradients back; the tensor-parallel ranks send a part each, and gather the
      whole where it is not sharded over the sequence (Narayanan et al., SC 2021, section 4.1).
    """
    model, hardware, passes = job.model, job.hardware, 3 if job.checkpointing == "full" else 2
    stream, layers = tokens * model.hidden * _NUMBER, share.dense + share.expert
    halves = 2 * share.dense + (2 if model.shared_experts else 1) * share.expert
    routed = stream / axes.tp * model.top_k * axes.etp
    whole = tokens * _key_value_heads(model, axes.tp) * sum(model.features) * _NUMBER * axes.cp
    found = {
        "tp": 2 * passes * halves * collective(hardware, stream, axes.tp, 1),
        "etp": 2 * passes * share.expert * collective(hardware, routed, axes.etp, 1),
        "cp": (passes + 1) * layers * collective(hardware, whole, axes.cp, axes.tp),
        "ep": 0.0,
        "pp": 0.0,
    }
    if axes.ep > 1:
        members, groups = hardware.members(axes.ep, axes.etp), model.expert_groups or model.top_k
        outside = (axes.ep - members) / axes.ep * min(model.top_k, groups) / hardware.nic_rate
        inside = (members - 1) / axes.ep * model.top_k / hardware.domain_rate
        found["ep"] = 2 * passes * share.expert * stream / axes.tp * max(outside, inside)
    if axes.pp > 1:
        found["pp"] = stream / axes.tp / hardware.bandwidth(axes.pp, axes.world // axes.pp)
        if not job.sequence_parallel:
            found["pp"] += collective(hardware, stream, axes.tp, 1)
        found["pp"] *= 2 * job.stages_per_rank
    return found
