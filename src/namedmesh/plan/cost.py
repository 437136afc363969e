"""The cost of a layout: the bytes that a rank needs, and the seconds of a training step; every formula with its source.

``benchmarks/published.py`` compares it with published runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.plan.job import WEIGHTS, Axes, Job, axes_of
from namedmesh.sizes import SharedHeads, stage_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.plan.hardware import Hardware
    from namedmesh.plan.model import Model

# Bytes of a gradient that is accumulated or on its way: torchtitan's reduce_dtype is float32, as Megatron's.
_REDUCED = 4
# Bytes that the loss needs for each logit, by those of a number. Eager, in float32: the logits, their log-softmax, its gradient
# and that of the logits; in bf16 the last three are in float32. Under tensor parallelism torch's loss_parallel was measured: 5
# times the logits in float32, 9 times in bf16; a vocabulary-parallel cross entropy, as Megatron's: 3 and 5 times.
_EAGER, _EAGER_PARALLEL, _MEGATRON = {2: 14, 4: 16}, {2: 18, 4: 20}, {2: 10, 4: 12}
# Each tensor that the backward pass reads is written and read forward; backward it is read, and its gradient is written and
# read. What is computed again is written and read once more.
_FORWARD, _BACKWARD, _AGAIN = 2, 3, 2
# Operations of fused attention's backward pass, in those of its forward: five products for two (Dao, FlashAttention-2, 2023,
# section 3.1). Otherwise two for one, as for any product.
_ATTENTION_BACKWARD = 2.5
# Bytes to cast a number of a product's operand to fp8: torchao finds the largest number first, and reads it twice; Transformer
# Engine scales by the largest of earlier steps.
_CAST = {"torch": 5, "megatron": 3}
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
    """What a pipeline rank has of a model: layers without and with experts, and perhaps the embedding and the head."""

    rank: int
    dense: int
    expert: int
    first: bool
    last: bool


def shares(job: Job, pp: int) -> list[Share]:
    """Return the pipeline ranks that may need the most memory or time: the first, the first of the longest, the last."""
    if ("shares", pp) in job.known:
        found: list[Share] = job.known["shares", pp]
        return found
    layers, stages, each = job.model.layers or 0, pp * job.stages_per_rank, list[Share]()
    for rank in range(min(pp, job.model.layers or 1)):
        indices = range(rank, stages, pp)
        own = [layer for index in indices for layer in stage_range(layers, index, stages)]
        dense = sum(layer < layers - job.model.expert_layers for layer in own)
        each.append(Share(rank, dense, len(own) - dense, rank == 0, stages - 1 in indices))
    longest = max(each, key=lambda share: (share.dense + share.expert, share.expert))
    job.known["shares", pp] = list(dict.fromkeys((each[0], longest, each[-1])))
    return shares(job, pp)


def in_flight(job: Job, pp: int, rank: int, micro_batches: int | None) -> float:
    """Return how many micro-batches a pipeline rank keeps the activations of, of all its layers.

    1F1B keeps one for each rank from here to the end; interleaved with v stages a rank, (2 (p-r-1) + (v-1) p + 1) / v
    (Megatron-LM, ``schedules.py``; for the first rank that is Korthikanti et al., MLSys 2023, section 4.2.3).
    """
    turns, most = job.stages_per_rank, float(pp - rank)
    if turns > 1 and pp > 1:
        most = (2 * (pp - rank - 1) + (turns - 1) * pp + 1) / turns
    return most if micro_batches is None else min(most, micro_batches)


class Parameters(NamedTuple):
    """Parameters on a rank, before ZeRO: those shared over dp and cp, and the routed experts; of a layer, and of the ends."""

    shared: float
    experts: float
    layer: float
    ends: float


def parameters_of(job: Job, axes: Axes, share: Share) -> Parameters:
    """Return the parameters on a pipeline rank, before ZeRO divides them."""
    model, over = job.model, axes.ep * axes.etp
    dense, expert, routed = model.layer
    if model.layers is None:  # spread evenly
        shared = (expert if model.experts else dense) / axes.tp / axes.pp
        return Parameters(shared, routed / over / axes.pp, 0.0, 0.0)
    ends = model.embedding * (share.first + share.last)
    if share.first and share.last and model.tied:
        ends = model.embedding
    whole_heads = 0.0  # where tp does not divide them, a rank keeps the weights of all keys and values
    if model.kv % axes.tp and model.kv_rank is None and model.hidden:
        whole_heads = model.hidden * model.kv * sum(model.features) * (1 - 1 / axes.tp)
    shared = (dense * share.dense + expert * share.expert) / axes.tp
    shared += whole_heads * (share.dense + share.expert) + ends / axes.tp
    layer = dense / axes.tp + whole_heads
    if share.expert:
        layer = expert / axes.tp + whole_heads + routed / over
    return Parameters(shared, routed * share.expert / over, layer, ends / axes.tp)


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
    key = ("layer", axes.tp, axes.etp, experts)
    if key in job.known:
        known: Layer = job.known[key]
        return known
    model, tp = job.model, axes.tp
    hidden, heads = model.hidden or 0, (model.heads or 1) / tp
    stream = hidden / tp if job.sequence_parallel else float(hidden)
    query, value = model.features
    kv = heads if model.kv_rank is not None else kv_heads_on_rank(model, tp)
    latent = (model.q_rank or 0) + model.kv_rank + (model.rope_dim or 0) if model.kv_rank is not None else 0
    copies, gates = (4 if job.is_torch else 3, 2) if model.gated or experts else (2, 1)
    width, moved, router = model.inner / tp, 0.0, 0
    if experts:
        # A rank routes its part of the sequence, 1/tp of it, together with the other etp ranks of its experts.
        width = (model.top_k + (model.shared_experts or 0)) * model.expert_inner / tp
        moved = (2 if job.is_torch else 1) * model.top_k * hidden * axes.etp / tp
        router = 2 * (model.experts or 0)
    normed = 2.0 * hidden if job.is_torch else 2 * stream
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
    found = Layer(read, kept, gates * width + hidden, 2 * hidden + out + width, outputs)
    job.known[key] = found
    return found


def kv_heads_on_rank(model: Model, tp: int) -> float:
    """Return how many kv heads a tensor-parallel rank computes, by ``KeyValueParallel`` where tp does not divide them."""
    if model.kv % tp == 0:
        return model.kv // tp
    return len(SharedHeads(model.heads or model.kv, model.kv, tp).of_rank(0))


def loss_bytes(job: Job, tp: int) -> int:
    """Return the bytes that the loss needs for each logit."""
    if not job.is_torch:
        return _MEGATRON[job.number_bytes]
    if job.fused_loss:
        return 2 * job.number_bytes
    return (_EAGER if tp == 1 else _EAGER_PARALLEL)[job.number_bytes]


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs.

    Args:
        weights: the weights that it keeps.
        gradients: their gradients.
        optimizer: Adam's state, with the weights in float32.
        gathered: what FSDP holds whole for the whole step: embedding and head; in a pipeline, its stages and their gradients.
        activations: what it keeps of all micro-batches in flight for the backward pass.
        loss: copies of the logits of one micro-batch.
        backward: what one layer needs on top in its backward pass: what is computed again, gradients, and the gathered
            weights of two layers.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0
    loss: float = 0.0
    backward: float = 0.0

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All together: what an allocator reserves, as blocks of one phase seldom serve another."""
        return self.states + self.gathered + self.activations + self.loss + self.backward


def estimate_memory(job: Job, sizes: Mapping[str, int]) -> Memory:
    """Estimate the memory of the pipeline rank that needs the most; parts whose sizes are not known are 0.

    States as ZeRO divides them (Rajbhandari et al., SC 2020, section 5): weights at stage 3, gradients at 2, the optimizer at 1.
    What FSDP2 gathers, accumulates and prefetches is read from torch's code.

    Example:
        The example of the ZeRO paper, 7.5 billion parameters over 64 ranks:

        >>> from namedmesh.plan import Model
        >>> estimate_memory(Job(Model(params=7_500_000_000), stage=1), {"dp": 64}).states / 1e9
        31.40625
    """
    job, axes = job.settled, axes_of(sizes)
    return max((_memory(job, axes, share) for share in shares(job, axes.pp)), key=lambda memory: memory.total)


def _memory(job: Job, axes: Axes, share: Share) -> Memory:
    held, states = parameters_of(job, axes, share), [0.0, 0.0, 0.0]  # of weights, gradients, optimizer
    for count, ranks in ((held.shared, axes.shards), (held.experts, axes.expert_shards)):
        for part, stage in enumerate((3, 2, 1)):
            states[part] += job.state_bytes[part] * count / (ranks if (job.stage or 0) >= stage else 1)
    if job.missing not in ([], ["global_batch"]):
        return Memory(states[0], states[1], states[2])
    number, model = job.number_bytes, job.model
    tokens, micro_batches = (job.micro_batch or 1) * (job.seq or 0) / axes.cp, job.micro_batches(axes.dp)
    dense = layer_of(job, axes, experts=False)
    worst = layer_of(job, axes, experts=True) if share.expert else dense
    kept = in_flight(job, axes.pp, share.rank, micro_batches)
    activations = kept * tokens * number * (dense.kept * share.dense + worst.kept * share.expert)
    backward = tokens * number * (worst.read - worst.kept + worst.gradients)
    gathered = 0.0
    if job.stage == WEIGHTS and axes.pp == 1:
        gathered = number * held.ends
        # Three layers, two of them fetched before they are needed.
        backward += (3 * number + _REDUCED) * held.layer + gathered
    elif job.stage == WEIGHTS:
        # In a pipeline weights stay gathered, and gradients are reduced after the last micro-batch.
        whole, accumulates = held.shared + held.experts, micro_batches is None or micro_batches > kept
        gathered = (number + (_REDUCED if accumulates else 0)) * whole
        backward += (number + _REDUCED) * held.layer
    loss = 0.0
    if share.last:
        logits = (model.vocab or 0) / axes.tp * loss_bytes(job, axes.tp)
        loss = tokens * (logits + 2 * number * (model.hidden or 0))
    return Memory(states[0], states[1], states[2], gathered, activations, loss, backward)


def collective(hardware: Hardware, whole: float, size: int, stride: int) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of ``whole`` bytes round a ring of ranks, ``stride`` apart."""
    if size == 1:
        return 0.0
    across = -(-size // hardware.members(size, stride)) - 1
    latency = (size - 1 - across) * _HOP_INSIDE + across * _HOP_ACROSS
    return whole * (size - 1) / size / hardware.bandwidth(size, stride) + latency


@dataclass(frozen=True)
class Step:
    """The seconds of a step by what they go to, the most first.

    Args:
        seconds: by part: matrix products, attention, elementwise kernels, which the memory bounds, bubble, optimizer, and each
            axis as far as it does not hide behind computation.
    """

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())


def estimate_step(job: Job, sizes: Mapping[str, int]) -> Step:
    """Estimate the seconds of a step on the pipeline rank that takes longest.

    - Products: 2 operations for each parameter that a token meets, twice that backward, at the fraction of the peak that large
      ones reach. Attention: 4 s q operations a token and layer, of which a causal mask leaves half. (Narayanan et al., SC 2021,
      appendix.)
    - Elementwise kernels (norms, gates, residuals, loss, casts to fp8) write and read the tensors of :func:`layer_of`.
      With FSDP2 each gathered weight is copied once more, and each gradient before it is reduced.
    - The bubble: (p-1) / v micro-batches (Narayanan et al., section 2.2).
    - Each axis, at the bandwidth of its groups. tp and ep stop the computation, and so does pp unless it is interleaved; cp hides
      behind attention in Megatron's ring, and not at all where keys and values are gathered; weights are gathered behind a
      forward pass and gradients reduced behind a backward pass, but for those of one layer.

    Args:
        job: what is trained, and how; the sizes of the model, ``seq`` and ``global_batch`` are known.
        sizes: the size of each axis; micro-batches divide the global batch.

    Example:
        >>> from namedmesh.plan import Model
        >>> job = Job(Model(layers=32, hidden=4096, heads=32), seq=4096, global_batch=64)
        >>> {part: round(seconds, 2) for part, seconds in estimate_step(job, {"tp": 2, "dp": 4}).seconds.items()}
        {'matmul': 2.19, 'elementwise': 0.56, 'attention': 0.36, 'tp': 0.2, 'dp': 0.15, 'optimizer': 0.01}
    """
    job, axes = job.settled, axes_of(sizes)
    if job.hardware.filled(axes.world) is not job.hardware:
        job = replace(job, hardware=job.hardware.filled(axes.world))
    return max((_step(job, axes, share) for share in shares(job, axes.pp)), key=lambda step: step.total)


def _step(job: Job, axes: Axes, share: Share) -> Step:
    count, tokens = job.micro_batches(axes.dp) or 1, (job.micro_batch or 1) * (job.seq or 0) / axes.cp
    held = parameters_of(job, axes, share)
    work = _computation(job, axes, share, tokens, held)
    # FSDP2 gathers and reduces for each micro-batch, outside of pipelines.
    reduces_each = job.stage == WEIGHTS and axes.pp == 1
    if count > 1 and not reduces_each:
        work["elementwise"][1] += _ACCUMULATED * (held.shared + held.experts) / job.hardware.memory_rate
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
    seconds["elementwise"] += rounds * _copies(job, axes, held, gathers)
    seconds |= {"bubble": idle, "optimizer": _optimizer(job, axes, held)}
    seconds["dp"] = rounds * _data_parallel(job, axes, share, held, work, gathers)
    return Step(
        {part: seconds[part] for part in sorted(seconds, key=lambda part: -seconds[part]) if seconds[part]}
    )


def _exposed(seconds: float, behind: float, edge: float = 0.0) -> float:
    """Return what communication adds to a computation beside it, of which ``edge`` has nothing to hide behind."""
    alone = max(seconds * edge, seconds - behind)
    return alone + _TAKEN * (seconds - alone)


def _computation(
    job: Job, axes: Axes, share: Share, tokens: float, held: Parameters
) -> dict[str, list[float]]:
    """Return the seconds of one micro-batch through the layers of a rank and the head, forward and backward, by part.

    Products of few tokens take as long as their weights take to read, or gradients of weights to write.
    """
    model, hardware, again = job.model, job.hardware, job.again
    dense, expert, routed = model.layer
    met = dense * share.dense + (expert + routed * model.top_k / (model.experts or 1)) * share.expert
    products = 2 * tokens * met / axes.tp / hardware.matmul_rate(job.precision)
    products = max(products, job.number_bytes * (held.shared + held.experts) / hardware.memory_rate)
    head = 2 * tokens * model.embedding / axes.tp / hardware.matmul_rate("bf16") if share.last else 0.0
    scores = (
        tokens
        * (job.seq or 0)
        * (model.heads or 1)
        * sum(model.features)
        / axes.tp
        * (share.dense + share.expert)
    )
    attended = scores / (hardware.peak["bf16"] * hardware.attention)
    recomputed = job.checkpointing == "full" or (job.checkpointing == "selective" and not job.is_torch)
    loss = (model.vocab or 0) / axes.tp * loss_bytes(job, axes.tp) if share.last else 0.0
    moved = [loss, loss]
    for layers, experts in ((share.dense, False), (share.expert, True)):
        if not layers:
            continue
        one, number = layer_of(job, axes, experts=experts), job.number_bytes
        forward = _FORWARD * number * one.read
        backward = number * (_BACKWARD * one.read + _AGAIN * (one.read - one.kept))
        if job.precision == "fp8":
            forward += _CAST[job.trainer] * one.inputs
            backward += _CAST[job.trainer] * ((1 + again) * one.inputs + one.outputs)
        moved = [moved[0] + forward * layers, moved[1] + backward * layers]
    return {
        "matmul": [products + head, products * (2 + again) + 2 * head],
        "attention": [attended, attended * (_ATTENTION_BACKWARD + recomputed)],
        "elementwise": [tokens * each / hardware.memory_rate for each in moved],
    }


def _keys_and_values(model: Model, tp: int) -> float:
    """Return the numbers of keys and values of a token that a rank sends over cp; latent attention has as many heads as queries."""
    heads = (model.heads or 1) / tp if model.kv_rank else kv_heads_on_rank(model, tp)
    return heads * sum(model.features)


def _optimizer(job: Job, axes: Axes, held: Parameters) -> float:
    """Return the seconds of clipping and Adam on the parameters whose state a rank has."""
    own = held.shared + held.experts
    if job.stage:
        own = held.shared / axes.shards + held.experts / axes.expert_shards
    return (_ADAM + _CLIPPED + job.number_bytes) * own / job.hardware.memory_rate


def _copies(job: Job, axes: Axes, held: Parameters, gathers: int) -> float:
    """Return the seconds in which FSDP2 copies weights out of the tensor that it gathers, and gradients into one to reduce.

    Nothing computes meanwhile (torch's ``_fsdp_collectives.py``: ``split_with_sizes_copy`` and ``chunk_cat``).
    """
    if not job.is_torch or job.stage != WEIGHTS:
        return 0.0
    sharded = (held.shared if axes.shards > 1 else 0.0) + (held.experts if axes.expert_shards > 1 else 0.0)
    return ((2 * gathers + 1) * job.number_bytes + _REDUCED) * sharded / job.hardware.memory_rate


def _data_parallel(  # noqa: PLR0917  what it is computed from
    job: Job, axes: Axes, share: Share, held: Parameters, work: dict[str, list[float]], gathers: int
) -> float:
    """Return the seconds of gathers of weights and reductions of gradients that do not hide.

    At stage 0 gradients are all-reduced. From stage 1 on they are reduced and weights gathered (the ZeRO paper, section 7), over
    dp_shard with cp, and for routed experts edp; what each rank has of the gradients is all-reduced over dp_replicate.
    """
    gathered = reduced = 0.0
    groups = ((held.shared, axes.shards, axes.tp), (held.experts, axes.expert_shards, axes.etp * axes.ep))
    for count, size, stride in groups:
        once = collective(job.hardware, _REDUCED * count, size, stride)
        gathered += collective(job.hardware, job.number_bytes * count, size, stride) if job.stage else once
        reduced += once + 2 * collective(
            job.hardware, _REDUCED * count / size, axes.dp_replicate, size * stride
        )
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
    stream = tokens * (model.hidden or 0) * job.number_bytes
    halves = 2 * share.dense + (2 if model.shared_experts else 1) * share.expert
    routed = stream / axes.tp * model.top_k * axes.etp
    whole = tokens * _keys_and_values(model, axes.tp) * job.number_bytes * axes.cp
    found = {
        "tp": 2 * passes * halves * collective(hardware, stream, axes.tp, 1),
        "etp": 2 * passes * share.expert * collective(hardware, routed, axes.etp, 1),
        "cp": (passes + 1) * (share.dense + share.expert) * collective(hardware, whole, axes.cp, axes.tp),
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
