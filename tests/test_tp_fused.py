"""Several layers in one linear: their parts on the ranks, against one process, and in checkpoints."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from messages import says
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from tp_checks import against_whole, largest_difference
from tp_compare import assert_right, problem_of, sharded, training_difference, whole
from tp_models import Net, gate_up

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize,
    plan_report,
)
from namedmesh.tensor_parallel.fused import rows_moved

if TYPE_CHECKING:
    from pathlib import Path


class FusedAttention(nn.Module):
    """All queries, then all keys, then all values, in one linear; or head by head."""

    def __init__(self, n_heads: int = 4, n_kv_heads: int = 4, *, interleaved: bool = False) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.interleaved = n_heads, n_kv_heads, 4, interleaved
        self.qkv = nn.Linear(16, (n_heads + 2 * n_kv_heads) * self.head_dim)
        self.out = nn.Linear(n_heads * self.head_dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        groups = self.n_heads // self.n_kv_heads
        if self.interleaved:
            q, k, v = fused.unflatten(-1, (-1, groups + 2, self.head_dim)).split([groups, 1, 1], -2)
            q = q.flatten(-3, -2)
            k, v = k.flatten(-3, -2), v.flatten(-3, -2)
        else:
            unit = fused.shape[-1] // (groups + 2)  # the features that this rank finds of keys, and of values
            q, k, v = (
                p.unflatten(-1, (-1, self.head_dim)) for p in fused.split([groups * unit, unit, unit], -1)
            )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        )
        result: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return result


def chunked() -> Net:
    """``chunk(3, -1)``, as written in many models."""

    def compute(m: Any, x: Tensor) -> Any:
        heads = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
        return m.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    return Net(compute, qkv=nn.Linear(16, 48, bias=False), out=nn.Linear(16, 16))


def maxout() -> Net:
    """The larger one of two features that lie next to each other."""
    compute = lambda m, x: m.down(m.up(x).unflatten(-1, (-1, 2)).amax(-1))  # noqa: E731
    return Net(compute, up=nn.Linear(16, 48), down=nn.Linear(24, 16))


CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "q|k|v by chunk": (chunked(), {"qkv": FusedColwiseParallel(blocks=3), "out": RowwiseParallel()}),
    "q|k|v": (FusedAttention(), {"qkv": FusedColwiseParallel(blocks=3), "out": RowwiseParallel()}),
    "q|k|v, fewer kv heads": (
        FusedAttention(8, 4),
        {"qkv": FusedColwiseParallel(blocks=(32, 16, 16)), "out": RowwiseParallel()},
    ),
    "head by head": (
        FusedAttention(interleaved=True),
        {"qkv": FusedColwiseParallel(interleaved=4), "out": RowwiseParallel()},
    ),
    "group by group": (
        FusedAttention(8, 4, interleaved=True),
        {"qkv": FusedColwiseParallel(interleaved=4), "out": RowwiseParallel()},
    ),
    "gate|up": (gate_up(16), {"gate_up": FusedColwiseParallel(blocks=2), "down": RowwiseParallel()}),
    "maxout": (maxout(), {"up": FusedColwiseParallel(blocks=1), "down": RowwiseParallel()}),
    "gate|up, sharded sequence": (
        gate_up(16),
        {
            "gate_up": FusedColwiseParallel(blocks=2, input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    ),
}


def difference(case: str, compiled: bool = False) -> float:
    torch.manual_seed(0)
    module, plan = CASES[case]
    reference = copy.deepcopy(module).double()
    data = torch.randn(2, 8, 16, dtype=torch.float64)
    if "sequence" in case:
        return largest_difference(partial(against_whole, reference, plan, data, cut_in=1, cut_out=1))
    model = sharded(reference, plan)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    return training_difference(model, reference, data)


def differences() -> dict[str, float]:
    found = {case: difference(case) for case in CASES}
    if torch.distributed.get_world_size() == 2:
        found["compiled"] = difference("q|k|v, fewer kv heads", True)
    return found


@pytest.mark.filterwarnings("default")  # torch.compile's own
@pytest.mark.parametrize("size", [2, 4])
def test_a_fused_layer_trains_as_the_whole_one(size: int) -> None:
    assert_right(run_ranks(size, differences), 1e-10, cases=len(CASES) + (size == 2))


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4, 4), (12,), (4, 16, 8), (24, 4)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_row_reaches_the_rank_that_works_on_it(sizes: tuple[int, ...], size: int) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for worker in range(size):
        got = [
            row
            for holder in range(size)
            for move in rows_moved(sizes, size, holder, worker)
            for row in range(*move)
        ]
        parts = [rows // size for rows in sizes]
        assert got == [
            start + worker * part + i for start, part in zip(starts, parts, strict=True) for i in range(part)
        ]


def checkpointed(folder: str) -> list[bool]:
    """A checkpoint written by tp and data parallelism together, and one of the whole model read by them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = FusedAttention(8, 4)
    plan = CASES["q|k|v, fewer kv heads"][1]
    model = parallelize(copy.deepcopy(reference), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    model(torch.randn(2, 8, 16)).sum().backward()
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/sharded")
    read = {name: torch.zeros_like(value) for name, value in reference.state_dict().items()}
    dcp.load(read, checkpoint_id=f"{folder}/sharded")
    same = [torch.equal(value, read[name]) for name, value in reference.state_dict().items()]
    dcp.save(
        {name: value * 2 for name, value in reference.state_dict().items()}, checkpoint_id=f"{folder}/whole"
    )
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/whole")
    model.load_state_dict(state)
    return same + [torch.equal(whole(value), 2 * read[name]) for name, value in model.state_dict().items()]


def test_checkpoints_are_those_of_the_whole_model(tmp_path: Path) -> None:
    assert all(all(same) for same in run_ranks(4, checkpointed, str(tmp_path)))


# --- what a plan must say -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name"), [(case, "qkv") for case in list(CASES)[:5]] + [("gate|up", "gate_up")]
)
def test_a_plain_column_style_does_not_say_how_the_features_lie(case: str, name: str) -> None:
    model, plan = CASES[case]
    features = model.get_submodule(name).out_features
    row = "down" if name == "gate_up" else "out"
    assert problem_of(model, plan | {name: ColwiseParallel()}) == (
        f"{name}: {features} output features, of which {row} takes {model.get_submodule(row).in_features}: several "
        "layers in one, whose features may lie in blocks (q|k|v, gate|up) or head by head; say which, with "
        "FusedColwiseParallel(blocks=...) or FusedColwiseParallel(interleaved=...); blocks=1 where rank after rank is "
        "right"
    )
    assert plan_report(model, 2, plan).rows


def test_parts_that_do_not_fit() -> None:
    model = FusedAttention(8, 2)
    out = {"out": RowwiseParallel()}
    assert problem_of(model, out | {"qkv": FusedColwiseParallel(blocks=(32, 8, 4))}) == (
        "qkv: blocks=(32, 8, 4) do not add up to out_features 48"
    )
    assert problem_of(model, out | {"qkv": FusedColwiseParallel(interleaved=5)}) == (
        "qkv: 5 interleaved heads do not divide out_features 48"
    )
    with pytest.raises(PlanError, match=says("qkv: n_kv_heads 2 ... and heads would be cut; choose a ... 2")):
        plan_report(model, 4, out | {"qkv": FusedColwiseParallel(blocks=(32, 8, 8))})
    assert problem_of(gate_up(16), {"gate_up": FusedColwiseParallel(blocks=(40, 8))}, 16) == (
        "2 problems:\n"
        "  - gate_up: 40 output features of a block are not divisible by the tp size 16; choose a tp size that "
        "divides 40\n"
        "  - gate_up: 8 output features of a block are not divisible by the tp size 16; choose a tp size that "
        "divides 8"
    )
    with pytest.raises(PlanError) as caught:
        FusedColwiseParallel()
    assert str(caught.value) == (
        "FusedColwiseParallel got blocks=None and interleaved=None; give one of them: blocks for q|k|v or gate|up, "
        "one after the other, interleaved for q, k and v head by head"
    )
