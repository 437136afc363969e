"""A model under a plan trains as in one process, in every mode: a table of model x plan x mode over one helper."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from messages import error_of
from ranks import run_ranks
from tensors import apart, numbers, whole
from tiny import AdamWOfShards
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from tp_compare import (
    assert_no_difference,
    compare_training,
    make_tp_mesh,
    max_grad_difference,
    parallelize_copy,
)
from tp_models import TORCHS_NORMS, UP_DOWN, Llama, Lora, Mlp, Net, OfHeads, llama_plan

from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
    parallelize,
    split_linear,
)

IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
DATA = numbers(2, 4, 8, seed=0)


def qkv() -> Net:
    """Queries, keys and values in one linear, which is taken apart."""

    def compute(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        out: Tensor = m.o(torch.tanh(q) * torch.sigmoid(k) + v)
        return out

    return Net(compute, qkv=nn.Linear(8, 48), o=nn.Linear(16, 8))


def split_qkv() -> Net:
    model = qkv()
    split_linear(model, "qkv", [16, 16, 16])
    return model


def adapted() -> Mlp:
    """Linears with adapters, as PEFT wraps them."""
    model = Mlp()
    model.up, model.down = Lora(model.up), Lora(model.down)  # type: ignore[assignment]
    return model


ADAPTERS: dict[str, Any] = {
    **{f"up.{name}": ColwiseParallel() for name in ("base_layer", "lora_B.default")},
    **{f"down.{name}": RowwiseParallel() for name in ("base_layer", "lora_A.default")},
}
WHOLE_BETWEEN: dict[str, Any] = {
    "up": ColwiseParallel(output_layouts=Replicate()),
    "down": RowwiseParallel(input_layouts=Replicate()),
}
SHARED_HEADS = partial(Llama, n_heads=8, n_kv_heads=1, layers=1)
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Tensor]] = {
    "mlp": (Mlp, UP_DOWN, DATA),
    "whole between": (Mlp, WHOLE_BETWEEN, DATA),
    "llama": (partial(Llama, layers=1), llama_plan(), IDS),
    "tied": (partial(Llama, tied=True, layers=1), llama_plan(), IDS),
    "sequence": (partial(Llama, layers=1), llama_plan(sequence_parallel=True), IDS),
    "torch's norms": (partial(Llama, layers=1), llama_plan(sequence_parallel=True) | TORCHS_NORMS, IDS),
    "shared heads": (SHARED_HEADS, llama_plan(8, 1, sequence_parallel=True), IDS),
    "q|k|v": (split_qkv, {"qkv.*": ColwiseParallel(), "o": RowwiseParallel()}, DATA),
    "adapters": (adapted, ADAPTERS, DATA),
}


def in_copies(model: nn.Module) -> nn.Module:
    """A copy, written down and read again where nothing of torch's is in the way: a function of a test, its styles' hooks."""
    model = copy.deepcopy(model)
    hooked = any(type(each).__name__ == "RMSNorm" and each._forward_pre_hooks for each in model.modules())
    return model if hooked or isinstance(model, Net) else pickle.loads(pickle.dumps(model))  # noqa: S301


def recomputed(model: Any) -> Any:
    layers: Any = getattr(model, "layers", None)
    for name, layer in layers.named_children() if layers is not None else ():
        layers.register_module(name, checkpoint_wrapper(layer))
    if layers is None:
        model.forward = partial(checkpoint, model.forward, use_reentrant=False)
    return model


def selective(model: Any) -> Any:
    """Keep the matrix products, as selective checkpointing does: what is kept may not be written into."""

    def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = operation in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    model.forward = partial(checkpoint, model.forward, use_reentrant=False, context_fn=contexts)
    return model


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    return model


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "copied": in_copies,
    "recomputed": recomputed,
    "selective": selective,
    "compiled": compiled,
}


def both(
    name: str, mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Any, Any, Tensor]:
    """The model of a case under its plan, the same whole, and the data."""
    make, plan, data = CASES[name]
    torch.manual_seed(0)
    reference = make().to(dtype)
    model = parallelize(copy.deepcopy(reference), mesh or make_tp_mesh(), plan)
    return model, reference, data.to(dtype) if data.is_floating_point() else data


def as_whole(name: str, mode: str) -> float:
    """The largest difference of output, gradients, two steps and state from those of one process."""
    model, reference, data = both(name)
    return compare_training(MODES[mode](model), reference, data, steps=2)


def all_as_whole(mode: str, names: Iterable[str] = CASES) -> dict[str, float]:
    return {name: as_whole(name, mode) for name in names}


@pytest.mark.filterwarnings("default")  # torch.compile's own
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", [2])
def test_training_is_that_of_one_process(tp: int, mode: str) -> None:
    assert_no_difference(run_ranks(tp, all_as_whole, mode, timeout=240.0), 1e-11, len(CASES))


@pytest.mark.usefixtures("as_on_cuda")
def test_training_on_four_ranks() -> None:
    # Whose heads, sequence or parts are dealt out otherwise than on two.
    names = ("llama", "torch's norms", "shared heads", "q|k|v")
    assert_no_difference(run_ranks(4, all_as_whole, "eager", names), 1e-11, len(names))


def over_fsdp(name: str) -> float:
    """A step of one batch and one of three micro-batches on (dp 2, tp 2); each dp rank has data of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference, data = both(name, mesh["tp"])
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [AdamWOfShards(each.parameters(), eps=1e-3) for each in (model, reference)]
    worst = 0.0
    for backwards in (1, 3):
        batches = [data.roll(backwards + index, 0) for index in range(2 * backwards)]
        for index in range(backwards):
            model.set_is_last_backward(index == backwards - 1)
            model(batches[2 * index + mesh.get_local_rank("dp")]).square().sum().backward()
        for batch in batches:
            (reference(batch).square().sum() / 2).backward()
        worst = max(worst, max_grad_difference(model, reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(worst, *(apart(whole(one), other) for one, other in pairs))


def all_over_fsdp() -> dict[str, float]:
    names = ("mlp", "sequence", "torch's norms", "shared heads", "q|k|v")
    return {name: over_fsdp(name) for name in names}


@pytest.mark.usefixtures("as_on_cuda")
def test_fsdp_over_tensor_parallel_with_accumulation() -> None:
    assert_no_difference(run_ranks(4, all_over_fsdp, timeout=240.0), cases=5)


def second_derivatives() -> dict[str, float]:
    """The gradient of the size of all gradients, which torch's and our collectives pass on any number of times."""
    found = {}
    for name in ("mlp", "whole between", "q|k|v"):
        model, reference, data = both(name)
        for each in (model, reference):
            x = data.clone().requires_grad_()
            wanted = [x, *each.parameters()]
            firsts: Any = torch.autograd.grad(each(x).pow(3).sum(), wanted, create_graph=True)
            for first in firsts:
                whole(first).square().sum().backward(retain_graph=True)
        found[name] = max_grad_difference(model, reference) / 100
    return found


def test_double_backward() -> None:
    assert_no_difference(run_ranks(2, second_derivatives), cases=3)


def in_low_precision() -> dict[str, tuple[float, set[torch.dtype]]]:
    """How far autocast, and FSDP2's mixed precision, are from themselves on one process."""
    found = {}
    for name in ("mlp", "sequence", "shared heads"):
        model, reference, data = both(name, dtype=torch.float32)
        outputs = []
        for each in (model, reference):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(each(data))
            outputs[-1].square().mean().backward()
        size = max(float(each.grad.abs().max()) for each in reference.parameters())
        dtypes = {each.grad.dtype for each in model.parameters()} | {outputs[0].dtype}
        found[name] = max_grad_difference(model, reference) / size, dtypes - {outputs[1].dtype, torch.float32}
    return found


def test_autocast() -> None:
    for found in run_ranks(2, in_low_precision):
        for far, other_types in found.values():
            assert far < 0.02
            assert other_types == set()


def mixed_precision() -> int:
    """Steps of bfloat16 under FSDP2, and of float16 with a scaler, in which nothing is taken for a difference."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    steps = 0
    for name, dtype in product(
        ("sequence", "shared heads", "torch's norms"), (torch.bfloat16, torch.float16)
    ):
        make, plan, data = CASES[name]
        torch.manual_seed(0)
        model: Any = parallelize(make(), mesh["tp"], plan)
        if dtype is torch.bfloat16:
            fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            with torch.autocast("cpu", dtype, enabled=dtype is torch.float16):
                loss = model(data).float().square().mean()
            scaler.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


def test_rounding_of_16_bits_is_no_difference() -> None:
    assert run_ranks(2, mixed_precision) == [24, 24]


def edges() -> dict[str, float]:
    """No tokens, no gradients, and a wrapper."""
    found = {}
    mesh = make_tp_mesh()
    model, reference, data = both("mlp")
    empty = [torch.zeros(0, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for each, x in zip((model, reference), empty, strict=True):
        each(x).sum().backward()
    found["empty"] = max_grad_difference(model, reference)
    with torch.no_grad():
        found["no gradients"] = apart(model(data), reference(data))
    with torch.inference_mode():
        found["inference"] = apart(model(data), reference(data))
    # A wrapper takes ``*args, **kwargs``.
    by_keyword = Net(lambda m, x: m.part(x=x), part=checkpoint_wrapper(copy.deepcopy(reference)))
    inside = {f"part._checkpoint_wrapped_module.{name}": style for name, style in UP_DOWN.items()}
    model = parallelize(by_keyword, mesh, inside | {"part": SharedInput()})
    found["shared by keyword"] = compare_training(model, Net(lambda m, x: m.part(x), part=reference), data)
    reference = twice_in_one_module()
    plan: Any = {"0": ColwiseParallel(), "1.inner": LocalParameters(), "2": RowwiseParallel()}
    found["two names"] = compare_training(parallelize_copy(reference, plan), reference, data)
    encoder: Any = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double()
    names = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    model, x = parallelize_copy(encoder, names).eval(), numbers(3, 5, 8, seed=0)
    padding = torch.arange(5) > torch.tensor([[4], [2], [1]])
    with torch.no_grad():
        found["encoder"] = apart(model(x), encoder.eval()(x))
        padded = [each(x, src_key_padding_mask=padding)[~padding] for each in (model, encoder)]
    found["padded encoder"] = apart(*padded)
    return found


def twice_in_one_module() -> nn.Module:
    """One parameter under two names, on the features of each head."""
    inner = Net(lambda m, x: x * m.scale + m.shift, scale=nn.Parameter(torch.rand(4)))
    inner.register_parameter("shift", inner.scale)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(8, 16), OfHeads(inner), nn.Linear(16, 8)).double()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's, in one process
def test_edges() -> None:
    assert_no_difference(run_ranks(2, edges), cases=7)


def plain_parameters() -> list[object]:
    """Parameters that are replaced by plain tensors: by this rank's shards, and by whole ones."""
    model, reference, data = both("mlp")
    state = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    found: list[object] = [apart(functional_call(model, state, data), reference(data)) < 1e-12]
    for name, shape in (("up.bias", (16,)), ("down.weight", (8, 16))):
        part = {name: reference.get_parameter(name)}
        found.append(error_of(partial(functional_call, model, part, data)).partition(" on this")[0])
        assert str(shape) in str(found[-1])
    model.load_state_dict(reference.state_dict(), assign=True)
    found.append(error_of(lambda: model(data)).partition(";")[0])
    return found


def test_whole_weights_where_shards_belong_are_rejected() -> None:
    weight = "weight has shape (16, 8) on this rank, whose shard has shape (8, 8)"
    errors = ["bias has shape (16,)", "weight has shape (8, 16)", weight]
    assert run_ranks(2, plain_parameters) == [[True, *(f"ShapeError: {error}" for error in errors)]] * 2
