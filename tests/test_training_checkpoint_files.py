"""Directories of checkpoints: who may write there, what is found and removed, and what Hugging Face reads of them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from messages import error_of
from ranks import run_ranks
from torch import nn

import namedmesh
from namedmesh import training
from namedmesh.compat import megatron
from namedmesh.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def groups_that_outlive_the_default_group(root: Path) -> list[str]:
    """Destroy all groups while everything that used them is still referenced, as by the variables of a script."""
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    mesh.add_view("expert", ep=2)
    mesh.flatten("dp", "tp")
    kept: list[Any] = [megatron.bind(mesh), mesh]
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    checkpoints = training.Checkpoints(root / "run", mesh, async_=True)
    kept += [checkpoints, checkpoints.save(1, model)]
    checkpoints.close()
    training.save(root / "one", mesh, model)
    groups = {known.label: ref(known.group) for known in mesh.communicators}
    groups["world"] = ref(dist.group.WORLD)  # type: ignore[arg-type]
    assert {"checkpoints", "self", "world"} <= groups.keys()
    mesh.close()
    dist.destroy_process_group()
    gc.collect()
    assert kept
    return [label for label, group in groups.items() if group() is not None]


def test_no_group_outlives_the_default_group(tmp_path: Path) -> None:
    """A thread of gloo that is left at the end of the interpreter aborts the process now and then."""
    assert run_ranks(2, groups_that_outlive_the_default_group, tmp_path) == [[], []]


# --- Hugging Face ----------------------------------------------------------------------------------------------


class Normed(nn.Sequential):
    """A model with a buffer that each rank averages for itself."""

    def __init__(self, mean: float) -> None:
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)
        self[1].running_mean.fill_(mean)


def save_means_that_differ(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    training.save(root / "ours", mesh, Normed(mesh.rank() + 5.0))
    mesh.close()


@pytest.mark.oracle("safetensors")
def test_pretrained_weights_are_all_of_the_model_and_nothing_of_another(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run_ranks(2, save_means_that_differ, tmp_path)
    target = tmp_path / "theirs"
    target.mkdir()
    base = {name: tensor + 1 for name, tensor in Normed(8.0).state_dict().items()}
    save_file(base, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has other weights \(model.safetensors\), which from_pretrained"):
        training.to_pretrained(tmp_path / "ours", target)
    (target / "model.safetensors").rename(tmp_path / "base.safetensors")
    for _ in range(2):  # what it has written before, it replaces
        training.to_pretrained(tmp_path / "ours", target)
    (weights,) = target.glob("*.safetensors")
    written, expected = load_file(weights), Normed(5.0).state_dict()  # of the lowest rank
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())

    # An index says which files are the model's.
    (tmp_path / "base.safetensors").rename(target / "model.safetensors")
    model = Normed(0.0)
    training.load(target, None, model)
    assert model[1].running_mean.tolist() == [5.0, 5.0]
    index = target / "model.safetensors.index.json"
    index.rename(target / "index")
    said = error_of(lambda: training.load(target, None, model))
    assert f"{target} has '0.bias', '0.weight', '1.bias', '1.num_batches_tracked' and 3 more in more than one" in said
    (target / "index").rename(index)
    weights.unlink()
    assert f"names files that do not exist: {weights.name}." in error_of(lambda: training.load(target, None, model))


@pytest.mark.oracle("peft", "transformers")
def test_adapters_are_not_written_under_names_that_nobody_finds(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1}
    config = LlamaConfig(**sizes, num_hidden_layers=1)
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj"], r=1))
    for name, part in (("with", model), ("inside", model.get_base_model())):
        training.save(tmp_path / name, None, part)
        with pytest.raises(CheckpointError, match="has adapters of PEFT, such as"):
            training.to_pretrained(tmp_path / name, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
