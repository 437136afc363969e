"""Two hundred random small modules: refused, trained as in one process, or stopped with the right names.

They are made of linears, gains, norms, activations, in-place operations, subclasses, adapters and frozen parts.

Each comes with a plan that may leave out what it works on between its sharded layers. The plan is right, or it is
not: what happens is for :func:`outcome` to say.
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
from tensors import apart_by_size, numbers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from tp_compare import make_tp_mesh
from tp_models import Gain, Lora, OfHeads

from namedmesh.errors import GradientError, PlanError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
    parallelize,
)

DIM, HIDDEN, HEAD = 8, 16, 4
PARTS, EACH = 4, 50
# What torch says where a module mixes plain tensors and DTensors, or writes into what its styles hand out.
TORCHS_OWN = (
    "mixed torch.Tensor and DTensor",
    "is being modified inplace",
    "have a sharding strategy registered",
)
# Words that a reader of names would take for something.
NAMES = ["factor", "act", "temperature", "norm", "gate_scale", "k_norm", "silu", "mixer", "attn_gain", "elu"]


class InPlace(nn.Module):
    """Writes into what it gets."""

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


WHOLE: list[Callable[[], nn.Module]] = [
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
BETWEEN: list[Callable[[], nn.Module]] = [
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


class Wiring(nn.Module):
    """Something on the input, sharded layers with something between them, and something on the output."""

    def __init__(self, seed: int) -> None:  # noqa: C901  one draw after the other
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        names = draw.sample(NAMES, 5)
        column = draw.choice([nn.Linear, nn.Linear, nn.Linear, Normalizing, Softmax])
        row = draw.choice([nn.Linear, nn.Linear, nn.Linear, Gated])
        parts: dict[str, nn.Module] = {"up": column(DIM, HIDDEN), "down": row(HIDDEN, DIM)}
        if draw.random() < 0.4:
            parts["other"] = nn.Linear(DIM, HIDDEN)
        if draw.random() < 0.3:
            parts["skip"] = nn.Linear(DIM, DIM)
        if draw.random() < 0.15:  # used on each rank's features
            parts["beside"] = nn.Linear(DIM, HEAD)
        for name in ("up", "down"):
            layer = parts[name]
            if draw.random() < 0.2 and type(layer) is nn.Linear:
                parts[name] = Lora(layer, HEAD)
        self.before = names[0] if draw.random() < 0.7 else ""
        self.between = names[1:3] if draw.random() < 0.5 else names[1:2]
        self.after = names[3] if draw.random() < 0.5 else ""
        if self.before:
            parts[self.before] = draw.choice(WHOLE)()
        for name in self.between:
            parts[name] = draw.choice(BETWEEN)()
        if self.after:
            parts[self.after] = draw.choice(WHOLE)()
        for name in draw.sample(sorted(parts), len(parts)):  # the order of declaration says nothing
            self.add_module(name, parts[name])
        self.bare = nn.Parameter(torch.ones(1)) if draw.random() < 0.25 else None
        self.bare_between = draw.random() < 0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.8, 0.8)
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
        if hasattr(self, "beside"):
            features = (features.unflatten(-1, (-1, HEAD)) * layers.beside(x).unsqueeze(-2)).flatten(-2)
        if self.bare is not None and self.bare_between:
            features = features * self.bare
        out: Tensor = layers.down(features)
        if self.bare is not None and not self.bare_between:
            out = out * self.bare
        if hasattr(self, "skip"):
            out = out + layers.skip(x)
        return getattr(self, self.after)(out) if self.after else out


class Outcome(NamedTuple):
    """What happened: ``"right"``, ``"refused"``, ``"stopped"``, or what must not be."""

    kind: str
    detail: str = ""


def outcome(wiring: Wiring) -> Outcome:
    """Train a module for some steps under its plan, and alone; on one rank."""
    try:
        _train(copy.deepcopy(wiring), copy.deepcopy(wiring))
    except RuntimeError:
        return Outcome("refused", "it does not train in one process: what it writes into was to be kept")
    try:
        return _trained(wiring, check=True)
    except PlanError as error:
        return Outcome("refused", str(error))
    except GradientError as error:
        return _stopped(wiring, str(error))
    except RuntimeError as error:
        if any(words in str(error) for words in TORCHS_OWN):
            return Outcome("refused", str(error))
        raise


def _trained(wiring: Wiring, *, check: bool, tolerance: float = 1e-9) -> Outcome:
    reference = copy.deepcopy(wiring)
    model = parallelize(
        copy.deepcopy(wiring), make_tp_mesh(), wiring.plan, src_data_rank=None, check_gradients=check
    )
    wrong = _train(model, reference, tolerance, check=check)
    return Outcome("wrong", " ".join(sorted(wrong))) if wrong else Outcome("right")


def _train(model: nn.Module, reference: Any, tolerance: float = 1e-9, *, check: bool = False) -> set[str]:
    """Do some steps, of which the first leaves some parameters frozen; return whose gradients are wrong in one of them."""
    wrong: set[str] = set()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    for step in range(3):
        for each in (model, reference):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(step > 0 or name not in reference.frozen)
        data = numbers(2, 3, DIM, seed=step)
        found: list[dict[str, Tensor | None]] = []
        for each in (model, reference):
            each.zero_grad()
            x = data.clone().requires_grad_()
            out = each(x * 1)
            out.square().mean().backward()
            gradients = {name: parameter.grad for name, parameter in each.named_parameters()}
            found.append({"the output": out.detach(), "the input": x.grad, **gradients})
        mixed = {
            name
            for name, each in model.named_parameters()
            if isinstance(each.grad, DTensor) and not isinstance(each, DTensor)
        }
        if mixed and not check:  # for which optimizers have an assertion
            return wrong | mixed
        for optimizer in optimizers:
            optimizer.step()
        wrong |= {
            name for name, value in found[0].items() if apart_by_size(value, found[1][name], 1.0) > tolerance
        }
    return wrong


def _stopped(wiring: Wiring, text: str) -> Outcome:
    """Return whether what an error names is wrong without the comparison."""
    # A norm leaves next to nothing of the gradient of what scales its input, and that may be wrong, too.
    wrong = set(_trained(wiring, check=False, tolerance=1e-13).detail.split())
    named = set(re.findall(r"[\w.]+", text)) & {name for name, _ in wiring.named_parameters()}
    if not wrong:
        return Outcome("stopped without need", text)
    return (
        Outcome("stopped")
        if named <= wrong
        else Outcome("stopped with a wrong name", f"{named - wrong}: {text}")
    )


def outcomes(part: int) -> list[Outcome]:
    return [outcome(Wiring(seed).double()) for seed in range(part * EACH, (part + 1) * EACH)]


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")  # torch's, of a gain times a DTensor
@pytest.mark.parametrize("part", range(PARTS))
def test_there_is_no_fourth_outcome(part: int) -> None:
    first, second = run_ranks(2, outcomes, part)
    assert [found.kind for found in first] == [found.kind for found in second]
    kinds = Counter(found.kind for found in first)
    assert kinds.keys() <= {"refused", "right", "stopped"}, [found for found in first if found.detail]
    assert min(kinds["right"], kinds["stopped"]) > EACH // 5  # or else the modules are too much alike
