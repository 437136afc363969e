"""Checkpointed activations, selectively or whole: gradients are those of one process, whatever is kept."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
import tp_compare
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from tp_compare import assert_right, sharded, tp_mesh, training_difference, whole
from tp_models import llama_plan as llama_plan
from tp_models import TORCHS_NORMS, Llama, Net

import namedmesh
from namedmesh._torch import TORCH
from namedmesh.compat import ezpz, fairscale, megatron
from namedmesh.compat.cross_entropy import cross_entropy
from namedmesh.compat.ezpz import tp as ezpz_tp
from namedmesh.compat.megatron import tensor_parallel as megatron_layers
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    SumOutput,
    parallelize,
)
from namedmesh.compat.regions import RankGroup, all_gather, exchange, gather_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

STEPS = 2
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
KEEP, REPEAT = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep every matrix product."""
    return KEEP if op in PRODUCTS else REPEAT


def offloaded(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep every matrix product in the memory of the host; on the device up to torch 2.10, which cannot."""
    return getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", KEEP) if op in PRODUCTS else REPEAT


def communicated(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep what collectives return, and what waits for it."""
    return KEEP if "c10d" in op.namespace else REPEAT


def everything(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep all there is, but for views, what writes into its input, and what torch's own norm writes into."""
    plain = not any(argument.alias_info for argument in op._schema.arguments)
    return KEEP if plain and op is not aten.mean.dim else REPEAT


class EverySecond:
    """Keep every second matrix product."""

    def __init__(self, first: int) -> None:
        self.seen = {True: first, False: first}

    def __call__(self, ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op not in PRODUCTS:
            return REPEAT
        self.seen[ctx.is_recompute] += 1
        return KEEP if self.seen[ctx.is_recompute] % 2 else REPEAT


POLICIES: dict[str, Callable[[], Any]] = {
    "products": lambda: products,
    "every second": partial(EverySecond, 0),
    "every other": partial(EverySecond, 1),
    "offloaded": lambda: offloaded,
    "communicated": lambda: communicated,
    "everything": lambda: everything,
    "a list": lambda: [aten.mm.default, aten.addmm.default],
}


def selectively(function: Callable[..., Any], *args: Any, policy: str) -> Any:
    contexts = lambda: create_selective_checkpoint_contexts(POLICIES[policy]())  # noqa: E731
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def apart(one: Tensor, other: Tensor) -> float:
    return tp_compare.apart(whole(one), whole(other))


# --- the styles ---------------------------------------------------------------------------------------------

BETWEEN = Shard(1)
PREPARED = PrepareModuleInput(input_layouts=BETWEEN, desired_input_layouts=Replicate())
SEQUENCE_PLAN = llama_plan(sequence_parallel=True)
PLANS: dict[str, dict[str, Any]] = {
    "plain": llama_plan(),
    "sequence": SEQUENCE_PLAN,
    "torch's preparation": SEQUENCE_PLAN
    | {"layers.*.attention": PREPARED, "layers.*.feed_forward": PREPARED},
    "torch's norms": SEQUENCE_PLAN | TORCHS_NORMS,
    "gathered": llama_plan()
    | {
        "layers.*.feed_forward.w1": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.feed_forward.w3": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.feed_forward.w2": RowwiseParallel(input_layouts=Replicate()),
    },
}


IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def trained_differences() -> dict[tuple[str, str], float]:
    """How far training is from that of one process, for each plan and policy."""
    found = {}
    for (name, plan), policy in product(PLANS.items(), POLICIES):
        torch.manual_seed(0)
        several = name == "sequence"  # layers and steps: one plan is enough for these
        reference = Llama(layers=2 if several else 1).double()
        model = sharded(reference, plan)
        for layer in model.layers:
            layer.forward = partial(selectively, layer.forward, policy=policy)
        found[name, policy] = training_difference(model, reference, IDS, steps=STEPS if several else 1)
    return found


def test_every_policy_trains_as_one_process() -> None:
    for found in run_ranks(2, trained_differences, timeout=240.0):
        assert list(found) == list(product(PLANS, POLICIES))
        assert max(found.values()) < 1e-12, found


class Checkpointed(nn.Module):
    """A block of which the matrix products are kept, in a form that the compiler takes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, products)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


def compiled_differences() -> dict[str, float]:
    found = {}
    for name in ("plain", "sequence"):
        torch.manual_seed(0)
        reference = Llama(layers=1).double()
        model = sharded(reference, PLANS[name])
        for each in (model, reference):
            each.layers = nn.ModuleList(map(Checkpointed, each.layers))
        model.compile(backend="aot_eager")
        found[name] = training_difference(model, reference, IDS, steps=STEPS)
    return found


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_compiled_with_kept_products() -> None:
    assert_right(run_ranks(2, compiled_differences))


# --- layers of legacy code, and the functions under them -----------------------------------------------------


def legacy(up: nn.Module, down: nn.Module) -> Net:
    """Two linear layers of a dialect; an output may be a tensor, or a tensor and a bias."""

    def compute(m: Any, x: Tensor) -> Tensor:
        for layer in (m.up, m.down):
            out = layer(x)
            x = torch.tanh(out[0] if isinstance(out, tuple) else out)
        return x

    return Net(compute, up=up, down=down).double()


def legacy_model(dialect: str, *, sequence: bool = False) -> Any:
    if dialect == "megatron":
        config = type("Config", (), {"sequence_parallel": sequence, "params_dtype": torch.float64})
        layers = megatron_layers
        up = layers.ColumnParallelLinear(8, 16, config=config, gather_output=False)
        return legacy(up, layers.RowParallelLinear(16, 8, config=config, input_is_parallel=True))
    module: Any = fairscale.layers if dialect == "fairscale" else ezpz_tp.layers
    up = module.ColumnParallelLinear(8, 16, gather_output=False)
    return legacy(up, module.RowParallelLinear(16, 8, input_is_parallel=True))


def one_process(model: Any, peers: RankGroup) -> nn.Sequential:
    """The same with whole weights."""
    up, down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
    with torch.no_grad():
        for ours, layer, dim in ((model.up, up, 0), (model.down, down, 1)):
            layer.weight.copy_(all_gather(ours.get_parameter("weight").detach(), peers, dim))
            layer.bias.zero_()
    return nn.Sequential(up, nn.Tanh(), down, nn.Tanh())


def legacy_difference(
    model: Any, peers: RankGroup, call: Callable[..., Tensor], *, sequence: bool = False
) -> float:
    """Weights of a dialect's model after some steps, against those of one process."""
    reference = one_process(model, peers)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(STEPS):
        x = torch.randn(4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(2)[peers.rank] if sequence else x
        for one in optimizers:
            one.zero_grad()
        call(model, mine.clone().requires_grad_()).square().sum().backward()
        if sequence:  # as Megatron's training loop does for what is marked
            for parameter in model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    assert parameter.grad is not None
                    torch.distributed.all_reduce(parameter.grad, group=peers.process_group)
        reference(x).square().sum().backward()
        for one in optimizers:
            one.step()
    pairs = zip(((model.up, 0), (model.down, 1)), (reference[0], reference[2]), strict=True)
    return max(
        apart(all_gather(ours.get_parameter("weight").detach(), peers, dim), layer.get_parameter("weight"))
        for (ours, dim), layer in pairs
    )


LEGACY = (("megatron", False), ("megatron", True), ("fairscale", False), ("ezpz", False))


def legacy_differences() -> dict[tuple[str, bool, str], float]:
    found = {}
    peers = RankGroup(torch.distributed.group.WORLD)
    megatron.initialize_model_parallel(tensor_model_parallel_size=2)
    fairscale.initialize_model_parallel(2)
    ezpz_tp.initialize_tensor_parallel(2)
    for (dialect, sequence), policy in product(LEGACY, (*POLICIES, "compiled")):
        torch.manual_seed(0)
        model = legacy_model(dialect, sequence=sequence)
        call: Callable[..., Any] = partial(selectively, policy=policy)
        if policy == "compiled":
            compiled = torch.compile(Checkpointed(model), backend="aot_eager", fullgraph=True)
            call = lambda _model, x, compiled=compiled: compiled(x)  # noqa: E731
        found[dialect, sequence, policy] = legacy_difference(model, peers, call, sequence=sequence)
    return found


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_legacy_layers_under_every_policy() -> None:
    assert_right(run_ranks(2, legacy_differences), cases=len(LEGACY) * (len(POLICIES) + 1))


def outcome(call: Callable[..., Tensor], given: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a differentiable input and of parameters."""
    value = given.clone().requires_grad_(given.is_floating_point() or given.is_complex())
    for parameter in parameters:
        parameter.grad = None
    out = call(value)
    (out * torch.arange(out.numel(), dtype=torch.float64).view(out.shape)).abs().square().sum().backward()
    sources = [value, *parameters] if value.requires_grad else parameters
    assert all(source.grad is not None for source in sources)
    return [out.detach(), *(source.grad for source in sources if source.grad is not None)]


def embedding() -> nn.Embedding:
    return nn.Embedding(16, 8, dtype=torch.float64)


def parts(mesh: DeviceMesh) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Single styles, layers and functions over the ranks, each with an input."""
    peers, mappings = RankGroup(mesh), fairscale.mappings
    gathered = megatron_layers.gather_from_sequence_parallel_region
    scattered = megatron_layers.reduce_scatter_to_sequence_parallel_region
    target = torch.tensor([[1, 3, 14], [0, 9, 2]])
    ids = torch.tensor([[1, 3, 14, 1], [0, 9, 2, 2]])
    x = torch.linspace(-1, 2, 64, dtype=torch.float64).view(2, 4, 8)
    row = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    norm = partial(nn.LayerNorm, 8, dtype=torch.float64)
    layers = fairscale.layers
    styles: dict[str, tuple[nn.Module, Any, Tensor]] = {
        "column embedding": (embedding(), ColwiseParallel(output_layouts=Replicate()), ids),
        "row embedding": (embedding(), RowwiseParallel(input_layouts=Replicate()), ids),
        "row embedding, cut": (embedding(), row, ids),
        "local parameters": (norm(), LocalParameters(), x),
        "torch's sequence": (norm(), SequenceParallel(use_local_output=True), x),
        "summed": (nn.Tanh(), SumOutput(), x),
        "column, complex": (nn.Linear(8, 8, dtype=torch.complex128), ColwiseParallel(), x * 1j),
        "row, complex": (nn.Linear(16, 8, dtype=torch.complex128), RowwiseParallel(), x * 1j),
    }
    if TORCH.release < (2, 9):  # gloo cannot hand out parts of a complex weight there
        styles = {name: each for name, each in styles.items() if "complex" not in name}
    found: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        name: (parallelize(module, mesh, style), value) for name, (module, style, value) in styles.items()
    }
    for kind in (layers.VocabParallelEmbedding, layers.ParallelEmbedding):
        for options in ({}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}):
            found[f"{kind.__name__}, {options}"] = kind(16, 8, **options).double(), ids
    return found | {
        "loss": (lambda x: cross_entropy(x[:, :3], target, peers), x),
        "smoothed loss": (lambda x: cross_entropy(x[:, :3], target, peers, 0.1), x),
        "gathered parts": (lambda x: gather_parts(x, peers, 1), x),
        "gathered, uneven": (lambda x: gathered(x[: 1 + peers.rank], True, peers.process_group, [1, 2]), x),
        "gathered alike, uneven": (
            lambda x: gathered(x[: 1 + peers.rank], False, peers.process_group, [1, 2]),
            x,
        ),
        "scattered, uneven": (lambda x: scattered(x, peers.process_group, [0, 2]), x),
        "exchanged": (lambda x: exchange(x, peers), x),
        "exchanged, uneven": (
            lambda x: exchange(x, peers, ([0, 2], [0, 0] if peers.rank == 0 else [2, 2])),
            x,
        ),
        "copied": (lambda x: mappings.copy_to_model_parallel_region(x * 2) * 3, x),
        "reduced": (lambda x: mappings.reduce_from_model_parallel_region(x * 2) * 3, x),
        "cut": (lambda x: mappings.scatter_to_model_parallel_region(x * 2) * 3, x),
        "gathered": (lambda x: mappings.gather_from_model_parallel_region(x * 2) * 3, x),
    }


def part_differences() -> dict[str, float]:
    """Outputs and gradients with each policy, against those without one."""
    fairscale.initialize_model_parallel(2)
    torch.manual_seed(0)
    found = {}
    for name, (call, value) in parts(tp_mesh()).items():
        parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
        wanted = outcome(call, value, parameters)
        for policy in POLICIES:
            got = outcome(partial(selectively, call, policy=policy), value, parameters)
            found[f"{name}: {policy}"] = max(map(apart, got, wanted))
    return found


def test_every_style_layer_and_function_under_every_policy() -> None:
    assert_right(
        run_ranks(2, part_differences), cases=(26 if TORCH.release >= (2, 9) else 24) * len(POLICIES)
    )


# --- a mesh that is selected for the forward only ------------------------------------------------------------


def mapped(dialect: str, model: nn.Module, x: Tensor) -> Tensor:
    """Layers and a function of a dialect, which ask for their ranks when they run."""
    if dialect == "fairscale":
        x = fairscale.mappings.copy_to_model_parallel_region(x)
    else:
        x = ezpz_tp.mappings.copy_to_tensor_parallel_region(x)
    out: Tensor = model(x)
    return out


def backward_outside() -> float:
    """The recomputation comes after the block that named the mesh."""
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    given = torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 2, 8)
    worst = 0.0
    for dialect, module in (("fairscale", fairscale), ("ezpz", ezpz)):
        for reentrant in (False, True):
            x = given.clone().requires_grad_()
            with module.bind(mesh):
                model = legacy_model(dialect)
                call = partial(mapped, dialect, model)
                wanted = outcome(call, given, list(model.parameters()))
                model.zero_grad()
                out = checkpoint(call, x, use_reentrant=reentrant)
            (out * torch.arange(64.0).view(out.shape)).square().sum().backward()
            got = [out, x.grad, *(parameter.grad for parameter in model.parameters())]
            worst = max(worst, *map(apart, got, wanted))
    mesh.close()
    return worst


def test_a_backward_outside_of_the_block_that_selected_the_mesh() -> None:
    assert max(run_ranks(2, backward_outside)) < 1e-12
