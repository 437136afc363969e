"""Which ranks have the same samples, and over which mesh their gradients are averaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from messages import error_of, problems_of
from ranks import fake_world, run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import namedmesh
from namedmesh import training
from namedmesh.errors import ShapeError
from namedmesh.fingerprints import digest

PLACES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dp": ({"dp": 8}, tuple(range(8))),
    "tp": ({"dp": 4, "tp": 2}, (0, 0, 1, 1, 2, 2, 3, 3)),
    "hybrid": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, (0, 0, 1, 1, 2, 2, 3, 3)),
    "cp": ({"dp": 2, "cp": 2, "tp": 2}, (0, 0, 0, 0, 1, 1, 1, 1)),
    "pp": ({"pp": 2, "dp": 2, "tp": 2}, (0, 0, 1, 1, 0, 0, 1, 1)),
    "no data": ({"pp": 4, "tp": 2}, (0,) * 8),
}


@pytest.mark.parametrize("name", PLACES)
def test_samplers_differ_along_data_axes_only(name: str) -> None:
    sizes, places = PLACES[name]
    dataset: Any = range(8)
    for rank in range(8):
        with fake_world(8, rank):
            mesh = namedmesh.init_mesh(**sizes, device="cpu")
            place = training.sampler_kwargs(mesh)
            assert place == {"num_replicas": max(places) + 1, "rank": places[rank]}
            sampler: Any = DistributedSampler(dataset, shuffle=False, **place)
            loaded = [int(each) for each in DataLoader(dataset, sampler=sampler)]
            assert loaded == list(range(places[rank], 8, max(places) + 1))
            mesh.close()


def test_an_axis_that_nobody_knows_is_refused() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(data=2, pp=1, model=4, extra=1, device="cpu")
        known = "('dp', 'dp_replicate', 'dp_shard', 'pp', 'cp', 'tp')"
        tail = (
            "so it is not known whether samples differ along it; make the mesh with these names, and add what has "
            "others with mesh.add_view(...)"
        )
        calls: tuple[Any, ...] = (training.sampler_kwargs, training.fsdp_mesh)
        calls += tuple(partial(call, torch.ones(())) for call in (training.mean_loss, training.count_tokens))
        calls += (partial(training.normalize_loss, torch.ones(()), torch.tensor(1)),)
        for call in calls:
            assert problems_of(partial(call, mesh)) == [
                f"axis {axis!r} is none of {known}, {tail}" for axis in ("data", "model")
            ]
        mesh.close()


def test_fsdp_needs_an_axis_to_shard_over() -> None:
    with fake_world(8):
        refused: tuple[dict[str, Any], ...] = ({"pp": 4, "tp": 2}, {"dp_replicate": 8})
        for sizes in refused:
            mesh = namedmesh.init_mesh(**sizes, device="cpu")
            assert error_of(partial(training.fsdp_mesh, mesh)) == (
                f"AxisError: {mesh.layout} has no axis to shard parameters over; add dp, dp_shard or cp, if of size 1"
            )
            mesh.close()
        mesh = namedmesh.init_mesh(dp_replicate=8, dp_shard=1, device="cpu")
        assert training.fsdp_mesh(mesh).mesh_dim_names == ("dp_replicate", "dp_shard")
        assert training.fsdp_mesh(mesh).shape == (8, 1)
        mesh.close()


def test_tokens_are_counted_by_masks_and_numbers_and_their_mean_is_exact() -> None:
    with fake_world(2):
        mesh = namedmesh.init_mesh(dp=1, cp=1, tp=2, device="cpu")
        targets = torch.tensor([[7, -100], [3, 5]])
        mask = targets != -100
        for counted in (mask, 3, torch.tensor(3), mask.float().sum()):
            assert training.count_tokens(counted, mesh).item() == 3
        assert problems_of(lambda: training.count_tokens(targets, mesh)) == [
            "mask_or_count must be a mask of booleans, or a number, got torch.int64 of shape (2, 2); give a mask such as "
            "targets != -100, or the sum of a mask of another type"
        ]
        with pytest.raises(ShapeError, match=r"a sum of losses in torch.bfloat16 is not exact"):
            training.normalize_loss(torch.ones((), dtype=torch.bfloat16), torch.tensor(3), mesh)
        halves = [torch.tensor(each, dtype=torch.bfloat16) for each in (256.0, 1.0)]
        assert training.mean_loss(halves, mesh) == 257
        logits = torch.randn(4, 10, requires_grad=True)
        nothing = torch.full((4,), -100)
        total = torch.nn.functional.cross_entropy(logits, nothing, reduction="sum")
        loss = training.normalize_loss(total, training.count_tokens(nothing != -100, mesh), mesh)
        loss.backward()
        assert loss == 0
        assert logits.grad is not None
        assert logits.grad.eq(0).all()
        mesh.close()


def test_the_mean_over_tokens_is_compiled_as_one_graph() -> None:
    with fake_world(4):
        mesh = namedmesh.init_mesh(dp=2, cp=2, device="cpu")
        mean = torch.compile(training.normalize_loss, backend="eager", fullgraph=True)
        assert mean(torch.tensor(3.0), torch.tensor(6), mesh) == 2
        mesh.close()


def batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(100, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens.t(), "names": ["a", "b"], "mask": (tokens > 50, torch.empty(0), None)}


def compare_batches() -> list[str]:
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    rank, told = dist.get_rank(), list[str]()

    def check(value: object) -> None:
        told.append(error_of(lambda: training.check_same_batch(value, mesh)))

    mine = batch(mesh.rank("dp"))
    check(mine)
    check(dict(reversed(mine.items())))
    check(None if rank in {2, 3, 4, 5} else mine)
    check(batch(rank if rank in {1, 2} else mesh.rank("dp") + 10))
    check(mine | {"names": ["a", "c"] if rank == 7 else ["a", "b"]})
    check(mine | {"tokens": mine["tokens"].contiguous().view(2, 8) if rank == 7 else mine["tokens"]})
    check(mine | {"tokens": mine["tokens"].float() if rank == 7 else mine["tokens"]})
    long = np.arange(5000) + mesh.rank("dp") * 10
    if rank == 7:
        long[2500] += 1
    check({"array": long})
    check(Sample(torch.arange(3) + mesh.rank("dp"), {"a": {rank // 7}}))
    check(batch(5))
    check(mine | {"image": Image(mesh.rank("dp")), "how": [masked, partial(masked, []), lambda: 0, dict]})
    check(mine | {"image": Image(rank % 2), "reader": iter([1]), "lines": (line for line in [rank])})
    mesh.close()
    return told


class Image:
    """Pixels behind a description that has their place in memory, and that points back to itself."""

    def __init__(self, color: int) -> None:
        self.pixels, self.parent = bytes([color] * 8), self

    def __repr__(self) -> str:
        return f"<Image at {id(self):#x}>"


@dataclass
class Sample:
    tokens: Tensor
    more: object


def test_ranks_with_other_samples_are_named() -> None:
    by_rank = run_ranks(8, compare_batches)
    tail = "loaded different samples, and must load the same; give their samplers sampler_kwargs(mesh) and one seed"
    seven = f"AgreementError: ranks 2, 3, 6 and ranks 7 {tail}"
    both = f"AgreementError: 2 problems:\n  - ranks 0, 4, 5 and ranks 1 {tail}\n  - ranks 2 and ranks 3, 6, 7 {tail}"
    alike = (
        "AgreementError: ranks 0, 1, 4, 5 and ranks 2, 3, 6, 7 loaded the same samples, and must load different ones; give their "
        "samplers sampler_kwargs(mesh)"
    )
    stages = "AgreementError: 2 problems:\n" + "\n".join(
        f"  - ranks {first} and ranks {second} {tail}"
        for first, second in (("0, 4", "1, 5"), ("2, 6", "3, 7"))
    )
    expected = ["", "", "", both, *[seven] * 5, alike, "", stages]
    assert all(told == expected for told in by_rank), by_rank[0]


def test_a_conjugate_is_another_value() -> None:
    z = torch.tensor([1 + 2j])
    assert digest(z) != digest(z.conj()) == digest(z.conj().resolve_conj())


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_arrays_and_tensors_of_every_kind_have_digests() -> None:
    image = np.arange(12).reshape(3, 4)
    assert digest(image[:, ::-1]) == digest(image[:, ::-1].copy()) != digest(image)
    assert digest(np.array(["a", "b"])) != digest(np.array(["a", "c"]))
    days = np.array(["2020-01-01", "2020-01-02"], "datetime64[D]")
    assert digest(days[:1]) != digest(days[1:])
    assert digest(image) == digest(image.astype(">i8"))
    record = np.dtype([("id", "i4")])
    assert digest(np.zeros(2, record)) != digest(np.ones(2, record))
    rows = [torch.ones(2), torch.ones(3)]
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda value: value.to_sparse(),
        lambda value: value.to_sparse_csr(),
        lambda value: torch.nested.nested_tensor([*rows, value[0]]),
        lambda value: torch.nested.nested_tensor([*rows, value[0]], layout=torch.jagged),
    ]
    for make in kinds:
        assert digest(make(torch.eye(3))) == digest(make(torch.eye(3))) != digest(make(2 * torch.eye(3)))


def masked(rows: list[int]) -> tuple[list[int], list[float], float]:
    """A batch with numbers that are drawn for it, in the main process or in a worker."""
    with training.rng_stream("data"):
        return rows, torch.rand(2).tolist(), random.random() if torch.utils.data.get_worker_info() else 0.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
@pytest.mark.parametrize("workers", [0, 1])
def test_stages_load_the_same_samples_with_the_same_masks(workers: int) -> None:
    told = {}
    for rank in range(8):
        with fake_world(8, rank):
            mesh = namedmesh.init_mesh(pp=2, dp=2, cp=2, device="cpu")
            training.seed_all(5, mesh)
            rows: Any = range(6)
            drawn = training.data_generator()
            how: dict[str, Any] = {"collate_fn": masked, "num_workers": workers, "generator": drawn}
            loader = DataLoader(rows, 2, shuffle=True, **how)
            told[rank] = [list(loader) for _ in range(2)]
            assert told[rank] == told[mesh.rank("dp") * 2]
            mesh.close()
    assert told[0] != told[2]
    assert told[0][0] != told[0][1]
