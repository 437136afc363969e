"""The sharded model computes what the whole one does: outputs, gradients, and losses over several steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from tp_compare import assert_right, gradient_of, sharded, tp_mesh, whole
from tp_models import Mlp, OwnForward

from namedmesh.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    reduce_gradients,
)

if TYPE_CHECKING:
    from torch import Tensor


WHOLE, SEQUENCE, LAST = Replicate(), Shard(1), Shard(-1)


def largest(one: Tensor, other: Tensor) -> float:
    return (whole(one.detach()) - whole(other.detach())).abs().max().item()


def gradient_difference(mine: Tensor, reference: Tensor, *, locally: bool) -> float:
    """How far a gradient is from the reference's: as a whole, and once it is summed, as what this rank holds."""
    wanted = gradient_of(reference)
    difference = largest(gradient_of(mine), wanted)
    if isinstance(mine, DTensor) and locally:
        reduce_gradients([mine])
        grad = mine.grad
        assert isinstance(grad, DTensor)
        # On one rank every placement is the same, and torch is free to name another.
        assert grad.placements == mine.placements or mine.device_mesh.size() == 1
        shard = distribute_tensor(wanted, mine.device_mesh, mine.placements, src_data_rank=None)
        difference = max(difference, (grad.to_local() - shard.to_local()).abs().max().item())
    return difference


# (style of `up`, style of `down`, layout of the input, layout of the output)
PAIRS: dict[str, tuple[Any, Any, Any, Any]] = {
    "default": (ColwiseParallel(), RowwiseParallel(), WHOLE, WHOLE),
    "sequence": (
        ColwiseParallel(input_layouts=SEQUENCE),
        RowwiseParallel(output_layouts=SEQUENCE),
        SEQUENCE,
        SEQUENCE,
    ),
    "dim 0": (
        ColwiseParallel(input_layouts=Shard(0)),
        RowwiseParallel(output_layouts=Shard(-3)),
        Shard(0),
        Shard(0),
    ),
    "gathered between": (
        ColwiseParallel(output_layouts=WHOLE),
        RowwiseParallel(input_layouts=WHOLE),
        WHOLE,
        WHOLE,
    ),
    "DTensor between": (ColwiseParallel(use_local_output=False), RowwiseParallel(), WHOLE, WHOLE),
    "DTensor out": (
        ColwiseParallel(),
        RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False),
        WHOLE,
        SEQUENCE,
    ),
    "output features cut": (ColwiseParallel(), RowwiseParallel(output_layouts=LAST), WHOLE, Shard(2)),
    "positive dims": (
        ColwiseParallel(output_layouts=Shard(2)),
        RowwiseParallel(input_layouts=Shard(2)),
        WHOLE,
        WHOLE,
    ),
    "unknown to the short way": (
        ColwiseParallel(input_layouts=LAST, output_layouts=SEQUENCE),
        RowwiseParallel(input_layouts=SEQUENCE),
        LAST,
        WHOLE,
    ),
    "the sequence cut between": (
        ColwiseParallel(output_layouts=SEQUENCE),
        RowwiseParallel(input_layouts=SEQUENCE, output_layouts=SEQUENCE),
        WHOLE,
        SEQUENCE,
    ),
    "torch's": (TorchColwise(), TorchRowwise(), WHOLE, WHOLE),
}


def pair_differences(
    name: str,
    *,
    linear: type[nn.Linear] = nn.Linear,
    frozen: tuple[str, ...] = (),
    as_dtensor: bool = False,
) -> float:
    mesh, (up, down, input_layout, output_layout) = tp_mesh(), PAIRS[name]
    torch.manual_seed(1)
    reference = Mlp().double()
    if linear is not nn.Linear:
        reference.up.__class__ = reference.down.__class__ = linear
    for parameter in frozen:
        reference.get_parameter(parameter).requires_grad_(False)
    model = sharded(reference, {"up": up, "down": down})
    x = torch.randn(4, 8, 8, dtype=torch.float64, requires_grad=True)
    placed = distribute_tensor(x.detach(), mesh, [input_layout], src_data_rank=None)
    shard = (placed if as_dtensor else placed.to_local()).requires_grad_()
    wanted = reference(x)
    wanted.square().sum().backward()
    got = model(shard)
    if not isinstance(got, DTensor):
        assert type(got) is torch.Tensor or name == "torch's"
        got = DTensor.from_local(got, mesh, [output_layout])
    got.full_tensor().square().sum().backward()
    assert shard.grad is not None
    grad = shard.grad if as_dtensor else DTensor.from_local(shard.grad, mesh, [input_layout])
    found = [largest(got, wanted), largest(grad, x.grad)]  # type: ignore[arg-type]
    for (fqn, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad == (fqn not in frozen)
        if mine.requires_grad:
            found.append(gradient_difference(mine, theirs, locally=name != "torch's"))
        else:
            assert mine.grad is None
    return max(found)


def all_pairs() -> dict[str, float]:
    found = {name: pair_differences(name) for name in PAIRS}
    for name in ("default", "sequence", "unknown to the short way"):
        found[f"{name}, DTensor in"] = pair_differences(name, as_dtensor=True)
        found[f"{name}, own forward"] = pair_differences(name, linear=OwnForward)
        for frozen in (("up.weight",), ("down.weight", "up.bias"), ("down.bias", "up.bias", "up.weight")):
            found[f"{name}, {frozen} frozen"] = pair_differences(name, frozen=frozen)
    return found


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_layout_gives_the_whole_models_gradients(tp_size: int) -> None:
    assert_right(run_ranks(tp_size, all_pairs), cases=len(PAIRS) + 3 * 5)


# --- embeddings ---------------------------------------------------------------------------------------------


def embedding_difference(style: Any, output_layout: Any, options: dict[str, Any]) -> float:
    mesh = tp_mesh()
    torch.manual_seed(2)
    reference = nn.Embedding(16, 8, dtype=torch.float64, **options)
    model = sharded(reference, style)
    ids = torch.randint(0, 16, (4, 8))
    ids[0, :4] = 5  # a frequent one
    if style.input_layouts != (Replicate(),):
        mine = distribute_tensor(ids, mesh, style.input_layouts, src_data_rank=None).to_local()
    else:
        mine = ids
    weights = torch.randn(4, 8, 8, dtype=torch.float64)
    wanted = reference(ids)
    (wanted * weights).sum().backward()
    got = model(mine)
    if not isinstance(got, DTensor):
        got = DTensor.from_local(got, mesh, [output_layout])
    (got.full_tensor() * weights).sum().backward()
    return max(largest(got, wanted), gradient_difference(model.weight, reference.weight, locally=True))


ROWS, COLUMNS = partial(RowwiseParallel, input_layouts=WHOLE), ColwiseParallel
# (style, layout of the output, options of the embedding)
EMBEDDINGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{f"rows, padding {i}": (ROWS(), WHOLE, {"padding_idx": i}) for i in (None, 0, 5, -1)},
    **{f"columns, padding {i}": (COLUMNS(), LAST, {"padding_idx": i}) for i in (None, 0, 5, -1)},
    "rows, sequence": (ROWS(output_layouts=SEQUENCE), SEQUENCE, {}),
    "rows, ids cut": (RowwiseParallel(input_layouts=SEQUENCE), WHOLE, {}),
    "rows, DTensor out": (ROWS(use_local_output=False), WHOLE, {}),
    "columns, gathered": (COLUMNS(output_layouts=WHOLE), WHOLE, {}),
    "columns, sequence": (COLUMNS(output_layouts=SEQUENCE), SEQUENCE, {}),
}


def all_embeddings() -> dict[str, float]:
    return {name: embedding_difference(*case) for name, case in EMBEDDINGS.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_embeddings_of_rows_and_columns(tp_size: int) -> None:
    assert_right(run_ranks(tp_size, all_embeddings), cases=len(EMBEDDINGS))


def stranger() -> str:
    model = sharded(nn.Embedding(16, 8), RowwiseParallel(input_layouts=WHOLE))
    with pytest.raises(IndexError) as caught:
        model(torch.tensor([[3, 16]]))
    return str(caught.value)


def test_an_id_outside_the_vocabulary_is_refused_on_every_rank() -> None:
    text = "index out of range in self: the ids run from 3 to 16, the vocabulary from 0 to 15"
    assert run_ranks(2, stranger) == [text] * 2


# --- what surrounds a training step -------------------------------------------------------------------------
