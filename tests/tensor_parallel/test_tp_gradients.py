"""Gradients of replicated parameters are compared in every mode; partial ones are all-reduced once."""

from __future__ import annotations

import copy
import io
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from as_cuda import NoReads
from messages import error_of
from ranks import run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from tp_compare import (
    OperationRecorder,
    assert_no_difference,
    get_grad,
    make_tp_mesh,
    max_grad_difference,
)
from tp_models import TORCHS_NORMS, UP_DOWN, Gain, Llama, Mlp, Net, OfHeads, make_llama_plan

from namedmesh._errors import GradientError
from namedmesh.tensor_parallel import ColwiseParallel, LocalParameters, parallelize, register_gradient_check

X = random_tensor(2, 8, seed=1)


def make_gain_model(*, zeros: bool = False) -> Any:
    """Make a feed-forward with a gain on the hidden features; under tp its gradient is partial."""
    torch.manual_seed(0)
    down = nn.Linear(16, 8)
    if zeros:
        nn.init.zeros_(down.weight)
    layers = {"up": nn.Linear(8, 16), "gain": Gain(), "down": down}
    return nn.Sequential(OrderedDict(layers)).double()


def parallelize_without_gain(**options: Any) -> Any:
    """Parallelize the gain model with a wrong plan: it omits the gain."""
    return parallelize(make_gain_model(), make_tp_mesh(), UP_DOWN, **options)


def read_names(error: GradientError) -> set[str]:
    """Return the names of the parameters in a message."""
    return set(re.split(", ", str(error).partition(":")[0]))


def raises_error(call: Callable[[], Any], *names: str) -> bool:
    """Return whether a call raises a GradientError with these names (the gain's by default)."""
    try:
        call()
    except GradientError as error:
        return read_names(error) == {*(names or ("gain.weight",))}
    return False


def run_backward_of(model: Any, value: Tensor = X) -> None:
    model(value).square().sum().backward()


def step(model: Any, value: Tensor = X) -> None:
    run_backward_of(model, value)
    torch.optim.SGD(model.parameters(), lr=0.0, foreach=False).step()


def train(model: Any, steps: int, value: Tensor = X) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        run_backward_of(model, value)
        optimizer.step()


def run_modes() -> dict[str, bool]:  # noqa: C901, PLR0915  one function for each way
    """Return, for each mode of training, whether the wrong plan raises and a right one does not."""

    def parallelize_zeros() -> Any:
        return parallelize(make_gain_model(zeros=True), make_tp_mesh(), UP_DOWN)

    def unfreeze_after_step() -> None:
        model = parallelize_without_gain()
        model.gain.requires_grad_(requires_grad=False)
        train(model, 1)
        model.gain.requires_grad_(requires_grad=True)
        train(model, 1)

    def unfreeze_after_parallelize() -> None:
        model = make_gain_model()
        model.requires_grad_(requires_grad=False)
        model = parallelize(model, make_tp_mesh(), UP_DOWN)
        model.requires_grad_(requires_grad=True)
        step(model)

    def run_checkpointed(reentrant: bool) -> None:
        model = parallelize_without_gain()
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0, foreach=False).step()

    def run_compiled() -> None:
        model = parallelize_without_gain()
        model.compile(backend="aot_eager", fullgraph=True)
        train(model, 1)  # compiled code runs no hooks: the optimizer step compares

    def assign_grads() -> None:
        """Set gradients as zero-bubble schedules do, which compute those of weights separately."""
        model = parallelize_without_gain()
        params = list(model.parameters())
        grads = torch.autograd.grad(model(X).square().sum(), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        torch.optim.SGD(params, foreach=False).step()

    def use_gain_on_one_rank() -> None:
        model = parallelize_without_gain()
        out = model.down(model.gain(model.up(X)) if dist.get_rank() else model.up(X))
        model.down.bias.sum().backward()
        out.square().sum().backward()
        torch.optim.SGD(model.parameters(), foreach=False).step()

    def parallelize_with_torch() -> None:
        model = make_gain_model()
        plan = {"up": torch_styles.ColwiseParallel(), "down": torch_styles.RowwiseParallel()}
        torch_styles.parallelize_module(model, make_tp_mesh(), plan)
        register_gradient_check(model, make_tp_mesh())
        step(model)

    def copy_after_forward(copy_model: Callable[[Any], Any]) -> None:
        model = parallelize_without_gain()
        model(X)
        step(copy_model(model))

    def save_and_load(model: Any) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def copy_and_compile() -> None:
        model = parallelize_without_gain()
        model(X)
        model = copy.deepcopy(model)
        model.compile(backend="aot_eager", fullgraph=True)
        train(model, 1)

    def return_grads_first() -> None:
        """torch.autograd.grad accumulates no gradients."""
        model = parallelize_without_gain()
        torch.autograd.grad(model(X).sum(), [*model.parameters()])
        step(model)

    def call_with_computed_weights_first() -> None:
        """In meta-learning the weights of a forward are computed, and get no gradients."""
        model = parallelize_without_gain()
        weights = {name: param * 1.5 for name, param in model.named_parameters()}
        torch.func.functional_call(model, weights, (X,)).square().sum().backward()
        step(model)

    def make_grads_nan(ranks: set[int]) -> None:
        model: Any = parallelize(Mlp(), make_tp_mesh(), UP_DOWN)
        if dist.get_rank() in ranks:
            model.down.bias.register_hook(lambda grad: grad * torch.nan)
        step(model, X.float())

    def share_replicated_features() -> None:
        """A replicated linear whose features each rank uses with its local heads."""
        compute = lambda m, x: m.down(m.up(x).unflatten(-1, (-1, 4)).mul(m.k(x).unsqueeze(-2)).flatten(-2))  # noqa: E731
        torch.manual_seed(0)
        linears = {"up": nn.Linear(8, 16), "k": nn.Linear(8, 4), "down": nn.Linear(16, 8)}
        step(parallelize(Net(compute, **linears).double(), make_tp_mesh(), UP_DOWN))

    def add_param_on_one_rank() -> None:
        """A parameter that only one rank has is not compared."""
        model: Any = parallelize(make_gain_model(), make_tp_mesh(), UP_DOWN | {"gain": LocalParameters()})
        model.extra = nn.Parameter(torch.ones(1)) if dist.get_rank() else None
        train(model, 2)

    def cancel_grads() -> None:
        """The norm of each head cancels the gain, whose gradient is only rounding errors."""
        compute = lambda m, x: m.down(m.norms(m.gain(m.up(x)))) + m.bare * x  # noqa: E731
        torch.manual_seed(0)
        parts: dict[str, Any] = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "gain": Gain()}
        parts |= {
            "norms": OfHeads(nn.RMSNorm(4, elementwise_affine=False)),
            "bare": nn.Parameter(torch.ones(1)),
        }
        train(parallelize(Net(compute, **parts).double(), make_tp_mesh(), UP_DOWN), 2)

    return {
        "first backward": raises_error(lambda: step(parallelize_without_gain())),
        "frozen in the first step": raises_error(unfreeze_after_step),
        "frozen in parallelize": raises_error(unfreeze_after_parallelize),
        "behind zeros": raises_error(lambda: train(parallelize_zeros(), 2)),
        "copy": raises_error(lambda: step(copy.deepcopy(parallelize_without_gain()))),
        "copy, behind zeros": raises_error(lambda: train(copy.deepcopy(parallelize_zeros()), 2)),
        "copy after a forward": raises_error(lambda: copy_after_forward(copy.deepcopy)),
        "loaded after a forward": raises_error(lambda: copy_after_forward(save_and_load)),
        "compiled copy": raises_error(copy_and_compile),
        "after torch.autograd.grad": raises_error(return_grads_first),
        "after computed weights": raises_error(call_with_computed_weights_first),
        "NaN on one rank": raises_error(lambda: make_grads_nan({1}), "down.bias"),
        "checkpoint": raises_error(partial(run_checkpointed, False)),
        "reentrant checkpoint": raises_error(partial(run_checkpointed, True)),
        "compiled": raises_error(run_compiled),
        "assigned gradients": raises_error(assign_grads),
        "gradient on one rank": raises_error(use_gain_on_one_rank),
        "torch's styles": raises_error(parallelize_with_torch),
        "half precision": raises_error(lambda: step(parallelize_without_gain().bfloat16(), X.bfloat16())),
        "replicated keys": raises_error(share_replicated_features, "k.weight", "k.bias"),
        "accepts: NaN on all ranks": not raises_error(lambda: make_grads_nan({0, 1})),
        "accepts: a parameter on one rank": not raises_error(add_param_on_one_rank),
        "accepts: rounding errors": not raises_error(cancel_grads),
        "accepts: check_gradients=False": not raises_error(
            lambda: train(parallelize_without_gain(check_gradients=False), 3)
        ),
        "accepts: LocalParameters": not raises_error(
            lambda: train(
                parallelize(make_gain_model(), make_tp_mesh(), UP_DOWN | {"gain": LocalParameters()}), 3
            )
        ),
    }


@pytest.mark.ci
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.filterwarnings("default")  # torch.compile's own, and of a gain times a DTensor
def test_partial_gradients_of_replicated_parameters_raise_in_every_mode() -> None:
    for results in run_ranks(2, run_modes):
        assert all(results.values()), results


def train_with_fsdp() -> bool:
    """Return whether this rank raises, although only one dp rank has the shard that differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize(make_gain_model(), mesh["tp"], UP_DOWN)
    fully_shard(model, mesh=mesh["dp"])
    return raises_error(lambda: train(model, 1))


@pytest.mark.usefixtures("as_on_cuda")
def test_with_fsdp_all_ranks_raise_at_the_first_step() -> None:
    assert run_ranks(4, train_with_fsdp) == [True] * 4


def run_with_different_samples() -> dict[str, bool]:  # noqa: C901  one function for each way
    """Return for each kind of first layer whether different samples raise, and equal ones do not."""
    rank = dist.get_rank()
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(rank))

    def make_llama(**options: Any) -> Any:
        torch.manual_seed(0)
        return parallelize(Llama(layers=1), make_tp_mesh(), make_llama_plan(**options))

    def change_one_token() -> None:
        tokens = torch.zeros(2, 8, dtype=torch.long)
        tokens[0, 0] = rank
        step(make_llama(), tokens)

    def run_checkpointed() -> None:
        model = make_llama()
        checkpoint(model, ids, use_reentrant=False).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0, foreach=False).step()

    def copy_after(forwards: int) -> None:
        model = make_llama()
        for _ in range(forwards):
            model(torch.zeros_like(ids))
        step(copy.deepcopy(model), ids)

    def use_replicated_embedding() -> None:
        plan = {name: style for name, style in make_llama_plan().items() if name != "tok_embeddings"}
        step(parallelize(Llama(layers=1), make_tp_mesh(), plan), ids)

    def assign_grads() -> None:
        model = make_llama()
        params = list(model.parameters())
        grads = torch.autograd.grad(model(ids).square().sum(), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        torch.optim.SGD(params, foreach=False).step()

    def run_as_stage() -> None:
        """A pipeline stage first infers shapes, on uninitialized memory."""
        model: Any = parallelize(Mlp(), make_tp_mesh(), UP_DOWN)
        memory = random_tensor(2, 8, seed=rank).float().requires_grad_()
        torch.autograd.grad(model(memory).sum(), memory)
        step(model, X.float())

    def shard_sequence() -> None:
        """The first layer all-gathers its input, of which ranks have different shards."""
        plan = UP_DOWN | {"up": ColwiseParallel(input_layouts=Shard(0))}
        step(parallelize(Mlp(), make_tp_mesh(), plan), random_tensor(2, 8, seed=rank).float())

    def train_mlp(x: Tensor, **options: Any) -> None:
        step(parallelize(Mlp(), make_tp_mesh(), UP_DOWN, **options), x)

    name = "tok_embeddings"
    return {
        "ids": raises_error(lambda: step(make_llama(), ids), name),
        "one token": raises_error(change_one_token, name),
        "sequence parallel": raises_error(lambda: step(make_llama(sequence_parallel=True), ids), name),
        "different lengths": raises_error(lambda: make_llama()(ids[:, : 8 - rank]), name),
        "checkpointed": raises_error(run_checkpointed, name),
        "copy": raises_error(lambda: copy_after(0), name),
        "copy after a forward": raises_error(lambda: copy_after(1), name),
        "copy after three forwards": raises_error(lambda: copy_after(3), name),
        "assigned gradients": raises_error(assign_grads, name),
        "replicated embedding": raises_error(use_replicated_embedding, "layers.0.attention.wq"),
        "features": raises_error(lambda: train_mlp(random_tensor(2, 8, seed=rank).float()), "up"),
        "accepts: a stage's first run": not raises_error(run_as_stage),
        "accepts: a shard of the sequence": not raises_error(shard_sequence),
        "accepts: check_gradients=False": not raises_error(
            lambda: train_mlp(X.float() * rank, check_gradients=False)
        ),
    }


@pytest.mark.ci
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_ranks_with_different_samples_raise() -> None:
    for results in run_ranks(2, run_with_different_samples):
        assert all(results.values()), results


def run_compiled_layers_with_different_samples() -> bool:
    model: Any = parallelize(Llama(layers=1), make_tp_mesh(), make_llama_plan())
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    ids = torch.arange(16).view(2, 8) + dist.get_rank()
    return raises_error(lambda: step(model, ids), "tok_embeddings")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_ranks_with_different_samples_raise_in_compiled_code() -> None:
    assert run_ranks(2, run_compiled_layers_with_different_samples) == [True] * 2


def train_with_ddp() -> dict[str, float]:
    """Compare gradients under DDP, which replaces DTensors with local tensors, with one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = [X, X.roll(1, 0) * 2]
    shard_dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    differences = {}
    for as_view in (False, True):
        options: Any = {"device_mesh": mesh["dp"], "gradient_as_bucket_view": as_view}
        reference = make_gain_model()
        for batch in data:
            (reference(batch).square().sum() / 2).backward()
        model: Any = parallelize(make_gain_model(), mesh["tp"], UP_DOWN | {"gain": LocalParameters()})
        model = DistributedDataParallel(model, **options)
        params = dict(model.module.named_parameters())  # DDP removes them in a forward
        optimizer = torch.optim.SGD(params.values(), lr=0.0)
        run_backward_of(model, data[mesh.get_local_rank("dp")])
        optimizer.step()
        for name, param in reference.named_parameters():
            expected = get_grad(param)
            if name in shard_dims:
                expected = expected.chunk(2, shard_dims[name])[mesh.get_local_rank("tp")]
            differences[f"{name}, view {as_view}"] = compute_difference(params[name].grad, expected)
        wrong_plan = parallelize(make_gain_model(), mesh["tp"], UP_DOWN)
        optimizer = torch.optim.SGD(wrong_plan.parameters(), lr=0.0)
        run_backward_of(DistributedDataParallel(wrong_plan, **options))
        has_raised = raises_error(optimizer.step)
        differences[f"raises, view {as_view}"] = 0.0 if has_raised else 1.0
    return differences


def test_ddp_over_tensor_parallelism_equals_one_process() -> None:
    assert_no_difference(run_ranks(4, train_with_ddp), cases=12)


def step_while_capturing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names in the errors of the step after a captured one, at first and later."""
    names: list[str] = []
    for steps_before in (0, 3):
        model = parallelize_without_gain(check_gradients=False)
        register_gradient_check(model, make_tp_mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
        model.gain.requires_grad_(requires_grad=False)
        for _ in range(steps_before):
            run_backward_of(model)
            optimizer.step()
        model.gain.requires_grad_(requires_grad=True)
        with monkeypatch.context() as patch, NoReads():
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            run_backward_of(model)
            optimizer.step()
        try:
            optimizer.step()
        except GradientError as error:
            names += read_names(error)
    return names


def test_nothing_is_compared_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, step_while_capturing, monkeypatch) == [["gain.weight"] * 2] * 2


def count_mesh_reads() -> list[int]:
    """Return how often a compared step reads the ranks of groups, with one layer and with eight."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    get_ranks = dist.get_process_group_ranks
    mesh_property: Any = DeviceMesh.mesh
    counts = []
    for layers in (1, 8):
        model: Any = nn.Sequential(*(Mlp() for _ in range(layers)))
        plan = {f"*.{name}": style for name, style in UP_DOWN.items()}
        fully_shard(parallelize(model, mesh["tp"], plan), mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run_backward_of(model, X.float())
        reads: list[Any] = []

        def record_group(group: Any, reads: list[Any] = reads) -> Any:
            reads.append(group)
            return get_ranks(group)

        def record_mesh(mesh: Any, reads: list[Any] = reads) -> Any:
            reads.append(mesh)
            return mesh_property.fget(mesh)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_process_group_ranks", record_group)
            patch.setattr(DeviceMesh, "mesh", property(record_mesh))
            optimizer.step()
        counts.append(len(reads))
    return counts


def test_a_compared_step_reads_each_mesh_once() -> None:
    for few, many in run_ranks(2, count_mesh_reads):
        assert few == many > 0


def find_compared_steps() -> list[int]:
    """Return the optimizer steps, out of nine, in which the ranks communicate."""
    model = parallelize(Mlp(), make_tp_mesh(), UP_DOWN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compared = []
    for number in range(1, 10):
        run_backward_of(model, X.float())
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            optimizer.step()
        if all_reduce.called:
            compared.append(number)
    return compared


def test_ranks_compare_before_steps_that_are_powers_of_two() -> None:
    assert run_ranks(2, find_compared_steps) == [[1, 2, 4, 8]] * 2


def test_the_error_names_the_parameter_and_the_remedy() -> None:
    start = (
        r"GradientError: gain\.weight: replicated on the 2 ranks of tp, but the gradients differ, "
        r"by up to [\d.]+ of their norm"
    )
    for message in run_ranks(2, lambda: error_of(lambda: step(parallelize_without_gain()))):
        assert re.match(start, message)
        assert "LocalParameters(), which all-reduces its gradients" in message


# --- the all-reduce of partial gradients --------------------------------------------------------

PARTIAL_GRAD_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence": ({}, make_llama_plan(sequence_parallel=True)),
    "torch's norms": ({}, make_llama_plan(sequence_parallel=True) | TORCHS_NORMS),
    "shared kv heads": ({"n_kv_heads": 1}, make_llama_plan(8, 1)),
}


def reduce_partial_grads(name: str) -> tuple[int, float]:
    """Return the number of collectives in an optimizer step, and the difference of gradients."""
    options, plan = PARTIAL_GRAD_CASES[name]
    torch.manual_seed(0)
    reference = Llama(**options).double()
    model = parallelize(copy.deepcopy(reference), make_tp_mesh(), plan, check_gradients=False)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    for trained in (model, reference):
        for _ in range(3):  # micro-batches
            trained(ids).square().sum().backward()
    with OperationRecorder() as recorder:
        torch.optim.SGD(model.parameters(), lr=0.0, foreach=False).step()
    for param in model.parameters():
        if isinstance(param.grad, DTensor):
            assert isinstance(param, DTensor)
            assert param.grad.placements == param.placements
    largest = max(float(get_grad(param).abs().max()) for param in reference.parameters())
    return len(recorder.sent), max_grad_difference(model, reference) / largest


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", PARTIAL_GRAD_CASES)
def test_partial_gradients_are_reduced_with_one_collective(name: str) -> None:
    for collectives, difference in run_ranks(2, reduce_partial_grads, name):
        assert collectives == 1
        assert difference < 1e-12


class Routed(nn.Module):
    """Three norms, one for each kind of row. A norm without rows gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3)).double()

    def forward(self, rows: Tensor, kinds: list[int]) -> Tensor:
        outputs = [self.norms[kind](row) for row, kind in zip(rows, kinds, strict=True)]
        return torch.stack(outputs)


def train_routed(rows: slice, *, sharded: bool) -> list[list[float] | None]:
    """Return the gradients of two steps. Ranks use different norms; no rank uses the last one."""
    model: Any = Routed()
    if sharded:
        parallelize(model, make_tp_mesh(), {"norms.*": LocalParameters()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    grads: list[list[float] | None] = []
    for kinds in ([0, 0, 1, 1], [1, 0, 1, 1]):
        optimizer.zero_grad()
        model(random_tensor(4, 4, seed=3)[rows], kinds[rows]).pow(3).sum().backward()
        optimizer.step()
        grads += [
            None if param.grad is None else full_tensor(param.grad).tolist() for param in model.parameters()
        ]
    return grads


def test_a_rank_that_does_not_use_a_module_takes_part_in_the_all_reduce() -> None:
    expected = train_routed(slice(None), sharded=False)
    assert expected[-1] is None

    def train_local_rows() -> list[list[float] | None]:
        first = 2 * dist.get_rank()
        return train_routed(slice(first, first + 2), sharded=True)

    for grads in run_ranks(2, train_local_rows):
        for grad, expected_grad in zip(grads, expected, strict=True):
            assert grad == (None if expected_grad is None else pytest.approx(expected_grad))


def train_with_clipping() -> list[float]:
    """Return the differences from one process after clipping and steps of torch's optimizers."""
    differences = []
    for make_optimizer in (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, foreach=False, eps=1e-3),
        partial(torch.optim.AdamW, foreach=True, eps=1e-3),
        partial(torch.optim.LBFGS, max_iter=2),
    ):
        torch.manual_seed(0)
        reference = make_gain_model()
        plan = UP_DOWN | {"gain": LocalParameters()}
        model = parallelize(copy.deepcopy(reference), make_tp_mesh(), plan)
        for trained in (model, reference):
            optimizer: Any = make_optimizer(trained.parameters())
            for _ in range(2):
                closure = partial(run_backward, trained, optimizer)
                closure()
                if make_optimizer.func is torch.optim.LBFGS:
                    optimizer.step(closure)
                    continue
                clip_grad_norm_(trained.parameters(), 0.5, foreach=False)
                optimizer.step()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        differences.append(max(compute_difference(full_tensor(param), expected) for param, expected in pairs))
    return differences


def run_backward(model: Any, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(X).square().sum()
    loss.backward()
    return loss


@pytest.mark.ci
@pytest.mark.usefixtures("as_on_cuda")
def test_clipping_and_optimizers_accept_partial_gradients() -> None:
    for differences in run_ranks(2, train_with_clipping):
        assert max(differences) < 1e-10, differences
