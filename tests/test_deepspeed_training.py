"""``deepspeed.initialize(mpu=...)`` on a mesh: what it trains, clips and saves is what one process does."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from legacy import deepspeed_groups, init_deepspeed
from ranks import run_ranks
from torch import Tensor, nn

import namedmesh
from namedmesh.compat import deepspeed
from namedmesh.compat.megatron import tensor_parallel

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

STEPS, SAMPLES, LENGTH, IDS, WIDTH = 6, 8, 6, 16, 8
CLIP = 0.1  # below every norm, so that a wrong norm is a wrong step
STAGES = (0, 1, 2, 3)
TOLERANCE = 2e-6  # of float32, after six steps: DeepSpeed's stages 0 and 3 refuse float64


class Block(nn.Module):
    """Shards and copies: a cut vocabulary, norms on every rank, a cut layer with a cut and one with a whole bias."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.embed = tensor_parallel.VocabParallelEmbedding(IDS, WIDTH, tp_group=group)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = tensor_parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, tp_group=group)
        self.down = tensor_parallel.RowParallelLinear(
            4 * WIDTH, WIDTH, input_is_parallel=True, tp_group=group
        )
        self.last = nn.LayerNorm(WIDTH)
        self.head = tensor_parallel.ColumnParallelLinear(
            WIDTH, IDS, bias=False, gather_output=True, tp_group=group
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the tokens."""
        hidden: Tensor = self.embed(ids)
        inner = nn.functional.gelu(self.up(self.norm(hidden))[0])
        hidden = hidden + self.down(inner)[0]
        logits = self.head(self.last(hidden))[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Told(NamedTuple):
    """What a run says, step by step."""

    losses: list[float]
    norms: list[float]


def batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(3)
    pairs = torch.randint(IDS, (STEPS, 2, SAMPLES, LENGTH), generator=source)
    return [(ids, targets) for ids, targets in pairs]


def made(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def one_process(stack: bool = False) -> Told:
    torch.manual_seed(0)
    model = nn.Sequential(*stages()) if stack else Block()
    optimizer = made(model)
    told = Told([], [])
    for ids, targets in batches():
        loss = loss_of(model(ids), targets) if stack else model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        told.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        told.losses.append(loss.item())
    assert min(told.norms) > 2 * CLIP
    return told


def settings(stage: int, samples: int, **more: Any) -> dict[str, Any]:
    """A configuration of DeepSpeed's."""
    usual = {"train_micro_batch_size_per_gpu": samples, "zero_optimization": {"stage": stage}}
    return {**usual, "zero_allow_untested_optimizer": True, "steps_per_print": 1000, **more}


class Run:
    """A model in DeepSpeed's hands on one mesh, and the norms that it clips by."""

    def __init__(self, mesh: namedmesh.NamedMesh, stage: int, *, seed: int = 0, marked: bool = True) -> None:
        deepspeed_groups()
        engine_module: Any = sys.modules["deepspeed.runtime.engine"]
        self.mesh, self.told = mesh, Told([], [])
        self.sequence = next((axis for axis in ("sp", "cp") if axis in mesh.layout), None)
        torch.manual_seed(seed)
        model = Block(mesh.group("tp"))
        if not marked:
            for parameter in model.parameters():
                vars(parameter).pop("tensor_model_parallel", None)
        self._found: list[float] = []
        clip = engine_module.clip_grad_norm_  # stage 0 clips by its return value and does not keep it
        engine_module.clip_grad_norm_ = lambda **given: self._found.append(float(clip(**given)))
        unit = deepspeed.mpu(mesh)
        config = settings(stage, SAMPLES // mesh.size("dp"), gradient_clipping=CLIP)
        library = importlib.import_module("deepspeed")
        if isinstance(unit, deepspeed.SequenceParallelUnit) and stage == 3:
            group = unit.get_sequence_data_parallel_group()
            library.zero.Init(module=model, data_parallel_group=group, config_dict_or_path=config, mpu=unit)
        self.engine, *_ = library.initialize(model=model, optimizer=made(model), mpu=unit, config=config)
        self._put_back = engine_module, clip

    def mine(self, tensor: Tensor) -> Tensor:
        """This rank's samples, and with sequence parallelism its part of each."""
        tensor = tensor.chunk(self.mesh.size("dp"), 0)[self.mesh.rank("dp")]
        if self.sequence:
            tensor = tensor.chunk(self.mesh.size(self.sequence), 1)[self.mesh.rank(self.sequence)]
        return tensor

    def steps(self, first: int, last: int) -> None:
        for ids, targets in batches()[first:last]:
            loss = self.engine(self.mine(ids), self.mine(targets))
            # Up to stage 2 the gradients of the parts are summed; stage 3 averages them.
            parts = self.mesh.size(self.sequence) if self.sequence else 1
            self.engine.backward(loss / parts if self.engine.zero_optimization_stage() < 3 else loss)
            self.engine.step()
            whole = loss.detach() / parts
            for axis in {"dp", self.sequence} - {None}:
                dist.all_reduce(whole, group=self.mesh.group(str(axis)))
            self.told.losses.append(whole.item() / self.mesh.size("dp"))
            kept = self.engine.get_global_grad_norm()
            self.told.norms.append(self._found[-1] if kept is None else float(kept))

    def end(self) -> Told:
        self.engine.destroy()
        module, clip = self._put_back
        module.clip_grad_norm_ = clip
        return self.told


def _train_all(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    for stage in STAGES:
        run = Run(mesh, stage)
        run.steps(0, 3)
        run.engine.save_checkpoint(f"{folder}/{stage}", tag="three")
        run.steps(3, STEPS)
        told[f"stage {stage}"] = run.end()
        other = Run(mesh, stage, seed=7)
        other.steps(0, 1)
        other.told.losses.clear()
        other.told.norms.clear()
        path, _ = other.engine.load_checkpoint(f"{folder}/{stage}", tag="three")
        other.steps(3, STEPS)
        told[f"stage {stage}, loaded"] = (path is not None, other.end())
        unmarked = Run(mesh, stage, marked=False)
        unmarked.steps(0, 1)
        told[f"stage {stage}, unmarked"] = unmarked.end().norms
    mesh.close()
    return told


def near(told: Told, expected: Told) -> bool:
    pairs = [*zip(told.losses, expected.losses, strict=True), *zip(told.norms, expected.norms, strict=True)]
    return max(abs(one - other) for one, other in pairs) < TOLERANCE


@pytest.mark.oracle("deepspeed")
def test_zero_trains_clips_and_saves_as_one_process(tmp_path: Path) -> None:
    deepspeed_groups()  # before the ranks are forked, once
    (expected,) = run_ranks(1, one_process, init=False)
    rest = Told(expected.losses[3:], expected.norms[3:])
    for told in run_ranks(4, _train_all, str(tmp_path), timeout=170):
        for stage in STAGES:
            assert near(told[f"stage {stage}"], expected), stage
            loaded, after = told[f"stage {stage}, loaded"]
            assert loaded
            assert near(after, rest), stage
            # Without the marks the shards of the second tensor-parallel rank are not counted, and nobody says so.
            assert told[f"stage {stage}, unmarked"][0] < expected.norms[0] - 0.01, stage


def _train_sequence_parallel() -> dict[tuple[str, int], Told]:
    told = {}
    for axis in ("sp", "cp"):
        mesh = namedmesh.init_mesh(namedmesh.Layout(dp=2, **{axis: 2}, tp=1))
        for stage in STAGES if axis == "sp" else STAGES[1:2]:
            run = Run(mesh, stage)
            run.steps(0, STEPS)
            told[axis, stage] = run.end()
        dist.barrier()
        mesh.close()
    return told


@pytest.mark.oracle("deepspeed")
def test_ranks_that_share_a_sequence_share_their_gradients() -> None:
    deepspeed_groups()
    (expected,) = run_ranks(1, one_process, init=False)
    for told in run_ranks(4, _train_sequence_parallel, timeout=120):
        assert len(told) == len(STAGES) + 1
        for case, mine in told.items():
            assert near(mine, expected), case


# DeepSpeed's own pipelines, on a topology and a grid of ours.


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    wide = 4 * WIDTH
    first = [nn.Embedding(IDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide)]
    return [*first, nn.GELU(), nn.Linear(wide, WIDTH), nn.Linear(WIDTH, IDS)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train_pipeline() -> tuple[list[float], list[str]]:
    deepspeed_groups()
    library = importlib.import_module("deepspeed")
    module = importlib.import_module("deepspeed.runtime.pipe.module")
    vars(module)["PipelineParallelGrid"] = (
        deepspeed.PipelineParallelGrid
    )  # as install() does, for who calls it in time
    library.init_distributed(dist_backend="gloo")
    topology, loss = deepspeed.PipeDataParallelTopology(2, 2), loss_of
    model = module.PipelineModule(stages(), topology=topology, loss_fn=loss, partition_method="uniform")
    config = settings(1, 2, gradient_accumulation_steps=2, gradient_clipping=CLIP)
    engine, *_ = library.initialize(model=model, optimizer=made(model), config=config)
    grid = engine.grid
    losses = []
    for batch in batches():
        ids, targets = (tensor.chunk(2)[grid.data_parallel_id].chunk(2) for tensor in batch)
        losses.append(float(engine.train_batch(iter(zip(ids, targets, strict=True)))))
    engine.destroy()
    told = [type(grid).__module__, type(grid.topology()).__module__, repr(grid.mesh.layout)]
    grid.mesh.close()
    return losses, told


@pytest.mark.oracle("deepspeed")
def test_deepspeed_s_pipelines_run_on_our_grid() -> None:
    deepspeed_groups()
    (expected,) = run_ranks(1, one_process, True, init=False)
    package = "namedmesh.compat.deepspeed"
    for losses, told in run_ranks(4, _train_pipeline, timeout=120):
        assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
        assert told == [f"{package}.topology"] * 2 + ["Layout(pp=2, dp=2)"]


# The same on the groups of a mesh that is bound as on DeepSpeed's own.


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


def small_llama() -> nn.Module:
    """A model of Hugging Face's, that DeepSpeed shards itself."""
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": IDS, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model


# The sizes of the mesh, and the stages.
CASES: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "experts": ({"dp": 4}, (1, 2)),
    "tp": ({"dp": 2, "tp": 2}, (1,)),
}


def trained(groups: Any, case: str, stage: int) -> list[float]:
    """Three losses, on the groups of the bound mesh, or on DeepSpeed's own."""
    library: Any = importlib.import_module("deepspeed")
    torch.manual_seed(0)
    config = settings(stage, 2)
    given: dict[str, Any] = {}
    if case == "tp":
        model = small_llama()
        optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
        config |= {"optimizer": optimizer, "tensor_parallel": {"autotp_size": 2}}
    else:
        model = Experts()
        utils: Any = importlib.import_module("deepspeed.moe.utils")
        split = utils.split_params_into_different_moe_groups_for_optimizer
        parameters = split({"params": list(model.parameters()), "name": "all"})
        given["optimizer"] = torch.optim.AdamW(parameters, lr=0.01)
    engine, *_ = library.initialize(model=model, config=config, **given)
    losses = []
    source = torch.Generator().manual_seed(dist.get_rank() // CASES[case][0].get("tp", 1))
    for _ in range(3):
        if case == "tp":
            ids = torch.randint(IDS, (2, 4), generator=source)
            loss = engine(input_ids=ids, labels=ids).loss
        else:
            loss = engine(torch.randn(2, 4, WIDTH, generator=source))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    groups._release_process_group_references()
    return losses


def _train_on_both(case: str) -> list[tuple[int, list[float], list[float]]]:
    theirs = deepspeed_groups()
    init_deepspeed()
    told = []
    sizes, known = CASES[case]
    for stage in known:
        mesh = namedmesh.init_mesh(sizes, device="cpu")
        if case == "experts":
            mesh.add_view("expert", edp=2, ep=2)
        expected = trained(theirs, case, stage)
        with deepspeed.bind(mesh):
            assert case != "tp" or theirs._TENSOR_MODEL_PARALLEL_GROUP is mesh.group("tp")
            told.append((stage, trained(theirs, case, stage), expected))
        mesh.close()
    return told


WITH_TRANSFORMERS = pytest.param("tp", marks=pytest.mark.oracle("transformers"))


@pytest.mark.oracle("deepspeed")
@pytest.mark.parametrize("case", ["experts", WITH_TRANSFORMERS])
def test_deepspeed_trains_on_a_mesh_as_on_its_own_groups(case: str) -> None:
    deepspeed_groups()
    for told in run_ranks(4, _train_on_both, case, timeout=120):
        for stage, got, expected in told:
            assert len(set(expected)) == 3
            assert got == pytest.approx(expected, abs=1e-6), stage
