"""Hugging Face's own distributed models on our meshes, and our sharded models in its hands."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import fake_world, live_groups, run_ranks
from torch.distributed.tensor import DTensor

import namedmesh
from namedmesh import LayoutError, NamedMesh
from namedmesh.tensor_parallel import parallelize, plan_from_hf

if TYPE_CHECKING:
    from pathlib import Path


def transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module("transformers")


def tiny(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers().LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        vocab_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers().LlamaForCausalLM(config).eval()


def ids() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 32


@pytest.mark.oracle("transformers")
def test_the_meshes_of_transformers_are_adopted_with_their_groups() -> None:
    transformers()
    utils: Any = pytest.importorskip("transformers.distributed.utils")
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    if not hasattr(utils, "TransformersDeviceMesh"):
        pytest.skip("this transformers has no such meshes")
    with fake_world(16, rank=5):
        sizes = configuration.DistributedConfig(fsdp_size=4, tp_size=2, dp_replicate_size=2, ep_size=4)
        _, manager = utils.initialize_distributed_mesh(sizes)
        count = live_groups()
        mesh = NamedMesh.from_transformers(SimpleNamespace(_mesh_manager=manager))
        assert live_groups() == count
        assert mesh.layout.axes == ("pp", "dp_replicate", "fsdp", "tp")
        assert mesh.layout.sizes == (1, 2, 4, 2)
        assert list(mesh.views["expert"].sizes) == [1, 2, 2, 4]
        for axis in ("dp_replicate", "fsdp", "tp", "efsdp", "ep"):
            theirs = manager.get_mesh(axis)
            assert mesh[axis].get_group() is theirs.get_group() is mesh.group(axis)
            assert list(mesh.ranks(axis)) == theirs.mesh.tolist()
        assert mesh["efsdp", "ep"] == manager.get_mesh(("efsdp", "ep"))
        mesh.close()
        assert live_groups() == count  # they are not ours
        with pytest.raises(LayoutError) as caught:
            NamedMesh.from_transformers(torch.nn.Linear(1, 1))
        assert str(caught.value) == (
            "the Linear has no mesh of transformers, which makes one in from_pretrained(distributed_config=...); make a mesh "
            "with init_mesh, and shard the model with parallelize"
        )


def _in_its_hands(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    for tied in (False, True):
        whole = tiny(tied=tied)
        model = tiny(tied=tied)
        parallelize(model, mesh["tp"], plan_from_hf(model))
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
        told[f"generated, tied {tied}"] = torch.equal(
            model.generate(ids(), max_new_tokens=4, do_sample=False),
            whole.generate(ids(), max_new_tokens=4, do_sample=False),
        )
        path = f"{folder}/{tied}"
        model.save_pretrained(path)
        # With the mesh, for transformers to take what it needs of it.
        loaded = type(whole).from_pretrained(path, device_mesh=mesh["tp"])
        values = loaded.state_dict()
        told[f"saved, tied {tied}"] = [
            name for name, value in whole.state_dict().items() if not torch.equal(values[name], value)
        ]
        parallelize(loaded, mesh["tp"], plan_from_hf(loaded))
        told[f"loaded, tied {tied}"] = torch.allclose(loaded(ids()).logits, whole(ids()).logits, atol=1e-6)
    mesh.close()
    return told


@pytest.mark.oracle("transformers")
def test_a_model_that_we_sharded_generates_saves_and_loads(tmp_path: Path) -> None:
    tiny()
    for told in run_ranks(2, _in_its_hands, str(tmp_path)):
        assert told == {
            f"{what}, tied {tied}": [] if what == "saved" else True
            for tied in (False, True)
            for what in ("generated", "saved", "loaded")
        }
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
