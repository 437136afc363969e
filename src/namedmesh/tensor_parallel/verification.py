"""A model under a plan against the same model in one process: outputs and gradients, by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._torch import all_gather_object, tree_leaves, tree_map
from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.errors import PlanError, format_count
from namedmesh.tensor_parallel.plan import Plan, parallelize, resolve


@dataclass(frozen=True)
class VerifyReport:
    """What a comparison found: a line for each thing that differs when printed.

    ``compared``: the names of all: ``"output 0"``, ``"output 0 under no_grad"``, ``"gradient of input 0"``, ``"gradient of layers.0.weight"``. ``mismatches``: of
    those that differ, what each rank says, the same on every rank.
    """

    tp_size: int
    compared: tuple[str, ...]
    mismatches: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.mismatches

    def __str__(self) -> str:
        lines = [f"{name}: {text}" for name, text in self.mismatches.items()]
        total = f"{len(lines)} of {format_count(len(self.compared), 'tensor')} on {self.tp_size} ranks differ from one process"
        return "\n".join([*lines, total])


@torch.inference_mode(False)
@torch.enable_grad()
def verify(
    model: nn.Module, mesh: AxisMesh, plan: Plan, *inputs: Any, tolerance: float = 1e-5, **named: Any
) -> VerifyReport:
    """Run a model whole and sharded, forward and backward, and report what differs.

    It tells, for one input, what no plan and no comparison between ranks can: that the ranks together compute what one
    process does. It costs two copies of the whole model in double precision on every rank: take a small one.
    The copies are in evaluation mode, draw the same random numbers, and have the parameters and inputs of the first rank;
    parameters that are all zero get numbers, because they would hide what is wrong behind them.

    Args:
        model: the model, not parallelized; it is left as it is.
        mesh: the NamedMesh, of which ``tp`` is taken, or one axis; all its ranks call this.
        plan: what ``parallelize`` would get.
        *inputs: what the model is called with; the gradients of tensors, in containers too, are compared.
        tolerance: the largest difference, as a part of the largest number of a tensor, that is none.
        **named: what the model is called with by name.

    Raises:
        PlanError: the one that ``parallelize`` would raise; the model has no values; it returns nothing to compare.
    """
    mesh = one_axis(mesh, "tp", "verify")
    resolve(model, mesh.size(), plan)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor):
            raise PlanError(f"{name} is on the meta device or sharded; verify a whole model that has values")
    whole = copy.deepcopy(model).eval().double()
    given = tree_map(_copied, (inputs, named))
    for tensor in (*whole.parameters(), *whole.buffers(), *_tensors(given)):
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and not tensor.count_nonzero():
            nn.init.normal_(tensor, std=0.02, generator=torch.Generator(tensor.device).manual_seed(0))
        dist.broadcast(tensor.detach(), group=mesh.get_group(), group_src=0)
    sharded = parallelize(copy.deepcopy(whole), mesh, plan, check_gradients=False)
    wanted, got = (_run(each, given) for each in (whole, sharded))
    # Terms that cancel out leave rounding, which may be all of a gradient.
    rounding = 1e-13 * max((_size(each) for name, each in wanted.items() if "gradient" in name), default=0.0)
    own = {}
    for name, each in (wanted | got).items():
        nothing = torch.zeros_like(each)  # in place of what one of the two does not make
        own[name] = _difference(got.get(name, nothing), wanted.get(name, nothing), tolerance, rounding)
    of_all = all_gather_object(mesh.get_group(), own)
    different = {}
    for name in own:
        texts = [found[name] for found in of_all if found.get(name)]
        if texts:
            different[name] = "; ".join(texts)
    return VerifyReport(mesh.size(), tuple(own), different)


def _tensors(value: object) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _copied(value: Any) -> Any:
    """Return a leaf of the inputs for one run: in double precision, with a gradient."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach().clone()
    return value.double().requires_grad_() if value.is_floating_point() else value


def _run(model: nn.Module, given: Any) -> dict[str, Tensor]:
    """Return what a model makes of inputs, and the gradients of a weighted sum of it; all draw from a fixed seed, and put it back."""
    leaves = tree_map(_copied, given)
    outputs = _outputs(model, leaves)
    trained = [each for each in outputs if each.requires_grad]
    generator = torch.Generator("cpu").manual_seed(0)
    weights = []
    for tensor in trained:
        weight = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu")
        weights.append(weight.to(tensor))
    if trained:
        torch.autograd.backward(trained, weights)
    found = {f"output {i}": each.detach() for i, each in enumerate(outputs)}
    with torch.no_grad():  # torch has other ways through a model for this
        found |= {f"output {i} under no_grad": each for i, each in enumerate(_outputs(model, leaves))}
    differentiated = {f"input {i}": each for i, each in enumerate(_tensors(leaves))}
    for name, each in (differentiated | dict(model.named_parameters())).items():
        if each.requires_grad:
            gradient: Any = torch.zeros_like(each) if each.grad is None else each.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[f"gradient of {name}"] = whole.to_dense()
    return found


def _outputs(model: nn.Module, leaves: Any) -> list[Tensor]:
    """Return the tensors that a model returns, as full tensors."""
    # A model may write into its inputs, but into no leaf.
    args, named = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, leaves)
    with torch.random.fork_rng(range(torch.accelerator.device_count())):
        torch.manual_seed(0)
        output = model(*args, **named)
    outputs = [each.full_tensor() if isinstance(each, DTensor) else each for each in _tensors(output)]
    if not outputs:
        kind = type(output).__name__
        raise PlanError(f"no tensor is in the output, a {kind}; return some in plain containers")
    return outputs


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _difference(mine: Tensor, wanted: Tensor, tolerance: float, rounding: float) -> str:
    """Return torch's sentence on how far a tensor is from the one of one process; nothing where it is near enough."""
    if mine.numel() == wanted.numel():
        mine = mine.reshape(wanted.shape)  # fused experts have a dim more
    try:
        within = max(tolerance * _size(wanted), rounding)
        torch.testing.assert_close(mine, wanted, rtol=0, atol=within, equal_nan=True)
    except AssertionError as error:
        return f"on rank {dist.get_rank()}, {' '.join(str(error).split())}"
    return ""
