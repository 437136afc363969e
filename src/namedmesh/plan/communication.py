"""What a rank sends in a step over each axis, how long that takes, and what it may hide behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.plan.job import Axes, Job, Share, kv_heads_on_rank

if TYPE_CHECKING:
    from namedmesh.plan.hardware import Hardware
    from namedmesh.plan.memory import Parameters

REDUCED = 4
"""Bytes of a gradient on its way: torchtitan and Megatron reduce in float32."""
# Seconds of one hop of a ring, NVLink and network, and of a hop of a tree over the network: NCCL src/graph/tuning.cc.
_HOP_INSIDE, _HOP_ACROSS = 3.4e-6, 9.6e-6


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank sends over an axis for one micro-batch, or for a step, and the seconds it takes alone."""

    sent: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.seconds + other.seconds)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.sent * times, self.seconds * times)


def collective(hardware: Hardware, whole: float, size: int, stride: int) -> Traffic:
    """Return an all-gather or a reduce-scatter of ``whole`` bytes round a ring of ``size`` ranks, ``stride`` apart."""
    if size == 1:
        return Traffic()
    sent = whole * (size - 1) / size
    across = -(-size // hardware.members(size, stride)) - 1
    latency = (size - 1 - across) * _HOP_INSIDE + across * _HOP_ACROSS
    return Traffic(sent, sent / hardware.bandwidth(size, stride) + latency)


def tensor_parallel(job: Job, axes: Axes, share: Share, tokens: float) -> tuple[Traffic, Traffic]:
    """Return the traffic of a micro-batch over tp and over etp.

    Each half of a layer gathers or reduces the residual stream at both ends, forward and backward: an all-gather and a
    reduce-scatter with sequence parallelism, an all-reduce without (Korthikanti et al., section 4.2.2); once more where the
    layer is computed again. Routed experts do that over etp, with their own tokens.
    """
    model = job.model
    passes = 3 if job.checkpointing == "full" else 2
    stream = tokens * (model.hidden or 0) * job.number_bytes
    halves = 2 * share.dense + (2 if model.shared_experts else 1) * share.expert
    tp = collective(job.hardware, stream, axes.tp, 1) * (2 * passes * halves)
    routed = stream / axes.tp * model.top_k * axes.etp
    etp = collective(job.hardware, routed, axes.etp, 1) * (2 * passes * share.expert)
    return tp, etp


def context_parallel(job: Job, axes: Axes, share: Share, tokens: float) -> tuple[Traffic, Traffic]:
    """Return the traffic of a micro-batch over cp: of keys and values, forward and backward, and of their gradients.

    They are gathered, and gradients exchanged, or both go round a ring (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise
    Transformers", 2023). torch's ``context_parallel`` gathers them all, and sends gradients of float32 round a ring, with a hop
    more; torchtitan's Llama repeats the heads of keys and values for all its queries before (its ``repeat_kv``). Latent
    attention has as many heads as queries.
    """
    if axes.cp == 1:
        return Traffic(), Traffic()
    query, value, _ = job.model.features
    heads = float(kv_heads_on_rank(job.model, axes.tp))
    is_torchs = job.keys_over_cp == "torch"
    if job.model.kv_rank or is_torchs:
        heads = (job.model.heads or 1) / axes.tp
    whole = tokens * heads * (query + value) * job.number_bytes * axes.cp
    once = collective(job.hardware, whole, axes.cp, axes.tp) * share.layers
    passes = 3 if job.checkpointing == "full" else 2
    gradients = once * (4 / job.number_bytes * axes.cp / (axes.cp - 1)) if is_torchs else once
    return once * passes, gradients


def expert_parallel(job: Job, axes: Axes, share: Share, tokens: float) -> Traffic:
    """Return the traffic of a micro-batch over ep: tokens go to their experts and back, forward and backward.

    Source: Lepikhin et al., "GShard", 2020, section 3. What leaves the domain goes through the rank's own NIC, once for
    each group of experts where their number is limited (DeepSeek-V3, section 3.2.2); the rest over the fast links, meanwhile.
    """
    if axes.ep == 1 or not share.expert:
        return Traffic()
    model, hardware = job.model, job.hardware
    members = hardware.members(axes.ep, axes.etp)
    one = tokens / axes.tp * (model.hidden or 0) * job.number_bytes
    outside = (axes.ep - members) / axes.ep * one * min(model.top_k, model.expert_groups or model.top_k)
    inside = (members - 1) / axes.ep * one * model.top_k
    seconds = max(outside / hardware.nic_rate, inside / hardware.domain_rate)
    passes = 3 if job.checkpointing == "full" else 2
    return Traffic(outside + inside, seconds) * (2 * passes * share.expert)


def pipeline_parallel(job: Job, axes: Axes, tokens: float) -> Traffic:
    """Return the traffic of a micro-batch over pp: activations go to the next stage, and their gradients back.

    The tensor-parallel ranks send a part each, and gather the whole where it is not sharded over the sequence (Narayanan et
    al., SC 2021, section 4.1).
    """
    if axes.pp == 1:
        return Traffic()
    whole = tokens * (job.model.hidden or 0) * job.number_bytes
    bandwidth = job.hardware.bandwidth(axes.pp, axes.tp * axes.data)
    once = Traffic(whole / axes.tp, whole / axes.tp / bandwidth)
    if not job.sequence_parallel:
        once += collective(job.hardware, whole, axes.tp, 1)
    return once * (2 * job.stages_per_rank)


def data_parallel(job: Job, axes: Axes, held: Parameters) -> tuple[Traffic, Traffic]:
    """Return the gathers of weights, and the reductions of gradients, over the ranks that have the same ones.

    At stage 0 gradients are all-reduced: reduced and gathered. From stage 1 on weights are gathered, in bf16; source: the
    ZeRO paper, section 7. The axes are dp with cp, and for routed experts edp.
    """
    gather = reduce = Traffic()
    groups = ((held.shared, axes.data, axes.tp), (held.experts, axes.edp, axes.etp * axes.ep))
    for count, size, stride in groups:
        reduced = collective(job.hardware, REDUCED * count, size, stride)
        reduce += reduced
        gather += collective(job.hardware, job.number_bytes * count, size, stride) if job.stage else reduced
    return gather, reduce
