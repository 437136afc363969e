"""A sequence that cannot be split is refused on every rank, before gloo ends the process; and what can be sent as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import error_of
from ranks import fake_world, run_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from tp_compare import tp_mesh
from tp_models import Llama, OwnForward, llama_plan

from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

SEQUENCE, WHOLE = Shard(1), Replicate()


def refusals() -> dict[str, tuple[str, str]]:
    """What each layer of each style says of 17 positions, and what it should; after each the ranks are alive."""
    tp = torch.distributed.get_world_size()
    half, odd = torch.zeros(2, 17, 16 // tp), torch.zeros(2, 17, 16)
    ids = torch.zeros(2, 17, dtype=torch.long)
    of_ids: dict[str, Any] = {"input_layouts": WHOLE, "output_layouts": SEQUENCE}
    found = {}
    for name, module, style, value, shape in (
        ("rows", nn.Linear(16, 8), RowwiseParallel(output_layouts=SEQUENCE), half, (2, 17, 8)),
        ("torch's rows", nn.Linear(16, 8), torchs.RowwiseParallel(output_layouts=SEQUENCE), half, (2, 17, 8)),
        ("own forward", OwnForward(16, 8), RowwiseParallel(output_layouts=SEQUENCE), half, (2, 17, 8)),
        ("dim 0", nn.Linear(16, 8), RowwiseParallel(output_layouts=Shard(0)), half[0], (17, 8)),
        ("columns", nn.Linear(16, 8), ColwiseParallel(output_layouts=SEQUENCE), odd, (2, 17, 8)),
        (
            "torch's columns",
            nn.Linear(16, 8),
            torchs.ColwiseParallel(output_layouts=SEQUENCE),
            odd,
            (2, 17, 8),
        ),
        ("embedding", nn.Embedding(32, 16), RowwiseParallel(**of_ids), ids, (2, 17, 16)),
        ("torch's embedding", nn.Embedding(32, 16), torchs.RowwiseParallel(**of_ids), ids, (2, 17, 16)),
        (
            "column embedding",
            nn.Embedding(32, 16),
            ColwiseParallel(output_layouts=SEQUENCE),
            ids,
            (2, 17, 16),
        ),
    ):
        model: Any = parallelize(nn.ModuleDict({"part": module}), tp_mesh(), {"part": style})
        said = error_of(lambda model=model, value=value: model["part"](value))  # type: ignore[misc]
        torch.distributed.barrier()
        wanted = (
            f"ShapeError: dim {shape.index(17)} of an activation of shape {shape} cannot be split into {tp} equal shards (the tp "
            f"size); pad it to {17 + (-17 % tp)}, or to another multiple of {tp}"
        )
        found[name] = said, wanted
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_every_style_that_splits_refuses_what_it_cannot_split(tp: int) -> None:
    for found in run_ranks(tp, refusals):
        assert {name: said for name, (said, _) in found.items()} == {
            name: wanted for name, (_, wanted) in found.items()
        }


def test_one_rank_takes_any_length() -> None:
    with fake_world(1):
        model = parallelize(Llama(), tp_mesh(), llama_plan(sequence_parallel=True))
        assert model(torch.zeros(1, 17, dtype=torch.long)).shape == (1, 17, 32)


def layouts_of_what_goes_on() -> list[bool]:
    """Whether outputs and input gradients lie in memory as a pipeline has to send them."""
    told = []
    for style, width in (
        (ColwiseParallel(input_layouts=SEQUENCE), 8),
        (ColwiseParallel(), 8),
        (RowwiseParallel(output_layouts=SEQUENCE), 4),
        (RowwiseParallel(), 4),
    ):
        layer = parallelize(nn.Linear(8, 8), tp_mesh(), style)
        value = torch.ones(2, 4, width, requires_grad=True)
        output = layer(value)
        gradient: list[torch.Tensor] = []
        value.register_hook(gradient.append)
        output.sum().backward()
        told += [output.is_contiguous(), gradient[0].is_contiguous()]
    return told


def test_what_a_layer_passes_on_can_be_sent_as_it_is() -> None:
    assert run_ranks(2, layouts_of_what_goes_on) == [[True] * 8] * 2
