"""Samples of each rank, the mesh that averages gradients, and losses normalized by tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from messages import error_of, list_problems
from ranks import fake_world, run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import namedmesh
from namedmesh import training
from namedmesh._checks.digests import digest
from namedmesh._errors import ShapeError

# The sizes of the axes, and by rank the position of its sampler.
SAMPLERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dp": ({"dp": 8}, tuple(range(8))),
    "tp": ({"dp": 4, "tp": 2}, (0, 0, 1, 1, 2, 2, 3, 3)),
    "hybrid": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, (0, 0, 1, 1, 2, 2, 3, 3)),
    "cp": ({"dp": 2, "cp": 2, "tp": 2}, (0, 0, 0, 0, 1, 1, 1, 1)),
    "pp": ({"pp": 2, "dp": 2, "tp": 2}, (0, 0, 1, 1, 0, 0, 1, 1)),
    "no data axis": ({"pp": 4, "tp": 2}, (0,) * 8),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_differ_along_data_axes_only(name: str) -> None:
    sizes, positions = SAMPLERS[name]
    num_replicas = max(positions) + 1
    dataset: Any = range(8)
    for rank, position in enumerate(positions):
        with fake_world(8, rank):
            mesh = namedmesh.init_mesh(**sizes, device="cpu")
            kwargs = training.sampler_kwargs(mesh)
            assert kwargs == {"num_replicas": num_replicas, "rank": position}
            sampler: Any = DistributedSampler(dataset, shuffle=False, **kwargs)
            samples = [int(sample) for sample in DataLoader(dataset, sampler=sampler)]
            assert samples == list(range(position, 8, num_replicas))
            mesh.close()


def test_an_axis_of_unknown_meaning_is_an_error() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(data=2, pp=1, model=4, extra=1, device="cpu")
        known_axes = "('dp', 'dp_replicate', 'dp_shard', 'pp', 'cp', 'tp')"
        message = (
            f"axis {{}} is none of {known_axes}, so it is not known whether samples differ along it; make "
            "the mesh with these names, and add an axis of another name with mesh.add_view(...)"
        )
        one = torch.ones(())
        calls: tuple[Callable[[], object], ...] = (
            lambda: training.sampler_kwargs(mesh),
            lambda: training.fsdp_mesh(mesh),
            lambda: training.mean_loss(one, mesh),
            lambda: training.count_tokens(one, mesh),
            lambda: training.normalize_loss(one, one, mesh),
        )
        for call in calls:
            assert list_problems(call) == [message.format("'data'"), message.format("'model'")]
        mesh.close()


def test_fsdp_needs_an_axis_to_shard_over() -> None:
    with fake_world(8):
        layouts: tuple[dict[str, Any], ...] = ({"pp": 4, "tp": 2}, {"dp_replicate": 8})
        for sizes in layouts:
            mesh = namedmesh.init_mesh(**sizes, device="cpu")
            assert error_of(partial(training.fsdp_mesh, mesh)) == (
                f"AxisError: {mesh.layout} has no axis to shard parameters over; add dp, dp_shard or cp, "
                "if only of size 1"
            )
            mesh.close()
        mesh = namedmesh.init_mesh(dp_replicate=8, dp_shard=1, device="cpu")
        assert training.fsdp_mesh(mesh).mesh_dim_names == ("dp_replicate", "dp_shard")
        assert training.fsdp_mesh(mesh).shape == (8, 1)
        mesh.close()


def test_count_tokens_takes_a_boolean_mask_or_a_number() -> None:
    with fake_world(2):
        mesh = namedmesh.init_mesh(dp=1, cp=1, tp=2, device="cpu")
        targets = torch.tensor([[7, -100], [3, 5]])
        mask = targets != -100
        for mask_or_count in (mask, 3, torch.tensor(3), mask.float().sum()):
            assert training.count_tokens(mask_or_count, mesh).item() == 3
        assert list_problems(lambda: training.count_tokens(targets, mesh)) == [
            "mask_or_count must be a boolean mask or a number, got torch.int64 of shape (2, 2); pass a mask "
            "such as targets != -100, or the sum of a mask of another dtype"
        ]
        assert training.count_tokens(0, mesh) == 0
        assert error_of(lambda: training.count_tokens(-3, mesh)) == (
            "TrainingError: mask_or_count must be at least 0, got -3; pass a mask such as targets != -100"
        )
        mesh.close()


@pytest.mark.parametrize("make", [DistributedSampler, DataLoader])
def test_data_without_a_state_is_an_error(make: Any, tmp_path: Path) -> None:
    rows: Any = range(4)
    data = make(rows, num_replicas=1, rank=0) if make is DistributedSampler else make(rows)
    text = error_of(lambda: training.save(tmp_path / "one", None, torch.nn.Linear(1, 1), data=data))
    assert (
        f"data must have state_dict() and load_state_dict(), got {make.__name__}; pass torchdata's " in text
    )
    assert not (tmp_path / "one").exists()


def test_sums_in_half_precision_are_errors_and_means_are_exact() -> None:
    with fake_world(2):
        mesh = namedmesh.init_mesh(dp=1, cp=1, tp=2, device="cpu")
        with pytest.raises(ShapeError, match=r"must be in float32 or float64, got torch\.bfloat16"):
            training.normalize_loss(torch.ones((), dtype=torch.bfloat16), torch.tensor(3), mesh)
        # Their sum is not a number of bfloat16.
        losses = [torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0)]
        assert training.mean_loss(losses, mesh) == 257
        mesh.close()


def test_a_step_without_supervised_tokens_has_zero_loss_and_gradients() -> None:
    with fake_world(2):
        mesh = namedmesh.init_mesh(dp=1, cp=1, tp=2, device="cpu")
        logits = torch.randn(4, 10, requires_grad=True)
        targets = torch.full((4,), -100)
        loss_sum = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        num_tokens = training.count_tokens(targets != -100, mesh)
        loss = training.normalize_loss(loss_sum, num_tokens, mesh)
        loss.backward()
        assert loss == 0
        assert logits.grad is not None
        assert logits.grad.eq(0).all()
        mesh.close()


def test_normalize_loss_compiles_to_one_graph() -> None:
    with fake_world(4):
        mesh = namedmesh.init_mesh(dp=2, cp=2, device="cpu")
        compiled = torch.compile(training.normalize_loss, backend="eager", fullgraph=True)
        assert compiled(torch.tensor(3.0), torch.tensor(6), mesh) == 2
        mesh.close()


def make_batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(100, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens.t(), "names": ["a", "b"], "mask": (tokens > 50, torch.empty(0), None)}


def find_batch_errors() -> list[str]:
    """Return the error of each batch, on a mesh whose ranks 0, 1, 4, 5 must load the same."""
    mesh = namedmesh.init_mesh(pp=2, dp=2, tp=2)
    rank = dist.get_rank()
    errors: list[str] = []

    def check(batch: object) -> None:
        errors.append(error_of(lambda: training.check_same_batch(batch, mesh)))

    batch = make_batch(mesh.rank("dp"))
    tokens = batch["tokens"]
    check(batch)
    check(dict(reversed(batch.items())))
    check(None if rank in {2, 3, 4, 5} else batch)
    check(make_batch(rank if rank in {1, 2} else mesh.rank("dp") + 10))
    check(batch | {"names": ["a", "c"] if rank == 7 else ["a", "b"]})
    check(batch | {"tokens": tokens.contiguous().view(2, 8) if rank == 7 else tokens})
    check(batch | {"tokens": tokens.float() if rank == 7 else tokens})
    array = np.arange(5000) + mesh.rank("dp") * 10
    if rank == 7:
        array[2500] += 1
    check({"array": array})
    check(Sample(torch.arange(3) + mesh.rank("dp"), {"a": {rank // 7}}))
    check(make_batch(5))
    functions = [load_with_random_values, partial(load_with_random_values, []), lambda: 0, dict]
    check(batch | {"image": Image(mesh.rank("dp")), "functions": functions})
    check(batch | {"image": Image(rank % 2), "reader": iter([1]), "lines": (line for line in [rank])})
    mesh.close()
    return errors


class Image:
    """Pixels in an object whose repr has its address in memory, and that refers to itself."""

    def __init__(self, color: int) -> None:
        self.pixels = bytes([color] * 8)
        self.parent = self

    def __repr__(self) -> str:
        return f"<Image at {id(self):#x}>"


@dataclass
class Sample:
    tokens: Tensor
    extra: object


def test_ranks_with_wrong_batches_are_named() -> None:
    by_rank = run_ranks(8, find_batch_errors)
    different = "loaded different samples, and must load the same; give their samplers sampler_kwargs(mesh) and one seed"
    equal = "loaded the same samples, and must load different ones; give their samplers sampler_kwargs(mesh)"
    rank_7 = f"AgreementError: ranks 2, 3, 6 and rank 7 {different}"
    ranks_1_and_2 = (
        "AgreementError: 2 problems:\n"
        f"  - ranks 0, 4, 5 and rank 1 {different}\n"
        f"  - rank 2 and ranks 3, 6, 7 {different}"
    )
    both_shares = f"AgreementError: ranks 0, 1, 4, 5 and ranks 2, 3, 6, 7 {equal}"
    odd_ranks = (
        "AgreementError: 2 problems:\n"
        f"  - ranks 0, 4 and ranks 1, 5 {different}\n"
        f"  - ranks 2, 6 and ranks 3, 7 {different}"
    )
    expected = ["", "", "", ranks_1_and_2, *[rank_7] * 5, both_shares, "", odd_ranks]
    for errors in by_rank:
        assert errors == expected


def test_a_conjugate_has_another_digest() -> None:
    z = torch.tensor([1 + 2j])
    assert digest(z) != digest(z.conj()) == digest(z.conj().resolve_conj())


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_arrays_and_tensors_of_every_kind_have_digests() -> None:
    image = np.arange(12).reshape(3, 4)
    assert digest(image[:, ::-1]) == digest(image[:, ::-1].copy()) != digest(image)
    assert digest(np.array(["a", "b"])) != digest(np.array(["a", "c"]))
    days = np.array(["2020-01-01", "2020-01-02"], "datetime64[D]")
    assert digest(days[:1]) != digest(days[1:])
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


def load_with_random_values(rows: list[int]) -> tuple[list[int], list[float], float]:
    """Return a batch with values that are drawn for it, in the main process or in a worker."""
    in_worker = torch.utils.data.get_worker_info() is not None
    with training.rng_stream("data"):
        return rows, torch.rand(2).tolist(), random.random() if in_worker else 0.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork while threads run
@pytest.mark.parametrize("num_workers", [0, 1])
def test_loaders_draw_the_same_values_along_pp_and_cp(num_workers: int) -> None:
    epochs_by_rank: dict[int, list[list[Any]]] = {}
    rows: Any = range(6)
    for rank in range(8):
        with fake_world(8, rank):
            mesh = namedmesh.init_mesh(pp=2, dp=2, cp=2, device="cpu")
            training.seed_all(5, mesh)
            loader = DataLoader(
                rows,
                batch_size=2,
                shuffle=True,
                collate_fn=load_with_random_values,
                num_workers=num_workers,
                generator=training.data_generator(),
            )
            epochs_by_rank[rank] = [list(loader), list(loader)]
            first_rank = mesh.rank("dp") * 2
            assert epochs_by_rank[rank] == epochs_by_rank[first_rank]
            mesh.close()
    assert epochs_by_rank[0] != epochs_by_rank[2]
    first_epoch, second_epoch = epochs_by_rank[0]
    assert first_epoch != second_epoch
