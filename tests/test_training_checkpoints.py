"""Checkpoints of several ranks: marked shards, DTensors and one process; what is refused, lost or failed, on every rank alike."""

from __future__ import annotations

import random
import resource
import threading
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from messages import error_of
from ranks import run_ranks
from tensors import apart, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from training_checks import Part, optimizer_for, parallelized, parts, sharded, states_of

import namedmesh
from namedmesh import training
from namedmesh.compat.megatron.tensor_parallel import set_tensor_model_parallel_attributes
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize
from namedmesh.training import checkpoint_files
from namedmesh.training.checkpoint_files import Ranks
from namedmesh.training.checkpoint_state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

REFUSED = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError(28, "No space left"))


# --- what is refused -------------------------------------------------------------------------------------------


def what_does_not_fit_is_refused_by_name(root: Path) -> None:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    torch.manual_seed(mesh.rank())
    stage = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert error_of(lambda: training.save(root / "last", mesh, stage)) == (
        "CheckpointError: '0.weight': other values on rank 1 than on rank 0, and a checkpoint holds one tensor of a name; replicas "
        "have to be equal, a layer has its number in the whole model in its name (training.stage_layers), and plain shards are "
        "marked with tensor_model_parallel and partition_dim"
    )
    named = nn.ModuleDict({str(mesh.rank()): nn.Linear(2, 2, bias=False)})
    assert error_of(lambda: training.save(root / "last", mesh, named, place=mesh.rank())) == (
        "CheckpointError: the extra values (place) are not on rank 1 what they are on rank 0; give every rank the same, such as a "
        "list of what each of them has"
    )
    training.save(root / "last", mesh, named, noise=torch.ones(3), step=1)
    renamed = nn.ModuleDict({str(mesh.rank() * 2): nn.Linear(2, 2, bias=False)})
    missing = error_of(lambda: training.load(root / "last", mesh, renamed))
    assert "rank 1: '2.weight': not in" in missing
    assert "\n  - '1.weight': in" in missing
    mesh.close()


def what_cannot_be_written_is_one_sentence(root: Path) -> None:
    """No room on one rank, and a file where a directory has to be."""
    mesh = namedmesh.init_mesh(dp=2)
    model = nn.Linear(300, 300)
    fully_shard(model, mesh=mesh["dp"])
    (root / "file").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    full, below = (
        error_of(partial(training.save, root / name, mesh, model)) for name in ("full", "file/below")
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.startswith(f"CheckpointError: the checkpoint {root}/full could not be written by rank 1 (")
    assert full.endswith("); see to room and permission there, and start the job again")
    assert full.count("could not be") == 1
    assert f"the checkpoint {root}/file/below could not be written by rank 0 (NotADirectoryError: " in below
    mesh.close()


class OddError(Exception):
    """What cannot be sent to another rank: it is made from two arguments, and pickled with one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class OnOneRank(nn.Module):
    """A module of which one rank can write the state, and another one cannot read it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.fails = ""

    def fail(self, call: str) -> None:
        if self.fails == call:
            raise OddError(call, "failed")

    def get_extra_state(self) -> list[int]:
        self.fail("get")
        return [1]

    def set_extra_state(self, state: list[int]) -> None:  # noqa: ARG002
        self.fail("set")


def what_fails_on_one_rank_is_told_on_every_rank(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model, second = OnOneRank(), mesh.rank() == 1
    training.save(root / "one", mesh, model)

    def told(call: Any) -> str:
        said = error_of(call)
        dist.barrier()
        return said

    model.fails = "get" if second else ""
    refused = "CheckpointError: rank 1: OddError: {} failed"
    assert told(lambda: training.save(root / "two", mesh, model)) == refused.format("get")
    model.fails = "set" if second else ""
    assert told(lambda: training.load(root / "one", mesh, model)) == refused.format("set")
    model.fails = ""
    run = training.Checkpoints(root / "run", mesh)
    assert run.resume_or_start(model, resume=second) == {"step": 0}  # what the first rank says
    with mock.patch.object(State, "copy", side_effect=MemoryError("full") if second else None):
        training.save(root / "two", mesh, model, async_=True)
        said = told(run.close)
    assert said == "CheckpointError: rank 1: MemoryError: full"
    mesh.close()


# --- plain shards with marks -----------------------------------------------------------------------------------

# Whole shape, and dim that is cut (None: whole on every rank).
CUTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "up.weight": ((12, 10), 0),
    "up.bias": ((12,), 0),
    "down.weight": ((10, 12), 1),
    "norm.weight": ((10,), None),
}


def numbers(name: str, seed: int) -> Tensor:
    return torch.randn(
        CUTS[name][0], generator=torch.Generator().manual_seed(seed + len(name)), dtype=torch.float64
    )


def shard(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    _, dim = CUTS[name]
    return tensor if dim is None else tensor.chunk(size, dim)[rank]


class Net(nn.Module):
    """The tensors of CUTS as modules; a rank's shards of them with Megatron's marks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        for name, (_, dim) in CUTS.items():
            module, _, leaf = name.partition(".")
            if not hasattr(self, module):
                setattr(self, module, nn.Linear(1, 1, bias=False))
            parameter = nn.Parameter(shard(name, numbers(name, 0), rank, size))
            if dim is not None and size > 1:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
            getattr(self, module).register_parameter(leaf, parameter)

    def step(self, optimizer: torch.optim.Optimizer, rank: int = 0, size: int = 1) -> None:
        for name, parameter in self.named_parameters():
            parameter.grad = shard(name, numbers(name, 1), rank, size)
        optimizer.step()


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(net.state_dict())
    for name, parameter in net.named_parameters():
        found |= {f"{name}:{key}": value for key, value in optimizer.state[parameter].items()}
    return {key: whole(each) for key, each in found.items()}


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(apart(value, other[key]) for key, value in one.items())


def marked_shards_are_whole_tensors(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    rank = mesh.rank("tp")
    marked = Net(rank, 2)
    optimizer = adam(marked.parameters())
    marked.step(optimizer, rank, 2)
    training.save(root / "marked", mesh, marked, optimizer)
    expected, one = Net(), Net()
    expecting, filled = adam(expected.parameters()), adam(one.parameters())
    expected.step(expecting)
    training.load(root / "marked", None, one, filled)
    differences = [largest(everything(one, filled), everything(expected, expecting))]

    expected.step(expecting)
    if rank == 0:
        training.save(root / "whole", None, expected, expecting)
    dist.barrier()
    training.load(root / "whole", mesh, marked, optimizer)
    wanted = {
        key: value if key.endswith("step") else shard(key.partition(":")[0], value, rank, 2)
        for key, value in everything(expected, expecting).items()
    }
    differences.append(largest(everything(marked, optimizer), wanted))

    # DTensors, of a model that torch has compiled, on an optimizer that has stepped before.
    spread = Net()
    parallelize(spread, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    spreading = adam(spread.parameters())
    compiled: Any = torch.compile(spread, backend="eager")
    for parameter in spread.parameters():
        parameter.grad = torch.zeros_like(parameter)
    spreading.step()
    training.load(root / "marked", mesh, compiled, spreading)
    differences.append(largest(everything(spread, spreading), everything(one, filled)))
    assert differences == [0.0] * 3
    mesh.close()


# --- in the background -----------------------------------------------------------------------------------------


def a_failure_in_the_background_is_told_on_every_rank(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=mesh["dp"])
    training.save(root / "good", mesh, model)
    more = training.Checkpoints(root / "more", mesh, async_=True)
    for call in (
        lambda: training.save(root / "next", mesh, model),
        lambda: training.load(root / "good", mesh, model),
        lambda: more.save(1, model),
    ):
        with REFUSED if mesh.rank() == 1 else mock.MagicMock():
            training.save(root / "bad", mesh, model, async_=True)
            Ranks.of(mesh).wait()
        said = f"CheckpointError: the checkpoint {root}/bad could not be written by rank 1 ("
        assert error_of(call).startswith(said)
    training.save(root / "next", mesh, model)  # it was told once
    assert more.save(1, model).result().name == "step-000001"
    mesh.close()
    dist.barrier()
    assert sorted(each.name for each in root.iterdir()) == ["good", "more", "next"]


def the_end_of_the_block_waits_for_the_last_save(root: Path) -> None:
    """What is under way is finished; where it failed, the end of the block says so, but hides no other error."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(2, 2)

    def run(name: str, failing: type[Exception] | None = None) -> None:
        with training.Checkpoints(root / name, mesh, async_=True) as checkpoints:
            checkpoints.resume_or_start(model)
            checkpoints.save(1, model)
            if failing is not None:
                raise failing

    run("fine")
    assert (root / "fine" / "step-000001" / "namedmesh.pt").exists()
    with REFUSED if mesh.rank() == 0 else nullcontext():
        said = error_of(lambda: run("bad"))
    place = root / "bad" / "step-000001"
    assert said.startswith(f"CheckpointError: the checkpoint {place} could not be written by rank 0 (")
    with pytest.raises(ZeroDivisionError):
        run("other", ZeroDivisionError)
    Ranks.of(mesh).finish()
    mesh.close()


def what_changes_while_it_is_written_is_not_in_the_checkpoint(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")

    def make() -> tuple[Part, torch.optim.Optimizer]:
        net = sharded(parallelized(parts([0], 1)[0], mesh, ulysses=False), mesh)
        return net, optimizer_for([net])

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        return everything(net, optimizer)

    net, optimizer = make()
    then = {name: each.clone() for name, each in step(net, optimizer).items()}
    changed = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def write_later(*args: Any) -> Any:
        assert changed.wait(60)
        return write(*args)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_later):
        written = training.save(root / "last", mesh, net, optimizer, async_=True)
        assert written is not None
        assert not written.cancel()  # what is written is not given up
        now = step(net, optimizer)
        changed.set()
        assert written.result() == root / "last"
    training.load(root / "last", mesh, *(other := make()))
    loaded = everything(*other)
    mesh.close()
    assert largest(loaded, then) == 0
    assert largest(loaded, now) > 0.01


# --- an optimizer that never stepped, and random states --------------------------------------------------------


def states_before_a_checkpoint_are_those_after_it(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = adam(model.parameters())
    torch.manual_seed(mesh.rank("tp"))
    before = torch.get_rng_state()
    training.save(root / "fresh", mesh, model, optimizer)
    assert not optimizer.state
    torch.rand(3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    training.load(root / "fresh", mesh, model, optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)
    mesh.close()

    # tp has another size now, and the states differed along it: they stay as they are.
    mesh = namedmesh.init_mesh(dp=4, tp=1, device="cpu")
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(7)
    seeded = torch.get_rng_state()
    training.load(root / "fresh", mesh, model)
    assert torch.equal(torch.get_rng_state(), seeded)
    training.save(root / "alike", mesh, model)
    mesh.close()

    # All ranks had the same: so has every rank of any layout.
    mesh = namedmesh.init_mesh(dp=1, tp=4, device="cpu")
    torch.rand(3)
    training.load(root / "alike", mesh, nn.Linear(4, 4))
    assert torch.equal(torch.get_rng_state(), seeded)
    mesh.close()


# --- what state_dict means -------------------------------------------------------------------------------------


class Fresh(nn.Module):
    """A module whose state dict is made afresh each time: a tensor of another size on each rank, and other values."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.average: Tensor
        self.count: Tensor
        self.register_buffer("average", torch.full((2,), float(number)))
        self.register_buffer("count", torch.tensor(number))
        self.amax = torch.arange(float(number + 1))

    def get_extra_state(self) -> Tensor:
        return self.amax.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.amax = state.clone()


class OwnState(torch.optim.SGD):
    """An optimizer that keeps what only this rank has, of several types and shapes, for the shard of a rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for each in group["params"]:
                rank = dist.get_rank()
                self.state[each] = {
                    "scale": torch.full((3,), float(rank)),
                    "absmax": torch.tensor([rank, 200], dtype=torch.uint8),
                    "factors": {"left": torch.eye(2) * rank},
                    "step": 7,
                    "shared": torch.tensor([1.0, 2.0], dtype=torch.float64),
                }


def numbers_of(model: Fresh) -> list[Any]:
    return [model.average.tolist(), int(model.count), model.amax.tolist()]


def what_ranks_have_for_themselves_they_get_back(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    rank = mesh.rank()
    model, sharded = Fresh(rank), nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(sharded, mesh=mesh["dp"])
    optimizer = OwnState(sharded.parameters(), lr=0.1)
    optimizer.step()
    saved = states_of(optimizer)
    both = [model, sharded]
    training.save(root / "one", mesh, both, optimizer)
    other, fresh = Fresh(5), OwnState(sharded.parameters(), lr=0.1)
    training.load(root / "one", mesh, [other, sharded], fresh)
    assert numbers_of(other) == [[rank, rank], rank, list(range(rank + 1))]
    assert states_of(fresh) == saved
    with torch.no_grad():
        model.weight.add_(rank)
    refused = "CheckpointError: 'weight': other values on rank 1 than on rank 0, "
    assert error_of(lambda: training.save(root / "one", mesh, both)).startswith(refused)
    mesh.close()
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    plain = nn.Sequential(nn.Linear(4, 4, bias=False))
    moved = error_of(lambda: training.load(root / "one", mesh, [other, plain], OwnState(plain.parameters())))
    assert (
        "'0.weight:scale', '0.weight:absmax', '0.weight:factors': kept by the optimizer for the part of a rank"
        in moved
    )
    training.load(root / "one", mesh, [other, plain])
    assert numbers_of(other)[:2] == [[0.0, 0.0], 0]  # the first
    mesh.close()


SAME = "a text that is written once"


class Loader:
    """What knows its place in the data, which is another one on each data rank."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def random_numbers_and_loaders_go_on_where_they_were(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    model = nn.Linear(1, 1)
    training.init_parameters(model, 0)
    training.seed_all(0, mesh)

    def draw() -> list[float]:
        return [
            random.random(),
            float(np.random.rand()),  # noqa: NPY002  the state that a job has
            torch.rand(1).item(),
            *drawn_from("data"),
            *drawn_from("tensor"),
        ]

    extra: Any = {"a": np.float64(1.5).item(), "texts": [SAME, SAME]}
    if mesh.rank() == 1:  # equal, but not for pickle
        extra = {"texts": [SAME, "".join(list(SAME))], "a": 1.5}
    training.save(root / "one", mesh, model, data=Loader(10 + mesh.rank()), values=extra)
    expected, loader = draw(), Loader(0)
    training.load(root / "one", mesh, model, data=loader)
    assert draw() == expected
    assert loader.place == 10 + mesh.rank()
    mesh.close()
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    refused = error_of(lambda: training.load(root / "one", mesh, model, data=loader))
    assert "no place in the data for this rank in" in refused
    mesh.close()


def drawn_from(name: str) -> list[float]:
    with training.streams(name):
        return [torch.rand(1).item()]


# --- weights of two stages -------------------------------------------------------------------------------------


class Ends(nn.Module):
    """The first stage, the last one, or both, of an embedding that is the output, too."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        torch.manual_seed(first)
        self.embed = nn.Embedding(4, 2).double() if first else None
        self.head = nn.Linear(2, 4, bias=False).double() if last else None
        if self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        return x if self.head is None else self.head(x)

    def tied(self, mesh: namedmesh.NamedMesh) -> Callable[[], None]:
        ends = [None if each is None else each.weight for each in (self.embed, self.head)]
        return training.tie_stages(mesh, *ends)


def steps(
    mesh: namedmesh.NamedMesh, model: Ends, optimizer: Any, sum_gradients: Any, count: int
) -> list[float]:
    pipe = training.pipeline(model, mesh, microbatches=2, loss=lambda out, y: (out - y).square().mean())
    told = []
    for _ in range(count):
        loss = pipe.step(torch.arange(4), target=torch.eye(4, dtype=torch.float64))
        told.append(training.mean_loss(loss, mesh).item())
        sum_gradients()
        told.append(training.clip_grad_norm_(model.parameters(), 0.5, mesh).item())
        optimizer.step()
        optimizer.zero_grad()
    return told


def tied_stages_are_one_weight_in_every_layout(root: Path) -> None:
    """Saved on two stages and on one, gone on with on the other: the losses and norms of one process."""

    def job(pp: int, source: Path | None, target: Path | None, count: int) -> list[float]:
        mesh = namedmesh.init_mesh(pp=pp, dp=2 // pp, device="cpu")
        model = Ends(mesh.is_first("pp"), mesh.is_last("pp"))
        sum_gradients, optimizer = model.tied(mesh), adam(model.parameters())
        if source is not None:
            training.load(source, mesh, model, optimizer)
        told = steps(mesh, model, optimizer, sum_gradients, count)
        if target is not None:
            training.save(target, mesh, model, optimizer)
        dist.barrier()
        mesh.close()
        return told

    expected = job(1, None, None, 6)
    found = job(1, None, root / "1", 2) + job(2, root / "1", root / "2", 2) + job(1, root / "2", None, 2)
    assert found == [pytest.approx(each, abs=1e-9) for each in expected]
    about = checkpoint_files.read_about(root / "2")
    saved = checkpoint_files.read_metadata(root / "2", about).state_dict_metadata
    assert [name for name in saved if name.startswith("model.")] == ["model.embed.weight"]
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    model = Ends(mesh.is_first("pp"), mesh.is_last("pp"))
    with torch.no_grad():
        next(model.parameters()).add_(mesh.rank())
    training.save(root / "untied", mesh, model)
    model.tied(mesh)
    said = error_of(lambda: training.load(root / "untied", mesh, model))
    assert "'embed.weight' and 'head.weight' are tied here, and are two weights with other values" in said
    with torch.no_grad():
        next(model.parameters()).add_(mesh.rank())
    assert "other values on rank 1 than on rank 0" in error_of(
        lambda: training.save(root / "apart", mesh, model)
    )
    mesh.close()


def a_rank_that_dies_after_the_end_leaves_the_checkpoint(root: Path) -> None:
    """The last broadcast of DCP fails, and the checkpoint is in its place: cleaning up must not remove it."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    finish = checkpoint_files.Writer.finish

    def die(self: Any, *arguments: Any, **named: Any) -> None:
        finish(self, *arguments, **named)
        raise RuntimeError("Connection closed by peer")

    with mock.patch.object(checkpoint_files.Writer, "finish", die):
        assert "closed by peer" in error_of(
            lambda: training.save(root / "one", mesh, nn.Linear(2, 2), step=4)
        )
    assert training.load(root / "one", mesh, nn.Linear(2, 2)) == {"step": 4}
    mesh.close()


# --- all of them, in a world of two ranks and one of four ------------------------------------------------------

ON_RANKS = {
    2: (
        what_does_not_fit_is_refused_by_name,
        what_cannot_be_written_is_one_sentence,
        what_fails_on_one_rank_is_told_on_every_rank,
        marked_shards_are_whole_tensors,
        what_ranks_have_for_themselves_they_get_back,
        random_numbers_and_loaders_go_on_where_they_were,
        a_failure_in_the_background_is_told_on_every_rank,
        the_end_of_the_block_waits_for_the_last_save,
        tied_stages_are_one_weight_in_every_layout,
        a_rank_that_dies_after_the_end_leaves_the_checkpoint,
    ),
    4: (
        what_changes_while_it_is_written_is_not_in_the_checkpoint,
        states_before_a_checkpoint_are_those_after_it,
    ),
}


def in_turn(cases: tuple[Callable[[Path], None], ...], root: Path) -> None:
    for case in cases:
        torch.manual_seed(0)
        (root / case.__name__).mkdir(exist_ok=True)
        case(root / case.__name__)


@pytest.mark.parametrize("ranks", ON_RANKS)
def test_what_checkpoints_of_several_ranks_promise(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, in_turn, ON_RANKS[ranks], tmp_path)


# --- Hugging Face ----------------------------------------------------------------------------------------------


def through_pretrained(root: Path) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    config.tie_word_embeddings = True  # one tensor under two names: theirs keeps one of them
    torch.manual_seed(0)
    model: Any = fully_shard(LlamaForCausalLM(config), mesh=mesh["dp"])
    training.save(root / "ours", mesh, model)
    if mesh.rank() == 0:
        training.to_pretrained(root / "ours", root / "theirs")
        config.save_pretrained(root / "theirs")
        loaded = LlamaForCausalLM.from_pretrained(root / "theirs")
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.mul_(2)
        loaded.save_pretrained(root / "changed")
    dist.barrier()
    before = {name: each.full_tensor() for name, each in model.named_parameters()}
    training.load(root / "changed", mesh, model)
    after = {name: each.full_tensor() for name, each in model.named_parameters()}
    mesh.close()
    return [(after[name] - 2 * each).abs().max().item() for name, each in before.items()]


@pytest.mark.oracle("transformers", "safetensors")
def test_save_pretrained_and_back(tmp_path: Path) -> None:
    import transformers  # noqa: F401  once, before the ranks are forked

    by_rank = run_ranks(2, through_pretrained, tmp_path)
    assert len(by_rank[0]) > 8
    assert {difference for told in by_rank for difference in told} == {0.0}
