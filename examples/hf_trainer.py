"""Train with Hugging Face's Trainer, and so accelerate, on a mesh of ours: ``torchrun --nproc-per-node 2 examples/hf_trainer.py``."""

import tempfile

import torch
import torch.distributed as dist
from accelerate import DistributedType, ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

import namedmesh
from namedmesh.tensor_parallel import plan_from_hf

mesh = namedmesh.init_mesh(tp=-1)
on_cpu = mesh.device.type == "cpu"
if on_cpu:  # accelerate takes a ParallelismConfig on accelerators only, for no reason that concerns the mesh

    def as_on_gpus(_: ParallelismConfig, accelerator: object) -> None:
        """Let accelerate prepare the model as it does on GPUs."""
        accelerator.state.distributed_type = DistributedType.MULTI_GPU

    ParallelismConfig._validate_accelerator = as_on_gpus  # noqa: SLF001

torch.manual_seed(0)
sizes = LlamaConfig(
    hidden_size=32, intermediate_size=64, vocab_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(sizes)
namedmesh.parallelize(model, mesh["tp"], plan_from_hf(model))
model.config.distributed_config = DistributedConfig(tp_size=mesh.size("tp"))  # accelerate reads it here
parallelism = ParallelismConfig(tp_size=mesh.size("tp"))
parallelism.device_mesh = mesh.device_mesh  # accelerate makes no mesh of its own

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        parallelism_config=parallelism,
        save_strategy="no",  # the Trainer saves on one rank alone, which would wait for the others
        report_to=[],
        disable_tqdm=True,
        use_cpu=on_cpu,
    )
    words = torch.arange(64).view(4, 16)
    samples = [{"input_ids": row, "labels": row} for row in words]
    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    loss = trainer.train().training_loss
    trainer.model.save_pretrained(folder)  # on every rank
    if mesh.global_rank == 0:
        again = LlamaForCausalLM.from_pretrained(folder)
        print(f"mean loss {loss:.2f}, after it {again(words, labels=words).loss.item():.2f}")
        print("on the mesh's groups:", trainer.accelerator.torch_device_mesh is mesh.device_mesh)
    dist.barrier()
mesh.close()
dist.destroy_process_group()
