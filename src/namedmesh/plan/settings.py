"""What to write for the policies of a partition, and what its numbers assume."""

from __future__ import annotations

from namedmesh.plan.model import Axes, Job

# With FSDP2, which shards weights, gradients and optimizer states: ZeRO's stage 3. Stages 1 and 2 are the nearest it has.
_FSDP = "fully_shard(layer, mesh=fsdp_mesh(mesh)"
_TORCH_STAGES = {
    0: "DistributedDataParallel(model, process_group=fsdp_mesh(mesh).get_group())",
    1: f"{_FSDP}, reshard_after_forward=False), and model.set_requires_gradient_sync(False) before all micro-batches but the last",
    2: f"{_FSDP}, reshard_after_forward=False)",
    3: f"{_FSDP})",
}
_TORCH_CHECKPOINTING = {
    "none": "nothing",
    "selective": "checkpoint(layer, x, use_reentrant=False, context_fn=...) around each layer, with create_selective_checkpoint_"
    "contexts of a policy that saves attention and every second matrix product",
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


def settings_of(job: Job, axes: Axes) -> list[str]:
    """Return a line for each policy of a job: what to write for it with the job's trainer."""
    size, stage, checkpointing = job.micro_batch or 1, job.stage or 0, job.checkpointing or "none"
    count = job.micro_batches(axes.dp)
    if job.is_torch:
        sharding = _TORCH_STAGES[stage]
        batch = f"for rows in batch.split({size}), {count} times forward and backward before a step of the optimizer"
        if axes.pp > 1:
            schedule = "1F1B" if job.stages_per_rank == 1 else "Interleaved1F1B"
            batch = f'training.pipeline(stage, mesh, "{schedule}", microbatches={count}, loss=...)'
            # torch's schedules reduce gradients after the last micro-batch by themselves.
            sharding = _TORCH_STAGES[2 if stage == 1 else stage]
        if job.model.experts and stage:
            sharding += ', with fully_shard(experts, mesh=mesh["edp"]) before'
        again = _TORCH_CHECKPOINTING[checkpointing]
    else:
        batch = f"--micro-batch-size {size} --global-batch-size {job.global_batch}"
        if job.stages_per_rank > 1:
            batch += f" --num-virtual-stages-per-pipeline-rank {job.stages_per_rank}"
        sharding, again = _MEGATRON_STAGES[stage], _MEGATRON_CHECKPOINTING[checkpointing]
    return [
        f"micro-batch {size}: {batch}",
        f"stage {stage}: {sharding}",
        f"checkpointing {checkpointing}: {again}",
    ]


def assumptions_of(job: Job) -> str:
    """Return in a sentence which trainer and which assumptions the numbers of a job are for."""
    sharing = "with" if job.sequence_parallel else "without"
    loss = "a compiled loss" if job.fused_loss and job.is_torch else "an eager loss"
    if not job.is_torch:
        loss = "Megatron's fused loss"
    return (
        f"The numbers are for {_TRAINERS[job.trainer]}, matrix products in {job.precision}, {sharing} "
        f"sequence parallelism, {loss}, AdamW with its states in float32, and {job.hardware.name}; see --trainer, --precision, --sequence-parallel, --fused-loss and --hardware."
    )
