"""Gradients of what is whole on every rank: compared by whatever way they come, and summed once where they are parts."""

from __future__ import annotations

import copy
import io
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_cuda import NoReads
from messages import error_of
from ranks import run_ranks
from tensors import apart, numbers, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from tp_compare import OperationRecorder, assert_no_difference, get_grad, make_tp_mesh
from tp_models import TORCHS_NORMS, UP_DOWN, Gain, Llama, Mlp, Net, OfHeads, llama_plan

from namedmesh.errors import GradientError
from namedmesh.tensor_parallel import ColwiseParallel, LocalParameters, parallelize, register_gradient_check

X = numbers(2, 8, seed=1)


def gained(*, zeros: bool = False) -> Any:
    """A gain on each rank's features."""
    torch.manual_seed(0)
    down = nn.Linear(16, 8)
    if zeros:
        nn.init.zeros_(down.weight)
    layers = {"up": nn.Linear(8, 16), "gain": Gain(), "down": down}
    return nn.Sequential(OrderedDict(layers)).double()


def wrong_model(**options: Any) -> Any:
    return parallelize(gained(), make_tp_mesh(), UP_DOWN, **options)


def names_in(error: GradientError) -> set[str]:
    return set(re.split(", ", str(error).partition(":")[0]))


def stops(call: Callable[[], Any], *names: str) -> bool:
    """Whether a call ends in the error with the right names, on this rank."""
    try:
        call()
    except GradientError as error:
        return names_in(error) == {*(names or ("gain.weight",))}
    return False


def step(model: Any, value: Tensor = X) -> None:
    model(value).square().sum().backward()


def trained(model: Any, steps: int, value: Tensor = X) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        step(model, value)
        optimizer.step()


def stopped_when() -> dict[str, bool]:  # noqa: C901, PLR0915  one function for each way
    """Every way by which a gradient may come, of a model whose gain is in no style."""

    def behind_zeros() -> Any:
        return parallelize(gained(zeros=True), make_tp_mesh(), UP_DOWN)

    def frozen_first() -> None:
        model = wrong_model()
        model.gain.requires_grad_(requires_grad=False)
        trained(model, 1)
        model.gain.requires_grad_(requires_grad=True)
        trained(model, 1)

    def frozen_when_applied() -> None:
        model = gained()
        model.requires_grad_(requires_grad=False)
        model = parallelize(model, make_tp_mesh(), UP_DOWN)
        model.requires_grad_(requires_grad=True)
        step(model)

    def checkpointed(reentrant: bool) -> None:
        model = wrong_model()
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()

    def compiled() -> None:
        model = wrong_model()
        model.compile(backend="aot_eager", fullgraph=True)
        trained(model, 1)  # the compiler makes no hooks: the optimizer asks

    def assigned() -> None:
        """As a pipeline's schedule does that computes the gradients of weights in a pass of their own."""
        model = wrong_model()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(X).square().sum(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.optim.SGD(parameters, foreach=False).step()

    def one_has_none() -> None:
        model = wrong_model()
        out = model.down(model.gain(model.up(X)) if dist.get_rank() else model.up(X))
        model.down.bias.sum().backward()
        out.square().sum().backward()
        torch.optim.SGD(model.parameters(), foreach=False).step()

    def by_torch() -> None:
        model = gained()
        plan = {"up": torch_styles.ColwiseParallel(), "down": torch_styles.RowwiseParallel()}
        torch_styles.parallelize_module(model, make_tp_mesh(), plan)
        register_gradient_check(model, make_tp_mesh())
        step(model)

    def after_a_forward(copied: Callable[[Any], Any]) -> None:
        model = wrong_model()
        model(X)
        step(copied(model))

    def loaded(model: Any) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def copied_and_compiled() -> None:
        model = wrong_model()
        model(X)
        model = copy.deepcopy(model)
        model.compile(backend="aot_eager", fullgraph=True)
        trained(model, 1)

    def after_other_gradients() -> None:
        """Gradients that are returned, and that no parameter gets, leave the check for the backward."""
        model = wrong_model()
        torch.autograd.grad(model(X).sum(), [*model.parameters()])
        step(model)

    def after_a_call_with_computed_weights() -> None:
        """As in meta-learning: the parameters of that forward have no gradients of their own."""
        model = wrong_model()
        weights = {name: param * 1.5 for name, param in model.named_parameters()}
        torch.func.functional_call(model, weights, (X,)).square().sum().backward()
        step(model)

    def not_finite(ranks: set[int]) -> None:
        model: Any = parallelize(Mlp(), make_tp_mesh(), UP_DOWN)
        if dist.get_rank() in ranks:
            model.down.bias.register_hook(lambda gradient: gradient * torch.nan)
        step(model, X.float())

    def keys() -> None:
        """A whole layer whose features each rank uses with its own."""
        compute = lambda m, x: m.down(m.up(x).unflatten(-1, (-1, 4)).mul(m.k(x).unsqueeze(-2)).flatten(-2))  # noqa: E731
        torch.manual_seed(0)
        linears = {"up": nn.Linear(8, 16), "k": nn.Linear(8, 4), "down": nn.Linear(16, 8)}
        step(parallelize(Net(compute, **linears).double(), make_tp_mesh(), UP_DOWN))

    def only_some_have_a_bias() -> None:
        """What one rank has alone is left out."""
        model: Any = parallelize(gained(), make_tp_mesh(), UP_DOWN | {"gain": LocalParameters()})
        model.extra = nn.Parameter(torch.ones(1)) if dist.get_rank() else None
        trained(model, 2)

    def rounding() -> None:
        """A norm of each head leaves nothing but rounding of the gain's gradient, which the ranks have apart."""
        compute = lambda m, x: m.down(m.norms(m.gain(m.up(x)))) + m.bare * x  # noqa: E731
        torch.manual_seed(0)
        parts: dict[str, Any] = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "gain": Gain()}
        parts |= {
            "norms": OfHeads(nn.RMSNorm(4, elementwise_affine=False)),
            "bare": nn.Parameter(torch.ones(1)),
        }
        trained(parallelize(Net(compute, **parts).double(), make_tp_mesh(), UP_DOWN), 2)

    return {
        "at once": stops(lambda: step(wrong_model())),
        "frozen at first": stops(frozen_first),
        "frozen when applied": stops(frozen_when_applied),
        "behind zeros": stops(lambda: trained(behind_zeros(), 2)),
        "of a copy": stops(lambda: step(copy.deepcopy(wrong_model()))),
        "of a copy, behind zeros": stops(lambda: trained(copy.deepcopy(behind_zeros()), 2)),
        "of a copy after a forward": stops(lambda: after_a_forward(copy.deepcopy)),
        "loaded after a forward": stops(lambda: after_a_forward(loaded)),
        "of a compiled copy": stops(copied_and_compiled),
        "after other gradients": stops(after_other_gradients),
        "after computed weights": stops(after_a_call_with_computed_weights),
        "not finite on one rank": stops(lambda: not_finite({1}), "down.bias"),
        "not: not finite on all ranks": not stops(lambda: not_finite({0, 1})),
        "checkpoint": stops(partial(checkpointed, False)),
        "reentrant checkpoint": stops(partial(checkpointed, True)),
        "compiled": stops(compiled),
        "assigned": stops(assigned),
        "one rank has none": stops(one_has_none),
        "torch's styles": stops(by_torch),
        "half precision": stops(lambda: step(wrong_model().bfloat16(), X.bfloat16())),
        "keys": stops(keys, "k.weight", "k.bias"),
        "not: what only some have": not stops(only_some_have_a_bias),
        "not: rounding": not stops(rounding),
        "not: check=False": not stops(lambda: trained(wrong_model(check_gradients=False), 3)),
        "not: LocalParameters": not stops(
            lambda: trained(parallelize(gained(), make_tp_mesh(), UP_DOWN | {"gain": LocalParameters()}), 3)
        ),
    }


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.filterwarnings("default")  # torch.compile's own, and of a gain times a DTensor
def test_every_way_by_which_a_gradient_comes_is_compared() -> None:
    for found in run_ranks(2, stopped_when):
        assert all(found.values()), found


def under_fsdp() -> bool:
    """One dp rank's shard of the gain has the difference: all ranks stop."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize(gained(), mesh["tp"], UP_DOWN)
    fully_shard(model, mesh=mesh["dp"])
    return stops(lambda: trained(model, 1))


@pytest.mark.usefixtures("as_on_cuda")
def test_under_fsdp_all_ranks_stop_at_the_first_step() -> None:
    assert run_ranks(4, under_fsdp) == [True] * 4


def other_samples() -> dict[str, bool]:  # noqa: C901  one function for each way
    """Ranks with samples of their own, in each way in which a model may begin; and what is no such thing."""
    rank = dist.get_rank()
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(rank))

    def llama(**options: Any) -> Any:
        torch.manual_seed(0)
        return parallelize(Llama(layers=1), make_tp_mesh(), llama_plan(**options))

    def one_token() -> None:
        other = torch.zeros(2, 8, dtype=torch.long)
        other[0, 0] = rank
        step(llama(), other)

    def checkpointed() -> None:
        checkpoint(llama(), ids, use_reentrant=False).square().sum().backward()

    def copied(forwards: int) -> None:
        model = llama()
        for _ in range(forwards):
            model(torch.zeros_like(ids))
        step(copy.deepcopy(model), ids)

    def whole_embedding() -> None:
        plan = {name: style for name, style in llama_plan().items() if name != "tok_embeddings"}
        step(parallelize(Llama(layers=1), make_tp_mesh(), plan), ids)

    def compiled_layers() -> None:
        model = llama()
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        step(model, ids)

    def assigned() -> None:
        model = llama()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(ids).square().sum(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.optim.SGD(parameters, foreach=False).step()

    def as_a_stage() -> None:
        """A first run on memory as it is, for shapes, then a batch."""
        model: Any = parallelize(Mlp(), make_tp_mesh(), UP_DOWN)
        memory = numbers(2, 8, seed=rank).float().requires_grad_()
        torch.autograd.grad(model(memory).sum(), memory)
        step(model, X.float())

    def own_sequence() -> None:
        """A rank's own part of the sequence, which the first layer gathers."""
        plan = UP_DOWN | {"up": ColwiseParallel(input_layouts=Shard(0))}
        step(parallelize(Mlp(), make_tp_mesh(), plan), numbers(2, 8, seed=rank).float())

    name = "tok_embeddings"
    return {
        "ids": stops(lambda: step(llama(), ids), name),
        "one token": stops(one_token, name),
        "sequence parallel": stops(lambda: step(llama(sequence_parallel=True), ids), name),
        "other lengths": stops(lambda: llama()(ids[:, : 8 - rank]), name),
        "checkpointed": stops(checkpointed, name),
        "a copy": stops(lambda: copied(0), name),
        "a copy after a forward": stops(lambda: copied(1), name),
        "a copy after three": stops(lambda: copied(3), name),
        "compiled layers": stops(compiled_layers, name),
        "assigned": stops(assigned, name),
        "whole embedding": stops(whole_embedding, "layers.0.attention.wq"),
        "features": stops(
            lambda: step(parallelize(Mlp(), make_tp_mesh(), UP_DOWN), numbers(2, 8, seed=rank).float()), "up"
        ),
        "not: a stage's first run": not stops(as_a_stage),
        "not: a part of the sequence": not stops(own_sequence),
        "not: check=False": not stops(
            lambda: step(parallelize(Mlp(), make_tp_mesh(), UP_DOWN, check_gradients=False), X.float() * rank)
        ),
    }


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_ranks_with_other_samples_are_reported() -> None:
    for found in run_ranks(2, other_samples):
        assert all(found.values()), found


def under_ddp() -> dict[str, float]:
    """DDP has local shards in the place of parameters: they are not whole, and its gradients are right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = [X, X.roll(1, 0) * 2]
    found = {}
    for as_view in (False, True):
        options: Any = {"device_mesh": mesh["dp"], "gradient_as_bucket_view": as_view}
        reference = gained()
        for batch in data:
            (reference(batch).square().sum() / 2).backward()
        model: Any = parallelize(gained(), mesh["tp"], UP_DOWN | {"gain": LocalParameters()})
        model = DistributedDataParallel(model, **options)
        parameters = dict(model.module.named_parameters())  # a forward takes them away
        optimizer = torch.optim.SGD(parameters.values(), lr=0.0)
        step(model, data[mesh.get_local_rank("dp")])
        optimizer.step()
        shards = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        for name, parameter in reference.named_parameters():
            wanted = get_grad(parameter)
            if name in shards:
                wanted = wanted.chunk(2, shards[name])[mesh.get_local_rank("tp")]
            found[f"{name}, view {as_view}"] = apart(parameters[name].grad, wanted)
        wrong = DistributedDataParallel(parallelize(gained(), mesh["tp"], UP_DOWN), **options)
        found[f"stops, view {as_view}"] = 0.0 if stops(partial(step, wrong)) else 1.0
    return found


def test_ddp_over_tensor_parallelism() -> None:
    assert_no_difference(run_ranks(4, under_ddp), cases=12)


def while_captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A whole step in a capture, as a first one and later; what the ranks compare waits until it is over."""
    found: list[str] = []
    for steps_before in (0, 3):
        model = wrong_model(check_gradients=False)
        register_gradient_check(model, make_tp_mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
        model.gain.requires_grad_(requires_grad=False)
        for _ in range(steps_before):
            step(model)
            optimizer.step()
        model.gain.requires_grad_(requires_grad=True)
        with monkeypatch.context() as patch, NoReads():
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            step(model)
            optimizer.step()
        try:
            optimizer.step()
        except GradientError as error:
            found += names_in(error)
    return found


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, while_captured, monkeypatch) == [["gain.weight"] * 2] * 2


def looks_at_meshes() -> list[int]:
    """How often a compared step asks for the ranks of meshes and groups, with few parameters and with many."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    ranks_of, found = dist.get_process_group_ranks, []
    places = DeviceMesh.mesh
    for layers in (1, 8):
        model: Any = nn.Sequential(*(Mlp() for _ in range(layers)))
        plan = {f"*.{name}": style for name, style in UP_DOWN.items()}
        fully_shard(parallelize(model, mesh["tp"], plan), mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, X.float())
        asked: list[Any] = []

        def groups(group: Any, asked: list[Any] = asked) -> Any:
            asked.append(group)
            return ranks_of(group)

        def numbers_of(mesh: Any, asked: list[Any] = asked) -> Any:
            asked.append(mesh)
            return places.fget(mesh)  # type: ignore[attr-defined]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_process_group_ranks", groups)
            patch.setattr(DeviceMesh, "mesh", property(numbers_of))
            optimizer.step()
        found.append(len(asked))
    return found


def test_a_compared_step_looks_at_each_mesh_once() -> None:
    for few, many in run_ranks(2, looks_at_meshes):
        assert few == many > 0


def when_compared() -> list[int]:
    """The steps, of the first nine, before which the ranks communicate; and what a training step leaves behind."""
    model = parallelize(Mlp(), make_tp_mesh(), UP_DOWN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(1, 10):
        step(model, X.float())
        with OperationRecorder() as recorded:
            optimizer.step()
        if "allgather_" in recorded.names:
            found.append(number)
    return found


def test_the_steps_at_which_the_ranks_compare() -> None:
    assert run_ranks(2, when_compared) == [[1, 2, 4, 8]] * 2


def test_the_sentence() -> None:
    got = r"GradientError: gain\.weight: replicated on the 2 ranks of tp, but the gradients differ, by up to [\d.]+ of their norm"
    for text in run_ranks(2, lambda: error_of(lambda: step(wrong_model()))):
        assert re.match(got, text)
        assert "LocalParameters(), which all-reduces its gradients" in text


# --- sums -----------------------------------------------------------------------------------------------------

PARTIAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence": ({}, llama_plan(sequence_parallel=True)),
    "torch's norms": ({}, llama_plan(sequence_parallel=True) | TORCHS_NORMS),
    "shared kv heads": ({"n_kv_heads": 1}, llama_plan(8, 1)),
}


def sums(name: str) -> tuple[int, float]:
    """How many collectives sum the parts of three micro-batches, and how far the gradients then are from whole."""
    options, plan = PARTIAL[name]
    torch.manual_seed(0)
    reference = Llama(**options).double()
    model = parallelize(copy.deepcopy(reference), make_tp_mesh(), plan, check_gradients=False)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    for each in (model, reference):
        for _ in range(3):
            each(ids).square().sum().backward()
    with OperationRecorder() as reduced:
        torch.optim.SGD(model.parameters(), lr=0.0, foreach=False).step()
    pairs: list[Any] = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert all(one.grad.placements == one.placements for one, _ in pairs if isinstance(one.grad, DTensor))
    size = max(float(other.grad.abs().max()) for _, other in pairs)
    worst = max(apart(whole(one.grad), other.grad) for one, other in pairs) / size
    return len(reduced.sent), worst


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", PARTIAL)
def test_parts_are_summed_once_a_step(name: str) -> None:
    for collectives, worst in run_ranks(2, sums, name):
        assert collectives == 1
        assert worst < 1e-12


class Routed(nn.Module):
    """Three gains, one for each kind of row; a kind without rows leaves its gain without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ModuleList(nn.LayerNorm(4) for _ in range(3)).double()

    def forward(self, rows: Tensor, kinds: list[int]) -> Tensor:
        outputs = [self.gains[kind](row) for row, kind in zip(rows, kinds, strict=True)]
        return torch.stack(outputs)


def routed(rows: slice, *, sharded: bool) -> list[list[float] | None]:
    """The gradients of two steps, of a rank's own rows: the ranks use different gains, and nobody uses the last one."""
    model: Any = Routed()
    if sharded:
        parallelize(model, make_tp_mesh(), {"gains.*": LocalParameters()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found: list[list[float] | None] = []
    for kinds in ([0, 0, 1, 1], [1, 0, 1, 1]):
        optimizer.zero_grad()
        model(numbers(4, 4, seed=3)[rows], kinds[rows]).pow(3).sum().backward()
        optimizer.step()
        gradients = [param.grad for param in model.parameters()]
        found += [None if gradient is None else whole(gradient).tolist() for gradient in gradients]
    return found


def test_a_rank_that_does_not_use_a_module_takes_part_in_the_sum() -> None:
    expected = routed(slice(None), sharded=False)
    assert expected[-1] is None
    for found in run_ranks(
        2, lambda: routed(slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2), sharded=True)
    ):
        for gradient, other in zip(found, expected, strict=True):
            assert gradient == (None if other is None else pytest.approx(other))


def clipped_and_stepped() -> list[float]:
    """Clipping and steps of torch's optimizers on gradients that are parts, against one process."""
    found = []
    for make in (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, foreach=False, eps=1e-3),
        partial(torch.optim.AdamW, foreach=True, eps=1e-3),
        partial(torch.optim.LBFGS, max_iter=2),
    ):
        torch.manual_seed(0)
        reference = gained()
        model = parallelize(copy.deepcopy(reference), make_tp_mesh(), UP_DOWN | {"gain": LocalParameters()})
        optimizers: list[Any] = [make(each.parameters()) for each in (model, reference)]
        for _ in range(2):
            for each, optimizer in zip((model, reference), optimizers, strict=True):
                closure = partial(backward_of, each, optimizer)
                closure()
                if make.func is torch.optim.LBFGS:
                    optimizer.step(closure)
                    continue
                clip_grad_norm_(each.parameters(), 0.5, foreach=False)
                optimizer.step()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        found.append(max(apart(whole(one), other) for one, other in pairs))
    return found


def backward_of(model: Any, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(X).square().sum()
    loss.backward()
    return loss


@pytest.mark.usefixtures("as_on_cuda")
def test_clipping_and_optimizers_take_parts() -> None:
    for found in run_ranks(2, clipped_and_stepped):
        assert max(found) < 1e-10, found
