"""What a plan leaves out, or gets wrong: trained as in one process, or named at the first backward on every rank."""

from __future__ import annotations

import copy
import gc
import re
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from tp_checks import against_whole, largest_difference
from tp_compare import assert_right, numbers, sharded, tp_mesh, training_difference
from tp_models import llama_plan as llama_plan
from tp_models import UP_DOWN, Attention, Llama, Mlp, Net, hf_model
from tp_wirings import Gain, OfHeads

from namedmesh.errors import GradientError, MeshError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    KeepWhole,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
    SumTailGradient,
    compare_gradients,
    gradient_comparison,
    parallelize,
    plan_from_hf,
    plan_report,
)
from namedmesh.tensor_parallel.collectives import all_gather

if TYPE_CHECKING:
    from collections.abc import Callable

Plan = dict[str, Any]
WHOLE, SEQUENCE = Replicate(), Shard(1)


class Wired(nn.Module):
    """``down(between(up(before(x))))``, and ``skip(x)`` beside it, with the parts declared in any order."""

    def __init__(self, order: str, **parts: nn.Module) -> None:
        super().__init__()
        parts = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)} | parts
        for name in sorted(parts, key=lambda name: order.find(name)):
            self.add_module(name, parts[name])
        self.names = set(parts)

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self
        for name in sorted(self.names & {"factor", "temperature", "relu_first"}):
            x = layers.get_submodule(name)(x)
        features = layers.up(x)
        features = features * layers.gate(x) if "gate" in self.names else features
        for name in sorted(self.names & {"act", "gain", "norms", "vector"}):
            features = layers.get_submodule(name)(features)
        out = layers.down(torch.tanh(features))
        out = out + layers.skip(x) if "skip" in self.names else out
        return layers.scale(out) if "scale" in self.names else out  # type: ignore[no-any-return]


def scaled(after: bool) -> Net:
    """A number of the module itself, between the two linears or after both."""

    def compute(m: Any, x: Tensor) -> Any:
        features = torch.tanh(m.up(x * m.other))
        return m.down(features) * m.weight if after else m.down(features * m.weight)

    numbers = {name: nn.Parameter(torch.ones(1)) for name in ("weight", "other")}
    return Net(compute, up=nn.Linear(8, 16), down=nn.Linear(16, 8), **numbers)


class Subclass(nn.Linear):
    """Calls the forward of its base, and works on all of its features before or after."""

    def __init__(
        self, work: Callable[[Tensor], Tensor], inputs: int, outputs: int, before: bool = False
    ) -> None:
        super().__init__(inputs, outputs)
        self.work, self.before = work, before

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        return super().forward(self.work(input)) if self.before else self.work(super().forward(input))


def glu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.cat([gate * up, up], -1)


def quantized(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 8
    return (x / step).round() * step


def two_columns(operation: Callable[[Tensor], Any], where: str = "before", *, residual: bool = True) -> Net:
    """Two column layers, and an operation on their input: before them, between them, or between them on a copy."""

    def compute(m: Any, x: Tensor) -> Any:
        if where == "before":
            operation(x)
        features = m.up(x)
        if where != "before":
            x = x * 1 if where == "copy" else x
            operation(x)
        out = m.down(torch.tanh(features) * m.gate(x))
        return out + x if residual else out

    return Net(compute, up=nn.Linear(8, 16), gate=nn.Linear(8, 16), down=nn.Linear(16, 8))


def double_gradient(x: Tensor) -> None:
    x.register_hook(lambda gradient: 2 * gradient.clamp(-1, 1))


def written_for_the_caller() -> Net:
    """The module that shares its input writes into it, and what is around it uses that afterwards."""
    return Net(lambda m, x: m.part(x) + x, part=two_columns(lambda x: x.mul_(2), residual=False))


def hooked() -> nn.Module:
    model = Wired(LAST)
    model.get_submodule("up").register_forward_hook(lambda _module, _args, output: output.softmax(-1))
    return model


def beside() -> Net:
    """All ranks compute a few features whole, and use them with their own part of others."""

    def compute(m: Any, x: Tensor) -> Any:
        x = m.norm(x)
        return m.down((m.up(x).unflatten(-1, (-1, 4)) * m.small(x).unsqueeze(-2)).flatten(-2))

    linears = {"small": nn.Linear(8, 4), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    return Net(compute, norm=nn.RMSNorm(8), **linears)


def column_of(work: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Wired(LAST, up=Subclass(work, 8, 16))


def row_of(work: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Wired(LAST, down=Subclass(work, 16, 8, before=True))


SHARED: Plan = UP_DOWN | {"gate": ColwiseParallel(), "": SharedInput()}
LAST = "up down skip"  # whatever else there is comes before, or after, these
FIRST = "gain vector norms act skip up down"
SKIP = partial(Wired, LAST, gain=Gain(), skip=nn.Linear(8, 8))
NORMED_HEADS = partial(Wired, LAST, norms=OfHeads(nn.RMSNorm(4)))
ACTIVATED = partial(Wired, LAST, act=nn.PReLU())
# A model and a plan with which training is that of one process.
RIGHT: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "(a) a factor of the input": (partial(Wired, LAST, factor=Gain()), UP_DOWN),
    "(a) a temperature of the input": (partial(Wired, FIRST, temperature=Gain()), UP_DOWN),
    "(b) a gain between, covered": (SKIP, UP_DOWN | {"gain": LocalParameters()}),
    "(b) a scale of the whole": (partial(Wired, FIRST, scale=Gain()), UP_DOWN),
    "a number, covered": (partial(scaled, False), UP_DOWN | {"": LocalParameters({"weight": WHOLE})}),
    "a number after both": (partial(scaled, True), UP_DOWN | {"": KeepWhole()}),
    "(c) softmax": (column_of(lambda x: x.softmax(-1)), UP_DOWN),
    "(c) normalize": (column_of(lambda x: F.normalize(x, dim=-1)), UP_DOWN),
    "(c) chunked": (column_of(glu), UP_DOWN),
    "(c) row: layer norm": (row_of(lambda x: F.layer_norm(x, (16,))), UP_DOWN),
    "(c) row: quantized": (row_of(quantized), UP_DOWN),
    "(c) row: mean gate": (row_of(lambda x: x * torch.sigmoid(x.mean(-1, keepdim=True))), UP_DOWN),
    "(f) written into at first": (partial(two_columns, lambda x: x.mul_(2)), SHARED),
    "(f) a ReLU in place": (partial(two_columns, F.relu_), SHARED),
    "(f) a copy is written into": (partial(two_columns, lambda x: x.mul_(2), "copy"), SHARED),
    "(f) written into for the caller": (
        written_for_the_caller,
        {f"part.{name}".rstrip("."): style for name, style in SHARED.items()},
    ),
    "a softmax in a hook": (hooked, UP_DOWN),
    "(f) a hook": (partial(two_columns, double_gradient), SHARED),
    "norms of heads, covered": (NORMED_HEADS, UP_DOWN | {"norms.inner": LocalParameters()}),
    "an activation, covered": (ACTIVATED, UP_DOWN | {"act": LocalParameters()}),
    "a few features, covered": (beside, UP_DOWN | {"small": SumTailGradient(4)}),
    "a gate, covered": (
        partial(Wired, LAST, gate=nn.Linear(8, 16)),
        UP_DOWN | {"gate": ColwiseParallel(output_layouts=Shard(-1))},
    ),
}
# A model, a plan, and the names that the error has to have.
STOPPED: dict[str, tuple[Callable[[], nn.Module], Plan, set[str]]] = {
    "(b) a gain between, declared last": (
        partial(Wired, "gain" + LAST, gain=Gain(), skip=nn.Linear(8, 8)),
        UP_DOWN,
        {"gain.weight"},
    ),
    "(b) a vector of the model's width on features": (
        lambda: Wired(LAST, up=nn.Linear(8, 32), down=nn.Linear(32, 8), vector=_EachEight(Gain(8))),
        UP_DOWN,
        {"vector.inner.weight"},
    ),
    "a number of the module, between": (partial(scaled, False), UP_DOWN, {"weight"}),
    "norms of heads": (NORMED_HEADS, UP_DOWN, {"norms.inner.weight"}),
    "an activation": (ACTIVATED, UP_DOWN, {"act.weight"}),
}


class _EachEight(OfHeads):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.unflatten(-1, (-1, 8))).flatten(-2)
        return out


def result(make: Callable[[], nn.Module], plan: Plan) -> float | str:
    """How far training is from that of one process, or the error."""
    torch.manual_seed(0)
    reference = make().double()
    for parameter in reference.parameters():  # a norm of ones, and a factor of 1, would hide what it does
        nn.init.uniform_(parameter, -0.7, 0.7)
    model = sharded(_given(reference), {f"inner.{k}".rstrip("."): s for k, s in plan.items()})
    data = torch.randn(2, 6, 8, dtype=torch.float64)
    try:
        return training_difference(model, _given(reference), data)
    except GradientError as error:
        return str(error)


def _given(inner: nn.Module) -> Net:
    """A module with an input that is no leaf, so that it may write into it."""
    return Net(lambda m, x: m.inner(x * 1), inner=inner)


def results() -> dict[str, float | str]:
    return {name: result(*case[:2]) for name, case in (RIGHT | STOPPED).items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, float | str]]:
    return run_ranks(2, results)


@pytest.mark.parametrize("name", [*RIGHT, *STOPPED])
def test_training_is_that_of_one_process_or_stops_with_the_names(
    name: str, found: list[dict[str, float | str]]
) -> None:
    first, second = (each[name] for each in found)
    if name in RIGHT:
        assert isinstance(first, float), first
        assert max(first, float(second)) < 1e-10
        return
    assert first == second
    assert names_in(first) == {f"inner.{each}" for each in STOPPED[name][2]}


def names_in(text: object) -> set[str]:
    """The parameters that an error names in front of its reasons."""
    return set(re.findall(r"[\w.]+(?:weight|bias)(?=[:,])", str(text)))


ON_SHARDS: Plan = {
    "inner": SharedInput(input_layouts=SEQUENCE),
    "inner.up": ColwiseParallel(),
    "inner.gate": ColwiseParallel(),
    "inner.down": RowwiseParallel(output_layouts=SEQUENCE),
}


def gathered_inputs() -> dict[str, float | str]:
    """(f) Where the shared input is gathered."""
    cases: dict[str, tuple[Callable[[Tensor], Any], str]] = {
        "mul": (lambda x: x.mul_(2), "before"),
        "relu": (F.relu_, "before"),
        "dropout": (lambda x: F.dropout(x, 0.0, training=True, inplace=True), "before"),
        "hook": (double_gradient, "before"),
        "mul between": (lambda x: x.mul_(2), "between"),
        "hook between": (double_gradient, "between"),
    }
    found: dict[str, float | str] = {}
    for name, case in cases.items():
        model = _given(two_columns(*case, residual=False))
        pairs = partial(against_whole, model, ON_SHARDS, numbers(2, 4, 8, seed=1), cut_in=1, cut_out=1)
        try:
            found[name] = largest_difference(pairs)
        except (MeshError, RuntimeError) as error:
            found[name] = str(error)
    return found


def test_what_is_written_into_a_gathered_input() -> None:
    for found in run_ranks(2, gathered_inputs):
        assert max(float(found[name]) for name in ("mul", "relu", "dropout", "hook")) < 1e-12, found
        # As in one process, where the first layer has kept what the operation writes into.
        assert "modified by an inplace operation" in str(found["mul between"])
        assert "its shared input has a hook" in str(found["hook between"])


# --- the words of the error -----------------------------------------------------------------------------------


def error_of(make: Callable[[], nn.Module], plan: Plan, data: Tensor, **options: Any) -> str:
    torch.manual_seed(0)
    model = parallelize(make().double(), tp_mesh(), plan, **options)
    with pytest.raises(GradientError) as caught:
        model(data).square().sum().backward()
    return str(caught.value)


def row_gate() -> Net:
    """A gate that a row layer makes of all features, for each rank's own."""
    compute = lambda m, x: m.down((up := m.up(x)) * torch.sigmoid(m.gate(up)))  # noqa: E731
    return Net(compute, up=nn.Linear(8, 16), gate=nn.Linear(16, 1), down=nn.Linear(16, 8))


class TwoBatches(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + torch.distributed.get_rank()))


def texts() -> dict[str, str]:
    gathered = UP_DOWN | {"small": ColwiseParallel(output_layouts=WHOLE)}
    return {
        "parameter": error_of(partial(Wired, LAST, act=nn.PReLU()), UP_DOWN, numbers(2, 8, seed=1)),
        "several": error_of(partial(scaled, False), UP_DOWN, numbers(2, 8, seed=1)),
        "upstream": error_of(beside, UP_DOWN, numbers(2, 8, seed=1)),
        "gathered": error_of(beside, gathered, numbers(2, 8, seed=1)),
        "row": error_of(row_gate, UP_DOWN | {"gate": RowwiseParallel()}, numbers(2, 8, seed=1)),
        "input": error_of(TwoBatches, UP_DOWN, numbers(2, 8, seed=1)),
        "keys": error_of(
            lambda: Attention(32, 4, 1),
            {"wq": ColwiseParallel(), "wo": RowwiseParallel()},
            numbers(1, 3, 32, seed=1),
        ),
        "sequence": error_of(
            Llama,
            {k: s for k, s in llama_plan(sequence_parallel=True).items() if "ffn_norm" not in k},
            torch.arange(16).view(2, 8),
        ),
    }


def test_what_the_errors_name() -> None:
    first, second = run_ranks(2, texts)
    assert first == second
    assert first["parameter"] == (
        "act.weight: whole on each of the 2 ranks of tp, but their gradients differ, by up to 1.1 of the size: each has "
        "a part, and they would train apart; where the ranks use a module on their own features or tokens only, add "
        "'act': LocalParameters() to the plan, which sums the parts (what all use alike elsewhere, too, needs parameters "
        "of its own there); where they use their own features of what a linear makes, give it a style: ColwiseParallel(), "
        "KeyValueParallel() for keys and values, SumTailGradient(width) if all use its last width features; what all "
        "ranks use alike stays whole (KeepWhole()), and can differ because of what follows it only"
    )
    assert "add '': LocalParameters({'weight': Replicate()}) to the plan" in first["several"]
    assert names_in(first["upstream"]) == {"norm.weight", "small.weight", "small.bias"}
    assert "the output of small: the 2 ranks of tp have all of it" in first["gathered"]
    assert "output_layouts=Shard(-1)" in first["gathered"]
    assert "the output of gate: " in first["row"]
    assert "LocalParameters" not in first["row"]  # for the bias, whose module has a style
    assert "the input of up: the plan says that the 2 ranks of tp have the same" in first["input"]
    assert names_in(first["keys"]) == {"wk.weight", "wv.weight"}
    assert "layers.0.ffn_norm.weight, layers.1.ffn_norm.weight: whole" in first["sequence"]


# --- when the ranks compare ----------------------------------------------------------------------------------


def wrong_model(**options: Any) -> Any:
    torch.manual_seed(0)
    return parallelize(Wired(LAST, gain=Gain()).double(), tp_mesh(), UP_DOWN, **options)


def stops(call: Callable[[], Any], output: str = "") -> bool:
    """Whether a call ends in the error with the right name, on this rank."""
    try:
        call()
    except GradientError as error:
        return f"the output of {output}:" in str(error) if output else names_in(error) == {"gain.weight"}
    return False


def stopped_when() -> dict[str, bool]:  # noqa: C901, PLR0915  one function for each way
    """Every way by which a gradient may come, of a model whose gain is in no style."""
    x = numbers(2, 8, seed=1)

    def step(model: Any, value: Tensor = x) -> None:
        model(value).square().sum().backward()

    def trained_later(unused: bool) -> None:
        """A parameter that never has a gradient makes the ranks compare more rarely, until another one has one."""
        model = wrong_model()
        if unused:
            model.unused = nn.Parameter(torch.ones(1))
        model.gain.requires_grad_(False)
        for _ in range(20):
            step(model)
        model.gain.requires_grad_(True)
        step(model)

    def zero_first() -> None:
        model = wrong_model()
        step(model, torch.zeros_like(x) * 0)
        for module in (model.up, model.down):
            nn.init.zeros_(module.bias)
        step(model)

    def two_steps(model: Any, style: Any, data: Tensor = x) -> None:
        """With nothing behind a layer of zeros in the first one."""
        model = parallelize(model, tp_mesh(), UP_DOWN | {"small": style} if style else UP_DOWN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            model(data).square().mean().backward()
            optimizer.step()

    def used_twice() -> None:
        compute = lambda m, x: m.down(m.gain(m.up(x))) + m.gain(x)  # noqa: E731
        model = Net(compute, gain=Gain(), up=nn.Linear(8, 16), down=nn.Linear(16, 8)).double()
        nn.init.zeros_(model.get_parameter("down.weight"))
        two_steps(model, None)

    def gathered() -> None:
        model = beside().double()
        nn.init.zeros_(model.get_parameter("down.weight"))
        two_steps(model, ColwiseParallel(output_layouts=WHOLE))

    def gathered_twice() -> None:
        """The output of the first call is used by all ranks alike, that of the second one by each with its features."""

        def compute(m: Any, x: Tensor) -> Any:
            of_all = m.small(x).mean(-1, keepdim=True)
            return of_all + m.down(
                (m.up(x).unflatten(-1, (-1, 4)) * m.small(2 * x).unsqueeze(-2)).flatten(-2)
            )

        linears = {"small": nn.Linear(8, 4), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
        two_steps(Net(compute, **linears).double(), ColwiseParallel(output_layouts=WHOLE))

    def next_to_nothing() -> None:
        """A norm of each head leaves nothing but rounding of the gain's gradient, which the ranks have apart."""
        compute = lambda m, x: m.down(m.norms(m.gain(m.up(x)))) + m.bare * x  # noqa: E731
        linears = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
        norms = OfHeads(nn.RMSNorm(4, elementwise_affine=False))
        torch.manual_seed(0)
        two_steps(
            Net(compute, gain=Gain(), norms=norms, bare=nn.Parameter(torch.ones(1)), **linears).double(), None
        )

    def gathered_small() -> None:
        """In single precision, of many tokens, of each of which the mean takes a small part."""
        torch.manual_seed(0)
        two_steps(beside(), ColwiseParallel(output_layouts=WHOLE), torch.randn(4096, 8))

    def copied() -> None:
        step(copy.deepcopy(wrong_model()))

    def checkpointed(reentrant: bool) -> None:
        model = wrong_model()
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()

    def compiled() -> None:
        model = wrong_model()
        model.compile(backend="aot_eager", fullgraph=True)
        step(model)  # the compiler makes no hooks: the optimizer asks
        torch.optim.SGD(model.parameters(), foreach=False).step()

    def assigned() -> None:
        """As a pipeline's schedule does that computes the gradients of weights in a pass of their own."""
        model = wrong_model()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(x).square().sum(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.optim.SGD(parameters, foreach=False).step()

    def one_has_none() -> None:
        """A parameter that one rank uses, and the other does not."""
        model = wrong_model()
        out = model.down(model.gain(model.up(x)) if torch.distributed.get_rank() else model.up(x))
        model.forward = lambda _: out
        step(model)

    def by_torch() -> None:
        torch.manual_seed(0)
        model = Wired(LAST, gain=Gain()).double()
        plan = {"up": torch_styles.ColwiseParallel(), "down": torch_styles.RowwiseParallel()}
        torch_styles.parallelize_module(model, tp_mesh(), plan)
        compare_gradients(model, tp_mesh())
        step(model)

    def over_steps() -> None:
        model = wrong_model(check=False)
        for _ in range(3):
            step(model)

    return {
        "at once": stops(lambda: step(wrong_model())),
        "trained later": stops(partial(trained_later, False)),
        "trained later, beside one that is not used": stops(partial(trained_later, True)),
        "zero at first": stops(zero_first),
        "used on all features, too, behind zeros": stops(used_twice),
        "an output behind zeros": stops(gathered, "small"),
        "an output with small gradients": stops(gathered_small, "small"),
        "an output of several calls": stops(gathered_twice, "small"),
        "rounding only": not stops(next_to_nothing),
        "a copy": stops(copied),
        "checkpoint": stops(partial(checkpointed, False)),
        "reentrant checkpoint": stops(partial(checkpointed, True)),
        "compiled": stops(compiled),
        "assigned": stops(assigned),
        "one rank has none": stops(one_has_none),
        "torch's styles": stops(by_torch),
        "half precision": stops(lambda: step(wrong_model().bfloat16(), x.bfloat16())),
        "check=False": not stops(over_steps),
    }


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_every_way_by_which_a_gradient_comes_is_compared() -> None:
    for found in run_ranks(2, stopped_when):
        assert all(found.values()), found


def begun_alone() -> tuple[str, int]:
    """A parameter that one rank only begins to train; and how often the ranks compare before, in six passes."""
    rank, model = torch.distributed.get_rank(), wrong_model()
    model.gain.requires_grad_(False)
    with mock.patch.object(gradient_comparison, "all_gather", wraps=all_gather) as compared:
        for _ in range(6):
            model(numbers(2, 8, seed=1)).square().sum().backward()
    gradient_comparison.BEGINNING_LIMIT = timedelta(seconds=1)
    model.gain.requires_grad_(rank == 1)
    try:
        model(numbers(2, 8, seed=1)).square().sum().backward()
    except GradientError as error:
        return str(error), compared.call_count
    return "", compared.call_count


def test_a_rank_that_begins_alone_to_train_a_parameter_does_not_hang() -> None:
    first, second = run_ranks(2, begun_alone)
    text = (
        "gain.weight begins to need a gradient on rank 1, but within 0:00:01 not on rank 0; call requires_grad_ for the "
        "same parameters on every rank of tp"
    )
    assert (first[0], second[0]) == ("", text)
    assert first[1] == second[1] == 1


def with_parameters_of_one_rank() -> tuple[str, str]:
    """A bias that only the first rank has, and a head that only the last one has: right, and wrong."""
    rank, texts = torch.distributed.get_rank(), []
    for factor in (1, 1 + rank):
        model = nn.Sequential(nn.Linear(8, 8, bias=rank == 0), nn.Linear(8, 8) if rank else nn.Identity())
        compare_gradients(model, tp_mesh())
        try:
            (model[0](torch.ones(2, 8)).sum() * factor + model(torch.ones(2, 8)).sum() * 0).backward()
            texts.append("")
        except GradientError as error:
            texts.append(str(error))
    return texts[0], texts[1]


def test_a_parameter_that_only_some_ranks_have_is_left_out() -> None:
    for right, wrong in run_ranks(2, with_parameters_of_one_rank):
        assert right == ""
        assert names_in(wrong) == {"0.weight"}


def asked_and_told() -> tuple[int, str]:
    """Every parameter is sharded, and the first gradients are zero: how often the model is looked at, and what comes next."""
    linears = {"up": nn.Linear(8, 16, bias=False), "down": nn.Linear(16, 8, bias=False)}
    model = sharded(Net(lambda m, x: m.down(m.up(x)), **linears).double(), UP_DOWN)
    x, kind = numbers(2, 8, seed=1), gradient_comparison.GradientComparison
    with mock.patch.object(kind, "_parameters", autospec=True, side_effect=kind._parameters) as asked:
        outs = [model(x * 0) for _ in range(3)]
        outs[-1].square().sum().backward()
    with pytest.raises(GradientError) as caught:
        model(x * (1 + torch.distributed.get_rank())).square().sum().backward()
    return asked.call_count, str(caught.value)


def test_what_is_left_is_looked_for_once_a_backward() -> None:
    for asked, text in run_ranks(2, asked_and_told):
        assert asked == 1
        assert text.startswith("the input of up: the plan says")


def forgotten() -> int:
    """A model goes away while another optimizer makes a step."""
    kept = [wrong_model()]

    def forget(*_: Any) -> None:
        kept.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (forget, lambda *_: None)]
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    for handle in handles:
        handle.remove()
    return len(kept)


def test_a_model_may_go_away_during_a_step() -> None:
    assert run_ranks(2, forgotten) == [0, 0]


def hooks_left() -> tuple[int, int]:
    model = parallelize(Wired(LAST).double(), tp_mesh(), UP_DOWN)
    before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    model(numbers(2, 8, seed=1)).square().sum().backward()
    return before, sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_it_costs_one_collective_and_leaves_no_hook() -> None:
    for before, after in run_ranks(2, hooks_left):
        assert before > 0
        assert after == 0


def with_data_parallelism() -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = numbers(4, 8, seed=1).chunk(2)[mesh["dp"].get_local_rank()]
    found = {}
    for name, part in {"wrong": "gain", "right": "scale"}.items():
        for accumulated in (False, True):
            torch.manual_seed(0)
            parts: dict[str, nn.Module] = {part: Gain()}
            model: Any = parallelize(Wired(LAST, **parts).double(), mesh["tp"], UP_DOWN)
            fully_shard(model, mesh=mesh["dp"])

            def steps(model: Any = model, accumulated: bool = accumulated) -> None:
                for last in (False, True):
                    model.set_requires_gradient_sync(last or not accumulated)
                    model(x).square().sum().backward()

            found[f"{name}, {accumulated}"] = stops(steps) == (name == "wrong")
    return found


def test_fsdp_over_tensor_parallel_and_accumulation() -> None:
    for found in run_ranks(4, with_data_parallelism):
        assert all(found.values()), found


def precisions() -> list[str]:
    """Right models in types that round coarsely, and under autocast: no alarm."""
    found = []
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True), (torch.float32, False)):
        torch.manual_seed(0)
        model = parallelize(Llama().to(dtype), tp_mesh(), llama_plan(sequence_parallel=True))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = (
                    model(torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0)))
                    .float()
                    .square()
                    .mean()
                )
            try:
                loss.backward()
            except GradientError as error:
                found.append(f"{dtype}, {autocast}: {error}")
    return found


def test_rounding_is_no_difference() -> None:
    assert run_ranks(2, precisions) == [[], []]


# --- models --------------------------------------------------------------------------------------------------


def two_steps() -> list[float]:
    """A plan for the model around its layers and one for each layer, in either order."""
    plan = llama_plan(sequence_parallel=True)
    around = {key: style for key, style in plan.items() if not key.startswith("layers")}
    block = {key.removeprefix("layers.*."): style for key, style in plan.items() if key not in around}
    found = []
    for first in (True, False):
        torch.manual_seed(0)
        reference = Llama().double()
        model: Any = copy.deepcopy(reference)
        plans = [(layer, block) for layer in model.layers]
        for part, own in [(model, around), *plans] if first else [*plans, (model, around)]:
            parallelize(part, tp_mesh(), own)
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
        found.append(training_difference(model, reference, ids))
    return found


def test_layers_may_have_a_plan_of_their_own() -> None:
    assert_right(run_ranks(2, two_steps), 1e-11)


def frozen_apertus() -> float:
    """(e) Norms and activations that are frozen when the plan is applied, and trained later."""
    reference = hf_model("Apertus")
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("mlp.act_fn" not in name and "norm" not in name)
    model = sharded(reference, plan_from_hf(reference))
    for each in (model, reference):
        each.requires_grad_(True)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    return training_difference(model, reference, ids, pick="logits")


@pytest.mark.oracle("transformers")
def test_what_was_frozen_when_the_plan_was_applied_is_trained_right_later() -> None:
    hf_model("Apertus")
    assert max(run_ranks(2, frozen_apertus)) < 1e-5


def test_a_dry_run_says_nothing_of_what_a_forward_does() -> None:
    assert plan_report(Wired(LAST, gain=Gain()), 2, UP_DOWN).unsharded == (("gain.weight", (1,)),)
