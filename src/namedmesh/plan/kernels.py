"""The bytes that elementwise kernels read and write for each token of a layer."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from namedmesh.plan.job import Axes, Job, kv_heads_on_rank
from namedmesh.plan.memory import feed_forward, saved

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
# Attention over cp, bytes for each feature of the queries. By torch (distributed/tensor/experimental/_attention.py), for each
# chunk but the first: keys and values are copied (8), and the chunk's output is merged in float32 (32 on average); backward
# they are copied (8), gradients of queries (12), keys and values (23) are summed in float32, and the latter copied (16). By
# namedmesh.training.context_attention, however many chunks: one or two merges in float32, and the cast (43 on average);
# backward two or three gradients of the queries are summed (17).
_MERGE, _MERGE_PIECES = (40, 59), (43, 17)


class Passes(NamedTuple):
    """Bytes of a token, forward and backward; what is computed again counts as backward."""

    forward: float
    backward: float


def layer_bytes(job: Job, axes: Axes, *, experts: bool) -> Passes:
    """Return the bytes of one layer."""
    return _layer_bytes(job, axes._replace(pp=1, dp=1, ep=1), experts)  # many layouts share the others


@lru_cache(maxsize=4096)
def _layer_bytes(job: Job, axes: Axes, experts: bool) -> Passes:
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
        features = (job.model.heads or 1) * job.model.features[0] / axes.tp
        merged, summed = _MERGE_PIECES
        if job.keys_over_cp == "torch":
            merged, summed = ((axes.cp - 1) * each for each in _MERGE)
        forward += merged * features
        backward += (summed + (merged if again == 1 else 0)) * features
    return Passes(forward, backward)


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
