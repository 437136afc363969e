"""Estimate the seconds of a training step, by what they go to, and what a rank sends over each axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.plan.job import Axes, Job, Share, axes_of, bubble, kv_heads_on_rank, shares
from namedmesh.plan.memory import REDUCED, Parameters, feed_forward, loss_bytes, parameters_of, saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.plan.hardware import Hardware

# Seconds of one hop of a ring, NVLink and network, and of a hop of a tree over the network: NCCL src/graph/tuning.cc.
_HOP_INSIDE, _HOP_ACROSS = 3.4e-6, 9.6e-6
# Operations of fused attention's backward pass, in those of its forward: five products for two (Dao, FlashAttention-2,
# 2023, section 3.1). Otherwise two for one, as for any product.
_FUSED_BACKWARD = 2.5
# Bytes of a parameter where micro-batches accumulate: the gradient is read in bf16, the sum read and written in float32
# (Megatron's main_grad; FSDP2's accumulated gradients under a float32 reduce_dtype).
_ACCUMULATED = 2 + 4 + 4
# While a collective runs beside the computation it takes its processors: 20 of 132 multiprocessors (DeepSeek-V3, 2024,
# section 3.2.2); 0.15 in Calculon's systems/*.json (Isaev et al., SC 2023).
_TAKEN = 0.15
# Bytes of a parameter in float32: Adam reads weight, gradient, mean and variance, and writes all but the gradient; torch's
# own in eager mode has a kernel for each of its eight operations (torch/optim/adam.py, foreach). Clipping reads the
# gradient for its norm, and reads and writes it.
_ADAM, _EAGER_ADAM, _CLIPPED = 28, 84, 12


# Each tensor that the backward pass reads is written and read forward; backward it is read, and its gradient is written
# and read. What is computed again is written and read once more.
_FORWARD, _BACKWARD, _AGAIN = 2, 3, 2
# What eager torch reads and writes beyond that, in bytes for each number in bf16, forward and backward: one kernel for each
# operation of autograd, whose results a compiler keeps on the chip.
_SUM = (2, 4)  # the residual stream, written before the norm reads it; and its gradient
_INPUTS = 12  # gradients of one input of queries, keys and values, and of one of gate and up: three sums
_NORM = (32, 66)  # RMSNorm: casts, power, mean, two products, in float32; LayerNorm is one kernel
_ROTARY = (16, 16)  # cast to float32, product of complex numbers, cast back
_GATE = (4, 8)  # silu's result; and its gradient
# Bytes to cast a number of a product's operand to fp8: torchao finds the largest number first, and reads it twice;
# Transformer Engine scales by the largest of earlier steps.
_CAST = {"torch": 5, "megatron": 3}
# Attention over cp by torch (distributed/tensor/experimental/_attention.py), bytes for each feature of the queries, for each
# chunk but the first: keys and values are copied (8), and the chunk's output is merged in float32 (32 on average); backward
# they are copied (8), gradients of queries (12), keys and values (23) are summed in float32, and the latter copied (16).
_MERGE = (40, 59)
# By namedmesh.training.context_attention on GPUs, how often each number of all ranks' keys and values is read or written beside
# attention. Eager: they are copied behind each other, and into the order of the sequence (4); backward again (4), the gradients
# of the two chunks of queries are filled up to the whole sequence (4) and summed (3), and copied back as they came (4).
# Compiled: one copy; backward no other, one sum, and one copy.
_GATHERED_EAGER, _GATHERED = (4, 15), (2, 4)


@dataclass(frozen=True)
class Step:
    """The seconds of a step by what they go to, and the bytes that a rank sends, by axis.

    Args:
        seconds: by part: matrix products, attention, elementwise kernels, which the memory bounds, bubble, optimizer, and each axis as far as
            it does not hide behind computation.
        sent: bytes by axis.
    """

    seconds: dict[str, float]
    sent: dict[str, float]

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())


def estimate_step(job: Job, sizes: Mapping[str, int]) -> Step:
    """Estimate the seconds of a step on the pipeline rank that takes longest.

    - Matrix products: 2 operations for each parameter that a token meets, twice that backward, at the fraction of the peak
      that large products reach. Attention: 4 s q operations a token and layer for q features, of which causal fused
      attention computes half. (Narayanan et al., SC 2021, appendix.)
    - Elementwise kernels, bound by memory (norms, gates, residuals, loss; scores of unfused attention; casts to fp8): they
      write and read what :func:`layer_bytes` counts, at the memory's bandwidth.
      With FSDP2 each gathered weight is copied once more, and each gradient before it is reduced.
    - The bubble of the schedule, and the optimizer.
    - Each axis, at the bandwidth of its groups. tp and ep stop the computation (ep not with DualPipe), and so does pp
      unless it is interleaved; cp hides behind attention in a ring, and behind the rank's own chunk of it in eager torch (compiled
      code waits where it gathers: torch's ``_functional_collectives.py``, ``_maybe_wrap_tensor``); weights are gathered behind a
      forward pass and gradients reduced behind a backward pass, but for those of one layer. With ZeRO 3 outside of a pipeline
      that is so for each micro-batch.

    Args:
        job: what is trained, and how; the sizes of the model, ``seq`` and ``global_batch`` are known.
        sizes: the size of each axis; micro-batches divide the global batch.

    Example:
        >>> from namedmesh.plan.model import Model
        >>> job = Job(Model(layers=32, hidden=4096, heads=32), seq=4096, global_batch=64)
        >>> step = estimate_step(job, {"tp": 2, "dp": 4})
        >>> {part: round(seconds, 3) for part, seconds in step.seconds.items()}
        {'matmul': 1.875, 'elementwise': 0.51, 'attention': 0.356, 'tp': 0.2, 'dp': 0.148, 'optimizer': 0.011}
    """
    axes = axes_of(sizes)
    hardware = job.hardware.filled(axes.tp * axes.data * axes.pp)
    if hardware is not job.hardware:
        job = replace(job, hardware=hardware)
    return max((_of_share(job, axes, share) for share in shares(job, axes.pp)), key=lambda step: step.total)


def _of_share(job: Job, axes: Axes, share: Share) -> Step:
    count = job.micro_batches(axes.dp) or 1
    tokens = job.micro_batch * (job.seq or 0) / axes.cp
    held = parameters_of(job, axes, share)
    work = _computation(job, axes._replace(pp=1, dp=1, ep=1), share, tokens, held)
    if count > 1 and not _reduces_each(job, axes):
        work["elementwise"][1] += _ACCUMULATED * (held.shared + held.experts) / job.hardware.memory_rate
    traffic = dict(zip(("tp", "etp"), tensor_parallel(job, axes, share, tokens), strict=True))
    traffic["cp"], gradients = context_parallel(job, axes, share, tokens)
    traffic["ep"] = expert_parallel(job, axes, share, tokens)
    traffic["pp"] = pipeline_parallel(job, axes, tokens)
    seconds = {part: sum(both) for part, both in work.items()}
    computing, attention = sum(seconds.values()), seconds["attention"]
    waits = {axis: one.seconds for axis, one in traffic.items()}
    if job.keys_over_cp == "ring":
        waits["cp"] = _exposed(waits["cp"] + gradients.seconds, attention)
    elif job.keys_over_cp == "gathered" or job.compiled:
        waits["cp"] += gradients.seconds
    else:  # gathered at once, beside the rank's own chunk; the last chunk's gradients have nothing beside them
        waits["cp"] = _exposed(waits["cp"], attention / axes.cp)
        waits["cp"] += _exposed(gradients.seconds, attention, 1 / axes.cp)
    traffic["cp"] += gradients
    if job.schedule == "dualpipe":
        waits["ep"] = _exposed(waits["ep"], computing)
    if job.stages_per_rank > 1 or job.schedule == "dualpipe":
        waits["pp"] = _exposed(waits["pp"], computing)
    # DualPipe: each of the rank's two stages works on half of the micro-batches.
    part = 0.5 if job.schedule == "dualpipe" and axes.pp > 1 else 1.0
    seconds |= waits
    idle = bubble(job, axes.pp) * sum(seconds.values()) * part
    seconds = {what: one * count * part for what, one in seconds.items()}
    sent = {axis: one.sent * count * part for axis, one in traffic.items()}
    rounds, gathers = (count, 2) if _reduces_each(job, axes) else (1, 1)
    seconds["elementwise"] += rounds * _copies(job, axes, held, gathers)
    seconds |= {"bubble": idle, "optimizer": _optimizer(job, axes, held)}
    seconds["dp"], sent["dp"] = _data_parallel(job, axes, share, held, work, rounds)
    return Step(_nonzero(seconds), _nonzero(sent))


def _reduces_each(job: Job, axes: Axes) -> bool:
    """Return whether weights are gathered and gradients reduced for each micro-batch, as FSDP2 does without a pipeline."""
    return job.gathers and axes.pp == 1


def _exposed(seconds: float, behind: float, edge: float = 0.0) -> float:
    """Return what communication adds to a computation beside it, of which ``edge`` has nothing to hide behind."""
    alone = max(seconds * edge, seconds - behind)
    return alone + _TAKEN * (seconds - alone)


def _nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {part: parts[part] for part in sorted(parts, key=lambda part: -parts[part]) if parts[part]}


def _computation(
    job: Job, axes: Axes, share: Share, tokens: float, held: Parameters
) -> dict[str, list[float]]:
    """Return the seconds of one micro-batch through the layers of a rank and the head, forward and backward, by part.

    Products of few tokens take as long as their weights take to read, or gradients of weights to write.
    """
    model, hardware = job.model, job.hardware
    dense, expert, routed = model.layer
    met = dense * share.dense + (expert + routed * model.top_k / (model.experts or 1)) * share.expert
    products = 2 * tokens * met / axes.tp / hardware.matmul_rate(job.precision)
    products = max(products, job.number_bytes * (held.shared + held.experts) / hardware.memory_rate)
    again = {"full": 1.0, "op": 0.5}.get(job.checkpointing, 0.0) * products  # "op": every second product
    if "mla_up_proj" in job.recompute:
        again += 2 * tokens * model.from_latent * share.layers / axes.tp / hardware.matmul_rate(job.precision)
    head = 2 * tokens * model.embedding / axes.tp / hardware.matmul_rate("bf16") if share.last else 0.0
    query, value, _ = model.features
    scores = 2 * tokens * (job.seq or 0) * (model.heads or 1) * (query + value) / axes.tp * share.layers
    attended_again = job.checkpointing == "full" or (job.checkpointing == "selective" and not job.is_torch)
    if job.fused_attention:
        attended, backward = scores / 2 / (hardware.peak["bf16"] * hardware.attention), _FUSED_BACKWARD
    else:
        attended, backward = scores / hardware.matmul_rate("bf16"), 2.0
    loss = (model.vocab or 0) / axes.tp * loss_bytes(job, axes.tp) if share.last else 0.0
    moved = [loss, loss]
    for layers, experts in ((share.dense, False), (share.expert, True)):
        if layers:
            one = layer_bytes(job, axes, experts)
            moved = [moved[0] + one.forward * layers, moved[1] + one.backward * layers]
    return {
        "matmul": [products + head, products * 2 + again + 2 * head],
        "attention": [attended, attended * (backward + attended_again)],
        "elementwise": [tokens * each / hardware.memory_rate for each in moved],
    }


def _optimizer(job: Job, axes: Axes, held: Parameters) -> float:
    """Return the seconds of clipping and Adam on the parameters whose state a rank has."""
    sharded = job.stage > 0
    own = held.shared / (axes.data if sharded else 1) + held.experts / (axes.edp if sharded else 1)
    adam = _EAGER_ADAM if job.is_torch and not job.compiled else _ADAM
    adam -= 2 * (12 - job.optimizer_bytes)  # moments are read and written
    return (adam + _CLIPPED + job.number_bytes) * own / job.hardware.memory_rate


def _copies(job: Job, axes: Axes, held: Parameters, gathers: int) -> float:
    """Return the seconds in which FSDP2 copies weights out of the tensor that it gathers, and gradients into one to reduce.

    Nothing computes meanwhile (torch's ``_fsdp_collectives.py``: ``split_with_sizes_copy`` and ``chunk_cat``).
    """
    if not job.is_torch or not job.gathers:
        return 0.0
    sharded = held.shared if axes.data > 1 else 0.0
    sharded += held.experts if axes.edp > 1 else 0.0
    number = job.number_bytes
    return (gathers * 2 * number + number + REDUCED) * sharded / job.hardware.memory_rate


def _data_parallel(  # noqa: PLR0917  what it is computed from
    job: Job, axes: Axes, share: Share, held: Parameters, work: dict[str, list[float]], rounds: int
) -> tuple[float, float]:
    """Return the seconds of gathers of weights and reductions of gradients that do not hide, and the bytes sent.

    At stage 0 gradients are all-reduced: reduced and gathered. From stage 1 on weights are gathered, in bf16; source: the
    ZeRO paper, section 7. The axes are dp with cp, and for routed experts edp.
    """
    gather = reduce = Traffic()
    groups = ((held.shared, axes.data, axes.tp), (held.experts, axes.edp, axes.etp * axes.ep))
    for count, size, stride in groups:
        reduced = collective(job.hardware, REDUCED * count, size, stride)
        reduce += reduced
        gather += collective(job.hardware, job.number_bytes * count, size, stride) if job.stage else reduced
    each = gather + reduce
    if _reduces_each(job, axes):
        each += gather
    forward, backward = map(sum, zip(*work.values(), strict=True))
    if not job.overlap:
        exposed = each.seconds
    else:
        # The first layer's weights, and the last layer's gradients, have nothing to hide behind.
        edge = 1 / max(1, share.layers)
        exposed = _exposed(gather.seconds, forward, edge)
        exposed += _exposed(each.seconds - gather.seconds, backward, edge)
    return exposed * rounds, each.sent * rounds


class Passes(NamedTuple):
    """Bytes of a token, forward and backward; what is computed again counts as backward."""

    forward: float
    backward: float


@lru_cache(maxsize=4096)
def layer_bytes(job: Job, axes: Axes, experts: bool) -> Passes:
    """Return the bytes of one layer, which many layouts share: those that differ in pp, dp and ep."""
    one = saved(job, axes, experts=experts)
    forward, backward = _FORWARD * one.all, _BACKWARD * one.all + _AGAIN * (one.all - one.kept)
    again = {"full": 1.0, "op": 0.5}.get(job.checkpointing, 0.0)  # of products; of the rest, all or nothing
    if job.is_torch and not job.compiled:
        more = _eager(job, axes, experts)
        forward += more.forward
        backward += more.backward + (more.forward if again else 0.0)
    if job.precision == "fp8":
        inputs, outputs = _operands(job, axes, experts)
        forward += _CAST[job.trainer] * inputs
        backward += _CAST[job.trainer] * ((1 + again) * inputs + outputs)
    if axes.cp > 1 and job.keys_over_cp != "ring":
        more = _over_cp(job, axes)
        forward += more.forward
        backward += more.backward + (more.forward if again == 1 else 0)
    return Passes(forward, backward)


def _over_cp(job: Job, axes: Axes) -> Passes:
    """Return what attention over cp adds where keys and values are gathered."""
    query, _, output = job.model.features
    heads = (job.model.heads or 1) / axes.tp
    if job.keys_over_cp == "torch":
        return Passes(*((axes.cp - 1) * each * heads * query for each in _MERGE))
    own = _keys_and_values(job, axes.tp)
    copied, summed = _GATHERED if job.compiled or not job.is_torch else _GATHERED_EAGER
    # The two chunks of the output, and of the gradient of the queries, are joined.
    forward = copied * axes.cp * own + 2 * heads * output
    backward = (summed * axes.cp + 3) * own + 2 * heads * query
    return Passes(job.number_bytes * forward, job.number_bytes * backward)


def _eager(job: Job, axes: Axes, experts: bool) -> Passes:
    """Return what Llama's layers add where the network is gated, and GPT's where it is not."""
    model = job.model
    hidden = model.hidden or 0
    stream = hidden / axes.tp if job.sequence_parallel else float(hidden)
    width = feed_forward(job, axes, experts=experts).width
    turned = ((model.heads or 1) / axes.tp + kv_heads_on_rank(model, axes.tp)) * model.features[0]
    bytes_: list[float] = []
    for direction in range(2):
        count = 2 * _SUM[direction] * stream
        if not job.fused_norms:
            count += 2 * _NORM[direction] * stream
        if model.gated:
            count += _ROTARY[direction] * turned + _GATE[direction] * width
        bytes_.append(count * job.number_bytes / 2)
    if model.gated:
        bytes_[1] += _INPUTS * hidden * job.number_bytes / 2
    return Passes(*bytes_)


def _operands(job: Job, axes: Axes, experts: bool) -> tuple[float, float]:
    """Return the numbers that a layer's products read, and those that they make."""
    model, tp = job.model, axes.tp
    hidden, heads = model.hidden or 0, (model.heads or 1) / tp
    query, value, output = model.features
    inner = feed_forward(job, axes, experts=experts)
    made = heads * query + kv_heads_on_rank(model, tp) * (query + value) + inner.gradients
    return 2 * hidden + heads * output + inner.width, 2 * hidden + made


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
    stream = tokens * (model.hidden or 0) * job.number_bytes
    halves = 2 * share.dense + (2 if model.shared_experts else 1) * share.expert
    tp = collective(job.hardware, stream, axes.tp, 1) * (2 * job.passes * halves)
    routed = stream / axes.tp * model.top_k * axes.etp
    etp = collective(job.hardware, routed, axes.etp, 1) * (2 * job.passes * share.expert)
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
    is_torchs = job.keys_over_cp == "torch"
    whole = tokens * _keys_and_values(job, axes.tp) * job.number_bytes * axes.cp
    once = collective(job.hardware, whole, axes.cp, axes.tp) * share.layers
    gradients = once * (4 / job.number_bytes * axes.cp / (axes.cp - 1)) if is_torchs else once
    return once * job.passes, gradients


def _keys_and_values(job: Job, tp: int) -> float:
    """Return the numbers of keys and values of a token that a rank sends over cp."""
    model = job.model
    query, value, _ = model.features
    repeated = model.kv_rank or job.keys_over_cp == "torch"
    return ((model.heads or 1) / tp if repeated else kv_heads_on_rank(model, tp)) * (query + value)


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
    return Traffic(outside + inside, seconds) * (2 * job.passes * share.expert)


def pipeline_parallel(job: Job, axes: Axes, tokens: float) -> Traffic:
    """Return the traffic of a micro-batch over pp: activations go to the next stage, and their gradients back.

    The tensor-parallel ranks send a part each, and gather the whole where it is not sharded over the sequence (Narayanan et
    al., SC 2021, section 4.1).
    """
    if axes.pp == 1:
        return Traffic()
    whole = tokens * (job.model.hidden or 0) * job.number_bytes
    once = Traffic(whole / axes.tp, whole / axes.tp / job.hardware.bandwidth(axes.pp, axes.tp * axes.data))
    if not job.sequence_parallel:
        once += collective(job.hardware, whole, axes.tp, 1)
    return once * (2 * job.stages_per_rank)
