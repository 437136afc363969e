"""DeepSpeed trains, clips and saves on the groups of a mesh as one process does."""

from __future__ import annotations

import importlib
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from legacy import deepspeed_groups, init_deepspeed
from ranks import run_ranks
from tensors import rounding_tolerance
from torch import Tensor, nn

import namedmesh
from namedmesh.compat import deepspeed
from namedmesh.compat.megatron import tensor_parallel

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

STEPS, SAMPLES, LENGTH, IDS, WIDTH = 6, 8, 6, 16, 8
CLIP = 0.1  # smaller than every gradient norm, so that a wrong norm gives a wrong step
STAGES = (0, 1, 2, 3)
# DeepSpeed's stages 0 and 3 do not support float64. A loss is the mean over all tokens; each loses about log(IDS).
TOLERANCE = rounding_tolerance(torch.float32, SAMPLES * LENGTH, math.log(IDS))


class Block(nn.Module):
    """A model with sharded and replicated weights and biases."""

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
        """Return the mean loss of the tokens."""
        hidden: Tensor = self.embed(ids)
        inner = nn.functional.gelu(self.up(self.norm(hidden))[0])
        hidden = hidden + self.down(inner)[0]
        logits = self.head(self.last(hidden))[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class History(NamedTuple):
    """The losses and gradient norms of the steps of a run."""

    losses: list[float]
    norms: list[float]


def batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(3)
    pairs = torch.randint(IDS, (STEPS, 2, SAMPLES, LENGTH), generator=source)
    return [(ids, targets) for ids, targets in pairs]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_in_one_process(stack: bool = False) -> History:
    torch.manual_seed(0)
    model = nn.Sequential(*make_layers()) if stack else Block()
    optimizer = make_optimizer(model)
    history = History([], [])
    for ids, targets in batches():
        loss = compute_loss(model(ids), targets) if stack else model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        history.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        history.losses.append(loss.item())
    assert min(history.norms) > 2 * CLIP
    return history


def make_config(stage: int, samples: int, **more: Any) -> dict[str, Any]:
    """Make a config for ``deepspeed.initialize``."""
    config = {"train_micro_batch_size_per_gpu": samples, "zero_optimization": {"stage": stage}}
    return {**config, "zero_allow_untested_optimizer": True, "steps_per_print": 1000, **more}


class Run:
    """A model and its DeepSpeed engine on one mesh, and the norms by which it clips."""

    def __init__(
        self, mesh: namedmesh.NamedMesh, stage: int, *, seed: int = 0, with_attributes: bool = True
    ) -> None:
        deepspeed_groups()
        engine_module: Any = sys.modules["deepspeed.runtime.engine"]
        self.mesh = mesh
        self.history = History([], [])
        self.sequence = next((axis for axis in ("sp", "cp") if axis in mesh.layout), None)
        torch.manual_seed(seed)
        model = Block(mesh.group("tp"))
        if not with_attributes:
            for parameter in model.parameters():
                vars(parameter).pop("tensor_model_parallel", None)
        # Stage 0 does not store the norm by which it clips, so record the result of the function.
        self._clipped_norms: list[float] = []
        clip = engine_module.clip_grad_norm_
        engine_module.clip_grad_norm_ = lambda **kwargs: self._clipped_norms.append(float(clip(**kwargs)))
        unit = deepspeed.mpu(mesh)
        config = make_config(stage, SAMPLES // mesh.size("dp"), gradient_clipping=CLIP)
        library = importlib.import_module("deepspeed")
        if isinstance(unit, deepspeed.SequenceParallelUnit) and stage == 3:
            group = unit.get_sequence_data_parallel_group()
            library.zero.Init(module=model, data_parallel_group=group, config_dict_or_path=config, mpu=unit)
        self.engine, *_ = library.initialize(
            model=model, optimizer=make_optimizer(model), mpu=unit, config=config
        )
        self._patched_module = engine_module
        self._upstream_clip = clip

    def get_shard(self, tensor: Tensor) -> Tensor:
        """Return the samples of this rank; with sequence parallelism, its shard of them."""
        tensor = tensor.chunk(self.mesh.size("dp"), 0)[self.mesh.rank("dp")]
        if self.sequence:
            tensor = tensor.chunk(self.mesh.size(self.sequence), 1)[self.mesh.rank(self.sequence)]
        return tensor

    def train(self, first: int, last: int) -> None:
        """Train on the batches from ``first`` to ``last - 1``."""
        for ids, targets in batches()[first:last]:
            loss = self.engine(self.get_shard(ids), self.get_shard(targets))
            # Up to stage 2, the gradients of sequence shards are summed. Stage 3 averages them.
            num_shards = self.mesh.size(self.sequence) if self.sequence else 1
            self.engine.backward(loss / num_shards if self.engine.zero_optimization_stage() < 3 else loss)
            self.engine.step()
            global_loss = loss.detach() / num_shards
            for axis in {"dp", self.sequence} - {None}:
                dist.all_reduce(global_loss, group=self.mesh.group(str(axis)))
            self.history.losses.append(global_loss.item() / self.mesh.size("dp"))
            norm = self.engine.get_global_grad_norm()
            self.history.norms.append(self._clipped_norms[-1] if norm is None else float(norm))

    def finish(self) -> History:
        """Destroy the engine, and return the history."""
        self.engine.destroy()
        self._patched_module.clip_grad_norm_ = self._upstream_clip
        return self.history


def _train_all(folder: str) -> dict[str, Any]:
    histories: dict[str, Any] = {}
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    for stage in STAGES:
        run = Run(mesh, stage)
        run.train(0, 3)
        run.engine.save_checkpoint(f"{folder}/{stage}", tag="three")
        run.train(3, STEPS)
        histories[f"stage {stage}"] = run.finish()
        other = Run(mesh, stage, seed=7)
        other.train(0, 1)
        other.history.losses.clear()
        other.history.norms.clear()
        path, _ = other.engine.load_checkpoint(f"{folder}/{stage}", tag="three")
        other.train(3, STEPS)
        histories[f"stage {stage}, loaded"] = (path is not None, other.finish())
        without = Run(mesh, stage, with_attributes=False)
        without.train(0, 1)
        histories[f"stage {stage}, without attributes"] = without.finish().norms
    mesh.close()
    return histories


def is_close(history: History, expected: History) -> bool:
    pairs = [*zip(history.losses, expected.losses, strict=True)]
    pairs += zip(history.norms, expected.norms, strict=True)
    return max(abs(value - expected_value) for value, expected_value in pairs) < TOLERANCE


@pytest.mark.oracle("deepspeed")
def test_zero_trains_clips_and_saves_as_one_process(tmp_path: Path) -> None:
    deepspeed_groups()  # imported once, before the ranks are forked
    (expected,) = run_ranks(1, train_in_one_process, init=False)
    last_steps = History(expected.losses[3:], expected.norms[3:])
    for histories in run_ranks(4, _train_all, str(tmp_path), timeout=170):
        for stage in STAGES:
            assert is_close(histories[f"stage {stage}"], expected), stage
            is_loaded, resumed = histories[f"stage {stage}, loaded"]
            assert is_loaded
            assert is_close(resumed, last_steps), stage
            # Without the attributes, DeepSpeed silently ignores the shards of the second tp rank.
            norms = histories[f"stage {stage}, without attributes"]
            assert norms[0] < expected.norms[0] - 0.01, stage


def _train_sequence_parallel() -> dict[tuple[str, int], History]:
    histories = {}
    for axis in ("sp", "cp"):
        mesh = namedmesh.init_mesh(namedmesh.Layout(dp=2, **{axis: 2}, tp=1))
        for stage in STAGES if axis == "sp" else STAGES[1:2]:
            run = Run(mesh, stage)
            run.train(0, STEPS)
            histories[axis, stage] = run.finish()
        dist.barrier()
        mesh.close()
    return histories


@pytest.mark.oracle("deepspeed")
def test_sequence_parallel_ranks_train_as_one_process() -> None:
    deepspeed_groups()
    (expected,) = run_ranks(1, train_in_one_process, init=False)
    for histories in run_ranks(4, _train_sequence_parallel, timeout=120):
        assert len(histories) == len(STAGES) + 1
        for case, history in histories.items():
            assert is_close(history, expected), case


# --- pipelines of DeepSpeed on our topology and grid ----------------------------------------------


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    wide = 4 * WIDTH
    first_layers = [nn.Embedding(IDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide)]
    return [*first_layers, nn.GELU(), nn.Linear(wide, WIDTH), nn.Linear(WIDTH, IDS)]


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train_pipeline() -> tuple[list[float], list[str]]:
    deepspeed_groups()
    library = importlib.import_module("deepspeed")
    module = importlib.import_module("deepspeed.runtime.pipe.module")
    # As install() would do before this module is imported.
    vars(module)["PipelineParallelGrid"] = deepspeed.PipelineParallelGrid
    library.init_distributed(dist_backend="gloo")
    model = module.PipelineModule(
        make_layers(),
        topology=deepspeed.PipeDataParallelTopology(2, 2),
        loss_fn=compute_loss,
        partition_method="uniform",
    )
    config = make_config(1, 2, gradient_accumulation_steps=2, gradient_clipping=CLIP)
    engine, *_ = library.initialize(model=model, optimizer=make_optimizer(model), config=config)
    grid = engine.grid
    losses = []
    for batch in batches():
        ids, targets = (tensor.chunk(2)[grid.data_parallel_id].chunk(2) for tensor in batch)
        losses.append(float(engine.train_batch(iter(zip(ids, targets, strict=True)))))
    engine.destroy()
    facts = [type(grid).__module__, type(grid.topology()).__module__, repr(grid.mesh.layout)]
    grid.mesh.close()
    return losses, facts


@pytest.mark.oracle("deepspeed")
def test_pipelines_of_deepspeed_train_on_our_grid_as_one_process() -> None:
    deepspeed_groups()
    (expected,) = run_ranks(1, train_in_one_process, True, init=False)
    package = "namedmesh.compat.deepspeed"
    for losses, facts in run_ranks(4, _train_pipeline, timeout=120):
        assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
        assert facts == [f"{package}.topology"] * 2 + ["Layout(pp=2, dp=2)"]


# --- the groups of a bound mesh, compared with DeepSpeed's own groups -----------------------------


class Experts(nn.Module):
    """A model with an MoE layer of DeepSpeed."""

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


def make_llama() -> nn.Module:
    """Make a small Hugging Face model, which DeepSpeed shards itself."""
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": IDS, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model


# The sizes of the mesh, and the ZeRO stages.
CASES: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "experts": ({"dp": 4}, (1, 2)),
    "tp": ({"dp": 2, "tp": 2}, (1,)),
}


def train_case(groups: Any, case: str, stage: int) -> list[float]:
    """Return the losses of three steps, on the bound mesh or on DeepSpeed's own groups."""
    library: Any = importlib.import_module("deepspeed")
    torch.manual_seed(0)
    config = make_config(stage, 2)
    kwargs: dict[str, Any] = {}
    if case == "tp":
        model = make_llama()
        optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
        config |= {"optimizer": optimizer, "tensor_parallel": {"autotp_size": 2}}
    else:
        model = Experts()
        utils: Any = importlib.import_module("deepspeed.moe.utils")
        split = utils.split_params_into_different_moe_groups_for_optimizer
        parameters = split({"params": list(model.parameters()), "name": "all"})
        kwargs["optimizer"] = torch.optim.AdamW(parameters, lr=0.01)
    engine, *_ = library.initialize(model=model, config=config, **kwargs)
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
    results = []
    sizes, zero_stages = CASES[case]
    for stage in zero_stages:
        mesh = namedmesh.init_mesh(sizes, device="cpu")
        if case == "experts":
            mesh.add_view("expert", edp=2, ep=2)
        expected = train_case(theirs, case, stage)
        with deepspeed.bind(mesh):
            assert case != "tp" or theirs._TENSOR_MODEL_PARALLEL_GROUP is mesh.group("tp")
            results.append((stage, train_case(theirs, case, stage), expected))
        mesh.close()
    return results


WITH_TRANSFORMERS = pytest.param("tp", marks=pytest.mark.oracle("transformers"))


@pytest.mark.oracle("deepspeed")
@pytest.mark.parametrize("case", ["experts", WITH_TRANSFORMERS])
def test_deepspeed_trains_on_a_mesh_as_on_its_own_groups(case: str) -> None:
    deepspeed_groups()
    for results in run_ranks(4, _train_on_both, case, timeout=120):
        for stage, losses, expected in results:
            assert len(set(expected)) == 3
            assert losses == pytest.approx(expected, abs=1e-6), stage
