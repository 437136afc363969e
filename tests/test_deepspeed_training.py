"""``deepspeed.initialize(mpu=...)`` on a mesh: what it trains, clips and saves is what one process does."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import namedmesh
from namedmesh.compat import deepspeed
from namedmesh.compat.deepspeed import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    SequenceParallelUnit,
    mark_parameters,
    mpu,
)
from namedmesh.compat.megatron.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

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
        self.embed = VocabParallelEmbedding(IDS, WIDTH, tp_group=group)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, tp_group=group)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, tp_group=group)
        self.last = nn.LayerNorm(WIDTH)
        self.head = ColumnParallelLinear(WIDTH, IDS, bias=False, gather_output=True, tp_group=group)

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


def one_process() -> Told:
    torch.manual_seed(0)
    model = Block()
    optimizer = made(model)
    told = Told([], [])
    for ids, targets in batches():
        loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        told.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        told.losses.append(loss.item())
    return told


class Run:
    """A model in DeepSpeed's hands on one mesh, and the norms that it clips by."""

    def __init__(self, mesh: namedmesh.NamedMesh, stage: int, *, seed: int = 0, marked: bool = True) -> None:
        engine_module = _quiet_deepspeed()
        self.mesh, self.told = mesh, Told([], [])
        self.sequence = next((axis for axis in ("sp", "cp") if axis in mesh.layout), None)
        torch.manual_seed(seed)
        model = Block(mesh.group("tp"))
        self.shards = mark_parameters(model)
        if not marked:
            for parameter in model.parameters():
                vars(parameter).pop("model_parallel", None)
                vars(parameter).pop("tensor_model_parallel", None)
        self._found: list[float] = []
        clip = engine_module.clip_grad_norm_  # stage 0 clips by its return value and does not keep it
        engine_module.clip_grad_norm_ = lambda **given: self._found.append(float(clip(**given)))
        unit = mpu(mesh)
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES // mesh.size("dp"),
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000,
        }
        library = importlib.import_module("deepspeed")
        if isinstance(unit, SequenceParallelUnit) and stage == 3:
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


def _engine_module() -> Any:
    """Imported before the ranks are forked, so that not each of them does it."""
    return importlib.import_module("deepspeed.runtime.engine")


def _quiet_deepspeed() -> Any:
    """In a rank: no warnings of DeepSpeed's, and nothing compiled."""
    warnings.simplefilter("ignore")
    # Its collectives in shared memory are compiled on first use, and nothing here is about them.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    return _engine_module()


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
        told["shards"] = run.shards
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
    _engine_module()
    (expected,) = run_ranks(1, one_process, init=False)
    assert min(expected.norms) > 2 * CLIP
    rest = Told(expected.losses[3:], expected.norms[3:])
    for told in run_ranks(4, _train_all, str(tmp_path), timeout=170):
        assert told["shards"] == ["embed.weight", "up.weight", "up.bias", "down.weight", "head.weight"]
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
    _engine_module()
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
    _quiet_deepspeed()
    deepspeed = importlib.import_module("deepspeed")
    module = importlib.import_module("deepspeed.runtime.pipe.module")
    vars(module)["PipelineParallelGrid"] = PipelineParallelGrid  # as install() does, for who calls it in time
    deepspeed.init_distributed(dist_backend="gloo")
    model = module.PipelineModule(
        stages(), topology=PipeDataParallelTopology(2, 2), loss_fn=loss_of, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=made(model),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000,
        },
    )
    grid = engine.grid
    losses = []
    for batch in batches():
        ids, targets = (tensor.chunk(2)[grid.data_parallel_id].chunk(2) for tensor in batch)
        losses.append(float(engine.train_batch(iter(zip(ids, targets, strict=True)))))
    engine.destroy()
    told = [type(grid).__module__, type(grid.topology()).__module__, repr(grid.mesh.layout)]
    grid.mesh.close()
    return losses, told


def _train_stages_alone() -> list[float]:
    model = nn.Sequential(*stages())
    optimizer = made(model)
    losses = []
    for ids, targets in batches():
        loss = loss_of(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.oracle("deepspeed")
def test_deepspeed_s_pipelines_run_on_our_grid() -> None:
    _engine_module()
    (expected,) = run_ranks(1, _train_stages_alone, init=False)
    package = "namedmesh.compat.deepspeed"
    for losses, told in run_ranks(4, _train_pipeline, timeout=120):
        assert losses == pytest.approx(expected, abs=TOLERANCE)
        assert told == [f"{package}.topology"] * 2 + ["Layout(pp=2, dp=2)"]


# The same on the groups of a mesh that is bound as on DeepSpeed's own.


def original() -> Any:
    """DeepSpeed's module of groups."""
    _quiet_deepspeed()
    return importlib.import_module("deepspeed.utils.groups")


def init_deepspeed() -> None:
    vars(importlib.import_module("deepspeed.comm.comm"))["cdb"] = None
    importlib.import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


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
    for _ in range(3):
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
            assert len(set(expected)) == 3
            assert got == pytest.approx(expected, abs=1e-6), (case, stage)


# A model of Hugging Face's, that DeepSpeed shards itself.


def small_llama() -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def train_sharded_by_deepspeed(groups: Any) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
    }
    engine, *_ = importlib.import_module("deepspeed").initialize(model=small_llama(), config=config)
    source = torch.Generator().manual_seed(dist.get_rank() // 2)
    losses = []
    for _ in range(3):
        ids = torch.randint(32, (2, 4), generator=source)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    groups._release_process_group_references()
    return losses


def _shard_on_both() -> tuple[bool, list[float], list[float]]:
    theirs = original()
    init_deepspeed()
    expected = train_sharded_by_deepspeed(theirs)
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    with deepspeed.bind(mesh):
        held = theirs._TENSOR_MODEL_PARALLEL_GROUP is mesh.group("tp")
        got = train_sharded_by_deepspeed(theirs)
    mesh.close()
    return held, got, expected


@pytest.mark.oracle("deepspeed", "transformers")
def test_deepspeed_shards_a_model_on_a_mesh_as_on_its_own_groups() -> None:
    original()
    small_llama()
    for held, got, expected in run_ranks(4, _shard_on_both, timeout=120):
        assert held
        assert len(set(expected)) == 3
        assert got == pytest.approx(expected, abs=1e-6)
