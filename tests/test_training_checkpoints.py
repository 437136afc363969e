"""Checkpoints: refused by name, never half written, the same for marked shards, DTensors, one process and others."""

from __future__ import annotations

import multiprocessing
import random
import resource
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from tiny import AdamWOfShards
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import namedmesh
from namedmesh import training
from namedmesh.compat.megatron.tensor_parallel import set_tensor_model_parallel_attributes
from namedmesh.errors import CheckpointError
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize
from namedmesh.training import checkpoint_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


def refusal(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except CheckpointError as error:
        return list(error.problems)
    return []


# --- what is refused -------------------------------------------------------------------------------------------


def refused_in_one_process(root: Path) -> None:
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2, bias=False)})
    path = root / "last"
    assert refusal(lambda: training.load(path, None, saved)) == [
        f"there is no finished checkpoint at {path}; name the path that it was saved to"
    ]
    training.save(path, None, saved)
    other = nn.ModuleDict({"a": nn.Linear(2, 4, bias=False), "c": nn.Linear(1, 1)})
    before = [each.clone() for each in other.state_dict().values()]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert refusal(lambda: training.load(path, None, other, optimizer)) == [
        f"'a.weight' has shape (4, 2) here, and (3, 2) in the checkpoint {path}",
        *(f"{name!r} is not in the checkpoint {path}" for name in ("c.weight", "c.bias")),
        f"the checkpoint {path} was saved without an optimizer; load it without one",
        *(
            f"{name!r} is in the checkpoint {path}, and on no rank in the model"
            for name in ("a.bias", "b.weight")
        ),
    ]
    assert all(torch.equal(one, two) for one, two in zip(before, other.state_dict().values(), strict=True))
    used = root / "used"
    used.mkdir()
    (used / "notes").write_text("mine")
    assert refusal(lambda: training.save(used, None, saved)) == [
        f"{used} exists and is no checkpoint of namedmesh.training; give the checkpoint a path of its own"
    ]
    assert (used / "notes").exists()
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(5))], lr=0.1)
    assert refusal(lambda: training.save(path, None, saved, stranger)) == [
        "the optimizer has parameters of shape (5,) that the model has not; make it from the parameters that "
        "the model has now"
    ]
    grouped = [{"params": saved["a"].parameters(), "lr": 0.1}, {"params": saved["b"].parameters(), "lr": 0.2}]
    training.save(path, None, saved, torch.optim.SGD(grouped))
    together = torch.optim.SGD(saved.parameters(), lr=0.1)
    assert refusal(lambda: training.load(path, None, saved, together)) == [
        "'a.weight', 'b.weight' are in one group of the optimizer, and were in groups with other options; group them "
        "as they were"
    ]
    training.save(path, None, saved, step=1)
    assert training.checkpoint_info(path) == (None, {"step": 1})
    assert {each.name for each in root.iterdir()} == {"last", "used"}


def refused_on_two_ranks(root: Path) -> list[list[str]]:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    torch.manual_seed(mesh.rank())
    stage = nn.Sequential(nn.Linear(2, 2, bias=False))
    colliding = refusal(lambda: training.save(root / "last", mesh, stage))
    named = nn.ModuleDict({str(mesh.rank()): nn.Linear(2, 2, bias=False)})
    differing = refusal(lambda: training.save(root / "last", mesh, named, place=mesh.rank()))
    training.save(root / "last", mesh, named, noise=torch.ones(3), step=1)
    renamed = nn.ModuleDict({str(mesh.rank() * 2): nn.Linear(2, 2, bias=False)})
    missing = refusal(lambda: training.load(root / "last", mesh, renamed))
    mesh.close()
    return [colliding, differing, missing]


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, refused_in_one_process, tmp_path, init=False)
    by_rank = run_ranks(2, refused_on_two_ranks, tmp_path / "two")
    assert by_rank[0] == by_rank[1]
    *others, missing = by_rank[0]
    assert {text.partition(" the ")[0] for text in missing} == {
        "rank 1: '2.weight' is not in",
        "'1.weight' is in",
    }
    assert others == [
        [
            "'0.weight': other values on rank 1 than on rank 0, and a checkpoint holds one tensor of a name; replicas "
            "have to be equal, a layer has its number in the whole model in its name (training.stage_layers), and "
            "plain shards are marked with tensor_model_parallel and partition_dim"
        ],
        [
            "the extra values (place) are not on rank 1 what they are on rank 0; give every rank the same, such as a "
            "list of what each of them has"
        ],
    ]


# --- killed ----------------------------------------------------------------------------------------------------


def refused_by_the_disk(root: Path) -> list[list[str]]:
    """No room on one rank, and a file where a directory has to be."""
    mesh = namedmesh.init_mesh(dp=2)
    model = nn.Linear(300, 300)
    fully_shard(model, mesh=mesh["dp"])
    (root / "file").touch()
    if mesh.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    return [refusal(partial(training.save, root / name, mesh, model)) for name in ("full", "file/below")]


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    full, below = run_ranks(2, refused_by_the_disk, tmp_path)[0]
    assert len(full) == len(below) == 1
    assert full[0].startswith(f"the checkpoint {tmp_path}/full could not be written by rank 1 (")
    assert full[0].endswith("); see to room and permission there")
    assert (
        f"the checkpoint {tmp_path}/file/below could not be written ([Errno 20] Not a directory" in below[0]
    )


def numbered(number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer of which every number is the same."""
    model = nn.ModuleDict({str(each): nn.Linear(8, 8) for each in range(8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return model, optimizer


def write_for_ever(path: Path) -> None:
    torch.set_num_threads(1)
    number = 0
    while True:
        training.save(path, None, *numbered(number), number=number)
        number += 1


def read_back(path: Path) -> tuple[int, set[float]]:
    model, optimizer = numbered(-1)
    number = training.load(path, None, model, optimizer)["number"]
    found = [*model.parameters(), *(kept["momentum_buffer"] for kept in optimizer.state.values())]
    return number, {value for each in found for value in each.flatten().tolist()}


def test_killed_at_any_moment_the_last_good_one_loads(tmp_path: Path) -> None:
    path, moments = tmp_path / "last", random.Random(0)
    context = multiprocessing.get_context("fork")
    for _ in range(8):
        writer = context.Process(target=write_for_ever, args=(path,))
        writer.start()
        while not (path / "namedmesh.pt").exists() and writer.is_alive():
            pass
        writer.join(timeout=moments.uniform(0.0, 0.3))  # it never ends by itself
        writer.kill()
        writer.join()
        ((number, values),) = run_ranks(1, read_back, path, init=False)
        assert values == {number}


# --- plain shards with marks -----------------------------------------------------------------------------------

# Whole shape, dim that is cut (None: whole on every rank), blocks.
CUTS: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "up.weight": ((12, 10), 0, 1),
    "up.bias": ((12,), 0, 1),
    "down.weight": ((10, 12), 1, 1),
    "fused.weight": ((16, 6), 0, 2),
    "norm.weight": ((10,), None, 1),
}


def numbers(name: str, seed: int) -> Tensor:
    return torch.randn(
        CUTS[name][0], generator=torch.Generator().manual_seed(seed + len(name)), dtype=torch.float64
    )


def shard(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    _, dim, blocks = CUTS[name]
    if dim is None:
        return tensor
    return torch.cat([block.chunk(size, dim)[rank] for block in tensor.chunk(blocks, dim)], dim)


class Net(nn.Module):
    """The tensors of CUTS as modules; a rank's shards of them with Megatron's marks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        for name, (_, dim, blocks) in CUTS.items():
            module, _, leaf = name.partition(".")
            if not hasattr(self, module):
                setattr(self, module, nn.Linear(1, 1, bias=False))
            parameter = nn.Parameter(shard(name, numbers(name, 0), rank, size))
            if dim is not None and size > 1:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=blocks)
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
    return {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in found.items()}


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((value - other[key]).abs().max().item() for key, value in one.items())


def through_marked_shards(root: Path) -> list[float]:
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    rank = mesh.rank("tp")
    marked = Net(rank, 2)
    optimizer = adam(marked.parameters())
    marked.step(optimizer, rank, 2)
    training.save(root / "marked", mesh, marked, optimizer)
    expected, whole = Net(), Net()
    expecting, filled = adam(expected.parameters()), adam(whole.parameters())
    expected.step(expecting)
    training.load(root / "marked", None, whole, filled)
    differences = [largest(everything(whole, filled), everything(expected, expecting))]

    expected.step(expecting)
    if rank == 0:
        training.save(root / "whole", None, expected, expecting)
    dist.barrier()
    with mock.patch.object(checkpoint_load, "whole", wraps=checkpoint_load.whole) as worked_out:
        training.load(root / "whole", mesh, marked, optimizer)
    assert worked_out.call_count == 3 * len(CUTS)  # once for each parameter, and for each of its two moments
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
    differences.append(largest(everything(spread, spreading), everything(whole, filled)))
    mesh.close()
    return differences


def test_marked_shards_are_whole_tensors(tmp_path: Path) -> None:
    by_rank = run_ranks(2, through_marked_shards, tmp_path)
    assert by_rank == [[0.0] * 3] * 2


# --- written in the background ---------------------------------------------------------------------------------


def changed_while_it_is_written(root: Path) -> tuple[float, float]:
    """How far what is loaded is from what was saved, and from what the model has become meanwhile."""
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        parallelize(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for layer in net.values():
            fully_shard(layer, mesh=mesh["dp"])
        return net, AdamWOfShards(net.parameters(), lr=0.1)

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
        now = step(net, optimizer)
        changed.set()
        assert written.result() == root / "last"
    training.load(root / "last", mesh, *(other := make()))
    loaded = everything(*other)
    mesh.close()
    return largest(loaded, then), largest(loaded, now)


def test_what_changes_while_it_is_written_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    for saved, changed in run_ranks(4, changed_while_it_is_written, tmp_path):
        assert saved == 0
        assert changed > 0.01


# --- an optimizer that never stepped, and random states --------------------------------------------------------


def states_around_a_checkpoint(root: Path) -> None:
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


def test_states_before_a_checkpoint_are_those_after_it(tmp_path: Path) -> None:
    run_ranks(4, states_around_a_checkpoint, tmp_path)


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
        training.to_pretrained(root / "ours", root / "theirs", shard_bytes=1024)
        config.save_pretrained(root / "theirs")
        loaded = LlamaForCausalLM.from_pretrained(root / "theirs")
        assert len(list((root / "theirs").glob("*.safetensors"))) > 1
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


def test_without_safetensors_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("namedmesh.training.checkpoint_load.find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        training.to_pretrained(tmp_path / "step", tmp_path / "model")
