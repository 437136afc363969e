"""torch.compile takes a whole plan in one graph; autocast does what it does for the whole model."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from tp_compare import apart, gradient_of, sharded, tp_mesh, training_difference, whole
from tp_models import llama_plan as llama_plan
from tp_models import TORCHS_NORMS, Attention, Block, Llama, Mlp, Net, gate_up

from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    SumOutput,
    parallelize,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class NormedAttention(Attention):
    """With a norm over the features of each head, of queries and of keys."""

    def __init__(self) -> None:
        super().__init__(32, 8, 4)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return result


def summed() -> Net:
    """Every rank makes a part of the output."""
    up = nn.Linear(8, 8, bias=False)
    return Net(lambda m, x: m.rest(m.up(x).sum(-1)), up=up, rest=nn.Identity())


def ids() -> Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


OneLayer = partial(Llama, layers=1)
HEADS: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel())
HEADS |= {"wo": RowwiseParallel(), "q_norm": LocalParameters(), "k_norm": LocalParameters()}
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Tensor]]] = {
    "plain": (OneLayer, llama_plan(), ids),
    "sequence": (OneLayer, llama_plan(sequence_parallel=True), ids),
    "torch's norms": (
        OneLayer,
        llama_plan(sequence_parallel=True) | TORCHS_NORMS,
        ids,
    ),
    "norms of heads": (NormedAttention, HEADS, lambda: values(2, 8, 32)),
    "summed": (summed, {"up": ColwiseParallel(), "rest": SumOutput()}, lambda: values(2, 8, 8)),
}


def compiled_cases() -> dict[str, tuple[int, float]]:
    """In how many graphs, and how far outputs and gradients are from those of one process."""
    found = {}
    for name, (make, plan, given) in CASES.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = make().double()
        model, counter = sharded(reference, plan), CompileCounterWithBackend("aot_eager")
        model.compile(backend=counter, fullgraph=True)
        difference = training_difference(model, reference, given(), steps=1)
        found[name] = counter.frame_count, difference
    return found


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_a_plan_is_one_graph() -> None:
    for found in run_ranks(2, compiled_cases, timeout=240.0):
        assert list(found) == list(CASES)
        for name, (graphs, difference) in found.items():
            assert graphs == 1, name
            assert difference < 1e-12, name


def twice() -> nn.Module:
    """A model that uses its layers twice."""
    return Net(lambda m, x: m.mlp(m.mlp(x)), mlp=Mlp(8, 16))


def autocast_types(dtype: torch.dtype) -> tuple[float, set[str]]:
    """Under autocast: how far from one process, as a part of the size, and in which types outputs come."""
    torch.manual_seed(0)
    reference = twice().to(dtype)
    model = sharded(reference, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    x = values(2, 4, 8).to(dtype)
    outs = []
    for one in (reference, model):
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(one(x))
        outs[-1].float().square().sum().backward()
    found = [apart(*outs) / float(outs[0].detach().abs().max())]
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        gradient, wanted = gradient_of(mine), gradient_of(theirs)
        assert gradient.dtype is wanted.dtype is dtype
        found.append(apart(whole(gradient), wanted) / float(wanted.abs().max()))
    return max(found), {str(out.dtype) for out in outs}


@pytest.mark.parametrize(
    ("dtype", "made", "tolerance"),
    # The loss is computed in float32.
    [(torch.float64, torch.float64, 1e-6), (torch.float32, torch.bfloat16, 0.03)],
)
def test_autocast_does_what_it_does_to_the_whole_model(
    dtype: torch.dtype, made: torch.dtype, tolerance: float
) -> None:
    for difference, types in run_ranks(2, autocast_types, dtype):
        assert types == {str(made)}
        assert difference < tolerance


def casts(batches: int) -> list[int]:
    """How often weights are cast in two blocks of several batches each, by one process and by ours."""
    torch.manual_seed(0)
    reference = twice()
    model = sharded(reference, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    counts = []
    for one in (reference, model):
        count = 0
        for _ in range(2):
            with (
                torch.profiler.profile(record_shapes=True, acc_events=True) as profile,
                torch.autocast("cpu", torch.bfloat16),
            ):
                losses = [one(torch.ones(3, 5, 8)).sum() for _ in range(batches)]
            torch.stack(losses).sum().backward()
            events: Any = profile.events()
            shapes = [e.input_shapes[0] for e in events if e.name == "aten::_to_copy"]
            # Activations have three dims here, and [1, 1] is what tells us of the block.
            count += sum(len(shape) == 2 and shape != [1, 1] for shape in shapes)
        counts.append(count)
    return counts


def test_a_block_casts_each_weight_once() -> None:
    for found in run_ranks(2, casts, 3):
        assert found == [4, 4]


# --- collectives in compiled graphs --------------------------------------------------------------------------


def counted(model: nn.Module, value: Tensor) -> dict[str, Counter[str]]:
    """How many collectives of each kind the compiled forward and backward have."""
    from torch._dynamo.backends.common import aot_autograd

    counts: dict[str, Counter[str]] = {}

    def compiler(kind: str) -> Any:
        def count(graph: Any, _inputs: Any) -> Any:
            names = [str(node.target) for node in graph.graph.nodes if "c10d_functional" in str(node.target)]
            counts[kind] = Counter(name.split(".")[1] for name in names if "wait" not in name)
            return make_boxed_func(graph.forward)

        return count

    model.compile(
        backend=aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward")),
        fullgraph=True,
    )
    model(value).sum().backward()
    return counts


def compiled_counts() -> dict[str, dict[str, Counter[str]]]:
    mesh = tp_mesh()
    sequence = {
        key[9:]: style for key, style in llama_plan(sequence_parallel=True).items() if "layers" in key
    }
    plain = {key[9:]: style for key, style in llama_plan().items() if "layers" in key}
    gathered = torch_styles.PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    theirs: dict[str, Any] = dict.fromkeys(("attention_norm", "ffn_norm"), torch_styles.SequenceParallel())
    theirs |= dict.fromkeys(("attention", "feed_forward"), gathered)
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        theirs[name] = torch_styles.ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        theirs[name] = torch_styles.RowwiseParallel(output_layouts=Shard(1))
    fused = {"gate_up": FusedColwiseParallel(blocks=2), "down": RowwiseParallel()}
    shard, value = torch.randn(2, 4, 32, requires_grad=True), torch.randn(2, 8, 32, requires_grad=True)
    return {
        "ours, sequence": counted(parallelize(Block(32, 8, 4, 48), mesh, sequence), shard),
        "torch's, sequence": counted(
            torch_styles.parallelize_module(Block(32, 8, 4, 48), mesh, theirs), shard
        ),
        "ours": counted(parallelize(Block(32, 8, 4, 48), mesh, plain), value),
        "fused": counted(parallelize(gate_up(32), mesh, fused), value),
    }


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_a_compiled_block_has_the_collectives_of_torchs_styles() -> None:
    for found in run_ranks(2, compiled_counts):
        ours, theirs = found["ours, sequence"], found["torch's, sequence"]
        assert ours["forward"] == theirs["forward"]
        assert ours["backward"] == theirs["backward"]
        assert found["ours"] == {"forward": Counter(all_reduce=2), "backward": Counter(all_reduce=2)}
        # Rows of the weight and of the bias, of which each rank sends what another one works on.
        moved = Counter(all_reduce=1, all_to_all_single=2)
        assert found["fused"] == {"forward": moved, "backward": moved}
