"""Fine-tune a Hugging Face model, with FSDP and tensor parallelism.

Run it with ``torchrun --nproc-per-node 4 examples/huggingface.py``.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import parallelize, plan_from_hf

mesh = namedmesh.init_mesh(dp=-1, tp=2)
training.seed_all(0, mesh)
torch.manual_seed(0)  # the same initial weights on every rank; from_pretrained(...) needs no seed
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(mesh.device)
parallelize(model, mesh["tp"], plan_from_hf(model))  # the plan that the model declares
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])

optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# Each token id is one more than the previous one.
tokens = (torch.arange(32, device=mesh.device)[None] + 32 * mesh.rank("dp")) % 64
for step in range(21):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    training.clip_grad_norm_(model.parameters(), 1.0, mesh)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() / mesh.size("dp"), group=mesh.group("dp"))
    if mesh.global_rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {mean.item():.3f}")

generated = model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False)  # on every rank
# Collective: every rank must call it. Rank 0 gets full tensors on its CPU.
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
with tempfile.TemporaryDirectory() as folder:
    if mesh.global_rank == 0:
        model.save_pretrained(folder, state_dict=state)
        again = LlamaForCausalLM.from_pretrained(folder)
        print("generated:", *generated[0].tolist())
        print("saved parameters:", sum(param.numel() for param in again.parameters()))
    dist.barrier()
dist.destroy_process_group()
