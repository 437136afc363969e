"""Experts on ranks of their own: losses and gradients of the example are those of one process, whatever the layout."""

from __future__ import annotations

from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import train
from messages import error_of
from parallel import IGNORED, Step
from ranks import fake_world, run_ranks
from tensors import apart
from torch import Tensor, nn

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ExpertParallel, parallelize

# Of the mesh over pp, dp and tp, and of the view over pp, edp, ep and etp.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep1": ({"pp": 1, "dp": 4, "tp": 1}, {"ep": 1, "etp": 1}),
    "ep2": ({"pp": 1, "dp": 4, "tp": 1}, {"ep": 2, "etp": 1}),
    "ep4": ({"pp": 1, "dp": 4, "tp": 1}, {"ep": 4, "etp": 1}),
    "ep8": ({"pp": 1, "dp": 8, "tp": 1}, {"ep": 8, "etp": 1}),
    "tp2 ep2": ({"pp": 1, "dp": 2, "tp": 2}, {"ep": 2, "etp": 1}),
    "tp2 ep8": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 8, "etp": 1}),
    "tp2 ep4 etp2": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 4, "etp": 2}),
    "pp2 ep2": ({"pp": 2, "dp": 4, "tp": 1}, {"ep": 2, "etp": 1}),
    "pp2 tp2 ep4": ({"pp": 2, "dp": 2, "tp": 2}, {"ep": 4, "etp": 1}),
    "pp2 tp2 ep2 etp2": ({"pp": 2, "dp": 2, "tp": 2}, {"ep": 2, "etp": 2}),
}


def differences(mesh: namedmesh.NamedMesh, expert: dict[str, Any]) -> dict[str, float]:
    """How far the loss, the gradients and their norm are from those of one process, on this rank, in float64."""
    settings = train.Settings(dim=32, layers=mesh.size("pp"), moe=True, verify=True, **expert)
    models = alone, model = train.new_model(settings), train.make_model(settings, mesh)
    for name, each in (item for one in models for item in one.named_parameters()):
        each.data *= 10 if "feed_forward" in name else 1  # so that gradients are not tiny
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(train.VOCABULARY, (8, 9), generator=generator)
    padding = torch.rand(8, 8, generator=generator) < torch.linspace(0, 0.9, 8)[:, None]
    inputs, targets = tokens[:, :-1], tokens[:, 1:].masked_fill(padding, IGNORED)
    logits = alone(inputs, torch.arange(8))
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    expected.backward()
    share = training.sampler_kwargs(mesh)
    mine = (each[share["rank"] :: share["num_replicas"]].contiguous() for each in (inputs, targets))
    loss = Step(model, mesh, microbatches=mesh.size("pp"))(*mine)
    gradients = []
    for name, each in model.named_parameters():
        gradients.append(apart(each.grad, alone.get_parameter(name).grad))
    norm = training.clip_grad_norm_(model.parameters(), 0.1, mesh)
    whole_norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    return {
        "loss": (loss - expected).abs().item(),
        "gradients": max(gradients),
        "norm": (norm - whole_norm).abs().item(),
    }


def compare(layouts: list[str]) -> dict[str, dict[str, float]]:
    told = {}
    for name in layouts:
        dense, expert = LAYOUTS[name]
        mesh = namedmesh.init_mesh(**dense)
        mesh.add_view("expert", pp=dense["pp"], edp=-1, **expert)
        told[name] = differences(mesh, expert)
        mesh.close()
    return told


@pytest.mark.parametrize(("ranks", "pp"), [(4, 1), (8, 1), (8, 2)])
def test_experts_are_those_of_one_process(ranks: int, pp: int) -> None:
    names = [
        name
        for name, (dense, expert) in LAYOUTS.items()
        if dense["pp"] == pp and prod(dense.values()) == ranks
    ]
    for told in run_ranks(ranks, compare, names):
        assert list(told) == names
        for differences in told.values():
            assert max(differences.values()) < 1e-9, told


class Experts(nn.Module):
    """One weight for each expert, without a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.weight = nn.Parameter(values)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        expert = torch.arange(counts.shape[0]).repeat_interleave(counts, output_size=tokens.shape[0])
        return torch.einsum("ti,tij->tj", tokens, self.weight[expert])


# How many tokens each of two ranks has for each of four experts.
COUNTS = (((3, 0, 1, 1), (0, 5, 0, 2)), ((0, 0, 0, 0), (1, 0, 2, 0)), ((0, 0, 0, 0), (0, 0, 0, 0)))


def travelling_tokens(compiled: bool) -> list[float]:
    """Experts on two ranks beside all of them on each: outputs, and gradients of tokens and of weights."""
    mesh = namedmesh.init_mesh(dp=2)
    mesh.add_view("expert", edp=1, ep=2)
    here: Any = parallelize(Experts(), mesh["ep"], ExpertParallel(mesh))
    call: Any = here
    if compiled:
        call = torch.compile(here, backend="aot_eager", fullgraph=True)
    differences = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for counts_of_ranks in COUNTS:
            counts = torch.tensor(counts_of_ranks[mesh.rank("dp")])
            tokens = torch.randn(int(counts.sum()), 3, dtype=torch.float64).requires_grad_()
            everywhere = Experts()
            expected, found = everywhere(tokens, counts), call(tokens, counts)
            wanted = torch.autograd.grad(expected.square().sum(), [tokens, everywhere.weight])
            got = torch.autograd.grad(found.square().sum(), [tokens, here.weight])
            weights = wanted[1].clone()
            torch.distributed.all_reduce(weights)
            weights /= 2  # as many ranks as everything else is averaged over
            pairs = [(found, expected), (got[0], wanted[0]), (got[1], weights)]
            differences += [apart(one, other) for one, other in pairs]
    torch.distributed.barrier()
    mesh.close()
    return differences


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_travel_to_their_experts_and_back(compiled: bool) -> None:
    for differences in run_ranks(2, travelling_tokens, compiled):
        assert max(differences) < 1e-9


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.ones(8, 2, 3)), nn.Parameter(torch.ones(3))


def test_what_is_no_stack_of_experts_is_refused() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=8, device="cpu")
        mesh.add_view("expert", edp=2, ep=4)

        def refused(module: nn.Module) -> str:
            return error_of(lambda: parallelize(module, mesh["ep"], ExpertParallel(mesh)))

        takes = "ExpertParallel takes a module that owns parameters (experts, ...), but"
        for module, owns in (
            (Mixed(), "Mixed owns {'up': (8, 2, 3), 'bias': (3,)}"),
            (nn.ReLU(), "ReLU owns none"),
        ):
            assert refused(module) == f"PlanError: the model: {takes} {owns}"
        with mock.patch.object(train, "EXPERTS", 6):
            assert "dim 0 of gate 6 is not divisible" in refused(train.Experts(2, 2))
        experts = parallelize(train.Experts(2, 2), mesh["ep"], ExpertParallel(mesh))
        with pytest.raises(
            RuntimeError, match="Cannot concatenate overlapping meshes"
        ):  # torch's, of a second time
            refused(experts)
        assert error_of(lambda: experts(torch.ones(3, 2), torch.tensor([2, 1]))) == (
            "ShapeError: the numbers of tokens have shape (2,); pass one number for each of the 8 experts"
        )
        mesh.close()
