"""Hugging Face's own distributed models on our meshes, and our sharded models in its hands."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fake_world, live_groups, run_ranks
from tensors import whole
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from tp_models import make_hf_model

import namedmesh
from namedmesh import NamedMesh
from namedmesh.tensor_parallel import parallelize, plan_from_hf


def transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module("transformers")


def tiny(*, tied: bool = False) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return make_hf_model("Llama", **sizes, **heads).float().eval()


def ids() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 32


def sharded(mesh: NamedMesh, *, tied: bool = False) -> Any:
    model = tiny(tied=tied)
    return parallelize(model, mesh["tp"], plan_from_hf(model))


def parallelism(mesh: NamedMesh, **sizes: int) -> Any:
    """What accelerate is told of a mesh."""
    told = importlib.import_module("accelerate").ParallelismConfig(**sizes)
    told.device_mesh = mesh.device_mesh
    return told


def losses_of(
    model: Any,
    optimizer: Any,
    batches: Iterable[torch.Tensor],
    backward: Callable[..., Any] = torch.Tensor.backward,
) -> list[torch.Tensor]:
    """The losses of a step for each batch."""
    losses = []
    for batch in batches:
        loss = model(batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.oracle("transformers")
def test_the_meshes_of_transformers_are_adopted_with_their_groups() -> None:
    transformers()
    utils: Any = importlib.import_module("transformers.distributed.utils")
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    with fake_world(16, rank=5):
        sizes = configuration.DistributedConfig(fsdp_size=4, tp_size=2, dp_replicate_size=2, ep_size=4)
        _, manager = utils.initialize_distributed_mesh(sizes)
        count = live_groups()
        # As the book's page on other libraries says.
        mesh = NamedMesh.from_device_mesh(manager.get_mesh(("pp", "dp_replicate", "fsdp", "tp")))
        mesh.adopt_view("expert", manager.get_mesh(("pp", "dp_replicate", "efsdp", "ep")))
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


def _in_its_hands(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    for tied in (False, True):
        alone, model = tiny(tied=tied), sharded(mesh, tied=tied)
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
        told[f"generated, tied {tied}"] = torch.equal(
            model.generate(ids(), max_new_tokens=4, do_sample=False),
            alone.generate(ids(), max_new_tokens=4, do_sample=False),
        )
        path = f"{folder}/{tied}"
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if mesh.rank("tp") == 0:
            model.save_pretrained(path, state_dict=state)
        torch.distributed.barrier()
        # With the mesh, for transformers to take what it needs of it.
        loaded = type(alone).from_pretrained(path, device_mesh=mesh["tp"])
        values = loaded.state_dict()
        told[f"saved, tied {tied}"] = [
            name for name, value in alone.state_dict().items() if not torch.equal(values[name], value)
        ]
        parallelize(loaded, mesh["tp"], plan_from_hf(loaded))
        told[f"loaded, tied {tied}"] = torch.allclose(loaded(ids()).logits, alone(ids()).logits, atol=1e-6)
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


def _steps_of_accelerate(mesh: NamedMesh, configuration: Any) -> tuple[bool, list[float]]:
    accelerate: Any = importlib.import_module("accelerate")
    model = sharded(mesh).train()
    model.config.distributed_config = configuration  # how accelerate knows that the model is sharded
    accelerator = accelerate.Accelerator(cpu=True, parallelism_config=parallelism(mesh, tp_size=2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = losses_of(model, optimizer, [ids()] * 2, accelerator.backward)
    return accelerator.torch_device_mesh is mesh.device_mesh, [loss.item() for loss in losses]


def _steps_of_trainer(folder: str, mesh: NamedMesh | None, configuration: Any) -> tuple[Any, list[float]]:
    model = (tiny() if mesh is None else sharded(mesh)).train()
    if mesh is not None:
        model.config.distributed_config = configuration
    arguments = transformers().TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,  # and the defaults: fused AdamW, and gradients clipped to a norm of 1
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        parallelism_config=None if mesh is None else parallelism(mesh, tp_size=2),
    )
    samples = [{"input_ids": row, "labels": row} for row in ids().repeat(2, 1)]
    trainer = transformers().Trainer(model=model, args=arguments, train_dataset=samples)
    trainer.train()
    state = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    # On every rank, which it waits for: save_model() lets the writing rank in alone.
    first = torch.distributed.get_rank() == 0
    trainer.model.save_pretrained(f"{folder}/saved", is_main_process=first, state_dict=state)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return mesh is None or trainer.accelerator.torch_device_mesh is mesh.device_mesh, losses


def _train_on_our_mesh(folder: str) -> list[Any]:
    state: Any = importlib.import_module("accelerate.state")
    accelerate: Any = importlib.import_module("accelerate")
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")

    def as_on_gpu(_self: Any, accelerator: Any) -> None:
        accelerator.state.distributed_type = accelerate.DistributedType.MULTI_GPU

    # accelerate refuses a ParallelismConfig on the CPU, for no reason that concerns the mesh.
    accelerate.ParallelismConfig._validate_accelerator = as_on_gpu
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    sizes = configuration.DistributedConfig(tp_size=2)
    told = [_steps_of_accelerate(mesh, sizes)]
    state.AcceleratorState._reset_state(reset_partial_state=True)
    told.append(_steps_of_trainer(folder, mesh, sizes))
    mesh.close()
    return told


def _losses_alone(tokens: torch.Tensor, steps: int) -> list[float]:
    model = tiny().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [loss.item() for loss in losses_of(model, optimizer, [tokens] * steps)]


def _train_alone(folder: str) -> list[Any]:
    return [(True, _losses_alone(ids(), 2)), _steps_of_trainer(folder, None, None)]


@pytest.mark.oracle("transformers", "accelerate")
def test_accelerate_and_trainer_train_on_our_mesh(tmp_path: Path) -> None:
    tiny()
    importlib.import_module("accelerate")
    (expected,) = run_ranks(1, _train_alone, f"{tmp_path}/alone", init=False)
    for told in run_ranks(2, _train_on_our_mesh, f"{tmp_path}/ours"):
        for (is_ours, losses), (_, right) in zip(told, expected, strict=True):
            assert is_ours
            assert losses == pytest.approx(right, abs=2e-3)  # Trainer rounds what it logs
            assert losses[1] < losses[0]
    load = transformers().LlamaForCausalLM.from_pretrained
    ours, alone = (load(tmp_path / which / "saved") for which in ("ours", "alone"))
    for name, value in alone.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), value, atol=1e-6, rtol=1e-5)


def samples() -> torch.Tensor:
    return torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))


def _fully_sharded_by_accelerate() -> tuple[bool, list[float]]:
    accelerate: Any = importlib.import_module("accelerate")
    from torch.distributed.fsdp import FSDPModule

    # accelerate shards on machines with GPUs only, for no reason that concerns the mesh.
    state = accelerate.PartialState
    backend_of = state._prepare_backend
    state._prepare_backend = lambda *args: (backend_of(*args)[0], accelerate.DistributedType.MULTI_GPU)
    state.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    mesh = namedmesh.init_mesh(dp_replicate=1, dp_shard=4, cp=1, device="cpu")
    mesh.flatten("dp_replicate", "dp_shard", name="dp")
    mesh.flatten("dp_shard", "cp", name="dp_shard_cp")
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = accelerate.Accelerator(
        cpu=True, parallelism_config=parallelism(mesh, dp_shard_size=4), fsdp_plugin=plugin
    )
    model, rows = tiny().train(), samples()
    loader: Any = torch.utils.data.DataLoader([*rows], batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    batches = [batch for _ in range(3) for batch in loader]
    losses = losses_of(model, optimizer, batches, accelerator.backward)
    group = mesh.group("dp_shard")
    is_ours = all(
        isinstance(each, DTensor) and each.device_mesh.get_group() is group for each in model.parameters()
    )
    is_ours = is_ours and isinstance(model, FSDPModule)
    means = [accelerator.reduce(loss, "mean").item() for loss in losses]
    mesh.close()
    return is_ours, means


@pytest.mark.oracle("transformers", "accelerate")
def test_accelerate_shards_parameters_fully_on_our_mesh() -> None:
    tiny()
    importlib.import_module("accelerate")
    (expected,) = run_ranks(1, _losses_alone, samples(), 3, init=False)
    for is_ours, losses in run_ranks(4, _fully_sharded_by_accelerate):
        assert is_ours
        assert losses == pytest.approx(expected, abs=1e-5)


def _loaded_onto_our_mesh(folder: str) -> dict[str, bool]:
    utils: Any = importlib.import_module("transformers.distributed.utils")
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    mesh = namedmesh.init_mesh(pp=1, dp_replicate=1, fsdp=1, tp=2, device="cpu")
    experts = mesh.add_view("expert", pp=1, dp_replicate=1, efsdp=2, ep=1)
    meshes = utils.TransformersDeviceMesh(mesh.device_mesh, experts)

    class OnOurMesh(transformers().LlamaForCausalLM):  # type: ignore[misc]
        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> Any:
            return distributed_config, device_map or mesh.device, meshes

    reference = tiny()
    sizes = configuration.DistributedConfig(tp_size=2)
    model = OnOurMesh.from_pretrained(folder, distributed_config=sizes)
    placed = [each for each in model.parameters() if isinstance(each, DTensor)]
    told = {
        "sharded": len(placed) > 0,
        "ours": all(each.device_mesh.get_group("tp") is mesh.group("tp") for each in placed),
    }
    for each in (reference, model):
        each(ids(), labels=ids()).loss.backward()
    told["logits"] = torch.allclose(model(ids()).logits, reference(ids()).logits, atol=1e-6)
    for name, parameter in reference.named_parameters():
        told[name] = torch.allclose(whole(model.get_parameter(name).grad), parameter.grad, atol=1e-6)
    mesh.close()
    return told


@pytest.mark.oracle("transformers")
def test_transformers_loads_shards_onto_our_mesh(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    for told in run_ranks(2, _loaded_onto_our_mesh, str(tmp_path)):
        assert told == dict.fromkeys(told, True)
        assert len(told) > 3
