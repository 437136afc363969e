"""``deepspeed.utils.groups`` over one mesh: the original's answers, and what DeepSpeed trains on it."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, live_groups, run_ranks
from torch import nn

import namedmesh
from namedmesh import LayoutError
from namedmesh.compat.deepspeed import mpu
from namedmesh.compat.errors import ContractError

if TYPE_CHECKING:
    from types import ModuleType

ours: Any = importlib.import_module(
    "namedmesh.compat.deepspeed.groups"
)  # with variables that mypy does not see
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


def answer(module: Any, call: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        return shown(getattr(module, call)(*arguments, **named))
    except (AssertionError, KeyError, NotImplementedError, RuntimeError):
        return "refused"


@pytest.mark.oracle("deepspeed")
def test_every_function_answers_as_deepspeed_s() -> None:
    theirs = original()
    functions = {
        name: list(inspect.signature(function).parameters)
        for name, function in vars(theirs).items()
        if inspect.isfunction(function) and function.__module__ == theirs.__name__
    }
    assert {name: list(inspect.signature(getattr(ours, name)).parameters) for name in functions} == functions
    rng = random.Random(1)
    created = {ours: 0, theirs: 0}
    for _ in range(25):
        sizes = {
            "pp": rng.choice([1, 2]),
            "dp": rng.choice([2, 4, 6]),
            "sp": rng.choice([1, 2]),
            "tp": rng.choice([1, 2]),
        }
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        layout = namedmesh.Layout(**sizes)
        pp, tp, world = sizes.get("pp", 1), sizes.get("tp", 1), layout.world_size
        with fake_world(world, rng.randrange(world)):
            init_deepspeed()
            mesh = namedmesh.init_mesh(layout, device="cpu")
            unit = mpu(mesh)
            has_unit = rng.random() < 0.6
            size, before = (
                rng.choice([1, 2, 2, 3, 4]),
                {"use_data_before_expert_parallel_": rng.random() < 0.4},
            )
            create = rng.choice(
                [
                    ("_create_expert_and_data_parallel", (size,), before),
                    ("_create_expert_and_data_parallel", (size, tp, pp, rng.choice(["tp", "sp"])), {}),
                    ("_create_expert_data_and_model_parallel", (size, unit), before),
                    ("_init_tp_mesh_device", (tp,), {}),
                ]
            )
            calls: list[Any] = [create, ("_create_zero_param_parallel_group", (rng.choice([1, 2, 3]),), {})]
            calls.append(("_get_expert_parallel_ranks", (world, tp, size, pp, *before.values()), {}))
            for name, parameters in functions.items():
                if "get_" in name and "ranks" not in name and name != "_get_local_all_to_all_group":
                    calls.append((name, (f"ep_size_{size}",) if parameters else (), {}))
            answers = []
            for module in (ours, theirs):
                count = live_groups()
                if has_unit:
                    vars(theirs)["mpu"] = ours.mpu = unit
                answers.append([answer(module, *call) for call in calls])
                created[module] += live_groups() - count
            for call, mine, right in zip(calls, *answers, strict=True):
                assert mine == right, (sizes, has_unit, call)
            for module in (ours, theirs):
                module._release_process_group_references()
            mesh.close()
    assert created[ours] * 3 < created[theirs]


def use(module: ModuleType) -> None:
    """Give DeepSpeed, which is imported, a module for its groups; ``install()`` does, for who calls it in time."""
    for name, holder in list(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed" and inspect.ismodule(vars(holder).get("groups")):
            vars(holder)["groups"] = module
    vars(sys.modules["deepspeed.comm"])["initialize_mesh_device"] = ours.initialize_mesh_device


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


def trained(groups: Any, case: str, stage: int) -> list[float]:
    library: Any = importlib.import_module("deepspeed")
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    given: dict[str, Any] = {}
    if case == "ulysses":
        given["mesh_param"] = (2, 2)
        groups.mesh_device = sys.modules[
            "deepspeed.comm"
        ].initialize_mesh_device(  # as the engine does, too late for a model
            (2, 2), ("data_parallel", "sequence_parallel")
        )
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


def _train_on_both() -> tuple[dict[Any, Any], list[Any], tuple[int, int]]:
    warnings.simplefilter("ignore")
    theirs = original()
    init_deepspeed()
    start = live_groups()
    expected = {case: trained(theirs, *case) for case in CASES}
    many = live_groups() - start
    mesh = namedmesh.init_mesh(dp=2, sp=2, device="cpu")
    use(ours)
    ours._release_process_group_references()
    start = live_groups()
    got = {case: trained(ours, *case) for case in CASES}
    few = live_groups() - start
    mesh.close()
    return expected, [got], (few, many)


@pytest.mark.oracle("deepspeed")
def test_deepspeed_trains_on_ours_as_on_its_own() -> None:
    original()
    for expected, (got,), (few, many) in run_ranks(4, _train_on_both, timeout=120):
        for case, losses in expected.items():
            assert len(set(losses)) == STEPS
            assert got[case] == pytest.approx(losses, abs=1e-6), case
        assert few < many / 2


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
    "stage 3": {"zero_optimization": {"stage": 3}},
    "quantized gradients": {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
}


def play_what_a_cpu_lacks() -> None:
    """The kernels of quantized gradients, of two nodes of two ranks, that quantize nothing."""
    ranks, nodes = 2, 2
    module: Any = importlib.import_module("deepspeed.runtime.comm.coalesced_collectives")
    module.quantizer_module = SimpleNamespace(
        Symmetric=None,
        swizzle_quant=lambda whole, *_: (
            whole.reshape(nodes, ranks, -1).transpose(0, 1).flatten(),
            torch.zeros(4),
        ),
        quantized_reduction=lambda shards, *_: (shards.view(ranks, -1).mean(0), torch.zeros(2)),
        dequantize=lambda shards, *_: shards,
    )
    os.environ["LOCAL_SIZE"] = str(ranks)
    # DeepSpeed 0.19.8 asks with a default, which transformers 5.23 no longer takes.
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


def _sharded_on_both() -> tuple[dict[str, list[float]], dict[str, list[float]], bool]:
    warnings.simplefilter("ignore")
    theirs = original()
    play_what_a_cpu_lacks()
    init_deepspeed()
    cases = [case for case in SHARDED if case != "stage 3"]
    expected = {case: trained_by_itself(theirs, case) for case in cases}
    use(ours)
    ours._release_process_group_references()
    got = {case: trained_by_itself(ours, case) for case in ("autoep", "quantized gradients", "stage 3")}
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
    ours.bind(mesh)
    held = ours.get_tensor_model_parallel_group() is mesh.group("tp")
    got["autotp"] = trained_by_itself(ours, "autotp")
    mesh.close()
    return expected, got, held


@pytest.mark.oracle("deepspeed", "transformers")
def test_deepspeed_shards_models_on_ours_as_on_its_own() -> None:
    original()
    for case in SHARDED:
        model_of(case)
    for name in ("auto_ep", "auto_ep_folding", "auto_ep_layer", "auto_tp", "layers"):
        importlib.import_module(f"deepspeed.module_inject.{name}")
    for expected, got, held in run_ranks(4, _sharded_on_both, timeout=120):
        assert held
        for case, losses in expected.items():
            assert len(set(losses)) == STEPS
            assert got[case] == pytest.approx(losses, abs=1e-6), case
        assert got["quantized gradients"] == pytest.approx(got["stage 3"], abs=1e-6)


def test_a_bound_mesh_gives_its_groups_and_its_view_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "16")  # how many devices a node has, for DeepSpeed
    with fake_world(16, rank=5):
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, edp=2, ep=2, etp=2)
        ours.bind(mesh)
        assert ours._get_data_parallel_group() is ours.get_data_parallel_group() is mesh.group("dp")
        assert ours.get_tensor_model_parallel_group() is mesh.group("tp")
        assert ours._get_expert_parallel_group("ep_size_2") is mesh.group("ep")
        assert ours._get_expert_data_parallel_group("ep_size_2") is mesh.group("edp")
        assert {"ep_size_2": list(mesh.ranks("ep"))} == ours._EXPERT_PARALLEL_GROUP_RANKS
        assert ours._get_expert_model_parallel_world_size() == ours.expert_tensor_parallel_world_size == 2
        assert ours._get_max_expert_size_name() == "ep_size_2"
        ours._create_zero_param_parallel_group(2)
        assert ours._get_zero_param_intra_parallel_group() is mesh.group("tp")  # the same ranks
        assert ours._get_local_all_to_all_group()["local_0"] is dist.group.WORLD
        assert ours._init_tp_mesh_device(2) is None
        torch_mesh = ours.initialize_mesh_device((8, 2), ("data_parallel", "sequence_parallel"))
        assert torch_mesh.get_group("sequence_parallel") is mesh.group("tp")
        with pytest.raises(
            LayoutError, match="asks for tensor parallelism of 4, and the mesh that is bound has 2"
        ):
            ours._init_tp_mesh_device(4)
        with pytest.raises(ContractError, match="the groups of hpZ exist already"):
            ours._create_zero_param_parallel_group(2)
        with pytest.raises(
            ContractError, match="'ep_size_4' are not initialized, of ep_size_2; give the MoE"
        ):
            ours._get_expert_parallel_group("ep_size_4")
        mesh.close()
    assert ours.mpu is None  # the state ends with the default group
    assert not ours._EXPERT_PARALLEL_GROUP
    with pytest.raises(ContractError, match=r"default group; .* deepspeed\.init_distributed\(\) first"):
        ours._get_data_parallel_group()
