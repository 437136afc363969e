"""Several micro-batches a step: the parts of whole parameters' gradients add up on each rank, and are summed once."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from test_tp_collectives import CASES, Traffic
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from tp_compare import gradients_apart, sharded, tp_mesh, whole
from tp_models import llama_plan as llama_plan
from tp_models import NORMS, Llama

import namedmesh
from namedmesh._torch import TORCH
from namedmesh.tensor_parallel import SequenceParallel, parallelize, reduce_gradients
from namedmesh.training import clip_grad_norm_

MICRO_BATCHES, STEPS = 4, 2
SHARED_HEADS = {"n_kv_heads": 1}
COUNTED = ("plain", "plain, loss", "sequence", "sequence, loss")


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(0, 32, (2 * MICRO_BATCHES, 8), generator=generator).chunk(MICRO_BATCHES))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()) / MICRO_BATCHES


# --- counts -------------------------------------------------------------------------------------------------


def calls(model: nn.Module, *, loss: bool) -> int:
    """How many collectives a step of several micro-batches has, the second time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    found = 0
    for step in range(STEPS):
        with Traffic() as traffic:
            for ids in batches(step):
                if loss:
                    with loss_parallel():
                        loss_of(model, ids).backward()
                else:
                    loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = sum(traffic.calls.values())
    return found


def all_calls() -> dict[str, tuple[int, int]]:
    found = {}
    for name in COUNTED:
        case, model = CASES[name], Llama(layers=1)
        ours = sharded(model, case.ours)
        torchs = parallelize_module(copy.deepcopy(model), tp_mesh(), case.torchs)
        found[name] = calls(ours, loss=case.loss), calls(torchs, loss=case.loss)
    return found


@pytest.mark.skipif(
    not CLIPS_PARTIAL_GRADIENTS,
    reason="parts of gradients are summed at once, which torch's styles would clip wrong",
)
def test_micro_batches_have_no_more_collectives_than_torchs_styles() -> None:
    for found in run_ranks(2, all_calls):
        assert list(found) == list(COUNTED)
        for name, (ours, torchs) in found.items():
            assert ours <= torchs, (name, ours, torchs)


def sums_of_shared_parameters() -> list[Counter[str]]:
    """What a step communicates after its backwards, for norms on parts of the sequence and for shared kv heads."""
    found = []
    for options, plan in (({}, llama_plan(sequence_parallel=True)), (SHARED_HEADS, llama_plan())):
        model = parallelize(Llama(**options), tp_mesh(), plan)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for ids in batches(0):
            loss_of(model, ids).backward()
        with Traffic() as traffic:
            optimizer.step()
        found.append(traffic.calls)
    return found


def test_a_step_sums_all_of_them_at_once() -> None:
    sums = Counter(all_reduce=1) if CLIPS_PARTIAL_GRADIENTS else Counter()
    assert run_ranks(2, sums_of_shared_parameters) == [[sums] * 2] * 2


# --- values -------------------------------------------------------------------------------------------------


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    some: list[Tensor],
    *,
    clip: bool = False,
    sum_early: bool = False,
    recompute: bool = False,
) -> None:
    for ids in some:
        loss = checkpoint(loss_of, model, ids, use_reentrant=False) if recompute else loss_of(model, ids)
        loss.backward()
        if sum_early:
            reduce_gradients(model)
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def inside(model: nn.Module, optimizer: torch.optim.Optimizer, some: list[Tensor]) -> None:
    """The backwards run inside the step."""

    def closure() -> float:
        optimizer.zero_grad(set_to_none=False)  # what follows is added to a gradient that is summed
        for ids in some:
            loss_of(model, ids).backward()
        return 0.0

    optimizer.step(closure)


class SgdOfShards(torch.optim.Optimizer):
    """With momentum, on what this rank holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                local, gradient = (
                    each.to_local() if isinstance(each, DTensor) else each
                    for each in (parameter, parameter.grad)
                )
                state = self.state[parameter]
                state["moved"] = state.get("moved", 0) * 0.9 + gradient
                local -= 0.5 * state["moved"]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


WAYS: dict[str, tuple[Any, Any]] = {
    "torch's momentum": (plain, momentum),
    "on shards": (plain, SgdOfShards),
    "clipped": (partial(plain, clip=True), momentum),
    "in a closure": (inside, momentum),
    "in a closure, on shards": (inside, SgdOfShards),
    "summed after each": (partial(plain, sum_early=True), SgdOfShards),
    "recomputed": (partial(plain, recompute=True), SgdOfShards),
}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence": ({}, llama_plan(sequence_parallel=True)),
    "torch's norms": ({}, llama_plan(sequence_parallel=True) | dict.fromkeys(NORMS, SequenceParallel())),
    "shared kv heads": (SHARED_HEADS, llama_plan(sequence_parallel=True)),
}


def trained(model: nn.Module, way: str) -> nn.Module:
    step, make = WAYS[way]
    optimizer = make(model.parameters())
    for number in range(STEPS):
        step(model, optimizer, batches(number))
    return model


def apart(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((whole(one.detach()) - other.detach()).abs().max().item() for one, other in pairs)


def differences() -> dict[tuple[str, str], float]:
    found = {}
    for name, (options, plan) in PLANS.items():
        torch.manual_seed(0)
        start = Llama(layers=1, **options).double()
        for way in WAYS:
            reference = trained(copy.deepcopy(start), way)
            model = trained(sharded(start, plan), way)
            found[name, way] = apart(model, reference)
    return found


def test_a_step_of_several_micro_batches_is_that_of_one_process() -> None:
    for found in run_ranks(2, differences):
        assert len(found) == len(PLANS) * len(WAYS)
        # torch 2.8 and 2.9 clip by a factor in single precision.
        assert max(found.values()) < (1e-12 if CLIPS_PARTIAL_GRADIENTS else 1e-7), found


def whole_gradients() -> list[float]:
    """What ``full_tensor`` returns between the micro-batches, and the norm of clipping, in compiled code too."""
    mesh = namedmesh.init_mesh(tp=-1, device="cpu")
    torch.manual_seed(0)
    reference = Llama(layers=1).double()
    found = []
    for compiled in (False, True):
        model = parallelize(copy.deepcopy(reference), mesh["tp"], llama_plan(sequence_parallel=True))
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        reference.zero_grad()
        for ids in batches(0)[:2]:
            for each in (model, reference):
                loss_of(each, ids).backward()
            found.append(gradients_apart(model, reference))
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        with Traffic() as traffic:
            found.append(abs(float(clip_grad_norm_(model.parameters(), 0.1, mesh) - wanted)))
        assert traffic.calls == Counter(
            all_reduce=1 + CLIPS_PARTIAL_GRADIENTS
        )  # of the norm, and of all parts
    torch.distributed.barrier()
    mesh.close()
    return found


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_gradients_are_whole_for_whoever_reads_them() -> None:
    assert max(max(found) for found in run_ranks(2, whole_gradients)) < 1e-12


def with_fsdp() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    worst = 0.0
    for name, (options, plan) in PLANS.items():
        torch.manual_seed(0)
        start = Llama(**options).double()
        reference: Any = copy.deepcopy(start)
        model: Any = parallelize(copy.deepcopy(start), mesh["tp"], plan)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        sharded: Any = fully_shard(model, mesh=mesh["dp"])
        optimizers = [momentum(each.parameters()) for each in (reference, model)]
        for step in range(STEPS):
            for number, ids in enumerate(batches(step)):
                sharded.set_requires_gradient_sync(number == MICRO_BATCHES - 1 or name == "torch's norms")
                loss_of(reference, ids).backward()
                loss_of(model, ids.chunk(2)[mesh["dp"].get_local_rank()]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        worst = max(worst, apart(model, reference))
    return worst


def test_micro_batches_under_fsdp() -> None:
    assert max(run_ranks(4, with_fsdp)) < 1e-12
