"""Two hundred random small modules under random plans.

The modules consist of linears, gains, norms, activations, in-place operations, subclasses,
adapters and frozen parameters. A plan may omit modules between the sharded layers, and may
therefore be wrong. Allowed are three outcomes: the plan is rejected, the module trains as in one
process, or a GradientError names parameters whose gradients are wrong without the check.
"""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from tensors import random_tensor, relative_difference
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from tp_compare import make_tp_mesh
from tp_models import Gain, Lora, OfHeads

from namedmesh._errors import GradientError, PlanError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
    parallelize,
)

DIM, HIDDEN, HEAD = 8, 16, 4
PARTS = 12
MODULES_PER_PART = 17
# torch's errors if a module mixes plain tensors and DTensors, or writes into an output of its
# styles.
TORCHS_ERRORS = (
    "mixed torch.Tensor and DTensor",
    "is being modified inplace",
    "have a sharding strategy registered",
)
# Names with a meaning: a check that guesses from names would be misled.
NAMES = ["factor", "act", "temperature", "norm", "gate_scale", "k_norm", "silu", "mixer", "attn_gain", "elu"]


class InPlace(nn.Module):
    """Writes into its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.relu = kind, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "relu":
            out: Tensor = self.relu(x)
            return out
        return x.mul_(1.5) if self.kind == "mul" else x.add_(0.25)


class Normalizing(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        return F.normalize(super().forward(input), dim=-1)


class Softmax(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).softmax(-1)


class Gated(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input * torch.sigmoid(input.mean(-1, keepdim=True)))


MODULES_OUTSIDE: list[Callable[[], nn.Module]] = [
    Gain,
    lambda: Gain(DIM),
    lambda: nn.LayerNorm(DIM),
    lambda: nn.RMSNorm(DIM),
    lambda: OfHeads(nn.RMSNorm(HEAD)),
    nn.PReLU,
    nn.Tanh,
    lambda: nn.Linear(DIM, DIM),
    lambda: InPlace("mul"),
    lambda: InPlace("add"),
    lambda: InPlace("relu"),
]
MODULES_BETWEEN: list[Callable[[], nn.Module]] = [
    Gain,
    lambda: OfHeads(nn.RMSNorm(HEAD)),
    lambda: OfHeads(nn.LayerNorm(HEAD)),
    lambda: OfHeads(Gain(HEAD)),
    lambda: OfHeads(nn.Linear(HEAD, HEAD)),
    nn.PReLU,
    nn.Tanh,
    nn.SiLU,
    lambda: InPlace("mul"),
    lambda: InPlace("relu"),
]


class RandomModule(nn.Module):
    """Sharded layers, with random modules before, between and behind them, and a random plan."""

    def __init__(self, seed: int) -> None:  # noqa: C901  one random draw after another
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        names = draw.sample(NAMES, 5)
        column = draw.choice([nn.Linear, nn.Linear, nn.Linear, Normalizing, Softmax])
        row = draw.choice([nn.Linear, nn.Linear, nn.Linear, Gated])
        modules: dict[str, nn.Module] = {"up": column(DIM, HIDDEN), "down": row(HIDDEN, DIM)}
        if draw.random() < 0.4:
            modules["other"] = nn.Linear(DIM, HIDDEN)
        if draw.random() < 0.3:
            modules["skip"] = nn.Linear(DIM, DIM)
        if draw.random() < 0.15:  # replicated, and multiplied with local features
            modules["heads"] = nn.Linear(DIM, HEAD)
        for name in ("up", "down"):
            layer = modules[name]
            if draw.random() < 0.2 and type(layer) is nn.Linear:
                modules[name] = Lora(layer, HEAD)
        self.before = names[0] if draw.random() < 0.7 else ""
        self.between = names[1:3] if draw.random() < 0.5 else names[1:2]
        self.after = names[3] if draw.random() < 0.5 else ""
        if self.before:
            modules[self.before] = draw.choice(MODULES_OUTSIDE)()
        for name in self.between:
            modules[name] = draw.choice(MODULES_BETWEEN)()
        if self.after:
            modules[self.after] = draw.choice(MODULES_OUTSIDE)()
        for name in draw.sample(sorted(modules), len(modules)):  # the order has no meaning
            self.add_module(name, modules[name])
        self.bare = nn.Parameter(torch.ones(1)) if draw.random() < 0.25 else None
        self.bare_between = draw.random() < 0.5
        for param in self.parameters():
            nn.init.uniform_(param, -0.8, 0.8)
        self.plan = self._plan(draw)
        self.frozen = [name for name, _ in self.named_parameters() if draw.random() < 0.2]

    def _plan(self, draw: random.Random) -> dict[str, Any]:
        columns = [name for name in ("up", "other") if hasattr(self, name)]
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {"down": RowwiseParallel()}
        for name, second in (("up", "lora_B"), ("down", "lora_A")):
            if isinstance(getattr(self, name), Lora):
                style = plan.pop(name)
                plan |= {f"{name}.base_layer": style, f"{name}.{second}.default": style}
        for name in self.between:
            module = getattr(self, name)
            if draw.random() < 0.5 and next(module.parameters(), None) is not None:
                plan[f"{name}.inner" if isinstance(module, OfHeads) else name] = LocalParameters()
        if draw.random() < 0.2:
            plan[""] = SharedInput()
        elif self.bare is not None and self.bare_between and draw.random() < 0.5:
            plan[""] = LocalParameters({"bare": Replicate()})
        return plan

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self
        x = getattr(self, self.before)(x) if self.before else x
        features = layers.up(x)
        if hasattr(self, "other"):
            features = features * layers.other(x)
        for name in self.between:
            features = getattr(self, name)(features)
        if hasattr(self, "heads"):
            features = (features.unflatten(-1, (-1, HEAD)) * layers.heads(x).unsqueeze(-2)).flatten(-2)
        if self.bare is not None and self.bare_between:
            features = features * self.bare
        out: Tensor = layers.down(features)
        if self.bare is not None and not self.bare_between:
            out = out * self.bare
        if hasattr(self, "skip"):
            out = out + layers.skip(x)
        return getattr(self, self.after)(out) if self.after else out


class Outcome(NamedTuple):
    """The result of one module.

    Attributes:
        kind: ``"equal"``, ``"rejected"`` or ``"raised"``, or a result that is not allowed.
        detail: the message of an error, or the names of wrong gradients.
    """

    kind: str
    detail: str = ""


def run_module(module: RandomModule) -> Outcome:
    """Train a module under its plan and in one process; runs on each rank."""
    try:
        _train(copy.deepcopy(module), copy.deepcopy(module))
    except RuntimeError:
        return Outcome("rejected", "it does not train in one process: it writes into a saved tensor")
    try:
        return _compare(module, check_gradients=True)
    except PlanError as error:
        return Outcome("rejected", str(error))
    except GradientError as error:
        return _check_names(module, str(error))
    except RuntimeError as error:
        if any(text in str(error) for text in TORCHS_ERRORS):
            return Outcome("rejected", str(error))
        raise


def _compare(module: RandomModule, *, check_gradients: bool, tolerance: float = 1e-9) -> Outcome:
    reference = copy.deepcopy(module)
    model = parallelize(
        copy.deepcopy(module),
        make_tp_mesh(),
        module.plan,
        src_data_rank=None,
        check_gradients=check_gradients,
    )
    wrong = _train(model, reference, tolerance, check_gradients=check_gradients)
    return Outcome("different", " ".join(sorted(wrong))) if wrong else Outcome("equal")


def _train(
    model: nn.Module, reference: Any, tolerance: float = 1e-9, *, check_gradients: bool = False
) -> set[str]:
    """Train both for three steps; in the first some parameters are frozen.

    Returns:
        The names of the outputs and gradients that have differed in a step.
    """
    models = (model, reference)
    wrong: set[str] = set()
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.01) for trained in models]
    for step in range(3):
        results = []
        for trained in models:
            for name, param in trained.named_parameters():
                param.requires_grad_(step > 0 or name not in reference.frozen)
            results.append(_run_step(trained, random_tensor(2, 3, DIM, seed=step)))
        mixed = set()
        for name, param in model.named_parameters():
            if isinstance(param.grad, DTensor) and not isinstance(param, DTensor):
                mixed.add(name)
        # torch's optimizers assert that there are none. With the check, the error comes first.
        if mixed and not check_gradients:
            return wrong | mixed
        for optimizer in optimizers:
            optimizer.step()
        actual, expected = results
        for name, tensor in actual.items():
            if relative_difference(tensor, expected[name], 1.0) > tolerance:
                wrong.add(name)
    return wrong


def _run_step(model: nn.Module, data: Tensor) -> dict[str, Tensor | None]:
    """Run forward and backward; return the output and all gradients by name."""
    model.zero_grad()
    x = data.requires_grad_()
    # The module may write into its input in place. autograd forbids that for leaves.
    output = model(x * 1)
    output.square().mean().backward()
    results = {"the output": output.detach(), "the input": x.grad}
    for name, param in model.named_parameters():
        results[name] = param.grad
    return results


def _check_names(module: RandomModule, message: str) -> Outcome:
    """Check that the gradients which an error names are wrong without the check."""
    # A norm cancels most of the gradient of a factor in front of it. The remainder may be wrong.
    wrong = set(_compare(module, check_gradients=False, tolerance=1e-13).detail.split())
    names = {name for name, _ in module.named_parameters()}
    named = names.intersection(re.findall(r"[\w.]+", message))
    if not wrong:
        return Outcome("raised without need", message)
    if named <= wrong:
        return Outcome("raised")
    return Outcome("raised with a wrong name", f"{named - wrong}: {message}")


def run_part(part: int) -> list[Outcome]:
    seeds = range(part * MODULES_PER_PART, (part + 1) * MODULES_PER_PART)
    return [run_module(RandomModule(seed).double()) for seed in seeds]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")  # torch's, of a gain times a DTensor
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
def test_a_random_module_is_equal_or_rejected_or_raises(part: int) -> None:
    first, second = run_ranks(2, run_part, part)
    assert [outcome.kind for outcome in first] == [outcome.kind for outcome in second]
    kinds = Counter(outcome.kind for outcome in first)
    details = [outcome for outcome in first if outcome.detail]
    assert kinds.keys() <= {"rejected", "equal", "raised"}, details
    # The random modules must not be too similar.
    assert min(kinds["equal"], kinds["raised"]) > MODULES_PER_PART // 10
