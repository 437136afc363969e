"""Estimate the bytes that one rank needs, part by part: states, gathered weights, activations, loss, backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.plan.job import Axes, Job, Share, axes_of, in_flight, kv_heads_on_rank, shares

if TYPE_CHECKING:
    from collections.abc import Mapping

REDUCED = 4
"""Bytes of a gradient that is accumulated or on its way: torchtitan's ``reduce_dtype`` is float32, as Megatron's."""
_FP8, _FP12 = 1.0, 1.5
_PREFETCHED = 2  # FSDP2 gathers the next layer while one computes
# Bytes that the loss needs for each logit. Eager, in float32: the logits, their log-softmax, its gradient and that of the
# logits; in bf16 the last three are in float32 (torch's cross_entropy of logits.float(), whose copy is gone by then). Fused:
# the logits and their gradient. Under tensor parallelism torch's loss_parallel was measured: 5 times the logits in float32, 9
# times in bf16; an explicit vocabulary-parallel cross entropy, as Megatron's: 3 and 5 times.
_EAGER, _EAGER_PARALLEL, _EXPLICIT = {2: 14, 4: 16}, {2: 18, 4: 20}, {2: 10, 4: 12}


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs.

    Args:
        weights: the weights that it keeps.
        gradients: their gradients.
        optimizer: Adam's state, with the weights in float32.
        gathered: what a sharded rank holds whole for the whole step: embedding and head; in a pipeline, its stages and
            their gradients.
        activations: what it keeps of all micro-batches in flight for the backward pass.
        loss: copies of the logits.
        merged: the logits of all micro-batches in one tensor, which torch's pipelines return at the end.
        backward: what one layer needs on top in its backward pass: what is computed again, gradients, and the gathered
            weights of two layers.
        rank: which pipeline rank it is.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0
    loss: float = 0.0
    backward: float = 0.0
    merged: float = 0.0
    rank: int = 0

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All together: what an allocator reserves, as blocks of one phase seldom serve another."""
        return self.allocated + min(self.loss, self.backward) + self.merged

    @property
    def allocated(self) -> float:
        """The most that is allocated at a time: the loss is done before the first layer's backward, and all before merging."""
        return self.states + self.gathered + self.activations + max(self.loss, self.backward)


class Saved(NamedTuple):
    """Bytes for each token of a layer: all that its backward pass reads, what is kept of it, and what is in flight there."""

    all: float
    kept: float
    gradients: float


def estimate_memory(job: Job, sizes: Mapping[str, int]) -> Memory:
    """Estimate the memory of the pipeline rank that needs the most.

    States follow Rajbhandari et al., "ZeRO", SC 2020, sections 3.1 and 5: of P parameters on a rank, 2 P bytes of weights
    (divided over the data-parallel ranks at stage 3), 2 P or 4 P of gradients (at 2), 12 P of optimizer state (at 1).
    In float32, 4, 4 and 8. Activations follow Korthikanti et al., "Reducing Activation Recomputation", MLSys 2023, table 2, taken apart tensor by
    tensor; :func:`saved` lists them. What torch's FSDP2 gathers, accumulates and prefetches, and what its pipelines keep
    (the logits of all micro-batches, and once more all of them when they are merged), is read from torch's code.
    ``benchmarks/memory.py`` and ``benchmarks/published.py`` compare it with measurements.

    Args:
        job: what is trained, and how.
        sizes: the size of each axis.

    Returns:
        Bytes; parts whose sizes are not known are 0.

    Example:
        The example of the ZeRO paper, 7.5 billion parameters over 64 ranks:

        >>> from namedmesh.plan.model import Model
        >>> job = Job(Model(params=7_500_000_000), stage=1)
        >>> estimate_memory(job, {"dp": 64}).states / 1e9
        31.40625
    """
    axes = axes_of(sizes)
    micro_batches = job.micro_batches(axes.dp)
    each = [memory_of_share(job, axes, share, micro_batches) for share in shares(job, axes.pp)]
    return max(each, key=lambda memory: memory.total)


class Parameters(NamedTuple):
    """Parameters on a rank: those shared over dp and cp, and the routed experts; of all its layers, and of one."""

    shared: float
    experts: float
    layer: float
    expert_layer: float
    ends: float


def parameters_of(job: Job, axes: Axes, share: Share) -> Parameters:
    """Return the parameters on a pipeline rank, before ZeRO divides them."""
    model = job.model
    dense, expert, routed = model.layer
    over = axes.ep * axes.etp
    ends = model.embedding * ((1 if share.first else 0) + (1 if share.last else 0))
    if share.first and share.last and model.tied:
        ends = model.embedding
    if not model.layers:  # spread evenly
        shared = (dense if not model.experts else expert) / axes.tp / axes.pp
        return Parameters(shared, routed / over / axes.pp, 0.0, 0.0, 0.0)
    whole_heads = _replicated(job, axes)
    shared = (dense * share.dense + expert * share.expert) / axes.tp + whole_heads * share.layers
    one = (expert if share.expert else dense) / axes.tp + whole_heads
    return Parameters(
        shared + ends / axes.tp,
        routed * share.expert / over,
        one,
        routed / over if share.expert else 0.0,
        ends / axes.tp,
    )


def _replicated(job: Job, axes: Axes) -> float:
    """Return the weights of keys and values that a rank has beyond its part: all, where tp does not divide the heads."""
    model = job.model
    if model.kv % axes.tp == 0 or model.kv_rank is not None or not model.hidden:
        return 0.0
    query, value, _ = model.features
    return model.hidden * model.kv * (query + value) * (1 - 1 / axes.tp)


def memory_of_share(job: Job, axes: Axes, share: Share, micro_batches: int | None) -> Memory:
    """Return the memory of one pipeline rank."""
    held = parameters_of(job, axes, share)
    states = _states(job, held, axes)
    if not job.sized:
        return Memory(*states, rank=share.rank)
    tokens = job.micro_batch * (job.seq or 0) / axes.cp
    dense = saved(job, axes, experts=False)
    expert = saved(job, axes, experts=True) if share.expert else dense
    kept = in_flight(job, axes.pp, share.rank, micro_batches)
    activations = kept * tokens * (dense.kept * share.dense + expert.kept * share.expert)
    worst = expert if share.expert else dense
    backward = tokens * (worst.all - worst.kept + worst.gradients)
    gathered = 0.0
    if job.gathers:
        accumulates = micro_batches is None or micro_batches > kept
        gathered, layer = _gathered(job, held, axes.pp, accumulates=accumulates)
        backward += layer
    loss, merged = _loss(job, axes, tokens, micro_batches) if share.last else (0.0, 0.0)
    return Memory(*states, gathered, activations, loss, backward, merged, share.rank)


def _states(job: Job, held: Parameters, axes: Axes) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer, after ZeRO."""
    sharded = [0.0, 0.0, 0.0]
    for count, ranks in ((held.shared, axes.data), (held.experts, axes.edp)):
        for part, stage in enumerate((3, 2, 1)):
            sharded[part] += count / (ranks if job.stage >= stage else 1)
    weights, gradients, optimizer = sharded
    if job.precision == "fp32":  # no second copy of the weights
        return 4 * weights, 4 * gradients, 8 * optimizer
    return 2 * weights, job.gradient_bytes * gradients, job.optimizer_bytes * optimizer


def _gathered(job: Job, held: Parameters, pp: int, *, accumulates: bool) -> tuple[float, float]:
    """Return the bytes that FSDP2 holds whole all the step, and those of a layer in its backward pass.

    Gradients accumulate beside the most activations where a forward follows the first backward.
    """
    number, layer = job.number_bytes, held.layer + held.expert_layer
    reduced = REDUCED * layer
    if pp == 1:
        return number * held.ends, (_PREFETCHED + 1) * number * layer + reduced + number * held.ends
    # In a pipeline weights stay gathered, and gradients are reduced after the last micro-batch.
    whole = held.shared + held.experts
    accumulated = REDUCED * whole if accumulates else 0.0
    return number * whole + accumulated, number * layer + reduced


def saved(job: Job, axes: Axes, *, experts: bool) -> Saved:
    """Return the bytes for each token of a layer.

    In numbers, for width h, q features of queries on the rank, k of keys and v of values, f of the feed-forward network:

    - the residual stream before each half, 2 h; the norms' outputs, 2 h (torch gathers the sequence for them and keeps
      that; Megatron gathers again); unfused norms 2 h more;
    - attention: q + k + v, its output q (torch keeps a copy in another order too), with MLA also the latent vectors;
      unfused, 5 bytes for each score;
    - feed-forward: 2 f, gated 4 f (Megatron's fused gate: 3 f); for each expert of a token also its input, and in torch its
      output, which is weighted afterwards (Megatron weights within, ``moe/experts.py``);
    - two masks of dropout, a byte each.

    Sizes on a rank are divided by tp; what is outside of attention and feed-forward network is divided too with sequence
    parallelism.
    """
    return _saved(job, axes._replace(pp=1, dp=1, ep=1), experts)  # many layouts share the others


@lru_cache(maxsize=4096)
def _saved(job: Job, axes: Axes, experts: bool) -> Saved:
    model, tp, number = job.model, axes.tp, job.number_bytes
    hidden, heads = model.hidden or 0, model.heads or 1
    stream = hidden / tp if job.sequence_parallel else float(hidden)
    query, value, output = model.features
    kv = kv_heads_on_rank(model, tp)
    queries, keys_values = heads * query / tp, float(kv * (query + value))
    latent = 0
    if model.kv_rank is not None:
        keys_values = heads * (query + value) / tp
        latent = (model.q_rank or 0) + model.kv_rank + (model.rope_dim or 0)
    out = heads * output / tp
    inner = feed_forward(job, axes, experts=experts)
    normed = 2.0 * hidden if job.is_torch else 2 * stream
    every = (
        2 * stream + normed + latent + queries + keys_values + (2 if job.is_torch else 1) * out + inner.all
    )
    every += 0 if job.fused_norms else 2 * stream
    scores = 0.0 if job.fused_attention else 5 * heads * (job.seq or 0) / axes.cp / tp
    masks = 2 * stream if job.dropout else 0.0
    whole = number * every + scores + masks
    again = scores
    if "layernorm" in job.recompute:
        again += number * normed
        normed = 0.0
    if "mla_up_proj" in job.recompute and model.kv_rank is not None:
        again += number * (queries + keys_values)
    if "moe_act" in job.recompute and experts:
        again += number * inner.width
        inner = inner._replace(inputs=inner.inputs - inner.width)
    if job.fp8_inputs:
        again += (number - _FP8) * (normed + inner.inputs) + (number - _FP12) * out
    kept = {
        "none": whole,
        "selective": whole - again,
        # Every second product: queries, values and, of the feed-forward network, those that follow; sums over tp are kept.
        "op": number * (stream + queries + kv * value + out + inner.op + (2 * stream if tp > 1 else 0)),
        "full": number * stream,
    }[job.checkpointing]
    return Saved(whole, kept, number * (inner.gradients + hidden))


class Inner(NamedTuple):
    """Numbers for each token of a feed-forward network."""

    all: float  # what its backward pass reads
    op: float  # what of it the policy "op" keeps
    gradients: float  # those in flight
    width: float  # the inner width on the rank, of all experts of a token
    inputs: float  # what of ``all`` products and gates read


def feed_forward(job: Job, axes: Axes, *, experts: bool) -> Inner:
    """Return the numbers for each token of the feed-forward network of a layer."""
    model = job.model
    hidden = model.hidden or 0
    gated = model.gated or experts
    copies, gates = (4 if job.is_torch else 3, 2) if gated else (2, 1)
    if not experts:
        width = model.inner / axes.tp
        op = width + (hidden if gated else 0)
        return Inner(copies * width, op, gates * width, width, copies * width)
    # A rank routes its part of the sequence, 1/tp of it, together with the other etp ranks of its experts.
    width = (model.top_k + (model.shared_experts or 0)) * model.expert_inner / axes.tp
    moved = (2 if job.is_torch else 1) * model.top_k * hidden * axes.etp / axes.tp
    router = 2 * (model.experts or 0)  # in float32
    inputs = copies * width + moved
    return Inner(inputs + router, width + moved, gates * width, width, inputs)


def loss_bytes(job: Job, tp: int) -> int:
    """Return the bytes that the loss needs for each logit."""
    if not job.is_torch:
        return _EXPLICIT[job.number_bytes]
    if job.fused_loss:
        return 2 * job.number_bytes
    return (_EAGER if tp == 1 else _EAGER_PARALLEL)[job.number_bytes]


def _loss(job: Job, axes: Axes, tokens: float, micro_batches: int | None) -> tuple[float, float]:
    """Return the bytes of the head's input, the logits and their copies on the last pipeline rank; and those merged."""
    logits = tokens * (job.model.vocab or 0) / axes.tp
    needed = logits * loss_bytes(job, axes.tp) + 2 * tokens * job.number_bytes * (job.model.hidden or 0)
    if axes.pp == 1 or not job.is_torch:
        return needed, 0.0
    # torch's pipelines keep the logits of every micro-batch, one of which is counted above.
    outputs = (micro_batches or axes.pp) * logits * job.number_bytes
    return needed + outputs - logits * job.number_bytes, outputs
