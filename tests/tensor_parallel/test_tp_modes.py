"""A parallelized model trains as in one process in every mode."""

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
from tensors import compute_difference, full_tensor, random_tensor
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
from tp_models import TORCHS_NORMS, UP_DOWN, Llama, Lora, Mlp, Net, OfHeads, make_llama_plan

from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
    parallelize,
    split_linear,
)

IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
DATA = random_tensor(2, 4, 8, seed=0)


def make_qkv() -> Net:
    """Make an attention-like module with a fused linear."""

    def compute(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        out: Tensor = m.o(torch.tanh(q) * torch.sigmoid(k) + v)
        return out

    return Net(compute, qkv=nn.Linear(8, 48), o=nn.Linear(16, 8))


def make_split_qkv() -> Net:
    model = make_qkv()
    split_linear(model, "qkv", [16, 16, 16])
    return model


def make_adapted() -> Mlp:
    """Make a feed-forward with LoRA adapters, as PEFT wraps linears."""
    model = Mlp()
    model.up, model.down = Lora(model.up), Lora(model.down)  # type: ignore[assignment]
    return model


ADAPTERS: dict[str, Any] = {
    **{f"up.{name}": ColwiseParallel() for name in ("base_layer", "lora_B.default")},
    **{f"down.{name}": RowwiseParallel() for name in ("base_layer", "lora_A.default")},
}
REPLICATED_BETWEEN: dict[str, Any] = {
    "up": ColwiseParallel(output_layouts=Replicate()),
    "down": RowwiseParallel(input_layouts=Replicate()),
}
SHARED_HEADS = partial(Llama, n_heads=8, n_kv_heads=1, layers=1)
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Tensor]] = {
    "mlp": (Mlp, UP_DOWN, DATA),
    "replicated between": (Mlp, REPLICATED_BETWEEN, DATA),
    "llama": (partial(Llama, layers=1), make_llama_plan(), IDS),
    "tied": (partial(Llama, tied=True, layers=1), make_llama_plan(), IDS),
    "sequence": (partial(Llama, layers=1), make_llama_plan(sequence_parallel=True), IDS),
    "torch's norms": (partial(Llama, layers=1), make_llama_plan(sequence_parallel=True) | TORCHS_NORMS, IDS),
    "shared heads": (SHARED_HEADS, make_llama_plan(8, 1, sequence_parallel=True), IDS),
    "q|k|v": (make_split_qkv, {"qkv.*": ColwiseParallel(), "o": RowwiseParallel()}, DATA),
    "adapters": (make_adapted, ADAPTERS, DATA),
}


# With the DTensor path, heads that ranks share, and wrapped layers.
SOME_CASES = ("torch's norms", "shared heads", "adapters")


def copy_and_pickle(model: nn.Module) -> nn.Module:
    """Return a copy of a model that was pickled, if torch and the test can pickle it."""
    model = copy.deepcopy(model)
    # The hooks of torch's SequenceParallel and the functions of a Net are local functions.
    has_torchs_hooks = False
    for module in model.modules():
        if type(module).__name__ == "RMSNorm" and module._forward_pre_hooks:
            has_torchs_hooks = True
    if has_torchs_hooks or isinstance(model, Net):
        return model
    copied: nn.Module = pickle.loads(pickle.dumps(model))  # noqa: S301
    return copied


def checkpoint_layers(model: Any) -> Any:
    layers: Any = getattr(model, "layers", None)
    if layers is None:
        model.forward = partial(checkpoint, model.forward, use_reentrant=False)
        return model
    for name, layer in layers.named_children():
        layers.register_module(name, checkpoint_wrapper(layer))
    return model


def checkpoint_selectively(model: Any) -> Any:
    """Save matrix products, recompute the rest. Collectives must not write into saved tensors."""

    def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_product = operation in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    model.forward = partial(checkpoint, model.forward, use_reentrant=False, context_fn=contexts)
    return model


def compile_model(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    return model


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "copied": copy_and_pickle,
    "checkpointed": checkpoint_layers,
    "checkpointed selectively": checkpoint_selectively,
    "compiled": compile_model,
}


def make_models(
    name: str, mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Any, Any, Tensor]:
    """Return the parallelized model of a case, the unsharded model, and the data."""
    make, plan, data = CASES[name]
    torch.manual_seed(0)
    reference = make().to(dtype)
    model = parallelize(copy.deepcopy(reference), mesh or make_tp_mesh(), plan)
    return model, reference, data.to(dtype) if data.is_floating_point() else data


def compare_mode(name: str, mode: str) -> float:
    """Return the largest difference of outputs, gradients and state in two steps."""
    model, reference, data = make_models(name)
    return compare_training(MODES[mode](model), reference, data, steps=2)


def compare_cases(mode: str, names: Iterable[str] = CASES) -> dict[str, float]:
    return {name: compare_mode(name, mode) for name in names}


@pytest.mark.filterwarnings("default")  # torch.compile's own
@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("eager", tuple(CASES)),
        pytest.param("copied", SOME_CASES, marks=pytest.mark.ci),
        pytest.param("checkpointed", SOME_CASES, marks=pytest.mark.ci),
        pytest.param("checkpointed selectively", SOME_CASES, marks=pytest.mark.ci),
        pytest.param("compiled", ("mlp",), marks=pytest.mark.ci),
        *(pytest.param(mode, tuple(CASES), marks=pytest.mark.slow) for mode in MODES if mode != "eager"),
    ],
)
def test_training_equals_one_process(mode: str, names: tuple[str, ...]) -> None:
    assert_no_difference(run_ranks(2, compare_cases, mode, names, timeout=240.0), 1e-11, len(names))


@pytest.mark.ci
@pytest.mark.usefixtures("as_on_cuda")
def test_training_on_four_ranks_equals_one_process() -> None:
    # The cases with heads, sequences or fused linears that four ranks share in another way than
    # two.
    names = ("torch's norms", "shared heads")
    assert_no_difference(run_ranks(4, compare_cases, "eager", names), 1e-11, len(names))


def compare_with_fsdp(name: str) -> float:
    """Train on (dp 2, tp 2): a step with one batch for each dp rank, and one with three."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference, data = make_models(name, mesh["tp"])
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [AdamWOfShards(trained.parameters(), eps=1e-3) for trained in (model, reference)]
    largest = 0.0
    for micro_batches in (1, 3):
        batches = [data.roll(micro_batches + index, 0) for index in range(2 * micro_batches)]
        for index in range(micro_batches):
            model.set_is_last_backward(index == micro_batches - 1)
            model(batches[2 * index + mesh.get_local_rank("dp")]).square().sum().backward()
        for batch in batches:
            (reference(batch).square().sum() / 2).backward()
        largest = max(largest, max_grad_difference(model, reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        largest = max(largest, compute_difference(full_tensor(param), expected))
    return largest


def compare_cases_with_fsdp(names: Iterable[str]) -> dict[str, float]:
    return {name: compare_with_fsdp(name) for name in names}


@pytest.mark.ci
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    "names",
    [
        ("sequence", "shared heads"),
        pytest.param(("mlp", "torch's norms", "q|k|v"), marks=pytest.mark.slow),
    ],
)
def test_fsdp_with_gradient_accumulation_equals_one_process(names: tuple[str, ...]) -> None:
    assert_no_difference(run_ranks(4, compare_cases_with_fsdp, names, timeout=240.0), cases=len(names))


def compare_second_derivatives() -> dict[str, float]:
    """Compare the gradients of the squared norm of all gradients."""
    differences = {}
    for name in ("mlp", "replicated between", "q|k|v"):
        model, reference, data = make_models(name)
        for trained in (model, reference):
            x = data.clone().requires_grad_()
            inputs = [x, *trained.parameters()]
            grads: Any = torch.autograd.grad(trained(x).pow(3).sum(), inputs, create_graph=True)
            for grad in grads:
                full_tensor(grad).square().sum().backward(retain_graph=True)
        differences[name] = max_grad_difference(model, reference) / 100
    return differences


def test_second_derivatives_equal_one_process() -> None:
    assert_no_difference(run_ranks(2, compare_second_derivatives), cases=3)


def compare_autocast() -> dict[str, tuple[float, set[torch.dtype]]]:
    """Compare gradients under autocast with autocast in one process.

    Returns:
        For each case the relative difference, and the dtypes that one process does not have.
    """
    results = {}
    for name in ("mlp", "sequence", "shared heads"):
        model, reference, data = make_models(name, dtype=torch.float32)
        outputs = []
        for trained in (model, reference):
            with torch.autocast("cpu", torch.bfloat16):
                output = trained(data)
            output.square().mean().backward()
            outputs.append(output)
        largest = max(float(param.grad.abs().max()) for param in reference.parameters())
        dtypes = {param.grad.dtype for param in model.parameters()} | {outputs[0].dtype}
        unexpected = dtypes - {outputs[1].dtype, torch.float32}
        results[name] = max_grad_difference(model, reference) / largest, unexpected
    return results


def test_autocast_equals_one_process() -> None:
    for results in run_ranks(2, compare_autocast):
        for difference, unexpected_dtypes in results.values():
            assert difference < 0.02
            assert unexpected_dtypes == set()


def train_in_mixed_precision(names: Iterable[str]) -> int:
    """Train in bfloat16 with FSDP2, and in float16 with a scaler; return the number of steps."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    steps = 0
    for name, dtype in product(names, (torch.bfloat16, torch.float16)):
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


@pytest.mark.parametrize(
    "names",
    [("sequence",), pytest.param(("shared heads", "torch's norms"), marks=pytest.mark.slow)],
)
def test_rounding_in_half_precision_does_not_raise(names: tuple[str, ...]) -> None:
    assert run_ranks(2, train_in_mixed_precision, names) == [8 * len(names)] * 2


def compare_edge_cases() -> dict[str, float]:
    differences = {}
    model, reference, data = make_models("mlp")
    for trained in (model, reference):
        no_tokens = torch.zeros(0, 8, dtype=torch.float64, requires_grad=True)
        trained(no_tokens).sum().backward()
    differences["no tokens"] = max_grad_difference(model, reference)
    with torch.no_grad():
        differences["no_grad"] = compute_difference(model(data), reference(data))
    with torch.inference_mode():
        differences["inference_mode"] = compute_difference(model(data), reference(data))
    # The forward of a wrapper takes ``*args, **kwargs``.
    by_keyword = Net(lambda m, x: m.inner(x=x), inner=checkpoint_wrapper(copy.deepcopy(reference)))
    plan: dict[str, Any] = {"inner": SharedInput()}
    for name, style in UP_DOWN.items():
        plan[f"inner._checkpoint_wrapped_module.{name}"] = style
    model = parallelize(by_keyword, make_tp_mesh(), plan)
    unwrapped = Net(lambda m, x: m.inner(x), inner=reference)
    differences["input by keyword"] = compare_training(model, unwrapped, data)
    reference = make_model_with_two_names()
    plan = {"0": ColwiseParallel(), "1.inner": LocalParameters(), "2": RowwiseParallel()}
    differences["two names"] = compare_training(parallelize_copy(reference, plan), reference, data)
    encoder: Any = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double()
    plan = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    model = parallelize_copy(encoder, plan).eval()
    encoder.eval()
    x = random_tensor(3, 5, 8, seed=0)
    padding = torch.arange(5) > torch.tensor([[4], [2], [1]])
    with torch.no_grad():
        differences["encoder"] = compute_difference(model(x), encoder(x))
        padded = model(x, src_key_padding_mask=padding)[~padding]
        expected = encoder(x, src_key_padding_mask=padding)[~padding]
    differences["padded encoder"] = compute_difference(padded, expected)
    return differences


def make_model_with_two_names() -> nn.Module:
    """Make a model with one parameter under two names, applied to the features of each head."""
    inner = Net(lambda m, x: x * m.scale + m.shift, scale=nn.Parameter(torch.rand(4)))
    inner.register_parameter("shift", inner.scale)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(8, 16), OfHeads(inner), nn.Linear(16, 8)).double()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's, in one process
def test_edge_cases_equal_one_process() -> None:
    assert_no_difference(run_ranks(2, compare_edge_cases), cases=7)


def use_plain_parameters() -> list[object]:
    """Replace parameters with plain tensors: with local shards, and with full tensors.

    Returns:
        Whether the output with local shards is as expected, and the errors with full tensors.
    """
    model, reference, data = make_models("mlp")
    shards = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    results: list[object] = [
        compute_difference(functional_call(model, shards, data), reference(data)) < 1e-12
    ]
    for name in ("up.bias", "down.weight"):
        full = {name: reference.get_parameter(name)}
        results.append(error_of(partial(functional_call, model, full, data)).partition(" on this")[0])
    model.load_state_dict(reference.state_dict(), assign=True)
    results.append(error_of(lambda: model(data)).partition(";")[0])
    return results


def test_full_tensors_in_place_of_shards_raise() -> None:
    weight = "weight has shape (16, 8) on this rank, whose shard has shape (8, 8)"
    errors = ["bias has shape (16,)", "weight has shape (8, 16)", weight]
    assert run_ranks(2, use_plain_parameters) == [[True, *(f"ShapeError: {error}" for error in errors)]] * 2
