"""Count the parameters, activations and memory of a pipeline rank.

Each formula names its source.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from namedmesh.layout.sizes import split_layers
from namedmesh.tools.plan.model import Axes, Job, Model

FSDP_STAGE = 3
"""The ZeRO stage that shards the weights, as FSDP does."""

BF16_BYTES = 2
"""Bytes of an activation, and of a weight in a matrix product."""

# Bytes that the loss needs for each logit. Eager, in float32: the log-softmax, its gradient, the
# gradient of the logits, and the logits in bf16. Compiled: only the logits and their gradient.
_EAGER_LOSS_BYTES = 14
_COMPILED_LOSS_BYTES = 4
# Under tensor parallelism, torch's loss_parallel was measured at 9 times the logits in bf16, and a
# vocabulary-parallel cross entropy such as Megatron's at 5 times.
_LOSS_PARALLEL_BYTES = 18
_MEGATRON_LOSS_BYTES = 10

REDUCED_BYTES = 4
"""Bytes of an accumulated or reduced gradient: float32 in torchtitan and in Megatron."""

# Bytes of Adam's state: the weight and two moments in float32 (Rajbhandari et al., ZeRO, SC 2020,
# section 3.1).
_OPTIMIZER_BYTES = 12
# Bytes of a gradient that is kept. Megatron accumulates in float32
# (``accumulate_allreduce_grads_in_fp32``, on with bf16). NVIDIA's recipes for it, of NeMo and
# Megatron Bridge, accumulate in bf16 (``grad_reduce_in_fp32 = False`` in scripts/performance).
_GRADIENT_BYTES = {"torch": 2, "megatron": 4, "bridge": 2}


class StageShare(NamedTuple):
    """The layers and matrices of one pipeline rank.

    Attributes:
        rank: the pipeline rank.
        dense_layers: the number of layers without experts.
        expert_layers: the number of layers with experts.
        ends: the number of embedding-sized matrices: embedding and head.
        is_last: whether the rank has the head and the loss.
    """

    rank: int
    dense_layers: int
    expert_layers: int
    ends: int
    is_last: bool

    @property
    def layers(self) -> int:
        """The number of layers of both kinds."""
        return self.dense_layers + self.expert_layers

    def parameters(self, model: Model, axes: Axes) -> tuple[float, float]:
        """Return the number of parameters on a rank, before ZeRO shards them.

        Args:
            model: the sizes of the model.
            axes: the sizes of the axes. Here tp, ep and etp shard parameters.

        Returns:
            The parameters that are replicated over dp and cp, and the parameters of the routed
            experts.
        """
        dense, expert, routed = model.layer
        shared = dense * self.dense_layers + expert * self.expert_layers + model.embedding * self.ends
        if model.kv % axes.tp and not model.kv_rank:
            # If tp does not divide the kv heads, each tp rank keeps the weights of all of them.
            keys_and_values = model.hidden * model.kv * sum(model.features)
            shared += self.layers * keys_and_values * (axes.tp - 1)
        return shared / axes.tp, routed * self.expert_layers / (axes.ep * axes.etp)


@cache
def list_stage_shares(model: Model, pp: int, stages_per_rank: int) -> tuple[StageShare, ...]:
    """Return the pipeline ranks that may need the most memory or time.

    Args:
        model: the sizes of the model.
        pp: the number of pipeline ranks.
        stages_per_rank: the number of stages of each rank; more than one with an interleaved
            schedule.

    Returns:
        The first rank, which keeps most micro-batches, the first with most layers, and the last,
        with the loss.
    """
    stage_count = pp * stages_per_rank
    # Models such as DeepSeek-V3 have a few dense layers first, and experts in all layers behind
    # them.
    first_expert_layer = model.layers - model.expert_layers
    every_share = []
    for rank in range(min(pp, model.layers)):
        layers: list[int] = []
        for stage in range(rank, stage_count, pp):
            layers.extend(split_layers(model.layers, stage, stage_count))
        dense_layers = sum(layer < first_expert_layer for layer in layers)
        is_last = rank == pp - 1
        ends = 1 if pp == 1 and model.tied else int(rank == 0) + int(is_last)
        share = StageShare(rank, dense_layers, len(layers) - dense_layers, ends, is_last)
        every_share.append(share)
    longest = max(every_share, key=lambda share: (share.layers, share.expert_layers))
    return tuple(dict.fromkeys((every_share[0], longest, every_share[-1])))


def count_in_flight(job: Job, pp: int, rank: int) -> float:
    """Return the number of micro-batches whose activations a pipeline rank keeps.

    1F1B keeps one for each rank from this one to the last. Interleaved with v stages a rank, it
    keeps (2 (p-r-1) + (v-1) p + 1) / v (Megatron-LM, ``schedules.py``). For the first rank this is
    the formula of Korthikanti et al., MLSys 2023, section 4.2.3.
    """
    stages = job.stages_per_rank
    if stages == 1 or pp == 1:
        return pp - rank
    return (2 * (pp - rank - 1) + (stages - 1) * pp + 1) / stages


class LayerElements(NamedTuple):
    """Numbers of elements of the activations of one layer on a rank, for each token.

    Attributes:
        read: the activations that the backward pass reads.
        kept: the activations that are kept until then; the rest is recomputed.
        gradients: the gradients that exist at one time in the backward pass.
        inputs: the inputs of the matrix products.
        outputs: the outputs of the matrix products.
    """

    read: float
    kept: float
    gradients: float
    inputs: float
    outputs: float


def count_layer_elements(job: Job, axes: Axes, *, has_experts: bool) -> LayerElements:
    """Count the activations of one layer, tensor by tensor.

    These are the tensors of Korthikanti et al., MLSys 2023, table 2, for a residual stream of width
    h:

    - Residual stream: the inputs of both halves, 2 h.
    - Norms: their outputs, 2 h. torch all-gathers the sequence for them and keeps the result;
      Megatron all-gathers it again.
    - Attention: queries, keys, values, and the output. torch keeps a second copy of it in
      another memory format. With latent attention also the latent vectors.
    - Feed-forward network of width f: 2 f, gated 4 f (Megatron's fused gate: 3 f).
    - Experts: for each expert of a token its input, and in torch its output, which is weighted
      afterwards. Megatron applies the weights inside (``moe/experts.py``).

    Everything outside of attention and the feed-forward network is sharded over tp only with
    sequence parallelism. Selective checkpointing in torch keeps queries, values and every second
    matrix product; all-reduced outputs are kept, too.

    Args:
        job: the model, and how it is trained.
        axes: the sizes of the axes.
        has_experts: whether the layer has experts.
    """
    model = job.model
    tp = axes.tp
    hidden = model.hidden
    residual = hidden / tp if job.sequence_parallel else hidden
    if job.is_torch:
        norm_outputs: float = 2 * hidden
        attention_copies = 2
        gated_tensors = 4
        expert_copies = 2
    else:
        norm_outputs = 2 * residual
        attention_copies = 1
        gated_tensors = 3
        expert_copies = 1

    heads = model.heads / tp
    kv_heads = count_kv_heads(model, tp)
    query_features, value_features = model.features
    latent = model.q_rank + model.kv_rank + model.rope_dim if model.kv_rank else 0
    projected = heads * query_features + kv_heads * (query_features + value_features)
    attention_output = heads * value_features

    # An ungated network has one product into the inner width and one activation of it.
    up_projections = 1
    network_tensors = 2
    if model.ffn or has_experts:
        up_projections = 2
        network_tensors = gated_tensors
    width = model.inner / tp
    dispatched = 0.0
    router = 0
    if has_experts:
        # A rank routes its shard of the sequence, 1/tp of it, together with the other etp ranks of
        # its experts.
        width = (model.top_k + model.shared_experts) * (model.expert_ffn or model.inner) / tp
        dispatched = expert_copies * model.top_k * hidden * axes.etp / tp
        router = 2 * model.experts

    read = 2 * residual + norm_outputs + latent + projected + attention_copies * attention_output
    read += network_tensors * width + dispatched + router
    kept = read
    if job.checkpointing == "full":
        kept = residual
    elif job.checkpointing == "selective" and job.is_torch:
        every_second = width + hidden * (up_projections - 1)
        if has_experts:
            every_second = width + dispatched
        kept = residual + heads * query_features + kv_heads * value_features + attention_output + every_second
        if tp > 1:
            kept += 2 * residual
    return LayerElements(
        read=read,
        kept=kept,
        gradients=up_projections * width + hidden,
        inputs=2 * hidden + attention_output + width,
        outputs=2 * hidden + projected + up_projections * width,
    )


def count_kv_heads(model: Model, tp: int) -> float:
    """Return the number of kv heads on a rank; latent attention has one for each query head."""
    if model.kv_rank:
        return model.heads / tp
    # With fewer kv heads than ranks, several ranks have the same one.
    return max(1.0, model.kv / tp)


def count_loss_bytes_per_token(job: Job, axes: Axes) -> float:
    """Return the bytes that the loss needs for the logits of one token on a rank."""
    if not job.is_torch:
        bytes_per_logit = _MEGATRON_LOSS_BYTES
    elif job.fused_loss:
        bytes_per_logit = _COMPILED_LOSS_BYTES
    elif axes.tp == 1:
        bytes_per_logit = _EAGER_LOSS_BYTES
    else:
        bytes_per_logit = _LOSS_PARALLEL_BYTES
    return job.model.vocab / axes.tp * bytes_per_logit


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
    # Each stage of ZeRO shards one more of the states: the optimizer, gradients, weights.
    shared, routed = share.parameters(job.model, axes)
    parameters = [shared + routed] * 3
    for sharded_state in range(job.stage or 0):
        parameters[sharded_state] = shared / axes.shards + routed / axes.expert_shards
    return Memory(
        weights=BF16_BYTES * parameters[2],
        gradients=_GRADIENT_BYTES[job.trainer] * parameters[1],
        optimizer=_OPTIMIZER_BYTES * parameters[0],
        gathered=gathered,
        activations=in_flight * tokens * BF16_BYTES * kept,
        loss=loss,
        backward=backward,
    )


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
