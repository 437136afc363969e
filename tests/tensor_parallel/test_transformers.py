"""transformers and accelerate run on meshes of namedmesh, and use models that it has sharded."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import Double
from ranks import fake_world, live_groups, run_ranks
from tensors import compute_difference
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from tp_models import make_hf_model

import namedmesh
from namedmesh import NamedMesh
from namedmesh.tensor_parallel import parallelize, plan_from_hf

TOLERANCE = 1e-9  # everything is computed in float64: AdamW divides by gradients that may be small


def import_transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module("transformers")


def make_tiny(*, tied: bool = False) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return make_hf_model("Llama", **sizes, **heads).eval()


def make_ids() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 32


def make_sharded(mesh: NamedMesh, *, tied: bool = False) -> Any:
    model = make_tiny(tied=tied)
    return parallelize(model, mesh["tp"], plan_from_hf(model))


def compute_logits(model: Any) -> torch.Tensor:
    with Double():
        logits: torch.Tensor = model(make_ids()).logits
    return logits


def is_close(tensor: Any, expected: Any) -> bool:
    return compute_difference(tensor, expected) < TOLERANCE


def make_parallelism_config(mesh: NamedMesh, **sizes: int) -> Any:
    """Make accelerate's description of a mesh."""
    config = importlib.import_module("accelerate").ParallelismConfig(**sizes)
    config.device_mesh = mesh.device_mesh
    return config


def run_steps(
    model: Any,
    optimizer: Any,
    batches: Iterable[torch.Tensor],
    backward: Callable[..., Any] = torch.Tensor.backward,
) -> list[torch.Tensor]:
    """Train one step on each batch; return the losses."""
    losses = []
    for batch in batches:
        with Double():
            loss = model(batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.oracle("transformers")
def test_meshes_of_transformers_are_adopted_with_their_groups() -> None:
    import_transformers()
    utils: Any = importlib.import_module("transformers.distributed.utils")
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    with fake_world(16, rank=5):
        sizes = configuration.DistributedConfig(fsdp_size=4, tp_size=2, dp_replicate_size=2, ep_size=4)
        _, manager = utils.initialize_distributed_mesh(sizes)
        count = live_groups()
        # The guide says how to adopt them.
        mesh = NamedMesh.from_device_mesh(manager.get_mesh(("pp", "dp_replicate", "fsdp", "tp")))
        mesh.adopt_view("expert", manager.get_mesh(("pp", "dp_replicate", "efsdp", "ep")))
        assert live_groups() == count
        assert mesh.layout.axes == ("pp", "dp_replicate", "fsdp", "tp")
        assert mesh.layout.sizes == (1, 2, 4, 2)
        assert list(mesh.views["expert"].sizes) == [1, 2, 2, 4]
        for axis in ("dp_replicate", "fsdp", "tp", "efsdp", "ep"):
            axis_mesh = manager.get_mesh(axis)
            assert mesh[axis].get_group() is axis_mesh.get_group() is mesh.group(axis)
            assert list(mesh.ranks(axis)) == axis_mesh.mesh.tolist()
        assert mesh["efsdp", "ep"] == manager.get_mesh(("efsdp", "ep"))
        mesh.close()
        assert live_groups() == count  # close() keeps adopted groups


def generate_save_and_load(folder: str) -> dict[str, Any]:
    """Generate with a sharded model, save it, and load it again; with tied weights and without.

    Returns:
        Whether tokens and logits equal one process, and the names of entries that were saved wrong.
    """
    results: dict[str, Any] = {}
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    for tied in (False, True):
        reference = make_tiny(tied=tied)
        model = make_sharded(mesh, tied=tied)
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
        results[f"generated, tied {tied}"] = torch.equal(
            model.generate(make_ids(), max_new_tokens=4, do_sample=False),
            reference.generate(make_ids(), max_new_tokens=4, do_sample=False),
        )
        path = f"{folder}/{tied}"
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if mesh.rank("tp") == 0:
            model.save_pretrained(path, state_dict=state)
        torch.distributed.barrier()
        # With the mesh, which transformers reads the device from.
        loaded = type(reference).from_pretrained(path, device_mesh=mesh["tp"])
        values = loaded.state_dict()
        results[f"saved, tied {tied}"] = [
            name for name, value in reference.state_dict().items() if not torch.equal(values[name], value)
        ]
        parallelize(loaded, mesh["tp"], plan_from_hf(loaded))
        results[f"loaded, tied {tied}"] = is_close(compute_logits(loaded), compute_logits(reference))
    mesh.close()
    return results


@pytest.mark.oracle("transformers")
def test_a_sharded_model_generates_saves_and_loads(tmp_path: Path) -> None:
    make_tiny()
    expected: dict[str, Any] = {}
    for tied in (False, True):
        expected[f"generated, tied {tied}"] = True
        expected[f"saved, tied {tied}"] = []
        expected[f"loaded, tied {tied}"] = True
    for results in run_ranks(2, generate_save_and_load, str(tmp_path)):
        assert results == expected
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2


def train_with_accelerate(mesh: NamedMesh, configuration: Any) -> tuple[bool, list[float]]:
    accelerate: Any = importlib.import_module("accelerate")
    model = make_sharded(mesh).train()
    # accelerate reads here that the model is sharded.
    model.config.distributed_config = configuration
    accelerator = accelerate.Accelerator(
        cpu=True, parallelism_config=make_parallelism_config(mesh, tp_size=2)
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = run_steps(model, optimizer, [make_ids()] * 2, accelerator.backward)
    return accelerator.torch_device_mesh is mesh.device_mesh, [loss.item() for loss in losses]


def train_with_trainer(folder: str, mesh: NamedMesh | None, configuration: Any) -> tuple[Any, list[float]]:
    model = (make_tiny() if mesh is None else make_sharded(mesh)).train()
    if mesh is not None:
        model.config.distributed_config = configuration
    arguments = import_transformers().TrainingArguments(
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
        parallelism_config=None if mesh is None else make_parallelism_config(mesh, tp_size=2),
    )
    samples = [{"input_ids": row, "labels": row} for row in make_ids().repeat(2, 1)]
    trainer = import_transformers().Trainer(model=model, args=arguments, train_dataset=samples)
    with Double():
        trainer.train()
    state = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    # save_pretrained() has a barrier. Trainer's save_model() calls it on the writing rank only.
    is_main = torch.distributed.get_rank() == 0
    trainer.model.save_pretrained(f"{folder}/saved", is_main_process=is_main, state_dict=state)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return mesh is None or trainer.accelerator.torch_device_mesh is mesh.device_mesh, losses


def train_on_mesh(folder: str) -> list[Any]:
    state: Any = importlib.import_module("accelerate.state")
    accelerate: Any = importlib.import_module("accelerate")
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")

    def as_on_gpu(_self: Any, accelerator: Any) -> None:
        accelerator.state.distributed_type = accelerate.DistributedType.MULTI_GPU

    # accelerate rejects a ParallelismConfig on the CPU, for reasons that do not concern the mesh.
    accelerate.ParallelismConfig._validate_accelerator = as_on_gpu
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    sizes = configuration.DistributedConfig(tp_size=2)
    results = [train_with_accelerate(mesh, sizes)]
    state.AcceleratorState._reset_state(reset_partial_state=True)
    results.append(train_with_trainer(folder, mesh, sizes))
    mesh.close()
    return results


def train_in_one_process(tokens: torch.Tensor, steps: int) -> list[float]:
    model = make_tiny().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [loss.item() for loss in run_steps(model, optimizer, [tokens] * steps)]


def train_expected(folder: str) -> list[Any]:
    return [(True, train_in_one_process(make_ids(), 2)), train_with_trainer(folder, None, None)]


@pytest.mark.oracle("transformers", "accelerate")
def test_accelerate_and_trainer_train_on_a_named_mesh(tmp_path: Path) -> None:
    make_tiny()
    importlib.import_module("accelerate")
    (expected,) = run_ranks(1, train_expected, f"{tmp_path}/expected", init=False)
    for results in run_ranks(2, train_on_mesh, f"{tmp_path}/sharded"):
        # Trainer rounds its log.
        for tolerance, (uses_mesh, losses), (_, expected_losses) in zip(
            (TOLERANCE, 2e-3), results, expected, strict=True
        ):
            assert uses_mesh
            assert losses == pytest.approx(expected_losses, abs=tolerance)
            assert losses[1] < losses[0]
    load = import_transformers().LlamaForCausalLM.from_pretrained
    saved = load(tmp_path / "sharded" / "saved")
    for name, param in load(tmp_path / "expected" / "saved").named_parameters():
        assert is_close(saved.get_parameter(name), param), name


def make_samples() -> torch.Tensor:
    return torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))


def train_with_fsdp() -> tuple[bool, list[float]]:
    accelerate: Any = importlib.import_module("accelerate")
    from torch.distributed.fsdp import FSDPModule

    # accelerate uses FSDP with GPUs only, for reasons that do not concern the mesh.
    state = accelerate.PartialState
    prepare_backend = state._prepare_backend
    state._prepare_backend = lambda *args: (prepare_backend(*args)[0], accelerate.DistributedType.MULTI_GPU)
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
        cpu=True, parallelism_config=make_parallelism_config(mesh, dp_shard_size=4), fsdp_plugin=plugin
    )
    model, rows = make_tiny().train(), make_samples()
    loader: Any = torch.utils.data.DataLoader([*rows], batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    batches = [batch for _ in range(3) for batch in loader]
    losses = run_steps(model, optimizer, batches, accelerator.backward)
    group = mesh.group("dp_shard")
    uses_mesh = isinstance(model, FSDPModule)
    for param in model.parameters():
        uses_mesh &= isinstance(param, DTensor) and param.device_mesh.get_group() is group
    means = [accelerator.reduce(loss, "mean").item() for loss in losses]
    mesh.close()
    return uses_mesh, means


@pytest.mark.oracle("transformers", "accelerate")
def test_accelerate_uses_fsdp_on_a_named_mesh() -> None:
    make_tiny()
    importlib.import_module("accelerate")
    (expected,) = run_ranks(1, train_in_one_process, make_samples(), 3, init=False)
    for uses_mesh, losses in run_ranks(4, train_with_fsdp):
        assert uses_mesh
        assert losses == pytest.approx(expected, abs=TOLERANCE)


def load_onto_mesh(folder: str) -> dict[str, bool]:
    utils: Any = importlib.import_module("transformers.distributed.utils")
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    mesh = namedmesh.init_mesh(pp=1, dp_replicate=1, fsdp=1, tp=2, device="cpu")
    experts = mesh.add_view("expert", pp=1, dp_replicate=1, efsdp=2, ep=1)
    meshes = utils.TransformersDeviceMesh(mesh.device_mesh, experts)

    class OnNamedMesh(import_transformers().LlamaForCausalLM):  # type: ignore[misc]
        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> Any:
            return distributed_config, device_map or mesh.device, meshes

    reference = make_tiny()
    sizes = configuration.DistributedConfig(tp_size=2)
    model = OnNamedMesh.from_pretrained(folder, distributed_config=sizes)
    dtensors = [param for param in model.parameters() if isinstance(param, DTensor)]
    results = {
        "sharded": len(dtensors) > 0,
        "group": all(param.device_mesh.get_group("tp") is mesh.group("tp") for param in dtensors),
    }
    for trained in (reference, model):
        with Double():
            loss = trained(make_ids(), labels=make_ids()).loss
        loss.backward()
    results["logits"] = is_close(compute_logits(model), compute_logits(reference))
    for name, param in reference.named_parameters():
        results[name] = is_close(model.get_parameter(name).grad, param.grad)
    mesh.close()
    return results


@pytest.mark.oracle("transformers")
def test_transformers_loads_shards_onto_a_named_mesh(tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path)
    for results in run_ranks(2, load_onto_mesh, str(tmp_path)):
        assert results == dict.fromkeys(results, True)
        assert len(results) > 3
