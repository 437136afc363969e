"""Format the code or flags for the policies of a partition, and its assumptions."""

from __future__ import annotations

from namedmesh.tools.plan.model import Axes, Job

# FSDP2 is ZeRO stage 3: it shards weights, gradients and optimizer states. Stages 1 and 2 are
# approximated by it.
_FSDP = "fully_shard(layer, mesh=fsdp_mesh(mesh)"
# At stage 2, weights stay gathered between the forward and the backward pass. At stage 1, gradients
# stay unsharded until the last micro-batch, too.
_TORCH_STAGES = {
    0: "DistributedDataParallel(model, process_group=fsdp_mesh(mesh).get_group())",
    1: f"{_FSDP}, reshard_after_forward=False), and model.set_requires_gradient_sync(False) before all "
    "micro-batches but the last",
    2: f"{_FSDP}, reshard_after_forward=False)",
    3: f"{_FSDP})",
}
_TORCH_CHECKPOINTING = {
    "none": "nothing",
    "selective": "checkpoint(layer, x, use_reentrant=False, context_fn=...) around each layer, with "
    "create_selective_checkpoint_contexts of a policy that saves attention and every second matrix product",
    "full": "checkpoint(layer, x, use_reentrant=False) around each layer",
}
_MEGATRON_STAGES = {
    0: "nothing",
    1: "--use-distributed-optimizer",
    2: "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    3: "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
}
_MEGATRON_CHECKPOINTING = {
    "none": "nothing",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
_TRAINERS = {
    "torch": "torch's layers, with FSDP2",
    "megatron": "Megatron-LM's layers, with gradients in float32",
    "bridge": "Megatron-LM's layers in NVIDIA's recipes, with gradients in bf16",
}


def list_settings(job: Job, axes: Axes) -> list[str]:
    """Return a line for each policy of a job: the code or the flags of the job's trainer."""
    size = job.micro_batch or 1
    stage = job.stage or 0
    checkpointing = job.checkpointing or "none"
    is_interleaved = job.stages_per_rank > 1
    if job.is_torch:
        count = job.micro_batches(axes.dp)
        batch = f"for rows in batch.split({size}), {count} times forward and backward before a step of the optimizer"
        sharding = _TORCH_STAGES[stage]
        recomputation = _TORCH_CHECKPOINTING[checkpointing]
        if axes.pp > 1:
            schedule = "Interleaved1F1B" if is_interleaved else "1F1B"
            batch = f'training.Pipeline(stage, mesh, "{schedule}", n_microbatches={count}, loss_fn=...)'
            # torch's pipeline schedules reduce gradients only after the last micro-batch, without
            # further settings.
            sharding = _TORCH_STAGES[2 if stage == 1 else stage]
        if job.model.experts and stage:
            # Experts are sharded over their own replicas; the layer around them must be sharded
            # afterwards.
            sharding += ', with fully_shard(experts, mesh=mesh["edp"]) before'
    else:
        batch = f"--micro-batch-size {size} --global-batch-size {job.global_batch}"
        sharding = _MEGATRON_STAGES[stage]
        recomputation = _MEGATRON_CHECKPOINTING[checkpointing]
        if is_interleaved:
            batch += f" --num-virtual-stages-per-pipeline-rank {job.stages_per_rank}"
    return [
        f"micro-batch {size}: {batch}",
        f"stage {stage}: {sharding}",
        f"checkpointing {checkpointing}: {recomputation}",
    ]


def describe_assumptions(job: Job) -> str:
    """Return a sentence on the trainer and the assumptions for which a job is estimated."""
    sharing = "with" if job.sequence_parallel else "without"
    if not job.is_torch:
        loss = "Megatron's fused loss"
    elif job.fused_loss:
        loss = "a compiled loss"
    else:
        loss = "an eager loss"
    return (
        f"The numbers are for {_TRAINERS[job.trainer]}, matrix products in {job.precision}, "
        f"{sharing} sequence parallelism, {loss}, AdamW with its states in float32, and "
        f"{job.hardware.name}; see --trainer, --precision, --sequence-parallel, --fused-loss and "
        "--hardware."
    )
