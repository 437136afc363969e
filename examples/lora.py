"""Train LoRA adapters of a Hugging Face model from a local folder.

Run it with ``torchrun --nproc-per-node 4 examples/lora.py [FOLDER]``.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import parallelize, plan_from_hf

mesh = namedmesh.init_mesh(dp=-1, tp=2)
is_first = mesh.global_rank == 0

# Without a folder, rank 0 makes a small model. All ranks need to see the same folder.
folders = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
dist.broadcast_object_list(folders, src=0)
folder = Path(folders[0])
if is_first and not any(folder.iterdir()):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes)).save_pretrained(folder)
dist.barrier()

# Add the adapters before the model is sharded. One seed gives every rank the same initial values.
torch.manual_seed(1)
config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).to(mesh.device)
model.train()  # from_pretrained returns a model in evaluation mode
parallelize(model, mesh["tp"], plan_from_hf(model, adapters=True))
for layer in model.get_base_model().model.layers:
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])

# The base model is frozen: gradients and optimizer states exist for the adapters only.
adapters = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=0.03)
tokens = (torch.arange(32, device=mesh.device)[None] + 16 * mesh.rank("dp")) % 64
for step in range(11):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    training.clip_grad_norm_(adapters, 1.0, mesh)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() / mesh.size("dp"), group=mesh.group("dp"))
    if is_first and step % 5 == 0:
        print(f"step {step}: loss {mean.item():.3f}")

# Collective: every rank must call it. Rank 0 gets full tensors, and PEFT writes the adapters.
sharded_loss = model(tokens, labels=tokens).loss
options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
state = get_model_state_dict(model, options=options)
if is_first:
    model.save_pretrained(folder / "adapters", state_dict=state)
    print("trained parameters:", sum(param.numel() for param in adapters))
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), folder / "adapters")
    cpu_tokens = tokens.cpu()
    difference = alone(cpu_tokens, labels=cpu_tokens).loss - sharded_loss.cpu()
    print("one process with the saved adapters has the same loss:", abs(difference.item()) < 1e-4)
dist.barrier()
dist.destroy_process_group()
