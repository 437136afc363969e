"""DeepSpeed's own code on the groups of a mesh: what it answers once its variables are filled, and what it trains."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from installing import run_python, without
from ranks import fake_world, live_groups, run_ranks
from torch import nn

import namedmesh
from namedmesh.compat import deepspeed

if TYPE_CHECKING:
    from types import ModuleType

STEPS, WIDTH = 3, 8


def original() -> ModuleType:
    """DeepSpeed's module, without what it compiles."""
    importlib.import_module("deepspeed.runtime.engine")
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    return sys.modules["deepspeed.utils.groups"]


def init_deepspeed() -> None:
    library: Any = importlib.import_module("deepspeed")
    sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
    library.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def shown(value: Any) -> Any:
    """An answer with the ranks of groups in their place."""
    if isinstance(value, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(value))
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    return [shown(each) for each in value] if isinstance(value, (tuple, list, range)) else value


def answers(groups: ModuleType) -> dict[str, Any]:
    """What every getter without arguments says."""
    told = {}
    for name, getter in vars(groups).items():
        if name.startswith(("get_", "_get_")) and not getter.__code__.co_argcount:
            if name == "_get_local_all_to_all_group":  # it makes groups, by the number of devices
                continue
            try:
                told[name] = shown(getter())
            except (AssertionError, KeyError, NotImplementedError, TypeError):
                told[name] = "refused"
    return told


@pytest.mark.oracle("deepspeed")
def test_a_bound_mesh_is_answered_as_an_mpu_is() -> None:
    """The getters answer as where the engine was given the mpu; the tensor-parallel ones, which it leaves out, too."""
    theirs = original()
    rng = random.Random(1)
    compared = 0
    for _ in range(25):
        sizes = {axis: rng.choice([1, 2, 3]) for axis in ("pp", "dp", "sp", "tp")}
        layout = namedmesh.Layout(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"})
        world = layout.world_size
        with fake_world(world, rng.randrange(world)):
            init_deepspeed()
            mesh = namedmesh.init_mesh(layout, device="cpu")
            vars(theirs)["mpu"] = deepspeed.mpu(mesh)
            expected = answers(theirs)
            theirs._release_process_group_references()
            before = live_groups()
            deepspeed.bind(mesh)
            told = answers(theirs)
            assert live_groups() == before
            tp = tuple(mesh.ranks("tp")) if "tp" in mesh else tuple(mesh.ranks("dp")[mesh.rank("dp") :][:1])
            assert told["get_tensor_model_parallel_group"] == told["get_model_parallel_group"] == tp
            assert told["get_data_parallel_world_size"] == mesh.size("dp")
            for name, answer in expected.items():
                if answer != "refused":
                    assert told[name] == answer, (sizes, name)
                    compared += 1
            mesh.close()
            assert theirs.mpu is None
            assert theirs._TENSOR_MODEL_PARALLEL_GROUP is None
    assert compared > 300


class Experts(nn.Module):
    """A layer of DeepSpeed's experts."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = importlib.import_module("deepspeed.moe.layer")
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = layer.MoE(
            WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2, capacity_factor=4.0, use_rts=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.experts(self.first(x).relu())
        loss: torch.Tensor = self.last(x + hidden).square().mean() + 0.01 * balance
        return loss


class Attention(nn.Module):
    """Ulysses: attention over whole sequences, of which each rank has a part."""

    def __init__(self, groups: Any) -> None:
        super().__init__()
        layer: Any = importlib.import_module("deepspeed.sequence.layer")
        self.mix, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = layer.DistributedAttention(
            self.attend, groups._get_sequence_parallel_group(), scatter_idx=2, gather_idx=1
        )

    @staticmethod
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(x).unflatten(-1, (2, 3 * WIDTH // 2)).chunk(3, -1)
        mixed = self.attention(query.contiguous(), key.contiguous(), value.contiguous(), 0)
        loss: torch.Tensor = self.last(mixed.flatten(2)).square().mean()
        return loss


def trained(groups: Any, case: str, stage: int, unit: Any, *, bound: bool) -> list[float]:
    library: Any = importlib.import_module("deepspeed")
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    given: dict[str, Any] = {}
    if case == "ulysses" and not bound:
        given["mpu"] = groups.mpu = unit
    if case == "hpz":
        config["zero_optimization"]["zero_hpz_partition_size"] = 2
        with library.zero.Init(config_dict_or_path=config):
            model: nn.Module = nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
            )
    else:
        model = Experts() if case == "experts" else Attention(groups)
    parameters: Any = list(model.parameters())
    if case == "experts":
        utils: Any = importlib.import_module("deepspeed.moe.utils")
        parameters = utils.split_params_into_different_moe_groups_for_optimizer(
            {"params": parameters, "name": "all"}
        )
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, **given)
    losses = []
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss = engine(torch.randn(2, 4, WIDTH, generator=source))
        loss = loss.square().mean() if case == "hpz" else loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    groups._release_process_group_references()
    return losses


CASES = [("experts", 1), ("experts", 2), ("ulysses", 0), ("ulysses", 1), ("ulysses", 2), ("hpz", 3)]


def _train_on_both() -> list[Any]:
    warnings.simplefilter("ignore")
    theirs = original()
    init_deepspeed()
    told = []
    for case, stage in CASES:
        mesh = namedmesh.init_mesh({"dp": 2, "sp": 2} if case == "ulysses" else {"dp": 4}, device="cpu")
        if case == "experts":
            mesh.add_view("expert", edp=2, ep=2)
        expected = trained(theirs, case, stage, deepspeed.mpu(mesh), bound=False)
        with deepspeed.bind(mesh):
            got = trained(theirs, case, stage, None, bound=True)
        mesh.close()
        told.append((case, stage, got, expected))
    return told


@pytest.mark.oracle("deepspeed")
def test_deepspeed_trains_on_a_mesh_as_on_its_own_groups() -> None:
    original()
    for told in run_ranks(4, _train_on_both, timeout=120):
        for case, stage, got, expected in told:
            assert len(set(expected)) == STEPS
            assert got == pytest.approx(expected, abs=1e-6), (case, stage)


# Hugging Face's models, that DeepSpeed shards itself.

SHARDED: dict[str, dict[str, Any]] = {
    "autotp": {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    "autoep": {
        "zero_optimization": {"stage": 1},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": 2,
            "preset_model": "mixtral",
            "use_grouped_mm": False,
        },
    },
}


def play_an_older_transformers() -> None:
    """DeepSpeed 0.19.8 asks with a default, which transformers 5.23 no longer takes."""
    registry: Any = importlib.import_module("transformers.utils.output_capturing")._CanRecordRegistry
    asked = registry.get
    registry.get = lambda self, model, _=None: asked(self, model)


def model_of(case: str) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if case == "autoep":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def trained_by_itself(groups: Any, case: str) -> list[float]:
    library: Any = importlib.import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **SHARDED[case],
    }
    engine, *_ = library.initialize(model=model_of(case), config=config)
    source = torch.Generator().manual_seed(dist.get_rank() // 2 if case == "autotp" else dist.get_rank())
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(32, (2, 4), generator=source)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    groups._release_process_group_references()
    return losses


def _sharded_on_both() -> list[Any]:
    warnings.simplefilter("ignore")
    theirs: Any = original()
    play_an_older_transformers()
    init_deepspeed()
    told = []
    for case in SHARDED:
        expected = trained_by_itself(theirs, case)
        mesh = namedmesh.init_mesh({"dp": 2, "tp": 2} if case == "autotp" else {"dp": 4}, device="cpu")
        if case == "autoep":
            mesh.add_view("expert", edp=2, ep=2)
        with deepspeed.bind(mesh):
            axis, group = (
                ("tp", theirs._TENSOR_MODEL_PARALLEL_GROUP)
                if case == "autotp"
                else (
                    "ep",
                    theirs._EXPERT_PARALLEL_GROUP["ep_size_2"],
                )
            )
            held = group is mesh.group(axis)
            told.append((case, held, trained_by_itself(theirs, case), expected))
        mesh.close()
    return told


@pytest.mark.oracle("deepspeed", "transformers")
def test_deepspeed_shards_models_on_a_mesh_as_on_its_own_groups() -> None:
    original()
    for case in SHARDED:
        model_of(case)
    for name in ("auto_ep", "auto_ep_folding", "auto_ep_layer", "auto_tp", "layers"):
        importlib.import_module(f"deepspeed.module_inject.{name}")
    for told in run_ranks(4, _sharded_on_both, timeout=120):
        for case, held, got, expected in told:
            assert held
            assert len(set(expected)) == STEPS
            assert got == pytest.approx(expected, abs=1e-6), case


@pytest.mark.oracle("deepspeed")
def test_a_bound_mesh_gives_its_groups_and_its_view_of_the_experts() -> None:
    theirs: Any = original()
    with fake_world(16, rank=5):
        init_deepspeed()
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, edp=2, ep=2, etp=2)
        other = namedmesh.init_mesh(dp=8, tp=2, device="cpu")
        deepspeed.bind(mesh)
        assert theirs._get_data_parallel_group() is theirs.get_data_parallel_group() is mesh.group("dp")
        assert theirs.get_tensor_model_parallel_group() is mesh.group("tp")
        assert theirs._get_expert_parallel_group("ep_size_2") is mesh.group("ep")
        assert theirs._get_expert_data_parallel_group("ep_size_2") is mesh.group("edp")
        assert {"ep_size_2": list(mesh.ranks("ep"))} == theirs._EXPERT_PARALLEL_GROUP_RANKS
        assert theirs._get_expert_model_parallel_world_size() == theirs.expert_tensor_parallel_world_size == 2
        assert theirs._clone_world_group() is dist.group.WORLD
        with deepspeed.bind(other):
            assert theirs.get_tensor_model_parallel_group() is other.group("tp")
            assert not theirs._EXPERT_PARALLEL_GROUP
        assert theirs.get_tensor_model_parallel_group() is mesh.group("tp")
        assert theirs._get_max_expert_size_name() == "ep_size_2"
        other.close()
        mesh.close()
        assert theirs.mpu is None
        assert not theirs._EXPERT_PARALLEL_GROUP


def test_without_deepspeed_there_are_no_groups_to_fill() -> None:
    code = (
        without("deepspeed")
        + """
import namedmesh
from namedmesh.compat import deepspeed
mesh = namedmesh.init_mesh(dp=-1, device="cpu")
try:
    deepspeed.bind(mesh)
except RuntimeError as error:
    print(str(error).rpartition(";")[2])
"""
    )
    assert run_python(code, fresh=True) == " install it, or give mpu(mesh) to what takes one\n"
