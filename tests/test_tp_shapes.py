"""A sequence that cannot be split is refused on every rank, before gloo ends the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import fake_world, run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from tp_compare import tp_mesh
from tp_models import Llama, OwnForward, llama_plan

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

SEQUENCE, WHOLE = Shard(1), Replicate()


class Named(nn.Module):
    """Passes what it gets, by position or by name, and a second output."""

    def forward(self, x: Any, *, memory: Any = None) -> Any:
        return x if memory is None else (x, memory)


def refusal(module: nn.Module, style: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the ShapeError that the forward raises; then a collective, to see that all are alive."""
    model = parallelize(nn.ModuleDict({"part": module}), tp_mesh(), {"part": style})
    with pytest.raises(ShapeError) as caught:
        model["part"](*args, **kwargs)  # type: ignore[index]
    torch.distributed.barrier()
    return str(caught.value)


def refusals() -> dict[str, tuple[str, str]]:
    """What each style says, and what it should."""
    tp, mesh = torch.distributed.get_world_size(), tp_mesh()
    half, odd = torch.zeros(2, 17, 16 // tp), torch.zeros(2, 17, 16)
    ids = torch.zeros(2, 17, dtype=torch.long)
    rows = RowwiseParallel(output_layouts=SEQUENCE)
    embedding = RowwiseParallel(input_layouts=WHOLE, output_layouts=SEQUENCE)
    split = PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=SEQUENCE)
    split_kwarg = PrepareModuleInput(
        input_kwarg_layouts={"memory": WHOLE}, desired_input_kwarg_layouts={"memory": SEQUENCE}
    )
    split_out = PrepareModuleOutput(output_layouts=(WHOLE, WHOLE), desired_output_layouts=(WHOLE, SEQUENCE))
    split_both = PrepareModuleInputOutput(
        input_layouts=WHOLE,
        desired_input_layouts=WHOLE,
        output_layouts=WHOLE,
        desired_output_layouts=SEQUENCE,
    )
    replicated = DTensor.from_local(odd, mesh, [WHOLE], run_check=False)
    out8, out16 = text((2, 17, 8), 1, tp), text((2, 17, 16), 1, tp)
    torchs_embedding = TorchRowwise(input_layouts=WHOLE, output_layouts=SEQUENCE)
    columns = ColwiseParallel(output_layouts=SEQUENCE)
    return {
        "rows": (refusal(nn.Linear(16, 8), rows, half), out8),
        "torch's rows": (refusal(nn.Linear(16, 8), TorchRowwise(output_layouts=SEQUENCE), half), out8),
        "own forward": (refusal(OwnForward(16, 8), rows, half), out8),
        "dim 0": (
            refusal(nn.Linear(16, 8), RowwiseParallel(output_layouts=Shard(0)), half[0]),
            text((17, 8), 0, tp),
        ),
        "torch's columns": (refusal(nn.Linear(16, 8), TorchColwise(output_layouts=SEQUENCE), odd), out8),
        "columns": (refusal(nn.Linear(16, 8), columns, odd), out8),
        "embedding": (refusal(nn.Embedding(32, 16), embedding, ids), out16),
        "torch's embedding": (refusal(nn.Embedding(32, 16), torchs_embedding, ids), out16),
        "column embedding": (refusal(nn.Embedding(32, 16), columns, ids), out16),
        "input": (refusal(Named(), split, odd), text((2, 17, 16), 1, tp)),
        "input by name": (
            refusal(Named(), split_kwarg, odd, memory=odd),
            text((2, 17, 16), 1, tp),
        ),
        "output": (refusal(Named(), split_out, odd, memory=odd), out16),
        "input and output": (refusal(Named(), split_both, odd), out16),
        "norm": (
            refusal(nn.LayerNorm(16), SequenceParallel(), replicated),
            text((2, 17, 16), 1, tp),
        ),
    }


def text(shape: tuple[int, ...], dim: int, tp: int) -> str:
    longer = 17 + (-17 % tp)
    return (
        f"dim {dim} of an activation of shape {shape} cannot be split into {tp} equal shards (the tp size); pad it to "
        f"{longer}, or to another multiple of {tp}"
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_every_style_that_splits_refuses_what_it_cannot_split(tp: int) -> None:
    for found in run_ranks(tp, refusals):
        assert {name: got for name, (got, _) in found.items()} == {
            name: text for name, (_, text) in found.items()
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
