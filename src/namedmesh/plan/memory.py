"""Estimate the memory of a training step on a rank; each formula names its source."""

from __future__ import annotations

from typing import NamedTuple

from namedmesh.plan.model import Axes, Job
from namedmesh.plan.stages import (
    BF16_BYTES,
    FSDP_STAGE,
    StageShare,
    count_in_flight,
    count_layer_elements,
    count_loss_bytes_per_token,
    list_stage_shares,
)

REDUCED_BYTES = 4
"""Bytes of an accumulated or reduced gradient: float32 in torchtitan and in Megatron."""

# Bytes of Adam's state: the weight and two moments in float32 (Rajbhandari et al., ZeRO, SC 2020,
# section 3.1).
_OPTIMIZER_BYTES = 12
# Bytes of a gradient that is kept. Megatron accumulates in float32
# (``accumulate_allreduce_grads_in_fp32``, on with bf16). NVIDIA's recipes for it, of NeMo and
# Megatron Bridge, accumulate in bf16 (``grad_reduce_in_fp32 = False`` in scripts/performance).
_GRADIENT_BYTES = {"torch": 2, "megatron": 4, "bridge": 2}


class Memory(NamedTuple):
    """The memory that one rank needs, in bytes, by part.

    Attributes:
        weights: the weights that the rank keeps.
        gradients: the gradients that the rank keeps.
        optimizer: Adam's state, with the weights in float32.
        gathered: the parameters that FSDP keeps unsharded for the whole step: embedding and head;
            in a pipeline, all weights of the rank's stages and their gradients.
        activations: the activations of all micro-batches in flight, kept for the backward pass.
        loss: the copies of the logits of one micro-batch.
        backward: the additional memory of one layer's backward pass: recomputed activations,
            gradients, and the gathered weights of the layers around it.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    loss: float
    backward: float

    @property
    def total(self) -> float:
        """The sum, which an allocator reserves: blocks of one phase seldom serve another."""
        return sum(self)


def estimate_memory(job: Job, axes: Axes) -> Memory:
    """Estimate the memory of the pipeline rank that needs the most.

    ZeRO shards states as in Rajbhandari et al., SC 2020, section 5: weights at stage 3, gradients
    from stage 2, the optimizer from stage 1. Gathered, accumulated and prefetched tensors of FSDP2
    follow torch's code.

    Args:
        job: the model, and how it is trained; ``layers``, ``hidden`` and ``heads`` have to be
            known.
        axes: the sizes of the axes.
    """
    shares = list_stage_shares(job.model, axes.pp, job.stages_per_rank)
    estimates = [_estimate_stage(job, axes, share) for share in shares]
    return max(estimates, key=lambda memory: memory.total)


def _estimate_stage(job: Job, axes: Axes, share: StageShare) -> Memory:
    """Estimate the memory of one pipeline rank."""
    tokens = (job.micro_batch or 1) * job.seq / axes.cp
    dense_layer = count_layer_elements(job, axes, has_experts=False)
    largest_layer = dense_layer
    if share.expert_layers:
        largest_layer = count_layer_elements(job, axes, has_experts=True)

    in_flight = count_in_flight(job, axes.pp, share.rank)
    micro_batches = job.micro_batches(axes.dp)
    if micro_batches:  # 0 if the global batch is not known
        in_flight = min(in_flight, micro_batches)
    kept = dense_layer.kept * share.dense_layers + largest_layer.kept * share.expert_layers
    recomputed = largest_layer.read - largest_layer.kept
    gathered = 0.0
    backward = tokens * BF16_BYTES * (recomputed + largest_layer.gradients)
    if job.stage == FSDP_STAGE:
        accumulates = not micro_batches or micro_batches > in_flight
        gathered, layer_bytes = _estimate_gathered_bytes(job, axes, share, accumulates=accumulates)
        backward += layer_bytes
    loss = 0.0
    if share.is_last:
        hidden_states = 2 * BF16_BYTES * job.model.hidden
        loss = tokens * (count_loss_bytes_per_token(job, axes) + hidden_states)
    return Memory(
        weights=_estimate_state_bytes(job, axes, share, BF16_BYTES, from_stage=3),
        gradients=_estimate_state_bytes(job, axes, share, _GRADIENT_BYTES[job.trainer], from_stage=2),
        optimizer=_estimate_state_bytes(job, axes, share, _OPTIMIZER_BYTES, from_stage=1),
        gathered=gathered,
        activations=in_flight * tokens * BF16_BYTES * kept,
        loss=loss,
        backward=backward,
    )


def _estimate_state_bytes(
    job: Job, axes: Axes, share: StageShare, bytes_per_parameter: int, *, from_stage: int
) -> float:
    """Return the bytes on a rank of weights, gradients or optimizer states.

    Args:
        job: the model, and how it is trained.
        axes: the sizes of the axes.
        share: the layers of the pipeline rank.
        bytes_per_parameter: the bytes of these tensors for each parameter.
        from_stage: the lowest ZeRO stage that shards them.
    """
    shared, routed = share.parameters(job.model, axes)
    if (job.stage or 0) >= from_stage:
        return bytes_per_parameter * (shared / axes.shards + routed / axes.expert_shards)
    return bytes_per_parameter * (shared + routed)


def _estimate_gathered_bytes(
    job: Job, axes: Axes, share: StageShare, *, accumulates: bool
) -> tuple[float, float]:
    """Return the bytes that FSDP2 gathers for a whole step and for one layer's backward pass.

    Args:
        job: the model, and how it is trained.
        axes: the sizes of the axes.
        share: the layers of the pipeline rank.
        accumulates: whether a pipeline rank keeps gradients of several micro-batches.
    """
    one_layer = share._replace(
        dense_layers=int(not share.expert_layers), expert_layers=int(share.expert_layers > 0), ends=0
    )
    layer = sum(one_layer.parameters(job.model, axes))
    if axes.pp == 1:
        gathered = BF16_BYTES * job.model.embedding * share.ends / axes.tp
        # Three layers are gathered at a time, two of them prefetched.
        return gathered, (3 * BF16_BYTES + REDUCED_BYTES) * layer + gathered
    # torch's pipeline schedules keep weights gathered, and reduce gradients after the last
    # micro-batch.
    bytes_per_parameter = BF16_BYTES
    if accumulates:
        bytes_per_parameter += REDUCED_BYTES
    shared, routed = share.parameters(job.model, axes)
    return bytes_per_parameter * (shared + routed), (BF16_BYTES + REDUCED_BYTES) * layer
